"Nothing of kdnotes is open to a network: whatever listens while it works listens on this machine alone."

import ipaddress
import json
import subprocess
import sys
import time
from pathlib import Path
import psutil
import pytest
from notebooks import ROOT, surroundings
from test_doctor import write_corpus, write_model

pytestmark = pytest.mark.slow
TOKEN = 'hf_planted_by_a_test_000000000000'


def listening(process: subprocess.Popen) -> dict[str, set[str]]:
    "What each process, it and those that it started, listens at: command line -> addresses."
    found = {}
    for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            addresses = {c.laddr.ip for c in p.net_connections('inet') if c.status == psutil.CONN_LISTEN}
            found.setdefault(' '.join(p.cmdline()), set()).update(addresses)
        except psutil.Error:
            continue  # it has just ended
    return found


def watched(process: subprocess.Popen, until=lambda seen: False, seconds: float = 300) -> dict[str, set[str]]:
    "What listened at any time until the process ended, or enough was seen."
    seen = {}
    end = time.monotonic() + seconds
    while process.poll() is None and not until(seen):
        assert time.monotonic() < end, seen
        for line, addresses in listening(process).items():
            seen.setdefault(line, set()).update(addresses)
        time.sleep(0.02)
    return seen


def outside(seen: dict[str, set[str]]) -> dict[str, set[str]]:
    "What listened to more than this machine."
    open_to_others = {
        line: {a for a in addresses if not ipaddress.ip_address(a).is_loopback}
        for line, addresses in seen.items()
    }
    return {line: addresses for line, addresses in open_to_others.items() if addresses}


def test_a_run_with_two_ranks_in_a_notebook_listens_on_loopback_alone(tmp_path):
    given = dict(
        mode='parallel_baseline',
        corpus=write_corpus(tmp_path / 'corpus'),
        teacher=write_model(tmp_path / 'teacher'),
        max_length=64,
        ranks=2,
        smoke=True,
    )
    process = subprocess.Popen(
        [
            Path(sys.executable).parent / 'papermill',
            ROOT / 'nbs/run.ipynb',
            tmp_path / 'out.ipynb',
            *(str(part) for name, value in given.items() for part in ('-p', name, value)),
        ],
        env=surroundings(tmp_path, HF_TOKEN=TOKEN),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = watched(process)
    assert process.wait() == 0, process.stdout.read()[-2000:]
    [record] = tmp_path.glob('runs/*/*/record.json')
    assert json.loads(record.read_text())['parallel']['ranks'] == 2
    for part in ('ipykernel', 'kdnotes.experiment.worker'):
        assert any(part in line and addresses for line, addresses in seen.items()), f'{part} was not seen'
    assert not outside(seen)
    left = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert (tmp_path / 'out.ipynb') in left
    assert not [path for path in left if TOKEN.encode() in path.read_bytes()], 'a secret was written down'


@pytest.mark.exhaustive
def test_jupyterlab_listens_on_loopback_alone(tmp_path):
    process = subprocess.Popen(
        [Path(sys.executable).parent / 'jupyter', 'lab', '--no-browser', '--allow-root'],
        cwd=tmp_path,
        env=surroundings(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen = watched(process, until=lambda seen: any(seen.values()), seconds=120)
        assert any(seen.values()), 'it never listened'
        assert not outside(seen)
    finally:
        process.terminate()
        process.wait()

"""Runs at the same time, one of which dies on the way: the others are finished and kept, it is named, and the
same command makes it alone. Two commands on one study, and a home that is nobody else's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
import pandas as pd
import psutil
import pytest
from notebooks import surroundings
from processes import command_line, descendants
from small_runs import write_corpus, write_model
from kdnotes.cli import main

ARMS = 'baseline,mixed_baseline,full_student'  # the second dies


@pytest.fixture
def asked(tmp_path) -> list[str]:
    "The command, for models that train in a blink."
    given = dict(
        corpus=write_corpus(tmp_path / 'corpus'),
        teacher=write_model(tmp_path / 'teacher'),
        student_layers=1,
        ranks=1,
        max_length=64,
        smoke='true',
        study='beside-smoke',
    )
    parameters = [part for name, value in given.items() for part in ('-p', f'{name}={value}')]
    return [
        sys.executable,
        '-m',
        'kdnotes.cli',
        'study',
        '--seeds',
        '1',
        '--arms',
        ARMS,
        '--jobs',
        '2',
        *parameters,
    ]


def start(home: Path, command: list[str], umask: int = -1, **more) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=home,
        env=surroundings(home, **more),
        umask=umask,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def trainer(study: psutil.Process, mode: str) -> psutil.Process:
    "The process that trains a mode, once it is there."
    end = time.monotonic() + 600
    while time.monotonic() < end and study.is_running():
        for process in descendants(study.pid):
            if any(f'/{mode}-s0-' in part for part in command_line(process)):
                return process
        time.sleep(0.02)
    raise AssertionError(f'no process trains {mode}')


def records(home: Path) -> dict[str, dict]:
    "The records by mode."
    texts = (path.read_text() for path in (home / 'runs/beside-smoke').glob('*/record.json'))
    return {record['mode']: record for record in map(json.loads, texts)}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_dies_takes_no_other_with_it(asked, tmp_path, monkeypatch, capsys):
    study = start(tmp_path, asked)
    os.kill(trainer(psutil.Process(study.pid), 'mixed_baseline').pid, signal.SIGKILL)
    said, errors = study.communicate(timeout=600)
    [lost] = (tmp_path / 'runs/beside-smoke').glob('mixed_baseline-s0-*')
    assert study.returncode == 1, errors
    assert (
        errors.count('\n') == 1
        and errors.startswith('kdnotes')
        and '1 of 3 runs failed' in errors
        and lost.name in errors
    )
    assert (
        f'{lost.name} failed: ' in said and json.loads((lost / 'state.json').read_text())['status'] != 'done'
    )
    kept = records(tmp_path)
    assert (
        set(kept) == {'baseline', 'full_student'}
        and 'full_student' in (tmp_path / 'runs/beside-smoke/table.txt').read_text()
    )
    compared = pd.read_csv(tmp_path / 'runs/beside-smoke/comparisons.csv').query("kind != 'teacher'")
    assert len(compared.drop_duplicates(['a', 'b'])) == 1
    assert {record['machine']['jobs'] for record in kept.values()} == {1, 2}, (
        'the student had nobody beside it'
    )

    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    code = main(asked[3:])
    said, errors = capsys.readouterr()
    assert code == 0, errors
    whole = records(tmp_path)
    assert set(whole) == {'baseline', 'mixed_baseline', 'full_student'} and all(
        whole[mode] == kept[mode] for mode in kept
    )
    assert lost.name in said and not any(kept[mode]['run_id'] + ' failed' in said for mode in kept)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_commands_on_one_study_spoil_nothing(asked, tmp_path):
    "What one makes the other leaves alone, and says so; every run is made once, and a third call finds all."
    both = [start(tmp_path, asked) for _ in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    for process, (_, errors) in zip(both, said):
        assert process.returncode in (0, 1, 2) and 'Traceback' not in errors, errors
        assert process.returncode == 0 or 'is held by another process' in errors, errors
    third = start(tmp_path, asked)
    _, errors = third.communicate(timeout=600)
    assert third.returncode == 0, errors
    made = list((tmp_path / 'runs/beside-smoke').glob('*/record.json'))
    whole = records(tmp_path)
    assert len(made) == len(whole) == 3
    assert all(json.loads(path.read_text()) == whole[path.parent.name.split('-s0-')[0]] for path in made)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_the_umask_keeps_to_oneself_stays_so_and_no_home_is_needed(asked, tmp_path):
    copied = [part.replace('beside-smoke', 'copied-smoke') for part in asked]
    for command, umask in ((asked, 0o022), (copied, 0o077)):
        study = start(tmp_path, command, umask, HOME='/proc/no-home')
        said, errors = study.communicate(timeout=600)
        assert study.returncode == 0 and 'Traceback' not in errors, errors
    assert "was made in study 'beside-smoke' already" in said
    written = [path for path in tmp_path.rglob('*copied-smoke*/**/*') if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if path.stat().st_mode & 0o077] == []

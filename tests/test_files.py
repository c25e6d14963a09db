"""Files are whole or not there, and a lock dies with its owner: seen from other processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import psutil
import pytest
from kdnotes.core.files import (
    BusyError,
    FileError,
    atomic_write,
    free_memory,
    lock,
    read_json,
    runs_path,
    write_json,
)


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / 'a.json'
    write_json(path, {'n': 1})
    code = (
        "import os, signal; from kdnotes.core import files\n"
        # dies after writing, before the rename
        "files.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"files.write_json({str(path)!r}, {{'n': 2}})"
    )
    assert subprocess.run([sys.executable, '-c', code]).returncode == -signal.SIGKILL
    assert read_json(path) == {'n': 1}
    assert len(list(tmp_path.iterdir())) == 2  # the temporary file stays, under a name nobody reads
    write_json(path, {'n': 3})
    assert read_json(path) == {'n': 3}


def test_a_failing_rename_leaves_no_temporary_file(tmp_path, monkeypatch):
    atomic_write(tmp_path / 'a', 'old')

    def fail(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='No space'):
        atomic_write(tmp_path / 'a', 'new')
    assert [p.name for p in tmp_path.iterdir()] == ['a'] and (tmp_path / 'a').read_text() == 'old'


def test_a_lock_that_was_moved_away_is_not_the_lock(tmp_path):
    patient = lock(tmp_path / 'run' / 'l', wait_s=30)
    with lock(tmp_path / 'run' / 'l', wait_s=0):
        waiting = ThreadPoolExecutor(1).submit(patient.__enter__)
        time.sleep(0.3)
        (tmp_path / 'run').rename(tmp_path / 'aside')
    waiting.result(timeout=60)
    with pytest.raises(BusyError):
        with lock(tmp_path / 'run' / 'l', wait_s=0):
            pass
    patient.__exit__(None, None, None)


NOBODY = 65534


def test_runs_of_another_user_that_may_not_be_read_are_not_missing(monkeypatch):
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are their owner's alone
        os.chmod(home, 0o755)
        runs = Path(home) / 'runs'
        runs.mkdir()
        monkeypatch.setenv('KDNOTES_HOME', home)
        assert runs_path().samefile(runs)
        runs.chmod(0)
        owner = os.geteuid()
        if owner == 0:  # whom no mode keeps out
            os.seteuid(NOBODY)
        try:
            with pytest.raises(FileError, match='/runs: Permission denied; change its permissions'):
                runs_path()
        finally:
            os.seteuid(owner)
            runs.chmod(0o700)


def group_of(folder: Path, version: int, limit: str, used: int, idle: int) -> None:
    "A cgroup as the kernel shows it."
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ('memory.limit_in_bytes', 'memory.usage_in_bytes'), 2: ('memory.max', 'memory.current')}
    for name, value in zip(names[version], (limit, used)):
        (folder / name).write_text(f'{value}\n')
    (folder / 'memory.stat').write_text(f'anon 5\n{"total_" * (version == 1)}inactive_file {idle}\n')


@pytest.mark.parametrize(
    'version, line, folder',
    [
        (2, '0::/', ''),  # a container, which sees its own group as the top
        (2, '0::/', 'unified'),
        (2, '0::/user.slice/run-1.scope', 'user.slice/run-1.scope'),  # systemd-run, SLURM
        (2, '0::/job/step', 'job'),  # the limit of a group around it
        (1, '4:memory:/slurm/job_7', 'memory/slurm/job_7'),
        (1, '4:cpu,memory:/docker/ab', 'memory'),
    ],
)
def test_a_limit_of_memory_is_that_of_the_cgroup_of_the_process(tmp_path, version, line, folder):
    (tmp_path / 'cgroup').write_text(f'5:freezer:/\n{line}\n1:name=systemd:/x\n')
    group_of(tmp_path / 'fs' / folder, version, limit='2000', used=1500, idle=300)
    assert free_memory(tmp_path / 'cgroup', tmp_path / 'fs') == 800
    group_of(tmp_path / 'fs' / folder, version, limit='1000', used=1500, idle=300)  # lowered meanwhile
    assert free_memory(tmp_path / 'cgroup', tmp_path / 'fs') == 0
    group_of(tmp_path / 'fs' / folder, version, {1: 2**63 - 4096, 2: 'max'}[version], used=1500, idle=300)
    free = free_memory(tmp_path / 'cgroup', tmp_path / 'fs')
    assert abs(free - psutil.virtual_memory().available) < 2**31


def test_a_system_without_cgroups_has_what_is_free(tmp_path):
    assert free_memory(tmp_path / 'cgroup', tmp_path / 'fs') > 0

"""A training on several machines is that of one. Machines here: processes that share no folder; where it is
permitted, each in a network of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
import psutil
import pytest
from kdnotes.core.config import ConfigError, make_config
from kdnotes.core.processes import Meeting, MeetingError
from kdnotes.core.resolve import Machine, resolve_ranks
from kdnotes.experiment.launch import why_ended

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
NAMES = ('kdnotes-a', 'kdnotes-b')  # of the networks


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def ip(*words: str) -> None:
    subprocess.run(['ip', *words], check=True, capture_output=True)


@contextmanager
def networks():
    "Two networks with a cable between them."
    try:
        for name in NAMES:
            ip('netns', 'add', name)
        ip('-n', NAMES[0], 'link', 'add', 'wire', 'type', 'veth', 'peer', 'name', 'wire', 'netns', NAMES[1])
        for i, name in enumerate(NAMES, 1):
            ip('-n', name, 'addr', 'add', f'10.98.76.{i}/24', 'dev', 'wire')
            for link in ('wire', 'lo'):
                ip('-n', name, 'link', 'set', link, 'up')
        yield
    finally:
        for name in NAMES:
            subprocess.run(['ip', 'netns', 'del', name], capture_output=True)


class Machines:
    "Starts the same command on two machines, each with a home of its own."

    def __init__(self, folder: Path, teacher: Path, apart: bool):
        self.homes = [folder / 'a', folder / 'b']
        self.teacher = teacher
        self.prefix = [['ip', 'netns', 'exec', name] if apart else [] for name in NAMES]
        self.address = f'10.98.76.1:{free_port()}' if apart else f'localhost:{free_port()}'
        self.processes = []

    def start(self, *more: str, own=((), ()), mode: str = 'mixed_kd') -> list[subprocess.Popen]:
        "`own`: what each of them is told besides."
        self.processes = []
        for home, prefix, given in zip(self.homes, self.prefix, own):
            home.mkdir(exist_ok=True)
            several = ['nodes=2', 'launcher=torchrun', f'rendezvous={self.address}']
            settings = ['ranks=2', 'threads_per_rank=1', f'teacher={self.teacher}', *several, *more, *given]
            self.processes.append(
                subprocess.Popen(
                    [*prefix, *command(mode, settings)],
                    env=environment(home),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return self.processes

    def ends(self) -> list[tuple[int, str]]:
        "Exit code and last words of both; 400 s are a hang."
        said = [p.communicate(timeout=400)[0].strip().splitlines()[-1] for p in self.processes]
        return [(p.returncode, words) for p, words in zip(self.processes, said)]

    def close(self) -> None:
        for p in self.processes:
            p.kill()
            p.wait()


def command(mode: str, settings: list[str]) -> list[str]:
    given = [word for setting in settings for word in ('-p', setting)]
    run = ['run', '--mode', mode, '--corpus', 'embedded', '--smoke', '--study', 'machines']
    return [sys.executable, '-m', 'kdnotes', *run, *given]


def environment(home: Path) -> dict[str, str]:
    return os.environ | dict(KDNOTES_HOME=str(home), PYTHONPATH=str(ROOT), HF_HUB_OFFLINE='1')


def records(home: Path) -> dict[str, dict]:  # mode -> record
    found = [json.loads(p.read_text()) for p in home.glob('runs/machines/*/record.json')]
    return {record['mode']: record for record in found}


@pytest.fixture(params=['apart', 'localhost'])
def machines(request, tmp_path, small_teacher):
    "Two in networks of their own, where the kernel permits it; and two on the loopback interface."
    with ExitStack() as stack:
        if request.param == 'apart':
            try:
                stack.enter_context(networks())
            except (OSError, subprocess.CalledProcessError) as e:
                pytest.skip(f'no networks of their own here, which need the rights of root: {e}')
        found = Machines(tmp_path, small_teacher, request.param == 'apart')
        stack.callback(found.close)
        yield found


def test_two_machines_leave_the_run_that_one_machine_leaves(machines, tmp_path, small_teacher):
    alone = ['ranks=2', 'threads_per_rank=1', f'teacher={small_teacher}']
    home = tmp_path / 'one'
    home.mkdir()
    subprocess.run(command('mixed_kd', alone), env=environment(home), check=True, capture_output=True)
    machines.start()
    ends = machines.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    one = records(home)
    for there in map(records, machines.homes):
        assert {mode: r['run_id'] for mode, r in there.items()} == {m: r['run_id'] for m, r in one.items()}
        assert {mode: r['model_sha256'] for mode, r in there.items()} == {
            mode: r['model_sha256'] for mode, r in one.items()
        }
        assert there['mixed_kd']['parallel']['reason'] == '2 ranks on cpu, 2 machines'
        assert there['mixed_kd']['time']['teacher_train_s'] is not None
    a, b = machines.homes
    for cache in ('tokens', 'signals'):  # made on each machine, on its own disk
        assert os.listdir(a / 'runs/.cache' / cache) and os.listdir(b / 'runs/.cache' / cache)


@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
@pytest.mark.parametrize(
    'own, words',
    [
        ((('seed=1',), ('seed=2',)), "since the run's name, which tells all settings"),
    ],
)
def test_machines_that_would_train_another_run_say_so(machines, own, words):
    machines.start('student_init=teacher_pretrained', own=own, mode='mixed_student')
    for code, said in machines.ends():
        assert code == 1 and words in said and 'give both the same' in said, said
    assert not any(machines.homes[0].glob('runs/machines/*/record.json'))


def wait_for(there, seconds: float = 400):
    end = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < end, 'nothing came'
        time.sleep(0.1)
    return found


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    "The agent that torchrun is, and the rank that it started."
    below = psutil.Process(process.pid).children(recursive=True)
    return [p for p in below if 'kdnotes.experiment.worker' in ' '.join(p.cmdline())]


@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
@pytest.mark.exhaustive
@pytest.mark.parametrize('lost', ['rank', 'agent'])
def test_when_one_machine_is_lost_both_end_and_the_same_command_goes_on(machines, lost):
    settings = ['student_init=teacher_pretrained', 'checkpoint_steps=1', 'epochs=12']
    processes = machines.start(*settings, mode='mixed_student')
    wait_for(lambda: [p for home in machines.homes for p in home.glob('runs/machines/*/checkpoints/step-*')])
    agent, rank = ranks_of(processes[1])
    (agent if lost == 'agent' else rank).send_signal(signal.SIGKILL)
    for code, said in machines.ends():
        assert code in (1, 75) and 'the same command' in said, said
    assert not psutil.pid_exists(rank.pid) and not psutil.pid_exists(agent.pid)
    machines.start(*settings, mode='mixed_student')
    assert [code for code, _ in machines.ends()] == [0, 0]
    found = [records(home)['mixed_student'] for home in machines.homes]
    assert found[0]['resumed_at'] and found[0] == found[1]


def test_a_host_that_cannot_be_reached_is_a_sentence():
    with pytest.raises(MeetingError, match='rendezvous=nowhere.invalid:29500 cannot be reached from here'):
        Meeting(2, 1, 'nowhere.invalid:29500', 'a study').wait()


SEVERAL = dict(mode='mixed_kd', ranks=2, nodes=2, launcher='torchrun', rendezvous='a:29500')


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(rendezvous='a'), 'is no <host>:<port>'),
        (dict(rendezvous='a:99999'), 'is no <host>:<port>'),
        (dict(rendezvous=None), 'needs rendezvous=<host>:<port>'),
        (dict(launcher='local'), 'needs launcher=torchrun'),
        (dict(mode='baseline', ranks=1), 'runs on 1 rank; use a parallel mode'),
        (dict(nodes=0), 'nodes'),
    ],
)
def test_machines_that_could_not_meet_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        make_config(**SEVERAL | given)


@pytest.mark.parametrize(
    'ranks, machine, words',
    [
        (3, Machine('cpu', 2), 'make it a multiple of 2'),
        (18, Machine('cpu', 2), 'use at most 16'),
        (4, Machine('cuda', 16, gpus=1), 'needs 2 GPUs here, and 1 are visible'),
    ],
)
def test_ranks_that_machines_cannot_have_are_refused(ranks, machine, words):
    with pytest.raises(ConfigError, match=words):
        resolve_ranks(ranks, 'auto', 'auto', machine, nodes=2)


def test_each_machine_has_its_share_of_ranks_and_its_cores():
    assert resolve_ranks(4, 'auto', 'auto', Machine('cpu', 8), nodes=2) == (4, 4)
    assert resolve_ranks('auto', 'auto', 'auto', Machine('cuda', 16, gpus=8), nodes=4) == (32, None)


def test_torchruns_table_of_the_dead_is_a_sentence():
    lines = ['Traceback (most recent call last):', 'torch.distributed.elastic.ChildFailedError:', '=====']
    assert why_ended(lines) == 'one of its ranks was killed, as when memory runs out'

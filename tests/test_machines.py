"""A training on several machines is that of one. Machines here: processes that share one home folder, each in
a network of its own where it is permitted.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
import psutil
import pytest
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.processes import EXIT_STOPPED, Rendezvous, RendezvousError
from kdnotes.core.machine import Machine, inherited, resolve_ranks
from kdnotes.core.resolve import resolve
from kdnotes.experiment.launch import RunError, execute
from kdnotes.experiment.plan import plan
from processes import ranks_of
from small_runs import write_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
NAMES = tuple(f'kdnotes-{os.getpid()}-{letter}' for letter in 'ab')  # networks of these tests alone


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
    "Starts the same command on two machines."

    def __init__(self, folder: Path, teacher: Path, apart: bool):
        self.homes = [folder / 'shared'] * 2
        self.teacher = teacher
        self.prefix = [['ip', 'netns', 'exec', name] if apart else [] for name in NAMES]
        # the second is the host, which torchrun does not number first
        self.address = f'10.98.76.2:{free_port()}' if apart else f'localhost:{free_port()}'
        self.processes = []

    def start(
        self, *more: str, own=((), ()), mode: str = 'mixed_kd', ranks: int = 2
    ) -> list[subprocess.Popen]:
        "`own`: what each of them is given besides."
        self.processes = []
        several = ['nodes=2', 'launcher=torchrun', f'rendezvous={self.address}']
        for home, prefix, given in zip(self.homes, self.prefix, own):
            home.mkdir(exist_ok=True)
            settings = [f'ranks={ranks}', 'threads_per_rank=1', f'teacher={self.teacher}', *several]
            self.processes.append(started([*prefix, *command(mode, [*settings, *more, *given])], home))
        return self.processes

    def ends(self) -> list[tuple[int, str]]:
        "Exit code and last words of both; 400 s are a hang."
        said = [p.communicate(timeout=400)[0].strip().splitlines()[-1] for p in self.processes]
        return [(p.returncode, words) for p, words in zip(self.processes, said)]

    def close(self) -> None:
        for p in self.processes:
            p.kill()
            p.wait()


def started(words: list[str], home: Path) -> subprocess.Popen:
    return subprocess.Popen(
        words, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def command(mode: str, settings: list[str]) -> list[str]:
    corpus = [] if any(setting.startswith('corpus=') for setting in settings) else ['corpus=embedded']
    given = [word for setting in (*corpus, *settings) for word in ('-p', setting)]
    run = ['run', '--mode', mode, '--smoke', '--study', 'machines']
    return [sys.executable, '-m', 'kdnotes', *run, *given]


def environment(home: Path) -> dict[str, str]:
    return os.environ | dict(KDNOTES_HOME=str(home), PYTHONPATH=str(ROOT), HF_HUB_OFFLINE='1')


def records(home: Path) -> dict[str, dict]:  # mode -> record
    found = [json.loads(p.read_text()) for p in home.glob('runs/machines/*/record.json')]
    return {record['mode']: record for record in found}


@pytest.fixture(params=['apart or localhost', 'localhost'])
def machines(request, tmp_path, small_teacher):
    "Two in networks of their own, where the kernel permits it; and two on the loopback interface."
    with ExitStack() as stack:
        apart = request.param != 'localhost'
        if apart:
            try:
                stack.enter_context(networks())
            except (OSError, subprocess.CalledProcessError) as e:
                if request.param == 'apart':
                    pytest.skip(f'no networks of their own here, which need the rights of root: {e}')
                apart = False
        found = Machines(tmp_path, small_teacher, apart)
        stack.callback(found.close)
        yield found


def on_one_machine(folder: Path, mode: str, *settings: str) -> dict[str, str]:  # mode -> run_id, weights
    "What the same command leaves where nobody else is."
    home = folder / 'one'
    home.mkdir(exist_ok=True)
    given = command(mode, ['threads_per_rank=1', *settings])
    subprocess.run(given, env=environment(home), check=True, capture_output=True)
    return results(home)


def results(home: Path) -> dict[str, tuple[str, str]]:  # mode -> run_id, weights
    return {mode: (r['run_id'], r['model_sha256']) for mode, r in records(home).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    'ranks, more',
    [
        (2, []),
        # a step has three examples, so that a rank of the second machine has none
        (4, ['batch_size=3']),
    ],
)
def test_two_machines_leave_the_run_that_one_machine_leaves(machines, tmp_path, small_teacher, ranks, more):
    one = on_one_machine(tmp_path, 'mixed_kd', f'ranks={ranks}', f'teacher={small_teacher}', *more)
    disks = [tmp_path / 'disk a', tmp_path / 'disk b']
    machines.start(*more, ranks=ranks, own=[(f'node_cache={disk}',) for disk in disks])
    ends = machines.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    [home] = set(machines.homes)
    there = records(home)
    assert results(home) == one
    assert there['mixed_kd']['parallel']['reason'] == f'{ranks} ranks on cpu, 2 machines'
    assert there['mixed_kd']['time']['teacher_train_s'] is not None
    for disk in disks:  # each machine computes its own
        assert os.listdir(disk / 'tokens') and os.listdir(disk / 'signals')
    assert not (home / 'runs/.cache/signals').exists()
    [folder] = home.glob('runs/machines/mixed_kd-*')
    assert len(list(folder.glob('log*.txt'))) == 2


STUDENT = ('student_init=teacher_pretrained',)  # which stands on no other run


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['apart'], indirect=True)
def test_machines_that_share_no_home_say_so(machines, tmp_path):
    machines.homes = [tmp_path / 'a', tmp_path / 'b']
    machines.start(*STUDENT, mode='mixed_student')
    ends = machines.ends()
    assert all(code == 1 and 'all machines share one home folder' in said for code, said in ends), ends


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
def test_ranks_that_torchrun_has_started_train_the_same_run(machines, tmp_path, small_teacher):
    settings = [*STUDENT, f'teacher={small_teacher}']
    one = on_one_machine(tmp_path, 'mixed_student', 'ranks=2', *settings)
    python, *given = command('mixed_student', ['launcher=inherit', 'threads_per_rank=1', *settings])
    agent = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    home = machines.homes[0]
    home.mkdir()
    machines.processes = [started([python, *agent, *given], home)]
    [(code, said)] = machines.ends()
    assert code == 0, said
    assert results(home) == one


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['apart'], indirect=True)
@pytest.mark.parametrize('differs', ['seed', 'corpus', 'ranks', 'torch'])
def test_machines_that_would_train_another_run_say_so(machines, tmp_path, differs):
    own = dict(seed=[('seed=1',), ('seed=2',)], ranks=[('ranks=2',), ('ranks=4',)]).get(differs, ((), ()))
    if differs == 'corpus':  # a row of the second machine's was changed
        folders = [write_corpus(tmp_path / name / 'corpus') for name in 'ab']
        train = folders[1] / 'WikiQA-train.tsv'
        train.write_text(train.read_text().replace('title 3', 'title 4'))
        own = [(f'corpus={folder}',) for folder in folders]
    if differs == 'torch':
        site = tmp_path / 'site'
        site.mkdir()
        (site / 'sitecustomize.py').write_text("import torch\n\ntorch.__version__ = '2.12.0'\n")
        machines.prefix[1] = [*machines.prefix[1], 'env', f'PYTHONPATH={site}{os.pathsep}{ROOT}']
    machines.start(*STUDENT, own=own, mode='mixed_student')
    for code, said in machines.ends():
        assert code == 1 and 'the machines cannot train together: mixed_student-s' in said, said
        assert 'give all the same command' in said and (differs != 'torch' or 'torch 2.12.0' in said), said
    assert not any(machines.homes[0].glob('runs/machines/*/record.json'))


def wait_for(there, seconds: float = 400):
    end = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < end, 'nothing came'
        time.sleep(0.1)
    return found


@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
@pytest.mark.exhaustive
@pytest.mark.parametrize('lost', ['rank', 'agent'])
def test_when_one_machine_is_lost_both_end_and_the_same_command_goes_on(machines, lost):
    settings = ['student_init=teacher_pretrained', 'checkpoint_steps=1', 'epochs=12']
    processes = machines.start(*settings, mode='mixed_student')
    [home] = set(machines.homes)
    wait_for(lambda: list(home.glob('runs/machines/*/checkpoints/step-*')))
    agent, rank = ranks_of(processes[1].pid)  # torchrun's command names the worker, too
    (agent if lost == 'agent' else rank).send_signal(signal.SIGKILL)
    for code, said in machines.ends():
        assert code in (1, 75) and 'the same command' in said, said
    assert not [p for p in (agent, rank) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    machines.start(*settings, mode='mixed_student')
    assert [code for code, _ in machines.ends()] == [0, 0]
    assert records(home)['mixed_student']['resumed_at']


PLACE = dict(
    RANK='3', WORLD_SIZE='4', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='1'
)


@pytest.mark.parametrize(
    'env, words',
    [
        (dict(RANK='4'), 'RANK=4 WORLD_SIZE=4 .* are not equal blocks'),
        (dict(LOCAL_WORLD_SIZE='0'), 'are not equal blocks'),
        (dict(WORLD_SIZE='0'), 'are not equal blocks'),
        (dict(LOCAL_RANK='0'), 'start as many on each machine'),
        (dict(RANK='x'), "'x' is not set or no number"),
    ],
)
def test_what_torchrun_could_not_have_told_is_refused(env, words):
    with pytest.raises(ConfigError, match=words):
        inherited(PLACE | env)


def test_a_host_that_cannot_be_reached_is_a_sentence():
    with pytest.raises(RendezvousError, match='rendezvous=nowhere.invalid:29500 cannot be reached from here'):
        print(Rendezvous(2, 1, 'nowhere.invalid:29500', 'a study').is_host)


SEVERAL = dict(mode='mixed_kd', ranks=2, nodes=2, launcher='torchrun', rendezvous='a:29500')


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(rendezvous='a'), 'is no <host>:<port>'),
        (dict(rendezvous='a:99999'), 'is no <host>:<port>'),
        (dict(rendezvous=None), 'needs rendezvous=<host>:<port>'),
        (dict(rendezvous=''), 'needs rendezvous=<host>:<port>'),
        (dict(launcher='local'), 'needs launcher=torchrun'),
        (dict(launcher='ray', rendezvous=None), 'needs rendezvous=<address of the Ray cluster>'),
        (dict(launcher='ray', rendezvous='ray://a'), 'is no <host>:<port>'),
        (dict(launcher='inherit', stage='true'), 'would be run after the ranks have started'),
        (dict(launcher='slurm'), 'launcher'),
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


# of torch 2.x; a rank of this machine was killed, and another ended by the agent
TABLE = """
kdnotes.experiment.worker FAILED
Failures:
[1]:
  exitcode  : -15 (pid: 18)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {} (pid: 17)
  error_file: <N/A>
""".splitlines()


@pytest.mark.parametrize('code, first', [(-9, -9), (75, 75), (-15, EXIT_STOPPED), (1, 1)])
def test_torchruns_table_says_how_the_first_rank_ended(code, first):
    of_two = Rendezvous(2, 1, 'localhost:29500', 'a study')
    assert of_two.first_code([line.format(code) for line in TABLE], 1) == first


def listening(name: str) -> set[tuple[str, str]]:  # address, command line of its process
    "What listens in a network, in which nothing else runs."
    said = subprocess.run(
        ['ip', 'netns', 'exec', name, 'ss', '-Htlnp'], capture_output=True, text=True, check=True
    )
    found = set()
    for line in said.stdout.splitlines():
        address = line.split()[3].rsplit(':', 1)[0].strip('[]').split('%')[0]
        program = ''
        with suppress(psutil.Error):
            for pid in re.findall(r'pid=(\d+)', line)[:1]:  # a process that has just ended has none
                program = ' '.join(psutil.Process(int(pid)).cmdline())
        found.add((address, program))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['apart'], indirect=True)
def test_across_machines_the_chosen_interface_listens_and_torchruns_stores(machines):
    seen = [set(), set()]
    machines.start(*STUDENT, mode='mixed_student')
    while any(p.poll() is None for p in machines.processes):
        for name, known in zip(NAMES, seen):
            known |= listening(name)
        time.sleep(0.05)
    assert [code for code, _ in machines.ends()] == [0, 0]
    wild = {'*', '0.0.0.0', '::'}
    for i, known in enumerate(seen, 1):
        assert f'10.98.76.{i}' in {address for address, _ in known}
        assert {address for address, _ in known} <= {f'10.98.76.{i}', '127.0.0.1', '::1', *wild}, known
    for known in seen:  # that of the rendezvous on its host, and that of the ranks where torchrun counts from
        stores = [program for address, program in known if address in wild and program]
        assert stores and all('torch.distributed.run' in program for program in stores), seen


@pytest.mark.parametrize(
    'env, given, words',
    [
        (False, {}, "launcher=inherit reads RANK, .*'RANK' is not set"),
        (True, dict(ranks=3), 'ranks=3 contradicts launcher=inherit, since torchrun has started 4'),
        (True, dict(nodes=3, ranks=3), 'ranks=3 contradicts'),
    ],
)
def test_what_torchrun_has_told_and_what_was_asked_must_agree(monkeypatch, env, given, words):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value) if env else monkeypatch.delenv(name, raising=False)
    asked = dict(mode='mixed_kd', ranks='auto', launcher='inherit')
    with pytest.raises(ConfigError, match=words):
        resolve(make_config(**asked | given), Machine('cpu', 2), 'embedded')


def test_ranks_of_a_ray_cluster_are_not_started_here(small_teacher, monkeypatch, tmp_path):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    given = dict(SEVERAL, launcher='ray', rendezvous='auto', teacher=str(small_teacher), corpus='embedded')
    planned = plan(make_config(**given, smoke=True))
    with pytest.raises(RunError, match='launcher=ray starts ranks on the machines of a Ray cluster'):
        execute(planned)


@contextmanager
def small_disk(folder: Path):
    "A disk of a megabyte."
    folder.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f'no disk of its own here, which needs the rights of root: {mounted.stderr}')
    try:
        yield folder
    finally:
        subprocess.run(['umount', folder], check=True)


@pytest.fixture
def staged(tmp_path, monkeypatch, capfd):
    "What a run says whose data cannot be staged: it ends before any rank is started."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')

    def run(stage: str, *more: str) -> str:
        assert main(command('baseline', [f'stage={stage}', *more])[3:]) == 1
        assert not any((tmp_path / 'home').glob('runs/*/*/config.json'))
        return ' '.join(capfd.readouterr().err.split())

    return run


def test_a_disk_that_is_full_while_staging_is_a_sentence(tmp_path, staged):
    with small_disk(tmp_path / 'disk') as disk:
        fills = 'sleep 300 & head -c 5000000 /dev/zero > $KDNOTES_STAGE/corpus'
        said = staged(fills, f'node_cache={disk}')
        assert 'ended with exit code 1' in said and 'No space left on device; put that right' in said, said
    assert not [p for p in psutil.process_iter(['cmdline']) if p.info['cmdline'] == ['sleep', '300']]


@pytest.mark.parametrize(
    'stage, words',
    [
        ('ulimit -f 1; exec head -c 5000000 /dev/zero > $KDNOTES_STAGE/corpus', 'was ended by SIGXFSZ'),
        ('echo the server is away; exit 7', 'ended with exit code 7: the server is away; put that right'),
        ('kill -9 $$', 'was ended by SIGKILL: it printed nothing'),
        (
            'setsid sleep 273 & echo begun; exit 3',
            'ended with exit code 3: begun; put that right',
        ),  # it stays
    ],
)
def test_a_stage_that_fails_is_a_sentence(staged, stage, words):
    assert words in staged(stage)


def test_of_an_endless_line_of_a_stage_the_end_is_told(staged):
    said = staged("head -c 3000000 /dev/zero | tr '\\0' x; false")
    assert 500 < len(said) < 3000 and 'xxx; put that right' in said


def test_a_stop_while_staging_ends_what_the_user_has_started(tmp_path):
    home = tmp_path / 'home'
    home.mkdir()
    process = started(command('baseline', ['stage=sleep 271 & sleep 272; true']), home)
    asleep = wait_for(
        lambda: [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == 'sleep']
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode not in (0, None)
    assert not psutil.wait_procs(asleep, timeout=10)[1]


@pytest.mark.exhaustive
def test_a_staged_corpus_is_trained_on_and_its_run_has_the_name_it_has_without(tmp_path, small_teacher):
    corpus = write_corpus(tmp_path / 'slow disk' / 'corpus')
    disk = tmp_path / 'fast'
    common = ['max_length=64', f'teacher={small_teacher}']
    one = on_one_machine(tmp_path, 'baseline', f'corpus={corpus}', *common)
    stage = f'cp -r "{corpus}" $KDNOTES_STAGE/'
    settings = [f'stage={stage}', f'node_cache={disk}', f'corpus={disk}/staged/corpus', 'threads_per_rank=1']
    home = tmp_path / 'home'
    home.mkdir()
    process = started(command('baseline', [*settings, *common]), home)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert results(home) == one
    assert os.listdir(disk / 'tokens') and not (home / 'runs/.cache').exists()

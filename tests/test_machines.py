"""A training on several machines is that of one. Machines here: processes that share no folder; where it is
permitted, each in a network of its own.
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
from kdnotes.core.given import make_config
from kdnotes.core.processes import EXIT_STOPPED, Meeting, MeetingError
from kdnotes.core.resolve import Machine, place_of, resolve, resolve_ranks
from kdnotes.experiment.launch import RunError, execute
from kdnotes.experiment.plan import plan
from processes import ranks_of
from small_runs import write_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
NAMES = ('kdnotes-a', 'kdnotes-b')  # of the networks


def free_port(among=(0,)) -> int:
    for port in among:
        with suppress(OSError), socket.socket() as s:
            s.bind(('127.0.0.1', port))
            return s.getsockname()[1]
    raise OSError('no port is free')


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
        # the second is the host, which torchrun would not number first
        self.address = f'10.98.76.2:{free_port()}' if apart else f'localhost:{free_port()}'
        self.processes = []

    def start(
        self, *more: str, own=((), ()), mode: str = 'mixed_kd', ranks: int = 2, several=None, told=({}, {})
    ) -> list[subprocess.Popen]:
        "`own`: what each of them is given besides; `told`: what its environment says besides."
        self.processes = []
        several = several or ['nodes=2', 'launcher=torchrun', f'rendezvous={self.address}']
        for home, prefix, given, env in zip(self.homes, self.prefix, own, told):
            home.mkdir(exist_ok=True)
            settings = [f'ranks={ranks}', 'threads_per_rank=1', f'teacher={self.teacher}', *several]
            self.processes.append(started([*prefix, *command(mode, [*settings, *more, *given])], home, env))
        return self.processes

    def by_srun(self, tasks: int = 1) -> list[dict[str, str]]:
        "What srun tells each task of a step on two machines, with so many on each."
        host = '10.98.76.[1-2]' if self.prefix[0] else 'localhost,localhost'
        common = dict(
            SLURM_JOB_ID=str(40_000 + free_port(range(20_000, 30_000)) - 20_000),
            SLURM_STEP_ID='0',
            SLURM_NNODES='2',
            SLURM_STEP_NUM_NODES='2',
            SLURM_STEP_NUM_TASKS=str(2 * tasks),
            SLURM_STEP_TASKS_PER_NODE=f'{tasks}(x2)',
            SLURM_JOB_NODELIST=host,
            SLURM_STEP_NODELIST=host,
        )
        return [
            common | dict(SLURM_NODEID=str(k // tasks), SLURM_PROCID=str(k), SLURM_LOCALID=str(k % tasks))
            for k in range(2 * tasks)
        ]

    def ends(self) -> list[tuple[int, str]]:
        "Exit code and last words of both; 400 s are a hang."
        said = [p.communicate(timeout=400)[0].strip().splitlines()[-1] for p in self.processes]
        return [(p.returncode, words) for p, words in zip(self.processes, said)]

    def close(self) -> None:
        for p in self.processes:
            p.kill()
            p.wait()


def started(words: list[str], home: Path, env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        words, env=environment(home) | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@pytest.fixture(params=['apart or localhost', pytest.param('localhost', marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize(
    'ranks, more',
    [
        (2, []),
        # a step has three examples, so that a rank of the second machine has none
        pytest.param(4, ['batch_size=3'], marks=pytest.mark.exhaustive),
    ],
)
def test_two_machines_leave_the_run_that_one_machine_leaves(machines, tmp_path, small_teacher, ranks, more):
    one = on_one_machine(tmp_path, 'mixed_kd', f'ranks={ranks}', f'teacher={small_teacher}', *more)
    temporary = tmp_path / 'temporary'
    temporary.mkdir()
    machines.start(*more, ranks=ranks, told=(dict(TMPDIR=str(temporary)),) * 2)
    ends = machines.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    assert not list(temporary.glob('torchelastic_*')), 'torchrun leaves none of its folders'
    for home in machines.homes:
        there = records(home)
        assert results(home) == one
        assert there['mixed_kd']['parallel']['reason'] == f'{ranks} ranks on cpu, 2 machines'
        assert there['mixed_kd']['time']['teacher_train_s'] is not None
    a, b = machines.homes
    for cache in ('tokens', 'signals'):  # made on each machine, on its own disk
        assert os.listdir(a / 'runs/.cache' / cache) and os.listdir(b / 'runs/.cache' / cache)


STUDENT = ('student_init=teacher_pretrained',)  # which stands on no other run


def test_srun_says_how_many_machines_there_are_and_where_they_meet(machines):
    machines.start(*STUDENT, mode='mixed_student', several=['launcher=slurm'], told=machines.by_srun())
    ends = machines.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    one, other = (records(home)['mixed_student'] for home in machines.homes)
    assert one == other and one['parallel']['reason'] == '2 ranks on cpu, 2 machines'


@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
@pytest.mark.exhaustive
def test_ranks_that_srun_has_started_train_the_same_run(machines, tmp_path, small_teacher):
    one = on_one_machine(tmp_path, 'mixed_kd', 'ranks=4', f'teacher={small_teacher}')
    tasks = machines.by_srun(tasks=2)
    given = command('mixed_kd', ['launcher=inherit', 'threads_per_rank=1', f'teacher={small_teacher}'])
    machines.processes = [started(given, machines.homes[k // 2], env) for k, env in enumerate(tasks)]
    ends = machines.ends()
    assert [code for code, _ in ends] == [0] * 4, ends
    assert [results(home) for home in machines.homes] == [one, one]


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
def test_ranks_that_torchrun_has_started_train_the_same_run(machines, tmp_path, small_teacher):
    settings = [*STUDENT, f'teacher={small_teacher}']
    one = on_one_machine(tmp_path, 'mixed_student', 'ranks=2', *settings)
    python, *given = command('mixed_student', ['launcher=inherit', 'threads_per_rank=1', *settings])
    agent = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    machines.processes = [started([python, *agent, *given], machines.homes[0], {})]
    [(code, said)] = machines.ends()
    assert code == 0, said
    assert results(machines.homes[0]) == one


@pytest.mark.exhaustive
def test_of_one_home_for_all_machines_the_first_alone_writes(machines, tmp_path, small_teacher):
    one = on_one_machine(tmp_path, 'mixed_kd', 'ranks=2', f'teacher={small_teacher}')
    shared, own = machines.homes
    machines.homes = [shared, shared]
    shared.mkdir()
    if machines.prefix[
        0
    ]:  # who may have networks may have mounts: who is not the host can only read the home
        read_only = f'mount --bind {shared} {shared} && mount -o remount,bind,ro {shared} && exec "$@"'
        machines.prefix[0] += ['unshare', '--mount', 'sh', '-c', read_only, 'sh']
    caches = [(f'node_cache={tmp_path / name}',) for name in ('disk a', 'disk b')]
    machines.start('shared_storage=True', own=caches)
    ends = machines.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(shared) == one and not own.exists()
    # but their teacher's, which the other one was given
    assert len([record for name in 'ab' for record in (tmp_path / f'disk {name}').rglob('record.json')]) == 1
    for name in ('disk a', 'disk b'):
        assert os.listdir(tmp_path / name / 'tokens') and os.listdir(tmp_path / name / 'signals')
    assert not (shared / 'runs/.cache/tokens').exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
def test_machines_with_one_home_that_do_not_say_so_are_told(machines):
    machines.homes = [machines.homes[0]] * 2
    running = machines.start(*STUDENT, mode='mixed_student')
    told = wait_for(lambda: [p for p in running if p.poll() is not None])
    said = told[0].communicate()[0]
    assert told[0].returncode == 1 and 'give shared_storage=True on each of them' in said, said


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
@pytest.mark.parametrize('differs', ['seed', 'corpus'])
def test_machines_that_would_train_another_run_say_so(machines, tmp_path, differs):
    words = "since the run's name, which tells all settings"
    own = [('seed=1',), ('seed=2',)]
    if differs == 'corpus':  # a row of the second machine's was changed
        words = 'since the corpus differs'
        folders = [write_corpus(tmp_path / name / 'corpus') for name in 'ab']
        train = folders[1] / 'WikiQA-train.tsv'
        train.write_text(train.read_text().replace('title 3', 'title 4'))
        own = [(f'corpus={folder}',) for folder in folders]
    machines.start(*STUDENT, own=own, mode='mixed_student')
    for code, said in machines.ends():
        assert code == 1 and words in said and 'give both the same' in said, said
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
    wait_for(lambda: [p for home in machines.homes for p in home.glob('runs/machines/*/checkpoints/step-*')])
    agent, rank = ranks_of(processes[1].pid)  # torchrun's command names the worker, too
    (agent if lost == 'agent' else rank).send_signal(signal.SIGKILL)
    for code, said in machines.ends():
        assert code in (1, 75) and 'the same command' in said, said
    assert not [p for p in (agent, rank) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    machines.start(*settings, mode='mixed_student')
    assert [code for code, _ in machines.ends()] == [0, 0]
    found = [records(home)['mixed_student'] for home in machines.homes]
    assert found[0]['resumed_at'] and found[0] == found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', ['localhost'], indirect=True)
def test_machines_that_were_told_other_numbers_of_ranks_say_so(machines):
    machines.start('student_init=teacher_pretrained', own=(('ranks=2',), ('ranks=4',)), mode='mixed_student')
    for code, said in machines.ends():
        assert code == 1 and '3 ranks have met, and this machine was told of' in said, said


@pytest.mark.parametrize(
    'launcher, env, words',
    [
        ('inherit', dict(RANK='4', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2'), 'RANK=4 is none of WORLD_SIZE=2'),
        ('inherit', dict(RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='0'), '0 on each machine'),
        ('inherit', dict(RANK='0', WORLD_SIZE='0', LOCAL_WORLD_SIZE='1'), 'RANK=0 is none of WORLD_SIZE=0'),
        ('slurm', dict(SLURM_NODEID='2', SLURM_STEP_NODELIST='a,b'), 'SLURM_NODEID=2 is none of 2 machines'),
        ('slurm', dict(SLURM_NODEID='1'), 'SLURM_STEP_NODELIST of the scheduler names no machine'),
    ],
)
def test_places_that_contradict_themselves_are_refused(launcher, env, words):
    torch = dict(LOCAL_RANK='0', MASTER_ADDR='a', MASTER_PORT='29500')
    step = dict(SLURM_JOB_ID='7', SLURM_STEP_ID='0', SLURM_STEP_NUM_NODES='2', SLURM_STEP_NUM_TASKS='2')
    with pytest.raises(ConfigError, match=words):
        place_of(launcher, (torch if launcher == 'inherit' else step) | env)


def test_steps_of_a_job_meet_at_ports_of_their_own():
    step = dict(SLURM_JOB_ID='7', SLURM_STEP_NUM_NODES='2', SLURM_STEP_NUM_TASKS='2', SLURM_NODEID='0')
    step |= dict(SLURM_STEP_NODELIST='gpu[1-2]')
    places = {place_of('slurm', step | dict(SLURM_STEP_ID=str(n))).address for n in range(20)}
    assert len(places) == 20


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
        (dict(rendezvous=''), 'needs rendezvous=<host>:<port>'),
        (dict(launcher='local'), 'needs launcher=torchrun'),
        (dict(launcher='ray', rendezvous=None), 'needs rendezvous=<address of the Ray cluster>'),
        (dict(launcher='ray', rendezvous='ray://a'), 'is no <host>:<port>'),
        (
            dict(launcher='ray', rendezvous='ray://a:10001', shared_storage=True),
            'launcher=ray shares no home',
        ),
        (dict(launcher='inherit', stage='true'), 'would be run after the ranks have started'),
        (dict(nodes=1, launcher='local', shared_storage=True), 'launcher=local shares no home'),
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
    meeting = Meeting(2, 1, 'localhost:29500', 'a study')
    assert meeting.first_code([line.format(code) for line in TABLE], 1) == first


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


PLACE = dict(mode='mixed_kd', ranks='auto')


@pytest.mark.parametrize(
    'env, given, words',
    [
        ({}, dict(launcher='slurm'), 'SLURM_STEP_ID is not set here'),
        ({}, dict(launcher='inherit'), 'neither RANK nor SLURM_STEP_ID is set here'),
        (dict(tasks=8), dict(launcher='slurm'), 'add --ntasks-per-node=1'),
        (
            dict(tasks=1),
            dict(launcher='slurm', nodes=3, ranks=3),
            'nodes=3 is not what launcher=slurm has been told, 2',
        ),
        (
            dict(tasks=2),
            dict(launcher='inherit', ranks=3),
            'ranks=3 is not what launcher=inherit has been told, 4',
        ),
    ],
)
def test_what_a_scheduler_has_told_and_what_was_asked_must_agree(monkeypatch, tmp_path, env, given, words):
    if env:
        for name, value in Machines(tmp_path, tmp_path, False).by_srun(**env)[0].items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        resolve(make_config(**PLACE | given), Machine('cpu', 2), 'embedded')


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
        ('kill -9 $$', 'was ended by SIGKILL: it said nothing'),
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
    process = started(command('baseline', ['stage=sleep 271 & sleep 272; true']), home, {})
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
    process = started(command('baseline', [*settings, *common]), home, {})
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert results(home) == one
    assert os.listdir(disk / 'tokens') and not (home / 'runs/.cache').exists()

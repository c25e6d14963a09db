"""Runs on a Ray cluster of this machine: the same records as without it, what is lost on the way comes again
once, what fails says the same, and nothing is left behind.
"""

import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
import psutil
import pytest
from kdnotes import __version__
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.spec import flat, with_values
from kdnotes.core.parse import make_config
from kdnotes.core.files import at_home
from kdnotes.core.processes import Stopped, stop_all
from kdnotes.core.machine import Machine
from kdnotes.experiment import cluster as cluster_module
from kdnotes.experiment.cluster import Cluster, make_run
from kdnotes.experiment.launch import NO_LIMITS, Limits, RunError, execute
from kdnotes.experiment.plan import Plan, plan
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import floors
from notebooks import surroundings
from processes import descendants, ranks_of, running
from small_runs import ON, planned

pytestmark = pytest.mark.slow
TASK = 'text_classification'
# of a record: what differs between two runs of one setting on one machine
MEASURED = {
    *(
        'curve',
        'environment',
        'latency',
        'machine',
        'memory',
        'operations',
        'phases',
        'sampling',
        'throughput',
    ),
    *('time', 'timeline', 'utilisation'),
}


@pytest.fixture(scope='module')
def cluster():
    "Ray with the cores of this machine, started as by a background job; it leaves no process and no folder."
    pytest.importorskip('ray', reason='Ray is not installed')
    before = set(descendants(os.getpid()))
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    made = Cluster('local')
    signal.signal(signal.SIGINT, interrupted)
    folder = made._folder.path
    yield made
    started = set(descendants(os.getpid())) - before
    made.close()
    assert len(started) >= 3 and running(started) == []
    assert not folder.exists()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    return tmp_path


def baseline(teacher: Path) -> Plan:
    "A run that stands on no other."
    return planned(TASK, 'baseline', teacher)


def in_thread(call, *arguments) -> Future:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return future


def next_rank(future: Future, before: set[int]) -> psutil.Process:
    "The rank of a run that another thread waits for, once it is there."
    while not future.done():
        for rank in ranks_of(os.getpid()):
            if rank.pid not in before:
                return rank
        time.sleep(0.02)
    raise AssertionError(f'no rank has come: {future.exception()}')


# before the tests with a cluster: a process joins one at a time
@pytest.mark.parametrize(
    'address, text',
    [
        ('somewhere', 'is no address of a Ray cluster; give local, auto, host:port or ray://host:port'),
        ('localhost:1', 'no Ray cluster answers at'),
        ('ray://localhost:1', 'no Ray cluster answers at'),
        ('localhost:99999', 'is no address of a Ray cluster'),
    ],
)
def test_an_address_that_is_not_there(address, text):
    with pytest.raises(ConfigError, match=text) as refused:
        Cluster(address)
    assert '\n' not in str(refused.value)


def test_a_study_says_in_one_sentence_that_no_cluster_is_there(home, capsys):
    assert main(['study', '--smoke', '--ray', 'localhost:1']) == 2
    errors = capsys.readouterr().err
    assert "no Ray cluster answers at 'localhost:1'" in errors and errors.count('\n') == 1
    assert list(home.glob('runs/[!.]*')) == []


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(
        ConfigError, match=r"Ray, which is not installed here: run pip install 'ray\[client\]'"
    ):
        Cluster('local')


@pytest.mark.exhaustive
def test_a_run_and_its_teacher_are_as_without_ray(cluster, home, small_teacher, tmp_path_factory, rank_here):
    p = planned(TASK, 'full_kd', small_teacher)
    said = []
    rows = []
    record = cluster.execute(p, rows.append, said.append)
    runs = [p, p.teacher]
    folders = [RunFolder(r.config.where.study, r.run_id) for r in runs]
    assert [folder.state()['status'] for folder in folders] == ['done', 'done']
    for folder in folders:
        folder.check()
        assert not (folder.path / 'checkpoints').exists()
    assert [row['run_id'] for row in rows if row['kind'] == 'start'] == [p.teacher.run_id, p.run_id]
    assert any('runs on the cluster and uses 1 CPU' in text for text in said)
    assert cluster.execute(p, said.append, said.append) == record and said[-1].endswith('is done already')
    with at_home(tmp_path_factory.mktemp('without')):
        without = execute(p)
        own_floors = floors(p.config.where.study)
    assert record.keys() == without.keys()
    assert {k for k in record if record[k] != without[k]} <= MEASURED
    assert [point['loss'] for point in record['curve'] if 'loss' in point] == [
        point['loss'] for point in without['curve'] if 'loss' in point
    ]
    assert record['machine']['jobs'] == 1
    assert floors(p.config.where.study).equals(own_floors)


@pytest.mark.exhaustive
def test_a_process_joins_one_cluster_at_a_time(cluster):
    same = Cluster('auto')
    assert same._machines() == cluster._machines()
    same.close()
    assert cluster._machines(), 'who has not joined leaves nothing'
    with pytest.raises(ConfigError, match='is not the Ray cluster that this process has joined'):
        Cluster('localhost:1')


@pytest.mark.exhaustive
def test_what_cannot_be_made_there_is_one_sentence(cluster, home, small_teacher):
    p = baseline(small_teacher)
    large = plan(
        make_config(**flat(p.requested, changed=True) | dict(threads_per_rank=64)), Machine('cpu', 64)
    )
    with pytest.raises(RunError, match='needs 1 x 64 CPUs, and the cluster at local has 0 of them'):
        cluster.execute(large)
    assert cluster.room([p]) == len(os.sched_getaffinity(0))
    RunFolder(p.config.where.study, p.run_id).create()
    there = dict(plan=p, version=__version__, home=str(home), folder=str(home), jobs=1, limits=NO_LIMITS)
    elsewhere = with_values(p.config, corpus='/nowhere')
    for other, text in (
        (dict(version='0.0.0'), 'install one version'),
        (dict(plan=replace(p, config=elsewhere)), '/nowhere'),
        (dict(plan=replace(p, corpus_sha256='0' * 64)), 'changed since the run was planned, or '),
        (dict(home=str(home / 'elsewhere')), 'does not share the folder'),
    ):
        error = cluster_module._execute_there(**there | other)
        assert text in str(error) and '\n' not in str(error)


@pytest.mark.exhaustive
def test_a_limit_is_broken_once_and_says_the_same(cluster, home, small_teacher):
    p = baseline(small_teacher)
    limits = Limits(memory_mib=1)
    with pytest.raises(RunError) as there:
        cluster.execute(p, limits=limits)
    folder = RunFolder(p.config.where.study, p.run_id)
    assert there.value.cause == folder.state()['cause'] == 'memory'
    assert str(there.value).startswith(p.run_id) and 'more than the 1 that it may have' in str(there.value)
    assert not folder.done and (folder.path / 'log.txt').exists()
    assert cluster.execute(p)['run_id'] == p.run_id  # what failed is made by the same call


@pytest.mark.exhaustive
def test_a_machine_without_kdnotes(cluster, home, small_teacher, tmp_path, monkeypatch):

    (tmp_path / 'not_there.py').write_text('def make(*given):\n    pass\n')
    monkeypatch.syspath_prepend(tmp_path)  # of this process, and not of the workers
    monkeypatch.setattr(cluster_module, '_execute_there', importlib.import_module('not_there').make)
    with pytest.raises(RunError, match='cannot import this version of kdnotes; install it'):
        cluster.execute(baseline(small_teacher))


@pytest.mark.exhaustive
@pytest.mark.parametrize('kills', [1, 2])
def test_a_lost_worker_is_replaced_once(kills, cluster, home, small_teacher):
    p = baseline(small_teacher)
    future = in_thread(cluster.execute, p)
    ranks = set()
    for _ in range(kills):
        rank = next_rank(future, ranks)
        ranks.add(rank.pid)
        worker = rank.parent()
        assert worker.name().startswith('ray::') and worker.pid != os.getpid()
        worker.kill()
    folder = RunFolder(p.config.where.study, p.run_id)
    if kills == 1:
        again = next_rank(future, ranks)
        assert future.result(timeout=600)['run_id'] == p.run_id and again.pid not in ranks
        assert len(list(home.glob('runs/*/*/record.json'))) == 1 and folder.state()['status'] == 'done'
        assert len(folder.rows('end')) <= 1
    else:
        with pytest.raises(RunError, match='WorkerCrashedError of Ray') as lost:
            future.result(timeout=600)
        assert lost.value.cause == folder.state()['cause'] == 'killed'


@pytest.mark.exhaustive
def test_a_stop_reaches_a_run_on_the_cluster_which_then_goes_on(cluster, home, small_teacher):
    # long enough for the stop to come before its end, on a busy machine too
    longer = flat(baseline(small_teacher).requested, changed=True) | dict(epochs=10, smoke=False)
    p = plan(make_config(**longer), ON)
    future = in_thread(cluster.execute, p)
    rank = next_rank(future, set())
    stop_all()
    stop_all()
    with pytest.raises(Stopped, match='was stopped before its end'):
        future.result(timeout=600)
    assert RunFolder(p.config.where.study, p.run_id).state()['status'] == 'interrupted'
    assert running([rank]) == []
    assert cluster.execute(p)['run_id'] == p.run_id


@pytest.mark.exhaustive
def test_two_students_at_a_time_make_their_teacher_once(cluster, home, small_teacher):
    students = [
        plan(make_config(**flat(planned(TASK, mode, small_teacher).requested, changed=True)), ON)
        for mode in ('full_student', 'full_kd')
    ]
    said = []
    both = [in_thread(cluster.execute, p, lambda row: None, said.append, 2) for p in students]
    made = [future.result(timeout=600) for future in both]
    assert [record['run_id'] for record in made] == [p.run_id for p in students]
    teacher = students[0].teacher.run_id
    assert sum(text.startswith(f'{teacher} runs on') for text in said) == 1
    assert [record['machine']['jobs'] for record in made] == [2, 2]


def on_two(teacher: Path, mode: str = 'full_student', **more) -> Plan:
    "Two ranks on two machines, for which this one stands."
    asked = flat(planned(TASK, mode, teacher).requested, changed=True)
    place = dict(ranks=2, nodes=2, launcher='ray', rendezvous='local', track='tensorboard')
    return plan(make_config(**asked | place | more), ON)


def ray_workers(run_id: str, number: int) -> list[psutil.Process]:
    "The Ray workers that make a run, once all of them have a rank."
    found = set()
    while len(found) < number:
        agents = {rank.parent() for rank in ranks_of(os.getpid())} - {None}
        found = {p for agent in agents for p in agent.parents() if p.name().startswith('ray::')}
        time.sleep(0.05)
    return sorted(found, key=lambda p: p.pid)


@pytest.mark.exhaustive
def test_a_run_on_two_machines_is_that_of_one(cluster, home, small_teacher, tmp_path_factory):
    p = on_two(small_teacher, 'full_kd', score_every=1)
    folder = RunFolder(p.config.where.study, p.run_id)
    rows = []
    early = []
    said = []

    def on_row(row):
        if row['run_id'] == p.run_id:
            rows.append(row)
            early.append((row['kind'], folder.done, folder.state()['status'], len(folder.rows())))

    record = cluster.execute(p, on_row, said.append)
    assert ('step', False, 'running') in {of[:3] for of in early}, 'rows come while it runs'
    assert early[-1][-1] == len(rows), 'each is on disk before it is told'
    plain = [{k: v for k, v in row.items() if k not in ('study', 'run_id', 'settings')} for row in rows]
    assert plain == folder.rows(), 'each row comes once, from one machine'
    assert list((folder.path / 'tb').glob('events*')), 'track=tensorboard follows its rows here'
    assert record['parallel']['reason'] == '2 ranks on cpu, 2 machines'
    assert any('uses 1 CPU on each of 2 machines' in text for text in said)
    assert len(list(folder.path.glob('log*.txt'))) == 2
    with at_home(tmp_path_factory.mktemp('one')):
        one = execute(on_two(small_teacher, 'full_kd', nodes=1, launcher='local', rendezvous=None))
    assert one['run_id'] == record['run_id'] and one['model_sha256'] == record['model_sha256']
    other = on_two(small_teacher, 'full_kd', score_every=1, study='other')
    assert make_run(other, say=said.append) == record | dict(study='other')
    assert said[-1].endswith("was made in study 'small' already")


@pytest.mark.exhaustive
def test_more_machines_than_the_cluster_has(cluster, home, small_teacher):
    p = on_two(small_teacher, ranks=8, nodes=8)
    with pytest.raises(RunError, match='needs 8 x 1 CPU, and the cluster at local has 2 of them'):
        cluster.execute(p)
    assert RunFolder(p.config.where.study, p.run_id).state() is None and ranks_of(os.getpid()) == []


# no smoke run, which ends after six steps: long enough for what comes before its end, on a busy machine too
LONG = dict(smoke=False, epochs=20, student_init='teacher_pretrained', checkpoint_steps=20)


@pytest.mark.exhaustive
def test_when_a_machine_is_lost_the_run_ends_and_the_same_call_goes_on(cluster, home, small_teacher):
    p = on_two(small_teacher, **LONG)
    steps = Event()
    future = in_thread(cluster.execute, p, lambda row: row['kind'] == 'checkpoint' and steps.set())
    workers = ray_workers(p.run_id, 2)
    assert steps.wait(400)
    ranks = ranks_of(os.getpid())
    workers[1].kill()
    with pytest.raises(RunError, match='WorkerCrashedError of Ray') as lost:
        future.result(timeout=400)
    folder = RunFolder(p.config.where.study, p.run_id)
    assert lost.value.cause == folder.state()['cause'] == 'killed' and folder.state()['status'] == 'failed'
    assert running(ranks) == []
    record = cluster.execute(p)
    assert record['run_id'] == p.run_id and record['resumed_at'], 'the newest checkpoint was found'


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
from kdnotes.cli import main
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
for more in range(int(sys.argv[1])):
    cluster.add_node(num_cpus=1)
code = main([*sys.argv[2:], '-p', f'rendezvous={cluster.address}'])
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize('more', [1, 0])
def test_machines_of_a_cluster_that_runs(more, home, small_teacher):
    "Two nodes of Ray, each of which takes one of the machines; with one node it is refused without a wait."
    pytest.importorskip('ray', reason='Ray is not installed')
    given = dict(task=TASK, teacher=small_teacher, max_length=32, student_layers=1, ranks=2)
    given |= dict(threads_per_rank=1, nodes=2, launcher='ray', student_init='teacher_pretrained')
    asked = [part for name, value in given.items() for part in ('-p', f'{name}={value}')]
    with tempfile.TemporaryDirectory(prefix='ray-') as short:  # names of sockets must be short
        made = subprocess.run(
            [sys.executable, '-c', TWO_NODES, str(more), 'run', '--mode', 'full_student', '--smoke', *asked],
            cwd=home,
            env=surroundings(home, TMPDIR=short, RAY_TMPDIR=short, RAY_AUTH_TOKEN=secrets.token_hex(32)),
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=600,
        )
    records = [json.loads(path.read_text()) for path in home.glob('runs/*/*/record.json')]
    if more:
        assert made.returncode == 0, made.stderr
        assert [r['parallel']['reason'] for r in records] == ['2 ranks on cpu, 2 machines']
    else:
        assert made.returncode == 1 and records == []
        assert 'needs 2 x 1 CPU, and the cluster at ' in made.stderr
        assert 'has 1 of them' in made.stderr and made.stderr.count('\n') == 1


def command(
    home: Path, teacher: Path, *more: str, place: dict | None = None, smoke: bool = True, **variables: str
) -> subprocess.Popen:
    "A study with a Ray of its own; `place`: where its ranks are."
    given = dict(task=TASK, teacher=teacher, max_length=32, ranks=1, threads_per_rank=1)
    given |= place or {}
    asked = [part for name, value in given.items() for part in ('-p', f'{name}={value}')]
    return subprocess.Popen(
        [sys.executable, '-m', 'kdnotes', 'study', *['--smoke'] * smoke, '--study', 'small', *asked, *more],
        cwd=home,
        env=surroundings(home, **variables),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def records_of(home: Path) -> dict[str, dict]:
    found = (json.loads(path.read_text()) for path in home.glob('runs/small*/*/record.json'))
    return {record['run_id']: record for record in found}


@pytest.mark.exhaustive
@pytest.mark.parametrize('machines', [1, 2])
def test_ctrl_c_leaves_no_process_and_the_same_command_makes_the_rest(machines, home, small_teacher):
    arm = ('--arms', 'parallel_baseline', '-p', 'epochs=10')  # long enough for Ctrl-C to come before its end
    place = dict(ranks=2, nodes=2, launcher='ray', rendezvous='local') if machines == 2 else {}
    asked = (home, small_teacher, '--seeds', '1', *arm, *(() if place else ('--ray', 'local')))
    study = command(*asked, place=place, smoke=False)
    while study.poll() is None and not ranks_of(study.pid):
        time.sleep(0.05)
    started = descendants(study.pid)
    os.killpg(study.pid, signal.SIGINT)  # as a terminal does
    said, errors = study.communicate(timeout=300)
    assert study.returncode == 75, errors
    assert 'Traceback' not in errors
    psutil.wait_procs(started, timeout=60)
    assert running(started) == []
    study = command(*asked, place=place, smoke=False)
    said, errors = study.communicate(timeout=900)
    assert study.returncode == 0 and len(records_of(home)) == 1, errors


@pytest.mark.exhaustive
def test_a_machine_without_memory_ends_a_run_once(home, small_teacher):
    "Ray ends a worker of a machine whose memory is used so far; it would start the task again without end."
    asked = (home, small_teacher, '--seeds', '1', '--arms', 'parallel_baseline', '--ray', 'local')
    study = command(*asked, RAY_memory_usage_threshold='0.01')
    said, errors = study.communicate(timeout=600)
    assert study.returncode == 1, errors
    assert 'OutOfMemoryError of Ray' in errors
    [state] = home.glob('runs/small-smoke/parallel_baseline-*/state.json')
    assert json.loads(state.read_text())['cause'] == 'memory' and records_of(home) == {}

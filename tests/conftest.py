"""What every test needs: the environment's own commands, a home of the tests' own, the real corpora where
there are any, and a share of the tests on request.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
import pytest
from kdnotes.core.files import own_home

ROOT = Path(__file__).resolve().parents[1]
for variable in ('MAKEFLAGS', 'MFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES'):
    os.environ.pop(variable, None)  # `make test-rest SHARE=2/5` would hand SHARE to every make of a test
os.environ.pop('VIRTUAL_ENV', None)  # IPython would mix in the packages of an environment named here
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # threads that wait leave the cores to other tests
os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')])
# absolute, for tests change the folder they run in; workers inherit KDNOTES_DATA as `own_home` leaves it
GIVEN = Path(os.environ.get('KDNOTES_DATA') or ROOT.parent / 'shared' / 'data').resolve()
CORPORA = Path(os.environ.setdefault('KDNOTES_TESTS_CORPORA', str(GIVEN)))
for number in (signal.SIGINT, signal.SIGHUP):  # a job in the background has them ignored, and hands that on
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
own_home()  # before any test, and what it starts, looks for runs, corpora or models

# Files that take longest begin first, so that no worker is left alone with one at the end; the others follow
# by name.
LONGEST = (
    'test_notebooks.py',
    'test_golden.py',
    'test_thesis.py',
    'test_machines.py',
    'test_tuning.py',
    'test_cluster.py',
    'test_stopping.py',
    'test_search.py',
)


@pytest.fixture(scope='session')
def project() -> Path:
    "The checkout."
    return ROOT


@pytest.fixture(scope='session')
def real_corpora() -> Path:
    "The folder of the real corpora."
    if not CORPORA.is_dir():
        pytest.skip('no real corpora here: KDNOTES_DATA names no folder')
    return CORPORA


@pytest.fixture
def corpora(real_corpora, monkeypatch) -> Path:
    "The same, where the library looks for it: in this test."
    monkeypatch.setenv('KDNOTES_DATA', str(real_corpora))
    return real_corpora


@pytest.fixture(scope='session')
def small_home(tmp_path_factory) -> Path:
    "Where the runs of `small_run` are."
    return tmp_path_factory.mktemp('small')


@pytest.fixture(scope='session')
def small_teacher(small_home) -> Path:
    "A random model of two layers that reads words as MiniLM does."
    from small_runs import small_model

    return small_model(small_home / 'teacher')


@pytest.fixture
def small_run(small_home, small_teacher, monkeypatch):  # (task, mode) -> run_id
    "Makes a small finished run, once in a session; KDNOTES_HOME is where it is."
    from small_runs import make_small_run

    monkeypatch.setenv('KDNOTES_HOME', str(small_home))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    return lambda task, mode='baseline': make_small_run(task, mode, small_teacher)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    "The test's own folder, where runs and caches go; no real hub is asked."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    return tmp_path


@pytest.fixture
def rank_here(monkeypatch):
    "Runs of one rank are trained by the test's own process."
    from small_runs import train_here

    train_here(monkeypatch)


@pytest.fixture(autouse=True)
def _subnormal_numbers():
    "A training on a CPU flushes them to zero in its process: tests that follow have them again."
    yield
    if torch := sys.modules.get('torch'):
        torch.set_flush_denormal(False)


def pytest_addoption(parser):
    parser.addoption(
        '--share',
        metavar='K/N',
        help='only the K-th of N shares of the chosen tests, K from 0; a test belongs to a share by its name',
    )


def share_of(
    name: str,  # a test's node id
    n: int,  # shares
) -> int:  # in [0, n), the same on every machine
    "The share a test belongs to."
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % n


def read_share(text: str) -> tuple[int, int]:
    "K and N."
    k, slash, n = text.partition('/')
    if not (slash and k.isdigit() and n.isdigit() and int(k) < int(n)):
        raise pytest.UsageError(f'--share {text}: it must be K/N with 0 <= K < N, as 2/5')
    return int(k), int(n)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if not (text := config.getoption('--share')):
        return
    k, n = read_share(text)
    others = [item for item in items if share_of(item.nodeid, n) != k]
    items[:] = [item for item in items if share_of(item.nodeid, n) == k]
    config.hook.pytest_deselected(items=others)

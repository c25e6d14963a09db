"What every test needs: the environment's own commands, and the real corpora where there are any."
import os, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.pop('VIRTUAL_ENV', None)  # IPython would mix in the packages of an environment named here
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')])
# absolute, for tests change the folder they run in
if data := os.environ.get('KDNOTES_DATA'): os.environ['KDNOTES_DATA'] = str(Path(data).resolve())
elif (ROOT.parent / 'shared' / 'data').is_dir(): os.environ['KDNOTES_DATA'] = str(ROOT.parent / 'shared' / 'data')

@pytest.fixture(scope='session')
def project() -> Path:
    "The checkout."
    return ROOT

@pytest.fixture(scope='session')
def corpora() -> Path:
    "The folder of the real corpora."
    folder = os.environ.get('KDNOTES_DATA')
    if not folder or not Path(folder).is_dir(): pytest.skip('no real corpora here: KDNOTES_DATA names no folder')
    return Path(folder)

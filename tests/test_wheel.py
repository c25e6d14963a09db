"A wheel holds all that the package needs: it trains and reports outside of a checkout, without a network."

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> Path:
    "The wheel, unpacked into a folder of its own."
    if find_spec('setuptools') is None or find_spec('pip') is None:
        pytest.skip('setuptools and pip build a wheel')
    folder = tmp_path_factory.mktemp('wheel')
    source = folder / 'source'
    source.mkdir()
    for name in ('pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / 'kdnotes', source / 'kdnotes', ignore=shutil.ignore_patterns('__pycache__'))
    command = [sys.executable, '-m', 'pip', 'wheel', '.', '--no-deps', '--no-build-isolation', '--no-index']
    subprocess.run([*command, '-q', '-w', str(folder)], cwd=source, check=True, capture_output=True)
    [wheel] = folder.glob('kdnotes-*.whl')
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / 'site')
    return folder / 'site'


def called(site: Path, home: Path, *command: str) -> str:
    "What a command prints that imports the wheel's package."
    hidden = ('KDNOTES_HOME', 'KDNOTES_DATA', 'PYTHONPATH')
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= dict(PYTHONPATH=str(site), HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES='')
    done = subprocess.run(
        [sys.executable, *command], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_all_files_of_the_package_are_in_the_wheel(site):
    listed = subprocess.run(
        ['git', 'ls-files', 'kdnotes'], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert [name for name in listed if (ROOT / name).exists() and not (site / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_wheel_trains_alone(site, small_teacher, tmp_path):
    assert called(site, tmp_path, '-c', 'import kdnotes; print(kdnotes.__file__)').startswith(str(site))
    given = ['--corpus', 'embedded', '--smoke', '--teacher', str(small_teacher), '-p', 'student_layers=1']
    run = ['-m', 'kdnotes', 'run', '--mode', 'mixed_kd', *given, '-p', 'max_length=32', '--json']
    record = json.loads(called(site, tmp_path, *run))
    assert (tmp_path / 'runs' / record['study'] / record['run_id'] / 'model').is_dir(), (
        'in the folder one is in'
    )
    called(site, tmp_path, '-m', 'kdnotes', 'report', record['study'], '--no-pdf')
    assert (tmp_path / 'runs' / record['study'] / 'report.html').is_file()
    asked = ['--question', 'What is salt?', '--candidate', 'It is white.', '--candidate', 'No.']
    assert 'It is white.' in called(site, tmp_path, '-m', 'kdnotes', 'predict', record['run_id'], *asked)

"""Lessons and tests find and touch nothing of a user's: neither runs of the same names, finished or damaged,
nor corpora, caches or models of the hub.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
import pytest
from handmade import make_record, write_run
from kinds import one_of_each
from notebooks import contents
from kdnotes.experiment.study_plan import plan_study
from kdnotes.results.runs import RunFolder

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted(p for p in (ROOT / 'nbs').rglob('[0-9][0-9]_*.ipynb') if '.ipynb_checkpoints' not in p.parts)
# what a home is made of comes before it
BEFORE = (
    'core/00_arms',
    'core/01_config',
    'core/03_machine',
    'core/05_resolve',
    'core/06_run_id',
    'core/07_files',
)
# quick ones that look for runs and evidence; `make test-all` takes all
QUICK = (
    'experiment/06_launch',
    'results/06_overview',
    'experiment/18_study',
)


def damage(folder: RunFolder, kind: int) -> None:
    "Leave a run as a full disk or a hand would."
    if kind == 0:
        (folder.path / 'record.json').write_text('{"schema": ')
    elif kind == 1:
        (folder.path / 'record.json').unlink()
        (folder.path / 'state.json').write_text('{"status": "run')
    else:
        (folder.path / 'model' / 'config.json').write_text('[]')


def fill(home: Path) -> None:
    "Runs of the names that lessons plan, every fourth of them finished."
    plans = [p for plan in plan_study(1, 'all', corpus='embedded') for p in (plan.teacher, plan)]
    for i, run_id in enumerate(sorted({p.run_id for p in plans if p})):
        mode, seed = run_id.split('-s')[0], int(run_id.split('-s')[1].split('-')[0])
        folder = write_run(make_record(mode, seed, study='embedded') | dict(run_id=run_id))
        (folder.path / 'model').mkdir()
        (folder.path / 'model' / 'config.json').write_text(json.dumps(dict(model_type='bert')))
        (folder.path / 'model' / 'model.safetensors').write_bytes(b'no weights')
        if i % 4 and mode != 'baseline':
            damage(folder, i % 4 - 1)
    cache = home / 'runs' / '.cache' / 'tokens' / 'a.tokens'
    cache.mkdir(parents=True)
    (cache / 'values').write_bytes(b'torn')


@pytest.fixture(scope='module')
def user(tmp_path_factory) -> Path:
    "A user's folder: a checkout with runs, a home with more of them, corpora that are none, and a cache."
    folder = tmp_path_factory.mktemp('user')
    checkout = folder / 'checkout'
    shutil.copytree(ROOT / 'nbs', checkout / 'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    for name in ('kdnotes', 'thesis', 'tests'):
        (checkout / name).symlink_to(ROOT / name)
    for name in ('settings.ini', 'pyproject.toml'):
        shutil.copy(ROOT / name, checkout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(checkout))
        fill(checkout)
    shutil.copytree(checkout / 'runs', folder / 'home' / 'runs')
    hub = folder / '.cache' / 'huggingface' / 'hub' / 'models--bert-base-uncased'
    hub.mkdir(parents=True)
    (hub / 'refs').write_text('no folder')
    (folder / 'data' / 'wikiqa').mkdir(parents=True)
    (folder / 'data' / 'wikiqa' / 'WikiQA-train.tsv').write_text('no table')
    return folder


def what_nbdev_says(user: Path, pattern: str, **more: str) -> str:
    "What nbdev_test says of notebooks when that user calls it."
    own = ('KDNOTES_HOME', 'XDG_CACHE_HOME', 'HF_HOME')
    surroundings = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run(
        [Path(sys.executable).parent / 'nbdev_test', '--path', pattern, '--n_workers', '0'],
        cwd=user / 'checkout',
        env=surroundings | dict(HOME=str(user), KDNOTES_DATA=str(user / 'data')) | more,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return done.stdout + done.stderr


def theirs(user: Path) -> dict[str, str]:
    "What a user has; matplotlib's list of fonts is the machine's."
    places = ('checkout/runs', 'checkout/thesis/data', 'home', 'data', '.cache/huggingface')
    return {place: contents(user / place) for place in places}


@pytest.mark.exhaustive
@pytest.mark.parametrize('home', one_of_each(['named', 'beside the checkout']))
def test_lessons_beside_finished_and_damaged_runs(user, home):
    before = theirs(user)
    more = dict(KDNOTES_HOME=str(user / 'home')) if home == 'named' else {}
    for name in QUICK[1:2] if home == 'named' else QUICK[::2]:
        assert 'Success.' in what_nbdev_says(user, f'nbs/{name}.ipynb', **more), name
    assert theirs(user) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize('home', ['beside the checkout', 'named'])
def test_all_lessons_beside_finished_and_damaged_runs(user, home):
    before = theirs(user)
    more = dict(KDNOTES_HOME=str(user / 'home')) if home == 'named' else {}
    assert 'Success.' in (said := what_nbdev_says(user, 'nbs', **more)), said
    assert theirs(user) == before


def test_a_notebook_has_a_home_before_it_imports_anything():
    own = ['#| hide\nfrom kdnotes.core.files import own_home', '#| hide\nown_home();']
    for path in LIBRARY:
        code = [c for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
        if path.relative_to(ROOT / 'nbs').with_suffix('').as_posix() not in BEFORE:
            found = [''.join(c['source']) for c in code[1:3]]
            assert found == own, f"{path}: copy the two cells after another notebook's `default_exp`"


def test_this_test_has_a_home_too():
    for name in ('KDNOTES_HOME', 'KDNOTES_DATA', 'XDG_CACHE_HOME'):
        assert 'kdnotes-lessons-' in os.environ[name]

"""The parameter `track`: runs, studies and searches in trackers, by the real clients in their off-line
modes; a tracker that fails ends nothing.
"""

import sys
from functools import partial
from importlib.util import find_spec
import numpy as np
import pandas as pd
import pytest
import kdnotes as kd
from kdnotes.core.config import ConfigError
from kdnotes.core.files import runs_path
from kdnotes.experiment.launch import figures_of
from kdnotes.results.runs import RunFolder
from kdnotes.results.tracking import TRACKERS, Comet, Outcome
from test_api import COLUMNS, questions
from tracker_files import READERS, pixels


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    return tmp_path_factory.mktemp('trackers')


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('COMET_START_ONLINE', '0')
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    for name in ('MLFLOW_TRACKING_URI', 'WANDB_PROJECT', 'COMET_API_KEY'):
        monkeypatch.delenv(name, raising=False)


def need(package: str) -> None:
    "Skip a test without a client; it is not imported here, which would be before kdnotes has set it up."
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'kdnotes[track]'")


@pytest.fixture(params=TRACKERS)
def track(request):
    "Each tracker whose client is installed."
    need(dict(comet='comet_ml').get(request.param, request.param))
    return request.param


def small(**more):
    return dict(smoke=True, study='trackers', max_length=32, ranks=1, say=lambda text: None) | more


@pytest.fixture(scope='module')
def data(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(home))
        return kd.load_data(questions(), columns=COLUMNS)


@pytest.fixture
def small_study(data, small_teacher, rank_here):
    "Makes the runs when it is called first, and then only compares them."
    given = small(student_layers=[1], teacher=str(small_teacher), study='tracked')
    return partial(kd.study, data, 1, 'baseline,full_student', **given)


@pytest.fixture
def small_search(data, small_teacher, rank_here):
    "Makes the trials when it is called first."
    given = small(study='searched', teacher_mode='baseline', teacher=str(small_teacher), front_seeds=0)
    space = dict(layers=[1, 2], learning_rate=[1e-4, 1e-2, 'log'])
    return partial(kd.search, data, n_trials=3, space=space, threshold='none', **given)


def same_table(read: pd.DataFrame, written: pd.DataFrame) -> None:
    "Cells are equal, numbers as numbers: a file may hold them as texts."
    assert list(read.columns) == [str(c) for c in written.columns] and len(read) == len(written)
    for name in written.columns:
        if pd.api.types.is_numeric_dtype(written[name]):
            values = pd.to_numeric(read[str(name)], errors='coerce').astype(float)
            np.testing.assert_allclose(values, written[name].astype(float))


@pytest.mark.slow
def test_a_run_is_there_with_its_rows_its_metrics_and_its_figure(data, small_teacher, rank_here, track):
    said = []
    seed = [*TRACKERS].index(track)
    run = kd.finetune(data, small_teacher, track=track, **small(seed=seed, say=said.append))
    assert not [text for text in said if 'track=' in text]
    entry = READERS[track](run.folder.path)
    record = run.record
    if track != 'tensorboard':  # which names a run by its folder
        assert entry.name == run.run_id
        assert str(entry.settings['batch_size']) == str(record['settings']['batch_size'])
    rows = run.folder.rows('step')
    assert [v for _, v in entry.curves['loss']] == pytest.approx([row['loss'] for row in rows])
    assert [step for step, _ in entry.curves['loss']] == [row['step'] for row in rows]
    for where, metrics in record['metrics'].items():
        for name, value in metrics.items():
            if value is not None:
                assert entry.last(f'run/metrics/{where}/{name}') == pytest.approx(value)
    drawn = figures_of(record)
    assert {*drawn} == {*entry.figures} == {'curves'}
    np.testing.assert_array_equal(entry.figures['curves'], pixels(drawn['curves']))


@pytest.mark.slow
def test_a_study_is_one_more_run_with_intervals_tables_and_figures(small_study, track):
    said = []
    made = small_study(track=track, say=said.append)
    assert not [text for text in said if 'track=' in text]
    folder = runs_path() / made.report.study
    entry = READERS[track](folder)
    if track != 'tensorboard':
        assert entry.name == made.report.study
        assert str(entry.settings['seeds']) == '1'
    primary = kd.load_run(made.plans[0].run_id).record['primary']
    for arm, values in made.report.values.items():
        for name, interval in values.items():
            tag = f'{arm}/{primary["set"]}/{primary["metric"]}' if name == 'primary' else f'{arm}/{name}'
            assert entry.last(f'{tag}/mean') == pytest.approx(interval.estimate)
            if interval.low is not None:
                assert entry.last(f'{tag}/high') == pytest.approx(interval.high)
    same_table(entry.tables['comparisons'], made.report.numbers)
    same_table(entry.tables['results'], made.report.results)
    assert len(entry.tables['arms']) == len(made.report.arms) == 2
    assert {*entry.figures} == {figure.name for figure in made.figures if figure.path}
    assert all(image.std() > 0 for image in entry.figures.values())


@pytest.mark.slow
def test_a_search_is_one_more_run_with_its_trials_and_its_front(small_search, track):
    said = []
    found = small_search(track=track, say=said.append)
    assert not [text for text in said if 'track=' in text]
    entry = READERS[track](runs_path() / found.study)
    if track != 'tensorboard':
        assert entry.name == found.study and str(entry.settings['n_trials']) == '3'
    for objective in found.objectives:
        values = [t.values[objective.name] for t in found.trials]
        read = dict(entry.curves[f'trial/{objective.name}'])
        assert [read[t.number] for t in found.trials] == pytest.approx(values)
    assert entry.last('search/front') == len(found.front)
    assert list(map(str, entry.tables['trials']['run_id'])) == [t.run_id for t in found.trials]
    assert len(entry.tables['front'])
    assert 'search_front' in entry.figures


def broken(method: str):
    "A tracker of which one method fails."

    class Broken:
        def __init__(self, folder, name, settings):
            if method == '__init__':
                raise ConnectionError('no network')

        def log(self, row, values, step):
            if method == 'log':
                raise SystemExit('no network')

        def finish(self, outcome):
            raise ConnectionError('no network')

    return Broken


@pytest.mark.slow
@pytest.mark.parametrize('method', ['__init__', 'log', 'finish'])
def test_a_tracker_that_fails_ends_no_run(data, small_teacher, rank_here, monkeypatch, method):
    monkeypatch.setitem(TRACKERS, 'tensorboard', broken(method))
    need('tensorboard')
    said = []
    seed = 10 + ['__init__', 'log', 'finish'].index(method)
    run = kd.finetune(data, small_teacher, track='tensorboard', **small(seed=seed, say=said.append))
    kind = 'SystemExit' if method == 'log' else 'ConnectionError'
    assert [text for text in said if 'track=' in text] == [
        f'track=tensorboard failed for {run.run_id} ({kind}: no network); it continues without this tracker'
    ]
    assert run.folder.record() == run.record


@pytest.mark.slow
def test_a_tracker_that_fails_ends_no_study_and_no_search(small_study, small_search, monkeypatch):
    need('tensorboard')
    monkeypatch.setitem(TRACKERS, 'tensorboard', broken('__init__'))
    for work, name in ((small_study, 'tracked-smoke'), (small_search, 'searched-smoke')):
        said = []
        assert work(track='tensorboard', say=said.append) is not None
        assert said[-1].startswith(f'track=tensorboard failed for {name} (ConnectionError: no network)')


@pytest.mark.slow
def test_a_study_that_is_repeated_is_the_same_run_of_mlflow(small_study):
    mlflow = pytest.importorskip('mlflow', reason="mlflow is not installed: pip install 'kdnotes[track]'")
    for _ in range(2):
        made = small_study(track='mlflow')
    client = mlflow.MlflowClient((runs_path() / '.mlflow').as_uri())
    experiment = client.get_experiment_by_name(made.report.study)
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_name for run in runs].count(made.report.study) == 1


def test_two_experiments_of_comet_at_a_time_do_not_end_each_other(tmp_path):
    need('comet_ml')
    names = ('one', 'two')
    folders = [RunFolder('study', name, tmp_path / name) for name in names]
    open_ = [Comet(folder, folder.run_id, {}) for folder in folders]
    for step in range(3):
        for n, tracker in enumerate(open_):
            tracker.log({}, dict(loss=10.0 * n + step), step)
    for tracker in open_:
        tracker.finish(Outcome({}))
    read = [READERS['comet'](folder.path) for folder in folders]
    assert [entry.name for entry in read] == [*names]
    assert [[v for _, v in entry.curves['loss']] for entry in read] == [[0, 1, 2], [10, 11, 12]]
    key = {path.name.partition('-')[0] for path in folders[0].path.glob('comet/*.zip')}
    again = Comet(folders[0], 'one', {})
    again.finish(None)
    assert {path.name.partition('-')[0] for path in folders[0].path.glob('comet/*.zip')} == key


@pytest.mark.slow
def test_a_finished_run_is_not_logged_and_a_tracker_names_no_run(data, small_teacher, rank_here):
    need('tensorboard')
    plain = kd.finetune(data, small_teacher, **small(seed=30))
    assert not (plain.folder.path / 'tb').exists()
    again = kd.finetune(data, small_teacher, track='tensorboard', **small(seed=30))
    assert again.run_id == plain.run_id and not (again.folder.path / 'tb').exists(), 'it was done already'


@pytest.mark.parametrize('name, package', [('wandb', 'wandb'), ('comet', 'comet_ml')])
def test_a_package_that_is_missing_is_named_before_anything_starts(
    data, small_teacher, monkeypatch, name, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"track={name} needs {package}, .* pip install 'kdnotes\[track\]'"
    ):
        kd.finetune(data, small_teacher, track=name, **small(seed=6))


@pytest.mark.slow
def test_a_callback_that_fails_costs_no_run(data, small_teacher, rank_here):
    said = []

    def on_row(row):
        raise ConnectionError('the server is away')

    given = small(seed=40, ranks=1, say=said.append)
    run = kd.finetune(data, small_teacher, on_row=on_row, **given)
    assert [line for line in said if 'ConnectionError: the server is away' in line] == [
        f'on_row failed for a row of kind start of {run.run_id} (ConnectionError: the server is away); the '
        'run goes on, and rows.jsonl in its folder has every row'
    ]
    assert run.folder.rows('end') and run.folder.record() == run.record


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_study_hands_on_the_rows_of_all_its_runs_and_co2_is_null_without_an_energy(data, home):
    rows = []
    made = kd.study(data, 1, 'baseline,full_student', on_row=rows.append, **small(grid_g_per_kwh=400.0))
    planned = {p.run_id for p in made.plans}
    assert {r['run_id'] for r in rows if r['kind'] == 'end'} == planned
    starts = [r for r in rows if r['kind'] == 'start']
    assert {r['settings']['network'] for r in starts} == {'teacher', 'student'}
    for run_id in planned:
        record = kd.load_run(run_id).record
        energy = record['energy']
        assert energy['grid_g_per_kwh'] == 400.0
        if energy['device_j'] is None:
            assert energy['co2_g'] is None and 'no energy was measured' in record['reasons']['energy.co2_g']
        else:
            assert energy['co2_g'] == pytest.approx(energy['device_j'] / 3.6e6 * 400.0)
        on_disk = kd.load_run(run_id).folder.rows()
        handed = [r for r in rows if r['run_id'] == run_id]
        assert [r['kind'] for r in handed] == [r['kind'] for r in on_disk]

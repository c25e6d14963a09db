"""The parameter `track`: a run's rows and record in TensorBoard, Weights & Biases and MLflow, which "
"cost no run."""

import sys
from types import ModuleType, SimpleNamespace
import pytest
import kdnotes as kd
from kdnotes.core.config import ConfigError
from test_api import COLUMNS, questions


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    return tmp_path_factory.mktemp('trackers')


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')


def small(**more):
    return dict(smoke=True, study='trackers', max_length=32, say=lambda text: None) | more


@pytest.fixture(scope='module')
def data(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(home))
        return kd.load_data(questions(), columns=COLUMNS)


class FakeWandb(ModuleType):
    "What is used of wandb, remembered."

    def __init__(self):
        super().__init__('wandb')
        self.runs = {}

    def init(self, **given):
        logged = []
        run = SimpleNamespace(given=given, logged=logged, summary={}, ended=None)
        run.log = lambda values, step: logged.append((step, values))
        run.finish = lambda exit_code: setattr(run, 'ended', exit_code)
        self.runs[given['id']] = run
        return run


@pytest.mark.slow
def test_wandb_has_one_run_for_each_run_of_a_study(data, small_teacher, rank_here, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', wandb := FakeWandb())
    given = small(ranks=1, student_layers=[1], teacher=str(small_teacher), track='wandb', study='tracked')
    made = kd.study(data, 1, 'baseline,full_student', **given)
    assert set(wandb.runs) == {p.run_id for p in made.plans}
    for p in made.plans:
        run = wandb.runs[p.run_id]
        record = kd.load_run(p.run_id).record
        assert (run.given['name'], run.given['group'], run.ended) == (p.run_id, 'tracked-smoke', 0)
        assert run.given['config'] == record['settings']
        rows = kd.load_run(p.run_id).folder.rows('step')
        losses = {step: values['loss'] for step, values in run.logged if 'loss' in values}
        assert losses == {row['step']: row['loss'] for row in rows}
        primary = record['primary']
        assert run.summary[f"run/metrics/{primary['set']}/{primary['metric']}"] == primary['value']


@pytest.mark.slow
def test_wandb_itself_writes_the_run_when_it_is_offline(data, small_teacher, rank_here, monkeypatch):
    pytest.importorskip('wandb', reason="wandb is not installed: pip install 'kdnotes[track]'")
    monkeypatch.setenv('WANDB_MODE', 'offline')
    run = kd.finetune(data, small_teacher, track='wandb', **small(seed=5, ranks=1))
    assert [*run.folder.path.glob(f'wandb/offline-run-*/run-{run.run_id}.wandb')]


@pytest.mark.slow
def test_mlflow_has_the_settings_and_every_number_of_student_and_teacher(
    data, small_teacher, rank_here, home, monkeypatch
):
    mlflow = pytest.importorskip('mlflow', reason="mlflow is not installed: pip install 'kdnotes[track]'")
    monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    said = []
    given = small(
        seed=1, ranks=1, student_layers=[1], teacher_mode='baseline', track='mlflow', say=said.append
    )
    student = kd.distil(data, small_teacher, **given)
    assert not [text for text in said if 'track=' in text]
    client = mlflow.MlflowClient((home / 'runs/.mlflow').as_uri())
    experiment = client.get_experiment_by_name(student.record['study'])
    tracked = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(tracked) == {student.run_id, student.record['teacher_run_id']}
    run = tracked[student.run_id]
    assert run.info.status == 'FINISHED'
    assert run.data.params['batch_size'] == str(student.record['settings']['batch_size'])
    primary = student.record['primary']
    assert run.data.metrics[f"{primary['set']}/{primary['metric']}"] == pytest.approx(primary['value'])
    losses = client.get_metric_history(run.info.run_id, 'loss/total')
    assert [m.value for m in losses] == [r['loss'] for r in student.folder.rows('step')]


@pytest.mark.slow
def test_tensorboard_is_written_when_it_is_asked_for_and_names_no_other_run(data, small_teacher, rank_here):
    pytest.importorskip('tensorboard', reason='tensorboard is optional')
    plain = kd.finetune(data, small_teacher, **small(seed=3, ranks=1))
    assert not (plain.folder.path / 'tb').exists()
    run = kd.finetune(data, small_teacher, track='tensorboard', **small(seed=4, ranks=1))
    assert [*(run.folder.path / 'tb').glob('events*')]
    again = kd.finetune(data, small_teacher, track='tensorboard', **small(seed=3, ranks=1))
    assert again.run_id == plain.run_id and not (again.folder.path / 'tb').exists(), 'it was done already'


def test_a_package_that_is_missing_is_named_before_anything_starts(data, small_teacher, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(ConfigError, match=r"track=wandb needs wandb, .* pip install 'kdnotes\[track\]'"):
        kd.finetune(data, small_teacher, track='wandb', **small(seed=6))


@pytest.mark.slow
def test_a_tracker_that_breaks_costs_no_run(data, small_teacher, rank_here, monkeypatch):
    wandb = FakeWandb()

    def broken(**given):
        raise ConnectionError('no network')

    wandb.init = broken
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    said = []
    run = kd.finetune(data, small_teacher, track='wandb', **small(seed=7, ranks=1, say=said.append))
    assert [text for text in said if 'track=' in text] == [
        f'track=wandb failed for {run.run_id} (ConnectionError: no network); the run goes on without it'
    ]


@pytest.mark.slow
def test_a_callback_that_fails_costs_no_run(data, small_teacher, rank_here):
    said = []

    def on_row(row):
        raise ConnectionError('the server is away')

    given = small(seed=2, ranks=1, say=said.append)
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

"""A run's rows in the trackers that the how-to names, with its own code; and in TensorBoard's HParams."""

import re
import nbformat
import pytest
import kdnotes as kd
from notebooks import ROOT
from test_api import COLUMNS, questions

HOW_TO = ROOT / 'nbs/howto/trackers.ipynb'


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    return tmp_path_factory.mktemp('trackers')


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')


def example(title):
    "The Python under a heading of the how-to, its last line, which trains, left out."
    cells = [c.source for c in nbformat.read(HOW_TO, 4).cells if c.source.startswith(f'## {title}')]
    [code] = re.findall(r'```python\n(.*?)```', cells[0], re.S)
    *lines, last = code.strip().splitlines()
    assert last.startswith('student = kd.distil(')
    return '\n'.join(lines)


def small(**more):
    return dict(smoke=True, study='trackers', max_length=32, say=lambda text: None) | more


@pytest.fixture(scope='module')
def data(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(home))
        return kd.load_data(questions(), columns=COLUMNS)


@pytest.mark.exhaustive
def test_mlflow_has_the_settings_and_every_number_of_student_and_teacher(
    data, small_teacher, rank_here, tmp_path, monkeypatch
):
    mlflow = pytest.importorskip('mlflow', reason="mlflow is not installed: pip install 'kdnotes[trackers]'")
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    mlflow.set_tracking_uri((tmp_path / 'store').as_uri())
    shell = {}
    exec(example('MLflow'), shell)
    given = small(seed=1, ranks=1, student_layers=[1], teacher_mode='baseline')
    student = kd.distil(data, small_teacher, on_row=shell['to_mlflow'], **given)
    tracked = {run.info.run_name: run for run in mlflow.search_runs(output_format='list')}
    assert set(tracked) == {student.run_id, student.record['teacher_run_id']}
    run = tracked[student.run_id]
    assert run.data.params['batch_size'] == str(student.record['settings']['batch_size'])
    primary = student.record['primary']
    assert run.data.metrics[f"{primary['set']}/{primary['metric']}"] == pytest.approx(primary['value'])
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, 'loss')
    assert [m.value for m in losses] == [r['loss'] for r in student.folder.rows('step')]


@pytest.mark.slow
def test_a_tracker_that_fails_costs_no_run(data, small_teacher, rank_here):
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

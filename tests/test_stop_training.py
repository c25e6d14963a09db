"""A callback that stops a training: the run is interrupted, has no result, and is resumed exactly."""

import pytest
import kdnotes as kd
from kdnotes.core.processes import Stopped
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_record

QUIET = dict(say=lambda text: None)


@pytest.fixture
def data(home):
    words = ('red', 'blue')
    rows = [dict(text=f'thing number {i} is {words[i % 2]}', label=words[i % 2]) for i in range(120)]
    return kd.load_data(rows, task='text_classification', **QUIET)


def train(data, teacher, **more):
    "Some 300 steps: seconds, so that a stop comes before the end."
    given = dict(batch_size=4, epochs=12, max_length=32, ranks=1, threads_per_rank=1, study='stopped')
    return kd.finetune(data, teacher, **QUIET | given | more)


@pytest.mark.slow
def test_a_stopped_training_has_no_result_and_goes_on_to_the_same_weights(
    data, small_teacher, monkeypatch, home
):
    rows = []

    def stop(row):
        rows.append(row)
        if row['kind'] == 'step' and row['step'] > 1:
            raise kd.StopTraining('the loss is good enough')

    with pytest.raises(kd.StopTraining) as error:
        train(data, small_teacher, on_row=stop)
    run_id = rows[-1]['run_id']
    text = str(error.value)
    assert text.startswith(f'{run_id} was stopped by on_row: the loss is good enough; it has no result')
    assert 'the same call without this stop goes on from step' in text
    assert error.value.reason == 'the loss is good enough' and isinstance(error.value, Stopped)
    folder = RunFolder('stopped', run_id)
    state = folder.state()
    assert (state['status'], state['reason']) == ('interrupted', 'on_row: the loss is good enough')
    assert find_record(run_id) is None and [*(folder.path / 'checkpoints').iterdir()]
    resumed = train(data, small_teacher)
    assert resumed.run_id == run_id and folder.rows('resume')
    monkeypatch.setenv('KDNOTES_HOME', str(home / 'another'))
    whole = train(data, small_teacher)
    assert whole.run_id == run_id and not whole.folder.rows('resume')
    assert whole.record['model_sha256'] == resumed.record['model_sha256']


@pytest.mark.slow
def test_a_stop_in_a_study_stops_the_study(data, small_teacher):
    def stop(row):
        if row['kind'] == 'step':
            raise kd.StopTraining('enough')

    with pytest.raises(kd.StopTraining, match='was stopped by on_row: enough'):
        given = dict(
            batch_size=4, epochs=12, max_length=32, threads_per_rank=1, student_layers=[1], study='stopped'
        )
        kd.study(
            data, seeds=1, arms='full_student', teacher=str(small_teacher), on_row=stop, **QUIET, **given
        )


@pytest.mark.slow
def test_a_stop_that_comes_too_late_leaves_the_record(data, small_teacher, rank_here):
    "Here the run has ended when its first row is read."

    def stop(row):
        raise kd.StopTraining('too late')

    run = train(data, small_teacher, smoke=True, on_row=stop)
    assert run.record['steps'] == 6 and run.folder.state()['status'] == 'done'

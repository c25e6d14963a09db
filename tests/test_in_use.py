"""What a study's models are for their user: shares of a teacher's metric, sizes, times, and the headline."""

import numpy as np
import pytest
from handmade import make_record, make_units, write_run
from kdnotes.analysis import in_use
from kdnotes.analysis.intervals import StatsError
from kdnotes.analysis.report import report
from kdnotes.analysis.tables import Evidence, arm_values, evidence
from kdnotes.core.arms import USUAL


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


VALUES = dict(baseline=0.8, full_student=0.7, full_kd=0.72, mixed_kd=0.72)


def write_study(modes=USUAL, seeds=(0, 1, 2), change=lambda record: None):
    for mode in modes:
        for seed in seeds:
            made = make_record(mode, seed, VALUES[mode] + 0.004 * seed, 40.0 if mode == 'baseline' else 10.0)
            made['params_total'] = 20_000_000 if mode == 'baseline' else 5_000_000
            ms = 12.0 if mode == 'baseline' else 4.0
            made['latency'] = dict(batch_1_ms=ms, batch_32_ms=20 * ms, batch_1_tokens=50, batch_32_tokens=60)
            change(made)
            write_run(made)
    return evidence('made')


def test_a_share_is_of_the_teachers_mean_over_the_same_seeds_and_units():
    e = write_study()
    found = in_use.kept_share(e, 'mixed_kd')
    students = [make_units(0.72 + 0.004 * s, s)['value'].mean() for s in range(3)]
    teachers = [make_units(0.8 + 0.004 * s, s)['value'].mean() for s in range(3)]
    assert found.estimate == pytest.approx(np.mean(students) / np.mean(teachers), abs=1e-4)
    assert (found.n, found.units) == (3, 40) and found.low < found.estimate < found.high
    assert in_use.kept_share(e, 'baseline') is None


@pytest.mark.parametrize('share', [0.7, 0.95])
def test_the_interval_of_a_share_covers_it_as_often_as_it_says(share):
    "Students keep `share` of each unit and have noise of their own; all is drawn anew each time."
    rng = np.random.default_rng(3)
    trials = 400
    covered = 0
    for _ in range(trials):
        units = rng.beta(4, 2, 120)  # how easy a unit is
        teacher = units + rng.normal(0, 0.01, (5, 1)) + rng.normal(0, 0.1, (5, 120))
        student = share * units + rng.normal(0, 0.01, (5, 1)) + rng.normal(0, 0.1, (5, 120))
        found = in_use.share_interval(student, teacher)
        covered += found.low <= share <= found.high
    assert 0.92 <= covered / trials <= 0.985


def test_a_share_needs_pairs_and_a_teacher_above_nought():
    with pytest.raises(ValueError, match='pair them first'):
        in_use.share_interval([0.5, 0.6], [0.5])
    with pytest.raises(ValueError, match='needs one above 0'):
        in_use.share_interval([0.5, 0.6], [0.0, 0.0])
    with pytest.raises(StatsError, match='not finite'):
        in_use.share_interval([0.5, float('nan')], [0.5, 0.5])
    one = in_use.share_interval([0.4], [0.5])
    assert one.estimate == pytest.approx(0.8) and one.low is None and one.reason


def test_the_headline_says_what_is_kept_what_is_saved_and_how_sure_that_is():
    e = write_study()
    keeps, saves, sure = in_use.headline(in_use.in_use(e))
    assert keeps.startswith('mixed_kd keeps 90.') and 'its teacher baseline 0.80' in keeps
    assert '25 % of the parameters (5.0 M of 20.0 M)' in saves
    assert 'answers one example of 50 tokens 3.00' in saves and 'was trained 4.00' in saves
    assert sure.startswith('This rests on 3 seeds and 40 questions.') and 'full_kd' in sure
    said = str(report('made'))
    assert said.startswith(keeps) and 'one example of 50 tokens, ms' in said


def test_the_undistilled_student_stands_beside_the_distilled_one():
    e = write_study(('baseline', 'full_student', 'full_kd'))
    keeps = in_use.headline(in_use.in_use(e))[0]
    assert 'full_kd keeps 90.' in keeps and 'without distillation, full_student keeps 87.' in keeps


def test_a_headline_says_what_its_study_cannot_tell():
    e = write_study(('baseline', 'full_kd'), seeds=(0,), change=lambda record: record.pop('latency'))
    keeps, saves, sure = in_use.headline(in_use.in_use(e))
    assert 'how fast it answers was not measured' in saves
    assert 'nothing is known about other seeds' in sure and 'add the arm full_student' in sure


def test_a_metric_where_less_is_better_has_no_share():
    for mode, value in (('baseline', 3.0), ('full_kd', 3.2)):
        write_run(make_record(mode, 0, value, higher=False))
    e = evidence('made')
    assert in_use.kept_share(e, 'full_kd') is None
    said = in_use.headline(in_use.in_use(e))[0]
    assert 'full_kd 3.200 [' in said and 'its teacher baseline 3.000 [' in said and 'keeps' not in said


def test_a_study_of_one_network_has_no_headline():
    write_run(make_record('baseline', 0, 0.8))
    e = evidence('made')
    assert (
        in_use.headline(in_use.in_use(e)) == ()
        and in_use.use_table(in_use.in_use(e)).loc['baseline', 'parameters, M']
    )


def test_what_a_model_has_that_learnt_nothing_stands_beside_the_share():
    runs = [
        make_record(mode, 0, value, metric='exact') for mode, value in (('baseline', 0.6), ('full_kd', 0.5))
    ]
    for r in runs:
        r['task'] = 'extractive_qa'
        r['metrics']['test']['always_unanswerable'] = 0.51
    e = Evidence('made', runs, make_units(0.5, 0).iloc[:0].assign(run_id=''), arm_values(runs, None), [])
    assert in_use.headline(in_use.in_use(e))[0].endswith(
        'its teacher baseline 60.0, a model that never answers 51.0.'
    )

"""What a study's models are for their user: shares of a teacher's metric, sizes, times, and the headline."""

import re
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from handmade import make_record, make_units, write_floors, write_run
from kdnotes.analysis import in_use
from kdnotes.analysis.comparable import Floor
from kdnotes.analysis.intervals import StatsError, crossed_interval
from kdnotes.report.report import report, report_as_dict
from kdnotes.analysis.evidence import evidence, primary_interval
from kdnotes.core.arms import USUAL


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


VALUES = dict(baseline=0.8, mixed_baseline=0.8, full_student=0.7, full_kd=0.72, mixed_kd=0.72)


FLOORS = dict(random_order=0.3, bm25=0.5)


def write_study(modes=USUAL, seeds=(0, 1, 2), change=lambda record: None, floors=FLOORS):
    for mode in modes:
        for seed in seeds:
            made = make_record(mode, seed, VALUES[mode] + 0.004 * seed, 40.0 if mode == 'baseline' else 10.0)
            made['params_total'] = 20_000_000 if mode == 'baseline' else 5_000_000
            ms = 12.0 if mode == 'baseline' else 4.0
            made['latency'] = dict(batch_1_ms=ms, batch_32_ms=20 * ms, batch_1_tokens=50, batch_32_tokens=60)
            change(made)
            write_run(made)
    if floors:
        write_floors(made, **floors)
    return evidence('made')


def test_a_share_is_of_what_the_teacher_gains_over_the_best_floor():
    e = write_study()
    found = in_use.in_use(e).shares['mixed_kd']
    floor = make_units(0.5, 99)['value'].mean()
    students = [make_units(0.72 + 0.004 * s, s)['value'].mean() - floor for s in range(3)]
    teachers = [make_units(0.8 + 0.004 * s, s)['value'].mean() - floor for s in range(3)]
    assert found.estimate == pytest.approx(np.mean(students) / np.mean(teachers), abs=1e-4)
    assert found.estimate == pytest.approx((0.724 - 0.5) / (0.804 - 0.5), abs=1e-4)
    assert (found.n, found.units) == (3, 40) and found.low < found.estimate < found.high
    assert in_use.in_use(e).shares['baseline'] is None
    assert [floor.name for floor in e.trivial] == ['bm25', 'random_order']


def test_the_interval_of_a_share_above_a_floor_is_that_of_its_gains():
    e = write_study()
    kept = in_use.in_use(e).kept['mixed_kd']
    s, t = (np.array([make_units(v + 0.004 * i, i)['value'] for i in range(3)]) for v in (0.72, 0.8))
    f = make_units(0.5, 99)['value'].to_numpy()
    right = in_use.share_interval(s - f, t - f)
    assert kept.share.low == pytest.approx(right.low, abs=1e-4)
    assert kept.share.high == pytest.approx(right.high, abs=1e-4)
    assert kept.teacher.estimate == pytest.approx(0.304, abs=1e-4)


AT_THE_BASELINE = {  # the best baseline -> code, the first sentence
    0.87: (
        'teacher_at_floor',
        'mixed_kd and baseline, the teacher, are significantly worse than BM25, a trivial baseline (0.724 '
        'and 0.804 against 0.870), so that no share of the gain means anything: train it longer, at another '
        'learning rate (`kdnotes tune`), from other weights or on more texts.',
    ),
    0.73: (
        'student_at_floor',
        'mixed_kd is not significantly better than BM25, a trivial baseline (0.724 against 0.730): train it '
        'longer or at another learning rate (`kdnotes tune`), give it more layers or texts without labels, '
        'or score it on more questions.',
    ),
}


@pytest.mark.parametrize('value', AT_THE_BASELINE)
def test_the_first_sentence_says_that_models_are_not_above_the_best_baseline(value):
    e = write_study(floors=dict(bm25=value))
    code, first = AT_THE_BASELINE[value]
    use = in_use.in_use(e)
    assert use.kept['mixed_kd'].code == code
    assert in_use.headline(use)[0] == first
    told = report_as_dict(report('made'))
    assert told['headline'][0] == first and str(report('made')).startswith(first)
    assert told['floors']['bm25']['test']['map'] == value
    share = told['kept']['mixed_kd']['share']
    cell = in_use.use_table(use).loc['mixed_kd', "of its teacher's gain over BM25, %"]
    if code == 'teacher_at_floor':
        assert share is None and cell == 'teacher not better'
        assert 'mixed_kd keeps' not in ' '.join(told['headline'])
    else:  # a share of a teacher that has gained something is shown, be it as small as chance makes it
        assert share['estimate'] == pytest.approx((0.724 - 0.73) / (0.804 - 0.73), abs=1e-3)
        assert cell.startswith('-8.1 [') and 'mixed_kd keeps -8.1 %' in told['headline'][1]
    # full_kd -> mixed_kd: neither is better
    [low] = [text for text in told['sentences'] if text.startswith('full_kd -> mixed_kd')]
    assert 'either full_kd nor mixed_kd is better than BM25, so that this tells nothing' in low


def test_the_pretrained_weights_as_they_come_are_advised_where_they_are_as_good():
    first = in_use.headline(in_use.in_use(write_study(floors=dict(bm25=0.5, frozen_encoder=0.79))))[0]
    assert 'worse than the frozen encoder, a trivial baseline (0.724 against 0.790)' in first
    assert first.endswith(', or use the pretrained weights as they come.')


def test_a_student_that_is_better_than_its_teacher_is_told_first():
    def weak(record):
        if record['mode'] == 'baseline':
            record['primary']['value'] = record['metrics']['test']['map'] = 0.6

    said = in_use.headline(in_use.in_use(write_study(change=weak)))
    assert said[0] == (
        'baseline, the teacher, is significantly worse than its student mixed_kd: train it longer, at '
        'another learning rate (`kdnotes tune`), from other weights or on more texts, before anything is '
        'distilled from it.'
    )


def test_a_share_covers_what_students_keep_where_they_keep_little():
    "Students keep a fifth, of a gain that their seeds and units hide half of the time: shown in all draws."
    rng = np.random.default_rng(5)
    covered = shown = above = 0
    floor = Floor('bm25', 'BM25', dict(primary=dict(higher_is_better=True)), None)
    record = dict(primary=dict(value=0.5))
    for _ in range(300):
        gains = dict(
            s=0.06 * 0.2
            + rng.normal(0, 0.004, (5, 1))
            + rng.normal(0, 0.1, 100)
            + rng.normal(0, 0.02, (5, 100)),
            t=0.06 + rng.normal(0, 0.004, (5, 1)) + rng.normal(0, 0.1, 100) + rng.normal(0, 0.02, (5, 100)),
        )
        runs = iter(gains.values())
        kept = in_use.kept_of_pairs(
            [(record, record)], floor, lambda _, runs=runs: next(runs), crossed_interval
        )
        if kept.share is not None:
            shown += 1
            above += kept.code == 'kept'
            covered += kept.share.low <= 0.2 <= kept.share.high
    assert above < 0.5 * shown and 0.92 <= covered / shown


def test_a_given_teacher_at_the_floor_is_asked_for_its_labels():
    def given(record):
        if record['mode'] == 'baseline':
            record['factors']['init'] = 'given'

    keeps = in_use.headline(in_use.in_use(write_study(floors=dict(bm25=0.9), change=given)))[0]
    assert 'check that it was fine-tuned for this task' in keeps


def test_without_a_floor_nothing_is_kept():
    keeps = in_use.headline(in_use.in_use(write_study(floors={})))[0]
    assert keeps.startswith('How much of what baseline has learnt mixed_kd keeps is not known')


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
    assert keeps.startswith('mixed_kd keeps 73.7 % [') and 'of what its teacher gains over BM25' in keeps
    assert 'its teacher baseline 0.80' in keeps and 'BM25 0.500.' in keeps
    assert '25 % of the parameters (5.0 M of 20.0 M)' in saves
    assert 'answers one example of 50 tokens 3.00' in saves and 'was trained 4.00' in saves
    assert 'times as fast as baseline (2 epochs against 3)' in saves and 'in one number format' not in saves
    assert sure.startswith('This rests on 3 seeds and 40 questions.') and 'full_kd' in sure
    said = str(report('made'))
    assert said.startswith(keeps) and 'one example of 50 tokens, ms' in said


def test_the_undistilled_student_stands_beside_the_distilled_one():
    e = write_study(('baseline', 'full_student', 'full_kd'))
    keeps = in_use.headline(in_use.in_use(e))[0]
    assert 'full_kd keeps 73.7' in keeps and 'without distillation, full_student keeps 67.1' in keeps


def test_a_headline_says_what_its_study_cannot_tell():
    e = write_study(('baseline', 'full_kd'), seeds=(0,), change=lambda record: record.pop('latency'))
    keeps, saves, sure = in_use.headline(in_use.in_use(e))
    assert 'how fast it answers was not measured' in saves
    assert 'nothing is known about other seeds' in sure and 'add the arm full_student' in sure


def test_where_less_is_better_a_share_is_of_what_is_less_than_the_floor():
    for mode, value in (('baseline', 3.0), ('full_kd', 3.2)):
        for seed in range(2):
            made = make_record(mode, seed, value + 0.01 * seed, higher=False)
            write_run(made)
    write_floors(made, random_order=5.0, bm25=3.8)
    e = evidence('made')
    assert e.trivial[0].name == 'bm25'  # the lowest
    assert in_use.in_use(e).shares['full_kd'].estimate == pytest.approx(
        (3.8 - 3.205) / (3.8 - 3.005), abs=1e-3
    )
    said = in_use.headline(in_use.in_use(e))[0]
    assert 'full_kd keeps 74.8 %' in said and 'BM25 3.800' in said


def test_where_less_is_better_no_text_says_above():
    for mode, value in (('baseline', 3.0), ('full_student', 3.9), ('full_kd', 3.95)):
        for seed in range(3):
            made = make_record(mode, seed, value + 0.01 * seed, higher=False)
            write_run(made)
    write_floors(made, bm25=3.8)
    e = evidence('made')
    keeps = in_use.headline(in_use.in_use(e))[0]
    assert keeps.startswith(
        'full_kd is significantly worse than BM25, a trivial baseline (3.960 against 3.800)'
    )
    step = next(c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd'))
    assert step.at_floor == 'neither full_student nor full_kd is better than BM25, so that this tells nothing'
    [teacher] = in_use.headline(in_use.in_use(evidence('made', [r['run_id'] for r in e.arms['baseline']])))[
        :1
    ]
    assert teacher.endswith('It is significantly better than BM25, the best trivial baseline.')
    assert 'above' not in str(report('made'))


def without_value(record):
    record['primary']['value'] = record['metrics']['test']['map'] = None


def test_only_an_arm_that_is_missing_is_advised():
    def sure(modes, change=lambda record: None):
        return in_use.headline(in_use.in_use(write_study(modes, change=change)))[-1]

    def other_batches(record):
        if record['mode'] == 'full_kd':
            record['settings']['batch_size'] = 16

    unknown = 'What distillation itself adds is not known from these runs: '
    assert f'{unknown}add the arm full_student, the same student without' in sure(('baseline', 'full_kd'))
    said = sure(('baseline', 'full_student', 'full_kd'), other_batches)
    assert f'{unknown}the step from full_student to full_kd is not kd alone: batch_size differ' in said


def test_runs_without_a_value_are_named_with_their_reason_wherever_they_are_missed():
    e = write_study(('baseline', 'full_student', 'full_kd'), seeds=(0,), change=without_value, floors={})
    ids = {arm: runs[0]['run_id'] for arm, runs in e.arms.items()}
    lack = {arm: f'{i} has no MAP: made up' for arm, i in ids.items()}
    both = f"{ids['full_student']}, {ids['full_kd']} have no MAP: made up"
    keeps, _, sure = in_use.headline(in_use.in_use(e))
    assert keeps.startswith('What full_kd keeps of baseline is not known, since') and 'have no MAP' in keeps
    step = f'full_student and full_kd are not compared by MAP on the test set, since {both}.'
    assert sure.endswith(f'is not known from these runs: {step}')
    assert any(step in said for said in report('made').sentences)
    alone = in_use.headline(in_use.in_use(evidence('made', [ids['baseline']])))
    assert alone == (f"{lack['baseline']}.",)


def test_training_beside_the_teachers_network_in_the_same_format_stands_beside_it():
    modes = ('baseline', 'mixed_baseline', 'mixed_kd')
    saves = in_use.headline(in_use.in_use(write_study(modes)))[1]
    assert 'as baseline (2 epochs against 3), its teacher\'s own training not counted' in saves
    assert 'in one number format, 1.00' in saves and 'as mixed_baseline (2 epochs against 3)' in saves


@pytest.mark.parametrize('mode, other', dict(baseline='a student', full_kd='a teacher').items())
def test_a_study_of_one_arm_says_what_it_scores_and_whether_that_was_learnt(mode, other):
    e = write_study([mode])
    said = in_use.headline(in_use.in_use(e))
    assert len(said) == 2 and f'MAP on the test set: {mode} 0.' in said[0] and 'BM25 0.500' in said[0]
    assert said[0].endswith('It is significantly better than BM25, the best trivial baseline.')
    assert 'This rests on 3 seeds and 7 ' in said[1] or '3 seeds and 40' in said[1]
    assert f'What is kept and what is saved shows {other} beside it.' in said[1]
    assert str(report('made')).startswith(said[0])


def test_a_teacher_that_has_not_converged_is_told_before_its_students_are():
    def early(record):
        if record['mode'] == 'baseline' and record['seed'] == 1:
            losses = np.linspace(2.48, 1.57, 72)
            record['curve'] = [dict(step=s, loss=x, value=None) for s, x in enumerate(losses)]
        elif record['mode'] == 'baseline':
            losses = 2.48 * np.exp(-np.arange(72) / 10)
            record['curve'] = [dict(step=s, loss=x, value=None) for s, x in enumerate(losses)]

    e = write_study(['baseline', 'full_kd'], change=early)
    [first, *_] = in_use.headline(in_use.in_use(e))
    run_id = next(r['run_id'] for r in e.arms['baseline'] if r['seed'] == 1)
    assert first.startswith(
        f'1 of 3 teachers has not converged, {run_id} least of all: its training loss was 2.4'
    )
    assert 'with more epochs (it had 3)' in first and '`teacher_epochs`' in first
    alone = evidence('made', [r['run_id'] for r in e.arms['baseline']])
    assert in_use.headline(in_use.in_use(alone))[0] == first


def test_two_seeds_that_disagree_have_no_interval_of_their_times_anywhere():
    def change(record):
        record['time']['train_s'] = {('baseline', 0): 10.0, ('baseline', 1): 33.5}.get(
            (record['mode'], record['seed']), 10.0
        )

    write_study(['baseline', 'full_kd'], seeds=(0, 1), change=change)
    found = report('made')
    text = str(found)
    assert (
        '1.83 [no interval] times as fast' in text and '1.83 [no interval]' in found.comparisons.to_string()
    )
    assert '672' not in text and '[0.00' not in text
    assert any(note.startswith('[no interval]: the interval of 2 pairs') for note in found.notes)
    assert '21.8 [no interval]' in found.arms.to_string(), 'and no width that would reach below 0 seconds'
    assert any('would reach below 0' in note for note in found.notes)
    said = report_as_dict(found)
    [comparison] = said['comparisons']
    assert comparison['train_s_low'] is None and comparison['p_train_s'] == pytest.approx(0.5, abs=0.01)


def test_a_text_that_commands_a_terminal_is_seen_in_a_report_as_text():
    "table.txt is shown as it is."
    hidden = '\x1b[31mred'
    write_run(make_record('baseline', 0, 0.8, corpus=f'/data/{hidden}'))
    text = str(report('made'))
    assert '\x1b' not in text and '\\u001b[31mred' in text


def test_the_weights_of_a_model_that_lost_heads_are_said_to_be_those_of_its_pruned_folder():
    """`model/` holds it whole, with zeros where heads were."""

    def change(record):
        if record['arm'] == 'mixed_kd':
            record['kept_heads'] = [[0, 2], [1]]

    table = in_use.use_table(in_use.in_use(write_study(change=change)))
    assert table.loc['mixed_kd', 'weights, MiB'] == '19 (of pruned/)'  # 5 M numbers of four bytes
    assert table.loc['full_kd', 'weights, MiB'] == '19'


@pytest.mark.parametrize('seeds', [3, 5])
def test_a_report_says_what_few_seeds_allow(seeds):
    """t of two degrees of freedom at .05 and, the smallest of four, at .0125; of four degrees of freedom."""
    write_study(seeds=range(seeds))
    found = [note for note in report('made').notes if 'little can be significant' in note]
    assert bool(found) == (seeds == 3)
    if found:
        t = stats.t.ppf
        k = int(re.search(r'smallest p of (\d+)', found[0])[1])
        three, five = (
            f'{t(0.975, df):.1f} (as the smallest p of {k}: {t(1 - 0.025 / k, df):.1f})' for df in (2, 4)
        )
        assert found[0] == (
            'with 3 seeds little can be significant: where the seeds make most of the spread, a difference '
            f'must be {three} times its standard error; with 5 seeds {five} times'
        )


@pytest.mark.parametrize('seeds', [1, 3])
def test_an_arm_that_is_right_nearly_always_has_an_interval_on_its_scale(seeds):
    """Wilson's of 40 texts: all right, the t interval would be [1, 1]."""
    runs = [make_record('full_kd', seed, 1.0) for seed in range(seeds)]
    all_right = [make_units(1.0, 0).assign(value=1.0, run_id=r['run_id']) for r in runs]
    value = primary_interval(runs, pd.concat(all_right))
    z2 = stats.norm.ppf(0.975) ** 2
    assert (value.estimate, value.low, value.high) == (1.0, pytest.approx(40 / (40 + z2)), 1.0)

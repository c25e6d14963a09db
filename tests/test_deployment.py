"""What a study's models are for their user: shares of a teacher's metric, sizes, times, and the headline."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from handmade import make_record, make_units, write_floors, write_run, written_report
from kdnotes.stats import deployment
from kdnotes.stats.comparable import TrivialBaseline
from kdnotes.stats.intervals import StatsError, crossed_interval
from kdnotes.report.tables import use_table
from kdnotes.stats.evidence import evidence, primary_interval
from kdnotes.core.arms import USUAL
from kdnotes.core.render import phrase, reason, sentences


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def headline(use):
    return sentences('headline.jinja', 'headline', deployment.summary(use))


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
    found = deployment.deployment(e).shares['mixed_kd']
    floor = make_units(0.5, 99)['value'].mean()
    students = [make_units(0.72 + 0.004 * s, s)['value'].mean() - floor for s in range(3)]
    teachers = [make_units(0.8 + 0.004 * s, s)['value'].mean() - floor for s in range(3)]
    assert found.estimate == pytest.approx(np.mean(students) / np.mean(teachers), abs=1e-4)
    assert found.estimate == pytest.approx((0.724 - 0.5) / (0.804 - 0.5), abs=1e-4)
    assert (found.n, found.units) == (3, 40) and found.low < found.estimate < found.high
    assert deployment.deployment(e).shares['baseline'] is None
    assert [floor.name for floor in e.baselines] == ['bm25', 'random_order']


def test_the_interval_of_a_share_above_a_floor_is_that_of_its_gains():
    e = write_study()
    kept = deployment.deployment(e).recovered['mixed_kd']
    s, t = (np.array([make_units(v + 0.004 * i, i)['value'] for i in range(3)]) for v in (0.72, 0.8))
    f = make_units(0.5, 99)['value'].to_numpy()
    right = deployment.share_interval(s - f, t - f)
    assert kept.share.low == pytest.approx(right.low, abs=1e-4)
    assert kept.share.high == pytest.approx(right.high, abs=1e-4)
    assert kept.teacher.estimate == pytest.approx(0.304, abs=1e-4)


AT_THE_BASELINE = {  # the best baseline -> code, arms that are not above it
    0.87: ('teacher_at_floor', ['mixed_kd', 'baseline']),
    0.73: ('student_at_floor', ['mixed_kd']),
}


@pytest.mark.parametrize('value', AT_THE_BASELINE)
def test_a_headline_begins_with_models_that_are_not_above_the_best_baseline(value):
    use = deployment.deployment(write_study(floors=dict(bm25=value)))
    code, arms = AT_THE_BASELINE[value]
    assert use.recovered['mixed_kd'].code == code and list(use.at_baseline) == arms
    assert all(i.high < 0 for i in use.at_baseline.values()) == (code == 'teacher_at_floor')  # worse
    found = written_report()
    data = found.data()
    [warned] = sentences('headline.jinja', 'cautions', use)
    assert data['headline'][0] == warned and str(found).startswith(warned)
    assert data['floors']['bm25']['test']['map'] == value
    share = data['kept']['mixed_kd']['share']
    cell = use_table(use).loc['mixed_kd', phrase('tables.jinja', 'recovered', ['BM25'])]
    if code == 'teacher_at_floor':
        assert share is None and cell == phrase('tables.jinja', 'share', code)
    else:  # a share of a teacher that has gained something is shown, be it as small as chance makes it
        assert share['estimate'] == pytest.approx((0.724 - 0.73) / (0.804 - 0.73), abs=1e-3)
        assert cell.startswith('−8.1 [') and '−8.1% [' in data['headline'][1]
    step = next(c for _, c in use.evidence.comparisons if (c.a, c.b) == ('full_kd', 'mixed_kd'))
    assert step.at_baseline.code == 'at_baseline'  # neither is better
    assert dict(step.at_baseline.details)['baselines'] == ('BM25',)


@pytest.mark.parametrize('floor', ['bm25', 'frozen_encoder'])
def test_the_pretrained_weights_are_advised_where_they_are_as_good(floor):
    use = deployment.deployment(write_study(floors={'random_order': 0.5, floor: 0.79}))
    [warned] = sentences('headline.jinja', 'cautions', use)
    assert ('pretrained weights' in warned) == (floor == 'frozen_encoder') and '0.724' in warned


def test_a_headline_begins_with_a_student_that_is_better_than_its_teacher():
    def weak(record):
        if record['mode'] == 'baseline':
            record['primary']['value'] = record['metrics']['test']['map'] = 0.6

    assert not deployment.deployment(write_study()).student_above_teacher
    use = deployment.deployment(write_study(change=weak))
    assert use.student_above_teacher and not use.at_baseline
    assert headline(use)[0] == phrase('headline.jinja', 'above_teacher', use)


def test_a_share_covers_what_students_keep_where_they_keep_little():
    "Students keep a fifth, of a gain that their seeds and units hide half of the time: shown in all draws."
    rng = np.random.default_rng(5)
    covered = shown = above = 0
    floor = TrivialBaseline('bm25', 'BM25', dict(primary=dict(higher_is_better=True)), None)
    for _ in range(300):
        gains = dict(
            s=0.06 * 0.2
            + rng.normal(0, 0.004, (5, 1))
            + rng.normal(0, 0.1, 100)
            + rng.normal(0, 0.02, (5, 100)),
            t=0.06 + rng.normal(0, 0.004, (5, 1)) + rng.normal(0, 0.1, 100) + rng.normal(0, 0.02, (5, 100)),
        )
        kept = deployment.gap_recovered(gains['s'], gains['t'], floor, crossed_interval)
        if kept.share is not None:
            shown += 1
            above += kept.code == 'kept'
            covered += kept.share.low <= 0.2 <= kept.share.high
    assert above < 0.5 * shown and 0.92 <= covered / shown


@pytest.mark.parametrize('init', ['given', 'pretrained'])
def test_a_given_teacher_at_the_floor_is_not_trained_longer(init):
    def given(record):
        if record['mode'] == 'baseline':
            record['factors']['init'] = init

    use = deployment.deployment(write_study(floors=dict(bm25=0.9), change=given))
    assert use.is_given('baseline') == (init == 'given')
    assert phrase('headline.jinja', 'advice', init == 'given') in headline(use)[0]


def test_without_a_baseline_no_share_is_known():
    use = deployment.deployment(write_study(floors={}))
    assert use.recovered['mixed_kd'].code == 'no_floor' and use.shares['mixed_kd'] is None


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
        found = deployment.share_interval(student, teacher)
        covered += found.low <= share <= found.high
    assert 0.92 <= covered / trials <= 0.985


def test_a_share_needs_pairs_and_a_teacher_above_nought():
    with pytest.raises(StatsError, match='needs pairs'):
        deployment.share_interval([0.5, 0.6], [0.5])
    with pytest.raises(ValueError, match='a teacher above 0'):
        deployment.share_interval([0.5, 0.6], [0.0, 0.0])
    with pytest.raises(StatsError, match='must be finite'):
        deployment.share_interval([0.5, float('nan')], [0.5, 0.5])
    one = deployment.share_interval([0.4], [0.5])
    assert one.estimate == pytest.approx(0.8) and one.low is None and one.reason


def test_the_headline_has_what_is_recovered_what_is_saved_and_how_sure_that_is():
    e = write_study()
    use = deployment.deployment(e)
    s = deployment.summary(use)
    assert s.arm == 'mixed_kd' and s.effect.b == 'full_kd' and s.no_effect is None and s.tokens == 50
    saved = s.savings
    assert saved.parameters == (5_000_000, 20_000_000) and saved.latency_ms == 4.0
    assert saved.faster.estimate == pytest.approx(3.0)
    assert (saved.training.other, saved.training.epochs) == ('baseline', (3, 2))
    assert saved.training.ratio.estimate == pytest.approx(4.0) and saved.same_format is None
    recovered, saves, sure = headline(use)
    share = use.recovered['mixed_kd'].share
    assert f'{100 * share.estimate:.1f}% [{100 * share.low:.1f}, {100 * share.high:.1f}]' in recovered
    assert '0.804 [' in recovered and '0.500' in recovered and '73.7%' in recovered
    assert '25%' in saves and '3.00 [3.00, 3.00] times' in saves and '4.00 [4.00, 4.00] times' in saves
    assert '3 seeds' in sure and '40 questions' in sure
    text = str(written_report())
    assert text.startswith(recovered) and 'one example of 50 tokens, ms' in text


def test_the_share_of_the_undistilled_student_is_next_to_that_of_the_distilled_one():
    use = deployment.deployment(write_study(('baseline', 'full_student', 'full_kd')))
    first = headline(use)[0]
    for arm in ('full_kd', 'full_student'):
        assert f'{arm} recovers {100 * use.shares[arm].estimate:.1f}%' in first


def test_a_summary_has_reasons_for_what_its_study_cannot_answer():
    e = write_study(('baseline', 'full_kd'), seeds=(0,), change=lambda record: record.pop('latency'))
    s = deployment.summary(deployment.deployment(e))
    assert s.savings.faster is None and not s.savings.latency_measured and s.effect is None
    assert (s.no_effect.code, s.no_effect.arm, s.no_effect.taught) == ('add_arm', 'full_student', True)
    assert phrase('reasons.jinja', 'one_seed') in headline(s.use)[-1]


def test_where_less_is_better_a_share_is_of_what_is_less_than_the_floor():
    for mode, value in (('baseline', 3.0), ('full_kd', 3.2)):
        for seed in range(2):
            made = make_record(mode, seed, value + 0.01 * seed, higher=False)
            write_run(made)
    write_floors(made, random_order=5.0, bm25=3.8)
    e = evidence('made')
    assert e.baselines[0].name == 'bm25'  # the lowest
    assert deployment.deployment(e).shares['full_kd'].estimate == pytest.approx(
        (3.8 - 3.205) / (3.8 - 3.005), abs=1e-3
    )
    first = headline(deployment.deployment(e))[0]
    assert '74.8% [' in first and '3.800' in first


def test_where_less_is_better_the_baselines_are_beaten_from_above():
    for mode, value in (('baseline', 3.0), ('full_student', 3.9), ('full_kd', 3.95)):
        for seed in range(3):
            made = make_record(mode, seed, value + 0.01 * seed, higher=False)
            write_run(made)
    write_floors(made, bm25=3.8)
    e = evidence('made')
    use = deployment.deployment(e)
    assert list(use.at_baseline) == ['full_kd'] and use.at_baseline['full_kd'].high < 0
    assert use.gain('baseline').low > 0 and '(3.960 against 3.800)' in headline(use)[0]
    step = next(c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd'))
    assert step.at_baseline == reason('at_baseline', a='full_student', b='full_kd', baselines=('BM25',))


def without_value(record):
    record['primary']['value'] = record['metrics']['test']['map'] = None


def test_only_an_arm_that_is_missing_is_advised():
    def no_effect(modes, change=lambda record: None):
        return deployment.summary(deployment.deployment(write_study(modes, change=change))).no_effect

    def other_batches(record):
        if record['mode'] == 'full_kd':
            record['settings']['batch_size'] = 16

    assert no_effect(('baseline', 'full_kd')).code == 'add_arm'
    why = no_effect(('baseline', 'full_student', 'full_kd'), other_batches)
    assert why.code == 'several_factors' and why.comparison.attribution.others == {'batch_size': (32, 16)}


def test_runs_without_a_value_are_named_with_their_reason_wherever_they_are_missed():
    e = write_study(('baseline', 'full_student', 'full_kd'), seeds=(0,), change=without_value, floors={})
    ids = {arm: runs[0]['run_id'] for arm, runs in e.arms.items()}
    s = deployment.summary(deployment.deployment(e))
    assert s.no_value == lack(ids['full_kd'], ids['baseline'])
    assert s.no_effect.code == 'no_difference'
    assert s.no_effect.comparison.reasons['difference'] == lack(ids['full_student'], ids['full_kd'])
    found = written_report()
    assert lack(ids['baseline'], ids['full_kd'], ids['full_student']) in found.notes
    step = phrase('comparison.jinja', 'sentence', s.no_effect.comparison)
    assert headline(s.use)[-1].endswith(step) and any(step in text for text in found.sentences)
    alone = headline(deployment.deployment(evidence('made', [ids['baseline']])))
    assert alone == (f'{lack(ids["baseline"])}.',)


def lack(*run_ids):
    return reason('no_value', run_ids=run_ids, name='MAP', why=('made up',))


def test_training_is_compared_with_the_teachers_network_in_the_same_format_too():
    modes = ('baseline', 'mixed_baseline', 'mixed_kd')
    saved = deployment.summary(deployment.deployment(write_study(modes))).savings
    assert (saved.training.other, saved.training.ratio.estimate) == ('baseline', pytest.approx(4.0))
    assert (saved.same_format.other, saved.same_format.ratio.estimate) == (
        'mixed_baseline',
        pytest.approx(1.0),
    )
    assert saved.same_format.epochs == (3, 2)


@pytest.mark.parametrize('mode', ['baseline', 'full_kd'])
def test_a_study_of_one_arm_says_what_it_scores_and_whether_that_was_learnt(mode):
    use = deployment.deployment(write_study([mode]))
    s = deployment.summary(use)
    assert (s.arm, s.savings, s.no_value) == (mode, None, None)
    assert use.gain(mode).low > 0 and use.baseline(mode).name == 'bm25'
    first, second = headline(use)
    assert f'{use.value(mode).estimate:.3f} [' in first and '0.500' in first and '3 seeds' in second
    assert str(written_report()).startswith(first)


def test_a_headline_begins_with_a_teacher_that_has_not_converged():
    def early(record):
        if record['mode'] == 'baseline' and record['seed'] == 1:
            losses = np.linspace(2.48, 1.57, 72)
            record['curve'] = [dict(step=s, loss=x, value=None) for s, x in enumerate(losses)]
        elif record['mode'] == 'baseline':
            losses = 2.48 * np.exp(-np.arange(72) / 10)
            record['curve'] = [dict(step=s, loss=x, value=None) for s, x in enumerate(losses)]

    e = write_study(['baseline', 'full_kd'], change=early)
    s = deployment.summary(deployment.deployment(e))
    u = s.unconverged
    assert (u.n, u.n_teachers, u.worst['seed']) == (1, 3, 1) and u.losses.start == pytest.approx(
        2.45, abs=0.05
    )
    first = headline(s.use)[0]
    assert first == phrase('headline.jinja', 'unconverged', u) and u.worst['run_id'] in first
    alone = evidence('made', [r['run_id'] for r in e.arms['baseline']])
    assert headline(deployment.deployment(alone))[0] == first


def test_two_seeds_that_disagree_have_no_interval_of_their_times_anywhere():
    def change(record):
        record['time']['train_s'] = {('baseline', 0): 10.0, ('baseline', 1): 33.5}.get(
            (record['mode'], record['seed']), 10.0
        )

    write_study(['baseline', 'full_kd'], seeds=(0, 1), change=change)
    found = written_report()
    text = str(found)
    assert (
        '1.83 [no interval] times as fast' in text and '1.83 [no interval]' in found.comparisons.to_string()
    )
    assert '672' not in text and '[0.00' not in text
    assert '21.8 [no interval]' in found.arms.to_string(), 'and no width that would reach below 0 seconds'
    reasons = [dict(note.details)['why'].code for note in found.notes if note.code == 'interval_missing']
    assert reasons == ['ratio_too_wide', 'below_zero']
    [time] = [row for row in found.data()['comparisons'] if row['quantity'] == 'train_s']
    assert time['low'] is None and time['p'] == pytest.approx(0.5, abs=0.01)


def test_a_text_that_commands_a_terminal_is_seen_in_a_report_as_text():
    "table.txt is shown as it is."
    hidden = '\x1b[31mred'
    write_run(make_record('baseline', 0, 0.8, corpus=f'/data/{hidden}'))
    text = str(written_report())
    assert '\x1b' not in text and '\\u001b[31mred' in text


def test_the_weights_of_a_model_that_lost_heads_are_said_to_be_those_of_its_pruned_folder():
    """`model/` holds it whole, with zeros where heads were."""

    def change(record):
        if record['arm'] == 'mixed_kd':
            record['kept_heads'] = [[0, 2], [1]]

    table = use_table(deployment.deployment(write_study(change=change)))
    assert table.loc['mixed_kd', 'weights, MiB'] == '19 (of pruned/)'  # 5 M numbers of four bytes
    assert table.loc['full_kd', 'weights, MiB'] == '19'


@pytest.mark.parametrize('seeds', [3, 5])
def test_a_report_says_what_few_seeds_allow(seeds):
    """t of two degrees of freedom at .05 and, the smallest of four, at .0125; of four degrees of freedom."""
    write_study(seeds=range(seeds))
    found = [dict(note.details) for note in written_report().notes if note.code == 'few_seeds']
    assert bool(found) == (seeds == 3)
    if found:
        [its] = found
        k = its['members']
        three, five = ([stats.t.ppf(1 - 0.025 / m, df) for m in (1, k)] for df in (2, 4))
        assert (its['seeds'], its['enough']) == (3, 5) and k > 1
        assert its['limits'] == pytest.approx(three) and its['enough_limits'] == pytest.approx(five)


@pytest.mark.parametrize('seeds', [1, 3])
def test_an_arm_that_is_right_nearly_always_has_an_interval_on_its_scale(seeds):
    """Wilson's of 40 texts: all right, the t interval would be [1, 1]."""
    runs = [make_record('full_kd', seed, 1.0) for seed in range(seeds)]
    all_right = [make_units(1.0, 0).assign(value=1.0, run_id=r['run_id']) for r in runs]
    value = primary_interval(runs, pd.concat(all_right))
    z2 = stats.norm.ppf(0.975) ** 2
    assert (value.estimate, value.low, value.high) == (1.0, pytest.approx(40 / (40 + z2)), 1.0)

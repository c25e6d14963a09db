"What a label is worth: the gap that is closed and the labels that are saved, against truths that are known."

import numpy as np
import pandas as pd
import pytest
from handmade import make_record
from kdnotes.stats.intervals import crossed_interval, mean_interval
from kdnotes.stats.labels import (
    BEFORE,
    BEYOND,
    TrainedArm,
    gap_closed,
    equivalent_labels,
    trained_arms,
    values_of,
    label_efficiency,
)
from kdnotes.stats.evidence import NotDrawn
from kdnotes.core.render import phrase, sentences
from kdnotes.report import plotting as pt
from kdnotes.stats.comparable import check_arm
from kdnotes.report.figures import labels_figure
from kdnotes.report.report import _trained_on
from kdnotes.stats.evidence import Evidence, evidence
from kdnotes.experiment.study import run_study
from small_runs import small_model, train_here

SEEDS, UNITS = 5, 120


def scores(mean, rng, own=0.01):
    "A matrix of seeds and units: units differ, seeds differ, and the rest."
    units = np.random.default_rng(1).normal(0, 0.2, UNITS)  # the same ones for all arms
    return mean + units + rng.normal(0, own, (SEEDS, 1)) + rng.normal(0, 0.1, (SEEDS, UNITS))


def test_the_share_of_the_gap_is_the_ratio_of_the_two_distances():
    rng = np.random.default_rng(0)
    alone, taught, teacher = (scores(mean, rng) for mean in (0.5, 0.6, 0.7))
    found = gap_closed(alone, taught, teacher)
    expected = (taught.mean() - alone.mean()) / (teacher.mean() - alone.mean())
    assert found.estimate == pytest.approx(expected) and found.low < 0.5 < found.high and found.null == 0
    # as the interval of one distance where the other one is exact
    exact = gap_closed(alone, taught, alone + 0.2)
    of_distance = crossed_interval(taught - alone)
    assert (exact.low, exact.high) == pytest.approx((of_distance.low / 0.2, of_distance.high / 0.2))


def test_a_teacher_that_is_not_above_the_student_has_no_gap():
    rng = np.random.default_rng(0)
    alone, taught = scores(0.5, rng), scores(0.55, rng)
    assert gap_closed(alone, taught, alone) is None
    assert gap_closed(alone, taught, scores(0.501, rng)) is None
    assert (
        gap_closed(*(x[:1, 0] for x in (alone, taught, alone + 0.2))) is None
    )  # one value tells no interval


@pytest.mark.exhaustive
def test_the_labels_that_are_saved_are_covered_as_often_as_is_said():
    "Alone .5 at 256 labels and .6 at 4,096: .55 is worth 1,024."
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(200):
        curve = [(n, scores(mean, rng)) for n, mean in ((256, 0.5), (4096, 0.6), (16_384, 0.65))]
        worth = equivalent_labels(scores(0.55, rng), curve)
        assert worth.low <= worth.estimate <= worth.high
        inside.append(worth.low <= 1024 <= worth.high)
    assert 0.9 <= np.mean(inside) <= 0.995


def worth_text(worth):
    return phrase('headline.jinja', 'worth', worth)


def test_what_lies_outside_of_the_numbers_that_were_tried_is_open():
    rng = np.random.default_rng(0)
    curve = [(256, scores(0.5, rng)), (1024, scores(0.6, rng))]
    better = equivalent_labels(scores(0.9, rng), curve)
    assert (better.low, better.estimate, better.high) == (BEYOND, BEYOND, BEYOND)
    assert worth_text(better) == 'more than 1,024'
    worse = equivalent_labels(scores(0.1, rng), curve)
    assert (worse.low, worse.estimate, worse.high) == (BEFORE, BEFORE, BEFORE)
    assert worth_text(worse) == 'fewer than 256'
    as_the_most = equivalent_labels(scores(0.6, rng), curve)
    assert 256 < as_the_most.low < 1024 and as_the_most.high == BEYOND
    assert worth_text(as_the_most).endswith(', more than 1,024]')
    assert equivalent_labels(scores(0.9, rng)[:1], [(n, values[:1]) for n, values in curve]) is None


def test_seeds_that_are_far_apart_tell_nothing():
    rng = np.random.default_rng(3)
    curve = [(256, scores(0.505, rng, own=0.1)), (4096, scores(0.51, rng, own=0.1))]
    worth = equivalent_labels(scores(0.5, rng, own=0.1), curve)
    assert (worth.low, worth.high) == (BEFORE, BEYOND) and not worth.is_known


def test_the_fewest_labels_count_where_more_of_them_do_worse():
    rng = np.random.default_rng(0)
    curve = [(256, scores(0.5, rng)), (1024, scores(0.66, rng)), (4096, scores(0.57, rng))]
    worth = equivalent_labels(scores(0.6, rng), curve)
    assert 256 < worth.low < worth.estimate < worth.high <= 1024


def test_a_share_is_told_from_none_where_the_difference_is():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        alone, taught, teacher = (scores(mean, rng, own=0.02) for mean in (0.5, 0.53, 0.7))
        share, difference = gap_closed(alone, taught, teacher), crossed_interval(taught - alone)
        assert (share.low > 0) == (difference.low > 0)
        assert share.low < share.estimate < share.high


def record(
    arm, seed, value, network='student', kd=False, labels=None, teacher=None, better=True, init=None, **rows
):
    primary = dict(set='test', metric='map', value=value, higher_is_better=better)
    settings = dict(labels=labels)
    factors = dict(network=network, kd=kd, init=init)
    ids = dict(run_id=f'{arm}-{seed}', arm=arm, seed=seed, teacher_run_id=teacher, mode='mixed_kd', study='s')
    return ids | dict(
        primary=primary, settings=settings, factors=factors, trained_rows=rows, task='answer_selection'
    )


def evidence_of(records):
    return Evidence('s', records, pd.DataFrame(), {}, [])


def study(better=True):
    "A given teacher of one seed, two students alone with 64 labels, one with 256, and one that is taught."
    sign = 1 if better else -1
    noise = np.random.default_rng(0).normal(0, 0.005, (4, 3))
    arms = dict(alone=(0.5, 64), longer=(0.52, 64), more=(0.6, 256))
    found = [record('teacher', 0, sign * 0.8, network='teacher', init='given', better=better, train=999)]
    for (arm, (mean, n)), its in zip(arms.items(), noise):
        found += [
            record(arm, s, sign * (mean + its[s]), labels=n, better=better, train=n + 2) for s in range(3)
        ]
    more = dict(kd=True, labels=64, teacher='teacher-0', better=better, train=66, unlabelled=900)
    return found + [record('taught', s, sign * (0.7 + noise[3, s]), **more) for s in range(3)]


@pytest.mark.parametrize('better', [True, False])
def test_the_best_without_distillation_is_the_one_that_counts(better):
    [pays] = label_efficiency(evidence_of(study(better)))
    assert (pays.taught.arm, pays.alone.arm, pays.teacher.arm) == ('taught', 'longer', 'teacher')
    assert pays.closed.estimate == pytest.approx((0.7 - 0.52) / (0.8 - 0.52), abs=0.03)
    assert pays.equivalent.estimate == BEYOND and pays.equivalent.tried == (64, 256)
    [sentence] = sentences('headline.jinja', 'labels', [pays])
    share = phrase('headline.jinja', 'share', pays.closed)
    for part in (
        '64 labels',
        '900 unlabelled rows',
        '3 seeds',
        f'taught closes {share}',
        'more than 256 labels',
    ):
        assert part in sentence


def test_an_arm_with_fewer_seeds_or_other_first_weights_is_no_rival():
    lucky = record('lucky', 0, 0.79, labels=64, train=66)
    other = [record('other', s, 0.78, labels=64, train=66) | dict(params_total=9) for s in range(3)]
    more = [record('many', s, 0.79, labels=512, train=66) for s in range(2)]
    assert label_efficiency(evidence_of([*study(), lucky, *other, *more])) == label_efficiency(
        evidence_of(study())
    )


def elsewhere(value, labels=64):
    "A student without distillation that starts from other weights, of three seeds."
    its = [record('elsewhere', s, value, labels=labels, train=labels, init='transferred') for s in range(3)]
    return its


def test_a_student_that_was_trained_elsewhere_first_is_a_rival():
    [pays] = label_efficiency(evidence_of([*study(), *elsewhere(0.62)]))
    assert (pays.alone.arm, pays.control.arm) == ('elsewhere', 'longer')
    assert pays.closed.estimate == pytest.approx((0.7 - 0.62) / (0.8 - 0.62), abs=0.03)
    assert pays.other_start
    [pays] = label_efficiency(evidence_of([*study(), *elsewhere(0.4)]))
    assert (pays.alone.arm, pays.control.arm) == ('longer', 'longer')
    assert not pays.other_start
    alone = [r for r in study() if r['arm'] not in ('alone', 'longer')]
    [pays] = label_efficiency(evidence_of([*alone, *elsewhere(0.62)]))
    assert pays.alone.arm == 'elsewhere' and pays.control is None


def test_the_line_joins_the_best_of_each_number_and_trivial_models_are_drawn():
    records = [*study(), *elsewhere(0.62)]
    arms = {r['arm']: [x for x in records if x['arm'] == r['arm']] for r in records}
    values = {
        arm: dict(primary=mean_interval([r['primary']['value'] for r in runs])) for arm, runs in arms.items()
    }
    row = dict(key='k', split='test', set='', unit='', cluster='', metric='map')
    floors = pd.DataFrame([row | dict(floor='bm25', value=0.55), row | dict(floor='random_order', value=0.3)])
    figure = labels_figure(Evidence('s', records, pd.DataFrame(), values, [], floors))
    axes = figure.axes[0]
    joined = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_color() == pt.LINE]
    [line] = [line for line in joined if sorted(line.get_xdata()) == [64, 256]]
    best = [max(values[arm]['primary'].estimate for arm in of) for of in (('elsewhere', 'longer'), ('more',))]
    assert line.get_ydata() == pytest.approx(best)
    levels = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert levels['BM25'] == 0.55
    assert not any(label.startswith('a random order') for label in levels)  # below all arms


def test_why_no_gap_is_known():
    of_one_seed = [r for r in study() if r['seed'] == 0]
    without = [r for r in study() if r['arm'] != 'teacher']
    low = [r | dict(primary=r['primary'] | dict(value=0.5)) if r['arm'] == 'teacher' else r for r in study()]
    for records, code in ((of_one_seed, 'no_seeds'), (without, 'no_teacher'), (low, 'teacher_not_above')):
        [pays] = label_efficiency(evidence_of(records))
        assert pays.closed is None and pays.why.code == code
        assert str(pays.why) in sentences('headline.jinja', 'labels', [pays])[0]


def test_rows_that_labels_leave_are_others_for_each_seed():
    def run(seed, labels=64, train=64):
        rows = dict(train=train + seed, unlabelled=1000 - seed)
        own = dict(labels=labels, unlabelled_id=f'{1000 - seed}-{seed}')
        return make_record('mixed_kd', seed) | dict(trained_rows=rows, settings=own)

    assert check_arm([run(0), run(1)]) is None
    assert 'unlabelled_id' in str(check_arm([run(0), run(1, train=65)]))  # another corpus' rows for each
    assert 'unlabelled_id' in str(check_arm([run(0, labels=None), run(1, labels=None)]))
    assert _trained_on([run(0), run(1)]) == {'mixed_kd': ([64, 65], [1000, 999])}
    assert phrase('setting.jinja', 'rows', 999, 1000) == '999 to 1,000 rows'


def test_a_report_of_few_labels_alone_says_how_many():
    runs = [
        make_record('mixed_kd', s) | dict(trained_rows=dict(train=65), settings=dict(labels=64))
        for s in (0, 1)
    ]
    [rows] = _trained_on(runs).values()
    assert phrase('setting.jinja', 'trained_on', *rows) == '65 rows with a label'


def test_a_study_with_one_number_of_labels_says_nothing_of_it():
    plain = [r | dict(settings={}, trained_rows=dict(train=900)) for r in study() if r['arm'] != 'taught']
    taught = [r | dict(settings={}, trained_rows=dict(train=900)) for r in study() if r['arm'] == 'taught']
    assert label_efficiency(evidence_of(plain + taught)) == []
    with pytest.raises(NotDrawn) as e:
        labels_figure(evidence_of(plain + taught))
    assert str(e.value) == phrase('reasons.jinja', 'labels_not_varied')
    older = [r | dict(trained_rows={}) for r in study() if r['arm'] != 'teacher']
    assert trained_arms(evidence_of(older).arms) == []


def test_values_are_of_the_seeds_that_all_have():
    runs = [
        [record(arm, s, x + s) for s in seeds] for arm, x, seeds in (('a', 0, (0, 1, 2)), ('b', 10, (2, 1)))
    ]
    a, b = values_of(
        [TrainedArm('', 'alone', 1, 0, tuple(sorted(its, key=lambda r: r['seed']))) for its in runs], None
    )
    assert (a.tolist(), b.tolist()) == ([1, 2], [11, 12])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_study_of_few_labels_and_the_rows_that_are_left_has_a_report(tmp_path, monkeypatch):
    "Two seeds have other rows without a label, and are one arm."
    train_here(monkeypatch)
    common = dict(task='answer_selection', corpus='embedded', max_length=32, threads_per_rank=1, ranks=1)
    common |= dict(teacher=str(small_model(tmp_path / 'small')), student_layers='1', smoke=True, study='few')
    made = run_study(2, 'full_student,full_kd', grid={'labels': [200, 400]}, unlabelled='rest', **common)
    assert not made.failed
    taught = [line for line in made.report.setting if line.startswith('Trained on ') and ' without' in line]
    assert len(taught) == 2
    seeds = evidence(made.report.study).arms['full_kd-labels-200']
    assert len({r['settings']['unlabelled_id'] for r in seeds}) == 2
    assert made.report.figures['labels'].exists()
    assert [pays.alone.role for pays in label_efficiency(evidence(made.report.study))] == ['alone', 'alone']

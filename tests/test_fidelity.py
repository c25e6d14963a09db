"Calibration and fidelity: by hand, against scikit-learn, scipy and statsmodels, and at their edges."

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from scipy.stats import entropy, kendalltau
from sklearn.calibration import calibration_curve
from statsmodels.stats.proportion import proportion_confint
from kdnotes.stats.calibration import (
    agreement,
    agreement_values,
    align_predictions,
    predicted_probabilities,
    reliability,
    tau_gain,
)
from kdnotes.stats.intervals import StatsError, crossed_interval
from kdnotes.stats.tests import crossed_test
from kdnotes.core.render import reason


def run(seed=0, units=60, items=6, noise=0.3, sharp=1.0):
    base = np.random.default_rng(0)
    rng = np.random.default_rng(seed + 100)
    z = base.normal(-1, 1.5, units * items)
    label = (base.random(z.size) < expit(z)).astype(int)
    return pd.DataFrame(
        dict(
            split='test',
            unit=np.repeat([f'Q{i}' for i in range(units)], items),
            item=[f'S{i:03d}' for i in range(z.size)],
            label=label,
            score=sharp * (z + noise * rng.normal(size=z.size)),
        )
    )


def one(scores, labels=None, unit='Q'):
    return pd.DataFrame(
        dict(
            split='test',
            unit=unit,
            item=[f'{unit}{i}' for i in range(len(scores))],
            label=labels or [1] + [0] * (len(scores) - 1),
            score=scores,
        )
    )


def test_bins_are_scikit_learns():
    r = run(units=100, items=10)
    _, said = calibration_curve(r['label'], expit(r['score']), n_bins=10, strategy='uniform')
    assert reliability([r], np.random.default_rng(0))['probability'].tolist() == pytest.approx(said)


def test_units_are_drawn_whole():
    """A hundred copies of each item are no new information."""
    r = run(noise=0.0)
    copies = pd.concat([r.assign(item=r['item'] + f'-{k}') for k in range(20)])
    ra, rb = (reliability([x], np.random.default_rng(0), bins=4) for x in (r, copies))
    assert (rb['high'] - rb['low']).to_numpy() == pytest.approx((ra['high'] - ra['low']).to_numpy(), rel=0.1)


def test_reliability_counts_every_item_once():
    runs = [run(s) for s in range(3)]
    t = reliability(runs, np.random.default_rng(0))
    assert t['n'].sum() == 3 * len(runs[0])
    assert (t['low'] <= t['right']).all() and (t['right'] <= t['high']).all()
    assert (t['right'] * t['n']).sum() == pytest.approx(3 * runs[0]['label'].sum())


@pytest.mark.parametrize('label', [0, 1])
def test_a_bin_whose_labels_agree_is_not_certain(label):
    """Wilson's limits, of the items that are in the bin in any run, each counted once."""
    runs = [run(s, noise=0.01).assign(label=label) for s in range(3)]
    t = reliability(runs, np.random.default_rng(0), bins=3)
    bins = np.array([(3 * expit(r['score'])).astype(int) for r in runs])
    for row in t.itertuples():
        n = int((bins == row.bin).any(0).sum())
        limits = proportion_confint(n * label, n, method='wilson')
        assert n < row.n / 2 and (row.low, row.high) == pytest.approx(limits)
        assert row.low <= row.right <= row.high and row.high - row.low > 0.01


def jensen_shannon(p, q):
    m = (p + q) / 2
    return (entropy(p, m) + entropy(q, m)) / 2


def test_agreement_by_hand_and_against_scipy():
    student, teacher = run(1, noise=1.0), run(0)
    v = agreement_values(student, teacher)
    for q in ('Q3', 'Q17'):
        s, t = (x[x['unit'] == q]['score'].to_numpy() for x in (student, teacher))
        both = [(np.array([a, 1 - a]), np.array([b, 1 - b])) for a, b in zip(expit(t), expit(s))]
        found = v.loc[q]
        assert found['tau'] == pytest.approx(kendalltau(s, t).statistic)
        assert found['top_1'] == (s.argmax() == t.argmax())
        assert found['js'] == pytest.approx(np.mean([jensen_shannon(*pair) for pair in both]))
    i = agreement([student], [teacher])
    assert {k: x.estimate for k, x in i.items()} == pytest.approx(v.mean().to_dict()) and i['js'].units == 60


def test_a_unit_without_an_order_has_no_rank_correlation():
    both = pd.concat([one([1.0], unit='A'), one([2.0, 1.0], unit='B'), one([1.0, 1.0], unit='C')])
    assert agreement_values(both, both)['tau'].isna().tolist() == [True, False, True]
    i = agreement([both], [both])
    assert (
        i['tau'].units == 1 and i['top_1'].units == 3 and 'tau' not in agreement([one([1.0])], [one([1.0])])
    )


def test_rows_find_each_other_whatever_their_order():
    student, teacher = run(1), run(0)
    other = pd.concat([student, student.assign(split='dev', score=0.0)])
    for rows in (student.sample(frac=1, random_state=0), other):
        assert agreement([rows], [teacher]) == agreement([student], [teacher])


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda r: r.assign(split='dev'), "nothing of split 'test'"),
        (lambda r: r.assign(score=np.nan), 'not finite'),
        (lambda r: r.iloc[1:], 'other items'),
        (lambda r: r.assign(label=1 - r['label']), 'other items or labels'),
        (lambda r: pd.concat([r, r.iloc[:1]]), 'other items'),
    ],
)
def test_predictions_that_do_not_fit_are_refused_in_one_sentence(change, words):
    with pytest.raises(StatsError, match=words) as e:
        align_predictions([run(), change(run(1))], 'test')
    assert '\n' not in str(e.value) and 'run 1' in str(e.value)


def test_students_need_their_teachers():
    with pytest.raises(ValueError, match='shorter'):
        agreement([run()], [])
    with pytest.raises(StatsError, match='at least one frame'):
        align_predictions([], 'test')


def of_classes(probabilities, labels):
    "Predictions of classes a, b, ...: a list of probabilities an example, and the number of its right class."
    rows = [
        dict(split='test', unit=f'e{i}', item='abcd'[k], label=int(k == label), score=3 + np.log(p))
        for i, (example, label) in enumerate(zip(probabilities, labels))
        for k, p in enumerate(example)
    ]
    return pd.DataFrame(rows)


FOUR = [[0.7, 0.1, 0.1, 0.1], [0.2, 0.4, 0.2, 0.2], [0.04, 0.03, 0.9, 0.03], [0.15, 0.15, 0.15, 0.55]]
FOUR += [[0.45, 0.2, 0.2, 0.15]]
# the second and the fourth example are of another class than the one predicted
FOUR_LABELS = [0, 0, 2, 1, 0]


def test_four_classes_by_hand():
    run = of_classes(FOUR, FOUR_LABELS)
    probability, right, _ = predicted_probabilities([run], kind='logits')
    assert probability[0] == pytest.approx([0.7, 0.4, 0.9, 0.55, 0.45])
    assert right[0].tolist() == [1, 0, 1, 0, 1]
    # two bins of equal width: .4 and .45, one of them right; .7, .9, .55, two right
    t = reliability([run], np.random.default_rng(0), bins=2, kind='logits')
    assert t['probability'].tolist() == pytest.approx([0.425, 2.15 / 3])
    assert t['right'].tolist() == pytest.approx([1 / 2, 2 / 3]) and t['n'].tolist() == [2, 3]


def test_two_runs_of_four_classes_may_predict_different_ones():
    runs = [of_classes(FOUR, FOUR_LABELS), of_classes(FOUR[::-1], FOUR_LABELS)]
    _, right, _ = predicted_probabilities(runs, kind='logits')
    assert right.tolist() == [[1, 0, 1, 0, 1], [1, 0, 1, 1, 1]]
    v = agreement_values(runs[1], runs[0], kind='logits')
    assert v['top_1'].tolist() == [1, 0, 1, 0, 1]
    assert v['js'].tolist() == pytest.approx(list(map(jensen_shannon, np.array(FOUR), np.array(FOUR[::-1]))))
    t = reliability(runs, np.random.default_rng(0), bins=3, kind='logits')
    assert t['n'].sum() == 10 and (t["right"] * t["n"]).sum() == pytest.approx(7)


@pytest.mark.parametrize('label, share', [(0, 1.0), (1, 0.0)])
def test_a_bin_of_classes_whose_predictions_are_all_right_or_all_wrong_is_not_certain(label, share):
    runs = [of_classes([[0.7, 0.3]] * 12, [label] * 12)] * 3
    row = reliability(runs, np.random.default_rng(0), bins=2, kind='logits').iloc[0]
    assert row['right'] == share and row['n'] == 36
    limits = proportion_confint(int(12 * share), 12, method='wilson')  # 12 different examples
    assert (row['low'], row['high']) == pytest.approx(limits)


@pytest.mark.parametrize(
    'change, kind, words',
    [
        (lambda r: r, 'numbers', 'numbers, which have no probability'),
        (lambda r: r, 'probabilities', "kind='probabilities' must be one of"),
        (lambda r: r.iloc[1:], 'logits', 'each of the same two or more classes'),
        (lambda r: r.assign(label=0), 'logits', 'one right class'),
        (lambda r: r[r['item'] == 'a'], 'logits', 'two or more classes'),
    ],
)
def test_scores_that_are_no_probabilities_of_classes_are_refused(change, kind, words):
    runs = [change(of_classes(FOUR, FOUR_LABELS))]
    for ask in (
        lambda: reliability(runs, np.random.default_rng(0), kind=kind),
        lambda: agreement(runs, runs, kind=kind),
    ):
        with pytest.raises(StatsError, match=words) as e:
            ask()
        assert '\n' not in str(e.value)


def test_the_gain_of_distillation_is_scipys_tau_paired_by_question_and_seed():
    taught = [run(s, noise=0.3) for s in (1, 2, 3)]
    control = [run(s, noise=0.6) for s in (11, 12, 13)]
    teachers = [run(s, noise=0.2) for s in (21, 22, 23)]
    # a question without an order in one run counts in none
    control[1].loc[control[1]['unit'] == 'Q7', 'score'] = 1.0
    units = sorted(set(taught[0]['unit']) - {'Q7'})

    def tau(s, t, unit):
        return kendalltau(*(x.loc[x['unit'] == unit, 'score'] for x in (s, t))).statistic

    def taus(students):
        return np.array([[tau(s, t, u) for u in units] for s, t in zip(students, teachers)])

    found = tau_gain(taught, control, teachers, np.random.default_rng(0))
    difference = taus(taught) - taus(control)
    expected = crossed_interval(difference)
    assert (found.difference.n, found.difference.units) == (3, 59)
    for name in ('estimate', 'low', 'high'):
        assert getattr(found.difference, name) == pytest.approx(getattr(expected, name))
    assert found.test.p == pytest.approx(crossed_test(difference).p) and found.difference.low > 0
    assert found.taught.estimate == pytest.approx(taus(taught).mean())
    # held against the teacher of another seed it is another interval
    turned = tau_gain(taught, control, teachers[1:] + teachers[:1], np.random.default_rng(0))
    assert turned.difference.low != pytest.approx(expected.low)


def test_a_gain_needs_a_control_and_an_order():
    three = [run(s) for s in (1, 2, 3)]
    with pytest.raises(ValueError, match='longer'):
        tau_gain(three, [], three, np.random.default_rng(0))
    flat = [r.assign(score=1.0) for r in three]
    with pytest.raises(StatsError, match='no unit has an order'):
        tau_gain(three, flat, three, np.random.default_rng(0))
    one_seed = tau_gain(three[:1], three[1:2], three[2:], np.random.default_rng(0))
    assert one_seed.test.p is None and one_seed.test.reason == reason('one_seed')

"Fronts, their hypervolume, and the student to ship."

import math
from dataclasses import replace
import numpy as np
import pytest
from kdnotes.core.config import ConfigError
from kdnotes.search.front import (
    Objective,
    Trial,
    box,
    front,
    knee,
    pareto_with_seeds,
    ship,
    trials_table,
)

SCORE = Objective('score', 'dev accuracy', True)
SIZE = Objective('params', 'parameters', False)
BOTH = [SCORE, SIZE]


def trial(number, score, params, state='complete', **more):
    values = dict(score=score, params=params)
    return Trial(number, dict(layers=number), state, values, **dict(run_id=f'run-{number}') | more)


def random_trials(n, seed, grid=6):
    "Scores and sizes of few values, so that many are equal."
    rng = np.random.default_rng(seed)
    scores, sizes = rng.integers(1, grid, (2, n)).tolist()
    states = rng.choice(['complete', 'complete', 'infeasible'], n).tolist()
    return [trial(i, s / grid, float(p), state) for i, (s, p, state) in enumerate(zip(scores, sizes, states))]


@pytest.mark.parametrize('seed', range(20))
def test_the_front_is_what_a_plain_comparison_of_all_pairs_leaves(seed):
    trials = random_trials(25, seed)
    can_be = [t for t in trials if t.state == 'complete']

    def beaten(t):
        return any(
            o.values['score'] >= t.values['score']
            and o.values['params'] <= t.values['params']
            and o.values != t.values
            for o in can_be
        )

    found = front(trials, BOTH)
    assert sorted(t.number for t in found) == [t.number for t in can_be if not beaten(t)]
    sizes = [t.values['params'] for t in found]
    assert sizes == sorted(sizes)
    assert {t.number for t in front(trials[::-1], BOTH)} == {t.number for t in found}


def test_what_cannot_be_compared_is_not_on_the_front():
    trials = [
        trial(0, 0.5, 10.0),
        trial(1, None, 1.0),
        trial(2, math.nan, 1.0),
        trial(3, math.inf, 1.0),
        trial(4, 0.9, 1.0, state='infeasible', causes=('threshold',)),
        trial(5, 0.9, 1.0, state='running'),
        replace(trial(6, 0.9, 1.0), values=dict(score=0.9)),
    ]
    assert [t.number for t in front(trials, BOTH)] == [0]


def test_a_box_holds_all_complete_trials():
    trials = [trial(0, 0.7, 9.0), trial(1, 0.2, 3.0), trial(2, 0.1, 99.0, 'infeasible'), trial(3, 0.9, None)]
    assert box(trials, BOTH) == (dict(score=0.2, params=9.0), dict(score=0.7, params=3.0))
    with pytest.raises(ConfigError, match='no trial is complete'):
        box(trials[2:3], BOTH)


FOUR = [trial(0, 0.70, 400.0), trial(1, 0.60, 100.0), trial(2, 0.69, 200.0), trial(3, 0.72, 900.0)]


@pytest.mark.parametrize(
    'margin, number, by', [(0.0, 0, 'baseline'), (0.01, 2, 'margin'), (0.1, 1, 'margin')]
)
def test_the_smallest_within_the_margin_is_shipped(margin, number, by):
    "0.70 - 0.69 is more than 0.01 in binary numbers; it is not more to a user."
    choice = ship(FOUR, BOTH, FOUR[0], margin)
    assert (choice.trial.number, choice.by) == (number, by)


def test_the_sentence_of_a_choice():
    "The wording of each rule, from its numbers."
    none = [replace(t, state='infeasible', causes=('threshold',)) for t in FOUR]
    heavy = replace(FOUR[0], state='infeasible', values=dict(score=0.71, params=600.0))
    level = [trial(1, 0.70, 400.0), FOUR[0]]
    made = [
        ship(FOUR, BOTH, FOUR[0], 0.01),
        ship([heavy, FOUR[3]], BOTH, heavy),
        ship(level[:1], BOTH, level[1]),
        ship(FOUR, BOTH, FOUR[0]),
        ship(FOUR, [SCORE], FOUR[3]),
        ship(FOUR[1:2], BOTH, FOUR[0], 0.01),
        ship(FOUR[1:], BOTH, None),
        ship(none, BOTH, none[0]),
        ship([], BOTH, None),
    ]
    assert [c.sentence for c in made] == [
        "Ship run-2, trial 2 (layers=2): dev accuracy 0.6900 (98.6% of the baseline's 0.7000), "
        "parameters 200 (50.0% below the baseline's 400).",
        "Ship run-3, trial 3 (layers=3): dev accuracy 0.7200 (1.4% above the baseline's 0.7100), "
        "parameters 900 (50.0% above the baseline's 600).",
        'Ship run-1, trial 1 (layers=1): dev accuracy 0.7000 (equal to the baseline), '
        'parameters 400 (equal to the baseline).',
        'Ship run-0, the baseline (layers=0): dev accuracy 0.7000, parameters 400. '
        'No cheaper trial on the front is within 0 of its dev accuracy.',
        'Ship run-3, the baseline (layers=3): dev accuracy 0.7200. No trial is better.',
        "Ship run-1, trial 1 (layers=1): dev accuracy 0.6000 (85.7% of the baseline's 0.7000), "
        "parameters 100 (75.0% below the baseline's 400). It is the knee of the front: no trial is within "
        "0.01 of the baseline's dev accuracy.",
        'Ship run-2, trial 2 (layers=2): dev accuracy 0.6900, parameters 200. It is the knee of the front: '
        'the baseline has no dev accuracy.',
        'Nothing to ship: no trial satisfies all constraints. The best dev accuracy is 0.7200, from trial 3 '
        '(threshold).',
        'Nothing to ship: no trial has a dev accuracy yet.',
    ]


def test_a_score_that_is_an_error_is_kept_low():
    error = replace(SCORE, label='dev nll', higher_is_better=False)
    trials = [trial(0, 2.0, 400.0), trial(1, 2.04, 100.0), trial(2, 2.5, 10.0)]
    choice = ship(trials, [error, SIZE], trials[0], 0.05)
    assert choice.trial.number == 1
    assert choice.baseline == dict(score=2.0, params=400.0)
    assert "dev nll 2.04 (2.0% above the baseline's 2)" in choice.sentence


def test_without_a_baseline_to_hold_on_to_it_is_the_knee():
    failed = trial(0, None, 400.0, 'infeasible', causes=('time',))
    for baseline, known in ((None, {}), (failed, dict(params=400.0))):
        choice = ship([failed, *FOUR[1:]], BOTH, baseline, 0.01)
        assert (choice.trial.number, choice.by, choice.baseline) == (2, 'knee', known)
    # (0.69 - 0.60) / 0.12 of the score for 100 of 800 parameters
    assert knee(front(FOUR, BOTH), BOTH).number == 2
    assert knee(FOUR[:2], BOTH).number == 0  # two ends lose the same: the better score


def test_no_trial_that_holds_is_said_with_the_best_seen():
    trials = [replace(t, state='infeasible', causes=('threshold',)) for t in FOUR]
    choice = ship(trials, BOTH, trials[0], 0.01)
    assert (choice.trial, choice.by, choice.best.number) == (None, 'nothing', 3)
    assert ship([], BOTH, None).best is None


def test_means_over_seeds_decide_where_there_are_some():
    seeds = {
        'run-0': dict(score=[0.70, 0.66]),
        'run-1': dict(score=[0.60, 0.68]),
        'run-3': dict(score=[0.72, 0.60]),
    }
    assert [(t.number, t.values['score']) for t in pareto_with_seeds(FOUR, BOTH, seeds)] == [
        (1, pytest.approx(0.64)),
        (0, pytest.approx(0.68)),
    ]
    choice = ship(FOUR, BOTH, FOUR[0], 0.05, seeds)
    assert choice.trial.number == 1
    assert (choice.trial.values['score'], choice.baseline['score']) == pytest.approx((0.64, 0.68))


def test_tables_have_a_row_a_trial():
    trials = [*FOUR, trial(4, None, 5.0, 'infeasible', causes=('memory', 'time'), run_id=None)]
    table = trials_table(trials, BOTH)
    assert list(table) == ['number', 'run_id', 'layers', 'score', 'params', 'state', 'cause']
    assert table['cause'].iloc[-1] == 'memory, time' and math.isnan(table['score'].iloc[-1])

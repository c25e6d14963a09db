"""Costs are the sums their formulas say, nulls stay nulls with their reason,
and unlike things are never added.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from kdnotes.core.config import TASKS, task_info
from kinds import one_of_each
from kdnotes.stats import costs as C
from kdnotes.stats.costs import Cost, CostError, Sizes
from handmade import make_record

SIZES = Sizes({'dev': 300, 'test': 700}, metric='p_at_1', units=50, unit_examples=600)


def record(
    mode='full_kd',
    seed=0,
    *,
    train=(100.0, 9_000.0),
    teacher=(10.0, 400.0),
    evaluation=(2.0, 100.0),
    made=True,
    **more,
):
    r = make_record(mode, seed, curve=False)
    phases = dict(
        student=dict(seconds=train[0] + 1, device_j=train[1], cpu_s=1.0),
        evaluation=dict(seconds=evaluation[0], device_j=evaluation[1], cpu_s=1.0),
    )
    if teacher and mode.endswith('kd'):
        phases['teacher'] = dict(
            seconds=teacher[0] + 0.5 if made else 0.1, device_j=teacher[1] if made else 3.0, cpu_s=1.0
        )
    return (
        r
        | dict(
            run_id=f'{mode}-s{seed}',
            examples=2_000,
            resumed_at=[],
            phases=phases,
            metrics={'dev': {'map': 0.6}, 'test': {'map': 0.7, 'p_at_1': 0.6}},
            curve=[dict(step=5, set='dev', value=0.5), dict(step=9, set='dev', value=0.6)],
            time=r['time'] | dict(train_s=train[0], teacher_s=teacher[0] if phases.get('teacher') else None),
        )
        | more
    )


def teacher(seed=0, **more):
    return record('baseline', seed, **dict(train=(300.0, 40_000.0), evaluation=(6.0, 500.0)) | more)


def test_every_formula_by_hand():
    r = record()
    made = 700 + 300 + 300
    assert C.n_predictions(r, SIZES) == made
    each = C.per_1000_predictions(r, SIZES)
    assert (each.seconds, each.joules) == pytest.approx((2 * 1000 / made, 100 * 1000 / made))
    paid = C.payback(r, teacher(), SIZES)
    assert (paid.joules, paid.seconds) == pytest.approx((9_400 / (400 / made), 110 / (4 / made)))


@pytest.mark.parametrize(
    'made, why', [((2.0, 500.0), 'joules'), ((2.0, 700.0), 'joules'), ((6.0, 100.0), 'seconds')]
)
def test_a_student_that_is_not_cheaper_never_pays_back(made, why):
    paid = C.payback(record(evaluation=made), teacher(), SIZES)
    assert getattr(paid, why) is None and paid.reasons == {why: C.NEVER}


def test_a_machine_without_energy_still_has_times():
    why = 'this machine has no RAPL counters'

    def no_j(r):
        phases = {k: v | dict(device_j=None) for k, v in r['phases'].items()}
        return r | dict(phases=phases, reasons=r['reasons'] | {f'phases.{k}.device_j': why for k in phases})

    r, t = no_j(record()), no_j(teacher())
    for cost in (C.training_cost(r), C.signal_cost(r), C.per_1000_predictions(r, SIZES)):
        assert cost.seconds > 0 and cost.joules is None and cost.reasons == dict(joules=why)
    paid = C.payback(r, t, SIZES)
    assert paid.seconds > 0 and paid.joules is None and paid.reasons['joules'] == why


def test_a_record_of_the_schema_before_has_no_phases():
    old = make_record('full_kd', train_s=80.0) | dict(examples=1_000, metrics={'test': {'p_at_1': 0.5}})
    assert old['phases'] is None and C.training_cost(old).seconds == 80
    assert C.training_cost(old).reasons == dict(joules='made up')
    none = C.per_1000_predictions(old, SIZES)
    assert none == Cost(None, None, dict.fromkeys(C.UNITS, 'the record holds no phases'))
    counted = old | dict(energy=old['energy'] | dict(device_j=500.0))  # of the training alone, then
    assert C.training_cost(counted) == Cost(80.0, 500.0)


def test_a_run_in_two_sessions_knows_the_energy_of_the_last_alone():
    r = record(resumed_at=[4])
    cost = C.training_cost(r)
    assert cost.seconds == 100 and cost.joules is None and 'several sessions' in cost.reasons['joules']
    assert C.per_1000_predictions(r, SIZES).seconds is None


def test_the_signal_is_paid_by_who_made_it():
    maker = record(seed=0)
    reader = record('mixed_kd', made=False)
    stranger = record('full_kd', made=True) | dict(teacher_run_id='another')
    assert C.signal_cost(maker) == Cost(10.0, 400.0) == C.signal_cost(reader, [stranger, maker])
    alone = C.signal_cost(reader, [stranger])
    assert alone.seconds == 10 and alone.joules is None and 'there already' in alone.reasons['joules']
    assert C.signal_cost(record('full_student')) == C.FREE == C.signal_cost(teacher())


@pytest.mark.parametrize(
    'change',
    [
        dict(environment=dict(device='a GPU')),
        dict(parallel=dict(ranks=4, threads_per_rank=1)),
        dict(parallel=dict(ranks=1, threads_per_rank=1)),
    ],
)
def test_times_of_two_places_are_not_subtracted(change):
    moved = {k: teacher()[k] | v for k, v in change.items()}
    paid = C.payback(record(), teacher(**moved), SIZES)
    assert paid.seconds is None and paid.joules is None and 'different devices' in paid.reasons['seconds']


def test_records_that_do_not_belong_together_are_refused():
    with pytest.raises(CostError, match='give the record of its own'):
        C.payback(record(), teacher(1), SIZES)
    with pytest.raises(CostError, match='2 corpora'):
        C.payback_table([record(), record(seed=1, corpus_sha256='other')], SIZES)


def test_sizes_are_counted_in_the_tables():
    predictions = pd.DataFrame(
        [('dev', 'a')] * 3 + [('test', 'b')] * 4 + [('test', 'c')] * 5, columns=['split', 'unit']
    )
    units = pd.DataFrame(
        [('test', 'b', 'p_at_1'), ('test', 'b', 'map'), ('dev', 'a', 'p_at_1'), ('test', 'c', 'map')],
        columns=['split', 'unit', 'metric'],
    )
    kind = task_info('answer_selection').score_kind({})  # each candidate is judged by itself
    counted = C.sizes_of(predictions, units, 'test', 'p_at_1', kind)
    assert counted == Sizes(dict(dev=3, test=9), 'p_at_1', 1, 4)
    with pytest.raises(CostError, match='take those of a run'):
        C.sizes_of(predictions, units[units.metric == 'map'], 'test', 'p_at_1', kind)
    with pytest.raises(CostError, match='take those of one run'):
        C.sizes_of(predictions, pd.concat([units, units]), 'test', 'p_at_1', kind)


@pytest.mark.parametrize('task', TASKS)
def test_a_text_of_several_classes_or_tokens_is_one_example(task):
    """Three texts with a row for each of three classes: three predictions, so that a student that cost 110 s
    and saves 4 s in 3 + 3 + 3 predictions is paid back after 247.5 of them, and not after 742.5.
    """
    kind = task_info(task).score_kind({})
    rows = [(split, f'{split}{i}', k) for split in ('dev', 'test') for i in range(3) for k in range(3)]
    predictions = pd.DataFrame(rows, columns=['split', 'unit', 'item'])
    units = pd.DataFrame(
        [('test', f'test{i}', 'accuracy') for i in range(3)], columns=['split', 'unit', 'metric']
    )
    sizes = C.sizes_of(predictions, units, 'test', 'accuracy', kind)
    each = 9 if task == 'answer_selection' else 3
    assert sizes == Sizes(dict(dev=each, test=each), 'accuracy', 3, each)
    assert C.payback(record(), teacher(), sizes).seconds == pytest.approx(110 / (4 / (3 * each)))


# over seeds


def study(n=3, **more):
    return [
        r
        for seed in range(n)
        for f in [1 + 0.1 * seed]
        for r in (
            teacher(seed, evaluation=(6.0 * f, 500.0 * f)),
            record(seed=seed, evaluation=(2.0 * f, 100.0 * f), **more)
            | dict(teacher_run_id=f'baseline-s{seed}'),
        )
    ]


def test_payback_over_seeds_is_between_those_of_the_seeds():
    records = study()
    cell = C.payback_table(records, SIZES).table.loc['full_kd', 'joules']
    each = [C.payback(r, t, SIZES).joules for t, r in zip(records[::2], records[1::2])]
    assert min(each) < cell.estimate < max(each) and cell.low < min(each) and cell.n == 3
    one = C.payback_table(study(1), SIZES).table.loc['full_kd', 'joules']
    assert one.low is None and one.reason  # one seed has no interval


def fieller_by_search(x, y):
    "The ratios that a t test does not tell from the truth, looked for one by one."
    grid = np.linspace(0.2, 5, 4801) * x.mean() / y.mean()
    inside = [t for t in grid if scipy_stats.ttest_1samp(x - t * y, 0).pvalue >= 0.05]
    return min(inside), max(inside)


@pytest.mark.exhaustive
@pytest.mark.parametrize('n', one_of_each((3, 5, 9)))
def test_the_interval_of_a_ratio_of_means_is_fiellers(n):
    rng = np.random.default_rng(n)
    x, y = rng.normal(10, 1, n), rng.normal(4, 0.3, n)
    i = C.ratio_of_means(x, y)
    assert (i.low, i.high) == pytest.approx(fieller_by_search(x, y), rel=2e-3)
    assert i.low < i.estimate < i.high and i.estimate == pytest.approx(x.mean() / y.mean())


def test_a_seed_that_never_pays_back_is_counted_and_not_excluded():
    def spends(joules):
        records = study(5)
        evaluation = dict(seconds=2.0, device_j=joules, cpu_s=1.0)
        records[3] = records[3] | dict(phases=records[3]['phases'] | dict(evaluation=evaluation))
        return records

    records = spends(560.0)  # its teacher spends 550 J
    found = C.payback_table(records, SIZES)
    row = found.table.loc['full_kd']
    assert (row.never_joules, row.never_seconds, found.reasons) == (1, 0, {})
    paid = [C.payback(r, t, SIZES) for t, r in zip(records[::2], records[1::2])]
    x, y = (np.array([getattr(p, part).joules for p in paid]) for part in ('extra', 'saved'))
    assert y.min() < 0 and row.joules.n == 5 and row.joules.estimate == pytest.approx(x.mean() / y.mean())
    worse = C.payback_table(spends(9_000.0), SIZES)
    assert worse.table.loc['full_kd', 'joules'] is None and worse.table.loc['full_kd', 'never_joules'] == 1
    assert worse.reasons == {'full_kd.joules': f'{C.NEVER}, on average; it is not in 1 of 5 runs'}


def test_one_unknown_run_makes_the_arm_unknown():
    records = study()
    records[3] = records[3] | dict(resumed_at=[2])
    found = C.payback_table(records, SIZES)
    assert found.table.loc['full_kd', 'seconds'] is None
    assert 'several sessions' in found.reasons['full_kd.seconds']
    assert 'a teacher is missing' in C.payback_table(study()[1:], SIZES).reasons['full_kd.joules']


def test_busy_runs_are_counted():
    records = study()
    records[1] = records[1] | dict(machine=dict(load_average_mean=3.0, busy_share=0.3, cpu_steal=0.0))
    assert C.payback_table(records, SIZES).table.busy.tolist() == [1]

"""The model of a step: its units and limits, constants found again from steps that were made from known ones,
what is left out and predicted, curves, and rows that say too little.
"""

import math
from dataclasses import replace
import numpy as np
import pytest
from kdnotes.scaling import steptime as s
from kdnotes.core.config import ConfigError
from kdnotes.core.render import phrase

CPU = s.Machine(4e-3, 6e-3, 12e-3, spread=0.05, overlap=0.3, crowding=0.1, alpha_s=3e-4, byte_s=1 / 0.8e9)
GPU = s.Machine(1e-3, 2e-3, 5e-3, 0.0, 0.03, 0.5, 0.0, 2e-5, 1 / 100e9, 5e-5, 1 / 2e9, 1 / 10e9)
# two constants alone, which are fitted fast
SIMPLE = s.Machine(per_example_s=4e-3, byte_s=1 / 0.8e9)
BOTH = ('per_example_s', 'byte_s')
BASE = s.Step(16, 50, 32, 4, gradient_bytes=264e6, bucket_bytes=25 * 2**20)
SIZE = 27e6  # bytes of the gradients of `rows`


def rows(truth=CPU, noise=0.0, turns=5, seed=0):
    "Configurations of two cores, with steps made from known constants."
    rng = np.random.default_rng(seed)
    made = []
    for ranks in (1, 2, 4):
        for micro_batches, examples in ((1, 8), (4, 8), (8, 32), (50, 8)):
            for sync, mib in (('delayed', 25), ('every', 25), ('every', 1)):
                if ranks == 1 and (sync, mib) != ('delayed', 25):
                    continue
                sums = micro_batches if sync == 'every' else 1
                row = dict(
                    name=f'{ranks} ranks, {micro_batches} x {examples}, {sync}, {mib} MiB',
                    task='masked_lm',
                    ranks=ranks,
                    threads=1,
                    cores=2,
                    micro_batches=micro_batches,
                    examples=ranks * micro_batches * examples,
                    gradient_sync=sync,
                    bytes=SIZE * sums,
                    all_reduces=sums,
                    messages=sums * math.ceil(SIZE / (mib * 2**20)),
                )
                seconds = s.total_s(s.step_of(row), truth)
                made.append(row | dict(step_s=list(seconds * np.exp(noise * rng.normal(size=turns)))))
    return made


# ---- units ----


def test_the_ring_formula_against_a_ring_that_is_played():
    for ranks in (2, 3, 8):
        size, alpha_s, rate = 1e8, 1e-3, 1e9
        seconds = 0.0
        for _ in range(2):  # reduce-scatter, all-gather
            for _ in range(ranks - 1):
                seconds += alpha_s + size / ranks / rate  # all ranks send a chunk at the same time
        assert s.ring_all_reduce_s(size, ranks, alpha_s, rate) == pytest.approx(seconds)
    assert s.ring_all_reduce_s(1e9, 1, 1.0, 1.0) == 0 == s.ring_all_reduce_s(0, 8, 0.0, 1.0)


def test_bytes_and_bandwidth_have_their_units():
    beta = replace(GPU, alpha_s=0.0, alpha_between_s=0.0)
    half = replace(
        beta, byte_s=beta.byte_s / 2, ring_byte_s=beta.ring_byte_s / 2, link_byte_s=beta.link_byte_s / 2
    )
    full = s.hierarchical_all_reduce_s(264e6, BASE, beta)
    assert s.hierarchical_all_reduce_s(264e6, BASE, half) == pytest.approx(full / 2)
    assert s.hierarchical_all_reduce_s(2 * 264e6, BASE, beta) == pytest.approx(2 * full)
    assert full == pytest.approx(2 * 7 / 8 * 264e6 / 100e9 + 2 * 3 / 4 * 264e6 / 2e9)
    assert s.step_s(replace(BASE, gradient_bytes=0), GPU)['communication'] == 0
    assert s.step_s(replace(BASE, ranks=1, nodes=1), GPU)['communication'] == 0


def test_rings_share_the_work_until_the_link_is_full():
    beta = replace(GPU, alpha_s=0.0, alpha_between_s=0.0, byte_s=0.0)
    one, two, five, many = (
        s.hierarchical_all_reduce_s(264e6, replace(BASE, rings=n), beta) for n in (1, 2, 5, math.inf)
    )
    assert one == pytest.approx(2 * two) and one == pytest.approx(5 * five) and five == pytest.approx(many)


@pytest.mark.parametrize('buckets', [1, 2, 7])
@pytest.mark.parametrize('overlap', [0.0, 0.2, 2 / 3])
def test_what_is_hidden_against_buckets_that_are_played(buckets, overlap):
    for compute in (0.001, 0.05, 1.0):
        step = s.Step(8, 1, 4, gradient_bytes=1e8, bucket_bytes=1e8 / buckets, delay_s=0.002)
        machine = s.Machine(overlap=overlap, alpha_s=1e-3, byte_s=1e-9)
        each = s.ring_all_reduce_s(1e8 / buckets, 4, 1e-3, 1e9) + 0.002
        free = 0.0
        for k in range(buckets):
            ready = (k + 1) / buckets * overlap * compute
            free = max(free, ready) + each
        assert s.exposed_s(step, machine, compute) == pytest.approx(free - overlap * compute)


def test_the_slowest_rank_against_drawn_ones():
    machine = s.Machine(per_example_s=0.01, spread=0.2)
    rng = np.random.default_rng(0)
    for sync in ('delayed', 'every'):
        step = s.Step(10, 6, 8, sync=sync)
        drawn = 0.1 * (1 + 0.2 * rng.normal(size=(20_000, 6, 8)))
        seconds = drawn.sum(1).max(1) if sync == 'delayed' else drawn.max(2).sum(1)
        assert s.total_s(step, machine) == pytest.approx(seconds.mean(), rel=0.005)


def test_parts_add_up_and_summing_each_time_costs_more():
    every = replace(BASE, sync='every')
    delayed, each = s.step_s(BASE, GPU), s.step_s(every, GPU)
    assert sum(each.values()) == s.total_s(every, GPU) > s.total_s(BASE, GPU)
    assert each['communication'] == pytest.approx(50 * delayed['communication'])
    assert each['waiting'] == pytest.approx(math.sqrt(50) * delayed['waiting'])
    assert each['compute'] == delayed['compute'] == pytest.approx(50 * (2e-3 + 16e-3))


def test_efficiency_is_never_above_one_at_an_equal_batch():
    rng = np.random.default_rng(1)
    for _ in range(300):
        nodes, per_node = rng.integers(1, 9, size=2).tolist()
        step = s.Step(
            examples=float(rng.integers(1, 64)),
            micro_batches=int(rng.integers(1, 60)),
            ranks=nodes * per_node,
            nodes=nodes,
            sync=rng.choice(['delayed', 'every']).item(),
            gradient_bytes=float(rng.choice([0, 1e6, 1e9])),
            bucket_bytes=float(rng.choice([1e6, 1e8, math.inf])),
        )
        values = rng.exponential(size=12) * rng.integers(0, 2, size=12)
        values[0] += 0.1  # something is computed
        values[:5] *= (1e-2, 1e-2, 1e-2, 1e-3, 0.2)
        values[5] = min(values[5], 1.0)
        values[6:] *= (0.2, 1e-4, 1e-9, 1e-4, 1e-9, 1e-9)
        machine = s.Machine(*values.tolist())
        for equal_batch in (True, False):
            table = s.curve([machine], step, equal_batch=equal_batch)
            assert not len(table) or table['efficiency'].max() <= 1 + 1e-12


# ---- calibration ----


def test_constants_are_found_again():
    exact = s.calibrate(rows())
    for name in s.FREE:
        assert getattr(exact, name) == pytest.approx(getattr(CPU, name), rel=0.01), name
    noisy = s.calibrate(rows(noise=0.02))
    for name in ('per_example_s', 'fixed_s', 'optimizer_s', 'alpha_s', 'byte_s'):
        assert getattr(noisy, name) == pytest.approx(getattr(CPU, name), rel=0.25), name


@pytest.mark.exhaustive
def test_left_out_steps_are_predicted():
    made = rows(noise=0.02)
    table, machines = s.held_out(made)
    assert list(table['name']) == [row['name'] for row in made] and len(machines) == len(made)
    assert table['error_percent'].abs().median() < 4
    where = table.set_index('name').loc['4 ranks, 8 x 32, every, 1 MiB']
    assert where['error_percent'] == pytest.approx(100 * (where['predicted_s'] / where['observed_s'] - 1))


@pytest.mark.exhaustive
def test_a_left_out_row_is_not_seen():
    made = rows(SIMPLE)
    made[7] = made[7] | dict(step_s=[3 * made[7]['step_s'][0]])
    table, _ = s.held_out(made, BOTH)
    assert table['error_percent'][7] == pytest.approx(100 * (1 / 3 - 1), abs=1)
    again = made[7] | dict(name='again')  # the same configuration is left out with it
    twice, _ = s.held_out([*made, again], BOTH)
    assert twice['error_percent'][7] == pytest.approx(100 * (1 / 3 - 1), abs=1)


def test_steps_that_the_model_could_not_have_made_show_in_the_errors():
    odd = [r | dict(step_s=[r['step_s'][0] * (2.0 if r['ranks'] == 4 else 1.0)]) for r in rows(SIMPLE)]
    table, _ = s.held_out(odd, BOTH)
    assert table['error_percent'].abs().median() > 10


def test_waits_that_were_measured_are_fitted():
    made = rows()
    without = s.calibrate([row | dict(step_s=[1.3 * row['step_s'][0]]) for row in made])
    shown = []
    for row in made:
        parts = s.step_s(s.step_of(row), CPU)
        shown.append(row | dict(exposed_s=[parts['communication'] + parts['waiting']] * 3))
    exact = s.calibrate(shown)
    assert exact.byte_s == pytest.approx(CPU.byte_s, rel=0.01)
    slower = s.calibrate([row | dict(step_s=[1.3 * row['step_s'][0]]) for row in shown])
    assert slower.per_example_s > exact.per_example_s
    assert slower.byte_s < without.byte_s  # the waits were no longer, so it is not the links


def test_a_simulated_link_is_not_taken_for_the_own_one():
    slow = [
        r | dict(delay_ms=0.5, gbit_per_s=1.0, name=r['name'] + ', slow') for r in rows() if r['ranks'] == 2
    ]
    made = [r | dict(step_s=s.total_s(s.step_of(r), CPU)) for r in [*rows(), *slow]]
    every = next(s.step_of(r) for r in slow if r['messages'] == 26 * 4)
    assert every.delay_s == pytest.approx(2 * 0.5e-3 + 2 / 2 * SIZE / 26 * 8 / 1e9)
    assert s.calibrate(made).byte_s == pytest.approx(CPU.byte_s, rel=0.01)
    forgotten = s.calibrate([r | dict(delay_ms=0.0, gbit_per_s=None) for r in made])
    assert forgotten.byte_s > 2 * CPU.byte_s


@pytest.mark.exhaustive
def test_no_constant_is_below_zero():
    made = [row | dict(step_s=[0.1]) for row in rows()]  # nothing depends on anything
    machine = s.Machine()
    try:
        machine = s.calibrate(made)
    except ConfigError as why:
        assert 'the rows do not determine' in str(why)
    assert min(getattr(machine, name) for name in s.FREE) >= 0


# ---- rows that say too little, or nonsense ----


@pytest.mark.parametrize(
    'chosen, told',
    [
        (lambda r: r['ranks'] == 1, ['byte_s', 'alpha_s', 'crowding', 'spread', 'overlap']),
        (lambda r: r['examples'] == 8 * r['ranks'] * r['micro_batches'], ['per_example_s', 'fixed_s']),
    ],
)
def test_constants_that_no_row_tells_are_named(chosen, told):
    few = [row for row in rows() if chosen(row)]
    assert s.unidentified(few, machine=CPU) == told
    with pytest.raises(ConfigError, match='the rows do not determine ' + ' and '.join(told)):
        s.calibrate(few)


@pytest.mark.exhaustive
def test_as_many_constants_as_rows_tell():
    assert s.identified(rows()) == s.FREE
    assert s.identified([r for r in rows() if r['ranks'] == 1]) == ('per_example_s', 'optimizer_s', 'fixed_s')
    same = [r for r in rows() if r['examples'] == 8 * r['ranks'] * r['micro_batches']]
    assert set(s.FREE) - set(s.identified(same)) == {'fixed_s'}
    table, _ = s.held_out(same, s.identified(same))
    assert table['error_percent'].abs().max() < 1  # what cannot be told is not needed for more of the same


def test_a_row_that_alone_tells_a_constant_is_not_predicted():
    one = [row for row in rows() if row['ranks'] == 1]
    two = next(row for row in rows() if row['ranks'] == 2)
    table, machines = s.held_out([*one, two], ('per_example_s', 'fixed_s', 'optimizer_s', 'byte_s'))
    assert math.isnan(table['predicted_s'].iloc[-1]) and 'do not determine byte_s' in table['why'].iloc[-1]
    assert len(machines) < len(table)


@pytest.mark.parametrize(
    'changed, told',
    [
        (dict(task='answer_selection'), 'rows of several tasks'),
        (dict(ranks=3, nodes=2), '3 ranks cannot be shared out equally to 2 machines'),
    ],
)
@pytest.mark.filterwarnings('ignore:Mean of empty slice', 'ignore:invalid value')
def test_wrong_rows_are_refused(changed, told):
    made = rows()
    made[-1] |= changed
    with pytest.raises(ConfigError, match=told):
        s.calibrate(made)


def test_one_rank_sends_nothing():
    alone = dict(
        name='x', ranks=1, micro_batches=4, examples=8, gradient_sync='every', bytes=0, all_reduces=0
    )
    assert s.step_of(alone).gradient_bytes == 0 and s.total_s(s.step_of(alone), CPU) > 0
    made = [
        r | dict(exposed_s=[] if r['ranks'] == 1 else None, gbit_per_s=None, delay_ms=0.0) for r in rows()
    ]
    assert s.calibrate(made) == s.calibrate(rows())


# ---- more devices ----


def test_a_curve_at_an_equal_batch_and_at_an_equal_batch_a_rank():
    strong = s.curve([GPU, replace(GPU, ring_byte_s=4 * GPU.ring_byte_s)], BASE)
    assert set(strong['batch']) == {BASE.batch} and strong['efficiency'].is_monotonic_decreasing
    assert (strong['low'] < strong['high']).iloc[1:].all() and (strong['high'] == strong['speedup']).all()
    assert strong['low'][0] == strong['high'][0]  # eight devices are one machine
    weak = s.curve([GPU], BASE, equal_batch=False)
    assert list(weak['batch'] / weak['devices']) == [16 * 50] * 7
    assert weak['efficiency'].iloc[-1] > strong['efficiency'].iloc[-1]


def test_a_rank_without_an_example_is_left_out():
    assert list(s.curve([GPU], s.Step(4, 1, 8))['devices']) == [8, 16, 32]


@pytest.mark.parametrize(
    'machine, base, first, times',
    [
        (s.Machine(per_example_s=0.01), BASE, 'devices', 2.0),
        (s.Machine(1e-3, byte_s=1e-6), replace(BASE, micro_batches=1), 'bandwidth', 2.0),
        (
            s.Machine(1e-3, alpha_between_s=10.0),
            BASE,
            'accumulation',
            2.0,
        ),
        (
            s.Machine(1e-3, byte_s=1e-8),
            replace(BASE, sync='every'),
            'delayed',
            None,
        ),
    ],
)
def test_what_to_buy_next(machine, base, first, times):
    found = s.gains(machine, base)
    assert next(iter(found)) == first and list(found.values()) == sorted(found.values(), reverse=True)
    if times is None:
        times = s.total_s(base, machine) / s.total_s(replace(base, sync='delayed'), machine)
    assert found[first] == pytest.approx(times, rel=0.1) and times > 1


def test_what_gains_most_in_a_sentence():
    found = dict(bandwidth=1.984, devices=1.2, accumulation=1.0)
    assert phrase('scaling.jinja', 'gains', found) == (
        'Doubling the bandwidth helps most: it gives 1.98 times the examples per second (doubling the '
        'devices at the same batch size: 1.20, doubling accumulation and batch size: 1.00).'
    )

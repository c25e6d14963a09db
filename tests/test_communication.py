"""What travels between ranks: gradients in 16 bits or as low-rank factors,
once a step or after every micro-batch, in buckets of any size;
the real trainer in real ranks over gloo.
"""

import contextlib
import functools
import os
import numpy as np
import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from helpers import SameWord, flat, tiny_bert, tiny_config
from parity import trained_weights, way_apart
from ranks import launch

TWO = dict(micro_batch_tokens=32)  # examples of 16 tokens at once
RUNS = {
    'fp32': {},
    'fp16': dict(gradient_dtype='fp16'),
    'powersgd': dict(gradient_dtype='powersgd', epochs=24.0),
    'delayed': TWO,
    'every': TWO | dict(gradient_sync='every'),
    'fp16, delayed': TWO | dict(gradient_dtype='fp16'),
    'fp16, every': TWO | dict(gradient_dtype='fp16', gradient_sync='every'),
    'small buckets': dict(bucket_mib=0.02),
    'tiny buckets': dict(bucket_mib=0.01),
}
# each in ranks of its own
OTHERS = {
    'bf16': dict(gradient_dtype='bf16'),
    **{f'{sync}, uneven': dict(micro_batch_tokens=28, gradient_sync=sync) for sync in ('delayed', 'every')},
}
# of a number, the leading one included: rounding changes a number by at most 2**-bits of it,
BITS = {'fp16': 11, 'bf16': 8}
# and below fp16's normal numbers by at most half of its smallest one; bf16 goes as far down as fp32
SMALLEST = {'fp16': 2.0**-24, 'bf16': 0.0}
WAY = {'fp16': 0.02, 'bf16': 0.15}  # of final weights, as in test_precision.py and test_parity.py


@contextlib.contextmanager
def first_gradients(model):
    "Of the first step, by parameter: what this rank computed, and what the optimizer got."
    own = {}
    got = []
    register = DistributedDataParallel.register_comm_hook

    def noted(wrapper, state, hook):
        @functools.wraps(hook)
        def send(state, bucket):
            if not got:
                own.update((id(p), g.clone()) for p, g in zip(bucket.parameters(), bucket.gradients()))
            return hook(state, bucket)

        register(wrapper, state, send)

    def step(*_):
        sent = [p for p in model.parameters() if id(p) in own]  # the table's rows travel by themselves
        if not got:
            got.extend([flat(own[id(p)] for p in sent), flat(p.grad for p in sent)])

    DistributedDataParallel.register_comm_hook = noted
    hook = register_optimizer_step_pre_hook(step)
    try:
        yield got
    finally:
        DistributedDataParallel.register_comm_hook = register
        hook.remove()


def train_one(here, even: bool, parameters: dict) -> dict:
    "One training from the same start as every other, and what it left behind."
    from bench.profiling import replaced
    from kdnotes.train import loop as trainer
    from kdnotes.train.distributed import Waits
    from watching import watch

    model = tiny_bert()
    rows = []
    waits = []
    begin = trained_weights(model)
    config = tiny_config('full_student', ranks=here.ranks, **parameters)
    end = Waits.end

    def ended(of):
        before = of.seconds
        end(of)
        waits.append(of.seconds > before)

    with (
        first_gradients(model) as got,
        watch(model) as seen,
        replaced(Waits, 'end', ended),
    ):
        result = trainer.train(
            SameWord(even=even),
            model,
            config,
            here,
            lambda kind, **values: rows.append(dict(kind=kind, **values)),
        )
    return dict(
        update=trained_weights(model) - begin,
        loss=[r['loss'] for r in rows if r['kind'] == 'step'],
        own=got[0],
        got=got[1],
        waited=result.waited_s,
        waits=waits,
        **{
            name: [getattr(s, name) for s in seen.steps]
            for name in ('forwards', 'rounds', 'buckets', 'messages', 'bytes', 'checksums')
        },
    )


def train_all(names: list[str]) -> dict[str, dict]:
    "What a rank does."
    from kdnotes.train import distributed as runtime

    here = runtime.start(tiny_config('full_student', ranks=int(os.environ['WORLD_SIZE'])))
    notes = {
        name: train_one(here, 'uneven' not in name and name != 'powersgd', (RUNS | OTHERS)[name])
        for name in names
    }
    runtime.stop(here)
    return notes


@functools.cache
def trained(*names: str, ranks: int = 2, package=None) -> list[dict[str, dict]]:
    "The notes of each rank."
    return launch(
        'test_communication:train_all', list(names or RUNS), ranks=ranks, package=package, timeout_s=60
    )


def check_equal_on_all_ranks(ranks: list[dict]):
    "One training's notes, rank by rank: gradients of every step and final weights, to the last bit."
    for rank in ranks[1:]:
        assert rank['checksums'] == ranks[0]['checksums'] and (rank['update'] == ranks[0]['update']).all()
    assert np.abs(ranks[0]['update']).max() > 1e-2, 'something was learned'


def check_16_bits(ranks: list[dict], usual: list[dict], dtype: str):
    "A training that sends 16 bits, and one that sends fp32."
    check_equal_on_all_ranks(ranks)
    first, second = (rank['own'] for rank in ranks)
    np.testing.assert_allclose(
        usual[0]['got'],
        (first + second) / 2,
        rtol=1e-6,
        atol=1e-9,
        err_msg='fp32: the mean of what the ranks computed',
    )
    # each rank's number is rounded once, and their mean once more: at most half of 2 * 2**-bits * (|a| +
    # |b|); the same holds for halves of the smallest number
    bound = 1.01 * 2.0 ** -BITS[dtype] * (np.abs(first) + np.abs(second)) + 2 * SMALLEST[dtype]
    gap = np.abs(ranks[0]['got'].astype(float) - usual[0]['got'])
    assert (gap <= bound).all() and gap.max() > 0, f'{(gap / np.maximum(bound, 1e-30)).max()} of the bound'
    assert 0 < way_apart(usual[0], ranks[0]) < WAY[dtype]
    np.testing.assert_allclose(ranks[0]['loss'], usual[0]['loss'], rtol=0, atol=2.0 ** -BITS[dtype] * 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize('name', RUNS)
def test_ranks_stay_equal(name):
    check_equal_on_all_ranks([notes[name] for notes in trained()])


@pytest.mark.exhaustive
def test_waiting_is_counted_wherever_gradients_are_synchronised():
    "After each backward that is, and before the update for what travels by itself."
    for notes in trained():
        for name in ('delayed', 'every'):
            rounds = notes[name]['rounds']
            assert notes[name]['waited'] > 0
            assert notes[name]['waits'] == [True] * (sum(rounds) + len(rounds)), name


@pytest.mark.exhaustive
def test_what_travels_is_counted_as_it_is_sent():
    notes = trained()[0]
    size = 4 * len(notes['fp32']['got'])
    once, every, half, cut = (notes[name] for name in ('delayed', 'every', 'fp16, delayed', 'tiny buckets'))
    # beside the gradients, the words' rows and the ranks' agreement
    others = [sent - size for sent in once['bytes'][1:]]
    assert 0 < min(others) and max(others) < size
    for run, rounds, numbers in ((every, every['rounds'], size), (half, once['rounds'], size // 2)):
        assert [sent - n * numbers for sent, n in zip(run['bytes'][1:], rounds[1:])] == others
    more = [b - a for a, b in zip(once['messages'], cut['messages'])]
    assert more == [n - 1 for n in cut['buckets']]


def test_fp16_between_ranks_is_fp32_to_its_rounding():
    check_16_bits([notes['fp16'] for notes in trained()], [notes['fp32'] for notes in trained()], 'fp16')


def test_bf16_between_ranks_is_fp32_to_its_rounding():
    check_16_bits(
        [notes['bf16'] for notes in trained('bf16')], [notes['fp32'] for notes in trained()], 'bf16'
    )


def test_low_rank_factors_learn():
    notes = trained()[0]['powersgd']
    assert len(notes['loss']) == 96 and max(notes['rounds']) == 1
    assert np.mean(notes['loss'][-8:]) < 0.5 * np.mean(notes['loss'][:8]), (
        'it is used from the eleventh all-reduce on'
    )


@pytest.mark.parametrize('dtype', ['', 'fp16, '])
def test_synchronised_after_every_micro_batch_or_once(dtype):
    "The same gradient, added up in another order; in 16 bits it is rounded after every micro-batch."
    for notes in trained():
        once = notes[f'{dtype}delayed']
        every = notes[f'{dtype}every']
        assert once['forwards'] == every['forwards'] == [2, 1, 2, 2, 2, 2, 1, 2], 'micro-batches of this rank'
        assert once['rounds'] == [1] * 8 and every['rounds'] == every['forwards']
        np.testing.assert_allclose(
            every['got'],
            once['got'],
            rtol=0,
            atol=3 * 2.0**-11 * np.abs(once['got']).max() if dtype else 1e-6,
        )
        assert way_apart(once, every) < (WAY['fp16'] if dtype else 1e-4)


def uneven(name: str) -> list[dict]:
    ranks = [notes[name] for notes in trained(name, ranks=3)]
    check_equal_on_all_ranks(ranks)
    return ranks


@pytest.mark.exhaustive
def test_ranks_with_different_numbers_of_micro_batches():
    delayed = uneven('delayed, uneven')
    every = uneven('every, uneven')
    assert any(len(set(counts)) > 1 for counts in zip(*(rank['forwards'] for rank in delayed))), (
        'ranks with different numbers of micro-batches'
    )
    assert all(len(set(counts)) == 1 for counts in zip(*(rank['forwards'] for rank in every))), (
        'one that has run out goes along: the others would wait for it for ever'
    )
    assert every[0]['rounds'] == every[0]['forwards'] and max(every[0]['rounds']) > 1
    assert way_apart(delayed[0], every[0]) < 1e-4


def test_buckets_change_the_number_of_messages_and_nothing_else():
    "To the last bit: of two ranks' numbers there is one sum."
    notes = trained()[0]
    whole = notes['fp32']
    small = notes['small buckets']
    tiny = notes['tiny buckets']
    mib = 4 * len(whole['got']) / 2**20
    assert set(whole['buckets']) == {1} and 1 < small['buckets'][-1] < tiny['buckets'][-1]
    for run, most in ((small, mib / 0.02 + 1), (tiny, mib / 0.01 + 1)):
        assert len(set(run['buckets'][1:])) == 1 and run['buckets'][-1] <= most, (
            'a bucket is full before the next begins; the first step has another cut'
        )
        assert (
            run['rounds'] == whole['rounds'] == [1] * 8
            and (run['update'] == whole['update']).all()
            and run['checksums'] == whole['checksums']
        )

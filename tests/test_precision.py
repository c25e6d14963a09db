"""Loss scaling through the real trainer, in real ranks over gloo:
an overflow on any rank makes all of them skip the same step and halve the same scale.

The matmuls are fp16's own: a CPU computes them slowly, and `resolve` refuses that to users;
a runtime made by hand does it.
"""

import contextlib
import functools
import hashlib
import os
from dataclasses import asdict
import re
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from helpers import SameWord, flat, tiny_bert, tiny_config
from kdnotes.core.processes import Stopped
from kdnotes.train.failures import STOP, TrainingError
from kdnotes.train.precision import update_weights
from kdnotes.train.distributed import Runtime, start, stop
from parity import trained_weights, way_apart
from ranks import launch

# of a training; the number of the first step in an `overflow` row
STEPS = 8
FIRST = 1
# an example with a label, and the steps it is in
BAD = 13
AT = (2, 5)
# the scale torch's GradScaler begins with; one at which nothing overflows that is not made to
BEGIN = 2.0**16
LOW = 2.0**10
RANKS = [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)]


class Overflowing(SameWord):
    "The gradient of one example is infinite, on the rank that holds it."

    def loss_terms(self, outputs, batch, signal):
        rows = torch.from_numpy(batch.index == BAD)
        if rows.any():
            outputs.logits.register_hook(lambda gradient: gradient.masked_fill(rows[:, None], float('inf')))
        return super().loss_terms(outputs, batch, signal)


class Loud(SameWord):
    """A loss 64 times as large, so that scaled gradients are above fp16's largest number until the scale
    is lower.
    """

    def loss_terms(self, outputs, batch, signal):
        return {
            name: (64 * value, n) for name, (value, n) in super().loss_terms(outputs, batch, signal).items()
        }


class Hopeless(SameWord):
    "The loss is finite and its gradient never is."

    def loss_terms(self, outputs, batch, signal):
        outputs.logits.register_hook(lambda gradient: gradient * float('nan'))
        return super().loss_terms(outputs, batch, signal)


class LowScale(Runtime):
    "A scale that begins low, and doubles after two good steps."

    def scaler(self):
        return torch.amp.GradScaler(
            self.device.type, init_scale=LOW, growth_interval=2, enabled=self.dtype == 'fp16'
        )


@contextlib.contextmanager
def watched(model):
    """By step: was the optimizer told of an overflow, a hash of the weights after it,
    steps AdamW has taken, the scale after it.
    """
    notes = dict(overflows=[], weights=[], taken=[], scales=[])
    update = torch.amp.GradScaler.update

    def before(optimizer, *_):
        notes['overflows'].append(bool(getattr(optimizer, 'found_inf', 0.0)))

    def after(optimizer, *_):
        notes['weights'].append(hashlib.sha256(flat(model.parameters()).tobytes()).hexdigest())
        notes['taken'].append({int(state['step']) for state in optimizer.state.values()})

    def updated(scaler, *args):
        update(scaler, *args)
        notes['scales'].append(scaler.get_scale())

    hooks, torch.amp.GradScaler.update = (
        [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)],
        updated,
    )
    try:
        yield notes
    finally:
        torch.amp.GradScaler.update = update
        for hook in hooks:
            hook.remove()


def train_one(here: Runtime, task=SameWord, folder=None, on_step=lambda step: None, **parameters) -> dict:
    "One training from the same start as every other, and what it left behind."
    from kdnotes.train import loop as trainer

    model = tiny_bert()
    rows = []
    begin = trained_weights(model)
    config = tiny_config('mixed_student', ranks=here.ranks, **parameters)

    def on_row(kind, **values):
        rows.append(dict(kind=kind, **values))
        if kind == 'step':
            on_step(values['step'])

    with watched(model) as notes:
        result = trainer.train(task(), model, config, here, on_row, checkpoints=folder, key='tiny')
    return notes | dict(
        update=trained_weights(model) - begin,
        rows=[r for r in rows if r['kind'] == 'overflow'],
        loss=[r['loss'] for r in rows if r['kind'] == 'step'],
        count=result.overflow_steps,
        final_scale=result.final_scale,
    )


RUNS = {
    'default': (Overflowing, 'fp16', Runtime, {}),
    'low': (Overflowing, 'fp16', LowScale, {}),
    'low, micro-batches': (Overflowing, 'fp16', LowScale, dict(micro_batch_tokens=32)),
    'loud': (Loud, 'fp16', Runtime, dict(epochs=4.0)),
    'never': (SameWord, 'fp16', LowScale, {}),
    'fp32': (SameWord, 'fp32', Runtime, {}),
    'fp16 between ranks': (Overflowing, 'fp16', LowScale, dict(gradient_dtype='fp16')),
}  # name -> task, format, the runtime's kind, settings


def train_all(names: list[str]) -> dict[str, dict]:
    "What a rank does."
    here = start(tiny_config('full_student', ranks=int(os.environ['WORLD_SIZE'])))
    notes = {
        name: train_one(kind(**asdict(here) | dict(dtype=dtype, device=here.device)), task, **parameters)
        for name, (task, dtype, kind, parameters) in ((n, RUNS[n]) for n in names)
    }
    stop(here)
    return notes


def adamw_on_old_moments(
    started: bool,
    # sha256 of the weights, moments too small for a normal number
) -> tuple[str, int]:
    "What a rank does: half the weights had no gradient for long."
    if started:
        start(tiny_config('full_student'))
    torch.set_num_threads(2)
    drawn = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(1 << 20, generator=drawn))
    optimizer, (old, new) = torch.optim.AdamW([p], fused=True), p.data.tensor_split(2)
    for step in range(4):
        p.grad = torch.cat([torch.zeros_like(old), torch.randn(new.shape, generator=drawn)])
        optimizer.step()
        if not step:
            state = optimizer.state[p]
            state['exp_avg'][: len(old)], state['exp_avg_sq'][: len(old)] = 2e-40, 1e-10
    moments = optimizer.state[p]['exp_avg'].numpy()
    return hashlib.sha256(p.detach().numpy().tobytes()).hexdigest(), int(
        ((moments != 0) & (np.abs(moments) < np.finfo(np.float32).tiny)).sum()
    )


def test_moments_below_the_smallest_normal_number_are_zero_and_the_weights_the_same():
    (weights, small), (plain_weights, plain_small) = (
        launch('test_precision:adamw_on_old_moments', started)[0] for started in (True, False)
    )
    assert weights == plain_weights and small == 0 and plain_small == 1 << 19


@functools.cache
def trained(ranks: int, names: tuple[str, ...] = tuple(RUNS), package=None) -> list[dict[str, dict]]:
    "The notes of each rank."
    return launch('test_precision:train_all', list(names), ranks=ranks, package=package)


def check_same_steps_skipped(ranks: list[dict]):
    "One training's notes, rank by rank."
    main, *others = ranks
    steps = len(main['overflows'])
    assert [len(main[k]) for k in ('weights', 'taken', 'scales')] == [steps] * 3
    for rank in others:
        for what in ('overflows', 'scales', 'weights', 'count', 'final_scale'):
            assert rank[what] == main[what], f'{what} differ between ranks'
        assert (rank['update'] == main['update']).all() and rank['rows'] == []
    skipped = [i for i, over in enumerate(main['overflows']) if over]
    for i in range(1, steps):
        assert (main['weights'][i] == main['weights'][i - 1]) == (i in skipped), (
            f'weights stay as they are in a skipped step, and move in every other: {i}'
        )
    assert main['taken'][-1] == {steps - len(skipped)}, "AdamW's own count leaves skipped steps out"
    scales = [main['rows'][0]['scale'] if skipped[:1] == [0] else main['scales'][0], *main['scales']]
    for i in skipped:
        assert scales[i + 1] == scales[i] / 2
    assert main['rows'] == [dict(kind='overflow', step=FIRST + i, scale=scales[i]) for i in skipped], (
        'a row for each, with the scale that was too much'
    )
    assert main['count'] == len(skipped) and main['final_scale'] == main['scales'][-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize('ranks', RANKS)
@pytest.mark.parametrize('name', [n for n, run in RUNS.items() if run[1] == 'fp16'])
def test_every_rank_skips_the_same_step(ranks, name):
    check_same_steps_skipped([notes[name] for notes in trained(ranks)])


@pytest.mark.parametrize('ranks', RANKS)
@pytest.mark.parametrize('name', ['low', 'low, micro-batches', 'fp16 between ranks'])
def test_one_infinite_gradient_is_one_skipped_step(ranks, name):
    "It is in one micro-batch of one rank. The scale halves with it, and doubles after two good steps."
    for notes in trained(ranks):
        assert [i for i, over in enumerate(notes[name]['overflows']) if over] == [*AT]
        scale = LOW
        good = 0
        expected = []
        for i in range(STEPS):
            good = 0 if i in AT else good + 1
            scale *= 0.5 if i in AT else 2 if good == 2 else 1
            good %= 2
            expected.append(scale)
        assert notes[name]['scales'] == expected and len(set(expected)) > 1


@pytest.mark.parametrize('ranks', RANKS)
def test_scaling_finds_a_scale_that_fits(ranks):
    """Numbers too large for fp16 and no fault: at torch's own first scale every step overflows,
    until halving has made room.
    """
    for notes in trained(ranks):
        loud = notes['loud']
        assert (
            loud['overflows'][:2] == [True] * 2
            and not loud['overflows'][-1]
            and loud['scales'][0] == BEGIN / 2
        )
        assert (
            np.isfinite(loud['loss']).all()
            and np.isfinite(loud['update']).all()
            and np.abs(loud['update']).max() > 1e-3
        )


# fp16 keeps 11 bits of a number, bf16 8: an eighth of what test_parity.py allows bf16 (seen: losses 2e-4 and
# weights .009 of the way).
LOSS = 2.5e-3
WAY = 0.02


@pytest.mark.parametrize('ranks', RANKS)
def test_fp16_trains_as_fp32_does(ranks):
    notes = trained(ranks)[0]
    assert not any(notes['never']['overflows']) and max(notes['never']['scales']) == LOW * 2**4
    np.testing.assert_allclose(notes['never']['loss'], notes['fp32']['loss'], rtol=0, atol=LOSS)
    assert 0 < way_apart(notes['fp32'], notes['never']) < WAY


@pytest.mark.parametrize('ranks', RANKS[1:])
@pytest.mark.parametrize('name', ['low', 'low, micro-batches', 'fp16 between ranks'])
def test_ranks_do_not_matter_when_steps_are_skipped(ranks, name):
    one = trained(1)[0][name]
    many = trained(ranks)[0][name]
    np.testing.assert_allclose(many['loss'], one['loss'], rtol=0, atol=LOSS)
    assert way_apart(one, many) < WAY


@pytest.mark.parametrize('at', [2, 3, 6])
def test_the_scale_is_taken_up_with_the_training(tmp_path, at):
    """Stopped before or right after an overflow, and resumed:
    to the last bit the training that never stopped, its scale and its count of good steps included.
    """
    here = LowScale(torch.device('cpu'), 'fp16')

    def ask(step):
        STOP.requested = step == at

    whole = train_one(here, Overflowing)
    try:
        pytest.raises(Stopped, train_one, here, Overflowing, tmp_path, ask)
    finally:
        STOP.requested = False
    rest = train_one(here, Overflowing, tmp_path)
    assert (
        rest['scales'] == whole['scales'][at:]
        and rest['weights'] == whole['weights'][at:]
        and rest['count'] == whole['count'] == len(AT)
    )
    assert rest['rows'] == [row for row in whole['rows'] if row['step'] >= at + FIRST]


class Poisoned(SameWord):
    "The loss of one example is infinite."

    def loss_terms(self, outputs, batch, signal):
        terms = super().loss_terms(outputs, batch, signal)
        wrong = float('inf') if BAD in batch.index else 1.0
        return {name: (value * wrong, n) for name, (value, n) in terms.items()}


def test_an_infinite_loss_in_fp16_is_found_between_two_rows_of_the_log():
    "The sum of the losses since the last row says that one was infinite, and not which."
    epochs = 250.0  # a row every tenth step
    with pytest.raises(TrainingError, match='the first layer concerned: the loss itself') as raised:
        train_one(Runtime(torch.device('cpu'), 'fp16'), Poisoned, epochs=epochs)
    examples = re.search(r'training examples ([\d, ]+);', str(raised.value))[1].split(', ')
    assert str(BAD) in examples


def test_a_gradient_that_no_scale_makes_finite_ends_the_training():
    with pytest.raises(TrainingError, match='not finite at step'):
        train_one(Runtime(torch.device('cpu'), 'fp16'), Hopeless, epochs=16.0)


@pytest.mark.parametrize('norm, factor', [(0.01, 1.0), (4.0, 0.25)])
def test_small_gradients_are_not_scaled_up(norm, factor):
    "Clipping divides by the norm where it is above 1, and leaves the rest alone: AdamW's first moment tells."
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gradient = torch.tensor([[0.5, -0.5, 0.5, 0.5]]) * norm
    model.weight.grad = gradient.clone()
    never = torch.zeros((), dtype=torch.bool)
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    config = tiny_config('full_student', max_grad_norm=1.0)
    update_weights(model, optimizer, scaler, config, never, [model.weight.grad])
    np.testing.assert_allclose(optimizer.state[model.weight]['exp_avg'], 0.1 * factor * gradient, rtol=1e-5)

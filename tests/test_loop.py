"""The training loop, looked at from its sides: the steps, the rates, a step and the scores shared by ranks
that are played one after the other, the rows and totals of a training, and how it ends early.
"""

import contextlib
from collections import Counter
from pathlib import Path
from dataclasses import dataclass, field
import numpy as np
import pytest
import torch
import kdnotes
from helpers import CPU, SameWord, flat, tiny_bert, tiny_config, trained
from kdnotes.losses.targets import hard_target_ce
from kdnotes.tasks.base import Evaluation
from kdnotes.train import loop
from kdnotes.train.checkpoint import checkpoints
from kdnotes.train.distributed import Runtime
from kdnotes.train.failures import TrainingError
from kdnotes.train.gradient_stats import gradient_ranges
from kdnotes.train.evaluation import evaluate, predict
from watching import host_syncs
from kdnotes.train.loop import (
    Objective,
    accumulate,
    log_interval,
    rank_micro_batches,
    rate_factor,
    schedule_steps,
    with_steps,
)

# steps, rates and the optimizer


def test_no_line_of_ours_waits_for_the_device_within_a_step(monkeypatch):
    waits = Counter()

    def counted(half):
        def run(*args, **kwargs):
            with host_syncs() as found:
                result = half(*args, **kwargs)
            waits.update(found)
            return result

        return run

    monkeypatch.setattr(loop, 'accumulate', counted(loop.accumulate))
    monkeypatch.setattr(loop, 'update_weights', counted(loop.update_weights))
    loop.train(SameWord(), tiny_bert(), tiny_config('full_student'), CPU, lambda kind, **values: None)
    package = Path(kdnotes.__file__).parent
    assert waits and not [file for file in waits if package in file.parents]


def test_a_smoke_run_is_six_steps():
    total, steps = schedule_steps(SameWord(), tiny_config('full_student', smoke=True))
    assert total == len(list(steps)) == 6
    assert schedule_steps(SameWord(), tiny_config('full_student', smoke=True, epochs=1))[0] == 4


def test_training_for_some_steps():
    config = with_steps(SameWord(), tiny_config('full_student', smoke=True), 11, seed=5)
    assert schedule_steps(SameWord(), config)[0] == 11 and config.seed == 5 and config.data.smoke is False


# ranks, played one after the other


@dataclass(frozen=True)
class Played(Runtime):
    "A rank whose sums stay its own; what the ranks say to each other is known."

    said: tuple = ()

    def sum(self, values):
        return values

    def gather(self, value):
        return list(self.said)


class Counting(torch.nn.Module):
    "A model that counts its forward passes, and those whose gradients are not synchronised."

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.passes = []
        self.synchronised = True

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        self.passes.append(self.synchronised)
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)

    @contextlib.contextmanager
    def no_sync(self):
        self.synchronised = False
        yield
        self.synchronised = True


@dataclass
class Shares:
    "What ranks had of a step."

    losses: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    tokens: int = 0
    cells: int = 0
    passes: list = field(default_factory=list)


def shared(index, ranks, **parameters) -> Shares:
    "One step."
    found = Shares()
    config = tiny_config('full_student', **parameters)
    for rank in range(ranks):
        model = Counting(tiny_bert())
        objective = Objective(
            SameWord(), config, Played(torch.device('cpu'), 'fp32', rank, ranks), {'hard': 2.0}
        )
        losses, tokens, cells = accumulate(model, objective, CPU.scaler(), np.array(index))
        found.losses.append({name: value.item() for name, value in losses.items()})
        found.gradients.append(flat(p.grad for p in model.parameters()))
        found.tokens += tokens
        found.cells += cells
        found.passes.append(model.passes)
    return found


@pytest.mark.parametrize('sync', ['delayed', 'every'])
@pytest.mark.parametrize('ranks', [2, 3])
def test_ranks_share_a_step(ranks, sync):
    index = range(11)
    task = SameWord()
    model = tiny_bert()
    batch = task.batch('train', np.array(index))
    known = batch.labels >= 0
    loss = hard_target_ce(model(**batch.inputs).logits[known], batch.labels[known])
    (2 * loss).backward()
    parts = shared(index, ranks, micro_batch_tokens=32, gradient_sync=sync)
    assert sum(x['hard'] for x in parts.losses) == pytest.approx(loss.item(), rel=1e-5)
    assert sum(x['total'] for x in parts.losses) == pytest.approx(2 * loss.item(), rel=1e-5)
    assert parts.tokens == batch.tokens
    np.testing.assert_allclose(
        np.mean(parts.gradients, axis=0), flat(p.grad for p in model.parameters()), atol=1e-6
    )
    for passes in parts.passes:
        assert passes == ([True] * len(passes) if sync == 'every' else [False] * (len(passes) - 1) + [True])
    if sync == 'every':
        assert len({len(passes) for passes in parts.passes}) == 1, 'each backward is one of all ranks'


def test_ranks_go_as_often_as_they_must():
    task = SameWord()
    index = np.arange(11)
    config = tiny_config('full_student', micro_batch_tokens=32)
    ranks = [Played(torch.device('cpu'), 'fp32', rank, 3) for rank in range(3)]
    own = [len(rank_micro_batches(task, index, config, runtime)) for runtime in ranks]
    assert min(own) < max(own)
    for sync, passes in (('delayed', own), ('every', [max(own)] * 3)):
        parts = shared(index, 3, micro_batch_tokens=32, gradient_sync=sync)
        assert [len(of_a_rank) for of_a_rank in parts.passes] == passes


def test_a_rank_without_examples_adds_nothing():
    longest = int(SameWord().lengths('train').argmax())
    parts = shared([longest], 2)
    assert parts.losses[1] == dict(hard=0.0, total=0.0) and not parts.gradients[1].any()
    assert [len(passes) for passes in parts.passes] == [1, 1]
    assert parts.tokens == parts.cells == SameWord().lengths('train')[longest]


def test_ranks_share_the_scores():
    model = tiny_bert().train()
    whole = predict(model, SameWord(), 'dev', CPU, tokens=16)
    assert model.training and whole.shape == (5, 1) and whole.dtype == np.float32
    ranks = [
        predict(model, SameWord(), 'dev', Played(torch.device('cpu'), 'fp32', rank, 2), tokens=16)
        for rank in (0, 1)
    ]
    assert all((scores == 0).any() for scores in ranks)
    np.testing.assert_allclose(sum(ranks), whole, atol=1e-6)
    batch = SameWord().batch('dev', np.arange(5))
    with torch.no_grad():
        logits = model.eval()(**batch.inputs).logits
    np.testing.assert_allclose(whole[:, 0], logits[:, 1] - logits[:, 0], atol=1e-5)
    predict(model, SameWord(), 'dev', CPU)
    assert not model.training


def test_more_ranks_than_examples():
    model = tiny_bert()
    whole = predict(model, SameWord(), 'test', CPU)
    ranks = [
        predict(model, SameWord(), 'test', Played(torch.device('cpu'), 'fp32', rank, 2, said=(1, 0)))
        for rank in (0, 1)
    ]
    assert ranks[0].tolist() == whole.tolist() and ranks[1].tolist() == [[0.0]]


class Itself(SameWord):
    "A task that evaluates a model itself."

    evaluates_itself = True

    def evaluate_model(self, forward, sets):
        if self.fails:
            raise ValueError('no')
        logits = forward(self.batch('dev', np.arange(5))).logits
        self.seen = dict(
            ranks=(forward.rank, forward.ranks),
            graph=logits.requires_grad,
            training=forward.model.training,
            total=forward.sum(np.array([3.0])).tolist(),
        )
        return Evaluation({split: {'accuracy': 1.0} for split in sets}, None, None)


def test_a_task_may_evaluate_itself():
    task = Itself()
    model = tiny_bert().train()
    task.fails = False
    rank = Played(torch.device('cpu'), 'fp32', 1, 2)
    assert evaluate(model, task, ('dev',), rank).metrics == {'dev': {'accuracy': 1.0}}
    assert task.seen == dict(ranks=(1, 2), graph=False, training=False, total=[3.0]) and model.training
    task.fails = True
    with pytest.raises(ValueError, match='no'):
        evaluate(model, task, ('dev',), rank)
    assert model.training
    evaluate(model.eval(), SameWord(), ('dev',), CPU)
    assert not model.training


# the rows and the totals of a training


def test_rows_of_a_training():
    config = tiny_config('full_student', ranks=1, warmup_fraction=0.25)
    task = SameWord()
    _, rows, result = trained(task, config)
    assert rows[0] == dict(
        kind='start', ranks=1, threads_per_rank=None, steps=8, examples=25, precision='fp32', device='cpu'
    )
    kinds = [row['kind'] for row in rows]
    assert kinds == ['start', *['step'] * 4, 'eval', *['step'] * 4]
    lengths = task.lengths('train')
    plan = list(schedule_steps(task, config)[1])
    steps = [row for row in rows if row['kind'] == 'step']
    assert [row['step'] for row in steps] == list(range(1, 9))
    assert [row['epoch'] for row in steps] == [0] * 4 + [1] * 4
    assert [row['examples'] for row in steps] == np.cumsum([len(step.index) for step in plan]).tolist()
    tokens = np.cumsum([lengths[step.index].sum() for step in plan]).tolist()
    assert [row['tokens'] for row in steps] == tokens
    assert [row['learning_rate'] for row in steps] == pytest.approx(
        [config.train.learning_rate * rate_factor(step, 8, 0.25) for step in range(8)]
    )
    assert all(row['losses'] == {'hard': row['loss']} and row['elapsed_s'] > 0 for row in steps)
    seconds = [row['elapsed_s'] for row in steps]
    assert seconds == sorted(seconds)

    on_the_way = rows[5]
    assert (on_the_way['step'], on_the_way['epoch'], on_the_way['set']) == (4, 0, 'dev')
    assert on_the_way['metrics'].keys() == {'accuracy'} and 0 < on_the_way['elapsed_s'] <= seconds[4]
    points = [point for point in result.curve if 'loss' in point]
    assert points == [
        dict(step=row['step'], elapsed_s=round(row['elapsed_s'], 3), loss=row['loss']) for row in steps
    ]
    assert [point for point in result.curve if 'loss' not in point] == [
        dict(
            step=4,
            elapsed_s=round(on_the_way['elapsed_s'], 3),
            set='dev',
            metric='accuracy',
            value=on_the_way['metrics']['accuracy'],
        )
    ]

    cells = sum(len(step.index) * lengths[step.index].max() for step in plan)
    assert result.steps == 8 and result.epoch == 1 and result.examples == 50
    assert result.tokens == tokens[-1] and result.padding_share == pytest.approx(1 - tokens[-1] / cells)
    assert result.losses == {'hard': steps[-1]['loss'], 'total': steps[-1]['loss']}
    # the first two of eight steps are the warm-up
    warm = len(plan[0].index) + len(plan[1].index)
    rest = result.examples_per_s / (50 - warm), result.tokens_per_s / (tokens[-1] - tokens[1])
    assert rest[0] == pytest.approx(rest[1]) and 1 / rest[0] < result.train_s
    assert result.overflow_steps is result.final_scale is result.waited_s is None


def test_the_first_row_is_the_first_step_by_hand():
    config = tiny_config('full_student', ranks=1)
    task = SameWord()
    _, rows, _ = trained(task, config)
    step = next(schedule_steps(task, config)[1])
    model = tiny_bert()
    batch = task.batch('train', step.index)
    known = batch.labels >= 0
    loss = hard_target_ce(model(**batch.inputs).logits[known], batch.labels[known])
    loss.backward()
    assert rows[1]['loss'] == pytest.approx(loss.item(), rel=1e-5)
    norm = np.linalg.norm(flat(p.grad for p in model.parameters()))
    assert rows[1]['grad_norm'] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize('dtype', ['fp32', 'fp16'])
def test_rows_of_gradients(dtype):
    runtime = Runtime(torch.device('cpu'), dtype)
    _, rows, _ = trained(config=tiny_config('mixed_student', ranks=1, gradient_stats=3), runtime=runtime)
    assert [row['step'] for row in rows if row['kind'] == 'gradients'] == [3, 6]

    config = tiny_config('mixed_student', ranks=1, gradient_stats=1)
    _, rows, _ = trained(config=config, runtime=runtime)
    row = next(row for row in rows if row['kind'] == 'gradients')
    assert row['step'] == 1 and row['scale'] == 2.0**16 and row['scaled'] is (dtype == 'fp16')
    model = tiny_bert()
    index = next(schedule_steps(SameWord(), config)[1]).index
    accumulate(model, Objective(SameWord(), config, CPU, {'hard': 1.0}), CPU.scaler(), index)
    by_hand = gradient_ranges(((name, p.grad) for name, p in model.named_parameters()), 2.0**16)
    assert [layer['layer'] for layer in row['layers']] == [layer['layer'] for layer in by_hand]
    assert row['layers'][0]['elements'] < by_hand[0]['elements'], 'the words that training uses'
    for layer, same in zip(row['layers'][1:], by_hand[1:]):
        assert layer['elements'] == same['elements']
        assert layer['largest'] == pytest.approx(same['largest'], rel=1e-2)
        assert layer['scaled'] == pytest.approx(same['scaled'], abs=0.02)


class Epochs(SameWord):
    "A task that notes which epoch it is asked for."

    def __init__(self):
        super().__init__()
        self.asked = dict(batch=[], counts=[])

    def batch(self, split, index, epoch=0):
        if split == 'train':
            self.asked['batch'].append(epoch)
        return super().batch(split, index, epoch)

    def loss_counts(self, split, index, epoch=0):
        self.asked['counts'].append(epoch)
        return super().loss_counts(split, index, epoch)


def test_a_task_is_told_the_epoch():
    task = Epochs()
    trained(task)
    assert task.asked['counts'] == [0] * 4 + [1] * 4
    asked = task.asked['batch']
    assert asked == sorted(asked) and asked.count(1) == 8, 'once for its words, once to train'


def test_a_hundred_rows_are_enough_and_the_last_step_has_one():
    _, rows, _ = trained(config=tiny_config('full_student', ranks=1, epochs=50.25, batch_size=8))
    steps = [row['step'] for row in rows if row['kind'] == 'step']
    assert steps == [*range(2, 201, 2), 201]


# how a training ends early


class Broken(SameWord):
    "Its third step fails."

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.calls = 0

    def loss_terms(self, outputs, batch, signal):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().loss_terms(outputs, batch, signal)


@pytest.mark.parametrize('error', [MemoryError(), RuntimeError("can't allocate memory")], ids=repr)
def test_memory_that_runs_out_is_a_sentence(error):
    config = tiny_config('full_student', ranks=1)
    third = list(schedule_steps(SameWord(), config)[1])[2]
    longest = SameWord().lengths('train')[third.index].max()
    with pytest.raises(TrainingError) as e:
        trained(Broken(error), config)
    assert (
        f'memory ran out on cpu at step 3, in a micro-batch of 8 examples of up to {longest} tokens '
        f'(micro_batch_tokens={config.train.micro_batch_tokens})'
    ) in str(e.value)


def test_a_checkpoint_when_its_time_has_come(tmp_path):
    _, rows, _ = trained(
        config=tiny_config('full_student', ranks=1, checkpoint_minutes=1e-9), folder=tmp_path / 'soon'
    )
    assert [row['step'] for row in rows if row['kind'] == 'checkpoint'] == list(range(1, 8))
    trained(config=tiny_config('full_student', ranks=1, checkpoint_minutes=60), folder=tmp_path / 'late')
    assert checkpoints(tmp_path / 'late') == []


class Infinite(SameWord):
    "One example makes the loss infinite."

    def loss_terms(self, outputs, batch, signal):
        terms = super().loss_terms(outputs, batch, signal)
        return {name: (v * float('inf') if 13 in batch.index else v, n) for name, (v, n) in terms.items()}


def test_a_loss_that_is_not_finite_names_step_examples_and_what_is_kept(tmp_path):
    config = tiny_config('full_student', ranks=1, checkpoint_steps=1)
    number, index = next(
        (step.done, step.index) for step in schedule_steps(SameWord(), config)[1] if 13 in step.index
    )
    with pytest.raises(TrainingError) as e:
        trained(Infinite(), config, folder=tmp_path)
    said = str(e.value)
    assert said.startswith(f'loss or gradients are not finite at step {number}; the first layer concerned: ')
    named = said.partition('with training examples ')[2].partition(';')[0]
    assert sorted(map(int, named.split(', '))) == sorted(index)
    assert f'lower learning_rate={config.train.learning_rate:g}' in said
    assert said.endswith(f'the checkpoint before it stays in {tmp_path}')


class InfiniteOnce(SameWord):
    "Its third step's loss is infinite, and finite when it is computed again."

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss_terms(self, outputs, batch, signal):
        self.calls += 1
        terms = super().loss_terms(outputs, batch, signal)
        return {name: (v * float('inf') if self.calls == 3 else v, n) for name, (v, n) in terms.items()}


@pytest.mark.parametrize('epochs', [2, 60])  # with a row at every step, and at every second
def test_a_step_that_is_finite_when_it_is_done_again_is_told_as_such(epochs):
    config = tiny_config('full_student', ranks=1, epochs=epochs)
    third = list(schedule_steps(SameWord(), config)[1])[2]
    task = InfiniteOnce()
    with pytest.raises(TrainingError) as e:
        trained(task, config)
    assert task.calls == 4, 'three steps, and the third again'
    assert str(e.value) == (
        'loss or gradients are not finite at step 3; the first layer concerned: none when the step is done '
        f'again, with training examples {", ".join(map(str, third.index))}; '
        f'look at these, or lower learning_rate={config.train.learning_rate:g}'
    )


def test_in_fp16_losses_are_looked_at_where_all_ranks_write_a_row():
    "Every tenth step of a thousand; the sum of the losses since the row before does not say in which it was."
    task = InfiniteOnce()
    runtime = Runtime(torch.device('cpu'), 'fp16')
    with pytest.raises(TrainingError, match='not finite at step 10; .*: none when the step is done again'):
        trained(task, tiny_config('full_student', ranks=1, epochs=250), runtime=runtime)
    assert task.calls == 10 + 10, 'all ten are done again'


class Steep(SameWord):
    "The loss is finite and its gradient is not."

    def loss_terms(self, outputs, batch, signal):
        terms = super().loss_terms(outputs, batch, signal)
        nothing = (outputs.logits * 0).abs().sqrt().sum()
        return {name: (value + nothing, n) for name, (value, n) in terms.items()}


def test_a_gradient_that_is_not_finite_ends_a_training_whose_loss_is():
    model = tiny_bert()
    with pytest.raises(TrainingError, match='^loss or gradients are not finite at step 1; '):
        trained(Steep(), model=model)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ('steps', 'between'), [(1, 1), (99, 1), (1084, 10), (2000, 20), (8000, 20), (28_125, 28), (312_500, 312)]
)
def test_rows_of_a_long_training_come_often_and_are_at_most_a_thousand(steps, between):
    assert log_interval(steps) == between
    assert steps // between <= 1050 or steps < 1000

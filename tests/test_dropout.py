"""Ranks with dropout on: each draws its own, the same again with the same seed,
and together they train as two replicas would that add their gradients by hand.
"""

import hashlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SameWord, tiny_bert, tiny_config
from parity import trained_weights
from ranks import launch

RANKS = 2
DROPOUT = 0.2


def dropout_config(ranks: int = RANKS):
    "Several micro-batches a rank."
    return tiny_config('full_student', ranks=ranks, micro_batch_tokens=32)


def trained_rank() -> dict:
    "What a rank does: train a student with dropout, and note each mask of the first step."
    from kdnotes.train import distributed as runtime
    from kdnotes.train import cpu_fast_path
    from kdnotes.train import loop as trainer

    here = runtime.start(dropout_config())
    student = tiny_bert(dropout=DROPOUT)
    start = trained_weights(student)
    losses = []
    masks = []
    take = cpu_fast_path.DropoutRng.take

    def noted(bits, n):
        numbers = take(bits, n)
        masks.append(hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
        return numbers

    def on_row(kind, **values):
        if kind == 'step':
            losses.append(values['loss'])

    cpu_fast_path.DropoutRng.take = noted
    trainer.train(SameWord(), student, dropout_config(), here, on_row)
    runtime.stop(here)
    return dict(
        start=start,
        weights=trained_weights(student),
        losses=losses,
        masks=masks,
        torch_seed=torch.initial_seed(),
    )


@pytest.fixture(scope='module')
def ranks() -> list[dict]:
    return launch('test_dropout:trained_rank', ranks=RANKS)


def trained_by_hand() -> tuple[np.ndarray, list[float]]:
    """The weights and losses of replicas in one process:
    each sees its shard with its own dropout, their gradients are added, and a plain AdamW steps.
    """
    from kdnotes.distill.needed_positions import first_position
    from kdnotes.tasks.batching import micro_batches
    from kdnotes.core.streams import torch_seed
    from kdnotes.train.cpu_fast_path import DropoutRng
    from kdnotes.train.cpu_fast_path import FastPath
    from kdnotes.train.state import make_optimizer
    from kdnotes.train.loop import rate_factor
    from kdnotes.train.loop import schedule_steps

    config = dropout_config()
    task = SameWord()
    replicas = [tiny_bert(dropout=DROPOUT).train() for _ in range(RANKS)]
    own_dropout = [
        FastPath(replica, None, DropoutRng(torch_seed(config.seed, 'dropout', rank)))
        for rank, replica in enumerate(replicas)
    ]
    optimizers = [make_optimizer(replica, config) for replica in replicas]
    total, steps = schedule_steps(task, config)
    losses = []
    for step in steps:
        labelled = task.loss_counts('train', step.index)['hard']
        loss_sum = 0.0
        for rank, replica in enumerate(replicas):
            own_dropout[rank]._rng.start(step.number)
            for part in micro_batches(
                step.index, task.lengths('train'), config.train.micro_batch_tokens, rank, RANKS
            ):
                batch = task.batch('train', part)
                with first_position(replica):
                    logits = replica(**batch.inputs).logits
                loss = F.cross_entropy(logits, batch.labels, ignore_index=-1, reduction='sum') / labelled
                loss.backward()
                loss_sum += loss.item()
        losses.append(loss_sum)
        for parameters in zip(*(replica.parameters() for replica in replicas)):
            added = sum(p.grad for p in parameters if p.grad is not None)
            for p in parameters:
                p.grad = added.clone()
        for replica, optimizer in zip(replicas, optimizers):
            torch.nn.utils.clip_grad_norm_(replica.parameters(), config.train.max_grad_norm)
            for group in optimizer.param_groups:
                group['lr'] = config.train.learning_rate * rate_factor(
                    step.number, total, config.train.warmup_fraction
                )
            optimizer.step()
            optimizer.zero_grad()
    return trained_weights(replicas[0]), losses


@pytest.mark.exhaustive
def test_the_same_ranks_train_the_same_again(ranks):
    again = launch('test_dropout:trained_rank', ranks=RANKS)
    for before, now in zip(ranks, again):
        assert (
            (now['weights'] == before['weights']).all()
            and now['masks'] == before['masks']
            and now['losses'] == before['losses']
        )


def test_they_are_two_replicas_that_add_their_gradients(ranks):
    weights, losses = trained_by_hand()
    way = np.linalg.norm(weights - ranks[0]['start'])
    np.testing.assert_allclose(ranks[0]['losses'], losses, rtol=0, atol=2e-6)
    assert np.linalg.norm(weights - ranks[0]['weights']) <= 1e-4 * way


def check_own_streams(ranks: list[dict]) -> None:
    "What each rank draws is its own, in torch's generator and in the masks of the fast path."
    assert len({rank['torch_seed'] for rank in ranks}) == RANKS
    assert not set(ranks[0]['masks']) & set(ranks[1]['masks'])


def test_each_rank_draws_its_own(ranks):
    check_own_streams(ranks)

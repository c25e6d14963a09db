"""A task and models small enough to train in a blink, with what makes partitions go wrong:
unequal lengths, examples without a label, steps of one example.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
import numpy as np
import pandas as pd
import torch
from transformers import (
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)
from architectures import small_bert
from kdnotes.core.spec import Loss, RunConfig, TaskSettings
from kdnotes.core.parse import make_config
from kdnotes.core.processes import Stopped
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.tasks.batching import Batch, Ragged, pad_pairs
from kdnotes.losses.targets import hard_target_ce, soft_target_kl
from kdnotes.tasks.base import Evaluation, Primary, SignalSpec, Task
from kdnotes.train.distributed import Runtime
from kdnotes.train.failures import STOP
from kdnotes.train.loop import TrainResult, train

CPU = Runtime(torch.device('cpu'), 'fp32')

# word w of the first half is word w + HALF of the second
VOCABULARY = 80
HALF = 30


class SameWord:
    """Do both halves of a pair hold the same word? A quarter of the training examples has no label (-1),
    so that a term's count is not the number of examples.
    """

    name = 'same_word'
    auto_class = 'AutoModelForSequenceClassification'
    model_kwargs = {'num_labels': 2}
    evaluates_itself = False
    projected = ''
    unread_modules = ()
    loss = Loss()
    settings = TaskSettings()
    primary = Primary('dev', 'accuracy', True)
    evaluation_sets = ('dev', 'test')
    signal_spec = {'logits': SignalSpec((2,))}

    def __init__(
        self,
        n: int = 25,  # training examples
        even: bool = False,  # all of 16 tokens
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.splits = {
            split: self._pairs(rng, size, even) for split, size in dict(train=n, dev=5, test=1).items()
        }
        labels = self.splits['train'][2]
        # alone in a step when the batch size leaves one over: it must have a label
        longest = int(self.lengths('train').argmax())
        labels[[i for i in range(n) if i % 4 == 3 and i != longest]] = -1

    @staticmethod
    def _pairs(rng, n, even):
        rows = []
        labels = []
        for _ in range(n):
            first = rng.integers(10, 10 + HALF, 5 if even else rng.integers(1, 7))
            second = rng.integers(10 + HALF, 10 + 2 * HALF, 8 if even else rng.integers(1, 14))
            labels.append(int(rng.random() < 0.5))
            if labels[-1]:
                second[rng.integers(len(second))] = rng.choice(first) + HALF
            rows.append([1, *first, 2, *second, 2])
        return Ragged.from_rows(rows), np.array([r.index(2) + 1 for r in rows]), np.array(labels)

    def lengths(self, split):
        return self.splits[split][0].lengths

    def groups(self, split):
        return np.arange(len(self.splits[split][0]))

    def batch(self, split, index, epoch=0):
        ids, second, labels = self.splits[split]
        inputs, tokens = pad_pairs(ids, second, index)
        return Batch(np.asarray(index), inputs, torch.from_numpy(labels[index]), tokens)

    def signal(self, outputs, batch):
        return {'logits': outputs.logits}

    def loss_terms(self, outputs, batch, signal):
        known = batch.labels >= 0
        terms = {
            'hard': (hard_target_ce(outputs.logits[known], batch.labels[known], 'sum'), int(known.sum()))
        }
        return terms | (
            {'soft': (soft_target_kl(outputs.logits, signal['logits'], 2.0, 'sum'), len(known))}
            if signal
            else {}
        )

    def loss_weights(self, kd):
        return Task.loss_weights(self, kd)

    def loss_counts(self, split, index, epoch=0):
        return {'hard': int((self.splits[split][2][index] >= 0).sum()), 'soft': len(index)}

    def scores(self, outputs, batch):
        return outputs.logits.float().diff(dim=1)

    def evaluate(self, scores):
        metrics = {
            split: {'accuracy': float(((s[:, 0] > 0) == self.splits[split][2]).mean())}
            for split, s in scores.items()
        }
        return Evaluation(metrics, pd.DataFrame(), pd.DataFrame())


def tiny_bert(seed: int = 0, dropout: float = 0.0) -> BertForSequenceClassification:
    "Two layers of 32; weights large enough for the two segments to matter."
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        small_bert(VOCABULARY, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def tiny_teacher() -> BertForSequenceClassification:
    "In training mode and with dropout, as its own training would leave it; sure of what it says."
    teacher = tiny_bert(seed=7, dropout=0.3).train()
    with torch.no_grad():
        teacher.classifier.weight *= 10
    return teacher


def tiny_distilbert(seed: int = 0) -> DistilBertForSequenceClassification:
    "A student whose forward takes no token_type_ids."
    torch.manual_seed(seed)
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=2,
            hidden_dim=64,
            max_position_embeddings=32,
            initializer_range=0.1,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        )
    )


def tiny_config(mode: str, ranks: int = 1, **parameters) -> RunConfig:
    "Resolved, for a CPU."
    defaults = dict(threads_per_rank=1, epochs=2, learning_rate=3e-3, batch_size=8)
    return resolve(
        make_config(mode=mode, ranks=ranks, **defaults | parameters), Machine('cpu', cores=2), 'embedded'
    )


def as_configured(task, config: RunConfig):
    "A task with the weights and the temperature of a configuration."
    task.loss = config.loss or Loss()
    if hasattr(task, 'settings'):
        given = config.task_settings
        weights = dict(ranking_weight=given.ranking_weight, pointwise_weight=given.pointwise_weight)
        task.settings = task.settings.model_copy(update=weights)
    return task


def flat(tensors) -> np.ndarray:
    "All numbers of some tensors, end to end."
    return torch.cat([t.detach().float().flatten() for t in tensors]).numpy().copy()


class Training(NamedTuple):
    "What a training has left."

    weights: np.ndarray | None  # None where it was stopped
    rows: list[dict]
    result: TrainResult | None

    @property
    def losses(self) -> dict[int, float]:  # step -> loss
        return {row['step']: row['loss'] for row in self.rows if row['kind'] == 'step'}


def trained(
    task=None,
    config: RunConfig | None = None,
    model=None,
    runtime: Runtime = CPU,
    signal: Callable | None = None,
    folder: Path | None = None,  # of its checkpoints
    stop_after: int | None = None,  # the step at which it is asked to stop
    look: Callable = lambda model, kind, values: None,  # at the model, with each row
) -> Training:
    "A training to its end, or until it is stopped."
    task, config, model = task or SameWord(), config or tiny_config('full_student'), model or tiny_bert()
    rows = []

    def on_row(kind, **values):
        rows.append(dict(kind=kind, **values))
        look(model, kind, values)
        if kind == 'step':
            STOP.requested = values['step'] == stop_after

    try:
        result = train(task, model, config, runtime, on_row, signal, checkpoints=folder, key='run')
    except Stopped:
        return Training(None, rows, None)
    finally:
        STOP.requested = False
    return Training(flat(model.parameters()), rows, result)


def one_sentence(error) -> str:
    "What a refusal says, in one line."
    text = str(error.value)
    assert text and '\n' not in text
    return text

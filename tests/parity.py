"Tiny trainings in real ranks, and what each rank notes down about them."

import contextlib
import copy
import hashlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import BertForSequenceClassification
from architectures import small_bert
from helpers import VOCABULARY, SameWord, flat, tiny_bert, tiny_config, tiny_distilbert, tiny_teacher
from ranks import launch


def tiny_narrow(seed: int = 0) -> BertForSequenceClassification:
    "Half as wide as its teacher, with half as many attention heads."
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        small_bert(VOCABULARY, hidden_size=16, num_attention_heads=1, intermediate_size=32)
    )


def tiny_slim(seed: int = 0) -> BertForSequenceClassification:
    "Half as wide as its teacher, with as many attention heads."
    torch.manual_seed(seed)
    return BertForSequenceClassification(small_bert(VOCABULARY, hidden_size=16, intermediate_size=32))


def tiny_pruned(seed: int = 0) -> BertForSequenceClassification:
    "One head of two in each layer, and a third layer that is new."
    from kdnotes.core.parse import make_config
    from kdnotes.distill.students import shape_student

    return shape_student(tiny_bert(seed), make_config(layers=3, heads=1))


STUDENTS = dict(
    bert=tiny_bert, distilbert=tiny_distilbert, narrow=tiny_narrow, slim=tiny_slim, pruned=tiny_pruned
)


@dataclass(frozen=True)
class Run:
    "One training, from the same start and with the same steps as every other with this student."

    ranks: int = 1
    kd: bool = True
    dtype: str = 'fp32'
    tokens: int = 8192  # of a micro-batch
    even: bool = False  # examples of 16 tokens each, so that a budget of k * 16 is k examples
    signal: str = 'online'  # or the storage format of a cache
    student: str = 'bert'
    ranking: str = 'none'  # or a loss between the candidates of a question
    # or a loss between hidden states, and value relations with it; 'all': TinyBERT's losses and all relations
    hidden: str = 'none'


class World:
    """The notes of runs, a list by rank. A run is made when it is first asked for,
    and with it the planned ones that have as many ranks.
    """

    def __init__(self, folder: Path, plan: tuple[Run, ...] = (), package: Path | None = None):
        self.folder = folder
        self.plan = plan
        self.package = package
        self.notes = {}

    def __getitem__(self, run: Run) -> list[dict]:
        if run not in self.notes:
            runs = [run, *(r for r in self.plan if r.ranks == run.ranks and r != run and r not in self.notes)]
            by_rank = launch('parity:train_all', runs, self.folder, ranks=run.ranks, package=self.package)
            self.notes |= dict(zip(runs, zip(*by_rank)))
        return self.notes[run]


def intermediate(hidden: str, **more) -> dict:
    "Parameters of a training that learns from intermediate layers."
    if hidden == 'all':
        more = dict(attention_loss='mse', embedding_loss='mse', relation_loss='qkv', relation_heads=8) | more
        hidden = 'mse'
    return (
        dict(
            signal='online',
            student_layers=(0, 1),
            hidden_loss=hidden,
            relation_loss='values',
            relation_weight=3.0,
        )
        | more
    )


def ranked_corpus(
    sizes=(3, 1, 5, 2, 8, 4, 2),  # candidates of each training question
):  # a kdnotes.tasks.sources.Corpus of made-up words
    "Questions of very different size; some have no right candidate, one has two and one has nothing else."
    from kdnotes.tasks.sources import Corpus

    rng = np.random.default_rng(3)
    rows = []
    for q, size in enumerate(sizes):
        right = {0: {1}, 2: {0, 3}, 3: {0, 1}, 4: {7}, 6: {0}}.get(q, set())
        for i in range(size):
            words = [
                ' '.join(f'w{w}' for w in rng.integers(0, 60, rng.integers(1, most))) for most in (7, 14)
            ]
            rows.append(
                dict(
                    question_id=f'Q{q}',
                    question=words[0],
                    document_id=f'D{q % 3}',
                    document_title='',
                    sentence_id=f'D{q % 3}-{i}',
                    sentence=words[1],
                    label=int(i in right),
                )
            )
    return Corpus('made up', 'made up', '', dict(train=rows, dev=rows[:9], test=rows[:4]), 'x')


def ranked_task(ranking: str = 'none', **more):
    "The real task, with a word's number as its token."
    from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
    from kdnotes.tasks.batching import EncodedPairs, Ragged
    from kdnotes.core.spec import Loss

    settings = AnswerSelectionSettings(train_questions='all', ranking_loss=ranking)
    task = AnswerSelection(ranked_corpus(), loss=Loss(**more), settings=settings)

    def ids(text, after):
        return [*(10 + int(w[1:]) for w in text.split()), after]

    encoded = {}
    for split, rows in task.rows.items():
        pairs = [([1, *ids(r['question'], 2)], ids(r['sentence'], 2)) for r in rows]
        encoded[split] = (
            Ragged.from_rows([a + b for a, b in pairs]),
            np.array([len(a) for a, _ in pairs]),
        )
    task.pairs = EncodedPairs(encoded)
    return task


def train_all(runs: list[Run], folder: Path) -> list[dict]:
    "What a rank does."
    from kdnotes.train import distributed as runtime

    here = runtime.start(tiny_config('full_student', ranks=runs[0].ranks))
    notes = [_train(run, replace(here, dtype=run.dtype), folder) for run in runs]
    runtime.stop(here)
    return notes


def _train(run: Run, here, folder: Path) -> dict:
    "Train a tiny student, and note what can be compared."
    from kdnotes.train import evaluation, loop as trainer

    config = tiny_config(
        f"{'full' if run.dtype == 'fp32' else 'mixed'}_{'kd' if run.kd else 'student'}",
        ranks=run.ranks,
        micro_batch_tokens=run.tokens,
        ranking_loss=run.ranking,
        **({} if run.hidden == 'none' else intermediate(run.hidden)),
    )
    task = SameWord(even=run.even) if run.ranking == 'none' else ranked_task(run.ranking)
    student = STUDENTS[run.student]()
    teacher, rows, start = (
        _Teacher(run, config, task, here, folder) if run.kd else None,
        [],
        trained_weights(student),
    )
    with _watch(student) as notes:
        result = trainer.train(
            task,
            student,
            config,
            here,
            lambda kind, **values: rows.append(dict(kind=kind, **values)),
            teacher,
        )
    scores = {split: evaluation.predict(student, task, split, here) for split in task.evaluation_sets}
    return notes | dict(
        update=trained_weights(student) - start,
        losses=np.array([[r['loss'], *r['losses'].values()] for r in rows if r['kind'] == 'step']),
        examples=np.diff([0, *(r['examples'] for r in rows if r['kind'] == 'step')]),
        totals=(result.steps, result.examples, result.tokens),
        scores=scores,
        teacher=teacher.notes() if teacher else None,
    )


def trained_weights(student) -> np.ndarray:
    """All weights but the keys' biases: softmax cancels them, so their gradient is rounding error,
    which Adam divides by its own size.
    """
    return flat(p for name, p in student.named_parameters() if not name.endswith(('key.bias', 'k_lin.bias')))


def way_apart(a: dict, b: dict) -> float:
    "How far apart two trainings ended, as a share of how far the first went."
    return np.linalg.norm(a['update'] - b['update']) / np.linalg.norm(a['update'])


@contextlib.contextmanager
def _watch(student):
    """At each step: a hash of the gradients, forwards and all-reduces since the step before;
    the last step's gradients; warnings.
    """
    notes, since, construct = (
        dict(gradients=[], forwards=[], all_reduces=[]),
        dict(forwards=0, all_reduces=0),
        DistributedDataParallel.__init__,
    )

    def forward(model, args):
        since['forwards'] += model.training

    def all_reduce(group, bucket):
        since['all_reduces'] += 1
        return allreduce_hook(group, bucket)

    def constructed(wrapper, *args, **kwargs):
        construct(wrapper, *args, **kwargs)
        wrapper.register_comm_hook(None, all_reduce)

    def step(optimizer, *_):
        notes['last_gradient'] = flat(p.grad for p in student.parameters())
        trained = [p.grad for group in optimizer.param_groups for p in group['params']]  # of projections too
        notes['gradients'].append(hashlib.sha256(flat(trained).tobytes()).hexdigest())
        notes['trained'] = sum(g.numel() for g in trained)
        for name in since:
            notes[name].append(since[name])
        since.update(forwards=0, all_reduces=0)

    hooks = [register_optimizer_step_pre_hook(step), student.register_forward_pre_hook(forward)]
    DistributedDataParallel.__init__ = constructed
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter('always')
            yield notes
        notes['warnings'] = sorted({f'{w.category.__name__}: {w.message}' for w in heard})
    finally:
        DistributedDataParallel.__init__ = construct
        for hook in hooks:
            hook.remove()


class _Teacher:
    "The trainer's `signal`; beside it, the teacher alone on every batch the trainer asks about."

    def __init__(self, run: Run, config, task: SameWord, here, folder: Path):
        from kdnotes.distill import intermediate as layers, teacher_cache as teacher

        self.network = tiny_teacher()
        self.calls = set()
        self.signals = []
        self.alone = []
        self.batch = None
        self.copy = copy.deepcopy(self.network).eval()
        self.start = flat(self.network.parameters())
        self.network.register_forward_pre_hook(
            lambda network, args: self.calls.add(
                (network.training, torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'))
            )
        )
        if run.signal == 'online':
            self.signal = layers.online_teacher(task, self.network, config)
        else:
            key = dict(
                weights_sha256='w',
                config_sha256='f',
                corpus_sha256='c',
                tokenizer_sha256='t',
                split='train',
                max_length=32,
                forward_dtype='fp32',
                storage_dtype=run.signal,
                subset='all',
            )
            self.signal = teacher.make_signal(
                task,
                self.network,
                folder / f'{run.signal}-{run.ranks}',
                key,
                tokens=64,
                workers=teacher.Workers(here.rank, here.ranks, here.barrier),
            )

        self.shape = getattr(self.signal, 'shape', None)

    @torch.no_grad()
    def answer(self, inputs: dict) -> torch.Tensor:
        return self.copy(**inputs).logits

    def __call__(self, batch) -> dict[str, torch.Tensor]:
        self.batch, signal = batch, self.signal(batch)
        self.signals.append(signal['logits'])
        self.alone.append(self.answer(batch.inputs))
        return signal

    def notes(self) -> dict:
        one_segment = self.answer(
            self.batch.inputs | dict(token_type_ids=torch.zeros_like(self.batch.inputs['token_type_ids']))
        )
        return dict(
            signal=torch.cat(self.signals).detach().numpy(),
            alone=torch.cat(self.alone).numpy(),
            segments=(one_segment - self.alone[-1]).abs().mean().item(),
            calls=self.calls,
            gradients=any(s.requires_grad for s in self.signals)
            or any(p.grad is not None for p in self.network.parameters()),
            moved=bool((flat(self.network.parameters()) != self.start).any()),
        )

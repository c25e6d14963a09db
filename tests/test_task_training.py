"""Tasks with examples of their own kind in training, blocks and windows: however it is divided, stopped
and gone on with, and whether the teacher's numbers are stored or computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
import numpy as np
import pytest
import torch
from architectures import small_bert
from ranks import launch
from tiny_lm import LENGTH, SPECIAL, WORDS, tiny_corpus, tiny_lm, tiny_lm_config, tiny_task, tiny_tokenizer
from transformers import BertForQuestionAnswering, BertForTokenClassification, BertModel
from kdnotes.core.spec import RunConfig
from kdnotes.core.parse import make_config
from kdnotes.core.processes import Stopped
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.distill import teacher_cache as te
from kdnotes.distill.intermediate import online_teacher
from kdnotes.tasks.embeddings import Embeddings
from kdnotes.tasks.extractive_qa import ExtractiveQA
from kdnotes.tasks.sources import Corpus
from kdnotes.tasks.token_classification import TokenClassification
from kdnotes.train import distributed as runtime
from kdnotes.train.failures import STOP
from kdnotes.train.evaluation import evaluate
from kdnotes.train.loop import train
from watching import watch

WINDOW = 20  # tokens


def passages() -> Corpus:
    "Asked for a word, the answer is the one behind it, where the passage has it; some passages are long."
    rng = np.random.default_rng(0)

    def rows(split: str, n: int) -> list[dict]:
        made = []
        for i in range(n):
            words = [f'w{w}' for w in rng.choice(WORDS, int(rng.integers(4, 22)), replace=False)]
            at = int(rng.integers(len(words) - 1))
            asked = words[at] if i % 3 else next(f'w{w}' for w in range(WORDS) if f'w{w}' not in words)
            begin = len(' '.join(words[: at + 1])) + 1
            answers = ((begin, begin + len(words[at + 1])),) if i % 3 else ()
            made.append(
                dict(
                    id=f'{split}-{i}',
                    question=asked,
                    context=' '.join(words),
                    answers=answers,
                    cluster=f'{split}-{i // 2}',
                )
            )
        return made

    return Corpus(
        'tiny',
        'folder',
        'nowhere',
        {s: rows(s, n) for s, n in dict(train=23, dev=9, test=8).items()},
        '0' * 64,
    )


def qa_config(mode: str = 'full_kd', ranks: int = 1, **parameters) -> RunConfig:
    "Resolved, for a CPU."
    defaults = dict(
        threads_per_rank=1,
        epochs=2,
        learning_rate=3e-3,
        batch_size=8,
        max_length=WINDOW,
        stride=4,
        adam_epsilon=1e-5,
        student_layers=(0, 1),
    )
    given = make_config(task='extractive_qa', mode=mode, ranks=ranks, **defaults | parameters)
    return resolve(given, Machine('cpu', cores=2), 'embedded', teacher_depth=2)


def qa_task(config: RunConfig) -> ExtractiveQA:
    task = ExtractiveQA.from_corpus(passages(), config)
    task.encode(tiny_tokenizer())
    return task


def qa_model(seed: int = 0, dropout: float = 0.0) -> BertForQuestionAnswering:
    torch.manual_seed(seed)
    return BertForQuestionAnswering(
        small_bert(len(SPECIAL) + WORDS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def tagged() -> Corpus:
    "A word is an entity of the kind that the word before it says; some texts are cut."
    rng = np.random.default_rng(0)

    def rows(split: str, n: int) -> list[dict]:
        made = []
        for i in range(n):
            numbers = rng.integers(0, WORDS, int(rng.integers(3, 26)))
            tags = ['O', *(f'B-{"AB"[w % 2]}' if w % 3 else 'O' for w in numbers[:-1])]
            words = [f'w{w}' for w in numbers]
            made.append(
                dict(
                    id=f'{split}-{i}',
                    text=' '.join(words),
                    tokens=words,
                    tags=tags,
                    cluster=f'{split}-{i // 2}',
                )
            )
        return made

    splits = {split: rows(split, n) for split, n in dict(train=23, dev=9, test=8).items()}
    return Corpus('tiny', 'folder', 'nowhere', splits, '0' * 64)


def tag_config(mode: str = 'full_kd', ranks: int = 1, **parameters) -> RunConfig:
    "Resolved, for a CPU."
    defaults = dict(
        threads_per_rank=1,
        epochs=2,
        learning_rate=3e-3,
        batch_size=8,
        max_length=WINDOW,
        adam_epsilon=1e-5,
        student_layers=(0, 1),
    )
    given = make_config(task='token_classification', mode=mode, ranks=ranks, **defaults | parameters)
    return resolve(given, Machine('cpu', cores=2), 'embedded', teacher_depth=2)


def tag_task(config: RunConfig) -> TokenClassification:
    task = TokenClassification.from_corpus(tagged(), config)
    task.encode(tiny_tokenizer())
    return task


def tag_model(seed: int = 0, dropout: float = 0.0) -> BertForTokenClassification:
    torch.manual_seed(seed)
    shape = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=5)
    return BertForTokenClassification(small_bert(len(SPECIAL) + WORDS, **shape))


LONGEST = 14  # tokens of a query or a text


def collection() -> Corpus:
    "A query of three words, a text with two of them, which is relevant, and one with one of them."
    rng = np.random.default_rng(0)

    def rows(split: str, n: int) -> list[dict]:
        made = []
        for i in range(n):
            words = [f'w{w}' for w in rng.choice(WORDS, int(rng.integers(8, 16)), replace=False)]
            for label in (1, 0):
                text = [*words[: 1 + label], *words[3 : int(rng.integers(5, 8))]]
                document = dict(document_id=f'{split}-{i // 2}', document_title='')
                ids = dict(question_id=f'{split}-{i}', sentence_id=f'{split}-{i}-{label}')
                texts = dict(question=' '.join(words[:3]), sentence=' '.join(text))
                made.append(document | ids | texts | dict(label=label))
        return made

    splits = {s: rows(s, n) for s, n in dict(train=23, dev=5, test=4).items()}
    return Corpus('tiny', 'folder', 'nowhere', splits, '0' * 64)


def embeddings_config(mode: str = 'full_kd', ranks: int = 1, **parameters) -> RunConfig:
    "Resolved, for a CPU."
    defaults = dict(threads_per_rank=1, epochs=2, learning_rate=3e-3, batch_size=16, negatives_block=4)
    defaults |= dict(max_length=LONGEST, adam_epsilon=1e-5, student_layers=(0, 1))
    given = make_config(task='embeddings', mode=mode, ranks=ranks, **defaults | parameters)
    return resolve(given, Machine('cpu', cores=2), 'embedded', teacher_depth=2)


def embeddings_task(config: RunConfig) -> Embeddings:
    task = Embeddings.from_corpus(collection(), config)
    task.encode(tiny_tokenizer())
    return task


def encoder(seed: int = 0, dropout: float = 0.0) -> BertModel:
    torch.manual_seed(seed)
    model = BertModel(
        small_bert(len(SPECIAL) + WORDS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )
    model.pooler.requires_grad_(False)  # as `configure_model` does
    return model


@dataclass(frozen=True)
class Kind:
    "A task, and a model of it by a seed."

    config: Callable[..., RunConfig]
    task: Callable[[RunConfig], Any]
    model: Callable[..., torch.nn.Module]
    length: int  # of its longest example
    close: tuple[str, ...]  # metrics of `test` that all divisions share
    stored: dict = field(default_factory=dict)  # with which a signal can be stored


KINDS = dict(
    masked_lm=Kind(
        tiny_lm_config,
        tiny_task,
        tiny_lm,
        LENGTH,
        ('nll', 'pseudo_nll'),
        dict(masks='static', top_k=4, soft_on='masked', hidden_loss='none'),
    ),
    extractive_qa=Kind(qa_config, qa_task, qa_model, WINDOW, ()),
    token_classification=Kind(tag_config, tag_task, tag_model, WINDOW, ('nll',)),
    embeddings=Kind(embeddings_config, embeddings_task, encoder, 2 * LONGEST, ('ndcg_at_10',)),
)


@pytest.fixture(scope='module')
def here():
    return runtime.start(qa_config())


def flat_weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- the same training, however it is divided ----


def _trained(ranks: int, name: str, parameters: dict) -> dict:
    "What a rank notes of a training."
    torch.set_num_threads(1)
    kind = KINDS[name]
    # a gradient of nothing but rounding errors is not worth a full step, as it is with AdamW's own epsilon
    config = kind.config(ranks=ranks, **dict(adam_epsilon=1e-5) | parameters)
    here = runtime.start(config)
    task = kind.task(config)
    model = kind.model(1)
    losses = []
    signal = online_teacher(task, kind.model(7).eval(), config) if 'kd' in config.where.mode else None

    def on_row(kind: str, **values) -> None:
        losses.extend([values['loss']] if kind == 'step' else [])

    with watch(model) as seen:
        result = train(task, model, config, here, on_row, signal)
    found = evaluate(model, task, task.evaluation_sets, here)
    runtime.stop(here)
    return dict(
        weights=flat_weights(model).numpy(),
        losses=losses,
        metrics=found.metrics['test'],
        predictions=found.predictions,
        tokens=result.tokens,
        micro_batches=max(step.forwards for step in seen.steps),
        synchronised={step.rounds for step in seen.steps},
    )


def launched(name: str, ranks: int, **parameters) -> list[dict]:
    return launch('test_task_training:_trained', ranks, name, parameters, ranks=ranks)


@cache
def alone(name: str, *parameters: tuple[str, Any]) -> dict:
    return launched(name, 1, **dict(parameters))[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize('ranks,lengths', [(1, 2), (2, 500), (2, 1)])
@pytest.mark.parametrize('name', KINDS)
def test_ranks_and_accumulation_change_nothing(name, ranks, lengths):
    kind = KINDS[name]
    more = dict(soft_on='masked') if name == 'masked_lm' and lengths == 1 else {}
    expected = alone(name, *more.items())
    found = launched(name, ranks, micro_batch_tokens=lengths * kind.length, **more)
    for rank in found:
        np.testing.assert_allclose(rank['weights'], expected['weights'], atol=1e-4)
        assert rank['tokens'] == expected['tokens']
        for metric in kind.close:
            assert rank['metrics'][metric] == pytest.approx(expected['metrics'][metric], abs=1e-3)
        assert list(rank['predictions']['unit']) == list(expected['predictions']['unit'])
        np.testing.assert_allclose(rank['predictions']['score'], expected['predictions']['score'], atol=5e-3)
    np.testing.assert_allclose(found[0]['losses'], expected['losses'], rtol=1e-4)
    np.testing.assert_array_equal(found[0]['weights'], found[-1]['weights'])
    if ranks > 1:
        # gradients travel once a step, however many micro-batches there are
        assert (found[0]['micro_batches'] > 1) == (lengths == 1)
        assert found[0]['synchronised'] == {1}


def test_a_rank_without_blocks_changes_nothing():
    "A step of one block, and two ranks."
    given = dict(mode='full_student', batch_size=1, epochs=0.5)
    expected, *_ = launched('masked_lm', 1, **given)
    *_, found = launched('masked_lm', 2, **given)
    np.testing.assert_allclose(found['weights'], expected['weights'], atol=1e-4)


@pytest.mark.parametrize(
    'name,at', [('masked_lm', 4), ('extractive_qa', 1), ('token_classification', 4), ('embeddings', 2)]
)
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path, here, name, at):
    kind = KINDS[name]
    config = kind.config(epochs=3)

    def run(folder, stop_at=None):
        task = kind.task(config)
        model = kind.model(1, dropout=0.1)
        signal = online_teacher(task, kind.model(7).eval(), config)

        def on_row(kind, **values):
            if kind == 'step' and values['step'] == stop_at:
                STOP.requested = True

        try:
            train(task, model, config, here, on_row, signal, checkpoints=folder, key='tiny')
        finally:
            STOP.requested = False
        return flat_weights(model)

    expected = run(None)
    with pytest.raises(Stopped):
        run(tmp_path, stop_at=at)
    assert torch.equal(run(tmp_path), expected)


@pytest.mark.exhaustive
def test_it_learns_where_answers_are(here):
    "The word behind the one that is asked for, and that there is none."
    config = qa_config('full_student', epochs=60, batch_size=4)
    task = qa_task(config)
    model = qa_model(1)
    train(task, model, config, here, lambda *a, **k: None)
    for of in (task.rows, task.windows, task.pairs.splits, task.labels):
        of['dev'] = of['train']
    learnt = evaluate(model, task, ('dev',), here).metrics['dev']
    assert learnt['exact'] > 0.9 and learnt['has_ans_exact'] > 0.8


@pytest.mark.exhaustive
def test_it_learns_hidden_words(here):
    task = tiny_task(tiny_lm_config('full_student'), tiny_corpus(150))
    found = []
    for epochs in (0.01, 60):
        config = tiny_lm_config('full_student', epochs=epochs, batch_size=16, adam_epsilon=1e-5)
        model = tiny_lm(1)
        train(task, model, config, here, lambda *a, **k: None)
        found.append(evaluate(model, task, ('test',), here).metrics['test'])
    before, after = found
    assert after['nll'] < before['nll'] - 0.5 and after['unigram_nll'] == before['unigram_nll']


# ---- a stored signal ----


@pytest.mark.parametrize('name', KINDS)
def test_a_cached_signal_is_the_online_one(tmp_path, here, name):
    kind = KINDS[name]
    online, cached = (kind.config(signal=of, **kind.stored) for of in ('online', 'cached'))
    task = kind.task(cached)
    teacher = kind.model(7).eval()
    parts = dict(
        weights_sha256='a',
        config_sha256='f',
        corpus_sha256='b',
        tokenizer_sha256='c',
        split='train',
        max_length=kind.length,
        forward_dtype='fp32',
        storage_dtype='fp32',
        subset=task.signal_key(),
    )
    stored = te.make_signal(task, teacher, tmp_path / 'signal', parts)
    batch = task.batch('train', np.array([2, 9, 5]), epoch=1)
    said = te.teacher_signal(kind.task(online), teacher, batch)
    for key, value in said.items():
        torch.testing.assert_close(stored(batch)[key], value, rtol=0, atol=1e-5)
    if name == 'masked_lm':
        size = sum(f.stat().st_size for f in (tmp_path / 'signal').rglob('shard-*/*'))
        assert size / len(task.lengths('train')) < 2 * task.masked * 4 * 4 + 150, 'bytes an example'
    both = []
    for config, signal in ((online, online_teacher(kind.task(online), teacher, online)), (cached, stored)):
        model = kind.model(1)
        train(kind.task(config), model, config, here, lambda *a, **k: None, signal)
        both.append(flat_weights(model))
    torch.testing.assert_close(*both, rtol=0, atol=1e-5)


def test_what_windows_there_are_is_in_the_key():
    assert qa_task(qa_config()).signal_key() != qa_task(qa_config(stride=3)).signal_key()

"""Extractive question answering in training: however it is divided, stopped and gone on with, and whether the
teacher's numbers are stored or computed.
"""

import numpy as np
import pytest
import torch
from architectures import small_bert
from ranks import launch
from tiny_lm import SPECIAL, WORDS, tiny_tokenizer
from transformers import BertForQuestionAnswering
from kdnotes.core.config import RunConfig, make_config
from kdnotes.core.processes import Stopped
from kdnotes.core.resolve import Machine, resolve
from kdnotes.distill import teacher_cache as te
from kdnotes.tasks.extractive_qa import ExtractiveQA
from kdnotes.tasks.sources import Corpus
from kdnotes.train import distributed as runtime
from kdnotes.train.failures import STOP
from kdnotes.train.loop import evaluate, train

LENGTH = 20


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
        max_length=LENGTH,
        stride=4,
        adam_epsilon=1e-5,
        student_layers=(0, 1),
    )
    given = make_config(task='extractive_qa', mode=mode, ranks=ranks, **defaults | parameters)
    return resolve(given, Machine('cpu', cores=2), 'embedded', teacher_depth=2)


def qa_task(config: RunConfig) -> ExtractiveQA:
    task = ExtractiveQA.made(passages(), config)
    task.encode(tiny_tokenizer())
    return task


def qa_model(seed: int = 0, dropout: float = 0.0) -> BertForQuestionAnswering:
    torch.manual_seed(seed)
    return BertForQuestionAnswering(
        small_bert(len(SPECIAL) + WORDS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


@pytest.fixture(scope='module')
def here():
    return runtime.start(qa_config())


def flat_weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- the same training, however it is divided ----


def _trained(ranks: int, parameters: dict) -> dict:
    "What a rank notes of a training."
    torch.set_num_threads(1)
    config = qa_config(ranks=ranks, **parameters)
    here = runtime.start(config)
    task = qa_task(config)
    model = qa_model(1)
    rows = []
    signal = te.online_signal(task, qa_model(7).eval())
    train(task, model, config, here, lambda kind, **v: rows.append((kind, v)), signal)
    found = evaluate(model, task, task.evaluation_sets, here)
    runtime.stop(here)
    losses = [v['loss'] for kind, v in rows if kind == 'step']
    return dict(
        weights=flat_weights(model).numpy(),
        losses=losses,
        metrics=found.metrics,
        predictions=found.predictions,
    )


@pytest.fixture(scope='module')
def one_rank():
    return launch('test_qa_training:_trained', 1, {}, ranks=1)[0]


@pytest.mark.parametrize('ranks,tokens', [(1, 2 * LENGTH), (2, 8192), (2, LENGTH)])
def test_ranks_and_accumulation_change_nothing(one_rank, ranks, tokens):
    found = launch('test_qa_training:_trained', ranks, dict(micro_batch_tokens=tokens), ranks=ranks)
    for rank in found:
        np.testing.assert_allclose(rank['weights'], one_rank['weights'], atol=1e-4)
        expected = one_rank['predictions']
        assert list(rank['predictions']['unit']) == list(expected['unit'])
        np.testing.assert_allclose(rank['predictions']['score'], expected['score'], atol=1e-3)
    np.testing.assert_allclose(found[0]['losses'], one_rank['losses'], rtol=1e-4)
    np.testing.assert_array_equal(found[0]['weights'], found[-1]['weights'])


@pytest.mark.parametrize('at', [1, 4])
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path, here, at):
    config = qa_config(epochs=3)

    def run(folder, stop_at=None):
        task = qa_task(config)
        model = qa_model(1, dropout=0.1)
        signal = te.online_signal(task, qa_model(7).eval())

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


def test_it_learns_where_answers_are(here):
    "The word behind the one that is asked for, and that there is none."
    config = qa_config('full_student', epochs=60, batch_size=4)
    task = qa_task(config)
    model = qa_model(1)
    train(task, model, config, here, lambda *a, **k: None)
    task.rows['dev'] = task.rows['train']
    task.windows['dev'] = task.windows['train']
    task.pairs.splits['dev'] = task.pairs.splits['train']
    task.labels['dev'] = task.labels['train']
    learnt = evaluate(model, task, ('dev',), here).metrics['dev']
    assert learnt['exact'] > 0.9 and learnt['has_ans_exact'] > 0.8


# ---- a stored signal ----


def test_a_cached_signal_is_the_online_one(tmp_path, here):
    config = qa_config()
    task = qa_task(config)
    assert len(task.lengths('train')) > len(task.rows['train'])  # some passages have several windows
    teacher = qa_model(7).eval()
    parts = dict(
        weights_sha256='a',
        config_sha256='f',
        corpus_sha256='b',
        tokenizer_sha256='c',
        split='train',
        max_length=LENGTH,
        forward_dtype='fp32',
        storage_dtype='fp32',
        subset=task.signal_key(),
    )
    stored = te.make_signal(task, teacher, tmp_path / 'signal', parts)
    batch = task.batch('train', np.array([2, 9, 5]))
    torch.testing.assert_close(
        stored(batch)['logits'], te.teacher_signal(task, teacher, batch)['logits'], rtol=0, atol=1e-5
    )
    both = []
    for signal in (te.online_signal(task, teacher), stored):
        model = qa_model(1)
        train(qa_task(config), model, config, here, lambda *a, **k: None, signal)
        both.append(flat_weights(model))
    torch.testing.assert_close(*both, rtol=0, atol=1e-5)


def test_what_windows_there_are_is_in_the_key():
    assert qa_task(qa_config()).signal_key() != qa_task(qa_config(stride=3)).signal_key()

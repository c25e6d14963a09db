"Losses against values worked out by hand, in a fresh import of the module."

import math
import numpy as np
import pytest
import torch
from kdnotes.losses.targets import (
    hard_target_ce,
    margin_mse,
    pair_counts,
    ranknet,
    soft_target_kl,
)
from kdnotes.losses.vocabulary import OpenLogits, TopK, vocabulary_ce, vocabulary_kl, vocabulary_nll

LOG3 = math.log(3)
# p = (3/4, 1/4) and q = (1/2, 1/2): KL(p || q) = 3/4 log(3/2) + 1/4 log(1/2); KL(q || p) = 1/2 log(2/3) + 1/2
# log(2)
P_Q = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
Q_P = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)


@pytest.mark.parametrize('T', [0.5, 1.0, 2.0, 4.0])
def test_soft_targets_by_hand(T):
    student = torch.tensor([[0.0, 0.0]])
    teacher = torch.tensor([[T * LOG3, 0.0]])
    assert soft_target_kl(student, teacher, T).item() == pytest.approx(T * T * P_Q, rel=1e-5)
    assert soft_target_kl(teacher, student, T).item() == pytest.approx(T * T * Q_P, rel=1e-5)


def test_mean_and_sum_over_rows_of_any_shape():
    student = torch.zeros(2, 3, 2)
    teacher = torch.tensor([LOG3, 0.0]).expand(2, 3, 2)
    assert soft_target_kl(student, teacher, 1.0, 'sum').item() == pytest.approx(6 * P_Q, rel=1e-5)
    assert soft_target_kl(student, teacher, 1.0, 'mean').item() == pytest.approx(P_Q, rel=1e-5)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    assert hard_target_ce(teacher, labels, 'sum').item() == pytest.approx(-6 * math.log(0.75), rel=1e-5)
    assert hard_target_ce(teacher, labels).item() == pytest.approx(-math.log(0.75), rel=1e-5)


def test_gradient_by_hand_and_none_for_the_teacher():
    T = 2.0
    student = torch.zeros(1, 2, requires_grad=True)
    teacher = torch.tensor([[T * LOG3, 0.0]], requires_grad=True)
    soft_target_kl(student, teacher, T).backward()
    # T * (q - p)
    assert student.grad.tolist() == [pytest.approx([T * (0.5 - 0.75), T * (0.5 - 0.25)], rel=1e-5)]
    assert teacher.grad is None


# teacher (1/2, 1/4, 1/8, 1/8) cut to its two largest is (2/3, 1/3); the student gives 1/4 to each of all four
# classes
CUT = 2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(4 / 3)


def teacher4() -> torch.Tensor:
    return torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


@pytest.mark.parametrize(
    'cut',
    [
        dict(top_k=2),
        dict(min_probability=0.2),
        dict(min_probability=0.2, top_k=4),
        dict(min_probability=0.01, top_k=2),
    ],
)
@pytest.mark.parametrize('T', [1.0, 4.0])
def test_cut_soft_targets_by_hand(cut, T):
    assert soft_target_kl(torch.zeros(1, 4), T * teacher4(), T, **cut).item() == pytest.approx(
        T * T * CUT, rel=1e-5
    )


@pytest.mark.parametrize('cut', [dict(top_k=1), dict(min_probability=1.0), dict(min_probability=0.6)])
def test_one_class_left_is_a_hard_target(cut):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(16, 7, generator=generator) * 3 for _ in range(2))
    if 'top_k' not in cut and cut['min_probability'] < 1:
        teacher = teacher * 10  # sure enough to reach it in every row
    assert soft_target_kl(student, teacher, 1.0, **cut).item() == pytest.approx(
        hard_target_ce(student, teacher.argmax(-1)).item(), rel=1e-4
    )


def test_equal_classes_are_cut_together_or_not_at_all():
    even = torch.zeros(1, 4)
    for cut in (dict(top_k=1), dict(min_probability=0.9)):
        assert soft_target_kl(even, even, 1.0, **cut).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize('cut', [dict(min_probability=0.2), dict(top_k=2)])
def test_a_cut_is_of_the_classes_whatever_the_rows_shape(cut):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 2, 4, generator=generator).unbind(0)
    rows = soft_target_kl(student.flatten(0, -2), teacher.flatten(0, -2), 1.0, **cut)
    assert soft_target_kl(student, teacher, 1.0, **cut).item() == pytest.approx(rows.item(), rel=1e-6)
    with pytest.raises(ValueError, match='from 1 to the 4 classes, got 5'):
        soft_target_kl(student, teacher, 1.0, top_k=5)


@pytest.mark.parametrize(
    'cut',
    [
        dict(top_k=1),
        dict(top_k=2),
        dict(min_probability=1.0),
        dict(min_probability=1e-30),
        dict(min_probability=0.5, top_k=1),
    ],
)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cut_finite_for_extreme_logits(cut, dtype):
    for T in (0.1, 1.0, 100.0):
        student = torch.tensor(
            [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [1e4, 1e4, 1e4]], dtype=dtype, requires_grad=True
        )
        teacher = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, 1e4, -1e4], [0.0, -1e4, 0.0]], dtype=dtype)
        loss = soft_target_kl(student, teacher, T, **cut)
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite() and student.grad.isfinite().all()


def some_questions(n: int = 40, seed: int = 0):
    "Scores of student and teacher, questions, graded labels."
    rng = np.random.default_rng(seed)
    return (
        torch.from_numpy(rng.normal(0, 3, n)).float(),
        torch.from_numpy(rng.normal(0, 3, n)).float(),
        torch.from_numpy(rng.integers(0, 7, n)),
        torch.from_numpy(rng.integers(0, 3, n)),
    )


def test_ranking_losses_equal_loops_over_pairs():
    student, teacher, groups, labels = some_questions()
    s, t, g, y = (x.tolist() for x in (student, teacher, groups, labels))
    above = [(i, j) for i in range(len(s)) for j in range(len(s)) if g[i] == g[j] and y[i] > y[j]]
    every = [(i, j) for i in range(len(s)) for j in range(i) if g[i] == g[j]]

    def margin(i, j):
        return ((s[i] - s[j]) - (t[i] - t[j])) ** 2

    net = sum(math.log(1 + math.exp(s[j] - s[i])) for i, j in above)
    assert ranknet(student, groups, labels, 'sum').item() == pytest.approx(net, rel=1e-5)
    assert ranknet(student, groups, labels).item() == pytest.approx(net / len(above), rel=1e-5)
    for pairs, given in ((above, labels), (every, None)):
        total = sum(margin(i, j) for i, j in pairs)
        assert margin_mse(student, teacher, groups, given, 'sum').item() == pytest.approx(total, rel=1e-5)
        assert margin_mse(student, teacher, groups, given).item() == pytest.approx(
            total / len(pairs), rel=1e-5
        )
    assert pair_counts(g, y) == {'labelled': len(above), 'all': len(every)}
    assert (
        pair_counts([str(q) for q in g], np.array(y, dtype=float))
        == pair_counts(groups, labels)
        == pair_counts(g, y)
    )


def test_ranking_gradients_by_hand():
    groups = torch.tensor([5, 5])
    labels = torch.tensor([0, 1])
    scores = torch.tensor([LOG3, 0.0], requires_grad=True)
    ranknet(scores, groups, labels).backward()  # the right one is LOG3 behind: sigma(-LOG3) - 1 = -3/4
    assert scores.grad.tolist() == pytest.approx([0.75, -0.75], rel=1e-5)
    student = torch.tensor([0.0, 1.0], requires_grad=True)
    teacher = torch.tensor([0.0, 4.0], requires_grad=True)
    margin_mse(student, teacher, groups).backward()  # 2 * (1 - 4)
    assert student.grad.tolist() == pytest.approx([6.0, -6.0]) and teacher.grad is None


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ranking_losses_are_finite_float32(dtype):
    scores = torch.tensor([1e4, -1e4, 1e4], dtype=dtype, requires_grad=True)
    groups = torch.tensor([1, 1, 1])
    labels = torch.tensor([0, 1, 1])
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = ranknet(scores, groups, labels) + margin_mse(scores, -scores, groups)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite() and scores.grad.isfinite().all()


# ---- over a vocabulary, in pieces ----


@pytest.fixture
def pieces(monkeypatch):
    "Seven tokens are four pieces of at most two."
    monkeypatch.setattr('kdnotes.losses.vocabulary.PIECE', 10)


def open_logits(seed: int, dtype=torch.float32) -> OpenLogits:
    "Of seven tokens, over five words."
    generator = torch.Generator().manual_seed(seed)
    shapes = ((7, 3), (5, 3), (5,))
    features, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return OpenLogits(features.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dtype)


def gradients(loss, logits: OpenLogits) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, (logits.features, logits.weight, logits.bias)))


@pytest.mark.parametrize('k, top_k', [(3, None), (3, 2), (2, None)])
@pytest.mark.parametrize('T', [1.0, 3.0])
def test_kept_largest_logits_are_targets_that_were_cut(pieces, T, k, top_k):
    student = open_logits(0)
    teacher = open_logits(1)
    whole = soft_target_kl(student.tensor(), teacher.tensor(), T, 'sum', top_k=top_k or k)
    expected = gradients(whole, student)
    for theirs in (TopK.from_logits(teacher, k), TopK.from_logits(teacher.tensor(), k)):
        found = vocabulary_kl(student, theirs, T, top_k=top_k)
        torch.testing.assert_close(found, whole)
        torch.testing.assert_close(gradients(found, student), expected)
        torch.testing.assert_close(vocabulary_kl(student.tensor(), theirs, T, top_k=top_k), whole)


@pytest.mark.parametrize('dtype, bound', [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_pieces_of_a_cross_entropy_are_the_whole_in_each_format(pieces, dtype, bound):
    logits = open_logits(0, dtype)
    labels = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    whole = hard_target_ce(logits.tensor(), labels, 'sum')
    found = vocabulary_ce(logits, labels)
    torch.testing.assert_close(found, whole)
    for ours, theirs in zip(gradients(found, logits), gradients(whole, logits)):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < bound
    nll = vocabulary_nll(logits, labels)
    torch.testing.assert_close(nll.sum(), whole)
    assert nll.shape == (7,)

"Losses against values worked out by hand, in a fresh import of the module."

import math
import numpy as np
import pytest
import torch
from kdnotes.losses.targets import (
    hard_target_ce,
    margin_mse,
    masked_reduce,
    pair_counts,
    ranknet,
    soft_target_kl,
    weighted_sum,
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


def test_three_classes_by_hand():
    # teacher (1/2, 1/4, 1/4), student (1/4, 1/4, 1/2): 1/2 log 2 + 0 - 1/4 log 2 = log(2) / 4
    student = torch.tensor([[0.25, 0.25, 0.5]]).log()
    teacher = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert soft_target_kl(student, teacher, 1.0).item() == pytest.approx(math.log(2) / 4, rel=1e-5)


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


def test_gradient_scale_hardly_depends_on_the_temperature():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(64, 2, generator=generator) * 1.5 for _ in range(2))

    def norm(T):
        s = student.clone().requires_grad_()
        soft_target_kl(s, teacher, T).backward()
        return s.grad.norm().item()

    assert 0.5 < norm(4.0) / norm(1.0) < 2


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_for_extreme_logits(dtype):
    for T in (0.1, 1.0, 100.0):
        student = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, 1e4]], dtype=dtype, requires_grad=True)
        teacher = torch.tensor([[-1e4, 1e4], [-1e4, 1e4], [0.0, -1e4]], dtype=dtype)
        loss = soft_target_kl(student, teacher, T) + hard_target_ce(student, torch.tensor([1, 0, 0]))
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite() and student.grad.isfinite().all()


def test_float32_under_autocast():
    student = torch.randn(4, 2)
    teacher = torch.randn(4, 2)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = soft_target_kl(student, teacher, 2.0)
    assert loss.dtype == torch.float32 and loss == soft_target_kl(student, teacher, 2.0)


@pytest.mark.parametrize('T', [0, -1.0, float('nan')])
def test_bad_temperature(T):
    with pytest.raises(ValueError, match=f'T must be > 0, got {T}'):
        soft_target_kl(torch.zeros(1, 2), torch.zeros(1, 2), T)


def test_weighted_sum_returns_total_and_parts():
    parts = {'hard': torch.tensor(2.0, requires_grad=True), 'soft': torch.tensor(4.0, requires_grad=True)}
    total, logged = weighted_sum(parts, {'hard': 0.25, 'soft': 0.75})
    total.backward()
    assert total.item() == 3.5 and parts['hard'].grad == 0.25 and parts['soft'].grad == 0.75
    assert {k: v.item() for k, v in logged.items()} == {'hard': 2.0, 'soft': 4.0} and not any(
        v.requires_grad for v in logged.values()
    )


def test_weighted_sum_refuses_what_would_go_untrained():
    one = {'hard': torch.tensor(1.0)}
    for weights in ({}, {'hard': 1.0, 'soft': 1.0}, {'hard': 0.0}):
        with pytest.raises(ValueError):
            weighted_sum(one, weights)


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


def test_a_cut_that_cuts_nothing():
    student = torch.randn(8, 5)
    teacher = torch.randn(8, 5)
    for cut in (dict(top_k=5), dict(min_probability=1e-6)):
        assert soft_target_kl(student, teacher, 2.0, **cut).item() == pytest.approx(
            soft_target_kl(student, teacher, 2.0).item(), rel=1e-5
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


def test_temperature_is_2_where_none_is_given():
    student = torch.tensor([[0.0, 0.0]])
    teacher = torch.tensor([[2 * LOG3, 0.0]])
    assert soft_target_kl(student, teacher).item() == pytest.approx(4 * P_Q, rel=1e-5)


def test_gradient_of_a_cut():
    # q - p' for what is kept, q for what is not
    student = torch.zeros(1, 4, requires_grad=True)
    soft_target_kl(student, teacher4(), 1.0, top_k=2).backward()
    assert student.grad.tolist() == [pytest.approx([1 / 4 - 2 / 3, 1 / 4 - 1 / 3, 1 / 4, 1 / 4], rel=1e-5)]


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


@pytest.mark.parametrize(
    ('cut', 'message'),
    [
        (dict(min_probability=0.0), 'min_probability must be > 0 and <= 1, got 0.0'),
        (dict(min_probability=1.1), 'min_probability must be > 0 and <= 1, got 1.1'),
        (dict(min_probability=float('nan')), 'min_probability must be > 0 and <= 1, got nan'),
        (dict(top_k=0), 'top_k must be a whole number from 1 to the 2 classes, got 0'),
        (dict(top_k=3), 'top_k must be a whole number from 1 to the 2 classes, got 3'),
        (dict(top_k=1.5), 'top_k must be a whole number from 1 to the 2 classes, got 1.5'),
    ],
)
def test_bad_cuts(cut, message):
    with pytest.raises(ValueError, match=message):
        soft_target_kl(torch.zeros(1, 2), torch.zeros(1, 2), **cut)


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


def test_micro_batches_of_whole_questions_add_up_to_the_step():
    student, teacher, groups, labels = some_questions(60)
    counts = pair_counts(groups, labels)
    parts = [torch.isin(groups, torch.tensor(part)) for part in ([0, 3], [1, 2, 6], [4], [5])]

    def gradient(loss, masks, count):
        s = student.clone().requires_grad_()
        sum(loss(s, m) / count for m in masks).backward()
        return s.grad

    for name, loss in (
        ('labelled', lambda s, m: ranknet(s[m], groups[m], labels[m], 'sum')),
        ('all', lambda s, m: margin_mse(s[m], teacher[m], groups[m], reduction='sum')),
    ):
        everything = [torch.ones(60, dtype=torch.bool)]
        by_parts = gradient(loss, parts, counts[name])
        whole = gradient(loss, everything, counts[name])
        assert by_parts.numpy() == pytest.approx(whole.numpy(), abs=1e-6)
        assert sum(pair_counts(groups[m], labels[m])[name] for m in parts) == counts[name]


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


def test_no_pair_is_no_loss():
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    for groups, labels in (([1, 1], [1, 1]), ([1, 2], [0, 1])):
        groups = torch.tensor(groups)
        labels = torch.tensor(labels)
        assert pair_counts(groups, labels)['labelled'] == 0
        loss = ranknet(scores, groups, labels) + margin_mse(scores, scores * 2, groups, labels)
        loss.backward()
        assert loss.item() == 0 and not scores.grad.any()
    assert pair_counts([], []) == {'labelled': 0, 'all': 0}
    assert pair_counts([0, 1], [1, 0]) == {'labelled': 0, 'all': 0}, 'rows of two groups are no pair'


def test_bad_rows_for_ranking():
    four = torch.zeros(4)
    one = torch.zeros(4, dtype=torch.int64)
    for call in (
        lambda: ranknet(four[:, None], one, one),
        lambda: ranknet(four, one[:3], one),
        lambda: margin_mse(four, four[:2], one),
        lambda: margin_mse(four[:, None], four, one),
        lambda: margin_mse(four, four, one[:, None]),
        lambda: margin_mse(four, four, one, one[:, None]),
    ):
        with pytest.raises(ValueError, match=r'must be one number a row, all of one shape \(n,\), got'):
            call()
    for call in (
        lambda: ranknet(four, one, one, 'none'),
        lambda: margin_mse(four, four, one, reduction='none'),
        lambda: masked_reduce(four, one.bool(), 'none'),
    ):
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'none'"):
            call()
    with pytest.raises(ValueError, match='groups and labels must have one shape'):
        pair_counts([1, 1], [1])
    with pytest.raises(ValueError, match='labels must be >= 0, got -100; exclude rows without a label'):
        pair_counts([1, 1], [1, -100])


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


@pytest.mark.parametrize('cut', [{}, dict(top_k=2), dict(min_probability=0.2)])
@pytest.mark.parametrize('T', [1.0, 3.0])
def test_pieces_of_soft_targets_are_the_whole(pieces, T, cut):
    student = open_logits(0)
    teacher = open_logits(1)
    whole = soft_target_kl(student.tensor(), teacher.tensor(), T, 'sum', **cut)
    expected = gradients(whole, student)
    for theirs in (teacher, teacher.tensor()):
        found = vocabulary_kl(student, theirs, T, **cut)
        torch.testing.assert_close(found, whole)
        torch.testing.assert_close(gradients(found, student), expected)
        closed = vocabulary_kl(student.tensor(), theirs, T, **cut)
        torch.testing.assert_close(closed, whole)


@pytest.mark.parametrize('k, top_k', [(3, None), (3, 2), (2, None)])
@pytest.mark.parametrize('T', [1.0, 3.0])
def test_kept_largest_logits_are_targets_that_were_cut(pieces, T, k, top_k):
    student = open_logits(0)
    teacher = open_logits(1)
    whole = soft_target_kl(student.tensor(), teacher.tensor(), T, 'sum', top_k=top_k or k)
    expected = gradients(whole, student)
    for theirs in (TopK.of(teacher, k), TopK.of(teacher.tensor(), k)):
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

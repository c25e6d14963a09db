"Losses against values worked out by hand, in a fresh import of the module."
import math
import pytest
import torch
from kdnotes.losses import hard_target_ce, soft_target_kl, weighted_sum

LOG3 = math.log(3)
# p = (3/4, 1/4) and q = (1/2, 1/2): KL(p || q) = 3/4 log(3/2) + 1/4 log(1/2); KL(q || p) = 1/2 log(2/3) + 1/2 log(2)
P_Q, Q_P = .75 * math.log(1.5) + .25 * math.log(.5), .5 * math.log(2 / 3) + .5 * math.log(2)


@pytest.mark.parametrize('T', [.5, 1., 2., 4.])
def test_soft_targets_by_hand(T):
    student, teacher = torch.tensor([[0., 0.]]), torch.tensor([[T * LOG3, 0.]])
    assert soft_target_kl(student, teacher, T).item() == pytest.approx(T * T * P_Q, rel=1e-5)
    assert soft_target_kl(teacher, student, T).item() == pytest.approx(T * T * Q_P, rel=1e-5)


def test_three_classes_by_hand():
    # teacher (1/2, 1/4, 1/4), student (1/4, 1/4, 1/2): 1/2 log 2 + 0 - 1/4 log 2 = log(2) / 4
    student, teacher = torch.tensor([[.25, .25, .5]]).log(), torch.tensor([[.5, .25, .25]]).log()
    assert soft_target_kl(student, teacher, 1.).item() == pytest.approx(math.log(2) / 4, rel=1e-5)


def test_mean_and_sum_over_rows_of_any_shape():
    student, teacher = torch.zeros(2, 3, 2), torch.tensor([LOG3, 0.]).expand(2, 3, 2)
    assert soft_target_kl(student, teacher, 1., 'sum').item() == pytest.approx(6 * P_Q, rel=1e-5)
    assert soft_target_kl(student, teacher, 1., 'mean').item() == pytest.approx(P_Q, rel=1e-5)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    assert hard_target_ce(teacher, labels, 'sum').item() == pytest.approx(-6 * math.log(.75), rel=1e-5)
    assert hard_target_ce(teacher, labels).item() == pytest.approx(-math.log(.75), rel=1e-5)


def test_gradient_by_hand_and_none_for_the_teacher():
    T = 2.
    student, teacher = torch.zeros(1, 2, requires_grad=True), torch.tensor([[T * LOG3, 0.]], requires_grad=True)
    soft_target_kl(student, teacher, T).backward()
    assert student.grad.tolist() == [pytest.approx([T * (.5 - .75), T * (.5 - .25)], rel=1e-5)]  # T * (q - p)
    assert teacher.grad is None


def test_gradient_scale_hardly_depends_on_the_temperature():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(64, 2, generator=generator) * 1.5 for _ in range(2))

    def norm(T):
        s = student.clone().requires_grad_()
        soft_target_kl(s, teacher, T).backward()
        return s.grad.norm().item()
    assert .5 < norm(4.) / norm(1.) < 2


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_for_extreme_logits(dtype):
    for T in (.1, 1., 100.):
        student = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, 1e4]], dtype=dtype, requires_grad=True)
        teacher = torch.tensor([[-1e4, 1e4], [-1e4, 1e4], [0., -1e4]], dtype=dtype)
        loss = soft_target_kl(student, teacher, T) + hard_target_ce(student, torch.tensor([1, 0, 0]))
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite() and student.grad.isfinite().all()


def test_float32_under_autocast():
    student, teacher = torch.randn(4, 2), torch.randn(4, 2)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = soft_target_kl(student, teacher, 2.)
    assert loss.dtype == torch.float32 and loss == soft_target_kl(student, teacher, 2.)


@pytest.mark.parametrize('T', [0, -1., float('nan')])
def test_bad_temperature(T):
    with pytest.raises(ValueError, match=f'T must be > 0, got {T}'):
        soft_target_kl(torch.zeros(1, 2), torch.zeros(1, 2), T)


def test_weighted_sum_returns_total_and_parts():
    parts = {'hard': torch.tensor(2., requires_grad=True), 'soft': torch.tensor(4., requires_grad=True)}
    total, logged = weighted_sum(parts, {'hard': .25, 'soft': .75})
    total.backward()
    assert total.item() == 3.5 and parts['hard'].grad == .25 and parts['soft'].grad == .75
    assert {k: v.item() for k, v in logged.items()} == {'hard': 2., 'soft': 4.} and not any(v.requires_grad for v in logged.values())


def test_weighted_sum_refuses_what_would_go_untrained():
    one = {'hard': torch.tensor(1.)}
    for weights in ({}, {'hard': 1., 'soft': 1.}, {'hard': 0.}):
        with pytest.raises(ValueError):
            weighted_sum(one, weights)

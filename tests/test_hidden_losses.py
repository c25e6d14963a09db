"Losses on hidden states and on relations, against values worked out by hand."

import math
import pytest
import torch
from torch import nn
from kdnotes.distill.intermediate import (
    HiddenProjections,
    capture_outputs,
    hidden_cosine,
    hidden_mse,
    relation_kl,
)

NAN = float('nan')
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])  # 7 real tokens


def states(*widths: int, seed: int = 0, n: int = 3, length: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, length, w, generator=generator) for w in widths]


LOSSES = {
    'mse': hidden_mse,
    'cosine': hidden_cosine,
    'relations': lambda student, teacher, mask: relation_kl(student, teacher, mask, 2),
}
each_loss = pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES)


# hidden states


def test_by_hand():
    student = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    teacher = torch.tensor([[[4.0, 3.0], [0.0, 2.0]]])
    both = torch.ones(1, 2)
    one = torch.tensor([[1, 0]])
    assert hidden_mse(student, teacher, both).item() == pytest.approx((1 + 1) / 2 + (1 + 4) / 2)
    assert hidden_cosine(student, teacher, both).item() == pytest.approx(1 / 25 + 1, rel=1e-5)
    assert hidden_mse(student, teacher, one).item() == pytest.approx(1) and hidden_cosine(
        student, teacher, one
    ).item() == pytest.approx(1 / 25, rel=1e-5)


@each_loss
def test_examples_add_up(loss):
    student, teacher = states(8, 8)
    total = loss(student, teacher, MASK)
    by_example = sum(loss(student[i : i + 1], teacher[i : i + 1], MASK[i : i + 1]) for i in range(3))
    assert by_example.item() == pytest.approx(total.item(), rel=1e-5)
    assert loss(student, teacher, MASK * 0).item() == 0 and total.dtype == torch.float32


@each_loss
@pytest.mark.parametrize('trash', [0.0, 1e6, NAN, math.inf])
def test_padding_reaches_neither_value_nor_gradient(loss, trash):
    student, teacher = states(8, 8)
    real = MASK.bool()[..., None]

    def run(s, t, m):
        s = s.clone().requires_grad_()
        value = loss(s, t, m)
        value.backward()
        return value.item(), s.grad

    value, gradient = run(student, teacher, MASK)
    other, dirty = run(student.where(real, trash), teacher.where(real, -trash), MASK)
    assert (
        other == pytest.approx(value, rel=1e-6)
        and torch.equal(dirty, gradient)
        and not dirty[~MASK.bool()].any()
    )
    longer, long_gradient = run(
        *(nn.functional.pad(x, (0, 0, 0, 3), value=trash) for x in (student, teacher)),
        nn.functional.pad(MASK, (0, 3)),
    )
    assert longer == pytest.approx(value, rel=1e-5) and torch.allclose(
        long_gradient[:, :4], gradient, atol=1e-6
    )


@each_loss
def test_no_loss_for_the_same_and_no_gradient_for_the_teacher(loss):
    student, teacher = states(8, 8)
    assert loss(student, student.clone(), MASK).item() == pytest.approx(0, abs=1e-5)
    student.requires_grad_(), teacher.requires_grad_()
    loss(student, teacher, MASK).backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0


@each_loss
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_float32_with_or_without_autocast(loss, dtype):
    student, teacher = (x.to(dtype) for x in states(8, 8))
    plain = loss(student, teacher, MASK)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert loss(student, teacher, MASK) == plain
    assert plain.dtype == torch.float32 and plain.item() == pytest.approx(
        loss(student.float(), teacher.float(), MASK).item(), rel=1e-6
    )


@each_loss
def test_finite_at_zero_and_far_away(loss):
    for scale in (0.0, 1e4):
        student, teacher = ((x * scale).requires_grad_() for x in states(8, 8))
        value = loss(student, teacher, MASK)
        value.backward()
        assert value.isfinite() and student.grad.isfinite().all()


# projections


def test_a_projection_is_a_matrix():
    [student] = states(8)
    projections = HiddenProjections([1, 2], 8, 6, seed=3)
    assert projections(1, student).shape == (3, 4, 6)
    # no bias
    assert projections(1, student)[0, 0].tolist() == pytest.approx(
        (projections.matrices['1'].weight @ student[0, 0]).tolist(), rel=1e-5
    )


def test_projections_start_from_their_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = HiddenProjections([1, 2], 8, 6, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    for seed, equal in ((3, True), (4, False)):
        other = HiddenProjections([2, 1], 8, 6, seed=seed)
        assert all(torch.equal(p, q) == equal for p, q in zip(one.parameters(), other.parameters()))
    assert [name for name, _ in one.named_parameters()] == ['matrices.1.weight', 'matrices.2.weight']


# relations


def test_relations_by_loops():
    student, teacher = states(12, 6, seed=5)
    expected = 0.0
    for n in range(3):
        real = int(MASK[n].sum())
        for head in range(3):
            p, q = (
                torch.softmax(v @ v.T / math.sqrt(v.shape[1]), -1)
                for v in (
                    teacher[n, :real, 2 * head : 2 * head + 2],
                    student[n, :real, 4 * head : 4 * head + 4],
                )
            )
            expected += (p * (p / q).log()).sum().item() / 3
    assert relation_kl(student, teacher, MASK, 3).item() == pytest.approx(expected, rel=1e-4)


# getting at the values


def test_captured_lets_go_after_an_error_too():
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        with capture_outputs([layer]) as values:
            assert values == [None]
            layer(torch.zeros(1, 3))
    assert not layer._forward_hooks

"Five systems' losses against values worked out by hand, and their weights translated there and back."

import math
import numpy as np
import pytest
import torch
from kdnotes.losses.conventions import DIALECTS, dialect_loss, translate

# T = 4; row one: p = (3/4, 1/4), q = (1/2, 1/2); row two: both (3/4, 1/4); labels 0 and 1
T = 4.0
LOG3 = math.log(3)
STUDENT = torch.tensor([[0.0, 0.0], [T * LOG3, 0.0]])
TEACHER = torch.tensor([[T * LOG3, 0.0], [T * LOG3, 0.0]])
LABELS = torch.tensor([0, 1])
KL = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2  # mean over the two rows
CROSS = (math.log(2) + (0.75 * math.log(4 / 3) + 0.25 * math.log(4))) / 2  # H(p, q), the same
CE = (math.log(2) + math.log(1 + 3**T)) / 2  # the labels, T = 1: margins 0 and -4 log 3

BY_HAND = [
    ('canonical', dict(hard=0.25, soft=0.75), 0.25 * CE + 0.75 * 16 * KL),
    ('hf_distilbert', dict(alpha_mlm=2, alpha_ce=5), 2 * CE + 5 * 16 * KL),
    ('textbrewer', dict(hard_label_weight=0, kd_loss_weight=1), CROSS),
    ('textbrewer', dict(hard_label_weight=0.5, kd_loss_weight=2), 0.5 * CE + 2 * CROSS),
    ('torchdistill', dict(alpha=0.25), 0.25 * CE + 0.75 * 16 * KL),
    ('torchdistill', dict(alpha=0.25, beta=3), 0.25 * CE + 3 * 16 * KL),
    ('torchdistill', dict(alpha=0), KL),
    ('torchdistill', dict(alpha=0, beta=3), KL),
    ('modelopt', dict(kd_loss_weight=0.5), 0.5 * CE + 0.5 * 16 * KL / 2),
    ('modelopt', dict(kd_loss_weight=1), 16 * KL / 2),
]


@pytest.mark.parametrize(
    ('dialect', 'weights', 'value'), BY_HAND, ids=lambda v: v if isinstance(v, str) else ''
)
def test_by_hand(dialect, weights, value):
    assert dialect_loss(dialect, STUDENT, TEACHER, LABELS, T, weights).item() == pytest.approx(
        value, rel=1e-5
    )


def test_rows_without_a_label_count_for_the_teacher_only():
    labels = torch.tensor([-100, 1])
    loss = dialect_loss('hf_distilbert', STUDENT, TEACHER, labels, T, dict(alpha_mlm=2, alpha_ce=5)).item()
    assert loss == pytest.approx(2 * math.log(1 + 3**T) + 5 * 16 * KL, rel=1e-5)
    for dialect, weights, _ in BY_HAND:
        assert math.isfinite(
            dialect_loss(dialect, STUDENT, TEACHER, torch.tensor([-100, -100]), T, weights).item()
        )


def test_more_leading_dimensions_are_rows_except_for_torchdistill():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    labels = torch.randint(5, (2, 3), generator=generator)
    for dialect in set(DIALECTS) - {'torchdistill'}:
        weights = dict.fromkeys(DIALECTS[dialect], 0.5)
        flat = dialect_loss(
            dialect, student.flatten(0, 1), teacher.flatten(0, 1), labels.flatten(), T, weights
        )
        assert dialect_loss(dialect, student, teacher, labels, T, weights).item() == pytest.approx(
            flat.item(), rel=1e-5
        )
    # dimension 1 for the classes: two images of 5 pixels and 3 classes, summed over pixels, divided by 2
    turned = [x.movedim(1, -1).flatten(0, 1) for x in (student, teacher)]
    kl = dialect_loss('torchdistill', *turned, None, T, {'alpha': 0}).item() * 5
    assert dialect_loss('torchdistill', student, teacher, None, T, {'alpha': 0}).item() == pytest.approx(
        kl, rel=1e-5
    )
    with pytest.raises(ValueError, match=r'labels must be \(2, 5\), one a row, got \(2, 3\)'):
        dialect_loss('torchdistill', student, teacher, labels, T, {'alpha': 0.5})


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_float32_and_no_gradient_for_the_teacher(dtype):
    for dialect, weights, value in BY_HAND:
        student = STUDENT.to(dtype).requires_grad_()
        teacher = TEACHER.to(dtype).requires_grad_()
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = dialect_loss(dialect, student, teacher, LABELS, T, weights)
        loss.backward()
        assert (
            loss.dtype == torch.float32
            and loss.item() == pytest.approx(value, rel=0.03)
            and student.grad.isfinite().all()
            and teacher.grad is None
        )
        far = torch.tensor([[1e4, -1e4]], requires_grad=True)
        loss = dialect_loss(dialect, far, -far.detach(), torch.tensor([1]), 1.0, weights)
        loss.backward()
        assert loss.isfinite() and far.grad.isfinite().all()


def gradient(dialect, student, teacher, labels, T, weights):
    s = student.clone().requires_grad_()
    dialect_loss(dialect, s, teacher, labels, T, weights).backward()
    return s.grad.numpy()


def same(a, b):
    return np.allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())


def test_torchdistill_without_alpha():
    for labelled, labels in ((True, LABELS), (False, None)):
        there = translate({'alpha': 0.0}, T, 'torchdistill', 'textbrewer', (2, 2), labelled)
        assert there == {'hard_label_weight': 0, 'kd_loss_weight': pytest.approx(1)}
        assert same(
            gradient('textbrewer', STUDENT, TEACHER, labels, T, there),
            gradient('torchdistill', STUDENT, TEACHER, labels, T, {'alpha': 0.0}),
        )
        assert translate(there, T, 'textbrewer', 'torchdistill', (2, 2), labelled) == {'alpha': 0, 'beta': 1}
    # no labels, no weight
    assert translate({'alpha': 0.5}, T, 'torchdistill', 'canonical', (2, 2), labelled=False) == {
        'hard': 0,
        'soft': 1 / 16,
    }
    with pytest.raises(ValueError, match="multiply its criterion's factor by 16 instead"):
        translate(dict(hard=0, soft=1), T, 'canonical', 'torchdistill', (2, 2))


def test_without_labels_modelopt_has_a_weight_of_its_own():
    there = translate({'kd_loss_weight': 0.5}, T, 'modelopt', 'canonical', (9, 2), labelled=False)
    assert there == {'hard': 0, 'soft': 0.25}
    assert translate(there, T, 'canonical', 'modelopt', (9, 2), labelled=False) == {'kd_loss_weight': 0.5}
    with pytest.raises(ValueError, match=r'must be at most 1, got 0 \+ 2 \* 1 = 2'):
        translate(dict(hard=0, soft=1), T, 'canonical', 'modelopt', (9, 2), labelled=False)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            dict(dialect='kd'),
            (
                r"dialect must be one of \['canonical', 'hf_distilbert', 'textbrewer', 'torchdistill', "
                r"'modelopt'\], got 'kd'"
            ),
        ),
        (dict(weights={'alpha': 0.5}), r"weights of canonical must be \['hard', 'soft'\], got \['alpha'\]"),
        (dict(weights={'hard': 1}), r"weights of canonical must be"),
        (dict(weights={'hard': -1, 'soft': 1}), "canonical's hard must be >= 0, got -1"),
        (dict(weights={'hard': None, 'soft': 1}), "canonical's hard must be >= 0, got None"),
        (dict(weights={'hard': math.inf, 'soft': 1}), "canonical's hard must be >= 0, got inf"),
        (dict(dialect='torchdistill', weights={'alpha': 2}), "torchdistill's beta must be >= 0, got -1"),
        (dict(dialect='torchdistill', weights={'alpha': None}), "weights of torchdistill must be"),
        (
            dict(dialect='modelopt', weights={'kd_loss_weight': 1.5}),
            "modelopt's kd_loss_weight must be from 0 to 1, got 1.5",
        ),
        (dict(T=0), 'T must be > 0, got 0'),
        (dict(T=float('nan')), 'T must be > 0, got nan'),
        (dict(student=STUDENT[0]), r'student and teacher must be logits \(rows, classes\) of one shape'),
        (dict(teacher=TEACHER[:1]), 'of one shape'),
        (dict(labels=LABELS[:1]), r'labels must be \(2,\), one a row, got \(1,\)'),
    ],
)
def test_bad_input(arguments, message):
    good = dict(
        dialect='canonical',
        student=STUDENT,
        teacher=TEACHER,
        labels=LABELS,
        T=T,
        weights=dict(hard=0.5, soft=0.5),
    )
    with pytest.raises(ValueError, match=message):
        dialect_loss(**good | arguments)

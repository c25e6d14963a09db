"""The ranges of gradients: counted as one would count them number by number,
of the trainer's own gradients too.
"""

import json
import numpy as np
import pytest
import torch
from helpers import SameWord, tiny_bert, tiny_config
from kdnotes.train import loop as trainer
from kdnotes.train.gradient_stats import BORDERS, gradient_ranges
from kdnotes.train.distributed import Runtime
from watching import host_syncs

INFINITE = float('inf')


def spread(n: int = 20_000, seed: int = 0) -> torch.Tensor:
    "Numbers of every magnitude that float32 has, zeros and numbers that are none among them."
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(
        np.ldexp(rng.choice([-1, 1], n) * rng.uniform(0.5, 1, n), rng.integers(-125, 120, n)).astype(
            np.float32
        )
    )
    for value, at in (
        (0.0, slice(0, 300)),
        (INFINITE, slice(300, 340)),
        (float('nan'), slice(340, 350)),
        (2.0**-24, slice(350, 360)),
        (2.0**-14, slice(360, 370)),
        (2.0**16, slice(370, 380)),
    ):
        numbers[at] = value
    return numbers[torch.from_numpy(rng.permutation(n))]


def by_hand(numbers: torch.Tensor, scale: float) -> dict[str, float]:
    "Shares beyond the borders, one number after the other, in float64."
    sizes = [abs(x) * scale for x in numbers.double().tolist() if x == x and abs(x) != INFINITE and x != 0]
    return {
        name: sum(size >= 2.0**border if border > 0 else size < 2.0**border for size in sizes) / len(numbers)
        for name, border in BORDERS.items()
    }


@pytest.mark.parametrize('scale', [1.0, 2.0**16, 2.0**-3])
def test_shares_are_those_of_counting_by_hand(scale):
    numbers = spread()
    [row] = gradient_ranges([('head', numbers)], scale)
    assert row['plain'] == pytest.approx(by_hand(numbers, 1.0)) and row['scaled'] == pytest.approx(
        by_hand(numbers, scale)
    )
    finite = numbers[numbers.isfinite()]
    assert (row['elements'], row['zero'], row['not_finite'], row['largest']) == (
        20_000,
        300 / 20_000,
        50 / 20_000,
        finite.abs().max().item(),
    )
    exponents = np.frexp(finite[finite != 0].numpy())[1] - 1
    assert {row['log2_from'] + i: n for i, n in enumerate(row['log2_counts']) if n} == dict(
        zip(*np.unique(exponents, return_counts=True))
    )
    assert json.loads(json.dumps(row)) == row


def test_layers_are_counted_together_and_gradients_left_alone(monkeypatch):
    from kdnotes.train import gradient_stats as gradients

    numbers = spread()
    names = [f'encoder.layer.{i}.weight' for i in (0, 1, 0, 10)]
    parts = [*zip(names, numbers.split(5000))]
    before = [p.clone() for _, p in parts]
    whole = gradient_ranges(parts)
    monkeypatch.setattr(gradients, '_PIECE', 7)
    assert gradient_ranges(parts) == whole, 'in pieces'
    assert [(r['layer'], r['elements']) for r in whole] == [
        ('layer 0', 10_000),
        ('layer 1', 5000),
        ('layer 10', 5000),
    ]
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, (_, b) in zip(before, parts))


def test_of_the_trainer_between_backward_and_update(monkeypatch):
    """In fp16 its gradients are multiplied by the scale: without it they are fp32's, to fp16's rounding.
    The host waits for nothing but the counts.
    """

    def ranges(dtype):
        seen = []
        update = trainer.update_weights

        def looked_at(model, optimizer, scaler, *rest):
            fp16 = scaler.is_enabled()
            with host_syncs() as found:
                seen.append(
                    gradient_ranges(
                        ((n, p.grad) for n, p in model.named_parameters()),
                        scaler.get_scale() if fp16 else 2.0**10,
                        fp16,
                    )
                )
            assert found.total() == fp16  # the scale itself
            return update(model, optimizer, scaler, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(trainer, 'update_weights', looked_at)
            trainer.train(
                SameWord(),
                tiny_bert(),
                tiny_config('mixed_student'),
                Runtime(torch.device('cpu'), dtype),
                lambda *args, **values: None,
            )
        return seen

    exact = ranges('fp32')
    half = ranges('fp16')
    assert len(exact) == len(half) == 8
    for a, b in zip(exact[0], half[0]):
        assert (
            a['layer'] == b['layer']
            and b['largest'] == pytest.approx(a['largest'], rel=1e-2)
            and b['scaled']['fp16_above'] == 0
        )
        assert abs(a['log2_from'] + len(a['log2_counts']) - b['log2_from'] - len(b['log2_counts'])) <= 1

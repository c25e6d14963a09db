"Matmuls in bf16 on a CPU without instructions for them: torch's own numbers, and what is kept."

import numpy as np
import pytest
import torch
from helpers import SameWord, tiny_bert
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.train.precision import EmulatedBf16Matmul
from kdnotes.train.distributed import Runtime, start

CPU = torch.device('cpu')
TORCHS, WIDENED, FP32 = Runtime(CPU, 'bf16'), Runtime(CPU, 'bf16', emulated_bf16=True), Runtime(CPU, 'fp32')


def gradients(here: Runtime) -> np.ndarray:
    "Of one batch, without the keys' biases, whose gradient is rounding error."
    task = SameWord()
    model = tiny_bert()
    batch = task.batch('train', np.arange(25))
    with here.autocast():
        outputs = model(**batch.inputs)
    value, n = task.loss_terms(outputs, batch, {})['hard']
    (value / n).backward()
    return np.concatenate(
        [p.grad.flatten().numpy() for name, p in model.named_parameters() if not name.endswith('key.bias')]
    )


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_gradients_are_those_of_torchs_matmuls_and_not_fp32s():
    torchs = gradients(TORCHS)
    widened = gradients(WIDENED)
    fp32 = gradients(FP32)
    assert 0 < 5 * apart(widened, torchs) < apart(torchs, fp32) < 0.1


@pytest.mark.parametrize(
    'a, b',
    [
        ((7, 8), (8, 3)),
        ((2, 7, 8), (2, 8, 3)),
        ((2, 3, 7, 8), (2, 3, 8, 3)),
        ((2, 7, 8), (8, 3)),
        ((8,), (8, 3)),
        ((7, 8), (8,)),
        ((1, 7, 8), (4, 8, 3)),
    ],
)
def test_matmuls_of_whole_numbers_are_equal_to_the_last_bit(a, b):
    "Their sums need no rounding, so order does not matter; shapes that are left to torch are among them."

    def results(here):
        torch.manual_seed(0)
        leaves = [torch.randint(-3, 4, shape).float().requires_grad_() for shape in (a, b)]
        with here.autocast():
            found = [torch.matmul(*leaves), leaves[0] @ leaves[1], leaves[0].matmul(leaves[1])] + (
                [torch.bmm(*leaves)] if len(a) == len(b) == 3 and a[0] == b[0] else []
            )
        sum(p.float().sum() for p in found).backward()
        return [(t.dtype, t.tolist()) for t in (*found, *(leaf.grad for leaf in leaves))]

    assert results(WIDENED) == results(TORCHS)


def test_activations_are_kept_in_16_bits():
    "Else mixed precision would need fp32's memory there."

    def kept(here):
        seen = {}

        def keep(t):
            seen[t.data_ptr()] = t.numel() * t.element_size()
            return t

        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        x = torch.randn(512, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), here.autocast():
            net(x)
        return sum(size for at, size in seen.items() if at not in {p.data_ptr() for p in net.parameters()})

    assert kept(WIDENED) <= kept(TORCHS) < kept(FP32)


def test_fp32_matmuls_and_other_formats_are_left_alone():
    x = torch.randn(3, 3)
    y = torch.randn(3, 3)
    with EmulatedBf16Matmul():
        assert torch.equal(x @ y, torch.mm(x, y))
        assert (x.half() @ y.half()).dtype == torch.half
        with torch.autocast('cpu', dtype=torch.half):
            assert (x @ y).dtype == torch.half
        with torch.autocast('cpu', dtype=torch.bfloat16):
            found = x.double() @ y.double()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(found, x.double() @ y.double())


@pytest.mark.skipif(torch.cuda.is_available(), reason='about CPUs, and this machine trains on its GPU')
def test_a_run_uses_them_where_the_cpu_has_no_instructions(monkeypatch):
    def here(mode, *flags):
        monkeypatch.setattr('kdnotes.core.machine.cpu_flags', lambda: {'avx2', *flags})
        return start(resolve(make_config(mode=mode), Machine('cpu', 1), 'embedded'))

    assert here('mixed_student').emulated_bf16
    assert not here('mixed_student', 'avx512_bf16').emulated_bf16
    assert not here('full_student').emulated_bf16

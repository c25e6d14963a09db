"What a training does, counted by hooks: forwards, all-reduces and reads of the device."

import contextlib
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

# the host reads a number or a shape
WAITS = (
    'aten::_local_scalar_dense',
    'aten::nonzero',
    'aten::masked_select',
    'aten::equal',
    'aten::is_nonzero',
)


class _Waits(TorchDispatchMode):
    def __init__(self, found: Counter):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITS:
            frame = sys._getframe(1)
            while '/torch/' in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
                frame = frame.f_back
            self.found[Path(frame.f_code.co_filename)] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_syncs():
    "Files of the operations after which the host of a GPU would wait, with how often."
    found = Counter()
    with _Waits(found):
        yield found


def checksums(tensors) -> list[int]:
    "A number for each tensor that changes with any of its bits."
    return [
        int(t.detach().float().contiguous().view(torch.int32).sum(dtype=torch.int64).item()) for t in tensors
    ]


@contextlib.contextmanager
def watch(model):
    "The forwards, all-reduces and gradients of each step of a training of this model."
    from bench.scaling import communication

    names = ('forwards', 'wrapped', 'rounds', 'buckets', 'messages', 'bytes')
    seen = SimpleNamespace(steps=[], **dict.fromkeys(names, 0))

    def forward(*_):
        seen.forwards += torch.is_grad_enabled()

    def step(*_):
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad
        ]
        counts = {name: getattr(seen, name) for name in names}
        seen.steps.append(SimpleNamespace(**counts, checksums=checksums(gradients)))
        vars(seen).update(dict.fromkeys(names, 0))

    hooks = [register_optimizer_step_pre_hook(step), model.register_forward_pre_hook(forward)]
    try:
        with communication(seen):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()

"""Record what a training receives: its initial weights and the inputs of each step.

Python imports this module when it starts, if its folder is on PYTHONPATH. It uses hooks of torch and no name
of kdnotes, so that it works the same with two versions of kdnotes. It does nothing unless OBSERVED_RUNS names
the folder that it writes to.
"""

import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path


def digest(content: bytes) -> str:  # 12 hex digits
    "A short sha256."
    return hashlib.sha256(content).hexdigest()[:12]


def bytes_of(tensor) -> bytes:
    "A tensor's numbers as they lie in memory, of any dtype."
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_sha256(module) -> str:
    "All weights and buffers, whatever they are called and in whatever order they come."
    tensors = module.state_dict().values()
    return digest(
        ''.join(sorted(digest(bytes_of(t) + repr(tuple(t.shape)).encode()) for t in tensors)).encode()
    )


def input_texts(args: tuple, kwargs: dict) -> dict[str, str]:
    "Token ids and masks: name -> shape, sum and sha256 of the numbers."
    import torch

    given = dict(enumerate(args)) | kwargs
    whole = {name: t for name, t in given.items() if torch.is_tensor(t) and not t.is_floating_point()}
    return {
        str(name): f'shape {tuple(t.shape)}, sum {int(t.sum())}, sha256 {digest(bytes_of(t.long()))}'
        for name, t in whole.items()
    }


class Observer:
    "Writes one line for the initial weights and one line per optimizer step, into a file of this process."

    def __init__(self, folder: Path):
        self.file = folder / f'{time.time_ns()}-{os.getpid()}.jsonl'
        self.depth = 0
        self.inputs = []  # of the forwards since the last step
        self.begun = False

    def write(self, **values) -> None:
        with self.file.open('a') as f:
            f.write(json.dumps(values) + '\n')

    def trains(self, module) -> bool:
        import torch

        return self.depth == 1 and module.training and torch.is_grad_enabled()

    def before_forward(self, module, args) -> None:
        self.depth += 1
        if self.trains(module) and not self.begun:
            import torch.distributed as dist

            self.begun = True
            several = dist.is_initialized()
            place = (
                dict(rank=dist.get_rank(), ranks=dist.get_world_size()) if several else dict(rank=0, ranks=1)
            )
            self.write(kind='start', weights=weights_sha256(module), **place)

    def after_forward(self, module, args, kwargs, output) -> None:
        if self.trains(module):
            self.inputs.append(input_texts(args, kwargs))
        self.depth -= 1

    def before_step(self, optimizer, args, kwargs) -> None:
        self.write(kind='step', inputs=self.inputs)
        self.inputs = []

    def observe_torch(self) -> None:
        "Register with torch, for all modules and optimizers of this process."
        from torch.nn.modules import module
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        module.register_module_forward_pre_hook(self.before_forward)
        module.register_module_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)


class AfterTorch(importlib.abc.MetaPathFinder):
    "Has an observer registered right after torch is imported."

    def __init__(self, observer: Observer):
        self.observer = observer

    def find_spec(self, name, path=None, target=None):
        if name != 'torch':
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec('torch')
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.observer.observe_torch()

        spec.loader.exec_module = exec_module
        return spec


if folder := os.environ.get('OBSERVED_RUNS'):
    sys.meta_path.insert(0, AfterTorch(Observer(Path(folder))))

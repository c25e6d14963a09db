"""Real ranks for tests: processes with the environment that the launcher gives them,
forked from one server that has imported torch and transformers once.

Nothing of kdnotes is imported before a rank starts, so each can be given a package of its own,
say a copy with a mistake in it.
"""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
context = multiprocessing.get_context('forkserver')
context.set_forkserver_preload(
    [
        'torch.distributed.algorithms.ddp_comm_hooks.default_hooks',
        'torch.nn.parallel',
        'transformers.models.bert.modeling_bert',
        'transformers.models.distilbert.modeling_distilbert',
        'pandas',
        'pydantic',
        'pytest',
    ]
)


class RankError(Exception):
    "A rank that did not give a result; nothing is said about what it would have been."


def launch(
    function: str,  # 'module:name' of tests/, called in each rank
    *args,  # picklable
    ranks: int = 1,
    package: Path | None = None,  # the folder that holds kdnotes/; None: the installed one
    timeout_s: float = 120,
) -> list:  # what each rank returned
    "Run a function in `ranks` processes."
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank,
                args=(function, pickle.dumps(args), rank, ranks, package, Path(folder)),
            )
            for rank in range(ranks)
        ]
        for p in processes:
            p.start()
        try:
            _wait(processes, Path(folder), time.monotonic() + timeout_s)
        finally:
            for p in processes:
                p.kill()
            for p in processes:
                p.join()
        return [pickle.loads((Path(folder) / f'{rank}.pkl').read_bytes()) for rank in range(ranks)]


def _wait(processes: list, folder: Path, deadline: float) -> None:
    "Until all have ended well, or one has not."
    running = dict(enumerate(processes))
    while running:
        multiprocessing.connection.wait(
            [p.sentinel for p in running.values()], timeout=max(0, deadline - time.monotonic())
        )
        ended = {rank: p for rank, p in running.items() if not p.is_alive()}
        for rank, p in ended.items():
            if p.exitcode:
                raise RankError(
                    f'rank {rank} ended with {p.exitcode}:\n'
                    + (said.read_text() if (said := folder / f'{rank}.txt').exists() else '')
                )
        if not ended and time.monotonic() > deadline:
            raise RankError(f'ranks {sorted(running)} did not end in time')
        running = {rank: p for rank, p in running.items() if rank not in ended}


def _rank(function: str, args: bytes, rank: int, ranks: int, package: Path | None, folder: Path) -> None:
    "A rank's life."
    os.environ |= dict(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        KDNOTES_STORE=str(folder / 'store'),
        GLOO_SOCKET_IFNAME='lo',
        CUDA_VISIBLE_DEVICES='',
    )
    sys.path[:0] = [*([str(package)] if package else []), str(HERE)]
    try:
        module, _, name = function.partition(':')
        # loading imports what the arguments are made of
        value = getattr(__import__(module), name)(*pickle.loads(args))
        import kdnotes

        if package and Path(kdnotes.__file__).parents[1] != package:
            raise ImportError(f'kdnotes came from {kdnotes.__file__} and not from {package}')
        (folder / f'{rank}.pkl').write_bytes(pickle.dumps(value))
    except BaseException:
        (folder / f'{rank}.txt').write_text(traceback.format_exc())
        raise SystemExit(1) from None


def run_tests(*tests: str) -> list[tuple[str, str]]:
    """What a rank does to run tests, say 'test_losses.py::test_bad_temperature':
    their names, and 'passed' or the kind of error.
    """
    import pytest

    outcomes = []

    class Notes:
        def pytest_runtest_makereport(self, item, call):
            if call.when == 'call' or call.excinfo:
                outcomes.append((item.name, call.excinfo.typename if call.excinfo else 'passed'))

    os.chdir(HERE.parent)
    os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ['-p', 'no:cacheprovider', *(f'tests/{test}' for test in tests)], plugins=[Notes()]
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(said.getvalue())
    return outcomes

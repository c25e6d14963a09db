"""A tiny training that can be killed anywhere, in one process or in those of a launcher:
`python -m faults <folder> <kill at>`.
"""

import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

EVERY = 3  # steps between checkpoints


def train_in(
    folder: Path,  # the run folder; a checkpoint in it is taken up
    kill_at: int | None = None,  # the last rank gets SIGKILL inside this step, counted from 1; None: never
    ranks: int = 1,
    most_bytes: int | None = None,  # of a file, as on a disk that is full
    poison: int | None = None,  # an example whose loss is infinite
    again: Path | None = None,  # a file that the rank makes before it dies
) -> dict:  # what can be compared
    "What a rank does: train from the newest checkpoint to the end."
    import torch
    from helpers import SameWord, flat, tiny_bert, tiny_config
    from kdnotes.train import distributed as runtime, loop as trainer
    from kdnotes.results.runs import append_row
    from kdnotes.results.schema import make_row

    class Task(SameWord):
        "One forward is one step here."

        def loss_terms(self, outputs, batch, signal):
            self.step = getattr(self, 'step', resumed()) + 1
            if self.step == kill_at and here.rank == ranks - 1:
                if again:
                    again.touch()
                os.kill(os.getpid(), 9)
            terms = super().loss_terms(outputs, batch, signal)
            return {
                k: (v * float('inf') if poison is not None and poison in batch.index else v, n)
                for k, (v, n) in terms.items()
            }

    def resumed():
        return max((int(p.name[5:]) for p in (folder / 'checkpoints').glob('step-*')), default=0)

    torch.set_num_threads(1)
    config = tiny_config('full_student', ranks=ranks, epochs=8.0, checkpoint_steps=EVERY, keep_checkpoints=3)
    here, model, task = runtime.start(config), tiny_bert(dropout=0.1), Task()
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    def on_row(kind, **values):
        return append_row(folder / 'rows.jsonl', make_row(kind, **values))

    try:
        result = trainer.train(
            task, model, config, here, on_row, checkpoints=folder / 'checkpoints', key='tiny'
        )
    except Exception as e:
        return dict(
            error=f'{type(e).__name__}: {e}', finite=all(p.isfinite().all() for p in model.parameters())
        )
    runtime.stop(here)
    curve = [{k: v for k, v in point.items() if k != 'elapsed_s'} for point in result.curve]
    return dict(
        weights=flat(model.parameters()).tobytes(),
        resumed_at=result.resumed_at,
        curve=curve,
        totals=(result.steps, result.examples, result.tokens, result.padding_share),
    )


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import pickle

    folder = Path(sys.argv[1])
    # the mark of the last rank, which dies once
    again = folder / 'again'
    ranks = int(os.environ['WORLD_SIZE'])
    notes = train_in(folder, kill_at=None if again.exists() else int(sys.argv[2]), ranks=ranks, again=again)
    (folder / f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(notes))


@contextmanager
def files_no_larger_than(size: int):  # bytes
    "What is written beyond that is refused by the system, as by a disk that is full."
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)

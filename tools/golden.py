"""Compare the golden set in tests/golden/ with what the code gives today, or write it. The golden set holds
what must stay the same while the library is rebuilt and is the same on every machine; `tools/same.py`
compares the rest.

    python tools/golden.py            compares; exit status 1 if anything differs
    python tools/golden.py --write    writes the files

Write it only in a commit that is meant to change these values, and say in its message which keys changed and
why. Look at `git diff tests/golden` first: a value that changed without a reason is a bug. The values of the
thesis are read from thesis/generated/, so run `make thesis` first.
"""

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests' / 'golden'
EVIDENCE = ROOT / 'thesis' / 'data'
RELATIVE = 1e-12  # numbers that differ by less are equal
ABSOLUTE = 1e-12  # the same for a number near 0, as a p or the difference of two means
MOST_LINES = 20


# ---- comparing ----


def flat(value: Any, prefix: str = '') -> dict[str, Any]:  # 'a.b.0' -> number, text, truth or None
    "Nested objects and lists as dotted keys; an empty one is a value."
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(inner, dict) or not inner:
        return {prefix: value}
    found = {}
    for name, of in inner.items():
        found |= flat(of, f'{prefix}.{name}' if prefix else str(name))
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def equal(golden: Any, now: Any) -> bool:
    "Are two values the same?"
    if is_number(golden) and is_number(now):
        both_nan = math.isnan(golden) and math.isnan(now)
        return both_nan or math.isclose(golden, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(golden) is type(now) and golden == now


def mismatches(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    "One line for each key whose value differs, or that only one side has."
    lines = []
    for key in golden | now:
        if key not in now:
            lines.append(f'{key}: golden {brief(golden[key])}, now missing')
        elif key not in golden:
            lines.append(f'{key}: golden missing, now {brief(now[key])}')
        elif not equal(golden[key], now[key]):
            lines.append(f'{key}: golden {brief(golden[key])}, now {brief(now[key])}')
    return lines


def brief(value: Any) -> str:
    "A value as a line shows it."
    text = repr(value)
    return text if len(text) <= 160 else f'{text[:120]}...{text[-30:]}'


def summary(lines: list[str]) -> str:  # '': nothing differs
    "The first lines, and how many more there are."
    more = len(lines) - MOST_LINES
    return '\n'.join([*lines[:MOST_LINES], *[f'and {more} more'] * (more > 0)])


# ---- the values of the thesis ----


def thesis_values() -> dict[str, dict[str, Any]]:  # part -> key -> value
    "All values of the thesis, as tests/test_thesis.py holds them to the code."
    values = json.loads((ROOT / 'thesis' / 'generated' / 'values.json').read_text(encoding='utf-8'))
    parts = {}
    for key, value in values.items():
        part, dot, _ = key.partition('.')
        parts.setdefault(part if dot else 'general', {})[key] = value
    return parts


# ---- comparisons of the committed studies ----


@contextmanager
def committed_evidence() -> Iterator[None]:
    "The library sees the committed studies and no runs."
    from kdnotes.core.files import at_home, with_evidence

    with TemporaryDirectory() as folder, at_home(with_evidence(folder, ROOT)):
        yield


def studies() -> list[str]:
    "The committed studies."
    return sorted(file.name.removesuffix('.records.jsonl') for file in EVIDENCE.glob('*.records.jsonl'))


def study_tables(study: str) -> dict[str, str]:  # file name -> CSV; {}: the study is refused
    "What `kdnotes study` writes beside its table: the comparisons of a study, and the settings that differ."
    from kdnotes.stats.evidence import ReportError, difference_table, evidence
    from kdnotes.stats.deployment import deployment
    from kdnotes.stats.labels import label_efficiency
    from kdnotes.stats.tables import all_comparisons
    from kdnotes.experiment.study import all_differences

    try:
        e = evidence(study)
    except ReportError:  # of trials: their arms mix settings
        return {}
    by_pair = {f'{c.a} -> {c.b}': difference_table(c) for _, c in e.comparisons}
    differences = all_differences(SimpleNamespace(differences=by_pair))
    return {
        'comparisons.csv': all_comparisons(e, deployment(e), label_efficiency(e)).to_csv(index=False),
        'differences.csv': differences.to_csv(index=False),
    }


def hypervolume_history(
    trials: Sequence,  # in the order in which they ended
    objectives: Sequence,
    reference: dict[str, float],  # objective's name -> the worst value that counts
    ideal: dict[str, float],  # objective's name -> the best possible value
) -> np.ndarray:  # (trials,), shares of the box, 0 to 1, never decreasing
    "The hypervolume of the front after each trial."
    from optuna._hypervolume import compute_hypervolume  # Optuna has no public function for it
    from kdnotes.search.front import Trial, losses

    edge, best = losses([Trial(0, {}, '', dict(v)) for v in (reference, ideal)], objectives)
    points = (np.maximum(losses(trials, objectives), best) - best) / (edge - best)
    counts = np.array([t.state == 'complete' for t in trials], dtype=bool) & (points < 1).all(1)
    ones = np.ones(len(objectives))
    history = np.zeros(len(trials))
    for n in range(len(trials)):
        so_far = points[: n + 1][counts[: n + 1]]
        history[n] = compute_hypervolume(so_far, ones) if len(so_far) else 0.0
    return history


def searches() -> dict[str, dict[str, Any]]:  # study -> what its search has found
    "The committed searches: fronts, hypervolumes, importances, and the student to ship."
    from kdnotes.search.front import box, pareto_with_seeds
    from kdnotes.search.pictures import ended, importances_of
    from kdnotes.search.result import load_result

    found = {}
    for study in sorted(file.name.removesuffix('.search.json') for file in EVIDENCE.glob('*.search.json')):
        result = load_result(study)
        reference, ideal = box(result.trials, result.objectives)
        over_seeds = (result.trials, result.objectives, result.seed_values, result.threshold.value)
        found[study] = dict(
            front=[t.number for t in result.front],
            front_of_means={str(t.number): t.values for t in pareto_with_seeds(*over_seeds)},
            hypervolumes=hypervolume_history(ended(result), result.objectives, reference, ideal).tolist(),
            reference=reference,
            ideal=ideal,
            ship=result.ship.run_id,
            importances={
                f'{row.objective}.{row.parameter}': [row.trials, row.importance, bool(row.is_chance)]
                for row in importances_of(result).itertuples()
            },
            trials={str(t.number): [t.state, t.values, list(t.causes)] for t in result.trials},
        )
    return found


# how the rows of each table are told apart
ROW_KEYS = {
    'comparisons.csv': ('kind', 'a', 'b', 'quantity', 'method'),
    'differences.csv': ('comparison', 'setting'),
}


def read_table(name: str, text: str) -> dict[str, Any]:  # 'row, column' -> number or text
    "A CSV file by row and column; `columns` are their names in order."
    rows = csv.DictReader(io.StringIO(text))
    found = {f'{name}, columns': ', '.join(rows.fieldnames)}
    for row in rows:
        key = ', '.join(row[column] for column in ROW_KEYS[name])
        if f'{name}, {key}, {rows.fieldnames[0]}' in found:
            raise ValueError(f'{name} has two rows {key}')
        found |= {f'{name}, {key}, {column}': as_number(cell) for column, cell in row.items()}
    return found


def as_number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


# ---- parameters and commands ----


def limits(field: Any) -> dict[str, Any]:  # a pydantic field
    "What a parameter's value must be: ge, gt, le, lt, pattern."
    names = ('ge', 'gt', 'le', 'lt', 'pattern')
    found = [(name, getattr(of, name, None)) for of in field.metadata for name in names]
    return {name: value for name, value in found if value is not None}


def declared(fields: dict[str, Any]) -> dict[str, dict]:  # parameter -> kind, default, limits
    "What pydantic's fields say of parameters."
    from pydantic_core import to_jsonable_python

    found = {}
    for name, field in fields.items():
        default = 'required' if field.is_required() else to_jsonable_python(field.default)
        found[name] = dict(kind=kind_name(field.annotation), default=default, **limits(field))
    return found


def kind_name(annotation: Any) -> str:  # 'int', 'float | None'
    "A type as it is written."
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def parameters() -> dict:
    "All parameters of a run (kind, default, range), and where tasks, modes and corpora have other defaults."
    from kdnotes.core.arms import MODES
    from kdnotes.core.config import TASKS, task_info
    from kdnotes.core.spec import FLAT_NAMES, flat
    from kdnotes.core.parse import make_config

    common = {name: known.field for name, known in FLAT_NAMES.items()}
    found = dict(all_tasks=declared(common), tasks={}, modes={}, corpora={})
    for task in TASKS:
        info = task_info(task)
        found['tasks'][task] = declared(info.settings.model_fields)
        known = found['all_tasks'] | found['tasks'][task]
        of_modes = {mode: flat(make_config(task=task, mode=mode)) for mode in MODES}
        found['modes'][task] = {
            mode: {name: value for name, value in values.items() if value != known[name]['default']}
            for mode, values in of_modes.items()
        }
        found['corpora'][task] = {', '.join(key): dict(setting) for key, setting in info.defaults.items()}
    return found


def commands() -> dict:  # command -> option or argument -> how it is typed, default, ...
    "All commands with what they take."
    import typer
    from kdnotes.cli import make_app

    app = typer.main.get_command(make_app())
    own = {'': app} | app.commands
    return {
        f'kdnotes {name}'.strip(): {p.name: of_option(p) for p in own[name].params} for name in sorted(own)
    }


def of_option(option: Any) -> dict:  # a typer option or argument
    "What matters of an option to those who type it."
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    facts = dict(
        required=option.required,
        argument=option.param_type_name == 'argument',
        multiple=getattr(option, 'multiple', False),
        flag=getattr(option, 'is_flag', False),
    )
    found = dict(kind=kind_name(option.type_descriptor.annotation), default=default)
    found['typed'] = ' '.join([*option.opts, *option.secondary_opts])
    return found | {name: True for name, holds in facts.items() if holds}


# ---- records ----


def key_paths(value: Any, prefix: str = '') -> Iterator[str]:
    "The keys of a record and of what it holds, 'a.b'; those of the objects of a list are 'a[].b'."
    if isinstance(value, list):
        for of in value:
            yield from key_paths(of, f'{prefix}[]')
    if isinstance(value, dict):
        for name, of in value.items():
            path = f'{prefix}.{name}' if prefix else name
            yield path
            # reasons depend on the machine; a run shorter than a second has no timeline
            if path not in ('reasons', 'timeline'):
                yield from key_paths(of, path)


def record_keys(records: dict[str, dict]) -> dict:  # of 'task mode' -> record
    "The schema of records and their keys: 'all', or the runs that have one."
    holders = {}
    for run, record in records.items():
        for path in key_paths(record):
            holders.setdefault(path, dict())[run] = None
    keys = {path: 'all' if len(of) == len(records) else ', '.join(of) for path, of in sorted(holders.items())}
    return dict(schema=sorted({record['schema'] for record in records.values()}), keys=keys)


def small_records() -> dict[str, dict]:
    "The records of small runs of each task, trained now."
    sys.path.insert(0, str(ROOT / 'tests'))
    from kdnotes.core.config import TASKS
    from kdnotes.results.store import find_record
    from small_runs import make_small_run, small_model

    with TemporaryDirectory() as folder:
        os.environ |= dict(KDNOTES_HOME=folder, HF_HUB_OFFLINE='1')
        teacher = small_model(Path(folder) / 'teacher')
        students = {task: find_record(make_small_run(task, 'full_kd', teacher))[0] for task in TASKS}
        return with_teachers(students)


def with_teachers(students: dict[str, dict]) -> dict[str, dict]:  # of task -> record; 'task mode' -> record
    "The records of students and of the runs that taught them."
    from kdnotes.results.store import find_record

    found = {}
    for task, student in students.items():
        for record in (find_record(student['teacher_run_id'])[0], student):
            found[f'{task} {record["mode"]}'] = record
    return found


# ---- the files ----


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + '\n'


def golden_json(name: str) -> dict:
    "A file of the golden set."
    return json.loads((GOLDEN / f'{name}.json').read_text(encoding='utf-8'))


def golden_tables(study: str) -> dict[str, str]:  # file name -> CSV; {}: the study is refused
    "The tables of a study in the golden set."
    files = {name: GOLDEN / 'studies' / f'{study}.{name}' for name in ROW_KEYS}
    return {name: file.read_text(encoding='utf-8') for name, file in files.items() if file.exists()}


def table_mismatches(golden: dict[str, str], now: dict[str, str]) -> list[str]:
    "One line for each cell that differs between the tables of a study."
    sides = [{}, {}]
    for side, tables in zip(sides, (golden, now)):
        for name, text in tables.items():
            side |= read_table(name, text)
    return mismatches(*sides)


def today() -> dict[str, str]:  # path in tests/golden/ -> content
    "The whole golden set, made anew."
    found = {f'thesis/{part}.json': as_json(values) for part, values in thesis_values().items()}
    with committed_evidence():
        for study in studies():
            found |= {f'studies/{study}.{name}': text for name, text in study_tables(study).items()}
        found['searches.json'] = as_json(searches())
    found['studies.json'] = as_json(studies())
    found['parameters.json'] = as_json(parameters())
    found['commands.json'] = as_json(commands())
    found['record_keys.json'] = as_json(record_keys(small_records()))
    return found


def file_mismatches(path: str, golden: str, now: str) -> list[str]:
    "One line for each value of a file that differs."
    if path.endswith('.csv'):
        name = path.rpartition('.')[0].rpartition('.')[2] + '.csv'
        lines = table_mismatches({name: golden} if golden else {}, {name: now} if now else {})
    else:
        lines = mismatches(flat(json.loads(golden or '{}')), flat(json.loads(now or '{}')))
    return [f'{path}: {line}' for line in lines]


def main(arguments: Iterable[str] | None = None) -> int:  # None: those of the command line
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--write', action='store_true', help='write the files anew')
    options = parser.parse_args(arguments)
    now = today()
    there = sorted(file for file in GOLDEN.rglob('*') if file.is_file())
    golden = {str(file.relative_to(GOLDEN)): file.read_text(encoding='utf-8') for file in there}
    lines = []
    for path in sorted(golden | now):
        lines += file_mismatches(path, golden.get(path, ''), now.get(path, ''))
    if not options.write:
        print(summary(lines) or f'{len(golden)} files: nothing differs')
        return int(bool(lines))
    for path in golden.keys() - now.keys():
        (GOLDEN / path).unlink()
    for path, content in now.items():
        (GOLDEN / path).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / path).write_text(content, encoding='utf-8')
    print(f'{GOLDEN}: {len(now)} files; {len(lines)} values changed, came or went')
    return 0


if __name__ == '__main__':
    sys.exit(main())

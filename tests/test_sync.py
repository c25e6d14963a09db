"Notebooks, modules and README say the same, and the notebooks are clean and small enough to explain."

import ast
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = (ROOT / 'nbs', ROOT / 'bench' / 'nbs')
NOTEBOOKS = [p for of in PLACES for p in sorted(of.rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts]
LIBRARY = [p for p in NOTEBOOKS if re.match(r'\d\d_', p.name)]
HOW_TO = [p for p in NOTEBOOKS if p.parent.name == 'howto']
LESSONS = [p for p in NOTEBOOKS if p.parent.name == 'lessons']
EXPERIMENTS = [p for p in NOTEBOOKS if p not in LIBRARY + HOW_TO + LESSONS and p.stem != 'index']


@functools.cache
def cells(path: Path) -> list[dict]:
    "The cells, their source as one string."
    return [
        c | {'source': ''.join(c['source'])} for c in json.loads(path.read_text(encoding='utf-8'))['cells']
    ]


def title(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix('').as_posix()


def name_of(path: Path) -> str:
    "The module that a library notebook exports."
    code = '\n'.join(c['source'] for c in cells(path))
    return re.search(r'^#\| *default_exp +([\w.]+)', code, re.M)[1]


def module_of(path: Path) -> Path:
    "Its file."
    folder = ROOT / ('bench' if PLACES[1] in path.parents else 'kdnotes')
    return folder.joinpath(*name_of(path).split('.')).with_suffix('.py')


def exported(path: Path) -> list[str]:
    return [
        c['source']
        for c in cells(path)
        if c['cell_type'] == 'code' and re.search(r'^#\| *export\b', c['source'], re.M)
    ]


def bytes_of(folder: Path, pattern: str) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob(pattern))
        if '.ipynb_checkpoints' not in p.parts
    }


@pytest.fixture
def copy(tmp_path) -> Path:
    "A copy of what nbdev reads and writes."
    for name in ('nbs', 'kdnotes', 'bench', 'tools'):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints')
        )
    for name in ('settings.ini', 'pyproject.toml'):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def nbdev(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def changed(before: dict, after: dict) -> list[str]:
    return sorted(k for k in before | after if before.get(k) != after.get(k))


def test_modules_are_what_the_notebooks_export(copy):
    nbdev(copy, 'nbdev_export')
    nbdev(copy, sys.executable, 'tools/export_bench.py')
    for name in ('kdnotes', 'bench'):
        assert changed(bytes_of(ROOT / name, '*.py'), bytes_of(copy / name, '*.py')) == [], 'export again'


def test_every_module_has_its_notebook():
    # a package's __init__ holds its docstring alone
    modules = [p for name in ('kdnotes', 'bench') for p in (ROOT / name).rglob('*.py')]
    assert sorted(map(module_of, LIBRARY)) == sorted(
        p for p in modules if p.stem not in ('__init__', '_modidx')
    )
    for path in LIBRARY:
        *package, module = name_of(path).split('.')
        own = next(of for of in PLACES if of in path.parents)
        assert (path.parent, path.stem[3:]) == (own.joinpath(*package), module.strip('_')), path


def test_notebooks_are_clean(copy):
    for of in PLACES:
        its = of.relative_to(ROOT)
        nbdev(copy, 'nbdev_clean', '--fname', str(its))
        assert changed(bytes_of(of, '*.ipynb'), bytes_of(copy / its, '*.ipynb')) == [], 'run nbdev_clean'


def test_readme_is_fresh():
    spec = importlib.util.spec_from_file_location('readme', ROOT / 'tools' / 'readme.py')
    spec.loader.exec_module(tool := importlib.util.module_from_spec(spec))
    assert (ROOT / 'README.md').read_text(encoding='utf-8') == tool.readme(ROOT / 'nbs' / 'index.ipynb'), (
        'run `make readme`'
    )


def test_outputs_of_the_readme_are_what_its_code_says_now():
    from execnb.shell import CaptureShell

    shell = CaptureShell(path=ROOT / 'nbs')

    def data(outputs):
        return [{k: ''.join(v) for k, v in o.get('data', {}).items()} for o in outputs]

    for c in cells(ROOT / 'nbs' / 'index.ipynb'):
        if c['cell_type'] == 'code':
            assert data(shell.run(c['source'])) == data(c['outputs']), 'run `make readme`'


def test_files_the_readme_links_to_exist():
    targets = re.findall(r'\]\((?![a-z]+:|#)([^)\s]+)\)', (ROOT / 'README.md').read_text(encoding='utf-8'))
    assert targets and [t for t in targets if not (ROOT / t).exists()] == []


@pytest.mark.parametrize('notebook', HOW_TO, ids=lambda p: p.stem)
def test_files_a_how_to_links_to_exist(notebook):
    texts = [c['source'] for c in cells(notebook) if c['cell_type'] == 'markdown']
    targets = [t for text in texts for t in re.findall(r'\]\((?![a-z]+:|#)([^)\s]+)\)', text)]
    assert [t for t in targets if not (notebook.parent / t).exists()] == []
    assert f'howto/{notebook.name}' in (ROOT / 'README.md').read_text(encoding='utf-8')


STATEMENTS = 30  # of a function, docstring and nested functions counted: more is a second idea


def statements(function: ast.FunctionDef) -> int:
    "The statements of a function, those inside its blocks and nested functions too."
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def test_a_function_is_one_idea():
    for path in map(module_of, LIBRARY):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        long = {f.name: statements(f) for f in functions if statements(f) > STATEMENTS}
        assert not long, f'{path}: more than {STATEMENTS} statements: {long}'


def promise(path: Path) -> str:
    "The line below the title."
    return re.search(r'^> (.+)', cells(path)[0]['source'], re.M)[1]


def test_whoever_reads_promises_alone_finds_where_a_missing_column_is_refused_and_where_the_page_is_made():
    named = {name_of(path): promise(path) for path in LIBRARY}
    refusing = [
        name_of(path) for path in LIBRARY if 'rename the column that holds it' in '\n'.join(exported(path))
    ]
    promising = [name for name, said in named.items() if 'refusal of a missing column' in said]
    assert refusing == promising == ['tasks.schema']
    elsewhere = {
        'tasks.schema': ('core.columns', 'core.tables'),
        'core.tables': ('report.tables',),
        'report.page': ('report.report',),
        'report.report': ('report.page',),
    }
    for name, neighbours in elsewhere.items():
        assert all(f'`{name}`' in named[neighbour] for neighbour in neighbours), name
    pointed = {name for said in named.values() for name in re.findall(r'`([a-z]+\.[a-z_]+)`', said)}
    assert pointed <= set(named), 'promises name modules that exist'


@pytest.mark.parametrize('path', LIBRARY, ids=title)
def test_a_library_notebook_has_the_house_form(path):
    first, *rest = cells(path)
    assert re.fullmatch(f'# {path.stem[3:]}'.replace('_', '[_ ]') + r'\s+> .+', first['source'], re.S), (
        'it begins with its name and one promise'
    )
    assert 'does not do' in cells(path)[-1]['source'], 'it ends with what the module does not do'
    for source in exported(path):
        body = ast.parse(re.sub(r'^#\|.*\n', '', source, flags=re.M)).body
        imports = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in body]
        assert all(imports) or not any(imports), f'imports and other code share a cell:\n{source}'
        assert not any(a.name == '*' for n in body if isinstance(n, ast.ImportFrom) for a in n.names), (
            f'import * in an export:\n{source}'
        )


@pytest.mark.parametrize('path', [p for p in LIBRARY if 'bench' not in p.parts], ids=lambda p: p.stem)
def test_a_notebook_interrupts_its_code_and_shows_no_bare_repr(path):
    exports = 0  # in a row
    for c in cells(path):
        exports = exports + 1 if re.match(r'#\| *export\b', c['source']) else 0
        assert exports <= 2, f'say why before the third exported cell in a row:\n{c["source"][:200]}'
        for output in c.get('outputs', []):
            if output['output_type'] == 'execute_result':
                assert output['data'].keys() != {'text/plain'}, f'print a sentence or a table:\n{c["source"]}'


@pytest.mark.parametrize('path', EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_has_parameters_and_is_left_to_papermill(path):
    tagged = [c for c in cells(path) if 'parameters' in c['metadata'].get('tags', [])]
    assert [c['cell_type'] for c in tagged] == ['code'], (
        "exactly one cell carries papermill's tag 'parameters'"
    )
    assert re.search(r'^(- )?skip_exec: true$', cells(path)[0]['source'], re.M), (
        'its front matter says `skip_exec: true`'
    )


@pytest.mark.parametrize('path', EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_holds_no_outputs(path):
    "They would be whole sentences of a corpus, and the numbers of one machine."
    assert [c['source'][:60] for c in cells(path) if c.get('outputs') or c.get('execution_count')] == [], (
        'run `make check`, which clears them'
    )


def test_stored_outputs_tell_nothing_of_the_machine_they_were_made_on():
    outputs = [(path, json.dumps(o)) for path in NOTEBOOKS for c in cells(path) for o in c.get('outputs', [])]
    for told in (str(ROOT), str(Path.home()) + '/', 'site-packages'):
        assert not [(path, o[:200]) for path, o in outputs if told in o], told


def test_every_notebook_that_a_text_names_is_there():
    texts = [*ROOT.glob('*.md'), *(ROOT / 'thesis').rglob('*.typ')]
    named = {
        (path.name, name)
        for path in texts
        for name in re.findall(r'\bnbs/\w+(?:/\w+)*\.ipynb', path.read_text(encoding='utf-8'))
    }
    assert ('LOG.md', 'nbs/run.ipynb') in named
    assert [(path, name) for path, name in sorted(named) if not (ROOT / name).is_file()] == []

"The public names are those that were agreed on."

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from public_names import HERE
from public_names import LIST
from public_names import exported
from public_names import public_names


def test_public_names_are_those_listed():
    listed, found = LIST.read_text(encoding='utf-8').splitlines(), public_names().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(listed, found, lineterm='', n=0)
        if line[:1] in '+-' and line[:3] not in ('+++', '---')
    ]
    assert changes == [], 'meant so? then write the list again: python tests/public_names.py'


def test_names_are_read_from_modules_and_packages(tmp_path):
    (tmp_path / 'kdnotes' / 'train').mkdir(parents=True)
    (tmp_path / 'kdnotes' / 'train' / 'loop.py').write_text(
        "import nothing_that_is_installed\n__all__ = ['train',\n           'Step']\n"
    )
    (tmp_path / 'kdnotes' / '_modidx.py').write_text('d = {}\n')
    assert public_names(tmp_path / 'kdnotes') == 'kdnotes.train.loop Step\nkdnotes.train.loop train\n'
    assert exported(tmp_path / 'kdnotes' / '_modidx.py') == []


def public_symbols(path: Path) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    "What a module exports, without its values, and what these classes can do."
    own = set(exported(path))
    for node in ast.parse(path.read_text(encoding='utf-8')).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in own:
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef) and (inner.name[0] != '_' or inner.name == '__init__'):
                    yield f'{node.name}.{inner.name}', inner


def undescribed(path: Path) -> Iterator[str]:
    "Symbols without a docstring, and parameters with neither a type nor a comment on a line of their own."
    lines = path.read_text(encoding='utf-8').splitlines()
    for name, node in public_symbols(path):
        if node.name != '__init__' and not ast.get_docstring(node):
            yield f'{path.name}: {name} has no docstring'
        for a in ast.iter_child_nodes(node.args) if isinstance(node, ast.FunctionDef) else ():
            if isinstance(a, ast.arg) and a.arg not in ('self', 'cls') and not a.annotation:
                if '#' not in lines[a.lineno - 1] or a.lineno == node.lineno:
                    yield f'{path.name}: {name}({a.arg}) has neither a type nor a comment'


def test_every_public_symbol_is_described():
    modules = sorted(HERE.parent.glob('kdnotes/**/*.py'))
    assert [line for path in modules for line in undescribed(path)] == []


def test_what_is_not_described_is_named(tmp_path):
    (path := tmp_path / 'm.py').write_text(
        "__all__ = ['f']\ndef f(\n    a,\n    b,  # of m\n): ...\ndef g(c): ...\n"
    )
    assert list(undescribed(path)) == [
        'm.py: f has no docstring',
        'm.py: f(a) has neither a type nor a comment',
    ]

"Every public symbol is described; names say what a thing is."

import ast
from collections.abc import Iterator
from pathlib import Path
import pytest
from docs.symbols import patched

ROOT = Path(__file__).resolve().parents[1]
MODULES = [path for path in sorted(ROOT.glob('kdnotes/**/*.py')) if path.stem != '_modidx']

# words that do not say what a thing is, as names of variables, parameters, functions and classes
EMPTY = frozenset('told said say found its own asked beside of kept made stands_on spared apart'.split())
# parameters that users give, and a key of records
PROMISED = frozenset({'say', 'beside', 'kept'})


def exported(path: Path) -> list[str]:
    "A module's `__all__`, without importing it."
    for node in ast.parse(path.read_text(encoding='utf-8')).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == '__all__' for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return []


def bound_names(source: str) -> set[str]:
    "The names that a module gives to something."
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


@pytest.mark.parametrize('path', MODULES, ids=lambda p: p.relative_to(ROOT / 'kdnotes').as_posix())
def test_no_name_is_an_empty_word(path):
    names = {name.strip('_') for name in bound_names(path.read_text(encoding='utf-8'))}
    assert sorted(names & (EMPTY - PROMISED)) == [], 'name what it is: records, settings, matches'


def test_empty_words_are_seen():
    assert bound_names('def f(found, *, of=1):\n    own: int = 2\n') == {'f', 'found', 'of', 'own'}
    assert bound_names('class Told:\n    made = 1\n') == {'Told', 'made'}


def public_symbols(path: Path) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    "What a module exports, without its values, and what these classes can do."
    own = set(exported(path))
    tree = ast.parse(path.read_text(encoding='utf-8'))
    for owner, methods in patched(tree).items():
        if owner in own:
            yield from ((f'{owner}.{m.name}', m) for m in methods if m.name[0] != '_')
    for node in tree.body:
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
    assert [line for path in MODULES for line in undescribed(path)] == []


def test_what_is_not_described_is_named(tmp_path):
    (path := tmp_path / 'm.py').write_text(
        "__all__ = ['f']\ndef f(\n    a,\n    b,  # of m\n): ...\ndef g(c): ...\n"
    )
    assert list(undescribed(path)) == [
        'm.py: f has no docstring',
        'm.py: f(a) has neither a type nor a comment',
    ]

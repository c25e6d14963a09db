"""Public names of a module as its source tells them: docstring, result, and each parameter with the comment
beside it.

Nothing is imported: a page about a module needs no torch.
"""

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class DocsError(Exception):
    "What the site cannot show, as one sentence."


@dataclass(frozen=True)
class Parameter:
    "A parameter of a function, or a field of a class."

    name: str  # with its stars
    type: str  # as written; '' where none is
    default: str | None  # as written; None: it must be given
    comment: str
    heading: str = ''  # of the group of fields that begins here


@dataclass(frozen=True)
class Symbol:
    "A public name."

    name: str
    kind: str  # 'function' | 'class' | 'method' | 'property' | 'data'
    about: str  # docstring, or the comment of a constant
    cell: str  # of its notebook, the id
    parameters: tuple[Parameter, ...] = ()
    returns: str = ''  # type, as written
    returned: str = ''  # the comment beside it
    members: tuple['Symbol', ...] = ()  # of a class
    value: str = ''  # of a constant, as written


@dataclass(frozen=True)
class Module:
    "A module and what it offers."

    name: str  # kdnotes.losses.targets
    about: str  # its docstring
    notebook: str  # that exports it, below nbs/
    symbols: tuple[Symbol, ...]  # in the order of the source


@dataclass(frozen=True)
class Source:
    "A module's lines, and where its comments are."

    lines: list[str]
    comments: dict[int, str]  # line, from 1 -> the text behind #
    ends: list[int]  # lines where a statement ends, or the head of a function
    cells: dict[int, tuple[str, str]]  # line where a cell begins -> its notebook, below nbs/, and its id

    def alone(self, line: int) -> bool:
        "Is this line a comment and nothing else?"
        return line in self.comments and self.lines[line - 1].lstrip().startswith('#')

    def above(self, line: int) -> str:
        "The lines of comment right above a line, as one text."
        first = line
        while self.alone(first - 1):
            first -= 1
        return ' '.join(self.comments[i] for i in range(first, line))

    def beside(self, first: int, last: int) -> str:
        "The comments behind the code of some lines, as one text."
        return ' '.join(
            self.comments[i] for i in range(first, last + 1) if i in self.comments and not self.alone(i)
        )

    def heading(self, line: int) -> str:
        "The comment above a line and its comment with an empty line around it, which begins a group."
        while self.alone(line - 1):
            line -= 1
        blank = [not self.lines[i - 1].strip() for i in (line - 1, line - 3)]
        return self.comments[line - 2] if all(blank) and self.alone(line - 2) else ''

    def cell(self, line: int) -> str:
        "The id of the notebook's cell that a line comes from."
        return next((self.cells[i][1] for i in range(line, 0, -1) if i in self.cells), '')

    def segment(self, node: ast.AST) -> str:
        "What is written there. (`ast.get_source_segment` splits the whole module at every call.)"
        lines = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b'\n'.join(lines).decode()

    def written(self, node: ast.AST | None) -> str:
        "The same on one line."
        return '' if node is None else ' '.join(self.segment(node).split())


def read_source(text: str) -> Source:
    "A module's source."
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = {t.start[0]: t.string.removeprefix('#').strip() for t in tokens if t.type == tokenize.COMMENT}
    marks = {line: re.fullmatch(r'%% (?:\.\./)+nbs/(\S+) #(\w+)', text) for line, text in comments.items()}
    cells = {line: (m[1], m[2]) for line, m in marks.items() if m}
    ends = [t.start[0] for t in tokens if t.type == tokenize.NEWLINE]
    said = {line: text for line, text in comments.items() if not text.startswith('%% ')}
    return Source(text.splitlines(), said, ends, cells)


def parameters_of(node: ast.FunctionDef, source: Source) -> tuple[Parameter, ...]:
    "A function's parameters, `self` and `cls` left out."
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    pairs = [('', arg, default) for arg, default in zip(positional, defaults)]
    pairs += [('*', a.vararg, None)] if a.vararg else []
    pairs += [('', arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    pairs += [('**', a.kwarg, None)] if a.kwarg else []
    head = _head(node, source)
    next_lines = [arg.lineno for _, arg, _ in pairs[1:]] + [head]
    found = []
    for (stars, arg, default), next_line in zip(pairs, next_lines):
        last = max(arg.lineno, next_line - 1)
        # what stands behind the last line of the head is said of the result
        comment = source.beside(arg.lineno, min(last, head - 1)) or source.above(arg.lineno)
        value = None if default is None else source.written(default)
        found.append(Parameter(stars + arg.arg, source.written(arg.annotation), value, comment))
    return tuple(p for p in found if p.name not in ('self', 'cls'))


def _head(node: ast.FunctionDef, source: Source) -> int:
    "The last line of a function's head."
    return next(line for line in source.ends if line >= node.lineno)


def _about(node: ast.AST) -> str:
    return ast.get_docstring(node) or ''


def function_of(node: ast.FunctionDef, source: Source, kind: str = 'function') -> Symbol:
    "A function or method."
    head = _head(node, source)
    return Symbol(
        name=node.name,
        kind=kind,
        about=_about(node),
        cell=source.cell(node.lineno),
        parameters=parameters_of(node, source),
        returns=source.written(node.returns).strip('"\''),
        returned=source.beside(head, head),
    )


def _member(node: ast.FunctionDef, source: Source) -> Symbol:
    names = [source.written(d) for d in node.decorator_list]
    is_property = any(name.endswith(('property', 'as_prop=True)')) for name in names)
    return function_of(node, source, 'property' if is_property else 'method')


def patched(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:  # name of a class -> functions
    "The methods that are added to classes with `@patch`, after the class."
    methods: dict[str, list[ast.FunctionDef]] = {}
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and node.args.args and node.args.args[0].annotation is not None:
            if any(ast.unparse(d).startswith('patch') for d in node.decorator_list):
                methods.setdefault(ast.unparse(node.args.args[0].annotation), []).append(node)
    return methods


def class_of(
    node: ast.ClassDef,
    source: Source,
    more: Sequence[ast.FunctionDef] = (),  # methods that are added after the class
) -> Symbol:
    "A class: its fields, or what its `__init__` takes, and its public methods."
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and n.target.id[0] != '_']
    own = tuple(
        Parameter(
            n.target.id,
            source.written(n.annotation),
            None if n.value is None else source.written(n.value),
            source.beside(n.lineno, n.end_lineno) or source.above(n.lineno),
            source.heading(n.lineno),
        )
        for n in fields
    )
    functions = [*(n for n in node.body if isinstance(n, FUNCTIONS)), *more]
    for n in functions:
        if n.name == '__init__':
            own = parameters_of(n, source)
    members = tuple(_member(n, source) for n in functions if n.name[0] != '_' or n.name == '__call__')
    return Symbol(node.name, 'class', _about(node), source.cell(node.lineno), own, members=members)


def _symbols(tree: ast.Module, source: Source) -> dict[str, Symbol]:
    "All that a module defines at its top, by name."
    found = {}
    methods = patched(tree)
    added = {id(n) for functions in methods.values() for n in functions}
    for node in tree.body:
        if id(node) in added:
            continue
        if isinstance(node, FUNCTIONS):
            found[node.name] = function_of(node, source)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = class_of(node, source, methods.get(node.name, ()))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)]
            for name in names:
                about = source.beside(node.end_lineno, node.end_lineno) or source.above(node.lineno)
                value = source.segment(node)
                found[name] = Symbol(name, 'data', about, source.cell(node.lineno), value=value)
    return found


def read_module(path: Path, name: str) -> Module:
    "What a module's `__all__` names."
    text = path.read_text(encoding='utf-8')
    source = read_source(text)
    tree = ast.parse(text)
    found = _symbols(tree, source)
    public = ast.literal_eval(next((n.value for n in tree.body if _is_all(n)), ast.List([])))
    if missing := [n for n in public if n not in found]:
        raise DocsError(f'{name} offers {", ".join(missing)} in __all__ and defines it nowhere at its top')
    notebook = next((notebook for notebook, _ in source.cells.values()), '')
    return Module(name, _about(tree), notebook, tuple(s for n, s in found.items() if n in public))


def _is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(t, 'id', '') == '__all__' for t in node.targets)


def read_package(folder: Path) -> list[Module]:
    "All modules of a package that a notebook exports, by name."
    found = []
    for path in sorted(folder.rglob('*.py')):
        parts = path.relative_to(folder.parent).with_suffix('').parts
        if path.stem not in ('__init__', '_modidx'):
            found.append(read_module(path, '.'.join(parts)))
    return [module for module in found if module.notebook]

"Pages about what Python offers: a module's public names, each with the table of its parameters."

from docs.markdown import code, comment, directive, escaped, fenced, paragraphs, table
from docs.notebooks import with_symbols
from docs.symbols import DocsError, Module, Parameter, Symbol

LONGEST_VALUE = 25  # lines of a constant that are shown
GIVEN = '*required*'


def signature(symbol: Symbol) -> str:
    "A name with its parameters and their defaults; types are in the table."
    if symbol.kind == 'data' or symbol.kind == 'property':
        return symbol.name
    given = [p.name if p.default is None else f'{p.name}={p.default}' for p in symbol.parameters]
    return f'{symbol.name}({", ".join(given)})'


def typed(
    written: str,  # a type
    known: dict[str, str],  # name -> full name
) -> str:
    "A type whose classes lead to what is said of them."
    parts = written.split(' | ')
    if '[' in written or not any(part in known for part in parts):
        return code(written)
    return r' \| '.join(with_symbols(code(part), known) for part in parts)


def parameter_table(
    parameters: tuple[Parameter, ...],
    known: dict[str, str],  # name -> full name: what leads to its own description
    first: str = 'parameter',
) -> str:
    "Name, type, default and comment of each."
    if not parameters:
        return ''
    rows = [
        (
            code(p.name),
            typed(p.type, known),
            GIVEN if p.default is None and p.name[0] != '*' else code(p.default or ''),
            with_symbols(comment(p.comment), known),
        )
        for p in parameters
    ]
    return table((first, 'type', 'default', 'meaning'), rows, 'parameters')


def result(symbol: Symbol, known: dict[str, str]) -> str:
    "What a function gives."
    said = [typed(symbol.returns, known), with_symbols(comment(symbol.returned), known)]
    words = ': '.join(filter(None, said))
    return f'**Returns** {words}' if words and symbol.returns != 'None' else ''


def fields_of(symbol: Symbol, known: dict[str, str]) -> str:
    "A class's fields, under the headings that its source has."
    parts = []
    group: list[Parameter] = []
    for p in symbol.parameters:
        if p.heading:
            parts += [parameter_table(tuple(group), known, 'field'), f'**{escaped(p.heading)}**']
            group = []
        group.append(p)
    return '\n\n'.join(filter(None, [*parts, parameter_table(tuple(group), known, 'field')]))


def value_of(symbol: Symbol) -> str:
    "A constant's definition, cut where it is long."
    lines = symbol.value.splitlines()
    if len(lines) > LONGEST_VALUE:
        lines = [*lines[:LONGEST_VALUE], '...']
    return fenced('\n'.join(lines), 'python') if lines else ''


def described(
    symbol: Symbol,
    names: dict[str, str],  # name -> full name: what leads to its own description
    chapter: str = '',  # the page of its notebook; '': of a member, which says nothing of it
    canonical: str = '',  # the full name, where it is shown under another one
) -> str:
    "A name as a directive of Sphinx."
    own = {symbol.name, *(p.name for p in symbol.parameters)}
    known = {name: full for name, full in names.items() if name not in own}
    source = f'[source]({chapter}#cell-{symbol.cell}){{.source}}' if chapter and symbol.cell else ''
    parts = [' '.join(filter(None, [with_symbols(paragraphs(symbol.about), known), source]))]
    if symbol.kind == 'data':
        parts += [value_of(symbol)]
    elif symbol.kind == 'class':
        parts += [fields_of(symbol, known), *(described(m, names) for m in symbol.members)]
    else:
        parts += [parameter_table(symbol.parameters, known), result(symbol, known)]
    options = {'canonical': canonical} if canonical else {}
    return directive(f'py:{symbol.kind}', signature(symbol), '\n\n'.join(filter(None, parts)), **options)


def module_page(
    module: Module,
    chapter: str,  # the page of its notebook
    known: dict[str, str],  # name -> full name: what leads to its own description
    left_out: set[str] = frozenset(),  # names that stand elsewhere
) -> str:
    "All that a module offers."
    parts = [
        f'# {escaped(module.name.removeprefix("kdnotes."))}',
        paragraphs(module.about),
        f'`from {module.name} import ...` · [the chapter with its lessons]({chapter})',
        directive('py:module', module.name, ''),
    ]
    parts += [described(s, known, chapter) for s in module.symbols if s.name not in left_out]
    return '\n\n'.join(parts) + '\n'


def python_page(
    module: Module,  # kdnotes.api
    names: tuple[str, ...],  # that `import kdnotes as kd` offers
    chapter: str,
    known: dict[str, str],  # name -> full name: what leads to its own description
) -> str:
    "What `import kdnotes as kd` offers, the run first."
    there = {s.name: s for s in module.symbols}
    if missing := [name for name in names if name not in there]:
        raise DocsError(f'kdnotes offers {", ".join(missing)}, and {module.name} does not define it')
    order = sorted(
        names, key=lambda name: (name != 'Run', there[name].kind != 'class', list(there).index(name))
    )
    shown = [described(there[name], known, chapter, f'{module.name}.{name}') for name in order]
    parts = [
        '# import kdnotes as kd',
        paragraphs(module.about),
        'This page lists the user interface; everything else is in the [modules](/reference/modules.md). '
        'Modules are imported when they are first used.',
        directive('py:module', 'kdnotes', ''),
        *shown,
    ]
    return '\n\n'.join(parts) + '\n'

"Pages about what Python offers: a module's public names, each with the table of its parameters."

from docs.markdown import code, comment, directive, escaped, fenced, paragraphs, table
from docs.symbols import DocsError, Module, Parameter, Symbol

LONGEST_VALUE = 25  # lines of a constant that are shown
GIVEN = '*required*'


def signature(symbol: Symbol) -> str:
    "A name with its parameters and their defaults; types are in the table."
    if symbol.kind == 'data' or symbol.kind == 'property':
        return symbol.name
    given = [p.name if p.default is None else f'{p.name}={p.default}' for p in symbol.parameters]
    return f'{symbol.name}({", ".join(given)})'


def parameter_table(parameters: tuple[Parameter, ...], first: str = 'parameter') -> str:
    "Name, type, default and comment of each."
    if not parameters:
        return ''
    rows = [
        (
            code(p.name),
            code(p.type),
            GIVEN if p.default is None and p.name[0] != '*' else code(p.default or ''),
            comment(p.comment),
        )
        for p in parameters
    ]
    return table((first, 'type', 'default', 'meaning'), rows, 'parameters')


def result(symbol: Symbol) -> str:
    "What a function gives."
    said = [code(symbol.returns), comment(symbol.returned)]
    words = ': '.join(filter(None, said))
    return f'**Returns** {words}' if words and symbol.returns != 'None' else ''


def fields_of(symbol: Symbol) -> str:
    "A class's fields, under the headings that its source has."
    parts = []
    group: list[Parameter] = []
    for p in symbol.parameters:
        if p.heading:
            parts += [parameter_table(tuple(group), 'field'), f'**{escaped(p.heading)}**']
            group = []
        group.append(p)
    return '\n\n'.join(filter(None, [*parts, parameter_table(tuple(group), 'field')]))


def value_of(symbol: Symbol) -> str:
    "A constant's definition, cut where it is long."
    lines = symbol.value.splitlines()
    if len(lines) > LONGEST_VALUE:
        lines = [*lines[:LONGEST_VALUE], '...']
    return fenced('\n'.join(lines), 'python') if lines else ''


def described(
    symbol: Symbol,
    chapter: str = '',  # the page of its notebook; '': of a member, which says nothing of it
    canonical: str = '',  # the full name, where it is shown under another one
) -> str:
    "A name as a directive of Sphinx."
    source = f'[source]({chapter}#cell-{symbol.cell}){{.source}}' if chapter and symbol.cell else ''
    parts = [' '.join(filter(None, [paragraphs(symbol.about), source]))]
    if symbol.kind == 'data':
        parts += [value_of(symbol)]
    elif symbol.kind == 'class':
        parts += [fields_of(symbol), *(described(m) for m in symbol.members)]
    else:
        parts += [parameter_table(symbol.parameters), result(symbol)]
    options = {'canonical': canonical} if canonical else {}
    return directive(f'py:{symbol.kind}', signature(symbol), '\n\n'.join(filter(None, parts)), **options)


def module_page(
    module: Module,
    chapter: str,  # the page of its notebook
    left_out: set[str] = frozenset(),  # names that stand elsewhere
) -> str:
    "All that a module offers."
    parts = [
        f'# {escaped(module.name.removeprefix("kdnotes."))}',
        paragraphs(module.about),
        f'`from {module.name} import ...` · [the chapter with its lessons]({chapter})',
        directive('py:module', module.name, ''),
    ]
    parts += [described(s, chapter) for s in module.symbols if s.name not in left_out]
    return '\n\n'.join(parts) + '\n'


def python_page(
    module: Module,  # kdnotes.api
    names: tuple[str, ...],  # that `import kdnotes as kd` offers
    chapter: str,
) -> str:
    "What `import kdnotes as kd` offers, the run first."
    known = {s.name: s for s in module.symbols}
    if missing := [name for name in names if name not in known]:
        raise DocsError(f'kdnotes offers {", ".join(missing)}, and {module.name} does not define it')
    order = sorted(
        names, key=lambda name: (name != 'Run', known[name].kind != 'class', list(known).index(name))
    )
    shown = [described(known[name], chapter, f'{module.name}.{name}') for name in order]
    parts = [
        '# import kdnotes as kd',
        paragraphs(module.about),
        'Nothing is loaded before it is used. What stands here is what users call; all else is in the '
        '[modules](/reference/modules.md).',
        directive('py:module', 'kdnotes', ''),
        *shown,
    ]
    return '\n\n'.join(parts) + '\n'

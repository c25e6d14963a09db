"Notebooks as pages: nbdev's directives gone, what is hidden left out, links as the site has them."

import posixpath
import re
from collections.abc import Callable
from itertools import groupby

FENCES = re.compile(r'(^```.*?^```[^\n]*$)', re.M | re.S)
LINK = re.compile(r'\]\((?![a-z]+:)([^)\s]+)\)')
CODE = re.compile(r'(?<![`\[])`([A-Za-z_][\w.]*)(\(\))?`(?![`\]])')
PATH = re.compile(r'`nbs/([\w/]+\.ipynb)`')
ONLY_TEXT = re.compile(r'Markdown\(')  # a cell that does nothing but make a text
FLAG = re.compile(r'^#\| *(.+?) *\n?$', re.M)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    "A Markdown text with its prose changed and its blocks of code left alone."
    return ''.join(part if i % 2 else change(part) for i, part in enumerate(FENCES.split(text)))


def with_links(
    text: str,  # Markdown
    folder: str,  # of the file it stands in, below the checkout
    page_of: Callable[[str], str],  # path below the checkout -> address on the site
) -> str:
    "Links as the site has them."

    def new(match: re.Match) -> str:
        path, hash_, anchor = match[1].partition('#')
        anchor = f'#{anchor.lower()}' if hash_ else ''
        if not path:
            return f']({anchor})'
        return f']({page_of(posixpath.normpath(posixpath.join(folder, path)))}{anchor})'

    return outside_fences(text, lambda prose: LINK.sub(new, prose))


def with_symbols(
    text: str,  # Markdown
    symbols: dict[str, str],  # name -> full name
) -> str:
    "Names of functions and classes, written as code, lead to what is said of them."

    def new(match: re.Match) -> str:
        full = symbols.get(match[1])
        return match[0] if full is None else f'{{py:obj}}`{match[1]}{match[2] or ""} <{full}>`'

    def change(prose: str) -> str:
        lines = prose.split('\n')
        return '\n'.join(line if line.startswith('#') else CODE.sub(new, line) for line in lines)

    return outside_fences(text, change)


def flags_of(source: str) -> set[str]:
    "nbdev's directives in a cell."
    return set(FLAG.findall(source))


def page_cells(
    cell: dict,  # of a notebook's file
    prose: Callable[[str], str],  # changes Markdown
    folded: bool = False,  # is its code opened by a click? that of parameters is always open
) -> list[dict]:  # cells of the page; none: the cell is not shown
    "What a cell becomes."
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
        return [_markdown(prose(source))] if source.strip() else []
    flags = flags_of(source)
    tagged = cell['metadata'].get('tags', [])
    if cell['cell_type'] != 'code' or 'hide' in flags or 'injected-parameters' in tagged:
        return []
    text = FLAG.sub('', source).strip('\n')
    if not text:
        return []
    outputs = [_output(o, prose) for o in _merged(cell.get('outputs', []))]
    makes_text = bool(ONLY_TEXT.match(text))
    if makes_text and not outputs:
        return []
    tags = ['hide-input'] if folded and 'parameters' not in tagged else []
    if 'echo: false' in flags or makes_text:
        tags = ['remove-input']
    shown = dict(
        cell_type='code', metadata=dict(tags=tags), source=text, outputs=outputs, execution_count=None
    )
    # what others link to
    target = [_markdown(f'(cell-{cell["id"]})=')] if 'export' in flags else []
    return [*target, shown]


def _merged(outputs: list[dict]) -> list[dict]:
    "Outputs with lines that were printed one after the other as one text."
    found = []
    for kind, group in groupby(outputs, lambda o: o.get('name')):
        same = list(group)
        if kind:
            same = [same[0] | dict(text=''.join(line for o in same for line in o['text']))]
        found += same
    return found


def _output(output: dict, prose: Callable[[str], str]) -> dict:
    "A stored output, without the number of its execution; a notebook's path in a text is a link."
    changed = output | ({'execution_count': None} if output['output_type'] == 'execute_result' else {})
    data = output.get('data', {})
    if 'text/markdown' in data:
        text = prose(PATH.sub(r'[\1](\1)', ''.join(data['text/markdown'])))
        changed |= dict(data=data | {'text/markdown': text})
    return changed


def _markdown(text: str) -> dict:
    return dict(cell_type='markdown', metadata={}, source=text)


def page(
    notebook: dict,  # a notebook's file
    prose: Callable[[str], str],  # changes Markdown
    after_title: str = '',  # Markdown
    end: str = '',  # Markdown
    folded: bool = False,  # is its code opened by a click?
) -> dict:  # the same as a page
    "A notebook as a page."
    first, *rest = notebook['cells']
    title = re.sub(r'^- \w+: .*\n?', '', ''.join(first['source']), flags=re.M)
    cells = [_markdown(prose(title.strip()))]
    cells += [_markdown(after_title)] if after_title else []
    for cell in rest:
        cells += page_cells(cell, prose, folded)
    cells += [_markdown(end)] if end else []
    for i, cell in enumerate(cells):
        cell['id'] = f'cell-{i}'
    kernel = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
    language = dict(language_info=dict(name='python'))
    return dict(cells=cells, metadata=kernel | language, nbformat=4, nbformat_minor=5)

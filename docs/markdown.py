"MyST Markdown: what is quoted, and the directives that pages are made of."

import re
from collections.abc import Iterable, Sequence

# what Markdown could read as its own; a backslash before it makes it a character
SPECIAL = re.compile(r'([\\`*_{}\[\]()#+\-.!|<>$@~^:&])')


def escaped(
    text: str,  # plain
) -> str:
    "A text that stands for itself."
    return SPECIAL.sub(r'\\\1', re.sub(r'\s+', ' ', text))


def code(text: str) -> str:
    "A word as code, in as many backticks as it needs."
    text = ' '.join(text.split())
    longest = max(map(len, re.findall('`+', text)), default=0)
    fence = '`' * (longest + 1)
    pad = ' ' if text.startswith('`') or text.endswith('`') else ''
    return f'{fence}{pad}{text}{pad}{fence}' if text else ''


def comment(
    text: str,  # plain, with `code` in backticks
) -> str:
    "A comment or docstring as Markdown: code stays code, all else is plain."
    parts = re.split(r'(`[^`]+`)', ' '.join(text.split()))
    return ''.join(part if i % 2 else escaped(part) for i, part in enumerate(parts))


def paragraphs(text: str) -> str:
    "The same of a text with empty lines in it."
    return '\n\n'.join(comment(part) for part in text.split('\n\n'))


def fenced(text: str, language: str = 'text') -> str:
    "A block of code."
    longest = max(map(len, re.findall('`+', text)), default=0)
    fence = '`' * max(3, longest + 1)
    return f'{fence}{language}\n{text.rstrip()}\n{fence}'


def directive(name: str, argument: str, body: str, **options: str) -> str:
    "A directive, with a fence that is longer than any in its body."
    fence = ':' * max(3, 1 + max(map(len, re.findall('^:+', body, re.M)), default=0))
    lines = [f':{key}: {value}'.rstrip() for key, value in options.items()]
    return '\n'.join([f'{fence}{{{name}}} {argument}'.rstrip(), *lines, '', body.strip(), fence])


def table(
    columns: Sequence[str],  # Markdown
    rows: Iterable[Sequence[str]],  # Markdown, one line a cell
    kind: str = '',  # a class, for the style
) -> str:
    "A table whose cells are any Markdown."
    lines = []
    for row in (columns, *rows):
        lines += [
            f'{"-" if i else "* -"} {cell}'.rstrip() if not i else f'  - {cell}'.rstrip()
            for i, cell in enumerate(row)
        ]
    options = {'header-rows': '1'} | ({'class': kind} if kind else {})
    return directive('list-table', '', '\n'.join(lines), **options)

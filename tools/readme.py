"Write README.md from nbs/index.ipynb as it stands, stored outputs included."

import json
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTICE = '<!-- Made from nbs/index.ipynb by `make readme`: edit the notebook. -->'


def text(lines) -> str:
    return ''.join(lines).strip('\n')


def output(out: dict) -> str:
    "One stored output as markdown."
    data = out.get('data', {})
    if 'text/markdown' in data:
        return text(data['text/markdown'])
    if plain := text(data.get('text/plain', out.get('text', ''))):
        return f'```\n{plain}\n```'
    raise ValueError(f'nbs/index.ipynb: an output that a README cannot show: {out}')


def links(markdown: str) -> str:
    "Relative links of a notebook in nbs/, as the root sees them."
    return re.sub(
        r'\]\((?![a-z]+:|[#/])([^)\s]+)\)', lambda m: f']({posixpath.normpath("nbs/" + m[1])})', markdown
    )


def cell(c: dict) -> list[str]:
    "The paragraphs a cell becomes; `#| hide` drops it, `#| echo: false` drops its source."
    source = text(c['source'])
    if c['cell_type'] == 'markdown':
        return [links(source)]
    flags = set(re.findall(r'^#\| *(.+?) *$', source, re.M))
    if flags & {'hide', 'export'} or any(f.startswith('default_exp') for f in flags):
        return []
    code = text(re.sub(r'^#\|.*\n?', '', source, flags=re.M))
    return ([] if 'echo: false' in flags else [f'```python\n{code}\n```']) + [output(o) for o in c['outputs']]


def readme(notebook: Path) -> str:
    "The notebook as one markdown text."
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    return '\n\n'.join([NOTICE] + [p for c in cells for p in cell(c) if p]) + '\n'


if __name__ == '__main__':
    (ROOT / 'README.md').write_text(readme(ROOT / 'nbs' / 'index.ipynb'), encoding='utf-8')

"The pages of the site, from notebooks, modules, commands and evidence."

import ast
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from kdnotes.core.spec import PATHS
from docs.markdown import directive, paragraphs
from docs.notebooks import page, with_links, with_symbols
from docs.reference import module_page, python_page
from docs.symbols import DocsError, Module, read_package

ROOT = Path(__file__).resolve().parents[1]
# chapters in the order of imports; a package that is missing here comes behind them
ORDER = (
    'core',
    'telemetry',
    'losses',
    'results',
    'tasks',
    'distill',
    'train',
    'stats',
    'report',
    'scaling',
    'experiment',
    'search',
    'checks',
)
TEXTS = {'CHANGELOG.md': 'changelog', 'LOG.md': 'log', 'SECURITY.md': 'security'}


@dataclass
class Site:
    "Where the site's pages are written, and what they know of each other."

    root: Path  # the checkout
    source: Path  # the folder that Sphinx reads
    modules: list[Module]
    addresses: dict[str, str] = field(default_factory=dict)  # file below the checkout -> page
    symbols: dict[str, str] = field(default_factory=dict)  # name that is of one thing alone -> full name

    def write(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding='utf-8')

    def address_of(self, path: str) -> str:
        "Where a file of the checkout is on the site; one that is no page is copied there."
        if path in self.addresses:
            return self.addresses[path]
        if not (self.root / path).is_file():
            raise DocsError(f'a page links to {path}, which is not there; mend the link')
        copy = self.source / 'files' / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / path, copy)
        return f'/files/{path}'

    def prose(self, text: str, folder: str, own: dict[str, str]) -> str:
        "Markdown of a file in a folder, as a page has it."
        return with_symbols(with_links(text, folder, self.address_of), self.symbols | own)

    def write_notebook(
        self, path: str, own: dict[str, str] | None = None, after: str = '', end: str = ''
    ) -> None:
        "A notebook as a page."
        notebook = as_executed(self.root, path)
        check_notebook(path, notebook)
        folder = path.rpartition('/')[0]
        # what its outputs are of, where it was run for the site
        shown = notebook['metadata'].get('shown', '')
        made = page(
            notebook,
            lambda text: self.prose(text, folder, own or {}),
            after or shown and directive('note', '', shown),
            end,
            folded=bool(shown),
        )
        self.write(self.addresses[path][1:], json.dumps(made, ensure_ascii=False))


def check_notebook(path: str, notebook: dict) -> None:
    "Refuse a notebook that has no title, or that shows how it failed."
    cells = notebook['cells']
    if not cells or not ''.join(cells[0]['source']).startswith('# '):
        raise DocsError(f'{path} has no title; begin its first cell with a line "# What it is about"')
    for output in (o for c in cells for o in c.get('outputs', [])):
        if output['output_type'] == 'error':
            why = f'{output["ename"]}: {output["evalue"]}'
            raise DocsError(f'{path} shows a cell that failed ({why}); mend it, and run the notebook again')


def as_executed(root: Path, path: str) -> dict:
    "A notebook, with what it showed when it was run last where that is kept and its code is still the same."
    notebook = json.loads((root / path).read_text(encoding='utf-8'))
    kept = root / 'docs' / 'executed' / Path(path).name
    if Path(path).parent.name != 'nbs' or not kept.is_file():
        return notebook
    executed = json.loads(kept.read_text(encoding='utf-8'))
    return executed if sources(executed) == sources(notebook) else notebook


def sources(notebook: dict) -> list[str]:
    "What its cells say, but for the one that papermill puts in."
    found = notebook['cells']
    return [''.join(c['source']) for c in found if 'injected-parameters' not in c['metadata'].get('tags', [])]


def chapter(module: Module) -> str:
    "The page of a module's notebook."
    return f'/library/{"/".join(module.name.split(".")[1:])}.ipynb'


def reference(module: Module) -> str:
    "The page of a module's public names."
    return f'/reference/{"/".join(module.name.split(".")[1:])}.md'


def ordered(names: Iterable[str], order: tuple[str, ...]) -> list[str]:
    "Names in a given order, others behind them."
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def packages(root: Path) -> list[str]:
    "The packages of the library, in the order of their imports."
    return ordered(sorted(p.parent.name for p in (root / 'kdnotes').glob('*/__init__.py')), ORDER)


def lessons(root: Path) -> list[str]:
    "The lessons, in the order of their numbers."
    return sorted(p.stem for p in (root / 'nbs' / 'lessons').glob('*.ipynb'))


def how_tos(root: Path) -> list[str]:
    "The how-to notebooks, in the order in which the start names them."
    there = sorted(p.stem for p in (root / 'nbs' / 'howto').glob('*.ipynb'))
    start = (root / 'nbs' / 'index.ipynb').read_text(encoding='utf-8')
    named = re.findall(r'\]\(howto/(\w+)\.ipynb', start)
    return list(dict.fromkeys([name for name in named if name in there] + there))


def experiments(root: Path) -> list[str]:
    "The notebooks that people run, the first ones first."
    there = sorted(p.stem for p in (root / 'nbs').glob('[a-z]*.ipynb') if p.stem != 'index')
    return ordered(there, ('run', 'study', 'search', 'tune', 'scaling', 'cluster', 'bench'))


def bench(root: Path) -> list[str]:
    "The notebooks of the programs that measure kdnotes."
    return sorted(p.stem for p in (root / 'bench' / 'nbs').glob('*.ipynb'))


def addresses(root: Path, modules: Iterable[Module]) -> dict[str, str]:
    "Which file of the checkout is which page."
    return (
        {'nbs/index.ipynb': '/index.ipynb', 'README.md': '/index.ipynb'}
        | {f'nbs/lessons/{name}.ipynb': f'/lessons/{name}.ipynb' for name in lessons(root)}
        | {f'nbs/howto/{name}.ipynb': f'/howto/{name}.ipynb' for name in how_tos(root)}
        | {f'nbs/{name}.ipynb': f'/experiments/{name}.ipynb' for name in experiments(root)}
        | {f'bench/nbs/{name}.ipynb': f'/bench/{name}.ipynb' for name in bench(root)}
        | {f'nbs/{m.notebook}': chapter(m) for m in modules}
        | {file: f'/project/{name}.md' for file, name in TEXTS.items()}
    )


def symbols(modules: Iterable[Module], without: Iterable[str]) -> dict[str, str]:
    "Names that can mean one thing alone, by what they mean; plain words are left out."
    named = [(s.name, f'{m.name}.{s.name}') for m in modules for s in m.symbols]
    times = Counter(name for name, _ in named)
    plain = {name for name, _ in named if name.isalpha() and name.islower()} | set(without)
    return {name: full for name, full in named if times[name] == 1 and name not in plain}


def full_names(modules: Iterable[Module]) -> dict[str, str]:
    "Names with their module, as comments write them, by what they mean: `config.TASKS`."
    names = [f'{m.name}.{s.name}' for m in modules for s in m.symbols]
    short = [name.split('.', name.count('.') - 1)[-1] for name in names]
    times = Counter(short)
    long = {name.removeprefix('kdnotes.'): name for name in names}
    return {name: full for name, full in zip(short, names) if times[name] == 1} | long


def toctree(entries: Iterable[str], caption: str = '', depth: int = 1, shown: bool = False) -> str:
    "A list of pages."
    options = {'caption': caption} if caption else {}
    options |= {'maxdepth': str(depth)} | ({} if shown else {'hidden': ''})
    return directive('toctree', '', '\n'.join(entries), **options)


def modules_of(site: Site, package: str) -> list[Module]:
    "The modules of a package, in the order of their notebooks; a module by itself."
    name = f'kdnotes.{package}'
    found = [m for m in site.modules if m.name == name or m.name.startswith(f'{name}.')]
    return sorted(found, key=lambda m: m.notebook)


def chapters(site: Site) -> list[str]:
    "The pages of packages, and of modules that are in none."
    alone = [m.name.split('.')[1] for m in site.modules if m.name.count('.') == 1]
    return [f'{p}/index' for p in packages(site.root)] + alone


def about_package(root: Path, package: str) -> str:
    "A package's docstring."
    text = (root / 'kdnotes' / package / '__init__.py').read_text(encoding='utf-8')
    return paragraphs(ast.get_docstring(ast.parse(text)) or '')


def write_start(site: Site) -> None:
    "The first page, with the list of all others at its side."
    lists = [
        toctree([f'lessons/{name}' for name in lessons(site.root)], 'Lessons'),
        toctree([f'howto/{name}' for name in how_tos(site.root)], 'How to'),
        toctree([f'experiments/{name}' for name in experiments(site.root)], 'Notebooks to run'),
        toctree(
            ['reference/kdnotes', 'reference/parameters', 'reference/commands', 'reference/modules'],
            'Reference',
        ),
        toctree(['results/index'], 'Results'),
        toctree([f'library/{p}' for p in chapters(site)], 'Library, by lessons'),
        toctree([f'bench/{name}' for name in bench(site.root)], 'Bench, by lessons'),
        toctree([f'project/{name}' for name in ('peers', *TEXTS.values())], 'Project'),
    ]
    site.write_notebook('nbs/index.ipynb', end='\n\n'.join(lists))


def write_notebooks(site: Site) -> None:
    "Lessons, how-to, experiments and the bench."
    for name in lessons(site.root):
        site.write_notebook(f'nbs/lessons/{name}.ipynb')
    for name in how_tos(site.root):
        site.write_notebook(f'nbs/howto/{name}.ipynb')
    for name in experiments(site.root):
        site.write_notebook(f'nbs/{name}.ipynb')
    for name in bench(site.root):
        site.write_notebook(f'bench/nbs/{name}.ipynb')


def write_library(site: Site) -> None:
    "A chapter for each module's notebook."
    for m in site.modules:
        own = {s.name: f'{m.name}.{s.name}' for s in m.symbols}
        after = f'Module `{m.name}` · [its public names]({reference(m)})'
        site.write_notebook(f'nbs/{m.notebook}', own, after)
    for package in packages(site.root):
        entries = [m.name.split('.')[-1] for m in modules_of(site, package)]
        parts = [f'# {package}', about_package(site.root, package), toctree(entries, shown=True)]
        site.write(f'library/{package}/index.md', '\n\n'.join(parts) + '\n')


def offered(root: Path) -> tuple[str, ...]:
    "The names of `import kdnotes as kd`."
    tree = ast.parse((root / 'kdnotes' / '__init__.py').read_text(encoding='utf-8'))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == '_API':
            return ast.literal_eval(node.value)
    raise DocsError('kdnotes/__init__.py has no _API, the names of `import kdnotes as kd`')


def write_reference(site: Site) -> None:
    "A page for what `import kdnotes as kd` offers, and one for each module."
    names = offered(site.root)
    known = site.symbols | full_names(site.modules)
    for m in site.modules:
        if m.name == 'kdnotes.api':
            site.write('reference/kdnotes.md', python_page(m, names, chapter(m), known))
        left_out = set(names) if m.name == 'kdnotes.api' else set()
        own = {s.name: f'{m.name}.{s.name}' for s in m.symbols if s.kind == 'class'}
        site.write(reference(m)[1:], module_page(m, chapter(m), known | own, left_out))
    for package in packages(site.root):
        entries = [m.name.split('.')[-1] for m in modules_of(site, package)]
        parts = [f'# {package}', about_package(site.root, package), toctree(entries, shown=True)]
        site.write(f'reference/{package}/index.md', '\n\n'.join(parts) + '\n')
    entries = chapters(site)
    about = 'Every module says in `__all__` what it offers; a package imports only from those above it.'
    parts = ['# Modules', about, toctree(entries, depth=2, shown=True)]
    site.write('reference/modules.md', '\n\n'.join(parts) + '\n')


def write_texts(site: Site) -> None:
    "The project's own texts."
    for file, name in TEXTS.items():
        text = (site.root / file).read_text(encoding='utf-8')
        site.write(f'project/{name}.md', site.prose(text, '', {}))


def write_settings(site: Site) -> None:
    "Sphinx' configuration and the style."
    site.source.mkdir(parents=True, exist_ok=True)
    shutil.copy(site.root / 'docs' / 'conf.py', site.source)
    shutil.copytree(site.root / 'docs' / 'static', site.source / '_static', dirs_exist_ok=True)


def new_site(root: Path, source: Path) -> Site:
    "A site without pages yet."
    modules = read_package(root / 'kdnotes')
    known = symbols(modules, list(PATHS))
    return Site(root, source, modules, addresses(root, modules), known)


def write_static(site: Site) -> None:
    "All that is read, without importing the library."
    write_settings(site)
    write_start(site)
    write_notebooks(site)
    write_library(site)
    write_reference(site)
    write_texts(site)


def write_made(site: Site) -> None:
    "What the library says of itself: parameters, commands, results."
    from docs import results
    from docs.commands import commands_page
    from docs.parameters import parameters_page
    from docs.peers import peers_page
    from thesis.build import evidence_alone

    site.write('reference/parameters.md', parameters_page())
    site.write('reference/commands.md', commands_page())
    site.write('project/peers.md', peers_page(site.root))
    with evidence_alone(site.root):
        pages = [results.study_page(site.root, study, site.source) for study in results.studies(site.root)]
    for p in pages:
        site.write(f'results/{p.study}.md', p.text)
    site.address_of('thesis/thesis.pdf')
    site.write('results/index.md', results.list_page(pages))

"The docs site: parameter tables are whole, every public name has its place, and no link is dead."

import json
import sys
from pathlib import Path
import pytest
import typer
from docutils.utils.math import MathError
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from kinds import one_of_each

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import __main__ as main  # noqa: E402
from docs import notebooks, site  # noqa: E402
from docs.__main__ import check, sphinx  # noqa: E402
from docs.commands import commands_page  # noqa: E402
from docs.conf import mathml  # noqa: E402
from docs.findings import finding  # noqa: E402
from docs.links import dead_links, loaded_from_elsewhere  # noqa: E402
from docs.parameters import parameters_page  # noqa: E402
from docs.reference import typed  # noqa: E402
from kdnotes.cli import make_app  # noqa: E402
from kdnotes.commands.options import as_typed  # noqa: E402
from kdnotes.results.store import predictions  # noqa: E402
from kdnotes.stats.evidence import evidence  # noqa: E402
from docs.symbols import DocsError, read_module  # noqa: E402


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> site.Site:
    "All pages that need nothing but the sources."
    new = site.new_site(ROOT, tmp_path_factory.mktemp('docs'))
    site.write_static(new)
    return new


def module(folder: Path, text: str):
    path = folder / 'm.py'
    path.write_text(text, encoding='utf-8')
    return read_module(path, 'kdnotes.m')


def test_a_parameter_has_the_comment_beside_it_or_above_it(tmp_path):
    text = '''
__all__ = ['f', 'C', 'NAMES']

# %% ../nbs/core/01_m.ipynb #ab12
NAMES = ('a', 'b')  # of all


def f(
    x: int,  # beside
    # above,
    # on two lines
    y: float | None = None,
    *more: str,  # any number
    z=1,
) -> bool:  # what it gives
    "Does it."


class C:
    "A class."

    a: int = 3  # a field

    # a group

    b: str = ''  # another

    @property
    def size(self) -> int:  # how many
        "Its size."


@patch(as_prop=True)
def half(self: C) -> float:  # of the size
    "A half of it."


@patch
def grow(
    self: C,
    by: int,  # how much
) -> None:
    "Make it larger."
'''
    names, f, c = module(tmp_path, text).symbols
    assert (names.about, names.cell) == ('of all', 'ab12')
    assert [(p.name, p.type, p.default, p.comment) for p in f.parameters] == [
        ('x', 'int', None, 'beside'),
        ('y', 'float | None', 'None', 'above, on two lines'),
        ('*more', 'str', None, 'any number'),
        ('z', '', '1', ''),
    ]
    assert (f.about, f.returns, f.returned) == ('Does it.', 'bool', 'what it gives')
    assert [(p.name, p.default, p.comment, p.heading) for p in c.parameters] == [
        ('a', '3', 'a field', ''),
        ('b', "''", 'another', 'a group'),
    ]
    assert [(m.name, m.kind, m.returned) for m in c.members] == [
        ('size', 'property', 'how many'),
        ('half', 'property', 'of the size'),
        ('grow', 'method', ''),
    ]
    assert [(p.name, p.comment) for p in c.members[-1].parameters] == [('by', 'how much')]


def test_a_name_that_is_offered_and_not_defined_is_refused(tmp_path):
    with pytest.raises(DocsError, match='kdnotes.m offers lost in __all__ and defines it nowhere'):
        module(tmp_path, "__all__ = ['lost']\n")


def test_every_parameter_of_a_run_has_its_default_and_its_comment():
    from docs.markdown import code, comment
    from kdnotes.commands.options import comments
    from kdnotes.core.spec import FLAT_NAMES, GROUPS, parameters

    page = parameters_page()
    for name, known in FLAT_NAMES.items():
        text = comments(GROUPS[known.group])[known.name]
        row = f'{{#parameter-{name} .parameter}}\n  - {code(as_typed(known.field.default))}'.rstrip()
        assert text and row in page, name
        assert comment(text.replace('None:', 'none:')) in page, name
    assert [name for name in parameters() if f'`{name} <!{name}>`' not in page] == []


def test_a_type_leads_to_its_class():
    known = {'Run': 'kdnotes.api.Run'}
    assert typed('Run | str', known) == r'{py:obj}`Run <kdnotes.api.Run>` \| `str`'
    assert (
        typed('dict[str, Run]', known) == '`dict[str, Run]`' and typed('int | None', known) == '`int | None`'
    )


@pytest.mark.exhaustive
def test_every_public_name_is_on_a_page(written):
    names = set(site.offered(ROOT))
    start = (written.source / 'reference' / 'kdnotes.md').read_text(encoding='utf-8')
    assert [n for n in names if f':canonical: kdnotes.api.{n}\n' not in start] == []
    assert start.index('{py:class} Run(') < start.index('{py:class} Data(')
    lost = []
    for m in written.modules:
        page = (written.source / site.reference(m)[1:]).read_text(encoding='utf-8')
        left_out = names if m.name == 'kdnotes.api' else set()
        for s in m.symbols:
            if s.name not in left_out and f'{{py:{s.kind}}} {s.name}' not in page:
                lost.append(f'{m.name}.{s.name}')
    assert lost == []


def test_every_notebook_is_a_page(written):
    there = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_c' not in str(p)
    }
    assert there - set(written.addresses) == set()
    assert [a for a in written.addresses.values() if not (written.source / a[1:]).is_file()] == []


def cannot_be_shown(text: str) -> list[str]:
    "The formulas of a markdown cell that the site's converter does not know."
    lost = []
    for block in MarkdownIt().use(dollarmath_plugin).parse(text):
        for token in (block, *(block.children or [])):
            if not token.type.startswith('math'):
                continue
            try:
                mathml(token.content)
            except (MathError, AttributeError) as why:
                lost.append(f'{token.content}: {why}')
    return lost


def test_every_formula_of_a_notebook_can_be_shown():
    assert cannot_be_shown(r'of $\ln x$') == []
    for wrong in (r'of $\ln\Big(x\Big)$', '$$\\nothing$$'):
        assert len(cannot_be_shown(wrong)) == 1
    lost = []
    for path in sorted((ROOT / 'nbs').rglob('*.ipynb')):
        for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
            if cell['cell_type'] == 'markdown':
                lost += [f'{path.name}: {why}' for why in cannot_be_shown(''.join(cell['source']))]
    assert lost == []


def test_a_cell_loses_its_directives_and_a_hidden_one_is_left_out():
    def cell(source, *tags):
        return dict(cell_type='code', id='ab12', source=source, outputs=[], metadata=dict(tags=list(tags)))

    target, shown = notebooks.page_cells(cell('#| export\nx = 1'), str)
    assert (target['source'], shown['source']) == ('(cell-ab12)=', 'x = 1')
    assert notebooks.page_cells(cell('#| hide\nx = 1'), str) == []
    assert notebooks.page_cells(cell('#| default_exp losses.targets'), str) == []
    [silent] = notebooks.page_cells(cell('#| echo: false\nx'), str)
    assert silent['metadata']['tags'] == ['remove-input']
    assert notebooks.page_cells(cell('x = 1', 'injected-parameters'), str) == []
    [folded], [opened] = (
        notebooks.page_cells(cell('x = 1', *t), str, folded=True) for t in ([], ['parameters'])
    )
    assert (folded['metadata']['tags'], opened['metadata']['tags']) == (['hide-input'], [])


def test_of_a_cell_that_makes_a_text_the_text_is_shown_and_leads_to_pages(written):
    said = dict(output_type='display_data', data={'text/markdown': ['see a study (`nbs/study.ipynb`)']})
    cell = dict(cell_type='code', id='ab12', metadata={}, source="Markdown(f'see ...')", outputs=[said])
    [shown] = notebooks.page_cells(cell, lambda text: written.prose(text, 'nbs', {}))
    assert shown['metadata']['tags'] == ['remove-input']
    assert (
        shown['outputs'][0]['data']['text/markdown']
        == 'see a study ([study.ipynb](/experiments/study.ipynb))'
    )
    assert notebooks.page_cells(cell | dict(outputs=[]), str) == []


def test_lines_printed_one_after_the_other_are_one_text():
    printed = [dict(output_type='stream', name='stdout', text=[f'{i}\n']) for i in range(3)]
    table = dict(output_type='display_data', data={'text/plain': ['t']})
    cell = dict(
        cell_type='code', id='ab12', metadata={}, source='f()', outputs=[*printed[:2], table, printed[2]]
    )
    [shown] = notebooks.page_cells(cell, str)
    assert [o.get('text') for o in shown['outputs']] == ['0\n1\n', None, '2\n']


def test_links_lead_to_pages_and_a_lost_one_is_refused(written):
    text = 'see [a](01_targets.ipynb#Soft-Targets), `soft_target_kl`\n```sh\n[b](c)\n```'
    changed = written.prose(text, 'nbs/losses', {})
    assert '](/library/losses/targets.ipynb#soft-targets)' in changed
    assert '{py:obj}`soft_target_kl <kdnotes.losses.targets.soft_target_kl>`' in changed
    assert '[b](c)' in changed
    with pytest.raises(DocsError, match='a page links to nbs/lost.ipynb, which is not there'):
        written.prose('[a](lost.ipynb)', 'nbs', {})


@pytest.mark.parametrize(
    'cells, why',
    [
        ([], 'nbs/a.ipynb has no title; begin its first cell with a line "# What it is about"'),
        ([dict(source=['about'])], 'nbs/a.ipynb has no title'),
        (
            [
                dict(source=['# a']),
                dict(
                    source='1/0',
                    outputs=[dict(output_type='error', ename='ZeroDivisionError', evalue='division by zero')],
                ),
            ],
            r'shows a cell that failed \(ZeroDivisionError: division by zero\); mend it, and run',
        ),
    ],
)
def test_a_notebook_that_cannot_be_a_page_is_refused(cells, why):
    with pytest.raises(DocsError, match=why):
        site.check_notebook('nbs/a.ipynb', dict(cells=cells))


def test_without_its_packages_no_site_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(main, 'NEEDED', ('sphinx', 'no_such_package'))
    with pytest.raises(DocsError, match=r"no_such_package is not installed: make setup, or pip install -e"):
        main.build(tmp_path / 'source', tmp_path / 'site')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('kept', sorted((ROOT / 'docs' / 'executed').glob('*.ipynb')), ids=lambda p: p.stem)
def test_what_the_site_shows_of_a_notebook_is_of_its_code_now(kept):
    executed = json.loads(kept.read_text(encoding='utf-8'))
    assert site.sources(executed) == site.sources(
        json.loads((ROOT / 'nbs' / kept.name).read_text(encoding='utf-8'))
    ), f'run `python tools/executed.py {kept.stem}`'
    told = [json.dumps(o) for c in executed['cells'] for o in c.get('outputs', [])]
    assert told and not [o[:200] for o in told if str(ROOT) in o or '/tmp/' in o or 'site-packages' in o]
    assert kept.stat().st_size < 250_000
    assert 'error' not in {o.get('output_type') for c in executed['cells'] for o in c.get('outputs', [])}


def test_every_command_has_its_examples_its_options_and_its_place():
    page = commands_page()
    commands = typer.main.get_command(make_app()).commands
    for name, command in commands.items():
        own = page.split(f'### kdnotes {name}\n')[1].split('\n### ')[0]
        examples = [line.strip() for line in command.epilog.splitlines() if 'kdnotes ' in line]
        assert examples and all(example in own for example in examples)
        assert page.index(f'## {command.rich_help_panel.capitalize()}') < page.index(f'### kdnotes {name}\n')
    assert '`--to FOLDER`' in page.split('### kdnotes report\n')[1].split('\n### ')[0]
    assert '`STUDY`' in page and '*(required)*' in page


def test_dead_links_and_what_is_loaded_are_found(tmp_path):
    (tmp_path / 'a.html').write_text(
        '<p id="x"></p><a href="a.html#x">1</a><a href="#y">2</a><a href="b.html">3</a>'
        '<script src="https://cdn.example.org/m.js"></script><a href="https://example.org">4</a>'
    )
    (tmp_path / 's.css').write_text('@import "https://fonts.example.org/f.css";')
    assert dead_links(tmp_path) == [
        'a.html links to #y, and that page has no such anchor',
        'a.html links to b.html, which is not there',
    ]
    assert loaded_from_elsewhere(tmp_path) == [
        'a.html loads https://cdn.example.org/m.js from the network',
        's.css loads https://fonts.example.org/f.css from the network',
    ]
    with pytest.raises(DocsError, match='b.html, which is not there'):
        check(tmp_path)


@pytest.mark.exhaustive
def test_a_small_site_is_built_without_warnings(written, tmp_path):
    source = tmp_path / 'source'
    small = site.Site(ROOT, source, written.modules, written.addresses, {})
    site.write_settings(small)
    targets = next(m for m in written.modules if m.name == 'kdnotes.losses.targets')
    page, chapter = site.reference(targets)[1:], site.chapter(targets)[1:]
    for name in (page, chapter):
        small.write(name, (written.source / name).read_text(encoding='utf-8'))
    small.write('index.md', f'# start\n\n```{{toctree}}\n{page}\n{chapter}\n```\n')
    sphinx(source, tmp_path / 'site')
    check(tmp_path / 'site')
    html = (tmp_path / 'site' / chapter).with_suffix('.html').read_text(encoding='utf-8')
    assert '<math' in html
    described = (tmp_path / 'site' / page).with_suffix('.html').read_text(encoding='utf-8')
    assert 'id="kdnotes.losses.targets.soft_target_kl"' in described


@pytest.mark.exhaustive
@pytest.mark.parametrize('wrong', one_of_each(['[lost](nowhere.md)', r'$\\bar x$', r'$\nothing$']))
def test_a_warning_fails_the_build(written, tmp_path, wrong):
    small = site.Site(ROOT, tmp_path / 'source', [], {})
    site.write_settings(small)
    small.write('index.md', f'# start\n\n{wrong}\n')
    with pytest.raises(DocsError, match='the pages have the warnings above'):
        sphinx(tmp_path / 'source', tmp_path / 'site')


def test_the_page_of_a_study_of_rates_says_what_a_number_format_does():
    study = 'embedded-rates'
    known = evidence(study)
    text = finding(known, 'nothing', predictions(study, [r['run_id'] for r in known.records]))
    assert 'learning rates' in text and 'nothing' not in text

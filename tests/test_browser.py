"""The whole site, and JupyterLab, as a browser shows them. A browser's tests need Playwright and a Chromium,
and say so where one is missing.
"""

import json
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
import pytest
from notebooks import surroundings
from processes import wait_for

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.__main__ import build, check  # noqa: E402

VIEWS = {
    f'{width} px, {scheme}': dict(viewport=dict(width=width, height=1000), color_scheme=scheme)
    for width in (1280, 390)
    for scheme in ('light', 'dark')
}
PAGES = (
    'index.html',
    'lessons/lesson_02_dark_knowledge.html',
    'howto/own_texts.html',
    'experiments/run.html',
    'experiments/study.html',
    'experiments/search.html',
    'experiments/scaling.html',
    'reference/parameters.html',
    'reference/commands.html',
    'reference/kdnotes.html',
    'results/index.html',
    'results/wikiqa.html',
    'results/wikiqa-labels-gpu.html',
    'results/embedded-search.html',
    'project/peers.html',
    'search.html?q=learning_rate',
)
# what is wider than the window, and no box around it scrolls or cuts it off
TOO_WIDE = """() => {
    const wide = document.documentElement.scrollWidth - window.innerWidth;
    return wide > 0 ? `is ${wide} px wider than the window` : '';
}"""
WITHOUT_PICTURE = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"


@pytest.fixture(scope='module')
def chromium() -> Iterator:
    "A browser without a window."
    how = "no Playwright here: pip install -e '.[browser]' brings it"
    sync = pytest.importorskip('playwright.sync_api', reason=how)
    path = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if path is None:
        pytest.skip('no Chromium here: apt-get install chromium brings it')
    with sync.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=['--no-sandbox', '--disable-gpu'])
        yield browser
        browser.close()


def complaints(browser, site: Path, page: str, view: str) -> list[str]:
    "What is wrong with a page of a folder."
    context = browser.new_context(**VIEWS[view])
    shown = context.new_page()
    found = []
    shown.on('console', lambda said: found.append(said.text) if said.type == 'error' else None)
    shown.on('pageerror', lambda error: found.append(str(error)))
    shown.goto(f'{(site.resolve() / "x").as_uri()[:-1]}{page}', wait_until='load')
    if page.startswith('search'):
        shown.wait_for_selector('#search-results li a')
    found += [shown.evaluate(TOO_WIDE)] + shown.evaluate(WITHOUT_PICTURE)
    context.close()
    return [f'{page} at {view}: {what}' for what in found if what]


def test_what_is_wrong_with_a_page_is_found(chromium, tmp_path):
    head = '<!doctype html><meta name="viewport" content="width=device-width">'
    (tmp_path / 'good.html').write_text(f'{head}<div style="overflow-x: auto"><pre>{"x" * 900}</pre></div>')
    (tmp_path / 'wide.html').write_text(f'{head}<pre>{"x" * 900}</pre>')
    (tmp_path / 'error.html').write_text(f'{head}<script>nothing()</script>')
    (tmp_path / 'lost.html').write_text(f'{head}<img src="lost.png">')

    def said(page: str) -> str:
        return '\n'.join(complaints(chromium, tmp_path, page, '390 px, dark'))

    assert said('good.html') == ''
    assert 'px wider than the window' in said('wide.html')
    assert 'nothing is not defined' in said('error.html')
    assert 'lost.png' in said('lost.html')


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> Path:
    "The whole site; one with a dead link is refused."
    folder = tmp_path_factory.mktemp('docs')
    build(folder / 'work' / 'source', folder / 'site')
    return folder / 'site'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_whole_site_is_built(site):
    check(site)
    assert [page for page in PAGES if not (site / page.partition('?')[0]).is_file()] == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('view', VIEWS)
def test_pages_are_shown_as_they_should(chromium, site, view):
    found = [said for page in PAGES for said in complaints(chromium, site, page, view)]
    assert found == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_number_is_followed_from_the_start_to_its_record(chromium, site):
    shown = chromium.new_page()
    shown.set_default_timeout(20_000)
    shown.goto((site / 'index.html').resolve().as_uri())
    shown.locator('.sidebar-tree').get_by_role('link', name='Results', exact=True).click()
    shown.locator('table.studies').get_by_role('link', name='wikiqa', exact=True).click()
    figure = shown.locator('figure.drawn').first
    assert figure.locator('img').evaluate('image => image.naturalWidth') > 300
    figure.locator('figcaption').get_by_role('link', name='runs').click()
    assert shown.url.endswith('results/wikiqa.html#the-runs')
    runs = shown.locator('#the-runs')
    command = runs.locator('code').first.inner_text()
    row = runs.locator('table tbody tr').first.locator('td').all_inner_texts()
    assert command == f'kdnotes show {row[0]}'
    program = [sys.executable, '-m', *command.split()]
    told = subprocess.run(program, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert told.returncode == 0, told.stderr
    [score] = [line.split()[-1] for line in told.stdout.splitlines() if '(primary)' in line]
    assert f'{float(score):.3f}' == f'{float(row[4]):.3f}'


def smoke_notebook(folder: Path) -> Path:
    "The notebook of one run, whose run is one of a few steps."
    notebook = json.loads((ROOT / 'nbs' / 'run.ipynb').read_text(encoding='utf-8'))
    [cell] = [c for c in notebook['cells'] if 'parameters' in c['metadata'].get('tags', [])]
    more = ["\n", "corpus = 'embedded'\n", "smoke = True\n"]
    cell['source'] = [*cell['source'], *more]
    path = folder / 'run.ipynb'
    path.write_text(json.dumps(notebook), encoding='utf-8')
    return path


@pytest.fixture
def lab(tmp_path) -> Iterator[str]:
    "The address of a JupyterLab that shows a folder with that notebook."
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    smoke_notebook(tmp_path)
    given = [f'--ServerApp.port={port}', '--ServerApp.port_retries=0', f'--IdentityProvider.token={token}']
    process = subprocess.Popen(
        [Path(sys.executable).parent / 'jupyter', 'lab', '--no-browser', '--allow-root', *given],
        cwd=tmp_path,
        env=surroundings(tmp_path / 'home', PYTHONPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(('127.0.0.1', port)) == 0

    try:
        wait_for(listens, 'JupyterLab to listen', 120)
        yield f'http://127.0.0.1:{port}/lab/tree/run.ipynb?token={token}'
    finally:
        process.terminate()
        process.wait()


def outputs_of(path: Path) -> list[dict]:
    "What the last saved version of a notebook shows."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [o for c in cells for o in c.get('outputs', [])]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_jupyterlab_runs_a_notebook_to_its_end_and_shows_its_plot(chromium, lab, tmp_path):
    shown = chromium.new_page(viewport=dict(width=1280, height=1000))
    shown.goto(lab)
    shown.wait_for_selector('.jp-Notebook .jp-CodeCell', timeout=120_000)
    shown.get_by_text('Run', exact=True).first.click()
    shown.get_by_text('Run All Cells', exact=True).first.click()
    path = tmp_path / 'run.ipynb'

    def ended() -> bool:
        shown.keyboard.press('Control+s')
        shown.wait_for_timeout(2_000)
        last = json.loads(path.read_text(encoding='utf-8'))['cells'][-1]
        failed = [o['ename'] for o in outputs_of(path) if o['output_type'] == 'error']
        assert failed == []
        return bool(last['outputs'])

    wait_for(ended, 'the notebook to end', 600)
    assert any('image/png' in o.get('data', {}) for o in outputs_of(path))
    plot = shown.locator('.jp-RenderedImage img').first
    plot.scroll_into_view_if_needed()
    assert plot.evaluate('image => image.naturalWidth') > 300

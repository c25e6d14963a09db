"""The report of a study: one HTML file and the same as a PDF, whole, escaped, and the same bytes again."""

import sys
import xml.etree.ElementTree as ElementTree
import pytest
from handmade import make_record, write_run
from kdnotes import cli
from kdnotes.report.page import as_html, save_report
from kdnotes.stats.evidence import ReportError
from kdnotes.core.arms import USUAL
from kdnotes.core.render import phrase


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def write_study(seeds=(0, 1, 2), change=lambda record: None):
    for i, mode in enumerate(USUAL):
        for seed in seeds:
            made = make_record(mode, seed, 0.8 - 0.02 * i + 0.003 * seed, 40 / (i + 1))
            change(made)
            write_run(made)


def read(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html.removeprefix('<!DOCTYPE html>'))


def test_a_page_is_one_file_that_needs_nothing_from_elsewhere(home):
    write_study()
    saved = save_report('made', pdf=False)
    tree = read(saved.html.read_text())
    images = tree.findall('.//img')
    assert images and all(i.get('src').startswith('data:image/svg+xml;base64,') for i in images)
    assert all(i.get('alt') for i in images)
    assert not [e for e in tree.iter() if e.tag in ('script', 'link', 'iframe')]
    said = ' '.join(tree.itertext())
    assert all(s in said for s in saved.page.headline) and 'is not drawn' in said
    assert all(run.name in said for run in (home / 'runs/made').iterdir() if (run / 'record.json').exists())
    assert saved.html.parent == home / 'runs/made' and saved.pdf is None


def test_html_and_pdf_are_the_same_bytes_again(home):
    write_study()
    first = save_report('made')
    before = first.html.read_bytes(), first.pdf.read_bytes()
    assert before[1].startswith(b'%PDF')
    again = save_report('made')
    assert (again.html.read_bytes(), again.pdf.read_bytes()) == before


@pytest.mark.exhaustive
def test_what_a_machine_calls_itself_is_text_and_no_markup():
    write_study(change=lambda record: record['environment'].update(device='<b>&"cpu"</b>'))
    page = save_report('made', pdf=False).page
    assert not read(as_html(page)).findall('.//b')
    assert '<b>&"cpu"</b>' in ' '.join(read(as_html(page)).itertext())


@pytest.mark.exhaustive
def test_a_single_seed_is_reported_as_one():
    write_study(seeds=(0,))
    page = save_report('made', pdf=False).page
    assert phrase('reasons.jinja', 'one_seed') in page.headline[-1]


@pytest.mark.exhaustive
def test_without_typst_the_sentence_says_what_to_install(home, monkeypatch, capsys):
    write_study()
    monkeypatch.setitem(sys.modules, 'typst', None)
    with pytest.raises(ReportError, match='pip install typst'):
        save_report('made')
    assert not (home / 'runs/made/report.html').exists()
    assert cli.main(['report', 'made', '--no-pdf']) == 0
    assert capsys.readouterr().out.rstrip().endswith('runs/made/report.html')


@pytest.mark.parametrize(
    'typed, told',
    [('report nothing', "there is no study 'nothing'; there are made"), ('report made r-x', 'r-x')],
)
def test_a_study_without_runs_is_refused_in_one_sentence(home, typed, told, capsys):
    write_study(seeds=(0,))
    assert cli.main(typed.split()) != 0
    said = capsys.readouterr()
    assert said.out == '' and told in said.err and said.err.count('\n') == 1
    assert not list(home.glob('runs/*/report.*'))

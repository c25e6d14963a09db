"""What templates make of a study: a snapshot for each task, names that look like markup, and what is missing.

`KDNOTES_SNAPSHOTS=write pytest tests/test_rendered.py` writes the snapshots anew.
"""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from unittest import mock
import numpy as np
import pytest
from jinja2 import DictLoader, ChoiceLoader
import handmade
from handmade import make_record, make_units, write_floors, write_run, written_report
from kdnotes.stats.evidence import evidence
from kdnotes.core import render as rd
from kdnotes.core.arms import PROFILES
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import at_home, atomic_write, figures_path, runs_path, with_evidence
from kdnotes.core.render import phrase, reason
from kdnotes.experiment.display import run_box
from kdnotes.report.figures import draw_evidence
from kdnotes.report.page import as_html, as_pdf, page_of
from kdnotes.report.report import report, report_of

SNAPSHOTS = Path(__file__).parent / 'snapshots'
TASKS = {  # task -> metric, is higher better, values of the arms
    'answer_selection': ('map', True, (0.8, 0.7, 0.72)),
    'text_classification': ('accuracy', True, (0.9, 0.84, 0.87)),
    'sentence_pairs': ('spearman', True, (0.85, 0.8, 0.79)),
    'extractive_qa': ('f1', True, (0.7, 0.55, 0.6)),
    'masked_lm': ('loss', False, (2.0, 2.6, 2.4)),
}
ARMS = ('baseline', 'full_student', 'full_kd')


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def _units(value, seed, *, n, metric):
    return make_units(value, seed).assign(metric=metric)[:n]


def write_study(
    arms=ARMS, seeds=(0, 1, 2), task='answer_selection', change=lambda record: None, n_units=40, **more
):
    metric, higher, values = TASKS[task]
    for mode, value in zip(arms, values):
        for seed in seeds:
            about = dict(task=task, metric=metric, higher=higher) | more
            made = make_record(
                mode, seed, value + 0.004 * seed, 40.0 if mode == 'baseline' else 10.0, **about
            )
            teacher = mode == 'baseline'
            made['params_total'] = 20_000_000 if teacher else 5_000_000
            ms = 12.0 if teacher else 4.0
            made['latency'] = dict(batch_1_ms=ms, batch_32_ms=20 * ms, batch_1_tokens=50, batch_32_tokens=60)
            change(made)
            units = partial(_units, n=n_units, metric=metric)
            with mock.patch.object(handmade, 'make_units', units):
                write_run(made)
    return made


def written(study='made'):
    "The report without its figures, as a terminal shows it."
    return str(written_report(study))


# ---- snapshots ----


@pytest.mark.parametrize('task', TASKS)
def test_the_report_of_a_task_is_its_snapshot(task):
    made = write_study(task=task)
    _, higher, values = TASKS[task]
    write_floors(made, shuffled=values[0] - 0.4 if higher else values[0] + 2)
    text = '\n'.join(line.rstrip() for line in written().splitlines()) + '\n'
    path = SNAPSHOTS / f'report-{task}.txt'
    if os.environ.get('KDNOTES_SNAPSHOTS') == 'write':
        atomic_write(path, text)
    assert text == path.read_text(encoding='utf-8'), 'KDNOTES_SNAPSHOTS=write writes it anew'


# ---- names that look like markup ----

BAD = [
    '<script>alert(1)</script>',
    '*bold* | `x`',
    '#panic("typst")',
    '\x1b[31mred',
    'two\nlines',
    '{{ 7 * 7 }}',
]


def shown_as(text: str) -> str:
    "Lines and spaces as single spaces, as sentences have them."
    return ' '.join(text.split())


@pytest.mark.parametrize('bad', BAD)
def test_names_that_look_like_markup_are_text_everywhere(bad):
    def rename(record):
        record['corpus'] = f'/data/{bad}'
        record['environment']['device'] = bad
        record['environment']['cpu'] = bad
        if record['mode'] == 'full_kd':
            # a record with an arm that does not print is refused
            record['arm'] = f'own {bad}' if bad.isprintable() else 'own'
            record['models'] = dict(teacher=bad, student=bad, profile=next(iter(PROFILES)))
            record['settings'] |= dict(teacher_mode='given', student_init='hub')

    made = write_study(change=rename, seeds=(0, 1))
    e = evidence('made')
    text = written()
    assert not re.search(r'[\x00-\x08\x0b-\x1f\x7f]', text)
    assert '49' not in shown_as(bad) and ('\\u001b' in text) == ('\x1b' in bad)
    page = page_of(e, [])
    box = run_box(made)
    for html in (as_html(page), box._repr_html_()):
        assert '<script>' not in html
        if '\x1b' not in bad:  # XML holds no control characters
            tree = ElementTree.fromstring(html.removeprefix('<!DOCTYPE html>'))
            assert not [x for x in tree.iter() if x.tag in ('script', 'em', 'code')]
            if html.startswith('<!DOCTYPE') or bad.isprintable():  # a box names the arm, not the machine
                assert shown_as(bad) in shown_as(' '.join(tree.itertext()))
    assert not re.search(r'[\x00-\x08\x0b-\x1f\x7f]', str(box))
    assert as_pdf(page).startswith(b'%PDF')


def test_a_page_has_no_control_characters():
    write_study(change=lambda record: record['environment'].update(device='\x1b[31mred'))
    assert '\x1b' not in as_html(page_of(evidence('made'), []))


# ---- what is missing ----


def without_value(record):
    record['primary']['value'] = None
    record['metrics'] = {name: dict.fromkeys(of) for name, of in record['metrics'].items()}


def with_one_metric(record):
    record['metrics'] = {'test': {record['primary']['metric']: record['primary']['value']}}


MISSING = {
    'one arm': dict(arms=('baseline',)),
    'one seed': dict(seeds=(0,)),
    'one run': dict(arms=('full_kd',), seeds=(4,)),
    'no value': dict(change=without_value),
    'one metric': dict(change=with_one_metric),
    'no latency': dict(change=lambda record: record.pop('latency')),
}


@pytest.mark.parametrize('task', ['answer_selection', 'masked_lm'])
@pytest.mark.parametrize('kind', MISSING)
def test_a_study_that_lacks_something_is_rendered_whole(kind, task):
    made = write_study(task=task, **MISSING[kind])
    e = evidence('made')
    found = report_of(e, {})
    page = page_of(e, [])
    texts = [str(found), as_html(page), str(run_box(made)), run_box(made)._repr_html_()]
    texts += [*found.headline, *found.sentences, *found.setting, *map(str, found.notes)]
    for text in texts:
        words = re.sub(r'<style>.*</style>', '', text, flags=re.S)
        assert not re.search(r'\b(None|nan|inf|Undefined)\b|Reason\(|<bound method', words), words
    for sentence in (*found.headline, *found.sentences):
        assert re.search(r'[.!?]$', sentence) and '..' not in sentence and '  ' not in sentence
        assert not re.search(r' [.,;:)](\s|$)|\( |[{}]', sentence), sentence
    assert len(found.data()['headline']) == len(found.headline) > 0


def test_a_study_without_units_has_intervals_over_seeds():
    made = write_study(n_units=0)
    value = written_report().values[made['arm']]['primary']
    assert value.n == 3 and value.units is None and f'{value.estimate:.3f}' in written()


# ---- one sentence stands in one place ----


@pytest.fixture
def another(monkeypatch):
    "Templates in which a macro is another."

    def replace(name, old, new):
        first = rd.environment()
        source = first.loader.get_source(first, name)[0]
        assert source.count(old) == 1
        changed = first.overlay(
            loader=ChoiceLoader([DictLoader({name: source.replace(old, new)}), first.loader])
        )
        changed.cache.clear()
        monkeypatch.setattr(rd, 'environment', lambda: changed)

    return replace


ONE_SEED = 'one seed says nothing about the spread between seeds'


def test_the_sentence_on_one_seed_stands_in_one_line(another):
    made = write_study(seeds=(0,))

    def texts():
        e = evidence('made')
        [kd] = [c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd')]
        box = run_box(made)
        caption = draw_evidence(e, figures_path('made'), ['effects'])[0].caption
        finding = phrase('finding.jinja', 'factor', kd)
        return written(), as_html(page_of(e, [])), str(box), box._repr_html_(), finding, caption

    assert all(ONE_SEED in text for text in texts())
    another('reasons.jinja', ONE_SEED, 'a single seed has no spread')
    for text in texts():
        assert 'a single seed has no spread' in text and ONE_SEED not in text


def test_no_other_source_has_the_sentence_on_one_seed():
    root = Path(rd.__file__).parents[1]
    sources = [path for kind in ('*.py', '*.jinja', '*.html', '*.typ') for path in root.rglob(kind)]
    found = {path.name for path in sources if 'spread between seeds' in path.read_text(encoding='utf-8')}
    assert found == {'reasons.jinja'}


# ---- every reason ----


def test_every_reason_is_a_clause():
    macros = rd.environment().get_template('reasons.jinja').module
    names = [name for name in vars(macros) if callable(getattr(macros, name)) and not name.startswith('_')]
    assert len(names) > 40
    for name in names:
        if not getattr(macros, name).arguments:
            text = str(reason(name))
            assert text and not text.endswith('.') and '\n' not in text and '  ' not in text, name


def test_numbers_of_a_report_have_true_minus_signs():
    write_study()
    found = written_report()
    assert all('\N{MINUS SIGN}' in cell for cell in found.comparisons['change in test MAP'] if cell[0] != '+')
    assert not re.search(r'(?<![\w-])-\d', ' '.join((*found.headline, *found.sentences)))
    assert np.isfinite(found.numbers['estimate'].dropna()).all() and report('made').figures


@pytest.mark.parametrize('study, schema', [('gutenberg-batch', 2), ('squad1-student', 3)])
def test_committed_records_of_older_schemas_have_a_report(study, schema, tmp_path, project):
    lines = (project / 'thesis' / 'data' / f'{study}.records.jsonl').read_text(encoding='utf-8').splitlines()
    assert {json.loads(line)['schema'] for line in lines} == {schema}
    with at_home(with_evidence(tmp_path / 'home', project)):
        e = evidence(study)
        found = report_of(e, {})
        texts = [str(found), as_html(page_of(e, [])), str(run_box(e.records[0]))]
    value = found.values[e.records[0]['arm']]['primary'].estimate
    unit = rd.unit_of(e.records[0]['task'], e.records[0]['primary']['metric'])
    assert unit.text(value) in texts[0] and all(e.records[0]['run_id'] in text for text in texts[1:])
    assert not re.search(r'\b(None|nan)\b', texts[0])


def test_a_damaged_record_is_refused_by_its_name():
    made = write_study(seeds=(0,))
    (runs_path() / 'made' / made['run_id'] / 'record.json').write_text('{')
    with pytest.raises(KdnotesError, match=made['run_id']):
        report('made')

"""Reports: what they refuse, that they can be made from the evidence alone,
and that the same runs make the same bytes.
"""

import os
import shutil
import subprocess
import sys
import numpy as np
import pandas as pd
import pytest
from handmade import make_record, write_run, written_report
from notebooks import contents
from kdnotes.core.files import at_home, with_evidence
from kdnotes.report import figures as fg
from kdnotes.report import report as rp
from kdnotes.report import tables
from kdnotes.stats import evidence as ev
from kdnotes.stats import tables as tb
from kdnotes.core.arms import MODES, PROCEDURES
from kdnotes.core.files import figures_path, runs_path
from kdnotes.report.plotting import look, save_figure
from kdnotes.results.table import arms_of
from kdnotes.core.files import read_json, sha256_file
from kdnotes.core.render import phrase, reason
from kdnotes.results.store import RecordError, export
from kdnotes.tasks.sources import Corpus


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def study(modes=PROCEDURES, seeds=(0, 1, 2), **parameters):
    return [
        make_record(m, s, 0.7 + 0.02 * i + 0.003 * s, 40 / (i + 1) + s, **parameters)
        for i, m in enumerate(modes)
        for s in seeds
    ]


def write_all(records):
    for r in records:
        write_run(r)


def svgs(found):
    return {name: path.read_bytes() for name, path in found.figures.items()}


def test_a_study_with_no_runs_is_refused_with_one_sentence(home):
    with pytest.raises(ev.ReportError, match='no finished runs in') as e:
        rp.report('nothing')
    assert '\n' not in str(e.value) and not figures_path('nothing').exists()


@pytest.mark.parametrize(
    'other, words',
    [
        (dict(corpus='wikiqa'), 'mixes corpora'),
        (dict(smoke=True), 'full runs and smoke runs'),
        (dict(metric='auc'), 'mixes primary metrics'),
        (dict(temperature=8.0), "arm 'full_kd' mixes runs that differ in temperature"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(other, words):
    write_all(study(seeds=(0, 1)) + study(('full_kd',), (2,), **other))
    with pytest.raises(ev.ReportError, match=words):
        rp.report('made')
    # naming the runs helps
    assert len(rp.report('made', [r['run_id'] for r in study(seeds=(0, 1))]).figures) == 3


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(RecordError, match='run nowhere'):
        rp.report('made', ['nowhere'])


@pytest.mark.exhaustive
def test_evidence_alone_makes_the_same_bytes_in_a_process_with_another_hash_seed_and_style():
    write_all(study())
    found = rp.report('made')
    first = contents(figures_path('made'))
    export('made')
    shutil.rmtree(runs_path() / 'made')
    code = (
        "import matplotlib; matplotlib.rcParams.update({'font.size': 20, 'axes.grid': False})\n"
        "from kdnotes.report.report import report; print(report('made'))"
    )
    env = {**os.environ, 'PYTHONHASHSEED': '77', 'TZ': 'Asia/Tokyo'}
    done = subprocess.run([sys.executable, '-c', code], check=True, env=env, capture_output=True, text=True)
    assert done.stdout == f'{found}\n'
    assert contents(figures_path('made')) == first
    assert set(found.figures) == {'accuracy_time', 'throughput', 'curves'}


def test_figures_change_with_their_numbers_and_the_manifest_binds_them_to_runs():
    write_all(study())
    save_figure(fg.curves_figure(study()[:3]), figures_path('made'), 'mine', ['x', 'a'], 'a notebook')
    found = rp.report('made')
    manifest = read_json(figures_path('made') / 'MANIFEST.json')
    assert set(manifest) == {'accuracy_time.svg', 'curves.svg', 'throughput.svg', 'mine.svg'}
    assert manifest['mine.svg']['run_ids'] == ['a', 'x']
    for name, entry in manifest.items():
        assert entry['sha256'] == sha256_file(figures_path('made') / name)
    assert manifest['curves.svg']['run_ids'] == sorted(r['run_id'] for r in study())
    assert manifest['curves.svg']['producer'] == 'kdnotes.report.figures.curves_figure'
    first = svgs(found)
    write_all(study(('full_student',)))
    second = svgs(rp.report('made'))
    assert all(first[n] != second[n] for n in first)


def test_curves_come_from_the_record():
    record = make_record(curve=False)
    assert ev.curve_of(record) == []
    points = [dict(step=10, elapsed_s=1.0, loss=0.5), dict(step=20, set='dev', metric='map', value=0.7)]
    found = ev.curve_of(record | dict(curve=points))
    assert found == [dict(step=10, loss=0.5, value=None), dict(step=20, loss=None, value=0.7)]
    assert ev.curve_set([record | dict(curve=points)]) == 'dev'
    [undefined] = ev.curve_of(dict(curve=[dict(step=1, loss=float('nan'))]))
    assert undefined == dict(step=1, loss=None, value=None)
    long = ev.curve_of(dict(curve=[dict(step=s, loss=float(s)) for s in range(1, 1001)]))
    assert len(long) == 40 and np.mean([p['loss'] for p in long]) == pytest.approx(500.5)


def test_times_are_of_the_machine_that_made_most():
    moved = make_record('full_student', 0, torch='2.14.0')
    write_all([*study(), moved])
    found = written_report()
    assert 'examples_per_s' not in found.values['full_student']
    assert found.values['full_student']['primary'].estimate == pytest.approx(
        moved['primary']['value'], abs=1e-4
    )
    assert all(found.values[r['arm']]['train_s'].n == 3 for r in study())
    [note] = [dict(n.details) for n in found.notes if n.code == 'other_machines']
    assert note['n'] == 9 and tuple(note['excluded']) == (moved['run_id'],)


@pytest.mark.exhaustive
def test_two_machines_with_equally_many_runs_show_no_times_and_remove_stale_figures():
    write_all(study())
    rp.report('made')
    write_all(make_record('full_student', seed, torch='2.14.0') for seed in range(9))
    found = rp.report('made')
    assert set(found.figures) == {'curves'} and not (figures_path('made') / 'throughput.svg').exists()
    not_drawn = read_json(figures_path('made') / 'MANIFEST.json')['throughput.svg']
    assert not_drawn['sha256'] is None and len(not_drawn['run_ids']) == 18
    equal = reason('equal_machines', a=('torch 2.13.0',), b=('torch 2.14.0',))
    assert equal in found.notes and str(equal) in not_drawn['reason']
    assert 'train s' not in found.arms.columns and 'test MAP' in found.arms.columns


def test_null_accuracy_leaves_times_and_says_why():
    none = {'test': {'map': None}, 'dev': {'map': None}}
    write_all(r | dict(primary=r['primary'] | {'value': None}, metrics=none) for r in study())
    found = rp.report('made')
    assert set(found.figures) == {'throughput', 'curves'} and (found.arms['test MAP'] == '-').all()
    [note] = [dict(n.details) for n in found.notes if n.code == 'no_value']
    assert (note['name'], note['why'], len(note['run_ids'])) == ('MAP', ('made up',), 9)


def test_a_single_run_has_a_report_without_intervals():
    write_run(make_record('baseline'))
    found = rp.report('made')
    arm = found.arms.loc['baseline']
    assert '±' not in arm['train s'] and '±' in arm['test MAP'] and len(found.figures) == 3
    assert phrase('tables.jinja', 'no_comparison', 1) in str(found)
    assert reason('single_seed_arms', arms=('baseline',)) in found.notes


def test_tables_hold_what_was_asked():
    write_all(study(MODES))
    found = written_report()
    assert list(found.arms.index) == list(MODES) and (found.arms['seeds'] == 3).all()
    assert {'test MAP', 'train s', 'total s', 'examples/s', 'host MiB'} <= set(found.arms.columns)
    assert 'GPU MiB' not in found.arms.columns and list(found.metrics.index) == ['MAP', 'MRR']
    assert len(found.comparisons) == len(found.sentences) == len(found.differences) == 9
    codes = ('significant', 'not_significant', 'not_tested')
    assert set(found.comparisons['verdict']) <= {phrase('tables.jinja', 'verdict', code) for code in codes}
    assert '\x1b' not in str(found) and 'effect of kd' in str(found)
    i = found.values['baseline']['primary']
    assert found.arms.loc['baseline', 'test MAP'] == f'{i.estimate:.3f} ± {(i.high - i.low) / 2:.3f}'
    assert (i.n, i.units, i.estimate) == (3, 40, pytest.approx(np.mean([0.7, 0.703, 0.706])))
    # what the arms share is said, and on how much they were scored
    assert found.setting[-1] == 'Scored on 40 questions of test.'
    own = [said for said in found.setting if 'epochs' in said]
    assert len(own) == 2 and own[0].startswith('Setting: 3 epochs') and '(baseline, ' in own[0]
    write_all(make_record('baseline', s, weight_decay=0.5, epochs=1, study='other') for s in (0, 1))
    said = written_report('other').setting
    assert said[0].startswith('Setting: 1 epoch, ') and said[1] == 'Not default: weight_decay=0.5.'


def test_the_primary_metric_is_the_records():
    write_all(study(metric='perplexity', higher=False))
    found = written_report()
    assert 'test perplexity' in found.arms.columns
    assert 'change in test perplexity' in found.comparisons.columns
    rows = found.numbers[(found.numbers['quantity'] == 'primary') & (found.numbers['kind'] != 'teacher')]
    assert set(rows['verdict'].dropna()) == {'not_tested'} and set(rows['reason'].dropna()) == {
        'too_few_seeds'
    }


def test_of_an_error_lower_is_better_on_the_front_and_on_axes(home):
    modes = ('baseline', 'full_student', 'full_kd')
    error = dict(baseline=0.5, full_student=0.7, full_kd=0.6)
    seconds = dict(baseline=40.0, full_student=10.0, full_kd=20.0)
    more = dict(task='text_classification', metric='mse', higher=False)
    for mode in modes:
        for seed in (0, 1, 2):
            write_run(make_record(mode, seed, error[mode] + 0.003 * seed, seconds[mode] + seed, **more))
    e = ev.evidence('made')
    # the slowest arm has the smallest error: read as an accuracy, only the fastest would be on the front
    assert tb.pareto_front(e.values, 'train_s', False) == ['full_student', 'full_kd', 'baseline']
    label = fg.accuracy_figure(e.records, e.values).axes[0].get_xlabel()
    assert label == 'squared error on test\n(lower is better)'
    assert fg.effects_figure(e).axes[0].get_xlabel().endswith('(left: better)')
    [step] = [c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd')]
    assert step.difference.estimate == pytest.approx(-0.1)
    assert phrase('comparison.jinja', 'higher', step) == 'lower (better)'


def test_arms_keep_their_look_whatever_else_is_there():
    all_arms = arms_of(study(MODES))
    few = arms_of(study(('mixed_kd', 'baseline')))
    assert {a: look(a, few) for a in few} == {a: look(a, all_arms) for a in few}
    assert len({look(a, all_arms)[0] for a in all_arms}) == len({look(a, all_arms)[1] for a in all_arms}) == 7
    own = arms_of(study(MODES) + [make_record('full_kd', s, arm=f'own{k}') for k in (1, 2) for s in (0, 1)])
    assert list(own)[-2:] == ['own1', 'own2'] and look('own1', own)[0] == look('full_kd', own)[0]
    assert len({look(a, own) for a in own}) == 9


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    fg.curves_figure(study())._repr_png_()
    assert dict(matplotlib.rcParams) == before


def written_with(units, items, **more):
    "A run whose units and predictions are these."
    record = make_record(**more)
    folder = write_run(record)
    folder.write_table(
        'units', pd.DataFrame(dict(split='test', set='clean', cluster='D', metric='map') | units)
    )
    folder.write_table('predictions', pd.DataFrame(dict(split='test') | items))
    return record


def test_run_worst_gives_ids_when_the_corpus_is_not_at_hand(monkeypatch):
    items = dict(
        split=['test'] * 3 + ['dev'],
        unit='Q3',
        item=list('abcx'),
        label=[1, 0, 0, 1],
        score=[0.1, 2.0, 1.0, 9.0],
    )
    record = written_with(dict(unit=['Q3', 'Q4'], value=[1 / 3, 1.0]), items)
    monkeypatch.setattr(tables, 'corpus_of', lambda record: None)
    assert tables.run_worst(record, 1).iloc[0].tolist() == [0.333, 'Q3', 'b', 'a']
    rows = [
        dict(question_id='Q3', sentence_id=i, question='why?', sentence=f'text {i}', label=int(i == 'a'))
        for i in 'abc'
    ]
    corpus = Corpus('made', 'folder', 'made', {'test': rows}, '0' * 64)
    monkeypatch.setattr(tables, 'corpus_of', lambda record: corpus)
    assert tables.run_worst(record, 1).iloc[0].tolist() == [0.333, 'why?', 'text b', 'text a']


@pytest.mark.parametrize('higher, unit', [(True, 'low'), (False, 'high')])
def test_worst_follows_the_metrics_direction(monkeypatch, higher, unit):
    monkeypatch.setattr(tables, 'corpus_of', lambda record: None)
    items = dict(unit=['low', 'high'], item='a', label=[1, 1], score=[0.1, 0.2])
    record = written_with(dict(unit=['low', 'high'], value=[0.1, 0.9]), items, higher=higher)
    assert tables.run_worst(record, 1)['question'].tolist() == [unit]


def test_texts_come_from_the_runs_own_corpus_only():
    from kdnotes.tasks.sources import load_corpus

    corpus = load_corpus('answer_selection', 'embedded')
    assert tables.corpus_of(make_record() | dict(corpus_sha256=corpus.sha256)).splits == corpus.splits
    assert tables.corpus_of(make_record()) is None
    assert tables.corpus_of(make_record(corpus='embedded') | dict(corpus='/nowhere')) is None


def test_questions_that_are_not_scored_are_counted_too(tmp_path, project):
    "WikiQA has more questions than MAP is a mean of: in all others no order is better than another."
    with at_home(with_evidence(tmp_path / 'home', project)):
        said = written_report('wikiqa').setting[-1]
    counts = dict(dev=122, test=237), dict(dev=174, test=396)
    assert said == f'Scored on {phrase("setting.jinja", "scored_on", *counts, "question")}.'

"""A study's figures: made from committed records alone and the same to the last byte, readable in print,
and where their numbers are missing a reason instead.
"""

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from handmade import make_record, units_of
from kdnotes.report import figures as fg
from kdnotes.stats import evidence as ev
from kdnotes.report import plotting as pt
from kdnotes.stats import tables as tb
from kdnotes.stats.intervals import mean_interval
from kdnotes.report.report import report_of
from kdnotes.core.arms import MODES
from kdnotes.core.files import evidence_path, figures_path, read_json, sha256_file
from kdnotes.core.render import Reason, phrase, reason
from kdnotes.results.runs import write_csv
from kdnotes.results.store import RecordError
from kdnotes.results.table import above_rest, arms_of

OKABE_ITO = {'#000000', '#E69F00', '#56B4E9', '#009E73', '#F0E442', '#0072B2', '#D55E00', '#CC79A7'}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def moments(layers):
    ranges = dict(elements=100, zero=0.1, not_finite=0.0, log2_from=-30, shares=[0.1, 0.2, 0.3, 0.2, 0.1])
    return [dict(step=s, scale=1.0, layers=[dict(layer=n) | ranges for n in layers]) for s in (10, 50)]


def run(mode='full_kd', seed=0, value=0.7, train_s=40.0, energy=None, **parameters):
    "A whole record with everything a figure can show."
    r = make_record(mode, seed, value, train_s, **parameters)
    unknown = dict.fromkeys(('gpu_percent', 'device_mib', 'power_w'))
    line = [
        dict(elapsed_s=t, cpu_percent=150.0 + seed, host_mib=900.0 + t) | unknown
        for t in np.linspace(0.5, train_s, 20)
    ]
    spent = dict(student=train_s - 2, evaluation=1.0, synchronisation=0.5)
    return r | dict(
        timeline=line,
        gradients=moments(['embeddings', 'layer 0', 'head']),
        energy=r['energy'] | dict(device_j=energy),
        phases={name: dict(seconds=seconds) for name, seconds in spent.items()},
    )


def study(modes=tuple(MODES), seeds=(0, 1, 2), **parameters):
    "Differences of arms vary a little by seed: intervals of effect sizes are slow where they do not."
    return [
        run(m, s, 0.7 + 0.02 * i + 0.003 * s + 1e-5 * (i * (s + 1) % 5), 40 / (i + 1) + s, **parameters)
        for i, m in enumerate(modes)
        for s in seeds
    ]


def commit(found, name='made'):
    "As committed evidence; the order of the lines is the records'."
    evidence_path().mkdir(parents=True, exist_ok=True)
    (evidence_path() / f'{name}.records.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in found))
    its = units_of(
        [r | dict(primary=dict(value=0.5 if (v := r['primary']['value']) is None else v)) for r in found]
    )
    write_csv(evidence_path() / f'{name}.units.csv.gz', its, 6)
    return found


def figures(*names):
    "The figures of these names, all without one, made from what is committed."
    made = fg.draw_evidence(ev.evidence('made'), figures_path('made'), names or fg.FIGURES)
    return {f.name: f for f in made}


def evidence_of(found):
    commit(found)
    return ev.evidence('made')


def words(labels):
    return [t.get_text() for t in labels]


LATER = {'fidelity', 'reliability'}  # need predictions, which `commit` writes none of
NOT_HERE = LATER | {'labels'}  # the runs of `study` have as many labels


@pytest.mark.exhaustive
def test_a_rebuild_elsewhere_is_the_same_to_the_last_byte(tmp_path):
    found = commit(study())
    some = sorted(r['run_id'] for r in found if r['mode'] in ('full_student', 'full_kd'))
    folder = tmp_path / 'elsewhere'
    made = fg.draw_evidence(ev.evidence('made', some), folder)
    assert {f.name for f in made if not f.path} == {'accuracy_energy', *NOT_HERE}
    assert [f.name for f in made] == list(fg.FIGURES) and not figures_path('made').exists()
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = read_json(folder / 'MANIFEST.json')
    assert set(manifest) == {f'{n}.svg' for n in fg.FIGURES}
    for f in made:
        entry = manifest[f'{f.name}.svg']
        assert entry['run_ids'] == some == list(f.run_ids) and entry.get('reason') == f.reason
        assert (f.path is None) == bool(f.reason) == (f.caption == '')
        assert entry['sha256'] == (sha256_file(f.path) if f.path else None)
        module, _, name = entry['producer'].rpartition('.')
        assert callable(getattr(sys.modules[module], name))
        if f.path:
            f.path.unlink()
    random.Random(77).shuffle(found)
    commit(found)
    code = (
        'import matplotlib, pathlib; '
        "matplotlib.rcParams.update({'font.size': 20, 'axes.grid': False, 'lines.linewidth': 9})\n"
        'from kdnotes.report.figures import draw_evidence\n'
        'from kdnotes.stats.evidence import evidence\n'
        f"draw_evidence(evidence('made', {some[::-1]}), pathlib.Path({str(folder)!r}))"
    )
    env = {**os.environ, 'PYTHONHASHSEED': '77', 'TZ': 'Asia/Tokyo'}
    subprocess.run([sys.executable, '-c', code], check=True, env=env)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_a_missing_run_is_refused_by_name():
    commit(study(seeds=(0,)))
    with pytest.raises(RecordError, match='run gone-s0'):
        ev.evidence('made', ['gone-s0'])
    with pytest.raises(ev.ReportError, match='no finished runs'):
        ev.evidence('nothing')


def test_energy_is_shown_of_the_arms_that_have_it():
    "An older figure goes where there is no energy any more."
    commit(study(('baseline', 'full_kd'), (0, 1), energy=1e4) + study(('full_student',), (0, 1)))
    made = figures('accuracy_energy')['accuracy_energy']
    assert made.path.exists() and 'energy of the device' in made.caption
    assert 'full_student' not in made.caption.split('in bold: ')[1].split('.')[0]
    commit(study(seeds=(0, 1)))
    assert figures('accuracy_energy')['accuracy_energy'].reason == "no run has 'energy J': made up"
    assert not made.path.exists()


@pytest.mark.exhaustive
def test_runs_of_another_machine_are_excluded_from_times():
    n = len(commit(study(seeds=(0, 1))))
    commit(study(seeds=(0, 1)) + [run('full_kd', 2, torch='2.14.0')])
    for f in figures('throughput', 'phases', 'effects', 'accuracy_time').values():
        assert f.path and f' {n} runs on torch 2.13.0; excluded: ' in f.caption
    commit(study(seeds=(0, 1)) + study(seeds=(2, 3), torch='2.14.0'))
    made = figures()
    without = {n for n, f in made.items() if f.path is None} - NOT_HERE
    assert without == {'accuracy_time', 'accuracy_energy', 'throughput', 'phases', 'timelines'}
    said = str(reason('equal_machines', a=('torch 2.13.0',), b=('torch 2.14.0',)))
    assert all(said in made[n].reason for n in without)
    assert 'training time' not in made['effects'].caption


def test_one_seed_is_drawn_hollow_and_said():
    e = evidence_of(study(seeds=(0,)))
    markers = {m for _, m in pt.LOOKS.values()}
    lines = [line for axes in fg.effects_figure(e).axes for line in axes.lines]
    marks = [line for line in lines if line.get_marker() in markers]
    assert len(marks) == 14 and {line.get_markerfacecolor() for line in marks} == {'white'}
    assert phrase('reasons.jinja', 'one_seed') in fg.FIGURES['effects'].caption(e)
    assert '1 seed per arm.' in fg.FIGURES['throughput'].caption(e)


def test_the_forest_shows_the_comparisons_numbers():
    e = evidence_of(study())
    left, right = fg.effects_figure(e).axes
    shown = [c for kind, c in e.comparisons if kind != 'procedures']
    of_times = [c.speedup['train_s'] for c in shown]
    for axes, values in ((left, [c.difference for c in shown]), (right, of_times)):
        drawn = [
            (bar.lines[0].get_xdata()[0], *bar.lines[2][0].get_segments()[0][:, 0]) for bar in axes.containers
        ]
        np.testing.assert_allclose(drawn, [(i.estimate, i.low, i.high) for i in values])
    names = words(left.get_yticklabels())
    assert names[0] == 'chain, one factor per step' and 'controls' in names
    assert 'kd (3 seeds)\nfull_student → full_kd' in names and left.yaxis_inverted()


def test_an_interval_of_few_units_looks_different_and_is_explained():
    "Its length cannot be held against that of an interval from a variance."
    e = evidence_of(study(('baseline', 'full_student', 'full_kd', 'mixed_kd')))
    kd = next(c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd'))
    few = replace(kd, differing=3, difference=replace(kd.difference, se=None))
    assert few.few_differ and not kd.few_differ
    bounded = replace(e, comparisons=[(k, few if c is kd else c) for k, c in e.comparisons])

    def dashed(figure):
        bars = [bar for axes in figure.axes for bar in axes.containers]
        return [n for n, bar in enumerate(bars) if bar.lines[2][0].get_linestyle()[0][1] is not None]

    figure = fg.effects_figure(bounded)
    shown = [c.b for kind in fg._GROUPS for k, c in e.comparisons if k == kind]
    assert dashed(figure) == [shown.index('full_kd')]  # of the accuracy alone
    (legend,) = figure.legends
    assert 'few units differ' in legend.get_texts()[1].get_text()
    assert 'Dashed bars' in fg.FIGURES['effects'].caption(bounded)
    plain = fg.effects_figure(e)
    assert not dashed(plain) and not plain.legends and 'Dashed' not in fg.FIGURES['effects'].caption(e)


@pytest.mark.exhaustive
def test_many_arms_can_be_told_apart():
    "Fourteen arms of one mode: a row each, in accuracy and in courses, and no name on another."
    names = [f'full_student_rate_{n}e-5' for n in range(1, 15)]
    rates = [dict(arm=arm, learning_rate=1e-5 * (n + 2)) for n, arm in enumerate(names)]
    e = evidence_of(
        [run('full_student', s, 0.7 + n / 99, 41 + n, **a) for n, a in enumerate(rates) for s in (0, 1)]
    )
    accuracy, curves = fg.accuracy_figure(e.records, e.values), fg.curves_figure(e.records)
    rows = accuracy.axes[0].get_yticklabels()
    assert sorted(words(rows)) == sorted(f'{a} (2)' for a in names)
    bold = [t.get_text() for t in rows if t.get_fontweight() == 'bold']
    assert bold == [f'{a} (2)' for a in e.arms if a in tb.pareto_front(e.values)]
    labels = [axes.yaxis.label for axes in curves.axes[::2]]
    assert [text.replace('\n', '_') for text in words(labels)] == list(e.arms)
    for figure, texts in ((accuracy, rows), (curves, labels)):
        assert figure.get_figheight() <= 9.2
        boxes = [t.get_window_extent() for t in texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize('higher', [True, False])
def test_trivial_models_are_rows_and_the_best_a_line(higher):
    found = study(('baseline',), (0, 1))
    e = evidence_of([r | dict(primary=r['primary'] | dict(higher_is_better=higher)) for r in found])
    floors = {'random order': 0.39, 'shared words': 0.52}
    metric, cost = fg.accuracy_figure(e.records, e.values, baselines=floors).axes
    names = words(metric.get_yticklabels())
    assert names == ['baseline (2)', 'trivial: random order', 'trivial: shared words']
    (line,) = (x for x in metric.lines if x.get_linestyle() == ':')
    assert line.get_xdata()[0] == (0.52 if higher else 0.39)
    assert not any(x.get_linestyle() == ':' for x in cost.lines)
    left, right = metric.get_xlim()
    assert left < 0.39 and right > 0.52


@pytest.mark.parametrize(
    'first, second, row',
    [
        (dict(mode='full_student'), dict(max_grad_norm=3.0), 'kd* (2 seeds)\nfull_student → full_kd'),
        (
            dict(mode='full_kd'),
            dict(arm='own', max_grad_norm=3.0),
            'other settings* (2 seeds)\nfull_kd → own',
        ),
    ],
)
def test_a_step_of_several_settings_has_a_star(first, second, row):
    e = evidence_of([run(seed=s, **how) for how in (first, second) for s in (0, 1)])
    assert words(fg.effects_figure(e).axes[0].get_yticklabels())[1:] == [row]
    assert 'A star ' in fg.FIGURES['effects'].caption(e)


def test_with_a_gpu_its_load_and_power_are_shown():
    gpu = dict(gpu_percent=80.0, power_w=300.0)
    found = study(('baseline', 'mixed_kd'), (0, 1))
    e = evidence_of([r | dict(timeline=[p | gpu for p in r['timeline']]) for r in found])
    figure = fg.timelines_figure(e)
    assert [a.get_title('left') for a in figure.axes] == ['GPU busy, %', 'power, W', '', '']


def old(mode='full_kd', seed=0):
    "A record without phases, timeline and gradients."
    return make_record(mode, seed)


NULL = dict(metrics={'test': {'map': None}})


@pytest.mark.parametrize(
    'found, reasons',
    [
        (lambda: study(('baseline',)), dict(effects='no_step', labels='labels_not_varied')),
        (
            lambda: [old(seed=0), old(seed=1)],
            dict(timelines='no_timeline', phases='no_phases', gradients='no_gradients'),
        ),
        (
            lambda: [r | NULL | dict(primary=r['primary'] | dict(value=None)) for r in study(seeds=(0, 1))],
            dict(accuracy_time=reason('no_quantity', title='train s', why=(), notes=())),
        ),
    ],
)
def test_what_is_not_there_is_a_reason(found, reasons):
    commit(found())
    made = figures(*reasons, 'throughput')
    assert made.pop('throughput').path
    for name, f in made.items():
        why = reasons[name] if isinstance(reasons[name], Reason) else reason(reasons[name])
        assert f.path is None and f.reason == str(why)


def test_captions_take_their_numbers_from_the_records():
    commit(study(seeds=(0, 1)) + study(('baseline',), (2,)))
    made = {name: f.caption for name, f in figures().items()}
    for name, fact in (
        ('accuracy_time', '2 to 3 seeds per arm.'),
        ('accuracy_time', '40 questions'),
        ('effects', '95% intervals'),
        ('effects', 'MAP on the test set of embedded'),
        ('gradients', 'pooled over 15 runs and steps 10 to 50'),
    ):
        assert fact in made[name]
    assert all(c == '' or c.endswith('.') and '  ' not in c and '..' not in c for c in made.values())


def phrase_of(note):
    text = str(note)
    return text[:1].upper() + text[1:]


def watts(note):
    details = dict(note.details)
    return [*details['at_rest']], [*details['running']]


def test_energy_says_what_it_is_of():
    drawn = dict(device_j=9000.0, mean_w=150.0, idle_w=120.0, source='NVML energy counter')
    alone = dict(wall_s=60.0, idle_gpu_percent=0.0)
    commit(
        [
            r | dict(energy=r['energy'] | drawn, machine=(r['machine'] or {}) | alone)
            for r in study(seeds=(0, 1))
        ]
    )
    caption = figures('accuracy_energy')['accuracy_energy'].caption
    e = ev.evidence('made')
    said = report_of(e, {})
    note = next(n for n in said.notes if n.code == 'energy_of_device')
    assert f'{phrase_of(note)}.' in caption and watts(note) == (['120'], ['150'])
    warmer = [r | dict(energy=r['energy'] | dict(idle_w=118.0)) for r in e.records[:1]]
    assert watts(tb.energy_note(warmer + e.records[1:])) == (['118', '120'], ['150'])
    assert set(said.arms['above rest J']) == {'1800 ± 0'} and set(said.arms['energy J']) == {'9000 ± 0'}
    rapl = [
        r | dict(energy=r['energy'] | dict(source='RAPL counters of all CPU packages')) for r in e.records
    ]
    assert tb.energy_note(rapl).code == 'energy_of_packages'
    others = [r | dict(machine=r['machine'] | dict(idle_gpu_percent=40.0)) for r in e.records]
    assert above_rest(others[0]) is None and not watts(tb.energy_note(others))[0]
    assert tb.energy_note([r | dict(energy=r['energy'] | dict(device_j=None)) for r in e.records]) is None


@functools.cache
def lesson_evidence():
    "A study with a long name among its arms."
    own = [run('mixed_kd', s, arm='mixed_kd_with_a_long_name') for s in (0, 1)]
    own = [r | dict(energy=r['energy'] | dict(device_j=1e4), trained_rows=dict(train=64)) for r in own]
    others = [r | dict(trained_rows=dict(train=20_000)) for r in study(seeds=(0, 1), energy=12345.0)]
    commit(others + own)
    return ev.evidence('made')


def lesson_figures():
    "Every figure of that study."
    for name, f in fg.FIGURES.items():
        if name not in LATER:
            yield name, f.draw(lesson_evidence())


@pytest.mark.exhaustive
def test_every_figure_can_be_read_in_print():
    "Nothing is small, cut off, or over another."
    for name, figure in lesson_figures():
        FigureCanvasAgg(figure).draw()
        assert figure.get_figwidth() == pt.WIDTH and figure.get_figheight() <= 9.2, name
        texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
        assert min(t.get_fontsize() for t in texts) >= pt.SMALLEST, name
        for axes in filter(lambda axes: axes.get_visible(), figure.axes):
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                boxes = [t.get_window_extent() for t in labels if t.get_visible() and t.get_text()]
                boxes = sorted(boxes, key=lambda b: (b.x0, b.y0))
                assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes)), (name, words(labels))
            if name != 'gradients':
                assert_inside(axes, name)
        for dpi in (72, 600):
            with pt.theme():
                figure.set_dpi(dpi)
                FigureCanvasAgg(figure).draw()
                box = figure.get_tightbbox(figure.canvas.get_renderer())
            assert min(box.x0, box.y0) >= -0.001, (name, dpi, box)
            assert box.x1 <= figure.get_figwidth() + 0.001 and box.y1 <= figure.get_figheight() + 0.001, name


def assert_inside(axes, name):
    for line in axes.lines:
        if line.get_transform() != axes.transData or line.get_marker() in '|_':
            # a line through the whole panel; the end of a bar, which may reach below no time at all
            continue
        for values, limits in zip(line.get_data(), (axes.get_xlim(), axes.get_ylim())):
            values = np.asarray(values, float)
            low, high = sorted(limits)
            inside = (low - 1e-9 <= values) & (values <= high + 1e-9)
            assert (inside | ~np.isfinite(values)).all(), name


def test_arms_have_okabe_and_itos_colours_and_a_marker_each():
    colours, markers = map(set, zip(*pt.LOOKS.values()))
    assert colours <= OKABE_ITO and len(colours) == len(markers) == len(MODES)


def beaten(p: tuple, others, higher: bool) -> bool:
    "Is a point no faster and no better than another?"
    return any((x <= p[0] and (y >= p[1] if higher else y <= p[1])) and (x, y) != p for x, y in others)


@pytest.mark.parametrize('higher', [True, False])
def test_the_pareto_front_is_what_nothing_beats(higher):
    rng = random.Random(5)
    for _ in range(100):
        points = {
            f'a{i}': (rng.randrange(1, 6), rng.randrange(1, 6) / 10) for i in range(rng.randrange(1, 8))
        }
        values = {
            arm: dict(train_s=mean_interval([x]), primary=mean_interval([y]))
            for arm, (x, y) in points.items()
        } | dict(no_time=dict(primary=mean_interval([9.0])))

        kept = {p for p in points.values() if not beaten(p, points.values(), higher)}
        assert {points[a] for a in tb.pareto_front(values, higher_is_better=higher)} == kept


def test_phases_add_up_to_the_run_and_its_teachers_training():
    r = run('full_kd', train_s=40.0)
    r['time'] |= dict(teacher_train_s=100.0, wall_s=50.0)
    parts = ev.phase_seconds(r)
    assert (
        parts['waiting for other ranks'] == 0.5
        and parts['training'] == 37.5
        and parts["the teacher's own training"] == 100
    )
    # from the cache: not this run's time
    assert parts['start and end'] == pytest.approx(50 - 38 - 1) and parts['teacher signal'] == 2
    r['phases'] |= dict(teacher=dict(seconds=5.0))
    assert sum(ev.phase_seconds(r).values()) == pytest.approx(150)


def test_gradients_are_pooled_layer_by_layer():
    table = ev.pooled_gradients(
        moments(['head'])
        + [
            dict(
                step=90,
                scale=1.0,
                layers=[
                    dict(layer='head', elements=100, zero=0.0, not_finite=0.0, log2_from=-34, shares=[0.9])
                ],
            )
        ]
    )
    # of what is not zero
    assert table.index.tolist() == list(range(-34, -21, 2)) and table['head'].tolist() == pytest.approx(
        [1 / 3, 0, *np.array([0.1, 0.2, 0.3, 0.2, 0.1]) * 2 / 3 / 0.9]
    )


def test_the_gradients_share_below_fp16_is_written_beside_its_layer():
    commit(study(('mixed_kd',)))
    figure = fg.gradients_figure(ev.evidence('made'))
    # bins from -30, -28 and -26, of what is not zero
    assert [t.get_text() for t in figure.axes[0].texts] == ['66.7%'] * 3


def test_arms_come_in_the_order_of_the_chain():
    found = study(seeds=range(6))
    random.Random(1).shuffle(found)
    assert tuple(arms_of(found)) == tuple(MODES) == tuple(pt.LOOKS)
    assert all([r['seed'] for r in runs] == list(range(6)) for runs in arms_of(found).values())


def test_reliability_has_a_panel_an_arm_and_the_bins_as_they_are():
    arms = arms_of(study(seeds=(0,)))
    rows = [(0.05, 0.045, 0.04, 0.05, 500), (0.5, 0.45, None, None, 40), (0.95, 0.855, 0.8, 0.9, 1)]
    columns = ['confidence', 'accuracy', 'low', 'high', 'n']
    bins = pd.concat([pd.DataFrame(rows, columns=columns).assign(arm=arm) for arm in arms])
    figure = fg.reliability_figure(bins, arms)
    panels = [a for a in figure.axes if a.get_visible()]
    assert [a.get_title('left') for a in panels] == list(arms)
    point = panels[0].containers[1].lines[0]
    assert point.get_xdata().tolist() == [0.05, 0.5, 0.95]
    assert point.get_ydata().tolist() == pytest.approx([0.045, 0.45, 0.855])
    assert [bar.get_height() for bar in panels[0].patches] == pytest.approx([0.3, 0.3 * 40 / 500, 0.3 / 500])


def test_fidelity_shows_the_arms_there_are_in_their_order():
    arms = arms_of(study(seeds=(0,)))
    order = itertools.product(('agreement', 'distance'), ('mixed_kd', 'full_student'))
    rows = [dict(arm=arm, measure=m, estimate=0.8, low=None, high=None) for m, arm in order]
    figure = fg.fidelity_figure(pd.DataFrame(rows), arms)
    assert [a.get_xlabel() for a in figure.axes] == ['agreement', 'distance']
    assert words(figure.axes[0].get_yticklabels()) == ['full_student', 'mixed_kd']
    for draw in (fg.fidelity_figure, fg.reliability_figure):
        with pytest.raises(pt.NotDrawn):
            draw(pd.DataFrame(columns=['arm', 'measure']), arms)


def scored(r, noise, items='abcde', best=(2.0, -1, -2, -3, -4), label=None):
    "Predictions of a run: forty questions with scores that are a little different in each."
    n = len(items)
    label = np.tile([1] + [0] * (n - 1), 40) if label is None else label
    score = np.tile(best, 40) + noise.normal(0, 0.1, 40 * n)
    about = dict(run_id=r['run_id'], arm=r['arm'], seed=r['seed'], split='test')
    unit = np.repeat([f'Q{i}' for i in range(40)], n)
    return pd.DataFrame(about | dict(unit=unit, item=np.tile(list(items), 40), label=label, score=score))


def predict(monkeypatch, table):
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: table)


def with_teachers(found, taught='full_kd'):
    teachers = {r['seed']: r['run_id'] for r in found if r['mode'] == 'baseline'}
    return commit(
        [r | dict(teacher_run_id=teachers[r['seed']] if r['mode'] == taught else None) for r in found]
    )


def test_predictions_become_fidelity_and_reliability(monkeypatch):
    found = with_teachers(study(('baseline', 'full_kd'), (0, 1)))
    noise = np.random.default_rng(0)
    table = pd.concat([scored(r, noise) for r in found])
    predict(monkeypatch, table)
    e = ev.evidence('made')
    agree = tb.agreement_table(e)
    assert set(agree['arm']) == {'full_kd'} and not agree['control'].any()
    assert agree.set_index('measure')['estimate']['same candidate first'] == 1
    bins = tb.reliability_table(e)
    assert bins.groupby('arm')['n'].sum().to_dict() == dict(baseline=400, full_kd=400)
    made = figures('fidelity', 'reliability')
    assert made['fidelity'].path and '40 questions' in made['reliability'].caption
    first = made['reliability'].path.read_bytes()
    predict(monkeypatch, table.assign(score=[float(f'{s:.5g}') for s in table['score']]))
    assert figures('reliability')['reliability'].path.read_bytes() == first
    predict(monkeypatch, table.assign(split='dev'))
    assert figures('fidelity')['fidelity'].reason


def test_the_control_of_distillation_stands_beside_it(monkeypatch):
    found = with_teachers(study(('baseline', 'full_student', 'full_kd'), (0, 1, 2)))
    rng = np.random.default_rng(0)
    far = dict(baseline=0.2, full_student=1.5, full_kd=0.4)

    def scores(r, mode):
        drawn = scored(r, rng, best=(2.0, 1, 0, -1, -2))
        return drawn.assign(score=drawn['score'] + rng.normal(0, far[mode], 200))

    def sentence():
        return next(s for s in report_of(e, {}).sentences if s.startswith('The ranking of'))

    predict(monkeypatch, pd.concat([scores(r, r['mode']) for r in found]))
    e = ev.evidence('made')
    rows = tb.agreement_table(e)
    assert rows.groupby('arm')['control'].first().to_dict() == dict(full_kd=False, full_student=True)
    faces = [c.lines[0].get_markerfacecolor() for c in fg.fidelity_figure(rows, e.arms).axes[0].containers]
    assert faces.count('white') == 1 and len(faces) == 2
    caption = fg.FIGURES['fidelity'].caption(e)
    assert 'full_student' in caption
    (nearer,) = tb.teacher_agreement(e)
    difference = nearer.gain.difference
    tau = rows[rows['measure'] == "Kendall's tau"].set_index('arm')['estimate']
    assert difference.estimate == pytest.approx(tau['full_kd'] - tau['full_student'])
    assert sentence().startswith(
        "The ranking of full_kd is closer to the teacher's than that of full_student"
    )
    assert (
        f'{difference:+.3f}' in sentence()
        and '3 seeds and 40 questions; p' in sentence()
        and nearer.p_holm < 0.05
    )
    # the other way round, and nothing
    swap = dict(full_kd='full_student', full_student='full_kd', baseline='baseline')
    predict(monkeypatch, pd.concat([scores(r, swap[r['mode']]) for r in found]))
    assert sentence().startswith("The ranking of full_kd is less close to the teacher's")
    predict(monkeypatch, pd.concat([scores(r, 'full_kd') for r in found]))
    assert 'is not significantly closer' in sentence()


@pytest.mark.parametrize('target', ['classes', 'number'])
def test_predictions_of_classes_and_of_numbers(monkeypatch, target):
    "Four classes have probabilities, so they are drawn; numbers have none, and one sentence says so."
    about = dict(task='text_classification', target=target, metric='accuracy')
    found = with_teachers(study(('baseline', 'full_kd'), (0, 1), **about))
    noise = np.random.default_rng(0)
    label = np.tile([1, 0, 0, 0], 40)
    label[:16] = np.tile([0, 1, 0, 0], 4)  # a tenth is another class
    predict(monkeypatch, pd.concat([scored(r, noise, 'abcd', (2.0, 0, 0, 0), label) for r in found]))
    made = figures('fidelity', 'reliability')
    if target == 'number':
        assert made['fidelity'].reason == made['reliability'].reason
        assert 'number' in made['fidelity'].reason
        return
    e = ev.evidence('made')
    assert tb.agreement_table(e).set_index('measure')['estimate']['same class'] == 1
    bins = tb.reliability_table(e)
    assert bins.groupby('arm')['n'].sum().tolist() == [80, 80]  # an example a prediction
    # the highest of four probabilities, about 0.71; nine of ten predictions are right
    assert bins['confidence'].between(0.6, 0.8).all()
    assert (bins['accuracy'] * bins['n']).sum() == pytest.approx(0.9 * 160)
    assert 'correct predictions by the probability of the predicted class' in made['reliability'].caption

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
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from handmade import make_record, units_of
from kinds import one_of_each
from kdnotes.analysis import figures as fg
from kdnotes.analysis import evidence as ev
from kdnotes.analysis import tables as tb
from kdnotes.core.arms import MODES
from kdnotes.core.files import evidence_path, figures_path
from kdnotes.analysis.plotting import LOOKS, SMALLEST, STYLE, WIDTH, NotDrawn, arms_of, figure_bytes
from kdnotes.core.files import read_json, sha256_file
from kdnotes.records.store import RecordError, write_csv
from kdnotes.analysis.report import report_of
from kdnotes.analysis.evidence import ReportError
from kdnotes.analysis.tables import pareto_front
from kdnotes.records.schema import of_this_schema
from kdnotes.analysis.intervals import mean_interval

OKABE_ITO = {'#000000', '#E69F00', '#56B4E9', '#009E73', '#F0E442', '#0072B2', '#D55E00', '#CC79A7'}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def moments(layers):
    return [
        dict(
            step=s,
            scale=1.0,
            layers=[
                dict(
                    layer=n,
                    elements=100,
                    zero=0.1,
                    not_finite=0.0,
                    log2_from=-30,
                    shares=[0.1, 0.2, 0.3, 0.2, 0.1],
                )
                for n in layers
            ],
        )
        for s in (10, 50)
    ]


def run(mode='full_kd', seed=0, value=0.7, train_s=40.0, energy=None, **parameters):
    "A whole record with everything a figure can show."
    r = of_this_schema(make_record(mode, seed, value, train_s, **parameters) | dict(schema=1), 'a test')
    line = [
        dict(
            elapsed_s=t,
            cpu_percent=150.0 + seed,
            host_mib=900.0 + t,
            gpu_percent=None,
            device_mib=None,
            power_w=None,
        )
        for t in np.linspace(0.5, train_s, 20)
    ]
    return r | dict(
        timeline=line,
        gradients=moments(['embeddings', 'layer 0', 'head']),
        energy=r['energy'] | dict(device_j=energy),
        phases=dict(
            student=dict(seconds=train_s - 2), evaluation=dict(seconds=1.0), synchronisation=dict(seconds=0.5)
        ),
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


def files(made):
    return {f.name: f.path.read_bytes() for f in made if f.path}


def test_a_rebuild_elsewhere_is_the_same_to_the_last_byte(home):
    found = commit(study())
    first = files(fg.study_figures('made'))
    manifest = (figures_path('made') / 'MANIFEST.json').read_bytes()
    assert set(first) == set(fg.FIGURES) - {'accuracy_energy', *NOT_HERE}
    for seed in ('77',):
        random.Random(seed).shuffle(found)
        commit(found)
        code = (
            "import matplotlib; "
            "matplotlib.rcParams.update({'font.size': 20, 'axes.grid': False, 'lines.linewidth': 9})\nfrom "
            "kdnotes.analysis.figures import study_figures; study_figures('made')"
        )
        for old in figures_path('made').iterdir():
            old.unlink()
        subprocess.run(
            [sys.executable, '-c', code],
            check=True,
            env={**os.environ, 'PYTHONHASHSEED': seed, 'TZ': 'Asia/Tokyo'},
        )
        assert {n: (figures_path('made') / f'{n}.svg').read_bytes() for n in first} == first
        assert (figures_path('made') / 'MANIFEST.json').read_bytes() == manifest


LATER = {'fidelity', 'reliability'}  # need predictions, which `commit` writes none of
NOT_HERE = LATER | {'labels'}  # the runs of `study` have as many labels


def test_a_missing_run_is_refused_by_name():
    commit(study(seeds=(0,)))
    with pytest.raises(RecordError, match='run gone-s0'):
        fg.study_figures('made', ['gone-s0'])
    with pytest.raises(ReportError, match='no finished runs'):
        fg.study_figures('nothing')
    assert not figures_path('made').exists()


def test_the_manifest_binds_every_figure_made_or_not(tmp_path):
    found = commit(study())
    some = sorted(r['run_id'] for r in found if r['mode'] in ('full_student', 'full_kd'))
    made = fg.study_figures('made', some, tmp_path / 'elsewhere')
    manifest = read_json(tmp_path / 'elsewhere' / 'MANIFEST.json')
    assert (
        set(manifest) == {f'{n}.svg' for n in fg.FIGURES}
        and [f.name for f in made] == list(fg.FIGURES)
        and not figures_path('made').exists()
    )
    for f in made:
        entry = manifest[f'{f.name}.svg']
        assert (
            entry['run_ids'] == some == list(f.run_ids)
            and entry.get('reason') == f.reason
            and (f.path is None) == bool(f.reason) == (f.caption == '')
        )
        assert entry['sha256'] == (sha256_file(f.path) if f.path else None)
        module, _, name = entry['producer'].rpartition('.')
        assert callable(getattr(sys.modules[module], name))


def test_energy_that_was_not_measured_is_no_figure_and_a_reason():
    commit(study(seeds=(0, 1)))
    found = figures('accuracy_energy')
    assert (
        found['accuracy_energy'].path is None
        and found['accuracy_energy'].reason == "no run has 'energy J': made up"
    )
    commit(study(seeds=(0, 1), energy=1e4))
    found = figures('accuracy_energy')
    assert (
        found['accuracy_energy'].path.exists() and 'energy of the device' in found['accuracy_energy'].caption
    )
    commit(study(seeds=(0, 1)))
    figures('accuracy_energy')
    assert not (figures_path('made') / 'accuracy_energy.svg').exists()


def test_energy_of_some_arms_is_shown_for_these():
    commit(study(('baseline', 'full_kd'), (0, 1), energy=1e4) + study(('full_student',), (0, 1)))
    made = figures('accuracy_energy')['accuracy_energy']
    assert made.path and 'full_student' not in made.caption.split('means: ')[1].split('.')[0]


def test_a_run_of_another_machine_is_excluded_from_times():
    commit(study(seeds=(0, 1)) + [run('full_kd', 2, torch='2.14.0')])
    made = figures('throughput', 'phases', 'effects', 'accuracy_time')
    n = len(study(seeds=(0, 1)))
    for name in ('throughput', 'phases', 'effects', 'accuracy_time'):
        assert (
            made[name].path
            and f'Times, memory and energy are of the {n} runs made with torch 2.13.0; excluded: '
            in made[name].caption
        )


def test_two_machines_with_equally_many_runs_share_no_times():
    commit(study(seeds=(0, 1)) + study(seeds=(2, 3), torch='2.14.0'))
    made = figures()
    without = {n for n, f in made.items() if f.path is None}
    assert without - NOT_HERE == {'accuracy_time', 'accuracy_energy', 'throughput', 'phases', 'timelines'}
    assert all(
        'as many runs were made with torch 2.13.0 as with torch 2.14.0' in made[n].reason
        for n in without - NOT_HERE
    )
    assert 'training time' not in made['effects'].caption


def test_one_seed_is_drawn_hollow_and_said():
    commit(study(seeds=(0,)))
    e = ev.evidence('made')
    figure = fg.effects_figure(e)
    marks = [
        line
        for axes in figure.axes
        for line in axes.lines
        if line.get_marker() in {m for _, m in LOOKS.values()}
    ]
    assert len(marks) == 14 and {line.get_markerfacecolor() for line in marks} == {'white'}
    made = figures('effects', 'throughput')
    assert (
        'Hollow markers rest on a single seed' in made['effects'].caption
        and 'One seed an arm.' in made['throughput'].caption
    )


def test_the_forest_shows_the_comparisons_numbers():
    commit(study())
    e = ev.evidence('made')
    left, right = fg.effects_figure(e).axes
    shown = [c for kind, c in e.comparisons if kind != 'procedures']
    for axes, values in (
        (left, [c.difference for c in shown]),
        (right, [c.speedup['train_s'] for c in shown]),
    ):
        drawn = [
            (container.lines[0].get_xdata()[0], *container.lines[2][0].get_segments()[0][:, 0])
            for container in axes.containers
        ]
        np.testing.assert_allclose(drawn, [(i.estimate, i.low, i.high) for i in values])
    names = [t.get_text() for t in left.get_yticklabels()]
    assert (
        names[0] == 'the chain, one factor a step'
        and 'controls' in names
        and 'kd (3 seeds)\nfull_student → full_kd' in names
    )
    assert [t for t in left.get_yticks()] == sorted(left.get_yticks()) and left.yaxis_inverted()


def test_an_interval_of_few_units_looks_different_and_is_explained():
    "Its length cannot be held against that of an interval from a variance."
    commit(study(('baseline', 'full_student', 'full_kd', 'mixed_kd')))
    e = ev.evidence('made')
    kd = next(c for _, c in e.comparisons if (c.a, c.b) == ('full_student', 'full_kd'))
    few = replace(kd, differing=3, difference=replace(kd.difference, se=None))
    assert few.few_differ and not kd.few_differ
    bounded = replace(e, comparisons=[(k, few if c is kd else c) for k, c in e.comparisons])

    def dashed(figure):
        return [
            bar.lines[2][0].get_linestyle()[0][1] is not None
            for axes in figure.axes
            for bar in axes.containers
        ]

    figure = fg.effects_figure(bounded)
    place = [c.b for kind, c in e.comparisons if kind in fg._GROUPS].index('full_kd')
    assert [n for n, is_dashed in enumerate(dashed(figure)) if is_dashed] == [place]  # of the accuracy alone
    (legend,) = figure.legends
    assert 'few units differ' in legend.get_texts()[1].get_text()
    assert 'Dashed bars' in fg.FIGURES['effects'].caption(bounded)
    plain = fg.effects_figure(e)
    assert not any(dashed(plain)) and not plain.legends
    assert 'Dashed' not in fg.FIGURES['effects'].caption(e)


def test_many_arms_can_be_told_apart():
    "Fourteen arms of one mode: a row each, in accuracy and in courses, and no name on another."
    names = [f'full_student_rate_{n}e-5' for n in range(1, 15)]
    commit(
        [
            run('full_student', s, 0.7 + n / 99, 40 + n, arm=a, learning_rate=1e-5 * (n + 1))
            for n, a in enumerate(names)
            for s in (0, 1)
        ]
    )
    e = ev.evidence('made')
    accuracy = fg.accuracy_figure(e.records, e.values)
    curves = fg.curves_figure(e.records)
    for figure in (accuracy, curves):
        assert figure.get_figheight() <= 9.2
    rows = [t for t in accuracy.axes[0].get_yticklabels()]
    assert sorted(t.get_text() for t in rows) == sorted(f'{a} (2)' for a in names)
    bold = [t.get_text() for t in rows if t.get_fontweight() == 'bold']
    assert bold == [f'{a} (2)' for a in e.arms if a in pareto_front(e.values)]
    labels = [axes.yaxis.label for axes in curves.axes[::2]]
    assert [t.get_text().replace('\n', '_') for t in labels] == list(e.arms)
    for texts in (rows, labels):
        boxes = [t.get_window_extent() for t in texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize('higher', [True, False])
def test_trivial_models_are_rows_and_the_best_a_line(higher):
    records = [
        r | dict(primary=r['primary'] | dict(higher_is_better=higher)) for r in study(('baseline',), (0, 1))
    ]
    commit(records)
    e = ev.evidence('made')
    floors = {'random order': 0.39, 'shared words': 0.52}
    figure = fg.accuracy_figure(e.records, e.values, floors=floors)
    metric, cost = figure.axes
    names = [t.get_text() for t in metric.get_yticklabels()]
    assert names == ['baseline (2)', 'floor: random order', 'floor: shared words']
    (line,) = (x for x in metric.lines if x.get_linestyle() == ':')
    assert line.get_xdata()[0] == (0.52 if higher else 0.39)
    assert not any(x.get_linestyle() == ':' for x in cost.lines)
    left, right = metric.get_xlim()
    assert left < 0.39 and right > 0.52


def test_a_confounded_step_has_a_star():
    commit([run('full_student', s) for s in (0, 1)] + [run('full_kd', s, max_grad_norm=3.0) for s in (0, 1)])
    made = figures('effects')
    assert (
        fg._effect_name(ev.evidence('made').comparisons[0][1]) == 'kd*'
        and 'A star:' in made['effects'].caption
    )


def test_a_variant_of_other_settings_is_named_so():
    commit(
        [run('full_kd', s) for s in (0, 1)]
        + [run('full_kd', s, arm='own', max_grad_norm=3.0) for s in (0, 1)]
    )
    e = ev.evidence('made')
    assert [fg._effect_name(c) for _, c in e.comparisons] == ['other settings*']
    assert [t.get_text() for t in fg.effects_figure(e).axes[0].get_yticklabels()] == [
        'variants',
        'other settings* (2 seeds)\nfull_kd → own',
    ]


def test_with_a_gpu_its_load_and_power_are_shown():
    commit(
        [
            r | dict(timeline=[p | dict(gpu_percent=80.0, power_w=300.0) for p in r['timeline']])
            for r in study(('baseline', 'mixed_kd'), (0, 1))
        ]
    )
    figure = fg.timelines_figure(ev.evidence('made'))
    assert [a.get_title('left') for a in figure.axes[:2]] == ['GPU busy, %', 'power, W'] and len(
        figure.axes
    ) == 4


def test_nothing_to_compare_is_a_reason():
    commit(study(('baseline',)))
    assert figures('effects')['effects'].reason.startswith('the study has no two arms')


def test_records_of_the_first_schema_have_no_phases_timeline_and_gradients():
    commit([of_this_schema(make_record('full_kd', s) | dict(schema=1), 'a test') for s in (0, 1)])
    made = figures()
    assert {n for n, f in made.items() if f.path} == {'accuracy_time', 'curves', 'throughput'}
    assert (
        made['timelines'].reason == 'no record has a timeline'
        and 'phases' in made['phases'].reason
        and 'gradient_stats=0' in made['gradients'].reason
    )


def test_null_accuracy_is_a_reason():
    commit(
        [
            r | dict(primary=r['primary'] | dict(value=None), metrics={'test': {'map': None}})
            for r in study(seeds=(0, 1))
        ]
    )
    made = figures('accuracy_time', 'throughput')
    assert (
        made['accuracy_time'].reason == "no run has 'train s': there is no primary metric to show it with"
        and made['throughput'].path
    )


def test_captions_take_their_numbers_from_the_records():
    commit(study(seeds=(0, 1)) + study(('baseline',), (2,)))
    made = {name: f.caption for name, f in figures().items()}
    assert (
        '2 to 3 seeds an arm.' in made['accuracy_time']
        and '40 questions' in made['accuracy_time']
        and '95% intervals' in made['effects']
        and 'MAP on the test set of embedded' in made['effects']
    )
    assert 'pooled over 15 runs and steps 10 to 50' in made['gradients']
    assert all(c == '' or c.endswith('.') and '  ' not in c and '..' not in c for c in made.values())


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
    note = next(n for n in said.notes if n.startswith('Energy is that of the device alone'))
    assert f'{note}.' in caption and 'host (processor, memory, fans) was not metered' in note
    assert 'At rest it drew 120 to 120 W, and in the runs 150 to 150 W' in note
    assert set(said.arms['above rest J']) == {'1800 ± 0'} and set(said.arms['energy J']) == {'9000 ± 0'}
    rapl = [
        r | dict(energy=r['energy'] | dict(source='RAPL counters of all CPU packages')) for r in e.records
    ]
    assert 'without the memory (DRAM)' in tb.energy_note(rapl)
    others = [r | dict(machine=r['machine'] | dict(idle_gpu_percent=40.0)) for r in e.records]
    assert ev.above_rest(others[0]) is None and 'was not read while nobody used it' in tb.energy_note(others)
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


def test_every_figure_can_be_read_in_print():
    for name, figure in lesson_figures():
        FigureCanvasAgg(figure).draw()
        assert figure.get_figwidth() == WIDTH and figure.get_figheight() <= 9.2, name
        texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
        assert min(t.get_fontsize() for t in texts) >= SMALLEST, name


@pytest.mark.parametrize('dpi', one_of_each([72, 110, 600]))
def test_nothing_lies_outside_a_figure(dpi):
    for name, figure in lesson_figures():
        with matplotlib.rc_context(STYLE):
            figure.set_dpi(dpi)
            FigureCanvasAgg(figure).draw()
            box = figure.get_tightbbox(figure.canvas.get_renderer())
        assert (
            box.x0 >= -0.001
            and box.y0 >= -0.001
            and box.x1 <= figure.get_figwidth() + 0.001
            and box.y1 <= figure.get_figheight() + 0.001
        ), (name, box)


def test_no_two_labels_of_an_axis_overlap():
    for name, figure in lesson_figures():
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes:
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                boxes = [
                    t.get_window_extent()
                    for t in labels
                    if t.get_visible() and t.get_text() and axes.get_visible()
                ]
                assert not any(
                    a.overlaps(b) for a, b in itertools.pairwise(sorted(boxes, key=lambda b: (b.x0, b.y0)))
                ), (name, [t.get_text() for t in labels])


def test_no_run_is_drawn_outside_its_axes():
    for name, figure in lesson_figures():
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes:
            if not axes.get_visible() or name == 'gradients':
                continue
            x0, x1 = sorted(axes.get_xlim())
            y0, y1 = sorted(axes.get_ylim())
            for line in axes.lines:
                if line.get_transform() != axes.transData or line.get_marker() in '|_':
                    # a line through the whole panel; the end of a bar, which may reach below no time at all
                    continue
                x, y = (np.asarray(v, float) for v in line.get_data())
                ok = np.isfinite(x) & np.isfinite(y)
                assert (
                    (x[ok] >= x0 - 1e-9).all()
                    and (x[ok] <= x1 + 1e-9).all()
                    and (y[ok] >= y0 - 1e-9).all()
                    and (y[ok] <= y1 + 1e-9).all()
                ), name


def test_arms_have_okabe_and_itos_colours_and_a_marker_each():
    assert {colour for colour, _ in LOOKS.values()} <= OKABE_ITO and len(set(LOOKS.values())) == len(
        {m for _, m in LOOKS.values()}
    ) == len({c for c, _ in LOOKS.values()}) == len(MODES)


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
        assert {points[a] for a in pareto_front(values, higher_is_better=higher)} == kept


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


def test_drawing_a_figure_alone_without_its_numbers_says_why():
    commit([of_this_schema(make_record('full_kd') | dict(schema=1), 'a test')])
    e = ev.evidence('made')
    for draw in (fg.effects_figure, fg.timelines_figure, fg.phases_figure, fg.gradients_figure):
        with pytest.raises(NotDrawn) as why:
            draw(e)
        assert '\n' not in str(why.value)


def test_a_figure_in_a_notebook_is_a_png():
    commit(study(seeds=(0,)))
    figure = fg.timelines_figure(ev.evidence('made'))
    assert figure._repr_png_()[:4] == b'\x89PNG' and figure_bytes(figure, 'png') == figure_bytes(
        figure, 'png'
    )


def test_arms_come_in_the_order_of_the_chain():
    found = study(seeds=range(6))
    random.Random(1).shuffle(found)
    assert list(arms_of(found)) == [
        'baseline',
        'parallel_baseline',
        'mixed_baseline',
        'full_student',
        'mixed_student',
        'full_kd',
        'mixed_kd',
    ]
    assert all([r['seed'] for r in runs] == list(range(6)) for runs in arms_of(found).values())


def bins(arms, n=(500, 40, 3)):
    return pd.DataFrame(
        [
            dict(
                arm=arm,
                confidence=c,
                accuracy=c * 0.9,
                low=None if k == 1 else c * 0.8,
                high=None if k == 1 else c,
                n=k,
            )
            for arm in arms
            for c, k in zip((0.05, 0.5, 0.95), (*n[:2], 1))
        ]
    )


def test_reliability_has_a_panel_an_arm_and_the_bins_as_they_are():
    arms = arms_of(study(seeds=(0,)))
    figure = fg.reliability_figure(bins(arms), arms)
    panels = [a for a in figure.axes if a.get_visible()]
    assert [a.get_title('left') for a in panels] == list(arms)
    point = panels[0].containers[1].lines[0]
    assert point.get_xdata().tolist() == [0.05, 0.5, 0.95] and point.get_ydata() == pytest.approx(
        [0.045, 0.45, 0.855]
    )
    assert [bar.get_height() for bar in panels[0].patches] == pytest.approx([0.3, 0.3 * 40 / 500, 0.3 / 500])


def test_fidelity_shows_the_arms_there_are_in_their_order():
    arms = arms_of(study(seeds=(0,)))
    table = pd.DataFrame(
        [
            dict(arm=arm, measure=m, estimate=0.8, low=None, high=None)
            for m in ('agreement', 'distance')
            for arm in ('mixed_kd', 'full_student')
        ]
    )
    figure = fg.fidelity_figure(table, arms)
    assert [a.get_xlabel() for a in figure.axes] == ['agreement', 'distance'] and [
        t.get_text() for t in figure.axes[0].get_yticklabels()
    ] == ['full_student', 'mixed_kd']
    for draw, columns in ((fg.fidelity_figure, ['arm', 'measure']), (fg.reliability_figure, ['arm'])):
        with pytest.raises(NotDrawn):
            draw(pd.DataFrame(columns=columns), arms)


def test_predictions_become_fidelity_and_reliability(monkeypatch):
    found = commit(
        [
            r | dict(teacher_run_id='baseline-s0' if r['mode'] == 'full_kd' else None)
            for r in study(('baseline', 'full_kd'), (0, 1))
        ]
    )
    teacher = next(r['run_id'] for r in found if r['mode'] == 'baseline')
    commit([r | dict(teacher_run_id=teacher if r['mode'] == 'full_kd' else None) for r in found])
    rng = np.random.default_rng(0)

    def scores(r):
        return pd.DataFrame(
            dict(
                run_id=r['run_id'],
                arm=r['arm'],
                seed=r['seed'],
                split='test',
                unit=np.repeat([f'Q{i}' for i in range(40)], 5),
                item=np.tile(list('abcde'), 40),
                label=np.tile([1, 0, 0, 0, 0], 40),
                score=np.tile([2.0, -1, -2, -3, -4], 40) + rng.normal(0, 0.1, 200),
            )
        )

    table = pd.concat([scores(r) for r in found])
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: table)
    e = ev.evidence('made')
    agree = tb.agreement_table(e)
    assert (
        set(agree['arm']) == {'full_kd'}
        and not agree['control'].any()
        and agree.set_index('measure')['estimate']['same candidate first'] == 1
    )
    bins = tb.reliability_table(e)
    assert set(bins['arm']) == {'baseline', 'full_kd'} and bins.groupby('arm')['n'].sum().tolist() == [
        400,
        400,
    ]
    made = figures('fidelity', 'reliability')
    assert (
        made['fidelity'].path and made['reliability'].path and '40 questions' in made['reliability'].caption
    )
    monkeypatch.setattr(
        tb, 'predictions', lambda study, ids: table.assign(score=[float(f'{s:.5g}') for s in table['score']])
    )
    again = figures('reliability')['reliability']
    assert again.path.read_bytes() == made['reliability'].path.read_bytes()
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: table.assign(split='dev'))
    assert "hold nothing of split 'test'" in figures('fidelity')['fidelity'].reason


def test_the_control_of_distillation_stands_beside_it(monkeypatch):
    modes = ('baseline', 'full_student', 'full_kd')
    found = study(modes, (0, 1, 2))
    teachers = {r['seed']: r['run_id'] for r in found if r['mode'] == 'baseline'}
    found = [r | dict(teacher_run_id=teachers[r['seed']] if r['mode'] == 'full_kd' else None) for r in found]
    commit(found)
    rng = np.random.default_rng(0)
    noise = dict(baseline=0.2, full_student=1.5, full_kd=0.4)

    def scores(r):
        return pd.DataFrame(
            dict(
                run_id=r['run_id'],
                split='test',
                unit=np.repeat([f'Q{i}' for i in range(40)], 5),
                item=np.tile(list('abcde'), 40),
                label=np.tile([1, 0, 0, 0, 0], 40),
                score=np.tile([2.0, 1, 0, -1, -2], 40) + rng.normal(0, noise[r['mode']], 200),
            )
        )

    table = pd.concat([scores(r) for r in found])
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: table)
    e = ev.evidence('made')
    rows = tb.agreement_table(e)
    assert rows.groupby('arm')['control'].first().to_dict() == dict(full_kd=False, full_student=True)
    tau = rows[rows['measure'] == "Kendall's tau"].set_index('arm')['estimate']
    figure = fg.fidelity_figure(rows, e.arms)
    faces = [c.lines[0].get_markerfacecolor() for c in figure.axes[0].containers]
    assert faces.count('white') == 1 and len(faces) == 2
    caption = fg.FIGURES['fidelity'].caption(e)
    assert 'Hollow: full_student, the same students without distillation' in caption
    (nearer,) = tb.nearer_to_teacher(e)
    difference = nearer.gain.difference
    assert difference.estimate == pytest.approx(tau['full_kd'] - tau['full_student'])
    (said,) = (s for s in report_of(e, {}).sentences if 'ranking' in s)
    assert said.startswith('Distillation brought full_kd nearer to its teacher\'s ranking than full_student')
    assert f'{difference:+.3f}' in said and '3 seeds and 40 questions; p' in said
    # the other way round, and nothing
    turned = {r['run_id']: r['mode'] for r in found}
    swap = dict(full_kd='full_student', full_student='full_kd', baseline='baseline')
    other = {(r['mode'], r['seed']): r['run_id'] for r in found}
    away = table.assign(
        run_id=[
            other[swap[turned[i]], next(r['seed'] for r in found if r['run_id'] == i)]
            for i in table['run_id']
        ]
    )
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: away)
    assert 'farther from its teacher' in next(s for s in report_of(e, {}).sentences if 'ranking' in s)
    same = pd.concat([scores(r | dict(mode='full_kd')).assign(run_id=r['run_id']) for r in found])
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: same)
    assert 'was not detected' in next(s for s in report_of(e, {}).sentences if 'ranking' in s)


@pytest.mark.parametrize('target', ['classes', 'number'])
def test_predictions_of_classes_and_of_numbers(monkeypatch, target):
    "Four classes have probabilities, so they are drawn; numbers have none, and one sentence says so."
    found = study(
        ('baseline', 'full_kd'), (0, 1), task='text_classification', target=target, metric='accuracy'
    )
    teacher = found[0]['run_id']
    commit([r | dict(teacher_run_id=teacher if r['mode'] == 'full_kd' else None) for r in found])
    rng = np.random.default_rng(0)

    def scores(r):
        score = np.tile([2.0, 0, 0, 0], 40) + rng.normal(0, 0.1, 160)
        label = np.tile([1, 0, 0, 0], 40)
        label[:16] = np.tile([0, 1, 0, 0], 4)  # a tenth is another class
        unit = np.repeat([f'Q{i}' for i in range(40)], 4)
        its = dict(split='test', unit=unit, item=np.tile(list('abcd'), 40), label=label, score=score)
        return pd.DataFrame(its | dict(run_id=r['run_id'], arm=r['arm'], seed=r['seed']))

    table = pd.concat([scores(r) for r in found])
    monkeypatch.setattr(tb, 'predictions', lambda study, ids: table)
    made = figures('fidelity', 'reliability')
    if target == 'number':
        assert made['fidelity'].reason == made['reliability'].reason
        assert 'predictions are numbers, which have no probability' in made['fidelity'].reason
        return
    e = ev.evidence('made')
    agree = tb.agreement_table(e).set_index('measure')['estimate']
    assert agree['same class'] == 1
    bins = tb.reliability_table(e)
    assert bins.groupby('arm')['n'].sum().tolist() == [80, 80]  # an example a prediction
    # the highest of four probabilities, about 0.71; nine of ten predictions are right
    assert bins['confidence'].between(0.6, 0.8).all()
    assert (bins['accuracy'] * bins['n']).sum() == pytest.approx(0.9 * 160)
    assert 'right predictions by the probability of the predicted class' in made['reliability'].caption

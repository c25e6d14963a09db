"Pictures of a search: what they show is what the trials are, and where there is nothing to show, a reason."

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from kdnotes.analysis.plotting import SMALLEST, NotDrawn, figure_bytes
from kdnotes.core.files import read_json, sha256_file
from kdnotes.search import pictures as pc
from kdnotes.search.front import Objective, Trial, front

SCORE = Objective('score', 'dev accuracy', True)
ERROR = Objective('score', 'dev nll', False)
SIZE = Objective('params', 'parameters', False)
TIME = Objective('latency_ms', 'latency, ms', False)
BOTH = [SCORE, SIZE]
CAUSES = ['threshold', 'memory', 'time', 'curve', 'not finite', 'killed', 'failed', 'refused', 'my own']


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


@dataclass(frozen=True)
class Numbers:
    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Choices:
    choices: tuple


@dataclass(frozen=True)
class Drawn:
    of: Any

    def distribution(self):
        return self.of


SPACE = {f'rate_{n}': Drawn(Numbers(1e-8, 1e-2, log=True)) for n in range(6)}
SPACE |= {f'layers_{n}': Drawn(Numbers(1, 20)) for n in range(6)}
SPACE |= {f'share_{n}': Drawn(Numbers(0.0, 1.0)) for n in range(5)}
SPACE |= dict(seed=Drawn(Choices(tuple(range(1, 101)))))


def drawn_from(space, rng):
    setting = {}
    for name, parameter in space.items():
        d = parameter.distribution()
        if isinstance(d, Choices):
            setting[name] = d.choices[int(rng.integers(len(d.choices)))]
        elif d.log:
            setting[name] = float(np.exp(rng.uniform(np.log(d.low), np.log(d.high))))
        elif isinstance(d.low, int):
            setting[name] = int(rng.integers(d.low, d.high + 1))
        else:
            setting[name] = float(rng.uniform(d.low, d.high))
    return setting


def search(n=60, seed=0, space=SPACE, lower=False):
    "A search in which every cause comes, each trial after the one before it on two workers."
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        score, size = rng.uniform(0.5, 0.8), float(np.exp(rng.uniform(np.log(1e6), np.log(5e7))))
        cause = CAUSES[i // 3 % len(CAUSES)] if i % 3 == 2 else None
        if cause not in (None, 'threshold'):
            score = None
        elif cause:
            score = 0.45
        if lower and score:
            score = 1 / score
        values = dict(score=score, params=size, latency_ms=size / 1e6 if score else None)
        started = cause not in ('memory', 'refused')
        found.append(
            Trial(
                i,
                drawn_from(space, rng),
                'infeasible' if cause else 'complete',
                values,
                f'run-{i}' if started else None,
                (cause,) if cause else (),
                seconds=50.0 if started else None,
                started_s=60.0 * (i // 2) if started else None,
                ended_s=60.0 * (i // 2) + 50 if started else None,
            )
        )
    return found


def figures(trials, objectives=BOTH, space=SPACE, **more):
    return {
        'front': pc.front_figure(trials, objectives, **more),
        'parallel': pc.parallel_figure(trials, objectives, space),
        'slices': pc.slices_figure(trials, objectives, space),
        'timeline': pc.timeline_figure(trials, objectives),
        'causes': pc.causes_figure(trials),
    }


def texts(figure):
    return [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


@pytest.mark.parametrize('lower', [False, True])
def test_pictures_of_eighteen_parameters_fit_a_page_and_no_number_lies_on_another(lower):
    objectives = [ERROR if lower else SCORE, SIZE]
    trials = search(lower=lower)
    seeds = {'run-0': dict(score=[0.6, 0.7])}
    for name, figure in figures(trials, objectives, threshold=1.9 if lower else 0.5, seeds=seeds).items():
        assert figure.get_figheight() <= 9.2, name
        assert min(t.get_fontsize() for t in texts(figure)) >= SMALLEST, name
        assert not overlapping(figure), name


def overlapping(figure):
    "Numbers of a vertical axis that lie on each other."
    found = []
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        shown = [t for t, y in zip(axes.get_yticklabels(), axes.get_yticks()) if low <= y <= high]
        boxes = [(t.get_text(), t.get_window_extent()) for t in shown if t.get_text() and t.get_visible()]
        found += [(a[0], b[0]) for a, b in itertools.combinations(boxes, 2) if a[1].overlaps(b[1])]
    return found


@pytest.mark.parametrize('lower', [False, True])
def test_the_strips_name_lies_on_no_number(lower):
    few = {name: SPACE[name] for name in ('rate_0', 'layers_0')}
    trials = search(lower=lower)
    for factor in np.linspace(0.5, 2, 6):
        moved = [
            replace(t, values={k: v and v * factor for k, v in t.values.items()})
            for t in trials
            if t.number % 9
        ]
        assert not overlapping(pc.slices_figure(moved, [ERROR if lower else SCORE, SIZE], few)), factor


def test_kinds_differ_by_more_than_colour():
    assert {pc.kind_of(t) for t in search()} == {'complete', *CAUSES[:-1], 'other cause'}
    assert len({marker for _, marker in pc.LOOKS.values()}) >= len(pc.LOOKS) - 1
    same = [k for k, (_, marker) in pc.LOOKS.items() if marker == pc.LOOKS['front'][1]]
    assert same == ['front', 'complete']  # dark and light


def stairs(axes):
    "The corners of the solid staircase."
    (line,) = [x for x in axes.lines if x.get_drawstyle() == 'steps-post' and x.get_linestyle() == '-']
    return list(zip(*line.get_data()))


def test_the_staircase_is_the_front():
    trials = search()
    (axes,) = pc.front_figure(trials, BOTH).axes
    best = [(t.values['params'], t.values['score']) for t in front(trials, BOTH)]
    assert stairs(axes)[:-1] == best
    assert stairs(axes)[-1] == (axes.get_xlim()[1], best[-1][1])
    assert axes.get_xscale() == 'log'
    blue = pc.LOOKS['front'][0]
    points = axes.collections[0]
    faces = [to_hex(c).upper() for c in points.get_facecolors()]
    drawn = {tuple(p) for p, face in zip(points.get_offsets().tolist(), faces) if face == blue}
    assert drawn == set(best)
    again = pc.front_figure(trials, BOTH)
    assert figure_bytes(again) == figure_bytes(pc.front_figure(trials, BOTH))
    legend = [t.get_text() for t in pc.front_figure(trials, BOTH, threshold=0.5).legends[0].get_texts()]
    assert f'front ({len(best)})' in legend and 'threshold 0.5000' in legend


def test_means_over_seeds_make_the_solid_staircase():
    trials = search()
    best = front(trials, BOTH)
    seeds = {t.run_id: dict(score=[t.values['score'], t.values['score'] - 0.1]) for t in best}
    (axes,) = pc.front_figure(trials, BOTH, seeds=seeds).axes
    assert [y for _, y in stairs(axes)[:-1]] == pytest.approx([t.values['score'] - 0.05 for t in best])
    bars = [c.lines[2][0].get_segments()[0][:, 1] for c in axes.containers]
    np.testing.assert_allclose(
        bars, [(t.values['score'] - 0.1, t.values['score']) for t in trials if t in best]
    )


@pytest.mark.parametrize('lower', [False, True])
def test_a_trial_without_a_score_stands_at_the_worse_end_at_its_true_size(lower):
    trials = search(lower=lower)
    diverged = replace(trials[2], values=dict(score=900.0 if lower else -900.0, params=2e6))
    (axes,) = pc.front_figure([*trials, replace(diverged, number=99)], [ERROR if lower else SCORE, SIZE]).axes
    points = axes.collections[0].get_offsets()
    assert len(points) == len(trials) + 1
    complete = [t.values['score'] for t in trials if t.state == 'complete']
    worse = points[:, 1] > max(complete) if lower else points[:, 1] < min(complete)
    lost = [t.values['params'] for t in trials if t.values['score'] is None]
    edge = max(points[:, 1]) if lower else min(points[:, 1])
    assert sorted(points[np.isclose(points[:, 1], edge), 0]) == pytest.approx(sorted([*lost, 2e6]))
    assert worse.sum() >= len(lost) + 1
    known = [t.values['score'] for t in trials if t.values['score'] is not None]
    away = edge - max(known) if lower else min(known) - edge
    assert away > 0.1 * np.ptp(complete)
    assert axes.get_yticklabels()[-1].get_text() == 'none, far'
    reach = abs(np.diff(axes.get_ylim())[0])
    assert reach < 5 * np.ptp(complete)  # what diverged does not press the others together


def test_three_objectives_are_two_panels_without_a_staircase():
    figure = pc.front_figure(search(), [SCORE, SIZE, TIME])
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ['parameters (lower is better)', 'latency, ms (lower is better)']
    assert not any(line.get_drawstyle() == 'steps-post' for axes in figure.axes for line in axes.lines)


def test_a_history_is_drawn_as_the_median_of_its_repeats():
    repeats = [np.array([0.1, 0.2, 0.6]), np.array([0.3, 0.4, 0.5]), np.array([0.2, 0.9, 0.9])]
    (axes,) = pc.hypervolume_figure(dict(mine=[np.array([0.5])], random=repeats)).axes
    line = next(x for x in axes.lines if len(x.get_xdata()) == 3)
    np.testing.assert_allclose(line.get_data(), [[1, 2, 3], np.median(repeats, axis=0)])
    band = axes.collections[-1].get_paths()[0].vertices
    for n, shares in enumerate(np.transpose(repeats)):
        at = band[band[:, 0] == n + 1, 1]
        assert (at.min(), at.max()) == pytest.approx((shares.min(), shares.max()))
    assert 'random (3 repeats)' in [t.get_text() for t in axes.get_legend().get_texts()]


def optunas(**numbers):
    optuna = pytest.importorskip('optuna', reason='importances are its own')
    return {
        name: Drawn(optuna.distributions.FloatDistribution(low, high))
        for name, (low, high) in numbers.items()
    }


def drifting(n, rng, decides):
    "A search that goes somewhere while scores rise; one parameter decides of them or none does."
    found = []
    for i in range(n):
        t = i / n
        right = float(rng.uniform(0, 1))
        drifts = float(np.clip(t + rng.normal(0, 0.1), 0, 1))
        score = t + (2 * right if decides else 0.0) + float(rng.normal(0, 0.05))
        values = dict(score=score, params=1.0)
        found.append(Trial(i, dict(right=right, drifts=drifts), 'complete', values, f'run-{i}'))
    return found


def test_what_a_learning_search_drifted_to_is_no_finding():
    space = optunas(right=(0.0, 1.0), drifts=(0.0, 1.0))
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        table = pc.importances(drifting(60, rng, True), [SCORE], space).set_index('parameter')
        assert table['is_chance'].to_dict() == dict(right=False, drifts=True)
        table = pc.importances(drifting(60, rng, False), [SCORE], space).set_index('parameter')
        assert table['is_chance'].all()
        assert table['importance'].idxmax() == 'drifts'  # the share alone would have said so


def test_importances_of_few_trials_or_of_equal_values_are_not_drawn():
    space = optunas(right=(0.0, 1.0), drifts=(0.0, 1.0))
    trials = drifting(60, np.random.default_rng(0), True)
    table = pc.importances(trials, BOTH, space)
    assert set(table['objective']) == {'score'}  # all have one size
    _, empty = pc.importances_figure(table, BOTH).axes
    assert [t.get_text() for t in empty.texts] == ['too few trials,\nor all alike']
    few = [replace(t, values=dict(score=None, params=1.0)) if t.number >= 19 else t for t in trials]
    assert not len(pc.importances(few, [SCORE], space))
    outside = [replace(t, params=t.params | dict(right=7.0)) if t.number == 0 else t for t in trials]
    assert set(pc.importances(outside, [SCORE], space)['trials']) == {59}


def test_a_trial_below_its_threshold_tells_of_importances():
    space = optunas(right=(0.0, 1.0), drifts=(0.0, 1.0))
    trials = drifting(30, np.random.default_rng(0), True)
    told = [replace(t, state='infeasible', causes=('threshold',)) if t.number % 2 else t for t in trials]
    assert set(pc.importances(told, [SCORE], space)['trials']) == {30}


def test_places_are_on_the_scale_that_was_drawn_on():
    assert pc.place_of(1e-3, Numbers(1e-5, 1e-1, log=True)) == pytest.approx(0.5)
    assert pc.place_of(0.0, Numbers(-1.0, 3.0)) == 0.25
    assert pc.place_of('b', Choices(('a', 'b', 'c'))) == 0.5
    assert all(math.isnan(pc.place_of(v, Numbers(1e-5, 1, log=True))) for v in (None, 0, -1))


def test_trials_that_run_at_the_same_time_never_share_a_line():
    rng = np.random.default_rng(0)
    starts = np.sort(rng.uniform(0, 100, 80))
    spans = [(s, s + rng.uniform(1, 9)) for s in starts]
    found = pc.lanes(spans)
    for (a, x), (b, y) in itertools.combinations(zip(found, spans), 2):
        assert a != b or x[1] <= y[0] + 1e-6 or y[1] <= x[0] + 1e-6
    most = max(sum(s <= at < e for s, e in spans) for at in starts)
    assert max(found) + 1 == most


def test_a_timeline_says_how_busy_workers_were():
    trials = [t for t in search(12) if t.started_s is not None]
    figure = pc.timeline_figure(trials, BOTH)
    (axes,) = figure.axes
    last = max(t.ended_s for t in trials)
    busy = sum(t.seconds for t in trials) / (2 * last)
    assert f'busy {busy:.0%}' in axes.get_title(loc='left')
    assert len(axes.patches) == len(trials)
    running = replace(trials[0], state='running', started_s=last, ended_s=None)
    assert 'running (1)' in [
        t.get_text() for t in pc.timeline_figure([*trials, running], BOTH).legends[0].get_texts()
    ]


def test_causes_are_counted_by_whether_a_run_was_started():
    trials = search(60)
    table = pc.causes_table(trials)
    assert table['trials'].sum() == 20
    memory = table[table['cause'] == 'memory']
    assert memory['was'].tolist() == ['never started'] and memory['minutes'].tolist() == [0.0]
    two = [replace(trials[2], causes=('time', 'threshold'))]
    assert sorted(pc.causes_table(two)['cause']) == ['threshold', 'time']
    (axes,) = pc.causes_figure(trials).axes
    widths = [p.get_width() for p in axes.patches if p.get_width()]
    assert sum(widths) == 20


def test_a_picture_that_cannot_be_drawn_has_a_reason(tmp_path):
    few = {name: SPACE[name] for name in ('rate_0', 'layers_0')}
    empty = pc.Shown([], BOTH, few)
    lost = pc.Shown([t for t in search() if t.values['score'] is None], BOTH, few)
    one = pc.Shown(search(1), BOTH, few)
    alone = pc.Shown(search(30), [SCORE], few)
    names = [name for name in pc.PICTURES if name != 'search_importances']
    for n, (shown, drawn) in enumerate(
        [
            (empty, set()),
            (lost, {'search_timeline', 'search_causes'}),
            (one, {'search_front', 'search_slices', 'search_timeline'}),
            (alone, set(names) - {'search_front'}),
        ]
    ):
        made = pc.draw_search(shown, tmp_path / f'{n}' / 'figures', names)
        assert {f.name for f in made if f.path} == drawn
        assert all(bool(f.reason) != bool(f.path) for f in made)
        assert all(f.caption.endswith('.') for f in made if f.path)
    with pytest.raises(NotDrawn, match='no trial has ended'):
        pc.hypervolume_figure(dict(mine=[np.array([])]))


def test_the_manifest_binds_pictures_to_their_runs(tmp_path):
    trials = search(20, space=SPACE)
    space = optunas(**{f'share_{n}': (0.0, 1.0) for n in range(5)})
    folder = tmp_path / 'mine' / 'figures'
    made = pc.draw_search(pc.Shown(trials, BOTH, space, smoke=True), folder)
    manifest = read_json(folder / 'MANIFEST.json')
    assert set(manifest) == {f'{name}.svg' for name in pc.PICTURES}
    for f in made:
        entry = manifest[f'{f.name}.svg']
        assert entry['run_ids'] == sorted(t.run_id for t in trials if t.run_id)
        assert entry['sha256'] == (sha256_file(f.path) if f.path else None)
        assert callable(getattr(pc, entry['producer'].removeprefix('kdnotes.search.pictures.')))
    assert 'mean nothing' in made[0].caption
    meant = pc.draw_search(pc.Shown(trials, BOTH, space), tmp_path / 'other' / 'figures')
    for smoke, real in zip(made, meant):
        assert smoke.path.read_bytes() != real.path.read_bytes()
        assert 'mean nothing' not in real.caption

"Pictures of a search: what they show is what the trials are, and where there is nothing to show, a reason."

import itertools
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from kdnotes.report.plotting import SMALLEST, figure_bytes
from kdnotes.stats.evidence import NotDrawn
from kdnotes.core.files import read_json
from kdnotes.search import pictures as pc
from kdnotes.search.front import Objective, Trial, front

optuna = pytest.importorskip('optuna', reason='importances are its own')
SCORE = Objective('score', 'dev accuracy', True)
ERROR = Objective('score', 'dev nll', False)
SIZE = Objective('params', 'parameters', False)
TIME = Objective('latency_ms', 'latency, ms', False)
CAUSES = ['threshold', 'memory', 'time', 'curve', 'not finite', 'killed', 'failed', 'refused', 'my own']


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))


def drawn(kind, *ends, **how):
    "A parameter of a space."
    found = getattr(optuna.distributions, f'{kind}Distribution')(*ends, **how)
    return SimpleNamespace(distribution=lambda: found)


SPACE = {f'rate_{n}': drawn('Float', 1e-8, 1e-2, log=True) for n in range(6)}
SPACE |= {f'layers_{n}': drawn('Int', 1, 20) for n in range(6)}
SPACE |= {f'share_{n}': drawn('Float', 0.0, 1.0) for n in range(5)}
SPACE |= dict(seed=drawn('Categorical', tuple(range(1, 101))))
FEW = {name: SPACE[name] for name in ('rate_0', 'layers_0')}
UNIT = {name: drawn('Float', 0.0, 1.0) for name in ('right', 'drifts')}


def one_of(d, rng):
    if isinstance(d, optuna.distributions.CategoricalDistribution):
        return d.choices[int(rng.integers(len(d.choices)))]
    if isinstance(d.low, int):
        return int(rng.integers(d.low, d.high + 1))
    return float(np.exp(rng.uniform(np.log(d.low), np.log(d.high))) if d.log else rng.uniform(d.low, d.high))


def search(n=60, lower=False, space=SPACE, objectives=None, factor=1.0, **more):
    "A search in which every cause comes, each trial after the one before it on two workers."
    rng = np.random.default_rng(0)
    found = []
    for i in range(n):
        score, size = rng.uniform(0.5, 0.8), float(np.exp(rng.uniform(np.log(1e6), np.log(5e7))))
        cause = CAUSES[i // 3 % len(CAUSES)] if i % 3 == 2 else None
        if cause:
            score = 0.45 if cause == 'threshold' else None
        if score:
            score = factor / score if lower else factor * score
        started = cause not in ('memory', 'refused')
        when = dict(seconds=50.0, started_s=60.0 * (i // 2), ended_s=60.0 * (i // 2) + 50) if started else {}
        setting = {name: one_of(p.distribution(), rng) for name, p in space.items()}
        values = dict(score=score, params=size, latency_ms=size / 1e6 if score else None)
        about = (f'run-{i}' if started else None, (cause,) if cause else ())
        state = 'infeasible' if cause else 'complete'
        found.append(Trial(i, setting, state, values, *about, **when))
    return pc.Shown(found, objectives or [ERROR if lower else SCORE, SIZE], space, **more)


def overlapping(figure):
    "Numbers of a vertical axis that lie on each other."
    found = []
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        shown = [t for t, y in zip(axes.get_yticklabels(), axes.get_yticks()) if low <= y <= high]
        boxes = [(t.get_text(), t.get_window_extent()) for t in shown if t.get_text() and t.get_visible()]
        found += [(a[0], b[0]) for a, b in itertools.combinations(boxes, 2) if a[1].overlaps(b[1])]
    return found


def legend(figure):
    return [t.get_text() for t in figure.legends[0].get_texts()]


@pytest.mark.parametrize('lower', [False, True])
def test_pictures_of_eighteen_parameters_fit_a_page_and_no_number_lies_on_another(lower):
    s = search(lower=lower, threshold=1.9 if lower else 0.5, seeds={'run-0': dict(score=[0.6, 0.7])})
    for name in ('front', 'parallel', 'slices', 'timeline', 'causes'):
        figure = getattr(pc, f'{name}_figure')(s)
        assert figure.get_figheight() <= 9.2, name
        texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
        assert min(t.get_fontsize() for t in texts) >= SMALLEST, name
        assert not overlapping(figure), name
    for factor in np.linspace(0.5, 2, 6):  # the strip's name lies on no number
        assert not overlapping(pc.slices_figure(search(lower=lower, space=FEW, factor=factor))), factor


def test_kinds_differ_by_more_than_colour():
    assert {pc.kind_of(t) for t in search().trials} == {'complete', *CAUSES[:-1], 'other cause'}
    assert len({marker for _, marker in pc.LOOKS.values()}) >= len(pc.LOOKS) - 1
    same = [k for k, (_, marker) in pc.LOOKS.items() if marker == pc.LOOKS['front'][1]]
    assert same == ['front', 'complete']  # dark and light


def stairs(axes):
    "The corners of the solid staircase."
    (line,) = [x for x in axes.lines if x.get_drawstyle() == 'steps-post' and x.get_linestyle() == '-']
    return list(zip(*line.get_data()))


def test_the_staircase_is_the_front_and_that_of_means_where_there_are_more_seeds():
    s = search(threshold=0.5)
    figure = pc.front_figure(s)
    (axes,) = figure.axes
    best = front(s.trials, s.objectives)
    points = [(t.values['params'], t.values['score']) for t in best]
    assert stairs(axes) == [*points, (axes.get_xlim()[1], points[-1][1])]
    assert axes.get_xscale() == 'log'
    faces = [to_hex(c).upper() for c in axes.collections[0].get_facecolors()]
    offsets = axes.collections[0].get_offsets().tolist()
    assert {tuple(p) for p, face in zip(offsets, faces) if face == pc.LOOKS['front'][0]} == set(points)
    assert figure_bytes(pc.front_figure(s)) == figure_bytes(pc.front_figure(s))
    assert {f'front ({len(best)})', 'threshold 0.5000'} <= set(legend(figure))
    seeds = {t.run_id: dict(score=[t.values['score'], t.values['score'] - 0.1]) for t in best}
    (axes,) = pc.front_figure(search(seeds=seeds)).axes
    assert [y for _, y in stairs(axes)[:-1]] == pytest.approx([y - 0.05 for _, y in points])
    bars = [c.lines[2][0].get_segments()[0][:, 1] for c in axes.containers]
    in_order = [t.values['score'] for t in s.trials if t in best]
    np.testing.assert_allclose(bars, [(y - 0.1, y) for y in in_order])


@pytest.mark.parametrize('lower', [False, True])
def test_a_trial_without_a_score_stands_at_the_worse_end_at_its_true_size(lower):
    s = search(lower=lower)
    values = dict(score=900.0 if lower else -900.0, params=2e6)
    diverged = replace(s.trials[2], number=99, values=values)
    (axes,) = pc.front_figure(replace(s, trials=[*s.trials, diverged])).axes
    points = axes.collections[0].get_offsets()
    assert len(points) == len(s.trials) + 1
    known = [t.values['score'] for t in s.trials if t.values['score'] is not None]
    lost = [t.values['params'] for t in s.trials if t.values['score'] is None]
    edge = max(points[:, 1]) if lower else min(points[:, 1])
    assert sorted(points[np.isclose(points[:, 1], edge), 0]) == pytest.approx(sorted([*lost, 2e6]))
    complete = np.ptp([t.values['score'] for t in s.trials if t.state == 'complete'])
    assert (edge - max(known) if lower else min(known) - edge) > 0.1 * complete
    assert axes.get_yticklabels()[-1].get_text() == 'none, far'
    # what diverged does not press the others together
    assert abs(np.diff(axes.get_ylim())[0]) < 5 * complete


def test_three_objectives_are_two_panels_without_a_staircase():
    figure = pc.front_figure(search(objectives=[SCORE, SIZE, TIME]))
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
    with pytest.raises(NotDrawn, match='no trial has ended'):
        pc.hypervolume_figure(dict(mine=[np.array([])]))


def drifting(n=60, seed=0, decides=True, objectives=(SCORE,)):
    "A search that goes somewhere while scores rise; one parameter decides of them or none does."
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        t = i / n
        right, drifts = float(rng.uniform(0, 1)), float(np.clip(t + rng.normal(0, 0.1), 0, 1))
        values = dict(score=t + (2 * right if decides else 0.0) + float(rng.normal(0, 0.05)), params=1.0)
        found.append(Trial(i, dict(right=right, drifts=drifts), 'complete', values, f'run-{i}'))
    return pc.Shown(found, list(objectives), UNIT)


@pytest.mark.parametrize('seed', [0, 1])
def test_what_a_learning_search_drifted_to_is_no_finding(seed):
    table = pc.importances_of(drifting(seed=seed)).set_index('parameter')
    assert table['is_chance'].to_dict() == dict(right=False, drifts=True)
    table = pc.importances_of(drifting(seed=seed, decides=False)).set_index('parameter')
    assert table['is_chance'].all()
    assert table['importance'].idxmax() == 'drifts'  # the share alone would have said so


def test_which_trials_tell_of_importances():
    s = drifting(objectives=[SCORE, SIZE])
    assert set(pc.importances_of(s)['objective']) == {'score'}  # all have one size
    _, empty = pc.importances_figure(s).axes
    assert [t.get_text() for t in empty.texts] == ['too few trials,\nor all alike']

    def trials_of(change):
        return set(pc.importances_of(replace(s, trials=[change(t) for t in s.trials]))['trials'])

    lost = dict(score=None, params=1.0)
    assert trials_of(lambda t: replace(t, values=lost) if t.number >= 19 else t) == set()
    outside = dict(right=7.0)
    assert trials_of(lambda t: replace(t, params=t.params | outside) if t.number == 0 else t) == {59}
    below = dict(state='infeasible', causes=('threshold',))
    assert trials_of(lambda t: replace(t, **below) if t.number % 2 else t) == {60}


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
    s = search(12)
    trials = [t for t in s.trials if t.started_s is not None]
    (axes,) = pc.timeline_figure(s).axes
    last = max(t.ended_s for t in trials)
    assert f'busy {sum(t.seconds for t in trials) / (2 * last):.0%}' in axes.get_title(loc='left')
    assert len(axes.patches) == len(trials)
    running = replace(trials[0], state='running', started_s=last, ended_s=None)
    assert 'running (1)' in legend(pc.timeline_figure(replace(s, trials=[*trials, running])))


def test_causes_are_counted_by_whether_a_run_was_started():
    s = search()
    table = pc.causes_table(s.trials)
    assert table['trials'].sum() == 20
    memory = table[table['cause'] == 'memory']
    assert memory['was'].tolist() == ['never started'] and memory['minutes'].tolist() == [0.0]
    two = [replace(s.trials[2], causes=('time', 'threshold'))]
    assert sorted(pc.causes_table(two)['cause']) == ['threshold', 'time']
    (axes,) = pc.causes_figure(s).axes
    assert sum(p.get_width() for p in axes.patches) == 20


@pytest.mark.parametrize(
    'trials, objectives, drawn',
    [
        ([], [SCORE, SIZE], set()),
        ([t for t in search().trials if t.values['score'] is None], [SCORE, SIZE], {'timeline', 'causes'}),
        (search(1).trials, [SCORE, SIZE], {'front', 'slices', 'timeline'}),
        (search(30).trials, [SCORE], {'hypervolume', 'parallel', 'slices', 'timeline', 'causes'}),
    ],
)
def test_a_picture_that_cannot_be_drawn_has_a_reason(tmp_path, trials, objectives, drawn):
    made = pc.draw_search(pc.Shown(trials, objectives, FEW), tmp_path / 'mine' / 'figures')
    assert {f.name.removeprefix('search_') for f in made if f.path} - {'importances'} == drawn
    assert all(bool(f.reason) != bool(f.path) for f in made)
    assert all(f.caption.endswith('.') for f in made if f.path)
    manifest = read_json(tmp_path / 'mine' / 'figures' / 'MANIFEST.json')
    assert set(manifest) == {f'{name}.svg' for name in pc.PICTURES}
    for entry in manifest.values():
        assert entry['run_ids'] == sorted(t.run_id for t in trials if t.run_id)
        assert callable(getattr(pc, entry['producer'].removeprefix('kdnotes.search.pictures.')))

"Figures of a search: they show what the trials are, and where there is nothing to show, a reason."

import itertools
from dataclasses import replace
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from kdnotes.report.plotting import SMALLEST, figure_bytes
from kdnotes.core.files import read_json
from kdnotes.search import pictures as pc
from kdnotes.search.front import Objective, Trial, front
from kdnotes.search.result import SearchResult, Threshold

optuna = pytest.importorskip('optuna', reason='it draws figures and computes importances')
SCORE = Objective('score', 'dev accuracy', True)
EXACT = Objective('score', 'dev exact match', True, in_percent=True)
ERROR = Objective('score', 'dev nll', False)
SIZE = Objective('params', 'parameters', False)
TIME = Objective('latency_ms', 'latency, ms', False)
CAUSES = ['threshold', 'memory', 'time', 'not finite', 'killed', 'failed', 'refused']


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))


SPACE = {f'rate_{n}': dict(low=1e-8, high=1e-2, log=True) for n in range(6)}
SPACE |= {f'layers_{n}': dict(low=1, high=20, log=False, step=1) for n in range(6)}
SPACE |= {f'share_{n}': dict(low=0.0, high=1.0, log=False) for n in range(5)}
SPACE |= dict(seed=dict(choices=list(range(1, 101))))
FEW = {name: SPACE[name] for name in ('rate_0', 'layers_0')}
UNIT = {name: dict(low=0.0, high=1.0, log=False) for name in ('right', 'drifts')}


def result_of(trials, objectives=(SCORE, SIZE), space=FEW, threshold=None, seeds=None) -> SearchResult:
    "A search with these trials; seeds: run_id -> objective -> values."
    result = SearchResult(
        study='mine',
        task='answer_selection',
        corpus='embedded',
        corpus_sha256='0' * 64,
        space=space,
        space_name='own',
        objectives=tuple(objectives),
        threshold=None if threshold is None else Threshold(threshold, ''),
        trials=tuple(trials),
        fixed=dict(mode='full_kd'),
        seeds={run_id: (run_id,) * 2 for run_id in seeds or {}},
    )
    vars(result)['seed_values'] = seeds or {}  # instead of records
    return result


def sampled(of, rng):
    if 'choices' in of:
        return of['choices'][int(rng.integers(len(of['choices'])))]
    low, high = of['low'], of['high']
    if 'step' in of:
        return int(rng.integers(low, high + 1))
    return float(np.exp(rng.uniform(np.log(low), np.log(high))) if of['log'] else rng.uniform(low, high))


def search(n=60, lower=False, space=SPACE, objectives=None, **more) -> SearchResult:
    "A search with every cause, on two workers."
    rng = np.random.default_rng(0)
    found = []
    for i in range(n):
        score, size = rng.uniform(0.5, 0.8), float(np.exp(rng.uniform(np.log(1e6), np.log(5e7))))
        cause = CAUSES[i // 3 % len(CAUSES)] if i % 3 == 2 else None
        if cause:
            score = 0.45 if cause == 'threshold' else None
        if score:
            score = 1 / score if lower else score
        setting = {name: sampled(of, rng) for name, of in space.items()}
        values = dict(score=score, params=size, latency_ms=size / 1e6 if score else None)
        state = 'infeasible' if cause else 'complete'
        about = (f'run-{i}' if cause not in ('memory', 'refused') else None, (cause,) if cause else ())
        when = dict(seconds=50.0, started_s=60.0 * (i // 2), ended_s=60.0 * (i // 2) + 50)
        found.append(Trial(i, setting, state, values, *about, **when))
    return result_of(found, objectives or [ERROR if lower else SCORE, SIZE], space, **more)


def overlapping(figure):
    "Numbers of a vertical axis that overlap."
    found = []
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        shown = [t for t, y in zip(axes.get_yticklabels(), axes.get_yticks()) if low <= y <= high]
        boxes = [(t.get_text(), t.get_window_extent()) for t in shown if t.get_text() and t.get_visible()]
        found += [(a[0], b[0]) for a, b in itertools.combinations(boxes, 2) if a[1].overlaps(b[1])]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize('lower', [False, True])
def test_figures_of_eighteen_parameters_fit_a_page(lower):
    result = search(lower=lower, threshold=1.9 if lower else 0.5, seeds={'run-0': dict(score=[0.6, 0.7])})
    for name in ('front', 'hypervolume', 'parallel', 'slices'):
        figure = getattr(pc, f'{name}_figure')(result)
        assert figure.get_figheight() <= 9.2 and figure.get_figwidth() <= pc.pt.WIDTH, name
        texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
        assert min(t.get_fontsize() for t in texts) >= SMALLEST, name
        assert {to_hex(axes.get_facecolor()) for axes in figure.axes} == {'#ffffff'}, name
        assert figure_bytes(getattr(pc, f'{name}_figure')(result)) == figure_bytes(figure), name
    assert not overlapping(pc.front_figure(result))


def stairs(axes):
    "The corners of the solid staircase."
    (line,) = [x for x in axes.lines if x.get_drawstyle() == 'steps-post' and x.get_linestyle() == '-']
    return list(zip(*line.get_data()))


def test_the_staircase_is_the_front_and_that_of_means_where_there_are_more_seeds():
    result = search(threshold=0.5)
    figure = pc.front_figure(result)
    (axes,) = figure.axes
    best = front(result.trials, result.objectives)
    points = [(t.values['params'], t.values['score']) for t in best]
    assert stairs(axes) == [*points, (axes.get_xlim()[1], points[-1][1])]
    assert axes.get_xscale() == 'log'
    faces = [to_hex(c).upper() for c in axes.collections[0].get_facecolors()]
    offsets = axes.collections[0].get_offsets().tolist()
    assert {tuple(p) for p, face in zip(offsets, faces) if face == pc.LOOKS['front'][0]} == set(points)
    legend = {t.get_text() for t in figure.legends[0].get_texts()}
    assert {f'front ({len(best)})', 'threshold 0.5000'} <= legend
    seeds = {t.run_id: dict(score=[t.values['score'], t.values['score'] - 0.1]) for t in best}
    (axes,) = pc.front_figure(search(seeds=seeds)).axes
    assert [y for _, y in stairs(axes)[:-1]] == pytest.approx([y - 0.05 for _, y in points])
    (axes,) = pc.front_figure(search(seeds=seeds, objectives=[EXACT, SIZE])).axes
    assert [y for _, y in stairs(axes)[:-1]] == pytest.approx([100 * y - 5 for _, y in points]), 'in percent'


@pytest.mark.parametrize('lower', [False, True])
def test_a_trial_that_diverged_does_not_flatten_the_others(lower):
    result = search(lower=lower)
    values = dict(score=900.0 if lower else -900.0, params=2e6)
    diverged = replace(result.trials[2], number=99, values=values)
    more = result_of([*result.trials, diverged], result.objectives, SPACE)
    (axes,) = pc.front_figure(more).axes
    known = [t.values['score'] for t in result.trials if t.state == 'complete']
    low, high = axes.get_ylim()
    assert low <= min(known) <= max(known) <= high and high - low < 3 * np.ptp(known)
    lost = sum(t.values['score'] is None for t in result.trials)
    assert f'{lost} trials without a score or a cost are not shown' in pc.PICTURES['search_front'].caption(
        more
    )


def test_three_objectives_are_two_panels_without_a_staircase():
    figure = pc.front_figure(search(objectives=[SCORE, SIZE, TIME]))
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ['parameters (lower is better)', 'latency, ms (lower is better)']
    assert not any(line.get_drawstyle() == 'steps-post' for axes in figure.axes for line in axes.lines)


def drifting(n=60, seed=0, decides=True, objectives=(SCORE,), change=lambda t: t) -> SearchResult:
    "A search that moves while scores rise; one parameter decides them, or none does."
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        t = i / n
        right, drifts = float(rng.uniform(0, 1)), float(np.clip(t + rng.normal(0, 0.1), 0, 1))
        values = dict(score=t + (2 * right if decides else 0.0) + float(rng.normal(0, 0.05)), params=1.0)
        setting = dict(right=right, drifts=drifts)
        found.append(change(Trial(i, setting, 'complete', values, f'run-{i}', ended_s=float(i))))
    return result_of(found, objectives, UNIT)


@pytest.mark.parametrize('seed', [0, 1])
def test_a_drift_of_a_learning_search_is_not_an_importance(seed):
    table = pc.importances_of(drifting(seed=seed)).set_index('parameter')
    assert table['is_chance'].to_dict() == dict(right=False, drifts=True)
    table = pc.importances_of(drifting(seed=seed, decides=False)).set_index('parameter')
    assert table['is_chance'].all()
    assert table['importance'].idxmax() == 'drifts'  # the share alone would be misleading


def test_which_trials_count_for_importances():
    result = drifting(objectives=[SCORE, SIZE])
    assert set(pc.importances_of(result)['objective']) == {'score'}  # all have one size
    _, empty = pc.importances_figure(result).axes
    assert [t.get_text() for t in empty.texts] == ['too few trials,\nor all alike']

    def trials_of(change):
        return set(pc.importances_of(drifting(objectives=[SCORE, SIZE], change=change))['trials'])

    lost = dict(score=None, params=1.0)
    assert trials_of(lambda t: replace(t, values=lost) if t.number >= 19 else t) == set()
    outside = dict(right=7.0)
    assert trials_of(lambda t: replace(t, params=t.params | outside) if t.number == 0 else t) == {59}
    below = dict(state='infeasible', causes=('threshold',))
    assert trials_of(lambda t: replace(t, **below) if t.number % 2 else t) == {60}


@pytest.mark.parametrize(
    'trials, objectives, drawn',
    [
        ([], [SCORE, SIZE], set()),
        ([t for t in search(space=FEW).trials if t.values['score'] is None], [SCORE, SIZE], set()),
        (search(1, space=FEW).trials, [SCORE, SIZE], {'front'}),
        (search(30, space=FEW).trials, [SCORE], {'hypervolume', 'parallel', 'slices'}),
    ],
)
def test_a_figure_that_cannot_be_drawn_has_a_reason(tmp_path, trials, objectives, drawn):
    made = pc.draw_result(result_of(trials, objectives), tmp_path / 'mine' / 'figures')
    assert {f.name.removeprefix('search_') for f in made if f.path} - {'importances'} == drawn
    assert all(bool(f.reason) != bool(f.path) for f in made)
    assert all(f.caption.endswith('.') for f in made if f.path)
    manifest = read_json(tmp_path / 'mine' / 'figures' / 'MANIFEST.json')
    assert set(manifest) == {f'{name}.svg' for name in pc.PICTURES}
    for entry in manifest.values():
        assert entry['run_ids'] == sorted(t.run_id for t in trials if t.run_id)
        assert callable(getattr(pc, entry['producer'].removeprefix('kdnotes.search.pictures.')))

"""Does what a number format changes depend on the learning rate? A study of several rates.

Fp32 at each, and compared with it another format, other masks of dropout, or another order of sums.
"""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from kdnotes.core.config import primary_name
from kdnotes.report import plotting as pt
from kdnotes.stats.calibration import align_predictions
from kdnotes.stats.comparable import matched_pairs, unit_matrix
from kdnotes.stats.compare import Comparison, compare
from kdnotes.stats.intervals import Interval, mean_interval, ratio_interval
from kdnotes.stats.tables import score_kind
from kdnotes.stats.tests import ALPHA, holm
from .facts import about_values, distinct
from .steps import tested

# a kind of pair with fp32 -> its label in the figure
KINDS = {'format': 'the format', 'draw': 'other masks', 'order': 'another order of sums'}
CONTROLS = ('draw', 'order')
_LOOK = {'format': pt.LOOKS['mixed_student'], 'draw': pt.LOOKS['full_student'], 'order': pt.LOOKS['full_kd']}


@dataclass(frozen=True)
class Churn:
    "How far the models of two arms are from each other, one number per seed."

    seeds: tuple[int, ...]
    units: int  # of the primary metric's set
    changed: tuple[int, ...]  # units whose primary metric differs
    moved: tuple[float, ...]  # mean absolute difference of scores

    @property
    def distance(self) -> Interval:
        "How far a score moves on average, with an interval over seeds."
        return mean_interval(self.moved)


def churn(
    a: Sequence[dict],  # the runs of one arm
    b: Sequence[dict],  # of the other
    units: pd.DataFrame,
    predictions: Mapping[str, pd.DataFrame],  # run_id -> predictions
) -> Churn:
    "Pair two arms by seed and look at every unit and every score."
    rows = []
    for pair in matched_pairs(a, b)[0]:
        values = unit_matrix(pair, units, clusters=False)
        scores = align_predictions(
            [predictions[r['run_id']] for r in pair], pair[0]['primary']['set'], score_kind(pair)
        )
        changed = int((values.iloc[0] != values.iloc[1]).sum())
        rows.append((pair[0]['seed'], changed, float((scores[0] - scores[1]).abs().mean())))
    seeds, changed, moved = zip(*rows)
    return Churn(seeds, values.shape[1], changed, moved)


def churn_ratio(x: Churn, y: Churn) -> Interval:
    "How many times as far scores move in x, over the seeds that both have."
    both = sorted({*x.seeds} & {*y.seeds})
    return ratio_interval(*([m.moved[m.seeds.index(s)] for s in both] for m in (x, y)))


@dataclass(frozen=True)
class AtRate:
    "What the format and controls do at one learning rate."

    rate: float
    fp32: tuple[dict, ...]  # records
    compared: Mapping[str, Comparison]  # of KINDS -> with fp32
    moved: Mapping[str, Churn]  # the same


def at_rates(
    found: Sequence[dict],
    units: pd.DataFrame,
    predictions: Mapping[str, pd.DataFrame],  # run_id -> predictions
) -> list[AtRate]:
    "A study's students by rising rate; without the rates that have no pair at all."
    students = [r for r in found if r['factors']['network'] == 'student']
    layout = {r['run_id']: (r['settings']['ranks'], r['settings']['threads_per_rank']) for r in students}
    parts: dict[float, dict[str, list[dict]]] = {}  # rate -> 'fp32' or one of KINDS -> its runs
    for r in sorted(students, key=lambda r: (r['settings']['learning_rate'], r['seed'])):
        usual = layout[r['run_id']] == min(layout.values())
        part = 'format' if r['precision'] != 'fp32' else 'fp32' if usual else 'order'
        part = 'draw' if r['settings'].get('dropout_draw') else part
        parts.setdefault(r['settings']['learning_rate'], {}).setdefault(part, []).append(r)
    made = []
    for rate, of in parts.items():
        seeds = {part: {r['seed'] for r in runs} for part, runs in of.items()}
        paired = [kind for kind in KINDS if seeds.get('fp32', set()) & seeds.get(kind, set())]
        pairs = {kind: (of['fp32'], of[kind], units) for kind in paired}
        compared = {kind: compare(*pair) for kind, pair in pairs.items()}
        moved = {kind: churn(*pair, predictions) for kind, pair in pairs.items()}
        if pairs:
            made.append(AtRate(rate, tuple(of['fp32']), compared, moved))
    return made


def kinds_of(rates: Sequence[AtRate]) -> list[str]:  # of KINDS
    "The kinds of pair that every rate has."
    return [kind for kind in KINDS if rates and all(kind in x.moved for x in rates)]


def growth(rates: Sequence[AtRate]) -> dict[str, dict[str, dict]]:
    """How many times as far scores move at a higher rate: over all, before the last step up, and in it.
    'whole' | 'before' | 'last' -> kind -> ratio, p, p_holm, verdict; {} of a single rate.
    """
    if len(rates) < 2:
        return {}
    spans = {'whole': (rates[0], rates[-1])}
    if len(rates) > 2:
        spans |= {'before': (rates[0], rates[-2]), 'last': (rates[-2], rates[-1])}
    ratios = {
        (span, kind): churn_ratio(high.moved[kind], low.moved[kind])
        for span, (low, high) in spans.items()
        for kind in kinds_of(rates)
    }
    found: dict[str, dict[str, dict]] = {span: {} for span in spans}
    for (span, kind), of in tested(ratios, 'ratio', 1.0).items():
        found[span][kind] = of
    return found


def shape_of(grown: Mapping[str, Mapping[str, dict]]) -> dict[str, str]:
    "By kind: 'cliff': the last step up does more than all before it together | 'grows' | 'open'."
    shapes = {}
    for kind, whole in grown.get('whole', {}).items():
        shapes[kind] = 'grows' if whole['verdict'] == 'more' else 'open'
        if 'last' in grown and grown['last'][kind]['verdict'] == 'more':
            before, last = (grown[span][kind]['ratio'] for span in ('before', 'last'))
            if None not in (last.low, before.high) and last.low > before.high:
                shapes[kind] = 'cliff'
    return shapes


def beside(rates: Sequence[AtRate], control: str) -> dict[float, dict]:  # rate -> as of `growth`
    "How many times as far the format moves a score as a control does, rate by rate."
    ratios = {x.rate: churn_ratio(x.moved['format'], x.moved[control]) for x in rates}
    return tested(ratios, 'ratio', 1.0)


@pt.drawing
def rates_figure(rates: Sequence[AtRate]) -> Figure:
    "Changed questions, moved scores, and the change of the mean, by learning rate."
    titles = ['questions that change, %', 'a score moves by', f'{primary_name(rates[0].fp32[0])}, change']
    figure, panels = pt.grid(titles, 3, 2.3, 'learning rate')
    changed, moved, mean = panels.values()
    kinds = kinds_of(rates)
    for place, kind in enumerate(kinds):
        colour, marker = _LOOK[kind]
        its = [(x.rate, x.moved[kind]) for x in rates]
        shown = [
            (changed, [(rate, 100 * n / m.units) for rate, m in its for n in m.changed]),
            (moved, [(rate, far) for rate, m in its for far in m.moved]),
        ]
        for axes, points in shown:
            how = dict(errorbar=None, color=colour, marker=marker, mec=colour, label=KINDS[kind])
            pt.put_lines(axes, pd.DataFrame(points, columns=['x', 'y']), **how)
            axes.plot(*zip(*points), '.', color=colour, markersize=3, alpha=0.6)
        aside = 1 + 0.08 * (place - (len(kinds) - 1) / 2)
        rows = [
            pt.mark(c.difference, _LOOK[kind], bounded=c.few_differ) | dict(at=x.rate * aside)
            for x in rates
            if (c := x.compared[kind]).difference is not None
        ]
        pt.put_marks(mean, rows, 'y')
    for axes in panels.values():
        pt.log_axis(axes, 'x', [x.rate for x in rates])
        axes.tick_params(axis='x', rotation=40)
    moved.set_yscale('log')
    mean.axhline(0, color=pt.LINE, linewidth=0.8)
    changed.set_ylim(bottom=0)
    figure.legend(*changed.get_legend_handles_labels(), loc='outside upper right', ncols=len(kinds))
    if any(x.compared[kind].few_differ for x in rates for kind in kinds):
        pt.explain_bounded(figure)
    return figure


def draw_rates(rates: Sequence[AtRate], folder: Path, ids: Sequence[str]) -> list[pt.FigureFile]:
    "The figure as a file, bound to its runs."
    caption = 'Questions that change, moved scores, and the mean, by learning rate.'
    return pt.make_figures({'rates': pt.Picture(rates_figure, caption)}, rates, folder, ids)


def rates_values(
    found: Sequence[dict],
    rates: Sequence[AtRate],
    predictions: Mapping[str, pd.DataFrame],  # run_id -> predictions
) -> dict:
    "What chapters ask for: the study, each rate, what grows with it, and the format beside its controls."
    first, top, kinds = rates[0].fp32[0], rates[-1], kinds_of(rates)
    mean = {x.rate: np.mean([r['primary']['value'] for r in x.fp32]) for x in rates}  # in fp32
    best = max(mean, key=mean.get)
    p = {x.rate: x.compared['format'].p for x in rates if 'format' in kinds}
    corrected = holm(p)
    grown = growth(rates)
    controls = {c: beside(rates, c) for c in CONTROLS if {'format', c} <= {*kinds}}
    predicted = predictions[first['run_id']]
    about = {name: of for name, of in about_values(found).items() if name in ('study', 'corpus', 'n_runs')}
    names = [f'{x.rate:g}' for x in rates]
    others = distinct(r['precision'] for r in found if not r['settings'].get('dropout_draw'))
    beside_values = {}
    for control, of in controls.items():
        estimates = [its['ratio'].estimate for its in of.values()]
        less = all(its['verdict'] == 'less' for its in of.values())
        ends = dict(low=min(estimates), high=max(estimates), last=of[top.rate])
        beside_values[control] = dict(all_less=less) | ends
    movements = []
    for name, x in zip(names, rates):
        of_kinds = {
            kind: dict(moved=x.moved[kind].distance.estimate, changed=x.moved[kind].changed)
            | dict(mean_changed=np.mean(x.moved[kind].changed))
            for kind in kinds
        }
        by_control = {control: of[x.rate] for control, of in controls.items()}
        movements.append(dict(rate=name, kinds=of_kinds, beside=by_control))
    last = {k: dict(moved=m.distance, most_changed=max(m.changed)) for k, m in top.moved.items()}
    return about | dict(
        other_format=', '.join(name for name in others if name != 'fp32'),
        lowest=names[0],
        last_but_one=names[-2] if len(rates) > 1 else None,
        highest=names[-1],
        best=f'{best:g}',
        past_best=top.rate > best,
        n_rates=len(rates),
        most_seeds=max(len(m.seeds) for x in rates for m in x.moved.values()),
        units=rates[0].moved[kinds[0]].units,
        # questions whose pairs have scores: those that no candidate answers, or all, as well
        scored=predicted[predicted['split'] == first['primary']['set']]['unit'].nunique(),
        at=dict(last=last),
        grows=grown,
        shape=shape_of(grown),
        beside=beside_values,
        accuracy=dict(any=any(x is not None and x < ALPHA for x in corrected.values())),
        tables=dict(movement=movements),
    )

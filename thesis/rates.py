"""Does what a number format changes depend on the learning rate? A study of several rates.

Fp32 at each, and beside it another format, other masks of dropout, or another order of sums.
"""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from kdnotes.stats.compare import Comparison, compare
from kdnotes.stats.churn import PredictionChurn, churn_ratio, prediction_churn
from kdnotes.report import plotting as pt
from kdnotes.stats.tables import score_kind
from kdnotes.stats.tests import ALPHA, Family, holm
from kdnotes.core.config import primary_name
from .facts import about_values, distinct
from .steps import tested


# a kind of pair with fp32 -> its label in the figure
KINDS = {'format': 'the format', 'draw': 'other masks', 'order': 'another order of sums'}
CONTROLS = ('draw', 'order')


@dataclass(frozen=True)
class AtRate:
    "What the format and controls do at one learning rate."

    rate: float
    fp32: tuple[dict, ...]  # records
    compared: Mapping[str, Comparison]  # of KINDS -> with fp32
    moved: Mapping[str, PredictionChurn]  # the same


def _part(record: dict, usual: tuple[int, int]) -> str:
    "'fp32' or one of KINDS: what a run is at its rate, beside fp32 in the usual layout."
    if record['settings'].get('dropout_draw'):
        return 'draw'
    if record['precision'] != 'fp32':
        return 'format'
    return 'fp32' if _layout(record) == usual else 'order'


def _layout(record: dict) -> tuple[int, int]:
    "Ranks and threads of each: the order of a training's sums."
    return record['settings']['ranks'], record['settings']['threads_per_rank']


def at_rates(
    found: Sequence[dict],
    its_units: pd.DataFrame,
    predictions: Mapping[str, pd.DataFrame],
) -> list[AtRate]:
    "A study's students by rising rate; without the rates that have no pair at all."
    students = [r for r in found if r['factors']['network'] == 'student']
    usual = min(map(_layout, students))  # the smallest
    by_rate: dict[float, dict[str, list[dict]]] = {}  # rate -> part -> its runs
    for r in sorted(students, key=lambda r: (r['settings']['learning_rate'], r['seed'])):
        by_rate.setdefault(r['settings']['learning_rate'], {}).setdefault(_part(r, usual), []).append(r)
    kind_of_score = score_kind(students)
    made = []
    for rate, of in by_rate.items():
        seeds = {part: {r['seed'] for r in runs} for part, runs in of.items()}
        paired = [kind for kind in KINDS if seeds.get('fp32', set()) & seeds.get(kind, set())]
        if not paired:
            continue
        pairs = {kind: (of['fp32'], of[kind], its_units) for kind in paired}
        compared = {kind: compare(*pair) for kind, pair in pairs.items()}
        moved = {kind: prediction_churn(*pair, predictions, kind_of_score) for kind, pair in pairs.items()}
        made.append(AtRate(rate, tuple(of['fp32']), compared, moved))
    return made


def kinds_of(rates: Sequence[AtRate]) -> list[str]:  # of KINDS
    "The kinds of pair that every rate has."
    return [kind for kind in KINDS if rates and all(kind in x.moved for x in rates)]


def _ratios(family: str, ratios: Mapping) -> dict:
    "Ratios, tested together."
    return {key: dict(ratio=ratios[key]) | of for key, of in tested(family, ratios, 1.0).items()}


def growth(rates: Sequence[AtRate]) -> dict[str, dict[str, dict]]:
    """How many times as far scores move at a higher rate: over all, before the last step up, and in it.
    'whole' | 'before' | 'last' -> kind -> ratio, p, p_holm, verdict; {} of a single rate.
    """
    if len(rates) < 2:
        return {}
    spans = {'whole': (rates[0], rates[-1])}
    if len(rates) > 2:
        spans |= {'before': (rates[0], rates[-2]), 'last': (rates[-2], rates[-1])}
    found = _ratios(
        'growth',
        {
            (span, kind): churn_ratio(high.moved[kind], low.moved[kind])
            for span, (low, high) in spans.items()
            for kind in kinds_of(rates)
        },
    )
    return {span: {kind: found[span, kind] for kind in kinds_of(rates)} for span in spans}


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
    return _ratios(
        f'format beside {control}',
        {x.rate: churn_ratio(x.moved['format'], x.moved[control]) for x in rates},
    )


_LOOK = {
    'format': pt.LOOKS['mixed_student'],
    'draw': pt.LOOKS['full_student'],
    'order': pt.LOOKS['full_kd'],
}


@pt.drawing
def rates_figure(rates: Sequence[AtRate]) -> Figure:
    "Changed questions, moved scores, and the change of the mean, by learning rate."
    titles = ['questions that change, %', 'a score moves by', f'{primary_name(rates[0].fp32[0])}, change']
    figure, panels = pt.grid(titles, 3, 2.3, 'learning rate')
    changed, moved, mean = panels.values()
    kinds = kinds_of(rates)
    for place, kind in enumerate(kinds):
        colour, marker = _LOOK[kind]
        for axes, of_seeds in (
            (changed, lambda m: [100 * n / m.units for n in m.changed]),
            (moved, lambda m: list(m.moved)),
        ):
            points = pd.concat([pd.DataFrame(dict(x=x.rate, y=of_seeds(x.moved[kind]))) for x in rates])
            how = dict(errorbar=None, color=colour, marker=marker, mec=colour, label=KINDS[kind])
            pt.put_lines(axes, points, **how)
            axes.plot(points['x'], points['y'], '.', color=colour, markersize=3, alpha=0.6)
        aside = 1 + 0.08 * (place - (len(kinds) - 1) / 2)
        compared = [(x.rate * aside, x.compared[kind]) for x in rates]
        rows = [
            pt.mark(c.difference, _LOOK[kind], bounded=c.few_differ) | dict(at=at)
            for at, c in compared
            if c.difference is not None
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


def draw_rates(rates: Sequence[AtRate], folder: Path, ids: Sequence[str]) -> pt.FigureFile:
    "The figure as a file, bound to its runs."
    picture = pt.Picture(rates_figure, 'Questions that change, moved scores, and the mean, by learning rate.')
    return pt.make_figures({'rates': picture}, rates, folder, ids)[0]


def scored_questions(record: dict, predictions: Mapping[str, pd.DataFrame]) -> int:
    "Questions whose pairs have scores: those that no candidate answers, or all, as well."
    own = predictions[record['run_id']]
    return own[own['split'] == record['primary']['set']]['unit'].nunique()


def changed_means(rates: Sequence[AtRate]) -> dict[float, float | None]:
    "Rate -> p of the format's change of the mean, corrected over the rates; {} without a format."
    p = {x.rate: x.compared['format'].p for x in rates if 'format' in kinds_of(rates)}
    return holm(p, Family('format', tuple(p))) if p else {}


def rates_values(found: Sequence[dict], rates: Sequence[AtRate], scored: int) -> dict:
    "What chapters ask for: the study, each rate, what grows with it, and the format beside its controls."
    kinds = kinds_of(rates)
    mean = {x.rate: np.mean([r['primary']['value'] for r in x.fp32]) for x in rates}  # in fp32
    best = max(mean, key=mean.get)
    about = about_values(found)
    significant = [p for p in changed_means(rates).values() if p is not None and p < ALPHA]
    grown = growth(rates)
    controls = {c: beside(rates, c) for c in CONTROLS if {'format', c} <= {*kinds}}

    def summary(of: Mapping[float, dict]) -> dict:  # of the ratios to a control, by rate
        ratios = [its['ratio'].estimate for its in of.values()]
        all_less = all(its['verdict'] == 'less' for its in of.values())
        return dict(all_less=all_less, low=min(ratios), high=max(ratios), last=of[rates[-1].rate])

    def of_kind(x: AtRate, kind: str) -> dict:
        m = x.moved[kind]
        return dict(moved=m.distance.estimate, changed=m.changed, mean_changed=float(np.mean(m.changed)))

    return {name: about[name] for name in ('study', 'corpus', 'n_runs')} | dict(
        other_format=', '.join(distinct(r['precision'] for r in found if _part(r, _layout(r)) == 'format')),
        lowest=f'{rates[0].rate:g}',
        last_but_one=f'{rates[-2].rate:g}' if len(rates) > 1 else None,
        highest=f'{rates[-1].rate:g}',
        best=f'{best:g}',
        past_best=rates[-1].rate > best,
        n_rates=len(rates),
        most_seeds=max(len(m.seeds) for x in rates for m in x.moved.values()),
        units=rates[0].moved[kinds[0]].units,
        scored=scored,
        at=dict(
            last={
                kind: dict(moved=m.distance, most_changed=max(m.changed))
                for kind, m in rates[-1].moved.items()
            }
        ),
        grows=grown,
        shape=shape_of(grown),
        beside={control: summary(of) for control, of in controls.items()},
        accuracy=dict(any=bool(significant)),
        tables=dict(
            movement=[
                dict(rate=f'{x.rate:g}', kinds={kind: of_kind(x, kind) for kind in kinds})
                | dict(beside={control: of[x.rate] for control, of in controls.items()})
                for x in rates
            ]
        ),
    )

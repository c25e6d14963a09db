"""What the thesis may say of a study of extractive question answering.

Scores in percent beside those of never answering, and the way there.
"""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from kdnotes.analysis import plotting as pt
from kdnotes.analysis.intervals import Interval, scaled
from kdnotes.analysis.evidence import Evidence, curve_of, curve_set, primary_interval
from kdnotes.analysis.tables import set_interval
from kdnotes.core.render import PERCENT
from kdnotes.core.config import metric_name, task_info
from .facts import given, table
from .language import one_rank_values
from .values import aim_value


def percent(share: Interval | None, sign: str = '') -> str:
    """A share, or with a sign a difference of shares, in percent: 'estimate [low, high]'; the estimate alone
    where there are no limits, or none to speak of. Limits of a share end at 0 and 100 %.
    """
    if share is None or np.isnan(share.estimate):
        return '-'
    found = scaled(share, PERCENT.factor)
    if not sign and None not in (found.low, found.high):
        found = replace(found, low=max(found.low, 0.0), high=min(found.high, 100.0))
    return f'{found.estimate:{sign}.1f}' if share.low == share.high else f'{found:{sign}.1f}'


def beyond_never(e: Evidence, runs: Sequence[dict], where: str) -> Interval | None:
    """What runs have of `exact` beyond a model that never answers: a difference of shares; None: no run has
    been scored there.
    """
    own = e.units[(e.units['split'] == where) & e.units['run_id'].isin([r['run_id'] for r in runs])]
    without = set(own[own['metric'] == 'no_ans_exact']['unit'])
    exact = own[own['metric'] == 'exact']
    gains = exact.assign(metric='beyond', value=exact['value'] - exact['unit'].isin(without))

    def judged(r: dict) -> dict:
        scores = r['metrics'].get(where, {})
        values = [scores.get(name) for name in ('exact', 'always_unanswerable')]
        gain = None if None in values else values[0] - values[1]
        return r | dict(primary=r['primary'] | dict(set=where, metric='beyond', value=gain))

    return primary_interval([judged(r) for r in runs], gains)


def counted(e: Evidence) -> dict[str, dict[str, int]]:  # set -> articles, questions, no_ans
    "The evaluation sets in numbers."
    one = e.units[e.units['run_id'] == e.records[0]['run_id']]

    def of(its: pd.DataFrame) -> dict[str, int]:
        without = its[its['metric'] == 'no_ans_exact']
        return dict(
            articles=its['cluster'].nunique(),
            questions=its['unit'].nunique(),
            no_ans=without['unit'].nunique(),
        )

    return {where: of(its) for where, its in one.groupby('split', sort=False)}


# what the teacher should find of the answers that are there: below it a student learns to refuse
FOUND_AIM = 0.30
_SCORES = {'exact match': 'exact', 'F1': 'f1', 'found': 'has_ans_exact', 'refused': 'no_ans_exact'}


def never_verdict(gain: Interval) -> str:  # 'better' | 'worse' | 'open' | 'one_seed', which is no test
    "What a gain over never answering amounts to, by its interval."
    if gain.n == 1:
        return 'one_seed'
    if gain.low <= 0 <= gain.high:
        return 'open'
    return 'better' if gain.estimate > 0 else 'worse'


def score_table(e: Evidence, where: str, never: dict[str, dict]) -> pd.DataFrame:  # a row an arm, text
    "Scores of a set in percent, and what they are beyond never answering."

    def score(name: str):
        return lambda arm: percent(set_interval(e, e.arms[arm], where, name))

    columns = {title: score(name) for title, name in _SCORES.items()}
    beyond = {'beyond never answering': lambda arm: percent(never[arm]['difference'], '+')}
    return table(never, {'arm': str} | columns | beyond)


def question_values(e: Evidence) -> dict:
    "All values of the study."
    where = e.records[0]['primary']['set']
    gains = {arm: gain for arm, runs in e.arms.items() if (gain := beyond_never(e, runs, where))}
    never = {arm: dict(difference=gain, verdict=never_verdict(gain)) for arm, gain in gains.items()}
    values = one_rank_values(e)
    tables = values['tables'] | dict(scores=score_table(e, where, never))
    points = [percent(c.difference, '+') for _, c in e.comparisons]
    tables['comparisons'] = (
        tables['comparisons'].assign(difference=points).rename(columns=dict(difference='points'))
    )
    return values | dict(
        counted=counted(e),
        never=never,
        never_exact=e.records[0]['metrics'][where]['always_unanswerable'],
        answers={
            arm: aim_value(FOUND_AIM, set_interval(e, runs, where, 'has_ans_exact'), True)
            for arm, runs in e.arms.items()
        },
        recipe=given(
            [r for r in e.records if r['factors']['kd']], ('soft_weight', 'hard_weight', 'temperature')
        ),
        tables=tables,
    )


def way_of(
    record: dict,
) -> pd.DataFrame:  # step, loss and a column a metric, in percent; NaN where a point has no such number
    "A run's losses and its evaluations on the way."
    metric = record['primary']['metric']
    losses = [dict(step=p['step'], loss=p['loss']) for p in curve_of(record) if p['loss'] is not None]
    where = curve_set([record])
    scores = [
        dict(step=p['step']) | {k: 100 * v for k, v in ({metric: p['value']} | p.get('metrics', {})).items()}
        for p in record.get('curve') or ()
        if p.get('value') is not None and p.get('set', where) == where
    ]
    return pd.DataFrame([*losses, *scores], columns=['step', 'loss', *_metrics(record)])


def _metrics(record: dict) -> list[str]:
    "The metrics that a curve may have, the primary one first."
    return list(dict.fromkeys([record['primary']['metric'], *task_info(record['task']).curve_metrics]))


@pt.drawing
def progress_figure(
    records: Sequence[dict],  # of one study
) -> Figure:
    "Loss and scores along the optimizer steps, a panel each."
    arms = pt.arms_of(records)
    points = pd.concat([way_of(r).assign(arm=r['arm']) for r in records])
    keys = [key for key in ('loss', *_metrics(records[0])) if points[key].notna().any()]
    if not keys:
        raise pt.NotDrawn('no run has a training curve')
    task = records[0]['task']
    names = ['training loss' if key == 'loss' else f'{metric_name(key, task)}, %' for key in keys]
    figure, panels = pt.grid(names, 3, 1.9, 'optimizer steps', sharex=True)
    lines = []
    for arm, runs in arms.items():
        looks, mixed = pt.look(arm, arms), pt.in_mixed_precision(runs)
        for key, axes in zip(keys, panels.values()):
            own = points[points['arm'] == arm].rename(columns={'step': 'x', key: 'y'}).dropna(subset='y')
            pt.put_course(axes, own, looks, mixed)
        # an arm without points draws no line, so that handles are made from the looks
        how = dict(color=looks[0], marker=looks[1], markersize=4, linestyle='--' if mixed else '-')
        lines.append(Line2D([], [], label=arm, **how))
    axes.set_xlim(left=0)  # of all panels, once all is drawn
    figure.legend(handles=lines, loc='outside lower center', ncols=4)
    return figure


def _progress_caption(e: Evidence) -> str:
    return (
        f"Training loss and scores on the {curve_set(e.records)} set of {e.records[0]['corpus']} along the "
        'optimizer steps. Lines are means of the seeds, bands reach from the lowest to the highest seed; '
        'dashed lines are arms in mixed precision. Losses with and without distillation are different '
        'quantities. On the way the threshold is the best one for this set, so that these scores are a '
        'little too good.'
    )


QUESTION_FIGURES = {'progress': pt.Picture(progress_figure, _progress_caption, lambda e: (e.records,))}


def draw_questions(
    e: Evidence,
    folder: Path,  # where the files go
) -> list[pt.FigureFile]:  # one for each of QUESTION_FIGURES, made or with a reason
    "Draw what only this study has."
    return pt.make_figures(QUESTION_FIGURES, e, folder, [r['run_id'] for r in e.records])

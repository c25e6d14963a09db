"""A study of extractive question answering: scores compared with never answering, and along training."""

from __future__ import annotations
from collections.abc import Sequence
from pathlib import Path
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from kdnotes.core.arms import MODES
from kdnotes.core.config import metric_name, task_info
from kdnotes.report import plotting as pt
from kdnotes.results.table import arms_of
from kdnotes.stats.evidence import Evidence, curve_of, curve_set, primary_interval
from kdnotes.stats.intervals import Interval
from kdnotes.stats.tables import set_interval
from .facts import recorded_settings
from .language import one_rank_values
from .values import aim_value

# what the teacher should find of the answers that are there: below it a student learns to refuse
FOUND_AIM = 0.30
SCORES = ('exact', 'f1', 'has_ans_exact', 'no_ans_exact')


def beyond_never(e: Evidence, runs: Sequence[dict], where: str) -> Interval | None:
    "What runs have of `exact` beyond a model that never answers: a difference of shares; None: not scored."
    own = e.units[(e.units['split'] == where) & e.units['run_id'].isin([r['run_id'] for r in runs])]
    without = set(own[own['metric'] == 'no_ans_exact']['unit'])
    exact = own[own['metric'] == 'exact']
    gains = exact.assign(metric='beyond', value=exact['value'] - exact['unit'].isin(without))
    judged = []
    for r in runs:
        values = [r['metrics'].get(where, {}).get(name) for name in ('exact', 'always_unanswerable')]
        gain = None if None in values else values[0] - values[1]
        judged.append(r | dict(primary=r['primary'] | dict(set=where, metric='beyond', value=gain)))
    return primary_interval(judged, gains)


def never_verdict(gain: Interval) -> str:  # 'better' | 'worse' | 'open' | 'one_seed', which is no test
    "What a gain over never answering amounts to, by its interval."
    if gain.n == 1:
        return 'one_seed'
    if gain.low <= 0 <= gain.high:
        return 'open'
    return 'better' if gain.estimate > 0 else 'worse'


def question_values(e: Evidence) -> dict:
    "All values of the study."
    where = e.records[0]['primary']['set']
    gains = {arm: gain for arm, runs in e.arms.items() if (gain := beyond_never(e, runs, where))}
    own = e.units[e.units['run_id'] == e.records[0]['run_id']]
    counts = dict(articles=('cluster', 'nunique'), questions=('unit', 'nunique'))
    counted = own.groupby('split').agg(**counts).to_dict('index')
    no_answer = own[own['metric'] == 'no_ans_exact'].groupby('split')['unit'].nunique()
    scores = {
        arm: {name: set_interval(e, runs, where, name) for name in SCORES} for arm, runs in e.arms.items()
    }
    taught = [r for r in e.records if r['factors']['kd']]
    values = one_rank_values(e)
    values['tables']['scores'] = [dict(arm=arm, beyond=gain) | scores[arm] for arm, gain in gains.items()]
    return values | dict(
        counted={split: of | dict(no_ans=no_answer.get(split, 0)) for split, of in counted.items()},
        never={arm: dict(difference=gain, verdict=never_verdict(gain)) for arm, gain in gains.items()},
        never_exact=e.records[0]['metrics'][where]['always_unanswerable'],
        answers={arm: aim_value(FOUND_AIM, of['has_ans_exact'], True) for arm, of in scores.items()},
        recipe=recorded_settings(taught, ('soft_weight', 'hard_weight', 'temperature')),
    )


def course_of(record: dict) -> pd.DataFrame:  # step, key and y: the loss, and metrics in percent
    "A run's losses and its evaluations during training."
    metric, where = record['primary']['metric'], curve_set([record])
    rows = [(p['step'], 'loss', p['loss']) for p in curve_of(record) if p['loss'] is not None]
    for p in record.get('curve') or ():
        if p.get('value') is not None and p.get('set', where) == where:
            scores = {metric: p['value']} | p.get('metrics', {})
            rows += [(p['step'], name, 100 * value) for name, value in scores.items()]
    return pd.DataFrame(rows, columns=['x', 'key', 'y'])


@pt.drawing
def progress_figure(
    records: Sequence[dict],  # of one study
) -> Figure:
    "Loss and scores along the optimizer steps, one panel each."
    arms, task = arms_of(records), records[0]['task']
    points = pd.concat([course_of(r).assign(arm=r['arm']) for r in records])
    known = dict.fromkeys(['loss', records[0]['primary']['metric'], *task_info(task).curve_metrics])
    keys = [key for key in known if (points['key'] == key).any()]
    if not keys:
        raise pt.NotDrawn('no run has a training curve')
    names = ['training loss' if key == 'loss' else f'{metric_name(key, task)}, %' for key in keys]
    figure, panels = pt.grid(names, 3, 1.9, 'optimizer steps', sharex=True)
    lines = []
    for arm, runs in arms.items():
        looks, mixed = pt.look(arm, arms), MODES[runs[0]['mode']].precision == 'mixed'
        for key, axes in zip(keys, panels.values()):
            own = points[(points['arm'] == arm) & (points['key'] == key)]
            pt.put_course(axes, own, looks, mixed)
        # an arm without points draws no line, so that handles are made from the looks
        how = dict(color=looks[0], marker=looks[1], markersize=4, linestyle='--' if mixed else '-')
        lines.append(Line2D([], [], label=arm, **how))
    axes.set_xlim(left=0)  # of all panels, once all is drawn
    figure.legend(handles=lines, loc='outside lower center', ncols=4)
    return figure


# of the documentation; the thesis has its own
CAPTION = """Training loss and scores on the development set. Lines are means of the seeds, bands span the
lowest to the highest seed, and dashed lines are arms in mixed precision. During training the threshold is the
best one for this set, so these scores are slightly too high."""
QUESTION_FIGURES = {'progress': pt.Picture(progress_figure, CAPTION, lambda e: (e.records,))}


def draw_questions(
    e: Evidence,
    folder: Path,  # where the files go
) -> list[pt.FigureFile]:  # one for each of QUESTION_FIGURES, made or with a reason
    "Draw what only this study has."
    return pt.make_figures(QUESTION_FIGURES, e, folder, [r['run_id'] for r in e.records])

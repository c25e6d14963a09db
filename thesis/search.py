"""A search for students: its space compared with the published one, its front over several seeds, its cost,
and the verdicts on the published claims.
"""

from __future__ import annotations
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
import numpy as np
import pandas as pd
from kdnotes.core.config import task_info
from kdnotes.report.plotting import FigureFile
from kdnotes.search.front import pareto_with_seeds
from kdnotes.search.pictures import draw_result
from kdnotes.search.result import SearchResult, is_search, load_result
from kdnotes.search.spaces import STUDY, space_of
from kdnotes.stats.compare import compare
from kdnotes.stats.evidence import primary_interval
from kdnotes.stats.intervals import Interval
from .facts import ThesisError, about_values

STUDIED = dict(
    who='SigOpt and NVIDIA',
    year=2020,
    exact=0.6707,  # of the baseline; a share of the questions
    params=66.3,  # of the baseline; million
    trials=479,
    machines=20,
    days=4,
    machine_hours=24 * 4 * 20,
    never=0.5007,  # of the official development questions: what a model that never answers has
    smaller=0.22,  # share of the baseline's parameters that a student saved at an equal score
    better=0.035,  # gain over the baseline at about its size; a difference of shares
    drawn=len(STUDY),  # parameters
)
ABOUT_EQUAL = 0.05  # of the parameters, relatively: what counts as the same size


class Beside(NamedTuple):
    "A trial beside the baseline, over the seeds of both."

    saved: float  # share of the baseline's parameters
    gain: float  # of the score on the development set; positive is better
    difference: Interval | None  # of the score on the test set, paired; positive is better


def load_searched(study: str, part: str, ids: Sequence[str]) -> SearchResult:
    "What the search of a part has found, or a `ThesisError`."
    if not is_search(study):
        raise ThesisError(
            f'thesis/data/{study}.search.json, what the search {study!r} has found, is not there; restore '
            f'it, or take the search out with: python -m thesis pin {part}='
        )
    found = load_result(study)
    if unknown := sorted({i for runs in found.seeds.values() for i in runs} - {*ids}):
        raise ThesisError(
            f'the search {study!r} rests on {", ".join(unknown)}, which thesis/plan.json does not name; pin '
            f'{part}={study} again'
        )
    return found


def draw_searched(found: SearchResult, folder: Path) -> list[FigureFile]:
    "The figures of a search."
    return draw_result(found, folder)


def front_rows(
    found: SearchResult,
    means: Mapping[str, Mapping[str, float]],  # run_id of a trial -> objective -> mean over seeds
    units: pd.DataFrame,
) -> list[dict]:  # one row per point of the front, and one for the baseline; the smallest first
    "The front over its seeds, with its test scores; fresh: without the seed that a trial was chosen by."
    values, runs = found.seed_values, found.runs
    threshold = found.threshold and found.threshold.value
    best = {t.run_id for t in pareto_with_seeds(found.trials, found.objectives, values, threshold)}
    first = {t.run_id: t.number for t in reversed(found.trials)}  # of a setting drawn twice, the first
    before = found.baseline and means.get(found.baseline.run_id)
    rows = []
    for run_id in (i for i in values if runs[i]):
        fresh = values[run_id]['score'][1:]
        own = means[run_id]
        row = dict(trial=first[run_id], n=len(runs[run_id]), score=own['score'], params=own['params'])
        row |= dict(fresh=np.mean(fresh) if fresh else None, on_front=run_id in best)
        row['saved'] = 1 - own['params'] / before['params'] if before and first[run_id] else None
        rows.append(row | dict(test=primary_interval(runs[run_id], units)))
    return sorted(rows, key=lambda row: row['params'])


def beside_baseline(
    found: SearchResult,
    means: Mapping[str, Mapping[str, float]],  # run_id of a trial -> objective -> mean over seeds
    units: pd.DataFrame,
) -> list[Beside]:
    "Every point that has seeds, beside the baseline: [] where the baseline has no seeds."
    runs = found.runs
    base = found.baseline and found.baseline.run_id
    if not runs.get(base):
        return []
    sign = 1 if runs[base][0]['primary']['higher_is_better'] else -1
    points = []
    for run_id in (i for i, its in runs.items() if its and i != base):
        difference = compare(*(runs[base], runs[run_id])[::sign], units).difference
        gain = sign * (means[run_id]['score'] - means[base]['score'])
        points.append(Beside(1 - means[run_id]['params'] / means[base]['params'], gain, difference))
    return points


def claim(points: Sequence[Beside], reproduced: Callable[[Interval], bool]) -> dict:
    """The point that the development set prefers, and whether it shows what is claimed. A search of few
    trials can show that such a student exists; finding none does not show that there is none.
    """
    p = max(points, key=lambda p: (p.gain, p.saved))
    if p.difference is None or p.difference.low is None:
        return dict(verdict='not_comparable')
    verdict = 'reproduced' if reproduced(p.difference) else 'not_testable'
    return dict(saved=p.saved, difference=p.difference, verdict=verdict)


def smaller_claim(points: Sequence[Beside], margin: float) -> dict:
    "Is a student so much smaller as good as the baseline? saved, difference, verdict."
    if not points:
        return dict(verdict='not_comparable')
    small = [p for p in points if p.saved >= STUDIED['smaller']]
    if not small:
        return dict(verdict='not_testable', saved=max(p.saved for p in points))
    return claim(small, lambda d: d.low >= -margin)


def better_claim(points: Sequence[Beside]) -> dict:
    "Is a student of about the baseline's size so much better? near, saved, difference, verdict."
    alike = [p for p in points if abs(p.saved) <= ABOUT_EQUAL]
    if not alike:
        return dict(verdict='not_comparable')
    return dict(near=ABOUT_EQUAL) | claim(alike, lambda d: d.estimate >= STUDIED['better'] and d.low > 0)


def cost_values(found: SearchResult) -> dict:
    "Trials and what became of them, seconds, the search's own share, and the runs of other seeds."
    trials = [t for t in found.trials if t.state != 'running']
    ran = [t for t in trials if t.seconds]
    training = sum(t.seconds for t in ran)
    return dict(
        trials=len(trials),
        complete=sum(t.state == 'complete' for t in trials),
        training=training,
        a_trial=training / len(ran) if ran else None,
        driver=sum(t.extra.get('driver_s', 0.0) for t in trials) / training if training else None,
    )


def _as_range(of: dict | None) -> dict | None:  # low, high, ...; or values, which have no order
    return dict(values=of['choices']) if of and 'choices' in of else of


def search_values(found: SearchResult, records: Sequence[dict], units: pd.DataFrame) -> dict:
    "All values of a search."
    runs, values = found.runs, found.seed_values
    means = {i: {name: np.mean(of) for name, of in its.items()} for i, its in values.items()}
    first = next(r for r in records if r['factors']['network'] == 'student')
    teacher = next((r for r in records if r['run_id'] == first['teacher_run_id']), None)
    margin, *_ = task_info(found.task).margins.get(first['primary']['metric'], (0.0,))
    points = beside_baseline(found, means, units)
    base = found.baseline and found.baseline.run_id
    own = runs.get(base)
    # what to ship: by: 'margin' | 'knee' | 'baseline' | 'nothing'; saved and kept, beside the baseline
    chosen = found.choice
    ship = dict(by=chosen.by)
    if chosen.trial is not None and base in means:
        its, before = means[chosen.trial.run_id], means[base]
        ship |= dict(saved=1 - its['params'] / before['params'], kept=its['score'] / before['score'])
    published, *_ = space_of(STUDY, 'extractive_qa')
    both = {name: (published.get(name), of) for name, of in found.space.items()}
    spaces = [
        dict(parameter=name) | dict(zip(('published', 'here'), map(_as_range, of)))
        for name, of in both.items()
    ]
    return about_values(records) | dict(
        drawn=len(found.space),
        objectives=[o.name for o in found.objectives],
        threshold=found.threshold and found.threshold.value,
        examples=round((first.get('examples') or 0) / (first['settings'].get('epochs') or 1)),
        teacher_params=teacher['params_total'] / 1e6 if teacher else None,
        most_seeds=max(map(len, runs.values()), default=0),
        margin=margin,
        baseline=primary_interval(own, units) if own else None,
        baseline_params=own[0]['params_total'] / 1e6 if own else None,
        ship=ship,
        cost=cost_values(found) | dict(more=sum(len(of[1:]) for of in runs.values())),
        claims=dict(smaller=smaller_claim(points, margin), better=better_claim(points)),
        tables=dict(space=spaces, front=front_rows(found, means, units)),
    )

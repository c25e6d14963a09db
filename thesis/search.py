"""A search for students: its space beside the published one, its front over several seeds, its cost, and what
the published claims come to here.
"""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import numpy as np
import pandas as pd
from kdnotes.stats.compare import compare
from kdnotes.stats.intervals import Interval
from kdnotes.stats.evidence import primary_interval
from kdnotes.core.config import task_info
from kdnotes.search.found import Found, choice, seed_values
from kdnotes.search.front import pareto_with_seeds, share_saved, with_means
from kdnotes.search.spaces import STUDY, Space
from .facts import about_values


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


def space_rows(here: Space) -> list[dict]:  # parameter, published (None: it was not drawn), here
    "What a search draws, beside what the published one drew: low, high and log, or values."
    return [dict(parameter=name, published=STUDY.get(name), here=of) for name, of in here.items()]


def front_rows(
    found: Found,
    runs: Mapping[str, Sequence[dict]],  # of `runs_of`
    units: pd.DataFrame,
) -> list[dict]:  # a row a point of the front, and one for the baseline; the smallest first
    "The front over its seeds, with its test scores; fresh: without the seed that a trial was chosen by."
    values = seed_values(found, runs)
    threshold = found.threshold and found.threshold.value
    best = {t.run_id for t in pareto_with_seeds(found.trials, found.objectives, values, threshold)}
    first = {t.run_id: t.number for t in reversed(found.trials)}  # of a setting drawn twice, the first
    before = found.baseline and values.get(found.baseline.run_id)
    rows = []
    for run_id in (i for i in values if runs[i]):
        its = values[run_id]
        params = np.mean(its['params'])
        rows.append(
            dict(
                trial=first[run_id],
                n=len(runs[run_id]),
                score=np.mean(its['score']),
                fresh=np.mean(its['score'][1:]) if len(its['score']) > 1 else None,
                params=params,
                saved=share_saved(params, np.mean(before['params'])) if before and first[run_id] else None,
                test=primary_interval(runs[run_id], units),
                on_front=run_id in best,
            )
        )
    return sorted(rows, key=lambda row: row['params'])


@dataclass(frozen=True)
class Beside:
    "A trial beside the baseline, over the seeds of both."

    saved: float  # share of the baseline's parameters
    gain: float  # of the score on the development set; positive is better
    difference: Interval | None  # of the score on the test set, paired; positive is better


def beside_baseline(found: Found, runs: Mapping[str, Sequence[dict]], units: pd.DataFrame) -> list[Beside]:
    """Every point that has seeds, beside the baseline: [] where the baseline has no seeds, or parameters
    are no objective.
    """
    base = found.baseline
    names = {o.name: o for o in found.objectives}
    if base is None or not runs.get(base.run_id) or not {'score', 'params'} <= names.keys():
        return []
    means = with_means(found.trials, seed_values(found, runs))
    values = {t.number: t.values for t in means}
    higher = names['score'].higher_is_better

    def point(t) -> Beside:
        pair = [runs[base.run_id], runs[t.run_id]]
        c = compare(*(pair if higher else pair[::-1]), units)
        gain = t.values['score'] - values[base.number]['score']
        saved = share_saved(t.values['params'], values[base.number]['params'])
        return Beside(saved, gain if higher else -gain, c.difference)

    return [point(t) for t in means if t.number != base.number]


ABOUT_EQUAL = 0.05  # of the parameters, relatively: what counts as the same size


def _judged(points: Sequence[Beside], reproduced) -> dict:
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
    return _judged(small, lambda d: d.low >= -margin)


def better_claim(points: Sequence[Beside]) -> dict:
    "Is a student of about the baseline's size so much better? near, saved, difference, verdict."
    alike = [p for p in points if abs(p.saved) <= ABOUT_EQUAL]
    if not alike:
        return dict(verdict='not_comparable')
    found = _judged(alike, lambda d: d.estimate >= STUDIED['better'] and d.low > 0)
    return dict(near=ABOUT_EQUAL) | found


def cost_values(found: Found, more: Sequence[dict] = ()) -> dict:
    "Trials and what became of them, seconds, the search's own share, and the runs of other seeds."
    trials = [t for t in found.trials if t.state != 'running']
    ran = [t for t in trials if t.seconds]
    training = sum(t.seconds for t in ran)
    own = sum(t.extra.get('driver_s', 0.0) for t in trials)
    return dict(
        trials=len(trials),
        complete=sum(t.state == 'complete' for t in trials),
        training=training,
        a_trial=training / len(ran) if ran else None,
        driver=own / training if training else None,
        more=len(more),
    )


def shipped(found: Found, runs: Mapping[str, Sequence[dict]]) -> dict:
    "What to ship: by: 'margin' | 'knee' | 'baseline' | 'nothing'; saved and kept, beside the baseline."
    values = seed_values(found, runs)
    chosen = choice(found, values)
    base = found.baseline and values.get(found.baseline.run_id)
    if chosen.trial is None or not base:
        return dict(by=chosen.by)
    own = values[chosen.trial.run_id]
    mean = {name: (np.mean(own[name]), np.mean(of)) for name, of in base.items()}
    return dict(by=chosen.by, saved=share_saved(*mean['params']), kept=mean['score'][0] / mean['score'][1])


def search_values(
    found: Found, records: Sequence[dict], runs: Mapping[str, Sequence[dict]], units: pd.DataFrame
) -> dict:
    "All values of a search."
    first = next(r for r in records if r['factors']['network'] == 'student')
    teacher = next((r for r in records if r['run_id'] == first['teacher_run_id']), None)
    points = beside_baseline(found, runs, units)
    margin, *_ = task_info(found.task).margins.get(first['primary']['metric'], (0.0,))
    own = runs.get(found.baseline.run_id, []) if found.baseline else []
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
        ship=shipped(found, runs),
        cost=cost_values(found, [r for of in runs.values() for r in of[1:]]),
        claims=dict(smaller=smaller_claim(points, margin), better=better_claim(points)),
        tables=dict(space=space_rows(found.space), front=front_rows(found, runs, units)),
    )

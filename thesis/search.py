"""What the thesis may say of a search for students.

Its space beside the published one, its front over several seeds, what it cost, and what the published
claims come to here.
"""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import pandas as pd
from kdnotes.analysis.compare import compare
from kdnotes.core.render import duration
from kdnotes.analysis.intervals import Interval
from kdnotes.analysis.evidence import primary_interval
from kdnotes.core.config import task_info
from kdnotes.core.render import amount
from kdnotes.search.found import Found, choice
from kdnotes.search.front import share_saved, with_means
from kdnotes.search.spaces import STUDY, Integer, OneOf, Real, Space
from kdnotes.search.summary import front_with_test, seed_values
from .facts import about_values, among, table


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


def bounds(of: Real | Integer | OneOf) -> str:  # '1 to 12', '2e-06 to 0.1, log', '1 to 100, no order'
    "What is drawn, as text."
    if not isinstance(of, OneOf):
        return f'{of.low:g} to {of.high:g}' + ', log' * of.log
    first, last = of.values[0], of.values[-1]
    in_a_row = type(first) is int and list(of.values) == list(range(first, first + len(of.values)))
    return (f'{first} to {last}' if in_a_row else among(of.values)) + ', no order'


def space_table(here: Space) -> pd.DataFrame:  # a row a parameter, text
    "What a search draws, beside what the published one drew."
    return table(
        here,
        {
            'parameter': str,
            'published': lambda name: bounds(STUDY[name]) if name in STUDY else None,
            'here': lambda name: bounds(here[name]),
        },
    )


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
    "Trials and what became of them, seconds in words, the search's own share, and the runs of other seeds."
    trials = [t for t in found.trials if t.state != 'running']
    ran = [t for t in trials if t.seconds]
    training = sum(t.seconds for t in ran)
    own = sum(t.extra.get('driver_s', 0.0) for t in trials)
    return dict(
        trials=len(trials),
        complete=sum(t.state == 'complete' for t in trials),
        training=duration(training),
        a_trial=duration(training / len(ran)) if ran else None,
        driver=own / training if training else None,
        more=len(more),
    )


def _shipped(found: Found, runs: Mapping[str, Sequence[dict]]) -> dict:
    "What to ship: by: 'margin' | 'knee' | 'baseline' | 'nothing'; saved and kept, beside the baseline."
    values = seed_values(found, runs)
    chosen = choice(found, values)
    base = found.baseline and values.get(found.baseline.run_id)
    if chosen.trial is None or not base:
        return dict(by=chosen.by)
    own = values[chosen.trial.run_id]
    mean = {name: (sum(own[name]) / len(own[name]), sum(of) / len(of)) for name, of in base.items()}
    return dict(by=chosen.by, saved=share_saved(*mean['params']), kept=mean['score'][0] / mean['score'][1])


def search_values(
    found: Found, records: Sequence[dict], runs: Mapping[str, Sequence[dict]], units: pd.DataFrame
) -> dict:
    "All values of a search."
    runs = dict(sorted(runs.items(), key=lambda item: item[1][0]['params_total'] if item[1] else 0))
    students = [r for r in records if r['factors']['network'] == 'student']
    teacher = next((r for r in records if r['run_id'] == students[0]['teacher_run_id']), None)
    first = students[0]
    points = beside_baseline(found, runs, units)
    margin, *_ = task_info(found.task).margins.get(first['primary']['metric'], (0.0,))
    own = runs.get(found.baseline.run_id, []) if found.baseline else []
    tables = dict(space=space_table(found.space))
    if any(runs.values()):
        tables['front'] = front_with_test(found, runs).drop(columns=['run'])
    return about_values(records) | dict(
        drawn=len(found.space),
        score=found.objectives[0].label,
        costs=among((o.label for o in found.objectives[1:]), ' and '),
        threshold=found.threshold and amount(found.threshold.value),
        examples=round((first.get('examples') or 0) / (first['settings'].get('epochs') or 1)),
        teacher_params=teacher['params_total'] / 1e6 if teacher else None,
        most_seeds=max(map(len, runs.values()), default=0),
        margin=margin,
        baseline=primary_interval(own, units) if own else None,
        baseline_params=own[0]['params_total'] / 1e6 if own else None,
        ship=_shipped(found, runs),
        cost=cost_values(found, [r for of in runs.values() for r in of[1:]]),
        claims=dict(smaller=smaller_claim(points, margin), better=better_claim(points)),
        tables=tables,
    )

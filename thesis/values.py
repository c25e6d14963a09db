"""A study in numbers by key: its arms, what each is beside others and beside what takes no training."""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import replace
import numpy as np
import pandas as pd
from kdnotes.stats import calibration, costs
from kdnotes.stats.comparable import TrivialBaseline, gain_interval, of_one_machine
from kdnotes.stats.compare import study_factorial
from kdnotes.stats.intervals import Interval
from kdnotes.stats.deployment import deployment
from kdnotes.results.table import arms_of
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.tables import teacher_agreement, pareto_front, score_kind
from kdnotes.core.config import task_info
from kdnotes.results.store import RecordError, predictions
from .facts import about_values, amp_values, gradient_values, seeds_made_again
from .steps import (
    INTERACTION,
    STEPS,
    agreed,
    changed_pairs,
    compared,
    decision_values,
    effect_values,
    memory_values,
    one_format,
    other_questions,
    pairs_by_seed,
    step_values,
)


def predicted_by_run(e: Evidence) -> dict[str, pd.DataFrame]:
    "The predictions of every run; {} where the evidence has not those of all."
    try:
        found = predictions(e.study, [r['run_id'] for r in e.records])
    except RecordError:  # its own words name a folder
        return {}
    by_run = dict(list(found.groupby('run_id', sort=False)))
    return by_run if len(by_run) == len(e.records) else {}


def transfer_seconds(found: Sequence[dict]) -> dict[str, float]:  # network -> s
    "How long each network's first weights took, the same in all arms and seeds, where there is a transfer."
    return {r['factors']['network']: s for r in found if (s := r['time'].get('transfer_s'))}


def paid_values(e: Evidence, predicted: dict[str, pd.DataFrame]) -> dict[str, dict]:
    """After how many predictions a student has paid back its training and its signal (alone), and its own
    transfer as well (with_transfer), which is what the student's transfer took beyond that of its teacher:
    arm -> intervals; {} without times, predictions or a transfer of students.
    """
    found = e.times.runs
    transfer = transfer_seconds(found)
    if not found or not predicted or not {'student', 'teacher'} <= transfer.keys():
        return {}
    first = found[0]
    kind = score_kind(found)
    its_units = e.units[e.units['run_id'] == first['run_id']]
    sizes = costs.sizes_of(predicted[first['run_id']], its_units, first['primary']['set'], 'p_at_1', kind)
    alone = costs.payback_table(found, sizes).table
    own = transfer['student'] - transfer['teacher']
    by_id = {r['run_id']: r for r in found}
    paid = {}
    for arm, runs in arms_of(found).items():
        taught = [r for r in runs if r['teacher_run_id'] in by_id]
        each = [costs.payback(r, by_id[r['teacher_run_id']], sizes, found) for r in taught]
        if each and all(p.seconds is not None for p in each):
            extra, saved = ([getattr(p, part).seconds for p in each] for part in ('extra', 'saved'))
            with_transfer = costs.ratio_of_means([seconds + own for seconds in extra], saved)
            paid[arm] = dict(alone=alone.at[arm, 'seconds'], with_transfer=with_transfer)
    return paid


def fidelity_values(e: Evidence, scores: dict[str, pd.DataFrame]) -> dict:
    """nearer: taught arm -> Kendall's tau of it and of its control with the teacher, difference, p_holm;
    moved: the mean change of a score by the step of precision, where there are predictions.
    """
    parts = ('taught', 'control', 'difference')
    values = dict(
        nearer={
            one.arm: {part: getattr(one.gain, part) for part in parts} | dict(p_holm=one.p_holm)
            for one in teacher_agreement(e)
        }
    )
    pairs = pairs_by_seed(*(e.arms.get(arm, ()) for arm in STEPS['precision']))
    if not (pairs and scores) or score_kind(e.records) in calibration.NOT_CALIBRATED:
        return values
    split = e.records[0]['primary']['set']
    both = [
        calibration.aligned([scores[r['run_id']] for r in pair], split)[[0, 1]].to_numpy(float)
        for pair in pairs
    ]
    moved = np.concatenate([np.abs(np.diff(of)).ravel() for of in both])
    return values | dict(moved=dict(mean=moved.mean()))


FROZEN = 'frozen_encoder'  # the pretrained encoder as it comes: cosine of its embeddings


def kind_of(floor: TrivialBaseline) -> str:
    "What kind of trivial model it is: those of several pretrained weights have names of their own."
    return floor.name.partition(' ')[0]


def floor_values(floor: TrivialBaseline, e: Evidence) -> dict:
    """A trivial model: its kind, the pretrained weights it has (None: all of this study have the same), how
    many labels it is fitted to (None: to none), and what it scores on the set that is scored and on the one
    that chose settings.
    """

    def weights_of(floor: TrivialBaseline) -> str:
        return '' if 'weights' not in floor.units else floor.units['weights'].iloc[0].rpartition('/')[2]

    several = len({weights_of(f) for f in e.baselines} - {''}) > 1
    tuning = floor.record['metrics'].get(task_info(e.records[0]['task']).tuning_set, {})
    return dict(
        kind=kind_of(floor),
        weights=(several and weights_of(floor)) or None,
        labels=(floor.labels[0] or 'all') if floor.labels else None,
        value=floor.value,
        dev=tuning.get(floor.record['primary']['metric']),
    )


def side_of(gained: Interval | None) -> str:
    "On which side of a trivial model an arm is, as far as its interval tells: 'above' | 'below' | 'open'."
    if gained is None or gained.low is None or gained.low <= 0 <= gained.high:
        return 'open'
    return 'above' if gained.low > 0 else 'below'


def beside_floor(e: Evidence, name: str) -> dict:
    """Each arm beside the best trivial baseline of a kind, also one with more labels than the arm: arms: arm
    -> difference (positive is better), verdict: 'above' | 'below' | 'open'; shares: arm -> what it keeps of
    its teacher's gain over it; second: the next one of its kind, of other weights; {}: none was scored.
    """
    floors = [f for f in e.baselines if kind_of(f) == name]
    if not floors:
        return {}
    gained = {arm: gain_interval(runs, floors[0], e.units) for arm, runs in e.arms.items()}
    sides = {arm: dict(difference=of, verdict=side_of(of)) for arm, of in gained.items()}
    second = dict(second=floor_values(floors[1], e)) if len(floors) > 1 else {}
    return dict(arms=sides, shares=shares_over(e, floors[0].name)) | second


def shares_over(e: Evidence, name: str) -> dict[str, Interval]:
    "What each arm keeps of what its teacher gains over one trivial model: arms that keep a share alone."
    if e.baseline_table is None:
        return {}
    alone = replace(e, baseline_table=e.baseline_table[e.baseline_table['floor'] == name])
    return {arm: share for arm, share in deployment(alone).shares.items() if share} if alone.baselines else {}


def study_values(e: Evidence) -> dict:
    "What every study of arms has: its runs, its arms, its comparisons, and the best trivial models."

    def of_arm(arm: str, runs: list[dict]) -> dict:
        first = runs[0]
        return e.values[arm] | dict(
            n=len(runs),
            network=first['factors']['network'],
            steps=first.get('steps'),
            params=first['params_total'] / 1e6,
            examples=first.get('examples', 0) / (first['settings']['epochs'] or 1),
        )

    return about_values(e.records) | dict(
        arms={arm: of_arm(arm, runs) for arm, runs in e.arms.items()},
        arm_names=list(e.arms),
        floor=floor_values(e.baselines[0], e) if e.baselines else {},
        floors={kind_of(f): floor_values(f, e) for f in reversed(e.baselines)},  # the best of a kind
        frozen=beside_floor(e, FROZEN),
        tables=dict(comparisons=[compared(c) for _, c in e.comparisons]),
    )


def steps_values(e: Evidence, steps: Mapping[str, tuple[str, str]]) -> dict[str, dict]:
    "What chapters say of each step from an arm to another."
    pairs = {(c.a, c.b): c for _, c in e.comparisons}
    return {key: step_values(*pair, pairs.get(pair)) for key, pair in steps.items()}


def part_values(e: Evidence, aims: dict) -> dict:
    "All values of one study of the seven arms."
    arms = e.arms
    primary = e.records[0]['primary']
    effects = study_factorial(e.records, e.units)
    predicted = predicted_by_run(e)
    steps = steps_values(e, STEPS)
    for key, (a, b) in STEPS.items():
        runs = (arms.get(a, ()), arms.get(b, ()))
        steps[key] |= changed_pairs(*runs, e.units) | other_questions(*runs, e.units)

    def means(runs: list[dict]) -> dict[str, float]:  # of other metrics than the primary one
        scores = [r['metrics'][primary['set']] for r in runs]
        names = [name for name in ('mrr', 'p_at_1') if name in scores[0]]
        return {name: float(np.mean([of[name] for of in scores])) for name in names}

    return study_values(e) | dict(
        steps=steps,
        kd=dict(verdict=agreed([steps[k]['verdict'] for k in ('kd', 'kd_mixed')])),
        interaction=effect_values(effects, INTERACTION),
        one_format=one_format(arms, e.units),
        seeds_again=seeds_made_again(arms),
        decisions=decision_values(arms),
        mean={arm: means(runs) for arm, runs in arms.items()},
        aims=aim_values(e, aims),
        above={arm: share for arm, share in deployment(e).shares.items() if share},
        above_words=shares_over(e, 'shared_words'),
        memory=memory_values(arms_of(of_one_machine(e.records).runs)),
        amp=amp_values(e.records),
        front=pareto_front(e.values, 'train_s', primary['higher_is_better']),  # the cheapest first
        transfer_s=transfer_seconds(e.times.runs),
        gradients=gradient_values(arms),
        costs=dict(paid=paid_values(e, predicted)),
        fidelity=fidelity_values(e, predicted),
    )


def aim_value(wanted: float, found: Interval | None, higher_is_better: bool) -> dict:
    """One aim beside what was measured: wanted, measured, reached (by the estimate), decided: is the whole
    interval on one side?; verdict: 'reached' | 'missed' | 'not_told'.
    """

    def meets(x: float) -> bool:
        return bool(x >= wanted if higher_is_better else x <= wanted)

    reached = found is not None and meets(found.estimate)
    decided = found is not None and found.low is not None and meets(found.low) == meets(found.high)
    verdict = 'not_told' if not decided else 'reached' if reached else 'missed'
    return dict(wanted=wanted, measured=found, reached=reached, decided=decided, verdict=verdict)


def aim_values(e: Evidence, aims: dict) -> dict:
    """What was aimed at and what was measured: the primary metric of teacher and student, and kept: the
    student's over its teacher's; at least so much, or at most where lower is better.
    """
    first = e.records[0]
    p = first['primary']
    # beside a model that scores 0, what is kept above that is a share of the whole score
    of_set = dict(split=p['set'], set='', unit='', cluster='', metric=p['metric'])
    units = e.units[e.units['run_id'] == first['run_id']].drop(columns='run_id')
    floors = pd.concat([pd.DataFrame([of_set]), units], ignore_index=True)
    over_nothing = replace(e, baseline_table=floors.assign(floor='nothing', value=0.0))
    measured = {
        name: e.values.get(arm, {}).get('primary')
        for name, arm in dict(teacher='baseline', student='full_kd').items()
    }
    measured['kept'] = deployment(over_nothing).shares.get('full_kd')
    return {name: aim_value(aims[name], found, p['higher_is_better']) for name, found in measured.items()}

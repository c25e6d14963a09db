"""A study in numbers by key: its arms, compared with each other and with trivial baselines."""

from __future__ import annotations
from collections.abc import Mapping
from dataclasses import replace
import numpy as np
import pandas as pd
from kdnotes.core.config import task_info
from kdnotes.stats import calibration
from kdnotes.stats.comparable import TrivialBaseline, gain_interval, is_above, of_one_machine, unit_matrix
from kdnotes.stats.compare import compare
from kdnotes.stats.deployment import deployment, share_interval, with_teachers
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.intervals import Interval
from kdnotes.stats.labels import ratio_of_means
from kdnotes.stats.tables import teacher_agreement, pareto_front, score_kind
from kdnotes.stats.tests import holm
from kdnotes.results.table import arms_of
from .facts import about_values, amp_values, gradient_values, seeds_made_again
from .steps import (
    INTERACTIONS,
    STEPS,
    agreed,
    compared,
    decision_values,
    direction,
    interaction,
    memory_values,
    pairs_by_seed,
    steps_values,
    units_values,
)

INTERACTION = 'precision x kd'
FROZEN = 'frozen_encoder'  # the pretrained encoder as it comes: cosine of its embeddings


def transfer_seconds(found: list[dict]) -> dict[str, float]:  # network -> s
    "How long each network's first weights took, the same in all arms and seeds, where there is a transfer."
    return {r['factors']['network']: s for r in found if (s := r['time'].get('transfer_s'))}


def prediction_s(record: dict, examples: Mapping[str, int]) -> float | None:
    "Seconds of a prediction in a run's evaluations: on the way, and of all sets at the end; None: not known."
    if record.get('resumed_at') or 'evaluation' not in (record.get('phases') or {}):
        return None
    evaluated = [p for p in record.get('curve') or () if p.get('value') is not None]
    sets = [p.get('set') or [*record['metrics']][0] for p in evaluated[:-1]]  # the last point is of the end
    n = sum(examples[name] for name in (*sets, *record['metrics']))
    return record['phases']['evaluation']['seconds'] / n


def cores(record: dict) -> tuple[str, int]:
    "The device, and how many GPUs or cores of it."
    of = record['parallel']
    return record['environment']['device'], of['ranks'] * (of['threads_per_rank'] or 1)


def paid_values(e: Evidence, predicted: dict[str, pd.DataFrame]) -> dict[str, dict]:
    """After how many predictions a student has paid back its training and its signal (alone), and its own
    transfer as well (with_transfer), which is what the student's transfer took beyond that of its teacher:
    arm -> intervals; {} without times or a transfer of students.
    """
    found = e.times.runs
    transfer = transfer_seconds(found)
    if not {'student', 'teacher'} <= transfer.keys():
        return {}
    rows = predicted[found[0]['run_id']]
    if score_kind(found) != 'log_odds':  # a unit, not a row, is judged by itself
        rows = rows.drop_duplicates(['split', 'unit'])
    examples = rows['split'].value_counts().to_dict()
    own = transfer['student'] - transfer['teacher']
    by_id = {r['run_id']: r for r in found}
    paid = {}
    for arm, runs in arms_of(found).items():
        pairs = [(by_id[r['teacher_run_id']], r) for r in runs if r['teacher_run_id'] in by_id]
        each = [[prediction_s(r, examples) for r in pair] for pair in pairs]
        if not each or any(None in pair for pair in each) or any(cores(t) != cores(s) for t, s in pairs):
            continue
        saved = np.array([teachers - students for teachers, students in each])
        extra = np.array([r['time']['train_s'] + (r['time']['teacher_s'] or 0.0) for _, r in pairs])
        if saved.min() > 0:
            ways = dict(alone=extra, with_transfer=extra + own)
            paid[arm] = {name: ratio_of_means(seconds, saved) for name, seconds in ways.items()}
    return paid


def fidelity_values(e: Evidence, predicted: dict[str, pd.DataFrame]) -> dict:
    """nearer: taught arm -> Kendall's tau of it and of its control with the teacher, difference, p_holm;
    moved: the mean change of a score by the step of precision.
    """
    values = dict(
        nearer={
            one.arm: {name: getattr(one.gain, name) for name in ('taught', 'control', 'difference')}
            | dict(p_holm=one.p_holm)
            for one in teacher_agreement(e)
        }
    )
    split = e.records[0]['primary']['set']
    moved = []
    for pair in pairs_by_seed(e.arms, 'precision'):
        scores = calibration.align_predictions([predicted[r['run_id']] for r in pair], split)
        moved.append(np.abs(scores[1] - scores[0]).to_numpy(float))
    return values | (dict(moved=dict(mean=np.concatenate(moved).mean())) if moved else {})


def kind_of(floor: TrivialBaseline) -> str:
    "The kind of a trivial baseline: those of several pretrained weights have names of their own."
    return floor.name.partition(' ')[0]


def floor_values(floor: TrivialBaseline, e: Evidence) -> dict:
    """A trivial baseline: its kind, its pretrained weights (None: all of this study have the same), how many
    labels it is fitted to (None: to none), and its score on the set that is scored and on the one that chose
    the settings.
    """
    known = {f.name: f.units['weights'].iloc[0] for f in e.baselines if 'weights' in f.units}
    weights = {name: of.rpartition('/')[2] for name, of in known.items() if of}
    several = len({*weights.values()}) > 1
    tuning = floor.record['metrics'].get(task_info(e.records[0]['task']).tuning_set, {})
    return dict(
        kind=kind_of(floor),
        weights=weights.get(floor.name) if several else None,
        labels=(floor.labels[0] or 'all') if floor.labels else None,
        value=floor.value,
        dev=tuning.get(floor.record['primary']['metric']),
    )


def beside_floor(runs: list[dict], floor: TrivialBaseline, e: Evidence) -> dict:
    "An arm beside a trivial baseline: difference (positive is better), verdict: 'above' | 'below' | 'open'."
    gained = gain_interval(runs, floor, e.units)
    unknown = gained is None or gained.low is None or gained.low <= 0 <= gained.high
    return dict(difference=gained, verdict='open' if unknown else 'above' if is_above(gained) else 'below')


def shares_over(e: Evidence, name: str | None = None) -> dict[str, Interval]:
    "The share of its teacher's gain over one trivial baseline, or the best, that each arm recovers."
    if name is not None:
        table = e.baseline_table
        e = e if table is None else replace(e, baseline_table=table[table['floor'] == name])
        if not e.baselines:
            return {}
    return {arm: share for arm, share in deployment(e).shares.items() if share}


def study_values(e: Evidence) -> dict:
    "What every study of arms has: its runs, its arms, its comparisons, and the best trivial baselines."
    arms = {}
    for arm, runs in e.arms.items():
        first = runs[0]
        arms[arm] = e.values[arm] | dict(
            n=len(runs),
            network=first['factors']['network'],
            steps=first.get('steps'),
            params=first['params_total'] / 1e6,
            examples=first.get('examples', 0) / (first['settings']['epochs'] or 1),
        )
    best, second = [*(f for f in e.baselines if kind_of(f) == FROZEN), None, None][:2]
    frozen = {}
    if best:
        by_arm = {arm: beside_floor(runs, best, e) for arm, runs in e.arms.items()}
        frozen = dict(arms=by_arm, shares=shares_over(e, best.name))
        frozen |= dict(second=floor_values(second, e)) if second else {}  # of other weights
    return about_values(e.records) | dict(
        arms=arms,
        arm_names=list(e.arms),
        floor=floor_values(e.baselines[0], e) if e.baselines else {},
        floors={kind_of(f): floor_values(f, e) for f in reversed(e.baselines)},  # the best of a kind
        frozen=frozen,
        tables=dict(comparisons=[compared(c) for _, c in e.comparisons]),
    )


def part_values(e: Evidence, aims: dict, predicted: dict[str, pd.DataFrame]) -> dict:
    "All values of one study of the seven arms."
    arms, primary = e.arms, e.records[0]['primary']
    steps = steps_values(e, STEPS)
    for key in STEPS:
        steps[key] |= units_values(pairs_by_seed(arms, key), e.units)
    effects = {name: interaction(arms, e.units, weights) for name, weights in INTERACTIONS.items()}
    corrected = holm({name: p for name, (_, p) in effects.items()})
    (difference, p), p_holm = effects[INTERACTION], corrected[INTERACTION]
    of_both = dict(verdict=direction(difference, p_holm), difference=difference)
    of_both |= {} if p_holm is None else dict(p=p, p_holm=p_holm)
    in_one_format = [arms.get(arm) for arm in ('mixed_baseline', 'mixed_kd')]
    means = {
        arm: {
            name: np.mean([r['metrics'][primary['set']][name] for r in runs])
            for name in ('mrr', 'p_at_1')
            if name in runs[0]['metrics'][primary['set']]
        }
        for arm, runs in arms.items()
    }
    return study_values(e) | dict(
        steps=steps,
        kd=dict(verdict=agreed(steps[k]['verdict'] for k in ('kd', 'kd_mixed'))),
        interaction=of_both,
        one_format=compared(compare(*in_one_format, e.units)) if all(in_one_format) else {},
        seeds_again=seeds_made_again(arms),
        decisions=decision_values(arms),
        mean=means,
        aims=aim_values(e, aims),
        above=shares_over(e),
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
    """One aim: wanted, measured, reached (by the estimate), decided: is the whole interval on one side?;
    verdict: 'reached' | 'missed' | 'not_told'.
    """

    def meets(x: float) -> bool:
        return bool(x >= wanted if higher_is_better else x <= wanted)

    reached = found is not None and meets(found.estimate)
    decided = found is not None and found.low is not None and meets(found.low) == meets(found.high)
    verdict = 'not_told' if not decided else 'reached' if reached else 'missed'
    return dict(wanted=wanted, measured=found, reached=reached, decided=decided, verdict=verdict)


def aim_values(e: Evidence, aims: dict) -> dict:
    """Aims and what was measured: the primary metric of teacher and student, and kept: the student's score as
    a share of its teacher's.
    """
    measured = {
        name: e.values.get(arm, {}).get('primary')
        for name, arm in dict(teacher='baseline', student='full_kd').items()
    }
    pairs = with_teachers(*(e.arms.get(arm, ()) for arm in ('full_kd', 'baseline')))
    both = [unit_matrix(runs, e.units).to_numpy() for runs in zip(*pairs)]
    measured['kept'] = share_interval(*both) if both else None
    higher = e.records[0]['primary']['higher_is_better']
    return {name: aim_value(aims[name], of, higher) for name, of in measured.items()}

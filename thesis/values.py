"""What the thesis may say of a study: numbers by key, verdicts and tables."""

from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import replace
import numpy as np
import pandas as pd
from kdnotes.analysis import calibration, costs
from kdnotes.analysis.comparable import Floor, gain_interval, of_one_machine
from kdnotes.analysis.compare import (
    Comparison,
    study_factorial,
)
from kdnotes.analysis.intervals import Interval
from kdnotes.analysis.in_use import in_use
from kdnotes.analysis.plotting import arms_of
from kdnotes.analysis.evidence import Evidence
from kdnotes.analysis.tables import nearer_to_teacher, pareto_front, score_kind
from kdnotes.core.render import p_text
from kdnotes.report.tables import arms_table, epochs_cell
from kdnotes.core.config import task_info
from kdnotes.records.store import RecordError, predictions
from .facts import about_values, amp_values, gradient_values, seeds_made_again, table
from .steps import (
    INTERACTION,
    STEPS,
    agreed,
    changed_pairs,
    decision_values,
    decisions_table,
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


def transfer_seconds(found: Sequence[dict]) -> dict[str, float]:
    """What was waited for each network's first weights: that run's `total_s`, the same in all arms and
    seeds. 'teacher' and 'student', where they start from a transfer.
    """
    return {r['factors']['network']: s for r in found if (s := r['time'].get('transfer_s'))}


def paid_with_transfer(found: Sequence[dict], sizes: costs.Sizes) -> dict[str, Interval]:
    """After how many predictions students have paid back their training, their signal and their own
    transfer, which is what the student's transfer took beyond that of its teacher: arm -> predictions;
    {} without a transfer of students.
    """
    transfer = transfer_seconds(found)
    if not {'student', 'teacher'} <= transfer.keys():
        return {}
    own = transfer['student'] - transfer['teacher']
    by_id = {r['run_id']: r for r in found}
    paid = {}
    for arm, runs in arms_of(found).items():
        each = [
            costs.payback(r, by_id[r['teacher_run_id']], sizes, found)
            for r in runs
            if r['teacher_run_id'] in by_id
        ]
        if each and all(p.seconds is not None for p in each):
            extra, saved = ([getattr(p, part).seconds for p in each] for part in ('extra', 'saved'))
            paid[arm] = costs.ratio_of_means([seconds + own for seconds in extra], saved)
    return paid


def paid_values(e: Evidence, predicted: dict[str, pd.DataFrame]) -> dict[str, dict]:
    """After how many predictions a student has paid back its training and its signal (alone), and its own
    transfer as well (with_transfer): arm -> intervals; {} without times or predictions.
    """
    found = e.times.runs
    if not found or not predicted:
        return {}
    first = found[0]
    its_units = e.units[e.units['run_id'] == first['run_id']]
    kind = score_kind(found)
    sizes = costs.sizes_of(predicted[first['run_id']], its_units, first['primary']['set'], 'p_at_1', kind)
    alone = costs.payback_table(found, sizes).table
    return {
        arm: dict(alone=alone.at[arm, 'seconds'], with_transfer=of)
        for arm, of in paid_with_transfer(found, sizes).items()
    }


def fidelity_values(e: Evidence, scores: dict[str, pd.DataFrame]) -> dict:
    """nearer: taught arm -> Kendall's tau of it and of its control with the teacher, difference, p_holm;
    moved: the mean change of a score by the step of precision, where there are predictions.
    """
    values = dict(
        nearer={
            one.arm: dict(
                taught=one.gain.taught,
                control=one.gain.control,
                difference=one.gain.difference,
                p_holm=one.p_holm,
            )
            for one in nearer_to_teacher(e)
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


def effects_table(comparisons: Sequence[tuple[str, Comparison]]) -> pd.DataFrame:  # a row a comparison, text
    "Every comparison in numbers, with its p and the corrected p; a time says little without the epochs."

    def ratio(key: str):
        def cell(c: Comparison) -> str | None:
            its = c.speedup.get(key)
            return its and f'{its:.2f}' + f' (n={its.n})' * (its.n != c.n_seeds)

        return cell

    made = table(
        [c for _, c in comparisons],
        {
            'a': '{a}',
            'b': '{b}',
            'factor': lambda c: (c.attribution and c.attribution.factor) or 'several',
            'seeds': '{n_seeds}',
            'difference': '{difference:+.3f}',
            'p': '{p:p}',
            'p (Holm)': '{p_holm:p}',
            'epochs': epochs_cell,
            'training': ratio('train_s'),
            'its p': lambda c: p_text(c.p_times_holm.get('train_s')),
            'total': ratio('total_s'),
        },
    )
    if made.empty:
        return made
    if (made['training'] == '-').all():
        return made.drop(columns=['epochs', 'training', 'its p', 'total'])
    return made


FROZEN = 'frozen_encoder'  # the pretrained encoder as it comes: cosine of its embeddings


def floor_values(floor: Floor, tuning_set: str) -> dict:
    "What a trivial model is called and what it scores on the set that is scored, and on the one that chose."
    dev = floor.record['metrics'].get(tuning_set, {}).get(floor.record['primary']['metric'])
    return dict(words=floor.words, value=floor.value, dev=dev)


def kind_of(floor: Floor) -> str:
    "What kind of trivial model it is: those of several pretrained weights have names of their own."
    return floor.name.partition(' ')[0]


def side_of(gained: Interval | None) -> str:
    "On which side of a trivial model an arm is, as far as its interval tells: 'above' | 'below' | 'open'."
    if gained is None or gained.low is None or gained.low <= 0 <= gained.high:
        return 'open'
    return 'above' if gained.low > 0 else 'below'


def beside_floor(e: Evidence, name: str) -> dict:
    """Each arm beside the best trivial baseline of a kind, also one with more labels than the arm: arms: arm
    -> difference (positive is better),
    verdict: 'above' | 'below' | 'open'; shares: arm -> what it keeps of its teacher's gain over it; second:
    the next one of its kind, of other weights; {}: none was scored.
    """
    floors = [f for f in e.trivial if kind_of(f) == name]
    if not floors:
        return {}
    floor, *others = floors
    gained = {arm: gain_interval(runs, floor, e.units) for arm, runs in e.arms.items()}
    sides = {arm: dict(difference=of, verdict=side_of(of)) for arm, of in gained.items()}
    tuning = task_info(e.records[0]['task']).tuning_set
    second = dict(second=floor_values(others[0], tuning)) if others else {}
    return dict(arms=sides, shares=shares_over(e, floor.name)) | second


def shares_over(e: Evidence, name: str) -> dict[str, Interval]:
    "What each arm keeps of what its teacher gains over one trivial model: arms that keep a share alone."
    if e.floors is None:
        return {}
    alone = replace(e, floors=e.floors[e.floors['floor'] == name])
    return {arm: share for arm, share in in_use(alone).shares.items() if share} if alone.trivial else {}


def study_values(e: Evidence) -> dict:
    "What every study of arms has: its runs, its arms, and who the best trivial model is."
    best = e.trivial[0] if e.trivial else None
    tuning = task_info(e.records[0]['task']).tuning_set

    def of_arm(arm: str, runs: list[dict]) -> dict:
        first = runs[0]
        return e.values[arm] | dict(
            n=len(runs),
            steps=first.get('steps'),
            params=first['params_total'] / 1e6,
            examples=first.get('examples', 0) / (first['settings']['epochs'] or 1),
        )

    return about_values(e.records) | dict(
        arms={arm: of_arm(arm, runs) for arm, runs in e.arms.items()},
        floor=dict(words=best.words, value=best.value) if best else {},
        floors={kind_of(f): floor_values(f, tuning) for f in reversed(e.trivial)},  # the best of a kind
        frozen=beside_floor(e, FROZEN),
        tables=dict(
            arms=arms_table(e.records, e.values).reset_index(), comparisons=effects_table(e.comparisons)
        ),
    )


def steps_values(e: Evidence, steps: Mapping[str, tuple[str, str]]) -> dict[str, dict]:
    "What chapters say of each step from an arm to another."
    pairs = {(c.a, c.b): c for _, c in e.comparisons}
    return {key: step_values(*pair, pairs.get(pair)) for key, pair in steps.items()}


def mean_metrics(e: Evidence, names: Sequence[str] = ('mrr', 'p_at_1')) -> dict[str, dict[str, float]]:
    "Means over seeds of other metrics than the primary one, on its set: arm -> name -> mean."
    where = e.records[0]['primary']['set']
    return {
        arm: {
            name: float(np.mean([r['metrics'][where][name] for r in runs]))
            for name in names
            if name in runs[0]['metrics'][where]
        }
        for arm, runs in e.arms.items()
    }


def part_values(e: Evidence, aims: dict) -> dict:
    "All values of one study of the seven arms."
    arms = e.arms
    higher = e.records[0]['primary']['higher_is_better']
    effects = study_factorial(e.records, e.units)
    decisions = decision_values(arms)
    predicted = predicted_by_run(e)
    steps = steps_values(e, STEPS)
    for key, (a, b) in STEPS.items():
        runs = (arms.get(a, ()), arms.get(b, ()))
        steps[key] |= changed_pairs(*runs, e.units) | other_questions(*runs, e.units)
    values = study_values(e)
    values['tables']['decisions'] = decisions_table(decisions)
    return values | dict(
        steps=steps,
        kd=dict(verdict=agreed([steps[k]['verdict'] for k in ('kd', 'kd_mixed')])),
        interaction=effect_values(effects, INTERACTION),
        one_format=one_format(arms, e.units),
        seeds_again=seeds_made_again(arms),
        decisions=decisions,
        mean=mean_metrics(e),
        aims=aim_values(e.values, in_use(over_nothing(e)).shares.get('full_kd'), aims, higher),
        above={arm: share for arm, share in in_use(e).shares.items() if share},
        above_words=shares_over(e, 'shared_words'),
        memory=memory_values(arms_of(of_one_machine(e.records).runs)),
        amp=amp_values(e.records),
        front=pareto_front(e.values, 'train_s', higher),  # the cheapest first
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


def over_nothing(e: Evidence) -> Evidence:
    "The same study beside a model that scores 0: what is kept above that is a share of the whole score."
    first = e.records[0]
    p = first['primary']
    of_set = dict(split=p['set'], set='', unit='', cluster='', metric=p['metric'])
    units = e.units[e.units['run_id'] == first['run_id']].drop(columns='run_id')
    floors = pd.concat([pd.DataFrame([of_set]), units], ignore_index=True)
    return replace(e, floors=floors.assign(floor='nothing', value=0.0))


def aim_values(
    by_arm: dict[str, dict[str, Interval]], kept: Interval | None, aims: dict, higher_is_better: bool = True
) -> dict:
    """What was aimed at, what was measured, and whether it was reached: of the primary metric for teacher
    and student, and kept: the student's over its teacher's; at least so much, or at most where lower is
    better.
    """
    teacher, student = (by_arm.get(arm, {}).get('primary') for arm in ('baseline', 'full_kd'))
    measured = dict(teacher=teacher, student=student, kept=kept)
    return {name: aim_value(aims[name], found, higher_is_better) for name, found in measured.items()}

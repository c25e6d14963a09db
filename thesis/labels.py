"""When does distillation pay? The values of a study of few labels and of rows without one."""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple
from kdnotes.stats.comparable import baselines_for
from kdnotes.stats.compare import Comparison, compare, corrected
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.intervals import Interval
from kdnotes.stats.labels import (
    TrainedArm,
    LabelEfficiency,
    gap_closed,
    trained_arms,
    values_of,
    label_efficiency,
)
from .facts import uncommitted
from .steps import verdict
from .values import beside_floor, floor_values, shares_over, study_values


class Beside(NamedTuple):
    "A taught arm and one without distillation, of as many labels."

    pays: LabelEfficiency
    taught: TrainedArm
    alone: TrainedArm
    is_main: bool  # is it the best without distillation?
    starts_alike: bool  # is it the best of those that start from the same weights?
    closed: Interval | None  # the share of the gap to the teacher; None: it is not known
    result: Comparison  # with Holm's correction over all of a study


def held_against(
    e: Evidence,
    paid: Sequence[LabelEfficiency],  # of `label_efficiency`
) -> list[Beside]:
    "Each taught arm compared with the best without distillation, and with others of as many labels."
    alone = [its for its in trained_arms(e.arms) if its.role == 'alone']
    pairs = []
    for p in paid:
        seeds = {r['seed'] for r in p.taught.runs}
        others = [its for its in alone if its.labels == p.taught.labels and its.arm != p.alone.arm]
        for its in [p.alone, *(other for other in others if seeds <= {r['seed'] for r in other.runs})]:
            is_main = its is p.alone
            closed = p.closed
            if p.teacher and not is_main:
                closed = gap_closed(*values_of([its, p.taught, p.teacher], e.units))
            starts_alike = p.control is not None and its.arm == p.control.arm
            pairs.append((p, p.taught, its, is_main, starts_alike, closed))
    found = corrected([('variant', compare(its.runs, p.taught.runs, e.units)) for p, _, its, *_ in pairs])
    return [Beside(*pair, result) for pair, (_, result) in zip(pairs, found)]


def equivalent_labels(
    p: LabelEfficiency,
) -> dict | None:  # estimate, low, high (0: fewer than were tried, inf: more), tried, n
    "How many labels reach the same score without distillation; None: it is not known."
    return asdict(p.equivalent) if p.equivalent and p.equivalent.is_known else None


def soft_targets(its: TrainedArm) -> dict:
    "Their weight and temperature in a taught arm."
    settings = its.runs[0]['settings']
    return dict(weight=settings['alpha'], temperature=settings['temperature'])


def variant_values(
    e: Evidence,
    paid: Sequence[LabelEfficiency],  # of `label_efficiency`
    taught: TrainedArm,  # of one of these
) -> dict[str, dict]:
    "The other arms that are taught with as many labels and with texts, each beside this one, by arm."
    others = [
        p for p in paid if p.taught.texts and p.taught.labels == taught.labels and p.taught.arm != taught.arm
    ]
    found = corrected([('variant', compare(taught.runs, p.taught.runs, e.units)) for p in others])
    return {
        p.taught.arm: dict(texts=p.taught.texts, soft_targets=soft_targets(p.taught), closed=p.closed)
        | dict(difference=result.difference, p=result.p_holm)
        for p, (_, result) in zip(others, found)
    }


def labels_values(e: Evidence) -> dict:
    """All that a chapter asks of it; of the arm with rows without a label that has the fewest labels: beside
    the best without distillation (texts), beside the best that starts from the same weights (same_start), and
    both for the arm that is taught without these rows (labelled_only, labelled_same_start).
    """
    known, paid = trained_arms(e.arms), label_efficiency(e)
    found = held_against(e, paid)
    scores = {its.arm: e.values[its.arm]['primary'] for its in known}
    values = study_values(e)
    values['tables'] |= dict(
        learners=[
            dict(arm=its.arm, labels=its.labels, texts=its.texts, n=len(its.runs))
            | dict(steps=its.runs[0].get('steps'), score=scores[its.arm])
            for its in known
        ],
        pays=[
            dict(taught=of.taught.arm, alone=of.alone.arm, best=of.is_main, closed=of.closed)
            | dict(difference=of.result.difference, p=of.result.p_holm, worth=equivalent_labels(of.pays))
            for of in found
        ],
    )
    with_texts = [of for of in found if of.is_main and of.taught.texts]
    if not with_texts:
        return values
    kept, kept_words = shares_over(e), shares_over(e, 'shared_words')

    def one(of: Beside | None) -> dict | None:
        "What chapters say of one taught arm beside one without distillation."
        if of is None:
            return None
        best = next(iter(baselines_for(e.baselines, of.taught.runs)), None)
        return dict(
            taught=of.taught.arm,
            alone=of.alone.arm,
            labels=of.taught.labels,
            texts=of.taught.texts,
            n=len(of.taught.runs),
            scores=dict(taught=scores[of.taught.arm], alone=scores[of.alone.arm]),
            difference=of.result.difference,
            p=of.result.p_holm,
            verdict=verdict(of.result),
            closed=of.closed,
            starts='alike' if of.starts_alike else 'elsewhere',
            kept=kept.get(of.taught.arm),
            untrained=best and floor_values(best, e) | beside_floor(of.taught.runs, best, e),
            kept_words=kept_words.get(of.taught.arm),
            worth=equivalent_labels(of.pays),
        )

    def same_start(taught: TrainedArm) -> Beside | None:
        return next((of for of in found if of.starts_alike and of.taught.arm == taught.arm), None)

    chosen = min(with_texts, key=lambda of: of.taught.labels)
    taught, teacher = chosen.taught, chosen.pays.teacher
    without = [of for of in found if of.is_main and not of.taught.texts]
    only = next((of for of in without if of.taught.labels == taught.labels), None)
    run = taught.runs[0]
    return values | dict(
        texts=one(chosen),
        same_start=one(same_start(taught)),
        labelled_only=one(only),
        labelled_same_start=one(only and same_start(only.taught)),
        variants=variant_values(e, paid, taught),
        format=run['precision'],
        share=run['settings']['unlabelled_share'],
        soft_targets=soft_targets(taught),
        teacher_primary=scores[teacher.arm] if teacher else None,
        most_labels=str(max(its.labels for its in known if its.labels)),
        uncommitted=all(map(uncommitted, e.records)),
        params=dict(
            taught=run['params_total'] / 1e6,
            teacher=teacher.runs[0]['params_total'] / 1e6 if teacher else None,
        ),
    )

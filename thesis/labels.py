"""When does distillation pay? The values of a study of few labels and of rows without one."""

from __future__ import annotations
from collections.abc import Sequence
from typing import NamedTuple
from kdnotes.stats.compare import Comparison, compare, corrected, uncommitted
from kdnotes.stats.deployment import deployment
from kdnotes.stats.intervals import Interval
from kdnotes.stats.labels import (
    TrainedArm,
    LabelEfficiency,
    gap_closed,
    trained_arms,
    values_of,
    label_efficiency,
)
from kdnotes.stats.comparable import beside, gain_interval
from kdnotes.stats.evidence import Evidence
from .steps import verdict
from .values import floor_values, shares_over, side_of, study_values


class Beside(NamedTuple):
    "A taught arm and one without distillation."

    pays: LabelEfficiency
    alone: TrainedArm  # of as many labels
    result: Comparison  # with Holm's correction over all of a study

    @property
    def is_main(self) -> bool:
        "Is it the best without distillation, of as many labels?"
        return self.alone.arm == self.pays.alone.arm

    @property
    def starts_alike(self) -> bool:
        "Is it the best of those that start from the same weights?"
        return self.pays.control is not None and self.alone.arm == self.pays.control.arm

    def closed(self, e: Evidence) -> Interval | None:
        "The share of the gap between the arm without distillation and the teacher; None: it is not known."
        if self.is_main or self.pays.teacher is None:
            return self.pays.closed
        return gap_closed(*values_of([self.alone, self.pays.taught, self.pays.teacher], e.units))

    @property
    def worth(self) -> dict | None:
        """How many labels reach the same score without distillation: estimate, low, high (0: fewer than were
        tried, None: more), tried; None: it is not known.
        """
        worth = self.pays.equivalent
        if worth is None or not worth.is_known:
            return None
        return {name: getattr(worth, name) for name in ('estimate', 'low', 'high', 'tried', 'n')}


def held_against(
    e: Evidence,
    paid: Sequence[LabelEfficiency],  # of `label_efficiency`
) -> list[Beside]:
    "Each taught arm beside the best without distillation, and beside others with as many labels."
    alone = [its for its in trained_arms(e.arms) if its.role == 'alone']
    pairs = []
    for p in paid:
        seeds = {r['seed'] for r in p.taught.runs}
        others = [its for its in alone if its.labels == p.taught.labels and its.arm != p.alone.arm]
        pairs += [(p, p.alone)]
        pairs += [(p, its) for its in others if seeds <= {r['seed'] for r in its.runs}]
    found = corrected([('variant', compare(a.runs, p.taught.runs, e.units)) for p, a in pairs])
    return [Beside(*pair, result) for pair, (_, result) in zip(pairs, found)]


def variant_values(
    e: Evidence,
    paid: Sequence[LabelEfficiency],  # of `label_efficiency`
    chosen: LabelEfficiency,  # of these
) -> dict[str, dict]:
    "The other arms that are taught with as many labels and with texts, each beside the chosen one, by arm."
    taught = chosen.taught
    others = [
        p for p in paid if p.taught.texts and p.taught.labels == taught.labels and p.taught.arm != taught.arm
    ]
    found = corrected([('variant', compare(taught.runs, p.taught.runs, e.units)) for p in others])
    return {
        p.taught.arm: dict(
            texts=p.taught.texts,
            soft_targets=_soft_targets(p.taught),
            closed=p.closed,
            difference=result.difference,
            p=result.p_holm,
        )
        for p, (_, result) in zip(others, found)
    }


def _soft_targets(its: TrainedArm) -> dict:
    "Their weight and temperature in a taught arm."
    settings = its.runs[0]['settings']
    return dict(weight=settings['alpha'], temperature=settings['temperature'])


def _untrained(its: TrainedArm, e: Evidence) -> dict | None:
    "The best trivial baseline with as many labels, and an arm's difference from it; None: not measured."
    best = next(iter(beside(e.baselines, its.runs)), None)
    if best is None:
        return None
    gained = gain_interval(its.runs, best, e.units)
    return floor_values(best, e) | dict(difference=gained, verdict=side_of(gained))


def labels_values(e: Evidence) -> dict:
    """All that a chapter asks of it; of the arm with rows without a label that has the fewest labels: beside
    the best without distillation (texts), beside the best that starts from the same weights (same_start), and
    both for the arm that is taught without these rows (labelled_only, labelled_same_start).
    """
    known = trained_arms(e.arms)
    paid = label_efficiency(e)
    found = held_against(e, paid)
    values = study_values(e)
    values['tables'] |= dict(
        learners=[
            dict(arm=its.arm, labels=its.labels, texts=its.texts, n=len(its.runs))
            | dict(steps=its.runs[0].get('steps'), score=e.values[its.arm]['primary'])
            for its in known
        ],
        pays=[
            dict(taught=of.pays.taught.arm, alone=of.alone.arm, best=of.is_main, closed=of.closed(e))
            | dict(difference=of.result.difference, p=of.result.p_holm, worth=of.worth)
            for of in found
        ],
    )
    main = [of for of in found if of.is_main]
    with_texts = [of for of in main if of.pays.taught.texts]
    if not with_texts:
        return values
    kept = deployment(e).shares
    kept_words = shares_over(e, 'shared_words')

    def one(of: Beside | None) -> dict | None:
        "What chapters say of one taught arm beside one without distillation."
        if of is None:
            return None
        taught, alone = of.pays.taught, of.alone
        return dict(
            taught=taught.arm,
            alone=alone.arm,
            labels=taught.labels,
            texts=taught.texts,
            n=len(taught.runs),
            scores=dict(taught=e.values[taught.arm]['primary'], alone=e.values[alone.arm]['primary']),
            difference=of.result.difference,
            p=of.result.p_holm,
            verdict=verdict(of.result),
            closed=of.closed(e),
            starts='alike' if of.starts_alike else 'elsewhere',
            kept=kept[taught.arm],
            untrained=_untrained(taught, e),
            kept_words=kept_words.get(taught.arm),
            worth=of.worth,
        )

    def same_start(main_one: Beside | None) -> Beside | None:
        arm = main_one and main_one.pays.taught.arm
        return next((of for of in found if of.pays.taught.arm == arm and of.starts_alike), None)

    chosen = min(with_texts, key=lambda of: of.pays.taught.labels)
    taught, teacher = chosen.pays.taught, chosen.pays.teacher
    of_labels = [of for of in main if of.pays.taught.labels == taught.labels and not of.pays.taught.texts]
    labelled = next(iter(of_labels), None)
    run = taught.runs[0]
    return values | dict(
        texts=one(chosen),
        same_start=one(same_start(chosen)),
        labelled_only=one(labelled),
        labelled_same_start=one(same_start(labelled)),
        variants=variant_values(e, paid, chosen.pays),
        format=run['precision'],
        share=run['settings']['unlabelled_share'],
        soft_targets=_soft_targets(taught),
        teacher_primary=e.values[teacher.arm]['primary'] if teacher else None,
        most_labels=str(max(its.labels for its in known if its.labels)),
        uncommitted=all(map(uncommitted, e.records)),
        params=dict(
            taught=run['params_total'] / 1e6,
            teacher=teacher.runs[0]['params_total'] / 1e6 if teacher else None,
        ),
    )

"""When does distillation pay? What the thesis says of few labels and of rows without one."""

from __future__ import annotations
from collections.abc import Sequence
from typing import NamedTuple
import pandas as pd
from kdnotes.analysis.compare import Comparison, compare, corrected, uncommitted
from kdnotes.analysis.in_use import in_use
from kdnotes.analysis.intervals import Interval, scaled
from kdnotes.analysis.labels import Learner, Pays, gap_closed, learners, values_of, what_pays
from kdnotes.analysis.comparable import beside, gain_interval
from kdnotes.analysis.evidence import Evidence
from .facts import table
from .steps import verdict
from .values import shares_over, side_of, study_values


class Beside(NamedTuple):
    "A taught arm and one without distillation."

    pays: Pays
    alone: Learner  # of as many labels
    result: Comparison  # with Holm's correction over all of a study

    @property
    def is_main(self) -> bool:
        "Is it the best without distillation, of as many labels?"
        return self.alone.arm == self.pays.alone.arm

    @property
    def starts_alike(self) -> bool:
        "Is it the best of those that start from the same weights?"
        return self.pays.control is not None and self.alone.arm == self.pays.control.arm


def held_against(
    e: Evidence,
    paid: Sequence[Pays],  # of `what_pays`
) -> list[Beside]:
    "Each taught arm beside the best without distillation, and beside others with as many labels."
    alone = [its for its in learners(e.arms) if its.role == 'alone']
    pairs = []
    for p in paid:
        seeds = {r['seed'] for r in p.taught.runs}
        others = [its for its in alone if its.labels == p.taught.labels and its.arm != p.alone.arm]
        pairs += [(p, p.alone)]
        pairs += [(p, its) for its in others if seeds <= {r['seed'] for r in its.runs}]
    found = corrected([('variant', compare(a.runs, p.taught.runs, e.units)) for p, a in pairs])
    return [Beside(*pair, result) for pair, (_, result) in zip(pairs, found)]


def _closed(of: Beside, e: Evidence) -> Interval | None:
    "The share of the gap between the arm without distillation and the teacher; None: it is not known."
    if of.is_main or of.pays.teacher is None:
        return of.pays.closed
    return gap_closed(*values_of([of.alone, of.pays.taught, of.pays.teacher], e.units))


def learners_table(e: Evidence) -> pd.DataFrame:
    "What every arm learnt from, and what it reached: a row an arm, text."
    return table(
        learners(e.arms),
        {
            'arm': '{arm}',
            'rows with a label': lambda its: 'given' if its.labels is None else f'{its.labels:,}',
            'without': lambda its: f'{its.texts:,}' if its.texts else None,
            'steps': lambda its: its.runs[0].get('steps') or None,
            'seeds': lambda its: None if its.labels is None else len(its.runs),
            'score': lambda its: f'{e.values[its.arm]["primary"]:.3f}',
        },
    )


def pays_table(e: Evidence, found: Sequence[Beside]) -> pd.DataFrame:
    "What distillation did for each taught arm: a row a pair, text."
    return table(
        found,
        {
            'taught': '{pays.taught.arm}',
            'without distillation': '{alone.arm}',
            'difference': '{result.difference:+.3f}',
            'p': '{result.p_holm:p}',
            'of the gap, %': lambda of: (
                f'{scaled(closed, 100.0):.0f}' if (closed := _closed(of, e)) else None
            ),
            'labels for that score': lambda of: (of.is_main and of.pays.worth) or None,
        },
    )


class Variant(NamedTuple):
    "A taught arm, beside the one it is a variant of."

    pays: Pays
    result: Comparison  # with Holm's correction over the variants

    @property
    def taught(self) -> Learner:
        "The variant."
        return self.pays.taught


def variants(
    e: Evidence,
    paid: Sequence[Pays],  # of `what_pays`
    chosen: Pays,  # of these
) -> list[Variant]:
    "The other arms that are taught with as many labels and with texts, each beside the chosen one."
    others = [
        p
        for p in paid
        if p.taught.texts and p.taught.labels == chosen.taught.labels and p.taught.arm != chosen.taught.arm
    ]
    found = corrected([('variant', compare(chosen.taught.runs, p.taught.runs, e.units)) for p in others])
    return [Variant(p, result) for p, (_, result) in zip(others, found)]


def variants_table(e: Evidence, found: Sequence[Variant]) -> pd.DataFrame:
    "What other texts, starts and settings change: a row an arm, text."
    return table(
        found,
        {
            'taught': '{taught.arm}',
            'texts without a label': '{taught.texts:,}',
            'seeds': '{result.n_seeds}',
            'score': lambda of: f'{e.values[of.taught.arm]["primary"]:.3f}',
            'difference': '{result.difference:+.3f}',
            'p': '{result.p_holm:p}',
        },
    )


def _soft_targets(its: Learner) -> dict:
    "Their weight and temperature in a taught arm."
    settings = its.runs[0]['settings']
    return dict(weight=settings['alpha'], temperature=settings['temperature'])


def _untrained(its: Learner, e: Evidence) -> dict | None:
    "The best trivial baseline with as many labels, and an arm's difference from it; None: not measured."
    best = next(iter(beside(e.trivial, its.runs)), None)
    if best is None:
        return None
    gained = gain_interval(its.runs, best, e.units)
    return dict(words=best.words, value=best.value, difference=gained, verdict=side_of(gained))


def _values(
    of: Beside,
    e: Evidence,
    kept: dict[str, dict[str, Interval | None]],  # baseline -> arm -> the share of the teacher's gain over it
) -> dict:
    "What chapters say of one taught arm beside one without distillation."
    taught, alone = of.pays.taught, of.alone
    both = dict(taught=taught, alone=alone)
    return {name: its.arm for name, its in both.items()} | dict(
        labels=taught.labels,
        texts=taught.texts,
        n=len(taught.runs),
        scores={name: e.values[its.arm]['primary'] for name, its in both.items()},
        difference=of.result.difference,
        p=of.result.p_holm,
        verdict=verdict(of.result),
        closed=_closed(of, e),
        starts='alike' if of.starts_alike else 'elsewhere',
        kept=kept['best'][taught.arm],
        untrained=_untrained(taught, e),
        kept_words=kept['shared_words'].get(taught.arm),
        worth=str(of.pays.worth) if of.pays.worth and of.pays.worth.is_told else None,
    )


def labels_values(e: Evidence) -> dict:
    """All that a chapter asks of it; of the arm with rows without a label that has the fewest labels: beside
    the best without distillation (texts), beside the best that starts from the same weights (same_start), and
    both for the arm that is taught without these rows (labelled_only, labelled_same_start).
    """
    paid = what_pays(e)
    found = held_against(e, paid)
    values = study_values(e)
    values['tables'] |= dict(learners=learners_table(e), pays=pays_table(e, found))
    main = [of for of in found if of.is_main]
    with_texts = [of for of in main if of.pays.taught.texts]
    if not with_texts:
        return values
    chosen = min(with_texts, key=lambda of: of.pays.taught.labels)
    taught, teacher = chosen.pays.taught, chosen.pays.teacher
    varied = variants(e, paid, chosen.pays)
    values['tables']['variants'] = variants_table(e, varied)
    plain = [of for of in main if of.pays.taught.labels == taught.labels and not of.pays.taught.texts]

    kept = dict(best=in_use(e).shares, shared_words=shares_over(e, 'shared_words'))

    def same_start(main_one: Beside) -> dict | None:
        arm = main_one.pays.taught.arm
        pairs = [of for of in found if of.pays.taught.arm == arm and of.starts_alike]
        return _values(pairs[0], e, kept) if pairs else None

    run = taught.runs[0]
    return values | dict(
        texts=_values(chosen, e, kept),
        same_start=same_start(chosen),
        labelled_only=_values(plain[0], e, kept) if plain else None,
        labelled_same_start=same_start(plain[0]) if plain else None,
        variants={
            of.taught.arm: dict(
                texts=of.taught.texts,
                soft_targets=_soft_targets(of.taught),
                closed=of.pays.closed,
                difference=of.result.difference,
                p=of.result.p_holm,
            )
            for of in varied
        },
        format=run['precision'],
        share=run['settings']['unlabelled_share'],
        soft_targets=_soft_targets(taught),
        teacher_primary=e.values[teacher.arm]['primary'] if teacher else None,
        most_labels=str(max(its.labels for its in learners(e.arms) if its.labels)),
        uncommitted=all(map(uncommitted, e.records)),
        params=dict(
            taught=run['params_total'] / 1e6,
            teacher=teacher.runs[0]['params_total'] / 1e6 if teacher else None,
        ),
    )

"What a study found, in one sentence with its interval and its seeds: the head of its page."

from collections.abc import Sequence
from pathlib import Path
import pandas as pd
from kdnotes.analysis.comparable import beside, gain_interval, is_above
from kdnotes.analysis.compare import Comparison, verdict_on
from kdnotes.analysis.evidence import Evidence
from kdnotes.analysis.labels import Pays, pays_sentences, what_pays
from kdnotes.analysis.tests import ALPHA, Family, holm, p_words
from kdnotes.analysis.wording import better_words, difference_words, metric_on, unit_of
from kdnotes.core.config import counted
from kdnotes.core.files import read_json
from thesis.build import KD_PARTS
from thesis.rates import AtRate, at_rates

# factor -> what it does, the most asked one first
FACTORS = {
    'kd': 'learning from a teacher',
    'precision': 'computing in sixteen bits',
    'ranks': 'training in several processes',
    'network': 'the smaller network',
}


def rests_on(c: Comparison) -> str:
    "Seeds, units and p of a difference."
    _, p, corrected = c.tested('primary')
    found = [counted(c.n_seeds, 'seed')]
    if c.n_units:
        found.append(counted(c.n_units, c.unit_name[:-1]))
    if p is not None:
        several = corrected is not None and len(c.family.members) > 1
        found.append(f'{p_words(corrected)}, corrected' if several else p_words(p))
    return ', '.join(found)


def of_factor(c: Comparison) -> str:
    "What one factor does."
    what = FACTORS[c.attribution.factor]
    metric = metric_on(c.primary, c.task)
    whose = f'{c.b} beside {c.a}, {rests_on(c)}'
    verdict = verdict_on(c).code
    floor = f' But {c.at_floor}.' if c.at_floor else ''
    if verdict == 'significant':
        return f'{what.capitalize()} makes {metric} {better_words(c)} ({whose}).{floor}'
    if verdict == 'not_tested':
        alone = f'{whose}; one seed tells nothing about others'
        return f'With {what}, {metric} is {better_words(c)} ({alone}).{floor}'
    if c.attribution.factor == 'precision' and c.equivalences and c.equivalences[0].equivalent:
        same = c.equivalences[0]
        unit = unit_of(c.task, c.primary['metric'])
        margin = f'{same.margin * unit.factor:g}{unit.words}'
        alike = ', and every value is the same' if c.identical else ''
        rests = f'{c.b} beside {c.a}, {counted(c.n_seeds, "seed")}; TOST, {p_words(same.p_equivalent)}'
        told = f'{difference_words(c)}{alike} ({rests})'
        return f'{what.capitalize()} leaves {metric} within ±{margin}: {told}.{floor}'
    return (
        f'No effect of {what} on {metric} is shown: {difference_words(c)} ({whose}{_uncorrected(c)}).{floor}'
    )


def _uncorrected(c: Comparison) -> str:
    "What is said of a difference whose interval excludes 0, though its corrected p does not tell it from 0."
    low, high = c.difference.low, c.difference.high
    return '' if low is None or low <= 0 <= high else '; its own interval, uncorrected, excludes 0'


VALUES = Path(__file__).parents[1] / 'thesis' / 'generated' / 'values.json'


def of_soft_targets(study: str) -> str | None:  # None: the thesis does not pool this study with others
    """What soft targets add, over all studies, formats and questions that asked it: the one test of many that
    is significant would be a finding by choice.
    """
    values = read_json(VALUES)
    studies = [values[f'{part}.study'] for part in KD_PARTS]
    if study not in studies:
        return None

    def added(where: str) -> str:
        key = f'kd.{where}.difference'
        estimate, low, high = (values[f'{key}.{end}'] for end in ('estimate', 'low', 'high'))
        return f'{estimate:+.4f} [{low:+.4f}, {high:+.4f}]'

    rests = f'{values["kd.everywhere.difference.n"]} seeds, {p_words(values["kd.everywhere.p"])}, uncorrected'
    every = values['kd.everywhere.difference.units']
    return (
        f'Over {" and ".join(studies)}, both number formats and all {every} test and development questions, '
        f'{FACTORS["kd"]} adds {added("everywhere")} to MAP ({rests}); on the test set alone it adds '
        f'{added("test")}, on the development set alone {added("dev")}.'
    )


def of_untrained(e: Evidence, p: Pays) -> str:  # '': the taught arm is better, or nothing was measured
    "That what takes no training is as good as a taught arm: the first thing to say of it."
    best = next(iter(beside(e.trivial, p.taught.runs)), None)
    gained = best and gain_interval(p.taught.runs, best, e.units)
    if best is None or is_above(gained):
        return ''
    score = unit_of(p.taught.runs[0]['task'], best.record['primary']['metric']).text(best.value)
    return f'{p.taught.arm} is not better than {best.words}, a trivial baseline ({score}). '


def of_variants(found: Sequence[Comparison]) -> str:
    "What settings of one's own do, beside the arm that has none."
    metric = metric_on(found[0].primary, found[0].task)
    each = '; '.join(f'{c.b} {difference_words(c)} ({rests_on(c)}, {verdict_on(c).words})' for c in found)
    return f'Differences in {metric} from {found[0].a}: {each}.'


def of_rates(rates: Sequence[AtRate]) -> str:
    "What a number format does at several learning rates."
    sign = 1 if rates[0].fp32[0]['primary']['higher_is_better'] else -1
    best = max(rates, key=lambda x: sign * sum(r['primary']['value'] for r in x.fp32) / len(x.fp32))
    c = best.compared['format']
    span = f'{rates[0].rate:g} to {rates[-1].rate:g}'
    at_best = f'{difference_words(c)} at the best of them, {best.rate:g} ({rests_on(c)}, uncorrected)'
    metric = metric_on(c.primary, c.task)
    p = {f'{x.rate:g}': x.compared['format'].p for x in rates}
    corrected = holm(p, Family('rates', tuple(p)))
    told = [rate for rate, value in corrected.items() if value is not None and value < ALPHA]
    if told:
        return f'{FACTORS["precision"].capitalize()} changes {metric} at {", ".join(told)}; {at_best}.'
    rest = f'of {len(rates)} learning rates from {span}'
    return f'No effect of {FACTORS["precision"]} on {metric} is shown at any {rest}: {at_best}.'


def finding(
    e: Evidence,
    otherwise: str,  # what is said of a study that has nothing to compare
    predictions: pd.DataFrame,  # of its runs
) -> str:
    "A study's answer to what it was made for."
    students = [r for r in e.records if r['factors']['network'] == 'student']
    if not e.comparisons and len({r['settings']['learning_rate'] for r in students}) > 1:
        rates = at_rates(e.records, e.units, dict(list(predictions.groupby('run_id'))))
        if rates and all('format' in x.compared for x in rates):
            return of_rates(rates)
    if paid := what_pays(e):
        # what is taught with texts first: with labels alone a student may be at the floor
        first = min(paid, key=lambda p: not p.taught.texts)
        return of_untrained(e, first) + pays_sentences([first])[0]
    known = [(kind, c) for kind, c in e.comparisons if c.difference]
    single = [c for _, c in known if c.attribution.factor in FACTORS]
    if single:
        order = list(FACTORS)
        # steps in sixteen bits come behind those in 32
        first = min(reversed(single), key=lambda c: (c.n_seeds < 2, order.index(c.attribution.factor)))
        pooled = of_soft_targets(e.study) if first.attribution.factor == 'kd' else None
        return pooled or of_factor(first)
    variants = [c for kind, c in known if kind == 'variant']
    if variants:
        return of_variants(variants)
    return otherwise

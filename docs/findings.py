"What a study found, in one sentence with its interval and its seeds: the head of its page."

from collections.abc import Sequence
from pathlib import Path
import pandas as pd
from kdnotes.stats.comparable import baselines_for, gain_interval, is_above
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.labels import LabelEfficiency, label_efficiency
from kdnotes.stats.tests import holm
from kdnotes.core.files import read_json
from kdnotes.core.render import ALPHA, phrase
from thesis.build import KD_PARTS
from thesis.rates import AtRate, at_rates

# the factor that is asked about most comes first
FACTORS = ('kd', 'precision', 'ranks', 'network')
VALUES = Path(__file__).parents[1] / 'thesis' / 'generated' / 'values.json'


def of_soft_targets(study: str) -> str | None:  # None: the thesis does not pool this study with others
    """What soft targets add, over all studies, formats and questions that asked it: the one test of many that
    is significant would be a finding by choice.
    """
    values = read_json(VALUES)
    studies = [values[f'{part}.study'] for part in KD_PARTS]
    if study not in studies:
        return None
    names = ('estimate', 'low', 'high', 'n', 'units')
    found = {
        where: {name: values.get(f'kd.{where}.difference.{name}') for name in names}
        for where in ('everywhere', 'test', 'dev')
    }
    return phrase('finding.jinja', 'soft_targets', studies, found | dict(p=values['kd.everywhere.p']))


def of_labels(e: Evidence, paid: Sequence[LabelEfficiency]) -> str:
    "What distillation is worth where labels differ, and first whether the arm beats what takes no training."
    # what is taught with texts first: with labels alone a student may be at the baseline
    first = min(paid, key=lambda p: not p.taught.texts)
    best = next(iter(baselines_for(e.baselines, first.taught.runs)), None)
    if best and is_above(gain_interval(first.taught.runs, best, e.units)):
        best = None
    return phrase('finding.jinja', 'few_labels', first, best)


def of_rates(rates: Sequence[AtRate]) -> str:
    "What a number format does at several learning rates."
    sign = 1 if rates[0].fp32[0]['primary']['higher_is_better'] else -1
    best = max(rates, key=lambda x: sign * sum(r['primary']['value'] for r in x.fp32) / len(x.fp32))
    p = {f'{x.rate:g}': x.compared['format'].p for x in rates}
    corrected = holm(p)
    significant = [rate for rate, value in corrected.items() if value is not None and value < ALPHA]
    span = (rates[0].rate, rates[-1].rate)
    return phrase('finding.jinja', 'rates', best.compared['format'], len(rates), span, best.rate, significant)


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
    if paid := label_efficiency(e):
        return of_labels(e, paid)
    known = [(kind, c) for kind, c in e.comparisons if c.difference]
    single = [c for _, c in known if c.attribution.factor in FACTORS]
    if single:
        # steps in sixteen bits come behind those in 32
        first = min(reversed(single), key=lambda c: (c.n_seeds < 2, FACTORS.index(c.attribution.factor)))
        pooled = of_soft_targets(e.study) if first.attribution.factor == 'kd' else None
        return pooled or phrase('finding.jinja', 'factor', first)
    variants = [c for kind, c in known if kind == 'variant']
    return phrase('finding.jinja', 'variants', variants) if variants else otherwise

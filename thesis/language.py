"""What the thesis may say of a study of masked language models.

Scores by text, what a student keeps, and what becomes of published claims.
"""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
import numpy as np
import pandas as pd
from kdnotes.analysis.comparable import by_cluster, trained
from kdnotes.analysis.compare import compare, corrected
from kdnotes.analysis.in_use import in_use
from kdnotes.analysis.intervals import Interval, crossed_interval
from kdnotes.analysis.plotting import arms_of
from kdnotes.analysis.evidence import Evidence
from kdnotes.analysis.tables import judged_by, set_interval, sets_of
from kdnotes.core.arms import MODES
from kdnotes.core.config import RunConfig
from kdnotes.tasks.lm_settings import COSINE_WEIGHTS, RECIPES
from .facts import given, table
from .steps import STEPS, verdict
from .values import steps_values, study_values


ONE_RANK_STEPS = {name: pair for name, pair in STEPS.items() if name != 'ranks'}
ONE_RANK_STEPS['network'] = ('baseline', 'full_student')
_KINDS = dict(
    network='chain', kd='chain', precision='chain', procedure_2='procedures', procedure_3='procedures'
)


def of_one_rank(e: Evidence) -> Evidence:
    "The same evidence with the comparisons of a study in which every arm has one rank."
    arms = e.arms
    made = [
        (_KINDS.get(name, 'control'), compare(arms[a], arms[b], e.units, e.times))
        for name, (a, b) in ONE_RANK_STEPS.items()
        if {a, b} <= arms.keys()
    ]
    return replace(e, comparisons=corrected(made))


def work_values(found: Sequence[dict]) -> dict[str, dict[str, str]]:
    "What the trained runs of each network were given, as text; a network that nobody trained is left out."
    by_network: dict[str, list[dict]] = {}
    for r in filter(trained, found):
        by_network.setdefault(MODES[r['mode']].network, []).append(r)
    names = ('epochs', 'learning_rate', 'batch_size', 'max_length')
    return {network: given(runs, names) for network, runs in by_network.items()}


def one_rank_values(e: Evidence) -> dict:
    "What every such study has."
    return study_values(e) | dict(steps=steps_values(e, ONE_RANK_STEPS), work=work_values(e.records))


def recipe_values(found: Sequence[dict]) -> dict:
    """The weights of distillation: soft, hard and cosine weight, temperature, the tokens whose soft targets
    are learnt, and whether the weights are the published ones; {} where no run has KD.
    """
    settings = next((r['settings'] for r in found if r['factors']['kd']), None)
    if settings is None:
        return {}
    # a setting that has its default value is not recorded
    cosine = settings.get('hidden_weight', RunConfig.model_fields['hidden_weight'].default)
    ours = {name: settings.get(name) for name in ('soft_weight', 'hard_weight', 'temperature', 'soft_on')}
    ours['cosine_weight'] = cosine if settings.get('hidden_loss') == 'cosine' else 0.0
    published = RECIPES['distilbert'] | dict(cosine_weight=COSINE_WEIGHTS['distilbert'], temperature=2.0)
    same = all(ours[name] == published[name] for name in ours if name != 'soft_on')
    return dict(ours=ours, published_weights=same)


def kept_on(e: Evidence, where: str) -> dict[str, Interval | None]:
    """What each arm keeps of its teacher's gain over the best trivial baseline, on any text: arm -> the
    share; None: its teacher gains nothing there.
    """
    metric = e.records[0]['primary']['metric']
    return in_use(replace(e, records=judged_by(e.records, where, metric))).shares


def order_interval(e: Evidence, runs: Sequence[dict], where: str, low: str, high: str) -> Interval | None:
    "By how much one score of these runs lies above another one: nats a token; None: a score is not there."
    own = e.units[(e.units['split'] == where) & e.units['run_id'].isin([r['run_id'] for r in runs])]
    own = own[own['metric'].isin([low, high])]
    documents = sorted(own['cluster'].unique())
    found = {}
    for name, its in own.groupby('metric'):
        matrix = its.pivot(index='run_id', columns='unit', values='value')
        found[name] = by_cluster(matrix, its.drop_duplicates('unit').set_index('unit')['cluster'], documents)
    return crossed_interval(found[high] - found[low]) if {low, high} <= found.keys() else None


FAR = 0.1  # nats: a perplexity lies far below another one if it is a tenth smaller or less than that


def order_values(e: Evidence) -> dict:
    """In how many arms and texts (n) does perplexity lie far below pseudo-perplexity (above), and the one
    that counts visible tokens (seen_above)? verdict: 'reproduced': in all | 'consistent': the latter in all
    | 'not_reproduced' | 'open'.
    """

    def above(name: str) -> list[bool]:
        found = [
            order_interval(e, runs, where, name, 'pseudo_nll')
            for where in sets_of(e.records)
            for runs in e.arms.values()
        ]
        return [i.low is not None and i.low > FAR for i in found if i is not None]

    hidden, visible = above('nll'), above('nll_all')
    n = len(hidden)
    if not n or min(len(runs) for runs in e.arms.values()) < 2:
        code = 'open'  # one seed is no test
    elif all(hidden):
        code = 'reproduced'
    else:
        code = 'consistent' if len(visible) == n and all(visible) else 'not_reproduced'
    return dict(n=n, above=sum(hidden), seen_above=sum(visible), verdict=code)


_SCORES = {  # title -> set, score
    'WikiText-2': ('wikitext2', 'nll'),
    'IMDB': ('imdb', 'nll'),
    'novels': ('dev', 'nll'),
    'perplexity': ('wikitext2', 'perplexity'),
    'visible tokens too': ('wikitext2', 'perplexity_all'),
    'pseudo-perplexity': ('wikitext2', 'pseudo_perplexity'),
}


def _four(value: float) -> str:  # '11.50', '2623'
    "Four digits that count."
    return f'{value:#.4g}'.rstrip('.')


def scores_table(e: Evidence) -> pd.DataFrame:  # a row an arm, and one of the unigram model; text
    "Scores of the arms by text."

    def cell(where: str, name: str):
        def of(arm: str) -> str | None:
            if arm == 'unigram':
                value = e.records[0]['metrics'][where].get(f'unigram_{name}')
                return value and (f'{value:.3f}' if name == 'nll' else _four(value))
            found = set_interval(e, e.arms[arm], where, name)
            if found is None:
                return None
            return f'{found:.3f}' if name == 'nll' else _four(found.estimate)

        return of

    scored = sets_of(e.records)
    columns = {title: cell(*of) for title, of in _SCORES.items() if of[0] in scored}
    return table([*e.arms, 'unigram'], {'arm': str} | columns)


def kd_by_set(e: Evidence) -> dict[str, dict]:  # set -> metric -> difference
    "What distillation does to the loss of hidden tokens and of all tokens on every set, uncorrected."

    def of(where: str, name: str) -> dict:
        pair = (judged_by(e.arms[arm], where, name) for arm in STEPS['kd'])
        return dict(difference=compare(*pair, e.units, e.times).difference)

    return {where: {name: of(where, name) for name in ('nll', 'nll_all')} for where in sets_of(e.records)}


def language_values(e: Evidence) -> dict:
    "All values of the study."
    settings = e.records[0]['settings']
    values = one_rank_values(e)
    values['tables']['scores'] = scores_table(e)
    return values | dict(
        kept={where: kept_on(e, where) for where in sets_of(e.records)},
        kd_on=kd_by_set(e),
        order=order_values(e),
        perplexity={arm: float(np.exp(of['primary'].estimate)) for arm, of in e.values.items()},
        recipe=recipe_values(e.records),
        mask_share=settings['mask_share'],
        train_tokens=settings['train_tokens'],
        sample=f"{settings['pseudo_sample']:,}",
    )


def batch_values(found: Sequence[dict], units: pd.DataFrame) -> dict:
    "What the largest steps do beside the smallest at equal epochs: their blocks, the change and its verdict."
    arms = sorted(arms_of(found).values(), key=lambda runs: runs[0]['settings']['batch_size'])
    c = compare(arms[0], arms[-1], units)
    smallest, largest = (runs[0]['settings']['batch_size'] for runs in (arms[0], arms[-1]))
    about = dict(study=arms[0][0]['study'], smallest=smallest, largest=largest)
    return about | dict(change=c.difference, verdict=verdict(c))


SMALLER = (
    0.4  # claimed: the share of BERT's parameters by which DistilBERT is smaller, and elsewhere what is left
)
MILLIONS = 2  # claimed: tokens of the training text


def claims_values(order: dict, batches: dict, facts: dict) -> dict:
    """Verdicts on a published study's claims: smaller and left: of DistilBERT's size; order: of
    `order_values`; batches; tokens: 'reproduced' | 'consistent' | 'open' | 'not_reproduced'.
    """
    left = [facts['sizes']['left'][way] for way in ('base', 'masked_lm')]
    judged = dict(
        smaller=all(round(1 - share, 1) == SMALLER for share in left),
        left=all(round(share, 1) == SMALLER for share in left),
    )
    of_batches = dict(gains='reproduced', loses='not_reproduced')
    alike = round(facts['texts']['wikitext_tokens'] / 1e6) == MILLIONS
    return {name: 'reproduced' if right else 'not_reproduced' for name, right in judged.items()} | dict(
        order=order['verdict'],
        batches=of_batches.get(batches['verdict'], 'open'),
        tokens='consistent'
        if alike
        else 'not_reproduced',  # as many, which does not show that they are these
        share=SMALLER,
        far=FAR,
    )

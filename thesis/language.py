"""A study of masked language models: scores by text, and the verdicts on published claims."""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
import numpy as np
import pandas as pd
from kdnotes.core.arms import MODES
from kdnotes.core.spec import Loss
from kdnotes.results.table import arms_of
from kdnotes.results.schema import trained
from kdnotes.stats.comparable import by_cluster
from kdnotes.stats.compare import compare, corrected
from kdnotes.stats.deployment import deployment
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.intervals import Interval, crossed_interval
from kdnotes.stats.tables import judged_by, set_interval, sets_of
from kdnotes.tasks.masked_lm import COSINE_WEIGHTS, RECIPES
from .facts import recorded_settings
from .steps import STEPS, steps_values, verdict
from .values import study_values

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


def one_rank_values(e: Evidence) -> dict:
    "What every such study has: arms, steps, and what the trained runs of each network were given, as text."
    names = ('epochs', 'learning_rate', 'batch_size', 'max_length')
    work = {}
    for network in ('teacher', 'student'):
        runs = [r for r in e.records if trained(r) and MODES[r['mode']].network == network]
        work[network] = recorded_settings(runs, names)
    return study_values(e) | dict(steps=steps_values(e, ONE_RANK_STEPS), work=work)


def recipe_values(found: Sequence[dict]) -> dict:
    """The weights of distillation: soft, hard and cosine weight, temperature, the tokens whose soft targets
    are learnt, and whether the weights are the published ones; {} where no run has KD.
    """
    settings = next((r['settings'] for r in found if r['factors']['kd']), None)
    if settings is None:
        return {}
    # a setting that has its default value is not recorded
    cosine = settings.get('hidden_weight', Loss.model_fields['hidden_weight'].default)
    ours = {name: settings.get(name) for name in ('soft_weight', 'hard_weight', 'temperature')}
    ours['cosine_weight'] = cosine if settings.get('hidden_loss') == 'cosine' else 0.0
    published = RECIPES['distilbert'] | dict(cosine_weight=COSINE_WEIGHTS['distilbert'], temperature=2.0)
    same = all(ours[name] == published[name] for name in ours)
    return dict(ours=ours | dict(soft_on=settings.get('soft_on')), published_weights=same)


def order_interval(e: Evidence, runs: Sequence[dict], where: str, low: str, high: str) -> Interval | None:
    "By how much one score of these runs lies above another, in nats per token; None: a score is missing."
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
    above = {}
    for name in ('nll', 'nll_all'):
        found = [
            order_interval(e, runs, where, name, 'pseudo_nll')
            for where in sets_of(e.records)
            for runs in e.arms.values()
        ]
        above[name] = [i.low is not None and i.low > FAR for i in found if i is not None]
    hidden, visible = above.values()
    n = len(hidden)
    if not n or min(map(len, e.arms.values())) < 2:
        code = 'open'  # one seed is no test
    elif all(hidden):
        code = 'reproduced'
    else:
        code = 'consistent' if len(visible) == n and all(visible) else 'not_reproduced'
    return dict(n=n, above=sum(hidden), seen_above=sum(visible), verdict=code)


SCORES = (  # set, score
    ('wikitext2', 'nll'),
    ('imdb', 'nll'),
    ('dev', 'nll'),
    ('wikitext2', 'perplexity'),
    ('wikitext2', 'perplexity_all'),
    ('wikitext2', 'pseudo_perplexity'),
)


def score_rows(e: Evidence) -> list[dict]:  # one row per arm, and one of the unigram model
    "Scores of the arms by text: 'set.score' -> an interval, or None."
    scored = {'.'.join(of): of for of in SCORES if of[0] in sets_of(e.records)}
    rows = [
        dict(arm=arm) | {key: set_interval(e, runs, *of) for key, of in scored.items()}
        for arm, runs in e.arms.items()
    ]
    metrics = e.records[0]['metrics']
    unigram = {key: metrics[where].get(f'unigram_{name}') for key, (where, name) in scored.items()}
    return [*rows, dict(arm='unigram') | {key: x and dict(estimate=x) for key, x in unigram.items()}]


def language_values(e: Evidence) -> dict:
    "All values of the study."
    settings, metric = e.records[0]['settings'], e.records[0]['primary']['metric']
    kept, kd_on = {}, {}
    for where in sets_of(e.records):
        # the share of its teacher's gain over the best trivial baseline that each arm recovers there
        kept[where] = deployment(replace(e, records=judged_by(e.records, where, metric))).shares
        for name in ('nll', 'nll_all'):  # what distillation does there, uncorrected
            pair = (judged_by(e.arms[arm], where, name) for arm in STEPS['kd'])
            change = compare(*pair, e.units, e.times).difference
            kd_on.setdefault(where, {})[name] = dict(difference=change)
    values = one_rank_values(e)
    values['tables']['scores'] = score_rows(e)
    return values | dict(
        kept=kept,
        kd_on=kd_on,
        order=order_values(e),
        perplexity={arm: np.exp(of['primary'].estimate) for arm, of in e.values.items()},
        recipe=recipe_values(e.records),
        mask_share=settings['mask_share'],
        train_tokens=settings['train_tokens'],
        sample=settings['pseudo_sample'],
    )


def batch_values(found: Sequence[dict], units: pd.DataFrame) -> dict:
    "What the largest steps do beside the smallest at equal epochs: their blocks, the change and its verdict."
    by_size = {runs[0]['settings']['batch_size']: runs for runs in arms_of(found).values()}
    smallest, largest = min(by_size), max(by_size)
    c = compare(by_size[smallest], by_size[largest], units)
    about = dict(study=found[0]['study'], smallest=smallest, largest=largest)
    return about | dict(change=c.difference, verdict=verdict(c))


SMALLER = 0.4  # claimed: the share of BERT's parameters that DistilBERT lacks, and elsewhere what is left
MILLIONS = 2  # claimed: tokens of the training text


def claims_values(order: dict, batches: dict, facts: dict) -> dict:
    """Verdicts on a published study's claims: smaller and left: of DistilBERT's size; order: of
    `order_values`; batches; tokens: 'reproduced' | 'consistent' | 'open' | 'not_reproduced'.
    """
    left = [facts['sizes']['left'][way] for way in ('base', 'masked_lm')]
    counted = {True: 'reproduced', False: 'not_reproduced'}
    # as many tokens, which does not show that they are these
    alike = round(facts['texts']['wikitext_tokens'] / 1e6) == MILLIONS
    return dict(
        smaller=counted[all(round(1 - share, 1) == SMALLER for share in left)],
        left=counted[all(round(share, 1) == SMALLER for share in left)],
        order=order['verdict'],
        batches=dict(gains='reproduced', loses='not_reproduced').get(batches['verdict'], 'open'),
        tokens='consistent' if alike else 'not_reproduced',
        share=SMALLER,
        far=FAR,
    )

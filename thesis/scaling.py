"""What more devices gain: a published table, what synchronising costs here, and the main study's step."""

from __future__ import annotations
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
import numpy as np
from kdnotes.report import plotting as pt
from kdnotes.scaling import published
from kdnotes.scaling.steptime import USUAL, Predicted, Setup, draw_more, measured, more_machines
from kdnotes.stats.intervals import LEVEL, Interval
from .facts import distinct

ASKED = 'answer_selection'  # the task of the first study
DIVIDED = Setup(2, 1, large=True)  # a step with its batch, which more ranks divide further
ACCUMULATED = Setup(2, 8)
DELAYING = Setup(2, 8, 'every')
AT = 16  # ranks, of which the answer states what is predicted
COMPARED = ('gradient_sync', 'bucket_mib', 'gradient_dtype')  # what the configurations of a row differ in


def published_values() -> dict:
    "What chapters ask of the published table."
    fits, factors, whole = published.fit(), published.factors(), published.super_linear()
    wrong = factors[~factors['follows']].iloc[0]
    errors = fits.assign(off=fits['error_percent'].abs()).groupby('model')['off'].median()
    names = ('number', 'gpus', 'memory_gb', 'batch', 'sync', 'minutes', 'effective_batch')
    rows = [
        {name: getattr(r, name) for name in names}
        | dict(rings='several' if r.several_rings else 'one' if r.machines > 1 else None, updates=share)
        for r, share in zip(published.TABLE, published.batches()['updates'])
    ]
    return {name: whole[name] for name in ('factor', 'gpus', 'scaling', 'efficiency')} | dict(
        who='Samsung SDSA',
        year=2020,
        beside=whole['factor'] / whole['scaling'],
        more_sequences=whole['batch'],
        factors=len(factors),
        follow=factors['follows'].sum(),
        wrong=dict(what=wrong['what'], claimed=float(wrong['claimed']), factor=wrong['factor']),
        gpus_at_most=published.TABLE[-1].gpus,
        accumulation=published.ACCUMULATION,
        errors={model: errors[model] for model in published.DRAWN},
        tables=dict(rows=rows),
    )


def gain(results: dict, task: str, name: str, what: str) -> Interval | None:
    "A measured quotient: over turns; None: it was not measured."
    for row in results['gains']:
        if (row['task'], row['name'], row['what']) == (task, name, what):
            ends = {key: row[key] for key in ('low', 'high')}
            how = dict(level=LEVEL, method='Student t over turns, log scale', null=1.0)
            return Interval(estimate=row['times'], n=row['turns'], **ends, **how)
    return None


def through(of: Interval, to: Callable[[float], float], **changed) -> Interval:
    "An interval by a function that always rises, or always falls."
    ends = [None if x is None else to(x) for x in (of.low, of.high)]
    low, high = ends if None in ends else sorted(ends)
    return replace(of, estimate=to(of.estimate), low=low, high=high, **changed)


def serial_share(efficiency: Interval, ranks: int) -> Interval:
    "The share of a step that ranks do not divide."
    return through(efficiency, lambda e: (1 / e - 1) / (ranks - 1), null=0.0)


def faster_of(results: dict, setup: Setup) -> Interval:
    "How many times as fast the ranks of a setup are as one."
    return through(gain(results, ASKED, setup.name, 'efficiency, strong'), lambda e: setup.ranks * e)


def more_ranks(results: dict, predicted: Mapping[str, Predicted]):  # a table, of `more_machines`
    "What the model of a step predicts of more ranks for the step that is divided."
    step = next(row for row in measured(results, ASKED) if row['name'] == DIVIDED.name)
    return more_machines(step, predicted[ASKED])


def answer_values(results: dict, predicted: Mapping[str, Predicted]) -> dict:
    "What more ranks do to a step with the first study's batch."
    examples = {row['name']: row['examples'] for row in measured(results, ASKED)}
    faster = faster_of(results, DIVIDED)
    share = serial_share(gain(results, ASKED, DIVIDED.name, 'efficiency, strong'), DIVIDED.ranks)
    more = more_ranks(results, predicted)
    usual = [
        row
        for row in measured(results, ASKED)
        if not row['simulated'] and all(row[key] == value for key, value in USUAL.items())
    ]
    by_ranks = [  # gradients are summed once per step over this machine's own link
        {key: row[key] for key in ('ranks', 'micro_batches', 'examples')}
        | dict(step=np.median(row['step_s']))
        | {kind: gain(results, ASKED, row['name'], f'efficiency, {kind}') for kind in ('strong', 'weak')}
        for row in sorted(usual, key=lambda row: (row['ranks'], row['examples']))
    ]
    links = more[more['devices'] == AT].assign(slower=more['high'] < faster.estimate)
    return dict(
        ranks=DIVIDED.ranks,
        examples=examples[DIVIDED.name],
        more_examples=examples[ACCUMULATED.name],
        micro_batches=ACCUMULATED.micro_batches,
        faster=faster,
        accumulated=faster_of(results, ACCUMULATED),
        share=share,
        limit=through(share, lambda s: 1 / s),
        at=AT,
        cores=results['settings']['cores'],
        links=links[['link', 'speedup', 'low', 'high', 'slower']].to_dict('records'),
        tables=dict(ranks=by_ranks),
    )


def scaling_values(results: dict, predicted: Mapping[str, Predicted]) -> dict:
    "All that chapters ask of scaling."
    turns = [len(row['step_s']) for row in results['rows']]
    pairs = distinct((r['what'], r['name'], r['against']) for r in results['gains'] if r['what'] in COMPARED)
    gains = [  # how many times as long a step takes as one that differs in one thing
        dict(what=what, name=name, against=against)
        | {task: gain(results, task, name, what) for task in ('masked_lm', ASKED)}
        for what, name, against in pairs
    ]
    return dict(
        published=published_values(),
        device=results['environment'].get('device'),
        turns=min(turns),
        configurations=len(turns),
        sums=dict(few=DELAYING.micro_batches),
        # what synchronising costs one training, and how far the model of a step is off
        tasks={
            task: dict(
                parameters=measured(results, task)[0]['parameters'] / 1e6,
                delaying=dict(few=gain(results, task, DELAYING.name, 'gradient_sync')),
                error=dict(median=its.errors.median()),
                wait_error=its.wait_errors.median(),
            )
            for task, its in predicted.items()
        },
        tables=dict(gains=gains),
        answer=answer_values(results, predicted),
    )


def draw_scaling(results: dict, predicted: Mapping[str, Predicted], folder: Path) -> list[pt.FigureFile]:
    "The figures of scaling; they rest on no run."
    known = (DIVIDED.ranks, faster_of(results, DIVIDED))
    pictures = dict(
        published=pt.Picture(published.figure_1, '', lambda _: (published.fit(),)),
        carried=pt.Picture(published.figure_2, '', lambda _: (published.extrapolation(),)),
        more=pt.Picture(draw_more, '', lambda _: (more_ranks(results, predicted), known)),
    )
    return pt.make_figures(pictures, None, folder, ())

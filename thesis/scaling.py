"""What the thesis may say of more devices.

A published table put to a model of a step, what synchronising costs here, and what the main study's
training would gain.
"""

from __future__ import annotations
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
import numpy as np
import pandas as pd
from kdnotes.analysis import published_scaling
from kdnotes.analysis.intervals import LEVEL, Interval
from kdnotes.analysis import plotting as pt
from kdnotes.analysis import scaling_results as scaling
from kdnotes.analysis.scaling_results import Predicted, draw_more, measured, more_machines
from .facts import table, text


STUDY = dict(who='Samsung SDSA', year=2020)


def rows_table() -> pd.DataFrame:  # text
    "The seven rows, with the batch of an update."
    updates = published_scaling.batches().set_index('row')['updates']
    return table(
        published_scaling.TABLE,
        {
            'row': '{number}',
            'GPUs': '{gpus}',
            'card': '{memory_gb} GB',
            'batch': '{batch}',
            'summed': lambda r: 'each micro-step' if r.sync == 'every' else 'each update',
            'rings': lambda r: 'several' if r.several_rings else 'one' if r.machines > 1 else None,
            'minutes': '{minutes}',
            'sequences an update': '{effective_batch:,}',
            'updates': lambda r: f'{updates[r.number]:.3f}',
        },
    )


def published_values() -> dict:
    "What chapters ask of the published table."
    fits = published_scaling.fit()
    factors = published_scaling.factors()
    wrong = factors[~factors['follows']].iloc[0]
    whole = published_scaling.super_linear()
    errors = fits.assign(off=fits['error_percent'].abs()).groupby('model')['off'].median()
    return {name: whole[name] for name in ('factor', 'gpus', 'scaling', 'efficiency')} | dict(
        **STUDY,
        beside=whole['factor'] / whole['scaling'],
        more_sequences=whole['batch'],
        factors=len(factors),
        follow=int(factors['follows'].sum()),
        wrong=dict(what=wrong['what'], claimed=float(wrong['claimed']), factor=wrong['factor']),
        gpus_at_most=published_scaling.TABLE[-1].gpus,
        accumulation=published_scaling.ACCUMULATION,
        errors={model: errors[model] for model in published_scaling.DRAWN},
        tables=dict(rows=rows_table()),
    )


ASKED = 'answer_selection'  # the task of the first study
DIVIDED = scaling.Setup(2, 1, large=True)  # a step with its batch, which more ranks divide further
ACCUMULATED = scaling.Setup(2, 8)
DELAYING = dict(few=scaling.Setup(2, 8, 'every'), many=scaling.Setup(2, 50, 'every'))


def gain(results: dict, task: str, name: str, what: str) -> Interval | None:
    "A measured quotient: over turns; None: it was not measured."
    for row in results['gains']:
        if (row['task'], row['name'], row['what']) == (task, name, what):
            ends = {key: row[key] for key in ('low', 'high')}
            how = dict(level=LEVEL, method='Student t over turns, log scale', null=1.0)
            return Interval(estimate=row['times'], n=row['turns'], **ends, **how)
    return None


def _through(of: Interval, to: Callable[[float], float], **changed) -> Interval:
    "An interval by a function that always rises, or always falls."
    ends = [None if x is None else to(x) for x in (of.low, of.high)]
    low, high = ends if None in ends else sorted(ends)
    return replace(of, estimate=to(of.estimate), low=low, high=high, **changed)


def serial_share(efficiency: Interval, ranks: int) -> Interval:
    "The share of a step that ranks do not divide."
    return _through(efficiency, lambda e: (1 / e - 1) / (ranks - 1), null=0.0)


_WHAT = dict(gradient_sync='at each micro-batch', bucket_mib='buckets', gradient_dtype='format')
_TASKS = dict(masked_lm='language model', answer_selection='answer selection')


def gains_table(results: dict) -> pd.DataFrame:  # text
    "How many times as long a step takes as one that differs in one thing, by task."
    rows = {(r['what'], r['name'], r['against']): r for r in results['gains'] if r['what'] in _WHAT}

    def of(task: str):
        return lambda r: text('{of:.2f}', dict(of=gain(results, task, r['name'], r['what'])))

    return table(
        rows.values(),
        {'what': lambda r: _WHAT[r['what']], 'configuration': '{name}', 'beside': '{against}'}
        | {title: of(task) for task, title in _TASKS.items()},
    )


def ranks_table(results: dict, task: str) -> pd.DataFrame:  # text
    "Time against ranks and batch, gradients summed once a step over this machine's own link."
    usual = [
        row | dict(step=np.median(row['step_s']))
        for row in measured(results, task)
        if not row['simulated'] and all(row[key] == value for key, value in scaling.USUAL.items())
    ]

    def efficiency(kind: str) -> Callable[[dict], str]:
        return lambda row: text('{of:.2f}', dict(of=gain(results, task, row['name'], f'efficiency, {kind}')))

    return table(
        sorted(usual, key=lambda row: (row['ranks'], row['examples'])),
        {
            'ranks': '{ranks}',
            'micro-batches': lambda row: (
                f'{row["micro_batches"]} of {row["examples"] // row["ranks"] // row["micro_batches"]}'
            ),
            'examples a step': '{examples}',
            'step, s': '{step:.3f}',
            'examples/s': lambda row: f'{row["examples"] / row["step"]:.1f}',
        }
        | {f'efficiency, {kind}': efficiency(kind) for kind in ('strong', 'weak')},
    )


ASKED = 'answer_selection'  # the task of the first study
DIVIDED = scaling.Setup(2, 1, large=True)  # a step with its batch, which more ranks divide further
ACCUMULATED = scaling.Setup(2, 8)
DELAYING = scaling.Setup(2, 8, 'every')
AT = 16  # ranks, of which the answer tells what is predicted


def answer_values(results: dict, predicted: Mapping[str, Predicted]) -> dict:
    "What more ranks do to a step with the first study's batch."
    rows = {row['name']: row for row in measured(results, ASKED)}
    efficiency, long_efficiency = (
        gain(results, ASKED, setup.name, 'efficiency, strong') for setup in (DIVIDED, ACCUMULATED)
    )
    ranks = DIVIDED.ranks
    step, long = rows[DIVIDED.name], rows[ACCUMULATED.name]
    faster, accumulated = (_through(e, lambda e: ranks * e) for e in (efficiency, long_efficiency))
    share = serial_share(efficiency, ranks)
    limits = _through(share, lambda s: 1 / s)
    more = more_machines(step, predicted[ASKED])
    links = [
        f'{row.speedup:.2f} times as fast ({row.low:.2f} to {row.high:.2f}) over {row.link}'
        + ', slower than two ranks on one machine' * (row.high < faster.estimate)
        for row in more[more['devices'] == AT].itertuples()
    ]
    sentence = (
        f'On {ranks} ranks with a core each, a step of {step["examples"]} pairs is {faster:.2f} times as '
        f'fast as on one rank, and a step of {long["examples"]} pairs, accumulated in '
        f'{long["micro_batches"]} micro-batches a rank, {accumulated:.2f} times. '
        f"By Karp and Flatt's measure {share.estimate:.0%} [{share.low:.0%}, {share.high:.0%}] of the "
        f'shorter step count as undivided; with that share on any number of ranks, '
        f"Amdahl's law allows {limits:.1f} times at most. "
        f'On {AT} ranks, on machines with {results["settings"]["cores"]} cores each, the model of a step '
        f'predicts that it is {" and ".join(links)}. Round brackets hold the range of fits that '
        'leave a configuration out; they are no confidence limits.'
    )
    return dict(
        faster=faster,
        accumulated=accumulated,
        share=share,
        sentence=sentence,
        tables=dict(ranks=ranks_table(results, ASKED)),
    )


def _task_values(results: dict, task: str, predicted: Predicted) -> dict:
    "What synchronising costs one training, and how far the model of a step is off."
    return dict(
        parameters=measured(results, task)[0]['parameters'] / 1e6,
        delaying=dict(few=gain(results, task, DELAYING.name, 'gradient_sync')),
        error=dict(median=predicted.errors.median()),
        wait_error=predicted.wait_errors.median(),
    )


def scaling_values(results: dict, predicted: Mapping[str, Predicted]) -> dict:
    "All that chapters ask of scaling."
    turns = [len(row['step_s']) for row in results['rows']]
    return dict(
        published=published_values(),
        note=results['note'],
        device=results['environment'].get('device'),
        turns=min(turns),
        configurations=len(turns),
        sums=dict(few=DELAYING.micro_batches),
        tasks={task: _task_values(results, task, its) for task, its in predicted.items()},
        tables=dict(gains=gains_table(results)),
        answer=answer_values(results, predicted),
    )


_CAPTIONS = dict(
    published='The published minutes (left), and the error of two models that predict each row from '
    'the others (right).',
    carried='The published training on more GPUs, as models of a step predict it. Lines: the model by bytes. '
    'Bands: both models and their fits with a row left out. Points are published; beyond them nothing was '
    'measured.',
    more="A step with the first study's batch divided over more ranks, as the model predicts for two links. "
    'Bands are fits that leave a configuration out; beyond two ranks nothing was measured.',
)


def draw_scaling(results: dict, predicted: Mapping[str, Predicted], folder: Path) -> list[pt.FigureFile]:
    "The figures of scaling; they rest on no run."
    step = next(row for row in measured(results, ASKED) if row['name'] == DIVIDED.name)
    known = (DIVIDED.ranks, answer_values(results, predicted)['faster'])
    drawn = dict(
        published=(published_scaling.figure_1, lambda _: (published_scaling.fit(),)),
        carried=(published_scaling.figure_2, lambda _: (published_scaling.carried_on(),)),
        more=(draw_more, lambda _: (more_machines(step, predicted[ASKED]), known)),
    )
    pictures = {name: pt.Picture(of, _CAPTIONS[name], given) for name, (of, given) in drawn.items()}
    return pt.make_figures(pictures, None, folder, ())

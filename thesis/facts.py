"""Values by key, and what is known of a study before anything is compared: its runs, settings and machine."""

from __future__ import annotations
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any
import numpy as np
from kdnotes.stats.comparable import timed
from kdnotes.stats.intervals import Interval
from kdnotes.results.table import arms_of
from kdnotes.stats.evidence import pooled_gradients
from kdnotes.core.arms import MODES
from kdnotes.search.random import SPACES, as_judged, from_the_best
import pandas as pd


def fields(value: Any) -> dict[str, Any]:
    "What is written of a dataclass: of an interval its numbers."
    if isinstance(value, Interval):
        return {k: getattr(value, k) for k in ('estimate', 'low', 'high', 'n', 'units', 'level')}
    return asdict(value)


def flat(value: Any, prefix: str = '') -> dict[str, Any]:  # dotted key -> value
    "Nested groups and dataclasses as dotted keys; a list, as the rows of a table, is one value."
    if is_dataclass(value):
        value = fields(value)
    if not isinstance(value, Mapping) or value.keys() == {'head', 'rows'}:
        return {prefix: plain(value)}
    found = {}
    for name, inner in value.items():
        found |= flat(inner, f'{prefix}.{name}' if prefix else str(name))
    return found


def plain(value: Any) -> Any:
    "JSON's kinds; eight digits are enough for any text and are the same on every machine."
    if is_dataclass(value):
        value = fields(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(f'{value:.8g}') if np.isfinite(value) else None
    return value


def distinct(values: Iterable[Any]) -> list:
    "The different values, in their order."
    return list(dict.fromkeys(values))


def recorded_settings(found: Iterable[dict], names: Iterable[str]) -> dict[str, str]:
    "The values of settings that are numbers, as text; a setting that no run has is left out."
    runs = [r['settings'] for r in found]
    values = {name: distinct(f'{of[name]:g}' for of in runs if of.get(name) is not None) for name in names}
    return {name: ', '.join(of) for name, of in values.items() if of}


def about_values(found: Sequence[dict]) -> dict:
    "What was run, on what, and where."
    first = found[0]
    students = [r for r in found if r['factors']['network'] == 'student']
    searches = [r['tuning_id'] for r in students if r.get('tuning_id')]
    size = {r['factors']['network']: r['params_total'] for r in found}
    seeds = sorted(map(len, arms_of(found).values()))
    return dict(
        study=first['study'],
        corpus=first['corpus'].rpartition('/')[2],
        n_runs=len(found),
        metric=first['primary']['metric'],
        formats=distinct(r['precision'] for r in found),
        params_ratio=size['student'] / size['teacher'] if len(size) == 2 else None,
        teacher=', '.join(distinct(r['models']['teacher'] for r in found if 'models' in r)),
        student_layers=next((len(n) for r in students if (n := r['settings'].get('student_layers'))), None),
        tuned_student=searches[0].rsplit('-', 2)[1] if searches else None,
        machine={name: distinct(r['environment'][name] for r in found) for name in ('cpu', 'device')},
        energy_read=all('energy.device_j' not in r['reasons'] for r in timed(found).runs),
        n_seeds=len({r['seed'] for r in found}),
        seeds_an_arm=distinct([seeds[0], seeds[-1]]),
    )


def study_row(found: Sequence[dict]) -> dict:
    "A study in the table of all studies."
    return dict(
        study=found[0]['study'],
        task=found[0]['task'],
        corpus=found[0]['corpus'].rpartition('/')[2],
        runs=len(found),
        seeds=len({r['seed'] for r in found}),
        formats=distinct(r['precision'] for r in found),
        devices=distinct(r['environment']['device'] for r in found),
    )


NOT_SETTINGS = {'task', 'smoke', 'network', 'teacher_seed', 'kd'}  # said elsewhere


def settings_rows(found: Sequence[dict]) -> list[dict]:  # a row a setting
    "The recorded values of each setting, by network."

    def values(network: str, name: str) -> list[str]:
        own = [r['settings'].get(name) for r in found if r['factors']['network'] == network]
        return sorted({str(x) for x in own if x is not None})

    names = sorted({name for r in found for name in r['settings']} - NOT_SETTINGS)
    return [
        dict(setting=name) | {network: values(network, name) for network in ('teacher', 'student')}
        for name in names
    ]


SHOWN_PEAKS = ('baseline', 'mixed_baseline', 'full_kd', 'mixed_kd')


def peaks_rows(
    peaks: Mapping[str, Mapping[str, float]],  # 'cpu' and 'gpu' -> format -> operations a second
    on_cpu: Mapping[str, Sequence[dict]],  # arm -> its runs whose times count
    on_gpu: Mapping[str, Sequence[dict]],  # arm -> its runs
    alone: Mapping[str, Mapping[str, Any]],  # arm alone on the GPU -> format, speed (examples a second)
) -> list[dict]:  # a row an arm and device
    "The operations a second that each arm reaches, and what the device reaches in large products."
    rows = []
    for arm in SHOWN_PEAKS:
        reached = np.mean([r['throughput']['useful_flops_per_s'] for r in on_cpu[arm]])
        rows.append(dict(device='cpu', arm=arm, format=on_cpu[arm][0]['precision'], reached=reached))
    for arm in SHOWN_PEAKS:
        recorded = on_gpu[arm][0]['throughput']
        operations = recorded['useful_flops_per_s'] / recorded['examples_per_s']  # of an example
        reached = alone[arm]['speed'] * operations
        rows.append(dict(device='gpu', arm=arm, format=alone[arm]['format'], reached=reached))
    return [row | dict(peak=peaks[row['device']][row['format']]) for row in rows]


def amp_values(found: Sequence[dict]) -> dict:
    """Loss scales and skipped steps, over runs: runs, steps; overflows: steps that were skipped, none: were
    there none?; low: the lowest scale at the end; {} where no run was scaled.
    """
    scaled_runs = [r for r in found if r['amp']['final_scale'] is not None]
    if not scaled_runs:
        return {}
    overflows = sum(r['amp']['overflow_steps'] for r in scaled_runs)
    return dict(
        runs=len(scaled_runs),
        steps=sum(r['steps'] for r in scaled_runs),
        overflows=overflows,
        none=not overflows,
        low=min(r['amp']['final_scale'] for r in scaled_runs),
    )


FIRST_SCALE = 16  # log2 of the loss scale fp16 begins with


def gradient_values(arms: dict[str, list[dict]]) -> dict:
    """What formats would do to gradients, as recorded: share of the numbers that are not zero, of the worst
    layer of any arm, and where that is; {} where no run recorded its gradients.
    """
    moments = {arm: [m for r in runs for m in r.get('gradients') or ()] for arm, runs in arms.items()}
    tables = {arm: pooled_gradients(of) for arm, of in moments.items() if of}
    if not tables:
        return {}

    def worst(beyond) -> dict:
        shares = {
            (arm, layer): float(t[layer][beyond(t.index)].sum()) for arm, t in tables.items() for layer in t
        }
        arm, layer = max(shares, key=shares.get)
        return dict(share=shares[arm, layer], arm=arm, layer=layer)

    steps = sorted({m['step'] for of in moments.values() for m in of})
    return dict(
        steps=len(steps),
        first_step=steps[0],
        last_step=steps[-1],
        runs=sum(bool(r.get('gradients')) for runs in arms.values() for r in runs),
        lost=worst(lambda e: e < -24),
        coarse=worst(lambda e: e < -14),
        lost_scaled=worst(lambda e: e + FIRST_SCALE < -24),
        over_scaled=worst(lambda e: e + FIRST_SCALE >= 16),
        lost_bf16=worst(lambda e: e < -126),
        first_scale=FIRST_SCALE,
    )


def own_searches(trials: Sequence[dict], runs: Sequence[dict]) -> dict[str, str | list[str]]:
    """Whether each student arm, tuned by itself, would have had another setting: student arm -> 'same': its
    own search chose what its runs have | 'other' | 'none': it was not searched for; and each of these codes
    -> its arms, where there are any.
    """
    found = {}
    for arm, of in arms_of(runs).items():
        if MODES[of[0]['mode']].network != 'student':
            continue
        own = [r for r in trials if r['arm'] == arm]
        best = as_judged(own)[0]['settings'] if own else {}
        same = own and all(best[k] == of[0]['settings'][k] for k in SPACES['student'])
        found[arm] = 'same' if same else 'other' if own else 'none'
    codes = distinct(found.values())
    return found | {code: [arm for arm, its in found.items() if its == code] for code in codes}


def trial_values(found: Sequence[dict], units: pd.DataFrame, runs: Sequence[dict]) -> dict:
    """The trials of random searches: study, seeds, where they were judged; trials (fewest a search); others
    and open: trials but the best, and those of them that the questions do not tell from it; own: of
    `own_searches`.
    """
    searches: dict[str, dict[tuple, dict]] = {}  # search -> setting -> run
    for r in sorted(found, key=lambda r: r['run_id']):
        drawn = tuple(r['settings'][k] for k in SPACES[MODES[r['mode']].network])
        searches.setdefault(r['tuning_id'] or r['arm'], {}).setdefault(drawn, r)
    judged = [as_judged(list(tried.values())) for tried in searches.values()]
    others = [d for trials in judged for d in from_the_best(trials, units) if d]
    return dict(
        study=found[0]['study'],
        trials=min(map(len, searches.values())),
        seeds=sorted({r['seed'] for r in found}),
        where=judged[0][0]['primary']['set'],
        others=len(others),
        open=sum(d.low <= 0 <= d.high for d in others),
        own=own_searches(found, runs),
    )


def transfer_values(found: Sequence[dict]) -> dict:
    """The runs that gave others their first weights: of one study: the teacher's network, and the student's
    where it has a transfer of its own: formats, busy: the largest share of the machine that others used;
    teacher and student -> examples, settings, dev and test of the primary metric.
    """
    metric = found[0]['primary']['metric']
    busy = [share for r in found if (share := (r.get('machine') or {}).get('busy_share')) is not None]
    values = dict(
        study=found[0]['study'],
        formats=distinct(r['precision'] for r in found),
        busy=max(busy, default=None),
        amp=amp_values(found),
    )
    for r in found:
        settings = {k: r['settings'].get(k) for k in ('learning_rate', 'batch_size', 'alpha', 'temperature')}
        scores = {split: of[metric] for split, of in r['metrics'].items()}
        values[r['factors']['network']] = dict(examples=r.get('examples')) | settings | scores
    return values


def seeds_made_again(arms: dict[str, list[dict]]) -> list[int]:  # []: all share one start
    "The seeds whose first procedure starts from other weights than that of the first seed."
    runs = arms.get('baseline', [])
    starts = [r['initial'].get('start_sha256') for r in runs]
    return [r['seed'] for r, start in zip(runs, starts) if start != starts[0]]

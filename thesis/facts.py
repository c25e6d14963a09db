"""Values by key, and what the records of a study say by themselves: its runs, settings and machine."""

from __future__ import annotations
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
import numpy as np
import pandas as pd
from scipy.stats import t as student_t
from kdnotes.core.arms import MODES
from kdnotes.core.config import KdnotesError
from kdnotes.results.table import arms_of
from kdnotes.search.tuning import SPACES, as_judged, from_the_best
from kdnotes.stats.comparable import timed
from kdnotes.stats.evidence import pooled_gradients
from kdnotes.stats.intervals import LEVEL, Interval


class ThesisError(KdnotesError):
    "A thesis that cannot be built from the evidence there is."


def uncommitted(record: dict) -> bool:
    "Was a run made with changes that were not committed?"
    return (record['environment'].get('git') or '').endswith('-dirty')


OF_INTERVAL = ('estimate', 'low', 'high', 'n', 'units', 'level')


def plain(value: Any) -> Any:
    "JSON's kinds; of an interval its numbers. Eight digits are the same on every machine."
    if is_dataclass(value):
        names = OF_INTERVAL if isinstance(value, Interval) else [f.name for f in fields(value)]
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f'{value:.8g}') if math.isfinite(value) else None
    return value


def flat(value: Any, prefix: str = '') -> dict[str, Any]:  # dotted key -> value
    "Nested groups and dataclasses as dotted keys; a list, as the rows of a table, is one value."
    value = plain(value)
    if not isinstance(value, dict) or value.keys() == {'head', 'rows'}:
        return {prefix: value}
    parts = [flat(inner, f'{prefix}.{name}' if prefix else name) for name, inner in value.items()]
    return {key: inner for part in parts for key, inner in part.items()}


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
    students = [r for r in found if r['factors']['network'] == 'student']
    searches = [r['tuning_id'] for r in students if r.get('tuning_id')]
    size = {r['factors']['network']: r['params_total'] for r in found}
    seeds = sorted(map(len, arms_of(found).values()))
    return dict(
        study=found[0]['study'],
        corpus=found[0]['corpus'].rpartition('/')[2],
        n_runs=len(found),
        metric=found[0]['primary']['metric'],
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
    about = about_values(found)
    row = {name: about[name] for name in ('study', 'corpus', 'formats')} | dict(task=found[0]['task'])
    return row | dict(runs=about['n_runs'], seeds=about['n_seeds'], devices=about['machine']['device'])


NOT_SETTINGS = {'task', 'smoke', 'network', 'teacher_seed', 'kd'}  # stated elsewhere


def settings_rows(found: Sequence[dict]) -> list[dict]:  # one row per setting
    "The recorded values of each setting, by network."
    values: dict[str, dict[str, set]] = {}
    for r in found:
        for name in r['settings'].keys() - NOT_SETTINGS:
            by_network = values.setdefault(name, dict(teacher=set(), student=set()))
            if r['settings'][name] is not None:
                by_network[r['factors']['network']].add(str(r['settings'][name]))
    return [
        dict(setting=name) | {network: sorted(its) for network, its in values[name].items()}
        for name in sorted(values)
    ]


SHOWN_PEAKS = ('baseline', 'mixed_baseline', 'full_kd', 'mixed_kd')


def peaks_rows(
    peaks: Mapping[str, Mapping[str, float]],  # 'cpu' and 'gpu' -> format -> operations per second
    on_cpu: Mapping[str, Sequence[dict]],  # arm -> its runs whose times count
    on_gpu: Mapping[str, Sequence[dict]],  # arm -> its runs
    alone: Mapping[str, Mapping[str, Any]],  # arm alone on the GPU -> format, speed (examples per second)
) -> list[dict]:  # one row per arm and device
    "The operations per second that each arm reaches, and what the device reaches in large products."
    rows = []
    for arm in SHOWN_PEAKS:
        reached = np.mean([r['throughput']['useful_flops_per_s'] for r in on_cpu[arm]])
        rows.append(dict(device='cpu', arm=arm, format=on_cpu[arm][0]['precision'], reached=reached))
    for arm in SHOWN_PEAKS:
        recorded = on_gpu[arm][0]['throughput']
        reached = alone[arm]['speed'] * (recorded['useful_flops_per_s'] / recorded['examples_per_s'])
        rows.append(dict(device='gpu', arm=arm, format=alone[arm]['format'], reached=reached))
    return [row | dict(peak=peaks[row['device']][row['format']]) for row in rows]


def amp_values(found: Sequence[dict]) -> dict:  # {} where no run was scaled
    "Loss scales and skipped steps, over runs; low: the lowest scale at the end."
    scaled = [r for r in found if r['amp']['final_scale'] is not None]
    if not scaled:
        return {}
    overflows = sum(r['amp']['overflow_steps'] for r in scaled)
    low = min(r['amp']['final_scale'] for r in scaled)
    steps = sum(r['steps'] for r in scaled)
    return dict(runs=len(scaled), steps=steps, overflows=overflows, none=not overflows, low=low)


FIRST_SCALE = 16  # log2 of the loss scale fp16 begins with
BEYOND = dict(  # what a format does to a gradient -> is it done to one of this exponent?
    lost=lambda exponent: exponent < -24,
    coarse=lambda exponent: exponent < -14,
    lost_scaled=lambda exponent: exponent + FIRST_SCALE < -24,
    over_scaled=lambda exponent: exponent + FIRST_SCALE >= 16,
    lost_bf16=lambda exponent: exponent < -126,
)


def gradient_values(arms: dict[str, list[dict]]) -> dict:  # {} where no run recorded its gradients
    "What formats do to gradients: the share of the numbers that are not zero in the worst layer, and where."
    runs = {arm: [r for r in its if r.get('gradients')] for arm, its in arms.items()}
    moments = {arm: [m for r in its for m in r['gradients']] for arm, its in runs.items() if its}
    if not moments:
        return {}
    tables = {arm: pooled_gradients(of) for arm, of in moments.items()}
    steps = sorted({m['step'] for of in moments.values() for m in of})
    found = dict(steps=len(steps), first_step=steps[0], last_step=steps[-1], first_scale=FIRST_SCALE)
    for name, is_beyond in BEYOND.items():
        sums = {arm: t[is_beyond(t.index)].sum() for arm, t in tables.items()}
        shares = {(arm, layer): share for arm, its in sums.items() for layer, share in its.items()}
        arm, layer = max(shares, key=shares.get)
        found[name] = dict(share=shares[arm, layer], arm=arm, layer=layer)
    return found | dict(runs=sum(map(len, runs.values())))


def own_searches(trials: Sequence[dict], runs: Sequence[dict]) -> dict[str, str | list[str]]:
    """Whether each student arm, tuned by itself, would have another setting: student arm -> 'same', 'other',
    or 'none' where it was not searched for; and each of these codes -> its arms, where there are any.
    """
    found = {}
    for arm, of in arms_of(runs).items():
        if MODES[of[0]['mode']].network == 'student':
            own = [r for r in trials if r['arm'] == arm]
            best = as_judged(own)[0]['settings'] if own else {}
            same = own and all(best[k] == of[0]['settings'][k] for k in SPACES['student'])
            found[arm] = 'same' if same else 'other' if own else 'none'
    return found | {code: [arm for arm in found if found[arm] == code] for code in distinct(found.values())}


def trial_values(found: Sequence[dict], units: pd.DataFrame, runs: Sequence[dict]) -> dict:
    """The trials of random searches: study, seeds, where they were judged; trials (fewest per search); others
    and open: trials but the best, and those of them that are not significantly worse; own: of `own_searches`.
    """
    searches: dict[str, dict[tuple, dict]] = {}  # search -> setting -> run
    for r in sorted(found, key=lambda r: r['run_id']):
        drawn = tuple(r['settings'][k] for k in SPACES[MODES[r['mode']].network])
        searches.setdefault(r['tuning_id'] or r['arm'], {}).setdefault(drawn, r)
    judged = [as_judged(list(tried.values())) for tried in searches.values()]
    others = [d for trials in judged for d in from_the_best(trials, units) if d]
    return dict(
        study=found[0]['study'],
        trials=min(map(len, judged)),
        seeds=sorted({r['seed'] for r in found}),
        where=judged[0][0]['primary']['set'],
        others=len(others),
        open=sum(d.low <= 0 <= d.high for d in others),
        own=own_searches(found, runs),
    )


def transfer_values(found: Sequence[dict]) -> dict:
    """The runs that gave others their first weights: study, formats, busy (the largest share of the machine
    that others used), amp; teacher and student -> examples, settings, dev and test of the primary metric.
    """
    busy = [share for r in found if (share := (r.get('machine') or {}).get('busy_share')) is not None]
    about = {name: of for name, of in about_values(found).items() if name in ('study', 'formats')}
    values = about | dict(busy=max(busy, default=None), amp=amp_values(found))
    for r in found:
        settings = {k: r['settings'].get(k) for k in ('learning_rate', 'batch_size', 'alpha', 'temperature')}
        scores = {split: of[r['primary']['metric']] for split, of in r['metrics'].items()}
        values[r['factors']['network']] = dict(examples=r.get('examples')) | settings | scores
    return values


FORMATS_RACED = dict(bf16='kdnotes', fp16='kdnotes_fp16', tf32='kdnotes_tf32')  # beside kdnotes_fp32


def race_values(bert: dict) -> dict:
    """The race on a GPU: steps: the usual and larger ones; race: the same training in each format beside
    fp32: speed and joules, as ratios; low and high: the range of the speeds.
    """
    race = {}
    for cells in bert['rows']:
        row = dict(zip(bert['head'], cells))
        race[cells[0]] = dict(format=row['format'])
        for name, title in dict(joules='J / example', examples_per_s='examples/s').items():
            race[cells[0]][name] = None if row[title] == '-' else float(row[title].replace(',', ''))
    small, large, base = (race[name] for name in ('kdnotes', 'kdnotes_256', 'kdnotes_fp32'))
    ours = small['examples_per_s']
    names = dict(speed='examples_per_s', joules='joules')
    found = {
        fmt: {name: race[its][of] / base[of] for name, of in names.items()}
        for fmt, its in FORMATS_RACED.items()
    }
    low, *_, high = sorted(of['speed'] for of in found.values())
    found |= dict(low=low, high=high, verdict='slower' if high < 1 else 'not_slower')
    found |= dict(
        kd_beside_none=ours / race['student_alone']['examples_per_s'],
        beside_hf_best=ours / race['hf_best']['examples_per_s'],
    )
    return dict(steps=dict(small=small, large=large, faster=large['examples_per_s'] / ours), race=found)


def seeds_made_again(arms: dict[str, list[dict]]) -> list[int]:  # []: all share one start
    "The seeds whose first procedure starts from other weights than that of the first seed."
    starts = [(r['seed'], r['initial'].get('start_sha256')) for r in arms.get('baseline', [])]
    return [seed for seed, start in starts if start != starts[0][1]]


def without_overlap(found: Sequence[dict], units: pd.DataFrame, seen: Sequence[str]) -> dict:
    "What arms reach on the questions whose sentences the transfer's corpus does not have."
    p = found[0]['primary']
    own = (units['split'] == p['set']) & (units['metric'] == p['metric'])
    rows = units[own & ~units['unit'].isin(seen)]
    return dict(left=rows['unit'].nunique(), **rows.groupby('arm')['value'].mean())


# column of the GPU check's table -> name of the number
MEASURED = {
    'idle, W': 'idle',
    'loaded, W': 'loaded',
    'J / 1,000 examples': 'board',
    'examples/s': 'speed',
    'GPU, %': 'busy',
}
TWICE = ('baseline', 'parallel_baseline')  # one configuration where there is one GPU: measured twice
COMPARED = ('speed', 'board', 'above')


def measured_modes(
    table: dict,  # head and rows, text: `energy` of the check of a GPU
) -> dict[str, dict]:
    """What each mode drew: format, idle and loaded (W), board and above (J for 1,000 examples; the board's
    energy, and what of it is above the power at rest), speed, busy (%); without modes that were not measured.
    """
    modes = {}
    for cells in table['rows']:
        row = dict(zip(table['head'], cells))
        if '-' not in (row[title] for title in MEASURED):
            of = {name: float(row[title].replace(',', '')) for title, name in MEASURED.items()}
            above = 1000 * (of['loaded'] - of['idle']) / of['speed']
            modes[row['']] = dict(format=row['format'], **of, above=above)
    return modes


def energy_values(
    modes: dict[str, dict],  # of `measured_modes`
    pairs: dict[str, tuple[str, str]],  # step -> the modes that it compares
) -> dict:
    """Energy and speed of the modes, each measured once; rest: share of the power at rest; steps: the ratios,
    and told: is each larger than chance?; untold: quantities of which no step is; and the range of each.
    """
    # of normal logarithms, D / |d| of two equal pairs has Student's t with one degree of freedom
    factor = float(student_t.ppf((1 + LEVEL) / 2, 1))

    def ratios(a: str, b: str) -> dict[str, float]:
        return {name: modes[b][name] / modes[a][name] for name in COMPARED}

    def exceeds(ratio: float, noise: float) -> bool:
        # two equal measurements are rounded ones, and tell nothing
        return noise != 1 and abs(math.log(ratio)) > factor * abs(math.log(noise))

    twice = ratios(*TWICE) if set(TWICE) <= modes.keys() else {}
    steps = {}
    for key, (a, b) in pairs.items():
        if {a, b} <= modes.keys():
            of_b = {name: modes[b][name] for name in ('format', 'idle', 'loaded')}
            told = {name: exceeds(ratio, twice.get(name, 1)) for name, ratio in ratios(a, b).items()}
            steps[key] = dict(a=a, b=b, told=told, **of_b, **ratios(a, b))
    if not steps:
        raise ThesisError('the check of the GPU has no two modes with an energy to compare; run it again')
    shares = [of['idle'] / of['loaded'] for of in modes.values()]
    values = dict(rest=dict(low=min(shares), high=max(shares)), steps=steps, factor=factor)
    values['untold'] = {name: not any(step['told'][name] for step in steps.values()) for name in COMPARED}
    for name in COMPARED:
        numbers = [step[name] for step in steps.values()]
        values[name] = dict(low=min(numbers), high=max(numbers))
    if twice:
        apart = {name: abs(ratio - 1) for name, ratio in twice.items()}
        values['twice'] = dict(a=TWICE[0], b=TWICE[1], apart=apart, **twice)
    return values

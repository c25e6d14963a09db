"""What is known of a study before anything is compared: its runs, seeds, settings, models and machine."""

from __future__ import annotations
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any
import numpy as np
import pandas as pd
from kdnotes.analysis.comparable import timed
from kdnotes.analysis.intervals import Interval
from kdnotes.analysis.plotting import arms_of
from kdnotes.analysis.evidence import pooled_gradients
from kdnotes.core.render import p_text
from kdnotes.core.arms import MODES
from kdnotes.search.random import SPACES, as_judged, from_the_best


def flat(values: Any, prefix: str = '') -> dict[str, Any]:  # dotted key -> number, text, truth, list or None
    "Nested groups as dotted keys."
    if isinstance(values, Interval):
        values = {k: getattr(values, k) for k in ('estimate', 'low', 'high', 'n', 'units', 'level', 'reason')}
    if isinstance(values, dict) and values.keys() != {'head', 'rows'}:
        return {
            k: v
            for name, inner in values.items()
            for k, v in flat(inner, f'{prefix}.{name}' if prefix else str(name)).items()
        }
    return {prefix: plain(values)}  # a table is one value


_OF_RUNS = re.compile(r' (\(n=\d+\))$')


def _as_lists(frame: pd.DataFrame) -> dict[str, list]:  # head, rows
    "A table as lists; a number of runs that all cells of a column end with stands in its head."
    head = []
    columns = []
    for k, name in enumerate(frame.columns):
        cells = frame.iloc[:, k].tolist()
        counts = {found[1] if (found := _OF_RUNS.search(cell)) else '' for cell in cells if cell != '-'}
        count = counts.pop() if len(counts) == 1 else ''
        head.append(f'{name} {count}'.strip())
        columns.append([_OF_RUNS.sub('', cell) for cell in cells] if count else cells)
    return dict(head=head, rows=[list(row) for row in zip(*columns)])


def plain(value: Any) -> Any:
    "JSON's kinds; eight digits are enough for any text and are the same on every machine."
    if isinstance(value, pd.DataFrame):
        return _as_lists(value.astype(str))
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(f'{value:.8g}') if np.isfinite(value) else None
    return value


class _NotThere(Exception):
    "A cell asks for what its row does not have."


class _Cells(Formatter):
    "Format strings of a row, by its keys or its attributes."

    def get_value(self, key, args, kwargs):
        return kwargs[key] if isinstance(kwargs, Mapping) else getattr(kwargs, key)

    def get_field(self, field_name, args, kwargs):
        value, first = super().get_field(field_name, args, kwargs)
        number = value.estimate if isinstance(value, Interval) else value
        if number is None or number != number:
            raise _NotThere
        return value, first

    def format_field(self, value, format_spec):
        return p_text(value) if format_spec == 'p' else format(value, format_spec)


def text(
    how: str | Callable[[Any], Any],  # a format string, or what makes a text of a row
    row: Any,  # a mapping, or an object with attributes
) -> str:
    "A cell of a table; '-' where the row does not have its value."
    try:
        found = how(row) if callable(how) else _Cells().vformat(how, (), row)
    except _NotThere:
        found = None
    return '-' if found is None else str(found)


def table(rows: Iterable[Any], columns: Mapping[str, str | Callable[[Any], Any]]) -> pd.DataFrame:  # of text
    "Rows as text."
    return pd.DataFrame([{title: text(how, row) for title, how in columns.items()} for row in rows])


def among(values: Iterable[Any], between: str = ', ') -> str:  # 'a', or 'a, b'
    "The different values, as text."
    return between.join(dict.fromkeys(str(v) for v in values))


def low_to_high(numbers: Iterable[float]) -> str:  # '5', or '3 to 5'
    "The lowest and the highest, as text."
    of = sorted(numbers)
    return among((of[0], of[-1]), ' to ')


def given(found: Iterable[dict], names: Iterable[str]) -> dict[str, str]:
    "The values that runs have of settings which are numbers, as text; what no run has is left out."
    runs = [r['settings'] for r in found]
    values = {name: [f'{of[name]:g}' for of in runs if of.get(name) is not None] for name in names}
    return {name: among(of) for name, of in values.items() if of}


CORPUS_NAMES = {
    'wikiqa': 'WikiQA',
    'embedded': "the project's embedded corpus",
    'gutenberg': 'novels of Project Gutenberg',
    'squad1': 'SQuAD 1.1',
    'squad2': 'SQuAD 2.0',
    'squad1-8000': 'a part of SQuAD 1.1',
    'squad2-2000': 'a part of SQuAD 2.0',
}


def corpus_name(record: dict) -> str:
    "How a text calls a corpus; a folder by its last part."
    name = record['corpus'].rpartition('/')[2]
    return CORPUS_NAMES.get(name, name)


def about_values(found: Sequence[dict]) -> dict:
    "What was run, on what, and where."
    first = found[0]
    formats = among(r['precision'] for r in found)
    students = [r for r in found if r['factors']['network'] == 'student']
    searches = [r['tuning_id'] for r in students if r.get('tuning_id')]
    size = {r['factors']['network']: r['params_total'] for r in found}
    times = timed(found)
    return dict(
        study=first['study'],
        corpus_name=corpus_name(first),
        n_runs=len(found),
        metric=first['primary']['metric'],
        formats_in_words=' and '.join(formats.rsplit(', ', 1)),
        params_ratio=size['student'] / size['teacher'] if len(size) == 2 else None,
        teacher=among(r['models']['teacher'] for r in found if 'models' in r),
        student_layers=next((len(n) for r in students if (n := r['settings'].get('student_layers'))), None),
        tuned_student=searches[0].rsplit('-', 2)[1] if searches else None,
        machine={name: among((r['environment'][name] for r in found), ' and ') for name in ('cpu', 'device')},
        energy_reason=among(r['reasons'].get('energy.device_j', 'it was read') for r in times.runs),
        n_seeds=len({r['seed'] for r in found}),
        seeds_an_arm=low_to_high(map(len, arms_of(found).values())),
    )


_TASKS = dict(masked_lm='language model', extractive_qa='question answering')


def studies_table(found: Iterable[Sequence[dict]]) -> pd.DataFrame:  # a row a study, text
    "Every study with its runs."

    def short(device: str) -> str:
        return re.sub(r'\(R\)| Processor', '', device)

    def what(runs: Sequence[dict]) -> str:
        task = runs[0]['task']
        return f"{_TASKS.get(task, task.replace('_', ' '))}, {corpus_name(runs[0])}"

    return table(
        found,
        {
            'study': lambda runs: runs[0]['study'],
            'task, corpus': what,
            'runs': len,
            'seeds': lambda runs: len({r['seed'] for r in runs}),
            'formats': lambda runs: among(r['precision'] for r in runs),
            'device': lambda runs: among((short(r['environment']['device']) for r in runs), '; '),
        },
    )


def settings_table(found: Sequence[dict]) -> pd.DataFrame:  # setting, teacher network, student network; text
    "The recorded settings by network."

    def recorded(network: str) -> Callable[[str], str | None]:
        own = [r['settings'] for r in found if r['factors']['network'] == network]

        def cell(name: str) -> str | None:
            seen = {str(x) for of in own if (x := of.get(name)) is not None}
            return 'by arm: ' * (len(seen) > 1) + ', '.join(sorted(seen)) if seen else None

        return cell

    unsaid = {'task', 'smoke', 'network', 'teacher_seed', 'kd'}
    networks = {f"{network}'s network": recorded(network) for network in ('teacher', 'student')}
    return table(sorted({k for r in found for k in r['settings']} - unsaid), dict(setting=str) | networks)


SHOWN_PEAKS = ('baseline', 'mixed_baseline', 'full_kd', 'mixed_kd')


def operations(r: dict) -> float | None:  # of an example, forward and backward; None: not recorded
    "What the network of a run needs for an example."
    rate = r['throughput']['examples_per_s']
    return rate and r['throughput']['useful_flops_per_s'] / rate


def peaks_table(
    peaks: Mapping[str, Mapping[str, float]],  # 'cpu' and 'gpu' -> format -> operations a second
    on_cpu: Mapping[str, Sequence[dict]],  # arm -> its runs whose times count
    on_gpu: Mapping[str, Sequence[dict]],  # arm -> its runs
    alone: Mapping[str, Mapping[str, Any]],  # arm alone on the GPU -> format, speed (examples a second)
) -> pd.DataFrame:  # a row an arm and device, text
    "What formats reach of a device."
    rows = [
        dict(device='CPU', arm=arm, format=on_cpu[arm][0]['precision'])
        | dict(reached=np.mean([r['throughput']['useful_flops_per_s'] for r in on_cpu[arm]]))
        for arm in SHOWN_PEAKS
    ]
    rows += [
        dict(device='GPU', arm=arm, format=alone[arm]['format'])
        | dict(reached=alone[arm]['speed'] * operations(on_gpu[arm][0]))
        for arm in SHOWN_PEAKS
    ]
    return table(
        [row | dict(peak=peaks[row['device'].lower()][row['format']]) for row in rows],
        {
            'device': '{device}',
            'arm': '{arm}',
            'format': '{format}',
            'reached, GFLOP/s': lambda row: f'{row["reached"] / 1e9:,.0f}',
            'products, GFLOP/s': lambda row: f'{row["peak"] / 1e9:,.0f}',
            'share, %': lambda row: f'{100 * row["reached"] / row["peak"]:.2g}',
        },
    )


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

    return dict(
        steps=len({m['step'] for of in moments.values() for m in of}),
        lost=worst(lambda e: e < -24),
        coarse=worst(lambda e: e < -14),
        lost_scaled=worst(lambda e: e + FIRST_SCALE < -24),
        over_scaled=worst(lambda e: e + FIRST_SCALE >= 16),
        lost_bf16=worst(lambda e: e < -126),
        first_scale=FIRST_SCALE,
    )


def own_searches(trials: Sequence[dict], runs: Sequence[dict]) -> dict[str, str]:
    """Whether each student arm, tuned by itself, would have had another setting: student arm -> 'same': its
    own search chose what its runs have | 'other' | 'none': it was not searched for; and by each of these
    words the arms of it, as text, where there are any.
    """

    def verdict(arm: str, settings: dict) -> str:
        own = [r for r in trials if r['arm'] == arm]
        if not own:
            return 'none'
        best = as_judged(own)[0]['settings']
        return 'same' if all(best[k] == settings[k] for k in SPACES['student']) else 'other'

    found = {
        arm: verdict(arm, of[0]['settings'])
        for arm, of in arms_of(runs).items()
        if MODES[of[0]['mode']].network == 'student'
    }
    by_word = {word: [arm for arm, its in found.items() if its == word] for word in ('same', 'other', 'none')}
    return found | {word: among(arms) for word, arms in by_word.items() if arms}


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
        seeds=among(sorted({r['seed'] for r in found})),
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
    names = ('learning_rate', 'batch_size', 'alpha', 'temperature')
    busy = [(r.get('machine') or {}).get('busy_share') for r in found]

    def one(r: dict) -> dict:
        about = dict(examples=r.get('examples')) | {k: r['settings'].get(k) for k in names}
        return about | {split: scores[metric] for split, scores in r['metrics'].items()}

    return dict(
        study=found[0]['study'],
        formats=among(r['precision'] for r in found),
        busy=max((x for x in busy if x is not None), default=None),
        amp=amp_values(found),
    ) | {r['factors']['network']: one(r) for r in found}


def seeds_made_again(arms: dict[str, list[dict]]) -> str | None:  # as text; None: all share one start
    "The seeds whose first procedure starts from other weights than that of the first seed."
    runs = arms.get('baseline', [])
    starts = [r['initial'].get('start_sha256') for r in runs]
    return among(r['seed'] for r, start in zip(runs, starts) if start != starts[0]) or None

"""One arm against another: numbers, verdicts as codes, and what they rest on."""

from __future__ import annotations
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
import numpy as np
import pandas as pd
from kdnotes.stats.compare import (
    SEED,
    Comparison,
    Effect,
    compare,
    metric_differences,
    unit_matrix,
    verdict_on,
)
from kdnotes.stats.evidence import Evidence
from kdnotes.core.config import KdnotesError, task_info
from kdnotes.stats.tables import judged_by
from kdnotes.stats.tests import ALPHA, Family, crossed_test, holm, interval_test
from kdnotes.stats.intervals import (
    Interval,
    crossed_interval,
    difference_interval,
    mean_interval,
    ratio_interval,
)


# of MAP, the thesis's metric; the first is the study's, the second is reported with its power
MARGINS = task_info('answer_selection').margins['map']


def verdict(comparison: Comparison | None, about: str = 'primary') -> str:
    """What the primary metric, or a time, does from a to b, as far as a test tells: 'gains' | 'loses', of a
    time 'faster' | 'slower'; 'open' | 'not_tested'.
    """
    c = comparison
    found = 'not_tested' if c is None else verdict_on(c, about).code
    if found != 'significant':
        return 'open' if found == 'not_significant' else found
    if about == 'primary':
        return 'gains' if (c.difference.estimate > 0) == c.primary['higher_is_better'] else 'loses'
    return 'faster' if c.speedup[about].estimate > 1 else 'slower'


def direction(found: Interval, p: float | None, null: float = 0.0) -> str:
    """On which side of no change a quantity is, as far as a test tells: 'more' | 'less' | 'open' |
    'not_tested'.
    """
    if p is None:
        return 'not_tested'
    if p >= ALPHA:
        return 'open'
    return 'more' if found.estimate > null else 'less'


def tested(family: str, found: Mapping[Hashable, Interval | None], null: float = 0.0) -> dict[Hashable, dict]:
    "Intervals against no change, corrected together; ratios on the log scale: p, p_holm, verdict."
    p = {key: interval_test(of, null, log=null == 1.0).p if of else None for key, of in found.items()}
    corrected = holm(p, Family(family, tuple(p))) if p else {}
    return {
        key: dict(p=p[key], p_holm=of, verdict=direction(found[key], of, null))
        for key, of in corrected.items()
    }


def agreed(verdicts: Sequence[str]) -> str:
    """One verdict of several tests: what one of them finds is not what all find. The verdict of all that
    were made | 'mixed': they differ | 'not_tested': none was made.
    """
    found = {*verdicts} - {'not_tested'} or {'not_tested'}
    return found.pop() if len(found) == 1 else 'mixed'


STEPS = {  # key -> (a, b)
    'ranks': ('baseline', 'parallel_baseline'),
    'network': ('parallel_baseline', 'full_student'),
    'kd': ('full_student', 'full_kd'),
    'precision': ('full_kd', 'mixed_kd'),
    'teacher_precision': ('baseline', 'mixed_baseline'),
    'student_precision': ('full_student', 'mixed_student'),
    'kd_mixed': ('mixed_student', 'mixed_kd'),
    'procedure_2': ('baseline', 'full_kd'),
    'procedure_3': ('baseline', 'mixed_kd'),
}
PRECISION_STEPS = ('precision', 'student_precision', 'teacher_precision')


def compared(c: Comparison) -> dict:
    "A comparison in numbers; p of times are corrected."
    return dict(
        a=c.a,
        b=c.b,
        factor=c.attribution.factor if c.attribution else None,
        n_seeds=c.n_seeds,
        difference=c.difference,
        p=c.p,
        p_holm=c.p_holm,
        epochs=c.epochs,
        train_ratio=c.speedup.get('train_s'),
        train_p_holm=c.p_times_holm.get('train_s'),
        total_ratio=c.speedup.get('total_s'),
        total_p_holm=c.p_times_holm.get('total_s'),
    )


def step_values(
    a: str,
    b: str,
    comparison: Comparison | None,  # None: an arm has no runs
) -> dict:
    "What chapters ask of b against a: verdicts, and its numbers where there are any."
    c = comparison
    strict = [e for e in c.equivalences if e.margin == MARGINS[1]] if c else []
    values = dict(
        a=a,
        b=b,
        keeps_strictly=any(e.noninferior for e in strict),
        n_seeds=c.n_seeds if c else 0,
        verdict=verdict(c),
        train=verdict(c, 'train_s'),
    )
    return values if c is None or c.difference is None else values | compared(c)


ONE_FORMAT = ('mixed_baseline', 'mixed_kd')


def one_format(arms: dict[str, list[dict]], its_units: pd.DataFrame) -> dict:
    "The distilled student beside its teacher's network, both in mixed precision; {}: they cannot be paired."
    a, b = ONE_FORMAT
    return compared(compare(arms[a], arms[b], its_units)) if arms.get(a) and arms.get(b) else {}


def pairs_by_seed(a: Sequence[dict], b: Sequence[dict]) -> list[tuple[dict, dict]]:
    "The runs of two arms, paired by seed: sorted by seed; only the seeds that both arms have."
    of_a, of_b = ({r['seed']: r for r in runs} for runs in (a, b))
    return [(of_a[seed], of_b[seed]) for seed in sorted(of_a.keys() & of_b.keys())]


def changed_pairs(a: Sequence[dict], b: Sequence[dict], its_units: pd.DataFrame) -> dict:
    """How much there is that a difference of two arms could rest on: pairs of a seed and a unit that both
    arms have; changed: those whose primary metric differs; {} where there are none.
    """
    pairs = pairs_by_seed(a, b)
    if not pairs:
        return {}
    x, y = (unit_matrix(runs, its_units) for runs in zip(*pairs))
    if x is None or y is None or set(x.columns) != set(y.columns):
        return {}
    same = np.isclose(y[x.columns].to_numpy(), x.to_numpy(), atol=1e-6)
    return dict(pairs=x.size, changed=int((~same).sum()))


def other_questions(a: Sequence[dict], b: Sequence[dict], its_units: pd.DataFrame) -> dict[str, Interval]:
    """What the primary metric does from a to b on other units than those of its own set: dev: the
    difference on the set that chose settings; everywhere: on all units of both sets; {} where nothing is
    claimed of another set than the one that chose.
    """
    pairs = pairs_by_seed(a, b)
    if not pairs:
        return {}
    task = task_info(pairs[0][0]['task'])
    own = pairs[0][0]['primary']
    if task.tuning_set == own['set']:
        return {}

    def differences(where: str) -> np.ndarray | None:
        judged = zip(*(judged_by(runs, where, own['metric']) for runs in zip(*pairs)))
        return metric_differences(list(judged), its_units)[0]

    dev, test = differences(task.tuning_set), differences(own['set'])
    if test is None or test.ndim != 2 or len(test) < len(pairs):
        return {}  # differences of seeds alone: a record denies its units
    if dev is None or dev.ndim != 2 or len(dev) != len(test):
        arms = ' and '.join(r['arm'] for r in pairs[0])
        raise KdnotesError(
            f'the claim about {arms} rests on the {own["set"]} set alone: values of {own["metric"]} on the '
            f'{task.tuning_set} set, which chose the settings, are missing from the units of these runs; '
            'export their evidence again'
        )

    def interval(d: np.ndarray) -> Interval:
        return difference_interval(d, np.random.default_rng(SEED), task.reach.get(own['metric']))

    return dict(dev=interval(dev), everywhere=interval(np.hstack([dev, test])))


KD_STEPS = ('kd', 'kd_mixed')


def soft_target_gains(arms: dict[str, list[dict]], its_units: pd.DataFrame, where: str) -> pd.DataFrame:
    """What soft targets add on one set, in all formats of a study: a row a seed, a column a unit. The formats
    of a seed share their start, their data and their teacher, so that a seed counts once, by their mean.
    """
    metric = next(iter(arms.values()))[0]['primary']['metric']
    rows = its_units[(its_units['split'] == where) & (its_units['metric'] == metric)]
    values = rows.pivot(index='run_id', columns='unit', values='value')
    by_seed: dict[int, list[pd.Series]] = {}
    for step in KD_STEPS:
        for alone, taught in pairs_by_seed(*(arms.get(arm, ()) for arm in STEPS[step])):
            gain = values.loc[taught['run_id']] - values.loc[alone['run_id']]
            by_seed.setdefault(alone['seed'], []).append(gain)
    return pd.DataFrame({seed: pd.concat(of, axis=1).mean(axis=1) for seed, of in by_seed.items()}).T


def pooled_soft_targets(
    studies: Sequence[Evidence],  # on the same questions
) -> dict:
    """What soft targets add over several studies, on the set that is scored, the one that chose settings and
    both: test, dev and everywhere -> difference, p (uncorrected), verdict; sets: do the two sets have the
    same sign: 'alike' | 'opposite'.
    """
    first = studies[0].records[0]
    sets = dict(test=first['primary']['set'], dev=task_info(first['task']).tuning_set)
    gains = {
        name: pd.concat([soft_target_gains(e.arms, e.units, where) for e in studies])
        for name, where in sets.items()
    }
    gains['everywhere'] = pd.concat([gains['dev'], gains['test']], axis=1)
    found: dict[str, Any] = {}
    for name, of in gains.items():
        if of.isna().any(axis=None):
            raise KdnotesError(
                f'what soft targets add cannot be pooled on {name}: the studies were not scored on the same '
                'questions; pool studies of one corpus'
            )
        matrix = of.to_numpy(float)
        interval, p = crossed_interval(matrix), crossed_test(matrix).p
        found[name] = dict(difference=interval, p=p, verdict=direction(interval, p))
    signs = {found[name]['difference'].estimate > 0 for name in sets}
    return found | dict(sets='alike' if len(signs) == 1 else 'opposite')


def memory_values(arms: dict[str, list[dict]]) -> dict:
    """What mixed precision does to peaks of memory, of all ranks of a run, paired by seed: t tests on
    logarithms, corrected within these steps. Step -> ratio (None: no seed has both), verdict: 'more' | 'less'
    | 'open' | 'not_tested', p, p_holm.
    """

    def ratio(step: str) -> Interval | None:
        for key in ('peak_device_mib', 'peak_host_mib'):
            measured = ([r for r in arms.get(arm, ()) if r['memory'][key]] for arm in STEPS[step])
            if pairs := pairs_by_seed(*measured):
                of_a, of_b = ([r['memory'][key] for r in runs] for runs in zip(*pairs))
                return ratio_interval(of_b, of_a)
        return None

    ratios = {step: ratio(step) for step in PRECISION_STEPS}
    return {step: dict(ratio=ratios[step]) | of for step, of in tested('memory', ratios, 1.0).items()}


DECISIONS = tuple(f'{of}_{name}' for of in ('pair', 'trigger') for name in ('precision', 'recall', 'f1'))
DECISION_STEPS = ('kd', 'precision', 'procedure_3')


def decision_values(arms: dict[str, list[dict]]) -> dict[str, dict[str, dict]]:
    """What steps do to precision, recall and F1 of decisions: Student's t over seeds. Step -> metric ->
    difference, p, p_holm, over the seeds that both arms have; {} for tasks without these.
    """
    differences: dict[tuple[str, str], list[float]] = {}
    for step in DECISION_STEPS:
        for a, b in pairs_by_seed(*(arms.get(arm, ()) for arm in STEPS[step])):
            of_a, of_b = (r['metrics'][r['primary']['set']] for r in (a, b))
            for name in DECISIONS:
                if None not in (of_a.get(name), of_b.get(name)):
                    differences.setdefault((step, name), []).append(of_b[name] - of_a[name])
    intervals = {key: mean_interval(of) for key, of in differences.items()}
    found: dict[str, dict[str, dict]] = {}
    for (step, name), of in tested('decisions', intervals).items():
        found.setdefault(step, {})[name] = of | dict(difference=intervals[step, name])
    return found


INTERACTION = 'precision x kd (students)'


def effect_values(effects: Sequence[Effect], name: str) -> dict:
    """An effect or an interaction: verdict: 'more' | 'less' | 'open', by the corrected p | 'not_tested';
    difference, p, p_holm.
    """
    e = next(e for e in effects if e.name == name)
    if e.interval is None or e.p_holm is None:
        return dict(verdict='not_tested', difference=e.interval)
    return dict(verdict=direction(e.interval, e.p_holm), difference=e.interval, p=e.p, p_holm=e.p_holm)

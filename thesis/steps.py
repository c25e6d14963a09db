"""One arm against another: numbers, verdicts as codes, and what they rest on."""

from __future__ import annotations
from collections.abc import Hashable, Iterable, Mapping, Sequence
import numpy as np
import pandas as pd
from kdnotes.core.config import KdnotesError, task_info
from kdnotes.results.table import arms_of
from kdnotes.stats.comparable import bound_of, matched, paired_values
from kdnotes.stats.compare import SEED, Comparison, metric_differences
from kdnotes.stats.evidence import Evidence
from kdnotes.stats.intervals import (
    Interval,
    crossed_interval,
    difference_interval,
    mean_interval,
    ratio_interval,
)
from kdnotes.stats.tables import judged_by
from kdnotes.stats.tests import ALPHA, crossed_test, difference_and_test, holm, interval_test

# of MAP, the thesis's metric; the first is the study's, the second is reported with its power
MARGINS = task_info('answer_selection').margins['map']
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
DECISION_STEPS = ('kd', 'precision', 'procedure_3')
KD_STEPS = ('kd', 'kd_mixed')


def verdict(c: Comparison | None, about: str = 'primary') -> str:
    """What the primary metric, or a time, does from a to b: 'gains' | 'loses', of a time 'faster' | 'slower';
    'open' where the difference is not significant; 'not_tested'.
    """
    code = 'not_tested' if c is None else c.verdict(about).code
    if code != 'significant':
        return 'open' if code == 'not_significant' else code
    if about == 'primary':
        return 'gains' if (c.difference.estimate > 0) == c.primary['higher_is_better'] else 'loses'
    return 'faster' if c.speedup[about].estimate > 1 else 'slower'


def direction(of: Interval | None, p: float | None, null: float = 0.0) -> str:
    "On which side of no change a quantity is: 'more' | 'less' | 'open' | 'not_tested'."
    if p is None:
        return 'not_tested'
    return 'open' if p >= ALPHA else 'more' if of.estimate > null else 'less'


def tested(of: Mapping[Hashable, Interval | None], name: str, null: float = 0.0) -> dict[Hashable, dict]:
    "Intervals against no change, corrected together, ratios on the log scale: name, p, p_holm, verdict."
    p = {key: interval_test(i, null, log=null == 1.0).p if i else None for key, i in of.items()}
    corrected = holm(p)
    return {
        key: {name: of[key], 'p': p[key], 'p_holm': holms, 'verdict': direction(of[key], holms, null)}
        for key, holms in corrected.items()
    }


def agreed(verdicts: Iterable[str]) -> str:
    "The verdict of all tests that were made | 'mixed': they differ | 'not_tested': none was made."
    found = {*verdicts} - {'not_tested'} or {'not_tested'}
    return found.pop() if len(found) == 1 else 'mixed'


def compared(c: Comparison) -> dict:
    "A comparison in numbers; p of times are corrected."
    found = {name: getattr(c, name) for name in ('a', 'b', 'n_seeds', 'difference', 'p', 'p_holm', 'epochs')}
    found |= dict(factor=c.attribution.factor if c.attribution else None)
    for time in ('train', 'total'):
        ratio, _, p_holm = c.tested(f'{time}_s')
        found |= {f'{time}_ratio': ratio, f'{time}_p_holm': p_holm}
    return found


def steps_values(e: Evidence, steps: Mapping[str, tuple[str, str]]) -> dict[str, dict]:
    "What chapters ask of each step from an arm to another: verdicts, and its numbers where there are any."
    by_pair = {(c.a, c.b): c for _, c in e.comparisons}
    found = {}
    for key, (a, b) in steps.items():
        c = by_pair.get((a, b))
        found[key] = dict(a=a, b=b, verdict=verdict(c), train=verdict(c, 'train_s'))
        found[key]['n_seeds'] = c.n_seeds if c else 0
        of_margins = c.equivalences if c else ()
        found[key]['keeps_strictly'] = any(m.noninferior for m in of_margins if m.margin == MARGINS[1])
        if c and c.difference:
            found[key] |= compared(c)
    return found


# what one factor changes in the effect of another -> weight of each arm; they add up to 0. Only students are
# distilled, and the teacher's network in mixed precision runs on one rank only
INTERACTIONS = {
    'precision x kd': dict(mixed_kd=1, full_kd=-1, mixed_student=-1, full_student=1),
    'network x precision': dict(mixed_student=1, full_student=-1, mixed_baseline=-1, baseline=1),
}


def interaction(
    arms: Mapping[str, Sequence[dict]],
    units: pd.DataFrame,
    weights: Mapping[str, int],  # of INTERACTIONS
) -> tuple[Interval | None, float | None]:
    "The weighted sum of arms and its p, of the seeds, and teachers' seeds, that all arms have."
    runs = [arms.get(arm, ()) for arm in weights]
    rows = matched(runs, lambda r: r['primary']['value'] is not None)[0] if all(runs) else []
    values = paired_values(zip(*rows), units)
    if not values:
        return None, None
    bound = bound_of(rows[0], units)
    # half of the sizes of the weights times a difference of two values
    bound = None if bound is None else bound * sum(map(abs, weights.values())) / 2
    matrix = sum(w * x for w, x in zip(weights.values(), values))
    found, test = difference_and_test(matrix, np.random.default_rng(SEED), bound)
    return found, test.p


def pairs_by_seed(arms: Mapping[str, Sequence[dict]], step: str) -> list[tuple[dict, dict]]:
    "The runs of the two arms of a step, sorted by the seeds that both have."
    a, b = ({r['seed']: r for r in arms.get(arm, ())} for arm in STEPS[step])
    return [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def units_values(pairs: Sequence[tuple[dict, dict]], units: pd.DataFrame) -> dict:
    """What a step does to units: pairs of a seed and a unit; changed: those whose primary metric differs;
    dev: the difference on the set that chose the settings; everywhere: on all units of both sets; {} without
    units.
    """
    if not pairs:
        return {}
    task, own = task_info(pairs[0][0]['task']), pairs[0][0]['primary']

    def differences(where: str) -> np.ndarray | None:
        judged = zip(*(judged_by(runs, where, own['metric']) for runs in zip(*pairs)))
        found = metric_differences(list(judged), units)[0]
        return None if found is None or found.ndim != 2 or len(found) != len(pairs) else found

    test = differences(own['set'])
    if test is None:
        return {}
    values = dict(pairs=test.size, changed=int((np.abs(test) > 1e-6).sum()))
    if task.tuning_set == own['set']:
        return values
    dev = differences(task.tuning_set)
    if dev is None:
        arms = ' and '.join(r['arm'] for r in pairs[0])
        raise KdnotesError(
            f'the claim about {arms} rests on the {own["set"]} set alone: values of {own["metric"]} on the '
            f'{task.tuning_set} set, which chose the settings, are missing from the units of these runs; '
            'export their evidence again'
        )
    for name, of in dict(dev=dev, everywhere=np.hstack([dev, test])).items():
        values[name] = difference_interval(of, np.random.default_rng(SEED), task.reach.get(own['metric']))
    return values


def pooled_soft_targets(
    studies: Sequence[tuple[list[dict], pd.DataFrame]],  # records and units; of the same questions
) -> dict:
    """What soft targets add over several studies, on the set that is scored, the one that chose settings and
    both: test, dev and everywhere -> difference, p (uncorrected), verdict; sets: do the two sets have the
    same sign: 'alike' | 'opposite'. The formats of a seed share their start, their data and their teacher, so
    that a seed counts once, by their mean.
    """
    first = studies[0][0][0]
    gains: dict[str, list[pd.DataFrame]] = {}  # set -> of each study: one row per seed, one column per unit
    for where in (first['primary']['set'], task_info(first['task']).tuning_set):
        for found, units in studies:
            rows = units[(units['split'] == where) & (units['metric'] == first['primary']['metric'])]
            values = rows.pivot(index='run_id', columns='unit', values='value')
            pairs = [pair for step in KD_STEPS for pair in pairs_by_seed(arms_of(found), step)]
            added = pd.DataFrame([values.loc[b['run_id']] - values.loc[a['run_id']] for a, b in pairs])
            gains.setdefault(where, []).append(added.groupby([a['seed'] for a, _ in pairs]).mean())
    test, dev = (pd.concat(of, ignore_index=True) for of in gains.values())
    found = {}
    for name, of in dict(test=test, dev=dev, everywhere=pd.concat([dev, test], axis=1)).items():
        if of.isna().any(axis=None):
            raise KdnotesError(
                f'what soft targets add cannot be pooled on {name}: the studies were not scored on the same '
                'questions; pool studies of one corpus'
            )
        matrix = of.to_numpy(float)
        interval, p = crossed_interval(matrix), crossed_test(matrix).p
        found[name] = dict(difference=interval, p=p, verdict=direction(interval, p))
    signs = {found[name]['difference'].estimate > 0 for name in ('test', 'dev')}
    return found | dict(sets='alike' if len(signs) == 1 else 'opposite')


def memory_values(arms: dict[str, list[dict]]) -> dict:
    """What mixed precision does to peaks of memory, of all ranks of a run, paired by seed: t tests on
    logarithms, corrected within these steps. Step -> ratio (None: no seed has both), verdict, p, p_holm.
    """
    ratios: dict[str, Interval | None] = dict.fromkeys(PRECISION_STEPS)
    for step in PRECISION_STEPS:
        for key in ('peak_host_mib', 'peak_device_mib'):  # the device's, where it was measured
            peaks = [[r['memory'][key] for r in pair] for pair in pairs_by_seed(arms, step)]
            if measured := [pair for pair in peaks if all(pair)]:
                a, b = zip(*measured)
                ratios[step] = ratio_interval(b, a)
    return tested(ratios, 'ratio', 1.0)


def decision_values(arms: dict[str, list[dict]]) -> dict[str, dict[str, dict]]:
    """What steps do to precision, recall and F1 of decisions: Student's t over seeds. Step -> metric ->
    difference, p, p_holm, over the seeds that both arms have; {} for tasks without these.
    """
    names = [f'{of}_{name}' for of in ('pair', 'trigger') for name in ('precision', 'recall', 'f1')]
    differences: dict[tuple[str, str], list[float]] = {}
    for step in DECISION_STEPS:
        for pair in pairs_by_seed(arms, step):
            a, b = (r['metrics'][r['primary']['set']] for r in pair)
            for name in names:
                if None not in (a.get(name), b.get(name)):
                    differences.setdefault((step, name), []).append(b[name] - a[name])
    found: dict[str, dict[str, dict]] = {}
    intervals = {key: mean_interval(of) for key, of in differences.items()}
    for (step, name), of in tested(intervals, 'difference').items():
        found.setdefault(step, {})[name] = of
    return found

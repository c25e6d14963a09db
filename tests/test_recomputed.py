"""The thesis' tables of accuracy, computed again from the committed units by numpy alone.

Nothing of kdnotes is imported: what stands in a table must follow from `thesis/data` by the formulas of the
thesis' chapter on statistics, written here a second time.
"""

import csv
import gzip
import json
import re
from functools import lru_cache
from pathlib import Path
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PLAN = json.loads((ROOT / 'thesis/plan.json').read_text())
VALUES = json.loads((ROOT / 'thesis/generated/values.json').read_text())
PARTS = [part for part in PLAN['parts'] if f'{part}.tables.comparisons' in VALUES]
COMPARED = [part for part in PARTS if VALUES[f'{part}.tables.comparisons']]
VARIED = ['labels_gpu', 'labels_imdb']
# steps in which one factor changes; all other comparisons are a family of their own
ONE_FACTOR = {
    ('baseline', 'parallel_baseline'),
    ('parallel_baseline', 'full_student'),
    ('full_student', 'full_kd'),
    ('full_kd', 'mixed_kd'),
    ('baseline', 'mixed_baseline'),
    ('full_student', 'mixed_student'),
    ('mixed_student', 'mixed_kd'),
}
FEW = 15


def t_upper(t, df):
    "The chance that Student's t is above t >= 0: its density, integrated over an angle."
    edge = np.arctan(t / np.sqrt(df))
    angle, step = np.linspace(edge, np.pi / 2, 20_001, retstep=True)
    half, step_half = np.linspace(0, np.pi / 2, 20_001, retstep=True)

    def area(x, width):
        y = np.cos(x) ** (df - 1)
        return width / 3 * (y[0] + 4 * y[1::2].sum() + 2 * y[2:-1:2].sum() + y[-1])

    return 0.5 * area(angle, step) / area(half, step_half)


@lru_cache
def t_table(df):
    "Chances above, rising, and the t of each."
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (df - 1)
    area = np.append(0.0, np.cumsum((density[1:] + density[:-1]) / 2))
    above = (area[-1] - area) / area[-1] / 2
    kept = above > 1e-14
    return np.log(above[kept][::-1]), np.sqrt(df) * np.tan(angle[kept][::-1])


def t_limit(df, level=0.975):
    "The t below which Student's t lies with that chance."
    return float(np.interp(np.log(1 - level), *t_table(df)))


def test_the_table_of_t_is_that_of_its_density():
    for df in (1, 2, 4, 236):
        for level in (0.9, 0.975, 1 - 0.025 / 7):
            assert t_upper(t_limit(df, level), df) == pytest.approx(1 - level, rel=1e-5)


def crossed(y):
    "Mean, half of the 95 % interval and two-sided p of (seeds, units), both sampled."
    S, U = y.shape
    if S == 1:
        error = y.std(ddof=1) / np.sqrt(U)
        return y.mean(), t_limit(U - 1) * error, None
    mean = y.mean()
    rows, columns = y.mean(1) - mean, y.mean(0) - mean
    rest = y - mean - rows[:, None] - columns
    df = np.array([S - 1, U - 1, (S - 1) * (U - 1)])
    ms = np.array([U * (rows**2).sum(), S * (columns**2).sum(), (rest**2).sum()]) / df
    # a component that is not above nought takes its mean square out of the sum
    whole = (max(ms[0], ms[2]) + max(ms[1], ms[2]) - ms[2]) / (S * U)
    if not whole:
        return mean, 0.0, 1.0
    few = ms[0 if S <= U else 1] / (S * U)  # the fewer keep their whole mean square

    def half(level):
        limits = [t_limit(min(S, U) - 1, level), t_limit(max(S, U) - 1, level)]
        return np.sqrt(few * limits[0] ** 2 + (whole - few) * limits[1] ** 2)

    # p: twice the chance whose limit is nought, by halving its logarithm
    low, high = -30.0, np.log(0.5)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if half(1 - np.exp(middle)) > abs(mean) else (low, middle)
    return mean, half(0.975), min(1.0, 2 * np.exp(low))


def bounded(y, rng):
    """Limits of the mean where few units differ: one more unit at either end, all weights alike; and p, twice
    the chance at which the nearer limit is nought.
    """
    S, U = y.shape
    mean, units = y.mean(), y.mean(0)
    weights = rng.exponential(size=(20_000, U + 1))
    weights /= weights.sum(1, keepdims=True)
    error = y.mean(1).std(ddof=1) / np.sqrt(S) if S > 1 else 0.0
    drawn = {side: weights @ np.append(units, side) for side in (-1, 1)}

    def limit(side, q):
        over_units = max(side * (np.quantile(drawn[side], q if side > 0 else 1 - q) - mean), 0.0)
        over_seeds = t_limit(S - 1, q) * error if S > 1 else 0.0
        return mean + side * np.hypot(over_units, over_seeds)

    side = -1 if mean > 0 else 1
    low, high = 0.5, 1 - 1e-9
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if side * limit(side, middle) < 0 else (low, middle)
    return [limit(-1, 0.975), limit(1, 0.975)], min(1.0, 2 * (1 - low)) if mean else 1.0


def read(part):
    "arm -> seed -> {unit: (cluster, value)} of the primary metric, and (set, metric)."
    plan = PLAN['parts'][part]
    data = ROOT / 'thesis/data'
    lines = (data / f'{plan["study"]}.records.jsonl').read_text().splitlines()
    records = {r['run_id']: r for r in map(json.loads, lines)}
    where = {i: arm for arm, seeds in plan['runs'].items() for i in seeds.values()}
    p = records[next(iter(where))]['primary']
    found = {arm: {} for arm in plan['runs']}
    with gzip.open(data / f'{plan["study"]}.units.csv.gz', 'rt') as f:
        for row in csv.DictReader(f):
            if row['run_id'] in where and (row['split'], row['metric']) == (p['set'], p['metric']):
                seeds = found[where[row['run_id']]]
                seeds.setdefault(int(row['seed']), {})[row['unit']] = row['cluster'], float(row['value'])
    return found, p['metric']


def matrix(part, runs, seeds):
    "(seeds, units); for texts that are alike (seeds, documents), each as heavy as its units."
    units = sorted(runs[seeds[0]])
    y = np.array([[runs[seed][unit][1] for unit in units] for seed in seeds])
    if not part.startswith(('mlm', 'qa')):
        return y
    names, which = np.unique([runs[seeds[0]][unit][0] for unit in units], return_inverse=True)
    apart = y - y.mean(1, keepdims=True)
    totals = np.array([np.bincount(which, weights=row) for row in apart])
    return totals * len(names) / len(units) + y.mean(1, keepdims=True)


def holm(p_values):
    "Each p value times the number of those that are not smaller, and never below a smaller one's."
    rising = sorted(p_values, key=p_values.get)
    steps = [p_values[name] * (len(rising) - i) for i, name in enumerate(rising)]
    return {name: min(max(steps[: i + 1]), 1.0) for i, name in enumerate(rising)}


def interval_of(key):
    return [VALUES[f'{key}.{end}'] for end in ('estimate', 'low', 'high')]


@pytest.mark.parametrize('part', PARTS)
def test_means_and_intervals_of_arms(part):
    runs, _ = read(part)
    for arm in VALUES[f'{part}.arm_names']:
        y = matrix(part, runs[arm], sorted(runs[arm]))
        mean, half, _ = crossed(y)
        key = f'{part}.arms.{arm}'
        assert VALUES[f'{key}.n'] == len(y)
        assert interval_of(f'{key}.primary') == pytest.approx([mean, mean - half, mean + half], abs=2e-5)


@pytest.mark.parametrize('part', COMPARED)
def test_differences_their_intervals_and_p_values(part):
    runs, metric = read(part)
    rows = {(row['a'], row['b']): row for row in VALUES[f'{part}.tables.comparisons']}
    p_values = {}
    for (a, b), row in rows.items():
        seeds = sorted(runs[a].keys() & runs[b].keys())
        d = matrix(part, runs[b], seeds) - matrix(part, runs[a], seeds)
        mean, half, found = crossed(d)
        differ = int((np.abs(d) > 1e-9).any(0).sum())
        assert row['n_seeds'] == len(seeds)
        difference = [row['difference'][end] for end in ('estimate', 'low', 'high')]
        if metric == 'map' and differ < min(FEW, d.shape[1] / 2):
            # two sets of random weights agree to some ten-thousandths
            limits, found_p = bounded(d, np.random.default_rng(7))
            assert difference == pytest.approx([mean, *limits], abs=1.2e-3)
            assert found is None or row['p'] == pytest.approx(found_p, abs=0.03)
            p_values[a, b] = None if found is None else row['p']
            continue
        assert difference == pytest.approx([mean, mean - half, mean + half], abs=2e-5)
        assert row['p'] == (found if found is None else pytest.approx(found, rel=1e-2, abs=1e-4))
        p_values[a, b] = found
    if part.startswith(('mlm', 'qa')):
        return  # their steps are named by what they compare in each study
    tested = {step: p for step, p in p_values.items() if p is not None}
    for step in tested:
        # what one seed cannot test makes no family larger
        family = {s: p for s, p in tested.items() if (s in ONE_FACTOR) == (step in ONE_FACTOR)}
        assert rows[step]['p_holm'] == pytest.approx(holm(family)[step], rel=1e-2, abs=3e-3)


@pytest.mark.parametrize('part', VARIED)
def test_variants_of_a_taught_arm(part):
    runs, _ = read(part)
    chosen = runs[VALUES[f'{part}.texts.taught']]
    names = re.compile(rf'{part}\.variants\.(\w+)\.p')
    p_values = {}
    for arm in [found[1] for key in VALUES if (found := names.fullmatch(key))]:
        seeds = sorted(runs[arm].keys() & chosen.keys())
        key = f'{part}.variants.{arm}.difference'
        assert VALUES[f'{key}.n'] == len(seeds)
        d = matrix(part, runs[arm], seeds) - matrix(part, chosen, seeds)
        mean, half, p_values[arm] = crossed(d)
        assert interval_of(key) == pytest.approx([mean, mean - half, mean + half], abs=2e-5)
    corrected = holm(p_values)
    assert corrected and all(
        VALUES[f'{part}.variants.{arm}.p'] == pytest.approx(p, abs=6e-4) for arm, p in corrected.items()
    )


def by_set(part):
    "arm -> seed -> {(set, question): average precision} of the development and the test set."
    plan = PLAN['parts'][part]
    where = {i: arm for arm, seeds in plan['runs'].items() for i in seeds.values()}
    found = {}
    with gzip.open(ROOT / 'thesis/data' / f'{plan["study"]}.units.csv.gz', 'rt') as f:
        for row in csv.DictReader(f):
            if row['run_id'] in where and row['metric'] == 'map' and row['split'] in ('dev', 'test'):
                its = found.setdefault(where[row['run_id']], {}).setdefault(int(row['seed']), {})
                its[row['split'], row['unit']] = float(row['value'])
    return found


def test_what_soft_targets_add_is_pooled_over_formats_studies_and_sets():
    rows = []
    for part in ('main', 'gpu'):
        runs = by_set(part)
        of_seed = {}
        for alone, taught in (('full_student', 'full_kd'), ('mixed_student', 'mixed_kd')):
            for seed in runs[alone].keys() & runs[taught].keys():
                gains = {u: runs[taught][seed][u] - x for u, x in runs[alone][seed].items()}
                of_seed.setdefault(seed, []).append(gains)
        rows += [{u: np.mean([g[u] for g in found]) for u in found[0]} for found in of_seed.values()]
    units = sorted(rows[0])
    every = np.array([[row[u] for u in units] for row in rows])
    of_test = np.array([split == 'test' for split, _ in units])
    for name, y in (('everywhere', every), ('test', every[:, of_test]), ('dev', every[:, ~of_test])):
        mean, half, p = crossed(y)
        assert interval_of(f'kd.{name}.difference') == pytest.approx(
            [mean, mean - half, mean + half], abs=1e-6
        )
        assert VALUES[f'kd.{name}.p'] == pytest.approx(p, abs=1e-5)
    assert every.shape == (13, 359)
    assert interval_of('kd.everywhere.difference') == pytest.approx([0.006, 0.001, 0.011], abs=6e-4)
    assert VALUES['kd.test.difference.estimate'] == pytest.approx(0.0098, abs=1e-4)
    assert VALUES['kd.dev.difference.estimate'] == pytest.approx(-0.0017, abs=1e-4)


def closed_gap(alone, taught, teacher):
    "The share of a gap that is closed, with the shares at which its test turns over."
    gained, gap = taught - alone, teacher - alone

    def edge(side):
        low, high = (-3.0, gained.mean() / gap.mean()) if side < 0 else (gained.mean() / gap.mean(), 4.0)
        for _ in range(60):
            middle = (low + high) / 2
            mean, half, _ = crossed(gained - middle * gap)
            inside = mean - half < 0 if side < 0 else mean + half > 0
            low, high = (low, middle) if inside == (side < 0) else (middle, high)
        return (low + high) / 2

    return [gained.mean() / gap.mean(), edge(-1), edge(1)]


def test_the_gap_is_measured_from_the_best_student_without_distillation():
    runs = by_set('labels')
    units = sorted(u for u in runs['alone_256'][0] if u[0] == 'test')

    def scores(arm):
        return np.array([[runs[arm][seed][u] for u in units] for seed in sorted(runs[arm])])

    of_labels = ('alone_256', 'alone_256_longer', 'alone_256_squad1')
    means = {arm: scores(arm).mean() for arm in of_labels}
    best = max(means, key=means.get)
    assert best == 'alone_256_squad1' == VALUES['labels.texts.alone']
    assert means[best] == pytest.approx(0.572, abs=5e-4)
    taught = scores('taught_256_rest')
    teacher = np.repeat(scores('baseline')[:1], len(taught), axis=0)  # one given model
    found = closed_gap(scores(best), taught, teacher)
    assert interval_of('labels.texts.closed') == pytest.approx(found, abs=2e-3)
    assert found[0] == pytest.approx(0.72, abs=5e-3)
    same_start = closed_gap(scores('alone_256'), taught, teacher)
    assert interval_of('labels.same_start.closed') == pytest.approx(same_start, abs=2e-3)
    assert same_start[0] == pytest.approx(0.81, abs=5e-3)


def test_the_race_on_a_gpu_and_the_aims_that_were_missed():
    data = ROOT / 'thesis/data'
    bert = json.loads((data / 'gpu.json').read_text())['bert']
    rows = {row[0]: dict(zip(bert['head'], row)) for row in bert['rows']}
    fp32 = rows['kdnotes_fp32']
    for fmt, name in (('bf16', 'kdnotes'), ('fp16', 'kdnotes_fp16'), ('tf32', 'kdnotes_tf32')):
        for key, column in (('speed', 'examples/s'), ('joules', 'J / example')):
            a, b = (float(of[column].replace(',', '')) for of in (rows[name], fp32))
            assert VALUES[f'scope.race.{fmt}.{key}'] == pytest.approx(a / b, rel=1e-6)
    assert VALUES['scope.race.bf16.speed'] == pytest.approx(1050 / 1753, abs=1e-6)
    assert VALUES['scope.race.verdict'] == 'slower'
    assert VALUES['scope.race.kd_beside_none'] == pytest.approx(1050 / 1591, rel=1e-6)
    assert VALUES['scope.race.beside_hf_best'] == pytest.approx(1050 / 948, rel=1e-6)
    assert VALUES['facts.gpu.bert']['rows'] == bert['rows'] and len(rows) == 12
    ratios = json.loads((data / 'bench.json').read_text())['race']['ratios']
    names = [key.removesuffix('.value') for key in ratios if key.endswith('.value')]
    missed = [name for name in names if ratios[f'{name}.value'] < ratios[f'{name}.wanted']]
    assert (VALUES['race_aims.n'], VALUES['race_aims.missed']) == (len(names), len(missed)) == (7, 6)
    assert ratios['kdnotes_cold_hf_default.value'] == pytest.approx(2.35, abs=5e-3)


def test_every_run_on_a_gpu_had_uncommitted_changes():
    found = {}
    for plan in PLAN['parts'].values():
        ids = {i for seeds in plan['runs'].values() for i in seeds.values()}
        for line in (ROOT / 'thesis/data' / f'{plan["study"]}.records.jsonl').read_text().splitlines():
            r = json.loads(line)
            if r['run_id'] in ids and 'NVIDIA' in r['environment']['device']:
                found[r['study'], r['run_id']] = r['environment']['git'].endswith('-dirty')
    assert VALUES['uncommitted_gpu.of'] == len(found) and VALUES['uncommitted_gpu.runs'] == sum(
        found.values()
    )
    assert (VALUES['uncommitted_gpu.all'] == 'yes') == all(found.values())


def test_a_perplexity_is_that_of_the_mean_loss():
    runs, _ = read('mlm')
    losses = [np.mean([value for _, value in units.values()]) for units in runs['baseline'].values()]
    assert VALUES['mlm.perplexity.baseline'] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert VALUES['mlm.perplexity.baseline'] == pytest.approx(508, abs=0.5)


def test_the_pretrained_encoder_beside_the_arms():
    for part in ('main', 'labels', 'labels_gpu', 'gpu', 'without_transfer'):
        study = PLAN['parts'][part]['study']
        found = {}  # which weights -> (set, question; '' is the mean of a set) -> average precision
        with gzip.open(ROOT / 'thesis/data' / f'{study}.floors.csv.gz', 'rt') as f:
            for row in csv.DictReader(f):
                if (row['floor'], row['metric']) == ('frozen_encoder', 'map'):
                    found.setdefault(row['key'], {})[row['split'], row['unit']] = float(row['value'])
        best = max(found.values(), key=lambda its: its['test', ''])
        floor = {place: x for place, x in best.items() if place[1]}
        means = {place: x for place, x in best.items() if not place[1]}
        of_test = {u: x for (split, u), x in floor.items() if split == 'test'}
        assert np.mean([*of_test.values()]) == pytest.approx(means['test', ''], abs=1e-5)
        assert VALUES[f'{part}.floors.frozen_encoder.value'] == pytest.approx(means['test', ''])
        assert (means['test', ''], means['dev', '']) == pytest.approx((0.715, 0.687), abs=1e-3)
        runs, _ = read(part)
        for arm, seeds in runs.items():
            y = np.array([[own[u][1] - x for u, x in of_test.items()] for own in seeds.values()])
            key = f'{part}.frozen.arms.{arm}'
            mean, half, _ = crossed(y)
            found = interval_of(f'{key}.difference')
            assert found == pytest.approx([mean, mean - half, mean + half], abs=2e-5)
            side = 'above' if found[1] > 0 else 'below' if found[2] < 0 else 'open'
            assert VALUES[f'{key}.verdict'] == side

"""The study of learning rates and the decisions, found again from the evidence and the history."""

import csv
import gzip
import json
import subprocess
from pathlib import Path
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
VALUES = json.loads((ROOT / 'thesis/generated/values.json').read_text())
PLAN = json.loads((ROOT / 'thesis/plan.json').read_text())
DECIDED = json.loads((ROOT / 'thesis/decided.json').read_text())['decisions']


def rows(study, what):
    with gzip.open(ROOT / f'thesis/data/{study}.{what}.csv.gz', 'rt') as f:
        return list(csv.DictReader(f))


def arms_by_rate(study):
    "rate -> part -> seed -> run_id, of the students; the usual layout is the smallest."
    found = {}
    students = [
        r
        for r in map(json.loads, (ROOT / f'thesis/data/{study}.records.jsonl').read_text().splitlines())
        if r['factors']['network'] == 'student'
    ]
    threads = min(r['settings']['threads_per_rank'] for r in students)
    for r in students:
        s = r['settings']
        part = 'masks' if s.get('dropout_draw') else 'format' if r['precision'] != 'fp32' else 'fp32'
        if part == 'fp32' and s['threads_per_rank'] > threads:
            part = 'order'
        found.setdefault(s['learning_rate'], {}).setdefault(part, {})[r['seed']] = r['run_id']
    return dict(sorted(found.items()))


def test_scores(study):
    "run_id -> scores of the test set's pairs; how many questions these are of."
    tables = [[r for r in rows(study, 'predictions') if r['split'] == 'test']]
    runs = [i for table in tables for i in table[0] if i not in ('split', 'unit', 'item', 'label')]
    (table,) = tables
    return {run: np.array([float(r[run]) for r in table]) for run in runs}, len({r['unit'] for r in table})


test_scores.__test__ = False
NAMES = {'format': 'format', 'masks': 'draw', 'order': 'order'}  # here -> in keys


@pytest.mark.parametrize('part', ['rates', 'rates_embedded', 'rounding'])
def test_movements_follow_from_the_evidence(part):
    if part not in PLAN['parts']:
        pytest.skip(f'the thesis has no part {part}')
    study = PLAN['parts'][part]['study']
    scores, questions = test_scores(study)
    assert VALUES[f'{part}.scored'] == questions >= VALUES[f'{part}.units']
    units = {}
    for r in rows(study, 'units'):
        if (r['split'], r['set'], r['metric']) == ('test', 'clean', 'map'):
            units.setdefault(r['run_id'], {})[r['unit']] = r['value']
    table = VALUES[f'{part}.tables.movement']
    kinds = [name for name in NAMES if NAMES[name] in table[0]['kinds']]
    rates = {rate: arms for rate, arms in arms_by_rate(study).items() if {*kinds} <= arms.keys()}
    assert [float(row['rate']) for row in table] == list(rates)
    moved = {}
    for row, (rate, arms) in zip(table, rates.items()):
        for kind in kinds:
            seeds = sorted({*arms['fp32']} & {*arms[kind]})
            pairs = [(arms['fp32'][s], arms[kind][s]) for s in seeds]
            changed = [sum(units[a][q] != units[b][q] for q in units[a]) for a, b in pairs]
            found = row['kinds'][NAMES[kind]]
            assert found['changed'] == changed
            moved[rate, kind] = {s: np.abs(scores[a] - scores[b]).mean() for s, (a, b) in zip(seeds, pairs)}
            mean = np.mean([*moved[rate, kind].values()])
            assert found['moved'] == pytest.approx(mean, rel=1e-3, abs=1e-6)

    def grown(kind, low, high):
        both = moved[low, kind].keys() & moved[high, kind].keys()
        return np.exp(np.mean([np.log(moved[high, kind][s] / moved[low, kind][s]) for s in both]))

    first, *_, last_but_one, last = list(rates)
    for kind in kinds:
        spans = dict(whole=(first, last), before=(first, last_but_one), last=(last_but_one, last))
        for span, ends in spans.items():
            measured = VALUES[f'{part}.grows.{span}.{NAMES[kind]}.ratio.estimate']
            assert measured == pytest.approx(grown(kind, *ends), rel=1e-3)


def test_what_the_format_does_is_a_cliff_and_below_another_draw():
    "A line through the ends hid it: most of the rise is in the last doubling, past the best mean."
    assert VALUES['rates.shape.format'] == 'cliff' and VALUES['rates.shape.draw'] != 'cliff'
    assert VALUES['rates.past_best'] and float(VALUES['rates.best']) < float(VALUES['rates.highest'])
    assert VALUES['rates.grows.last.format.ratio.low'] > VALUES['rates.grows.before.format.ratio.high']
    assert VALUES['rates.beside.draw.all_less'] and VALUES['rates.beside.draw.high'] < 1


def test_decisions_are_dated_by_their_commits():
    assert len(DECIDED) > 8 and [d['when'] for d in DECIDED] == sorted(d['when'] for d in DECIDED)
    shallow = subprocess.run(['git', 'rev-parse', '--is-shallow-repository'], cwd=ROOT, capture_output=True)
    if shallow.stdout.strip() != b'false':
        pytest.skip('this copy has no history')
    for d in DECIDED:
        command = ['git', 'show', '-s', '--format=%ad', '--date=short', d['commit']]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert found.stdout.strip() == d['when'], d['what']


def test_torchs_products_follow_from_the_earlier_edition():
    found = VALUES['facts.torch_bf16.source']
    name, commit = 'thesis/data/embedded-without-bf16.records.jsonl', '6478cfc'
    assert name in found and commit in found
    shown = subprocess.run(['git', 'show', f'{commit}:{name}'], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip('this copy has no history')
    times = {}
    for r in map(json.loads, shown.stdout.splitlines()):
        times.setdefault(r['arm'], {})[r['seed']] = r['time']['train_s']
    seeds = sorted({*times['full_kd']} & {*times['mixed_kd']})
    logs = [np.log(times['mixed_kd'][s] / times['full_kd'][s]) for s in seeds]
    assert len(seeds) == VALUES['facts.torch_bf16.n']
    assert np.exp(np.mean(logs)) == pytest.approx(VALUES['facts.torch_bf16.estimate'], rel=1e-6)

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
    "rate -> part -> seed -> run_id, of the students."
    found = {}
    for line in (ROOT / f'thesis/data/{study}.records.jsonl').read_text().splitlines():
        r = json.loads(line)
        if r['factors']['network'] == 'teacher':
            continue
        drawn = r['settings'].get('dropout_draw', 0)
        part = 'draw' if drawn else 'fp32' if r['precision'] == 'fp32' else 'format'
        found.setdefault(r['settings']['learning_rate'], {}).setdefault(part, {})[r['seed']] = r['run_id']
    return dict(sorted(found.items()))


@pytest.mark.parametrize('part', ['rates', 'rates_embedded'])
def test_movements_follow_from_the_evidence(part):
    if part not in PLAN['parts']:
        pytest.skip(f'the thesis has no part {part}')
    study = PLAN['parts'][part]['study']
    scores = {
        run: np.array([float(r[run]) for r in table])
        for table in [[r for r in rows(study, 'predictions') if r['split'] == 'test']]
        for run in table[0]
        if run not in ('split', 'unit', 'item', 'label')
    }
    units = {}
    for r in rows(study, 'units'):
        if (r['split'], r['set'], r['metric']) == ('test', 'clean', 'map'):
            units.setdefault(r['run_id'], {})[r['unit']] = r['value']
    rates = arms_by_rate(study)
    movement = VALUES[f'{part}.tables.movement']['rows']
    assert [float(row[0]) for row in movement] == list(rates)
    moved = {}
    for row, (rate, arms) in zip(movement, rates.items()):
        for column, other in ((1, 'format'), (2, 'draw')):
            seeds = sorted({*arms['fp32']} & {*arms[other]})
            pairs = [(arms['fp32'][s], arms[other][s]) for s in seeds]
            changed = [sum(units[a][q] != units[b][q] for q in units[a]) for a, b in pairs]
            assert row[column] == f'{np.mean(changed):.1f} ({min(changed)} to {max(changed)})'
            moved[rate, other] = {s: np.abs(scores[a] - scores[b]).mean() for s, (a, b) in zip(seeds, pairs)}
            assert float(row[column + 2]) == pytest.approx(np.mean([*moved[rate, other].values()]), abs=1e-4)
    low, high = list(rates)[0], list(rates)[-1]
    for other in ('format', 'draw'):
        logs = [np.log(moved[high, other][s] / moved[low, other][s]) for s in moved[low, other]]
        grown = VALUES[f'{part}.grows.{other}.ratio.estimate']
        assert grown == pytest.approx(np.exp(np.mean(logs)), rel=1e-3)


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

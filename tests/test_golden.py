"""What must stay the same while the library is rebuilt: the code against the golden set in tests/golden/, and
the comparisons of tools/golden.py and tools/same.py themselves. Where a value is meant to change,
tools/golden.py says how the set is written.
"""

import os
import subprocess
import sys
from pathlib import Path
import pytest
from kinds import one_of_each
from kdnotes.core.config import TASKS
from kdnotes.results.store import find_record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'tools'))
import golden
import same


def check(lines: list[str]) -> None:
    "Fail with the first lines and the number of the others."
    if lines:
        pytest.fail(golden.summary(lines), pytrace=False)


# test_thesis.py holds thesis/generated/ to the code
@pytest.mark.parametrize('part', sorted(file.stem for file in (golden.GOLDEN / 'thesis').glob('*.json')))
def test_the_values_of_the_thesis_are_the_golden_ones(part):
    check(golden.mismatches(golden.golden_json(f'thesis/{part}'), golden.thesis_values().get(part, {})))


def test_the_thesis_has_no_part_more():
    assert sorted(golden.thesis_values()) == sorted(f.stem for f in (golden.GOLDEN / 'thesis').glob('*.json'))


@pytest.fixture(scope='module')
def committed():
    with golden.committed_evidence():
        yield


@pytest.mark.parametrize('study', golden.golden_json('studies'))
def test_the_comparisons_of_a_study_are_the_golden_ones(study, committed):
    check(golden.table_mismatches(golden.golden_tables(study), golden.study_tables(study)))


def test_every_committed_study_is_compared():
    assert golden.studies() == golden.golden_json('studies')


def test_the_committed_searches_are_the_golden_ones(committed):
    check(golden.mismatches(golden.flat(golden.golden_json('searches')), golden.flat(golden.searches())))


@pytest.mark.parametrize('name', ['parameters', 'commands'])
def test_parameters_and_commands_are_the_golden_ones(name):
    now = dict(parameters=golden.parameters, commands=golden.commands)[name]()
    check(golden.mismatches(golden.flat(golden.golden_json(name)), golden.flat(now)))


@pytest.mark.slow
@pytest.mark.parametrize('task', one_of_each(TASKS))
def test_records_have_the_golden_keys(task, small_run):
    student = find_record(small_run(task, 'full_kd'))[0]
    expected = golden.golden_json('record_keys')
    for run, record in golden.with_teachers({task: student}).items():
        keys = {path for path, runs in expected['keys'].items() if runs == 'all' or run in runs.split(', ')}
        assert set(golden.key_paths(record)) == keys
        assert record['schema'] in expected['schema']


# ---- the comparisons find what they look for ----


def test_a_changed_value_is_named_with_both_values():
    now = golden.flat(golden.parameters())
    changed = now | {'all_tasks.weight_decay.default': 0.011, 'all_tasks.alpha.le': 2}
    changed['all_tasks.new.default'] = changed.pop('all_tasks.keep.default')
    assert golden.mismatches(now, now) == []
    assert sorted(golden.mismatches(now, changed)) == [
        'all_tasks.alpha.le: golden 1, now 2',
        "all_tasks.keep.default: golden 'last', now missing",
        "all_tasks.new.default: golden missing, now 'last'",
        'all_tasks.weight_decay.default: golden 0.01, now 0.011',
    ]


def test_a_long_list_of_differences_is_cut():
    lines = golden.mismatches(golden.flat(golden.parameters()), {})
    shown = golden.summary(lines).splitlines()
    assert len(lines) > 100 and len(shown) == 21
    assert shown[:20] == lines[:20] and shown[20] == f'and {len(lines) - 20} more'
    assert golden.summary(lines[:20]).splitlines() == lines[:20]


@pytest.mark.parametrize('factor, differs', [(1 + 1e-13, False), (1 + 1e-10, True), (-1, True)])
def test_numbers_are_compared_to_twelve_digits(factor, differs):
    assert golden.equal(0.7561, 0.7561 * factor) is not differs
    assert not golden.equal(1, True) and not golden.equal(None, 0.0) and golden.equal(2, 2.0)


def test_a_changed_cell_of_a_comparison_is_found():
    tables = golden.golden_tables('wikiqa')
    lines = tables['comparisons.csv'].splitlines()
    cells = lines[3].split(',')
    column = lines[0].split(',').index('high')
    cells[column] = repr(float(cells[column]) + 1e-6)
    changed = tables | {'comparisons.csv': '\n'.join([*lines[:3], ','.join(cells), *lines[4:]])}
    (found,) = golden.table_mismatches(tables, changed)
    names = dict(zip(lines[0].split(','), cells))
    key = ', '.join(names[name] for name in golden.ROW_KEYS['comparisons.csv'])
    assert found.startswith(f'comparisons.csv, {key}, high: golden ')
    lost = tables | {'comparisons.csv': '\n'.join([*lines[:3], *lines[4:]])}
    assert len(golden.table_mismatches(tables, lost)) == len(lines[0].split(','))


# a training of torch alone: argument 1 is the seed of its order, argument 2 says whether it has its mask
TRAINING = """
import sys
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 4)

    def forward(self, input_ids, attention_mask):
        return (self.words(input_ids) * attention_mask[..., None]).sum()

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
ids = torch.randint(50, (8, 6))
mask = (torch.arange(6) < torch.randint(3, 6, (8, 1))).long()
for rows in torch.randperm(8, generator=torch.Generator().manual_seed(int(sys.argv[1]))).split(2):
    given = mask[rows] if sys.argv[2] == 'mask' else torch.ones_like(mask[rows])
    model(ids[rows], attention_mask=given).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def observations(folder: Path, *arguments: str) -> list[tuple[str, str, str]]:
    "What is observed of the training above."
    folder.mkdir()
    environment = os.environ | dict(PYTHONPATH=str(same.OBSERVER), OBSERVED_RUNS=str(folder))
    subprocess.run([sys.executable, '-c', TRAINING, *arguments], env=environment, check=True)
    (file,) = folder.glob('*.jsonl')
    return list(same.of_training('', same.read_lines(file)))


@pytest.mark.exhaustive
def test_another_order_and_a_dropped_mask_are_observed(tmp_path):
    usual = observations(tmp_path / 'usual', '0', 'mask')
    assert [when for what, when, _ in usual if what == 'attention_mask'] == [
        f'step {i}' for i in (1, 2, 3, 4)
    ]
    assert same.first_difference(usual, observations(tmp_path / 'again', '0', 'mask')) == ''
    order = same.first_difference(usual, observations(tmp_path / 'order', '1', 'mask'))
    assert order.startswith('step 1, 0: shape (2, 6), sum ')
    dropped = same.first_difference(usual, observations(tmp_path / 'dropped', '0', 'none'))
    assert dropped.startswith('step 1, attention_mask: shape (2, 6), sum ')
    assert ', sum 12, sha256 ' in dropped.partition(' in the base, ')[2]


def step_row(step: int, rate: float, loss: float) -> dict:
    row = dict(kind='step', step=step, learning_rate=rate, loss=loss, grad_norm=1.0)
    return row | dict(losses=dict(hard=loss, total=loss))


def test_what_differs_first_of_two_runs_is_named():
    base = list(same.of_rows([step_row(1, 1e-4, 0.7), step_row(2, 1e-4, 0.6)]))
    rate = list(same.of_rows([step_row(1, 1e-4, 0.7), step_row(2, 2e-4, 0.5)]))
    assert same.first_difference(base, base) == ''
    assert same.first_difference(base, rate) == 'step 2, learning_rate: 0.0001 in the base, 0.0002 here'
    last = 'step 2, learning_rate: 0.0001 in the base, nothing here'
    assert same.first_difference(base, base[: len(base) // 2]) == last
    more = 'step 2, learning_rate: nothing in the base, 0.0001 here'
    assert same.first_difference(base[: len(base) // 2], base) == more

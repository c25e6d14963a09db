"""What synchronising costs: one training however often ranks agree, real turns of real ranks,
a simulated link, and results that go on where they were stopped.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
from kdnotes.core.spec import flat as flat_parameters
import torch
import torch.distributed as dist
from helpers import flat, tiny_bert, tiny_config
from parity import ranked_task
from notebooks import papermill
from ranks import launch
from tiny_lm import LENGTH, tiny_lm, tiny_lm_config, tiny_task
from bench import scaling
from kdnotes.scaling.steptime import ring_all_reduce_s
from bench.contestants import BenchError
from bench.scaling import sentences
from kdnotes.core.files import read_json, write_json
from kdnotes.core.machine import Machine

ROOT = Path(__file__).resolve().parents[1]

# two trainings of one gradient, added up in another order: AdamW divides by a gradient's size, and with its
# epsilon at 1e-5 a rounding error is not worth a step
TOLERANCE = 1e-4  # of a weight; the largest moved by more than 1e-2
COURSE = dict(adam_epsilon=1e-5, epochs=4)


def final_weights(task: str, here, **parameters) -> np.ndarray:
    "A student's weights after four epochs of the real task."
    from kdnotes.train import loop as trainer

    if task == 'masked_lm':
        config = tiny_lm_config('full_student', ranks=here.ranks, batch_size=8, **COURSE | parameters)
        given = tiny_task(config)
        model = tiny_lm()
    else:
        config = tiny_config('full_student', ranks=here.ranks, batch_size=16, **COURSE | parameters)
        given = ranked_task()
        model = tiny_bert()
    begin = flat(model.parameters())
    trainer.train(given, model, config, here, lambda kind, **values: None)
    end = flat(model.parameters())
    assert np.abs(end - begin).max() > 1e-2, 'something was learned'
    return end


TASKS = ('masked_lm', 'answer_selection')


def train_ways() -> dict[str, dict[str, np.ndarray]]:
    "What a rank does, for each task: one training in one batch, and in micro-batches of an example or two."
    from kdnotes.train import distributed as runtime

    here = runtime.start(tiny_config('full_student', ranks=int(os.environ.get('WORLD_SIZE', 1))))
    ways = {sync: dict(micro_batch_tokens=2 * LENGTH, gradient_sync=sync) for sync in ('delayed', 'every')}
    ways['at_once'] = {}
    found = {task: {name: final_weights(task, here, **way) for name, way in ways.items()} for task in TASKS}
    runtime.stop(here)
    return found


@pytest.fixture(scope='module')
def alone() -> dict[str, dict[str, np.ndarray]]:
    "What one rank ends with."
    return launch('test_scaling:train_ways')[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize('ranks', [2, 4])
def test_delayed_and_every_are_one_large_batch_on_any_number_of_ranks(alone, ranks):
    notes = launch('test_scaling:train_ways', ranks=ranks)
    for task in TASKS:
        for name, weights in (alone[task] | notes[0][task]).items():
            found = [alone[task][name], weights]
            np.testing.assert_allclose(found, [alone[task]['at_once']] * 2, rtol=0, atol=TOLERANCE)
            assert all((rank[task][name] == weights).all() for rank in notes), 'ranks end alike'


def over_a_link(gbit: float, delay_ms: float) -> tuple[list[float], float]:
    "What a rank gets from four all-reduces, and how long they took."
    import time
    from kdnotes.train import distributed as runtime

    here = runtime.start(tiny_config('full_student', ranks=2))
    here.barrier()
    begin = time.perf_counter()
    with scaling.slow_link(2, gbit, delay_ms):
        got = [torch.full((2,), float(here.rank + i)) for i in range(4)]
        works = [dist.all_reduce(x, async_op=True) for x in got[:3]]
        dist.all_reduce(got[3])
        for work in works:
            work.wait()
    seconds = time.perf_counter() - begin
    runtime.stop(here)
    return [float(x[0]) for x in got], seconds


def test_a_simulated_link_changes_the_time_and_no_number():
    for got, seconds in launch('test_scaling:over_a_link', 1.0, 20.0, ranks=2):
        assert got == [1.0, 3.0, 5.0, 7.0]
        assert seconds > 4 * 2 * 0.020, 'one after the other, two delays each'


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    "A smoke measurement by real processes that was stopped after its third turn, and then went on."
    home = tmp_path_factory.mktemp('home')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(home))
        said = []

        def stop(line):
            said.append(line)
            if len(said) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            scaling.measure('tried', ('answer_selection',), smoke=True, say=stop)
        before = read_json(home / 'runs' / 'scaling' / 'tried.json')
        path = scaling.measure('tried', ('answer_selection',), smoke=True, say=said.append)
        again = scaling.measure('tried', ('answer_selection',), smoke=True, say=said.append)
        yield before, read_json(path), said, again == path


@pytest.mark.exhaustive
def test_turns_that_are_done_stay(measured):
    before, after, said, same = measured
    assert same and len(said) == 2 * len(scaling.SMOKE)
    assert sum(len(row['step_s']) for row in before['rows']) == 3
    for old, new in zip(before['rows'], after['rows']):
        assert (new['name'], new['step_s'][: len(old['step_s'])]) == (old['name'], old['step_s'])


@pytest.mark.exhaustive
def test_a_step_is_synchronised_once_or_at_each_micro_batch(measured):
    rows = {row['name']: row for row in measured[1]['rows']}
    assert len(rows) == len(scaling.SMOKE)
    alone = rows['1 x 2, delayed']
    assert (alone['all_reduces'], alone['messages'], alone['bytes'], sum(alone['exposed_s'])) == (0, 0, 0, 0)
    once = rows['2 x 2, delayed']
    every = rows['2 x 2, every']
    assert (once['all_reduces'], every['all_reduces']) == (1, 2)
    assert 1.9 < every['bytes'] / once['bytes'] < 2, 'but for the rows of the word table'
    for row in rows.values():
        assert len(row['step_s']) == len(row['exposed_s']) == 2
        assert all(
            0 <= low <= mean < step
            for low, mean, step in zip(row['least_exposed_s'], row['exposed_s'], row['step_s'])
        )
    slow = rows['2 x 2, every, 1 Gbit/s 0.5 ms simulated']
    assert slow['simulated'] and not every['simulated']
    assert min(slow['step_s']) > ring_all_reduce_s(slow['bytes'], 2, 0.5e-3, 1e9 / 8)


@pytest.mark.exhaustive
def test_every_table_says_what_was_measured(measured):
    text = scaling.text(measured[1], {})
    assert 'synchronisation is measured, not speed-up' in text and 'simulated' in text
    assert {g['what'] for g in measured[1]['gains']} == {'gradient_sync', 'efficiency, weak'}


def test_a_ratio_without_an_interval_is_told_without_one():
    results = read_json(ROOT / 'thesis' / 'data' / 'scaling.json')
    found = next(row for row in results['gains'] if row['what'] == 'gradient_sync')
    said = sentences(results, {})[0]
    assert f"takes {found['times']:.2f} [{found['low']:.2f}, {found['high']:.2f}] times as long" in said
    found['low'] = found['high'] = None  # of turns so noisy that they tell nothing
    assert f"takes {found['times']:.2f} times as long" in sentences(results, {})[0]


def test_results_of_another_machine_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    write_json(tmp_path / 'runs' / 'scaling' / 'a.json', dict(settings=dict(cpu='another'), rows=[]))
    with pytest.raises(BenchError, match='was measured with smoke=None, and here it is True'):
        scaling.measure('a', smoke=True)


def test_one_gpu_has_nobody_to_synchronise_with(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setattr(scaling, 'machine', lambda: Machine('cuda', 16, gpus=1))
    with pytest.raises(BenchError, match='on one GPU there is nobody to synchronise with'):
        scaling.measure('c')


def test_more_steps_than_the_corpus_has_are_refused():
    place = SimpleNamespace(task=ranked_task(), total=8)
    asked = flat_parameters(tiny_config('full_student', batch_size=16))
    with pytest.raises(BenchError, match='more examples than the corpus has'):
        scaling.train_setup(place, 0, asked, asdict(scaling.Setup(1, 2000)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_notebook_puts_what_it_measured_to_the_model(tmp_path):
    done = papermill(tmp_path, 'nbs/scaling.ipynb', tmp_path / 'out.ipynb', ('smoke', True))
    assert done.returncode == 0, done.stderr[-2000:]
    results = read_json(tmp_path / 'runs' / 'scaling' / 'scaling.json')
    assert len(results['rows']) == len(scaling.SMOKE) * len(scaling.EXAMPLES)
    saved = (tmp_path / 'runs' / 'scaling' / 'table.txt').read_text()
    for task in scaling.EXAMPLES:
        words = f'{task}: each of {len(scaling.SMOKE)} configurations in fp32 predicted from the others'
        assert words in saved
    cells = json.loads((tmp_path / 'out.ipynb').read_text())['cells']
    outputs = [o for c in cells if c['cell_type'] == 'code' for o in c['outputs']]
    # a task's measurements beside its model, and two figures of the published table
    assert sum('image/png' in o.get('data', {}) for o in outputs) == len(scaling.EXAMPLES) + 2

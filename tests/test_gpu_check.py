"The check of a GPU machine, rehearsed on the CPU: every part runs, and a fault in one stays in it."

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from helpers import SameWord, tiny_bert, tiny_config, tiny_teacher
from notebooks import ROOT, last_line, surroundings
from bench import gpu_check as G, gpu_numbers as P, gpu_race, gpu_setup
from kdnotes.core.arms import MODES
from kdnotes.tasks.base import Evaluation, TaskView
from kdnotes.tasks.batching import Batch
from kdnotes.train import cpu_fast_path, loop as trainer
from kdnotes.train import state as training_state
from kdnotes.train.distributed import Runtime

CPU = torch.device('cpu')
REHEARSAL = G.GpuCheckSetting(device='cpu', smoke=True, corpus='embedded')


def gpu_check(home, *arguments, **more):
    "The command, as `make gpu-check` starts it."
    return subprocess.run(
        [sys.executable, '-m', 'bench.gpu_check', *arguments],
        cwd=ROOT,
        env=surroundings(home, OMP_NUM_THREADS='1', **more),
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
    )


def results_of(home) -> dict:
    (saved,) = (home / 'runs' / 'gpu-check').glob('*/gpu_check.json')
    return json.loads(saved.read_text())


@pytest.fixture
def pair():
    return SimpleNamespace(
        config=tiny_config('full_kd', batch_size=8, warmup_fraction=0.0),
        task=SameWord(),
        teacher=tiny_teacher(),
        student=tiny_bert(dropout=0.1),
        runtime=Runtime(CPU, 'fp32'),
    )


# ---- what compares numbers can fail ----


def look(check: str, pair, folder) -> list[dict]:
    "The findings of a part of the check."
    if check == 'compare':
        return list(P.compare_with_cpu(dict(device='cpu'), pair))
    if check == 'overflow':
        return [P.overflow(pair, CPU)]
    return [P.resume(pair, CPU, 'bf16', folder) if check == 'resume' else P.masks(pair, CPU, 'bf16')]


@pytest.mark.parametrize(
    'check, told',
    [('compare', 'of its size away'), ('overflow', '4'), ('resume', '[3]'), ('masks', '0 of ')],
)
def test_a_sound_trainer_agrees_with_itself(check, told, pair, tmp_path):
    found = look(check, pair, tmp_path)
    assert all(f['ok'] for f in found) and told in found[0]['found']
    if check == 'compare':
        of = [(f['check'], f['of']) for f in found]
        assert of == [(name, dtype) for dtype in ('fp32', 'bf16') for name in ('gradient', 'losses')]


def careless(sound):
    "Steps over an overflow."

    def update(model, optimizer, scaler, *rest):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.nan_to_num_(0.0, 1.0, -1.0)
        return sound(model, optimizer, scaler, *rest)

    return update


def forgetful(sound):
    "Resumes without the optimizer's moments."

    def restore(checkpoint, model, optimizer, rank):
        sound(checkpoint, model, optimizer, rank)
        optimizer.state.clear()

    return restore


def by_format(sound):
    "Other masks in another format."

    def drop(x, p, bits):
        if x.dtype != torch.float32:
            bits.take(4)
        return sound(x, p, bits)

    return drop


def once_wrong(sound):
    "Other weights of the losses the third and fourth time: on the device."
    calls = []

    def weights(task, config):
        calls.append(1)
        return sound(task, config) if len(calls) <= 2 else {'hard': 1.0, 'soft': 0.0}

    return weights


@pytest.mark.parametrize(
    'check, module, name, broken',
    [
        ('compare', trainer, 'loss_weights', once_wrong),
        ('compare', P, 'FAR', lambda far: dict.fromkeys(far, 3e-4)),  # bf16 is not fp32
        ('overflow', trainer, 'update_weights', careless),
        ('resume', training_state, 'restore_training', forgetful),
        ('masks', cpu_fast_path, 'apply_dropout', by_format),
    ],
)
def test_what_goes_wrong_on_a_device_is_seen(check, module, name, broken, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    assert not all(f['ok'] for f in look(check, pair, tmp_path))


# ---- what is measured ----


def test_the_longest_examples_are_the_same_each_time_and_use_all_words():
    class Task:
        def lengths(self, split):
            return np.full(2000, 7)

        def batch(self, split, index, epoch=0):
            return Batch(index, {}, torch.zeros(len(index)), 7)

    task = P.longest_examples(Task(), 128, 30522)
    everything = task.batch('train', np.arange(2000)).inputs['input_ids']
    assert torch.equal(task.batch('train', np.array([77, 3])).inputs['input_ids'], everything[[77, 3]])
    assert all(x.is_contiguous() for x in task.batch('train', np.arange(3)).inputs.values()), (
        'memory that stands for several numbers cannot be pinned'
    )
    assert len(everything.unique()) > 0.9 * 30522, 'a table of words that stays whole needs the most memory'


def test_labels_of_tokens_are_as_long_as_the_longest_examples():
    class Tokens(SameWord):
        def batch(self, split, index, epoch=0):
            batch = super().batch(split, index, epoch)
            return replace(batch, labels=batch.inputs['input_ids'] % 3)

    task = Tokens()
    own = task.batch('train', np.array([3, 1])).labels
    longest = P.longest_examples(task, 64, 80).batch('train', np.array([3, 1]))
    assert longest.labels.shape == longest.inputs['input_ids'].shape == (2, 64)
    assert torch.equal(longest.labels[:, : own.shape[1]], own)
    spans = TaskView(task, batch=lambda *given: replace(task.batch(*given), labels=torch.tensor([[1, 2]])))
    assert P.longest_examples(spans, 64, 80).batch('train', np.array([3])).labels.tolist() == [[1, 2]]


class EvaluatesItself(SameWord):
    "A task that has no scores."

    evaluates_itself = True
    scores = evaluate = None

    def evaluate_model(self, forward, sets):
        index = np.arange(len(self.lengths(sets[0])))
        labels = torch.from_numpy(self.splits[sets[0]][2])
        right = forward(self.batch(sets[0], index)).logits.argmax(1) == labels
        return Evaluation({sets[0]: {'accuracy': float(right.float().mean())}}, None, None)


def test_a_task_that_evaluates_a_model_itself_has_its_energy_and_its_memory(pair, tmp_path, monkeypatch):
    config = tiny_config('full_student', batch_size=8, max_length=16)
    pair.task, pair.config = EvaluatesItself(), config
    monkeypatch.setattr(P, 'make_pair', lambda *_, **__: pair)
    job = dict(device='cpu', smoke=True, folder=str(tmp_path))
    assert 'evaluation' in P._train_watched(job, 'full_student')['phases']
    assert P._measure_memory(job, 'full_student')['length'] == 16


def test_energy_is_the_counter_over_the_measured_steps():
    class Meter:
        def __init__(self):
            self.joules_so_far = 0.0

        def joules(self):
            return self.joules_so_far

    meter = Meter()
    runtime = SimpleNamespace(clock=lambda: meter.joules_so_far / 50, dtype='bf16')  # 50 W
    here = gpu_setup.Metered(runtime, meter)
    for joules in (0.0, 1000.0, 1100.0, 1150.0):
        meter.joules_so_far = joules
        here.clock()
    assert gpu_setup.mean_power(here.readings, 3.0) == pytest.approx(50.0) and here.dtype == 'bf16'
    assert gpu_setup.mean_power([(0.0, None), (9.0, None)], 9.0) is None


def test_tf32_and_fp16_take_part_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_setup, 'machine', lambda: SimpleNamespace(bf16=True))
    rows = gpu_race.contestants(dict(device='cuda'))
    assert {
        name: (dtype, more.get('precision'))
        for name, (_, dtype, more) in rows.items()
        if name.startswith('kdnotes')
    } == {
        'kdnotes': ('bf16', None),
        'kdnotes_fp16': ('fp16', None),
        'kdnotes_tf32': ('fp32', 'tf32'),
        'kdnotes_fp32': ('fp32', None),
        'kdnotes_online': ('bf16', None),
        'kdnotes_256': ('bf16', None),
    }
    monkeypatch.setattr(gpu_setup, 'machine', lambda: SimpleNamespace(bf16=False))
    old = gpu_race.contestants(dict(device='cuda'))
    assert (
        'bf16' not in {dtype for _, dtype, _ in old.values()}
        and old['hf_default'][1] == 'fp16'
        and 'kdnotes_fp16' not in old
    )


def seen(mode='full_kd', watts=300.0, idle=60.0, overhead=0.002, **reasons):
    return dict(
        mode=mode,
        dtype='bf16',
        examples=3_000,
        seconds=2.0,
        energy=dict(idle_w=idle),
        phases=dict(student=dict(gpu_percent=80.0)),
        watts=watts,
        devices=[dict(throttle=dict(sw_power_cap=0.5, sync_boost=0.004, gpu_idle=0.1))],
        sampling=dict(overhead_share=overhead),
        reasons=reasons,
    )


def test_power_and_energy_of_a_mode():
    row = P.energy_row(seen())
    assert row == dict(
        mode='full_kd',
        format='bf16',
        idle_w=60.0,
        loaded_w=300.0,
        joules=200.0,
        examples_per_s=1500.0,
        gpu_percent=80.0,
        throttle='sw_power_cap 50%',
        sampling_percent=0.2,
        reason=None,
    )


def test_a_gpu_without_energy_says_why():
    row = P.energy_row(seen(watts=None, idle=None, **{'phases.student.device_j': 'a MIG instance'}))
    first, _ = P.judge_readings(row, True)
    assert first['ok'] is None and 'a MIG instance' in first['found'] and row['loaded_w'] is None
    said = G.energy_text(dict(modes=[row], teacher=dict(seconds=1.0, device_j=None)))
    assert (
        'no energy: a MIG instance' in said
        and 'joules_per_1000_examples' not in said
        and 'signal took 1.0 s' in said
    )
    assert '200' in G.energy_text(dict(modes=[P.energy_row(seen())], teacher=None))


# ---- the command ----


def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path):
    done = gpu_check(tmp_path)
    assert (
        done.returncode == 2
        and done.stderr.count('\n') == 1
        and 'nothing can be checked' in done.stderr
        and '--device cpu --smoke' in done.stderr
    )
    assert not (tmp_path / 'runs').exists()


def test_missing_packages_are_named_before_anything_is_imported():
    hide = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'torch'])); from bench.gpu_check "
        "import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, '-c', hide], cwd=ROOT, text=True, capture_output=True)
    assert (
        done.returncode == 2 and done.stderr.count('\n') == 1 and 'torch>=2.10, pydantic>=2' in done.stderr
    ), done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_part_that_dies_or_hangs_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    fake = tmp_path / 'python'
    fake.write_text(
        '#!/bin/sh\ncase "$4" in *numbers*) echo lost the GPU >&2; kill -9 $$;; *fits*) exec '
        'sleep 60;; *doctor*) echo dreadful >&2; exit 3;; *) exec "$REAL" "$@";; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv('REAL', sys.executable)
    monkeypatch.setattr(G.sys, 'executable', str(fake))
    monkeypatch.setattr(G, 'LIMITS', G.LIMITS | dict(fits=1.0))
    monkeypatch.setattr(G, 'SHORTEST', 0.0)
    monkeypatch.setattr(G, 'OVERTIME_S', 0.0)
    lines = []
    results = G.gpu_check(REHEARSAL, ('numbers', 'fits', 'doctor'), say=lines.append)
    wrong = G.failures(results)
    assert [w.partition(':')[0] for w in wrong] == ['numbers', 'fits', 'doctor'], results
    assert 'lost the GPU' in wrong[0] and 'did not answer within' in wrong[1] and 'dreadful' in wrong[2]
    assert (
        results_of(tmp_path)['failed'] == wrong
        and last_line(G.text(results)) == 'gpu-check: 3 failed of 0 checks'
    )


def test_what_was_found_before_an_interruption_stays_and_models_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))

    def made(part, job, say):
        if part == 'numbers':
            raise KeyboardInterrupt
        (Path(job['folder']) / 'models').mkdir()
        (Path(job['folder']) / f'{part}.json').write_text('{}')
        return dict(task='answer_selection', corpus='embedded', teachers={}, seconds=1.0)

    monkeypatch.setattr(G, '_run_part', made)
    with pytest.raises(KeyboardInterrupt):
        G.gpu_check(REHEARSAL, ('numbers', 'fits'))
    assert set(results_of(tmp_path)['parts']) == {'machine'} and results_of(tmp_path)['complete'] is False
    (folder,) = (tmp_path / 'runs' / 'gpu-check').iterdir()
    assert [p.name for p in folder.iterdir()] == ['gpu_check.json']


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rehearsal_of_everything(tmp_path):
    done = gpu_check(tmp_path, '--device', 'cpu', '--smoke', '--corpus', 'embedded')
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r'gpu-check: \d+ checks passed, \d+ do not apply here', last_line(done.stdout))
    results = results_of(tmp_path)
    parts = results['parts']
    assert (
        set(parts) == set(G.ORDER)
        and results['failed'] == []
        and all('error' not in p for p in parts.values())
    )
    assert (
        {f['of'] for f in parts['fits']['findings']}
        == {f['of'].rpartition('-')[0] for f in parts['doctor']['findings']}
        == set(MODES)
    )
    energy = parts['energy']
    assert (
        [m['mode'] for m in energy['modes']] == list(MODES)
        and not energy['missing']
        and energy['teacher']['seconds'] > 0
    )
    assert all(m['joules'] or m['reason'] for m in energy['modes']) and 'energy: each mode' in done.stdout
    assert {(f['check'], f['ok']) for f in parts['numbers']['findings']} == {
        (c, True) for c in ('gradient', 'losses', 'overflow', 'resume', 'masks')
    }
    for size in ('minilm', 'bert'):
        shown = G.rates_table(parts[size])
        assert (
            {'teacher', 'kdnotes', 'kdnotes_fp32', 'kdnotes_online', 'kdnotes_256', 'student_alone'}
            <= set(shown.index)
            and (shown.examples_per_s > 0).all()
            and (shown.of_large_percent > 0).all()
        )
        assert not {'hf_default', 'hf_best'} & set(shown.index) or re.search(
            rf'^{size} ratios: hf_default [\d.]+x', done.stdout, re.M
        )
        assert set(parts[size]['missing']) | set(shown.index) == set(gpu_race.contestants(dict(device='cpu')))
    (folder,) = (tmp_path / 'runs' / 'gpu-check').iterdir()
    assert not [p for p in folder.iterdir() if p.is_dir()], 'models and checkpoints are cleared away'

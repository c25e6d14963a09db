"""What long runs meet, each fault injected: SIGKILL anywhere, spoilt checkpoints, numbers that are none,
a full disk, a second process.
"""

import os
import pickle
import random
import shutil
import subprocess
import textwrap
from pathlib import Path
import pytest
from faults import EVERY
from kinds import one_of_each
from ranks import HERE, RankError, launch
from small_runs import write_corpus, write_model
from kdnotes.train.checkpoint import checkpoints
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import Plan, plan
from kdnotes.core.files import BusyError
from kdnotes.core.processes import Ranks
from kdnotes.results.runs import RunFolder, lock_run, read_rows, without_repeats

STEPS = 32


def folder_in(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def killed(folder: Path, at: int, ranks: int = 1):
    with pytest.raises(RankError, match='ended with -9'):
        launch('faults:train_in', folder, at, ranks, ranks=ranks)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    return {
        n: launch('faults:train_in', tmp_path_factory.mktemp(f'{n}'), None, n, ranks=n)[0] for n in (1, 2)
    }


def same(notes: dict, undisturbed: dict):
    assert notes['weights'] == undisturbed['weights'], 'every weight, to the last bit'
    assert (
        notes['curve'] == undisturbed['curve']
        and notes['totals'] == undisturbed['totals']
        and undisturbed['totals'][0] == STEPS
    )


# 20 steps in all parts of the training, the same ones each time
@pytest.mark.slow
@pytest.mark.parametrize('at', one_of_each(random.Random(0).sample(range(1, STEPS + 1), 20)))
def test_killed_and_resumed_is_never_killed(undisturbed, tmp_path, at):
    killed(tmp_path, at)
    [notes] = launch('faults:train_in', tmp_path)
    expected = (at - 1) // EVERY * EVERY
    assert notes['resumed_at'] == [expected] * bool(expected)
    same(notes, undisturbed[1])
    rows = read_rows(tmp_path / 'rows.jsonl')
    assert [r['step'] for r in rows if r['kind'] == 'resume'] == notes['resumed_at']
    steps = [
        r['step']
        for r in (
            without_repeats(rows)
            if expected
            else rows[[i for i, r in enumerate(rows) if r['kind'] == 'start'][-1] :]
        )
        if r['kind'] == 'step'
    ]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_killed_twice(undisturbed, tmp_path):
    for at in (8, 20):
        killed(tmp_path, at, ranks=2)
    notes = launch('faults:train_in', tmp_path, None, 2, ranks=2)
    assert notes[0]['resumed_at'] == [6, 18]
    for rank in notes:
        same(rank, undisturbed[2])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('at', [5, 17, 31])
def test_all_ranks_start_again_when_one_dies(undisturbed, tmp_path, monkeypatch, at):
    monkeypatch.setenv('PYTHONPATH', str(HERE), prepend=os.pathsep)
    ranks = Ranks('faults', tmp_path, at, ranks=2, threads=1, restarts=2, log=tmp_path / 'log.txt')
    ranks.start()
    said = (tmp_path / 'log.txt').read_text() if ranks.wait() else ''
    assert not said, said[-3000:]
    for rank in range(2):
        notes = pickle.loads((tmp_path / f'{rank}.pkl').read_bytes())
        assert notes['resumed_at'] == [(at - 1) // EVERY * EVERY]
        same(notes, undisturbed[2])


def flip(path: Path, at: int):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


SPOIL = {
    'torn tensors': lambda p: (p / 'model.safetensors').write_bytes(
        (p / 'model.safetensors').read_bytes()[:1000]
    ),
    'an empty file': lambda p: (p / 'optimizer.safetensors').write_bytes(b''),
    'a flipped bit in the weights': lambda p: flip(p / 'model.safetensors', 50_000),
    'a flipped bit in the random states': lambda p: flip(p / 'random.safetensors', 3_000),
    'a flipped bit in the manifest': lambda p: flip(p / 'manifest.json', 777),
    'a torn manifest': lambda p: (p / 'manifest.json').write_bytes((p / 'manifest.json').read_bytes()[:-9]),
    'a missing file': lambda p: (p / 'optimizer.safetensors').unlink(),
    'no manifest': lambda p: (p / 'manifest.json').unlink(),
}


@pytest.fixture(scope='module')
def stopped_at_20(tmp_path_factory):
    folder = tmp_path_factory.mktemp('stopped')
    killed(folder, 20)
    assert [p.name for p in checkpoints(folder / 'checkpoints')] == [
        'step-00000018',
        'step-00000015',
        'step-00000012',
    ], 'the last three are kept'
    return folder


@pytest.mark.slow
@pytest.mark.parametrize('how', one_of_each(SPOIL))
def test_a_spoilt_checkpoint_is_named_and_the_one_before_it_used(undisturbed, stopped_at_20, tmp_path, how):
    folder = shutil.copytree(stopped_at_20, tmp_path / 'run')
    newest = checkpoints(folder / 'checkpoints')[0]
    SPOIL[how](newest)
    [notes] = launch('faults:train_in', folder)
    assert notes['resumed_at'] == [15]
    same(notes, undisturbed[1])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_checkpoints_spoilt_is_a_new_beginning(undisturbed, stopped_at_20, tmp_path):
    folder = shutil.copytree(stopped_at_20, tmp_path / 'run')
    for path in checkpoints(folder / 'checkpoints'):
        flip(path / 'model.safetensors', 9_999)
    [notes] = launch('faults:train_in', folder)
    assert notes['resumed_at'] == []
    same(notes, undisturbed[1])


@pytest.mark.parametrize('ranks', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_number_that_is_none_is_named_and_the_step_not_taken(tmp_path, ranks):
    for notes in launch('faults:train_in', tmp_path, None, ranks, None, 13, ranks=ranks):
        assert notes['finite'], 'the weights are those before the step'
        assert (
            notes['error'].startswith('TrainingError: loss or gradients are not finite at step ')
            and 'the loss itself' in notes['error']
        )
        assert (
            '13' in notes['error'].partition('training examples')[2].partition(';')[0]
            and 'learning_rate=0.003' in notes['error']
        )


def test_a_full_disk_is_told_and_costs_nothing_that_was_written(undisturbed, tmp_path):
    killed(tmp_path, 8)
    before = {p: p.read_bytes() for p in (tmp_path / 'checkpoints').rglob('*') if p.is_file()}
    [notes] = launch('faults:train_in', tmp_path, None, 1, 60_000)
    assert (
        notes['error'].startswith('CheckpointError: ')
        and 'could not be written (' in notes['error']
        and 'free some room' in notes['error']
    ), notes
    assert {p: p.read_bytes() for p in (tmp_path / 'checkpoints').rglob('*') if p.is_file()} == before, (
        'nothing lost, nothing half written'
    )
    [notes] = launch('faults:train_in', tmp_path)
    assert notes['resumed_at'] == [6]
    same(notes, undisturbed[1])


@pytest.mark.exhaustive
def test_a_disk_that_fills_in_the_middle_of_a_checkpoint_costs_that_one_alone(undisturbed, tmp_path):
    "A real one, of which the first checkpoints take a part; with room again the training goes on."
    killed(folder_in(tmp_path, 'on a large disk'), 8)
    [newest, *_] = checkpoints(tmp_path / 'on a large disk/checkpoints')
    each = sum(p.stat().st_size for p in newest.iterdir())
    disk = folder_in(tmp_path, 'disk')
    size = f'size={int(2.5 * each) // 1024}k'
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', size, 'tmpfs', str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f'no disk of its own here, which needs the rights of root: {mounted.stderr.decode()}')
    try:
        [notes] = launch('faults:train_in', disk)
        assert notes['error'].startswith('CheckpointError: ') and 'free some room' in notes['error'], notes
        there = [p.name for p in checkpoints(disk / 'checkpoints')]
        assert there == ['step-00000006', 'step-00000003']
        assert sorted(p.name for p in (disk / 'checkpoints').iterdir()) == sorted(there), 'no draft is left'
        subprocess.run(['mount', '-o', 'remount,size=64m', str(disk)], check=True)
        [notes] = launch('faults:train_in', disk)
        assert notes['resumed_at'] == [6]
        same(notes, undisturbed[1])
    finally:
        subprocess.run(['umount', '-l', str(disk)], check=True)


def test_a_second_process_on_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    planned = plan(make_config(mode='baseline', corpus='embedded', smoke=True))
    folder = RunFolder(planned.config.where.study, planned.run_id)
    folder.create()
    with lock_run(folder), pytest.raises(BusyError, match='held by another process'):
        execute(planned)
    assert not (folder.path / 'config.json').exists() and folder.state() is None


# ---- deaths of a whole run ----


def run_that_dies(
    monkeypatch, tmp_path: Path, act: str, name: str, mode: str = 'baseline'
) -> tuple[Plan, RunFolder]:
    "A tiny run whose process gets SIGKILL when it calls `act` with a path of this name."
    module = act.partition('.')[0]
    patch = f"""
        import os, {module}
        from pathlib import Path

        usual = {act}

        def fatal(path, *args, **kwargs):
            if Path(path).name == {name!r}:
                os.kill(os.getpid(), 9)
            return usual(path, *args, **kwargs)

        {act} = fatal
    """
    (tmp_path / 'sitecustomize.py').write_text(textwrap.dedent(patch))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    config = make_config(
        mode=mode,
        corpus=str(write_corpus(tmp_path / 'corpus')),
        teacher=str(write_model(tmp_path / 'teacher')),
        max_length=64,
        smoke=True,
    )
    planned = plan(config)
    return planned, RunFolder(planned.config.where.study, planned.run_id)


@pytest.mark.exhaustive
@pytest.mark.parametrize('mode', ['baseline', 'parallel_baseline'])
def test_a_run_that_dies_after_its_record_is_done(monkeypatch, tmp_path, mode):
    planned, folder = run_that_dies(monkeypatch, tmp_path, 'shutil.rmtree', 'checkpoints', mode)
    record = execute(planned)
    assert record['run_id'] == planned.run_id and folder.state()['status'] == 'done'
    said = (folder.path / 'log.txt').read_text()
    assert 'was ended by SIGKILL' in said and 'start again' not in said


@pytest.mark.exhaustive
def test_a_run_that_is_killed_says_so(monkeypatch, tmp_path):
    planned, folder = run_that_dies(monkeypatch, tmp_path, 'os.makedirs', 'model')
    with pytest.raises(KdnotesError, match='was ended by SIGKILL: as when memory runs out .*same command'):
        execute(planned)
    assert folder.state()['status'] == 'failed' and folder.record() is None

"Commands that are stopped, and a file system that refuses: an exit code and a sentence, and nothing is lost."

import json
import os
import signal
import subprocess
import sys
import time
import psutil
import pytest
from notebooks import last_line, surroundings
from processes import has_ended, ranks_of
from small_runs import write_corpus, write_model
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.processes import Ranks
from kdnotes.results.store import forget

CLI = 'import sys; from kdnotes.cli import main; sys.exit(main())'


def words(home, *options, arms='parallel_baseline', **more) -> list[str]:
    "Of `kdnotes study` of arms that train for some seconds; more: parameters of a run."
    given = dict(
        corpus=home / 'corpus',
        teacher=home / 'teacher',
        study='stopped',
        max_length=64,
        epochs=25,
        batch_size=8,
    )
    parameters = [part for name, value in (given | more).items() for part in ('-p', f'{name}={value}')]
    return ['study', '--arms', arms, *options, *parameters]


def study(home, *options, **more):
    "The command, started."
    return subprocess.Popen(
        [sys.executable, '-c', CLI, *words(home, *options, **more)],
        env=surroundings(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def home(tmp_path):
    write_corpus(tmp_path / 'corpus')
    write_model(tmp_path / 'teacher')
    return tmp_path


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def steps(home) -> int:
    "How many rows of steps there are."
    return sum(path.read_text().count('"kind": "step"') for path in home.glob('runs/*/*/rows.jsonl'))


STOPS = {
    'SIGTERM to the command': (signal.SIGTERM, False),
    'Ctrl-C in a terminal, which reaches all': (signal.SIGINT, True),
    'a terminal that closes, which reaches all': (signal.SIGHUP, True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize('jobs', [1, 2])
@pytest.mark.parametrize('how', STOPS)
def test_a_study_that_is_stopped_says_so_and_goes_on(home, how, jobs, monkeypatch, capsys):
    number, to_all = STOPS[how]
    process = study(home, '--seeds', str(jobs), '--jobs', str(jobs), epochs=12)
    wait_for(lambda: steps(home) > 5)
    ranks = ranks_of(process.pid)
    if to_all:
        os.killpg(process.pid, number)
        if number == signal.SIGHUP:  # from the shell, and once more from the kernel when the shell ends
            time.sleep(0.01)
            os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert 'Traceback' not in errors and 'same command' in last_line(errors), errors
    assert ' is saved at step ' in last_line(errors), errors
    assert last_line(errors).endswith('the same command makes the rest')
    wait_for(lambda: all(map(has_ended, ranks)))
    begun = {p.parent.name: json.loads(p.read_text())['status'] for p in home.glob('runs/*/*/state.json')}
    assert 'interrupted' in begun.values() and 'running' not in begun.values(), begun
    assert list(home.glob('runs/*/*/checkpoints/step-*')), 'its state is saved'

    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert main(words(home, '--seeds', str(jobs), epochs=12)) == 0, capsys.readouterr().err
    records = [json.loads(path.read_text()) for path in home.glob('runs/stopped/*/record.json')]
    assert len(records) == jobs and any(record['resumed_at'] for record in records)


def test_ctrl_c_during_the_imports_of_a_rank_does_not_break_them(tmp_path, monkeypatch):
    module = "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('imported', flush=True)\n"
    (tmp_path / 'slow_imports.py').write_text(module)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    log = tmp_path / 'log'
    ranks = Ranks('slow_imports', ranks=2, log=log)
    ranks.start()
    wait_for(lambda: log.read_text().count('begun') == 2)
    for process in ranks._processes:
        process.send_signal(signal.SIGINT)
    assert ranks.wait() == 0 and log.read_text().count('imported') == 2, log.read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_signal_to_one_rank_is_no_stop_of_the_study(home):
    process = study(home, '--seeds', '1')
    wait_for(lambda: steps(home) > 5)
    ranks_of(process.pid)[1].terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    [folder] = home.glob('runs/stopped/*-s0-*/')
    assert 'all ranks start again' in (folder / 'log.txt').read_text()
    assert json.loads((folder / 'record.json').read_text())['resumed_at']


def spoil_checkpoints(folder):
    for path in folder.glob('checkpoints/step-*/model.safetensors'):
        path.write_bytes(path.read_bytes()[:-9])


def lose_rows(folder):
    (folder / 'rows.jsonl').unlink()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('lost', [spoil_checkpoints, lose_rows])
def test_rows_are_those_of_one_training(home, lost):
    "Begun anew, no step stands twice; a resumed run whose rows are lost says so in its record."
    process = study(home, '--seeds', '1')
    wait_for(lambda: steps(home) > 5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    [folder] = home.glob('runs/stopped/*-s0-*/')
    lost(folder)
    again = study(home, '--seeds', '1')
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    record = json.loads((folder / 'record.json').read_text())
    rows = [json.loads(line) for line in (folder / 'rows.jsonl').read_text().splitlines()]
    made = [row['step'] for row in rows if row['kind'] == 'step']
    assert made == sorted(set(made))
    if lost is lose_rows:
        assert record['resumed_at'] and made[0] > record['resumed_at'][0]
        assert record['reasons']['timeline'] == f"the rows up to step {record['resumed_at'][0]} were lost"
    else:
        assert not record['resumed_at'] and made[0] <= 3 and 'timeline' not in record['reasons']


def at_rest(process) -> bool:
    "Does it wait for somebody, after its imports?"
    before = sum(process.cpu_times()[:2])
    time.sleep(1)
    return before > 0.5 and sum(process.cpu_times()[:2]) - before < 0.2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_stop_reaches_a_rank_that_waits_for_the_other(home):
    process = study(home, '--seeds', '1')
    ranks = wait_for(lambda: len(found := ranks_of(process.pid)) == 2 and found)
    ranks[1].suspend()
    wait_for(lambda: at_rest(ranks[0]))
    process.terminate()
    ranks[0].wait(timeout=30)  # it would be killed after a minute
    ranks[1].resume()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75 and 'Traceback' not in errors, errors


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('jobs', [1, 2])
def test_a_second_interrupt_ends_at_once_what_is_left(home, jobs):
    process = study(home, '--seeds', str(jobs), '--jobs', str(jobs))
    wait_for(lambda: steps(home) > 5)
    ranks = ranks_of(process.pid)
    for p in ranks:
        p.suspend()  # they cannot follow the first
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, 'one interrupt waits for the ranks'

    def interrupted_again() -> bool:
        process.send_signal(signal.SIGINT)  # maybe more than once: two that come together are one
        try:
            return process.wait(timeout=10) is not None
        except subprocess.TimeoutExpired:
            return False

    wait_for(interrupted_again)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and 'Traceback' not in errors, errors
    wait_for(lambda: all(map(has_ended, ranks)))
    states = [json.loads(path.read_text())['status'] for path in home.glob('runs/*/*/state.json')]
    assert set(states) == {'interrupted'} and ' failed' not in said, said


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nobody_reads_what_a_study_says(home):
    process = study(home, '--seeds', '1')
    process.stdout.close()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75 and 'Traceback' not in errors and 'BrokenPipe' not in errors, errors


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_whose_launcher_was_killed_keep_their_run_until_they_end(home):
    process = study(home, '--seeds', '1')
    wait_for(lambda: steps(home) > 5)
    ranks = ranks_of(process.pid)
    for p in ranks:
        p.suspend()  # they do not see that it is gone
    process.kill()  # and nobody asks how it ended: a dead process that is still listed
    again = study(home, '--seeds', '1')
    wait_for(lambda: at_rest(psutil.Process(again.pid)))
    assert not ranks_of(again.pid), 'no second rank trains into the folder'
    for p in ranks:
        p.resume()
    said, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert 'ranks that still save their state are waited for' in said + errors
    [record] = [json.loads(path.read_text()) for path in home.glob('runs/stopped/*/record.json')]
    assert record['resumed_at']


def test_an_interrupt_waits_until_every_rank_is_started(tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen

    def interrupted(*args, **more):
        started.append(popen(*args, **more))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    ranks = Ranks('this', ranks=2, log=tmp_path / 'log.txt')
    monkeypatch.setattr(subprocess, 'Popen', interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.start()
    assert len(started) == 2
    ranks.kill()
    assert ranks.wait() == -signal.SIGKILL


def test_ranks_that_were_not_started_count_as_stopped(tmp_path):
    assert Ranks('this', log=tmp_path / 'log.txt').wait() == 75


# ---- stops at moments that a short run seldom meets ----


WRITTEN = {  # the file that is about to be put in its place
    'tokens': '*/.cache/tokens/*',
    "a half-made teacher's signal": '*/signals/*/meta.json',
    "a teacher's signal": '*/shard-*/manifest.json',
    'the scores of a run': '*/runs/*/full_kd-*/predictions.csv.gz',
    'the record of a run': '*/runs/*/full_kd-*/record.json',
    'the state of a run that is done': '*/runs/*/baseline-*/state.json',
    'a figure': '*/runs/*/figures/curves.svg',
    'the table': '*/table.txt',
}
STOPS_ITSELF = """
import fnmatch, os, signal, sys
from pathlib import Path

usual = os.replace
stopped = Path(__file__).with_name('stopped')


def replace(old, new, **more):
    if fnmatch.fnmatch(str(new), {pattern!r}) and not stopped.exists():
        stopped.touch()
        rank = '-m' in sys.orig_argv
        os.kill(os.getppid() if rank else os.getpid(), signal.SIGTERM)
    return usual(old, new, **more)


os.replace = replace
"""


def teach(home) -> subprocess.Popen:
    "A started study of a teacher and its student."
    return study(home, '--seeds', '1', arms='full_kd', smoke=True, epochs=1)


def tables(home) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in sorted(home.glob('runs/*/*/*.csv.gz'))}


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    home = tmp_path_factory.mktemp('undisturbed')
    write_corpus(home / 'corpus')
    write_model(home / 'teacher')
    process = teach(home)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return home


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('what', WRITTEN)
def test_a_stop_while_something_is_written(undisturbed, home, monkeypatch, what):
    (home / 'site').mkdir()
    (home / 'site' / 'sitecustomize.py').write_text(STOPS_ITSELF.format(pattern=WRITTEN[what]))
    monkeypatch.setenv('PYTHONPATH', str(home / 'site'), prepend=os.pathsep)
    process = teach(home)
    _, errors = process.communicate(timeout=300)
    assert (home / 'site' / 'stopped').exists(), errors
    assert process.returncode == 75 and 'Traceback' not in errors, errors

    again = teach(home)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert tables(home) == tables(undisturbed)
    assert {path.name for path in home.glob('runs/*/figures/*')} == {
        path.name for path in undisturbed.glob('runs/*/figures/*')
    }


# ---- a file system that refuses ----


SPOILED = {
    'Not a directory; move it away': lambda runs: runs.write_text(''),
    'File exists; move it away': lambda runs: runs.symlink_to(runs.parent / 'gone/away'),
    'Too many levels of symbolic links': lambda runs: runs.symlink_to(runs),
}


@pytest.mark.parametrize('words', [*SPOILED, 'a home that cannot be made'])
def test_runs_that_cannot_be_written_are_a_sentence(home, monkeypatch, capsys, words):
    there = home
    if words in SPOILED:
        SPOILED[words](home / 'runs')
    else:
        (home / 'file').write_text('')
        there, words = home / 'file' / 'home', 'Not a directory'
    monkeypatch.setenv('KDNOTES_HOME', str(there))
    given = dict(corpus=home / 'corpus', teacher=home / 'teacher', smoke=True, max_length=64)
    argv = [part for name, value in given.items() for part in ('-p', f'{name}={value}')]
    assert main(['study', '--arms', 'baseline', '--seeds', '1', *argv]) == 1
    said = capsys.readouterr().err.strip()
    assert '\n' not in said and words in said and str(home) in said, said


@pytest.mark.parametrize('name', ['x' * 101, '../x', 'a/b', '.hidden', ''])
def test_a_name_is_no_path(tmp_path, monkeypatch, name):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    with pytest.raises(ConfigError, match='is no name of a study: use at most 100 letters'):
        forget(name, ['baseline-s0-0'])
    assert list(tmp_path.iterdir()) == []

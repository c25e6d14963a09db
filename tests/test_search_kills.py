"A search that is killed at random, driver and trials: nothing is lost, and nothing is counted twice."

import json
import os
import random
import signal
import subprocess
import sys
import time
import psutil
import pytest
from kdnotes.core.processes import process_environment
from processes import ranks_of

N_TRIALS = 4 * int(os.environ.get('KDNOTES_KILLS', 4))
KILLS = int(os.environ.get('KDNOTES_KILLS', 4))  # 20 as they were tried by hand

COMMAND = [
    *(sys.executable, '-m', 'kdnotes', 'search', '--trials', str(N_TRIALS), '--workers', '2', '--smoke'),
    *('--corpus', 'embedded', '--mode', 'full_kd', '--study', 'killed', '--threshold', 'none'),
    *('--front-seeds', '0', '-p', 'max_length=64', '-p', 'checkpoint_steps=1'),
]


def journal(home) -> list[dict]:
    path = home / 'runs' / 'killed-smoke' / 'trials.journal'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kills_of_driver_and_trials_lose_nothing(tmp_path, small_teacher, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    env = process_environment(1) | dict(KDNOTES_HOME=str(tmp_path), HF_HUB_OFFLINE='1')
    command = [*COMMAND, '--teacher', str(small_teacher)]
    chance = random.Random(0)
    killed = {'driver': 0, 'trial': 0}
    log = open(tmp_path / 'log.txt', 'w')
    process = None
    while sum(killed.values()) < KILLS:
        if process is None or process.poll() is not None:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        time.sleep(chance.uniform(5, 9))
        if process.poll() == 0:
            break  # it has come to its end before enough kills
        if process.poll() is not None:
            continue  # what all trials stand on was killed twice
        driver = psutil.Process(process.pid)
        ranks = ranks_of(driver.pid)
        if ranks and chance.random() < 0.5:
            chance.choice(ranks).send_signal(signal.SIGKILL)
            killed['trial'] += 1
        else:
            driver.send_signal(signal.SIGKILL)
            process.wait()
            killed['driver'] += 1
    if process.poll() is None:
        process.wait()
    done = subprocess.run([*command, '--json'], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    trials = found['trials']
    assert [t['number'] for t in trials] == list(range(N_TRIALS)), 'each once'
    assert all(t['state'] in ('complete', 'infeasible') for t in trials), 'none is left open'
    complete = [t['run_id'] for t in trials if t['state'] == 'complete']
    folder = tmp_path / 'runs' / 'killed-smoke'
    assert all((folder / run_id / 'record.json').exists() for run_id in complete)
    told = [line for line in journal(tmp_path) if line.get('op_code') == 6]  # a trial's state and values
    finished = [line['trial_id'] for line in told if line.get('state') == 1]
    assert len(finished) == len(set(finished)) == N_TRIALS, 'told once each'
    twice = [t for t in trials if t['cause'] == 'killed']
    assert len(twice) <= killed['trial'] // 2, 'a trial is given up after two kills, and not before'
    assert sum(killed.values()) == KILLS, f'the search ended before all kills: {killed}'
    print(killed)

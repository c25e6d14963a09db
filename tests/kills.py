"""Kills and stops at random moments, and whether the result is that of a run nobody disturbed:
`python tests/kills.py --rank 100 --everything 40 --stops 60` kills one rank a hundred times and everything
forty times, asks `kdnotes study` sixty times to stop, and prints a table.

Too long for a test; what it found is in LOG.md.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
import pandas as pd
import psutil
from processes import ranks_of
from test_doctor import write_corpus, write_model

COMMON = dict(max_length=64, ranks=2, batch_size=8, checkpoint_steps=25, epochs=50, threads_per_rank=1)
RUNS = {
    'baseline': dict(mode='parallel_baseline'),
    'mixed_kd, bf16': dict(mode='mixed_kd', amp_dtype='bf16'),
    'accumulation': dict(mode='parallel_baseline', micro_batch_tokens=64),
    'ranking loss': dict(mode='full_kd', ranking_loss='margin_mse'),
    'hidden loss': dict(mode='full_kd', hidden_loss='mse', signal='online'),
    'every micro-batch': dict(mode='parallel_baseline', micro_batch_tokens=64, gradient_sync='every'),
    'bf16 gradients': dict(mode='full_kd', gradient_dtype='bf16'),
}
STUDY_S = 12  # that a study takes beside its run: imports, plan, export, figures
CODE = """
import json, sys
from kdnotes.core.config import KdnotesError
from kdnotes.core.given import make_config
from kdnotes.experiment.launch import run
try:
    record = run(make_config(**json.loads(sys.argv[1])))
except KdnotesError as e:
    sys.exit(f'refused: {e}')
"""


def start(home: Path, config: dict) -> subprocess.Popen:
    "A process that makes a run, and its ranks."
    return subprocess.Popen(
        [sys.executable, '-c', CODE, json.dumps(config)],
        env=dict(os.environ, KDNOTES_HOME=str(home), HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES=''),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_study(home: Path, config: dict) -> subprocess.Popen:
    "The command that makes a study of the same run, in a terminal of its own."
    given = config | dict(study='default')
    mode = given.pop('mode')
    parameters = [part for name, value in given.items() for part in ('-p', f'{name}={value}')]
    return subprocess.Popen(
        [sys.executable, '-m', 'kdnotes.cli', 'study', '--arms', mode, '--seeds', '1', *parameters],
        env=dict(os.environ, KDNOTES_HOME=str(home), HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES=''),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell that starts this script in the background has interrupts ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def stopped(home: Path, config: dict, seconds: float, drawn: random.Random) -> dict:
    "One study that is asked to stop at some moment, from its first import to its last figure, and goes on."
    process = start_study(home, config)
    at = drawn.uniform(0, seconds)
    time.sleep(at)
    how, wanted = drawn.choice([('SIGTERM', signal.SIGTERM), ('Ctrl-C', signal.SIGINT)])
    if process.poll() is None:
        if how == 'Ctrl-C':
            os.killpg(process.pid, wanted)  # a terminal sends it to all
        else:
            process.send_signal(wanted)
    asked = time.monotonic()
    said, _ = process.communicate(timeout=120)
    took = time.monotonic() - asked
    again = start_study(home, config)
    said_again, _ = again.communicate()
    return dict(
        killed=how,
        at_s=round(at, 2),
        code=process.returncode,
        took_s=round(took, 1),
        again=1,
        restarted=0,
        traceback='Traceback' in said + said_again,
        sentence=re.sub(r'\s+', ' ', said)[-160:] if process.returncode else said,
        done=again.returncode == 0,
    )


def undisturbed_run(home: Path, config: dict, begin) -> tuple:  # begin: start or start_study
    "Configuration, the home with its teacher and without the run, the run's result, and its seconds."
    mode = config['mode']
    process = begin(home, config)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    [rows_file] = home.glob(f'runs/default/{mode}-*/rows.jsonl')
    ends = [json.loads(line)['at_s'] for line in rows_file.read_text().splitlines()]
    found = result(home, mode)
    shutil.rmtree(rows_file.parent)
    return config, home, found, ends[-1] - ends[0] + 3


def result(home: Path, mode: str) -> tuple:
    "What must not depend on kills."
    [path] = home.glob(f'runs/default/{mode}-*/record.json')
    record = json.loads(path.read_text())
    tables = [(path.parent / f'{name}.csv.gz').read_bytes() for name in ('units', 'predictions')]
    return record['model_sha256'], record['metrics'], record['steps'], *tables


def kill(process: subprocess.Popen, everything: bool, drawn: random.Random) -> str:
    "Kill a rank, or the launcher and all ranks; what was killed, or nothing."
    ranks = ranks_of(process.pid)
    if not ranks:
        return 'nothing: it had ended or not begun'
    victims = [psutil.Process(process.pid), *ranks] if everything else [drawn.choice(ranks)]
    for victim in victims:
        try:
            victim.kill()
        except psutil.Error:
            continue
    return 'everything' if everything else 'one rank'


def disturbed(home: Path, config: dict, seconds: float, everything: bool, drawn: random.Random) -> dict:
    "One run with a kill, started again where it says that this is needed."
    process = start(home, config)
    while not ranks_of(process.pid) and process.poll() is None:
        time.sleep(0.01)
    at = drawn.uniform(0, seconds)
    time.sleep(at)
    killed = kill(process, everything, drawn)
    said, _ = process.communicate()
    again = 0
    refused = [said] if process.returncode else []
    while process.returncode and again < 3:
        again += 1
        process = start(home, config)
        said, _ = process.communicate()
        refused += [said] if process.returncode else []
    log = next(home.glob(f"runs/default/{config['mode']}-*/log.txt")).read_text()
    return dict(
        killed=killed,
        at_s=round(at, 2),
        restarted=log.count('all ranks start again'),
        again=again,
        traceback=any('Traceback' in text for text in refused),
        sentence=re.sub(r'\s+', ' ', refused[0])[-160:] if refused else '',
        done=process.returncode == 0,
    )


def main(single: int, whole: int, stops: int, seed: int) -> None:
    "All kills and stops, over the runs in turn; a line each as they come, and a table."
    drawn = random.Random(seed)
    kinds = ['rank'] * single + ['everything'] * whole + ['stop'] * stops
    kills = [(kind, i) for i, kind in enumerate(kinds)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        given = dict(
            corpus=str(write_corpus(folder / 'corpus')), teacher=str(write_model(folder / 'teacher'))
        )
        known = {}
        for kind, i in kills:
            name = list(RUNS)[i % len(RUNS)]
            begin = start_study if kind == 'stop' else start
            if (name, begin) not in known:
                home = folder / f'{name}-{begin.__name__}'.replace(' ', '-')
                known[name, begin] = undisturbed_run(home, COMMON | given | RUNS[name], begin)
                print(f'{name}, {begin.__name__}: {known[name, begin][3]:.1f} s undisturbed', flush=True)
            config, home, undisturbed, seconds = known[name, begin]
            copied = shutil.copytree(home, folder / 'home')
            if kind == 'stop':
                row = dict(run=name) | stopped(copied, config, seconds + STUDY_S, drawn)
            else:
                row = dict(run=name) | disturbed(copied, config, seconds, kind == 'everything', drawn)
            row['same'] = row['done'] and result(copied, config['mode']) == undisturbed
            shutil.rmtree(copied)
            print(json.dumps(row), flush=True)
            rows.append(row)
    table = pd.DataFrame(rows)
    sums = table.groupby(['run', 'killed'], sort=False)[['restarted', 'again', 'traceback', 'same']].sum()
    print(sums.to_string())
    print(table.groupby('killed').size())
    print('all the same:', bool(table['same'].all()), '; tracebacks:', int(table['traceback'].sum()))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ('rank', 'everything', 'stops', 'seed'):
        parser.add_argument(f'--{name}', type=int, default=0)
    given = parser.parse_args()
    main(given.rank, given.everything, given.stops, given.seed)

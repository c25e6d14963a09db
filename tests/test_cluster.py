"""Runs on a Ray cluster of this machine: the same records as without it, what is lost on the way comes again
once, what fails says the same, and nothing is left behind.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
import psutil
import pytest
from kdnotes.core.config import ConfigError
from kdnotes.core.files import at_home
from kdnotes.core.processes import Stopped, stop_all
from kdnotes.core.resolve import Machine
from kdnotes.experiment import cluster as cluster_module
from kdnotes.experiment.cluster import Cluster
from kdnotes.experiment.launch import NO_LIMITS, Limits, RunError, execute
from kdnotes.experiment.plan import Plan, plan
from kdnotes.records.store import RunFolder, floors
from notebooks import surroundings
from processes import descendants, has_ended, ranks_of
from small_runs import planned, small_model

pytestmark = pytest.mark.slow
TASK = 'text_classification'
# of a record: what differs between two runs of one setting on one machine
MEASURED = {
    *('curve', 'environment', 'latency', 'machine', 'memory', 'operations', 'phases', 'sampling', 'throughput'),
    *('time', 'timeline', 'utilisation'),
}


@pytest.fixture(scope='module')
def cluster():
    "Ray with the cores of this machine; it leaves no process and no folder."
    pytest.importorskip('ray', reason='Ray is not installed')
    before = set(descendants(os.getpid()))
    made = Cluster('local')
    folder = made._folder.path
    yield made
    started = set(descendants(os.getpid())) - before
    made.close()
    assert len(started) >= 3 and [process for process in started if not has_ended(process)] == []
    assert not folder.exists()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    return tmp_path


@pytest.fixture
def run(home, small_teacher) -> Plan:
    return planned(TASK, 'full_student', small_teacher)


def in_thread(call, *arguments) -> Future:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return future


def next_rank(future: Future, before: set[int]) -> psutil.Process:
    "The rank of a run that another thread waits for, once it is there."
    while not future.done():
        for rank in ranks_of(os.getpid()):
            if rank.pid not in before:
                return rank
        time.sleep(0.02)
    raise AssertionError(f'no rank has come: {future.exception()}')


def test_a_run_and_its_teacher_are_as_without_ray(cluster, home, small_teacher, tmp_path_factory):
    p = planned(TASK, 'full_kd', small_teacher)
    said = []
    rows = []
    record = cluster.execute(p, rows.append, said.append)
    runs = [p, p.teacher]
    folders = [RunFolder(r.config.study, r.run_id) for r in runs]
    assert [folder.state()['status'] for folder in folders] == ['done', 'done']
    for folder in folders:
        folder.check()
        assert not (folder.path / 'checkpoints').exists()
    assert [row['run_id'] for row in rows if row['kind'] == 'start'] == [p.teacher.run_id, p.run_id]
    assert any(f'goes to the cluster, where it takes 1 CPU' in text for text in said)
    assert any(text.startswith(f'training {p.run_id}') and ' (on ' in text for text in said)
    assert cluster.execute(p, said.append, said.append) == record and said[-1].endswith('is done already')
    with at_home(tmp_path_factory.mktemp('without')):
        without = execute(p)
        own_floors = floors(p.config.study)
    assert record.keys() == without.keys()
    assert {k for k in record if record[k] != without[k]} <= MEASURED
    assert [point['loss'] for point in record['curve'] if 'loss' in point] == [
        point['loss'] for point in without['curve'] if 'loss' in point
    ]
    assert record['machine']['jobs'] == 1
    assert floors(p.config.study).equals(own_floors)

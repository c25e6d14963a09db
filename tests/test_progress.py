"Long work says how far it is: to whoever watches, from whatever process, and without being in the way."

import io
import json
import subprocess
import sys
import pytest
from rich.console import Console
from kdnotes.core import progress as P
from kdnotes.experiment import launch
from kdnotes.experiment.launch import stage_file
from kdnotes.results.runs import RunFolder
from kdnotes.core.progress import Lines, Report, ReportFile, ReportFollower, reporting_to, stage


@pytest.fixture
def clock(monkeypatch):
    "Time that passes when a test says so."
    now = [100.0]
    monkeypatch.setattr(P.time, 'monotonic', lambda: now[0])
    return now


def test_what_is_quick_is_silent(clock):
    heard = []
    with reporting_to(heard.append), stage('reading', 10, 'rows') as advance:
        for _ in range(10):
            clock[0] += 0.49
            advance()
    assert heard == []


def test_what_is_long_reports_at_most_twice_a_second(clock):
    heard = []
    with reporting_to(heard.append), stage('reading', 10_000, 'rows') as advance:
        for _ in range(10_000):
            clock[0] += 0.001
            advance()
    times = [r.elapsed_s for r in heard]
    assert times[0] >= P.QUIET_S and all(b - a >= 0.5 for a, b in zip(times, times[1:-1]))
    assert 10 <= len(times) <= 12 and heard[-1].over and not any(r.over for r in heard[:-1])
    assert heard[-1].done == 10_000 and len({r.stage for r in heard}) == 1


def test_a_log_gets_two_lines_a_stage(clock):
    said = []
    with reporting_to(Lines(said.append)):
        for what in ('reading', 'scoring'):
            with stage(what, 100, 'rows') as advance:
                for _ in range(100):
                    clock[0] += 1.0
                    advance()
    assert [line.partition(':')[0] for line in said] == ['reading'] * 2 + ['scoring'] * 2
    assert said[0] == 'reading: 5 of 100 rows in 5.0 s, about 2 minutes left'
    assert said[1] == 'reading: 100 rows in 100.0 s'


def test_a_terminal_gets_a_bar_per_stage_and_a_line_at_its_end(clock):
    screen = io.StringIO()
    bars = P.Bars(Console(file=screen, force_terminal=True, width=100))
    with reporting_to(bars), stage('reading', 100, 'rows') as advance:
        for _ in range(100):
            clock[0] += 1.0
            advance()
        [task] = bars.progress.tasks
        assert (task.description, task.total) == ('reading', 100) and task.completed >= 99
    assert bars.progress.tasks == [] and 'reading: 100 rows in 100.0 s\n' in screen.getvalue()


def test_a_place_that_cannot_be_told_ends_no_work(clock, tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for sink in (P.Bars(Console(file=Closed())), ReportFile(tmp_path / 'no folder' / 'stage.json')):
        with reporting_to(sink), stage('reading', 3, 'rows') as advance:
            clock[0] += 5
            advance()


def test_a_follower_sees_every_stage_end_and_leaves_nothing(tmp_path):
    path = tmp_path / 'stage.json'
    path.write_text(json.dumps(dict(stage='0.0', what='of yesterday')))
    heard = []
    follower = ReportFollower(path, heard.append)
    write = ReportFile(path)
    for number in range(3):
        for done in (1, 2):
            write(
                Report(f'1.{number}', 'scoring', done, 2, 'rows', float(done), over=done == 2 and number == 1)
            )
            follower.look()
            follower.look()
    follower.close()
    assert [(r.stage, r.done, r.over) for r in heard] == [
        ('1.0', 1, False), ('1.0', 2, False), ('1.0', 2, True),
        ('1.1', 1, False), ('1.1', 2, True),
        ('1.2', 1, False), ('1.2', 2, False), ('1.2', 2, True),
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_pipe_gets_two_lines_on_standard_error():
    code = (
        'import time\nfrom kdnotes.core import progress as P\nP.QUIET_S = 0.05\nP.EVERY_S = 0.01\n'
        "for _ in P.followed(range(30), 'reading', 30, 'rows'):\n    time.sleep(0.01)\n"
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout == '' and len(done.stderr.splitlines()) == 2, done.stderr
    assert 'torch' not in subprocess.run(
        [sys.executable, '-X', 'importtime', '-c', 'import kdnotes.core.progress'],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip


class ReportingRanks:
    "Ranks that score something, and end."

    def __init__(self, folder, ends):
        self.write = ReportFile(stage_file(folder))
        self.polls = 0
        self.ends = ends

    def start(self):
        pass

    def poll(self):
        self.polls += 1
        if self.polls < 4:
            self.write(Report('7.0', 'scoring', self.polls, 3, 'rows', 1.0 * self.polls))
            return None
        return self.ends


@pytest.mark.parametrize('ends', [0, 1])
@pytest.mark.parametrize('alone', [True, False])
def test_a_launcher_shows_the_stages_of_its_ranks(tmp_path, monkeypatch, ends, alone):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setattr(launch.time, 'sleep', lambda seconds: None)
    folder = RunFolder('default', 'full_kd-s0-0123')
    folder.create()
    stage_file(folder).write_text('{"of": "yesterday"}')
    heard = []
    rows = []
    with reporting_to(heard.append):
        assert launch.follow_ranks(ReportingRanks(folder, ends), folder, rows.append, alone) == ends
    assert rows == [], 'a stage is no row'
    expected = [(1, False), (2, False), (3, False), (3, True)] if alone else []
    assert [(r.done, r.over) for r in heard] == expected
    assert not stage_file(folder).exists()

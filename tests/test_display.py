"""A finished run at a glance, the time that a study will take, and callbacks that cost no run."""

import gc
import json
import re
import signal
from html import escape
import nbformat
import papermill
import pytest
from jupyter_core.utils import run_sync
from handmade import make_record, write_floors, write_run, written_report
from kdnotes.stats import hardware as es
from kdnotes.report.figures import FIGURES, draw_evidence, run_curves
from kdnotes.report.plotting import SMOKE_MARK, figure_bytes, mark_smoke
from kdnotes.stats.evidence import evidence
from kdnotes.results.overview import run_table
from kdnotes.core.parse import make_config
from kdnotes.core.files import figures_path
from kdnotes.core.processes import Stopped
from kdnotes.core.render import phrase
from kdnotes.core.resolve import resolve
from kdnotes.experiment.launch import guarded
from kdnotes.experiment.study_plan import plan_study
from kdnotes.experiment.display import Kernels
from kdnotes.experiment.display import make_here, run_box
from kdnotes.experiment.study_plan import plan_table, time_left, pending_runs
from kdnotes.telemetry.summary import environment


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    return tmp_path


def written(mode, value, change=lambda record: None, **more):
    made = make_record(mode, 0, value, **more)
    made['params_total'] = 20_000_000 if mode == 'baseline' else 5_000_000
    ms = 12.0 if mode == 'baseline' else 4.0
    made['latency'] = dict(batch_1_ms=ms, batch_32_ms=20 * ms, batch_1_tokens=50, batch_32_tokens=60)
    change(made)
    write_run(made)
    return made


def pair(**more):
    teacher = written('baseline', 0.8, **more)
    return written('full_kd', 0.72, lambda r: r.update(teacher_run_id=teacher['run_id']), **more)


# ---- the box ----


def test_a_student_stands_beside_its_teacher_whatever_study_that_is_of():
    teacher = written('baseline', 0.8, study='another')
    student = written('full_kd', 0.72, lambda r: r.update(teacher_run_id=teacher['run_id']))
    write_floors(teacher, bm25=0.6)  # kept where the teacher is
    box = run_box(student)
    assert box.title.startswith(f"{student['run_id']}: MAP on the test set 0.720, 60.0% [")
    assert box.title.endswith('BM25 0.600')
    assert box.table.loc['parameters, M'].tolist() == ['5.0', '20.0']
    assert '25% of the parameters' in box.lines['savings'] and '3.00 times as fast' in box.lines['savings']
    sure = box.lines['confidence']
    assert '1 seed and 40 questions' in sure and phrase('reasons.jinja', 'one_seed') in sure
    assert not box.warning and str(box).startswith(student['run_id'])


def test_what_a_smoke_run_must_say_stands_first_in_its_box():
    box = run_box(pair(smoke=True))
    page = box._repr_html_()
    smoke = phrase('box.jinja', 'smoke')
    assert str(box).startswith(smoke) and page.index(smoke) < page.index(escape(box.title))


def test_a_run_without_a_value_or_a_teacher_says_so():
    def unknown(record):
        record['teacher_run_id'] = 'baseline-s9-000000000000'
        record['primary']['value'] = record['metrics']['test']['map'] = None

    nothing = written('full_kd', 0.72, unknown)
    box = run_box(nothing)
    assert box.title == phrase('reasons.jinja', 'no_value', [nothing['run_id']], 'MAP', ['made up'])
    assert box.lines['teacher'].startswith('baseline-s9-000000000000 ') and 'savings' not in box.lines


def test_a_run_names_the_run_of_its_study_that_is_nearest_to_it():
    first = written('full_kd', 0.72)
    written('full_kd', 0.71, alpha=0.9, temperature=4.0)
    written('full_kd', 0.6, study='another', alpha=0.6)
    written('full_kd', 0.6, smoke=True)
    second = written('full_kd', 0.7, alpha=0.8)
    said = run_box(second).lines['nearest']
    assert said == phrase('box.jinja', 'nearest', first, dict(alpha=(0.5, 0.8)), 4)
    assert said.startswith(f'{first["run_id"]} ') and '0.720' in said
    assert 'nearest' not in run_box(written('baseline', 0.8)).lines


def test_a_name_is_no_html():
    record = pair() | dict(run_id='<b>bold</b>')
    assert '<b>bold' not in run_box(record)._repr_html_()


def test_a_table_of_a_run_is_in_words_and_with_units():
    shown = run_table(pair())['']
    assert shown['time', 'training'] == '10 s' and shown['latency', 'one example'] == '4 ms'
    assert shown['not measured', 'energy.device_j'] == 'made up' and ('energy', 'device') not in shown


# ---- smoke says so ----


def test_every_figure_of_smoke_runs_says_so(home):
    pair(smoke=True)
    e = evidence('made')
    made = [f for f in draw_evidence(e, figures_path('made')) if f.path]
    assert made and all(f.caption.startswith('Smoke runs: these numbers mean nothing. ') for f in made)
    assert [t.get_text() for t in run_curves(e.records[0]).texts] == [SMOKE_MARK]
    for f in made:
        figure = FIGURES[f.name].draw(e)
        assert f.path.read_bytes() != figure_bytes(figure)
        assert f.path.read_bytes() == figure_bytes(mark_smoke(figure, True)), 'nothing else is added'


def test_a_smoke_study_says_first_that_its_numbers_mean_nothing():
    pair(smoke=True)
    found = written_report()
    assert found.headline[0] == phrase('headline.jinja', 'smoke') and str(found).startswith(found.headline[0])
    assert len(found.headline) == 4


def test_one_runs_losses_are_all_shown_and_smoothed():
    left, right = run_curves(pair()).axes
    logged, smooth = (line.get_ydata() for line in left.lines)
    assert len(logged) == len(smooth) > 10
    assert abs(smooth[1:] - smooth[:-1]).max() < abs(logged[1:] - logged[:-1]).max()
    assert [list(line.get_xdata()) for line in right.lines] == [[30, 60]]


# ---- how long it takes ----


def here(record, wall_s=None):
    "As if this machine had made it."
    record['environment'] |= {k: environment()[k] for k in ('device', 'cpu', 'torch')}
    if wall_s is not None:
        record['time']['wall_s'] = wall_s


def test_a_time_is_told_by_runs_of_the_same_kind_on_this_machine_alone():
    record = make_record('full_kd', epochs=2.0)
    given = dict(seed=5, epochs=4.0, learning_rate=1e-3, ranks=record['settings']['ranks'])
    config = resolve(make_config(mode='full_kd', **given), cpu(), 'embedded')
    work = es.work_planned(config, record['corpus_sha256'])
    machine = record['environment']

    def told(**changed):
        return es.seconds_of(work, [record | changed], machine)[0]

    teacher = dict(models=dict(teacher=config.model.pretrained, student=None))
    # one second is not training, and four epochs take twice as long as two
    assert told(**teacher) == pytest.approx(1.0 + 2 * 10.0)
    assert told() is None, 'another teacher'
    assert told(**teacher, corpus_sha256='0' * 64) is None
    assert told(**teacher, settings=record['settings'] | dict(batch_size=64)) is None
    assert told(**teacher, environment=machine | dict(device='another')) is None
    assert told(**teacher, machine=dict(jobs=2)) is None, 'it had the machine not for itself'
    assert told(**teacher, resumed_at=[3]) is None, 'its time is that of its last session'


def cpu():
    from kdnotes.core.machine import Machine

    return Machine('cpu', cores=2)


def test_a_study_says_how_long_it_will_take_or_what_will_tell():
    plans = plan_study(2, 'baseline,full_kd', corpus='embedded', study='mine')
    left = time_left(plans)
    assert (left.runs, left.known, left.n_finished) == (4, 0, 0)
    assert set(plan_table(plans)['time']) == {'not known'}
    base = next(p for p in plans if p.config.where.mode == 'baseline')
    for seed in (7, 8):
        made = make_record('baseline', seed, study='earlier')
        made |= dict(
            corpus_sha256=base.corpus_sha256, models=dict(teacher=base.config.model.pretrained, student=None)
        )
        here(made, wall_s=50.0 + 10 * seed)
        write_run(made)
    left = time_left(plans)
    assert (left.runs, left.known, left.n_finished, left.unknown) == (4, 2, 2, ('full_kd',))
    assert phrase('plan.txt.jinja', 'time', left, 2) == (
        'about 4 min for 2 of 4 runs, from 2 finished runs on this machine; not known for full_kd, of which '
        'no similar run has finished here in one session; less with 2 runs at a time'
    )
    table = plan_table(plans).set_index('run_id')
    assert table.loc[base.run_id, 'time'] == 'about 2 min' and table.loc[base.run_id, 'state'] == 'to train'


def test_what_a_run_stands_on_is_made_before_it_and_once():
    plans = [p for p in plan_study(1, 'full_kd,mixed_kd', corpus='embedded', study='mine')]
    [teacher] = {p.teacher.run_id for p in plans}
    assert [p.run_id for p in pending_runs(plans)] == [teacher, *(p.run_id for p in plans)]
    assert plan_table(plans)['state'].tolist() == ['trained first', 'to train', 'to train']


# ---- callbacks ----


@pytest.mark.parametrize('error', [ValueError('no'), ConnectionError('away')])
def test_a_callback_that_raises_is_called_again_and_named_once(error):
    said = []
    heard = []

    def on_row(row):
        heard.append(row['kind'])
        raise error

    listener = guarded(on_row, 'baseline-s0', said.append)
    for kind in ('start', 'step', 'end'):
        listener(dict(kind=kind))
    assert heard == ['start', 'step', 'end']
    assert len(said) == 1 and re.search(
        rf'on_row failed .* \({type(error).__name__}: {error}\); the run goes on', said[0]
    )


def test_an_interrupt_is_no_failure_of_a_callback():
    def on_row(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(on_row, 'baseline-s0', print)(dict(kind='start'))


def test_an_interrupted_cell_says_which_run_was_stopped(monkeypatch):
    "The student's has not begun while its teacher is trained."
    [student] = plan_study(1, 'full_kd', corpus='embedded', study='mine')

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr('kdnotes.experiment.display.make_run', interrupted)
    for planned, stopped in ((student, student.teacher), (student.teacher, student.teacher)):
        with pytest.raises(
            Stopped, match=f'{stopped.run_id} was stopped before its end; this cell, run again,'
        ):
            make_here(planned)


# ---- CO2 ----


def test_the_factor_of_a_grid_changes_no_name_and_reaches_the_teacher():
    plain, told = (
        plan_study(1, 'full_kd', corpus='embedded', study='mine', **more)[0]
        for more in ({}, dict(grid_g_per_kwh=380.0))
    )
    assert (plain.run_id, plain.teacher.run_id) == (told.run_id, told.teacher.run_id)
    assert told.config.where.grid_g_per_kwh == told.teacher.config.where.grid_g_per_kwh == 380.0


def test_a_column_of_co2_is_there_where_it_was_measured():
    teacher = written('baseline', 0.8)
    assert 'CO2 g' not in written_report().arms
    measured = dict(
        device_j=7200.0, mean_w=9.0, idle_w=1.0, source='counter', grid_g_per_kwh=400.0, co2_g=0.8
    )
    student = dict(teacher_run_id=teacher['run_id'], energy=measured)
    written('full_kd', 0.72, lambda r: r.update(student))
    arms = written_report().arms
    assert arms.loc['full_kd', 'CO2 g'] == '0.8' and arms.loc['baseline', 'CO2 g'] == '-'


def test_co2_without_an_energy_needs_its_reason(home):
    from kdnotes.results.schema import RecordError, check_record

    record = make_record()
    record['energy'] |= dict(grid_g_per_kwh=400.0, co2_g='much')
    with pytest.raises(RecordError, match="'energy.co2_g': input should be a valid number"):
        check_record(record)
    record['energy']['co2_g'] = None
    check_record(json.loads(json.dumps(record)))


# kernels of notebooks that are executed one after the other


def executed(kernels, folder, source, **environment):
    "What a notebook of one cell prints."
    path = folder / 'one.ipynb'
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    options = dict(progress_bar=False, log_output=False, kernel_name='python3', cwd=str(folder))
    with kernels.one(**environment) as kernel:
        made = papermill.execute_notebook(path, path, km=kernel, **options)
    cell = made.cells[0]
    assert cell.execution_count == 1
    return cell.outputs[0].text.split()


@pytest.fixture
def kernels():
    made = Kernels()
    yield made
    made.close()


LOOK = """
import os
print(os.getpid(), 'x' in globals(), os.environ['OF'], os.getcwd())
x = os.environ['OF'] = 'another'
os.chdir('/')
"""


def test_a_kernel_is_used_again_and_knows_nothing_of_before(kernels, tmp_path, monkeypatch):
    process, *known = executed(kernels, tmp_path, LOOK, OF='first')
    assert known == ['False', 'first', str(tmp_path)]
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    assert executed(kernels, tmp_path, LOOK, OF='second') == [process, 'False', 'second', str(tmp_path)]


def test_connections_to_a_kernel_end_with_its_notebook(kernels, tmp_path, caplog):
    for number in range(2):
        executed(kernels, tmp_path, LOOK, OF=str(number))
        gc.collect()
    assert 'destroy' not in caplog.text
    [kernel] = kernels.idle
    assert kernel.clients == []


@pytest.mark.exhaustive
def test_two_notebooks_at_once_have_a_kernel_each(kernels):
    with kernels.one() as first, kernels.one() as second:
        assert first is not second
    assert len(kernels.idle) == 2


@pytest.mark.exhaustive
def test_a_kernel_is_not_used_again_after_an_error(kernels, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match='ZeroDivisionError'):
        executed(kernels, tmp_path, '1 / 0')
    assert kernels.idle == []
    assert executed(kernels, tmp_path, LOOK, OF='next')[1:] == ['False', 'next', str(tmp_path)]


@pytest.mark.exhaustive
def test_a_kernel_that_died_waiting_is_replaced(kernels, tmp_path):
    process, *_ = executed(kernels, tmp_path, LOOK, OF='first')
    [kernel] = kernels.idle
    run_sync(kernel.manager.signal_kernel)(signal.SIGKILL)
    run_sync(kernel.manager.provisioner.wait)()
    assert executed(kernels, tmp_path, LOOK, OF='second')[0] != process


def test_no_kernel_and_no_socket_stays(tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    kernels = Kernels()
    with kernels.one() as kernel:
        pass
    assert list(tmp_path.glob('kdnotes-*/kernel-*'))
    kernels.close()
    assert not list(tmp_path.iterdir()) and not run_sync(kernel.is_alive)()

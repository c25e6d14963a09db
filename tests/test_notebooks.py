"Every notebook people run, through papermill as people run it; and what is left of a run that was stopped."

import ast
import base64
import json
import os
import re
import signal
import shutil
import subprocess
import time
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from kdnotes import cli
from kdnotes.core.arms import MODES, USUAL
from kdnotes.commands.output import run_notebook
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.spec import flat
from kdnotes.core.parse import make_config
from kdnotes.core.notebook_parameters import parameters_from
from kdnotes.core.processes import Stopped
from kdnotes.core.render import phrase
from kdnotes.core.machine import Machine
from kdnotes.tasks.sources import load_corpus
from kdnotes.experiment import display
from kdnotes.experiment.launch import execute
from kdnotes.experiment.study_plan import named, plan_study
from kdnotes.experiment.plan import plan
from kdnotes.distill.architectures import weights_sha256
from kdnotes.results.runs import read_csv
from papermill.cli import _resolve_type
from papermill.inspection import inspect_notebook
from notebooks import ROOT, command, contents, papermill, start_papermill, surroundings
from processes import heard_of, listening, open_to_others, wait_for

slow = pytest.mark.slow
SMOKE = (('corpus', 'embedded'), ('smoke', 'True'))
RANKS = min(len(os.sched_getaffinity(0)), 2)
TOKEN = 'hf_planted_by_a_test_000000000000'


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    return tmp_path_factory.mktemp('home')


@pytest.fixture(scope='module')
def parallel(small_teacher) -> tuple:
    "What runs of a small model are given."
    return ('ranks', RANKS), ('teacher', small_teacher), ('student_layers', '1'), *SMOKE


@pytest.fixture(scope='module')
def first(parallel) -> tuple:
    "What the first run is given."
    return ('mode', 'mixed_kd'), ('study', 'default-smoke'), *parallel


@pytest.fixture(scope='module')
def heard(home, first) -> dict[str, set[str]]:
    "What listened while the first run was made, in the two-path form."
    given = (home / 'out.ipynb', *first)
    quiet = subprocess.DEVNULL
    process = start_papermill(home, 'nbs/run.ipynb', *given, output=quiet, HF_TOKEN=TOKEN)
    seen = heard_of(process)
    assert process.wait() == 0, process.stderr.read()
    return seen


@pytest.fixture(scope='module')
def first_run(home, heard):
    "The executed notebook, the record, the run folder."
    [path] = home.glob('runs/default-smoke/mixed_kd-*/record.json')
    return nbformat.read(home / 'out.ipynb', 4), json.loads(path.read_text()), path.parent


def outputs(notebook, kind=None):
    "What a notebook shows: its printed text, or all outputs of one MIME type."
    shown = [o for c in notebook.cells if c.cell_type == 'code' for o in c.outputs]
    if kind is None:
        return ''.join(o.text for o in shown if o.output_type == 'stream')
    return [o.data[kind] for o in shown if kind in o.get('data', {})]


def code_of(name: str) -> list[str]:
    "The cells of an experiment notebook."
    return [c.source for c in nbformat.read(ROOT / f'nbs/{name}.ipynb', 4).cells if c.cell_type == 'code']


def metrics_by_hand(rows):
    """Mean average precision of the questions with both labels, score descending as float32,
    then item descending.
    """
    found = []
    for _, question in rows.assign(score=rows['score'].astype('float32')).groupby('unit'):
        labels = question.sort_values(['score', 'item'], ascending=False)['label'].to_numpy(dtype=float)
        if 0 < labels.sum() < len(labels):
            found.append(np.mean((np.cumsum(labels) / np.arange(1, len(labels) + 1))[labels > 0]))
    return np.mean(found)


# ---- plans ----


def test_a_study_hands_each_run_what_it_was_given(home, monkeypatch):
    """The cells of the notebook up to the runs, without training and papermill:
    the parameters of each run's notebook are those of the plan.
    """
    given = dict(
        arms='all',
        seeds=1,
        temperature=4.0,
        student_layers='[1, 3]',
        learning_rate='2e-4',
        hidden_loss='mse',
        signal='online',
        ranks=1,
        amp_dtype='bf16',
        teacher_seed='none',
        smoke='true',
    )
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.chdir(ROOT)
    code = code_of('study')
    runs = next(i for i, source in enumerate(code) if 'run_study(' in source)
    shell = {}
    exec(code[0], shell)
    exec(code[1] + f'\nglobals().update({given!r})', shell)
    for source in code[2:runs]:
        exec(source, shell)
    made = {}
    plans = []

    def make_runs(planned, make, say, jobs):
        plans.extend(planned)
        for p in planned:
            make(p, jobs)

    monkeypatch.setattr('kdnotes.experiment.study.execute', lambda p, on_row, say, jobs: None)
    monkeypatch.setattr('kdnotes.experiment.study.make_runs', make_runs)
    monkeypatch.setattr('kdnotes.experiment.study._compared', lambda plans, failed, say: None)
    monkeypatch.setattr(
        'papermill.execute_notebook',
        lambda notebook, output, parameters, **_: made.update({output.parent.name: parameters}),
    )
    exec(code[runs], shell)
    assert list(made) == [p.run_id for p in plans] and len(plans) == len(MODES)
    for p in plans:
        assert plan(make_config(**json.loads(json.dumps(made[p.run_id])))) == p
    kd = next(p.config for p in plans if p.config.where.mode == 'full_kd')
    assert (kd.loss.hidden_loss, kd.model.student.kept_layers, kd.where.study) == (
        'mse',
        (1, 3),
        'embedded-smoke',
    )


def make(*given, makefile=None, **surroundings) -> subprocess.CompletedProcess:
    "What make would do; with a Makefile, what it does."
    usual = {k: v for k, v in os.environ.items() if not k.startswith('MAKE')} | {'COLUMNS': '80'}
    return subprocess.run(
        ['make', *(['-f', makefile] if makefile else ['-n']), '-o', 'setup', *given],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=usual | surroundings,
    )


@pytest.mark.parametrize('name', ['CORPUS', 'P', 'COLUMNS', 'INIT', 'KDNOTES_HOME'])
def test_make_executes_nothing_that_it_is_given(tmp_path, name):
    executed = tmp_path / 'executed'
    text = f'alpha=$(shell touch {executed}) `touch {executed}` \'"'
    for done in (make('study', f'{name}={text}'), make('study', **{name: text})):
        assert done.stdout == 'kdnotes study --notebook\n' and not executed.exists(), done.stderr


def test_make_passes_its_variables_on_as_they_are(tmp_path):
    "To a `kdnotes` that prints its environment."
    (tmp_path / 'kdnotes').write_text('#!/bin/sh\nenv -0\n')
    (tmp_path / 'kdnotes').chmod(0o755)
    makefile = (ROOT / 'Makefile').read_text().replace('$(CURDIR)/.venv/bin', str(tmp_path))
    (tmp_path / 'Makefile').write_text(makefile)
    text = "it's \"a\" $(shell echo bad) $HOME `b`"
    given = dict(CORPUS=text, COLUMNS='text=review,label=stars', P='alpha=.3 layers=2', INIT='hub', SMOKE='1')
    done = make(
        'study', *(f'{name}={value}' for name, value in given.items()), makefile=tmp_path / 'Makefile'
    )
    passed = dict(line.split('=', 1) for line in done.stdout.split('\0') if line.startswith('KDNOTES_MAKE'))
    expected = given | dict(P='alpha=.3 layers=2 student_init=hub')
    del expected['INIT']
    assert passed == {f'KDNOTES_MAKE_{name}': value for name, value in expected.items()}, done.stderr
    assert '\0COLUMNS=' not in done.stdout, 'the width of the terminal'


def test_a_study_is_refused_before_its_notebook_is_touched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    notebook = tmp_path / 'runs/reviews/study.ipynb'
    notebook.parent.mkdir(parents=True)
    notebook.write_text('of a finished study')
    assert cli.main(['study', '--notebook', '--study', 'reviews', '-p', 'learning_rate=7']) == 2
    assert 'learning_rate' in capsys.readouterr().err and notebook.read_text() == 'of a finished study'


def test_a_run_is_shown_without_the_values_that_its_notebook_was_saved_with(tmp_path):
    "Who changes run.ipynb in JupyterLab and saves it changes no study."
    code = code_of('study')
    shell = {}
    exec(code[0], shell)
    exec(next(source for source in code if 'def without_values(' in source), shell)
    saved = nbformat.read(ROOT / 'nbs/run.ipynb', 4)
    [cell] = [c for c in saved.cells if 'parameters' in c.metadata.get('tags', [])]
    cell.source += '\nepochs = 1.0\nmax_length = 64'
    nbformat.write(saved, tmp_path / 'run.ipynb')
    shown = [c.source for c in shell['without_values'](tmp_path / 'run.ipynb').cells if c.cell_type == 'code']
    of_run = {}
    for source in shown[:2]:
        exec(source, of_run)
    assert make_config(**parameters_from(of_run['before'], of_run)) == make_config()
    assert len(shown) == sum(c.cell_type == 'code' for c in saved.cells)


def test_an_interrupted_study_says_what_is_done_and_shows_no_traceback(home, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.chdir(ROOT)
    code = code_of('study')
    runs = next(i for i, source in enumerate(code) if 'run_study(' in source)
    shell = {}
    for source in code[:runs]:
        exec(source, shell)

    def interrupted(on_plans, **given):
        on_plans(plan_study(1, 'baseline', 'stopped', corpus='embedded'))
        raise KeyboardInterrupt

    shell['run_study'] = interrupted
    with pytest.raises(Stopped, match='0 of 1 runs are done; this cell, run again, makes the rest'):
        exec(code[runs], shell)


def test_the_run_notebook_has_the_parameters_defaults():
    "A study gives it no more than differs from them."
    shell = {}
    for source in code_of('run')[:2]:
        exec(source, shell)
    assert make_config(**parameters_from(shell['before'], shell)) == make_config()


@pytest.mark.parametrize('name', ['run', 'study', 'search', 'tune', 'bench', 'cluster'])
def test_papermill_can_read_the_parameters(name, caplog):
    "A line that it cannot parse is a warning in the middle of each study."
    found = inspect_notebook(str(ROOT / f'nbs/{name}.ipynb'))
    assert len(found) > 3 and 'Unable to parse' not in caplog.text


@pytest.mark.parametrize('name', ['run', 'study', 'search', 'tune', 'cluster'])
def test_papermill_knows_the_parameters_that_people_give(name):
    "One that it does not know is honoured, beside papermill's line that it was passed unknown."
    found = inspect_notebook(str(ROOT / f'nbs/{name}.ipynb'))
    usual = flat(make_config())
    for of in ('teacher', 'student', 'labels', 'unlabelled', 'columns', 'corpus', 'study', 'task'):
        assert of in found
    for of in ('teacher', 'student', 'labels', 'unlabelled'):
        assert ast.literal_eval(found[of]['default']) == usual[of]


@pytest.mark.parametrize('given, expected', [('2026', '2026'), ('a', 'a'), ('7-b', '7-b'), ('0x1F', '0x1F')])
def test_a_name_of_digits_is_a_name(given, expected):
    "papermill makes a number of it."
    value = _resolve_type(given)
    assert make_config(study=value).where.study == make_config(arm=value).where.arm == expected
    assert make_config(teacher=value, corpus=value, columns=value).model.pretrained == expected
    found = named(study=value, corpus='embedded', smoke=True)
    assert found['study'] == f'{expected}-smoke'
    assert {p.config.where.study for p in plan_study(1, 'usual', **found)} == {f'{expected}-smoke'}
    for wrong in (True, 1.5, [7]):
        with pytest.raises(ConfigError, match='study=.* is refused: input should be a valid string'):
            make_config(study=wrong)


# ---- one run ----


def test_every_experiment_notebook_is_run_here():
    assert {p.stem for p in (ROOT / 'nbs').glob('[!0-9]*.ipynb')} - {'index'} == {
        'run',
        'study',
        'search',
        'tune',
        'bench',
        'scaling',
        'cluster',
    }, (
        'a new experiment notebook needs its smoke run: run and study have theirs here, '
        'search in test_search.py, tune in test_tuning.py, bench, scaling and cluster in files of their own'
    )


@slow
def test_a_run_leaves_its_record(first_run, home):
    _, record, folder = first_run
    expected = dict(run_id=folder.name, study='default-smoke', mode='mixed_kd', corpus='embedded')
    assert record.items() >= (expected | dict(precision='bf16')).items() and record['precision_reason']
    factors = dict(network='student', precision='bf16', kd=True, ranks=RANKS, init='teacher_finetuned')
    assert record['factors'] == factors | dict(signal_dtype='fp32', transfer=None)
    assert record['parallel']['ranks'] == RANKS and record['timeline']
    phases = record['phases']
    assert phases.keys() >= {'teacher', 'student', 'evaluation'} and ('synchronisation' in phases) == (
        RANKS > 1
    )
    assert 0 < phases['student']['seconds'] + phases['evaluation']['seconds'] <= record['time']['wall_s']
    files = {'config.json', 'rows.jsonl', 'state.json', 'units.csv.gz', 'predictions.csv.gz', 'model'}
    assert files <= {p.name for p in folder.iterdir()} and state(folder)['status'] == 'done'
    teacher = json.loads((folder.parent / record['teacher_run_id'] / 'record.json').read_text())
    expected = dict(mode='baseline', precision='fp32', seed=record['teacher_seed'])
    assert teacher.items() >= expected.items() and teacher['parallel']['ranks'] == 1
    parts = record['time']['train_s'] + record['time']['teacher_s'] + teacher['time']['train_s']
    assert record['time']['total_s'] == pytest.approx(parts)
    assert not (home / 'thesis').exists(), 'evidence is kept when it is asked for'


@slow
def test_a_run_listens_on_this_machine_alone_and_writes_no_secret(heard, home):
    for part in ('ipykernel', *['kdnotes.experiment.worker'] * (RANKS > 1)):
        assert any(part in line and addresses for line, addresses in heard.items()), f'{part} was not seen'
    assert not open_to_others(heard)
    left = [path for path in home.rglob('*') if path.is_file()]
    assert home / 'out.ipynb' in left
    assert not [path for path in left if TOKEN.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_jupyterlab_listens_on_this_machine_alone(tmp_path):
    process = subprocess.Popen(
        [Path(sys.executable).parent / 'jupyter', 'lab', '--no-browser', '--allow-root'],
        cwd=tmp_path,
        env=surroundings(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: any(listening(process).values()), 'JupyterLab to listen', 120)
        assert not open_to_others(listening(process))
    finally:
        process.terminate()
        process.wait()


@slow
def test_metrics_are_those_of_the_stored_units_and_predictions(first_run):
    _, record, folder = first_run
    means = read_csv(folder / 'units.csv.gz').groupby(['split', 'metric'])['value'].mean()
    assert {metric for _, metric in means.index} == {'map', 'mrr', 'p_at_1', 'answered_map', 'raw_map'}
    for (split, metric), value in means.items():
        assert value == pytest.approx(record['metrics'][split][metric], abs=2e-6)
    predictions = read_csv(folder / 'predictions.csv.gz')
    for split, rows in predictions.groupby('split'):
        assert metrics_by_hand(rows) == pytest.approx(record['metrics'][split]['map'])
    assert record['primary'] == dict(
        set='test', metric='map', higher_is_better=True, value=record['metrics']['test']['map']
    )


@slow
def test_the_saved_model_loads_and_is_the_one_that_was_scored(first_run):
    _, record, folder = first_run
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / 'model').eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / 'model')
    assert model.config.num_hidden_layers == 1 and model.config.num_labels == 2
    assert (
        weights_sha256(model) == record['model_sha256']
        and sum(p.numel() for p in model.parameters()) == record['params_total']
    )
    texts = {
        (r['question_id'], r['sentence_id']): (r['question'], r['sentence'])
        for r in load_corpus('answer_selection', 'embedded').splits['test']
    }
    stored = read_csv(folder / 'predictions.csv.gz').query("split == 'test'").head(8)
    first, second = zip(*(texts[key] for key in zip(stored['unit'], stored['item'])))
    with torch.inference_mode():
        logits = model(**tokenizer(first, second, padding=True, return_tensors='pt')).logits
    np.testing.assert_allclose(logits.diff(dim=1)[:, 0], stored['score'], atol=1e-4)


@slow
def test_the_executed_notebook_shows_the_run(first_run):
    notebook, record, _ = first_run
    shown = [o for c in notebook.cells if c.cell_type == 'code' for o in c.outputs]
    assert not [o for o in shown if o.get('name') == 'stderr'], 'nothing red'
    said = outputs(notebook)
    tables = outputs(notebook, 'text/html')
    assert (
        f"{record['run_id']} needs {record['teacher_run_id']} first" in said
        and f'run_id: {record["run_id"]}' in said
    )
    [box] = [t for t in tables if '(teacher)' in t]
    smoke = phrase('box.jinja', 'smoke')
    assert box.index(smoke) < box.index('MAP on the test set') < box.index('confidence')
    assert record['run_id'] in box and phrase('reasons.jinja', 'one_seed') in box
    assert any(
        '(primary)' in t and 'training speed' in t and record['precision_reason'] in t for t in tables
    ), 'the record, nothing cut off'
    assert (
        f"{record['run_id']} (answer_selection, mixed_kd" in said
        and 'times as long (median of alternating calls' in said
    ), 'the model is asked, and so is its teacher'
    [worst] = [t for t in tables if 'put first' in t]
    texts = [r['sentence'] for r in load_corpus('answer_selection', 'embedded').splits['test']]
    assert sum(t in worst for t in texts) >= 5, 'whole sentences'
    assert [base64.b64decode(p)[1:4] for p in outputs(notebook, 'image/png')] == [b'PNG'], 'the curves'


def links(notebook, folder):
    "The files that an executed notebook links to, as seen from where it lies."
    shown = [c.source for c in notebook.cells if c.cell_type == 'markdown'] + outputs(
        notebook, 'text/markdown'
    )
    found = [t for text in shown for t in re.findall(r'\]\((?![a-z]+:|#)([^)\s]+)\)', text)]
    return [(folder / target).resolve() for target in found]


@slow
@pytest.mark.exhaustive
def test_the_one_path_form_prints_the_notebook_and_trains_nothing_again(first_run, first, home):
    _, record, folder = first_run
    before = contents(folder)
    source = (ROOT / 'nbs/run.ipynb').read_bytes()
    with open(home / 'printed.ipynb', 'w') as output:
        done = papermill(home, 'nbs/run.ipynb', *first, output=output)
    assert done.returncode == 0, done.stderr
    printed = nbformat.read(home / 'printed.ipynb', 4)
    nbformat.validate(printed)
    assert f"{record['run_id']} is done already" in outputs(printed) and any(
        'put first' in t for t in outputs(printed, 'text/html')
    )
    assert contents(folder) == before and (ROOT / 'nbs/run.ipynb').read_bytes() == source


# ---- the study ----


def papermill_study(home, parallel):
    return papermill(
        home, 'nbs/study.ipynb', home / 'study.ipynb', ('seeds', 1), ('study', 'default'), *parallel
    )


@pytest.fixture(scope='module')
def made_study(first_run, small_teacher, parallel, home):
    "The usual arms of one seed; two of four are there from above, and one is made without a notebook."
    given = dict(teacher=str(small_teacher), student_layers=(1,), ranks=RANKS, corpus='embedded', smoke=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv('KDNOTES_HOME', str(home))
        patched.setenv('CUDA_VISIBLE_DEVICES', '')
        execute(plan(make_config(mode='full_student', study='default-smoke', **given)))
    done = papermill_study(home, parallel)
    assert done.returncode == 0, done.stderr


def captions(notebook):
    return [
        t
        for t in outputs(notebook, 'text/markdown')
        if t.startswith(('Smoke runs', 'Training', 'What', 'MAP'))
    ]


def records_of(study) -> dict[str, dict]:
    "The records of a study's folder, by mode."
    found = (json.loads(path.read_text()) for path in study.glob('*/record.json'))
    return {record['mode']: record for record in found}


@pytest.mark.exhaustive
@slow
def test_a_study_shows_its_table_and_binds_its_figures(made_study, first_run, home):
    study = home / 'runs/default-smoke'
    table = (study / 'table.txt').read_text()
    executed = nbformat.read(home / 'study.ipynb', 4)
    said = outputs(executed)
    records = records_of(study)
    assert set(records) == set(USUAL) and records['mixed_kd'] == first_run[1]
    smoke = phrase('headline.jinja', 'smoke')
    assert table.startswith(smoke) and outputs(executed, 'text/markdown')[0].startswith(smoke)
    assert captions(executed) and all(c.startswith('Smoke runs: these numbers') for c in captions(executed))
    one_seed = phrase('reasons.jinja', 'one_seed')
    for text in (*USUAL, "teacher's gain", 'parameters, M', 'test MAP', 'train s', one_seed):
        assert text in table
    own = study / records['full_kd']['run_id']
    of_run = links(nbformat.read(own / 'executed.ipynb', 4), own)
    assert {p.name for p in of_run} >= {'study.ipynb', '01_targets.ipynb'}
    assert [p for p in [*links(executed, home), *of_run] if not p.is_file()] == []
    [plans] = [t for t in outputs(executed, 'text/html') if 'to train' in t]
    assert plans.count('to train') == 1 and plans.count('>done<') == 3
    for text in ('time: not known: no similar run', 'corpus: embedded (sha256 ', f'training {own.name}'):
        assert text in said
    figures = study / 'figures'
    manifest = json.loads((figures / 'MANIFEST.json').read_text())
    made = {name: entry for name, entry in manifest.items() if entry['sha256']}
    usual = {
        'accuracy_time',
        'throughput',
        'curves',
        'effects',
        'phases',
        'timelines',
        'fidelity',
        'reliability',
    }
    assert set(made) == {p.name for p in figures.glob('*.svg')} >= {f'{name}.svg' for name in usual}
    assert all(entry['reason'] for name, entry in manifest.items() if name not in made)
    for name, entry in made.items():
        assert set(entry['run_ids']) == {r['run_id'] for r in records.values()}
        assert entry['sha256'] == contents(figures)[name] and entry['producer']


@slow
@pytest.mark.exhaustive
def test_a_studys_second_call_changes_nothing(made_study, parallel, home):
    figures = home / 'runs/default-smoke/figures'
    table = (home / 'runs/default-smoke/table.txt').read_text()
    times = {p: p.stat().st_mtime_ns for p in home.glob('runs/*/*/record.json')}
    before = contents(figures)
    done = papermill_study(home, parallel)
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in home.glob('runs/*/*/record.json')} == times, (
        'nothing is trained twice'
    )
    assert contents(figures) == before and (home / 'runs/default-smoke/table.txt').read_text() == table


@slow
@pytest.mark.exhaustive
def test_a_study_without_notebooks(made_study, parallel, home):
    """Where the notebook's runs are done, the same table and nothing trained; other arms are trained
    without papermill, at the same time.
    """
    given = [part for name, value in parallel for part in ('-p', f'{name}={value}')]
    asked = ('study', '--seeds', 1, '-p', 'study=default', *given)
    table = (home / 'runs/default-smoke/table.txt').read_text()
    before = contents(home / 'runs/default-smoke/figures')
    done = command(home, *asked)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.endswith(table)
        and 'corpus: embedded (sha256 ' in done.stdout
        and ' of 4: ' not in done.stdout
        and (home / 'runs/default-smoke/table.txt').read_text() == table
    )
    assert contents(home / 'runs/default-smoke/figures') == before
    done = command(home, *asked, '--arms', 'baseline,mixed_baseline,mixed_student', '--jobs', 2)
    assert done.returncode == 0, done.stderr
    records = records_of(home / 'runs/default-smoke')
    made = records['mixed_baseline']
    assert (
        f" of 3: {made['run_id']}" in done.stdout
        and f"test MAP {made['primary']['value']:.3f}, trained in " in done.stdout
        and 'baseline \N{RIGHTWARDS ARROW} mixed_baseline' in done.stdout
    )
    assert {mode: r['machine']['jobs'] for mode, r in records.items()} == dict(
        baseline=1, full_student=1, full_kd=1, mixed_kd=1, mixed_baseline=2, mixed_student=2
    ) and 'memory and energy of 2 of 3 runs are excluded' in done.stdout
    assert (
        not (home / 'runs/default-smoke' / made['run_id'] / 'executed.ipynb').exists()
        and made['factors']['precision'] == 'bf16'
    )


@slow
def test_another_study_takes_over_what_is_done(first_run, small_teacher, home, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    _, record, folder = first_run
    before = contents(folder)
    said = []
    given = dict(teacher=str(small_teacher), student_layers=(1,), ranks=RANKS, corpus='embedded', smoke=True)
    planned = plan(
        make_config(mode='mixed_kd', study='other', **given), Machine('cpu', len(os.sched_getaffinity(0)))
    )
    assert execute(planned, say=said.append) == record | dict(study='other')
    assert (
        said == [f"{record['run_id']} was made in study 'default-smoke' already"]
        and contents(folder) == before
    )
    other = contents(home / 'runs/other' / folder.name)
    assert all(
        other[name] == before[name]
        for name in ('units.csv.gz', 'predictions.csv.gz', 'model/model.safetensors')
    )
    assert records_of(home / 'runs/other') == dict(mixed_kd=record | dict(study='other'))


@pytest.mark.exhaustive
@slow
def test_evidence_is_kept_when_it_is_asked_for(made_study, home):
    assert not (home / 'thesis').exists()
    made = records_of(home / 'runs/default-smoke')
    kept = command(home, 'evidence', 'default-smoke')
    assert kept.returncode == 0 and f'{len(made)} runs of default-smoke are kept' in kept.stdout, kept.stderr
    lines = (home / 'thesis/data/default-smoke.records.jsonl').read_text().splitlines()
    assert {record['run_id'] for record in map(json.loads, lines)} == {r['run_id'] for r in made.values()}
    units = pd.read_csv(home / 'thesis/data/default-smoke.units.csv.gz')
    assert set(units['run_id']) == {r['run_id'] for r in made.values()}
    shutil.rmtree(home / 'thesis')


# ---- stopped runs ----


def training(home, after=0.0):
    "The run folder of a home, once it has begun to train after a point in time."
    for rows in home.glob('runs/*/*/rows.jsonl'):
        started = [
            json.loads(line)['at_s']
            for line in rows.read_text().splitlines()
            if line.endswith('}') and '"kind": "start"' in line
        ]
        if started and started[-1] > after:
            return rows.parent


def state(folder):
    return json.loads((folder / 'state.json').read_text())


@slow
@pytest.mark.exhaustive
def test_a_trainer_that_is_asked_to_stop_exits_75(first_run, tmp_path):
    _, record, folder = first_run
    own = tmp_path / 'runs/default' / record['teacher_run_id']
    own.mkdir(parents=True)
    asked = json.loads((folder.parent / own.name / 'config.json').read_text())
    asked['config'] |= dict(smoke=False, epochs=100.0)  # long enough to be stopped
    (own / 'config.json').write_text(json.dumps(asked))
    trainer = subprocess.Popen(
        [sys.executable, '-m', 'kdnotes.experiment.worker', str(own / 'config.json')],
        env=surroundings(tmp_path),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: training(tmp_path), 'training to begin')
    trainer.send_signal(signal.SIGTERM)
    trainer.communicate(timeout=300)
    assert (
        trainer.returncode == 75
        and state(own)['status'] == 'interrupted'
        and not (own / 'record.json').exists()
    )


@slow
@pytest.mark.exhaustive
def test_ctrl_c_in_make_says_that_the_same_command_makes_the_rest(tmp_path):
    said = tmp_path / 'said'
    with said.open('w') as out:
        made = subprocess.Popen(
            ['make', '-o', 'setup', 'study', 'SMOKE=1', 'SEEDS=1', 'ARMS=baseline', 'STUDY=stopped'],
            cwd=ROOT,
            env=surroundings(tmp_path),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal sends its Ctrl-C to all of a group
        )
        while 'training' not in said.read_text():
            assert made.poll() is None, said.read_text()
            time.sleep(0.2)
        os.killpg(made.pid, signal.SIGINT)
        assert made.wait() != 0
    assert 'stopped' in said.read_text() and 'the same command makes the rest' in said.read_text()
    assert 'Traceback' not in said.read_text()


@pytest.mark.slow
def test_the_kernel_of_a_command_listens_on_this_machine_alone_and_leaves_no_socket(tmp_path, monkeypatch):
    "Two at once have sockets of their own; ipykernel has one on loopback, for what its children print."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, 'NOTEBOOKS', tmp_path)
    listening_ports = (
        'import psutil\n'
        "found = {c.laddr.ip for c in psutil.Process().net_connections('inet') if c.status == 'LISTEN'}\n"
        "assert found <= {'127.0.0.1'} and who in (1, 2), f'found {found}'"
    )
    cells = [nbformat.v4.new_code_cell('who = 0'), nbformat.v4.new_code_cell(listening_ports)]
    cells[0].metadata['tags'] = ['parameters']
    kernel = dict(name='python3', display_name='python3', language='python')
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel))
    nbformat.write(notebook, tmp_path / 'small.ipynb')
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda who: run_notebook('small', tmp_path / f'{who}.ipynb', dict(who=who)), (1, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['1.ipynb', '2.ipynb', 'small.ipynb']
    with pytest.raises(KdnotesError, match='found') as caught:
        run_notebook('small', tmp_path / 'other.ipynb', dict(who=3))
    assert caught.value.exit_code == 1

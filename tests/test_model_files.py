"Folders of models that do not say what they said, or want more than to be read."

import json
import shutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from kdnotes.core.config import KdnotesError, make_config
from kdnotes.core.resolve import Machine
from kdnotes.distill.models import ModelError, load_config, load_model
from kdnotes.experiment.launch import RunError, execute, make_runs, run
from kdnotes.experiment.plan import plan, plan_study
from kdnotes.records.store import RunFolder
from kdnotes.tasks.base import SEQUENCE_HEAD
from test_doctor import write_corpus, write_model

slow = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    return tmp_path


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
        ('hidden_act', 'nonsense', "names 'nonsense', which transformers does not have"),
        ('hidden_dropout_prob', 7, 'between 0 and 1, but got 7'),
        ('intermediate_size', -3, 'negative dimension'),
    ],
)
def test_a_config_of_which_no_model_can_be_built_is_refused_before_anything_is_made(home, key, value, said):
    folder = write_model(home / 'model')
    rewrite(folder / 'config.json', lambda c: c.update({key: value}))
    with pytest.raises(ModelError, match=f'{folder} could not be loaded as a model: .*{said}'):
        plan(make_config(teacher=str(folder), max_length=64))


def test_a_model_answers_by_name_whatever_its_config_says(home):
    folder = write_model(home / 'model')
    rewrite(folder / 'config.json', lambda c: c.update(return_dict=False))
    outputs = load_model(folder, SEQUENCE_HEAD, seed=0)(input_ids=torch.ones((1, 4), dtype=torch.long))
    assert outputs.logits.shape == (1, 2)


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


def other_config(folder):
    rewrite(folder / 'config.json', lambda c: c.update(hidden_act='relu'))


@slow
@pytest.mark.parametrize(
    'change, words',
    [
        (other_vocabulary, 'the tokenizer of its teacher has changed'),
        (other_config, 'the config.json of the model that it starts from has changed'),
    ],
)
def test_runs_of_two_models_under_one_name_are_no_study(home, given, change, words):
    run(make_config(mode='baseline', **given))
    change(home / 'teacher')
    plans = plan_study(1, 'baseline,parallel_baseline', **given)
    with pytest.raises(RunError, match=words):
        make_runs(plans, lambda p, jobs: pytest.fail('nothing is made'))
    with pytest.raises(RunError, match=words):
        run(make_config(mode='baseline', **given | dict(study='another-smoke')))  # nor is it adopted


def other_weights(folder):
    tensors = load_file(folder / 'model.safetensors')
    save_file(
        {name: tensor * 2 for name, tensor in tensors.items()}, folder / 'model.safetensors', {'format': 'pt'}
    )


@slow
@pytest.mark.parametrize(
    'change, name', [(other_weights, 'model.safetensors'), (other_vocabulary, 'tokenizer')]
)
def test_a_model_that_changes_after_its_plan_is_not_trained(home, given, change, name):
    planned = plan(make_config(mode='baseline', **given), Machine('cpu', 2))
    change(home / 'teacher')
    with pytest.raises(KdnotesError, match=f'the {name} of .* changed since the run was planned'):
        execute(planned)
    assert not list(home.glob('home/runs/*/*/record.json'))


@slow
def test_a_run_that_was_ended_after_its_record_is_bound_by_the_next_call(home, given):
    planned = plan(make_config(mode='baseline', **given), Machine('cpu', 2))
    execute(planned)
    folder = RunFolder(planned.config.study, planned.run_id)
    bound = folder.state()['record_sha256']
    folder.write_state('interrupted', reason='KeyboardInterrupt')
    make_runs([planned], lambda p, jobs: pytest.fail('nothing is made'))
    assert folder.state()['status'] == 'done' and folder.state()['record_sha256'] == bound


@slow
def test_a_teacher_that_goes_away_during_a_training_has_its_time_in_the_record(home, given):
    asked = make_config(mode='full_kd', ranks=1, **given | dict(smoke=False, epochs=20, teacher_epochs=1))
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

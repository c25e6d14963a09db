"""One spec: nested, by flat names, from YAML and through papermill it is one run; and what it cannot say
is refused in a sentence that names the parameter."""

import json
import subprocess
import sys
from pathlib import Path
import papermill
import pytest
import yaml
from kdnotes.core.arms import MODES
from kdnotes.core.config import TASKS, ConfigError
from kdnotes.core.parse import flat_names, make_config, read_spec, stored_config, unread
from kdnotes.core.machine import Machine
from kdnotes.core.spec import (
    FLAT_NAMES,
    PATHS,
    Loss,
    RunConfig,
    RunSpec,
    Where,
    flat,
    parameters,
    value_of,
    with_values,
)
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study_plan import plan_study

ON = Machine('cpu', 2)
ROOT = Path(__file__).resolve().parents[1]
FLAT = dict(
    corpus='embedded', smoke=True, layers=2, temperature=3.0, teacher_epochs=2, epochs=1, study='one_spec'
)
NESTED = dict(
    data=dict(corpus='embedded', smoke=True),
    model=dict(student=dict(layers=2)),
    loss=dict(temperature=3.0),
    teacher=dict(train=dict(epochs=2)),
    train=dict(epochs=1),
    where=dict(study='one_spec'),
)


def given(task: str) -> tuple[dict, dict]:
    "The same run by flat names and as a nested spec."
    if task == 'sentence_pairs':  # scores have no temperature
        own = dict(alpha=0.3)
        names = {name: value for name, value in FLAT.items() if name != 'temperature'} | own
        return names | dict(task=task), NESTED | dict(task=task, loss=own)
    return FLAT | dict(task=task), NESTED | dict(task=task)


@pytest.mark.parametrize('task', TASKS)
def test_flat_names_groups_and_yaml_are_one_run(task, tmp_path):
    names, nested = given(task)
    (tmp_path / 'run.yaml').write_text(yaml.safe_dump(nested))
    configs = [
        make_config(**names),
        make_config(**nested),
        make_config(spec=tmp_path / 'run.yaml'),
        make_config(**{PATHS.get(name, name): value for name, value in names.items()}),
    ]
    assert all(config == configs[0] for config in configs)
    assert len({plan(config, ON, check=False).run_id for config in configs}) == 1
    changed = make_config(spec=tmp_path / 'run.yaml', epochs=4)
    assert changed.train.epochs == 4, 'what is given replaces what the file says'


@pytest.mark.parametrize('task', TASKS)
def test_a_study_has_the_same_runs_whichever_way_it_is_given(task, tmp_path):
    names, nested = given(task)
    (tmp_path / 'study.yaml').write_text(yaml.safe_dump(nested))
    ids = [
        [p.run_id for p in plan_study(1, arms='full_kd,mixed_kd', check=False, **parameters)]
        for parameters in (names, nested, dict(spec=str(tmp_path / 'study.yaml')))
    ]
    assert ids[0] == ids[1] == ids[2] and len(set(ids[0])) == 2


@pytest.mark.slow
def test_papermill_and_the_command_line_make_the_run_of_python(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    names, nested = given('text_classification')
    expected = plan(make_config(**names), check=False).run_id
    (tmp_path / 'run.yaml').write_text(yaml.safe_dump(nested))
    pairs = [word for name, value in names.items() for word in ('-p', f'{name}={value}')]
    for words in (pairs, ['--spec', str(tmp_path / 'run.yaml')]):
        out = subprocess.run(
            [sys.executable, '-m', 'kdnotes', 'run', '--dry-run', *words], capture_output=True, text=True
        )
        assert expected in out.stdout, out.stderr
    notebook = json.loads((ROOT / 'nbs' / 'run.ipynb').read_text())
    texts = [''.join(c['source']) for c in notebook['cells']]
    last = next(i for i, text in enumerate(texts) if 'planned = plan(config)' in text)
    notebook['cells'] = notebook['cells'][: last + 1]
    (tmp_path / 'short.ipynb').write_text(json.dumps(notebook))
    papermill.execute_notebook(
        tmp_path / 'short.ipynb',
        tmp_path / 'out.ipynb',
        parameters=names,
        cwd=ROOT / 'nbs',
        progress_bar=False,
    )
    assert expected in (tmp_path / 'out.ipynb').read_text()


def test_a_group_that_a_run_does_not_have_is_none():
    runs = {mode: make_config(mode=mode) for mode in MODES}
    for mode, config in runs.items():
        assert (config.loss is not None) == MODES[mode].kd
        assert (config.model.student is not None) == (MODES[mode].network == 'student')
        assert isinstance(config.teacher, RunSpec) == (MODES[mode].network == 'student')
    model = make_config(mode='baseline', teacher='/a/model', teacher_mode='given')
    assert model.train is None and value_of(model, 'epochs') is None
    assert not Where.model_fields.keys() & {
        path.partition('.')[2] for path in PATHS.values() if 'where' not in path
    }


def test_a_teacher_has_any_setting_that_a_run_can_have():
    config = make_config(mode='full_kd', **{'teacher.dropout': 0.2, 'teacher.epochs': 5, 'teacher_seed': 3})
    assert (config.teacher.train.dropout, config.teacher.train.epochs, config.teacher.seed) == (0.2, 5, 3)
    named = dict(corpus='embedded', mode='full_kd')
    with_dropout = plan(make_config(**named, **{'teacher.dropout': 0.2}), ON, check=False)
    assert with_dropout.teacher.config.train.dropout == 0.2
    assert with_dropout.run_id != plan(make_config(**named), ON, check=False).run_id
    alone = plan(make_config(corpus='embedded', mode='baseline', dropout=0.2), ON, check=False)
    assert with_dropout.teacher.run_id == alone.run_id, 'a teacher is a run like any other'
    with pytest.raises(
        ConfigError, match="no parameter 'teacher.epoch'; is it 'teacher_epochs'|teacher.epoch"
    ):
        make_config(mode='full_kd', **{'teacher.epoch': 5})


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('mode', MODES)
def test_flat_names_hold_the_whole_run(task, mode):
    config = make_config(task=task, mode=mode, corpus='embedded')
    assert make_config(**flat(config)) == config
    resolved = plan(config, ON, check=False).config
    assert flat(stored_config(json.loads(json.dumps(flat(resolved))))) == flat(resolved)
    assert flat(with_values(config, **flat(config))) == flat(config)


CONTRADICTIONS = [
    (
        dict(mode='full_student', alpha=0.3),
        "alpha=0.3 needs a teacher, and mode='full_student' learns from none",
    ),
    (dict(mode='baseline', heads=4), "heads=4 is about a student, and mode='baseline' has the network of"),
    (dict(mode='baseline', teacher='/m', teacher_mode='given', epochs=2), 'a given teacher is not trained'),
    (dict(mode='baseline', ranks=2), "ranks=2 contradicts mode='baseline', which runs on 1 rank"),
    (dict(mode='full_kd', precision='mixed'), "precision='mixed' contradicts mode='full_kd'"),
    (dict(mode='full_kd', amp_dtype='bf16'), "amp_dtype='bf16' contradicts mode='full_kd'"),
    (dict(mode='full_kd', hidden_loss='mse'), "hidden_loss='mse' needs signal='online'"),
    (dict(mode='full_kd', hidden_weight=2), 'hidden_weight=2 weighs nothing'),
    (dict(mode='full_kd', hidden_layers=(1,), signal='online'), 'are not looked at; choose a hidden_loss'),
    (dict(mode='full_kd', dialect='modelopt', top_k=1), 'knows no soft targets that are cut off'),
    (dict(mode='full_kd', unlabelled='rest'), "unlabelled='rest' are the training rows that labels=<n>"),
    (dict(mode='full_kd', unlabelled=' '), 'unlabelled is empty'),
    (dict(mode='full_kd', labels_seed=1), 'give labels=<n> too'),
    (dict(mode='full_kd', layers=2, student_layers=(1, 3)), 'both say which layers the student has'),
    (dict(mode='full_kd', pruning_seed=1), 'chooses no heads'),
    (dict(mode='full_kd', student='/a/model'), 'add student_init=hub'),
    (dict(mode='full_kd', student_init='hub'), "student_init='hub' needs student=<hub id or folder>"),
    (dict(mode='full_kd', student_init='transferred'), 'needs transfer=<corpus>'),
    (dict(mode='full_kd', patience=2), 'add keep=best'),
    (dict(mode='full_kd', warmup_steps=3, warmup_fraction=0.1), 'both say how long the learning rate rises'),
    (dict(mode='full_kd', teacher_mode='given'), "teacher_mode='given' needs teacher="),
    (dict(mode='mixed_baseline', teacher='/m', teacher_mode='given'), 'would train it'),
    (
        dict(mode='full_kd', teacher='/m', teacher_mode='given', teacher_epochs=2),
        "changes the teacher's training",
    ),
    (dict(mode='full_kd', teacher_mode='scores'), "needs columns='teacher=<column of the scores>'"),
    (dict(mode='full_kd', teachers='a,b', student_init='teacher_finetuned'), 'start from the layers of one'),
    (
        dict(mode='baseline', teacher_epochs=2),
        "teacher_epochs=2.0 changes the teacher, and mode='baseline' has none",
    ),
    (dict(mode='full_kd', nodes=2), 'needs launcher=torchrun, inherit or ray'),
    (dict(mode='full_kd', launcher='ray'), 'launcher=ray needs rendezvous='),
    (dict(mode='full_kd', launcher='torchrun', nodes=2, rendezvous='here'), 'is no <host>:<port>'),
    (dict(mode='full_kd', task='masked_lm', alpha=0.3), "alpha=0.3 is not read by task='masked_lm'"),
    (dict(mode='full_kd', ranks=0), 'ranks=0 must be between 1 and 1024'),
    (dict(mode='full_kd', data=dict(corpora='x')), "data: there is no parameter 'corpora'; is it 'corpus'?"),
    (dict(mode='full_kd', train=dict(lr=1e-3)), "train: there is no parameter 'lr'"),
    (dict(mode='full_kd', teacher=dict(kind='scores', are='logits')), "needs columns='teacher="),
]


@pytest.mark.parametrize('parameters, sentence', CONTRADICTIONS, ids=lambda value: str(value)[:60])
def test_a_spec_that_contradicts_itself_is_refused_in_a_sentence(parameters, sentence):
    with pytest.raises(ConfigError) as error:
        make_config(**parameters)
    assert sentence in str(error.value) and '\n' not in str(error.value)


YAML = [
    ('train: {epochs: 1}\ntrain: {epochs: 2}\n', "'train' is given twice in the group at line 1"),
    ('train:\n  epochs: 1\n  epochs: 2\n', "'epochs' is given twice in the group at line 2"),
    ('- epochs\n', 'holds no parameters'),
    ('', 'holds no parameters'),
    ('1: 2\n', 'holds no parameters'),
    ('train: {epochs: [}\n', 'cannot be read'),
    ('train: {epochs: many}\n', "epochs='many' is refused"),
    ('model: {student: {depth: 2}}\n', "model.student: there is no parameter 'depth'"),
]


@pytest.mark.parametrize('text, sentence', YAML, ids=lambda value: value[:40].strip() or 'empty')
def test_a_file_that_is_no_spec_is_refused_in_a_sentence(text, sentence, tmp_path):
    (tmp_path / 'run.yaml').write_text(text)
    with pytest.raises(ConfigError) as error:
        make_config(spec=str(tmp_path / 'run.yaml'))
    assert sentence in str(error.value) and '\n' not in str(error.value)
    with pytest.raises(ConfigError, match='cannot be read'):
        read_spec(tmp_path / 'none.yaml')


def test_each_parameter_has_one_place():
    assert len(set(PATHS.values())) == len(PATHS)
    for name, field in parameters().items():
        assert field.default is not None or field.annotation is not None, name
    for name, path in PATHS.items():
        node = RunConfig(model=dict(student={}), loss={}, teacher={})
        for part in path.split('.')[:-1]:
            node = getattr(node, part)
        last = path.rpartition('.')[2]
        of_teacher = FLAT_NAMES[name].group == 'teacher'  # it depends on what the teacher is
        assert of_teacher or last in type(node).model_fields, name
    assert flat_names(dict(loss='file.py:f')) == dict(loss='file.py:f'), 'a loss of your own is no group'
    assert set(unread('baseline', dict(alpha=0.3, layers=2, epochs=1))) == {'alpha', 'layers'}
    assert Loss.model_fields.keys() <= set(PATHS)

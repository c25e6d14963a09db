"""A task of a user: one file that defines TASK trains, is evaluated, reported and asked like any other; its
hash is part of the names of its runs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
import pytest
import kdnotes as kd
from kdnotes.core.config import TASKS, ConfigError, KdnotesError, load_plugin, plugin_id, task_info
from kdnotes.core.parse import make_config
from kdnotes.core.user_code import PLUGIN_FILE
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import records
from kdnotes.tasks.schema import Column, NoLabel, Schema
from small_runs import ON

STARS = (Path(__file__).parent / 'stars.py').read_text()
LINES = 60


@pytest.fixture(autouse=True)
def tasks():
    "What a test has added to the list of tasks is taken out again."
    from kdnotes.core import config

    before = dict(TASKS), dict(config._plugins)
    yield
    for known, now in zip(before, (TASKS, config._plugins)):
        now.clear()
        now.update(known)


@pytest.fixture
def plugin(home) -> Path:
    (home / 'stars.py').write_text(STARS)
    return home / 'stars.py'


def planned(teacher: Path, plugin: Path, mode: str = 'baseline', **more):
    student = dict(student_layers=(1,)) if mode != 'baseline' else {}
    usual = dict(corpus='embedded', max_length=32, threads_per_rank=1, ranks=1, smoke=True, study='stars')
    return plan(make_config(mode=mode, plugin=plugin, teacher=str(teacher), **usual | student | more), ON)


def test_a_task_with_its_schema_and_corpus_fits_in_sixty_lines():
    assert len(STARS.splitlines()) <= LINES


def test_the_tasks_of_kdnotes_are_in_the_same_list():
    assert TASKS['masked_lm'] == 'kdnotes.tasks.masked_lm' and plugin_id('masked_lm') == ''
    assert task_info('masked_lm').name == 'masked_lm'


def test_it_trains_is_told_by_its_hash_and_is_known_without_the_file(home, small_teacher, plugin, rank_here):
    first = planned(small_teacher, plugin, mode='full_kd')
    record = execute(first)
    assert record['task'] == 'stars' and record['metrics']['test'].keys() == {'stars_off', 'accuracy'}
    assert record['settings']['plugin_id'] == plugin_id('stars') == first.config.plugin_id
    assert (RunFolder('stars', first.run_id).path / PLUGIN_FILE).read_text() == STARS
    plugin.write_text(STARS + '\n# changed\n')
    assert planned(small_teacher, plugin, mode='full_kd').run_id != first.run_id
    plugin.write_text(STARS)
    again = planned(small_teacher, plugin, mode='full_kd')
    assert again.run_id == first.run_id
    plugin.unlink()
    env = dict(os.environ, KDNOTES_HOME=str(home / 'home'))
    for command in (['show', first.run_id], ['list', 'stars'], ['predict', first.run_id, '--text', 'superb']):
        ended = subprocess.run(
            [sys.executable, '-m', 'kdnotes', *command], env=env, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        assert ('stars off' in ended.stdout) or command[0] == 'predict' and '5' in ended.stdout


@pytest.mark.exhaustive
def test_a_study_of_all_arms_from_the_command_line(home, small_teacher, plugin):
    "Real processes, two ranks among them; a table, a report and a prediction."
    given = ['--plugin', str(plugin), '--corpus', 'embedded', '--smoke', '--seeds', '1', '--arms', 'all']
    given += ['--teacher', str(small_teacher), '--study', 'mine', '--json']
    given += [
        word
        for p in ('student_layers=1', 'max_length=32', 'ranks=2', 'threads_per_rank=1')
        for word in ('-p', p)
    ]
    ended = subprocess.run([sys.executable, '-m', 'kdnotes', 'study', *given], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert not found['failed']
    made = records('mine-smoke')
    assert {r['settings']['ranks'] for r in made} == {1, 2}
    assert {r['task'] for r in made} == {'stars'} and {r['settings']['plugin_id'] for r in made} == {
        plugin_id('stars')
    }
    assert 'mixed_kd' in {r['mode'] for r in made}


@pytest.mark.slow
def test_python_trains_and_asks_it(home, small_teacher, plugin, rank_here):
    rows = [
        dict(review=f'{word} thing {i}', stars=star)
        for i in range(30)
        for star, word in ((1, 'awful'), (5, 'superb'))
    ]
    data = kd.load_data(rows, plugin=plugin, say=lambda text: None)
    assert data.task == 'stars'
    run = kd.finetune(data, small_teacher, smoke=True, max_length=32, ranks=1, say=lambda text: None)
    assert run.record['task'] == 'stars'
    labels = run.predict('a superb thing').answer.values['labels']
    assert {of['label'] for of in labels} == {'1', '2', '3', '4', '5'}


# text of a file -> what is said of it
WRONG = [
    ('x = 1\n', 'has no TASK; define TASK = '),
    ('TASK = 3\n', 'TASK is a int, not a kdnotes.tasks.base.TaskInfo'),
    ('x = 1\n\nraise OSError("no disk")\n', 'cannot be loaded: OSError: no disk (line 3)'),
    (
        'import nothing_here\n',
        "cannot be loaded: ModuleNotFoundError: No module named 'nothing_here' (line 1)",
    ),
    ('def (:\n', 'cannot be loaded: SyntaxError: '),
    (
        STARS.replace("name='stars',\n", "name='masked_lm',\n"),
        "there is a task 'masked_lm' already, of kdnotes.tasks",
    ),
    (STARS.replace("name='stars',\n", "name='my stars',\n"), "the name 'my stars' is refused"),
    (
        STARS.replace('max(', 'max(').replace("name='stars',\n", "name='Stars',\n"),
        "the name 'Stars' is refused",
    ),
]


@pytest.mark.parametrize('text, sentence', WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_file_that_is_no_task_is_one_sentence(home, text, sentence):
    (home / 'mine.py').write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        load_plugin(home / 'mine.py')
    assert 'plugin=' in str(error.value) and '\n' not in str(error.value)


def test_a_name_that_another_file_has_a_missing_file_and_a_setting_of_every_run_are_refused(home, plugin):
    load_plugin(plugin)
    other = home / 'other.py'
    other.write_text(STARS + '\n# another one\n')
    with pytest.raises(ConfigError, match=f"there is a task 'stars' already, of {plugin}"):
        load_plugin(other)
    with pytest.raises(ConfigError, match='there is no such file'):
        load_plugin(home / 'none.py')
    own = "\n\nclass Own(TaskSettings):\n    seed: int = 1\n"
    text = STARS.replace("\nSTARS = ", f'\nfrom kdnotes.core.spec import TaskSettings{own}\n\nSTARS = ')
    other.write_text(text.replace("name='stars',\n", "name='more_stars',\n    settings=Own,\n"))
    with pytest.raises(ConfigError, match='has a setting seed, which is a parameter of every run'):
        make_config(plugin=str(other))
    with pytest.raises(ConfigError, match="there is no task 'suns'.*plugin=<file.py>"):
        task_info('suns')


def test_a_rank_refuses_another_source_than_was_planned(home, small_teacher, plugin, rank_here):
    "A rank is a process of its own, which knows no plugin before it loads the copy in the run's folder."
    from kdnotes.core import config

    its_plan = planned(small_teacher, plugin)
    changed = its_plan.code | {PLUGIN_FILE: STARS.replace('stars off', 'stars wrong')}
    object.__setattr__(its_plan, 'code', changed)
    del config._plugins['stars'], TASKS['stars']
    with pytest.raises(KdnotesError, match='the source of task=stars changed since the run was planned'):
        execute(its_plan)


def test_an_entry_point_is_a_task_like_the_others(home):
    "A package that is installed, as pip leaves it; one whose name is taken is left out with a warning."
    site = home / 'site'
    info = site / 'stars_task-1.dist-info'
    info.mkdir(parents=True)
    (site / 'stars_task.py').write_text(STARS)
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: stars-task\nVersion: 1\n')
    (info / 'entry_points.txt').write_text('[kdnotes.tasks]\nstars = stars_task\nmasked_lm = stars_task\n')
    code = (
        'import warnings\n'
        'with warnings.catch_warnings(record=True) as w:\n'
        '    warnings.simplefilter("always")\n'
        '    from kdnotes.core.config import TASKS, plugin_id, task_info\n'
        'print(task_info("stars").name, len(plugin_id("stars")), TASKS["masked_lm"])\n'
        'print(*(str(x.message) for x in w))'
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get('PYTHONPATH')]))
    env = dict(os.environ, PYTHONPATH=path)
    ended = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True)
    known, warned = ended.stdout.splitlines()
    assert known == 'stars 12 kdnotes.tasks.masked_lm'
    assert warned.startswith("the task 'masked_lm' of stars_task is refused")


def test_a_schema_whose_label_is_no_column_is_refused():
    with pytest.raises(ConfigError, match="names the column 'label', and its columns are text; name those"):
        Schema({'text': Column('text')}, content=('text',), no_label=NoLabel()).for_split('unlabelled')

"""An option is taken for no other: what a command does not have is refused in a sentence that names the
nearest, and so is a value that an option cannot have.
"""

import sys
import pytest
from kdnotes.core.config import ConfigError
from kdnotes.core.given import make_config

from kdnotes import cli
from bench import gpu_check

# what is typed, and what the one sentence must hold
WRONG = [
    ('study --seed 3', '`kdnotes study` has no option --seed; is it --seeds?'),
    ('study --seed=3 -p epochs=1', 'no option --seed; is it --seeds?'),
    ('tune --trial 2', '`kdnotes tune` has no option --trial; is it --trials?'),
    ('gpu-check --smok --device cpu', '`kdnotes gpu-check` has no option --smok; is it --smoke?'),
    (
        'name --xyzzy',
        '--arms, --corpus, --grid, --help, --json, --search, --seeds, --smoke, --study, --task, -p',
    ),
    ('study 3', "does not take '3'; `kdnotes study --help` says what it takes"),
    ('study --learning-rate 1e-4', 'as a parameter of the run: write -p learning_rate=<value>'),
    ('study --lr 1e-4', 'learning_rate is a parameter of the run: write -p learning_rate=<value>'),
    ('study -p lr=1e-4', "there is no parameter 'lr'; is it 'learning_rate'?"),
    ('study -p bs=8', "there is no parameter 'bs'; is it 'batch_size'?"),
    ('study --seeds 1 --seeds 2', '--seeds is given twice; `kdnotes study` takes it once'),
    (
        'study --corpus wikiqa -p corpus=embedded',
        'with --corpus wikiqa and with -p corpus=embedded; leave one',
    ),
    ('study -p jobs=2', 'jobs is no parameter of a run; write --jobs 2 instead of -p jobs=2'),
    ('tune -p mode=full_kd', 'write --mode full_kd instead of -p mode=full_kd'),
    ('run --seed 1 -p seed=2', 'seed is given twice, with --seed 1 and with -p seed=2; leave one out'),
    ('run --seed 1,2', "argument --seed: '1,2' must be a whole number, at least 0; `kdnotes run --help`"),
    ('score a b --by page', "argument --by: 'page' is not one of 'block', 'line'; `kdnotes score --help`"),
    ('--xyzzy', '`kdnotes` has no option --xyzzy; its options are --help, --install-completion, '),
    ('stduy', "there is no command 'stduy'; is it study?"),
    ('show full_kd-s0-0123456789ab', "there is no run 'full_kd-s0-0123456789ab'; `kdnotes list` names those"),
    ('list mine', "there is no study 'mine'; there is none yet: `kdnotes study` makes one"),
    ('study --seeds', "option '--seeds' requires an argument; `kdnotes study --help` says what it takes"),
    ('', 'missing command; `kdnotes --help` says what it takes'),
    ('tune --target=number', 'takes target as a parameter of the run: write -p target=number'),
    ('study corpus=wikiqa', '`kdnotes study` takes corpus as a parameter of the run: write --corpus wikiqa'),
    ('study --mode full_kd', '`kdnotes study` has no option --mode; its options are --arms, --columns, '),
    ('doctor --timeout nan', "argument --timeout: 'nan' must be a number, at least 1"),
    ('forget mine', 'the following arguments are required: RUN_ID; `kdnotes forget --help`'),
]


def exit_code(main, typed: str) -> int:
    "Of a command, whose parser may end it."
    try:
        return main(typed.split())
    except SystemExit as e:
        return e.code


@pytest.mark.parametrize('typed, refused', WRONG, ids=[typed for typed, _ in WRONG])
def test_what_a_command_does_not_take_is_refused_in_one_sentence(
    typed, refused, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    assert exit_code(cli.main, typed) == 2
    said = capsys.readouterr().err
    assert said.startswith('kdnotes: ') and refused in said and said.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'typed', ['--smok --device cpu', '--steps 9', '--minutes 0', '--alternations one', '--device tpu']
)
def test_the_check_of_a_gpu_machine_says_in_one_line_what_is_wrong(typed, capsys):
    assert exit_code(gpu_check.main, typed) == 2
    said = capsys.readouterr().err
    assert said.startswith('kdnotes: ') and typed.split()[0] in said and said.count('\n') == 1


@pytest.mark.parametrize('command', ['bench', 'scaling', 'gpu-check'])
def test_what_measures_kdnotes_itself_needs_a_clone(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'bench', None)  # as where a package is installed
    for name in [name for name in sys.modules if name.startswith('bench.')]:
        monkeypatch.delitem(sys.modules, name)
    assert exit_code(cli.main, command) == 2
    said = capsys.readouterr().err
    assert said.startswith('kdnotes: ') and 'clone' in said and said.count('\n') == 1


@pytest.mark.parametrize('command', cli.COMMANDS, ids=lambda c: c.name)
def test_help_fits_a_screen_and_says_typed_values(command, capsys):
    assert exit_code(cli.main, f'{command.name} --help') == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and not any('None' in line for line in lines)
    assert lines[:2] == ['examples:', f'  kdnotes {command.run.examples[0]}']


def test_parameters_say_which_defaults_are_a_tasks_own(capsys):
    assert cli.main(['parameters']) == 0
    said = ' '.join(capsys.readouterr().out.split())
    assert 'its own defaults: max_length=384' in said.partition('task=extractive_qa alone:')[2]


@pytest.mark.parametrize('typed', ['name', 'name -p corpus=embedded', 'name -pcorpus=embedded'])
def test_what_a_command_has_is_taken(typed, capsys):
    assert cli.main(typed.split()) == 0 and capsys.readouterr().out == 'embedded\n'


def test_a_task_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match='is refused: the tasks are'):
        make_config(task=['answer_selection'])

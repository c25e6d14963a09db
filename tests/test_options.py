"""What a command does not take is an error of one line, in the words of Typer or pydantic, with the name of
the option or parameter; nothing is done.
"""

import json
import sys
import pytest
import typer
from kdnotes import cli
from kdnotes.api import load_data
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.experiment.plan import plan
from bench import gpu_check

COMMANDS = typer.main.get_command(cli.make_app()).commands

# what is typed, and a part of the message
WRONG = [
    ('study --seed 3', 'No such option: --seed (Possible options: --seeds, '),
    ('study --xyzzy', 'No such option: --xyzzy'),
    ('study --learning-rate 1e-4', 'parameters of a run are given as -p name=value'),
    ('study 3', 'unexpected extra argument(s) (3)'),
    ('study corpus=wikiqa', 'unexpected extra argument(s) (corpus=wikiqa)'),
    ('stduy', "No such command 'stduy'. Did you mean 'study'?"),
    ('', 'Missing command'),
    ('study --seeds', "Option '--seeds' requires an argument"),
    ('forget mine', "Missing argument 'RUN_ID'"),
    ('study --seeds 0', "'--seeds': Input should be greater than or equal to 1"),
    ('study --seeds 1e400', "'--seeds': Input should be a valid integer"),
    ('run --seed 1,2', "'--seed': Input should be a valid integer"),
    ('run --seed 99999999999999999999', "seed='99999999999999999999' is refused: input should be less than"),
    ('doctor --timeout nan', "'--timeout': Input should be greater than or equal to 1"),
    ('score a b --by page', "'--by': Value error, 'page' is not one of 'block', 'line'"),
    ('run -p alpha=2', "alpha='2' is refused: input should be less than or equal to 1"),
    ('run -p seed', "-p 'seed': expected name=value"),
    ('study -p lr=1e-4', "there is no parameter 'lr'; is it 'learning_rate'?"),
    ('study -p jobs=2', "there is no parameter 'jobs'"),
    ('tune -p mode=full_kd', 'mode is an option of this command: --mode'),
    ('study -p mode=full_kd', 'mode cannot be given to a whole study'),
    ('study --corpus wikiqa -p corpus=embedded', 'corpus has two values: --corpus wikiqa and -p '),
    ('show full_kd-s0-0123456789ab', "there is no run 'full_kd-s0-0123456789ab'"),
    ('list mine', "there is no study 'mine'"),
    ('predict x --out a.csv', "'--out': is for the rows of --file"),
    ('predict x --file a.csv', '--out: the output table of --file is missing'),
    ('hardware', "'--run' / '--measured': give one of them"),
]  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


@pytest.mark.parametrize('typed, message', WRONG, ids=[typed for typed, _ in WRONG])
def test_an_error_is_one_line_and_nothing_is_done(typed, message, capsys, home):
    assert cli.main(typed.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('kdnotes: ') and message in error and error.count('\n') == 1
    assert list(home.iterdir()) == []


@pytest.mark.parametrize('name', ["it's", 'a "b" c', '$(touch bad)', 'a;b', '-'])
def test_a_corpus_with_quotes_is_a_name(name, capsys, home):
    assert cli.main(['name', '--corpus', name]) == 2
    assert 'there is no corpus' in capsys.readouterr().err and list(home.iterdir()) == []


def test_the_last_of_two_equal_options_is_used(capsys):
    assert cli.main(['name', '--study', 'one', '--study', 'two']) == 0
    assert capsys.readouterr().out == 'two\n'


def test_several_words_after_grid_are_its_values(home, capsys):
    typed = 'study --arms full_kd --seeds 1 --dry-run --json --corpus embedded --grid alpha=.3,.5'
    assert cli.main([*typed.split(), 'temperature=2,4', '--smoke']) == 0
    assert capsys.readouterr().out.count('"run_id": "full_kd') == 4


@pytest.mark.parametrize(
    'typed', ['--smok --device cpu', '--steps 9', '--minutes 0', '--alternations one', '--device tpu']
)
def test_the_check_of_a_gpu_machine_has_the_same_errors(typed, capsys):
    assert gpu_check.main(typed.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('kdnotes: ') and typed.split()[0] in error and error.count('\n') == 1


@pytest.mark.parametrize('command', ['bench', 'scaling', 'gpu-check'])
def test_what_measures_kdnotes_itself_needs_a_clone(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'bench', None)  # as where a package is installed
    for name in [name for name in sys.modules if name.startswith('bench.')]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert error.startswith('kdnotes: ') and 'clone' in error and error.count('\n') == 1


@pytest.mark.parametrize('name', COMMANDS)
def test_help_fits_a_screen_and_has_examples_and_json(name, capsys):
    assert cli.main([name, '--help']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and not any('None' in line for line in lines)
    assert any(line.startswith(f'    kdnotes {name}') for line in lines)
    assert any(line.split()[:1] == ['--json'] for line in lines)


def test_parameters_show_the_defaults_of_a_task(capsys):
    assert cli.main(['parameters']) == 0
    assert 'task=extractive_qa alone, with other defaults: max_length=384' in capsys.readouterr().out


@pytest.mark.parametrize('typed', ['name', 'name -p corpus=embedded', 'name -pcorpus=embedded'])
def test_what_a_command_has_is_taken(typed, capsys):
    assert cli.main(typed.split()) == 0 and capsys.readouterr().out == 'embedded\n'


def test_a_task_that_is_no_text_is_an_error():
    with pytest.raises(ConfigError, match='is refused: the tasks are'):
        make_config(task=['answer_selection'])


# ---- variables of make, which Typer reads from the environment ----


def test_variables_of_make_are_options(home, capsys, monkeypatch):
    for name, value in dict(
        CORPUS='embedded', SEEDS='1', ARMS='full_kd', GRID='alpha=.3,.5 temperature=2,4'
    ).items():
        monkeypatch.setenv(f'KDNOTES_MAKE_{name}', value)
    monkeypatch.setenv('KDNOTES_MAKE_P', 'max_length=64 epochs=1')
    monkeypatch.setenv('KDNOTES_MAKE_SMOKE', '1')
    assert cli.main(['study', '--dry-run', '--json']) == 0
    assert capsys.readouterr().out.count('"run_id": "full_kd') == 4
    monkeypatch.setenv('KDNOTES_MAKE_EPOCHS', '3')
    assert cli.main(['study', '--dry-run']) == 2
    assert '`make study` has no variable EPOCHS; use P=epochs=...' in capsys.readouterr().err


def test_a_corpus_of_one_file_is_split_as_in_python(home, capsys):
    rows = [f'a film of kind {i},{i % 2}' for i in range(40)]
    (home / 'films.csv').write_text('\n'.join(['review,stars', *rows]) + '\n')
    typed = ['--task', 'text_classification', '--corpus', str(home / 'films.csv'), '--dry-run', '--json']
    assert cli.main(['run', *typed, '--columns', 'text=review,label=stars']) == 0
    printed = capsys.readouterr()
    assert '32 for train, 4 for dev, 4 for test' in printed.err
    data = load_data(
        home / 'films.csv', 'text_classification', dict(text='review', label='stars'), say=lambda line: None
    )
    config = make_config(mode='mixed_kd', task=data.task, corpus=data.corpus)
    assert json.loads(printed.out)['runs'][-1]['run_id'] == plan(config, check=False).run_id
    # a table that says which row is of which split
    splits = ['train'] * 20 + ['dev'] * 10 + ['test'] * 5 + ['unlabelled'] * 5
    lines = [
        f'{row.rpartition(",")[0]},{"" if split == "unlabelled" else i % 2},{split}'
        for i, (row, split) in enumerate(zip(rows, splits))
    ]
    (home / 'films.csv').write_text('\n'.join(['text,label,split', *lines]) + '\n')
    assert cli.main(['run', *typed]) == 0
    split = load_data(home / 'films.csv', 'text_classification')
    config = make_config(mode='mixed_kd', task=data.task, corpus=split.corpus, unlabelled=split.unlabelled)
    assert json.loads(capsys.readouterr().out)['runs'][-1]['run_id'] == plan(config, check=False).run_id
    (home / 'book.txt').write_text('a text')
    assert cli.main(['run', '--corpus', str(home / 'book.txt'), '--dry-run']) == 2
    assert 'book.txt is no table; give a file that ends in .tsv, .csv' in capsys.readouterr().err


def test_text_from_make_means_itself(home, capsys, monkeypatch):
    monkeypatch.setenv('KDNOTES_MAKE_CORPUS', 'a \'b\' "$(touch bad)" c')
    assert cli.main(['study', '--dry-run']) == 2
    assert '"$(touch bad)" c' in capsys.readouterr().err.replace('\\', '')

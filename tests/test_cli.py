"""The command line: what programs read of it, what a shell completes, what it shares with the notebooks and
the Makefile, and the commands that look at runs and tidy up.
"""

import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
import numpy as np
import pytest
import typer
from handmade import make_record, write_run
from notebooks import ROOT, surroundings
from kdnotes import cli
from kdnotes.results.overview import list_runs
from kdnotes.cli import EXIT_CODES
from kdnotes.core import processes
from kdnotes.core.arms import USUAL
from kdnotes.core.cached import cached
from kdnotes.experiment.study_plan import finished_runs
from kdnotes.core.config import KdnotesError
from kdnotes.core.spec import parameters
from kdnotes.core.notebook_parameters import NamesBefore, parameters_from
from kdnotes.core.files import cache_path
from kdnotes.experiment.clean import leftovers
from kdnotes.results.runs import RunFolder

COMMANDS = typer.main.get_command(cli.make_app()).commands


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    return tmp_path


def write_study(study='made', seeds=(0, 1)):
    "A study of made-up runs; their folders."
    made = []
    for i, mode in enumerate(USUAL):
        for seed in seeds:
            made.append(
                write_run(make_record(mode, seed, 0.8 - 0.02 * i + 0.003 * seed, 40 / (i + 1), study=study))
            )
    return made


def as_json(capsys, *typed):
    "What a command prints with --json, which is JSON alone."
    assert cli.main([*typed, '--json']) == 0
    return json.loads(capsys.readouterr().out)


# ---- what programs read ----


@pytest.mark.exhaustive
def test_json_of_what_looks_at_runs(home, capsys):
    [first, *_] = write_study()
    runs = as_json(capsys, 'list', 'made')['runs']
    assert len(runs) == 8 and {run['mode'] for run in runs} == set(USUAL)
    assert as_json(capsys, 'list')['runs'] == runs
    assert as_json(capsys, 'show', first.run_id) == first.record()
    compared = as_json(capsys, 'compare', 'made')
    assert len(compared['headline']) == 3 and set(compared['arms']) == set(USUAL)
    pairs = {(c['a'], c['b']) for c in compared['comparisons'] if c['kind'] not in ('teacher', 'labels')}
    assert pairs and len(compared['sentences']) == len(pairs)
    written = as_json(capsys, 'report', 'made', '--no-pdf')
    assert Path(written['html']).is_file() and written['headline'] == compared['headline']
    assert as_json(capsys, 'evidence', 'made')['runs'] == sorted(run['run_id'] for run in runs)
    assert as_json(capsys, 'forget', 'made', first.run_id)['forgotten'] == [first.run_id]
    assert len(as_json(capsys, 'list')['runs']) == 7


def test_mode_and_seed_may_be_given_as_any_parameter(home, capsys):
    same = [
        as_json(capsys, 'run', '--dry-run', '-p', 'corpus=embedded', *given)['runs'][-1]['run_id']
        for given in (['-p', 'mode=full_kd', '-p', 'seed=3'], ['--mode', 'full_kd', '--seed', '3'])
    ]
    assert same[0] == same[1] and same[0].startswith('full_kd-s3-')
    both = ['--mode', 'full_kd', '-p', 'mode=full_kd']
    assert as_json(capsys, 'run', '--dry-run', '-p', 'corpus=embedded', *both)['runs'][-1]['seed'] == 0
    assert cli.main(['run', '--mode', 'full_kd', '-p', 'mode=mixed_kd']) == 2
    assert 'mode has two values: --mode full_kd and -p mode=mixed_kd' in capsys.readouterr().err


def test_json_of_what_needs_no_run(home, capsys):
    assert as_json(capsys, 'name', '--smoke') == dict(study='embedded-smoke', corpus='embedded')
    assert {p['name'] for p in as_json(capsys, 'parameters')} == set(parameters())
    assert {p['name'] for p in as_json(capsys, 'parameters', '--task', 'masked_lm')} == set(
        parameters('masked_lm')
    )
    assert as_json(capsys, 'clean', '--dry-run') == dict(found=[], removed=[])


@pytest.mark.slow
def test_json_of_what_uses_a_model(small_run, tmp_path, capsys):
    run_id = small_run('answer_selection')
    asked = ['--question', 'what is gold?', '--candidate', 'a metal', '--candidate', 'a bird']
    assert as_json(capsys, 'predict', run_id, *asked)['task'] == 'answer_selection'
    assert as_json(capsys, 'export', run_id, '--to', str(tmp_path / 'out'))['run_id'] == run_id
    assert as_json(capsys, 'show', run_id)['run_id'] == run_id


def small_options(home, study):
    "What makes a run of a blink, of the model of `small_run`."
    given = dict(teacher=home / 'teacher', max_length=64, ranks=1, threads_per_rank=1)
    return ['--smoke', '--study', study, *(x for k, v in given.items() for x in ('-p', f'{k}={v}'))]


@pytest.mark.slow
def test_json_of_what_trains_and_of_its_plan(small_run, small_home, rank_here, capsys):
    small_run('answer_selection')
    given = small_options(small_home, 'json')
    typed = ['run', '--mode', 'parallel_baseline', '--corpus', 'embedded', *given]
    planned = as_json(capsys, *typed, '--dry-run')
    assert [run['state'] for run in planned['runs']] == ['pending'] and planned['to_make'] == 1
    assert not (small_home / 'runs' / 'json').exists()
    made = as_json(capsys, *typed)
    assert made['run_id'] == planned['runs'][0]['run_id'] and made['mode'] == 'parallel_baseline'
    again = as_json(capsys, *typed, '--dry-run')
    assert again['runs'][0]['state'] == 'done' and again['seconds'] == 0
    assert cli.main(typed) == 0
    assert f'Details: kdnotes show {made["run_id"]}' in capsys.readouterr().out
    # another seed of the same takes as long as the runs that are like it
    like = as_json(capsys, *typed, '--seed', '1', '--dry-run')
    took = [record['time']['wall_s'] for record in finished_runs()]
    assert min(took) <= like['seconds'] <= max(took)
    study = ['study', '--arms', 'parallel_baseline', '--seeds', '1', *given]
    found = as_json(capsys, *study)
    assert len(found['runs']) == 1
    assert Path(found['files']['table']).is_file() and found['failed'] == {}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_json_of_a_search(small_run, small_home, rank_here, capsys):
    small_run('answer_selection')
    given = small_options(small_home, 'searched')
    found = as_json(
        capsys, 'tune', '--mode', 'parallel_baseline', '--trials', '1', '--corpus', 'embedded', *given
    )
    [trial] = found['trials']
    assert found['arm'] == 'parallel_baseline' and found['tuned'] == []
    assert all(trial[name] == value for name, value in found['chosen'].items())


def test_a_refusal_leaves_standard_output_empty(home, capsys):
    write_study('mine')
    refused = {
        'show nobody': 'there is no run',
        'list mien': 'is it mine?',
        'compare nothing': 'there are mine',
        'evidence nothing': 'there is no study',
        'study --arms x': 'no mode',
        'push full_kd-s0-0123456789ab me/mine': 'nothing was sent',
    }
    for command, why in refused.items():
        assert cli.main([*command.split(), '--json']) != 0
        said = capsys.readouterr()
        assert said.out == '' and said.err.startswith('kdnotes: ') and said.err.count('\n') == 1, command
        assert why in said.err, command


# ---- lists, one run, comparisons ----


def test_a_list_says_how_far_each_run_is_and_survives_a_damaged_one(home, capsys):
    [first, second, *_] = write_study()
    (second.path / 'record.json').write_text('{}')
    begun = RunFolder('made', 'full_kd-s7-0123456789ab').create()
    begun.write_state('running')
    state = json.loads((begun.path / 'state.json').read_text())
    dead = subprocess.Popen([sys.executable, '-c', ''])
    dead.wait()
    (begun.path / 'state.json').write_text(json.dumps(state | dict(pid=dead.pid)))
    states = {line.run_id: line.state for line in list_runs()}
    assert states[first.run_id] == 'done, without weights'
    assert states[second.run_id] == 'damaged' and states[begun.run_id] == 'interrupted'
    assert cli.main(['list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 9 and lines[0].split() == 'study run mode seed result when state'.split()
    assert cli.main(['show', begun.run_id]) == 0
    assert 'unfinished run' in capsys.readouterr().out
    assert cli.main(['show', second.run_id]) == 1


@pytest.mark.parametrize('torn', ['state.json', 'record.json'])
def test_a_torn_file_of_one_study_stops_no_other(home, capsys, torn):
    [first, second] = write_study(seeds=(0,))[:2]
    (first.path / torn).write_text('{"status": "don')
    assert first.run_id not in {record['run_id'] for record in finished_runs()}
    assert second.run_id in {record['run_id'] for record in finished_runs()}
    assert cli.main(['study', '--seeds', '1', '--corpus', 'embedded', '--study', 'other', '--dry-run']) == 0
    assert cli.main(['list']) == 0
    assert 'damaged' in capsys.readouterr().out
    assert cli.main(['show', first.run_id]) == 1  # who needs this run is told
    [line] = capsys.readouterr().err.splitlines()
    assert str(first.path / torn) in line and 'is not valid JSON' in line


def test_a_smoke_study_is_found_by_the_name_it_was_given(home, capsys):
    "`kdnotes study --study mine --smoke` makes mine-smoke, unless there is a mine."
    write_study('smoke-smoke', (0,))
    assert cli.main(['report', 'smoke', '--no-pdf']) == 0
    assert 'smoke-smoke/report.html' in capsys.readouterr().out
    assert as_json(capsys, 'list', 'smoke')['runs'] == as_json(capsys, 'list', 'smoke-smoke')['runs']
    write_study('smoke', (1,))
    assert {run['seed'] for run in as_json(capsys, 'list', 'smoke')['runs']} == {1}


def test_nothing_that_is_listed_commands_a_terminal(home, capsys):
    [first] = write_study('made', (0,))[:1]
    shutil.copytree(first.path, home / 'runs' / 'made\x1b]0;yours\x07\x1b[2J' / first.run_id)
    for command in (['list'], ['list', '--json'], ['list', 'mine\x9b2J'], ['compare', 'made\x1b[2J', 'made']):
        cli.main(command)
        printed = ''.join(capsys.readouterr())
        assert printed.replace('\n', '').isprintable() and printed.count('\\'), command


def test_a_list_tells_of_evidence_and_names_its_runs(home, capsys):
    kept = write_study('mine')
    assert cli.main(['evidence', 'mine']) == 0
    for folder in kept:
        shutil.rmtree(folder.path)
    capsys.readouterr()
    assert cli.main(['list']) == 0
    said = capsys.readouterr().out
    assert 'no runs yet' in said and 'kept as evidence, without weights: mine. `kdnotes list STUDY`' in said
    assert cli.main(['list', 'mine']) == 0
    said = capsys.readouterr().out
    assert all(folder.run_id in said for folder in kept) and said.count(' evidence') == len(kept)
    assert {run['state'] for run in as_json(capsys, 'list', 'mine')['runs']} == {'evidence'}


def test_runs_of_several_studies_are_compared(home, capsys):
    runs = [folder.run_id for folder in write_study()]
    chosen = [run for run in runs if run.startswith(('baseline', 'full_kd'))]
    assert set(as_json(capsys, 'compare', *chosen)['arms']) == {'baseline', 'full_kd'}
    RunFolder('made', 'full_kd-s7-0123456789ab').create().write_state('failed')
    assert cli.main(['compare', 'made', 'full_kd-s7-0123456789ab']) == 2
    assert 'is not done, so there is nothing to compare' in capsys.readouterr().err


# ---- tidying up ----


def signal(corpus_sha256, name):
    folder = cache_path() / 'signals' / name
    folder.mkdir(parents=True)
    (folder / 'meta.json').write_text(
        json.dumps(dict(key_parts=dict(corpus_sha256=corpus_sha256, config_sha256='f')))
    )
    (folder / 'logits').write_bytes(bytes(2**20))
    return folder


def test_clean_removes_what_no_run_needs_and_says_how_much(home, capsys):
    [done, *_] = write_study()
    kept = {p for p in home.rglob('*') if p.is_file()}
    (done.path / 'checkpoints' / 'step-000040').mkdir(parents=True)
    (done.path / 'checkpoints' / 'step-000040' / 'model.safetensors').write_bytes(bytes(2**20))
    begun = RunFolder('made', 'full_kd-s7-0123456789ab').create()
    begun.write_config(dict(corpus_sha256='wanted'))
    (begun.path / 'checkpoints' / 'step-000010').mkdir(parents=True)
    wanted = signal('wanted', 'a')
    idle = signal('other', 'b')
    data = cache_path() / 'data' / 'mine' / 'train.jsonl'
    data.parent.mkdir(parents=True)
    data.write_text('{}')
    assert cli.main(['clean', '--dry-run']) == 0
    assert capsys.readouterr().out.endswith('2.0 MiB would be removed.\n')
    assert idle.is_dir() and len(leftovers()) == 2
    assert cli.main(['clean']) == 2, 'nobody is there to say yes'
    assert 'add --yes' in capsys.readouterr().err and idle.is_dir()
    assert cli.main(['clean', '--yes']) == 0
    assert 'Removed 2.0 MiB of 2.0 MiB.' in capsys.readouterr().out
    assert not idle.exists() and not (done.path / 'checkpoints').exists()
    assert wanted.is_dir() and (begun.path / 'checkpoints' / 'step-000010').is_dir() and data.is_file()
    assert kept <= {p for p in home.rglob('*') if p.is_file()}
    assert cli.main(['clean', '--yes']) == 0
    assert capsys.readouterr().out == 'There are no checkpoints or caches to remove.\n'
    # a run whose config is torn may want any corpus: nothing of theirs goes, and cleaning goes on
    (begun.path / 'config.json').write_text('{')
    later = signal('other', 'c')
    assert cli.main(['clean', '--yes']) == 0 and later.is_dir()


def test_verify_names_what_has_changed(home, capsys):
    [done, *others] = write_study()
    folder = cache_path() / 'tokens' / 'a.tokens'
    cached(folder, lambda writer: writer.add(dict(values=np.arange(1000))))
    assert cli.main(['verify']) == 0
    n = len(others) + 1
    assert (
        capsys.readouterr().out == f'Read 1 cached folders and {n} finished runs; all are what was written.\n'
    )
    for path in (folder / 'values', done.path / 'predictions.csv.gz'):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert cli.main(['verify']) == 1
    out = capsys.readouterr().out
    assert str(folder) in out and str(done.path) in out and out.endswith('; 2 changed.\n')
    assert cli.main(['verify', '--json']) == 1
    changed = json.loads(capsys.readouterr().out)['changed']
    assert [(one['kind'], one['path']) for one in changed] == [
        ('cache', str(folder)),
        ('run', str(done.path)),
    ]


# ---- the same as the other doors ----


def notebook_defaults(name):
    "The parameters of a notebook and their values."
    cells = json.loads((ROOT / 'nbs' / f'{name}.ipynb').read_text())['cells']
    [source] = [''.join(c['source']) for c in cells if 'parameters' in c['metadata'].get('tags', [])]
    declared = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: ast.literal_eval(node.value) for node in declared}


@pytest.mark.parametrize('name', ['study', 'tune', 'bench', 'run'])
def test_a_command_has_the_defaults_of_its_notebook(name):
    theirs = notebook_defaults(name)
    ours = {p.name: p.default for p in COMMANDS[name].params}
    for option in (
        'seeds',
        'arms',
        'jobs',
        'mode',
        'trials',
        'seed',
        'contestants',
        'alternations',
        'steps',
        'dtype',
    ):
        if option in ours or option in theirs and option not in parameters():
            default = ours[option]
            if default is None and option in parameters():
                default = parameters()[option].default  # it is left to the run
            assert default == theirs[option], option


@pytest.mark.parametrize('name', ['study', 'tune'])
def test_a_notebook_and_its_command_have_the_same_corpus(name, home, capsys):
    assert notebook_defaults(name)['corpus'] == as_json(capsys, 'name')['corpus'] == 'embedded'


def test_a_notebook_refuses_in_the_same_words(home, capsys):
    with pytest.raises(KdnotesError) as refused:
        parameters_from(NamesBefore({}), dict(lr=1e-4))
    assert cli.main(['study', '-p', 'lr=1e-4']) == 2
    assert capsys.readouterr().err == f'kdnotes: {refused.value}\n'


@pytest.mark.parametrize(
    'command', ['show *', 'show [!.]*', 'evidence nope', 'report nope', 'report ..', 'compare a* b*']
)
def test_a_name_that_nobody_has_is_refused_and_no_pattern(home, capsys, command):
    write_run(make_record('baseline', 0, study='there'))
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err.startswith('kdnotes: there is no ')


def test_a_link_among_checkpoints_and_caches_stays(home, capsys):
    done = write_run(make_record('baseline', 0, study='there'))
    elsewhere = home / 'elsewhere'
    elsewhere.mkdir()
    (elsewhere / 'kept').write_text('kept')
    (done.path / 'checkpoints').symlink_to(elsewhere)
    signals = cache_path() / 'signals'
    signals.mkdir(parents=True)
    (signals / 'linked').symlink_to(elsewhere)
    (signals / 'note.txt').write_text('a file')
    assert leftovers() == [] and cli.main(['clean', '--yes']) == 0
    assert (elsewhere / 'kept').is_file() and (done.path / 'checkpoints').is_symlink()


def test_every_exit_code_is_in_the_table(capsys):
    def kinds(of):
        return {of, *(kind for sub in of.__subclasses__() for kind in kinds(sub))}

    assert {kind.exit_code for kind in kinds(KdnotesError)} <= set(EXIT_CODES)
    assert processes.EXIT_STOPPED in EXIT_CODES
    assert cli.main(['--help']) == 0
    said = capsys.readouterr().out
    assert all(f'{code:>2}  {meaning}' in said for code, meaning in EXIT_CODES.items())


# ---- as a process ----


def typed(home, *words, module='kdnotes', wait_s=120, **more):
    return subprocess.run(
        [sys.executable, '-m', module, *words],
        cwd=home,
        env=surroundings(home, **more),
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=wait_s,
    )


@pytest.mark.parametrize('module', ['kdnotes', 'kdnotes.cli'])
def test_it_is_a_module_too(home, module):
    done = typed(home, 'stduy', module=module)
    assert done.returncode == 2 and done.stderr == "kdnotes: No such command 'stduy'. Did you mean 'study'?\n"


def test_help_loads_no_heavy_package(home):
    code = (
        "import sys; from kdnotes.cli import main; main(['--help']); main(['study', '--help']); "
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib', 'seaborn', 'scipy'} & set(sys.modules); "
        'assert not heavy, heavy'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, env=surroundings(home)
    )
    assert done.returncode == 0, done.stderr


def completed(monkeypatch, capsys, words):
    "What a shell offers after these words: its script calls `kdnotes` with these variables."
    monkeypatch.setenv('_KDNOTES_COMPLETE', 'complete_bash')
    monkeypatch.setenv('COMP_WORDS', words)
    monkeypatch.setenv('COMP_CWORD', str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        cli.main([])
    return capsys.readouterr().out.split()


def test_bash_completes(home, monkeypatch, capsys):
    [first, *_] = write_study('mine')
    for words, expected in {
        'kdnotes pa': 'parameters',
        'kdnotes study --tr': '--transfer',
        'kdnotes study --arms baseline,full_k': 'baseline,full_kd',
        'kdnotes study -p learn': 'learning_rate=',
        f'kdnotes show {first.run_id[:-4]}': first.run_id,
    }.items():
        assert completed(monkeypatch, capsys, words) == [expected]


@pytest.mark.exhaustive
def test_completion_is_installed_for_bash(home):
    done = typed(
        home, '--install-completion', 'bash', HOME=str(home), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION='1'
    )
    assert done.returncode == 0, done.stderr
    assert 'bash_completions' in (home / '.bashrc').read_text()
    assert '_KDNOTES_COMPLETE' in (home / '.bash_completions' / 'kdnotes.sh').read_text()


def on_a_terminal(home, *words, columns=60, **more):
    "What a command prints on a terminal."
    ours, theirs = pty.openpty()
    env = surroundings(home, COLUMNS=str(columns), TERM='xterm', **more)
    with subprocess.Popen(
        [sys.executable, '-m', 'kdnotes', *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        said = b''
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert process.returncode == 0, said
    return said.decode().replace('\r\n', '\n')


@pytest.mark.exhaustive
def test_a_table_fits_a_terminal_and_has_no_colour_where_none_is_wanted(home):
    write_study()
    colours = re.compile(r'\x1b\[(?:\d+;)*3\dm')
    for words in (['list'], ['compare', 'made']):
        said = on_a_terminal(home, *words, NO_COLOR='1')
        assert not colours.search(said)
        plain = re.sub(r'\x1b\[[0-9;]*[a-zA-Z]', '', said)
        tables = [line for line in plain.splitlines() if line.startswith(' ')]
        assert tables and max(map(len, tables)) <= 60, words
    assert colours.search(on_a_terminal(home, '--help', NO_COLOR=''))


def test_a_pipe_gets_plain_text(home):
    write_study()
    said = typed(home, 'list').stdout + typed(home, 'study', '--help').stdout
    assert said and '\x1b' not in said and '│' not in said


# ---- what examines this machine, for programs: the real commands, at their smallest ----


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    'words, keys',
    [
        ('doctor --mode baseline --corpus embedded --smoke', {'ok', 'findings', 'notes', 'seconds'}),
        ('bench --contestants race --alternations 1 --steps 1 --smoke', set()),
        ('gpu-check --device cpu --smoke', set()),
    ],
)
def test_json_of_what_examines_the_machine_is_alone_on_standard_output(words, keys, home):
    done = typed(home, *words.split(), '--json', wait_s=1800)
    found = json.loads(done.stdout)
    assert isinstance(found, dict) and keys <= found.keys(), done.stderr

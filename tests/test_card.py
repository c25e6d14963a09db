"""The card of a model has the numbers of its record, shows names as they are written, loads as a card of the
hub, and its commands work.
"""

import contextlib
import io
import re
import shlex
import shutil
import numpy as np
import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from handmade import make_record, write_floors, write_run
from small_runs import ON
from kdnotes.api import Run
from kdnotes.core.config import TASKS, task_info
from kdnotes.core.parse import make_config, stored_config
from kdnotes.core.spec import value_of
from kdnotes.core.files import read_json, runs_path, sha256_file, write_json
from kdnotes.experiment.card import (
    CardError,
    command,
    leave_card,
    model_card,
    snippet,
    unit_interval,
)
from kdnotes.experiment.export import export_text
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.experiment.display import run_box
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import checked_run_model
from kdnotes.telemetry.summary import is_busy

RUNS = [
    ('answer_selection', 'full_kd'),
    ('masked_lm', 'baseline'),
    *(pytest.param(task, 'baseline', marks=pytest.mark.exhaustive) for task in TASKS if task != 'masked_lm'),
]


BUSY = 'not measured (other programs used the machine during the run)'
HOSTILE = '<img src=x>[a](http://b) **c** _d_ `e` | \x1b[31m\n# f\n```'


def section(text: str, title: str) -> str:
    "A part of a card."
    return re.split(r'\n## ', text.split(f'\n## {title}\n', 1)[1], maxsplit=1)[0]


def facts(text: str) -> dict[str, str]:
    "Its lines '- name: value'."
    return dict(re.findall(r'^- ([^:\n]+): (.*)$', text, re.M))


def score_table(text: str) -> dict[tuple[str, str], list[str]]:
    "(set, metric) -> value, interval and clusters, as texts."
    rows = re.findall(r'^\| (\S+) \| [^|]*`(\w+)`[^|]*\| (.*?) \| (.*?) \| (.*?) \|$', text, re.M)
    return {(where, metric): [value, limits.strip(), n.strip()] for where, metric, value, limits, n in rows}


def known(number: float, task: str, metric: str, of: float) -> str:
    "A score or a limit with the digits that mean something beside the score `of`."
    if metric in task_info(task).percent:
        return f'{100 * number:.1f}%'
    if abs(of) >= 100:
        return three(number)
    digits = 3 if abs(of) <= 1 else 2 if abs(of) < 10 else 1
    return f'{number:.{digits}f}'.replace('-', '\N{MINUS SIGN}')


def three(number: float) -> str:
    return f'{float(f"{number:.3g}"):,.10g}'


@pytest.fixture
def handmade_card(tmp_path, monkeypatch):
    "Writes a run with made-up numbers; the text of its card."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))

    def write(more='', name='embedded', **changes) -> str:
        record = make_record(corpus=name, mode='baseline')
        record |= dict(models=dict(teacher=name, student=None), smoke=False, steps=1200, examples=38400)
        record |= changes
        folder = write_run(record)
        config = dict(mode='baseline', study='made', corpus=name, max_length=64, epochs=3, batch_size=32)
        folder.write_config(dict(config=config | dict(learning_rate=1e-4, weight_decay=0.01)))
        write_floors(record, bm25=0.5, random_order=0.4)
        return model_card(record['run_id'], more).text

    return write


@pytest.mark.slow
@pytest.mark.parametrize('task, mode', RUNS)
def test_a_card_is_its_record(task, mode, small_run):
    run = RunFolder('small', small_run(task, mode))
    record = run.record()
    card = ModelCard.load(run.path / 'model' / 'README.md')
    assert card.content == model_card(run.run_id).content
    # metadata
    data = card.data
    assert data.pipeline_tag == task_info(task).use.pipeline and data.library_name == 'transformers'
    assert ('knowledge-distillation' in data.tags) == (mode == 'full_kd')
    assert data.license is None and data.base_model is None  # the weights are of a local folder
    found = {(of.dataset_split, of.metric_type): of for of in data.eval_results}
    expected = {
        (where, metric): value
        for where, metrics in record['metrics'].items()
        for metric, value in metrics.items()
    }
    assert {key: of.metric_value for key, of in found.items()} == {
        key: value for key, value in expected.items() if value is not None
    }
    assert {of.dataset_args['sha256'] for of in found.values()} == {record['corpus_sha256']}
    # the trivial baselines beside them, best first
    best = min if task == 'masked_lm' else max
    baselines = section(card.text, 'Scores').rpartition('Trivial baselines, ')[2]
    values = [float(x) for x in re.findall(r' (\d+\.\d+)%?[,.]$', baselines, re.M)]
    assert values and values[0] == best(values)
    # scores
    table = score_table(section(card.text, 'Scores'))
    assert {key: row[0] for key, row in table.items()} == {
        key: 'not defined' if value is None else known(value, task, key[1], value)
        for key, value in expected.items()
    }
    units = run.table('units')
    primary = record['primary']
    over = unit_interval(record, units, primary['set'], primary['metric'])
    row = table[primary['set'], primary['metric']]
    low, high = (known(x, task, primary['metric'], primary['value']) for x in (over.low, over.high))
    assert row[1:] == [f'{low} to {high}', str(over.n)]
    if task == 'answer_selection':
        assert 'MAP, all questions (`raw_map`): MAP over all questions; a question without' in card.text
    assert over.estimate == pytest.approx(primary['value'], abs=1e-5) and over.low < over.high
    # what it took
    costs = facts(section(card.text, 'Costs'))
    assert costs['Parameters'] == f'{record["params_total"]:,}'
    size = sum(p.stat().st_size for p in (run.path / 'model').iterdir() if p.name != 'README.md')
    assert costs['Size on disk'] == f'{three(size / 2**20)} MiB'
    assert costs['Training time'] == f'{three(record["time"]["train_s"])} s'
    busy = is_busy(record['machine'])
    forward = f'{three(record["latency"]["batch_1_ms"])} ms'
    assert costs['Latency of 1 example'] == (BUSY if busy else forward)
    measured_on = costs['Measured on'].split(', torch ')[0]
    assert measured_on == str(record['environment']['device']), 'on a CPU the two are one, and said once'
    joule = record['energy']['device_j']
    reason = record['reasons'].get('energy.device_j')
    assert costs['Energy of the devices'] == (
        f'not measured ({reason})' if joule is None else f'{three(joule)} J'
    )
    # data, teacher, procedure
    assert record['corpus_sha256'] in facts(section(card.text, 'Data'))['Corpus']
    origin = facts(section(card.text, 'Weights and teacher'))
    if mode == 'full_kd':
        teacher = RunFolder('small', record['teacher_run_id']).record()
        assert record['teacher_run_id'] in origin['Teacher'] and teacher['model_sha256'] in origin['Teacher']
    else:
        assert origin['Teacher'] == 'none' and record['initial']['weights_sha256'] in str(origin)
    procedure = facts(section(card.text, 'Training'))
    assert procedure['Seed'] == str(record['seed']) and f'`{mode}`' in procedure['Mode']
    assert f'{record["steps"]} steps' in procedure['Epochs']
    assert str(runs_path().parent) not in card.content


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('task, mode', RUNS)
def test_the_command_of_a_card_makes_the_run(task, mode, small_run, small_home):
    run_id = small_run(task, mode)
    text = section(model_card(run_id).text, 'Reproduce the training')
    words = shlex.split(re.search(r'```\n(.*?)\n```', text, re.S)[1])
    assert words[:2] == ['kdnotes', 'run'] and set(words[2::2]) == {'-p'}
    given = dict(word.split('=', 1) for word in words[3::2])
    assert given['teacher'] == '<folder of the teacher>'
    given['teacher'] = str(small_home / 'teacher')
    assert plan(make_config(**given), ON).run_id == run_id


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('task, mode', RUNS)
def test_what_a_card_tells_to_type_works(task, mode, small_run):
    run = RunFolder('small', small_run(task, mode))
    code = re.search(r'```python\n(.*?)\n```', section(model_card(run.run_id).text, 'Usage'), re.S)[1]
    code = code.replace('FOLDER', str(run.path / 'model'))
    assert code == snippet(run.record(), str(run.path / 'model'))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue().strip()


@pytest.mark.slow
def test_a_run_is_done_without_its_card_and_gets_one_again(small_run):
    run = RunFolder('small', small_run('text_classification'))
    path = run.path / 'model' / 'README.md'
    assert 'model/README.md' not in run.record()['files']
    path.unlink()
    assert checked_run_model(run.run_id) == run.path / 'model'
    small_run('text_classification')
    assert ModelCard.load(path).data.model_name == run.run_id
    path.write_text('edited')
    assert checked_run_model(run.run_id)
    path.unlink()
    leave_card(run)
    assert path.read_text() != 'edited'


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_teacher_that_has_not_converged_stands_in_plan_box_and_card(
    small_run, small_home, tmp_path, monkeypatch
):
    run_id = small_run('answer_selection', 'full_kd')
    shutil.copytree(small_home / 'runs', tmp_path / 'runs')
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    student = RunFolder('small', run_id)
    teacher = student.record()['teacher_run_id']
    path = runs_path() / 'small' / teacher / 'record.json'
    losses = np.linspace(2.48, 1.57, 72).tolist()
    curve = [dict(step=step, loss=loss, value=None) for step, loss in enumerate(losses)]
    whole = plan(stored_config(student.config()['config']), ON)
    words = f'{teacher} has not converged: its training loss was 2.4'
    assert words not in whole.explain() + model_card(run_id).text
    write_json(path, read_json(path) | dict(curve=curve, smoke=False))
    state = path.with_name('state.json')
    write_json(state, read_json(state) | dict(record_sha256=sha256_file(path)))
    assert words in whole.explain()
    assert words in model_card(run_id).text
    assert run_box(student.record()).lines['warning'].startswith(words)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_card_that_cannot_be_written_fails_no_run(small_run, monkeypatch):
    run = RunFolder('small', small_run('text_classification'))
    (run.path / 'model' / 'README.md').unlink()

    def full(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('kdnotes.experiment.card.atomic_write', full)
    config = stored_config(run.config()['config'])
    assert execute(plan(config, ON))['run_id'] == run.run_id
    monkeypatch.undo()


def test_a_run_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    with pytest.raises(CardError, match='there is no folder of a finished run'):
        model_card('baseline-s0-0123456789ab')


def test_no_folder_of_this_machine_is_in_a_command(tmp_path):
    config = make_config(mode='baseline', corpus=str(tmp_path), teacher='./mine', learning_rate=1e-4)
    said = command(config)
    assert str(tmp_path) not in said and './mine' not in said and '-p learning_rate=0.0001' in said
    assert np.isclose(
        make_config(**dict(learning_rate='0.0001')).train.learning_rate, config.train.learning_rate
    )


def test_a_command_names_what_the_teacher_was_trained_with():
    config = make_config(mode='full_kd', corpus='embedded', epochs=2, train_questions='answered')
    trained_with = dict(epochs=5, learning_rate=3e-4, train_questions='all', teacher_epochs=None)
    words = shlex.split(command(config, trained_with))
    again = make_config(**dict(word.split('=', 1) for word in words[3::2]))
    of_student = {name: value_of(again, name) for name in ('epochs', 'train_questions')}
    assert of_student == dict(epochs=2, train_questions='answered')
    of_teacher = {
        name: value_of(again, f'teacher_{name}') for name in ('epochs', 'learning_rate', 'questions')
    }
    assert of_teacher == dict(epochs=5, learning_rate=3e-4, questions='all')


def test_a_card_has_no_latency_of_a_busy_machine(handmade_card):
    latency = dict.fromkeys(('batch_1_tokens', 'batch_32_tokens'), 64) | dict(
        batch_1_ms=424.0, batch_32_ms=900.0
    )
    machine = make_record()['machine']
    for share, steal, expected in (
        (0.01, 0.0, '424 ms'),
        (0.2, 0.0, BUSY),
        (0.01, 9.0, BUSY),
        (None, 0.0, '424 ms'),
    ):
        loaded = machine | dict(busy_share=share, cpu_steal=steal)
        costs = facts(section(handmade_card(latency=latency, machine=loaded), 'Costs'))
        assert costs['Latency of 1 example'] == expected
        assert (costs['Latency of a batch of 32'] == BUSY) == (expected == BUSY)
        run = make_record() | dict(latency=latency, machine=loaded)
        assert ('one example: not measured' in repr(Run(run))) == (expected == BUSY)


def test_the_text_of_a_card(handmade_card):
    text = handmade_card('## Exported\n\nas ONNX\n')
    scores, exported, costs = (section(text, title) for title in ('Scores', 'Exported', 'Costs'))
    assert scores.strip() == (
        'The primary metric is MAP on the test set.\n\n'
        '| set | metric | value | 95% interval | clusters |\n|---|---|---|---|---|\n'
        '| dev | MAP (`map`): mean average precision over questions with correct and incorrect candidates '
        '| 0.600 |  |  |\n'
        '| test | MAP (`map`): mean average precision over questions with correct and incorrect candidates '
        '| 0.700 | 0.681 to 0.719 | 7 |\n'
        '| test | MRR (`mrr`): mean reciprocal rank of the first correct candidate, over the same questions '
        '| 0.500 |  |  |\n\n'
        'The intervals are over the clusters of units in a set: Student t intervals, or Wilson intervals for '
        'scores near an end of their scale.\nThey do not include the variation between training runs.\n\n'
        'Trivial baselines, MAP on the test set:\nBM25 0.500,\na random order 0.400.\n'
        'This model is significantly better than the best trivial baseline.'
    )
    assert exported == '\nas ONNX\n'
    assert section(text, 'Training').strip() == (
        '- Mode: `baseline` (init=pretrained, kd=False, network=teacher, precision=fp32, ranks=1)\n'
        '- Distillation: none: hard targets only\n- Matmuls: fp32 (made up)\n- Seed: 0\n'
        '- Maximum length: 64 tokens\n'
        '- Epochs: 3 (1,200 steps of 32 examples, 38,400 examples in total)\n'
        '- Peak learning rate: 0.0001\n- Weight decay: 0.01'
    )
    assert facts(costs)['Peak device memory'] == 'not measured (made up)'
    assert '\n\n\n' not in text and handmade_card().count('\n## ') == text.count('\n## ') - 1


def test_a_metric_with_a_bar_stays_in_its_cell(handmade_card):
    metrics = dict(test=dict(map=0.7) | {'a|b': 0.5})
    text = handmade_card(metrics=metrics)
    parsed = MarkdownIt('commonmark').enable('table').parse(text)
    cells = [cell.content for cell, before in zip(parsed[1:], parsed) if before.type == 'td_open']
    [at] = [i for i, cell in enumerate(cells) if cell == '`a|b`']
    assert cells[at - 1 : at + 2] == ['test', '`a|b`', '0.500']


def test_names_in_a_card_are_no_markup(handmade_card):
    known = make_record(mode='baseline')
    text = handmade_card(
        name=HOSTILE,
        environment=known['environment'] | dict(cpu=HOSTILE),
        factors=known['factors'] | dict(transfer=HOSTILE),
        precision_reason=HOSTILE,
        reasons=known['reasons'] | {'energy.device_j': HOSTILE, 'energy.mean_w': '<b>'},
    )
    assert '\x1b' not in text and text.count('u001b') >= 6
    parsed = MarkdownIt('commonmark').enable('table').parse(text)
    inline = [child for token in parsed for child in token.children or ()]
    assert not {token.type for token in (*parsed, *inline)} & {
        'html_block',
        'html_inline',
        'link_open',
        'em_open',
    }
    headings = [after.content for token, after in zip(parsed, parsed[1:]) if token.type == 'heading_open']
    assert headings[1:] == [
        'Data',
        'Weights and teacher',
        'Training',
        'Scores',
        'Costs',
        'Limitations',
        'Usage',
        'Reproduce the training',
    ]
    shown = HOSTILE.replace('\x1b', '\\u001b').replace('\n', '\\n')
    names = [''.join(child.content for child in token.children) for token in parsed if token.type == 'inline']
    assert f'Weights start from: {shown} (pretrained model)' in names
    assert sum(shown in line for line in names) == 4, (
        'corpus, weights, the cpu and what it was first trained on'
    )
    [_, reproduce] = [token for token in parsed if token.type == 'fence']
    assert reproduce.content.startswith('kdnotes run') and '\n# f\n```' in reproduce.content


def test_an_export_has_no_latency_of_a_busy_machine():
    found = dict(cross_encoder=False, task='answer_selection', threads=2, onnx=dict(largest_difference=1e-6))
    found |= dict(latency=dict(fp32_torch=dict(batch_1_ms=33.5, batch_32_ms=424.0)))
    found |= dict(bytes={'model.safetensors': 2**20})
    quiet = export_text(found | dict(load_average=1.0))
    assert '| this model | fp32, torch | 1.0 | 33.5 | 424 |' in quiet
    busy = export_text(found | dict(load_average=9.0))
    assert '| this model | fp32, torch | 1.0 | not measured | not measured |' in busy
    assert 'busy with other work (load average 9.0), so no times are reported' in busy

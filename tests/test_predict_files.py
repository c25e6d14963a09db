"""Predictions over a file: a call that is killed is resumed, in bounded memory, and its output is that of a
call that was not; backends give the scores of torch, or say that they are another model; a Dataset and a file
in Python; and what is refused.
"""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
import datasets
import numpy as np
import pandas as pd
import pytest
from kinds import one_of_each
from processes import wait_for
from test_predict import classifier
from test_predict_tables import refused
from test_predict_tables import TABLES
from kdnotes.api import load_run
from kdnotes.cli import main
from kdnotes.core import tables, write_tables
from kdnotes.core.config import TASKS, ConfigError, KdnotesError
from kdnotes.core.files import cache_path, read_json
from kdnotes.experiment import onnx_files, predict, predict_tables
from kdnotes.core.write_tables import file_rows
from kdnotes.experiment.predict import PredictError
from kdnotes.experiment.predict_tables import predict_file, predict_table

N = 12_000
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ('onnx', 'onnxscript', 'onnxruntime')),
    reason='the extra `export` is not installed',
)


@pytest.fixture
def model(tmp_path, home) -> str:
    return str(classifier(tmp_path / 'm', outputs=3))


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    "How many texts the model was asked about, call by call."
    sizes = []
    answers_of = predict_tables.answers_of

    def count(reader, info, requests, place):
        sizes.append(sum(len(given.get('candidates', [''])) for given in requests))
        return answers_of(reader, info, requests, place)

    monkeypatch.setattr(predict_tables, 'answers_of', count)
    return sizes


def write_texts(path: Path, n: int) -> Path:
    texts = [f'{i},iron {"rusts in moist air " * (i % 7)}' for i in range(n)]
    path.write_text('\n'.join(['id,text', *texts]) + '\n')
    return path


def ledgers() -> list[Path]:
    return list((cache_path() / 'predictions').glob('*.answers/ledger.json'))


# ---- killed, and called again ----


def test_a_killed_call_is_resumed_and_writes_what_an_undisturbed_one_writes(
    model, tmp_path, counted, monkeypatch
):
    file = write_texts(tmp_path / 'in.csv', N)
    typed = ['predict', model, '--file', str(file), '--out', str(tmp_path / 'out.csv')]
    process = subprocess.Popen([sys.executable, '-m', 'kdnotes', *typed], stderr=subprocess.PIPE)
    wait_for(lambda: ledgers() or process.poll() is not None, 'the first chunk')
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    process.stderr.close()
    assert not (tmp_path / 'out.csv').exists()
    [ledger] = ledgers()
    finished = read_json(ledger)['parts']
    assert 1 <= finished < N // predict_tables.CHUNK
    done = predict_file(model, file, tmp_path / 'out.csv')
    assert (done.rows, done.computed) == (N, N - finished * predict_tables.CHUNK) and sum(
        counted
    ) == done.computed
    assert f'{finished * predict_tables.CHUNK:,} of them from an earlier call' in str(done)
    # a third call has nothing to do, and one elsewhere does all of it
    counted.clear()
    assert predict_file(model, file, tmp_path / 'out.csv', overwrite=True).computed == 0 and counted == []
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'elsewhere'))
    assert predict_file(model, file, tmp_path / 'whole.csv').computed == N == sum(counted)
    assert (tmp_path / 'whole.csv').read_bytes() == (tmp_path / 'out.csv').read_bytes()


def test_what_an_answer_depends_on_is_another_name(model, tmp_path, counted, monkeypatch):
    file = write_texts(tmp_path / 'in.csv', 5)
    out = tmp_path / 'out.csv'

    def computed(name=model, file=file, **more):
        return predict_file(name, file, out, overwrite=True, **more).computed

    assert computed() == 5
    (tmp_path / 'copy.csv').write_bytes(file.read_bytes())
    assert computed(file=tmp_path / 'copy.csv') == 0  # the rows count, and not the file's name
    other = pd.read_csv(file).rename(columns=dict(text='review', id='text'))
    other['text'] = other['text'].astype(str) + ' films'
    other.to_csv(tmp_path / 'other.csv', index=False)
    assert computed(file=tmp_path / 'other.csv') == 5
    assert computed(file=tmp_path / 'other.csv', columns='text=review') == 5
    assert computed(str(classifier(tmp_path / 'changed', outputs=3, hidden_act='relu'))) == 5
    write_texts(file, 6)
    assert computed() == 6
    assert len(counted) == 5
    folders = len(list((cache_path() / 'predictions').glob('*.rows')))
    monkeypatch.setattr(predict_tables, '__version__', '99')  # which may read other rows
    assert computed() == 6
    assert len(list((cache_path() / 'predictions').glob('*.rows'))) == folders + 1


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_int8_is_resumed_in_the_batches_of_an_undisturbed_call(model, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(predict_tables, 'CHUNK', 4)
    file = write_texts(tmp_path / 'in.csv', 14)
    answers_of = predict_tables.answers_of

    def fail(*given):
        if len(counted) == 2:
            raise PredictError('stopped')
        return answers_of(*given)

    with monkeypatch.context() as patched:
        patched.setattr(predict_tables, 'answers_of', fail)
        with pytest.raises(PredictError, match='stopped'):
            predict_file(model, file, tmp_path / 'out.csv', backend='int8')
    assert predict_file(model, file, tmp_path / 'out.csv', backend='int8').computed == 6
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'elsewhere'))
    assert predict_file(model, file, tmp_path / 'whole.csv', backend='int8').computed == 14
    assert (tmp_path / 'whole.csv').read_bytes() == (tmp_path / 'out.csv').read_bytes()
    # in other batches the activations have another scale
    monkeypatch.setattr(predict_tables, 'CHUNK', 1)
    predict_file(model, file, tmp_path / 'alone.csv', backend='int8')
    assert (tmp_path / 'alone.csv').read_bytes() != (tmp_path / 'out.csv').read_bytes()
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, 'version', lambda name: '99' if name == 'onnxruntime' else version(name)
    )
    assert predict_file(model, file, tmp_path / 'new.csv', backend='int8').computed == 14


def test_an_error_in_the_middle_keeps_the_chunks_before_it(model, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(predict_tables, 'CHUNK', 2)
    file = write_texts(tmp_path / 'in.csv', 7)
    answers_of = predict_tables.answers_of

    def fail(reader, info, requests, place):
        if len(counted) == 2:
            raise PredictError(f'{place(1)}: it cannot be answered')
        return answers_of(reader, info, requests, place)

    monkeypatch.setattr(predict_tables, 'answers_of', fail)
    with pytest.raises(PredictError, match='in.csv, row 6: it cannot be answered'):
        predict_file(model, file, tmp_path / 'out.csv')
    monkeypatch.setattr(predict_tables, 'answers_of', answers_of)
    assert predict_file(model, file, tmp_path / 'out.csv').computed == 3


def test_chunks_of_questions_are_whole_questions_wherever_their_rows_are(tmp_path, home, monkeypatch):
    folder = str(classifier(tmp_path / 'm'))
    rng = np.random.default_rng(0)
    questions = rng.choice(['Why?', 'Who?', 'When?', 'Where?'], 23)
    sentences = [f'iron {"rusts " * n}{i}' for i, n in enumerate(rng.integers(1, 9, 23))]
    table = pd.DataFrame(dict(question=questions, sentence=sentences))
    expected = predict_table(folder, table)
    monkeypatch.setattr(predict_tables, 'CHUNK', 5)
    table.to_json(tmp_path / 'in.jsonl', orient='records', lines=True)
    predict_file(folder, tmp_path / 'in.jsonl', tmp_path / 'out.parquet')
    found = pd.read_parquet(tmp_path / 'out.parquet')
    assert found['rank'].tolist() == expected['rank'].tolist() and found['rank'].max() > 5
    assert found['log_odds'].tolist() == pytest.approx(expected['log_odds'].tolist(), abs=1e-6)


def test_memory_does_not_grow_with_the_rows(model, tmp_path, monkeypatch):
    for module in (predict_tables, write_tables):
        monkeypatch.setattr(module, 'PART', 500)
    for module in ('schema', 'own_tables'):
        monkeypatch.setattr(f'kdnotes.tasks.{module}.PART', 500)

    def peak(n: int) -> int:
        path = tmp_path / f'{n}.csv'
        path.write_text('text\n' + ''.join(f'iron {i} {"x" * 2000}\n' for i in range(n)))
        tracemalloc.start()
        predict_file(model, path, tmp_path / 'out.csv', overwrite=True)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1)  # imports
    assert peak(6000) < peak(2000) + 4_000_000  # of 8 million characters more


def test_a_file_that_changes_meanwhile_is_not_written(model, tmp_path, monkeypatch):
    file = write_texts(tmp_path / 'in.csv', 3)
    stored_answers = predict_tables.stored_answers

    def change(*given):
        answers = stored_answers(*given)
        write_texts(file, 3)
        os.utime(file, ns=(1, 1))
        return answers

    monkeypatch.setattr(predict_tables, 'stored_answers', change)
    with pytest.raises(KdnotesError, match='in.csv changed while it was read'):
        predict_file(model, file, tmp_path / 'out.csv')
    assert not (tmp_path / 'out.csv').exists()
    assert [path.name for path in tmp_path.glob('.*')] == []


def test_rows_are_never_stored_under_the_hash_of_others(model, tmp_path, monkeypatch):
    file, out = write_texts(tmp_path / 'in.csv', 3), tmp_path / 'out.csv'
    first, sha256_big_file = file.read_bytes(), predict_tables.sha256_big_file

    def change(path):
        digest = sha256_big_file(path)
        write_texts(file, 9)
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(predict_tables, 'sha256_big_file', change)
        with pytest.raises(KdnotesError, match='in.csv changed while it was read'):
            predict_file(model, file, out)
    file.write_bytes(first)
    assert predict_file(model, file, out).rows == 3
    assert [row['text'] for row in file_rows(out)] == [row['text'] for row in file_rows(file)]


def test_a_file_that_changes_between_its_two_readings_is_not_read(model, tmp_path, monkeypatch):
    file = write_texts(tmp_path / 'in.csv', 3)

    def change(path):
        yield from list(file_rows(path))
        write_texts(file, 3)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(predict_tables, 'file_rows', change)
    with pytest.raises(KdnotesError, match='in.csv changed while it was read'):
        predict_table(model, file)


@pytest.mark.parametrize('end', one_of_each(['jsonl.gz', 'parquet', 'tsv', 'csv']))
def test_a_column_of_numbers_that_begins_without_any(model, tmp_path, monkeypatch, end):
    for module in (predict_tables, write_tables):
        monkeypatch.setattr(module, 'PART', 2)
    rows = [dict(text=f'iron {i}', n=None if i < 3 else i + 0.5, k=i) for i in range(7)]
    (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    predict_file(model, tmp_path / 'in.jsonl', tmp_path / f'out.{end}')
    found = list(file_rows(tmp_path / f'out.{end}'))
    assert [row['text'] for row in found] == [row['text'] for row in rows]
    if end in ('jsonl.gz', 'parquet'):
        assert [row['n'] for row in found] == [row['n'] for row in rows]
        assert [row['k'] for row in found] == list(range(7))
    assert list(found[0])[3:] == predict_file(model, tmp_path / 'in.jsonl', tmp_path / 'b.csv').columns


# ---- backends ----


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('task', one_of_each(TASKS, lambda task: task in ('masked_lm', 'extractive_qa')))
def test_onnx_gives_the_scores_of_torch_and_int8_is_another_model(task, small_run, tmp_path, capsys):
    run = load_run(small_run(task))
    table = pd.DataFrame(TABLES[task])
    torch, onnx, int8 = (run.predict(table, backend=backend) for backend in predict.BACKENDS)
    numbers = torch.select_dtypes('number').columns
    assert len(numbers) and not onnx[numbers].equals(int8[numbers])
    for name in torch.columns:
        if name not in numbers:
            assert onnx[name].equals(torch[name])
            continue
        expected = torch[name].to_numpy(dtype=float)
        assert onnx[name].to_numpy(dtype=float) == pytest.approx(expected, abs=1e-4, nan_ok=True)
    if task == 'answer_selection':  # by the command, from a file of the cache
        table.to_csv(tmp_path / 'in.csv', index=False)
        before = {path: path.stat().st_mtime_ns for path in (cache_path() / 'onnx').rglob('*.onnx')}
        typed = ['--file', str(tmp_path / 'in.csv'), '--out', str(tmp_path / 'out.csv'), '--backend', 'int8']
        assert main(['predict', run.run_id, *typed]) == 0
        assert 'int8 is another model than the one that was trained' in capsys.readouterr().out
        found = pd.read_csv(tmp_path / 'out.csv')['log_odds']
        assert found.tolist() == pytest.approx(int8['log_odds'].tolist(), abs=1e-6)
        files = {path: path.stat().st_mtime_ns for path in (cache_path() / 'onnx').rglob('*.onnx')}
        assert files == before and len(files) >= 2


def test_a_backend_that_is_not_there_is_refused_before_anything_is_read(model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="backend 'tensorrt' is unknown; use torch, onnx, int8"):
        predict_table(model, pd.DataFrame(dict(text=['a'])), backend='tensorrt')
    monkeypatch.setattr(onnx_files, 'NEEDED', ('onnx', 'no_such_package'))
    with pytest.raises(KdnotesError) as error:
        predict_file(model, tmp_path / 'in.csv', tmp_path / 'out.csv', backend='onnx')
    assert 'no_such_package is not installed; run pip install "kdnotes[export]", or use backend=torch' in str(
        error.value
    )


# ---- in Python ----


@pytest.mark.slow
def test_a_dataset_and_a_file_get_what_a_frame_gets(small_run, tmp_path):
    run = load_run(small_run('text_classification'))
    texts = TABLES['text_classification']['text']
    frame = pd.DataFrame(dict(review=texts, stars=[1, 2, 3]))
    expected = run.predict(frame, columns='text=review')
    dataset = datasets.Dataset.from_pandas(frame).with_format('numpy')
    found = run.predict(dataset, columns=dict(text='review'))
    assert isinstance(found, datasets.Dataset) and dataset.column_names == ['review', 'stars']
    pd.testing.assert_frame_equal(found.to_pandas(), expected)
    dicts = run.predict(frame.to_dict('records'), columns='text=review')
    pd.testing.assert_frame_equal(dicts, expected, check_dtype=False)
    frame.to_parquet(tmp_path / 'in.parquet')
    pd.testing.assert_frame_equal(run.predict(tmp_path / 'in.parquet', columns='text=review'), expected)
    done = run.predict(tmp_path / 'in.parquet', columns='text=review', out=tmp_path / 'out.parquet')
    assert (done.rows, done.computed, done.backend) == (3, 3, 'torch')
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / 'out.parquet'), expected)


@pytest.mark.slow
def test_tables_that_are_refused_in_python(small_run, tmp_path):
    run = load_run(small_run('text_classification'))
    table = pd.DataFrame(dict(text=['iron']))
    splits = datasets.DatasetDict(train=datasets.Dataset.from_pandas(table))
    cases = {
        'a DatasetDict is no table': lambda: run.predict(splits),
        'a table is asked about alone': lambda: run.predict(table, pair='b'),
        'out is for the rows of a file': lambda: run.predict(table, out='out.csv'),
        'overwrite is for the rows of a table': lambda: run.predict('iron', overwrite=True),
        'overwrite is for the file that out names': lambda: run.predict(table, overwrite=True),
        'backend is for the rows of a table': lambda: run.predict('iron', backend='onnx'),
        'out is for the rows of a table': lambda: run.predict('iron', out='out.csv'),
        "there is no file": lambda: run.predict(tmp_path / 'nowhere.csv'),
        'a.txt is no table': lambda: run.predict(tmp_path / 'a.txt'),
        'has no row': lambda: run.predict(table[:0]),
        'the table, row b: text holds a list': lambda: run.predict(
            pd.DataFrame(dict(text=['a', ['b']]), index=[*'ab'])
        ),
        'the table: no row has a text in text': lambda: run.predict(pd.DataFrame(dict(text=['', None]))),
        "the table: there is no column 'text'": lambda: run.predict(
            datasets.Dataset.from_dict(dict(a=['b']))
        ),
    }
    for words, call in cases.items():
        with pytest.raises(KdnotesError) as error:
            call()
        assert words in str(error.value) and '\n' not in str(error.value), str(error.value)


# ---- what is refused ----


def test_a_repeated_option_is_refused(model, tmp_path, capsys):
    said = refused(capsys, model, '--text', 'a', '--text', 'b')
    assert "'--text'" in said and 'is given 2 times, and one value is read; give it once' in said
    files = ['--file', str(tmp_path / 'a.csv'), '--file', str(tmp_path / 'b.csv'), '--out', 'c.csv']
    assert "'--file'" in refused(capsys, model, *files)
    pair = str(classifier(tmp_path / 'pair'))
    assert main(['predict', pair, '--question', 'a', '--candidate', 'b', '--candidate', 'c', '--json']) == 0
    assert len(json.loads(capsys.readouterr().out)['answer']['candidates']) == 2
    assert '--file' in refused(capsys, model, '--text', 'a', '--backend', 'onnx')


def test_rows_that_cannot_be_answered_are_named(model, tmp_path, capsys, monkeypatch):
    for module in (predict_tables, write_tables):
        monkeypatch.setattr(module, 'PART', 2)
    monkeypatch.setattr(tables, 'PART', 2)
    out = str(tmp_path / 'out.csv')
    question = str(classifier(tmp_path / 'two'))
    cases = {  # file -> its content, the model, and what the refusal names
        'empty.csv': ('text,n\n,1\n" ",2\n', model, 'empty.csv: no row has a text in text'),
        'gap.jsonl': ('{"text": null}\n\n', model, 'gap.jsonl: no row has a text in text'),
        'list.jsonl': ('{"text": "a"}\n{"text": ["b"]}\n', model, 'list.jsonl, line 2: text holds a list'),
        'none.csv': ('text\n', model, 'none.csv has no row; give one at least'),
        'other.csv': ('review\na\n', model, "other.csv has the columns 'review'"),
        'three.csv': ('question,sentence\na,b\n', model, 'the model has 3 outputs'),
        'half.csv': ('question,sentence\n,b\nc,\n', question, 'no row has a text in question and sentence'),
        'name.csv': ('text,probability\na,b\n', model, "name.csv has a column 'probability' already"),
    }
    for name, (content, folder, words) in cases.items():
        (tmp_path / name).write_text(content)
        assert words in refused(capsys, folder, '--file', str(tmp_path / name), '--out', out), name
    assert not Path(out).exists() and [path.name for path in tmp_path.glob('.*')] == []
    late = tmp_path / 'late.jsonl'
    late.write_text('{"text": "a"}\n' * 2 + '{"text": "b", "more": 1}\n')
    assert "late.jsonl, line 3: none of the first 2 rows has 'more'" in refused(
        capsys, model, '--file', str(late), '--out', out
    )

"""Bad corpora end with one sentence that names the place;
good ones get one name and one hash wherever they lie.
"""

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest

from kdnotes.tasks.candidates import CORPORA, SCHEMA
from kdnotes.core.config import KdnotesError
from kdnotes.tasks.sources import SPLITS, CorpusError, load_corpus, local_copy, read_split, resolve_corpus

HEADER = '\t'.join(SCHEMA.names.values())
TASK = 'answer_selection'
GOOD = [
    'Q1\tWhat is salt?\tD1\tSalt\tD1-0\tSalt is "sodium chloride".\t1',
    'Q1\tWhat is salt?\tD1\tSalt\tD1-1\tSalt – or a pun on it – is in every sea.\t0',
    'Q2\tWho likes salt?\tD1\tSalt\tD1-0\tSalt is "sodium chloride".\t0',
    'Q3\tWhat is a sea?\tD2\tSea\tD2-0\tA sea is a large body of salt water.\t1',
    'Q3\tWhat is a sea?\tD2\tSea\tD2-1\tThere are seas without a coast.\t0',
]


def write(
    folder,
    names=('WikiQA-train.tsv', 'WikiQA-dev.tsv', 'WikiQA-test.tsv'),
    lines=(HEADER, *GOOD),
    encoding='utf-8',
    end='\r\n',
):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(''.join(line + end for line in lines).encode(encoding))
    return folder


def refused(action) -> str:
    with pytest.raises(CorpusError) as caught:
        action()
    sentence = str(caught.value)
    assert '\n' not in sentence and ';' in sentence, f'one sentence with what to do: {sentence}'
    assert caught.value._render_traceback_() == [f'CorpusError: {sentence}']
    return sentence


def replaced(i, old, new):
    return [HEADER, *GOOD[:i], GOOD[i].replace(old, new), *GOOD[i + 1 :]]


FAULTS = {
    'missing column': (
        dict(lines=['\t'.join(line.split('\t')[:5] + line.split('\t')[6:]) for line in [HEADER, *GOOD]]),
        ["no column 'sentence' among 'QuestionID', 'Question'"],
    ),
    'no header': (dict(lines=GOOD), ["no column 'question' among 'Q1', 'What is salt?'"]),
    'label not 0/1': (dict(lines=replaced(1, '\t0', '\t2')), ['line 3', "'2'", '0 or 1']),
    'label empty': (dict(lines=replaced(1, '\t0', '\t')), ['line 3', "''", '0 or 1']),
    'label a word': (dict(lines=replaced(4, '\t0', '\tno')), ['line 6', "'no'"]),
    'broken encoding': (dict(encoding='cp1252'), ['line 3', '0x96', 'UTF-8']),
    'utf-16': (dict(encoding='utf-16'), ['line 1', 'UTF-8']),
    'empty file': (dict(lines=[]), ['is empty; it needs the names of its columns']),
    'header alone': (dict(lines=[HEADER]), ['no row']),
    'short row': (
        dict(lines=[HEADER, *GOOD[:3], 'Q3\tWhat is a sea?\tD2', *GOOD[4:]]),
        ['line 5', '3 fields', '7'],
    ),
    'long row': (dict(lines=replaced(2, 'salt?', 'sa\tlt?')), ['line 4', '8 fields', '7']),
    'sentence twice': (dict(lines=[HEADER, *GOOD, GOOD[4]]), ['line 7', "'D2-1'", "'Q3'", 'twice']),
    'question without candidates': (
        dict(lines=[HEADER, *GOOD, 'Q9\tWho is there?\tD2\tSea\tD2-0\t\t0']),
        ['line 7', "'Q9'", 'without a candidate'],
    ),
    'question without text': (
        dict(lines=replaced(2, 'Who likes salt?', ' ')),
        ['line 4', 'Question is empty'],
    ),
    'no document': (dict(lines=replaced(2, 'D1\tSalt', '\tSalt')), ['line 4', 'DocumentID is empty']),
    'two texts of a question': (
        dict(lines=replaced(4, 'What is a sea?', 'Where is a sea?')),
        ['line 6', "'Q3'", 'another text'],
    ),
    'label -1': (dict(lines=replaced(1, '\t0', '\t-1')), ['line 3', 'nobody', "table['label'] != -1"]),
    'lines that end in CR': (dict(end='\r'), ['line 1']),
    'no positive': (dict(lines=[HEADER, GOOD[1], GOOD[2]]), ['no row has label 1']),
}


@pytest.mark.parametrize('name', ['WikiQA-train.tsv', 'WikiQA-test.tsv'])
@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_is_told_with_file_and_line(tmp_path, fault, name):
    content, told = FAULTS[fault]
    write(tmp_path)
    write(tmp_path, names=[name], **content)
    sentence = refused(lambda: load_corpus(TASK, str(tmp_path)))
    for part in (str(tmp_path / name), *told):
        assert part in sentence


def test_a_test_split_without_a_ranking_is_refused(tmp_path):
    write(tmp_path)
    write(tmp_path, names=['WikiQA-test.tsv'], lines=[HEADER, GOOD[0], GOOD[3]])
    assert 'both a right and a wrong' in refused(lambda: load_corpus(TASK, str(tmp_path)))


def test_what_is_no_fault(tmp_path):
    plain = load_corpus(TASK, str(write(tmp_path / 'plain')))
    assert [r['label'] for r in plain.splits['train']] == [1, 0, 0, 1, 0]
    assert plain.splits['train'][0]['sentence'] == 'Salt is "sodium chloride".'
    columns = [2, 6, 0, 1, 5, 3, 4]

    def shuffled(line):
        return '\t'.join(line.split('\t')[i] for i in columns) + '\tmore'

    names = ('train.tsv', 'dev.tsv', 'test.tsv')
    other = load_corpus(
        TASK,
        str(
            write(
                tmp_path / 'other', names, ['\ufeff' + shuffled(HEADER), *map(shuffled, GOOD), ''], end='\n'
            )
        ),
    )
    assert other.splits == plain.splits and other.sha256 == plain.sha256


def test_a_csv_file_with_tabs_is_said_to_be_a_tsv(tmp_path):
    for name in ('train', 'dev', 'test'):
        (tmp_path / f'{name}.csv').write_text('question\tsentence\tlabel\nq, or p\ts\t1\n')
    sentence = refused(lambda: load_corpus(TASK, str(tmp_path)))
    assert 'its columns are separated by tabs; name the file train.tsv' in sentence


@pytest.mark.parametrize('end', ['\n', '\r\n', '\r', '\r\r\n'])
def test_csv_lines_end_as_they_like(tmp_path, end):
    rows = [line.replace('"', '').split('\t') for line in [HEADER, *GOOD]]
    (tmp_path / 'train.csv').write_bytes(end.join(map(','.join, rows)).encode())
    read = read_split(tmp_path / 'train.csv', 'train', SCHEMA)
    assert [r['sentence'] for r in read] == [row[5] for row in rows[1:]]


# rows of question, sentence and label, the second of them wrong
QUOTES = {
    'none closed': ['good,1', '"lovely river walk,0', 'a,1', 'b,0'],
    'closed in a later row': ['good,1', '"lovely river walk,0', 'a,1', '"well, well",0'],
    'marked as in C': ['good,1', r'"say \"hi\" now",0', 'a,1'],
    'more behind them': ['good,1', '"a" b,0'],
}


@pytest.mark.parametrize('kind', QUOTES)
def test_quotes_that_would_join_rows_of_a_csv_file_are_refused_with_the_row(tmp_path, kind):
    (tmp_path / 'train.csv').write_text(
        '\n'.join(['question,sentence,label', *(f'why,{row}' for row in QUOTES[kind])]) + '\n'
    )
    sentence = refused(lambda: read_split(tmp_path / 'train.csv', 'train', SCHEMA))
    assert sentence.startswith(f'{tmp_path}/train.csv, row 2: ')


def test_an_answer_with_a_blank_at_its_edge_is_that_of_json(tmp_path):
    context = 'Iron rusts. Mercury is liquid.'
    rows = [
        dict(question='Which?', context=context, answer=' Mercury ', answer_start=11),
        dict(question='What?', context=context, answer=' Iron', answer_start=0),
        dict(question='How?', context=context, answer='', answer_start=''),
    ]
    table = pd.DataFrame(rows)
    table['answer_start'] = pd.to_numeric(table['answer_start'])  # with a gap, and so floats
    for split in SPLITS:
        table.to_csv(tmp_path / f'{split}.csv', index=False)
    assert '11.0' in (tmp_path / 'dev.csv').read_text()
    found = load_corpus('extractive_qa', str(tmp_path)).splits['dev']
    assert [row['answers'] for row in found] == [[[11, 20]], [[0, 4]], []]


def test_labels_that_became_floats_are_whole_numbers(tmp_path):
    for name, task, text in (('a', 'text_classification', 'text'), ('b', TASK, 'question,sentence')):
        (tmp_path / name).mkdir()
        for split in SPLITS:
            texts = '1.0' + ',2.0' * text.count(',')
            lines = [f'{text},label', f'{texts},1.0', f'{texts[:-1]}5,0.0', f'{texts[:-1]}6,1.0']
            (tmp_path / name / f'{split}.csv').write_text('\n'.join(lines))
        rows = load_corpus(task, str(tmp_path / name)).splits['train']
        assert [str(row['label']) for row in rows] == ['1', '0', '1']
        assert rows[0].get('text', rows[0].get('question')) == '1.0'


LONG = 'x' * 100_000
LONG_CELLS = {
    'a label': [HEADER, GOOD[0][:-1] + LONG],
    'a question without candidates': [HEADER, f'{LONG}\tq\tD\tt\tS\t\t1'],
    'a sentence twice': [HEADER, *[f'{LONG}\tq\tD\tt\t{LONG}\ts\t1'] * 2],
    'two texts of a question': [HEADER, f'{LONG}\tq\tD\tt\tS\ts\t1', f'{LONG}\tr\tD\tt\tT\ts\t0'],
    'a column twice': [f'{HEADER}\t{LONG}\t{LONG}', *GOOD],
}


@pytest.mark.parametrize('case', [*LONG_CELLS, 'a name of a column', 'a member twice'])
def test_a_long_cell_or_name_is_not_repeated_in_full(tmp_path, case):
    write(tmp_path, names=['train.tsv'], lines=LONG_CELLS.get(case, [HEADER, *GOOD]))
    (tmp_path / 'train.jsonl').write_text(f'{{"{LONG}": 1, "{LONG}": 2}}')
    path = tmp_path / ('train.jsonl' if case == 'a member twice' else 'train.tsv')
    columns = f'sentence={LONG}' if case == 'a name of a column' else None
    sentence = refused(lambda: read_split(path, 'train', SCHEMA, columns))
    assert 'xxx' in sentence and len(sentence) < 1000


@pytest.mark.parametrize('task', ['text_classification', TASK, 'extractive_qa'])
def test_a_text_that_no_network_reads_is_refused_where_it_stands(tmp_path, task):
    "It would be tokenised whole: of ten million characters that took gigabytes."
    rows = [
        dict(text='a', question='Is it a?', sentence='a', context='a', answer='a', label=i) for i in (0, 1)
    ]
    for split in SPLITS:
        (tmp_path / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    load_corpus(task, str(tmp_path))
    key = {'text_classification': 'text', TASK: 'sentence', 'extractive_qa': 'context'}[task]
    rows[1][key] *= 1_000_001
    (tmp_path / 'dev.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    sentence = refused(lambda: load_corpus(task, str(tmp_path)))
    assert f'dev.jsonl, line 2: {key} has 1,000,001 characters, and 1,000,000 are the most; cut' in sentence


def test_a_book_may_be_long(tmp_path):
    for split in SPLITS:
        (tmp_path / f'{split}.txt').write_text(f'{split} ' * 200_000)
    assert len(load_corpus('masked_lm', str(tmp_path)).splits['train'][0]['text']) > 1_000_000


# what is no ordinary file


def make_pipe(path: Path) -> None:
    "A pipe that ends at once for whoever reads it all the same, so that a test fails and does not wait."
    os.mkfifo(path)

    def end():
        with contextlib.suppress(OSError):  # it waits for ever, unless another test changes the user
            path.open('wb').close()

    threading.Thread(target=end, daemon=True).start()


@pytest.mark.parametrize('end', ['tsv', 'csv', 'jsonl', 'parquet'])
@pytest.mark.parametrize('kind', ['pipe', 'device', 'folder'])
def test_what_may_never_end_is_not_opened(tmp_path, kind, end):
    path = tmp_path / f'test.{end}'
    if kind == 'pipe':
        make_pipe(path)
    elif kind == 'device':
        path.symlink_to('/dev/null')
    else:
        path.mkdir()
    sentence = refused(lambda: read_split(path, 'test', SCHEMA))
    assert sentence.startswith(f'{path} is no ordinary file')


@pytest.mark.parametrize(
    'task, name, file',
    [('text_classification', 'imdb', 'imdb.jsonl'), (TASK, 'squad1', 'train-v1.1.json')],
)
def test_a_pipe_is_no_copy_of_a_published_corpus(tmp_path, monkeypatch, task, name, file):
    (tmp_path / name).mkdir()
    make_pipe(tmp_path / name / file)
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    assert f'{file} is no ordinary file' in refused(lambda: load_corpus(task, name))


def test_a_link_to_a_file_is_a_file(tmp_path):
    plain = load_corpus(TASK, str(write(tmp_path / 'plain')))
    (tmp_path / 'linked').mkdir()
    for path in (tmp_path / 'plain').iterdir():
        (tmp_path / 'linked' / path.name).symlink_to(path)
    assert load_corpus(TASK, str(tmp_path / 'linked')).sha256 == plain.sha256


# JSON


# a line -> what is said of it
NO_ROWS = {
    '"text"': 'it is no object',
    '{"text": "a"} {"text": "b"}': 'Extra data',
    '[' * 100_000: 'it is nested too deeply',
    '{"text":' * 100_000: 'it is nested too deeply',
}


@pytest.mark.parametrize('line', NO_ROWS, ids=lambda line: line[:30])
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / 'train.jsonl'
    path.write_text(f'{{"text": "a", "label": "n"}}\n\n{line}\n')
    sentence = refused(lambda: read_split(path, 'train', SCHEMA))
    assert sentence.startswith(f'{path}, line 3: {NO_ROWS[line]}')


@pytest.mark.parametrize('end', ['jsonl', 'parquet'])
def test_a_file_without_a_row_is_refused(tmp_path, end):
    path = tmp_path / f'train.{end}'
    path.write_text('\n \n')
    if end == 'parquet':
        pd.DataFrame({name: [] for name in SCHEMA.names.values()}).to_parquet(path)
    told = 'is empty' if end == 'jsonl' else 'there is no row'
    assert told in refused(lambda: read_split(path, 'train', SCHEMA))


def test_half_a_character_is_refused(tmp_path, monkeypatch):
    "JSON can write the half of a pair; no file, and no hash, can hold it."
    row = dict(zip(SCHEMA.names.values(), GOOD[0].split('\t'))) | dict(Sentence='Salt \ud800.')
    (tmp_path / 'train.jsonl').write_text(json.dumps(row))
    sentence = refused(lambda: read_split(tmp_path / 'train.jsonl', 'train', SCHEMA))
    assert "train.jsonl, line 1: Sentence holds '\\ud800', which is half a character" in sentence

    context = 'Salt is white. Sugar \ud800 is too.'
    asked = dict(id='q', question='What is white?', answers=[dict(text='Salt', answer_start=0)])
    articles = [dict(title=f't{i}', paragraphs=[dict(context=context, qas=[asked])]) for i in range(20)]
    (tmp_path / 'squad1').mkdir()
    with gzip.open(tmp_path / 'squad1/train-v1.1.json.gz', 'wt') as file:
        json.dump(dict(data=articles), file)
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    assert 'which is half a character' in refused(lambda: load_corpus(TASK, 'squad1'))


def test_folders_that_are_none(tmp_path):
    names = ['WikiQA-train.tsv', 'WikiQA-dev.tsv', 'WikiQA-test.tsv']
    for name in (str(tmp_path / 'nowhere'), './nowhere', 'wikqa'):
        sentence = refused(lambda name=name: load_corpus(TASK, name))
        assert name in sentence and all(n in sentence for n in names)
    (tmp_path / 'empty').mkdir()
    sentence = refused(lambda: load_corpus(TASK, str(tmp_path / 'empty')))
    assert all(n in sentence for n in [*names, 'train.tsv', 'dev.tsv', 'test.tsv'])
    write(tmp_path / 'half', names[:2])
    assert 'no WikiQA-test.tsv' in refused(lambda: load_corpus(TASK, str(tmp_path / 'half')))
    (tmp_path / 'half' / names[2]).mkdir()
    assert str(tmp_path / 'half' / names[2]) in refused(lambda: load_corpus(TASK, str(tmp_path / 'half')))
    assert issubclass(CorpusError, KdnotesError)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.delenv('KDNOTES_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_auto_takes_a_copy_before_the_embedded_corpus(offline, monkeypatch):
    assert resolve_corpus(TASK, 'auto') == 'embedded'
    mine = write(offline / 'home' / 'data' / 'wikiqa')
    assert resolve_corpus(TASK, 'auto') == 'wikiqa' and local_copy('wikiqa', CORPORA) == mine
    other = write(offline / 'elsewhere' / 'wikiqa')
    for relative in ('elsewhere', str(offline / 'elsewhere')):
        monkeypatch.setenv('KDNOTES_DATA', relative)
        assert local_copy('wikiqa', CORPORA).resolve() == other
    below_the_root = write(offline / 'home' / 'shelf' / 'wikiqa')
    monkeypatch.setenv('KDNOTES_DATA', 'shelf')
    assert local_copy('wikiqa', CORPORA).resolve() == below_the_root
    corpus = load_corpus(TASK, 'auto')
    assert (corpus.name, corpus.kind, Path(corpus.where)) == ('wikiqa', 'folder', below_the_root)


def test_a_relative_folder_becomes_absolute(offline):
    folder = write(offline / 'mine')
    assert resolve_corpus(TASK, 'mine') == str(folder) == load_corpus(TASK, 'mine').name


# the hub


@pytest.fixture
def hub(monkeypatch, offline):
    "A hub that answers and delivers what is put into the returned dict."
    datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')
    stored = {}
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    monkeypatch.setattr('huggingface_hub.HfApi.dataset_info', lambda self, repo_id, **more: repo_id)
    monkeypatch.setattr(
        'datasets.load_dataset',
        lambda hub_id: datasets.DatasetDict({s: datasets.Dataset.from_dict(c) for s, c in stored.items()}),
    )
    return stored


def columns(rows):
    return {name: [row[key] for row in rows] for key, name in SCHEMA.hub_names.items()}


def test_the_hub_and_a_folder_with_the_same_content_have_one_hash(hub, tmp_path):
    folder = load_corpus(TASK, str(write(tmp_path / 'folder')))
    hub.update(
        {
            name: columns(folder.splits[split])
            for split, name in dict(train='train', dev='validation', test='test').items()
        }
    )
    assert resolve_corpus(TASK, 'auto') == 'wikiqa'
    for name in ('wikiqa', 'microsoft/wiki_qa'):
        corpus = load_corpus(TASK, name)
        assert (corpus.name, corpus.kind, corpus.sha256) == ('wikiqa', 'hub', folder.sha256)
    other = load_corpus(TASK, 'someone/salt')
    assert (other.name, other.sha256) == ('someone/salt', folder.sha256)
    hub['test']['answer'][0] += '!'
    assert load_corpus(TASK, 'someone/salt').sha256 != folder.sha256


def test_what_the_hub_delivers_is_checked(hub, tmp_path):
    rows = read_split(write(tmp_path / 'folder') / 'WikiQA-train.tsv', 'train', SCHEMA)
    hub.update({s: columns(rows) for s in ('train', 'validation', 'test')})
    hub['test']['label'][3] = -1
    assert "someone/salt, split 'test', row 3: label is '-1'" in refused(
        lambda: load_corpus(TASK, 'someone/salt')
    )
    hub['test']['label'][3], hub['test']['answer'][2] = 1, None
    assert 'row 2' in refused(lambda: load_corpus(TASK, 'someone/salt'))
    del hub['test']['answer']
    assert "no column 'sentence'" in refused(lambda: load_corpus(TASK, 'someone/salt'))
    del hub['validation']
    assert "no split 'validation'" in refused(lambda: load_corpus(TASK, 'someone/salt'))


def test_a_hub_that_fails_while_delivering(hub, monkeypatch):
    def fail(hub_id):
        raise ConnectionError('reset by peer\nand much more')

    monkeypatch.setattr('datasets.load_dataset', fail)
    assert 'reset by peer' in refused(lambda: load_corpus(TASK, 'someone/salt'))


def test_offline_names_the_places_looked_at(offline, monkeypatch):
    datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')

    def fail(hub_id):
        raise ConnectionError('offline')

    monkeypatch.setattr(datasets, 'load_dataset', fail)
    sentence = refused(lambda: load_corpus(TASK, 'wikiqa'))
    assert str(offline / 'home' / 'data' / 'wikiqa') in sentence and 'corpus=embedded' in sentence


@pytest.mark.exhaustive
def test_a_hub_that_never_answers(tmp_path):
    "A silent server: a sentence, and the process ends although a thread still waits."
    pytest.importorskip('datasets', reason='the hub is read with the package datasets')
    with socket.create_server(('127.0.0.1', 0)) as server:
        code = (
            'from kdnotes.tasks.sources import ask_hub, load_corpus, resolve_corpus; ask_hub.__defaults__ = '
            '(0.5,)\nprint(resolve_corpus("answer_selection", "auto")); load_corpus("answer_selection", '
            '"someone/salt")'
        )
        env = {k: v for k, v in os.environ.items() if k not in ('HF_HUB_OFFLINE', 'KDNOTES_DATA')} | dict(
            HF_ENDPOINT=f'http://127.0.0.1:{server.getsockname()[1]}',
            KDNOTES_HOME=str(tmp_path),
            NO_PROXY='127.0.0.1',
        )
        done = subprocess.run(
            [sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=60
        )
    assert done.stdout.strip() == 'embedded' and done.returncode == 1, done.stderr
    assert 'did not answer within 0.5 s' in done.stderr.splitlines()[-1]


def test_a_folder_of_ones_own_is_told_of_its_own_files_first_and_of_the_direction_of_columns(tmp_path):
    for split in ('train', 'dev', 'test'):
        (tmp_path / f'{split}.csv').write_text('question,answer,label\nq,a,1\nq,b,0\n')
    told = (
        "no column 'sentence' among .*columns='sentence=<your column>' .--columns of a command, COLUMNS= of"
    )
    with pytest.raises(CorpusError, match=told):
        load_corpus('answer_selection', str(tmp_path))
    with pytest.raises(KdnotesError, match="is the wrong way round: .* as in 'sentence=answer'"):
        load_corpus('answer_selection', str(tmp_path), 'answer=sentence')
    (tmp_path / 'other').mkdir()
    for name in (tmp_path / 'other', 'nowhere'):
        with pytest.raises(CorpusError, match="train, dev and test as .* or wikiqa's own WikiQA-train.tsv"):
            load_corpus('answer_selection', str(name))

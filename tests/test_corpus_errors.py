"""Bad corpora end with one sentence that names the place; good ones get one name and one hash wherever they
lie. What the sentences say beyond file, row and column is nobody's promise, and no test's.
"""

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

import kdnotes as kd
from kdnotes.core import tables
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.tables import FORMATS
from kdnotes.core.write_tables import as_file
from kdnotes.tasks import schema, sources
from kdnotes.tasks.candidates import CORPORA, SCHEMA
from kdnotes.tasks.labelled_texts import check_labels
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


def write(folder, names=tuple(f'WikiQA-{split}.tsv' for split in SPLITS), lines=(HEADER, *GOOD), end='\r\n'):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(''.join(line + end for line in lines).encode())
    return folder


def refused(action, *names: str, kind: type[KdnotesError] = CorpusError) -> str:
    "The one sentence of a refusal, which has all these names in it and no traceback."
    try:
        action()
    except kind as e:
        error = e
    else:
        raise AssertionError(f'nothing was refused that names {names}')
    [line] = error._render_traceback_()
    sentence = str(error)
    assert line == f'{type(error).__name__}: {sentence}'
    assert sentence.isprintable() and len(sentence) < 700, sentence
    assert all(name in sentence for name in names), (names, sentence)
    return sentence


# ---- one table of what is wrong ----

TEXTS = 'text_classification'
SOUND = {
    TEXTS: [dict(text=f'text {i}', label='ab'[i % 2]) for i in range(4)],
    TASK: [dict(question=f'q{i // 2}', sentence=f's{i}', label=i % 2) for i in range(4)],
}
KEYS = ('question_id', 'question', 'document_id', 'sentence_id', 'sentence', 'label')


@dataclass
class Wrong:
    "What is wrong with a corpus, and what its refusal must name besides the file."

    file: str  # that is wrong; without an ending: of each format
    content: str | bytes | list[dict] | Callable[[Path], None]  # of it; or what is to be done with its path
    names: tuple[str, ...] = ()
    at: int | None = None  # which of the rows is named, from 0
    task: str = TEXTS
    ends: tuple[str, ...] = FORMATS  # formats that can hold it


def texts(*pairs, at: int | None = 1, names=('label',), split: str = 'train', **more) -> Wrong:
    return Wrong(split, [dict(text=text, label=label) for text, label in pairs], names, at, **more)


def pairs(
    *cells, at: int | None = 1, names=('label',), split: str = 'train', keys=KEYS[1::3] + KEYS[5:]
) -> Wrong:
    return Wrong(split, [dict(zip(keys, row)) for row in cells], names, at, TASK)


def pack(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data))


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_parquet(names: list[str], *columns, classes: list[str] | None = None) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    table = pa.Table.from_arrays([pa.array(of) for of in columns], names=names)
    if classes:  # as the package datasets writes them
        features = dict(label=dict(names=classes, _type='ClassLabel'))
        table = table.replace_schema_metadata({'huggingface': json.dumps(dict(info=dict(features=features)))})
    pq.write_table(table, buffer)
    return buffer.getvalue()


LONG = 'x' * 100_000
WIDE = ','.join(f'column {i}' for i in range(1000))
FULL = ('Q', 'q', 'D', 'S', 's', 1), ('Q', 'q', 'D', 'T', 't', 0)
WRONG = {
    # the bytes
    'latin-1': Wrong('train.csv', 'text,label\na,b\nGröße,a\n'.encode('latin-1'), ('line 3', 'UTF-8')),
    'latin-1 in a column nobody needs': Wrong(
        'dev.tsv', b'text\tlabel\tn\na\tb\t\xff\n', ('line 2', 'UTF-8')
    ),
    'latin-1 in JSON': Wrong('test.jsonl', '{"text": "ö"}'.encode('latin-1'), ('line 1', 'UTF-8')),
    'UTF-16': Wrong('train.csv', 'text,label\na,b\n'.encode('utf-16'), ('line 1', 'UTF-8')),
    'UTF-16, packed': Wrong(
        'train.csv.gz', gzip.compress('text,label\n'.encode('utf-16')), ('line 1', 'UTF-8')
    ),
    'UTF-16 without a mark': Wrong('train.csv', 'text,label\na,b\n'.encode('utf-16-le'), ("'text'",)),
    'NUL in a label': texts(('a', 'x'), ('b', 'y\0')),
    'half a character': texts(('a', 'x'), ('\ud800', 'y'), names=('text',), ends=('jsonl', 'jsonl.gz')),
    'no gzip': Wrong('train.tsv.gz', 'text\tlabel\n'),
    'a torn gzip': Wrong('train.csv.gz', gzip.compress(b'text,label\na,b\nc,d\n')[:-9]),
    # quotes, fields, separators
    'a quote that is not closed': Wrong('train.csv', 'text,label\na,b\n"c,d\ne,f\n', ('row 2',)),
    'a quote that is closed later': Wrong('train.csv', 'text,label\na,b\n"c,d\ne,"f"\n', ('row 2',)),
    'quotes as in C': Wrong('train.csv', 'text,label\na,b\n"c \\"d\\" e",d\n', ('row 2',)),
    'more behind a quote': Wrong('train.csv', 'text,label\na,b\n"c" d,e\n', ('row 2',)),
    'a short row': Wrong('train.tsv', 'text\tlabel\na\tb\nc\n', ('line 3',)),
    'a long row': Wrong('train.csv', 'text,label\na,b\nc,d,e\n', ('row 2',)),
    'semicolons': Wrong('train.csv', 'text;label\na;b\nc;d;e\n', ('row 2', 'by semicolons')),
    'tabs in CSV': Wrong('train.csv', 'text\tlabel\na\tb\nc,d\n', ('row 2', 'by tabs')),
    'commas in TSV': Wrong('train.tsv', 'text,label\na,b\n', ("'text,label'",)),
    'lines of old Macs': Wrong('train.tsv', 'text\tlabel\ra\tb\rc\td\r', ("'label'",)),
    'quotes of CSV in TSV': Wrong(
        'train.tsv', 'text\tlabel\n"he said ""hi"""\ta\nb\tc\n', ('line 2', 'quote')
    ),
    # columns and rows
    'nothing': Wrong('train.csv', ''),
    'empty lines': Wrong('train.jsonl', '\n \n'),
    'a header alone': Wrong('dev.tsv', 'text\tlabel\n'),
    'Parquet without a row': Wrong('dev.parquet', as_parquet(['text', 'label'], [], [])),
    'no header': Wrong('train.csv', 'a,b\nc,d\n', ("'text'",)),
    'no column': Wrong('dev', [dict(text='a'), dict(text='b')], ("'label'",)),
    'a wide table': Wrong('train.csv', f'{WIDE}\n' + b'\xff'.decode('latin-1'), ("'text'", "'column 0'")),
    'a column twice': Wrong('train.csv', 'text,label,text\na,b,c\n', ("'text'",)),
    'a column twice in Parquet': Wrong(
        'train.parquet', as_parquet(['label'] * 2, ['a'], ['b']), ("'label'",)
    ),
    'a long name twice': Wrong('train.tsv', f'{LONG}\t{LONG}\n', ('xxx',)),
    # JSON and Parquet
    'nested too deep': Wrong('train.jsonl', '{"text": "a"}\n' + '[' * 100_000, ('line 2',)),
    'objects nested too deep': Wrong('train.jsonl', '{"text":' * 100_000, ('line 1',)),
    'a member twice': Wrong('train.jsonl', '{"text": "a", "text": "b"}', ('line 1', "'text'")),
    'no object': Wrong('train.jsonl', '{"text": "a", "label": 1}\n\n"b"\n', ('line 3',)),
    'two objects': Wrong('train.jsonl', '{"text": "a"} {"text": "b"}\n', ('line 1',)),
    'half an object': Wrong('train.jsonl', '{"text": "a", "label": 1}\n{"text": \n', ('line 2',)),
    'a member that comes later': Wrong(
        'train.jsonl', '{"text": 1}\n{"text": 2, "label": 1}', ('line 1', 'label')
    ),
    'a member that is missing': Wrong(
        'train.jsonl', '{"text": 1, "label": 1}\n{"label": 2}', ('line 2', 'text')
    ),
    'torn Parquet': Wrong('train.parquet', as_parquet(['text', 'label'], ['a'], ['b'])[:-40]),
    'no Parquet': Wrong('train.parquet', 'text,label\n'),
    'a list': texts(('a', 'x'), (['b'], 'y'), names=('text',), ends=('jsonl', 'jsonl.gz')),
    'lists': texts((['a'], 'x'), (['b'], 'y'), at=0, names=('text',), ends=('jsonl', 'parquet')),
    # cells
    'a text beyond the limit': texts(('a', 'x'), ('b' * 1_000_001, 'y'), names=('text', '1,000,000')),
    'a sentence beyond the limit': pairs(('q', 'a', 1), ('q', 'b' * 1_000_001, 0), names=('sentence',)),
    'no text': texts(('a', 'x'), (' ', 'y'), names=('text',)),
    'no label': texts(('a', 'x'), ('b', '')),
    'null for a label': texts(('a', 'x'), ('b', None)),
    'a control character': texts(('a', 'x'), ('b', 'y\x07')),
    'labels that look alike': texts(('a', 'A'), ('b', 'Ａ')),
    'nan for a label': texts(('a', 'x'), ('b', 'nan'), ('c', 'y'), at=None),
    '-1 for a label': texts(('a', 'x'), ('b', '-1'), ('c', 'y'), at=None),
    'a class that train lacks': texts(('a', 'a'), ('b', 'c'), at=None, split='dev', names=('label', "'c'")),
    'an id twice': Wrong('dev', [dict(id=1, text='a', label='b')] * 2, ('id', "'1'"), 1),
    'no second text': Wrong('dev', [dict(text='a', second=s, label='b') for s in ('c', '')], ('second',), 1),
    'labels of unlabelled rows': texts(('z', ''), ('y', 'a'), split='unlabelled'),
    'a label that is no grade': pairs(('q', 'a', 1), ('q', 'b', 11)),
    'a label that is a word': pairs(('q', 'a', 1), ('q', 'b', 'no')),
    'a label that is long': pairs(('q', 'a', 1), ('q', 'b', LONG)),
    'a pair nobody labelled': pairs(('q', 'a', 1), ('q', 'b', -1)),
    'nothing right': pairs(('q', 'a', 0), ('q', 'b', 0), at=None),
    'no ranking': pairs(('q', 'a', 1), ('r', 'b', 1), at=None, split='test', names=()),
    'no candidate': pairs(*FULL, ('R', 'r', 'D', 'U', '', 0), at=2, names=(), keys=KEYS),
    'no question': pairs(*FULL, ('R', ' ', 'D', 'U', 'u', 0), at=2, names=('question',), keys=KEYS),
    'no document': pairs(*FULL, ('R', 'r', '', 'U', 'u', 0), at=2, names=('document_id',), keys=KEYS),
    'a sentence twice': pairs(*FULL, FULL[1], at=2, names=("'T'", "'Q'"), keys=KEYS),
    'a long id twice': pairs(*[('Q', 'q', 'D', LONG, 's', 1)] * 2, names=('xxx',), keys=KEYS),
    'two texts of a question': pairs(*FULL, ('Q', 'r', 'D', 'U', 'u', 0), at=2, names=("'Q'",), keys=KEYS),
    # files
    'two files': Wrong(
        'train.tsv.gz', lambda path: path.with_name('train.csv').write_text(''), ('train.csv',)
    ),
    'two corpora': Wrong('WikiQA-train.tsv', f'{HEADER}\n', ('train.csv',), task=TASK),
    'no dev': Wrong('dev.csv', Path.unlink, ('dev',)),
    'unlabelled of another spelling': Wrong('unlabeled.csv', 'text\nz\n'),
    'a folder': Wrong('dev.csv', lambda path: (path.unlink(), path.mkdir())),
    'a device': Wrong('dev.parquet', lambda path: path.symlink_to('/dev/null')),
    **{f'a pipe, {end}': Wrong(f'dev.{end}', make_pipe) for end in FORMATS},
    'no permission': Wrong('train.csv', lambda path: path.chmod(0)),
}


def place(path: Path, i: int) -> str:
    "Where the refusal of a row says that it is."
    kind = tables.format_of(path).partition('.')[0]
    return {'tsv': f'line {i + 2}', 'jsonl': f'line {i + 1}'}.get(kind, f'row {i + 1}')


def written(folder: Path, wrong: Wrong, name: str) -> bool:
    "A corpus of which one file is wrong; False: this format cannot hold what is wrong."
    path = folder / name
    stem = name.partition('.')[0]
    for split in SPLITS:
        if split != stem or path.suffix == '.csv':
            (folder / f'{split}.csv').write_bytes(
                as_file(SOUND[wrong.task], SOUND[wrong.task][0], Path('a.csv'))
            )
    if callable(wrong.content):
        if name == 'train.tsv.gz':
            path.touch()
        wrong.content(path)
    elif isinstance(wrong.content, list):
        try:
            path.write_bytes(as_file(wrong.content, list(wrong.content[0]), path))
        except ConfigError:
            return False
    else:
        content = wrong.content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return True


def checked(task: str, corpus: str) -> None:
    "A corpus as a plan reads it."
    found = load_corpus(task, corpus)
    if task == TEXTS:
        check_labels(found, make_config(task=task, corpus='embedded', mode='baseline'))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


@pytest.mark.parametrize('case', WRONG)
def test_a_file_that_is_wrong_is_named_with_its_place(case, monkeypatch):
    "Read as a whole and in parts, and without a change of any file."
    wrong = WRONG[case]
    monkeypatch.setattr(schema, 'PART', 1)
    owner = os.geteuid()
    for end in [''] if '.' in wrong.file else [f'.{end}' for end in wrong.ends]:
        with tempfile.TemporaryDirectory() as home:  # pytest's own folders are their owner's alone
            monkeypatch.setenv('KDNOTES_HOME', home)
            folder = Path(home, 'corpus')
            folder.mkdir()
            os.chmod(home, 0o777)
            path = folder / f'{wrong.file}{end}'
            if not written(folder, wrong, path.name):
                continue
            names = (path.name, *wrong.names, *([place(path, wrong.at)] if wrong.at is not None else []))
            before = contents(folder)
            if case == 'no permission' and owner == 0:  # whom no mode keeps out
                os.seteuid(65534)
            try:
                said = refused(lambda folder=folder: checked(wrong.task, str(folder)), *names)
                monkeypatch.setattr(sources, 'LARGE', 1)
                if case != 'no permission':
                    assert refused(lambda folder=folder: checked(wrong.task, str(folder))) == said
            finally:
                os.seteuid(owner)
            assert contents(folder) == before


AS = dict(frame=lambda rows: pd.DataFrame(rows, dtype=object), dicts=list)


@pytest.mark.parametrize('kind', AS)
@pytest.mark.parametrize('case', [case for case, of in WRONG.items() if isinstance(of.content, list)])
def test_rows_of_python_that_are_wrong_are_named(case, kind, monkeypatch, tmp_path):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    wrong = WRONG[case]
    data = dict.fromkeys(SPLITS, SOUND[wrong.task]) | {wrong.file: wrong.content}
    source = {split: AS[kind](rows) for split, rows in data.items()}

    def read():
        found = kd.load_data(source, wrong.task)
        checked(wrong.task, found.corpus)
        config = dict(task=wrong.task, corpus=found.corpus, unlabelled=found.unlabelled or 'auto')
        sources.corpus_of(make_config(mode='full_kd', **config))

    refused(read, *(name for name in wrong.names if name.isidentifier()), kind=KdnotesError)


# ---- what looks wrong and is not ----

BOOK = 'é' * 1_000_000
TAKEN = {  # a file, and its rows
    'a byte order mark': ('csv', '\ufefftext,label\na,b\nc,d\n', [('a', 'b'), ('c', 'd')]),
    'a mark in JSON': (
        'jsonl',
        '\ufeff{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}',
        [('a', 'b'), ('c', 'd')],
    ),
    'quotes': (
        'csv',
        'text,label\r\n"a ""b"", \n\r c",NA\n\n"x, ",007\n',
        [('a "b", \n\r c', 'NA'), ('x, ', '007')],
    ),
    'letters': ('tsv', 'text\tlabel\r\n"a\t1\r\n\r\nb\u2028\t0\n', [('"a', '1'), ('b\u2028', '0')]),
    'numbers': (
        'jsonl',
        '{"text": "a\\u2028", "label": 1}\n\n{"label": 1.0, "text": 7}\n{"text": 1e400, "label": false}\n',
        [('a\u2028', '1'), ('7', '1'), ('1e400', '0')],
    ),
    'whole numbers that became floats': ('csv', 'text,label\n1.0,1.0\nb,0.0\n', [('1.0', '1'), ('b', '0')]),
    'blanks': ('csv', 'text,label\n  x  ,a\n y,b\n', [('  x  ', 'a'), (' y', 'b')]),
    'a carriage return in a text': ('tsv', 'text\tlabel\na\rb\tc\nd\te\n', [('a\rb', 'c'), ('d', 'e')]),
    'NUL in a text': ('tsv', 'text\tlabel\na\0b\tc\nd\te\n', [('a\0b', 'c'), ('d', 'e')]),
    'lines of old Macs': ('csv', 'text,label\ra,b\rc,d\r', [('a', 'b'), ('c', 'd')]),
    'odd ends of lines': ('csv', 'text,label\r\r\na,b\r\r\nc,d', [('a', 'b'), ('c', 'd')]),
    'two megabytes in a cell': ('csv', f'text,label\n{BOOK},b\nc,d\n', [(BOOK, 'b'), ('c', 'd')]),
    'a wide table': (
        'csv',
        f'{WIDE},text,label\n{"," * 1000}a,b\n{"," * 1000}c,d\n',
        [('a', 'b'), ('c', 'd')],
    ),
    'names of classes': (
        'parquet',
        lambda: as_parquet(['text', 'label'], ['a', 'b'], [1, 0], classes=['no', 'yes']),
        [('a', 'yes'), ('b', 'no')],
    ),
}


@pytest.mark.parametrize('packed', ['', '.gz'])
@pytest.mark.parametrize('case', TAKEN)
def test_odd_files_are_read_as_what_they_say(case, packed, tmp_path, monkeypatch):
    "The splits need not be of one format, and a link is what it leads to."
    end, content, rows = TAKEN[case]
    if packed and end == 'parquet':
        pytest.skip('Parquet is packed itself')
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(schema, 'PART', 1)
    folder = tmp_path / 'corpus'
    folder.mkdir()
    for split in SPLITS:
        (folder / f'{split}.jsonl').write_bytes(as_file(SOUND[TEXTS], ['text', 'label'], Path('a.jsonl')))
    (folder / 'train.jsonl').unlink()
    data = content() if callable(content) else content.encode()
    (tmp_path / 'linked').write_bytes(gzip.compress(data) if packed else data)
    (folder / f'train.{end}{packed}').symlink_to(tmp_path / 'linked')
    sha256 = set()
    for large in (1 << 25, 1):
        monkeypatch.setattr(sources, 'LARGE', large)
        found = load_corpus(TEXTS, str(folder))
        sha256.add(found.sha256)
        assert [(row['text'], row['label']) for row in found.splits['train']] == rows
    assert len(sha256) == 1


def test_rows_that_are_scored_on_are_counted_and_learnt_from_nowhere_else(tmp_path):
    for split, cells in dict(
        train=[('a', '0'), ('a', '1'), ('a', '1'), ('b', '0'), ('b', '0'), ('c', '1')],
        dev=[(' a ', '0'), ('d', '0'), ('d', '1')],
        test=[('d', '0'), ('e', '1'), ('b', '1')],
        unlabelled=[('E', ''), ('f', '')],
    ).items():
        rows = [dict(text=text, label=label) for text, label in cells]
        (tmp_path / f'{split}.csv.gz').write_bytes(as_file(rows, ['text', 'label'], Path('a.csv.gz')))
    found = load_corpus(TEXTS, str(tmp_path))
    assert found.contradictions == dict(train=3, dev=2)
    assert (found.overlap, found.test_in_dev) == (dict(dev=1, test=1), 1)
    assert (found.left_out, [row['text'] for row in found.unlabelled]) == (1, ['f'])


def test_columns_may_stand_in_any_order(tmp_path):
    plain = load_corpus(TASK, str(write(tmp_path / 'plain')))
    assert [r['label'] for r in plain.splits['train']] == [1, 0, 0, 1, 0]
    assert plain.splits['train'][0]['sentence'] == 'Salt is "sodium chloride".'
    order = [2, 6, 0, 1, 5, 3, 4]
    lines = ['\t'.join(line.split('\t')[i] for i in order) + '\tmore' for line in (HEADER, *GOOD)]
    other = load_corpus(TASK, str(write(tmp_path / 'other', [f'{s}.tsv' for s in SPLITS], lines, '\n')))
    assert other.splits == plain.splits and other.sha256 == plain.sha256


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


def test_a_book_may_be_long(tmp_path):
    for split in SPLITS:
        (tmp_path / f'{split}.txt').write_text(f'{split} ' * 200_000)
    assert len(load_corpus('masked_lm', str(tmp_path)).splits['train'][0]['text']) > 1_000_000


@pytest.mark.parametrize('task, file', [(TEXTS, 'imdb.jsonl'), (TASK, 'train-v1.1.json')])
def test_a_pipe_is_no_copy_of_a_published_corpus(tmp_path, monkeypatch, task, file):
    name = 'imdb' if task == TEXTS else 'squad1'
    (tmp_path / name).mkdir()
    make_pipe(tmp_path / name / file)
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    refused(lambda: load_corpus(task, name), file)


def test_half_a_character_in_a_file_of_squad_is_refused(tmp_path, monkeypatch):
    context = 'Salt is white. Sugar \ud800 is too.'
    asked = dict(id='q', question='What is white?', answers=[dict(text='Salt', answer_start=0)])
    articles = [dict(title=f't{i}', paragraphs=[dict(context=context, qas=[asked])]) for i in range(20)]
    (tmp_path / 'squad1').mkdir()
    pack(tmp_path / 'squad1/train-v1.1.json.gz', json.dumps(dict(data=articles)).encode())
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    refused(lambda: load_corpus(TASK, 'squad1'), 'squad1', 'row 1')


# ---- names of corpora ----


def test_folders_that_are_none(tmp_path):
    names = [f'WikiQA-{split}.tsv' for split in SPLITS]
    (tmp_path / 'empty').mkdir()
    for name in (str(tmp_path / 'nowhere'), './nowhere', 'wikqa', str(tmp_path / 'empty')):
        refused(lambda name=name: load_corpus(TASK, name), name, *names, 'train, dev and test')
    write(tmp_path / 'half', names[:2])
    refused(lambda: load_corpus(TASK, str(tmp_path / 'half')), names[2])
    for split in SPLITS:
        (tmp_path / f'{split}.csv').write_text('question,answer,label\nq,a,1\nq,b,0\n')
    refused(lambda: load_corpus(TASK, str(tmp_path)), 'train.csv', "'sentence'", 'columns', 'COLUMNS')
    kind = ConfigError
    refused(lambda: load_corpus(TASK, str(tmp_path), 'answer=sentence'), "'answer=sentence'", kind=kind)
    assert load_corpus(TASK, str(tmp_path), 'sentence=answer').splits['dev'][1]['sentence'] == 'b'


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
    refused(lambda: load_corpus(TASK, 'someone/salt'), 'someone/salt', "'test'", 'row 3', 'label')
    hub['test']['label'][3], hub['test']['answer'][2] = 1, None
    refused(lambda: load_corpus(TASK, 'someone/salt'), 'row 2')
    del hub['test']['answer']
    refused(lambda: load_corpus(TASK, 'someone/salt'), "'sentence'")
    del hub['validation']
    refused(lambda: load_corpus(TASK, 'someone/salt'), "'validation'")


def test_a_hub_that_fails_while_delivering(hub, monkeypatch):
    def fail(hub_id):
        raise ConnectionError('reset by peer\nand much more')

    monkeypatch.setattr('datasets.load_dataset', fail)
    refused(lambda: load_corpus(TASK, 'someone/salt'), 'reset by peer')


def test_offline_names_the_places_looked_at(offline, monkeypatch):
    datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')

    def fail(hub_id):
        raise ConnectionError('offline')

    monkeypatch.setattr(datasets, 'load_dataset', fail)
    refused(lambda: load_corpus(TASK, 'wikiqa'), str(offline / 'home' / 'data' / 'wikiqa'), 'corpus=embedded')


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

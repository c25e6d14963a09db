"""Corpora whose columns are kept on disk: as those in memory, and read once on a machine."""

import json
import os
import re
import shutil
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
from faults import files_no_larger_than
from ranks import context
from letters import of_letters
from synthetic import read_large
from bench.stages import synthetic_pairs
from kdnotes.core import columns, files, tables
from kdnotes.core.cached import Writer
from kdnotes.core.config import KdnotesError, task_info
from kdnotes.core.files import FileError, cache_path
from kdnotes.experiment.clean import stale
from kdnotes.core.write_tables import as_file, file_rows
from kdnotes.tasks import documents, schema, sources
from kdnotes.tasks.candidates import SCHEMA
from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
from kdnotes.core.columns import Columns, Joined, codes
from kdnotes.tasks.ranking_metrics import group_by_question
from kdnotes.tasks.sources import SPLITS, load_corpus
from kdnotes.tasks.text_classification import TextClassification, TextRegression

ROWS = 600


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    return tmp_path / 'home'


@pytest.fixture
def pairs(tmp_path, home):
    return synthetic_pairs(tmp_path / 'pairs', ROWS)


@pytest.fixture
def reviews(tmp_path, home):
    folder = tmp_path / 'reviews'
    folder.mkdir()
    for split in SPLITS:
        rows = [dict(text=f'{split[:3]} a b {i % 50}', label=str(i % 3)) for i in range(120)]
        (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    return folder


@pytest.fixture
def large(monkeypatch):
    "Every corpus of tables counts as large."
    monkeypatch.setattr(sources, 'LARGE', 1)


def both(task, folder, monkeypatch):
    "A corpus in memory, and on disk; or the sentences that refuse them, '' where none does."
    found = []
    for at_least in (1 << 25, 1):
        monkeypatch.setattr(sources, 'LARGE', at_least)
        try:
            found.append(load_corpus(task, str(folder)))
        except KdnotesError as e:
            found.append(str(e))
    return found


def same_but_rows(one, other):
    "Are two corpora the same in all but what their rows are kept as?"
    return {k: v for k, v in vars(one).items() if k != 'splits'} == {
        k: v for k, v in vars(other).items() if k != 'splits'
    }


def refused(folder):
    "The sentence that refuses a corpus; '' where none does."
    try:
        load_corpus('answer_selection', str(folder))
    except KdnotesError as e:
        return str(e)
    return ''


def refuse_reading(monkeypatch):
    def read(*_):
        raise AssertionError('the corpus was read again')

    monkeypatch.setattr(sources, 'load_by_rules', read)


def test_columns_are_the_rows(pairs, monkeypatch):
    small, found = both('answer_selection', pairs, monkeypatch)
    assert same_but_rows(small, found)
    for split, rows in small.splits.items():
        kept = found.splits[split]
        listed = list(rows)
        assert list(kept) == listed and len(kept) == len(listed)
        assert [kept[i] for i in (0, 7, -1)] == [listed[i] for i in (0, 7, -1)]
        assert list(kept[3:9]) == listed[3:9] and list(kept[::-5]) == listed[::-5] and not list(kept[5:2])
        assert list(kept[np.array([4, 1])]) == [listed[4], listed[1]]
        for of in (kept, rows):
            assert list(Joined('|', of['question'], of['sentence'])) == [
                f"{row['question']}|{row['sentence']}" for row in listed
            ]
        assert codes(kept['question_id'])[1] == codes(rows['question_id'])[1]
        assert (codes(kept['question_id'])[0] == codes(rows['question_id'])[0]).all()
        assert kept['label'].tolist() == [row['label'] for row in listed]
        with pytest.raises(IndexError):
            kept[len(rows)]


@pytest.mark.parametrize('smoke', (False, True))
@pytest.mark.parametrize('questions', ('all', 'answered'))
def test_a_task_of_columns_on_disk_is_that_of_columns_in_memory(
    pairs, tmp_path, monkeypatch, questions, smoke
):
    made = []
    for corpus in both('answer_selection', pairs, monkeypatch):
        settings = AnswerSelectionSettings(train_questions=questions, document_title=True)
        task = AnswerSelection(corpus, settings=settings, smoke=smoke)
        task.encode(of_letters(), tmp_path / 'tokens')
        made.append(task)
    one, other = made
    assert len(list((tmp_path / 'tokens').glob('*.tokens'))) == 3, 'the same texts'
    assert (one.label_prior == other.label_prior).all()
    for split in SPLITS:
        assert list(one.rows[split]) == list(other.rows[split])
        assert (one.lengths(split) == other.lengths(split)).all()
        for name in ('ids', 'documents', 'question', 'items', 'labels', 'tie'):
            assert np.array_equal(
                getattr(one.questions[split], name), getattr(other.questions[split], name)
            ), name
    whole = group_by_question(one.rows['dev'])
    assert len(whole.items) == len(whole.tie) == len(one.rows['dev'])


@pytest.mark.parametrize('kind', (TextClassification, TextRegression))
def test_text_classification_of_columns(reviews, tmp_path, monkeypatch, kind):
    corpora = both('text_classification', reviews, monkeypatch)
    assert same_but_rows(*corpora) and corpora[0].contradictions
    one, other = map(kind, corpora)
    for task in (one, other):
        task.encode(of_letters(), tmp_path / 'tokens')
    assert one.head_labels == other.head_labels and one.head_config == other.head_config
    for split in SPLITS:
        assert np.array_equal(one.labels[split], other.labels[split])
        assert np.array_equal(one.lengths(split), other.lengths(split))


# ---- read once ----


def test_a_kept_corpus_is_not_read_again(pairs, monkeypatch):
    load_corpus('answer_selection', 'embedded')
    load_corpus('answer_selection', str(pairs))
    assert not (cache_path() / 'corpora').exists(), 'a small corpus is not kept'
    monkeypatch.setattr(sources, 'LARGE', 1)
    first = load_corpus('answer_selection', str(pairs))
    refuse_reading(monkeypatch)
    again = load_corpus('answer_selection', str(pairs))
    assert same_but_rows(first, again) and list(again.splits['dev']) == list(first.splits['dev'])


def test_a_corpus_is_read_once_on_a_machine(pairs):
    with ProcessPoolExecutor(2, context) as pool:
        found = list(pool.map(read_large, [pairs] * 2))
    assert len({sha256 for sha256, _ in found}) == 1 and sum(n for _, n in found) == 1


def test_columns_are_written_and_read_without_pyarrow(pairs, large, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    for _ in range(2):
        assert len(load_corpus('answer_selection', str(pairs)).splits['train']) == ROWS


def test_other_columns_are_read_anew(reviews, large):
    for split in SPLITS:
        path = reviews / f'{split}.jsonl'
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text('\n'.join(json.dumps(row | dict(other=f"b {row['text']}")) for row in rows))
    found = [load_corpus('text_classification', str(reviews), of) for of in (None, 'text=other')]
    assert len({corpus.sha256 for corpus in found}) == 2


def test_a_file_that_changed_is_another_corpus(reviews, large, monkeypatch):
    "Also where its size and its time of writing are those of before."
    before = load_corpus('text_classification', str(reviews))
    path = reviews / 'train.jsonl'
    data = path.read_bytes()
    stat = path.stat()
    with open(path, 'r+b') as f:
        f.write(data.replace(b'tra a b 7', b'tra b a 7', 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = load_corpus('text_classification', str(reviews))
    assert 'tra b a 7' in [row['text'] for row in after.splits['train']] and after.sha256 != before.sha256
    path.write_bytes(data)  # what is in it is what was read first
    refuse_reading(monkeypatch)
    assert load_corpus('text_classification', str(reviews)).sha256 == before.sha256


@pytest.mark.parametrize('size', (1 << 25, 1))
def test_a_file_that_changes_while_it_is_read(pairs, monkeypatch, size):
    monkeypatch.setattr(sources, 'LARGE', size)
    check = schema._check_cells

    def slow(*of):
        with open(pairs / 'train.tsv', 'a') as f:
            f.write('Q\t')
        check(*of)

    monkeypatch.setattr(schema, '_check_cells', slow)
    assert 'train.tsv changed while it was read; start the same command again' in refused(pairs)


def test_a_file_that_changes_while_another_is_read(pairs, large, monkeypatch):
    "It was read whole, and is not what was read any more."
    read = sources.load_by_rules

    def slow(*given):
        found = read(*given)
        with open(pairs / 'train.tsv', 'a') as f:
            f.write('Q\t')
        return found

    monkeypatch.setattr(sources, 'load_by_rules', slow)
    assert 'train.tsv changed while it was read' in refused(pairs)
    assert not list((cache_path() / 'corpora').glob('*.corpus/*'))


@pytest.mark.parametrize('name', ('train.1.bytes', 'dev.6.numbers', 'manifest.json'))
def test_a_kept_corpus_that_was_damaged_is_read_again(pairs, large, name):
    right = load_corpus('answer_selection', str(pairs))
    rows = list(right.splits['train'])
    [path] = (cache_path() / 'corpora').glob(f'*.corpus/{name}')
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # what is mapped stays as it is
    path.write_bytes(data)
    again = load_corpus('answer_selection', str(pairs))
    assert same_but_rows(again, right) and list(again.splits['train']) == rows


def test_columns_of_another_corpus_are_not_taken(pairs, reviews, large):
    "Whole as they are: somebody put them there."
    kept = []
    for task, folder in (('answer_selection', pairs), ('text_classification', reviews)):
        load_corpus(task, str(folder))
        kept += [path for path in (cache_path() / 'corpora').glob('*.corpus') if path not in kept]
    shutil.rmtree(kept[0])
    shutil.copytree(kept[1], kept[0])
    assert 'question' in load_corpus('answer_selection', str(pairs)).splits['train'][0]


# ---- what there is no room for ----


def test_a_disk_that_is_too_small_for_columns(pairs, large, monkeypatch):
    refuse_reading(monkeypatch)
    monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10))
    with pytest.raises(FileError, match='the columns of corpus .* take about .* free some room'):
        load_corpus('answer_selection', str(pairs))


@pytest.mark.parametrize('size', (0, 1000, 10_000))
def test_columns_that_cannot_be_written_leave_no_corpus(pairs, large, size):
    "The system refuses more bytes, whichever file and write they are of."
    with files_no_larger_than(size):
        assert re.search(r'(train[.0-9a-z]*|json|lock): File too large', refused(pairs))
    assert not list((cache_path() / 'corpora').glob('*.corpus/*'))
    assert len(load_corpus('answer_selection', str(pairs)).splits['train']) == ROWS


def test_room_is_asked_for_when_the_first_part_has_shown_what_rows_take(pairs, large, monkeypatch):
    asked = []
    monkeypatch.setattr(schema, 'PART', ROWS // 3)
    monkeypatch.setattr(schema, 'check_room', lambda folder, needed, what: asked.append(needed))
    load_corpus('answer_selection', str(pairs))
    size = sum(path.stat().st_size for path in (cache_path() / 'corpora').glob('*.corpus/train.*'))
    assert 0.5 * size < asked[0] < 2 * size


@pytest.mark.parametrize('end', ['tsv', 'csv.gz', 'jsonl'])
def test_reading_in_parts_takes_no_more_memory_for_more_rows(tmp_path, home, monkeypatch, end):
    for module in (schema, tables):
        monkeypatch.setattr(module, 'PART', 500)
    monkeypatch.setattr(columns, '_AT_ONCE', 500)
    peaks = []
    for rows in (4000, 16_000):
        path = as_format(synthetic_pairs(tmp_path / str(rows), rows), end) / f'train.{end}'
        tracemalloc.start()
        assert len(sources.read_split(path, 'train', SCHEMA, into=Writer(tmp_path / f'of {rows}'))) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 12_000 < 200, 'bytes a row'


def test_joined_tables_keep_their_texts_where_they_are(pairs, large):
    "As the rows of a run with rows without a label, in every rank."
    splits = load_corpus('answer_selection', str(pairs)).splits
    tables = [splits['train'], splits['dev'], splits['train']]
    texts = sum(rows['sentence'].nbytes + rows['question'].nbytes for rows in tables)
    tracemalloc.start()
    joined = Columns.joined(tables)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < texts / 4
    assert list(joined) == [row for rows in tables for row in rows]
    index = np.array([0, len(joined) - 1, ROWS + 3, 7])
    assert list(joined[index]) == [joined[i] for i in index.tolist()]
    assert list(Joined('|', joined['question'], joined['sentence'])[ROWS - 2 : ROWS + 2]) == [
        f"{row['question']}|{row['sentence']}" for row in joined[ROWS - 2 : ROWS + 2]
    ]


def many_equal_rows(path, rows):
    "A file of a few kilobytes."
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(['salt is white']))
    label = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(rows, dtype=np.int32) % 2), pa.array(['a', 'b'])
    )
    pq.write_table(pa.table(dict(text=text, label=label)), path)


def test_a_small_file_of_many_rows_is_large(tmp_path, home):
    for split in SPLITS:
        many_equal_rows(tmp_path / f'{split}.parquet', 200_000)
    assert sum(path.stat().st_size for path in tmp_path.glob('*.parquet')) < 1 << 20
    assert sources._large_files(task_info('text_classification').corpora, str(tmp_path), None)


@pytest.mark.parametrize('end', sources.FORMATS)
def test_rows_that_memory_has_no_room_for_are_refused_before_they_are_read(pairs, monkeypatch, end):
    as_format(pairs, end)
    read = schema.read_table
    monkeypatch.setattr(tables, 'free_memory', lambda: 1000)
    monkeypatch.setattr(schema, 'read_table', None)
    assert 'would take about' in refused(pairs) and 'GB of memory, and 0.0 GB are free' in refused(pairs)
    monkeypatch.setattr(schema, 'read_table', read)
    monkeypatch.setattr(sources, 'LARGE', 1)
    assert not refused(pairs), 'in parts there is room for it'


# ---- parts ----

KINDS = {
    'all columns': ('answer_selection', None),
    'no ids': ('answer_selection', ('Question', 'Sentence', 'Label')),
    'titles': ('answer_selection', ('Question', 'DocumentTitle', 'Sentence', 'Label')),
    'keys': ('answer_selection', ('question_id', 'Question', 'Sentence', 'Label')),
    'texts': ('text_classification', ('text', 'label')),
    'pairs': ('text_classification', ('text', 'second', 'label', 'cluster')),
}
FROM = dict(
    question_id='QuestionID',
    question='Question',
    sentence='Sentence',
    label='Label',
    text='Sentence',
    second='Question',
    cluster='DocumentID',
)


def rewritten(pairs, columns):
    "The same tables with these columns alone."
    for split in SPLITS:
        path = pairs / f'{split}.tsv'
        header, *lines = [line.split('\t') for line in path.read_text().splitlines()]
        places = [header.index(FROM.get(name, name)) for name in columns]
        rows = ['\t'.join(columns), *('\t'.join(line[i] for i in places) for line in lines)]
        path.write_text('\ufeff' + '\r\n'.join(rows) + '\r\n\r\n')


def as_format(folder, end):
    "The same tables in files of another format."
    for split in SPLITS if end != 'tsv' else ():
        rows = list(file_rows(folder / f'{split}.tsv'))
        path = folder / f'{split}.{end}'
        path.write_bytes(as_file(rows, list(rows[0]), path))
        (folder / f'{split}.tsv').unlink()
    return folder


@pytest.mark.parametrize('end', sources.FORMATS)
@pytest.mark.parametrize('kind', KINDS)
def test_parts_of_a_table_are_the_whole_of_it(pairs, monkeypatch, kind, end):
    task, columns = KINDS[kind]
    if columns:
        rewritten(pairs, columns)
    plain = load_corpus(task, str(pairs)).sha256  # in one part
    monkeypatch.setattr(schema, 'PART', 7)
    as_format(pairs, end)
    whole, found = both(task, pairs, monkeypatch)
    assert not isinstance(found, str), found
    assert whole.sha256 == plain and same_but_rows(found, whole)
    assert found.splits == whole.splits


def test_a_folder_whose_name_looks_like_a_pattern_is_read_and_no_other(pairs):
    here = pairs.parent / 'pairs[1]'
    for folder, rows in ((here, ROWS), (pairs.parent / 'pairs1', ROWS // 2)):
        folder.mkdir()
        for split in SPLITS:
            pd.read_csv(pairs / f'{split}.tsv', sep='\t')[:rows].to_parquet(folder / f'{split}.parquet')
    found = [load_corpus('answer_selection', str(folder)).sha256 for folder in (here, pairs)]
    assert found[0] == found[1]


# ---- what rows have in common ----


def test_a_contradiction_behind_a_row_whose_label_is_one_more():
    "Labels that are numbers: from row to row the text's number may rise by what the label falls."
    splits = dict(train=Columns.from_rows([dict(label=label) for label in (1, 0, 1)]))
    assert sources._contradictions(splits, dict(train=np.array([5, 6, 6]))) == dict(train=2)


# ---- columns that nobody needs ----


@pytest.mark.parametrize('end', [*sources.FORMATS, 'hub'])
def test_columns_that_nobody_needs_are_not_read(reviews, monkeypatch, end):
    "One of ten thousand columns takes no longer than one of three."
    wide = {f'c{i}': 'x' for i in range(300)}
    for split in SPLITS:
        path = reviews / f'{split}.jsonl'
        table = pd.DataFrame([json.loads(line) | wide for line in path.read_text().splitlines()])
        table.to_csv(reviews / f'{split}.tsv', sep='\t', index=False)
        path.unlink()
    read = []
    texts = schema._texts
    monkeypatch.setattr(schema, '_texts', lambda table, *of: read.extend(table.cells) or texts(table, *of))
    if end == 'hub':
        datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')
        formatted = []
        table = datasets.Dataset.from_pandas(table)
        table.set_transform(lambda part: formatted.extend(part) or part)
        own = task_info('text_classification').corpora.schema
        assert len(sources.hub_rows(table, 'test', 'someone/wide', own)) == 120
        assert set(formatted) == {'text', 'label'}
    else:
        as_format(reviews, end)
        load_corpus('text_classification', str(reviews))
    assert set(read) == {'text', 'label'}


def test_columns_of_files_that_have_changed_are_stale_and_no_others(reviews, large):
    load_corpus('text_classification', str(reviews))
    assert stale() == []
    with (reviews / 'train.jsonl').open('a') as f:
        f.write(json.dumps(dict(text='one more', label='1')) + '\n')
    assert [leftover.path.suffix for leftover in stale()] == [".corpus"]


def test_sets_that_are_no_split_are_there_of_a_large_corpus_too(tmp_path, large, monkeypatch):
    for split in SPLITS:
        (tmp_path / f'{split}.jsonl').write_text(json.dumps(dict(text=f'A text of {split}.')))
    monkeypatch.setitem(documents.MORE_SETS, 'imdb', lambda: [documents.document('r', 'A review.')])
    found = load_corpus('masked_lm', str(tmp_path), None, ('test', 'imdb'))
    assert [row['text'] for row in found.splits['imdb']] == ['A review.']


def test_columns_that_nobody_needs_take_no_memory(tmp_path):
    path = tmp_path / 'train.parquet'
    pd.DataFrame(dict(text=['a', 'b'], label=['x', 'y'], wide=['w' * 10**6, 'v' * 10**6])).to_parquet(path)
    assert tables.size_of(path) > 2e6 and tables.size_of(path, {'text', 'label'}) < 1000


def test_columns_of_an_earlier_version_are_stale(home):
    (cache_path() / 'corpora' / 'a.corpus').mkdir(parents=True)
    assert stale() == []
    (cache_path() / 'corpora' / 'a.corpus' / 'meta.json').write_text('{}')
    assert [one.path.name for one in stale()] == ['a.corpus']

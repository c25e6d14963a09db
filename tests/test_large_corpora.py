"""Corpora that are kept as columns: the same rows, numbers and refusals as of lists of dicts, read once on a
machine."""

import csv
import json
import multiprocessing
import os
import re
import shutil
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
from faults import files_no_larger_than
from letters import of_letters
from synthetic import read_large, synthetic_pairs
from kdnotes.core import files
from kdnotes.core.config import KdnotesError, task_info
from kdnotes.core.files import FileError, cache_path
from kdnotes.tasks import sources
from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
from kdnotes.tasks.columns import Columns, Texts, codes, numbers, open_columns, write_columns
from kdnotes.tasks.ranking_metrics import as_questions
from kdnotes.tasks.sources import SPLITS, CorpusError, load_corpus
from kdnotes.tasks.text_classification import TextClassification, TextClassificationSettings

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
    "A corpus as lists, and as columns."
    small = load_corpus(task, str(folder))
    monkeypatch.setattr(sources, 'LARGE', 1)
    return small, load_corpus(task, str(folder))


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
    monkeypatch.setattr(sources, '_streamed', read)


def test_columns_are_the_rows(pairs, monkeypatch):
    small, found = both('answer_selection', pairs, monkeypatch)
    assert same_but_rows(small, found)
    for split, rows in small.splits.items():
        kept = found.splits[split]
        assert isinstance(rows, list) and isinstance(kept, Columns)
        assert list(kept) == rows and len(kept) == len(rows)
        assert [kept[i] for i in (0, 7, -1)] == [rows[i] for i in (0, 7, -1)]
        assert list(kept[3:9]) == rows[3:9] and list(kept[::-5]) == rows[::-5] and not list(kept[5:2])
        assert list(kept.take(np.array([4, 1]))) == [rows[4], rows[1]]
        for of in (kept, rows):
            assert list(Texts(of, 'question', 'sentence', between='|')) == [
                f"{row['question']}|{row['sentence']}" for row in rows
            ]
        assert codes(kept, 'question_id')[1] == codes(rows, 'question_id')[1]
        assert (codes(kept, 'question_id')[0] == codes(rows, 'question_id')[0]).all()
        assert (numbers(kept, 'label') == numbers(rows, 'label')).all()
        with pytest.raises(IndexError, match='no row'):
            kept[len(rows)]


@pytest.mark.parametrize('smoke', (False, True))
@pytest.mark.parametrize('questions', ('all', 'answered'))
def test_a_task_of_columns_is_that_of_lists(pairs, tmp_path, monkeypatch, questions, smoke):
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
        for name in ('ids', 'documents', 'of', 'items', 'labels', 'tie'):
            assert np.array_equal(
                getattr(one.questions[split], name), getattr(other.questions[split], name)
            ), name
    whole = as_questions(one.rows['dev'])
    assert len(whole.items) == len(whole.tie) == len(one.rows['dev'])


@pytest.mark.parametrize('target', ('classes', 'number'))
def test_text_classification_of_columns(reviews, tmp_path, monkeypatch, target):
    corpora = both('text_classification', reviews, monkeypatch)
    assert same_but_rows(*corpora) and corpora[0].contradictions
    made = [
        TextClassification(corpus, settings=TextClassificationSettings(target=target)) for corpus in corpora
    ]
    for task in made:
        task.encode(of_letters(), tmp_path / 'tokens')
    one, other = made
    assert one.classes == other.classes and one.head_config == other.head_config
    for split in SPLITS:
        assert np.array_equal(one.labels[split], other.labels[split])
        assert np.array_equal(one.lengths(split), other.lengths(split))


def test_a_kept_corpus_is_not_read_again(pairs, large, monkeypatch):
    first = load_corpus('answer_selection', str(pairs))
    refuse_reading(monkeypatch)
    again = load_corpus('answer_selection', str(pairs))
    assert same_but_rows(first, again) and list(again.splits['dev']) == list(first.splits['dev'])


def test_a_small_corpus_is_not_kept(pairs):
    load_corpus('answer_selection', str(pairs))
    load_corpus('answer_selection', 'embedded')
    assert not (cache_path() / 'corpora').exists()


def test_without_pyarrow_rows_are_lists(pairs, large, monkeypatch):
    found = sources.importlib.util.find_spec
    monkeypatch.setattr(
        sources.importlib.util, 'find_spec', lambda name: None if name == 'pyarrow' else found(name)
    )
    assert isinstance(load_corpus('answer_selection', str(pairs)).splits['train'], list)


def test_a_file_that_changed_is_another_corpus(pairs, large):
    first = load_corpus('answer_selection', str(pairs))
    path = pairs / 'dev.tsv'
    text = path.read_text()
    path.write_text(text.replace('what ', 'who '))
    assert load_corpus('answer_selection', str(pairs)).sha256 != first.sha256
    path.write_text(text)
    assert load_corpus('answer_selection', str(pairs)).sha256 == first.sha256


def test_other_columns_are_read_anew(reviews, large):
    for split in SPLITS:
        path = reviews / f'{split}.jsonl'
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text('\n'.join(json.dumps(row | dict(other=f"b {row['text']}")) for row in rows))
    found = [load_corpus('text_classification', str(reviews), of) for of in (None, 'text=other')]
    assert len({corpus.sha256 for corpus in found}) == 2


@pytest.mark.parametrize('size', ('small', 'large'))
def test_a_file_that_changes_while_it_is_read(pairs, monkeypatch, size):
    if size == 'large':
        monkeypatch.setattr(sources, 'LARGE', 1)
    check = sources._check_characters

    def slow(rows, *more):
        with open(pairs / 'train.tsv', 'a') as f:
            f.write('Q\t')
        check(rows, *more)

    monkeypatch.setattr(sources, '_check_characters', slow)
    assert 'train.tsv changed while it was read; start the same command again' in refused(pairs)


def test_a_file_that_changes_while_another_is_read(pairs, large, monkeypatch):
    "It was read whole, and is not what was read any more."
    read = sources._streamed

    def slow(*given):
        found = read(*given)
        with open(pairs / 'train.tsv', 'a') as f:
            f.write('Q\t')
        return found

    monkeypatch.setattr(sources, '_streamed', slow)
    assert 'train.tsv changed while it was read' in refused(pairs)
    assert not list((cache_path() / 'corpora').glob('*.corpus/*'))


def edited_in_place(path, old: bytes, new: bytes):
    "Other letters at the first place of these, and the size and the time of before."
    before = path.stat()
    assert len(old) == len(new)
    with open(path, 'r+b') as f:
        f.seek(f.read().index(old))
        f.write(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def test_a_corpus_that_was_edited_in_place_is_read_again(reviews, large, monkeypatch):
    before = load_corpus('text_classification', str(reviews))
    edited_in_place(reviews / 'train.jsonl', b'tra a b 7', b'tra b a 7')
    after = load_corpus('text_classification', str(reviews))
    texts = [row['text'] for row in after.splits['train']]
    assert 'tra b a 7' in texts and after.sha256 != before.sha256
    os.utime(reviews / 'train.jsonl')  # touched: what is in it is what was read
    refuse_reading(monkeypatch)
    assert load_corpus('text_classification', str(reviews)).sha256 == after.sha256


@pytest.mark.parametrize('name', ('train.arrow', 'dev.arrow', 'meta.json'))
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


def test_a_wrong_row_is_refused_in_the_same_words(pairs, monkeypatch):
    path = pairs / 'test.tsv'
    lines = path.read_text().splitlines()
    lines[5] = lines[5].rsplit('\t', 1)[0] + '\t7'
    path.write_text('\n'.join(lines))
    sentences = []
    for at_least in (1 << 25, 1):
        monkeypatch.setattr(sources, 'LARGE', at_least)
        with pytest.raises(CorpusError) as refusal:
            load_corpus('answer_selection', str(pairs))
        sentences.append(str(refusal.value))
    assert sentences[0] == sentences[1] and 'test.tsv, line 6: Label is' in sentences[0]


def test_a_disk_that_is_too_small_for_columns(pairs, large, monkeypatch):
    refuse_reading(monkeypatch)
    monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10))
    with pytest.raises(
        FileError, match='the columns of corpus .* take about .* free some room, or set KDNOTES_HOME'
    ):
        load_corpus('answer_selection', str(pairs))


@pytest.mark.parametrize('size', (0, 1000, 30_000, 100_000))
def test_columns_that_cannot_be_written_leave_no_corpus(pairs, large, size):
    "The system refuses more bytes, whichever file and write they are of."
    with files_no_larger_than(size):
        assert re.search(r'\.(arrow|json|lock): it would be larger than a file may be; raise', refused(pairs))
    assert not list((cache_path() / 'corpora').glob('*.corpus/*'))
    assert len(load_corpus('answer_selection', str(pairs)).splits['train']) == ROWS


def test_columns_of_another_corpus_are_not_taken(pairs, reviews, large):
    "Whole as they are: somebody put them there."
    kept = []
    for task, folder in (('answer_selection', pairs), ('text_classification', reviews)):
        load_corpus(task, str(folder))
        kept += [path for path in (cache_path() / 'corpora').glob('*.corpus') if path not in kept]
    shutil.rmtree(kept[0])
    shutil.copytree(kept[1], kept[0])
    assert 'question' in load_corpus('answer_selection', str(pairs)).splits['train'][0]


def test_a_corpus_is_read_once_on_a_machine(pairs):
    with ProcessPoolExecutor(2, multiprocessing.get_context('spawn')) as pool:
        found = list(pool.map(read_large, [pairs] * 2))
    assert len({sha256 for sha256, _ in found}) == 1 and sum(n for _, n in found) == 1


def test_columns_hold_what_they_were_given(tmp_path):
    rows = [dict(a='', b=-1), dict(a='ü\u2028\n\t', b=2**62), dict(a='x' * 10**5, b=0)]
    write_columns(tmp_path / 'a.arrow', rows)
    assert list(open_columns(tmp_path / 'a.arrow')) == rows
    shutil.rmtree(tmp_path)


def streamed(task, folder, columns=None):
    "Is a corpus read part by part?"
    to = folder.parent / 'streamed'
    to.mkdir(exist_ok=True)
    paths = sources.split_files(folder, task_info(task).corpora)
    return sources._streamed(task, str(folder), columns, paths, to)


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(sources, '_PART', 7)  # rows


TABLES = {
    'all columns': ('answer_selection', None),
    'no ids': ('answer_selection', ('Question', 'Sentence', 'Label')),
    'no documents': ('answer_selection', ('QuestionID', 'Question', 'Sentence', 'Label')),
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
    for split in SPLITS:
        path = folder / f'{split}.tsv'
        table = pd.read_csv(path, sep='\t', dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE)
        other = path.with_suffix(f'.{end}')
        if end == 'csv':
            table.to_csv(other, index=False)
        elif end == 'jsonl':
            table.to_json(other, orient='records', lines=True)
        elif end == 'parquet':
            table.to_parquet(other, row_group_size=11)
        if end != 'tsv':
            path.unlink()


@pytest.mark.parametrize('end', sources.FORMATS)
@pytest.mark.parametrize('kind', TABLES)
def test_parts_of_a_table_are_the_whole_of_it(pairs, parts, kind, end):
    task, columns = TABLES[kind]
    if columns:
        rewritten(pairs, columns)
    plain = load_corpus(task, str(pairs)).sha256
    as_format(pairs, end)
    whole = load_corpus(task, str(pairs))
    assert whole.sha256 == plain
    found = streamed(task, pairs)
    assert found is not None and same_but_rows(found, whole)
    assert {split: list(rows) for split, rows in found.splits.items()} == whole.splits


WRONG = {
    'an id twice': lambda lines: [*lines, lines[3]],
    'another text': lambda lines: [*lines[:-1], lines[-1].replace('what ', 'who ')],
    'a label': lambda lines: [*lines[:-1], lines[-1][:-1] + '2'],
    'no label': lambda lines: [lines[0], *(line[:-1] + '0' for line in lines[1:])],
    'a field': lambda lines: [*lines, 'Q\tR'],
    'no text': lambda lines: [*lines[:-1], '\t'.join(['Q', '', *lines[-1].split('\t')[2:]])],
    'quotes': lambda lines: [*lines, '\t'.join(['N', '"say ""yes"""', 'D', 't', 'D-1', 'yes', '1'])],
    'ids that look alike': lambda lines: [
        *lines,
        *('\t'.join([q, 'x', 'D', 't', f'{q}1', 'yes', '1']) for q in ('Ａ', 'A')),
    ],
    'a control character': lambda lines: [*lines, '\t'.join(['a\x07', 'x', 'D', 't', 'D-1', 'yes', '1'])],
    'no header': lambda lines: lines[1:],
    'two columns of a name': lambda lines: [lines[0].replace('Sentence', 'Question', 1), *lines[1:]],
    'nothing': lambda lines: [],
    'a header alone': lambda lines: lines[:1],
    'half a character': None,
}


@pytest.mark.parametrize('split', ('train', 'test'))
@pytest.mark.parametrize('kind', WRONG)
def test_what_is_wrong_is_left_to_the_reader_of_whole_files(pairs, parts, monkeypatch, kind, split):
    path = pairs / f'{split}.tsv'
    if WRONG[kind]:
        path.write_text('\n'.join(WRONG[kind](path.read_text().splitlines())))
    else:
        path.write_bytes(path.read_bytes().replace(b'what', b'wh\xff', 1))
    sentence = refused(pairs)
    assert sentence and streamed('answer_selection', pairs) is None
    monkeypatch.setattr(sources, 'LARGE', 1)
    assert refused(pairs) == sentence


ODD = {
    'csv': 'text,label\r\n"a ""b"", \n\r c",NA\n\n007,"NA"\n  x  ,007\n',
    'jsonl': '{"text": "a\\u2028", "label": 1}\n\n{"label": 1.0, "text": 7}\n{"text": "b", "label": false}\n',
    'tsv': 'text\tlabel\r\n"a\t1\r\n\r\nb\u2028\t0\n',
}

SAID = {  # text, label of the rows above
    'csv': [('a "b", \n\r c', 'NA'), ('007', 'NA'), ('  x  ', '007')],
    'jsonl': [('a\u2028', '1'), ('7', '1'), ('b', '0')],
    'tsv': [('"a', '1'), ('b\u2028', '0')],
}


@pytest.mark.parametrize('end', ODD)
def test_odd_cells_are_the_same_in_parts(tmp_path, home, monkeypatch, end):
    monkeypatch.setattr(sources, '_PART', 1)
    for split in SPLITS:
        (tmp_path / f'{split}.{end}').write_text(ODD[end], newline='')
    whole = load_corpus('text_classification', str(tmp_path))
    assert [(row['text'], row['label']) for row in whole.splits['train']] == SAID[end]
    found = streamed('text_classification', tmp_path)
    assert found is not None and same_but_rows(found, whole)
    assert {split: list(rows) for split, rows in found.splits.items()} == whole.splits


LATER = {
    'a member that comes later': ('jsonl', '{"text": "a", "label": 0, "second": "b"}\n'),
    'a member that is missing later': ('jsonl', '{"text": "a"}\n'),
    'a list': ('jsonl', '{"text": ["a"], "label": 0}\n'),
    'no JSON': ('jsonl', '{"text": \n'),
    'a field too many': ('csv', 'a,0,1\n'),
    'an open quote': ('csv', '"a,0\n'),
    'no UTF-8': ('csv', b'\xff,0\n'),
}


@pytest.mark.parametrize('kind', LATER)
def test_a_later_part_of_another_kind_is_left_to_the_reader_of_whole_files(tmp_path, home, monkeypatch, kind):
    end, more = LATER[kind]
    monkeypatch.setattr(sources, '_PART', 2)
    good = {
        'csv': 'text,label\n' + ''.join(f'text {i},{i % 2}\n' for i in range(4)),
        'jsonl': ''.join(f'{{"text": "text {i}", "label": {i % 2}}}\n' for i in range(4)),
    }[end]
    for split in SPLITS:
        (tmp_path / f'{split}.{end}').write_text(good)
    assert streamed('text_classification', tmp_path) is not None
    with open(tmp_path / f'dev.{end}', 'ab') as f:
        f.write(more if isinstance(more, bytes) else more.encode())
    assert streamed('text_classification', tmp_path) is None


@pytest.mark.parametrize('end', ('csv', 'parquet'))
def test_a_folder_whose_name_looks_like_a_pattern_is_read_and_no_other(pairs, end):
    as_format(pairs, end)
    here = pairs.parent / 'pairs[1]'
    for folder, rows in ((here, ROWS), (pairs.parent / 'pairs1', ROWS // 2)):
        folder.mkdir()
        for split in SPLITS:
            table = getattr(pd, f'read_{end}')(pairs / f'{split}.{end}')[:rows]
            getattr(table, f'to_{end}')(folder / f'{split}.{end}', index=False)
    assert (
        load_corpus('answer_selection', str(here)).sha256
        == load_corpus('answer_selection', str(pairs)).sha256
    )


def test_ids_that_later_parts_lack_are_not_made_up(tmp_path, home, monkeypatch):
    monkeypatch.setattr(sources, '_PART', 2)
    rows = [dict(id=f'r{i}', text=f'text {i}', label=i % 2) for i in range(4)]
    rows += [dict(text=f'text {i}', label=i % 2) for i in range(4, 6)]
    for split in SPLITS:
        (tmp_path / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    assert streamed('text_classification', tmp_path) is None
    with pytest.raises(CorpusError, match='line 5: id'):
        load_corpus('text_classification', str(tmp_path))


def test_rows_without_a_member_are_not_lost(tmp_path, home, monkeypatch):
    monkeypatch.setattr(sources, '_PART', 4)
    for split in SPLITS:
        rows = ''.join(f'{{"text": "text {i}", "label": {i % 2}}}\n' for i in range(4))
        (tmp_path / f'{split}.jsonl').write_text(rows + '{}\n' * (split == 'train'))
    assert streamed('text_classification', tmp_path) is None
    with pytest.raises(CorpusError, match='line 5'):
        load_corpus('text_classification', str(tmp_path))


@pytest.mark.parametrize('kind', ('pipe', 'folder'))
def test_a_split_that_is_no_file_is_told_as_without_parts(pairs, monkeypatch, kind):
    (pairs / 'dev.tsv').unlink()
    if kind == 'pipe':
        os.mkfifo(pairs / 'dev.tsv')
    else:
        (pairs / 'dev.tsv').mkdir()
    sentence = refused(pairs)
    monkeypatch.setattr(sources, 'LARGE', 1)
    assert 'is no ordinary file' in sentence and refused(pairs) == sentence


def test_room_is_asked_for_when_the_first_part_has_shown_what_rows_take(pairs, large, monkeypatch):
    asked = []
    monkeypatch.setattr(sources, '_PART', ROWS // 3)
    monkeypatch.setattr(sources, 'check_room', lambda folder, needed, what: asked.append(needed))
    load_corpus('answer_selection', str(pairs))
    size = (next((cache_path() / 'corpora').glob('*.corpus')) / 'train.arrow').stat().st_size
    assert 0.5 * size < asked[1] < 2 * size


@pytest.mark.parametrize('end', ('csv', 'jsonl', 'parquet'))
def test_a_file_that_ends_too_early_is_told_as_without_parts(pairs, home, monkeypatch, end):
    as_format(pairs, end)
    path = pairs / f'dev.{end}'
    path.write_bytes(path.read_bytes()[:-40])
    sentence = refused(pairs)
    assert streamed('answer_selection', pairs) is None
    monkeypatch.setattr(sources, 'LARGE', 1)
    assert sentence and refused(pairs) == sentence


@pytest.mark.parametrize('rows', ([1] * 9 + [0], [0] + [1] * 9, [1, 0] * 5))
def test_second_texts_in_some_parts_only(pairs, parts, rows):
    rewritten(pairs, TABLES['pairs'][1])
    path = pairs / 'dev.tsv'
    header, *lines = path.read_text(encoding='utf-8-sig').splitlines()
    some = ['\t'.join([f'text {i}', 'more' * has, str(i % 2), str(i)]) for i, has in enumerate(rows)]
    path.write_text('\n'.join([header, *some]))
    assert streamed('text_classification', pairs) is None


def test_reading_in_parts_takes_no_more_memory_for_more_rows(tmp_path, home, monkeypatch):
    monkeypatch.setattr(sources, '_PART', 500)
    peaks = []
    for rows in (4000, 16_000):
        folder = synthetic_pairs(tmp_path / str(rows), rows)
        tracemalloc.start()
        assert streamed('answer_selection', folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 12_000 < 200, 'bytes a row'


def test_contradictions_and_overlap_by_hand(reviews):
    for split, rows in dict(
        train=[('a', '0'), ('a', '1'), ('a', '1'), ('b', '0'), ('b', '0'), ('c', '1')],
        dev=[(' a ', '0'), ('d', '0'), ('d', '1')],
        test=[('d', '0'), ('e', '1'), ('b', '1')],
    ).items():
        lines = [json.dumps(dict(text=text, label=label)) for text, label in rows]
        (reviews / f'{split}.jsonl').write_text('\n'.join(lines))
    found = load_corpus('text_classification', str(reviews))
    assert found.contradictions == dict(train=3, dev=2)
    assert (found.overlap, found.test_in_dev) == (dict(dev=1, test=1), 1)


# ---- what a file will cost is asked before it is read ----


@pytest.mark.parametrize('end', [*sources.FORMATS, 'hub'])
def test_columns_that_nobody_needs_are_not_read(reviews, monkeypatch, end):
    "One of ten thousand columns takes no longer than one of three."
    wide = {f'c{i}': 'x' for i in range(300)}
    for split in SPLITS:
        path = reviews / f'{split}.jsonl'
        table = pd.DataFrame([json.loads(line) | wide for line in path.read_text().splitlines()])
        table.to_csv(reviews / f'{split}.tsv', sep='\t', index=False)
        path.unlink()
    if end != 'hub':
        as_format(reviews, end)
    asked = []
    as_text = sources._as_text
    monkeypatch.setattr(sources, '_as_text', lambda cell: asked.append(cell) or as_text(cell))
    if end == 'hub':
        datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')
        rules = task_info('text_classification').corpora
        formatted = []
        table = datasets.Dataset.from_pandas(table)
        table.set_transform(lambda part: formatted.extend(part) or part)
        assert len(sources.hub_rows(table, 'test', 'someone/wide', rules)) == 120
        assert set(formatted) == {'text', 'label'}
    else:
        load_corpus('text_classification', str(reviews))
        assert len(asked) == 3 * 120 * 2
    assert 'x' not in asked


@pytest.mark.parametrize('end', ('tsv', 'csv', 'parquet'))
def test_a_missing_column_is_told_before_any_row_is_read(reviews, end):
    "And not with the names of all the others."
    table = pd.DataFrame({f'column {i}': ['a', 'b'] for i in range(300)})
    (reviews / 'train.jsonl').unlink()
    path = reviews / f'train.{end}'
    if end == 'parquet':
        table.to_parquet(path)
    else:
        table.to_csv(path, sep='\t' if end == 'tsv' else ',', index=False)
        path.write_bytes(path.read_bytes() + b'x' * 10**5 + b'\xff')  # what a reader of rows would come upon
    with pytest.raises(CorpusError, match=r"no column 'text' among .* and 280 more; rename") as refusal:
        load_corpus('text_classification', str(reviews))
    assert len(str(refusal.value)) < 800


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
    rules = task_info('text_classification').corpora
    for split in SPLITS:
        many_equal_rows(tmp_path / f'{split}.parquet', 200_000)
    assert sum(path.stat().st_size for path in tmp_path.glob('*.parquet')) < 1 << 20
    assert sources._large_files(rules, str(tmp_path), None)


@pytest.mark.parametrize('end', sources.FORMATS)
def test_rows_that_memory_has_no_room_for_are_refused_before_they_are_read(pairs, monkeypatch, end):
    as_format(pairs, end)
    tables = sources._tables
    monkeypatch.setattr(sources, 'free_memory', lambda: 1000)
    monkeypatch.setattr(sources, '_tables', None)
    assert 'would take about' in refused(pairs) and 'GB of memory, and 0.0 GB are free' in refused(pairs)
    monkeypatch.setattr(sources, '_tables', tables)
    monkeypatch.setattr(sources, 'LARGE', 1)
    assert not refused(pairs), 'in parts there is room for it'


def test_a_contradiction_behind_a_row_whose_label_is_one_more():
    "Labels that are numbers: from row to row the text's number may rise by what the label falls."
    splits = dict(train=[dict(label=label) for label in (1, 0, 1)])
    assert sources._contradictions(splits, dict(train=np.array([5, 6, 6]))) == dict(train=2)


def test_a_fault_of_a_file_that_memory_has_no_room_for_is_told(pairs, large, monkeypatch):
    "It cannot be read once more as a whole, and what was found is not lost."
    path = pairs / 'dev.tsv'
    lines = path.read_text().splitlines()
    path.write_text('\n'.join([*lines[:-1], lines[-1][:-1] + '7']))
    monkeypatch.setattr(sources, 'free_memory', lambda: 1000)
    assert f"dev.tsv, line {len(lines)}: Label is '7' and must be 0 or 1" in refused(pairs)

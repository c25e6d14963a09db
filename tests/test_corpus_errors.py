"""Bad corpora end with one sentence that names the place;
good ones get one name and one hash wherever they lie.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kdnotes.tasks.answer_selection import CORPORA
from kdnotes.core.config import KdnotesError
from kdnotes.tasks.answer_selection import HUB_COLUMNS, TSV_COLUMNS
from kdnotes.tasks.sources import SPLITS, CorpusError, load_corpus, local_copy, read_split, resolve_corpus

HEADER = '\t'.join(TSV_COLUMNS.values())
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
        ['line 1', "'Sentence'"],
    ),
    'no header': (dict(lines=GOOD), ['line 1', "'Question'"]),
    'label not 0/1': (dict(lines=replaced(1, '\t0', '\t2')), ['line 3', "'2'", '0 or 1']),
    'label empty': (dict(lines=replaced(1, '\t0', '\t')), ['line 3', "''", '0 or 1']),
    'label a word': (dict(lines=replaced(4, '\t0', '\tno')), ['line 6', "'no'"]),
    'broken encoding': (dict(encoding='cp1252'), ['line 3', '0x96', 'UTF-8']),
    'utf-16': (dict(encoding='utf-16'), ['line 1', 'UTF-8']),
    'empty file': (dict(lines=[]), ['is empty', 'Question', 'Sentence', 'Label']),
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
    'a text in quotes': (
        dict(
            lines=replaced(
                1, 'Salt – or a pun on it – is in every sea.', '"Salt, or ""salt"", is in every sea."'
            )
        ),
        ['line 3', 'Sentence stands in double quotes', 'save the table as .csv'],
    ),
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


def test_characters_that_look_like_line_ends_stay_in_a_text(tmp_path):
    odd = 'Salt\u2028is\x85here\x0b.'
    write(tmp_path, lines=replaced(1, 'Salt – or a pun on it – is in every sea.', odd))
    assert load_corpus(TASK, str(tmp_path)).splits['dev'][1]['sentence'] == odd


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


def test_embedded_is_the_same_each_time():
    a = load_corpus(TASK, 'embedded')
    b = load_corpus(TASK, 'embedded')
    assert a.sha256 == b.sha256 and a.name == a.kind == 'embedded' and set(a.splits) == set(SPLITS)


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
    return {name: [row[key] for row in rows] for key, name in HUB_COLUMNS.items()}


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
    rows = read_split(write(tmp_path / 'folder') / 'WikiQA-train.tsv', 'train', CORPORA)
    hub.update({s: columns(rows) for s in ('train', 'validation', 'test')})
    hub['test']['label'][3] = -1
    assert "someone/salt, split 'test', row 3: label is '-1'" in refused(
        lambda: load_corpus(TASK, 'someone/salt')
    )
    hub['test']['label'][3], hub['test']['answer'][2] = 1, None
    assert 'row 2' in refused(lambda: load_corpus(TASK, 'someone/salt'))
    del hub['test']['answer']
    assert "no column 'answer'" in refused(lambda: load_corpus(TASK, 'someone/salt'))
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

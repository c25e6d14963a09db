"Text classification as users bring it: files with columns of their own, through every door."

import csv
import json
import re
import shutil
from pathlib import Path
import nbformat
import pandas as pd
import pytest
import transformers
from kdnotes.cli import main
from kdnotes.core.config import KdnotesError, make_config
from kdnotes.core.resolve import Machine
from kdnotes.experiment.plan import plan
from kdnotes.experiment.shown import example_of
from kdnotes.experiment.study import run_study
from kdnotes.records.store import read_csv
from kdnotes.tasks.sources import CorpusError, load_corpus, read_split
from kdnotes.tasks.labelled_texts import CORPORA, class_names
from kdnotes.tasks.embedded import embedded_text_classification
from notebooks import papermill
from test_doctor import write_model

slow = pytest.mark.slow
COLUMNS = 'text=review,label=stars'
SIZES = dict(train=48, dev=24, test=24)


def test_a_line_of_imdb_may_hold_what_looks_like_its_end(tmp_path, monkeypatch):
    "U+0085 and U+2028 are characters of a text."
    (tmp_path / 'imdb').mkdir()
    rows = [
        dict(id=f'r{i}', text=f'film {i}\x85 good\u2028 bad', label='neg pos'.split()[i % 2])
        for i in range(90)
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / 'imdb/imdb.jsonl').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    corpus = load_corpus('text_classification', 'imdb')
    texts = {row['text'] for split in corpus.splits.values() for row in split}
    assert texts == {row['text'] for row in rows}


@pytest.mark.parametrize(
    'lines, words',
    [
        (['{"id": "a", "text": "a", "label": "p"}', '[' * 100_000], 'line 2: it is nested too deeply'),
        (['{"id": "a", "text": "a", "label": "p"}', '{"text": "b", "label": "n"}'], 'line 2: id is empty'),
        (['{"text": "a", "label": "p"}', '{"text": "b", "label": "n"}'], "there is no column 'id' among"),
        (['{"id": "a", "text": "caf\xe9", "label": "n"}'], 'line 1: byte 0xe9 is not UTF-8'),
    ],
)
def test_a_copy_of_imdb_with_a_line_that_is_no_review_is_refused(lines, words, tmp_path, monkeypatch):
    (tmp_path / 'imdb').mkdir()
    (tmp_path / 'imdb/imdb.jsonl').write_text('\n'.join(lines), encoding='latin-1')
    monkeypatch.setenv('KDNOTES_DATA', str(tmp_path))
    with pytest.raises(CorpusError, match=words):
        load_corpus('text_classification', 'imdb')


def test_the_real_imdb(corpora):
    if not (corpora / 'imdb').is_dir():
        pytest.skip('no copy of IMDB in $KDNOTES_DATA/imdb')
    sizes = {split: len(rows) for split, rows in load_corpus('text_classification', 'imdb').splits.items()}
    [path] = (corpora / 'imdb').glob('*.jsonl')
    assert sum(sizes.values()) == path.read_bytes().count(b'\n')
    assert sizes['train'] > sizes['test'] > sizes['dev'] > 0


def write_reviews(folder: Path, label=None) -> Path:
    "Three CSV files with other column names; `label` makes a row's label, else it is the row's own."
    label = label or (lambda row: row['label'])
    folder.mkdir()
    splits = embedded_text_classification()
    classes = sorted({row['label'] for row in splits['train']})[:3]
    for split, size in SIZES.items():
        rows = [row for row in splits[split] if row['label'] in classes]
        # of each class as many, in turn
        by_class = [[row for row in rows if row['label'] == name][: size // 3] for name in classes]
        with open(folder / f'{split}.csv', 'w', newline='', encoding='utf-8') as file:
            out = csv.writer(file)
            out.writerow(['review', 'stars', 'remark'])
            for row in (row for turn in zip(*by_class) for row in turn):
                out.writerow([row['text'], label(row), 'not read'])
    return folder


def write_encoder(folder: Path) -> Path:
    "A random model without a head, as pretrained ones are: its task gives it one."
    write_model(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.base_model.save_pretrained(folder)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    return tmp_path / 'home'


# ---- what is refused ----


WRONG = {
    'a map that names no column': (
        dict(columns='text=comment,label=stars'),
        ["train.csv: there is no column 'comment' among 'review', 'stars', 'remark'"],
    ),
    'a map that names no column for a key that may be missing': (
        dict(columns=f'{COLUMNS},cluster=author'),
        ["train.csv: there is no column 'author'"],
    ),
    'a map that names no key': (
        dict(columns=f'{COLUMNS},txt=remark'),
        ["names the key 'txt'", "is it 'text'?"],
    ),
    'a map with semicolons': (
        dict(columns='text=review;label=stars'),
        ["must be pairs key=column with commas between them"],
    ),
    "a map of another task's rows": (
        dict(columns='question=review,label=stars'),
        ["names the key 'question'", 'it is a key of task=answer_selection: is that task meant?'],
    ),
    'no map': (dict(columns='none'), ["there is no column 'text'", "columns='text=<your column>'"]),
    'a label that is no number': (
        dict(target='number'),
        ['is no number, and target=number needs one', "label '"],
    ),
    'a setting of another task': (
        dict(train_questions='answered'),
        [
            "train_questions is a setting of task='answer_selection'",
            "task='text_classification' does not read it",
        ],
    ),
    'an unknown task': (
        dict(task='sentiment'),
        ["task='sentiment' is refused", 'answer_selection, text_classification'],
    ),
}


@pytest.mark.parametrize('command', ['study', 'tune', 'doctor'])
@pytest.mark.parametrize('wrong', WRONG)
def test_what_cannot_be_is_refused_in_one_sentence(command, wrong, home, tmp_path, capsys):
    given, parts = WRONG[wrong]
    parameters = dict(
        task='text_classification',
        corpus=str(write_reviews(tmp_path / 'reviews')),
        columns=COLUMNS,
        smoke='true',
    )
    argv = [part for name, value in (parameters | given).items() for part in ('-p', f'{name}={value}')]
    assert main([command, *argv]) == 2
    [line] = capsys.readouterr().err.splitlines()
    for part in parts:
        assert part in line, line
    assert not list(home.glob('runs/*/*/config.json')), 'nothing was started'


TRAIN = {'text': ['a', 'b', 'c', 'd'], 'label': ['n', 'p', 'n', 'p']}
# how the columns of each file differ from TRAIN -> what is said
TABLES = {
    'a class with a blank': (
        dict(train=dict(label=['n', ' p', 'n', 'p'])),
        "label ' p' begins or ends with a blank",
    ),
    'a cluster without a name': (
        dict(dev=dict(cluster=['x', 'x', '', 'y'])),
        'dev.jsonl, line 3: cluster is empty',
    ),
    'a cluster that is a blank': (
        dict(dev=dict(cluster=['x', ' ', 'x', 'y'])),
        'dev.jsonl, line 2: cluster is empty',
    ),
    'a cluster that is missing': (
        dict(dev=dict(cluster=['x', 'x', 'y', None])),
        'dev.jsonl, line 4: cluster is empty',
    ),
    'pairs in some splits': (
        {split: dict(second=['x'] * 4) for split in ('train', 'dev')},
        'train holds pairs of texts and test single texts',
    ),
    'a list as a text': (
        dict(dev=dict(text=[['a'], ['b'], ['c'], ['d']])),
        'dev.jsonl, line 1: text holds a list',
    ),
}


def write_tables(folder: Path, changes: dict[str, dict]) -> Path:
    folder.mkdir()
    for split in SIZES:
        columns = TRAIN | changes.get(split, {})
        rows = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


def refused(folder: Path, **given) -> str:
    asked = make_config(task='text_classification', corpus=str(folder), mode='baseline', **given)
    with pytest.raises(KdnotesError) as e:
        plan(asked, Machine('cpu', 2))
    return str(e.value)


@pytest.mark.parametrize(
    ('labels', 'said'),
    [
        (['n', 'p', 'n', 'p'], "2 classes: 'n', 'p'"),
        (
            ['0.5', '1.0', '0.5', '1'],
            "2 classes: '0.5', '1'; labels like these are numbers, which target=number",
        ),
    ],
)
def test_the_plan_lists_the_classes(labels, said, home, tmp_path):
    corpus = write_tables(tmp_path / 'own', {split: dict(label=labels) for split in SIZES})
    asked = make_config(task='text_classification', corpus=str(corpus), mode='baseline')
    made = plan(asked, Machine('cpu', 2))
    assert said in made.amount and made.amount in made.explain()
    numbers = dict(dev=dict(label=['0.25'] * 4), train=dict(label=['0.5', '0.75', '1', '2']))
    assert 'target=number learns as such: use it, or' in refused(write_tables(tmp_path / 'other', numbers))


@pytest.mark.parametrize('name', TABLES)
def test_tables_that_would_be_misread_are_refused(name, home, tmp_path):
    changes, words = TABLES[name]
    assert words in refused(write_tables(tmp_path / 'own', changes))


@pytest.mark.parametrize(
    'content, words',
    [
        ('label,text\nn,hello, world\np,bye, moon\n', 'row 1: 3 fields where the header has 2'),
        ('text,label,label\na,n,p\nb,p,n\n', "two columns are called 'label'"),
        ('text,label\n', 'there is no row below the header'),
    ],
)
def test_a_csv_file_that_would_be_misread_is_refused(content, words, home, tmp_path, capfd):
    (tmp_path / 'own').mkdir()
    for split in SIZES:
        (tmp_path / f'own/{split}.csv').write_text(content)
    assert words in refused(tmp_path / 'own')
    assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(
    'columns, words',
    [
        ('text=label,label=label', "takes column 'label' for text and for label"),
        ('text=text,text=label', "names 'text' twice"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(columns, words, home, tmp_path):
    assert words in refused(write_tables(tmp_path / 'own', {}), columns=columns)


@pytest.mark.parametrize(
    'key, first, second, words',
    [
        ('id', 'a\rb', 'c', "id 'a\\rb' holds a control character"),
        ('id', 'n\u2075', 'n5', "id 'n5' looks like 'n⁵' of an earlier row and is not the same"),
        ('label', 'good', 'good\u00a0', "label 'good\\xa0' "),
        ('cluster', 'a\nb', 'c', "cluster 'a\\nb' holds a control character"),
    ],
)
def test_names_that_tables_cannot_hold_are_refused(key, first, second, words, home, tmp_path):
    n = len(TRAIN['label'])
    values = [first, second, *(f'{key}{i}' for i in range(n - 2))]
    assert words in refused(write_tables(tmp_path / 'own', {'train': {key: values}}))


def read_cells(folder: Path, texts: list[str], labels: list[str]) -> list[tuple[str, str]]:
    "Texts and labels of a training split, of which the cells are written as given."
    lines = [f'{{"text": {text}, "label": {label}}}\n' for text, label in zip(texts, labels)]
    (folder / 'train.jsonl').write_text(''.join(lines), encoding='utf-8')
    rows = read_split(folder / 'train.jsonl', 'train', CORPORA)
    return [(row['text'], row['label']) for row in rows]


@pytest.mark.parametrize(
    'cells',
    [
        ['2020-01-01', '2020-01-01T00:00:00', '2020-01-01 00:00:00'],
        ['12:30', '1_0', '007', '1.0', 'NaN', 'null', 'true', ' x '],
        ['a\u2028b', 'a\x85b', 'a\tb', 'a\nb', '\U0001f600'],
    ],
)
@pytest.mark.parametrize('ascii', [True, False])
def test_a_string_of_json_is_that_string(cells, ascii, tmp_path):
    texts = [json.dumps(cell, ensure_ascii=ascii) for cell in cells]
    labels = ['"n"', *['"p"'] * (len(cells) - 1)]
    assert [text for text, _ in read_cells(tmp_path, texts, labels)] == cells


def test_a_number_of_json_keeps_its_digits(tmp_path):
    written = {
        str(2**53 + 1): str(2**53 + 1),
        str(2**53): str(2**53),
        str(2**70): str(2**70),
        '9007199254740993.0': '9007199254740993.0',
        '-12345678901234567890.5': '-12345678901234567890.5',
        '1e400': '1e400',
        '1e-99999999999999999999': '1e-99999999999999999999',
        '1' * 5000: '1' * 5000,
        '1.0': '1',
        '-0.0': '0',
        '2.50': '2.5',
        '1e-7': '1e-07',
        'true': '1',
        'false': '0',
    }
    found = read_cells(tmp_path, ['"a"'] * len(written), list(written))
    assert [label for _, label in found] == list(written.values())


def test_a_member_that_a_line_lacks_is_an_empty_cell(tmp_path):
    (tmp_path / 'train.jsonl').write_text(
        '\ufeff{"label": "n", "text": "a", "more": [{}]}\r\n{"text": "b"}', encoding='utf-8'
    )
    with pytest.raises(CorpusError, match='train.jsonl, line 2: label is empty'):
        read_split(tmp_path / 'train.jsonl', 'train', CORPORA)


def test_texts_of_test_that_are_in_dev_are_told(home, tmp_path):
    changes = dict(dev=dict(text=['e', ' f ', 'g', 'h']), test=dict(text=['f', 'f', 'a', 'a']))
    folder = str(write_tables(tmp_path / 'own', changes))
    found = load_corpus('text_classification', folder)
    assert (found.test_in_dev, found.overlap) == (2, {'test': 2})
    asked = make_config(task='text_classification', mode='baseline', corpus=folder)
    assert '2 rows of test have the texts of a row of dev' in plan(asked, Machine('cpu', 2)).explain()


def test_texts_that_are_in_train_too_are_told(home, tmp_path):
    folder = write_tables(tmp_path / 'own', {})
    (folder / 'test.jsonl').write_bytes((folder / 'train.jsonl').read_bytes())
    found = load_corpus('text_classification', str(folder))
    n = len(found.splits['test'])
    assert found.overlap['test'] == n
    asked = make_config(task='text_classification', mode='baseline', corpus=str(folder), smoke=True)
    planned = plan(asked, Machine('cpu', 2))
    assert f'{n} of {n} rows of test' in planned.explain() and planned.overlap['test'] == (n, n)
    for task in ('answer_selection', 'text_classification'):
        embedded = load_corpus(task, 'embedded')
        assert embedded.overlap == {} and embedded.contradictions == {} and not embedded.test_in_dev


def test_one_text_with_two_labels_is_told(home, tmp_path):
    rows = dict(text=['twice', ' twice ', 'alike', 'alike'], label=['n', 'p', 'n', 'n'])
    folder = write_tables(tmp_path / 'own', {'train': rows})
    assert load_corpus('text_classification', str(folder)).contradictions == {'train': 2}
    asked = make_config(task='text_classification', mode='baseline', corpus=str(folder))
    words = 'labels: 2 of 4 rows of train have the texts of another row there, and another label'
    assert words in plan(asked, Machine('cpu', 2)).explain()


@pytest.mark.parametrize('batch_size, told', [(4, True), (3, False)])
def test_an_epoch_of_one_step_is_told(batch_size, told, home, tmp_path):
    asked = make_config(
        task='text_classification',
        mode='baseline',
        corpus=str(write_tables(tmp_path / 'own', {})),
        batch_size=batch_size,
    )
    words = 'steps: one an epoch: batch_size=4 takes all 4 rows of train at once'
    assert (words in plan(asked, Machine('cpu', 2)).explain()) == told


def test_two_corpora_in_one_folder_are_refused(tmp_path, corpora):
    folder = tmp_path / 'both'
    if not (corpora / 'wikiqa').is_dir():
        pytest.skip('no copy of WikiQA in $KDNOTES_DATA/wikiqa')
    shutil.copytree(corpora / 'wikiqa', folder)
    shutil.copy(folder / 'WikiQA-dev.tsv', folder / 'dev.tsv')
    with pytest.raises(CorpusError, match='WikiQA-train.tsv and dev.tsv, which are of two corpora'):
        load_corpus('answer_selection', str(folder))


def test_a_file_is_no_corpus_and_what_deals_it_out_is_named(home, tmp_path):
    folder = write_reviews(tmp_path / 'reviews')
    with pytest.raises(CorpusError, match='is a file, .* split it .*load_data'):
        load_corpus('text_classification', str(folder / 'train.csv'), COLUMNS)


def test_a_folder_may_be_a_path(home, tmp_path):
    folder = write_reviews(tmp_path / 'reviews')
    given = make_config(task='text_classification', corpus=folder, columns=COLUMNS)
    assert given == make_config(task='text_classification', corpus=str(folder), columns=COLUMNS)


def test_numbers_without_a_spread_are_refused(home, tmp_path):
    folder = write_tables(tmp_path / 'own', dict.fromkeys(SIZES, dict(label=['0.1', '0.10', '0.100', '.1'])))
    assert 'all labels are 0.1' in refused(folder, target='number')


NUMBERS = dict.fromkeys(SIZES, dict(label=['1', '2.', '-.5', '+3.4E38']))


@pytest.mark.parametrize(
    'label', ['1e39', '-3.5e38', '1e400', '1_0', 'nan', '-inf', '0x10', '1,5', '\u0663', '.']
)
def test_a_label_that_is_no_number_of_a_model_is_refused(label, home, tmp_path):
    changes = NUMBERS | {'test': dict(label=['1', '2', '3', label])}
    said = refused(write_tables(tmp_path / 'own', changes), target='number')
    assert f'test.jsonl, row 4: label {label!r} is no number' in said


# labels of train, and of test -> what is said, and of which row
NO_LABELS = {
    'SNLI': (
        ['0', '1', '2', '-1'],
        list('0120'),
        "train.jsonl, row 4: label '-1' .* 1 row of train; drop such",
    ),
    'GLUE': (list('0101'), ['-1'] * 4, "test.jsonl, row 1: label '-1' .* 4 rows of test; take a split that"),
    'some of test': (list('abab'), list('a?b?'), r"test.jsonl, row 2: label '\?' .* 2 rows of test; drop"),
    'nan': (['a', 'nan', 'a', 'b'], list('abab'), "train.jsonl, row 2: label 'nan' says that nobody"),
    'null': (list('abab'), ['a', 'b', 'a', 'null'], "test.jsonl, row 4: label 'null' says that nobody"),
    'NA': (['a', 'NA', 'NA', 'b'], list('abab'), "train.jsonl, row 2: label 'NA' .* 2 rows of train; drop"),
    'empty': (['a', '', 'a', 'b'], list('abab'), 'train.jsonl, line 2: label is empty; fill it in or remove'),
    'None': (
        ['a', None, 'a', 'b'],
        list('abab'),
        'train.jsonl, line 2: label is empty; fill it in or remove',
    ),
    'another class': (
        list('abab'),
        list('acac'),
        "test.jsonl, row 2: label 'c' is no class .* and 2 rows of",
    ),
}


@pytest.mark.parametrize('kind', NO_LABELS)
def test_a_row_without_a_label_is_of_no_class(kind, home, tmp_path):
    train, test, words = NO_LABELS[kind]
    changes = dict(train=dict(label=train), dev=dict(label=[train[0]] * 4), test=dict(label=test))
    assert re.search(words, refused(write_tables(tmp_path / 'own', changes)))


@pytest.mark.parametrize('labels', [['-1', '1'] * 2, ['-1', '0', '1', '1'], ['none', 'some'] * 2])
def test_labels_of_two_sides_are_classes(labels, home, tmp_path):
    folder = str(write_tables(tmp_path / 'own', dict.fromkeys(SIZES, dict(label=labels))))
    asked = make_config(task='text_classification', corpus=folder, mode='baseline')
    assert plan(asked, Machine('cpu', 2)).explain()


def test_labels_that_people_write_are_numbers(home, tmp_path):
    folder = str(write_tables(tmp_path / 'own', NUMBERS))
    asked = make_config(task='text_classification', corpus=folder, mode='baseline', target='number')
    assert plan(asked, Machine('cpu', 2)).explain()


def test_a_label_that_overflows_in_units_of_the_deviation_is_refused(home, tmp_path):
    numbers = dict.fromkeys(SIZES, dict(label=['1e-9', '2e-9', '1e-9', '3e-9']))
    numbers['test'] = dict(label=['1e-9', '1e38', '1e-9', '3e-9'])
    said = refused(write_tables(tmp_path / 'own', numbers), target='number')
    assert "test.jsonl, row 2: label '1e38' is too far from the labels of train" in said


LONG = 'x' * 100_000
# how the columns of train, and those of dev and test, differ from TRAIN; parameters
LONG_CELLS = {
    'a label with a blank': (dict(label=['n', 'p', f'{LONG} ', 'p']), {}, {}),
    'a label with a line end': (dict(label=['n', 'p', f'{LONG}\n{LONG}', 'p']), {}, {}),
    'labels that look alike': (dict(label=['n', 'p', f'{LONG}\u2075', f'{LONG}5']), {}, {}),
    'an id twice': (dict(id=['a', 'b', LONG, LONG]), {}, {}),
    'one label': (dict(label=[LONG] * 4), {}, {}),
    'a class': (dict(label=['n', LONG, 'n', 'n']), {}, {}),
    'no class': ({}, dict(label=[LONG] * 4), {}),
    'no number': (NUMBERS['train'], dict(label=[LONG] * 4, id=[LONG, 'a', 'b', 'c']), dict(target='number')),
    'a column': ({LONG: ['1'] * 4}, {}, dict(columns='text=review')),
}


@pytest.mark.parametrize('case', LONG_CELLS)
def test_a_long_cell_is_not_repeated_in_full(case, home, tmp_path):
    train, others, given = LONG_CELLS[case]
    folder = write_tables(tmp_path / 'own', dict(train=train, dev=others, test=others))
    said = refused(folder, **given)
    assert 'xxx...' in said and len(said) < 1000


@pytest.mark.parametrize(
    'columns',
    [
        LONG,
        f'{LONG}=text',
        f'text={LONG},text=label',
        f'text={LONG},label={LONG}',
        f'text={LONG}',
    ],
    ids=lambda columns: re.sub('x+', 'x', columns),
)
def test_a_long_map_is_not_repeated_in_full(columns, home, tmp_path):
    said = refused(write_tables(tmp_path / 'own', {}), columns=columns)
    assert 'xxx...' in said and len(said) < 1000


def test_classes_that_are_one_number_have_one_order():
    rows = [dict(label=label) for label in ('10', '01', '1', '001')]
    assert class_names(rows) == class_names(rows[::-1]) == ['001', '01', '1', '10']


def test_texts_longer_than_a_model_reads_are_refused(home, tmp_path):
    short = write_model(tmp_path / 'short')
    config = json.loads((short / 'config.json').read_text())
    longest = config['max_position_embeddings']
    folder = write_tables(tmp_path / 'own', {})
    if longest < 512:
        words = f'reads texts of at most {longest} tokens'
        assert words in refused(folder, teacher=str(short), max_length=512)


def test_one_class_only_is_refused(home, tmp_path):
    corpus = write_reviews(tmp_path / 'reviews', label=lambda row: 'good')
    asked = make_config(task='text_classification', corpus=str(corpus), columns=COLUMNS)
    with pytest.raises(KdnotesError, match="train.csv: every label is 'good', so there is nothing to learn"):
        plan(asked, Machine('cpu', 2))


def papermill_study(home, tmp_path, **parameters):
    "nbs/study.ipynb on a folder of reviews."
    corpus = write_reviews(tmp_path / 'reviews')
    given = dict(task='text_classification', corpus=corpus) | parameters
    return papermill(home, 'nbs/study.ipynb', tmp_path / 'study.ipynb', *given.items())


@slow
@pytest.mark.exhaustive  # test_bad_input.py has a notebook that refuses
def test_the_notebook_refuses_in_one_sentence_too(home, tmp_path):
    done = papermill_study(home, tmp_path, columns='text=comment,label=stars')
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert done.returncode != 0 and re.match("CorpusError: .*no column 'comment'", last), last


# ---- studies ----


@slow
@pytest.mark.exhaustive
def test_a_study_of_ones_own_texts_through_the_notebook(home, tmp_path):
    done = papermill_study(
        home,
        tmp_path,
        columns=COLUMNS,
        teacher=write_encoder(tmp_path / 'teacher'),
        student_layers='[1]',
        max_length=64,
        arms='baseline,full_kd',
        seeds=1,
        smoke=True,
    )
    assert done.returncode == 0, done.stderr
    study = home / 'runs/text_classification-reviews-smoke'
    records = {r['mode']: r for r in map(json.loads, (p.read_text() for p in study.glob('*/record.json')))}
    assert set(records) == {'baseline', 'full_kd'}
    for record in records.values():
        assert record['task'] == 'text_classification' and record['columns'] == COLUMNS
        assert record['primary']['metric'] == 'accuracy' and record['primary']['higher_is_better']
        folder = study / record['run_id']
        units = read_csv(folder / 'units.csv.gz').query("split == 'test' and metric == 'accuracy'")
        assert len(units) == SIZES['test'] and units['value'].mean() == pytest.approx(
            record['primary']['value']
        )
        # its own notebook went through, with the column map
        shown = nbformat.read(folder / 'executed.ipynb', 4)
        assert not [o for c in shown.cells for o in c.get('outputs', []) if o.output_type == 'error']
    table = (study / 'table.txt').read_text()
    assert 'test accuracy' in table and '\nmacro F1 ' in table, 'of the other metrics, too'


@slow
@pytest.mark.exhaustive
def test_a_number_is_better_when_its_error_is_lower(home, tmp_path):
    "A regression through a whole study: of two arms the one with the lower error is the better one."
    corpus = write_reviews(tmp_path / 'numbers', label=lambda row: len(row['text']) / 8)
    made = run_study(
        1,
        'baseline,full_kd',
        task='text_classification',
        target='number',
        corpus=str(corpus),
        columns=COLUMNS,
        teacher=str(write_encoder(tmp_path / 'teacher')),
        student_layers='1',
        max_length=64,
        smoke=True,
    )
    assert not made.failed and made.table.read_text() == f'{made.report}\n'
    records = {
        r['mode']: r for r in map(json.loads, (p.read_text() for p in home.glob('runs/*/*/record.json')))
    }
    primary = {mode: r['primary'] for mode, r in records.items()}
    assert {(p['metric'], p['higher_is_better']) for p in primary.values()} == {('mse', False)}
    better = primary['full_kd']['value'] < primary['baseline']['value']
    [sentence] = made.report.sentences
    saved = json.loads(next(home.glob('runs/*/full_kd-*/model/config.json')).read_text())
    values = pd.read_csv(corpus / 'train.csv')['stars']
    assert (saved['target_mean'], saved['target_deviation']) == pytest.approx(
        (values.mean(), values.std(ddof=0))
    )
    [numbers] = pd.read_csv(made.numbers).itertuples()
    difference = primary['full_kd']['value'] - primary['baseline']['value']
    assert numbers.difference == pytest.approx(difference, rel=1e-5)
    assert sentence.startswith('baseline -> full_kd (1 pair): squared error on the test set ')
    assert 'pearson' in made.report.metrics.index and '\npearson ' in str(made.report)
    assert ('(better in seed 0' if better else '(worse in seed 0') in sentence


def test_a_notebook_asks_a_model_of_pairs_about_two_texts(tmp_path):
    folder = write_reviews(tmp_path / 'reviews')
    columns = f'{COLUMNS},second=remark'
    corpus = load_corpus('text_classification', str(folder), columns)
    record = dict(task='text_classification', corpus=str(folder), columns=columns, settings={})
    record['corpus_sha256'] = corpus.sha256
    first = corpus.splits['test'][0]
    assert example_of(record) == dict(text=first['text'], pair='not read')
    single = load_corpus('text_classification', str(folder), COLUMNS)
    others = record | dict(columns=COLUMNS, corpus_sha256=single.sha256)
    assert example_of(others) == example_of(record | dict(corpus_sha256='gone')) and 'pair' not in example_of(
        others
    )

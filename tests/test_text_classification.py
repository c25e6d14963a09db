"Text classification as users bring it: files with columns of their own, through every door."

import csv
import json
import re
import shutil
from pathlib import Path
import nbformat
import pandas as pd
import pytest
from kdnotes.cli import main
from kdnotes.core.columns import Columns
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.render import phrase
from kdnotes.core.machine import Machine
from kdnotes.experiment.plan import plan
from kdnotes.experiment.display import example_of
from kdnotes.experiment.study import run_study
from kdnotes.results.runs import read_csv
from kdnotes.tasks.sources import CorpusError, load_corpus, read_split
from kdnotes.tasks.labelled_texts import SCHEMA, class_names
from kdnotes.tasks.embedded import embedded_text_classification
from notebooks import papermill
from small_runs import write_encoder

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
        (['{"id": "a", "text": "a", "label": "p"}', '[' * 100_000], 'line 2: '),
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
        ["names the key 'txt'", 'the keys are id, text'],
    ),
    'a map with semicolons': (
        dict(columns='text=review;label=stars'),
        ["there is no column 'review;label=stars'"],
    ),
    "a map of another task's rows": (
        dict(columns='question=review,label=stars'),
        ["names the key 'question'"],
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
        ["'sentiment'", 'answer_selection, text_classification'],
    ),
}


COMMANDS = ('study', 'tune', 'doctor')


@pytest.mark.parametrize('command,wrong', list(zip(COMMANDS * 3, WRONG)))
def test_what_cannot_be_is_refused_in_one_sentence(command, wrong, home, tmp_path, capsys):
    given, parts = WRONG[wrong]
    corpus = str(write_reviews(tmp_path / 'reviews'))
    parameters = dict(task='text_classification', corpus=corpus, columns=COLUMNS, smoke='true') | given
    argv = [part for name, value in parameters.items() for part in ('-p', f'{name}={value}')]
    assert main([command, *argv]) == 2
    [line] = capsys.readouterr().err.splitlines()
    for part in parts:
        assert part in line, line
    assert not list(home.glob('runs/*/*/config.json')), 'nothing was started'


TRAIN = {'text': ['a', 'b', 'c', 'd'], 'label': ['n', 'p', 'n', 'p']}


def train_has(key: str, first: str, second: str) -> dict:
    return dict(train={key: [first, second, f'{key}0', f'{key}1']})


def labels(*test: str, train=('1', '2.', '-.5', '+3.4E38')) -> dict:
    "Numbers as people write them, and others in test."
    return dict(train=dict(label=list(train)), dev=dict(label=list(train)), test=dict(label=[*test]))


NUMBER = dict(target='number')
# how the columns of each file differ from TRAIN, what is said, and parameters
TABLES = {
    **{
        f'no number: {label}': (
            labels('1', '2', '3', label),
            f'test.jsonl, row 4: label {label!r} is no number',
            NUMBER,
        )
        for label in ('1e39', '1_0', 'nan', '-inf', '0x10', '1,5', '\u0663')
    },
    'too far': (
        labels('1e-9', '1e38', '1e-9', '3e-9', train=('1e-9', '2e-9', '1e-9', '3e-9')),
        "test.jsonl, row 2: label '1e38' is too far from the labels of train",
        NUMBER,
    ),
    'one number': (
        labels('0.1', '.1', '.1', '.1', train=['0.1', '0.10', '0.100', '.1']),
        'all labels are 0.1',
        NUMBER,
    ),
    'a map of one column': (
        {},
        "names a key or a column twice",
        dict(columns='text=label,label=label'),
    ),
    'a map of one key': ({}, "names a key or a column twice", dict(columns='text=text,text=label')),
    'a control character': (train_has('id', 'a\rb', 'c'), "id 'a\\rb' holds a control character"),
    'ids that look alike': (
        train_has('id', 'n\u2075', 'n5'),
        "id 'n5' looks like 'n⁵' of an earlier row and is not the same",
    ),
    'a hard blank': (train_has('label', 'good', 'good\u00a0'), "label 'good\\xa0' "),
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
    ('labels', 'names', 'fractions'),
    [(['n', 'p', 'n', 'p'], ['n', 'p'], False), (['0.5', '1.0', '0.5', '1'], ['0.5', '1'], True)],
)
def test_the_plan_lists_the_classes(labels, names, fractions, home, tmp_path):
    corpus = write_tables(tmp_path / 'own', {split: dict(label=labels) for split in SIZES})
    asked = make_config(task='text_classification', corpus=str(corpus), mode='baseline')
    made = plan(asked, Machine('cpu', 2))
    assert made.labels == dict(names=names, fractions=fractions, weights=None)
    assert made.amount in made.explain()
    assert f'; {len(names)} classes: {", ".join(map(repr, names))}' in made.amount
    numbers = dict(dev=dict(label=['0.25'] * 4), train=dict(label=['0.5', '0.75', '1', '2']))
    assert 'use target=number, or correct them' in refused(write_tables(tmp_path / 'other', numbers))


def test_many_classes_are_listed_in_part():
    many = phrase('corpus.jinja', 'classes', [f'{i / 2}' for i in range(23)], True)
    assert many.endswith("'9.5' and 3 more; the labels are numbers, and target=number learns them as numbers")


def test_a_list_of_labels_is_no_class(home, tmp_path):
    listed = {split: dict(label=[['red', 'blue'], ['red'], ['red'], ['blue']]) for split in SIZES}
    words = refused(write_tables(tmp_path / 'listed', listed))
    assert 'label \'["blue", "red"]\' is a list; use target=labels' in words


@pytest.mark.parametrize('name', TABLES)
def test_tables_that_would_be_misread_are_refused(name, home, tmp_path):
    changes, words, *given = TABLES[name]
    assert words in refused(write_tables(tmp_path / 'own', changes), **dict(*given))


@pytest.mark.parametrize(
    'content, words',
    [
        ('label,text\nn,hello, world\np,bye, moon\n', 'row 1: 3 fields where the header has 2'),
        ('text,label,label\na,n,p\nb,p,n\n', "two columns are called 'label'"),
        ('text,label\n', 'there is no row'),
    ],
)
def test_a_csv_file_that_would_be_misread_is_refused(content, words, home, tmp_path, capfd):
    (tmp_path / 'own').mkdir()
    for split in SIZES:
        (tmp_path / f'own/{split}.csv').write_text(content)
    assert words in refused(tmp_path / 'own')
    assert capfd.readouterr() == ('', '')


def read_cells(folder: Path, texts: list[str], labels: list[str]) -> list[tuple[str, str]]:
    "Texts and labels of a training split, of which the cells are written as given."
    lines = [f'{{"text": {text}, "label": {label}}}\n' for text, label in zip(texts, labels)]
    (folder / 'train.jsonl').write_text(''.join(lines), encoding='utf-8')
    rows = read_split(folder / 'train.jsonl', 'train', SCHEMA)
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


# how the columns of each file differ from TRAIN, parameters, and what a plan tells
TOLD = {
    'test in dev': (
        dict(dev=dict(text=['e', ' f ', 'g', 'h']), test=dict(text=['f', 'f', 'a', 'a'])),
        {},
        '2 rows of test have the same texts as rows of dev',
    ),
    'two labels': (
        dict(train=dict(text=['twice', ' twice ', 'alike', 'alike'], label=['n', 'p', 'n', 'n'])),
        {},
        '2 of 4 rows of train have the same texts as another row of their split, with a different label',
    ),
    'one step': (
        {},
        dict(batch_size=4),
        'batch_size=4 takes all 4 rows of train at once: an epoch is one step',
    ),
    'numbers': (labels('1', '2', '3', '4'), NUMBER, 'an epoch is one step'),
}


@pytest.mark.parametrize('case', TOLD)
def test_what_a_plan_tells(case, home, tmp_path):
    changes, given, words = TOLD[case]

    def told(changes, **given):
        corpus = str(write_tables(tmp_path / str(len(list(tmp_path.iterdir()))), changes))
        asked = make_config(task='text_classification', mode='baseline', corpus=corpus, **given)
        return plan(asked, Machine('cpu', 2)).explain()

    assert words in told(changes, **given)
    assert words not in told({}, batch_size=3)


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


def test_two_corpora_in_one_folder_are_refused(tmp_path, corpora):
    folder = tmp_path / 'both'
    if not (corpora / 'wikiqa').is_dir():
        pytest.skip('no copy of WikiQA in $KDNOTES_DATA/wikiqa')
    shutil.copytree(corpora / 'wikiqa', folder)
    shutil.copy(folder / 'WikiQA-dev.tsv', folder / 'dev.tsv')
    with pytest.raises(CorpusError, match='dev.tsv and WikiQA-dev.tsv, and only one of them can be dev'):
        load_corpus('answer_selection', str(folder))


def test_a_file_is_no_corpus_and_what_deals_it_out_is_named(home, tmp_path):
    folder = write_reviews(tmp_path / 'reviews')
    with pytest.raises(CorpusError, match='load_data. splits a file'):
        load_corpus('text_classification', str(folder / 'train.csv'), COLUMNS)


# labels of train, and of test -> what is said, and of which row
NO_LABELS = {
    'SNLI': (
        ['0', '1', '2', '-1'],
        list('0120'),
        "train.jsonl, row 4: label '-1' .* 1 row of train; remove such",
    ),
    'GLUE': (
        list('0101'),
        ['-1'] * 4,
        "test.jsonl, row 1: label '-1' .* 4 rows of test; remove such rows, or take splits that",
    ),
    'some of test': (list('abab'), list('a?b?'), r"test.jsonl, row 2: label '\?' .* 2 rows of test; remove"),
    'nan': (['a', 'nan', 'a', 'b'], list('abab'), "train.jsonl, row 2: label 'nan' says that nobody"),
    'null': (list('abab'), ['a', 'b', 'a', 'null'], "test.jsonl, row 4: label 'null' says that nobody"),
    'NA': (['a', 'NA', 'NA', 'b'], list('abab'), "train.jsonl, row 2: label 'NA' .* 2 rows of train; remove"),
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
    'no number': (labels()['train'], dict(label=[LONG] * 4, id=[LONG, 'a', 'b', 'c']), NUMBER),
    'a column': ({LONG: ['1'] * 4}, {}, dict(columns='text=review')),
    'a map': ({}, {}, dict(columns=LONG)),
    'a map of two': ({}, {}, dict(columns=f'text={LONG},label={LONG}')),
}


@pytest.mark.parametrize('case', LONG_CELLS)
def test_a_long_cell_is_not_repeated_in_full(case, home, tmp_path):
    train, others, given = LONG_CELLS[case]
    folder = write_tables(tmp_path / 'own', dict(train=train, dev=others, test=others))
    said = refused(folder, **given)
    assert 'xxx...' in said and len(said) < 1000


def test_classes_that_are_one_number_have_one_order():
    rows = Columns.from_rows([dict(label=label) for label in ('10', '01', '1', '001')])
    assert class_names(rows) == class_names(rows[::-1]) == ['001', '01', '1', '10']


# ---- studies ----


@slow
@pytest.mark.exhaustive
def test_a_study_of_ones_own_texts_through_the_notebook(home, tmp_path):
    given = dict(
        task='text_classification',
        corpus=write_reviews(tmp_path / 'reviews'),
        columns=COLUMNS,
        teacher=write_encoder(tmp_path / 'teacher'),
        student_layers='[1]',
        max_length=64,
        arms='baseline,full_kd',
        seeds=1,
        smoke=True,
    )
    done = papermill(home, 'nbs/study.ipynb', tmp_path / 'study.ipynb', *given.items())
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
    rows = pd.read_csv(made.numbers).query("quantity == 'primary' and verdict.notna()")
    [numbers] = rows.itertuples()
    difference = primary['full_kd']['value'] - primary['baseline']['value']
    assert numbers.estimate == pytest.approx(difference, rel=1e-5)
    assert sentence.startswith(
        'baseline → full_kd (1 seed): With seed 0 alone, squared error on the test set is '
    )
    assert 'pearson' in made.report.metrics.index and '\npearson ' in str(made.report)
    assert ('lower (better)' if better else 'higher (worse)') in sentence


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

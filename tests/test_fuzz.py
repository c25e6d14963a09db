"""Malformed inputs, made by hypothesis from sound ones:
each is taken as what it says, or refused with one sentence of our own; nothing else is ever raised.

`KDNOTES_FUZZ` sets the number of inputs, over all kinds together, and as many tables: 250 always the same
ones by default; more of them, and others each time, by `make fuzz`.
"""

import contextlib
import copy
import csv
import gzip
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings, strategies as st
from kdnotes.stats import evidence
from kdnotes.results import overview
from kdnotes.report import report
from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
from kdnotes.train.checkpoint import (
    CheckpointError,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from kdnotes.commands.options import configurations, parse_parameters
from kdnotes.core.arms import MODES
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.spec import flat, parameters, value_of
from kdnotes.core.parse import make_config
from kdnotes.tasks.text_classification import TextClassification, TextRegression
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.core.run_id import run_id
from kdnotes.tasks.labelled_texts import check_labels
from kdnotes.tasks.sources import SPLITS, CorpusError, load_corpus, resolve_corpus
from kdnotes.tasks.batching import encode_pairs
from kdnotes.report.plotting import bind_figures
from kdnotes.core.tables import FORMATS, as_text, n_rows, number_text, read_table, size_of
from kdnotes.experiment.study_plan import choose_arms
from kdnotes.core.write_tables import EVERY, as_file, file_rows
from kdnotes.core.files import read_json
from kdnotes.distill.weights import ModelError, find_model
from kdnotes.results.runs import TABLES, append_row, read_rows, without_repeats
from kdnotes.results.store import export, find_record, records, units
from kdnotes.results.schema import SCHEMA, RecordError, make_row
from kdnotes.distill.teacher_cache import make_signal, open_signal
from handmade import make_record, make_units, write_run
from test_teacher_signal import KEY, Pairs, tiny_teacher

INPUTS = int(os.environ.get('KDNOTES_FUZZ', 250))
KINDS = 10  # of tests below without those of tables, which share them evenly

fuzz = settings(
    max_examples=-(-INPUTS // KINDS),
    derandomize=INPUTS <= 250,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.filter_too_much,
    ],
)

REFUSED = object()


def ours(action, kind: type[KdnotesError] = KdnotesError):
    "What an action gives, or REFUSED when it ends in one sentence of our own; else the test fails."
    try:
        result = action()
    except kind as e:
        event('refused')
        [line] = e._render_traceback_()
        assert line.strip() and '\n' not in line and '\r' not in line, repr(line)
        return REFUSED
    event('taken')
    return result


@pytest.fixture(scope='module', autouse=True)
def home(tmp_path_factory):
    "A home of the tests' own, where nobody asks a hub."
    folder = tmp_path_factory.mktemp('home')
    before = {k: os.environ.get(k) for k in ('KDNOTES_HOME', 'KDNOTES_DATA')}
    os.environ['KDNOTES_HOME'] = str(folder)
    os.environ.pop('KDNOTES_DATA', None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
        patch.setattr(report, 'draw_evidence', lambda *_: [])  # drawing takes a second, and is no reading
        yield folder
    for k, v in before.items():
        if v is None:
            os.environ.pop(k, None)
        else:
            os.environ[k] = v


# ---- faults ----

numbers = st.one_of(
    st.integers(-3, 70000),
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, float('nan'), float('inf')]),
)
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            '',
            ' ',
            '0',
            '1',
            'auto',
            'none',
            '../up',
            '~nobody',
            '~0',
            '/',
            '\0',
            'a\nb',
            'x' * 5000,
            '\ud800',
            '\u2028',
            '0x1',
            '1e3',
            'nan',
            'True',
        ]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def torn(draw, data: bytes) -> bytes:
    "A file after an accident: cut, a bit flipped, a piece lost, doubled or replaced."
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        n = draw(st.integers(1, 40))
        match draw(st.sampled_from(['cut', 'flip', 'lose', 'double', 'replace', 'insert'])):
            case 'cut':
                del data[at:]
            case 'flip' if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 'lose':
                del data[at : at + n]
            case 'double':
                data[at:at] = data[at : at + n]
            case 'replace':
                data[at : at + n] = draw(st.binary(max_size=n))
            case 'insert':
                data[at:at] = draw(
                    st.one_of(
                        st.binary(max_size=8),
                        st.sampled_from(
                            [
                                b'\t',
                                b'\n',
                                b'\r',
                                b'\0',
                                b'"',
                                b'{',
                                b'[' * 5000,
                                b'\xff\xfe',
                                b'\xe2\x80\xa8',
                            ]
                        ),
                    )
                )
    return bytes(data)


@st.composite
def changed(draw, value):
    "A JSON value with some of its parts taken out, renamed or replaced."
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place = None
        key = None
        while True:  # go down, and stop anywhere
            inner = value if place is None else place[key]
            if not isinstance(inner, (dict, list)) or not inner or place is not None and draw(st.booleans()):
                break
            place = inner
            key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if place is None:
            return draw(values)
        match draw(st.sampled_from(['out', 'other', 'rename'])):
            case 'out':
                del place[key]
            case 'rename' if isinstance(place, dict):
                place[draw(st.text(max_size=8))] = place.pop(key)
            case _:
                place[key] = draw(values)
    return value


def as_json(value) -> bytes:
    return json.dumps(value).encode()


@st.composite
def json_files(draw, value) -> bytes:
    "The file of a JSON object, or what became of it."
    return draw(
        st.one_of(
            changed(value).map(as_json),
            torn(as_json(value)),
            st.sampled_from(
                [b'', b'{}', b'[]', b'null', b'[' * 100000, b'{"a":' * 3000, b'1' * 5000, b'\xff']
            ),
        )
    )


# ---- tables ----

tables_fuzz = settings(fuzz, max_examples=-(-INPUTS // 2))
letters = st.characters(exclude_categories=['Cs'])
no_ends = st.characters(exclude_categories=['Cs'], exclude_characters='\t\r\n')
cell_types = dict(
    ints=st.integers(-(2**63), 2**63 - 1),
    floats=st.floats(allow_nan=False, allow_infinity=False),
    bools=st.booleans(),
    missing=st.none(),
)


@st.composite
def written_tables(draw) -> tuple[str, list[str], list[dict]]:
    "A format, names of columns, and rows of cells that it can hold."
    end = draw(st.sampled_from(FORMATS))
    kind = end.partition('.')[0]
    text = st.text(no_ends if kind == 'tsv' else letters, max_size=8)
    # the first name may not begin with what is a byte order mark there, nor look like several
    name = text.filter(lambda name: name.strip() and name[0] != '\ufeff' and not set(name) & set('\t;|,'))
    names = draw(st.lists(name, min_size=1, max_size=4, unique=True))
    types = cell_types | dict(texts=text)
    if kind in ('jsonl', 'parquet'):
        types |= dict(lists=st.lists(text, max_size=2))
    columns = {}
    for column in names:
        some = draw(
            st.lists(st.sampled_from(sorted(types)), min_size=1, max_size=1 if kind == 'parquet' else 3)
        )
        columns[column] = st.one_of(*(types[of] for of in some), st.none())
    rows = draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=5))
    rows = [{name: row[name] for name in names} for row in rows]
    if kind == 'jsonl':
        for row in rows[1:]:
            row.pop(draw(st.sampled_from([*names, None])), None)
    return end, names, rows


def expected_text(cell, kind: str) -> str | None:
    if kind == 'tsv':
        return '' if cell is None else str(cell)
    return number_text(repr(cell)) if kind == 'jsonl' and isinstance(cell, float) else as_text(cell)


@tables_fuzz
@given(written_tables(), st.sampled_from([None, 1, 2]), st.booleans(), st.sampled_from(['\n', '\r\n', '\r']))
def test_a_table_that_is_written_is_read_as_it_was(home, written, at_once, mark, line_end):
    end, names, rows = written
    kind, _, packed = end.partition('.')
    path = home / f'written.{end}'
    data = ours(lambda: as_file(rows, names, path), ConfigError)
    if data is REFUSED:  # an empty line is no row
        assert kind == 'tsv' and len(names) == 1 and '' in [as_text(row[names[0]]) for row in rows]
        return
    if kind == 'csv':  # as others write it
        buffer = io.StringIO(newline='')
        lines = csv.writer(
            buffer,
            lineterminator=line_end,
            quoting=csv.QUOTE_MINIMAL if line_end == '\r\n' else csv.QUOTE_ALL,
        )
        lines.writerows([names, *([as_text(row[name]) for name in names] for row in rows)])
        data = buffer.getvalue().encode()
        data = gzip.compress(data) if packed else data
    if kind != 'parquet':
        plain = gzip.decompress(data) if packed else data
        if kind != 'csv' and line_end == '\r\n':
            plain = plain.replace(b'\n', b'\r\n')
        data = gzip.compress(b'\xef\xbb\xbf' * mark + plain) if packed else b'\xef\xbb\xbf' * mark + plain
    path.write_bytes(data)
    head, *parts = read_table(path, names, at_once)
    assert head.names == names and sum(len(part.numbers) for part in parts) == len(rows)
    for name in names:
        cells = [as_text(cell) for part in parts for cell in part.cells[name]]
        assert cells == [expected_text(row.get(name), kind) for row in rows]
    if kind in ('jsonl', 'parquet'):  # types, too
        assert list(file_rows(path)) == rows
    assert size_of(path) > 0 and n_rows(path) >= kind.startswith('parquet')


SOUND = {
    'text_classification': [dict(text=f'{i} is "odd",\tö', label='ab'[i % 2], n=i) for i in range(4)],
    'answer_selection': [dict(question=f'q{i // 2}', sentence=f's{i}', label=i % 2) for i in range(4)],
}


def sound(task: str, end: str) -> bytes:
    rows = [{key: str(cell).replace('\t', ' ') for key, cell in row.items()} for row in SOUND[task]]
    return as_file(rows, list(rows[0]), Path(f'a.{end}'))


@tables_fuzz
@given(st.sampled_from(sorted(SOUND)), st.sampled_from(FORMATS), st.sampled_from(SPLITS), st.data())
def test_any_bytes_are_a_table_or_refused(task, end, split, data):
    if end.endswith('.gz') and data.draw(st.booleans()):
        plain = sound(task, end.removesuffix('.gz'))
        content = gzip.compress(data.draw(st.one_of(st.binary(max_size=200), torn(plain))))
    else:
        content = data.draw(
            st.one_of(st.binary(max_size=200), torn(sound(task, end)), torn(sound(task, end)))
        )
    with tempfile.TemporaryDirectory() as folder:
        for other in SPLITS:
            Path(folder, f'{other}.tsv').write_bytes(sound(task, 'tsv'))
        Path(folder, f'{split}.tsv').unlink()
        path = Path(folder, f'{split}.{end}')
        path.write_bytes(content)
        found = ours(lambda: (list(read_table(path, EVERY)), list(file_rows(path))), CorpusError)
        assert found is REFUSED or sum(len(part.numbers) for part in found[0]) == len(found[1])
        corpus = ours(lambda: load_corpus(task, folder), CorpusError)
        assert n_rows(path) >= 0 and path.read_bytes() == content
    if corpus is REFUSED:
        return
    assert len(corpus.sha256) == 64 and all(len(corpus.splits[split]) for split in SPLITS)
    if task == 'answer_selection':  # and the task can be made of it
        for questions, smoke in (('all', False), ('answered', True)):
            made = AnswerSelection(
                corpus, settings=AnswerSelectionSettings(train_questions=questions), smoke=smoke
            )
            assert len(made.questions[split].labels) <= len(corpus.splits[split])


def test_a_flipped_bit_of_a_parquet_file_does_not_end_the_process(tmp_path):
    "pyarrow aborts where it is asked about a column that such a file has lost."
    path = tmp_path / 'a.parquet'
    data = sound('text_classification', 'parquet')
    for at in range(len(data) - 500, len(data), 4):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with contextlib.suppress(CorpusError):
            list(file_rows(path))


# ---- parameters ----

fields = st.dictionaries(
    st.one_of(st.sampled_from(list(parameters())), st.text(max_size=10)), values, max_size=4
)
usual = st.fixed_dictionaries(
    {},
    optional=dict(
        mode=st.sampled_from(list(MODES)),
        seed=st.integers(0, 2**32),
        ranks=st.sampled_from(['auto', 1, 2, 8, '2', True, 2.0]),
        threads_per_rank=st.sampled_from(['auto', None, 1, '1']),
        epochs=numbers,
        learning_rate=numbers,
        precision=st.sampled_from(['fp32', 'tf32', 'mixed', None]),
        amp_dtype=st.sampled_from(['auto', 'fp16', 'bf16']),
        student_layers=st.lists(st.integers(-1, 7), max_size=4),
        student_init=st.sampled_from(['hub', 'teacher_pretrained']),
        temperature=numbers,
        alpha=numbers,
        study=texts,
        arm=texts,
        corpus=texts,
        teacher=texts,
        batch_size=numbers,
        profile=st.sampled_from(['laptop', 'paper']),
    ),
)
machines = st.builds(
    Machine, st.sampled_from(['cpu', 'cuda']), st.integers(1, 4), st.integers(0, 2), st.booleans()
)


@fuzz
@given(st.one_of(fields, usual), machines, st.sampled_from(['embedded', 'wikiqa', '/a/folder']))
@example({'ranks': 10**400}, Machine('cpu', 2), 'embedded')
@example({'epochs': float('nan')}, Machine('cpu', 2), 'embedded')
@example({1: 2}, Machine('cpu', 2), 'embedded')
def test_a_configuration(parameters, machine, corpus):
    config = ours(
        lambda: make_config(**{k: v for k, v in parameters.items() if isinstance(k, str)}), ConfigError
    )
    if config is REFUSED:
        return
    told = flat(config)
    assert make_config(**json.loads(json.dumps(told, allow_nan=False))) == config, (
        'it can be written and read again'
    )
    resolved = ours(lambda: resolve(config, machine, corpus), ConfigError)
    if resolved is REFUSED:
        return
    assert (
        'auto' not in [value_of(resolved, k) for k in ('corpus', 'ranks', 'threads_per_rank', 'precision')]
        and resolved.compute.ranks >= 1
        and (resolved.train is None or resolved.train.epochs > 0)
    )
    assert flat(make_config(**flat(resolved))) == flat(resolved)
    assert len(run_id(resolved, 'c', {}, 1).rpartition('-')[2]) == 12


@fuzz
@example([], [], 'x' * 5000)
@example(['study=a\nb'], [], '~0')
@example([], ['a\nb'], '\0')
@given(
    st.lists(
        st.one_of(
            st.text(max_size=20), st.builds('{}={}'.format, st.sampled_from(list(parameters())), texts)
        ),
        max_size=4,
    ),
    st.lists(st.one_of(st.sampled_from(list(MODES)), texts), max_size=2),
    texts,
)
def test_a_command_line(pairs, modes, name):
    configs = ours(lambda: configurations(modes, parse_parameters(pairs)), ConfigError)
    if configs is not REFUSED:
        assert configs[0] and {c.where.mode for c in configs[0]} <= set(MODES)
    ours(lambda: choose_arms(','.join([*modes, name])), ConfigError)
    found = ours(lambda: resolve_corpus('answer_selection', name), CorpusError)
    assert found is REFUSED or found in ('embedded', 'wikiqa') or Path(found).is_dir() or '/' in found
    found = ours(lambda: find_model(name), ModelError)
    assert found is REFUSED or (found / 'model.safetensors').is_file()


# few texts, so that rows share them, and names that look alike to a person or break a table
FEW_TEXTS = st.sampled_from(['ice floats', ' ice floats ', 'iron sinks', '[SEP]', 'a\x85b', 'ICE FLOATS'])
ODD_NAMES = st.one_of(
    st.sampled_from(
        ['1', '01', 'n5', 'n\u2075', 'n5 ', 'a\rb', 'a\tb', '', ' ', '\u200b', 'e\u0301', '\u00e9', 'null']
    ),
    st.integers(-2, 2),
    st.none(),
    st.floats(),
)


@st.composite
def labelled_splits(draw) -> dict[str, list[dict]]:
    "A corpus of few texts and two labels, with up to two odd names in it."
    row = st.fixed_dictionaries(dict(text=FEW_TEXTS, second=st.just(''), label=st.sampled_from('01')))
    splits = {split: draw(st.lists(row, min_size=2, max_size=6)) for split in SPLITS}
    for rows in splits.values():
        for i, row in enumerate(rows):
            row |= dict(id=f'r{i}', cluster=f'c{i // 2}')
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.sampled_from(splits[draw(st.sampled_from(SPLITS))]))
        row[draw(st.sampled_from(['id', 'cluster', 'label', 'second']))] = draw(ODD_NAMES)
    return splits


@fuzz
@given(labelled_splits(), st.sampled_from(['classes', 'number']))
def test_corpora_with_overlaps_and_odd_names(splits, target):
    with tempfile.TemporaryDirectory() as folder:
        for split, rows in splits.items():
            Path(folder, f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        corpus = ours(lambda: load_corpus('text_classification', folder), CorpusError)
        if corpus is REFUSED:
            return
        config = make_config(task='text_classification', corpus=folder, target=target, mode='baseline')
        if ours(lambda: check_labels(corpus, config), CorpusError) is REFUSED:
            return
        task = (TextRegression if target == 'number' else TextClassification)(corpus)
    texts = {s: [(r['text'].strip(), r['second'].strip()) for r in rows] for s, rows in corpus.splits.items()}
    for split in ('dev', 'test'):
        assert corpus.overlap.get(split, 0) == sum(pair in texts['train'] for pair in texts[split])
    for split, rows in corpus.splits.items():
        given = list(zip(texts[split], (row['label'] for row in rows)))
        contradicted = sum(any(t == text and other != label for t, other in given) for text, label in given)
        assert corpus.contradictions.get(split, 0) == contradicted
        assert len(task.rows[split]) == len(rows)


# ---- what runs leave ----

RECORD = make_record(study='fuzz')
ROWS = [
    make_row('start', ranks=1, threads_per_rank=1, steps=9, examples=9, precision='fp32', device='cpu'),
    make_row('overflow', step=3, scale=2.0),
    make_row('resume', step=2, path='p'),
    make_row('end', step=9, train_s=1.0, status='done'),
]


@pytest.fixture
def run(home):
    "A finished run, of which the record or a table is changed."
    folder = write_run(RECORD)
    yield folder
    shutil.rmtree(folder.path)


@fuzz
@given(json_files(RECORD))
@example(as_json({k: v for k, v in RECORD.items() if k != 'run_id'}))
@example(as_json(RECORD | dict(factors=[])))
@example(as_json(RECORD | dict(environment=RECORD['environment'] | dict(git=1))))
@example(as_json(RECORD | dict(run_id='full_kd-s0-other')))
@example(as_json(RECORD | dict(schema=[])))
@example(b'[' * 100000)
def test_a_record(home, run, data):
    (run.path / 'record.json').write_bytes(data)
    exported = home / 'thesis' / 'data' / 'fuzz.records.jsonl'
    exported.unlink(missing_ok=True)
    record = ours(run.record)
    if record is not REFUSED:
        assert record['schema'] == SCHEMA and record['run_id'] == run.run_id
    (run.path / 'state.json').write_bytes(data)
    for read in (run.state, run.create):
        ours(read)
    (run.path / 'state.json').unlink()
    for read in (
        lambda: records('fuzz'),
        lambda: units('fuzz'),
        lambda: find_record(RECORD['run_id']),
        lambda: export('fuzz'),
        lambda: report.report('fuzz'),
        lambda: [(overview.run_table(r), evidence.curve_of(r)) for r in records('fuzz')],
    ):
        ours(read)
    assert not exported.exists() or records('fuzz') == [
        json.loads(line) for line in exported.read_text().splitlines()
    ]


@fuzz
@given(
    st.lists(st.one_of(st.just(RECORD), changed(RECORD)), min_size=1, max_size=2)
    .map(lambda of: b''.join(as_json(r) + b'\n' for r in of))
    .flatmap(lambda data: st.one_of(st.just(data), torn(data)))
)
@example(as_json(RECORD | dict(settings=None)) + b'\n')
def test_exported_records(home, data):
    path = home / 'thesis' / 'data' / 'other.records.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    for read in (
        lambda: records('other'),
        lambda: units('other'),
        lambda: find_record('nobody'),
        lambda: find_record(RECORD['run_id']),
    ):
        ours(read)
    path.unlink()


@fuzz
@given(
    st.lists(st.one_of(st.sampled_from(ROWS), changed(ROWS[0]), changed(ROWS[2])), max_size=5)
    .map(lambda rows: b''.join(as_json(r) + b'\n' for r in rows))
    .flatmap(lambda data: st.one_of(st.just(data), torn(data)))
)
@example(b'\n')
@example(b'{"schema": 1}\n')
@example(b'{"schema": 1, "kind": "resume"}\n')
def test_rows(home, data):
    path = home / 'rows.jsonl'
    path.write_bytes(data)
    rows = ours(lambda: without_repeats(read_rows(path)), RecordError)
    ours(lambda: read_rows(path, 'step'), RecordError)
    append_row(path, ROWS[-1])
    after = ours(lambda: read_rows(path), RecordError)
    assert (rows is REFUSED) >= (after is REFUSED) and (after is REFUSED or after[-1] == ROWS[-1]), (
        'a row can be added to what a torn write left'
    )


TABLE = make_units(0.7, 0, 5).to_csv(index=False).encode()


@fuzz
@given(
    st.one_of(
        torn(gzip.compress(TABLE, mtime=0)), torn(TABLE).map(gzip.compress), torn(TABLE).map(gzip.compress)
    ),
    json_files({'accuracy.svg': dict(producer='p', run_ids=['a'], sha256='0')}),
)
@example(gzip.compress(b'rplit,set,unit,split,set,unit,cluster,metric,value'), b'{}')
def test_a_table_and_a_manifest(home, run, table, manifest):
    (run.path / 'record.json').write_bytes(as_json(RECORD))
    (run.path / 'units.csv.gz').write_bytes(table)
    found = ours(lambda: run.table('units'), RecordError)
    if found is not REFUSED:
        assert (
            list(TABLES['units'][0]) == [c for c in found if c in TABLES['units'][0]]
            and found['value'].dtype == float
            and all(isinstance(u, str) for u in found['unit'])
        )
    for read in (lambda: units('fuzz'), lambda: report.report('fuzz')):
        ours(read)
    folder = home / 'runs' / 'fuzz' / 'figures'
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'MANIFEST.json').write_bytes(manifest)
    if (
        ours(lambda: bind_figures(folder, {'new.svg': dict(producer='p', run_ids=[], sha256='1')}))
        is not REFUSED
    ):
        assert read_json(folder / 'MANIFEST.json')['new.svg']['sha256'] == '1'


# ---- what is kept to be faster, and to go on ----


@pytest.fixture(scope='module')
def signal(home):
    "A stored signal: its folder, its meta.json, what it says."
    stored = make_signal(Pairs(4), tiny_teacher(), home / 'signal', KEY | dict(storage_dtype='bf16'))
    meta = (home / 'signal' / 'meta.json').read_bytes()
    return home / 'signal', meta, stored(Pairs(4).batch('train', np.arange(4)))['logits']


@fuzz
@given(st.data())
def test_a_signals_description(signal, data):
    folder, meta, right = signal
    (folder / 'meta.json').write_bytes(data.draw(json_files(json.loads(meta))))
    found = ours(lambda: open_signal(folder))
    assert found is not REFUSED, 'a broken cache is no error: it is made again'
    if found is not None:
        assert torch.equal(found(Pairs(4).batch('train', np.arange(4)))['logits'], right), (
            'what is believed is right'
        )


class Speller:
    "A tokenizer of letters."

    is_fast = False
    init_kwargs: dict = {}

    def get_vocab(self):
        return {}

    def __call__(self, first, second, **_):
        return dict(
            input_ids=[[*map(ord, a), *map(ord, b)] for a, b in zip(first, second)],
            token_type_ids=[[0] * len(a) + [1] * len(b) for a, b in zip(first, second)],
        )


TEXTS = ['what', 'who'], ['that', 'nobody at all']


@pytest.fixture(scope='module')
def tokens(home):
    "Kept tokens: their files and what is in each."
    encode_pairs(Speller(), *TEXTS, 16, home / 'tokens')
    return {path: path.read_bytes() for path in sorted((home / 'tokens').glob('*.tokens/*'))}


@fuzz
@given(st.data())
def test_kept_tokens(tokens, data):
    path, whole = data.draw(st.sampled_from(sorted(tokens.items())))
    path.write_bytes(data.draw(st.one_of(torn(whole), torn(whole), st.binary(max_size=40))))
    # a broken cache is no error: it is made again
    (right, second), (kept, kept_second) = (
        encode_pairs(Speller(), *TEXTS, 16),
        encode_pairs(Speller(), *TEXTS, 16, path.parent.parent),
    )
    assert (
        (kept.values == right.values).all()
        and (kept.offsets == right.offsets).all()
        and (kept_second == second).all()
    ), 'what is believed is right'


@pytest.fixture(scope='module')
def saved(home):
    "A checkpoint: its folder and its files."
    path = save_checkpoint(
        home / 'checkpoints',
        7,
        dict(model=dict(a=torch.arange(4.0)), optimizer={}, random=dict(b=torch.zeros(2, dtype=torch.uint8))),
        dict(step=7, loss=0.5, names=['x']),
        'run-1',
    )
    return path, {p.name: p.read_bytes() for p in path.iterdir()}


@fuzz
@given(st.data())
def test_a_checkpoint(saved, data):
    path, files = saved
    name = data.draw(st.sampled_from(['manifest.json', 'manifest.json', *sorted(files)]))
    content = data.draw(json_files(json.loads(files[name])) if name == 'manifest.json' else torn(files[name]))
    for other, whole in files.items():
        (path / other).write_bytes(content if other == name else whole)
    found = ours(lambda: read_checkpoint(path, 'run-1'), CheckpointError)
    if found is REFUSED:
        assert newest_checkpoint(path.parent, 'run-1') is None
    else:
        assert (
            found.step == 7
            and found.state == dict(step=7, loss=0.5, names=['x'])
            and torch.equal(found.tensors['model']['a'], torch.arange(4.0))
        ), 'what is believed is right'

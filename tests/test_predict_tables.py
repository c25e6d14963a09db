"""Many texts at once: a list, a column, a table or a file gets for each text what it gets alone, in its
place; what cannot be answered is refused in one sentence, and no file is lost.
"""

import json
import math
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
from architectures import EACH_ARCHITECTURE, configs, write_teacher
from kinds import one_of_each
from test_predict import classifier
from kdnotes.api import load_run
from kdnotes.cli import main
from kdnotes.core.config import TASKS, ConfigError, KdnotesError, task_info
from kdnotes.core import tables
from kdnotes.core.tables import FORMATS, CorpusError
from kdnotes.experiment.export import export_model
from kdnotes.core.write_tables import as_file, file_rows
from kdnotes.experiment.predict import PredictError, load_reader, predict
from kdnotes.experiment.predict_tables import predict_file, predict_table
from kdnotes.experiment.saved_models import find_source

TEXTS = ['iron', 'iron rusts in moist air while gold does not', 'a', 'iron rusts', 'gold ' * 15]
AS = {
    'list': list,
    'tuple': tuple,
    'Series': lambda texts: pd.Series(texts, index=[3, 1, 1, 0, 9]),
    'array': np.array,
    'objects': lambda texts: np.array(texts, dtype=object),
}


def asked_alone(name: str, task: str, asked: list[dict]) -> list:
    "An answer to each, asked by itself."
    info = task_info(task)
    reader, _ = load_reader(find_source(name), info)
    return [info.use.answer(reader, of) for of in asked]


def probabilities(answer) -> dict[str, float]:
    return {row['label']: row['probability'] for row in answer.values['labels']}


@pytest.fixture
def model(tmp_path, home) -> str:
    return str(classifier(tmp_path / 'm', outputs=3))


# ---- lists ----


@pytest.mark.parametrize('kind', AS)
def test_several_texts_get_an_answer_each(model, kind):
    alone = asked_alone(model, 'text_classification', [dict(text=text) for text in TEXTS])
    found = predict(model, text=AS[kind](TEXTS))
    assert len(found) == 5 and found.task == 'text_classification' and found.seconds > 0
    assert len({tuple(probabilities(answer).values()) for answer in alone}) == 5  # they differ
    for one, among in zip(alone, found, strict=True):
        assert probabilities(among) == pytest.approx(probabilities(one), abs=1e-6)
        assert list(probabilities(among)) == list(probabilities(one)) and among.notes == one.notes
    first = {f'probability_{label}': p for label, p in probabilities(alone[0]).items()}
    assert found.table.loc[0].drop(['predicted', 'probability']).to_dict() == pytest.approx(first, abs=1e-6)
    assert found.table['predicted'].tolist() == [answer.values['labels'][0]['label'] for answer in alone]


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_padding_changes_no_answer_of_any_architecture(tmp_path, home, kind):
    folder = str(write_teacher(tmp_path / kind, configs(dropout=0.1)[kind]))
    asked = dict(text=['ab', 'a', 'the quick brown fox', 'b ' * 40], pair=['c', 'of many words', 'd', 'e'])
    found = predict(folder, **asked)
    each = [dict(zip(asked, texts)) for texts in zip(*asked.values())]
    for among, alone in zip(found, asked_alone(folder, 'text_classification', each), strict=True):
        assert probabilities(among) == pytest.approx(probabilities(alone), abs=1e-6)


def test_several_questions_have_their_own_candidates(tmp_path, home):
    folder = str(classifier(tmp_path / 'm'))
    asked = dict(
        question=['iron', 'gold', 'air'], candidates=[['a', 'iron rusts'], ['c'], ['x', 'y', 'a b c']]
    )
    found = predict(folder, **asked)
    each = [dict(zip(asked, of)) for of in zip(*asked.values())]
    for answer, alone in zip(found, asked_alone(folder, 'answer_selection', each), strict=True):
        rows, expected = answer.values['candidates'], alone.values['candidates']
        assert [row['candidate'] for row in rows] == [row['candidate'] for row in expected]
        assert [row['score'] for row in rows] == pytest.approx([row['score'] for row in expected], abs=1e-6)
    assert found.table.index.tolist() == [0, 0, 1, 2, 2, 2] and sorted(found.table['rank'][2]) == [1, 2, 3]


@pytest.mark.parametrize(
    'asked, words',
    {
        'a list and a text': (dict(text=['a', 'b'], pair='c'), 'text is a list of 2 and pair is given once'),
        'of other lengths': (dict(text=['a', 'b'], pair=['c']), 'text is a list of 2 and pair is one of 1'),
        'nested': (
            dict(text=['a', ['b']]),
            "number 1 of 2, counted from 0: the text is ['b'], and a text is",
        ),
        'of one question': (
            dict(question=['a', 'b'], candidates=['c', 'd']),
            'candidates is given once; give as many of each, with a list of candidates for each',
        ),
        'of no question': (dict(question='a', candidates=[['c'], ['d']]), 'question is given once'),
        'letters': (dict(question='a', candidates='bcd'), "candidates is 'bcd'; give a list of texts"),
        'half nested': (
            dict(question=['a', 'b'], candidates=[['c'], 'd']),
            "1 of 2, counted from 0: candidates is",
        ),
        'empty': (dict(text=['a', '']), 'number 1 of 2, counted from 0: the text is empty'),
        'None': (dict(text=['a', None]), 'the text is None, and a text is needed'),
        'a gap': (dict(text=pd.Series(['a', np.nan])), 'the text is nan, and a text is needed'),
        'a number': (dict(text=[5]), 'the text is 5, and a text is needed'),
        'a number alone': (dict(text=5), 'the text is 5, and a text is needed'),
        'nothing': (dict(text=[]), 'text is an empty list'),
        'no such input': (dict(texts=['a']), 'a model is not asked with texts'),
        'a set': (dict(text={'a'}), "the text is {'a'}, and a text is needed"),
        'beside': (dict(text=['a'], beside='m'), 'beside is for one text'),
        'of another task': (dict(question=['a'], passage=['b']), 'passage is not read'),
    }.values(),
)
def test_what_nobody_can_tell_apart_is_refused(model, asked, words):
    with pytest.raises(PredictError) as e:
        predict(model, **asked)
    assert words in str(e.value) and '\n' not in str(e.value)


# ---- tables ----

TABLES = {
    'answer_selection': dict(
        question=['What is iron?', 'Who?', 'What is iron?', 'Who?'],
        sentence=['Iron is a metal.', 'Ada.', 'Paris is a city in France.', 'It was Marie Curie in 1898.'],
    ),
    'text_classification': dict(text=['Iron is a metal.', 'Fine.', 'It rains in Paris in spring.']),
    'sentence_pairs': dict(text=['Iron rusts.', 'A city.'], second=['Iron rusts in air.', 'Gold.']),
    'masked_lm': dict(text=['Iron is a [MASK] .', '[MASK] and [MASK] .']),
    'extractive_qa': dict(
        question=['What is iron?', 'Where?'],
        context=['Iron is a metal. Paris is a city.', 'Paris is in France. ' * 30],
    ),
    'token_classification': dict(
        text=['Ada May left Ashford in April.', 'It rained.', 'Ada left Marlow. ' * 30]
    ),
}
TABLES['embeddings'] = TABLES['answer_selection']


def by_single_calls(name: str, task: str, table: pd.DataFrame) -> pd.DataFrame:
    "What a model says of each row, asked alone."
    if task == 'answer_selection':
        found = pd.DataFrame(index=table.index, columns=['rank', 'log_odds', 'probability'], dtype=float)
        for question, rows in table.groupby('question'):
            asked = dict(question=question, candidates=rows['sentence'].tolist())
            for row in asked_alone(name, task, [asked])[0].values['candidates']:
                found.loc[rows.index[row['place']]] = [row['rank'], row['score'], row['probability']]
        return found
    if task == 'embeddings':
        found = pd.DataFrame(index=table.index, columns=['rank', 'similarity'], dtype=float)
        for question, rows in table.groupby('question'):
            asked = dict(question=question, candidates=rows['sentence'].tolist())
            for row in asked_alone(name, task, [asked])[0].values['texts']:
                found.loc[rows.index[row['place']]] = [row['rank'], row['similarity']]
        return found
    inputs = dict(text='text', second='pair', question='question', context='passage')
    asked = [{inputs[key]: text for key, text in row.items()} for row in table.to_dict('records')]
    said = [answer.values for answer in asked_alone(name, task, asked)]
    if task == 'masked_lm':
        gaps = [{f'probability_{i}': of[0]['probability'] for i, of in enumerate(v['gaps'], 1)} for v in said]
        return pd.DataFrame(gaps, index=table.index)
    if task == 'text_classification':
        rows = [{f'probability_{row["label"]}': row['probability'] for row in v['labels']} for v in said]
        return pd.DataFrame(rows, index=table.index)
    if task == 'sentence_pairs':
        return pd.DataFrame(dict(predicted=[v['value'] for v in said]), index=table.index)
    if task == 'token_classification':
        rows = [[entity['probability'] for entity in v['entities']] for v in said]
        columns = dict(
            n_entities=map(len, rows), least_probability=(min(of, default=math.nan) for of in rows)
        )
        return pd.DataFrame({name: list(of) for name, of in columns.items()}, index=table.index)
    names = ('begin', 'end', 'probability', 'log_odds')
    return pd.DataFrame([{name: v[name] for name in names} for v in said], index=table.index)


@pytest.mark.slow
@pytest.mark.parametrize('task', one_of_each(TASKS, lambda task: task == 'extractive_qa'))
def test_a_table_gets_what_each_row_gets_alone(task, small_run, tmp_path, capsys):
    run_id = small_run(task)
    table = pd.DataFrame(TABLES[task] | dict(label='007'))
    table.index = table.index[::-1] + 10
    run = load_run(run_id)
    said = run.predict(table)
    expected = by_single_calls(run_id, task, table.drop(columns='label'))
    assert said[list(table)].equals(table) and said.index.equals(table.index)
    for name in expected:
        assert said[name].astype(float).to_numpy() == pytest.approx(
            expected[name].astype(float).to_numpy(), abs=1e-6, rel=1e-6, nan_ok=True
        ), name
    # an exported folder says the same, and so does the command, whatever the kind of file
    export_model(run_id, str(tmp_path / 'exported'))
    assert len(predict_table(str(tmp_path / 'exported'), table)) == len(table)
    rows = table.to_dict('records')
    for end in FORMATS if task == 'text_classification' else ['csv']:
        file, out = tmp_path / f'in.{end}', tmp_path / f'out.{end}'
        file.write_bytes(as_file(rows, list(table), file))
        assert main(['predict', run_id, '--file', str(file), '--out', str(out)]) == 0
        found = list(file_rows(out))
        assert list(found[0]) == [*table, *said.columns[len(table.columns) :]]
        assert [row['label'] for row in found] == ['007'] * len(table)
        for name in expected:
            cells = [math.nan if cell in ('', None) else float(cell) for cell in (row[name] for row in found)]
            assert cells == pytest.approx(
                expected[name].astype(float).tolist(), abs=1e-6, rel=1e-6, nan_ok=True
            ), name
    told = capsys.readouterr().out
    assert f'out.csv: {len(table)} rows ({task})' in told


@pytest.mark.slow
def test_columns_are_named_as_where_the_run_read_them(small_run, tmp_path):
    run = load_run(small_run('text_classification'))
    texts = TABLES['text_classification']['text']
    own = pd.DataFrame(dict(review=texts, stars=3))
    expected = run.predict(pd.DataFrame(dict(text=texts)))['probability']
    assert run.predict(own, columns=dict(text='review'))['probability'].equals(expected)
    assert run.predict(own, columns='text=review')['probability'].equals(expected)
    with pytest.raises(KdnotesError, match="the table: there is no column 'text' among 'review', 'stars'"):
        run.predict(own)
    with pytest.raises(ConfigError, match="names the key 'label', which a row does not have"):
        run.predict(own, columns='label=stars')
    with pytest.raises(ConfigError, match='a table is asked about alone'):
        run.predict(own, beside='none')
    with pytest.raises(ConfigError, match='columns is for the rows of a table'):
        run.predict(texts, columns='text=review')
    several = run.predict(texts)
    assert several.table['probability'].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    one = run.predict(texts[0])  # as ever: an answer with its time, not a list of one
    assert one.answer.values['labels'][0]['probability'] == pytest.approx(expected[0], abs=1e-6)
    assert one.latency_ms > 0 and str(several).splitlines()[1].startswith('  0: ')


def test_a_thousand_rows_and_more_keep_their_order(model):
    texts = [('iron rusts ' * (i % 7) + f'in {i % 11} days').strip() for i in range(2300)]
    said = predict_table(model, pd.DataFrame(dict(text=texts)))
    for i in (0, 999, 1000, 1001, 2299):
        [alone] = asked_alone(model, 'text_classification', [dict(text=texts[i])])
        assert said['probability'][i] == pytest.approx(alone.values['labels'][0]['probability'], abs=1e-6)


def test_what_a_long_text_loses_is_noted_in_its_row(model, tmp_path, capsys):
    (tmp_path / 'in.csv').write_text('text\niron\n' + 'gold ' * 90 + '\n')
    done = predict_file(model, tmp_path / 'in.csv', tmp_path / 'out.csv')
    notes = pd.read_csv(tmp_path / 'out.csv', keep_default_na=False)['note']
    assert done.noted == 1 and notes[0] == '' and 'more tokens than the 24 that the model takes' in notes[1]


def test_candidates_of_two_questions_of_the_same_words_are_ranked_apart(tmp_path, home):
    folder = str(classifier(tmp_path / 'm'))
    table = pd.DataFrame(dict(question_id=['1', '2', '1'], question=['Why?'] * 3, sentence=['a', 'b', 'c d']))
    assert predict_table(folder, table)['rank'].tolist()[1] == 1
    assert sorted(predict_table(folder, table.drop(columns='question_id'))['rank']) == [1, 2, 3]


# ---- rows without a text ----


def test_a_row_without_a_text_gets_empty_cells_and_the_others_what_they_get_alone(model, tmp_path, capsys):
    texts = ['iron', '', 'gold', ' ', None, 'iron rusts']
    there = [0, 2, 5]
    table = pd.DataFrame(dict(text=texts, n=range(6)), index=[*'abcdef'])
    found = predict_table(model, table)
    new = list(found.columns[2:])
    expected = predict_table(model, table.iloc[there])
    assert found[new].iloc[[1, 3, 4]].isna().all(axis=None) and 'note' in new
    pd.testing.assert_frame_equal(found.iloc[there], expected, check_dtype=False)
    for end in FORMATS:
        file, out = tmp_path / f'in.{end}', tmp_path / f'out.{end}'
        file.write_bytes(as_file([dict(text=text, n=0) for text in texts], ['text', 'n'], file))
        done = predict_file(model, file, out)
        rows = list(file_rows(out))
        nothing = '' if 'sv' in end else None
        empty = [i for i, row in enumerate(rows) if all(row[name] == nothing for name in new)]
        assert empty == [1, 3, 4]
        assert [float(rows[i]['probability']) for i in there] == pytest.approx(
            list(expected['probability']), abs=1e-6
        )
        first = [3, 5, 6] if 'tsv' in end else [2, 4, 5]
        assert done.first_empty == [
            f'{"row" if end in ("csv", "csv.gz", "parquet") else "line"} {i}' for i in first
        ]
        assert (done.rows, done.empty) == (6, 3)
    typed = ['predict', model, '--file', str(tmp_path / 'in.jsonl'), '--out', str(tmp_path / 'out.jsonl')]
    assert main([*typed, '--overwrite', '--json']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed['rows'], printed['empty'], printed['computed']) == (6, 3, 0)
    assert main([*typed, '--overwrite']) == 0
    said = capsys.readouterr().out
    assert '3 rows without a text (line 2, line 4, line 5)' in said
    assert '3 of them from an earlier call' in said


def test_ranks_leave_out_what_is_empty(tmp_path, home):
    folder = str(classifier(tmp_path / 'm'))
    table = pd.DataFrame(
        dict(question=['Why?', 'Who?', 'Why?', '', 'Why?', 'Who?'], sentence=['a', '', 'b', 'c', ' ', 'd'])
    )
    found = predict_table(folder, table)
    alone = predict_table(folder, table.iloc[[0, 2, 5]])
    assert found['rank'].isna().tolist() == [False, True, False, True, True, False]
    assert found['rank'].iloc[[0, 2, 5]].tolist() == alone['rank'].tolist() and alone['rank'].max() == 2
    (tmp_path / 'in.csv').write_text(table.to_csv(index=False))
    assert predict_file(folder, tmp_path / 'in.csv', tmp_path / 'out.csv').empty == 3
    cells = [row['rank'] for row in file_rows(tmp_path / 'out.csv')]
    assert cells == ['' if math.isnan(rank) else str(int(rank)) for rank in found['rank']]


# ---- files that are refused ----


def refused(capsys, *typed: str) -> str:
    assert main(['predict', *typed]) == 2
    said = capsys.readouterr()
    assert said.out == '' and said.err.count('\n') == 1, said.err
    return said.err


def test_files_that_cannot_be_read_or_written_are_refused(model, tmp_path, capsys):
    "Bad tables are refused as those of a corpus are: tests/test_corpus_errors.py."

    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    good = written('in.csv', 'text\niron\n')
    there = written('there.csv', 'precious')
    out = str(tmp_path / 'out.csv')
    cases = [  # what is typed, and what the refusal must name
        (
            ['--file', written('gap.csv', 'text,n\n"",1\n" ",2\n'), '--out', out],
            'gap.csv',
            'no row has a text',
        ),
        (['--file', written('torn.csv.gz', 'text'), '--out', out], 'torn.csv.gz'),
        (['--file', written('other.csv', 'review\na\n'), '--out', out], 'other.csv', 'text', 'question'),
        (['--file', written('two.csv', 'text,predicted\na,b\n'), '--out', out], 'two.csv', 'predicted'),
        (['--file', written('noted.csv', 'text,note\na,b\n'), '--out', out], 'noted.csv', 'note'),
        (['--file', written('lines.csv', 'text,n\na,"b\nc"\n'), '--out', f'{out[:-3]}tsv'], 'out.tsv'),
        (['--file', good, '--out', out, '--columns', 'label=x'], 'in.csv', 'text', 'columns'),
        (['--file', written('head.csv', 'text\n'), '--out', out], 'head.csv'),
        (['--file', written('in.txt', 'iron'), '--out', out], 'in.txt', '.jsonl'),
        (['--file', good, '--out', str(tmp_path / 'out.xlsx')], 'out.xlsx', '.jsonl'),
        (['--file', str(tmp_path / 'nowhere.csv'), '--out', out], 'nowhere.csv'),
        (['--file', good, '--out', there], 'there.csv', 'overwrite'),
        (['--file', good, '--out', good, '--overwrite'], 'in.csv'),
        (['--file', good, '--out', str(tmp_path / 'none' / 'out.csv')], 'none/out.csv'),
        (['--file', good], '--file'),
        (['--text', 'iron', '--out', out], '--out', '--file'),
        (['--text', 'iron', '--overwrite'], '--overwrite', '--file'),
        (['--file', good, '--out', out, '--text', 'a', '--beside', 'none'], '--text', '--beside', '--file'),
        (['--file', good, '--out', out, '--candidate', 'a'], '--candidate', '--file'),
    ]
    for typed, *names in cases:
        said = refused(capsys, model, *typed)
        assert all(name in said for name in names), (names, said)
    assert Path(there).read_text() == 'precious' and not Path(out).exists()
    assert [path.name for path in tmp_path.glob('.*')] == []
    assert main(['predict', model, '--file', good, '--out', there, '--overwrite', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found['rows'], found['columns'][0]) == (1, 'predicted') and 'predicted' in Path(there).read_text()


def test_cells_are_written_as_they_were_read(model, tmp_path):
    rows = [
        dict(id=1, text='iron', tags=['a', 1], more={'deep': None}, score=1e-300),
        dict(id=2**60 + 1, text='Größe, "so"', flag=True),
    ]
    (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    predict_file(model, tmp_path / 'in.jsonl', tmp_path / 'out.jsonl')
    lines = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    assert [{key: line[key] for key in row} for line, row in zip(lines, rows)] == rows
    assert 'tags' not in lines[1] and lines[0]['predicted']
    (tmp_path / 'in.csv').write_text('id,text,n\n007,"iron, ""so""",NA\n1e5,Größe,\n')
    predict_file(model, tmp_path / 'in.csv', tmp_path / 'out.csv')
    cells = [(row['id'], row['n']) for row in file_rows(tmp_path / 'out.csv')]
    assert cells == [('007', 'NA'), ('1e5', '')]
    frame = pd.DataFrame(
        dict(
            id=pd.array([1, None], dtype='Int64'),
            text=['iron', 'gold'],
            at=pd.to_datetime(['2020-01-01'] * 2),
        )
    )
    frame.to_parquet(tmp_path / 'in.parquet')
    predict_file(model, tmp_path / 'in.parquet', tmp_path / 'out.parquet')
    back = pd.read_parquet(tmp_path / 'out.parquet', dtype_backend='numpy_nullable')
    assert back['id'].tolist() == [1, pd.NA] and back['at'].equals(frame['at'].astype(back['at'].dtype))


def test_a_column_that_comes_late_is_not_lost(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, 'PART', 2)
    path = tmp_path / 'late.jsonl'
    path.write_text(
        ''.join(json.dumps(row) + '\n' for row in [dict(text='a')] * 3 + [dict(text='b', extra=1)])
    )
    with pytest.raises(CorpusError, match="late.jsonl, line 4: .*'extra'"):
        predict_file(model, path, tmp_path / 'out.jsonl')


def test_values_are_written_as_they_are(tmp_path):
    rows = [dict(flag=True, x=2.0, w=[1, 'a'], gone=None), dict(flag=False, x=0.1, w=[], gone=float('nan'))]
    names = ['flag', 'x', 'w', 'gone']
    csv_file = as_file(rows, names, tmp_path / 'a.csv').decode()
    assert csv_file == 'flag,x,w,gone\nTrue,2.0,"[1, ""a""]",\nFalse,0.1,[],\n'
    last = json.loads(as_file(rows, names, tmp_path / 'a.jsonl').decode().splitlines()[1])
    assert last == dict(flag=False, x=0.1, w=[])
    with pytest.raises(ConfigError, match='a.jsonl cannot hold'):
        as_file([dict(x=float('inf'))], ['x'], tmp_path / 'a.jsonl')

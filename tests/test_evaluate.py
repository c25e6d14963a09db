"""`kdnotes evaluate`: a run on its own test set gets the numbers of its record, a model that kdnotes did not
train those of its logits; intervals and differences are those of a study; what could only be guessed is
refused in one sentence.
"""

import json
import shutil
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from small_runs import LENGTHS, ON, small_model, train_here
from test_predict import classifier
import kdnotes as kd
from kdnotes.cli import main
from kdnotes.core.columns import Columns
from kdnotes.core.config import TASKS, ConfigError, KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.experiment import launch
from kdnotes.experiment.evaluate import EvaluationError, evaluate
from kdnotes.experiment.labelled_rows import LabelledRows, with_rows
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.results.store import find_record
from kdnotes.tasks.sources import load_corpus


@pytest.fixture(scope='module')
def whole_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('evaluate')


@pytest.fixture
def run(whole_home, monkeypatch):  # (task, **parameters) -> run_id
    "A run of a small network on all of an embedded corpus, a few steps long; made once."
    monkeypatch.setenv('KDNOTES_HOME', str(whole_home))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')

    def make(task: str, **parameters) -> str:
        teacher = whole_home / 'teacher'
        if not teacher.is_dir():
            small_model(teacher)
        more = dict(stride=32) if task == 'extractive_qa' else {}
        more |= dict(score_blocks=40, pseudo_sample=20) if task == 'masked_lm' else {}
        config = make_config(
            **dict(task=task, mode='baseline', corpus='embedded', teacher=str(teacher), epochs=0.1)
            | dict(max_length=LENGTHS[task], threads_per_rank=1, ranks=1, study='small')
            | more
            | parameters
        )
        its_plan = plan(config, ON)
        with pytest.MonkeyPatch.context() as patched:
            train_here(patched)
            launch.execute(its_plan)
        return its_plan.run_id

    return make


def values(result, about: str = 'model') -> dict[str, float]:
    "The metrics of a result."
    rows = result.table[result.table['about'] == about]
    return dict(zip(rows['metric'], rows['estimate']))


# ---- a run ----


@pytest.mark.parametrize('task', TASKS)
def test_a_run_on_its_test_set_has_the_numbers_of_its_record(run, task):
    run_id = run(task)
    record, _ = find_record(run_id)
    result = evaluate(run_id, 'embedded')
    scores = result.table
    on_rows = scores[scores['about'] == 'model'].set_index('metric')
    expected = {name: np.nan if value is None else value for name, value in record['metrics']['test'].items()}
    assert on_rows['estimate'].to_dict() == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    of_run = scores[scores['about'] == 'run'].set_index('metric')
    columns = ['estimate', 'low', 'high', 'n_units', 'n_clusters']
    pd.testing.assert_frame_equal(on_rows[columns], of_run[columns].loc[on_rows.index], rtol=1e-4)
    assert on_rows.loc[result.primary['metric'], 'low'] < on_rows.loc[result.primary['metric'], 'high']
    assert not result.warnings and set(scores['about']) == {'model', 'run', 'baseline', 'gain'}


def test_a_difference_is_that_of_a_comparison(run):
    a, b = run('text_classification'), run('text_classification', learning_rate=0.01, arm='other')
    compared = kd.compare(kd.load_run(a), kd.load_run(b))
    result = kd.load_run(a).evaluate('embedded', beside=kd.load_run(b))
    [row] = result.table.query("about == 'difference' and metric == 'accuracy'").to_dict('records')
    difference = compared.difference
    assert [row[key] for key in ('estimate', 'low', 'high')] == pytest.approx(
        [difference.estimate, difference.low, difference.high], abs=1e-6
    )
    assert row['p'] == pytest.approx(compared.p_permutation, abs=1e-3)
    assert (row['n_units'], row['n_clusters']) == (940, difference.units) and row['n_clusters'] < 940
    assert values(result, 'beside')['accuracy'] != values(result)['accuracy']
    assert result.table['p'].notna().sum() == 1  # of the primary metric alone


def test_each_unit_stands_beside_the_row_that_it_is_about(run):
    words = ['iron', 'gold', 'rusts', 'air', 'city']
    rows = [
        dict(
            q=f'what is {word}', sentence=f'{word} {other}', label=int(word == other), mine=f'{word}-{other}'
        )
        for word in words
        for other in words
    ]
    ranked = evaluate(run('answer_selection'), rows, columns=dict(question='q')).units
    assert ranked['q'].tolist() == [f'what is {word}' for word in words]
    # of a question the candidate that the model puts first, with the label that it has
    assert (
        ranked['label'] == (ranked['mine'].str.split('-').str[0] == ranked['mine'].str.split('-').str[1])
    ).all()
    assert (ranked['mrr'] == 1).tolist() == (ranked['label'] == 1).tolist()
    texts = sentences(6)
    frame = pd.DataFrame(dict(text=texts, label='chemistry', score=range(6)), index=[5, 5, 1, 0, 2, 3])
    label = load_corpus('text_classification', 'embedded').splits['train']['label'][0]
    classified = evaluate(run('text_classification'), frame.assign(label=label)).units
    assert classified['text'].tolist() == texts and classified['score_input'].tolist() == list(range(6))
    books = pd.DataFrame(dict(text=[' '.join(sentences(60, i)) for i in range(3)], title=[*'abc']))
    blocks = evaluate(run('masked_lm'), books).units
    assert set(blocks['title']) == {*'abc'} and blocks.groupby('title')['cluster'].nunique().eq(1).all()
    of_corpus = evaluate(run('text_classification'), 'embedded').units
    rows = load_corpus('text_classification', 'embedded').splits['test']
    assert of_corpus['text'].tolist() == rows['text'].tolist()


def test_rows_that_a_model_cuts_are_counted(home):
    names = dict(enumerate(['fact', 'opinion']))
    folder = str(classifier(home / 'm', id2label=names))
    rows = ROWS.assign(text=['iron', 'gold ' * 90, 'air'])
    result = evaluate(folder, rows, beside=str(classifier(home / 'n', id2label=names)))
    assert result.truncated == 1 and [w.code for w in result.warnings].count('rows_cut') == 2
    assert f'1 of 3 rows has more tokens than the 24 that {folder} takes' in str(result)
    whole = evaluate(folder, ROWS)
    assert whole.truncated == 0 and 'more tokens' not in str(whole)


def test_rows_that_were_trained_on_are_counted(run, tmp_path):
    run_id = run('text_classification')
    splits = load_corpus('text_classification', 'embedded').splits
    rows = [*splits['train'][:3], *splits['test'][:5]]
    table = pd.DataFrame([dict(review=row['text'], subject=row['label']) for row in rows])
    table.to_parquet(tmp_path / 'new.parquet')
    columns = dict(text='review', label='subject')
    for source in (table, str(tmp_path / 'new.parquet')):
        result = evaluate(run_id, source, columns)
        [warning] = result.warnings
        assert str(warning).startswith('3 of 8 rows have the texts of a row that') and result.n_rows == 8
        assert str(warning) in str(result)
    accuracy, macro = values(result)['accuracy'], values(result)['macro_f1']
    predicted = [predict(run_id, text=text).answer.values['labels'][0]['label'] for text in table['review']]
    assert accuracy == pytest.approx(accuracy_score(table['subject'], predicted))
    assert macro == pytest.approx(
        f1_score(table['subject'], predicted, average='macro', zero_division=0), abs=1e-9
    )
    assert result.units['prediction'].tolist() == predicted
    assert result.units['unit'].tolist() == [f'T{i}' for i in range(8)]


@pytest.mark.parametrize(
    'task, parameters', [('text_classification', dict(keep='best')), ('answer_selection', {})]
)
def test_rows_that_a_model_or_a_threshold_was_chosen_by_are_counted(run, task, parameters):
    run_id = run(task, **parameters)
    rows = load_corpus(task, 'embedded').splits['dev']
    [warning] = evaluate(run_id, 'embedded', split='dev').warnings
    assert str(warning).startswith(f'{len(rows):,} of {len(rows):,} rows have the texts of a row that')
    assert 'was trained on or chosen by, so scores on them are optimistic' in str(warning)


def test_rankings_are_those_of_predict(run):
    run_id = run('answer_selection')
    rng = np.random.default_rng(0)
    words = ['iron', 'gold', 'rusts', 'air', 'city', 'Paris', 'metal']
    rows = [
        dict(
            question=f'what is {q} of {words[q]}', sentence=' '.join(rng.choice(words, 5)), label=int(i == q)
        )
        for q in range(4)
        for i in range(6)
    ]
    result = evaluate(run_id, rows)
    average_precision = []
    for q in range(4):
        candidates = [row['sentence'] for row in rows[6 * q : 6 * q + 6]]
        answer = predict(run_id, 'none', question=rows[6 * q]['question'], candidates=candidates).answer
        ranks = {row['place']: row['rank'] for row in answer.values['candidates']}
        average_precision.append(1 / ranks[q])  # one candidate is right
    assert values(result)['map'] == values(result)['mrr'] == pytest.approx(np.mean(average_precision))
    assert result.units['map'].tolist() == pytest.approx(average_precision)
    # thresholds come from dev of its corpus
    assert values(result)['pair_f1'] is not None and result.unit_name == 'questions'


def test_a_run_whose_corpus_is_gone_is_evaluated_by_its_head(run, tmp_path):
    corpus = tmp_path / 'corpus'
    corpus.mkdir()
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        [dict(body=' '.join(rng.choice(['good', 'bad', 'film', 'plot'], 6)), stars=i % 3) for i in range(60)]
    )
    for split, part in dict(train=table[:40], dev=table[40:50], test=table[50:]).items():
        part.to_csv(corpus / f'{split}.csv', index=False)
    numbers = dict(corpus=str(corpus), columns='text=body,label=stars', target='number')
    run_id = run('text_classification', epochs=1, **numbers)
    # the columns of its corpus need not be named again
    before = evaluate(run_id, table[50:])
    half = table[50:].rename(columns=dict(stars='label'))  # as `kdnotes predict` has it, each that is there
    assert values(evaluate(run_id, half)) == values(before)
    assert values(before) == pytest.approx(find_record(run_id)[0]['metrics']['test'], abs=1e-6)
    shutil.rmtree(corpus)
    after = evaluate(run_id, table[50:])
    assert values(after) == pytest.approx(values(before), abs=1e-6)
    assert [warning.code for warning in after.warnings] == ['training_texts_unknown'] and not before.warnings


def test_answers_of_a_folder_without_its_run_are_those_of_the_run(run, tmp_path):
    run_id = run('extractive_qa')
    record, folder = find_record(run_id)
    shutil.copytree(folder.path / 'model', tmp_path / 'copy')
    result = evaluate(str(tmp_path / 'copy'), 'embedded')
    assert result.run_id is None and [warning.code for warning in result.warnings] == [
        'training_texts_unknown'
    ]
    for metric in ('best_exact', 'best_f1', 'best_exact_thresh'):  # these need no threshold of dev
        assert values(result)[metric] == pytest.approx(record['metrics']['test'][metric], abs=1e-6)


# ---- a model that kdnotes did not train ----


def logits_by_hand(folder: str, *texts) -> np.ndarray:
    "What transformers gives for each row, by itself."
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [
            model(**tokenizer(*row, return_tensors='pt')).logits[0].double().numpy() for row in zip(*texts)
        ]
    return np.array(rows)


def sentences(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    words = ['iron', 'gold', 'rusts', 'air', 'city', 'Paris', 'metal', 'good', 'bad']
    return [' '.join(rng.choice(words, rng.integers(2, 9))) for _ in range(n)]


@pytest.mark.parametrize('named', ['names', 'other case', 'numbers'])
def test_classes_are_those_of_the_logits(home, named):
    names = ['fact', 'opinion', 'question']
    folder = str(classifier(home / 'm', 3, id2label=dict(enumerate(names)), initializer_range=1.0))
    texts = sentences(30)
    truth = np.arange(30) % 3
    written = {'names': names, 'other case': ['Fact', 'OPINION', 'question'], 'numbers': ['0', '1', '2']}[
        named
    ]
    table = pd.DataFrame(dict(text=texts, label=[written[i] for i in truth]))
    logits = logits_by_hand(folder, texts)
    result = evaluate(folder, table)
    assert result.task == 'text_classification' and result.run_id is None
    predicted = logits.argmax(1)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert values(result) == pytest.approx(
        dict(
            accuracy=accuracy_score(truth, predicted),
            nll=-log_p[np.arange(30), truth].mean(),
            macro_f1=f1_score(truth, predicted, average='macro'),
            matthews=values(result)['matthews'],
        ),
        abs=1e-5,
    )
    assert result.units['prediction'].tolist() == [names[i] for i in predicted]
    assert len(set(predicted)) > 1  # it is no constant
    assert 'no run of this model is known' in str(result)
    note = f'taken for the outputs of {folder}, counted from 0: 0 is fact, 1 is opinion, 2 is question'
    assert (note in str(result)) == (named == 'numbers')


def test_numbers_are_not_shifted_into_names_that_count_from_one(home):
    stars = ['1 star', '2 stars', '3 stars', '4 stars', '5 stars']
    folder = str(classifier(home / 'm', 5, id2label=dict(enumerate(stars))))
    table = pd.DataFrame(dict(text=sentences(8), label=['1', '2', '3', '4'] * 2))
    with pytest.raises(EvaluationError, match="label '1' is no class of .* where these names have no digits"):
        evaluate(folder, table)
    plain = str(classifier(home / 'plain', 5))  # LABEL_0, ...
    named = table.assign(label=table['label'].map(lambda i: stars[int(i)]))
    result = evaluate(folder, named)
    assert [warning.code for warning in result.warnings] == ['training_texts_unknown']
    result = evaluate(plain, table, beside=str(classifier(home / 'n', 5, id2label=dict(enumerate('abcde')))))
    assert [warning.code for warning in result.warnings] == [
        'numbered_classes',
        'training_texts_unknown',
        'numbered_classes',
    ]


def test_one_row_is_evaluated_without_a_word_of_sklearn(home, recwarn):
    folder = str(classifier(home / 'm', id2label=dict(enumerate(['fact', 'opinion']))))
    result = evaluate(folder, ROWS[:1])
    assert values(result)['matthews'] == 0 and not [w for w in recwarn if 'label' in str(w.message)]


def test_a_file_with_some_of_the_classes_keeps_their_order(home):
    names = ['a', 'b', 'c', 'd']
    folder = str(classifier(home / 'm', 4, id2label=dict(enumerate(names))))
    texts = sentences(9)
    result = evaluate(folder, pd.DataFrame(dict(text=texts, label=['d', 'b', 'd'] * 3)))
    predicted = logits_by_hand(folder, texts).argmax(1)
    assert values(result)['accuracy'] == pytest.approx(np.mean(predicted == [3, 1, 3] * 3))


def test_numbers_of_two_models_are_in_one_unit(home):
    of_number = dict(problem_type='regression', initializer_range=0.5)
    one = str(classifier(home / 'one', 1, **of_number, target_mean=10.0, target_deviation=2.0))
    two = str(classifier(home / 'two', 1, **of_number))
    texts, truth = sentences(20), np.linspace(0, 19, 20)
    result = evaluate(one, pd.DataFrame(dict(text=texts, label=truth)), beside=two)
    first, second = 10 + 2 * logits_by_hand(one, texts)[:, 0], logits_by_hand(two, texts)[:, 0]
    assert values(result)['mse'] == pytest.approx(np.mean((first - truth) ** 2) / 4, rel=1e-4)
    assert values(result, 'beside')['mse'] == pytest.approx(np.mean((second - truth) ** 2) / 4, rel=1e-4)
    assert values(result, 'difference')['mae'] == pytest.approx(
        np.mean(np.abs(second - truth) - np.abs(first - truth)) / 2, rel=1e-4
    )
    assert result.units['prediction'].to_numpy() == pytest.approx(first, rel=1e-4)
    assert [w.code for w in evaluate(two, pd.DataFrame(dict(text=texts, label=truth))).warnings] == [
        'training_texts_unknown',
        'scale_unknown',
    ]


@pytest.mark.parametrize('outputs', [1, 2])
def test_a_cross_encoder_ranks(home, outputs):
    folder = str(classifier(home / 'm', outputs, initializer_range=0.5))
    first, second = [f'what is iron {i // 4}' for i in range(16)], sentences(16)
    table = pd.DataFrame(dict(question=first, sentence=second, label=[int(i % 4 == 1) for i in range(16)]))
    logits = logits_by_hand(folder, first, second)
    scores = (logits[:, -1] - (logits[:, 0] if outputs == 2 else 0)).reshape(4, 4)
    ranks = (scores > scores[:, 1:2]).sum(1) + 1
    result = evaluate(folder, table)
    assert result.task == 'answer_selection' and values(result)['mrr'] == pytest.approx(np.mean(1 / ranks))
    assert np.isnan(values(result)['pair_f1'])  # no threshold is known


def test_sentence_pairs_are_named_where_columns_do_not_decide(home):
    folder = str(classifier(home / 'm', 1, initializer_range=0.5))
    table = pd.DataFrame(dict(sentence1=sentences(12), sentence2=sentences(12, 1), score=np.arange(12) * 10))
    result = evaluate(folder, table)
    assert result.task == 'sentence_pairs' and 'on the scale' not in str(result)
    z = logits_by_hand(folder, table['sentence1'], table['sentence2'])[:, 0]
    assert values(result)['pearson'] == pytest.approx(np.corrcoef(z, table['score'])[0, 1], abs=1e-5)
    with pytest.raises(ConfigError, match='say which with task='):
        evaluate(folder, 'embedded')
    assert evaluate(folder, 'embedded', split='dev', task='sentence_pairs').source == 'embedded dev'


# ---- what is refused ----

ROWS = pd.DataFrame(dict(text=['iron rusts', 'gold', 'air'], label=['fact', 'opinion', 'fact']))


@pytest.mark.parametrize(
    'rows, more, words',
    {
        'of another task': (
            pd.DataFrame(dict(a=['x'], b=['y'])),
            {},
            'the columns of the rows do not decide it',
        ),
        'no label': (ROWS[['text']], dict(task='text_classification'), "there is no column 'label' among"),
        'another class': (ROWS.assign(label=['fact', 'news', 'news']), {}, "label 'news' is no class of"),
        'numbers from 1': (ROWS.assign(label=[1, 2, 1]), {}, "label '1' is no class of"),
        'no label in a row': (ROWS.assign(label=['fact', None, 'fact']), {}, 'label is empty'),
        'empty': (ROWS[:0], {}, 'the table: there is no row'),
        'no such file': ('new.csv', {}, "there is no file 'new.csv'"),
        'no such task': (ROWS, dict(task='masked_lm'), "task='masked_lm' is none that"),
        'no such set': (ROWS, dict(split='val'), "set='val' is refused"),
        'no such column': (ROWS, dict(columns=dict(label='stars'), task='text_classification'), "'stars'"),
        'tables without the set': (
            dict(train=ROWS, dev=ROWS),
            dict(task='text_classification'),
            'are called train, dev',
        ),
        'itself': (ROWS, dict(beside=True), 'is the model itself'),
        'a number': (ROWS, dict(beside=1), 'one gives classes and the other numbers'),
        'a ranking': (ROWS, dict(task='answer_selection'), "there is no column 'question'"),
    }.values(),
)
def test_what_could_only_be_guessed_is_refused(home, rows, more, words):
    names = dict(enumerate(['fact', 'opinion']))
    folder = str(classifier(home / 'm', id2label=names))
    if more.get('beside') is True:
        more = dict(beside=folder)
    elif more.get('beside'):
        more = dict(beside=str(classifier(home / 'n', 1)))
    with pytest.raises(KdnotesError) as e:
        evaluate(folder, rows, **more)
    assert words in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize(
    'outputs, config, task, words',
    {
        'of each label': (
            2,
            dict(problem_type='multi_label_classification'),
            'answer_selection',
            'multi_label_classification',
        ),
        'other labels': (
            3,
            dict(problem_type='multi_label_classification'),
            'text_classification',
            "label 'fact' has 'fact', which is none of",
        ),
        'three outputs': (3, {}, 'answer_selection', 'needs one, or two'),
        'named outputs': (2, dict(id2label={0: 'yes', 1: 'no'}), 'answer_selection', 'needs one, or two'),
        'names as numbers': (1, {}, 'text_classification', "label 'fact' is no number"),
    }.values(),
)
def test_a_head_of_another_meaning_is_refused(home, outputs, config, task, words):
    folder = str(classifier(home / 'm', outputs, **config))
    rows = ROWS
    if task == 'answer_selection':
        rows = pd.DataFrame(dict(question=['a', 'a'], sentence=['b', 'c'], label=[0, 1]))
    with pytest.raises(KdnotesError, match=words) as e:
        evaluate(folder, rows, task=task)
    assert '\n' not in str(e.value)


# ---- the command, and Python ----


def test_the_command_prints_and_writes_what_python_gives(home, capsys):
    folder = str(classifier(home / 'm', id2label=dict(enumerate(['fact', 'opinion']))))
    ROWS.rename(columns=dict(text='review')).to_csv(home / 'new.csv', index=False)
    typed = ['evaluate', folder, str(home / 'new.csv'), '--columns', 'text=review']
    assert main([*typed, '--out', str(home / 'units.csv'), '--json']) == 0
    printed = json.loads(capsys.readouterr().out)
    result = evaluate(folder, str(home / 'new.csv'), 'text=review')
    assert printed == json.loads(json.dumps(result.data()))
    assert list(printed) == sorted(
        'model run_id model_sha256 task source n_rows truncated unit_name primary beside warnings '
        'scores'.split()
    )
    keys = 'about name metric estimate low high p n_units n_clusters reason'
    assert {tuple(sorted(row)) for row in printed['scores']} == {tuple(sorted(keys.split()))}
    units = pd.read_csv(home / 'units.csv')
    new = ['unit', 'cluster', 'accuracy', 'nll', 'prediction', 'score']
    assert list(units) == ['review', 'label', *new] and len(units) == 3
    assert units['review'].tolist() == ROWS['text'].tolist()
    assert (units['accuracy'] == (units['prediction'] == units['label'])).all()
    assert main([*typed, '--out', str(home / 'units.csv')]) == 2  # it is there
    assert 'is there already' in capsys.readouterr().err
    assert main(typed) == 0 and capsys.readouterr().out == f'{result}\n'
    assert (
        main(['evaluate', folder, str(home / 'new.csv'), '--set', 'dev', '--task', 'text_classification'])
        == 2
    )


def test_python_tells_rows_from_texts(run, tmp_path):
    student = kd.load_run(run('masked_lm'))
    assert student.evaluate() == student.metrics
    with pytest.raises(ConfigError, match='no rows and no text'):
        student.evaluate(columns='text=body')
    text = ' '.join(sentences(60))
    (tmp_path / 'book.txt').write_text(text)
    assert student.evaluate(tmp_path / 'book.txt', length=32, sample=5).tokens == 5
    books = pd.DataFrame(dict(body=[text, ' '.join(sentences(60, 1))]))
    result = student.evaluate(books, columns='text=body')
    assert result.unit_name == 'documents' and values(result)['nll'] > 0 and 'unigram' in str(result)


def test_units_of_retrieval_have_the_first_row_of_their_query():
    "The text that is found first may be another query's."
    rows = [dict(question_id=q, sentence_id=i, sentence=f'{q}{i}') for q, i in ('ab', 'aa', 'bb')]
    given = pd.DataFrame(dict(text=['one', 'two', 'three']))
    labelled = LabelledRows('rows', '', Columns.from_rows(rows), given)
    units = pd.DataFrame(dict(unit=['a', 'b'], cluster=['a', 'b'], prediction=['b', 'nowhere']))
    assert with_rows(units, labelled, ('question_id',))['text'].tolist() == ['one', 'three']
    found = with_rows(units, labelled, ('question_id', 'sentence_id'))['text']
    assert found[0] == 'one' and pd.isna(found[1])

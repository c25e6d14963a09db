"Rows without a label: a student learns from them by its teacher's outputs, and nothing else changes."

import json
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
import kdnotes as kd
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.distill.models import load_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.experiment.export import export_model
from kdnotes.experiment.launch import run
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.tasks import sources
from kdnotes.tasks.base import NO_LABEL
from kdnotes.tasks.sources import CorpusError, corpus_of, load_corpus
from small_runs import ON

TASKS = ('answer_selection', 'text_classification', 'extractive_qa')


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    return tmp_path


def folder_of(task: str, folder: Path, unlabelled: int = 40, labelled: int = 60) -> Path:
    "The embedded corpus as CSV files, a part of its training rows without their labels."
    folder.mkdir(parents=True)
    splits = load_corpus(task, 'embedded').splits
    table = table_of(splits['train'])
    table[:labelled].to_csv(folder / 'train.csv', index=False)
    if unlabelled:
        rest = table[labelled : labelled + unlabelled].drop(columns=['label', *ANSWER], errors='ignore')
        rest.to_csv(folder / 'unlabelled.csv', index=False)
    for split in ('dev', 'test'):
        table_of(splits[split]).to_csv(folder / f'{split}.csv', index=False)
    return folder


ANSWER = ['answer', 'answer_start']


def table_of(rows) -> pd.DataFrame:
    "Rows as a table has them: an answer as a text and where it begins."
    table = pd.DataFrame(list(rows))
    if 'answers' in table:
        first = [next(iter(of), None) for of in table.pop('answers')]
        pairs = zip(table['context'], first)
        table['answer'] = ['' if of is None else text[slice(*of)] for text, of in pairs]
        table['answer_start'] = ['' if of is None else of[0] for of in first]
    return table


def planned(task: str, corpus: Path, mode: str = 'full_kd', **given):
    return plan(make_config(mode=mode, task=task, corpus=str(corpus), study='few', **given), ON)


@pytest.mark.exhaustive
@pytest.mark.parametrize('task', TASKS)
def test_rows_without_a_label_change_no_run_that_does_not_learn_from_them(task, home):
    without = folder_of(task, home / 'without', unlabelled=0)
    with_rows = folder_of(task, home / 'with')
    for mode in ('baseline', 'full_student'):
        assert planned(task, with_rows, mode).run_id == planned(task, without, mode).run_id
    usual = planned(task, without).run_id
    assert planned(task, with_rows, unlabelled='none').run_id == usual
    found = planned(task, with_rows)
    assert found.run_id != usual and found.teacher.run_id == planned(task, without).teacher.run_id
    assert found.config.loss.unlabelled_id.startswith('40-') and found.sizes['unlabelled']['rows'] == 40
    # the same rows by another way have the same name
    file = with_rows / 'unlabelled.csv'
    assert planned(task, without, unlabelled=str(file)).run_id == found.run_id


@pytest.mark.parametrize('task', TASKS)
def test_hard_targets_are_of_labelled_rows_alone_and_soft_ones_of_all(task, home, small_teacher):
    given = dict(teacher=str(small_teacher), max_length=32)
    if task == 'answer_selection':
        given |= dict(ranking_loss='ranknet')
    if task == 'extractive_qa':
        given |= dict(max_length=128, stride=32)  # a question is one window
    config = planned(task, folder_of(task, home / 'with'), **given).config
    made = make_task(config, corpus_of(config))
    made.encode(load_tokenizer(str(small_teacher)))
    torch.manual_seed(0)
    model = load_model(str(small_teacher), made.auto_class, 0, **made.model_kwargs).eval()
    index = np.array([0, 1, 2, 3, 60, 61, 99])  # 60 have a label
    batch = made.batch('train', index)
    without = (batch.labels == NO_LABEL).reshape(7, -1)[:, 0]
    assert made.unlabelled == 40 and without.tolist() == [False] * 4 + [True] * 3
    outputs = model(**batch.inputs)
    signal = online_signal(made, model)(batch)
    terms = made.loss_terms(outputs, batch, signal)
    alone = made.batch('train', index[:4])
    of_labelled = made.loss_terms(model(**alone.inputs), alone, online_signal(made, model)(alone))
    assert terms['hard'][1] == made.loss_counts('train', index)['hard'] == 4 and terms['soft'][1] == 7
    torch.testing.assert_close(terms['hard'][0], of_labelled['hard'][0])
    if 'ranking' in terms:
        assert not set(batch.groups[:4].tolist()) & set(batch.groups[4:].tolist())
        torch.testing.assert_close(terms['ranking'], of_labelled['ranking'])
    assert set(made.floors()) == set(make_task(config, corpus_of(config)).floors())


@pytest.mark.parametrize('task', TASKS)
def test_a_large_file_is_read_like_a_small_one(task, home, monkeypatch):
    folder = folder_of(task, home / 'with')
    small = load_corpus(task, str(folder))
    monkeypatch.setattr(sources, 'LARGE', 0)
    large = load_corpus(task, str(folder))
    assert large.unlabelled_id == small.unlabelled_id and large.sha256 == small.sha256
    assert list(large.unlabelled) == list(small.unlabelled)
    found = [make_task(p.config, corpus_of(p.config)) for p in [planned(task, folder)]]
    assert list(found[0].rows['train']) == [*small.splits['train'], *small.unlabelled]


def break_rows(folder: Path, how: str) -> None:
    rows = pd.read_csv(folder / 'unlabelled.csv')
    if how == 'label':
        rows['label'] = ['', '-1', '1'] + [''] * (len(rows) - 3)
    elif how == 'empty':
        rows = rows[:0]
    rows.to_csv(folder / 'unlabelled.csv', index=False)
    if how == 'two':
        (folder / 'unlabelled.jsonl').write_text('{}\n')


@pytest.mark.parametrize('large', [False, True])
@pytest.mark.parametrize(
    'how, words',
    [
        ('label', "label is '1', and rows of unlabelled have no label"),
        ('empty', 'there is no row'),
        ('two', 'only one of them can be unlabelled'),
    ],
)
def test_a_wrong_file_is_refused(how, words, large, home, monkeypatch):
    folder = folder_of('answer_selection', home / 'with')
    break_rows(folder, how)
    if large:
        monkeypatch.setattr(sources, 'LARGE', 0)
    with pytest.raises(CorpusError, match=words.replace('(', r'\(').replace(')', r'\)')) as e:
        load_corpus('answer_selection', str(folder))
    assert '\n' not in str(e.value)


def scored_on(folder: Path, n: int = 40) -> pd.DataFrame:
    "Rows of a folder that nobody has labelled, behind two of test that are written in another way."
    rows = pd.read_csv(folder / 'unlabelled.csv')[:n]
    test = pd.read_csv(folder / 'test.csv').drop(columns='label')[:2]
    test['text'] = [test['text'][0].upper(), '  ' + test['text'][1].replace(' ', '  ').replace('e', 'é')]
    return pd.concat([test, rows.drop(columns='label', errors='ignore')])


@pytest.mark.parametrize('how, large', [('own', False), ('own', True), ('file', False), ('folder', False)])
def test_rows_that_are_scored_on_are_left_out_counted_and_told(how, large, home, monkeypatch):
    task = 'text_classification'
    without = folder_of(task, home / 'with')
    clean = planned(task, without)
    rows = scored_on(without)
    given = {}
    if how == 'own':
        rows.to_csv(without / 'unlabelled.csv', index=False)
    elif how == 'file':
        rows.to_csv(home / 'more.csv', index=False)
        given['unlabelled'] = str(home / 'more.csv')
    else:
        other = folder_of(task, home / 'other', labelled=2)
        rows.assign(label=['a', 'b'] * 21).to_csv(other / 'train.csv', index=False)
        (other / 'unlabelled.csv').unlink()
        for split in ('dev', 'test'):
            rows[-2:].assign(label=['a', 'b']).to_csv(other / f'{split}.csv', index=False)
        given['unlabelled'] = str(other)
    if large:
        monkeypatch.setattr(sources, 'LARGE', 0)
    found = planned(task, without, **given)
    assert found.sizes['unlabelled']['rows'] == 40 and found.run_id == clean.run_id
    assert found.left_out == 2
    told = '2 of 42 rows without a label are left out, with the same texts as rows of dev or test'
    assert told in found.explain()
    again = planned(task, without, **given)  # from columns that are kept, where it is large
    assert again.run_id == found.run_id and again.left_out == 2
    for mode, more in (('full_student', {}), ('full_kd', dict(unlabelled='none'))):
        told = planned(task, without, mode, **more).explain()
        assert 'left out' not in told


@pytest.mark.parametrize('large', [False, True])
def test_rows_that_all_are_scored_on_stop_who_learns_from_them_alone(large, home, monkeypatch):
    task = 'text_classification'
    folder = folder_of(task, home / 'with')
    plain = folder_of(task, home / 'without', unlabelled=0)
    scored_on(folder, 0).to_csv(folder / 'unlabelled.csv', index=False)
    file = home / 'more.csv'
    scored_on(folder, 0).to_csv(file, index=False)
    if large:
        monkeypatch.setattr(sources, 'LARGE', 0)
    for given in ({}, dict(unlabelled=str(file))):
        with pytest.raises(CorpusError, match='all 2 rows without a label have the texts of a row of dev or'):
            planned(task, folder, **given)
    assert planned(task, folder, 'full_student').run_id == planned(task, plain, 'full_student').run_id
    assert planned(task, folder, unlabelled='none').run_id == planned(task, plain).run_id


@pytest.mark.parametrize('name', ['texts.txt', 'texts', 'texts.parquet.gz', 'texts.arrow', 'texts.CSV'])
def test_a_file_that_is_no_table_is_refused_by_its_name(name, home):
    words = rf'{name} .*\.tsv, \.csv, .*\.jsonl\.gz'
    folder = folder_of('text_classification', home / 'with')
    file = (folder / 'unlabelled.csv').rename(home / name)
    with pytest.raises(CorpusError, match=words) as e:
        planned('text_classification', folder, unlabelled=str(file))
    assert '\n' not in str(e.value)
    with pytest.raises(KdnotesError, match=words):
        kd.load_data(str(folder), task='text_classification', unlabelled=file)


def test_a_run_can_be_read_from_another_folder(home, monkeypatch):
    task = 'text_classification'
    folder = folder_of(task, home / 'corpus')
    (folder / 'unlabelled.csv').rename(home / 'more.csv')
    folder_of(task, home / 'other', labelled=100, unlabelled=0)
    for name, rows in (('more.csv', 40), ('other', 100)):
        monkeypatch.chdir(home)
        config = planned(task, folder, unlabelled=name).config
        assert config.loss.unlabelled == str(home / name)
        monkeypatch.chdir('/')
        assert len(corpus_of(config).unlabelled) == rows


@pytest.mark.parametrize('name', ['unlabeled.csv', 'Unlabelled.csv', 'unlabelled.CSV', 'unlabelled.csv.zip'])
def test_a_file_of_such_rows_that_would_not_be_read_is_refused(name, home):
    folder = folder_of('text_classification', home / 'with')
    (folder / 'unlabelled.csv').rename(folder / name)
    with pytest.raises(CorpusError, match=f'{name} would not be read: .* a file called unlabelled.tsv, '):
        load_corpus('text_classification', str(folder))


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(unlabelled='rest'), 'give labels too'),
        (dict(labels=5000), 'labels=5000 is more than the 60 rows'),
        (dict(unlabelled='none', unlabelled_share=0.5), 'is a share of no rows'),
        (dict(mode='full_student', unlabelled='none'), "mode='full_student' learns from none"),
        (dict(unlabelled='nowhere'), "there is no corpus 'nowhere'"),
        (dict(unlabelled=' '), 'unlabelled is empty'),
        (dict(unlabelled='{folder}'), 'is the corpus itself'),
        (dict(task='masked_lm', corpus='embedded', unlabelled='none'), "not read by task='masked_lm'"),
        (dict(unlabelled_id='40-000000000000'), 'names other rows without a label than there are'),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(given, words, home):
    folder = folder_of('answer_selection', home / 'with')
    usual = dict(mode='full_kd', task='answer_selection', corpus=str(folder))
    if 'unlabelled' in given:
        given = given | dict(unlabelled=given['unlabelled'].format(folder=folder))
    with pytest.raises(KdnotesError, match=words) as e:
        plan(make_config(**usual | given), ON)
    assert '\n' not in str(e.value)


def test_rows_that_are_no_tables_have_no_place_in_other_tasks(home):
    folder = folder_of('text_classification', home / 'with')
    (folder / 'unlabelled.csv').rename(folder / 'unlabelled.tsv')
    with pytest.raises(CorpusError, match='a task that learns from texts as they are has none'):
        load_corpus('masked_lm', str(folder))


def test_data_of_python_bring_them_along(home):
    splits = load_corpus('text_classification', 'embedded').splits
    tables = {split: pd.DataFrame(list(rows)) for split, rows in splits.items()}
    more = tables['train'][100:160].drop(columns='label')
    tables['train'] = tables['train'][:100]
    data = kd.load_data(tables, task='text_classification', unlabelled=more)
    assert data == kd.load_data(tables | dict(unlabelled=more), task='text_classification')
    corpus = corpus_of(make_config(task=data.task, corpus=data.corpus, unlabelled=data.unlabelled))
    assert [row['text'] for row in corpus.unlabelled] == more['text'].tolist()
    labelled = more.assign(label=tables['train']['label'].iloc[0])
    wrong = kd.load_data(tables, task='text_classification', unlabelled=labelled)
    with pytest.raises(CorpusError, match='have no label'):
        corpus_of(make_config(task=data.task, corpus=data.corpus, unlabelled=wrong.unlabelled))


def test_the_rows_of_another_corpus_are_its_training_rows_and_its_own(home):
    one = folder_of('text_classification', home / 'one', labelled=100, unlabelled=0)
    other = home / 'other'
    folder_of('text_classification', other, labelled=200, unlabelled=50)
    config = make_config(task='text_classification', corpus=str(one), unlabelled=str(other))
    found = corpus_of(config).unlabelled
    whole = [row['text'] for row in load_corpus('text_classification', 'embedded').splits['train'][:250]]
    assert [row['text'] for row in found] == whole and {row['label'] for row in found} == {''}


def test_too_few_labels_for_a_class_are_said_to_be_so(home):
    given = dict(mode='full_kd', task='text_classification', corpus='embedded', labels=8)
    with pytest.raises(CorpusError, match='is no class of the training split .* use more than labels=8'):
        plan(make_config(**given), ON)


def test_labels_are_drawn_by_the_seed_and_whole_questions(home):
    def rows(**given):
        config = make_config(task='answer_selection', corpus='embedded', mode='full_kd', **given)
        corpus = corpus_of(config)
        return [json.dumps(row) for row in corpus.splits['train']], corpus

    first, corpus = rows(labels=100, seed=3, unlabelled='rest')
    assert rows(labels=100, seed=3)[0] == first != rows(labels=100, seed=4)[0]
    assert set(first) < set(rows(labels=200, seed=3)[0])
    questions = {json.loads(row)['question_id'] for row in first}
    assert questions.isdisjoint(row['question_id'] for row in corpus.unlabelled)
    assert 100 <= len(first) < 120


@pytest.mark.parametrize('shared', ['own', 'shared'])
def test_a_teacher_with_another_seed_knows_the_labels_of_its_student_and_no_others(shared, home):
    given = dict(task='answer_selection', corpus='embedded', mode='full_kd', labels=32, unlabelled='rest')
    given |= dict(seed=3, teacher_setting=shared)

    def rows(config) -> list[str]:
        return [json.dumps(row) for row in corpus_of(config).splits['train']]

    usual, other = (plan(make_config(**given, teacher_seed=seed), ON) for seed in (3, 5))
    assert rows(other.config) == rows(other.teacher.config) == rows(usual.teacher.config)
    assert other.teacher.config.seed == 5 and other.teacher.config.train.labels_seed == 3
    assert usual.teacher.config.train.labels_seed is None, 'the usual teacher is called as ever'
    known = {json.loads(row)['question_id'] for row in rows(other.teacher.config)}
    assert known.isdisjoint(row['question_id'] for row in corpus_of(other.config).unlabelled)
    drawn = [plan(make_config(**given | dict(seed=seed), labels_seed=7), ON) for seed in (0, 1)]
    assert (
        rows(drawn[0].config) == rows(drawn[1].config) == rows(drawn[0].teacher.config) != rows(usual.config)
    )
    with pytest.raises(KdnotesError, match='labels_seed=7 draws the rows that keep their labels'):
        make_config(mode='full_kd', labels_seed=7)


@pytest.mark.exhaustive
def test_a_run_that_names_a_file_from_its_folder_is_exported_from_any(
    home, small_teacher, rank_here, monkeypatch
):
    "Also one that was made by an older version, whose configuration has the name as it was given."
    folder = folder_of('text_classification', home / 'corpus', unlabelled=0)
    rows = table_of(load_corpus('text_classification', 'embedded').splits['train'])[60:80]
    rows[['text']].to_csv(home / 'more.csv', index=False)
    monkeypatch.chdir(home)
    given = dict(task='text_classification', corpus='corpus', mode='full_kd', unlabelled='more.csv')
    given |= dict(teacher=str(small_teacher), student_init='teacher_pretrained', student_layers=(1,))
    given |= dict(max_length=32, ranks=1, threads_per_rank=1, smoke=True)
    record = run(make_config(**given))
    its = RunFolder(record['study'], record['run_id'])
    said = its.config()
    assert said['config']['unlabelled'] == str(home / 'more.csv') and said['config']['corpus'] == str(folder)
    (home / 'elsewhere').mkdir()
    monkeypatch.chdir(home / 'elsewhere')
    (its.path / 'config.json').write_text(
        json.dumps(said | dict(config=said['config'] | dict(unlabelled='more.csv')))
    )
    pytest.importorskip('onnxruntime')
    export_model(record['run_id'], 'exported', onnx=True, teacher=False)
    assert (home / 'elsewhere/exported/onnx/model.onnx').is_file()

"""Models that take no training: right values worked out by hand, and those of the committed evidence."""

import itertools
import json
import re
from pathlib import Path
import numpy as np
import pytest
from kdnotes.core.config import TASKS, metric_name, task_info
from kdnotes.core.given import make_config
from kdnotes.core.resolve import Machine, resolve, settings
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.experiment.plan import make_task
from kdnotes.experiment.worker import have_floors
from kdnotes.records.runs import read_csv
from kdnotes.records.store import floors, records
from kdnotes.tasks.base import floor_table, floors_key
from kdnotes.tasks.ranking_metrics import (
    as_questions,
    in_any_order,
    ranking_metrics,
    threshold_metrics,
)
from kdnotes.tasks.sources import Corpus, corpus_of
from kdnotes.tasks.text_classification import TextClassification, TextRegression
from tiny_lm import tiny_corpus, tiny_lm_config, tiny_tokenizer

ROOT = Path(__file__).parents[1]
DATA = ROOT / 'thesis' / 'data'


def config_of(task, corpus='embedded', **given):
    return resolve(
        make_config(task=task, mode='baseline', corpus=corpus, **given), Machine('cpu', cores=2), corpus
    )


def task_of(task, corpus='embedded', **given):
    config = config_of(task, corpus, **given)
    made = make_task(config, corpus_of(config))
    if task == 'masked_lm':
        made.encode(load_tokenizer(config.teacher))
    return made


# ---- answer selection ----


def question_of(labels):
    rows = [
        dict(question_id='Q', document_id='D', sentence_id=f'S{i}', label=label)
        for i, label in enumerate(labels)
    ]
    return as_questions(rows)


def every_order(scores):
    "Scores that put equal ones into each of their orders."
    for order in itertools.permutations(range(len(scores))):
        yield np.asarray(scores) + 1e-3 * np.array(order)


@pytest.mark.parametrize('scores', [(0,) * 5, (1, 0, 1, 0, 0), (2, 1, 1, 1, 0), (0, 1, 2, 3, 4), (7,)])
def test_floors_are_means_over_all_orders_of_equal_scores(scores):
    for labels in itertools.product((0, 1), repeat=len(scores)):
        questions = question_of(labels)
        every = [ranking_metrics(questions, order) for order in every_order(scores)]
        for name, value in ranking_metrics(in_any_order(questions), np.array(scores)).items():
            assert value == pytest.approx(np.mean([found[name] for found in every], axis=0)), (labels, name)


def test_answering_by_equal_scores_is_right_as_often_as_one_of_them():
    "Three questions whose first two candidates are equal: both right, one of them, none."
    labels = (1, 1, 0), (1, 0, 0), (0, 0, 1)
    rows = [
        dict(question_id=f'Q{q}', document_id='D', sentence_id=f'S{i}', label=label)
        for q, own in enumerate(labels)
        for i, label in enumerate(own)
    ]
    questions = in_any_order(as_questions(rows))
    found = threshold_metrics(questions, np.array([1, 1, 0] * 3), dict(pair=1.0, trigger=1.0))
    assert found['trigger_precision'] == found['trigger_recall'] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found['pair_precision'] == 3 / 6 and found['pair_recall'] == 3 / 4


# ---- classes and numbers ----


def corpus_of_pairs(labels):
    "Pairs that share their words or none; `labels` says what each kind is."
    kinds = [('ice is cold', 'Ice is cold.'), ('ice is cold', 'iron sinks')]
    rows = [
        dict(id=f'{i}', text=first, second=second, label=labels[i % 2], cluster=f'{i}')
        for i, (first, second) in enumerate(kinds * 6)
    ]
    return Corpus('pairs', 'folder', '', dict(train=[*rows, rows[0]], dev=rows, test=rows), 'x')


def test_classes_have_the_largest_one_and_pairs_what_they_share():
    found = TextClassification(corpus_of_pairs(('same', 'other'))).floors()
    assert found['majority'].metrics['test']['accuracy'] == 0.5  # 7 of 13 in train, 6 of 12 here
    # shares of 'other' and 'same': 6 + 7/15 and 7 + 8/15 of 14 (one more of each class, one more of all)
    other, same = (6 + 7 / 15) / 14, (7 + 8 / 15) / 14
    assert found['majority'].metrics['test']['nll'] == pytest.approx(-np.log([other, same]).mean())
    assert found['shared_words'].metrics['test']['accuracy'] == 1.0


def test_numbers_have_their_mean_and_pairs_that_of_what_they_share():
    found = TextRegression(corpus_of_pairs(('1', '0'))).floors()
    train = np.array([1.0] * 7 + [0.0] * 6)
    right = ((np.array([1.0, 0.0]) - train.mean()) ** 2).mean() / train.var()
    assert found['mean'].metrics['test']['mse'] == pytest.approx(right, rel=1e-5)
    assert found['shared_words'].metrics['test']['mse'] < 0.05 and 'majority' not in found


# ---- language models ----


def test_a_unigram_model_has_the_shares_of_the_training_text():
    config = tiny_lm_config()
    task = make_task(config, tiny_corpus())
    task.encode(tiny_tokenizer())
    ids = task.blocks['train'].ids(task.trained)[:, 1:-1].ravel()
    counts = np.bincount(ids, minlength=65)[5:] + 1  # no special token is asked for
    nats = -np.log(counts / counts.sum())
    found = task.floors()['unigram']
    text = task.texts['test']
    labels = task.batch('test', np.arange(len(text.chosen))).labels.numpy() - 5
    assert found.metrics['test']['nll'] == pytest.approx(nats[labels].mean())
    assert found.metrics['test']['unigram_nll'] == pytest.approx(found.metrics['test']['nll'])
    asked = text.blocks.maskable(text.chosen)  # ends of documents are not
    of_blocks = [nats[ids[own] - 5].mean() for ids, own in zip(text.blocks.ids(text.chosen), asked)]
    assert found.metrics['test']['nll_all'] == pytest.approx(np.mean(of_blocks))
    alone = found.predictions[found.predictions['item'] == 'alone']
    assert found.metrics['test']['pseudo_nll'] == pytest.approx(nats[alone['label'].to_numpy() - 5].mean())


# ---- all tasks ----


@pytest.mark.parametrize('name', TASKS)
def test_floors_are_means_of_units_on_every_evaluation_set(name):
    task = task_of(name, smoke=True)
    found = task.floors()
    assert found and found.keys() <= task_info(name).floors.keys()
    table = floor_table(found)
    for floor, of in found.items():
        assert set(of.metrics) == set(task.evaluation_sets)
        means = of.units.groupby(['split', 'metric'])['value'].mean()
        for (split, metric), mean in means.items():
            assert of.metrics[split][metric] == pytest.approx(mean, nan_ok=True)
        own = table[(table['floor'] == floor) & (table['unit'] == '')]
        assert (task.primary.set, task.primary.metric) in set(zip(own['split'], own['metric']))


def test_runs_that_were_made_before_get_their_floors_without_training(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    config = config_of('extractive_qa', smoke=True, study='old')
    sha = corpus_of(config).sha256
    have_floors(config, 'f' * 64)  # of another corpus than there is today
    assert len(floors('old')) == 0
    have_floors(config, sha)
    key = floors_key(task_info('extractive_qa'), sha, settings(config))
    never = floors('old', key).query(
        "floor == 'never' and unit == '' and metric == 'exact' and split == 'test'"
    )
    assert never['value'].tolist() == [0.5]  # a smoke run has twelve with and twelve without an answer
    path = tmp_path / 'runs/old/floors.csv.gz'
    before = path.stat().st_mtime_ns
    have_floors(config, sha)
    assert path.stat().st_mtime_ns == before


# ---- the committed evidence ----

STUDIES = sorted(p.name.removesuffix('.records.jsonl') for p in DATA.glob('*.records.jsonl'))


def kept(study):
    "Floors of committed evidence under the key of its records."
    [key] = {floors_key(task_info(r['task']), r['corpus_sha256'], r['settings']) for r in records(study)}
    table = read_csv(DATA / f'{study}.floors.csv.gz')
    return table[table['key'] == key].drop(columns='key').reset_index(drop=True)


@pytest.mark.parametrize('study', STUDIES)
def test_evidence_has_floors_of_all_its_primary_units(study):
    table = kept(study)
    assert len(table)
    for _, own in table.groupby('floor'):
        r = records(study)[0]
        where, metric = r['primary']['set'], r['primary']['metric']
        of_set = own[(own['split'] == where) & (own['metric'] == metric)]
        mean = of_set[of_set['unit'] != '']['value'].mean()
        assert of_set[of_set['unit'] == '']['value'].item() == pytest.approx(mean, rel=1e-4)


def test_floors_of_evidence_are_what_the_code_gives_today():
    now = floor_table(task_of('answer_selection').floors())
    then = kept('embedded-rates')
    assert (now.drop(columns='value') == then.drop(columns='value')).all(axis=None)
    assert then['value'].to_numpy() == pytest.approx(now['value'].to_numpy(), rel=1e-5)


def rows_of_how_to(name):
    "(corpus, set, metric, floor, value) of a how-to's table."
    cells = json.loads((ROOT / f'nbs/howto/{name}.ipynb').read_text(encoding='utf-8'))['cells']
    [text] = [''.join(c['source']) for c in cells if 'takes no training | value' in ''.join(c['source'])]
    return [
        tuple(x.strip() for x in m.groups())
        for m in re.finditer(r'^\| `(\w+)` \|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$', text, re.M)
    ]


EVIDENCE = {  # (task, corpus) -> a study of it
    ('answer_selection', 'wikiqa'): 'wikiqa',
    ('answer_selection', 'squad1'): 'squad1',
    ('extractive_qa', 'squad1'): 'extractive_qa-squad1',
    ('extractive_qa', 'squad2'): 'squad2-qa',
    ('masked_lm', 'gutenberg'): 'gutenberg',
}
HOW_TO = dict(
    own_texts=('answer_selection', 'text_classification'),
    passages=('extractive_qa',),
    language_models=('masked_lm',),
)


@pytest.mark.parametrize('name', HOW_TO)
def test_how_tos_have_the_numbers_of_floors(name, request):
    rows = rows_of_how_to(name)
    assert rows and all(len(row) == 5 for row in rows)
    tables = {}
    for corpus, where, metric, floor, value in rows:
        [(task, key)] = [
            (t, key) for t in HOW_TO[name] for key, words in task_info(t).floors.items() if words == floor
        ]
        if (task, corpus) not in tables:
            if corpus == 'imdb':
                request.getfixturevalue('corpora')
            study = EVIDENCE.get((task, corpus))
            tables[task, corpus] = kept(study) if study else floor_table(task_of(task, corpus).floors())
        table = tables[task, corpus]
        table = table[(table['unit'] == '') & (table['split'] == where) & (table['floor'] == key)]
        found = {metric_name(m, task): v for m, v in zip(table['metric'], table['value'])}
        right = f'{100 * found[metric]:.1f} %' if value.endswith('%') else f'{found[metric]:.3f}'
        assert value == right, (corpus, metric, floor)


def test_the_order_of_the_text_is_told_beside_the_floors(corpora):
    rows = task_of('answer_selection', 'wikiqa').rows['test']
    questions = as_questions(rows)
    in_order = ranking_metrics(questions, -np.arange(len(rows)))['map'][questions.clean].mean()
    text = (ROOT / 'nbs/howto/own_texts.ipynb').read_text(encoding='utf-8')
    assert f'has {in_order:.3f} there' in text

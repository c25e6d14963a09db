"""Ranking metrics equal trec_eval's, ties included;
thresholds and triggering equal their definitions, spelled out slowly.
"""

import numpy as np
import pandas as pd
import pytest

from kdnotes.tasks.answer_selection import AnswerSelection, worst
from kdnotes.tasks.ranking_metrics import (
    UNIT_METRICS,
    group_by_question,
    best_threshold,
    choose_thresholds,
    evaluate_split,
    precision_recall_f1,
    ranking_metrics,
    threshold_metrics,
)
from kdnotes.core.columns import Columns
from kdnotes.tasks.sources import Corpus, load_corpus

pytrec_eval = pytest.importorskip('pytrec_eval', reason='trec_eval comes as the package pytrec-eval-terrier')


def random_rows(rng, n_questions=300, most=14):
    rows = []
    used = 0
    for q in range(n_questions):
        n = int(rng.integers(1, most))
        document = f'D{rng.integers(90)}'
        # strings, not numbers: D1-9 after D1-10; beyond ASCII
        names = [f'{document}-{i}' for i in range(n - 1)] + ['é-1' if q % 2 else 'Z-1']
        rate = rng.choice([0.0, 0.15, 0.5, 1.0], p=[0.2, 0.5, 0.2, 0.1])
        rows += [
            dict(
                question_id=f'Q{q}',
                question=f'question {q}',
                document_id=document,
                document_title=document,
                sentence_id=name,
                sentence=f'sentence {used + i}',
                label=int(rng.random() < rate),
            )
            for i, name in enumerate(names)
        ]
        used += n
    return Columns.from_rows(rows)[rng.permutation(len(rows))]  # rows of a question need not be neighbours


def tied_scores(rng, n, levels=4):
    return rng.integers(0, levels, n) / levels - 0.5


def trec(rows, scores):
    qrel = {}
    run = {}
    for row, score in zip(rows, scores):
        qrel.setdefault(row['question_id'], {})[row['sentence_id']] = row['label']
        run.setdefault(row['question_id'], {})[row['sentence_id']] = float(score)
    found = pytrec_eval.RelevanceEvaluator(qrel, {'map', 'recip_rank', 'P_1'}).evaluate(run)
    ids = list(dict.fromkeys(row['question_id'] for row in rows))
    return {
        ours: np.array([found[q][theirs] for q in ids])
        for ours, theirs in dict(map='map', mrr='recip_rank', p_at_1='P_1').items()
    }


@pytest.mark.parametrize('levels', [1, 2, 4, 1000])
@pytest.mark.parametrize('seed', range(2))
def test_equal_to_trec_eval(seed, levels):
    rng = np.random.default_rng([seed, levels])
    rows = random_rows(rng)
    scores = tied_scores(rng, len(rows), levels)
    ours = ranking_metrics(group_by_question(rows), scores)
    theirs = trec(rows, scores)
    for metric in theirs:
        np.testing.assert_allclose(ours[metric], theirs[metric], atol=1e-12, err_msg=metric)


def test_scores_that_differ_only_in_float64_are_ties():
    rng = np.random.default_rng(7)
    rows = random_rows(rng)
    scores = 1 + tied_scores(rng, len(rows), 2) + rng.random(len(rows)) * 1e-9
    ours = ranking_metrics(group_by_question(rows), scores)
    theirs = trec(rows, scores)
    for metric in theirs:
        np.testing.assert_allclose(ours[metric], theirs[metric], atol=1e-12, err_msg=metric)
    ranks = pd.Series(scores).rank(method='first').to_numpy()  # what the scores say in float64
    assert not np.allclose(ranking_metrics(group_by_question(rows), ranks)['map'], theirs['map'])


def test_sets_and_units():
    rng = np.random.default_rng(2)
    rows = random_rows(rng)
    scores = tied_scores(rng, len(rows))
    metrics, units, predictions = evaluate_split('test', group_by_question(rows), scores, None)
    theirs = trec(rows, scores)
    labels = pd.DataFrame(rows).groupby('question_id', sort=False)['label']
    sets = dict(
        clean=(labels.nunique() == 2).to_numpy(),
        answered=(labels.max() == 1).to_numpy(),
        raw=np.full(labels.ngroups, True),
    )
    assert 0 < sets['clean'].sum() < sets['answered'].sum() < sets['raw'].sum()
    for metric, (name, of) in UNIT_METRICS.items():
        assert metrics[metric] == pytest.approx(theirs[of][sets[name]].mean(), abs=1e-12)
        own = units[units.metric == metric]
        assert metrics[metric] == pytest.approx(own.value.mean(), abs=1e-12)
        assert set(own['set']) == {name} and len(own) == sets[name].sum()
    document = {r['question_id']: r['document_id'] for r in rows}
    assert (units.unit.map(document) == units.cluster).all()
    assert list(units.columns) == ['split', 'set', 'unit', 'cluster', 'metric', 'value']
    assert set(units.split) == set(predictions.split) == {'test'}
    assert list(units.index) == list(range(len(units)))
    assert (
        list(predictions.columns) == ['split', 'unit', 'item', 'label', 'score']
        and predictions.score.dtype == np.float32
    )
    assert list(zip(predictions.unit, predictions.item, predictions.label)) == [
        (r['question_id'], r['sentence_id'], r['label']) for r in rows
    ]


# ids that a file does not have


@pytest.mark.parametrize('given', ['', 'question_id,document_title,'])
def test_without_ids_no_measure_depends_on_the_order_of_the_file(tmp_path, given):
    "A right sentence first or last, and one of two equal sentences right: a constant scorer gains nothing."
    told = 'Q{q},T{q},' if given else ''
    candidates = [
        [(f'text {i}', int(i == q % 4)) for i in range(4)] + [('twice', q % 2), ('twice', 0)]
        for q in range(20)
    ]

    def metrics(name, order):
        lines = [
            f'{told.format(q=q)}question {q},{text},{label}'
            for q, own in enumerate(candidates)
            for text, label in order(own)
        ]
        folder = tmp_path / name
        folder.mkdir()
        for split in ('train', 'dev', 'test'):
            (folder / f'{split}.csv').write_text('\n'.join([f'{given}question,sentence,label', *lines, '']))
        task = AnswerSelection(load_corpus('answer_selection', str(folder)))
        return task.evaluate({s: np.zeros(len(task.rows[s])) for s in ('dev', 'test')}).metrics['test']

    last = metrics('last', lambda own: sorted(own, key=lambda of: of[1]))
    first = metrics('first', lambda own: sorted(own, key=lambda of: -of[1]))
    assert first == last == metrics('as they are', list)
    assert 0.25 < last['map'] < 0.75


# thresholds, by definition


def slow_trigger(rows, scores, threshold):
    by_question = {}
    for row, score in zip(rows, np.float32(scores)):
        by_question.setdefault(row['question_id'], []).append((score, row['sentence_id'], row['label']))
    spoken = right = answerable = 0
    for candidates in by_question.values():
        score, _, label = max(candidates)
        answerable += any(c[2] for c in candidates)
        spoken += score >= threshold
        right += score >= threshold and label
    p = right / spoken if spoken else 0.0
    r = right / answerable
    return p, r, 2 * p * r / (p + r) if p + r else 0.0


def slow_pair(rows, scores, threshold):
    said = np.float32(scores) >= threshold
    label = np.array([r['label'] for r in rows])
    tp = (said & (label == 1)).sum()
    p = tp / said.sum() if said.any() else 0.0
    r = tp / label.sum()
    return p, r, 2 * p * r / (p + r) if p + r else 0.0


@pytest.mark.parametrize('levels', [3, 40])
@pytest.mark.parametrize('seed', range(3))
def test_thresholds_come_from_dev_and_are_the_best(seed, levels):
    rng = np.random.default_rng([seed, levels])
    splits = {}
    for split in ('dev', 'test'):
        rows = random_rows(rng, 80)
        splits[split] = (
            rows,
            np.float32(tied_scores(rng, len(rows), levels) + np.array([0.6 * r['label'] for r in rows])),
        )
    (dev, dev_scores), (test, test_scores) = splits['dev'], splits['test']
    thresholds = choose_thresholds(group_by_question(dev), dev_scores)
    found = threshold_metrics(group_by_question(test), test_scores, thresholds)
    for name, slow in dict(pair=slow_pair, trigger=slow_trigger).items():
        best = max(slow(dev, dev_scores, t)[2] for t in np.unique(dev_scores))
        assert slow(dev, dev_scores, thresholds[name])[2] == pytest.approx(best)
        assert [found[f'{name}_{m}'] for m in ('precision', 'recall', 'f1')] == pytest.approx(
            slow(test, test_scores, thresholds[name])
        )


def test_the_highest_of_equally_good_thresholds():
    scores = np.float32([4, 3, 2, 1])
    right = np.array([1, 0, 1, 0])
    assert best_threshold(scores, right, wanted=2) == 2.0  # F1 .67, .5, .8, .67
    assert best_threshold(np.float32([2, 1, 1]), np.array([1, 1, 0]), wanted=1) == 2.0
    # one score, one choice
    assert best_threshold(np.float32([1, 1, 1]), np.array([1, 0, 0]), wanted=1) == 1.0
    assert precision_recall_f1(scores, right, 2, np.inf) == (0.0, 0.0, 0.0)
    assert precision_recall_f1(scores[:2], np.array([0, 0]), 0, 3.5) == (0.0, 0.0, 0.0)


def test_thresholds_do_not_tell_apart_what_ranks_do_not():
    rows = [
        dict(question_id=q, document_id='D', sentence_id=f'{q}-1', label=label)
        for q, label in (('Q1', 1), ('Q2', 0), ('Q3', 0))
    ]
    questions = group_by_question(Columns.from_rows(rows))
    scores = 1 + np.array([2e-9, 1e-9, 0.0])  # the same in float32
    assert choose_thresholds(questions, scores) == dict(pair=1.0, trigger=1.0)


# the task


@pytest.fixture(scope='module')
def corpus():
    rng = np.random.default_rng(3)
    return Corpus('random', 'folder', '', {s: random_rows(rng, 60) for s in ('train', 'dev', 'test')}, '')


def test_the_task_evaluates_sets_with_devs_threshold(corpus):
    task = AnswerSelection(corpus)
    rng = np.random.default_rng(4)
    scores = {s: tied_scores(rng, len(task.rows[s]), 9)[:, None] for s in ('dev', 'test')}
    both = task.evaluate(scores)
    dev = task.evaluate({'dev': scores['dev']})
    test = task.evaluate({'test': scores['test']})
    thresholds = choose_thresholds(task.questions['dev'], scores['dev'])
    assert both.metrics['test']['trigger_f1'] == pytest.approx(
        slow_trigger(corpus.splits['test'], scores['test'].ravel(), thresholds['trigger'])[2]
    )
    assert both.metrics['dev'] == dev.metrics['dev']
    assert (
        test.metrics['test']['trigger_f1'] is None
        and test.metrics['test']['map'] == both.metrics['test']['map']
    )
    assert len(both.units) == len(dev.units) + len(test.units) and len(both.predictions) == sum(
        map(len, scores.values())
    )
    with pytest.raises(ValueError, match='must have .*, one for each pair in the order of the split$'):
        task.evaluate({'test': scores['test'][1:]})


def test_smoke_keeps_whole_questions_of_both_kinds(corpus):
    full = AnswerSelection(corpus)
    smoke = AnswerSelection(corpus, smoke=True)
    sizes = {s: dict(zip(q.ids, q.sizes)) for s, q in full.questions.items()}
    for split, q in smoke.questions.items():
        assert all(sizes[split][name] == n for name, n in zip(q.ids, q.sizes))
        assert 0 < q.clean.sum() < len(q.ids)
        kept = {(r['question_id'], r['sentence_id']) for r in smoke.rows[split]}
        assert smoke.rows[split] == [
            r for r in full.rows[split] if (r['question_id'], r['sentence_id']) in kept
        ]
    assert 64 <= len(smoke.rows['train']) < 64 + 14 and len(smoke.questions['test'].ids) == 24


def test_worst_agrees_with_the_metric_and_survives_a_file(corpus, tmp_path):
    task = AnswerSelection(corpus)
    rng = np.random.default_rng(5)
    evaluation = task.evaluate({s: tied_scores(rng, len(task.rows[s]), 5) for s in ('dev', 'test')})
    record = dict(primary=dict(set='test', metric='map', higher_is_better=True))
    table = worst(record, evaluation.units, evaluation.predictions, corpus, n=1000)
    values = evaluation.units.query("split == 'test' and metric == 'map'").value
    assert list(table['map']) == sorted(values.round(3))
    sentence = {r['sentence']: r for r in corpus.splits['test']}
    for row in table.to_dict('records'):
        assert sentence[row['correct']]['label'] == 1
        assert sentence[row['correct']]['question_id'] == sentence[row['put first']]['question_id']
    for name in ('units', 'predictions'):
        getattr(evaluation, name).to_csv(tmp_path / f'{name}.csv.gz', index=False)
    read = (pd.read_csv(tmp_path / f'{name}.csv.gz') for name in ('units', 'predictions'))
    pd.testing.assert_frame_equal(worst(record, *read, corpus, n=7), table.head(7))

"""Grades of relevance in answer selection: nDCG@10 equals that of trec_eval and of scikit-learn, every other
metric is that of labels 0 and 1, each loss learns from the grades, and a corpus without them is as it was.
"""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import ndcg_score
from transformers.modeling_outputs import SequenceClassifierOutput
from small_runs import ON, small_model, train_here
from test_ranking_metrics import random_rows, tied_scores
from kdnotes.core.columns import Columns
from kdnotes.core.parse import make_config
from kdnotes.experiment import launch
from kdnotes.experiment.evaluate import evaluate
from kdnotes.experiment.plan import plan
from kdnotes.losses.targets import listnet
from kdnotes.report.report import report
from kdnotes.results.store import find_record, units
from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
from kdnotes.tasks.base import NO_LABEL, Task
from kdnotes.tasks.batching import Batch
from kdnotes.tasks.ranking_metrics import average_ties, evaluate_split, group_by_question, ndcg
from kdnotes.tasks.sources import SPLITS, Corpus, load_corpus

pytrec_eval = pytest.importorskip('pytrec_eval', reason='trec_eval comes as the package pytrec-eval-terrier')


def relabelled(rows, labels):
    return Columns(rows.columns | dict(label=np.asarray(labels, dtype=np.int64)))


def graded_rows(rng, n_questions=200, most=25):
    rows = random_rows(rng, n_questions, most)
    return relabelled(rows, rows['label'] * rng.integers(1, 4, len(rows)))


def corpus_of(rng, **labels):
    "Labels by split as a function of those that are 0 or 1."
    splits = {split: random_rows(rng, 40) for split in SPLITS}
    return Corpus(
        'random',
        'folder',
        '',
        {s: relabelled(rows, labels.get(s, np.asarray)(rows['label'])) for s, rows in splits.items()},
        '',
    )


def scores_of(task, rng):
    return {split: tied_scores(rng, len(task.rows[split]), 9) for split in task.evaluation_sets}


# ---- the metric ----


@pytest.mark.parametrize('levels', [1, 3, 1000])
def test_ndcg_equals_trec_evals_for_the_same_gains(levels):
    rng = np.random.default_rng(levels)
    rows = graded_rows(rng)
    scores = tied_scores(rng, len(rows), levels)
    gains, run = {}, {}
    for row, score in zip(rows, scores):
        gains.setdefault(row['question_id'], {})[row['sentence_id']] = int(2 ** row['label'] - 1)
        run.setdefault(row['question_id'], {})[row['sentence_id']] = float(score)
    theirs = pytrec_eval.RelevanceEvaluator(gains, {'ndcg_cut_10'}).evaluate(run)
    questions = group_by_question(rows, graded=True)
    expected = [theirs[q]['ndcg_cut_10'] for q in questions.ids]
    assert questions.sizes.max() > 10
    np.testing.assert_allclose(ndcg(questions, scores), expected, atol=1e-12)


@pytest.mark.parametrize('levels', [1, 3, 1000])
def test_ndcg_equals_scikit_learns_which_averages_over_ties(levels):
    rng = np.random.default_rng(levels + 5)
    questions = average_ties(group_by_question(graded_rows(rng), graded=True))
    scores = np.float32(tied_scores(rng, len(questions.labels), levels))
    for q, value in enumerate(ndcg(questions, scores)):
        of_question = questions.question == q
        if of_question.sum() > 1:
            gains = 2.0 ** questions.grades[of_question] - 1
            assert value == pytest.approx(ndcg_score([gains], [scores[of_question]], k=10), abs=1e-12)


def test_units_are_the_questions_with_a_right_candidate():
    rng = np.random.default_rng(3)
    questions = group_by_question(graded_rows(rng), graded=True)
    scores = tied_scores(rng, len(questions.labels))
    metrics, units, predictions = evaluate_split('test', questions, scores, None)
    own = units[units['metric'] == 'ndcg_at_10']
    assert own['unit'].tolist() == questions.ids[questions.answered].tolist()
    assert metrics['ndcg_at_10'] == pytest.approx(own['value'].mean())
    assert set(predictions['label']) == {0, 1}


# ---- what asks for right or wrong ----


def test_other_metrics_are_those_of_right_and_wrong():
    rng = np.random.default_rng(4)
    binary = AnswerSelection(corpus_of(rng))
    three = dict.fromkeys(SPLITS, lambda labels: labels * np.resize([1, 3, 2], len(labels)))
    graded = AnswerSelection(corpus_of(np.random.default_rng(4), **three))
    assert graded.labels['train'].max() == 3
    scores = scores_of(binary, rng)
    ours, theirs = graded.evaluate(scores), binary.evaluate(scores)
    for split in ('dev', 'test'):
        metrics = dict(ours.metrics[split])
        assert 0 < metrics.pop('ndcg_at_10') < 1
        assert metrics == theirs.metrics[split]
    pd.testing.assert_frame_equal(ours.predictions, theirs.predictions)
    floors = {name: floor.metrics['test'] for name, floor in graded.floors().items()}
    assert all(0 < metrics['ndcg_at_10'] < 1 for metrics in floors.values())
    for name, floor in binary.floors().items():
        assert floor.metrics['test'] == {k: v for k, v in floors[name].items() if k != 'ndcg_at_10'}


@pytest.mark.parametrize('split', SPLITS)
def test_one_graded_split_makes_a_corpus_graded(split):
    task = AnswerSelection(corpus_of(np.random.default_rng(5), **{split: lambda labels: labels * 4}))
    metrics = task.evaluate(scores_of(task, np.random.default_rng(0))).metrics
    assert all('ndcg_at_10' in metrics[evaluated] for evaluated in ('dev', 'test'))
    assert task.highest_grade == (4 if split == 'train' else 1)


def test_a_corpus_of_two_labels_is_as_it_was():
    task = AnswerSelection(corpus_of(np.random.default_rng(6)))
    labels = task.labels['train']
    assert (task.label_prior == np.bincount(labels, minlength=2) / len(labels)).all()
    assert 'ndcg_at_10' not in task.evaluate(scores_of(task, np.random.default_rng(0))).metrics['test']
    outputs = SequenceClassifierOutput(logits=torch.randn(8, 2))
    batch = Batch(np.arange(8), {}, torch.from_numpy(labels[:8]), 8)
    ours, theirs = (
        loss(outputs, batch, None) for loss in (task.hard_loss, lambda *a: Task.hard_loss(task, *a))
    )
    assert ours[0].item() == theirs[0].item() and ours[1] == theirs[1]


def test_a_question_whose_best_grade_is_two_is_answered():
    corpus = corpus_of(np.random.default_rng(7), train=lambda labels: labels * 2)
    task = AnswerSelection(corpus, settings=AnswerSelectionSettings(train_questions='answered'))
    questions = group_by_question(corpus.splits['train'])
    assert task.questions['train'].ids.tolist() == questions.ids[questions.answered].tolist()


# ---- what is learnt ----


def test_a_candidate_alone_is_learnt_as_its_share_of_the_highest_grade():
    "The gradient is that of torch's cross-entropy with probabilities; rows without a label have none."
    corpus = corpus_of(np.random.default_rng(8), train=lambda labels: labels * np.resize([1, 4], len(labels)))
    more = relabelled(corpus.splits['train'][:5], [-1] * 5)
    task = AnswerSelection(Corpus('random', 'folder', '', corpus.splits | dict(unlabelled=more), ''))
    labels = task.labels['train']
    n = len(labels) - 5
    assert (labels[n:] == NO_LABEL).all() and set(labels[:n]) == {0, 1, 4}
    assert task.label_prior.tolist() == pytest.approx([1 - (labels[:n] / 4).mean(), (labels[:n] / 4).mean()])
    index = np.arange(n - 20, n + 5)
    logits = torch.randn(25, 2, requires_grad=True)
    batch = Batch(index, {}, torch.from_numpy(labels[index]), 25)
    total, count = task.hard_loss(SequenceClassifierOutput(logits=logits), batch, None)
    share = torch.from_numpy(labels[index[:20]] / 4).float()
    expected = F.cross_entropy(logits[:20], torch.stack([1 - share, share], 1), reduction='sum')
    assert count == 20 and total.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (total, expected))
    assert torch.allclose(ours, theirs, atol=1e-6) and not ours[20:].any()


@pytest.mark.parametrize('ranking', ['ranknet', 'lambda', 'listwise'])
def test_lists_are_learnt_by_grade(ranking):
    corpus = corpus_of(
        np.random.default_rng(9), train=lambda labels: labels * np.resize([1, 2, 3], len(labels))
    )
    settings = AnswerSelectionSettings(train_questions='all', ranking_loss=ranking)
    task = AnswerSelection(corpus, settings=settings)
    index = np.arange(len(task.labels['train']))
    grades = torch.from_numpy(task.labels['train'])
    groups = torch.from_numpy(task.questions['train'].question)
    batch = Batch(index, {}, grades, len(index), groups=groups)
    outputs = SequenceClassifierOutput(logits=torch.randn(len(index), 2))
    total, count = task.ranking(outputs, batch, None)
    assert count == task.loss_counts('train', index)['ranking']
    if ranking == 'listwise':
        scores = outputs.logits[:, 1] - outputs.logits[:, 0]
        assert total.item() == pytest.approx(listnet(scores, groups, grades, 'sum').item())
        return
    same = groups[:, None] == groups
    assert count == int((same & (grades[:, None] > grades)).sum())
    assert count > int((same & (grades[:, None] > 0) & (grades == 0)).sum())


# ---- a file of one's own ----


@pytest.fixture(scope='module')
def graded_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('graded')
    rng = np.random.default_rng(0)
    words = ['ice', 'floats', 'iron', 'sinks', 'water', 'lake', 'snow', 'melts']
    for split, n in dict(train=12, dev=6, test=6).items():
        rows = [
            dict(question=f'question {q} of {split}', sentence=' '.join(rng.choice(words, 4)), label=label)
            for q in range(n)
            for label in (0, 3, 1, 0, 2)
        ]
        pd.DataFrame(rows).to_csv(folder / f'{split}.csv', index=False)
    return folder


LOSSES = {
    'pointwise': {},
    'listwise': dict(ranking_loss='listwise', pointwise_weight=0.0),
    'lambda': dict(ranking_loss='lambda'),
}


@pytest.mark.slow
def test_students_of_grades_have_records_a_report_and_an_evaluation(graded_folder, home, monkeypatch):
    train_here(monkeypatch)
    teacher = small_model(home / 'teacher')
    common = dict(task='answer_selection', mode='full_kd', corpus=str(graded_folder), teacher=str(teacher))
    common |= dict(
        student_layers=(1,), max_length=32, threads_per_rank=1, ranks=1, smoke=True, study='grades'
    )
    for loss in LOSSES.values():
        made = plan(make_config(**common, **loss), ON)
        launch.execute(made)
        record, _ = find_record(made.run_id)
        assert np.isfinite(list(record['losses'].values())).all()
        own = units('grades', [made.run_id]).query("split == 'test' and metric == 'ndcg_at_10'")
        assert len(own) == 6
        assert record['metrics']['test']['ndcg_at_10'] == pytest.approx(own['value'].mean(), abs=1e-6)
    made_report = report('grades', [made.run_id])
    assert 'ndcg_at_10' in set(made_report.results['metric'])
    assert 'nDCG@10' in str(made_report)
    table = evaluate(made.run_id, str(graded_folder / 'test.csv')).table
    [row] = table[(table['about'] == 'model') & (table['metric'] == 'ndcg_at_10')].to_dict('records')
    assert row['estimate'] == pytest.approx(record['metrics']['test']['ndcg_at_10'], abs=1e-6)
    assert row['low'] < row['estimate'] < row['high']


def test_grades_are_read_as_they_are(graded_folder, home):
    corpus = load_corpus('answer_selection', str(graded_folder))
    assert np.bincount(corpus.splits['train']['label']).tolist() == [24, 12, 12, 12]

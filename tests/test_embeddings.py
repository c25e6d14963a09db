"Embeddings: what is trained on, what each loss is, what a query finds, files of one's own, and a study."

import json
import numpy as np
import pytest
import torch
from transformers import BertModel
from architectures import small_bert
from small_runs import ON
from kdnotes.checks.doctor import doctor
from kdnotes.core.config import KdnotesError
from kdnotes.core.machine import Machine
from kdnotes.core.parse import make_config
from kdnotes.distill.intermediate import open_student
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.experiment.study import run_study
from kdnotes.results.runs import read_csv
from kdnotes.tasks.embeddings import Embeddings, blocks_of, training_rows
from kdnotes.tasks.sources import load_corpus
from test_task_training import collection, embeddings_config, embeddings_task, encoder

TASK = 'embeddings'


# ---- rows ----


def test_rows_of_training_are_those_of_queries_with_a_relevant_text():
    rows = load_corpus(TASK, 'embedded').splits['train']
    answered = {row['question_id'] for row in rows if row['label']}
    for most in (0, 1, 3, None):
        chosen = rows[training_rows(rows, most, seed=0)]
        assert {row['question_id'] for row in chosen} == answered
        assert sum(chosen['label']) == sum(rows['label'])
        _, wrong = np.unique([row['question_id'] for row in chosen if not row['label']], return_counts=True)
        if most is None:
            assert len(chosen) == sum(row['question_id'] in answered for row in rows)
        else:
            assert wrong.max(initial=0) == most
    some, others = (training_rows(rows, 1, seed).tolist() for seed in (0, 1))
    assert some == training_rows(rows, 1, 0).tolist() != others


def test_blocks_are_whole_queries_of_about_their_size():
    question = np.random.default_rng(0).permutation(np.repeat(np.arange(50), 3))
    block = blocks_of(question, 8, seed=0)
    assert all(len(set(block[question == q])) == 1 for q in range(50))
    assert set(np.bincount(block)) <= {3, 6}
    assert blocks_of(np.zeros(5, dtype=int), 2, 0).tolist() == [0] * 5, 'one query is one block'


# ---- losses ----


def outputs_of(task, model, index):
    batch = task.batch('train', np.asarray(index))
    return model(batch.inputs['input_ids'], attention_mask=batch.inputs['attention_mask']), batch


def test_a_text_is_told_from_those_of_its_block_and_from_no_other():
    task = embeddings_task(embeddings_config())
    index = np.flatnonzero(task.block < 3)
    outputs, batch = outputs_of(task, encoder(1).eval(), index)
    total, count = task.hard_loss(outputs, batch, None)
    vectors = task.vectors(outputs, batch)
    expected = 0.0
    for i in np.flatnonzero(task.labels['train'][index]):
        same = torch.from_numpy(task.block[index] == task.block[index[i]])
        logits = 20 * vectors[same, 1] @ vectors[i, 0]
        expected += logits.logsumexp(0) - 20 * vectors[i, 1] @ vectors[i, 0]
    assert count == task.labels['train'][index].sum() and float(total.detach()) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )


def test_another_relevant_text_of_a_query_is_no_negative_of_it():
    corpus = collection()
    rows = list(corpus.splits['train'])[:4]
    again = rows[0] | dict(
        question_id=rows[2]['question_id'], question=rows[2]['question'], sentence_id='again'
    )
    also = rows[2] | dict(
        question_id=rows[0]['question_id'], question=rows[0]['question'], sentence_id='also'
    )
    splits = dict(corpus.splits, train=[*rows, again, also])
    config = embeddings_config(negatives_block=16, hard_negatives=0)
    task = Embeddings.from_corpus(type(corpus)('tiny', 'folder', 'nowhere', splits, '0' * 64), config)
    from tiny_lm import tiny_tokenizer

    task.encode(tiny_tokenizer())
    outputs, batch = outputs_of(task, encoder(1).eval(), np.arange(len(task.labels['train'])))
    total, count = task.hard_loss(outputs, batch, None)
    assert count == 4 and float(total.detach()) == pytest.approx(0, abs=1e-6), (
        'both texts answer both queries'
    )


KINDS = ('mse', 'cosine', 'in_batch', 'margin_mse', 'listwise')


@pytest.mark.parametrize('kind', KINDS)
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(kind):
    task = embeddings_task(embeddings_config(soft_targets=kind))
    index = np.flatnonzero(task.block < 3)
    outputs, batch = outputs_of(task, encoder(1).eval(), index)
    same = task.signal(outputs, batch)
    other = task.signal(outputs_of(task, encoder(2).eval(), index)[0], batch)
    assert float(task.soft_loss(outputs, batch, same)[0].detach()) == pytest.approx(0, abs=1e-4)
    total, count = task.soft_loss(outputs, batch, other)
    assert float(total.detach()) > 1e-3 and count == task.loss_counts('train', index)['soft']


def test_squared_distances_of_unit_vectors_are_twice_the_cosine_distances():
    totals = {}
    for kind in ('mse', 'cosine'):
        task = embeddings_task(embeddings_config(soft_targets=kind))
        index = np.arange(6)
        outputs, batch = outputs_of(task, encoder(1).eval(), index)
        other = task.signal(outputs_of(task, encoder(2).eval(), index)[0], batch)
        totals[kind] = float(task.soft_loss(outputs, batch, other)[0].detach())
    assert totals['mse'] == pytest.approx(2 * totals['cosine'], rel=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_a_teacher_of_another_width(kind):
    config = embeddings_config(soft_targets=kind)
    task = embeddings_task(config)
    student = encoder(1)
    teacher = BertModel(small_bert(student.config.vocab_size, hidden_size=48)).eval()
    signal = online_signal(task, teacher)
    whole, model = open_student(task, student, config, signal, seed=0)
    outputs, batch = outputs_of(whole, model, np.arange(6))
    whole.soft_loss(outputs, batch, signal(batch))[0].backward()
    projected = kind in ('mse', 'cosine')
    assert (model is not student) == projected, 'scores need no projection'
    if projected:
        [matrix] = model.projections.parameters()
        assert matrix.shape == (48, student.config.hidden_size) and matrix.grad.abs().sum() > 0
    assert student.embeddings.word_embeddings.weight.grad.abs().sum() > 0


# ---- files and settings ----

PAIRS = 'Question,Sentence\nwhat floats,Ice floats.\nwhat sinks,Iron sinks.\n'
# what all three files hold, parameters, what is said
REFUSED = {
    'nothing relevant': ('Question,Sentence,Label\na,b,0\nc,d,0\n', {}, 'no query has a relevant text'),
    'no query': ('Question,Sentence\n,b\n', {}, 'Question is empty'),
    'a block of one': (PAIRS, dict(negatives_block=1), 'negatives_block'),
    'a block beyond a step': (PAIRS, dict(batch_size=8), 'do not fit into batch_size=8'),
    'pairs of no kind': (
        PAIRS,
        dict(mode='full_kd', soft_targets='margin_mse', hard_negatives=0),
        'hard_negatives=0 leaves one of each',
    ),
    'scores have no vectors': (
        'Question,Sentence,s\na,b,1\nc,d,2\n',
        dict(mode='full_kd', soft_targets='cosine', teacher_mode='scores', columns='teacher=s')
        | dict(student_init='teacher_pretrained'),
        "teacher_mode='scores' has none",
    ),
    'scores are numbers': (
        'Question,Sentence,s\na,b,1\nc,d,2\n',
        dict(mode='full_kd', teacher_mode='scores', columns='teacher=s', scores_are='probabilities')
        | dict(student_init='teacher_pretrained'),
        'the scores of texts are numbers',
    ),
    'several teachers': (
        PAIRS,
        dict(mode='full_kd', teachers='a,b', student_init='teacher_pretrained'),
        'give one teacher',
    ),
    'two classes': (PAIRS, dict(mode='full_kd', top_k=1), 'top_k=1 is not read'),
}


def write(folder, text):
    for split in ('train', 'dev', 'test'):
        (folder / f'{split}.csv').write_text(text)
    return str(folder)


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_refused(case, tmp_path):
    text, given, words = REFUSED[case]
    with pytest.raises(KdnotesError) as e:
        corpus = write(tmp_path, text)
        plan(make_config(**dict(task=TASK, mode='baseline', corpus=corpus) | given), Machine('cpu', 2))
    assert words in str(e.value)


def test_a_row_without_a_label_is_a_relevant_text(tmp_path):
    rows = load_corpus(TASK, write(tmp_path, PAIRS)).splits['dev']
    assert rows['label'].tolist() == [1, 1] and rows['question_id'].tolist() == ['Q0', 'Q1']


def test_a_plan_notes_queries_without_a_text_and_texts_that_are_queries(tmp_path):
    text = 'Question,Sentence,Label\na,b,1\na,c,0\nc,d,0\n'
    given = dict(task=TASK, mode='baseline', corpus=write(tmp_path, text))
    notes = ' '.join(map(str, plan(make_config(**given), Machine('cpu', 2), check=False).texts))
    assert '1 of 2 queries of train' in notes and 'have no relevant text and are left out' in notes
    assert '1 text of dev' in notes and 'a query finds itself' in notes


# ---- runs ----


def planned(teacher, mode='full_kd', **more):
    student = dict(student_layers=(1,)) if mode != 'baseline' else {}
    usual = dict(task=TASK, corpus='embedded', max_length=48, threads_per_rank=1, ranks=1, smoke=True)
    return plan(make_config(mode=mode, teacher=str(teacher), **usual | student | more), ON)


def test_scores_of_any_ranker_teach(home, small_teacher, tmp_path, rank_here):
    rng = np.random.default_rng(0)
    lines = ['Question,Sentence,Label,score']
    for q in range(12):
        for label in (1, 0):
            lines.append(
                f'what is thing {q},thing {q} of kind {label * q} is here,{label},{label + rng.random():.3f}'
            )
    corpus = write(tmp_path, '\n'.join(lines) + '\n')
    more = dict(
        corpus=corpus, teacher_mode='scores', columns='teacher=score', student_init='teacher_pretrained'
    )
    records = [
        execute(planned(small_teacher, soft_targets=kind, study=kind, **more))
        for kind in ('margin_mse', 'listwise')
    ]
    for record in records:
        assert record['losses']['soft'] > 0 and record['teachers']['metrics']['test']['candidate_map'] == 1
    assert records[0]['model_sha256'] != records[1]['model_sha256']


@pytest.mark.slow
def test_a_study_from_its_teacher_to_its_table(home, small_teacher, rank_here):
    given = dict(corpus='embedded', teacher=str(small_teacher), student_layers='1', max_length=48, smoke=True)
    study = run_study(1, 'baseline,full_kd', task=TASK, **given)
    assert not study.failed and 'nDCG@10' in study.table.read_text()
    paths = list(study.table.parent.glob('*/record.json'))
    assert len(paths) == 2
    for path in paths:
        record = json.loads(path.read_text())
        assert record['initial'].get('adaptation') is None, 'no head, and so nothing is new'
        assert record['params_trainable'] < record['params_total'], 'the pooler is not trained'
        found = read_csv(path.parent / 'predictions.csv.gz').query("split == 'test'")
        expected = [ndcg(of.sort_values('score', ascending=False)) for _, of in found.groupby('unit')]
        assert record['primary']['value'] == pytest.approx(np.mean(expected), abs=1e-6)
        ranked = predict(
            str(path.parent / 'model'), question='what floats', candidates=['Ice floats.', 'Iron sinks.']
        )
        rows = ranked.answer.values['texts']
        assert [row['rank'] for row in rows] == [1, 2]
        assert 1 >= rows[0]['similarity'] >= rows[1]['similarity'] >= -1


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_in_two_ranks(home, small_teacher):
    given = dict(
        task=TASK, mode='full_kd', corpus='embedded', teacher=str(small_teacher), student_layers=(1,)
    )
    diagnosis = doctor(make_config(**given, max_length=48, threads_per_rank=1, ranks=2))
    results = {finding.check: (finding.result, finding.sentence) for finding in diagnosis.findings}
    assert {result for result, _ in results.values()} <= {'ok', 'skipped'}, results
    assert {check for check, (result, _) in results.items() if result == 'ok'} >= {
        'one rank',
        'cache',
        'resume',
    }


def ndcg(found) -> float:
    "Of the first ten texts of a query, from its predictions, which hold all relevant ones."
    gains = 1 / np.log2(2 + np.arange(10))
    label = found['label'].astype(int).to_numpy()
    return (label[:10] * gains[: len(label[:10])]).sum() / gains[: label.sum()].sum()


def test_the_model_of_a_sentence_transformer_teaches_as_it_is(home, small_teacher, rank_here):
    "One without a head, whose pooler may be missing."
    record = execute(planned(small_teacher, mode='baseline', teacher_mode='given'))
    assert record['steps'] == 0 and 0 <= record['primary']['value'] <= 1

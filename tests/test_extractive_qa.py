"""Extractive question answering: the official scores, worked out a second time; windows; what a loss may see;
and what is refused.
"""

import gzip
import json
import math
import os
import re
import shutil
import string
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from handmade import make_record
from small_runs import write_model
from kdnotes.api import load_data
from kdnotes.stats.compare import study_comparisons
from kdnotes.report.report import _about
from kdnotes.stats.evidence import Evidence, arm_values
from kdnotes.report.tables import arms_table, comparison_table, metrics_table
from kdnotes.core.spec import Loss
from kdnotes.core.parse import make_config
from kdnotes.distill.architectures import head_dropout
from kdnotes.distill.models import load_given, load_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM, ModelError
from kdnotes.experiment.card import snippet
from kdnotes.results.runs import RunFolder, read_csv
from kdnotes.losses.targets import soft_target_kl
from kdnotes.tasks.extractive_qa import (
    ExtractiveQA,
    ExtractiveQASettings,
    answerable,
    best_spans,
    check_tokens,
    span_logits,
)
from kdnotes.tasks.passages import (
    CORPORA,
    SQUAD1_SHA256,
    SQUAD2_SHA256,
)
from kdnotes.tasks.windows import encode_windows, room_for_questions
from kdnotes.tasks.sources import (
    Corpus,
    CorpusError,
    load_by_rules,
    load_corpus,
    read_folder,
)
from kdnotes.tasks.span_metrics import (
    answer_scores,
    no_answer_probability,
    normalised,
    span_metrics,
)

TASK = 'extractive_qa'


def refused(action, error) -> str:
    "The sentence of a refusal."
    with pytest.raises(error) as caught:
        action()
    sentence = str(caught.value)
    assert '\n' not in sentence, f'one sentence: {sentence}'
    return sentence


# ---- the official scores, worked out a second time: slowly, and without regular expressions or arrays ----


def plain_normalised(text: str) -> str:
    kept = ''.join(c for c in text.lower() if c not in set(string.punctuation))
    parts = ['']
    for c in kept:  # runs of letters and digits, and what is between them
        if parts[-1] and (c.isalnum() or c == '_') != (parts[-1][-1].isalnum() or parts[-1][-1] == '_'):
            parts.append('')
        parts[-1] += c
    return ' '.join(''.join(' ' if part in ('a', 'an', 'the') else part for part in parts).split())


def plain_f1(gold: str, predicted: str) -> float:
    right = plain_normalised(gold).split()
    given = plain_normalised(predicted).split()
    if not right or not given:
        return float(right == given)
    left = list(right)
    common = 0
    for word in given:
        if word in left:
            left.remove(word)
            common += 1
    if common == 0:
        return 0.0
    precision = common / len(given)
    recall = common / len(right)
    return 2 * precision * recall / (precision + recall)


def plain_scores(answers: list[str], predicted: str) -> tuple[float, float]:
    golds = [answer for answer in answers if plain_normalised(answer) != '']
    if not golds:
        golds = ['']
    exact = max(float(plain_normalised(gold) == plain_normalised(predicted)) for gold in golds)
    return exact, max(plain_f1(gold, predicted) for gold in golds)


def plain_evaluation(answers: dict, predicted: dict, no_answer: dict, threshold: float) -> dict:
    raw = {id: plain_scores(answers[id], predicted[id]) for id in answers if id in predicted}
    has = {id: len(answers[id]) > 0 for id in raw}
    found = {'total': len(raw), 'always_unanswerable': sum(not has[id] for id in raw) / len(raw)}
    for place, name in enumerate(('exact', 'f1')):
        kept = {id: (float(not has[id]) if no_answer[id] > threshold else raw[id][place]) for id in raw}
        found[name] = sum(kept.values()) / len(kept)
        for prefix, kind in (('has_ans', True), ('no_ans', False)):
            own = [kept[id] for id in raw if has[id] is kind]
            found[f'{prefix}_{name}'] = sum(own) / len(own) if own else None
        best = score = sum(not has[id] for id in raw)
        best_at = 0.0
        for id in sorted(raw, key=lambda id: no_answer[id]):
            if has[id]:
                score += raw[id][place]
            elif predicted[id]:
                score -= 1
            if score > best:
                best = score
                best_at = no_answer[id]
        found[f'best_{name}'] = best / len(raw)
        found[f'best_{name}_thresh'] = best_at
    return found


def assert_same_scores(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12) if value is not None else found[name] is None


def squad_evaluation(answers: dict, predicted: dict, no_answer: dict, threshold: float = 1.0) -> dict:
    "What the library says of a file of predictions; questions that it lacks are left out."
    known = [id for id in answers if id in predicted]
    of_none = np.array([no_answer[id] for id in known])
    answered, some = (np.array([bool(of[id]) for id in known]) for of in (answers, predicted))
    pairs = [answer_scores(answers[id], predicted[id]) for id in known]
    scores = np.array(pairs, dtype=float).reshape(-1, 2)
    metrics, _ = span_metrics(scores, answered, of_none, some, of_none > threshold)
    return metrics | dict(total=len(known))


# answers, the prediction, exact, f1: worked out by hand
CASES = [
    (['the Nile'], 'Nile', 1, 1),
    (['The Nile'], 'the nile', 1, 1),
    (['"Nile"'], 'Nile!', 1, 1),
    (['the river Nile'], 'the Nile', 0, 2 / 3),
    (['river Nile', 'Nile'], 'Nile', 1, 1),
    (['Blue Nile', 'White Nile'], 'White Nile river', 0, 0.8),
    (['Nile'], '', 0, 0),
    ([], '', 1, 1),
    ([], 'Nile', 0, 0),
    ([], '...', 1, 1),
    (['the'], '', 1, 1),  # nothing is left of the answer
    (['the', 'Nile'], '', 0, 0),  # an answer is left
    (['the', 'Nile'], 'Nile', 1, 1),
    (['?!'], 'a', 1, 1),
    (['1,000'], '1000', 1, 1),
    (['U.S.'], 'U S', 0, 0),
    (['well-known'], 'well known', 0, 0),
    (['New\tYork\n'], ' New York ', 1, 1),
    (['theatre'], 'atre', 0, 0),  # an article is a whole word
    (['Anna and a cat'], 'anna and cat', 1, 1),
    (['Café'], 'café', 1, 1),
    (['“Nile”'], 'Nile', 0, 0),  # quotes of print stay
    (['$10'], '10', 1, 1),
    (['l’a b'], 'l’ b', 1, 1),  # the letter stands alone
    (['to be or not to be'], 'to be', 0, 0.5),
    (['be be'], 'be', 0, 2 / 3),
]


@pytest.mark.parametrize('answers,predicted,exact,f1', CASES)
def test_scores_of_single_answers(answers, predicted, exact, f1):
    assert answer_scores(answers, predicted) == pytest.approx((exact, f1))
    assert plain_scores(answers, predicted) == pytest.approx((exact, f1))


def test_a_file_of_predictions():
    "Missing questions are left out, others are ignored, and equal probabilities come one after the other."
    answers = {'a': ['Nile'], 'b': [], 'c': ['Oder'], 'd': [], 'e': ['Elbe'], 'f': ['Don', 'the Don']}
    predicted = {'a': 'Nile', 'b': 'Nile', 'c': 'Nile', 'd': '', 'f': 'Don', 'x': 'Po'}
    no_answer = {'a': 0.5, 'b': 0.5, 'c': 0.1, 'd': 0.5, 'e': 0.0, 'f': 0.7}
    for threshold in (0.0, 0.5, 0.6, 1.0):
        found = squad_evaluation(answers, predicted, no_answer, threshold)
        assert_same_scores(found, plain_evaluation(answers, predicted, no_answer, threshold))
    assert found['total'] == 5
    # c costs nothing, a is right: 3 of 5; b is not, d is: 2 of 5 and so on; f is right again
    assert squad_evaluation(answers, predicted, no_answer)['best_exact'] == 3 / 5
    assert squad_evaluation(answers, predicted, no_answer)['best_exact_thresh'] == 0.5


def some_predictions(rows: list[dict], seed: int = 0) -> tuple[dict, dict]:
    "Of each question an answer, a part of one, a word more, or any words; and a probability of none."
    rng = np.random.default_rng(seed)
    predicted = {}
    no_answer = {}
    for row in rows:
        words = row['context'].split()
        at = int(rng.integers(len(words)))
        text = ' '.join(words[at : at + int(rng.integers(0, 4))])
        if row['answers'] and rng.random() < 0.6:
            begin, end = row['answers'][int(rng.integers(len(row['answers'])))]
            extra = rng.choice([0, 0, 0, -2, 6], size=2)
            text = row['context'][max(0, begin + extra[0]) : end + extra[1]]
        predicted[row['id']] = text
        # in steps, so that some are equal
        no_answer[row['id']] = float(
            np.round(np.clip(rng.normal(0.25 + 0.3 * (not row['answers']), 0.2), 0, 1), 3)
        )
    return predicted, no_answer


def squad2(corpora) -> Corpus:
    if not (corpora / 'squad2' / 'dev-v2.0.json').exists():
        pytest.skip('no SQuAD 2.0 here')
    return load_corpus(TASK, 'squad2')


@pytest.mark.parametrize('corpus', ['squad2', 'embedded'])
def test_scores_of_a_whole_split(corpora, corpus):
    rows = (squad2(corpora) if corpus == 'squad2' else load_by_rules(CORPORA, corpus)).splits['test']
    answers = {row['id']: [row['context'][b:e] for b, e in row['answers']] for row in rows}
    predicted, no_answer = some_predictions(rows)
    for text in predicted.values():
        assert normalised(text) == plain_normalised(text)
    expected = plain_evaluation(answers, predicted, no_answer, 0.4)
    assert 0.1 < expected['has_ans_exact'] < 0.8 and 0.2 < expected['no_ans_exact'] < 0.9
    assert 0 < expected['best_exact_thresh'] < 1
    assert_same_scores(squad_evaluation(answers, predicted, no_answer, 0.4), expected)


# ---- the corpora ----


def test_squad2_by_article(corpora):
    corpus = squad2(corpora)
    articles = {split: {row['cluster'] for row in rows} for split, rows in corpus.splits.items()}
    assert {split: len(of) for split, of in articles.items()} == dict(train=18, dev=6, test=11)
    assert not articles['train'] & articles['test'] and not articles['dev'] & articles['test']
    rows = [row for of in corpus.splits.values() for row in of]
    assert len(rows) == 11_873 and sum(not row['answers'] for row in rows) == 5_945
    assert max(len(row['answers']) for row in rows) == 6
    assert not corpus.overlap
    assert corpus.sha256 == SQUAD2_SHA256 and '18 articles are train' in CORPORA.notes[corpus.sha256]


def test_squad1_without_guessed_places(corpora):
    ids = corpora / 'squad1' / 'train-v1.1.guessed-start-ids.txt'
    if not ids.exists():
        pytest.skip('no SQuAD 1.1 here')
    guessed = set(ids.read_text().split())
    corpus = load_corpus(TASK, 'squad1')
    assert corpus.sha256 == SQUAD1_SHA256
    assert len(guessed) == 9_438 and len(corpus.splits['train']) == 24_000
    for rows in corpus.splits.values():
        assert not guessed & {row['id'] for row in rows}
        assert all(len(row['answers']) == 1 for row in rows)


def question(id: str, answer: str | None = None, start: int = 0, **more) -> dict:
    answers = [] if answer is None else [dict(text=answer, answer_start=start)]
    return dict(id=id, question=f'What is {id}?', answers=answers, is_impossible=answer is None) | more


def write_squad(folder, *questions, name='all.json', articles=4, context='Salt is white. Salt is a thing.'):
    "A file whose articles ask the same questions, with ids of their own."
    data = []
    for i in range(articles):
        qas = [q | dict(id=f"{name}-{i}-{q['id']}") for q in questions]
        data.append(dict(title=f'{name} {i}', paragraphs=[dict(context=f'{context} {i}', qas=qas)]))
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(dict(version='v2.0', data=data)))
    return folder


WRONG = {
    'a start that does not match': (
        question('q', 'white', 3),
        "of question 'all.json-0-q' does not stand at character 3",
    ),
    'an answer beside impossible': (
        question('q', 'Salt', is_impossible=True),
        'has 1 answer, and its is_impossible is True',
    ),
    'no answer and not impossible': (
        question('q', is_impossible=False),
        'has 0 answers, and its is_impossible is False',
    ),
    'no word on it': (
        {k: v for k, v in question('q').items() if k != 'is_impossible'},
        'has 0 answers, and its is_impossible is None',
    ),
    'no question': (question('q', 'Salt', question='  '), 'question is empty'),
    'an id twice': (question('p', 'Salt'), "-p' occurs twice; give each"),
}


def test_a_file_without_a_question_is_a_split_without_a_row(tmp_path):
    for split in ('train', 'dev', 'test'):
        data = [dict(title='t', paragraphs=[dict(context='Salt is white.', qas=[question('p', 'Salt')])])]
        (tmp_path / f'{split}.json').write_text(json.dumps(dict(data=[] if split == 'dev' else data)))
    assert 'there is no row' in refused(lambda: load_corpus(TASK, str(tmp_path)), CorpusError)


@pytest.mark.parametrize('name', WRONG)
def test_files_that_do_not_hold_together(tmp_path, name):
    wrong, words = WRONG[name]
    write_squad(tmp_path / 'own', question('p', 'Salt'), wrong)
    assert words in refused(lambda: load_corpus(TASK, str(tmp_path / 'own')), CorpusError)


def test_files_with_answers_alone_and_with_none(tmp_path):
    "Version 1 has no is_impossible, and an answer for every question: nothing is unanswerable then."
    answered = {k: v for k, v in question('p', 'Salt').items() if k != 'is_impossible'}
    corpus = load_corpus(TASK, str(write_squad(tmp_path / 'own', answered)))
    assert all(row['answers'] == [[0, 4]] for rows in corpus.splits.values() for row in rows)
    none = str(write_squad(tmp_path / 'none', question('p')))
    assert 'no question has an answer' in refused(lambda: load_corpus(TASK, none), CorpusError)


def test_folders_of_json(tmp_path):
    own = write_squad(tmp_path / 'own', question('p', 'Salt'), question('q'), articles=2)
    assert '2 articles cannot make' in refused(lambda: load_corpus(TASK, str(own)), CorpusError)
    for split in ('train', 'dev', 'test'):
        write_squad(tmp_path / 'three', question('p', 'Salt'), question('q'), name=f'{split}.json')
    three = load_corpus(TASK, str(tmp_path / 'three'))
    assert {row['cluster'] for row in three.splits['dev']} == {f'dev.json {i}' for i in range(4)}
    packed = tmp_path / 'packed'
    packed.mkdir()
    for path in (tmp_path / 'three').iterdir():
        (packed / f'{path.name}.gz').write_bytes(gzip.compress(path.read_bytes()))
    assert load_corpus(TASK, str(packed)).sha256 == three.sha256
    write_squad(tmp_path / 'three', question('p', 'Salt'), name='more.json')
    assert 'no other JSON' in refused(lambda: load_corpus(TASK, str(tmp_path / 'three')), CorpusError)
    (tmp_path / 'three' / 'more.json').unlink()
    (tmp_path / 'three' / 'train.tsv').write_text('question\tcontext\tanswer\nWhat?\tSalt.\tSalt')
    assert 'leave one kind there' in refused(lambda: load_corpus(TASK, str(tmp_path / 'three')), CorpusError)
    for name, said in dict(
        none='in the shape of SQuAD', pipe='no ordinary file', torn='no whole gzip'
    ).items():
        folder = tmp_path / name
        folder.mkdir()
        if name == 'pipe':
            os.mkfifo(folder / 'all.json')
        elif name == 'torn':
            (folder / 'all.json.gz').write_bytes(gzip.compress(b'{"data": []}')[:-9])
        assert said in refused(lambda folder=folder: load_corpus(TASK, str(folder)), CorpusError)


def test_tables_of_one_s_own(tmp_path):
    for split in ('train', 'dev', 'test'):
        lines = ['question\tcontext\tanswer\tanswer_start', f'What {split}?\tSalt is white.\twhite\t']
        lines += [f'Why {split}?\tSalt is white.\t\t', f'Who {split}?\tSalt, salt.\talt\t7']
        (tmp_path / f'{split}.tsv').write_text('\n'.join(lines))
    rows = read_folder(tmp_path, CORPORA)['dev']
    assert [row['answers'] for row in rows] == [[[8, 13]], [], [[7, 10]]]
    assert rows[0]['cluster'] == rows[1]['cluster'] != rows[2]['cluster']


def hub_rows_of(folder) -> dict[str, list[dict]]:
    "The questions of train.json, dev.json and test.json, as the hub has them."
    return {
        split: [
            dict(id=q['id'], title=article['title'], context=paragraph['context'], question=q['question'])
            | dict(answers={key: [a[key] for a in q['answers']] for key in ('text', 'answer_start')})
            for article in json.loads((folder / f'{split}.json').read_text())['data']
            for paragraph in article['paragraphs']
            for q in paragraph['qas']
        ]
        for split in ('train', 'dev', 'test')
    }


@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'other name', 'frames', 'datasets'])
def test_the_hub_s_own_shape_is_that_of_the_files(tmp_path, monkeypatch, kind):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    for split in ('train', 'dev', 'test'):
        questions = question('p', 'Salt'), question('q'), question('r', 'white', 8)
        write_squad(tmp_path / 'own', *questions, name=f'{split}.json')
    rows = hub_rows_of(tmp_path / 'own')
    frames = {split: pd.DataFrame(of) for split, of in rows.items()}
    name = 'golds' if kind == 'other name' else 'answers'
    (tmp_path / 'hub').mkdir()
    for split, frame in frames.items():
        if kind == 'parquet':
            frame.to_parquet(tmp_path / 'hub' / f'{split}.parquet')
        else:
            text = frame.rename(columns=dict(answers=name)).to_json(orient='records', lines=True)
            (tmp_path / 'hub' / f'{split}.jsonl').write_text(text)
    source = tmp_path / 'hub'
    if kind == 'frames':
        source = frames
    elif kind == 'datasets':
        datasets = pytest.importorskip('datasets', reason='the hub is read with the package datasets')
        source = {split: datasets.Dataset.from_list(of) for split, of in rows.items()}
    data = load_data(source, TASK, columns=dict(answers=name) if name != 'answers' else None)
    found = load_corpus(TASK, data.corpus, data.columns)
    expected = load_corpus(TASK, str(tmp_path / 'own'))
    assert found.splits == expected.splits and found.sha256 == expected.sha256


BAD_ANSWERS = {
    'more starts than texts': dict(text=['Salt'], answer_start=[0, 1]),
    'no list': 'Salt',
    'a text alone': dict(text='Salt', answer_start=0),
    'another place': dict(text=['Salt'], answer_start=[3]),
    'no number': dict(text=['Salt'], answer_start=['x']),
}


@pytest.mark.parametrize('kind', BAD_ANSWERS)
def test_answers_of_the_hub_that_do_not_hold_together(tmp_path, kind):
    row = dict(id='q', context='Salt is white.', question='What?', answers=BAD_ANSWERS[kind])
    for split in ('train', 'dev', 'test'):
        (tmp_path / f'{split}.jsonl').write_text(json.dumps(row))
    sentence = refused(lambda: read_folder(tmp_path, CORPORA), CorpusError)
    assert 'train.jsonl, line 1: ' in sentence and "'q'" in sentence and 'answer' in sentence


# ---- windows ----


@pytest.fixture(scope='module')
def tokenizer():
    return load_tokenizer(MINILM)


def test_labels_are_the_answers(corpora, tokenizer):
    "The tokens that are learnt, back as characters, are the answer, in every window that holds it."
    rows = squad2(corpora).splits['dev'][:800]
    windows = encode_windows(tokenizer, rows, 192, 64)
    spans = [next(iter(row['answers']), None) for row in rows]
    labels = windows.tokens(spans)
    answered = np.flatnonzero(labels.any(axis=1))
    for i, (begin, end) in zip(answered, windows.characters(answered, *labels[answered].T).tolist()):
        row = rows[windows.row[i]]
        low, high = row['answers'][0]
        assert begin <= low and high <= end
        # an answer may end inside of a word
        assert end - begin <= high - low + 12
        whole = row['context'][begin:end]
        assert row['context'][low:high] in whole
    exact = np.mean(
        [
            spans[windows.row[i]] == of
            for i, of in zip(answered, windows.characters(answered, *labels[answered].T).tolist())
        ]
    )
    assert exact > 0.98
    held = {windows.row[i] for i in answered}
    assert held == {i for i, span in enumerate(spans) if span}


def test_every_token_of_a_long_passage_is_in_a_window(tokenizer):
    context = ' '.join(f'word{i}' for i in range(400))
    rows = [dict(id='q', question='Which?', context=context, answers=(), cluster='c')]
    windows = encode_windows(tokenizer, rows, 64, 16)
    covered = np.zeros(len(context), dtype=bool)
    for i in range(len(windows.row)):
        low, high = windows.context[i]
        [(begin, end)] = windows.characters(np.array([i]), np.array([low]), np.array([high - 1])).tolist()
        covered[begin:end] = True
        assert windows.ids.lengths[i] <= 64
    assert covered.all() and len(windows.row) > 20


def corpus_of_one(question_words: int) -> Corpus:
    row = dict(
        id='q', question='why ' * question_words, context='Salt is white.', answers=((0, 4),), cluster='c'
    )
    return Corpus('one', 'folder', 'nowhere', dict(train=[row], dev=[row], test=[row]), '0' * 64)


class ClsLast:
    "A tokenizer that ends a text with [CLS]."

    is_fast = True
    cls_token = '[CLS]'
    cls_token_id = 101

    def __call__(self, *texts):
        return dict(input_ids=[7, 102, 8, 102, 101])


@pytest.mark.parametrize(
    'asked,other,words',
    [
        ('why ' * 44, None, ''),  # it fits
        ('why ' * 45, None, "question 'q' has 45 tokens, and windows of max_length=64 with stride=16 have"),
        ('salt ' * 60_000, None, "question 'q' has 60,000 tokens"),  # not the tokenizer's 'Truncation error'
        ('\uac01' * 30, None, 'shorten it'),  # a syllable of Korean is up to three tokens
        ('why', SimpleNamespace(is_fast=False), 'save a fast one'),
        ('why', ClsLast(), 'does not begin a text with its [CLS]'),
    ],
    ids=lambda value: str(value)[:12],
)
def test_questions_and_tokenizers_that_windows_do_not_hold(tokenizer, asked, other, words):
    config = make_config(task=TASK, corpus='embedded', max_length=64, stride=16)
    corpus = corpus_of_one(1)
    row = corpus.splits['dev'][0] | dict(question=asked)
    corpus = replace(corpus, splits=corpus.splits | dict(dev=[row]))
    if words:
        assert words in refused(lambda: check_tokens(corpus, config, lambda: other or tokenizer), CorpusError)
        return
    check_tokens(corpus, config, lambda: tokenizer)
    assert room_for_questions(tokenizer, 64, 16) == 44
    assert encode_windows(tokenizer, corpus.splits['dev'], 64, 16).ids.lengths.max() <= 64


@pytest.mark.parametrize('damage', ['flip', 'of others'])
def test_kept_windows_are_whole_or_made_anew(tokenizer, tmp_path, damage):
    "As all arrays that are kept: test_text_blocks.py has the damages."
    rows = [corpus_of_one(i).splits['dev'][0] | dict(id=f'q{i}') for i in range(1, 9)]
    others = encode_windows(tokenizer, rows[::-1], 64, 16, tmp_path)
    [other] = tmp_path.glob('*.tokens')
    right = encode_windows(tokenizer, rows, 64, 16)
    encode_windows(tokenizer, rows, 64, 16, tmp_path)
    [folder] = [path for path in tmp_path.glob('*.tokens') if path != other]
    if damage == 'flip':
        data = bytearray((folder / 'places').read_bytes())
        data[len(data) // 2] ^= 1
        (folder / 'places').unlink()  # what is mapped stays as it is
        (folder / 'places').write_bytes(data)
    else:
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
    found = encode_windows(tokenizer, rows, 64, 16, tmp_path)
    assert found.ids.values.tolist() == right.ids.values.tolist() != others.ids.values.tolist()
    for array in ('second', 'row', 'context', 'places'):
        assert np.array_equal(getattr(found, array), getattr(right, array)), array


def byte_pairs(*splits) -> transformers.PreTrainedTokenizerFast:
    "RoBERTa's tokenizer of a few hundred pieces, behind other rules of where words end."
    made = Tokenizer(BPE(unk_token='<unk>'))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    special = ['<s>', '<pad>', '</s>', '<unk>']
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [row['context'] for row in load_corpus(TASK, 'embedded').splits['dev'][:200]]
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.RobertaProcessing(('</s>', 2), ('<s>', 0))
    roles = dict(cls_token='<s>', sep_token='</s>', pad_token='<pad>', unk_token='<unk>')
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def test_tokens_that_do_not_give_the_answers_back_are_refused():
    "A blank that is put before each piece is taken for one of the text, and a letter goes with it."
    config = make_config(task=TASK, corpus='embedded', max_length=256)
    corpus = load_corpus(TASK, 'embedded')
    blank = pre_tokenizers.ByteLevel(add_prefix_space=True)
    plain = byte_pairs(blank)
    check_tokens(corpus, config, lambda: plain)
    torn = byte_pairs(pre_tokenizers.Whitespace(), blank, pre_tokenizers.Punctuation())
    sentence = refused(lambda: check_tokens(corpus, config, lambda: torn), CorpusError)
    found = re.search(r"give '(.*?)' for the answer '(.*?)', and so do those of (\d+) of (\d+)", sentence)
    given, answer, lost, looked = found.groups()
    assert answer.endswith(given) and given != answer and int(lost) > int(looked) / 2
    assert 'says wrong places' in sentence


def test_the_best_span_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for longest in (1, 3, 30):
        start = torch.from_numpy(rng.normal(size=(4, 12))).float()
        end = torch.from_numpy(rng.normal(size=(4, 12))).float()
        score, first, last = best_spans(start, end, longest)
        for i in range(4):
            spans = {
                (b, e): float(start[i, b] + end[i, e])
                for b in range(1, 12)
                for e in range(b, min(12, b + longest))
            }
            assert (int(first[i]), int(last[i])) == max(spans, key=spans.get)
            assert float(score[i]) == pytest.approx(max(spans.values()))


# ---- the loss ----


@pytest.fixture(scope='module')
def small(tokenizer):
    "A few embedded questions in short windows."
    settings = ExtractiveQASettings(stride=16, soft_weight=0.3, hard_weight=0.9)
    task = ExtractiveQA(load_by_rules(CORPORA, 'embedded'), 64, settings, smoke=True)
    task.encode(tokenizer)
    return task


def said(batch, seed: int):
    rng = torch.Generator().manual_seed(seed)
    shape = batch.inputs['input_ids'].shape
    return SimpleNamespace(
        start_logits=3 * torch.randn(shape, generator=rng), end_logits=3 * torch.randn(shape, generator=rng)
    )


def test_losses_worked_out_window_by_window(small):
    "Over the context and [CLS] alone, for beginning and end, with the teacher's temperature."
    batch = small.batch('train', np.arange(9))
    student = said(batch, 0)
    teacher = said(batch, 1)
    terms = small.loss_terms(student, batch, small.signal(teacher, batch))
    hard = soft = 0.0
    for i in range(9):
        low, high = batch.positions[i].tolist()
        places = [0, *range(low, high)]
        assert [p for p, ok in enumerate(answerable(batch)[i].tolist()) if ok] == places
        for side, name in enumerate(('start_logits', 'end_logits')):
            own = getattr(student, name)[i, places].double()
            right = places.index(batch.labels[i, side].item())
            hard -= own.log_softmax(0)[right] / 2
            p = (getattr(teacher, name)[i, places].double() / 2).softmax(0)
            q = (own / 2).log_softmax(0)
            soft += 4 * (p * (p.log() - q)).sum() / 2
    assert terms['hard'][0].item() == pytest.approx(hard.item(), rel=1e-5)
    assert terms['soft'][0].item() == pytest.approx(soft.item(), rel=1e-5)
    assert terms['hard'][1] == terms['soft'][1] == 9
    assert small.loss_weights(True) == dict(hard=0.9, soft=0.3) and small.loss_weights(False) == dict(
        hard=1.0
    )


def test_nothing_outside_the_passage_gets_a_gradient(small):
    batch = small.batch('train', np.arange(9))
    student = said(batch, 0)
    student.start_logits.requires_grad_()
    student.end_logits.requires_grad_()
    terms = small.loss_terms(student, batch, small.signal(said(batch, 1), batch))
    (terms['hard'][0] + terms['soft'][0]).backward()
    outside = ~answerable(batch)
    for gradient in (student.start_logits.grad, student.end_logits.grad):
        assert not gradient[outside].any() and gradient[~outside].all() and gradient.isfinite().all()


def test_a_teacher_s_padding_is_not_learnt(small):
    "The signal has a row a real token, whatever else is in the batch."
    alone = small.batch('train', np.array([3]))
    longest = int(np.argmax(small.lengths('train')))
    together = small.batch('train', np.array([3, longest]))
    outputs = said(together, 1)
    n = alone.tokens
    own = SimpleNamespace(start_logits=outputs.start_logits[:1, :n], end_logits=outputs.end_logits[:1, :n])
    signal = small.signal(outputs, together)['logits']
    assert signal.shape == (together.tokens, 2)
    assert torch.equal(signal[:n], small.signal(own, alone)['logits'])


def test_cut_off_soft_targets(small):
    batch = small.batch('train', np.arange(4))
    task = copy(small)
    task.loss = Loss(temperature=1.0, top_k=2)
    student = said(batch, 0)
    teacher = said(batch, 1)
    found = task.loss_terms(student, batch, task.signal(teacher, batch))['soft'][0]
    sides = [
        soft_target_kl(*(span_logits(of, batch)[i] for of in (student, teacher)), 1.0, 'sum', top_k=2)
        for i in range(2)
    ]
    assert found.item() == pytest.approx(sum(sides).item() / 2, rel=1e-6)
    # where a window has fewer tokens all are kept: that depends on which windows come together
    found = []
    for k in (None, batch.inputs['input_ids'].shape[1] + 500):
        task.loss = Loss(top_k=k)
        found.append(task.soft_targets(*(span_logits(of, batch)[0] for of in (student, teacher))).item())
    assert found[1] == pytest.approx(found[0], rel=1e-6)


# ---- merged windows and thresholds ----


def test_windows_of_a_question_are_merged(tokenizer):
    "The best span of all windows, and the window that is least sure that there is none."
    corpus = load_by_rules(CORPORA, 'embedded')
    task = ExtractiveQA(corpus, 48, ExtractiveQASettings(stride=8), smoke=True)
    task.encode(tokenizer)
    windows = task.windows['dev']
    [row] = np.flatnonzero(np.bincount(windows.row) > 2)[:1]
    own = np.flatnonzero(windows.row == row)
    scores = np.zeros((len(windows.row), 4), dtype=np.float32)
    scores[:, 0] = 5
    scores[:, 2:] = windows.context[:, :1]
    scores[own, 0] = [4, 3, *[6] * (len(own) - 2)]
    scores[own, 1] = [1, 2, *[2] * (len(own) - 2)]
    found = task.evaluate({'dev': scores})
    said = found.predictions.iloc[row]
    assert said['score'] == 2 - 3
    expected = windows.characters(own[1:2], scores[own[1:2], 2].astype(int), scores[own[1:2], 3].astype(int))
    assert said['item'] == f'{expected[0, 0]}:{expected[0, 1]}'
    assert list(found.predictions['unit']) == [of['id'] for of in task.rows['dev']]
    # no text of the corpus
    assert found.predictions['item'].str.fullmatch(r'\d+:\d+').all()
    assert set(found.predictions.columns) == {'split', 'unit', 'item', 'label', 'score'}


def test_the_threshold_comes_from_dev(small):
    rng = np.random.default_rng(3)
    scores = {}
    for split in ('dev', 'test'):
        windows = small.windows[split]
        scores[split] = np.zeros((len(windows.row), 4), dtype=np.float32)
        scores[split][:, 1] = rng.normal(size=len(windows.row))
        labels = small.labels[split]
        scores[split][:, 2:] = np.where(labels.any(axis=1, keepdims=True), labels, windows.context[:, :1])
    found = small.evaluate(scores)
    dev = found.metrics['dev']
    assert dev['exact'] == dev['best_exact'] > dev['always_unanswerable']
    at = dev['threshold']
    assert at == found.metrics['test']['threshold']
    predictions = found.predictions[found.predictions['split'] == 'test']
    answers = {row['id']: [row['context'][b:e] for b, e in row['answers']] for row in small.rows['test']}
    contexts = {row['id']: row['context'] for row in small.rows['test']}
    texts = {}
    for unit, item in zip(predictions['unit'], predictions['item']):
        begin, end = map(int, item.split(':'))
        texts[unit] = contexts[unit][begin:end]
    none = dict(zip(predictions['unit'], no_answer_probability(predictions['score'].to_numpy()).tolist()))
    expected = plain_evaluation(answers, texts, none, 1 / (1 + math.exp(at))) | dict(threshold=at)
    expected.pop('total')
    assert_same_scores(found.metrics['test'], expected)
    for metric in ('exact', 'f1', 'has_ans_f1', 'no_ans_exact'):
        units = found.units[(found.units['split'] == 'test') & (found.units['metric'] == metric)]
        assert units['value'].mean() == pytest.approx(found.metrics['test'][metric])
        assert set(units['cluster']) <= {row['cluster'] for row in small.rows['test']}


def test_where_every_question_has_an_answer_none_is_withdrawn(tokenizer):
    "SQuAD 1.1's shape: a model that is seldom right, and then sure."
    whole = load_by_rules(CORPORA, 'embedded')
    splits = {name: [row for row in rows if row['answers']] for name, rows in whole.splits.items()}
    task = ExtractiveQA(replace(whole, splits=splits), 64, ExtractiveQASettings(stride=16), smoke=True)
    task.encode(tokenizer)
    scores = {}
    for split in task.evaluation_sets:
        windows = task.windows[split]
        scores[split] = np.zeros((len(windows.row), 4), dtype=np.float32)
        right = (windows.row == 0) & task.labels[split].any(axis=1)
        scores[split][:, 1] = np.where(right, 9, -9)
        scores[split][:, 2:] = np.where(right[:, None], task.labels[split], windows.context[:, :1])
    found = task.evaluate(scores).metrics['test']
    assert found['threshold'] is None and found['exact'] == found['best_exact'] > 0
    assert found['f1'] == pytest.approx(found['best_f1']) and found['f1'] >= found['exact']
    assert task.floors()['near_phrase'].metrics['test']['threshold'] is None
    record = dict(primary=dict(set='test'), task=TASK, settings=dict(answer_length=30))
    code = snippet(record | dict(metrics=dict(test=found)), 'here')
    assert "float('-inf')" in code and compile(code, 'snippet', 'exec')


# ---- reports ----


def test_tables_show_shares_in_percent():
    made = [
        make_record(mode, seed, 0.5 + 0.1 * (mode == 'full_kd'), task=TASK, metric='exact')
        for mode in ('full_student', 'full_kd')
        for seed in range(2)
    ]
    for record in made:
        record['metrics'] = {'test': dict(exact=record['primary']['value'], best_exact_thresh=0.25)}
    arms = arms_table(made, arm_values(made, None))
    assert list(arms['test exact match, %']) == ['50.0 ± 0.0', '60.0 ± 0.0']
    metrics = metrics_table(made)
    assert list(metrics.loc['exact match, %']) == ['50.0 ± 0.0', '60.0 ± 0.0']
    assert list(metrics.loc['threshold of the best exact match']) == ['0.250 ± 0.000'] * 2
    [row] = comparison_table(study_comparisons(made, None)).to_dict('records')
    assert row['change in test exact match, percentage points'].startswith('+10.0')


def test_a_report_says_how_the_corpus_was_split():
    record = make_record('full_kd', task=TASK, metric='exact', corpus='squad2')
    record['corpus_sha256'] = SQUAD2_SHA256
    assert "SQuAD 2.0's dev part alone, split by article with seed 0" in _about(
        Evidence('made', [record], None, {}, [])
    )


@pytest.mark.parametrize('kind', ['bert', 'distilbert'])
def test_qa_dropout_is_before_the_head_and_nowhere_else(tmp_path, kind):
    source = str(write_model(tmp_path / 'model', kind))
    models = [
        load_model(source, 'AutoModelForQuestionAnswering', 0),
        head_dropout(load_model(source, 'AutoModelForQuestionAnswering', 0), 0.5),
    ]
    usual, changed = (
        {n: m.p for n, m in of.named_modules() if isinstance(m, torch.nn.Dropout)} for of in models
    )
    assert {n: p for n, p in changed.items() if usual.get(n) != p} == {
        'qa_outputs.dropout' if kind == 'bert' else 'dropout': 0.5
    }
    ids = dict(input_ids=torch.full((1, 6), 7))
    assert torch.equal(*(of.eval()(**ids).start_logits for of in models))
    for module in models[1].modules():
        if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    trained = models[1].train()
    assert not torch.equal(trained(**ids).start_logits, trained(**ids).start_logits)


@pytest.mark.parametrize('seed', range(2))
def test_stored_predictions_give_the_same_scores_to_the_last_question(small, tmp_path, monkeypatch, seed):
    "The threshold is one question's own log-odds: a digit less, and it would be refused."
    rng = np.random.default_rng(seed)
    split = 'dev'
    scores = {}
    for name in ('dev', 'test'):
        windows = small.windows[name]
        scores[name] = rng.normal(size=(len(windows.row), 4)).astype(np.float32) * 3.3
        scores[name][:, 1] *= 1e-3  # so that differences have more digits than a number holds
        labels = small.labels[name]
        scores[name][:, 2:] = np.where(labels.any(axis=1, keepdims=True), labels, windows.context[:, :1])
    found = small.evaluate(scores)
    monkeypatch.setenv("KDNOTES_HOME", str(tmp_path))
    folder = RunFolder("s", "baseline-s0-000000000000")
    folder.path.mkdir(parents=True)
    folder.write_table('predictions', found.predictions)
    stored = read_csv(folder.path / 'predictions.csv.gz')
    own = stored[stored['split'] == split]
    rows = {row['id']: row for row in small.rows[split]}
    exact = []
    for unit, item, score in zip(own['unit'], own['item'], own['score']):
        begin, end = map(int, item.split(':'))
        row = rows[unit]
        text = (
            row['context'][begin:end] if float(np.float32(score)) >= found.metrics[split]['threshold'] else ''
        )
        exact.append(plain_scores([row['context'][b:e] for b, e in row['answers']], text)[0])
    assert np.mean(exact) == pytest.approx(found.metrics[split]['exact'], abs=1e-12)


@pytest.mark.parametrize(
    'answer,start,words',
    [
        ('ana', '', 'stands 2 times'),  # it overlaps with itself: twice
        ('ana', '9' * 5000, 'does not stand at character'),
        ('ana', '\u0663', 'does not stand at character'),  # a digit of another script
    ],
)
def test_answers_of_tables(tmp_path, answer, start, words):
    for split in ('train', 'dev', 'test'):
        (tmp_path / f'{split}.tsv').write_text(
            f'question\tcontext\tanswer\tanswer_start\nWhat {split}?\tx anana y\t{answer}\t{start}'
        )
    assert words in refused(lambda: read_folder(tmp_path, CORPORA), CorpusError)


def test_a_given_head_of_three_outputs(tmp_path):
    source = write_model(tmp_path / 'model')
    config = transformers.AutoConfig.from_pretrained(source, num_labels=3)
    transformers.AutoModelForQuestionAnswering.from_config(config).save_pretrained(source)
    sentence = refused(lambda: load_given(source, 'AutoModelForQuestionAnswering'), ModelError)
    assert 'has 3 outputs for a token, and 2 are needed' in sentence

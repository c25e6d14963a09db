"""The embedded corpora: the guarantees a study rests on. That their files hold what is generated from the
table of facts is asserted in nbs/tasks/03_embedded.ipynb.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from kdnotes.tasks.embedded import embedded_answer_selection, embedded_masked_lm


@pytest.fixture(scope='module')
def corpus():
    return embedded_answer_selection()


def by(rows, key):
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return groups


def test_nothing_heavy_is_imported():
    program = (
        'import sys, kdnotes.tasks.embedded; print([m for m in ("torch", "transformers", "numpy", '
        '"pandas") if m in sys.modules])'
    )
    assert (
        subprocess.run(
            [sys.executable, '-c', program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == '[]'
    )


def test_rows_have_the_keys_and_types_of_the_contract(corpus):
    assert list(corpus) == ['train', 'dev', 'test']
    keys = ['question_id', 'question', 'document_id', 'document_title', 'sentence_id', 'sentence', 'label']
    for rows in corpus.values():
        for row in rows:
            assert list(row) == keys
            assert all(isinstance(row[k], str) and row[k] == row[k].strip() != '' for k in keys[:-1])
            assert type(row['label']) is int and row['label'] in (0, 1)


def test_sizes(corpus):
    answered = {
        split: sum(any(r['label'] for r in q) for q in by(rows, 'question_id').values())
        for split, rows in corpus.items()
    }
    assert 2300 <= len(corpus['train']) <= 2700 and 2500 <= len(corpus['test']) <= 2900
    assert answered['test'] >= 150 and answered['dev'] >= 60
    for split, rows in corpus.items():
        assert 0.04 <= sum(r['label'] for r in rows) / len(rows) <= 0.065
        assert 0.60 <= 1 - answered[split] / len(by(rows, 'question_id')) <= 0.72


def test_no_entity_is_shared_between_splits(corpus):
    titles = {split: {r['document_title'] for r in rows} for split, rows in corpus.items()}
    documents = {split: {r['document_id'] for r in rows} for split, rows in corpus.items()}
    for a, b in (('train', 'dev'), ('train', 'test'), ('dev', 'test')):
        assert not titles[a] & titles[b] and not documents[a] & documents[b]
        assert not {r['question'] for r in corpus[a]} & {r['question'] for r in corpus[b]}


def test_documents_and_questions_are_consistent(corpus):
    for rows in corpus.values():
        for question in by(rows, 'question_id').values():
            assert len({(r['question'], r['document_id'], r['document_title']) for r in question}) == 1
            # no sentence twice
            assert (
                len({r['sentence_id'] for r in question})
                == len({r['sentence'] for r in question})
                == len(question)
            )
            assert sum(r['label'] for r in question) < len(question)
        for document in by(rows, 'document_id').values():
            assert len({r['document_title'] for r in document}) == 1
            assert len({r['question'] for r in document}) == len({r['question_id'] for r in document})
            assert all(
                len({r['sentence'] for r in same}) == 1 for same in by(document, 'sentence_id').values()
            )


def test_positive_sentences_state_a_fact_of_the_table_and_negatives_never_the_asked_one(corpus):
    from importlib.resources import files

    table = json.loads(files('kdnotes').joinpath('assets', 'facts.json').read_text(encoding='utf-8'))
    entities = {e['name'].removeprefix('the ').lower(): e for e in table['entities']}

    def holds(value, sentence):
        return re.search(rf'(?<!\w){re.escape(value)}(?!\w)', sentence, re.IGNORECASE)

    for rows in corpus.values():
        for question in by(rows, 'question_id').values():
            entity = entities[question[0]['document_title'].lower()]
            keys = table['kinds'][entity['kind']]['facts']
            asked = {
                a
                for a in entity['facts']
                if question[0]['question']
                in {q.format(s=entity['name']) for q in table['phrasings'][keys[a]]['ask']}
            }
            assert len(asked) == 1, question[0]['question']  # a question asks for one attribute
            attribute = asked.pop()
            told = [
                say.format(s=s, v=entity['facts'][attribute]).lower()
                for say in table['phrasings'][keys[attribute]]['say']
                for s in (entity['name'], f"this {table['kinds'][entity['kind']]['noun']}")
            ]
            for row in question:
                states = any(row['sentence'].lower().endswith(t) for t in told)
                assert states == bool(row['label']), (row['question'], row['sentence'])
                if row['label']:
                    assert holds(entity['facts'][attribute], row['sentence'])


def test_sentences_are_whole(corpus):
    for rows in corpus.values():
        for row in rows:
            assert row['question'].endswith('?') and row['sentence'].endswith('.')
            assert row['question'][0].isupper() and row['sentence'][0] == row['sentence'][0].upper()
            assert not re.search(
                r'[{}]|  |\b[Aa] [aeioAEIO]|\b[Aa]n [^aeiouAEIOUhX]|\bthe the\b',
                row['question'] + ' ' + row['sentence'],
            ), row
            assert len((row['question'] + ' ' + row['sentence']).split()) <= 36


# ---- running text ----


def test_there_is_enough_to_read():
    words = {
        split: sum(len(row['text'].split()) for row in rows) for split, rows in embedded_masked_lm().items()
    }
    assert sum(words.values()) > 45_000
    assert words['train'] > 5 * words['dev'] and words['test'] > words['dev'] > 4_000
    # an entity that is alone of its kind has no paragraph about its like
    assert all(row['text'].count('\n') in (1, 2) for rows in embedded_masked_lm().values() for row in rows)

"""The real corpus is the published one: pairs, positives, questions,
and the questions each kind of MAP averages over.
"""

import json
from pathlib import Path
import numpy as np
import pytest

from kdnotes.tasks.candidates import CORPORA
from kdnotes.tasks.answer_selection import AnswerSelection
from kdnotes.tasks.ranking_metrics import counts
from kdnotes.tasks.candidates import WIKIQA_SHA256
from kdnotes.tasks import sources
from kdnotes.tasks.sources import load_by_rules, load_corpus, local_copy
from thesis.measured import drawn_labels

PUBLISHED = {  # Yang et al. 2015, table 1, and the clean sets of later work
    'train': dict(pairs=20360, positives=1040, questions=2118, answered=873, clean=857),
    'dev': dict(pairs=2733, positives=140, questions=296, answered=126, clean=122),
    'test': dict(pairs=6165, positives=293, questions=633, answered=243, clean=237),
}


@pytest.fixture(scope='module')
def corpus(real_corpora):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_DATA', str(real_corpora))
        if not local_copy('wikiqa', CORPORA):
            pytest.skip('no copy of WikiQA in $KDNOTES_DATA/wikiqa')
        yield load_corpus('answer_selection', 'wikiqa')


def test_published_counts(corpus):
    assert counts(corpus).T.to_dict() == PUBLISHED


def test_content(corpus):
    assert corpus.sha256 == WIKIQA_SHA256 and corpus.name == 'wikiqa' and corpus.kind == 'folder'
    assert load_corpus('answer_selection', corpus.where).name == 'wikiqa'  # by its content, not its place


def test_sentence_ids_are_what_the_hub_reader_makes(corpus):
    "The hub's copy has no ids; made from the order they break ties as these do."
    for rows in corpus.splits.values():
        seen = {}
        for r in rows:
            n = seen[r['question_id']] = seen.get(r['question_id'], -1) + 1
            assert r['sentence_id'] == f"{r['document_id']}-{n}"
        assert (
            len({r['document_id'] for r in rows})
            == len({r['document_title'] for r in rows})
            == len({(r['document_id'], r['document_title']) for r in rows})
        )


def test_the_hubs_copy_is_the_published_corpus(corpus, monkeypatch):
    "It lacks the ids of sentences and documents, and gets those back."
    tables = {
        dict(dev='validation').get(split, split): {
            name: [r[key] for r in rows] for key, name in CORPORA.schema.hub_names.items()
        }
        for split, rows in corpus.splits.items()
    }
    monkeypatch.setattr(sources, 'fetch_hub', lambda hub_id: tables)
    monkeypatch.setattr(sources, 'local_copy', lambda name, rules: None)
    for name in ('wikiqa', CORPORA.hub_source('wikiqa')):
        of_hub = load_by_rules(CORPORA, name)
        assert (of_hub.name, of_hub.kind, of_hub.sha256) == ('wikiqa', 'hub', WIKIQA_SHA256)


def test_a_perfect_and_a_constant_scorer(corpus):
    task = AnswerSelection(corpus)
    perfect = task.evaluate({s: task.questions[s].labels for s in ('dev', 'test')}).metrics['test']
    assert [perfect[m] for m in ('map', 'mrr', 'p_at_1', 'answered_map', 'pair_f1', 'trigger_f1')] == [
        1.0
    ] * 6
    assert perfect['raw_map'] == pytest.approx(243 / 633)
    constant = task.evaluate({'test': np.zeros(len(task.rows['test']))})
    assert 0.1 < constant.metrics['test']['map'] < 0.5
    assert constant.units.groupby(['set', 'metric']).size().to_dict() == {
        ('clean', 'map'): 237,
        ('clean', 'mrr'): 237,
        ('clean', 'p_at_1'): 237,
        ('answered', 'answered_map'): 243,
        ('raw', 'raw_map'): 633,
    }


def test_what_few_labels_hold(corpus):
    "256 labels are some thirty questions and a dozen right answers, as the committed facts say."
    kept = json.loads((Path(__file__).parents[1] / 'thesis/data/corpus.json').read_text())['drawn']
    assert drawn_labels(corpus) == kept
    assert (kept['questions_low'], kept['questions_high']) == (28, 33)
    assert (kept['right_low'], kept['right_high']) == (10, 21)

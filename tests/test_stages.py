"The stages of a run on a synthetic corpus: measured by what runs call, at a size that a test has time for."

import json
import numpy as np
import pytest
from kinds import one_of_each
from bench.stages import by_size, main, measure_stages, synthetic_pairs, table
from kdnotes.core.parse import make_config
from kdnotes.tasks.sources import corpus_of

ROWS = 2000


def test_the_corpus_is_one_that_a_run_would_take(tmp_path):
    folder = synthetic_pairs(tmp_path, ROWS, seed=1)
    corpus = corpus_of(make_config(corpus=str(folder)))
    train = corpus.splits['train']
    assert len(train) == ROWS and len(corpus.splits['dev']) == len(corpus.splits['test']) == 100
    assert sum(row['label'] for row in train) == ROWS / 10
    again = synthetic_pairs(tmp_path / 'again', ROWS, seed=1)
    assert corpus_of(make_config(corpus=str(again))).sha256 == corpus.sha256
    other = synthetic_pairs(tmp_path / 'other', ROWS, seed=2)
    assert corpus_of(make_config(corpus=str(other))).sha256 != corpus.sha256


@pytest.mark.exhaustive
def test_every_stage_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    found = by_size([ROWS])
    [of] = found
    stages = {stage['stage']: stage for stage in of['stages']}
    assert of['rows'] == ROWS and stages['reading']['rows'] == ROWS + 200
    assert stages['first step']['rows'] == ROWS and len(stages) == 10
    assert all(stage['seconds'] > 0 and stage['peak_mib'] >= 0 for stage in of['stages'])
    assert all(np.isfinite(list(of['host_us'].values()))) and of['peak_mib'] > 100
    assert json.loads((tmp_path / 'runs' / 'stages' / f'{ROWS}.json').read_text()) == of
    text = table(found)
    assert all(name in text for name in stages) and 'a step: padding' in text
    assert not [p for p in tmp_path.iterdir() if p.name != 'runs'], 'corpus, tokens and signal are gone'


def test_tokens_are_thirty_a_pair(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    from bench import stages

    seen = []
    monkeypatch.setattr(stages, 'rows_in_use', lambda task, vocabulary: seen.append(task.lengths('train')))
    measure_stages(ROWS, tmp_path / 'place')
    assert 28 < np.mean(seen[0]) < 33


@pytest.mark.parametrize('given', one_of_each(['', '12 rows', '99']))
def test_sizes_that_are_none(given):
    with pytest.raises(SystemExit, match='numbers of training rows, 100 at least$'):
        main(given.split())

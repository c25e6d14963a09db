"Sentence pairs: Spearman's correlation as a mean of units, files of one's own, and a study."

import json
import numpy as np
import pytest
from scipy.stats import spearmanr
from small_runs import write_encoder
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study import run_study
from kdnotes.results.runs import read_csv
from kdnotes.tasks.sentence_pairs import spearman_units
from kdnotes.tasks.sources import load_corpus

TASK = 'sentence_pairs'


@pytest.mark.parametrize('levels', [2, 5, 10**6])
@pytest.mark.parametrize('noise', [0.0, 1.0, 100.0])
@pytest.mark.parametrize('n', [5, 300])
def test_units_have_the_mean_that_scipy_gives(n, noise, levels):
    rng = np.random.default_rng([n, levels])
    scores = np.append(rng.integers(0, levels, n - 2), [0, levels]).astype(float)
    outputs = scores / levels + noise * rng.normal(size=n)
    values = spearman_units(outputs, scores)
    assert values.mean() == pytest.approx(spearmanr(outputs, scores).statistic, abs=1e-9)
    assert spearman_units(np.exp(outputs / noise if noise else outputs), scores) == pytest.approx(values), (
        'order'
    )
    assert spearman_units(-outputs, scores) == pytest.approx(-values), 'its sign'


def test_a_unit_is_what_leaving_its_pair_out_changes():
    rng = np.random.default_rng(0)
    n = 400
    scores = rng.integers(0, 9, n).astype(float)
    outputs = scores + rng.normal(0, 4, n)
    whole = spearmanr(outputs, scores).statistic
    without = [spearmanr(np.delete(outputs, i), np.delete(scores, i)).statistic for i in range(n)]
    pseudo = n * whole - (n - 1) * np.array(without)
    assert np.abs(spearman_units(outputs, scores) - pseudo).max() < 0.05
    assert (
        spearman_units(np.ones(n), scores).tolist() == spearman_units(scores, np.ones(n)).tolist() == [0] * n
    )


HEADER = 'sentence1,sentence2,score\n'
GOOD = 'Ice floats.,Ice swims.,4.5\nIce floats.,Iron sinks.,1\n'
# what all three files hold, parameters, what is said
REFUSED = {
    'above': ('a,b,5.1\n', {}, "score '5.1' is no number from 0 to 5"),
    'below': ('a,b,-1\n', dict(score_low=0, score_high=1), "score '4.5' is no number from 0 to 1"),
    'no number': ('a,b,much\n', {}, "score 'much' is no number from 0 to 5"),
    'one sentence': ('a,,3\n', {}, 'sentence2 is empty'),
    'no score': ('a,b,\n', {}, 'score is empty'),
    'no range': ('a,b,3\n', dict(score_low=5), 'score_high=5 must be above score_low=5'),
    'temperature': ('a,b,3\n', dict(temperature=3, mode='full_kd'), 'temperature=3.0 is not read'),
    'another column': ('a,b,3\n', dict(columns='label=stars'), "there is no column 'stars'"),
}


def write_pairs(folder, more=''):
    for split in ('train', 'dev', 'test'):
        (folder / f'{split}.csv').write_text(HEADER + GOOD + more)
    return str(folder)


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_refused(case, tmp_path):
    more, given, words = REFUSED[case]
    with pytest.raises(KdnotesError) as e:
        corpus = write_pairs(tmp_path, more)
        plan(make_config(**dict(task=TASK, mode='baseline', corpus=corpus) | given), Machine('cpu', 2))
    assert words in str(e.value)


def test_files_have_the_columns_of_the_benchmark(tmp_path):
    [first, _] = load_corpus(TASK, write_pairs(tmp_path)).splits['dev']
    assert [first[key] for key in ('text', 'second', 'label')] == ['Ice floats.', 'Ice swims.', '4.5']


@pytest.mark.slow
def test_a_study_from_its_teacher_to_its_table(tmp_path, monkeypatch, rank_here):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    teacher = str(write_encoder(tmp_path / 'teacher'))
    given = dict(corpus='embedded', teacher=teacher, student_layers='1', max_length=64, smoke=True)
    made = run_study(1, 'baseline,full_kd', task=TASK, **given)
    assert not made.failed and "Spearman's correlation" in made.table.read_text()
    for path in (tmp_path / 'home').glob('runs/*/*/record.json'):
        record = json.loads(path.read_text())
        assert record['settings']['score_high'] == 5
        assert (record['primary']['metric'], record['primary']['higher_is_better']) == ('spearman', True)
        own = read_csv(path.parent / 'predictions.csv.gz').query("split == 'test'")
        expected = spearmanr(own['score'], own['label'].astype(float)).statistic
        assert record['primary']['value'] == pytest.approx(expected, abs=1e-4)
        units = read_csv(path.parent / 'units.csv.gz').query("split == 'test' and metric == 'spearman'")
        assert units['value'].mean() == pytest.approx(record['primary']['value'], abs=1e-5)

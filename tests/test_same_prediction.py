"""A model that predicts one class for its whole test set has learned nothing, whatever its accuracy: the
command and the box of the run say so, and those of another run do not.
"""

import numpy as np
import pandas as pd
import pytest
from small_runs import ON, small_model, train_here
from kdnotes.cli import main
from kdnotes.core.parse import make_config
from kdnotes.core.render import phrase
from kdnotes.experiment import launch
from kdnotes.experiment.display import run_box
from kdnotes.experiment.plan import plan
from kdnotes.results.store import find_record
from kdnotes.stats.tables import SamePrediction


@pytest.fixture
def said(
    tmp_path, monkeypatch, capsys
):  # (name, table, **parameters) -> what is printed, and the warning of the box
    "What is said of a run on a table of its own."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    small_model(tmp_path / 'teacher')

    def make(name: str, table: pd.DataFrame, **parameters) -> tuple[str, str]:
        corpus = tmp_path / name
        corpus.mkdir()
        for i, split in enumerate(('train', 'dev', 'test')):
            table[i::3].to_csv(corpus / f'{split}.csv', index=False)
        given = dict(task='text_classification', mode='baseline', corpus=str(corpus), max_length=32)
        given |= (
            dict(teacher=str(tmp_path / 'teacher'), threads_per_rank=1, ranks=1, study='small') | parameters
        )
        its_plan = plan(make_config(**given), ON)
        with pytest.MonkeyPatch.context() as patched:
            train_here(patched)
            launch.execute(its_plan)
        capsys.readouterr()
        typed = [
            part
            for key, value in given.items()
            if key not in ('mode', 'corpus')
            for part in ('-p', f'{key}={value}')
        ]
        assert main(['run', '--mode', 'baseline', '--corpus', str(corpus), *typed]) == 0
        return capsys.readouterr().out, run_box(find_record(its_plan.run_id)[0]).warning

    return make


def test_a_model_that_predicts_one_class_is_named(said):
    rng = np.random.default_rng(0)
    texts = [' '.join(rng.choice(['iron', 'gold', 'air', 'city'], 6)) for _ in range(90)]
    labels = ['rare' if i % 10 == 0 else 'common' for i in range(90)]
    words = (
        'The model predicts the class common for all 30 examples of the test set, which have 2 classes: it '
        'has not learned to tell them apart. Suggestion: train it longer, at another learning rate'
    )
    table = pd.DataFrame(dict(text=texts, label=labels))
    for name, rows in dict(texts=table, pairs=table.assign(second=texts[::-1])).items():
        printed, warning = said(name, rows, epochs=1, learning_rate=1e-6)
        assert words in printed and words in warning, name
    printed, warning = said('smoke', table, smoke=True, learning_rate=1e-6)
    assert words[:30] not in printed + warning  # such numbers mean nothing anyway


def test_a_model_that_tells_classes_apart_is_not(said):
    words = [('iron', 'metal'), ('Paris', 'city')]
    table = pd.DataFrame(
        [dict(text=f'{words[i % 2][0]} ' * (1 + i % 5), label=words[i % 2][1]) for i in range(90)]
    )
    printed, warning = said('clear', table, epochs=20, learning_rate=0.01)
    assert 'The model predicts' not in printed + warning


def test_nearly_equal_numbers_are_called_so():
    record = dict(task='sentence_pairs', primary=dict(set='test'), factors=dict(init='given'))
    sentence = phrase('headline.jinja', 'same_prediction', record, SamePrediction(2.5, 40, None), 'pairs')
    assert sentence.startswith(
        'The model predicts nearly the same number for all 40 pairs of the test set: it has'
    )
    assert 'check that it was fine-tuned' in sentence

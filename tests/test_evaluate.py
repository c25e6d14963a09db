"""`kdnotes evaluate`: a run on its own test set gets the numbers of its record, a model that kdnotes did not
train those of its logits; intervals and differences are those of a study; what could only be guessed is
refused in one sentence.
"""

import contextlib
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
from small_runs import LENGTHS, ON, small_model, train_here
from kdnotes.core.config import TASKS, task_info
from kdnotes.core.parse import make_config
from kdnotes.experiment import launch
from kdnotes.experiment.evaluate import evaluate
from kdnotes.experiment.plan import plan
from kdnotes.results.store import find_record


@pytest.fixture(scope='module')
def whole_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('evaluate')


@pytest.fixture
def run(whole_home, monkeypatch):  # (task, **parameters) -> run_id
    "A run of a small network on all of an embedded corpus, a few steps long; made once."
    monkeypatch.setenv('KDNOTES_HOME', str(whole_home))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')

    def make(task: str, **parameters) -> str:
        teacher = whole_home / 'teacher'
        if not teacher.is_dir():
            small_model(teacher)
        more = dict(stride=32) if task == 'extractive_qa' else {}
        more |= dict(score_blocks=40, pseudo_sample=20) if task == 'masked_lm' else {}
        config = make_config(
            **dict(task=task, mode='baseline', corpus='embedded', teacher=str(teacher), epochs=0.1)
            | dict(max_length=LENGTHS[task], threads_per_rank=1, ranks=1, study='small')
            | more
            | parameters
        )
        its_plan = plan(config, ON)
        with pytest.MonkeyPatch.context() as patched:
            train_here(patched)
            launch.execute(its_plan)
        return its_plan.run_id

    return make


@pytest.mark.parametrize('task', TASKS)
def test_a_run_on_its_test_set_has_the_numbers_of_its_record(run, task):
    run_id = run(task)
    record, _ = find_record(run_id)
    result = evaluate(run_id, 'embedded')
    print(result)
    scores = result.table
    on_rows = scores[scores['about'] == 'model'].set_index('metric')
    assert on_rows['estimate'].dropna().to_dict() == pytest.approx(
        {k: v for k, v in record['metrics']['test'].items() if v is not None}, abs=1e-6
    )
    of_run = scores[scores['about'] == 'run'].set_index('metric')
    columns = ['estimate', 'low', 'high', 'n_units', 'n_clusters']
    pd.testing.assert_frame_equal(on_rows[columns], of_run[columns].loc[on_rows.index], rtol=1e-4)

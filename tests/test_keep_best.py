"""The best model of a training by its scores on dev, as `keep=best` keeps it: which step that is, that the
weights are those of that step, and that neither ranks nor a stop change it.
"""

import math
import numpy as np
import pytest
from helpers import SameWord, flat, tiny_config, trained
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.core.run_id import run_id, settings, training_settings
from kdnotes.experiment import launch as launcher
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.tasks.base import Evaluation, Primary
from kdnotes.train.checkpoint import checkpoints
from kinds import one_of_each
from ranks import launch
from small_runs import ON, small_model, train_here

EPOCH = 4  # steps
RISES_AND_FALLS = (0.5, 0.7, 0.6, 0.65)  # dev after each epoch


class Scored(SameWord):
    "What it scores on dev is told, one evaluation after another."

    def __init__(self, told, higher=True):
        super().__init__()
        self.told = iter(told)
        self.primary = Primary('dev', 'accuracy', higher)

    def evaluate(self, scores):
        value = next(self.told)
        return Evaluation({split: dict(accuracy=value) for split in scores}, None, None)


def student():
    from test_resume import Student

    return Student()


def training(told, higher=True, keep='best', folder=None, stop_after=None, look=None, **parameters):
    "Four epochs."
    config = tiny_config('full_student', epochs=4, keep=keep, **parameters)
    more = dict(look=look) if look else {}
    return trained(Scored(told, higher), config, student(), folder=folder, stop_after=stop_after, **more)


@pytest.fixture(scope='module')
def weights_after():
    "step -> the weights of a training that ended there, at the same schedule."
    found = {}

    def note(model, kind, values):
        if kind == 'eval':
            found[values['step']] = flat(model.parameters())

    last = training(RISES_AND_FALLS, keep='last', look=note)
    return found | {4 * EPOCH: last.weights}


@pytest.mark.parametrize(
    'told, higher, best',
    [
        (RISES_AND_FALLS, True, 2),
        ([1 - score for score in RISES_AND_FALLS], False, 2),  # as a perplexity
        ((0.5, 0.7, 0.7, 0.7), True, 2),  # the first of equals
        ((0.5, math.nan, None, 0.4), True, 1),
        ((0.1, 0.2, 0.3, 0.4), True, 4),
    ],
    ids=['falls again', 'lower is better', 'equals', 'undefined', 'last'],
)
def test_the_best_is_that_step(weights_after, told, higher, best):
    weights, rows, result = training(told, higher=higher)
    assert result.kept['step'] == best * EPOCH and result.kept['value'] == told[best - 1]
    assert (weights == weights_after[best * EPOCH]).all()
    assert result.steps == 4 * EPOCH and result.kept['planned'] == 4 * EPOCH
    assert [row['step'] for row in rows if row['kind'] == 'eval'] == [4, 8, 12, 16]  # the last one, too


def test_nothing_is_chosen_by_itself(weights_after):
    weights, rows, result = training(RISES_AND_FALLS, keep='last')
    assert result.kept is None and (weights == weights_after[4 * EPOCH]).all()
    assert [row['step'] for row in rows if row['kind'] == 'eval'] == [4, 8, 12]


@pytest.mark.parametrize('patience, done', [(1, 3), (2, 4), (3, 4)])
def test_patience_ends_a_training(weights_after, patience, done):
    weights, rows, result = training(RISES_AND_FALLS, patience=patience)
    assert result.steps == done * EPOCH and result.kept['step'] == 2 * EPOCH
    assert (weights == weights_after[2 * EPOCH]).all()
    assert [row['step'] for row in rows if row['kind'] == 'step'][-1] == result.steps


@pytest.mark.parametrize('at', [3, 8, 9, 12])
def test_stopped_and_taken_up(tmp_path, at):
    "To the last bit, also where the stop comes with the last step of an impatient training."
    weights, _, result = training(RISES_AND_FALLS, patience=1)
    cut = training(RISES_AND_FALLS, folder=tmp_path, stop_after=at, patience=1)
    assert cut.result is None and [p.name for p in checkpoints(tmp_path)] == [f'step-{at:08d}']
    again, _, taken_up = training(RISES_AND_FALLS[at // EPOCH :], folder=tmp_path, patience=1)
    assert (again == weights).all() and taken_up.kept == result.kept and taken_up.steps == result.steps
    assert [p['step'] for p in taken_up.curve] == [p['step'] for p in result.curve]


def trained_rank():
    "What a rank does; its scores are another rank's in reverse, so that only one of them can be followed."
    from kdnotes.train import distributed as runtime
    from kdnotes.train.loop import train
    import torch

    config = tiny_config('full_student', ranks=2, epochs=4, keep='best', patience=1, micro_batch_tokens=32)
    here = runtime.start(config)
    model = student()
    told = RISES_AND_FALLS if here.main else RISES_AND_FALLS[::-1]
    result = train(Scored(told), model, config, here, lambda kind, **values: None)
    runtime.stop(here)
    torch.set_flush_denormal(False)
    return flat(model.parameters()), result.kept, result.steps


@pytest.mark.exhaustive
def test_ranks_agree():
    (a, kept, steps), (b, other, others) = launch('test_keep_best:trained_rank', ranks=2)
    assert kept == other and kept['step'] == 2 * EPOCH and steps == others == 3 * EPOCH
    assert (a == b).all()


def named(**parameters):
    config = resolve(make_config(mode='baseline', **parameters), Machine('cpu', 2), 'embedded')
    return run_id(config, 'c', {}, 2), settings(config)


def test_it_is_part_of_a_run_only_where_it_is_asked_for():
    plain, values = named()
    assert not {'keep', 'patience', 'score_every'} & values.keys()
    assert plain == named(score_every=5)[0] == named(score_epochs=2)[0] == named(keep='last')[0]
    best, values = named(keep='best')
    assert best != plain and values['keep'] == 'best' and values['score_every'] == 0
    # when it is evaluated says which models are compared
    others = [dict(score_every=5), dict(score_epochs=2), dict(patience=2)]
    assert len({best} | {named(keep='best', **other)[0] for other in others}) == 4
    with pytest.raises(ConfigError, match='add keep=best'):
        make_config(patience=2)
    assert {'keep', 'patience'} <= training_settings('masked_lm')  # a given teacher has none of it


@pytest.mark.exhaustive
@pytest.mark.parametrize('task', one_of_each(['text_classification', 'masked_lm']))
def test_a_run_says_what_it_has_kept(task, tmp_path, monkeypatch):
    from kdnotes.core.render import phrase
    from kdnotes.experiment.card import model_card
    from kdnotes.report.report import report

    more = dict(
        task=task,
        mode='baseline',
        corpus='embedded',
        teacher=str(small_model(tmp_path / 'small')),
        smoke=True,
    )
    more |= dict(max_length=32, threads_per_rank=1, study=f'kept-{task}', learning_rate=0.05)
    its_plan = plan(make_config(keep='best', score_every=2, **more), ON)
    train_here(monkeypatch)
    record = launcher.execute(its_plan)
    folder = RunFolder(record['study'], record['run_id'])
    points = {p['step']: p['value'] for p in record['curve'] if p.get('set') == 'dev'}
    assert sorted(points) == [2, 4, 6]
    choose = max if record['primary']['higher_is_better'] else min
    kept = record['kept']
    assert kept['value'] == choose(points.values()) == points[kept['step']] and kept['planned'] == 6
    assert np.isclose(record['metrics']['dev'][record['primary']['metric']], kept['value'])
    assert {row['step'] for row in folder.rows() if row['kind'] == 'eval'} == {2, 4, 6}
    said = f'Kept: {phrase("setting.jinja", "kept", [record])}'
    assert f'step {kept["step"]} of 6' in said
    assert said in model_card(record['run_id']).content and f'{said}.' in str(report(record['study']))

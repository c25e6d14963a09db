"""The memory of a run, foretold from its shape: it grows with what costs memory and with nothing else, is the
doctor's where both look at the same, and is what real runs hold.
"""

import os
import numpy as np
import pytest
import torch
from kdnotes.core.given import make_config
from kdnotes.distill.architectures import count_parameters
from kdnotes.experiment.forecast import memory_of
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import Plan, plan
from kdnotes.experiment.worker import encoded_task, starting_model
from kdnotes.tasks.sources import corpus_of
from kdnotes.train.distributed import Runtime
from kdnotes.train.memory import TrainingSetup, forecast_memory, look_ahead


def plan_of(**settings) -> Plan:
    usual = dict(mode='full_student', corpus='embedded', student_init='teacher_pretrained')
    return plan(make_config(**usual | dict(ranks=1, threads_per_rank=1, layers=2) | settings))


def rising(settings: list[dict], stage: str = 'training') -> bool:
    found = [memory_of(plan_of(**changes)).stages[stage] for changes in settings]
    return all(a < b for a, b in zip(found, found[1:]))


@pytest.mark.parametrize(
    'name,values',
    [
        ('layers', [1, 6, 12]),
        ('heads', [1, 12]),
        ('feed_forward', [64, 3000]),
        ('batch_size', [4, 64]),
        ('max_length', [12, 36]),
    ],
)
def test_it_grows_with_what_costs_memory(name, values):
    assert rising([{name: value} for value in values])


def test_a_micro_batch_bounds_it():
    assert rising([dict(batch_size=256, micro_batch_tokens=tokens) for tokens in (64, 8192)])


def test_it_does_not_change_with_a_rate_or_a_temperature():
    one, other = (
        memory_of(
            plan_of(mode='mixed_kd', learning_rate=rate, temperature=temperature, pruning_seed=seed, heads=4)
        )
        for rate, temperature, seed in ((1e-5, 1.0, 1), (1e-2, 9.0, 2))
    )
    assert one == other


def test_parameters_are_those_of_the_network_that_is_trained():
    planned = plan_of(layers=3, heads=5, feed_forward=100)
    task = encoded_task(planned.config, corpus_of(planned.config), Runtime(torch.device('cpu'), 'fp32'))
    model, _ = starting_model(planned.config, task, dict(initial=planned.initial))
    needs = memory_of(planned)
    assert needs.params == count_parameters(model)
    assert needs.encoder_params == needs.params - count_parameters(model.bert.embeddings)


@pytest.mark.parametrize('layers', [2, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_it_is_the_doctors_where_a_training_leaves_nothing_out(layers):
    # the output layer of a language model reads every position and touches every row of the table
    planned = plan_of(task='masked_lm', layers=layers)
    here = Runtime(torch.device('cpu'), 'fp32', threads=1)
    task = encoded_task(planned.config, corpus_of(planned.config), here)
    model, _ = starting_model(planned.config, task, dict(initial=planned.initial))
    setup = TrainingSetup(task, model, planned.config, here)
    needs = memory_of(planned)
    process = needs.parts['process']
    doctors, _ = forecast_memory(setup, look_ahead(task, planned.config).largest, process)
    assert needs.stages['training'] == pytest.approx(sum(doctors.values()), rel=1e-2)


def test_a_teacher_beside_the_student_is_counted():
    alone = memory_of(plan_of())
    stored = memory_of(plan_of(mode='mixed_kd'))
    online = memory_of(plan_of(mode='mixed_kd', signal='online'))
    teacher = 4 * memory_of(plan_of(mode='baseline', student_init='teacher_finetuned', layers=None)).params
    assert 'signal' in stored.stages and 'signal' not in online.stages
    assert stored.stages['training'] > alone.stages['training'] + teacher
    assert online.stages['training'] > stored.stages['training']  # its forwards are beside the student's


def test_an_evaluation_in_large_batches_may_need_most():
    few, many = (memory_of(plan_of(layers=1, batch_size=4, eval_batch_size=n)) for n in (8, 1000))
    assert few.stages['training'] == many.stages['training']
    assert many.bytes == many.stages['evaluation'] > few.stages['evaluation']


def test_each_rank_needs_its_own():
    one, two = (memory_of(plan_of(mode='mixed_student', ranks=ranks, batch_size=64)) for ranks in (1, 2))
    assert one.bytes < two.bytes <= 2 * one.bytes
    assert two.bytes == 2 * sum(two.parts.values())


def test_nothing_of_this_process_changes():
    planned = plan_of(layers=3, heads=7, batch_size=20)
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads(), dict(os.environ)
    memory_of(planned)
    after = torch.get_rng_state(), np.random.get_state()[1], torch.get_num_threads(), dict(os.environ)
    assert (before[0] == after[0]).all() and (before[1] == after[1]).all() and before[2:] == after[2:]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    'settings',
    [
        dict(layers=1, heads=2, batch_size=4),
        dict(task='extractive_qa', layers=4, batch_size=64, micro_batch_tokens=16384, epochs=0.05),
    ],
)
def test_a_real_run_holds_what_was_foretold(settings, tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    planned = plan_of(**dict(epochs=0.1, study='memory') | settings)
    foretold = memory_of(planned).bytes / 2**20
    held = execute(planned)['memory']['peak_host_mib']
    assert 0.7 * foretold < held < 1.05 * foretold

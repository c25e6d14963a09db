"""A training taken up where it stopped is the training that never stopped:
to the last bit, in one process; real kills are in test_faults.py.
"""

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from helpers import SameWord, flat, tiny_bert, tiny_config, tiny_teacher
from kdnotes.train.checkpoint import (
    checkpoints,
    newest_checkpoint,
    random_states,
    read_checkpoint,
    restore_training,
    save_checkpoint,
    training_tensors,
)
from kdnotes.core.processes import Stopped
from kdnotes.train.failures import STOP, TrainingError
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.models import save_model
from kdnotes.train.distributed import Runtime
from kdnotes.train.loop import train
from parity import intermediate, tiny_narrow

CPU = Runtime(torch.device('cpu'), 'fp32')
STEPS = 8


class Student(torch.nn.Module):
    "A BERT whose last dropout draws from torch's own generator."

    def __init__(self):
        super().__init__()
        self.bert = tiny_bert(dropout=0.1)
        self.config = self.bert.config
        self.get_input_embeddings = self.bert.get_input_embeddings
        self.set_input_embeddings = self.bert.set_input_embeddings

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        outputs.logits = F.dropout(outputs.logits, 0.2, self.training)
        return outputs


class Poisoned(SameWord):
    "Example 13 makes the loss infinite."

    def loss_terms(self, outputs, batch, signal):
        return {
            k: (v * float('inf') if 13 in batch.index else v, n)
            for k, (v, n) in super().loss_terms(outputs, batch, signal).items()
        }


def trained(folder=None, stop_after=None, steps=None, config=None, model=None, signal=None):
    "The weights, the rows' losses by step, and the result; None for the first when it was stopped."
    model = model or Student()
    losses = {}
    seen = []

    def on_row(kind, **values):
        seen.append(kind)
        if kind == 'step':
            losses[values['step']] = values['loss']
            STOP.requested = values['step'] == stop_after

    config = config or tiny_config('full_student', ranks=1, checkpoint_steps=steps)
    try:
        result = train(SameWord(), model, config, CPU, on_row, signal, checkpoints=folder, key='run')
    except Stopped as e:
        assert f'after step {stop_after} of {STEPS}' in str(e)
        return None, losses, seen
    finally:
        STOP.requested = False
    return flat(model.parameters()), losses, result


@pytest.mark.parametrize('at', [1, 3, 4, 7, 8])
def test_stopped_and_taken_up(tmp_path, at):
    weights, losses, _ = trained()
    none, first, _ = trained(tmp_path, stop_after=at)
    assert none is None and [p.name for p in checkpoints(tmp_path)] == [f'step-{at:08d}']
    again, rest, result = trained(tmp_path)
    assert (
        (again == weights).all()
        and first | rest == losses
        and result.resumed_at == [at]
        and sorted(rest) == list(range(at + 1, STEPS + 1))
    )


def test_projections_are_taken_up_with_the_student_and_stay_out_of_it(tmp_path):
    config = tiny_config('full_kd', **intermediate('mse'))

    def run(**more):
        student = tiny_narrow()
        return student, *trained(
            config=config, model=student, signal=online_teacher(SameWord(), tiny_teacher(), config), **more
        )

    student, weights, losses, _ = run()
    names = set(tiny_narrow().state_dict())
    assert set(student.state_dict()) == names
    run(folder=tmp_path, stop_after=3)
    saved = read_checkpoint(tmp_path / 'step-00000003', 'run').tensors
    projections = [name for name in saved['model'] if 'projections' in name]
    assert len(projections) == 2 and all(f'{name}.exp_avg' in saved['optimizer'] for name in projections)
    again, same, rest, result = run(folder=tmp_path)
    assert (
        (same == weights).all()
        and result.resumed_at == [3]
        and all(losses[step] == rest[step] for step in rest)
    )
    save_model(again, tmp_path / 'model')
    with safe_open(tmp_path / 'model' / 'model.safetensors', 'pt') as file:
        assert set(file.keys()) == names


def test_checkpoints_disturb_nothing_and_the_last_two_are_kept(tmp_path):
    weights, losses, _ = trained()
    again, same, result = trained(tmp_path, steps=2)
    assert (again == weights).all() and same == losses and result.resumed_at == []
    assert [p.name for p in checkpoints(tmp_path)] == ['step-00000006', 'step-00000004']


def test_a_checkpoint_of_another_run_is_not_taken_up(tmp_path):
    trained(tmp_path, stop_after=3)
    model = Student()
    with pytest.warns(UserWarning, match="belongs to 'run' and not to 'another'"):
        result = train(
            SameWord(),
            model,
            tiny_config('full_student', ranks=1),
            CPU,
            lambda *a, **k: None,
            checkpoints=tmp_path,
            key='another',
        )
    assert result.resumed_at == []


def test_a_step_that_is_not_finite_is_not_taken():
    model = Student()
    with pytest.raises(
        TrainingError, match='the loss itself, of finite outputs, with training examples .*13'
    ):
        train(Poisoned(), model, tiny_config('full_student', ranks=1), CPU, lambda *a, **k: None)
    assert all(p.isfinite().all() for p in model.parameters())


def test_each_rank_takes_up_its_own_random_state(tmp_path):
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters())
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(random_states())
    save_checkpoint(tmp_path, 1, training_tensors(model, optimizer, states), {}, 'run')
    saved = newest_checkpoint(tmp_path, 'run')
    for rank, seed in enumerate((1, 2)):
        restore_training(saved, model, optimizer, rank)
        torch.testing.assert_close(
            torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed))
        )

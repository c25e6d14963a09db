"""A training taken up where it stopped is the training that never stopped:
to the last bit, in one process; real kills are in test_faults.py.
"""

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
import helpers
from helpers import CPU, SameWord, tiny_bert, tiny_config, tiny_teacher
from kdnotes.train.checkpoint import (
    checkpoints,
    newest_checkpoint,
    random_states,
    read_checkpoint,
    restore_training,
    save_checkpoint,
    training_tensors,
)
from kdnotes.train.failures import TrainingError
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.models import save_model
from kdnotes.train.loop import train
from parity import intermediate, tiny_narrow

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


def training(folder=None, steps=None, **more) -> helpers.Training:
    "A student with dropout of two kinds."
    config = tiny_config('full_student', ranks=1, checkpoint_steps=steps)
    return helpers.trained(**dict(config=config, model=Student(), folder=folder) | more)


@pytest.mark.parametrize('at', [1, 3, 4, 7, 8])
def test_stopped_and_taken_up(tmp_path, at):
    whole = training()
    first = training(tmp_path, stop_after=at)
    assert first.result is None and [p.name for p in checkpoints(tmp_path)] == [f'step-{at:08d}']
    again = training(tmp_path)
    assert (again.weights == whole.weights).all() and again.result.resumed_at == [at]
    assert first.losses | again.losses == whole.losses and [*again.losses] == [*range(at + 1, STEPS + 1)]


def test_projections_are_taken_up_with_the_student_and_stay_out_of_it(tmp_path):
    config = tiny_config('full_kd', **intermediate('mse'))

    def run(**more):
        student = tiny_narrow()
        signal = online_teacher(SameWord(), tiny_teacher(), config)
        return student, training(config=config, model=student, signal=signal, **more)

    student, whole = run()
    names = set(tiny_narrow().state_dict())
    assert set(student.state_dict()) == names
    run(folder=tmp_path, stop_after=3)
    saved = read_checkpoint(tmp_path / 'step-00000003', 'run').tensors
    projections = [name for name in saved['model'] if 'projections' in name]
    assert len(projections) == 2 and all(f'{name}.exp_avg' in saved['optimizer'] for name in projections)
    again, rest = run(folder=tmp_path)
    assert (rest.weights == whole.weights).all() and rest.result.resumed_at == [3]
    assert rest.losses.items() <= whole.losses.items()
    save_model(again, tmp_path / 'model')
    with safe_open(tmp_path / 'model' / 'model.safetensors', 'pt') as file:
        assert set(file.keys()) == names


def test_checkpoints_disturb_nothing_and_the_last_two_are_kept(tmp_path):
    whole = training()
    again = training(tmp_path, steps=2)
    assert (again.weights == whole.weights).all() and again.losses == whole.losses
    assert again.result.resumed_at == []
    assert [p.name for p in checkpoints(tmp_path)] == ['step-00000006', 'step-00000004']


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

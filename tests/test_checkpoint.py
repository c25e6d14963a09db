"What a checkpoint refuses, in whose words, and what it brings back."

import json
import random
import numpy as np
import pytest
import torch
from torch import nn
from kdnotes.core.files import sha256_text
from kdnotes.train.checkpoint import (
    CheckpointError,
    checkpoints,
    newest_checkpoint,
    random_states,
    read_checkpoint,
    restore_training,
    save_checkpoint,
    set_random_states,
    training_tensors,
)


def saved(folder, step=3, **more):
    return save_checkpoint(folder, step, {'model': {'w': torch.arange(3.0)}}, {'loss': 0.1}, 'run', **more)


def sign(path, **changes):
    "Write the manifest again with changes, and its own digest."
    body = json.loads((path / 'manifest.json').read_text())
    del body['sha256']
    body = {k: v for k, v in (body | changes).items() if v is not ...}
    digest = sha256_text(json.dumps(body, sort_keys=True))
    (path / 'manifest.json').write_text(json.dumps(body | {'sha256': digest}))


DAMAGES = {
    'no manifest': (
        lambda p: (p / 'manifest.json').unlink(),
        'manifest.json is missing, torn or not what was written',
    ),
    'half a manifest': (
        lambda p: (p / 'manifest.json').write_text((p / 'manifest.json').read_text()[:50]),
        'manifest.json is missing, torn or not what was written',
    ),
    'another step': (
        lambda p: (p / 'manifest.json').write_text(
            (p / 'manifest.json').read_text().replace('"step": 3', '"step": 4')
        ),
        'manifest.json is missing, torn or not what was written',
    ),
    'a number that is none': (
        lambda p: (p / 'manifest.json').write_text(
            (p / 'manifest.json').read_text().replace('"loss": 0.1', '"loss": NaN')
        ),
        'manifest.json is missing, torn or not what was written',
    ),
    'another schema': (
        lambda p: sign(p, schema=2),
        'manifest.json is of schema 2 and this version reads 1',
    ),
    'another key': (lambda p: sign(p, key='other'), "manifest.json belongs to 'other' and not to 'run'"),
    'a file is gone': (lambda p: (p / 'model.safetensors').unlink(), 'model.safetensors is missing'),
    'a file is longer': (
        lambda p: (p / 'model.safetensors').write_bytes((p / 'model.safetensors').read_bytes() + b'.'),
        'model.safetensors was changed after it was written (its sha256 is another)',
    ),
    'a byte is another': (
        lambda p: (p / 'model.safetensors').write_bytes((p / 'model.safetensors').read_bytes()[:-1] + b'.'),
        'model.safetensors was changed after it was written (its sha256 is another)',
    ),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path, name):
    damage, words = DAMAGES[name]
    path = saved(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError) as e:
        read_checkpoint(path, 'run')
    assert str(e.value) == f'{path}/{words}; the checkpoint is not used'
    said = []
    assert newest_checkpoint(tmp_path, 'run', said.append) is None and said == [str(e.value)]


def test_the_newest_stay_and_what_a_kill_left_is_cleared(tmp_path):
    (tmp_path / '.step-00000003.tmp' / 'deep').mkdir(parents=True)
    (tmp_path / 'step-00000003').mkdir()
    (tmp_path / 'step-x').touch()
    for step in (1, 2, 3):
        saved(tmp_path, step)
    assert [p.name for p in checkpoints(tmp_path)] == ['step-00000003', 'step-00000002']
    assert read_checkpoint(tmp_path / 'step-00000003', 'run').step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ['step-00000002', 'step-00000003', 'step-x']
    saved(tmp_path, 4, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ['step-00000004']


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(CheckpointError) as e:
        saved(tmp_path / 'file')
    assert str(e.value) == (
        f'{tmp_path}/file/step-00000003 could not be written (Not a directory); free some room on that disk '
        'and start the run again: it goes on from the checkpoint before'
    )


@pytest.mark.parametrize('odd', [False, True])
def test_every_generator_is_put_back(odd):
    "Also between the two numbers of a normal pair, of which numpy and Python keep the second."
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    if odd:
        np.random.randn(), random.gauss(0, 1)

    def drawn():
        return torch.rand(2).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]

    states = random_states()
    assert {t.dtype for t in states.values()} <= {torch.uint8, torch.int64, torch.float64}
    first = drawn()
    drawn()
    set_random_states(states)
    assert drawn() == first


def network(width=4, affine=True):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width, affine=affine), nn.Linear(width, 1))


def step(model, optimizer):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_buffers_and_moments_are_put_back(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    path = save_checkpoint(tmp_path, 1, training_tensors(model, optimizer, [random_states()]), {})
    again = network()
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    restore_training(read_checkpoint(path), again, other)
    for a, b in ((model, again), (again, model)):
        assert all((a.state_dict()[k] == b.state_dict()[k]).all() for k in b.state_dict())
    for p, q in zip(model.parameters(), again.parameters()):
        assert optimizer.state[p].keys() == other.state[q].keys() == {'step', 'exp_avg', 'exp_avg_sq'}
        assert all((optimizer.state[p][k] == other.state[q][k]).all() for k in optimizer.state[p])
    fresh = torch.optim.AdamW(network().parameters())
    unstepped = training_tensors(network(), fresh, [random_states()])
    assert unstepped['optimizer'] == {}

"""One training, however it is divided: micro-batches,
ranks and the teacher's cache change neither losses nor weights; real ranks over gloo, dropout 0.
"""

import itertools
from dataclasses import replace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SameWord, as_configured, flat, tiny_bert, tiny_config, tiny_teacher
from kdnotes.train.distributed import Runtime
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.train.loop import Objective, accumulate, loss_weights, train
from parity import Run, World, way_apart

# How far apart two divisions of one training may end: losses and scores absolutely, weights as a share of the
# way the training went.
# fp32 adds the same numbers in another order, and which one is the CPU's matter (seen: 5e-7 and 2e-5 on one
# kind, 3e-6 in a loss on another). bf16 rounds each micro-batch's gradients
# to 8 bits, and Adam lets small gradients go as far
# as large ones (seen: 6e-3 and 3e-2).
TOLERANCE = {'fp32': dict(loss=1e-5, score=1e-5, way=1e-4), 'bf16': dict(loss=2e-2, score=2e-2, way=0.15)}
# the same fp32 logits from batches of another shape (seen: 3 units in the last place)
ROUNDING = 1e-6
# of a cache: relative error of a number, and how far apart the trainings end
STORED = {'fp32': (0.0, 1e-4), 'fp16': (2**-11, 1e-2), 'bf16': (2**-8, 5e-2)}

EVEN = {128: 1, 64: 2, 32: 4}  # budget in tokens -> micro-batches of a step of 8 examples
KINDS = list(itertools.product((False, True), ('fp32', 'bf16')))  # KD, format
DIVIDED = [Run(2, kd, dtype, tokens) for kd, dtype in KINDS for tokens in (8192, 32)]
DIVIDED += [
    Run(3, False, 'fp32', 32),
    Run(3, True, 'fp32', 8192),
    Run(3, True, 'fp32', 32),
    Run(3, True, 'bf16', 32),
]
CACHED = [Run(ranks, signal=signal) for ranks in (1, 2) for signal in STORED]
OTHER_STUDENT = Run(student='distilbert')
RANKED = [
    Run(ranks, True, 'fp32', tokens, ranking=ranking)
    for ranking in ('ranknet', 'margin_mse', 'listwise', 'lambda')
    for ranks, tokens in ((1, 64), (2, 8192), (2, 64), (3, 64))
    if ranking in ('ranknet', 'margin_mse') or (ranks, tokens) == (2, 64)
]
WHOLE = [
    Run(dtype=dtype, student=student, hidden=hidden)
    for dtype, student, hidden in (
        ('fp32', 'narrow', 'mse'),
        ('fp32', 'bert', 'cosine'),
        ('bf16', 'narrow', 'mse'),
        ('fp32', 'slim', 'all'),
    )
]
INTERMEDIATE = [
    replace(run, ranks=ranks, tokens=tokens)
    for run in WHOLE
    for ranks, tokens in ((1, 32), (2, 8192), (2, 32), (3, 32))
    if (run.dtype == 'fp32' or ranks == 2) and (run.hidden != 'all' or (ranks, tokens) == (2, 32))
]
PLAN = (
    *(Run(1, kd, dtype, tokens, even=True) for kd, dtype in KINDS for tokens in EVEN),
    *(Run(1, kd, dtype) for kd, dtype in KINDS),
    *DIVIDED,
    *CACHED,
    OTHER_STUDENT,
    *(Run(ranking=loss) for loss in ('ranknet', 'margin_mse', 'listwise', 'lambda')),
    *RANKED,
    *WHOLE,
    *INTERMEDIATE,
)


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp('signals'), PLAN)


def name(run: Run) -> str:
    targets = 'kd' if run.kd else 'labels'
    parts = (run.ranks, targets, run.dtype, run.tokens, run.signal, run.student, run.ranking, run.hidden)
    return '-'.join(map(str, parts))


def assert_same_training(a: dict, b: dict, dtype: str, steps: int = 8):
    tolerance = TOLERANCE[dtype]
    assert a['totals'] == b['totals'] and len(a['losses']) == steps and np.abs(a['update']).max() > 1e-2, (
        'as many steps, examples and tokens, and something was learned'
    )
    np.testing.assert_allclose(
        b['losses'], a['losses'], rtol=0, atol=tolerance['loss'], err_msg='losses of the steps'
    )
    for split in a['scores']:
        np.testing.assert_allclose(
            b['scores'][split],
            a['scores'][split],
            rtol=0,
            atol=tolerance['score'],
            err_msg=f'scores of {split}',
        )
    assert (apart := way_apart(a, b)) <= tolerance['way'], f'weights: {apart:.1e} of the way apart'


def test_loss_of_a_step_in_plain_torch():
    "Divisions that agree could all be wrong."
    config = tiny_config('full_kd', alpha=0.3, micro_batch_tokens=64)
    task = SameWord()
    student = tiny_bert()
    teacher = tiny_teacher()
    here = Runtime(torch.device('cpu'), 'fp32')
    index = np.arange(25)
    weights = loss_weights(as_configured(task, config), config)
    objective = Objective(task, config, here, weights, online_signal(task, teacher))
    losses, *_ = accumulate(student, objective, here.scaler(), index)
    batch = task.batch('train', index)
    plain = tiny_bert()
    logits = plain(**batch.inputs).logits
    soft = teacher.eval()(**batch.inputs).logits.detach()
    hard = F.cross_entropy(logits, batch.labels, ignore_index=-1)
    kl = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(soft / 2, -1), reduction='batchmean') * 2 * 2
    (0.7 * hard + 0.3 * kl).backward()
    assert [losses[k].item() for k in ('hard', 'soft', 'total')] == pytest.approx(
        [x.item() for x in (hard, kl, 0.7 * hard + 0.3 * kl)], rel=1e-5
    )
    np.testing.assert_allclose(
        flat(p.grad for p in student.parameters()),
        flat(p.grad for p in plain.parameters()),
        rtol=0,
        atol=1e-6,
    )


def test_untouched_rows_decay():
    """A training without shortcuts would have done to every row of the table what this one does to those
    in use: ten rows of it occur nowhere.
    """
    model = tiny_bert()
    config = tiny_config('full_student', ranks=1, weight_decay=0.1)
    rates = []
    before = model.get_input_embeddings().weight.detach().clone()
    train(
        SameWord(),
        model,
        config,
        Runtime(torch.device('cpu'), 'fp32'),
        lambda kind, **values: rates.append(values['learning_rate']) if kind == 'step' else None,
    )
    after = model.get_input_embeddings().weight.detach()
    np.testing.assert_allclose(
        (after[3:10] / before[3:10]).numpy(), np.prod([1 - 0.1 * rate for rate in rates]), rtol=1e-5
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize('kd, dtype', KINDS)
def test_micro_batches_do_not_matter(world, kd, dtype):
    runs = {tokens: world[Run(1, kd, dtype, tokens, even=True)][0] for tokens in EVEN}
    for tokens, n in EVEN.items():
        full = [f for f, examples in zip(runs[tokens]['forwards'], runs[tokens]['examples']) if examples == 8]
        assert full == [n] * 6, f'8 examples are {n} micro-batches'
        assert_same_training(runs[128], runs[tokens], dtype)


@pytest.mark.parametrize('run', DIVIDED, ids=name)
def test_ranks_do_not_matter(world, run):
    one = world[Run(1, run.kd, run.dtype)][0]
    many = world[run]
    assert sorted(one['examples']) == [1, 1, 8, 8, 8, 8, 8, 8], 'some steps have fewer examples than ranks'
    assert (run.tokens == 8192) == (max(many[0]['forwards']) == 1), 'ranks with and without micro-batches'
    assert_same_training(one, many[0], run.dtype)


@pytest.mark.parametrize('run', RANKED, ids=name)
def test_questions_stay_whole_and_pairs_are_counted_over_the_step(world, run):
    """A step of one question leaves ranks without any;
    the largest question is beyond the budget of a micro-batch.
    """
    whole = world[Run(ranking=run.ranking)][0]
    divided = world[run]
    assert (
        max(whole['forwards'])
        == 1
        < max(sum(rank['forwards'][step] for rank in divided) for step in range(6))
    ), 'it was divided'
    lists = run.ranking == 'listwise'  # a term more: the teacher's
    assert whole['losses'].shape == (6, 4 + lists) and (whole['losses'][:, 3] > 0).sum() >= 4, (
        'the ranking loss is the last'
    )
    assert_same_training(whole, divided[0], 'fp32', steps=6)
    for other in divided[1:]:
        assert (
            other['gradients'] == divided[0]['gradients'] and (other['update'] == divided[0]['update']).all()
        )


@pytest.mark.parametrize('run', INTERMEDIATE, ids=name)
def test_losses_on_intermediate_layers_are_means_over_the_tokens_of_the_step(world, run):
    "Hidden states and relations; the narrow student has projections, which are trained and synchronised too."
    whole = world[replace(run, ranks=1, tokens=8192)][0]
    divided = world[run]
    terms = 6 if run.hidden == 'all' else 4
    assert whole['losses'].shape == (8, 1 + terms) and (whole['losses'][:, 3:] > 1e-3).all(), (
        'total, hard, soft, hidden, relation'
    )
    matrices = dict(narrow=2, slim=3).get(run.student, 0)
    assert whole['trained'] - len(whole['last_gradient']) == matrices * 16 * 32
    assert_same_training(whole, divided[0], run.dtype)
    for rank in divided:
        assert (
            rank['gradients'] == divided[0]['gradients']
            and (rank['update'] == divided[0]['update']).all()
            and rank['all_reduces'] == [run.ranks > 1] * 8
        )
    for rank in divided:
        assert rank['teacher']['calls'] == {(False, False, False)} and not (
            rank['teacher']['gradients'] or rank['teacher']['moved']
        )


@pytest.mark.parametrize('kd', [False, True])
def test_bf16_is_not_fp32(world, kd):
    assert (
        way_apart(world[Run(1, kd, 'fp32')][0], world[Run(1, kd, 'bf16')][0]) > 10 * TOLERANCE['fp32']['way']
    )


@pytest.mark.parametrize('run', DIVIDED, ids=name)
def test_gradients_and_weights_are_equal_on_all_ranks(world, run):
    first, *others = world[run]
    for other in others:
        assert other['gradients'] == first['gradients'], 'gradients of every step, to the last bit'
        assert (other['update'] == first['update']).all()
        for split in first['scores']:
            assert (other['scores'][split] == first['scores'][split]).all()
    assert len(set(first['gradients'])) == 8
    if run.dtype == 'fp32':
        np.testing.assert_allclose(
            first['last_gradient'],
            world[Run(1, run.kd)][0]['last_gradient'],
            rtol=0,
            atol=1e-6,
            err_msg='the gradient of one rank',
        )


@pytest.mark.parametrize('run', DIVIDED, ids=name)
def test_one_all_reduce_a_step(world, run):
    for rank in world[run]:
        assert rank['all_reduces'] == [1] * 8, f"{rank['forwards']} forwards"  # the model fits one bucket


def test_ranks_warn_of_nothing(world):
    assert [rank['warnings'] for run in DIVIDED for rank in world[run] if rank['warnings']] == []


@pytest.mark.parametrize(
    'run',
    [Run(1), Run(1, dtype='bf16'), Run(2, tokens=32), Run(2, dtype='bf16', tokens=32), OTHER_STUDENT],
    ids=name,
)
def test_teacher_in_the_trainer_is_the_teacher_alone(world, run):
    for seen in (rank['teacher'] for rank in world[run]):
        np.testing.assert_allclose(seen['signal'], seen['alone'], rtol=ROUNDING, atol=ROUNDING)
        assert seen['segments'] > 0.1, 'this teacher would say something else without token_type_ids'
        assert seen['calls'] == {(False, False, False)}, (
            'never in training mode, with gradients, or under autocast'
        )
        assert not (seen['gradients'] or seen['moved'])


@pytest.mark.parametrize('run', CACHED, ids=name)
def test_cached_signal_is_the_online_one(world, run):
    relative, way = STORED[run.signal]
    for rank in world[run]:
        np.testing.assert_allclose(
            rank['teacher']['signal'], rank['teacher']['alone'], rtol=relative + ROUNDING, atol=ROUNDING
        )
    online = world[Run(run.ranks)][0]
    assert (apart := way_apart(online, world[run][0])) <= way, f'weights: {apart:.1e} of the way apart'
    if run.signal == 'fp32':
        assert_same_training(online, world[run][0], 'fp32')
    else:
        assert (world[run][0]['teacher']['signal'] != online['teacher']['signal']).any(), (
            'it was stored in 16 bits'
        )

"""The losses a configuration can ask for besides the study's:
they reach the training as they are meant, and what cannot be meant is refused.
"""

import numpy as np
import pytest
import torch
from helpers import SameWord, as_configured, flat, tiny_bert, tiny_config, tiny_distilbert, tiny_teacher
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.losses.conventions import DIALECTS, dialect_loss
from kdnotes.distill.intermediate import (
    capture_outputs,
    online_teacher,
    open_student,
    relation_kl,
    attention_projections,
)
from kdnotes.losses.targets import margin_mse, ranknet, soft_target_kl
from kdnotes.train.distributed import Runtime
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.train.loop import Objective, accumulate, loss_weights, schedule_steps
from parity import intermediate, ranked_task, tiny_narrow

CPU = Runtime(torch.device('cpu'), 'fp32')


def QUIET(*a, **k):
    return None


OFF = dict(
    dialect='canonical',
    min_probability=None,
    top_k=None,
    ranking_loss='none',
    ranking_weight=1.0,
    hidden_loss='none',
    hidden_weight=1.0,
    hidden_layers=None,
    relation_loss='none',
    relation_weight=1.0,
)
ONLINE = dict(signal='online', hidden_loss='mse')


def gradient(task, config, signal=None, index=None):
    "Losses and gradients of one step of a tiny student."
    student = tiny_bert()
    index = np.arange(len(task.lengths('train'))) if index is None else index
    weights = loss_weights(as_configured(task, config), config)
    losses, *_ = accumulate(student, Objective(task, config, CPU, weights, signal), CPU.scaler(), index)
    return {k: v.item() for k, v in losses.items()}, flat(p.grad for p in student.parameters())


def in_plain_torch(task, signal, loss):
    "The gradient of `loss(logits, teacher's logits, batch)` over all training examples at once."
    student = tiny_bert()
    batch = task.batch('train', np.arange(len(task.lengths('train'))))
    value = loss(student(**batch.inputs).logits, signal(batch)['logits'], batch)
    value.backward()
    return value.item(), flat(p.grad for p in student.parameters())


@pytest.mark.parametrize(
    'asked, sentence',
    [
        (
            dict(mode='full_student', dialect='modelopt'),
            "dialect='modelopt' needs a teacher, and mode='full_student' learns from none",
        ),
        (dict(mode='baseline', min_probability=0.1), 'min_probability=0.1 needs a teacher'),
        (
            dict(mode='full_student', ranking_loss='margin_mse'),
            (
                "ranking_loss='margin_mse' needs a teacher, and mode='full_student' learns from none; "
                "use a KD mode, or ranking_loss='ranknet'"
            ),
        ),
        (dict(ranking_weight=0.5), 'ranking_weight=0.5 weighs nothing; choose a ranking_loss too'),
        (dict(top_k=3), "top_k=3 is more than the 2 classes of task='answer_selection'"),
        (dict(top_k=0), 'top_k=0 is refused'),
        (dict(min_probability=0.0), 'min_probability=0.0 is refused'),
        (dict(dialect='textbrewer', top_k=1), "dialect='textbrewer' knows no soft targets that are cut off"),
        (dict(ranking_loss='lambdarank'), "ranking_loss='lambdarank' is refused"),
        (
            dict(hidden_loss='mse'),
            "hidden_loss='mse' needs signal='online', since a teacher's intermediate layers are too large "
            'to be cached',
        ),
        (dict(relation_loss='values'), "relation_loss='values' needs signal='online'"),
        (dict(mode='full_student', signal='online', hidden_loss='mse'), "signal='online' needs a teacher"),
        (dict(hidden_weight=2.0), 'hidden_weight=2 weighs nothing; choose a hidden_loss too'),
        (dict(relation_weight=2.0), 'relation_weight=2 weighs nothing'),
        (
            dict(hidden_layers=(1, 3, 5)),
            'hidden_layers=(1, 3, 5) are not looked at; choose a hidden_loss too',
        ),
        (ONLINE | dict(hidden_weight=0.0), 'hidden_weight=0.0 is refused'),
        (
            ONLINE | dict(hidden_layers=(1, 3)),
            'must name a layer of the teacher for each of the 3 layers of the student',
        ),
        (ONLINE | dict(hidden_layers=(-1, 3, 5)), 'must be counted from 0'),
        (
            ONLINE | dict(profile='paper', student_init='hub'),
            "hidden_loss needs hidden_layers with student_init='hub'",
        ),
    ],
    ids=str,
)
def test_bad_combinations_are_refused(asked, sentence):
    with pytest.raises(ConfigError) as e:
        make_config(**asked)
    assert sentence in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('dialect', DIALECTS)
@pytest.mark.parametrize('tokens', [8192, 64])
def test_a_dialect_is_what_its_system_computes(dialect, tokens):
    config = tiny_config('full_kd', dialect=dialect, alpha=0.3, temperature=3.0, micro_batch_tokens=tokens)
    task = ranked_task('none', temperature=3.0)
    own = {'kd_loss_weight': 0.3} if dialect == 'modelopt' else dict(zip(DIALECTS[dialect], (0.7, 0.3)))
    signal = online_signal(task, tiny_teacher())
    _, theirs = in_plain_torch(
        task, signal, lambda s, t, batch: dialect_loss(dialect, s, t, batch.labels, 3.0, own)
    )
    _, ours = gradient(task, config, signal)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    if dialect in ('textbrewer', 'modelopt'):
        assert (
            np.abs(ours - gradient(task, tiny_config('full_kd', alpha=0.3, temperature=3.0), signal)[1]).max()
            > 1e-2
        )


@pytest.mark.parametrize('cut', [dict(top_k=1), dict(min_probability=0.3)], ids=str)
def test_the_cut_reaches_the_training(cut):
    task = ranked_task('none', **cut)
    config = tiny_config('full_kd', alpha=1.0, **cut)
    signal = online_signal(task, tiny_teacher())
    value, theirs = in_plain_torch(task, signal, lambda s, t, batch: soft_target_kl(s, t, 2.0, **cut))
    losses, ours = gradient(task, config, signal)
    assert losses['soft'] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert losses['soft'] != pytest.approx(
        gradient(ranked_task('none'), tiny_config('full_kd', alpha=1.0), signal)[0]['soft'], rel=1e-3
    )


@pytest.mark.parametrize('loss', ['ranknet', 'margin_mse'])
@pytest.mark.parametrize('tokens', [8192, 64, 16])
def test_ranking_is_the_mean_over_the_pairs_of_the_step(loss, tokens):
    task = ranked_task(loss)
    config = tiny_config(
        'full_kd', alpha=0.4, ranking_loss=loss, ranking_weight=0.25, micro_batch_tokens=tokens
    )
    signal = online_signal(task, tiny_teacher())
    questions = torch.from_numpy(ranked_task(loss).questions['train'].question)

    def ranking(s, t, labels):
        s = s.diff(dim=1)[:, 0]
        t = t.diff(dim=1)[:, 0]
        return ranknet(s, questions, labels) if loss == 'ranknet' else margin_mse(s, t, questions, labels)

    def whole(s, t, batch):
        return (
            0.6 * torch.nn.functional.cross_entropy(s, batch.labels)
            + 0.4 * soft_target_kl(s, t, 2.0)
            + 0.25 * ranking(s, t, batch.labels)
        )

    value, theirs = in_plain_torch(task, signal, whole)
    losses, ours = gradient(task, config, signal)
    assert losses['total'] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_a_step_without_a_pair_has_no_ranking_loss():
    task = ranked_task('ranknet')
    index = np.flatnonzero(
        task.groups('train') == int(np.flatnonzero(task.questions['train'].positives == 0)[0])
    )
    losses, ours = gradient(task, tiny_config('full_student', ranking_loss='ranknet'), index=index)
    assert task.loss_counts('train', index)['ranking'] == 0 == losses['ranking']
    np.testing.assert_allclose(
        ours, gradient(ranked_task('none'), tiny_config('full_student'), index=index)[1], rtol=0, atol=1e-7
    )


def test_weight_0_is_the_control_with_the_same_steps():
    control, asked, usual = (
        tiny_config('full_student', **more)
        for more in (dict(ranking_loss='ranknet', ranking_weight=0.0), dict(ranking_loss='ranknet'), {})
    )
    steps = [
        [s.index.tolist() for s in schedule_steps(ranked_task(c.task_settings.ranking_loss), c)[1]]
        for c in (control, asked, usual)
    ]
    assert steps[0] == steps[1] != steps[2]
    index = np.array(steps[0][0])
    task = ranked_task('ranknet')
    np.testing.assert_allclose(
        gradient(task, control, index=index)[1],
        gradient(ranked_task('none'), usual, index=index)[1],
        rtol=0,
        atol=1e-7,
    )
    assert gradient(task, control, index=index)[0]['ranking'] > 0.1, 'told, and not minimised'


def in_plain_torch_with_intermediate(student, teacher, config, projections, relation_heads):
    "Total loss of all training examples at once, layer by layer."
    batch = SameWord().batch('train', np.arange(25))
    mask = batch.inputs['attention_mask']
    with torch.no_grad(), capture_outputs(attention_projections(teacher)[-1:]) as its:
        t = teacher.eval()(**batch.inputs, output_hidden_states=True)
    with capture_outputs(attention_projections(student)[-1:]) as own:
        s = student(**batch.inputs, output_hidden_states=True)
    known = batch.labels >= 0
    hard = torch.nn.functional.cross_entropy(s.logits[known], batch.labels[known])
    distance = 0.0
    for layer, of in zip((1, 2), config.loss.hidden_layers):
        a = s.hidden_states[layer]
        b = t.hidden_states[of + 1]
        if projections:
            a = a @ projections.matrices[str(layer)].weight.T
        each = (
            (a - b).square().mean(-1)
            if config.loss.hidden_loss == 'mse'
            else 1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)
        )
        distance = distance + (each * mask).sum() / mask.sum() / 2
    return (
        0.5 * hard
        + 0.5 * soft_target_kl(s.logits, t.logits, 2.0)
        + 0.7 * distance
        + 3.0 * relation_kl(own[0], its[0], mask, relation_heads) / mask.sum()
    )


@pytest.mark.parametrize(
    'hidden, student, heads',
    [
        ('mse', tiny_narrow, 1),
        ('cosine', tiny_narrow, 1),
        ('mse', tiny_bert, 2),
        ('cosine', tiny_distilbert, 2),
    ],
)
@pytest.mark.parametrize('layers', [(0, 1), (1, 1)])
def test_losses_on_intermediate_layers_are_what_plain_torch_computes(hidden, student, heads, layers):
    config = tiny_config(
        'full_kd', **intermediate(hidden, hidden_weight=0.7, hidden_layers=layers, micro_batch_tokens=64)
    )
    signal = online_teacher(SameWord(), tiny_teacher(), config)
    task, ours = open_student(SameWord(), student(), config, signal, seed=4)
    plain = student()
    theirs = in_plain_torch_with_intermediate(plain, tiny_teacher(), config, ours.projections, heads)
    theirs.backward()
    objective = Objective(task, config, CPU, loss_weights(task, config), signal)
    losses, *_ = accumulate(ours, objective, CPU.scaler(), np.arange(25))
    assert (
        losses['total'].item() == pytest.approx(theirs.item(), rel=1e-5)
        and losses['hidden'] > 1e-2
        and losses['relation'] > 1e-4
    )
    np.testing.assert_allclose(
        flat(p.grad for p in ours.model.parameters()),
        flat(p.grad for p in plain.parameters()),
        rtol=0,
        atol=1e-6,
    )
    if ours.projections:
        assert min(p.grad.abs().max() for p in ours.projections.parameters()) > 1e-3
    assert (ours.projections is None) == (student is not tiny_narrow)

"""Losses over the candidates of a question, against loops written from the papers' formulas,
and as a training has them: counted in questions or pairs, whole questions in each micro-batch.
"""

import math
import numpy as np
import pytest
import torch
from helpers import as_configured, tiny_config, tiny_teacher
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.losses.targets import lambda_loss, listnet, listwise_kl, soft_target_kl
from kdnotes.train.loop import loss_weights, schedule_steps
from parity import ranked_task
from test_training_losses import gradient, in_plain_torch

SIZES = (3, 1, 5, 2, 8)
GROUPS = torch.repeat_interleave(torch.tensor([9, 4, 7, 1, 5]), torch.tensor(SIZES))
generator = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, 4, (sum(SIZES),), generator=generator)  # graded
SCORES, TEACHERS = torch.randn(2, sum(SIZES), generator=generator) * 2
ORDER = torch.randperm(sum(SIZES), generator=generator)  # groups are not end to end


def lists():
    "The rows of each group."
    return [torch.nonzero(GROUPS == g)[:, 0].tolist() for g in GROUPS.unique().tolist()]


def listnet_by_loops(s):
    total = 0.0
    for rows in lists():
        p = [math.exp(LABELS[i]) for i in rows]
        log_sum = torch.log(sum(torch.exp(s[i]) for i in rows))
        total = total - sum(p_i / sum(p) * (s[i] - log_sum) for p_i, i in zip(p, rows))
    return total, len(SIZES)


def kl_by_loops(s):
    total = 0.0
    for rows in lists():
        p = [math.exp(TEACHERS[i] / 3) for i in rows]
        p = [p_i / sum(p) for p_i in p]
        q = [torch.exp(s[i] / 3) / sum(torch.exp(s[j] / 3) for j in rows) for i in rows]
        total = total + 9 * sum(p_i * (math.log(p_i) - torch.log(q_i)) for p_i, q_i in zip(p, q))
    return total, len(SIZES)


def lambda_by_loops(s, mu=10.0):
    "Wang et al. 2018, equations 5, 16, 17 and 19, with log2 of the sigmoid."
    total, pairs = 0.0, 0

    def discount(rank):
        return math.log2(1 + rank)

    for rows in lists():
        rank = {i: 1 + place for place, i in enumerate(sorted(rows, key=lambda i: -s[i].item()))}
        best = sorted((2 ** LABELS[i].item() - 1 for i in rows), reverse=True)
        most = sum(gain / discount(1 + place) for place, gain in enumerate(best))
        for i in rows:
            for j in rows:
                if LABELS[i] <= LABELS[j]:
                    continue
                gains = abs(2 ** LABELS[i].item() - 2 ** LABELS[j].item()) / most
                rho = abs(1 / discount(rank[i]) - 1 / discount(rank[j]))
                d = abs(rank[i] - rank[j])
                delta = abs(1 / discount(d) - 1 / discount(d + 1))
                total = total - (rho + mu * delta) * gains * torch.log2(torch.sigmoid(s[i] - s[j]))
                pairs += 1
    return total, pairs


CASES = {
    'listnet': (listnet_by_loops, lambda s, **more: listnet(s, GROUPS, LABELS, **more)),
    'listwise_kl': (kl_by_loops, lambda s, **more: listwise_kl(s, TEACHERS, GROUPS, 3.0, **more)),
    'lambda': (lambda_by_loops, lambda s, **more: lambda_loss(s, GROUPS, LABELS, **more)),
    'lambdarank': (
        lambda s: lambda_by_loops(s, mu=0.0),
        lambda s, **more: lambda_loss(s, GROUPS, LABELS, mu=0.0, **more),
    ),
}
each = pytest.mark.parametrize('name', CASES)


@each
def test_value_and_gradient_are_those_of_the_formula(name, monkeypatch):
    loops, ours = CASES[name]
    exact = SCORES.double().requires_grad_()
    expected, n = loops(exact)
    [theirs] = torch.autograd.grad(expected / n, [exact])
    s = SCORES.clone().requires_grad_()
    value = ours(s)
    [gradient] = torch.autograd.grad(value, [s])
    assert value.item() == pytest.approx(expected.item() / n, abs=1e-6)
    torch.testing.assert_close(gradient.double(), theirs, atol=1e-6, rtol=0)
    assert ours(SCORES, reduction='sum').item() == pytest.approx(expected.item(), rel=1e-6)
    # the order of the rows is nobody's matter
    for tensor in ('GROUPS', 'LABELS', 'TEACHERS'):
        monkeypatch.setitem(globals(), tensor, globals()[tensor][ORDER])
    assert ours(SCORES[ORDER]).item() == pytest.approx(value.item(), abs=1e-6)


@each
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_finite_float32_far_away(name, dtype):
    s = (SCORES * 1e3).to(dtype).requires_grad_()
    value = CASES[name][1](s)
    value.backward()
    assert value.dtype == torch.float32 and value.isfinite() and s.grad.isfinite().all()


# ---- in a training ----


def question_of(task):
    return torch.from_numpy(task.questions['train'].question)


@pytest.mark.parametrize('tokens', [8192, 64, 16])
@pytest.mark.parametrize('pointwise', [1.0, 0.0])
@pytest.mark.parametrize('loss', ['listwise', 'lambda'])
def test_a_step_is_the_mean_over_its_questions_or_pairs(loss, pointwise, tokens):
    task = ranked_task(loss)
    given = dict(ranking_loss=loss, ranking_weight=0.25, pointwise_weight=pointwise)
    config = tiny_config('full_kd', alpha=0.4, micro_batch_tokens=tokens, **given)
    signal = online_signal(task, tiny_teacher())
    questions = question_of(task)

    def whole(s, t, batch):
        ours, theirs = (logits.diff(dim=1)[:, 0] for logits in (s, t))
        if loss == 'lambda':
            ranking = lambda_loss(ours, questions, batch.labels)
        else:
            ranking = 0.6 * listnet(ours, questions, batch.labels)
            ranking = ranking + 0.4 * listwise_kl(ours, theirs, questions, 2.0)
        hard = torch.nn.functional.cross_entropy(s, batch.labels)
        return pointwise * (0.6 * hard + 0.4 * soft_target_kl(s, t, 2.0)) + 0.25 * ranking

    value, theirs = in_plain_torch(task, signal, whole)
    losses, ours = gradient(task, config, signal)
    assert losses['total'] == pytest.approx(value, rel=1e-5)
    assert ('ranking_soft' in losses) == (loss == 'listwise')
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_rows_without_a_label_are_in_the_teachers_lists_alone():
    task = ranked_task('listwise')
    labels = task.labels['train']
    last = question_of(task).numpy() == 6
    task.labels['train'] = np.where(last, -100, labels)
    task.unlabelled = int(last.sum())
    counts = task.loss_counts('train', np.arange(len(labels)))
    assert counts == dict(hard=len(labels) - 2, soft=len(labels), ranking=6, ranking_soft=7)
    assert ranked_task('lambda').loss_counts('train', np.arange(len(labels))).keys() == {
        'hard',
        'soft',
        'ranking',
    }
    batch = task.batch('train', np.flatnonzero(last))
    signal = online_signal(task, tiny_teacher())(batch)
    outputs = tiny_teacher()(**batch.inputs)
    terms = task.loss_terms(outputs, batch, signal)
    assert terms['ranking'][0] == 0 == terms['ranking'][1] and terms['ranking_soft'][1] == 1


def test_questions_stay_whole_and_are_shuffled():
    task = ranked_task('listwise')
    config = tiny_config('full_student', ranking_loss='listwise', batch_size=4)
    _, steps = schedule_steps(task, config)
    question = question_of(task).numpy()
    orders = {}
    for step in steps:
        for q in set(question[step.index].tolist()):
            assert (question[step.index] == q).sum() == (question == q).sum()
        orders.setdefault(step.epoch, []).extend(dict.fromkeys(question[step.index].tolist()))
    assert sorted(orders[0]) == list(range(7)) == sorted(orders[1]) and orders[0] != orders[1]


def test_without_a_teacher_the_labels_have_the_whole_weight():
    config = tiny_config('full_student', ranking_loss='listwise', ranking_weight=0.5, pointwise_weight=0)
    task = as_configured(ranked_task('listwise'), config)
    assert loss_weights(task, config) == dict(hard=0.0, ranking=0.5)


@pytest.mark.parametrize(
    'given, sentence',
    [
        (dict(pointwise_weight=0.5), 'pointwise_weight=0.5 weighs the targets beside a ranking loss'),
        (
            dict(ranking_loss='lambda', ranking_weight=0, pointwise_weight=0),
            'pointwise_weight=0 and ranking_weight=0 leave nothing to learn',
        ),
        (dict(ranking_loss='listnet'), "ranking_loss='listnet' is refused"),
        (dict(task='text_classification', ranking_loss='listwise'), 'does not read it'),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(given, sentence):
    with pytest.raises(ConfigError) as e:
        make_config(**dict(mode='full_kd') | given)
    assert sentence in str(e.value) and '\n' not in str(e.value)

"""TinyBERT's and MiniLMv2's losses, against loops written from the papers' formulas: example by example
without padding, from the states and the weights of the layers.
"""

import math
import numpy as np
import pytest
import torch
import architectures
from helpers import SameWord, flat, tiny_bert, tiny_config, tiny_distilbert, tiny_teacher
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.machine import Machine
from kdnotes.core.parse import make_config
from kdnotes.distill.heads import SHAPED
from kdnotes.distill.intermediate import (
    attention_mse,
    attention_projections,
    attention_scores,
    capture_outputs,
    online_teacher,
    open_student,
    relation_heads,
    relation_kl,
)
from kdnotes.core.spec import Loss
from kdnotes.experiment.plan import plan
from kdnotes.train.distributed import Runtime
from kdnotes.train.loop import Objective, accumulate, loss_weights
from parity import tiny_narrow, tiny_slim

CPU = Runtime(torch.device('cpu'), 'fp32')
NAN = float('nan')
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])  # 7 real tokens


# ---- attention scores ----


def vectors(*widths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, width, generator=generator) for width in widths]


def tinybert_attention(query, key, heads, real):
    "A of each head of one example, by its elements."
    size = query.shape[1] // heads
    return [
        [
            [
                (query[i, h * size : (h + 1) * size] * key[j, h * size : (h + 1) * size]).sum()
                / math.sqrt(size)
                for j in range(real)
            ]
            for i in range(real)
        ]
        for h in range(heads)
    ]


def test_attention_by_loops():
    sq, sk, tq, tk = (v.double() for v in vectors(4, 4, 8, 8))
    sq.requires_grad_(), sk.requires_grad_()
    expected = 0.0
    for n in range(3):
        real = int(MASK[n].sum())
        ours = tinybert_attention(sq[n], sk[n], 2, real)
        theirs = tinybert_attention(tq[n], tk[n], 2, real)
        squares = [
            (ours[h][i][j] - theirs[h][i][j]) ** 2 for h in range(2) for i in range(real) for j in range(real)
        ]
        # MSE of an example's matrices, once for each of its tokens
        expected = expected + real * sum(squares) / len(squares)
    gradients = torch.autograd.grad(expected, [sq, sk])
    value = attention_mse((sq, sk), (tq, tk), MASK, heads=2)
    assert value.item() == pytest.approx(expected.item(), abs=1e-5) and value.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(value, [sq, sk]), gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_padding_and_autocast_change_no_attention_loss():
    pairs = [vectors(4, 4), vectors(8, 8)]
    for pair in pairs:
        pair[0].requires_grad_()
    value = attention_mse(*map(tuple, pairs), MASK, heads=2)
    [gradient] = torch.autograd.grad(value, [pairs[0][0]])
    real = MASK.bool()[..., None]
    dirty = [tuple(v.where(real, NAN) for v in pair) for pair in pairs]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        other = attention_mse(*dirty, MASK, heads=2)
    assert other.item() == pytest.approx(value.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(other, [pairs[0][0]])[0], gradient)
    assert pairs[1][0].grad is None and attention_mse(pairs[0], pairs[0], MASK, heads=2) == 0


@pytest.mark.parametrize('kind', [kind for kind in architectures.configs() if kind in SHAPED])
def test_the_scores_are_those_the_model_has_before_its_softmax(kind):
    torch.manual_seed(0)
    config = architectures.configs(n_layers=2)[kind]
    model = architectures.hf.AutoModel.from_config(config, attn_implementation='eager').eval()
    inputs = dict(
        input_ids=torch.tensor([[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    )
    both = [attention_projections(model, name)[1] for name in ('query', 'key')]
    with torch.no_grad(), capture_outputs(both) as recorded:
        shares = model(**inputs, output_attentions=True).attentions[1]
    mask = inputs['attention_mask'].bool()
    scores = attention_scores(*recorded, mask, heads=2)
    expected = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    rows = mask[:, None, :, None].expand_as(shares)
    torch.testing.assert_close(expected[rows], shares[rows], atol=1e-6, rtol=1e-5)


# ---- a training ----


def vectors_of(layer, state):
    "Queries, keys and values of a layer from the state below it."
    block = layer.attention
    if hasattr(block, 'q_lin'):
        return [linear(state) for linear in (block.q_lin, block.k_lin, block.v_lin)]
    return [linear(state) for linear in (block.self.query, block.self.key, block.self.value)]


def relations(v, heads):  # (length, width)
    parts = v.split(v.shape[1] // heads, dim=1)
    return [torch.softmax(part @ part.T / math.sqrt(part.shape[1]), -1) for part in parts]


def in_plain_torch(student, teacher, config, projections, heads, relation_heads):
    "Total loss of all training examples, one at a time."
    task = SameWord()
    terms = dict(hard=[], soft=[], hidden=[], attention=[], embedding=[], relation=[])
    tokens = 0
    for i in range(25):
        batch = task.batch('train', np.array([i]))
        tokens += batch.tokens
        with torch.no_grad():
            t = teacher.eval()(**batch.inputs, output_hidden_states=True)
        takes = {k: v for k, v in batch.inputs.items() if k != 'token_type_ids' or student is not None}
        if hasattr(student, 'distilbert'):
            takes.pop('token_type_ids')
        s = student(**takes, output_hidden_states=True)
        ours, theirs = ([h[0] for h in out.hidden_states] for out in (s, t))
        layers = (
            student.distilbert.transformer.layer
            if hasattr(student, 'distilbert')
            else student.bert.encoder.layer
        )
        if batch.labels[0] >= 0:
            terms['hard'].append(torch.nn.functional.cross_entropy(s.logits, batch.labels))
        p, q = (out.logits[0].div(2).softmax(-1) for out in (t, s))
        terms['soft'].append(4 * (p * (p / q).log()).sum())

        n = len(ours[0])
        carried = list(ours)
        if projections:
            carried = [h @ projections.matrices[str(i)].weight.T for i, h in enumerate(ours)]
        terms['embedding'].append(n * torch.nn.functional.mse_loss(carried[0], theirs[0]))
        for layer, of in zip((1, 2), config.loss.hidden_layers):
            terms['hidden'].append(n * torch.nn.functional.mse_loss(carried[layer], theirs[of + 1]) / 2)
            sq, sk, _ = vectors_of(layers[layer - 1], ours[layer - 1])
            tq, tk, _ = vectors_of(teacher.bert.encoder.layer[of], theirs[of])
            for a, b, c, d in zip(*(v.split(v.shape[1] // heads, dim=1) for v in (sq, sk, tq, tk))):
                of_head = a @ b.T / math.sqrt(a.shape[1]) - c @ d.T / math.sqrt(c.shape[1])
                terms['attention'].append(n * of_head.square().mean() / heads / 2)
        of = config.loss.relation_layer % 2
        for mine, its in zip(
            vectors_of(layers[-1], ours[1]), vectors_of(teacher.bert.encoder.layer[of], theirs[of])
        ):
            for r_s, r_t in zip(relations(mine, relation_heads), relations(its, relation_heads)):
                terms['relation'].append((r_t * (r_t / r_s).log()).sum() / relation_heads)
    counts = dict(hard=len(terms['hard']), soft=25)
    means = {name: sum(values) / counts.get(name, tokens) for name, values in terms.items()}
    weights = dict(hard=0.5, soft=0.5, hidden=0.7, attention=0.4, embedding=2.0, relation=3.0)
    return sum(weights[name] * value for name, value in means.items()), means


ALL = dict(
    signal='online',
    student_layers=(0, 1),
    hidden_loss='mse',
    hidden_weight=0.7,
    attention_loss='mse',
    attention_weight=0.4,
    embedding_loss='mse',
    embedding_weight=2.0,
    relation_loss='qkv',
    relation_weight=3.0,
)


@pytest.mark.parametrize(
    'student, more, heads',
    [
        (tiny_slim, dict(relation_heads=8), 8),
        (tiny_bert, dict(hidden_layers=(1, 1), relation_layer=0), 2),
        (tiny_distilbert, dict(relation_heads=1), 1),
    ],
)
def test_a_step_is_what_the_formulas_give(student, more, heads):
    config = tiny_config('full_kd', micro_batch_tokens=64, **ALL | more)
    signal = online_teacher(SameWord(), tiny_teacher(), config)
    task, ours = open_student(SameWord(), student(), config, signal, seed=4)
    plain = student()
    projections = ours.projections
    theirs, means = in_plain_torch(plain, tiny_teacher(), config, projections, 2, heads)
    wanted = torch.autograd.grad(
        theirs, [*plain.parameters(), *(projections.parameters() if projections else ())]
    )
    objective = Objective(task, config, CPU, loss_weights(task, config), signal)
    losses, *_ = accumulate(ours, objective, CPU.scaler(), np.arange(25))
    assert task.loss_counts('train', np.arange(25)).keys() >= means.keys()
    for name, value in means.items():
        assert losses[name].item() == pytest.approx(value.item(), rel=2e-6, abs=1e-6), name
        assert value > 1e-4, name
    np.testing.assert_allclose(flat(p.grad for p in ours.parameters()), flat(wanted), rtol=2e-6, atol=1e-6)
    assert (projections is None) == (student is not tiny_slim)
    if projections:
        assert sorted(projections.matrices) == ['0', '1', '2']


@pytest.mark.parametrize('name', ['attention_loss', 'embedding_loss'])
def test_one_loss_alone(name):
    config = tiny_config('full_kd', signal='online', student_layers=(0, 1), **{name: 'mse'})
    signal = online_teacher(SameWord(), tiny_teacher(), config)
    task, ours = open_student(SameWord(), tiny_bert(), config, signal, seed=4)
    weights = loss_weights(task, config)
    assert set(weights) == {'hard', 'soft', name.removesuffix('_loss')}
    batch = task.batch('train', np.arange(4))
    answers = signal(batch)
    assert len(answers) == 1 + (4 if name == 'attention_loss' else 1)
    assert task.loss_terms(ours(**batch.inputs), batch, answers).keys() == weights.keys()


# ---- what is refused ----


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(attention_loss='mse'), ["attention_loss='mse' needs signal='online'"]),
        (dict(embedding_loss='mse'), ["embedding_loss='mse' needs signal='online'"]),
        (dict(attention_weight=2.0), ['attention_weight=2 weighs nothing; choose an attention_loss too']),
        (dict(relation_heads=4), ['relation_heads=4 is not looked at; choose a relation_loss too']),
        (dict(relation_layer=2), ['relation_layer=2 is not looked at']),
        (
            dict(signal='online', attention_loss='mse', profile='paper', student_init='hub'),
            ["attention_loss needs hidden_layers with student_init='hub'"],
        ),
        (dict(mode='full_student', signal='online', attention_loss='mse'), ['needs a teacher']),
        (
            dict(signal='online', relation_loss='qkv', student_init='teacher_pretrained', teachers='a,b'),
            ['relation_loss looks at the layers of one teacher'],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(ConfigError) as e:
        make_config(**dict(mode='full_kd') | given)
    assert all(word in str(e.value) for word in words) and '\n' not in str(e.value)


def test_models_that_cannot_be_compared_are_refused_when_the_run_is_planned(small_teacher):
    def planned(**given):
        more = dict(mode='full_kd', corpus='embedded', signal='online', teacher=str(small_teacher))
        return plan(make_config(**more | given), Machine('cpu', 2))

    with pytest.raises(KdnotesError, match='the student has 1 of them and its teacher 2'):
        planned(attention_loss='mse', heads=1)
    with pytest.raises(KdnotesError, match='relation_heads=5 does not divide'):
        planned(relation_loss='qkv', relation_heads=5)
    with pytest.raises(KdnotesError, match='relation_layer=7 must be a number from 0 to'):
        planned(relation_loss='qkv', relation_layer=7)
    assert planned(attention_loss='mse').config.loss.hidden_layers is not None


def test_relation_heads_divide_both():
    slim, full, narrow = (model().config for model in (tiny_slim, tiny_bert, tiny_narrow))
    assert relation_heads(Loss(), narrow, full) == 1 and relation_heads(Loss(), slim, full) == 2
    asked = Loss(relation_loss='qkv', relation_heads=16, signal='online')
    assert relation_heads(asked, slim, full) == 16
    with pytest.raises(ConfigError, match="does not divide 16, the width of the student's attention"):
        relation_heads(asked.model_copy(update=dict(relation_heads=32)), slim, full)


def test_relations_of_more_heads_than_attention_has():
    student, teacher = vectors(8, 12)
    value = relation_kl(student, teacher, MASK, 4)
    expected = 0.0
    for n in range(3):
        real = int(MASK[n].sum())
        for q, p in zip(relations(student[n, :real], 4), relations(teacher[n, :real], 4)):
            expected += (p * (p / q).log()).sum() / 4
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)

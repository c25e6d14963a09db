"""The last layer for the positions somebody reads is the plain one at these positions: in logits and
gradients, in each number format, with dropout in distribution. Whoever looks at layers gets all positions.
"""

import contextlib
import threading
import numpy as np
import pytest
import torch
import transformers as hf
from architectures import configs, random_model
from helpers import CPU, SameWord, tiny_bert, tiny_config, tiny_teacher
from kinds import one_of_each
from parity import intermediate
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.distill.heads import attentions, layers_of
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.architectures import call
from kdnotes.distill.needed_positions import (
    first_position,
    only_positions,
)
from kdnotes.distill.students import head_importance
from kdnotes.distill.teacher_cache import teacher_signal
from kdnotes.experiment.plan import plan
from kdnotes.train.cpu_fast_path import DropoutRng, FastPath
from kdnotes.train.evaluation import predict
from kdnotes.train.loop import train

KNOWN = ('bert', 'roberta', 'xlm-roberta', 'camembert', 'electra', 'distilbert')
OTHERS = ('mpnet', 'deberta', 'deberta_v2', 'modernbert')


def config_of(kind: str, dropout: float = 0.0):
    known = configs(dropout=dropout)
    if kind in known:
        return known[kind]
    of_roberta = known['roberta'].to_dict()
    of_roberta.pop('model_type')
    return dict(zip(KNOWN[2:4], (hf.XLMRobertaConfig, hf.CamembertConfig)))[kind](**of_roberta)


def batch(length: int = 21) -> dict[str, torch.Tensor]:
    "Texts with padding and without."
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(length) < torch.tensor([[length], [length // 2], [5], [1]])).long()
    ids = torch.randint(5, 50, mask.shape, generator=generator) * mask
    return dict(input_ids=ids, attention_mask=mask, token_type_ids=(torch.arange(length) > 2) * mask)


def gradients(model, inputs, dtype=None) -> dict[str, torch.Tensor]:
    "Logits, and the gradient of every parameter."
    model.zero_grad(set_to_none=True)
    with torch.autocast('cpu', dtype) if dtype else contextlib.nullcontext():
        logits = call(model, inputs).logits
    (logits.double().square().sum() + logits.double()[:, 0].sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {'logits': logits.detach()} | found


@pytest.fixture(params=['without keys', 'with keys'])
def keys(request, monkeypatch):
    "Both ways of attending in the last layer; on a GPU it is always the second."
    if request.param == 'with keys':
        monkeypatch.setattr('kdnotes.distill.needed_positions.without_keys', lambda device: False)


# equality


@pytest.mark.parametrize('heads', ['all', 'fewer'])
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('kind', one_of_each(KNOWN, lambda kind: kind == 'distilbert'))
def test_logits_and_gradients_are_those_of_the_plain_forward(kind, training, attention, heads, keys):
    from kdnotes.distill.heads import set_heads

    model = random_model(config_of(kind)).double()
    if heads == 'fewer':
        model = set_heads(model, [[1]] * 4)
    model.set_attn_implementation(attention)
    model.train(training)
    for inputs in (batch(), {k: v[:1] for k, v in batch().items()}):
        plain = gradients(model, inputs)
        with first_position(model):
            first = gradients(model, inputs)
        assert first.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(first[name], plain[name], atol=1e-13, rtol=1e-12)
        again = gradients(model, inputs)
        assert all(torch.equal(again[name], plain[name]) for name in plain), 'the model is as it was'


@pytest.mark.parametrize('fast', [True, False])
@pytest.mark.parametrize('kind', one_of_each(KNOWN, lambda kind: kind == 'distilbert'))
def test_in_bf16_they_are_as_near_to_fp32_as_the_plain_ones(kind, fast, keys):
    model = random_model(config_of(kind)).train()
    exact = gradients(model, batch())
    path = FastPath(model, None, DropoutRng(0)) if fast else None
    plain = gradients(model, batch(), torch.bfloat16)
    with first_position(model):
        first = gradients(model, batch(), torch.bfloat16)
    if fast:
        path.end()

    def error(found):
        return max(float((found[n] - exact[n]).norm() / (exact[n].norm() + 1e-2)) for n in exact)

    assert error(plain) > 0
    assert error(first) <= 2 * error(plain) + 0.01


# dropout


def moments(model, n: int, first: bool) -> torch.Tensor:  # (2, n, width)
    "The first position's output and its square, of one text n times."
    inputs = {k: v[1:2].expand(n, -1) for k, v in batch(8).items() if k != 'token_type_ids'}
    with torch.no_grad(), only_positions(model) if first else contextlib.nullcontext():
        states = model(**inputs).last_hidden_state[:, 0]
    return torch.stack([states, states.square()])


@pytest.mark.parametrize('fast', [True, False])
@pytest.mark.parametrize('kind', one_of_each(KNOWN, lambda kind: kind == 'distilbert'))
def test_dropout_of_the_last_layer_has_the_same_mean_and_second_moment(kind, fast, keys):
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config_of(kind, dropout=0.3)).train()
    last = set(layers_of(model)[-1].modules())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module not in last:
            module.p = 0.0
    with torch.no_grad():
        # values that differ between tokens, so that it matters which of them attention drops
        value = getattr(attentions(model)[-1].module, attentions(model)[-1].inputs[2])
        value.weight.mul_(3)
        value.bias.normal_()
    path = FastPath(model, None, DropoutRng(0)) if fast else None
    n = 6000
    plain, first = (moments(model, n, first) for first in (False, True))
    if fast:
        path.end()
    spread = ((plain.var(1) + first.var(1)) / n).sqrt()
    assert plain[0].std(0).min() > 0.01, 'dropout does something'
    assert ((plain.mean(1) - first.mean(1)) / spread).abs().max() < 4.5


# who takes which path


class Adapted(torch.nn.Linear):
    "A linear layer that adds something, as adapters do."

    def forward(self, x):
        return super().forward(x) + x.flip(-1)


def test_projections_that_are_not_plain_are_called():
    model = random_model(config_of('bert')).double()
    own = attentions(model)[-1].module
    for name in ('key', 'value'):
        plain = getattr(own, name)
        adapted = Adapted(plain.in_features, plain.out_features).double()
        setattr(own, name, adapted)
        whole = gradients(model, batch())
        with first_position(model):
            first = gradients(model, batch())
        for parameter in whole:
            torch.testing.assert_close(first[parameter], whole[parameter], atol=1e-13, rtol=1e-12)
        setattr(own, name, plain)


@pytest.mark.parametrize('when', ('forward', 'forward_pre', 'full_backward', 'full_backward_pre'))
def test_whoever_hooks_into_keys_gets_them(when):
    model = random_model(config_of('bert'))
    found = []

    def note(module, *seen):
        tensor = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
        found.append(tensor.shape[1])

    getattr(attentions(model)[-1].module.key, f'register_{when}_hook')(note)
    with first_position(model):
        gradients(model, batch())
    assert found == [21]


@contextlib.contextmanager
def queries(model):
    "How many positions the last layer's query is computed at, at each forward."
    found = []
    attention = attentions(model)[-1]
    query = getattr(attention.module, attention.inputs[0])
    hook = query.register_forward_hook(lambda module, args, output: found.append(output.shape[1]))
    yield found
    hook.remove()


def trained(parameters: dict, student=None) -> tuple[list[int], list[int]]:
    "The positions of a student's last queries, and of its teacher's."
    config = tiny_config('full_kd', **dict(signal='online') | parameters)
    student = student or tiny_bert()
    teacher = tiny_teacher()
    task = SameWord()
    with queries(student) as of_student, queries(teacher) as of_teacher:
        train(task, student, config, CPU, lambda kind, **row: None, online_teacher(task, teacher, config))
    return of_student, of_teacher


def test_a_training_its_evaluations_and_its_teacher_compute_the_first_position():
    student, teacher = trained({})
    assert set(student) == set(teacher) == {1} and len(student) > len(teacher), 'evaluations on the way too'


@pytest.mark.parametrize('name', ['hidden', 'relation'])
def test_a_training_that_looks_at_layers_computes_all_positions(name):
    both = intermediate('mse')
    other = {'hidden': 'relation', 'relation': 'hidden'}[name]
    alone = {key: value for key, value in both.items() if not key.startswith(other)}
    student, teacher = trained(alone)
    of_evaluations = [n for n in student if n == 1]
    assert min(teacher) > 1 and len(student) - len(of_evaluations) == len(teacher)


def test_scores_and_a_signal_compute_the_first_position_and_are_the_plain_ones():
    model = tiny_teacher().eval()
    task = SameWord()
    first = task.batch('train', np.arange(9))
    with torch.no_grad():
        logits = model(**first.inputs).logits
    with queries(model) as found:
        scores = predict(model, task, 'train', CPU)
        signal = teacher_signal(task, model, first)['logits']
    assert set(found) == {1}
    torch.testing.assert_close(signal, logits, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(scores[:9, 0], logits.diff(dim=1)[:, 0], atol=1e-5)


def test_the_importance_of_heads_is_that_of_the_plain_forward():
    model = tiny_bert()
    with queries(model) as found:
        head_importance(model, SameWord(), tiny_config('full_student'))
    assert min(found) > 1


@pytest.mark.parametrize('kind', OTHERS)
def test_other_architectures_keep_their_forward(kind):
    model = random_model(configs(dropout=0.0)[kind]).double()
    plain = gradients(model, batch())
    with first_position(model):
        assert not [m for m in model.modules() if 'forward' in vars(m)]
        inside = gradients(model, batch())
    assert all(torch.equal(inside[name], plain[name]) for name in plain)


@pytest.mark.parametrize('asked', ['output_hidden_states', 'output_attentions'])
def test_a_model_that_gives_more_keeps_its_forward(asked):
    model = random_model(config_of('bert')).eval()
    model.set_attn_implementation('eager')
    setattr(model.config, asked, True)
    with first_position(model), queries(model) as found:
        call(model, batch())
    assert found == [21]


@pytest.mark.parametrize(
    'parameters, words',
    [
        (dict(mode='full_kd'), 'at the first token only'),
        (dict(mode='baseline'), 'at the first token only'),
        (dict(mode='baseline', task='text_classification'), 'at the first token only'),
        (
            dict(mode='full_kd', signal='online', hidden_loss='mse'),
            'at all tokens: hidden_loss reads all of them',
        ),
        (
            dict(mode='full_kd', signal='online', relation_loss='values'),
            'at all tokens: relation_loss reads all of them',
        ),
        (
            dict(mode='full_kd', signal='online', hidden_loss='mse', relation_loss='values'),
            'at all tokens: hidden_loss and relation_loss read all of them',
        ),
        (dict(mode='baseline', task='masked_lm'), 'at all tokens: the head reads more than the first'),
        (dict(mode='baseline', task='extractive_qa'), 'at all tokens: the head reads more than the first'),
    ],
)
def test_a_plan_says_at_which_tokens_the_last_layer_is_computed(parameters, words):
    planned = plan(make_config(**dict(corpus='embedded') | parameters), Machine('cpu', 2))
    assert f'last layer: {words}' in planned.explain()


@pytest.mark.parametrize('asked', ['hidden_states', 'attentions'])
def test_what_is_asked_for_is_whole(asked):
    model = random_model(config_of('bert')).eval()
    model.set_attn_implementation('eager')  # which has attentions to give
    inputs = batch() | {f'output_{asked}': True}
    with torch.no_grad():
        plain = model(**inputs)[asked]
        with first_position(model):
            inside = model(**inputs)[asked]
    assert len(inside) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside))


def test_another_thread_has_the_plain_model():
    model = hf.AutoModel.from_config(config_of('bert')).eval()
    lengths = []

    def other():
        with torch.no_grad():
            lengths.append(model(**batch()).last_hidden_state.shape[1])
            with only_positions(model):
                lengths.append(model(**batch()).last_hidden_state.shape[1])

    with only_positions(model, torch.zeros(4, 2, dtype=torch.long)), torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        lengths.append(model(**batch()).last_hidden_state.shape[1])
    assert lengths == [21, 1, 2]

"""Students of any shape, and the settings of model and optimizer that reach the trainer:
each parameter changes what it should, and nothing else.
"""

import copy
import json
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from architectures import write_teacher
from helpers import CPU, SameWord, one_sentence, tiny_bert, tiny_config, trained
from kinds import one_of_each
from parity import Run, World
from small_runs import write_corpus, write_model
from kdnotes.core.arms import MODES, PRESETS
from kdnotes.core.config import ConfigError
from kdnotes.core.spec import PATHS, value_of
from kdnotes.core.parse import make_config, preset_values
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.distill.heads import (
    attentions,
    is_pruned,
    layers_of,
    n_heads,
    linear_subset,
    set_heads,
    whole_model,
)
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.architectures import apply_settings, head_dropout, model_settings
from kdnotes.distill.weights import ModelError
from kdnotes.distill.architectures import count_parameters, forward_flops, weights_sha256
from kdnotes.distill.models import load_model, save_model
from kdnotes.distill.students import choose_layers
from kdnotes.distill.models import load_given
from kdnotes.distill.students import (
    check_shape,
    random_heads,
    head_importance,
    most_important,
    set_depth,
    shape_student,
)
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan, transfer_config
from kdnotes.experiment.study_plan import plan_study
from kdnotes.experiment.worker import _model_of_run, starting_model
from kdnotes.results.schema import RecordError, check_read, check_record
from kdnotes.results.runs import RunFolder
from kdnotes.train.cpu_fast_path import fast_path
from kdnotes.train.distributed import Runtime
from kdnotes.train.evaluation import evaluation_batches, predict
from kdnotes.train.loop import train
from kdnotes.train.state import make_optimizer
from handmade import make_record

pytestmark = pytest.mark.usefixtures('home')

ON = Machine('cpu', 2)
HEAD = 'AutoModelForSequenceClassification'
SIZES = dict(
    vocab_size=80,
    hidden_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=32,
    max_position_embeddings=40,
    initializer_range=0.1,
)
CONFIGS = {
    'bert': hf.BertConfig(**SIZES),
    'roberta': hf.RobertaConfig(**SIZES, pad_token_id=0),
    'electra': hf.ElectraConfig(**SIZES, embedding_size=16),
    'distilbert': hf.DistilBertConfig(
        vocab_size=80,
        dim=24,
        n_layers=4,
        n_heads=4,
        hidden_dim=32,
        max_position_embeddings=40,
        initializer_range=0.1,
    ),
}
IDS = torch.arange(3, 33).view(3, 10)


def tiny(kind='bert', auto_class=HEAD):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(hf, auto_class).from_config(copy.deepcopy(CONFIGS[kind])).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def shaped(kind='bert', **parameters):
    return shape_student(tiny(kind), make_config(**parameters))


def is_same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- the shape ----


@pytest.mark.parametrize('kind', one_of_each(CONFIGS, lambda kind: kind == 'distilbert'))
@pytest.mark.parametrize('by', ['seed', 'importance'])
def test_pruned_is_the_same_model_with_these_heads_masked(kind, by):
    whole = tiny(kind)
    rng = np.random.default_rng(0)
    importance = torch.from_numpy(rng.random((4, 4)))
    pruned = shape_student(copy.deepcopy(whole), make_config(heads=2, head_choice=by), lambda _: importance)
    kept = pruned.config.kept_heads
    assert kept == (random_heads(4, 4, 2, 42) if by == 'seed' else most_important(importance, 2))
    size = attentions(whole)[0].size

    def mask(layer):
        keep = torch.zeros(4).index_fill(0, torch.tensor(kept[layer]), 1).repeat_interleave(size)
        return lambda module, args: (args[0] * keep,)

    unmasked = logits(whole)
    for layer, attention in enumerate(attentions(whole)):
        attention.dense.register_forward_pre_hook(mask(layer))
    assert (logits(whole) - unmasked).abs().max() > 1e-3
    torch.testing.assert_close(logits(pruned), logits(whole), atol=1e-6, rtol=0)
    torch.testing.assert_close(logits(whole_model(pruned)), logits(whole), atol=1e-6, rtol=0)
    assert count_parameters(whole) - count_parameters(pruned) == 4 * 2 * size * (4 * 24 + 3)


def tiny_shaped():
    student = shape_student(tiny_bert(dropout=0.1), make_config(layers=3, heads=1, feed_forward=20))
    assert is_pruned(student)
    return student


@pytest.mark.parametrize('at', [1, 5])
def test_a_training_of_a_shaped_student_is_taken_up_bit_for_bit(tmp_path, at):
    whole = trained(model=tiny_shaped())
    assert np.isfinite(list(whole.losses.values())).all()
    assert trained(model=tiny_shaped(), folder=tmp_path, stop_after=at).result is None
    again = trained(model=tiny_shaped(), folder=tmp_path)
    assert (again.weights == whole.weights).all() and again.losses.items() <= whole.losses.items()
    assert [*again.losses] == [*whole.losses][at:]


@pytest.mark.exhaustive
def test_two_ranks_train_a_pruned_student_as_one_does(tmp_path):
    world = World(tmp_path)
    one = world[Run(student='pruned')][0]
    two = world[Run(student='pruned', ranks=2)]
    assert (two[0]['update'] == two[1]['update']).all()
    np.testing.assert_allclose(two[0]['losses'], one['losses'], atol=1e-5)
    np.testing.assert_allclose(two[0]['update'], one['update'], atol=2e-4)


def test_new_heads_are_filled_where_they_read_and_where_they_are_read():
    attention = attentions(set_heads(tiny_bert(), [[0, 1, 2], [0, 1, 2]], fill=torch.ones))[0]
    size = attention.size
    for name in attention.inputs:
        linear = getattr(attention.module, name)
        assert (linear.weight[-size:] == 1).all() and (linear.bias[-size:] == 0).all()
    assert (attention.dense.weight[:, -size:] == 1).all()


def test_a_layer_without_bias_is_picked_from_without():
    linear = nn.Linear(3, 4, bias=False)
    some = linear_subset(linear, rows=[2, 0], columns=[1])
    assert some.bias is None
    assert torch.equal(some.weight, linear.weight[[2, 0], 1:2])


@pytest.mark.parametrize('shape', [dict(layers=6), dict(heads=5), dict(feed_forward=40)])
def test_new_weights_are_drawn_by_the_runs_seed(shape):
    first, same, other = (shaped(**shape, seed=seed) for seed in (0, 0, 1))
    assert is_same(first, same) and not is_same(first, other)
    assert not is_pruned(first)


def test_importance_is_what_taking_a_head_out_would_change():
    "For each example the gradient of the mask, here by finite differences."
    task = SameWord(n=8)
    model = tiny_bert().eval()
    config = tiny_config('full_student', batch_size=8)
    importance = head_importance(model, task, config)
    assert torch.allclose(importance.norm(dim=1), torch.ones(2).double())
    model.double()
    found = torch.zeros(2, 2, dtype=torch.float64)
    step = 1e-2  # the loss is of float32
    for i in range(8):
        batch = task.batch('train', np.array([i]))
        for layer, attention in enumerate(attentions(model)):
            for head in range(2):
                values = []
                for change in (step, -step):
                    scale = torch.ones(2, dtype=torch.float64)
                    scale[head] += change
                    hook = attention.dense.register_forward_pre_hook(
                        lambda m, args, s=scale: (args[0] * s.repeat_interleave(16),)
                    )
                    with torch.no_grad():
                        loss, _ = task.loss_terms(model(**batch.inputs), batch, None)['hard']
                    values.append(float(loss))
                    hook.remove()
                found[layer, head] += abs(values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(importance, found / found.norm(dim=1, keepdim=True), atol=1e-3, rtol=0)
    assert all(p.grad is None for p in model.parameters())


class InPairs(SameWord):
    "Two examples that belong together, and which ones were asked for at once."

    def __init__(self):
        super().__init__(n=8)
        self.asked = []

    def groups(self, split):
        return super().groups(split) // 2

    def batch(self, split, index, epoch=0):
        self.asked.append(np.sort(index).tolist())
        return super().batch(split, index, epoch)


def test_importance_sees_examples_together_that_belong_together():
    task = InPairs()
    head_importance(tiny_bert(), task, tiny_config('full_student', micro_batch_tokens=16))
    assert sorted(task.asked) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_of_equal_heads_and_neurons_the_first_are_kept():
    "More than 16 of them: fewer are left in their order by a sort that is not stable, too."
    assert most_important(torch.zeros(2, 24), 3) == [[0, 1, 2], [0, 1, 2]]
    model = tiny()
    inner = layers_of(model)[0].intermediate.dense
    bits = torch.arange(32)[:, None] >> torch.arange(24) & 1
    with torch.no_grad():
        inner.weight.copy_(1 - 2 * bits)  # no two rows are the same, and their norms are
        inner.bias.zero_()
        layers_of(model)[0].output.dense.weight.fill_(1)
    kept = layers_of(shape_student(model, make_config(feed_forward=20)))[0].intermediate.dense.weight
    assert torch.equal(kept, inner.weight[:20])


@pytest.mark.parametrize('kind', one_of_each(CONFIGS, lambda kind: kind == 'distilbert'))
@pytest.mark.parametrize(
    'pruning', [dict(heads=3), dict(heads=6), dict(feed_forward=20, layers=2), dict(layers=5)]
)
def test_flops_are_those_that_pytorch_counts(kind, pruning):
    whole = shaped(kind, **pruning)
    whole.set_attn_implementation('eager')  # PyTorch counts it
    student = whole.base_model
    if getattr(student, 'pooler', None) is not None:
        student.pooler = None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        student(IDS)
    assert forward_flops(student.config, [IDS.shape[1]] * len(IDS)) == counter.get_total_flops()


# ---- saved and loaded ----


@pytest.mark.parametrize(
    'auto_class, kind',
    [
        (HEAD, 'distilbert'),
        ('AutoModelForMaskedLM', 'roberta'),
        ('AutoModelForQuestionAnswering', 'electra'),
    ],
)
def test_saved_loaded_and_equal(tmp_path, kind, auto_class):
    student = shape_student(tiny(kind, auto_class), make_config(layers=3, heads=2, feed_forward=20))
    save_model(student, tmp_path / 'pruned')
    save_model(whole_model(student), tmp_path / 'model')
    again = load_given(tmp_path / 'pruned', auto_class)
    assert weights_sha256(again) == weights_sha256(student) and type(again) is type(student)
    assert (
        json.loads((tmp_path / 'pruned/config.json').read_text())['kept_heads'] == student.config.kept_heads
    )
    plain = getattr(hf, auto_class).from_pretrained(tmp_path / 'model').eval()
    with torch.no_grad():
        for ours, theirs in zip(student.eval()(IDS).values(), plain(IDS).values()):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    # transformers' own loader does not take the small one for another model
    with pytest.raises(RuntimeError):
        getattr(hf, auto_class).from_pretrained(tmp_path / 'pruned')


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_leaves_a_plain_model_a_pruned_one_and_goes_on_from_it(ranks, tmp_path, request):
    if ranks == 1:
        request.getfixturevalue('rank_here')
    folder, corpus = write_model(tmp_path / 'model'), write_corpus(tmp_path / 'corpus')
    common = dict(
        mode='full_student',
        corpus=str(corpus),
        teacher=str(folder),
        student_init='teacher_pretrained',
        threads_per_rank=1,
        smoke=True,
        study='shapes',
        layers=3,
        heads=1,
        feed_forward=40,
        head_choice='importance',
        dropout=0.2,
        warmup_steps=2,
        eval_batch_size=7,
    )
    planned = plan(make_config(**common, ranks=ranks), ON)
    record = execute(planned)
    run = RunFolder('shapes', planned.run_id)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(run.path / 'model').eval()
    pruned = load_given(run.path / 'pruned', HEAD)
    torch.testing.assert_close(logits(pruned), logits(plain), atol=1e-6, rtol=0)
    assert record['kept_heads'] == pruned.config.kept_heads and len(record['kept_heads']) == 3
    assert record['params_total'] == count_parameters(pruned) < count_parameters(plain)
    assert record['model_sha256'] == weights_sha256(plain)
    assert all(v > 0 for v in record['latency'].values())
    assert (
        0
        < record['operations']['executed_flops_per_example']
        < record['operations']['model_flops_per_example']
    )
    assert pruned.config.hidden_dropout_prob == 0.2 and record['settings']['warmup_steps'] == 2
    task = SimpleNamespace(auto_class=HEAD, model_kwargs=dict(num_labels=2))
    assert is_same(_model_of_run(task, planned.run_id), pruned)
    # found done, by the same name
    assert execute(plan(make_config(**common, ranks=ranks), ON)) == record
    assert {'model/model.safetensors', 'pruned/model.safetensors'} <= run.record()['files'].keys()
    # a file that somebody changed is refused
    save_model(tiny(), run.path / 'model')
    with pytest.raises(Exception, match='is not what its run wrote'):
        _model_of_run(task, planned.run_id)


# ---- the teacher does not see it ----

SHAPE = dict(layers=2, heads=6, feed_forward=100, pruning_seed=7)


@pytest.mark.parametrize('setting', one_of_each(['own', 'shared']))
def test_the_shape_never_reaches_the_teacher(setting):
    for mode in ('full_student', 'full_kd'):
        plans = [
            plan(make_config(mode=mode, corpus='embedded', teacher_setting=setting, **shape), ON)
            for shape in ({}, SHAPE)
        ]
        assert plans[0].run_id != plans[1].run_id
        assert plans[0].teacher.run_id == plans[1].teacher.run_id
    with pytest.raises(ConfigError, match="mode='baseline' has the network of the teacher"):
        make_config(mode='baseline', corpus='embedded', **SHAPE)


def test_a_study_shapes_its_students_alone():
    with_shape = {p.config.where.mode: p for p in plan_study(1, 'all', corpus='embedded', **SHAPE)}
    without = {p.config.where.mode: p for p in plan_study(1, 'all', corpus='embedded')}
    for mode, p in with_shape.items():
        same = p.run_id == without[mode].run_id
        assert same == (MODES[mode].network == 'teacher'), mode
        assert not p.teacher or p.teacher.run_id == with_shape['baseline'].run_id
    with pytest.raises(ConfigError, match='heads would play no part'):
        plan_study(1, 'baseline', corpus='embedded', heads=6)


# ---- refusals ----


@pytest.mark.parametrize(
    'parameters, said',
    [
        (dict(heads=0), 'heads=0 is refused'),
        (dict(heads=13), 'heads=13 is refused'),
        (dict(layers=0), 'layers=0 is refused'),
        (dict(layers=21), 'layers=21 is refused'),
        (dict(feed_forward=0), 'feed_forward=0 is refused'),
        (dict(layers=2, student_layers=(1, 3)), 'leave one of them out'),
        (dict(pruning_seed=3), 'say with heads=<n> how many stay'),
        (dict(head_choice='importance'), 'say with heads=<n> how many stay'),
        (dict(heads=3, head_choice='importance', pruning_seed=3), 'draws no heads'),
        (dict(warmup_steps=3, warmup_fraction=0.1), 'leave one of them out'),
        (dict(dropout=1.0), 'dropout=1.0 is refused'),
        (dict(attention_dropout=-0.1), 'attention_dropout=-0.1 is refused'),
        (dict(initializer_range=0), 'initializer_range=0 is refused'),
        (dict(warmup_steps=-1), 'warmup_steps=-1 is refused'),
        (dict(eval_batch_size=0), 'eval_batch_size=0 is refused'),
        (dict(preset='sigopt_baseline'), 'use task=extractive_qa, or leave preset out'),
        (dict(preset='unheard'), "preset='unheard' is refused"),
        (
            dict(layers=2, hidden_loss='mse', signal='online', hidden_layers=(1, 3, 5)),
            'for each of the 2 layers',
        ),
        (dict(task='masked_lm', eval_batch_size=3), 'is not read by task'),
    ],
)
def test_what_cannot_be_meant_is_refused(parameters, said):
    with pytest.raises(ConfigError) as e:
        make_config(**parameters)
    assert said in one_sentence(e)


@pytest.mark.parametrize(
    'parameters, said',
    [
        (dict(layers=8, hidden_loss='mse', signal='online'), 'which of the teacher\'s they learn from'),
        (
            dict(layers=8, hidden_loss='mse', signal='online', hidden_layers=(1, 3, 9, 5, 1, 1, 1, 1)),
            'from 0 to 5',
        ),
    ],
)
def test_what_does_not_fit_the_teacher_is_refused_in_the_plan(parameters, said):
    with pytest.raises(ConfigError) as e:
        plan(make_config(mode='full_kd', corpus='embedded', **parameters), ON)
    assert said in one_sentence(e)


def test_an_architecture_that_cannot_be_shaped_or_has_no_such_dropout(tmp_path):
    modern = hf.AutoModelForSequenceClassification.from_config(
        hf.ModernBertConfig(
            vocab_size=80,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=40,
            pad_token_id=0,
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    folder = save_model(modern, tmp_path / 'modern')

    def check(**parameters):
        config = make_config(teacher=str(folder), student_layers=(0, 1, 2), **parameters)
        return check_shape(config, HEAD)

    for parameters in (dict(heads=2), dict(feed_forward=8)):
        with pytest.raises(ModelError) as e:
            check(**parameters)
        assert f"{[*parameters][0]} cannot be chosen for the architecture 'modernbert'" in one_sentence(e)
    with pytest.raises(ModelError) as e:
        check_shape(make_config(teacher=str(folder), layers=5), HEAD)
    assert 'layers=5, more than the 3 that there are' in one_sentence(e)
    with pytest.raises(ModelError) as e:
        check(dropout=0.1)
    assert "dropout=0.1 cannot be set, since the config of the architecture 'modernbert'" in one_sentence(e)
    assert check(attention_dropout=0.1)[0].config.attention_dropout == 0.1


# ---- one test a parameter ----


def worker_start(config, task=None):
    "What a rank begins with: the tiny model of a finished run, cut and shaped as asked."
    model = tiny_bert()
    job = dict(initial=dict(teacher_run_id='x', layers=[0, 1]), teacher_run_id='x')
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr('kdnotes.experiment.worker._model_of_run', lambda task, run_id: model)
        started, sha256 = starting_model(config, task or SameWord(), job)
    assert sha256 == weights_sha256(started)
    return started


def start(**parameters):
    given = dict(threads_per_rank=1, epochs=2, learning_rate=3e-3, batch_size=8, student_layers=(0, 1))
    asked = make_config(mode='full_student', ranks=1, **given | parameters)
    return worker_start(resolve(asked, ON, 'embedded', teacher_depth=2))


def changed_settings(optimizer) -> dict:
    return {
        name: [group[name] for group in optimizer.param_groups]
        for name in ('lr', 'betas', 'eps', 'weight_decay')
    }


@pytest.mark.parametrize(
    'parameter, value, field, expected',
    [
        ('learning_rate', 2e-4, 'lr', [2e-4, 2e-4]),
        ('adam_beta1', 0.8, 'betas', [(0.8, 0.999)] * 2),
        ('adam_beta2', 0.9, 'betas', [(0.9, 0.9)] * 2),
        ('adam_epsilon', 1e-6, 'eps', [1e-6, 1e-6]),
        ('weight_decay', 0.2, 'weight_decay', [0.2, 0.0]),
    ],
)
def test_the_optimizer(parameter, value, field, expected):
    model = tiny_bert()
    before, after = (
        changed_settings(make_optimizer(model, tiny_config('full_student', **given)))
        for given in ({}, {parameter: value})
    )
    assert after[field] == expected != before[field]
    assert {k: v for k, v in after.items() if k != field} == {k: v for k, v in before.items() if k != field}


def shares(model) -> dict:
    return {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}


@pytest.mark.parametrize(
    'parameter, field, where',
    [
        ('dropout', 'hidden_dropout_prob', lambda name: 'attention.self' not in name),
        ('attention_dropout', 'attention_probs_dropout_prob', lambda name: 'attention.self' in name),
    ],
)
def test_dropout_reaches_config_and_modules_and_no_weight(parameter, field, where):
    before, after = start(), start(**{parameter: 0.25})
    assert is_same(before, after)
    assert after.config.to_dict() == before.config.to_dict() | {field: 0.25}
    assert shares(after) == {name: 0.25 if where(name) else p for name, p in shares(before).items()}
    assert all(p == 0 for p in shares(before).values())


@pytest.mark.parametrize('kind', one_of_each(CONFIGS, lambda kind: kind == 'distilbert'))
def test_dropout_of_every_architecture_is_what_its_config_would_have_made(kind, tmp_path):
    settings = model_settings(make_config(dropout=0.3, attention_dropout=0.2), CONFIGS[kind])
    changed = apply_settings(tiny(kind), settings)
    made = hf.AutoModelForSequenceClassification.from_config(
        type(CONFIGS[kind]).from_dict(CONFIGS[kind].to_dict() | settings)
    )
    assert shares(changed) == shares(made) != shares(tiny(kind))
    # loaded with it, cut with it, pruned with it
    save_model(tiny(kind), tmp_path / 'model')
    assert shares(load_model(tmp_path / 'model', HEAD, 0, **settings)) == shares(made)
    cut = choose_layers(changed, (1, 3))
    pruned = set_heads(copy.deepcopy(changed), [[0]] * 4)
    assert set(shares(cut).values()) == set(shares(pruned).values()) == set(shares(made).values())


def test_initializer_range_is_the_spread_of_new_weights_alone(tmp_path):
    folder = save_model(tiny(auto_class='AutoModel'), tmp_path / 'model')
    before, after = (load_model(folder, HEAD, 0, initializer_range=r) for r in (0.01, 0.3))
    assert before.new_parameters == after.new_parameters != []
    for name, values in before.named_parameters():
        other = dict(after.named_parameters())[name]
        if name in after.new_parameters:
            # tiny as it is, thirty times as wide
            assert name.endswith('bias') or other.std() > 10 * values.std()
        else:
            assert torch.equal(values, other)
    wide = start(layers=4, student_layers=None, initializer_range=0.3)
    assert wide.config.initializer_range == 0.3
    assert 0.25 < layers_of(wide)[3].output.dense.weight.std() < 0.35


def test_layers_heads_and_neurons_of_a_run():
    plain = start()
    deeper = start(layers=3, student_layers=None)
    assert len(layers_of(deeper)) == 3 and n_heads(deeper.config) == 2
    fewer = start(heads=1)
    assert (n_heads(fewer.config), len(layers_of(fewer))) == (1, 2)
    kept = fewer.config.kept_heads
    # what stays is what was there
    query = [a.module.query.weight for a in attentions(plain)]
    for layer, attention in enumerate(attentions(fewer)):
        rows = slice(16 * kept[layer][0], 16 * kept[layer][0] + 16)
        assert torch.equal(attention.module.query.weight, query[layer][rows])
    narrow = start(feed_forward=10)
    assert narrow.config.intermediate_size == 10
    other = next(seed for seed in range(9) if random_heads(2, 2, 1, seed) != kept)
    assert start(heads=1, pruning_seed=other).config.kept_heads == random_heads(2, 2, 1, other)
    config = tiny_config('full_student', student_layers=(0, 1), heads=1, head_choice='importance')
    expected = most_important(head_importance(tiny_bert(), SameWord(), config), 1)
    assert worker_start(config).config.kept_heads == expected


def test_eval_batch_size_is_the_examples_of_an_evaluation_batch_and_changes_no_score():
    task = SameWord(n=25)
    lengths = task.lengths('train')
    sizes = [len(i) for i in evaluation_batches(lengths, CPU, 8192, 4)]
    assert sizes == [4] * 6 + [1]
    found = np.concatenate(
        [
            i
            for rank in range(2)
            for i in evaluation_batches(lengths, Runtime(CPU.device, 'fp32', rank, 2), 9, 4)
        ]
    )
    assert sorted(found) == list(range(25))
    model = tiny_bert()
    np.testing.assert_allclose(
        predict(model, task, 'train', CPU, examples=4), predict(model, task, 'train', CPU), atol=1e-5
    )
    assert all(PATHS[name].startswith('where.') for name in ('eval_batch_size', 'preset'))


# ---- dropout before the head of question answering ----


@pytest.mark.parametrize('kind', one_of_each(CONFIGS, lambda kind: kind == 'distilbert'))
def test_dropout_before_the_head_of_question_answering(kind):
    model = tiny(kind, 'AutoModelForQuestionAnswering')
    apply_settings(model, model_settings(make_config(dropout=0.0, attention_dropout=0.0), model.config))
    names = list(model.state_dict())
    plain = model.eval()(IDS).start_logits
    twin = copy.deepcopy(head_dropout(model, 0.5))
    assert list(model.state_dict()) == names and torch.equal(model.eval()(IDS).start_logits, plain)
    for dropping in (model, twin):
        assert not torch.equal(dropping.train()(IDS).start_logits, plain)
    head_dropout(twin, 0.0)
    assert torch.equal(twin.train()(IDS).start_logits, plain)
    assert not torch.equal(model.train()(IDS).start_logits, plain)


def test_the_cpu_fast_path_finds_the_dropout_of_the_head():
    model = tiny('bert', 'AutoModelForQuestionAnswering')
    apply_settings(model, model_settings(make_config(dropout=0.0, attention_dropout=0.0), model.config))
    head_dropout(model, 0.5).train()
    own = model.qa_outputs.dropout
    task = SameWord()

    def drawn(seed):
        with fast_path(model, task, torch.device('cpu'), seed) as fast:
            ids = task.batch('train', np.arange(4)).inputs['input_ids']
            fast.start(0, lambda: ids)
            assert model.qa_outputs.dropout is not own
            return model(ids).start_logits.detach()

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert model.qa_outputs.dropout is own


def test_qa_dropout_of_a_task_reaches_the_model(monkeypatch):
    model = tiny('bert', 'AutoModelForQuestionAnswering')
    monkeypatch.setattr('kdnotes.experiment.worker._model_of_run', lambda task, run_id: model)
    config = tiny_config('full_student', student_layers=(0, 1))
    config = config.model_copy(update=dict(task_settings=SimpleNamespace(qa_dropout=0.4)))
    job = dict(initial=dict(teacher_run_id='x', layers=[0, 1]), teacher_run_id='x')
    started, _ = starting_model(config, SimpleNamespace(unread_modules=()), job)
    assert started.qa_outputs.dropout.p == 0.4


# ---- presets ----


def test_a_preset_fills_what_is_not_given_and_what_the_mode_reads():
    def filled(**given):
        return preset_values(dict(preset='sigopt_baseline', task='extractive_qa') | given)

    assert filled() == PRESETS['sigopt_baseline']
    assert filled(dropout=None).keys() == filled().keys() - {'dropout'}
    assert filled(student_layers=(1, 3)).keys() == filled().keys() - {'layers'}
    assert filled(qa_dropout=0.3).keys() == filled().keys() - {'qa_dropout'}
    teacher = filled(mode='baseline')
    assert not teacher.keys() & {'layers', 'heads', 'pruning_seed', 'temperature', 'soft_weight'}
    given = filled(mode='baseline', teacher_mode='given')
    assert set(given) == {'eval_batch_size'}
    common = {k: v for k, v in filled().items() if k in PATHS}
    config = resolve(make_config(**common), ON, 'embedded', teacher_depth=12)
    assert (config.model.student.kept_layers, config.model.student.heads, config.train.warmup_steps) == (
        (1, 3, 5, 7, 9, 11),
        12,
        0,
    )
    assert (config.train.warmup_fraction, config.train.learning_rate, config.train.weight_decay) == (
        None,
        5e-5,
        9e-6,
    )


# ---- records ----


def test_older_records_have_no_latency_and_newer_ones_explain_what_is_null():
    record = make_record()
    assert 'latency' not in record
    check_record(record)
    whole = dict(batch_1_ms=1.0, batch_32_ms=2.0, batch_1_tokens=9, batch_32_tokens=9)
    check_record(record | dict(latency=whole, kept_heads=[[0, 2]], params_trainable=3))
    with pytest.raises(RecordError, match="'latency.batch_32_ms': field required"):
        check_record(record | dict(latency={k: v for k, v in whole.items() if k != 'batch_32_ms'}))
    with pytest.raises(RecordError, match="'latency.batch_32_ms' is null without a reason"):
        check_record(record | dict(latency=whole | dict(batch_32_ms=None)))
    for wrong in (dict(kept_heads=['x']), dict(latency=[])):
        with pytest.raises(RecordError):
            check_read(record | wrong, 'here')


def test_relations_of_students_with_fewer_heads_are_learnt():
    from helpers import tiny_teacher

    config = tiny_config(
        'full_kd', student_layers=(0, 1), heads=1, relation_loss='values', hidden_loss='mse', signal='online'
    )
    student = shape_student(tiny_bert(), config)
    train(
        SameWord(),
        student,
        config,
        CPU,
        lambda *a, **k: None,
        online_teacher(SameWord(), tiny_teacher(), config),
    )
    assert n_heads(student.config) == 1


def test_a_cut_of_a_pruned_model_keeps_the_heads_of_its_layers():
    pruned = shaped(heads=2)
    cut = choose_layers(pruned, (1, 3))
    assert cut.config.kept_heads == [pruned.config.kept_heads[i] for i in (1, 3)]
    assert [a.heads for a in attentions(cut)] == [2, 2]


@pytest.mark.parametrize('heads', [2, 5])
def test_new_layers_have_the_heads_of_the_last_that_was_there(heads):
    model = shaped(heads=heads)
    *before, last = model.config.kept_heads
    assert last != before[-1] or heads == 5
    deeper = set_depth(model, 6, 0)
    assert deeper.config.kept_heads == [*before, last, last, last]
    assert [a.heads for a in attentions(deeper)] == [heads] * 6


def test_a_student_of_its_own_is_looked_at_in_its_own_shape(tmp_path):
    folder = write_teacher(tmp_path / 'own', CONFIGS['distilbert'])
    config = make_config(mode='full_student', student_init='hub', student=str(folder), heads=2)
    student, left_out = check_shape(config, HEAD)
    assert (len(layers_of(student)), n_heads(student.config), left_out) == (4, 2, ())
    assert all(p.is_meta for p in student.parameters())


@pytest.mark.parametrize('shape', [dict(layers=2, heads=6), dict(layers=8), dict(student_layers=(0, 3))])
def test_a_transferred_student_gets_its_shape_where_it_is_trained_first(shape, monkeypatch):
    asked = make_config(corpus='embedded', transfer='wikiqa', student_init='transferred', **shape)
    config = resolve(asked, ON, 'embedded', 'wikiqa')
    first = resolve(transfer_config(config), ON, 'wikiqa')
    names = {n for n, path in PATHS.items() if path.startswith('model.student.')} - {
        'student',
        'student_init',
    }
    assert {n: value_of(first, n) for n in names} == {n: value_of(config, n) for n in names}
    # and is not shaped again
    model = shape_student(tiny_bert(), make_config(heads=1))
    monkeypatch.setattr('kdnotes.experiment.worker._model_of_run', lambda task, run_id: model)
    started, _ = starting_model(
        config, SameWord(), dict(initial=dict(transfer_run_id='x'), teacher_run_id='y')
    )
    assert started is model and n_heads(started.config) == 1

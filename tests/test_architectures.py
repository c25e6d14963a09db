"""Teachers of every architecture: their students are tried in the plan, trained, saved,
loaded by plain transformers, taken up after a stop, and refused in a sentence where they cannot be.
"""

import json
import warnings
import numpy as np
import pytest
import torch
import transformers as hf
from architectures import (
    EACH_ARCHITECTURE,
    REFUSED,
    SIZE,
    TOKENS,
    WORDS,
    configs,
    random_model,
    write_teacher,
)
from helpers import SameWord, trained
from kinds import one_of_each
from kdnotes.distill import architectures, models
from kdnotes.core.arms import spread_layers
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.tasks.batching import encode_pairs, pad_pairs
from kdnotes.tasks.sources import load_corpus
from kdnotes.experiment import export
from kdnotes.experiment.launch import run
from kdnotes.distill.intermediate import ModelWithIntermediate, attention_projections
from kdnotes.distill.architectures import call, weights_sha256
from kdnotes.distill.models import load_model, save_model
from kdnotes.distill.students import check_student, choose_layers
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_run_model
from kdnotes.train.cpu_fast_path import DropoutRng, FastPath, fast_path

pytestmark = pytest.mark.usefixtures('home')

HEAD = 'AutoModelForSequenceClassification'
WITHOUT_SDPA = {'mpnet', 'deberta', 'deberta_v2'}
WITHOUT_VALUES = {'deberta', 'modernbert'}  # query, key and value are one matrix


@pytest.fixture
def teacher_folder(kind, tmp_path):
    return write_teacher(tmp_path / kind, configs()[kind])


def batch() -> dict[str, torch.Tensor]:
    "Three texts of different lengths."
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(21) < torch.tensor([[21], [13], [5]])).long()
    ids = torch.randint(5, 50, (3, 21), generator=generator) * mask
    return dict(input_ids=ids, attention_mask=mask, token_type_ids=(torch.arange(21) > 2) * mask)


def student_of(model, layers=(1, 3)):
    "A student; that ModernBERT's first layer leaves a norm out is said elsewhere."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        return choose_layers(model, layers)


# ---- copies ----


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_a_student_is_the_same_after_saving(kind, teacher_folder, tmp_path):
    check_student(teacher_folder, (1, 3), HEAD)
    teacher = load_model(teacher_folder, HEAD, 0)
    before = weights_sha256(teacher)
    random_state = torch.random.get_rng_state()
    student = student_of(teacher)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    again = hf.AutoModelForSequenceClassification.from_pretrained(
        save_model(student, tmp_path / 'student')
    ).eval()
    assert weights_sha256(again) == weights_sha256(student) and again.config.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(call(again, batch()).logits, call(student, batch()).logits)
        assert torch.equal(
            call(student_of(teacher, (0, 1, 2, 3)), batch()).logits, call(teacher, batch()).logits
        )
        assert not torch.allclose(
            call(student, batch()).logits, call(student_of(teacher, (0, 2)), batch()).logits
        )
        for p in student.parameters():
            p.add_(1)
    assert weights_sha256(teacher) == before, 'a copy, not a view'


@pytest.mark.parametrize('layers, loses', [((1, 3), True), ((0, 3), False)])
def test_the_plan_says_what_a_first_layer_loses(layers, loses, tmp_path):
    folder = write_teacher(tmp_path / 'modernbert', configs(6)['modernbert'])
    given = dict(corpus='embedded', smoke=True, teacher=str(folder), student_layers=layers)
    planned = plan(make_config(mode='full_kd', **given), Machine('cpu', 2))
    why = 'is layer 1 of the teacher, without model.layers.0.attn_norm.weight'
    assert (bool(planned.loses), why in planned.explain()) == (loses, loses)


def test_a_decoder_without_a_padding_token_is_refused(tmp_path):
    config = hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, pad_token_id=None)
    folder = write_teacher(tmp_path / 'decoder', config)
    asked = make_config(mode='baseline', corpus='embedded', smoke=True, teacher=str(folder))
    with pytest.raises(KdnotesError, match='has no padding token'):
        plan(asked, Machine('cpu', 2))


@pytest.mark.parametrize('kind', REFUSED)
def test_an_architecture_without_layers_to_choose_is_refused_in_the_plan(kind, tmp_path):
    config, why = REFUSED[kind]
    folder = write_teacher(tmp_path / kind, config)
    given = dict(corpus='embedded', smoke=True, teacher=str(folder))
    with pytest.raises(KdnotesError, match=why) as refusal:
        plan(make_config(mode='full_kd', **given), Machine('cpu', 2))
    assert '\n' not in str(refusal.value)
    assert plan(make_config(mode='baseline', **given), Machine('cpu', 2)).config.model.pretrained == str(
        folder
    ), 'it may be trained all the same'


# ---- what is saved answers as what was scored ----


def unnamed_types(folder, **more):
    "The teacher's words in a generic tokenizer: a pair's types are 0 and 1, and it does not name them."
    roles = {role: f'[{role[:3].upper()}]' for role in ('pad_token', 'unk_token', 'cls_token', 'sep_token')}
    backend = load_tokenizer(folder).backend_tokenizer
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **roles, **more)


SAVED = configs() | dict(
    roberta_types=hf.RobertaConfig(**SIZE, num_hidden_layers=2, **TOKENS, type_vocab_size=2)
)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', SAVED)
def test_a_saved_folder_answers_as_its_model_was_scored(kind, tmp_path):
    "By AutoTokenizer and the head, and as a cross-encoder; that ONNX gets its inputs is seen by their names."
    SAVED[kind].max_position_embeddings = 160
    folder = write_teacher(tmp_path / kind, SAVED[kind])
    tokenizer = unnamed_types(folder, padding_side='left', model_input_names=['input_ids'])
    model = load_model(folder, HEAD, 0, num_labels=2)
    # letters that look like a token are letters there, too
    first, second = ['copper', 'is [SEP] a metal', 'a'], ['iron', 'copper', 'what is [MASK] made of']
    inputs, _ = pad_pairs(*encode_pairs(tokenizer, first, second, 64), np.arange(3))
    with torch.no_grad():
        scored = call(model, inputs).logits
    export._save_reranker(model, tmp_path / 'out' / 'cross-encoder', tokenizer, 64)
    save_model(model, tmp_path / 'out', tokenizer, 64)
    for at, expected in (('', scored), ('cross-encoder', scored[:, 1:] - scored[:, :1])):
        again = hf.AutoTokenizer.from_pretrained(tmp_path / 'out' / at)
        texts = again(first, second, padding=True, truncation=True, return_tensors='pt')
        taken = architectures.model_inputs(model) & {'input_ids', 'attention_mask', 'token_type_ids'}
        assert set(texts) == taken, 'what a model, and so its ONNX file, is given'
        with torch.no_grad():
            by_hand = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'out' / at)(**texts)
        torch.testing.assert_close(by_hand.logits, expected, atol=1e-5, rtol=1e-5)


PIECES = [
    (word, -1.0) for word in ('<pad>', '<unk>', '<s>', '</s>', '<cls>', '<sep>', '<mask>', '[CLS]', '[SEP]')
]
# enough of them that most words are known
SPELT = [*PIECES, *((word, -1.0) for word in ('▁', *'abcdefghijklmnopqrstuvwxyz0123456789.,?'))]
LETTERS = {
    word: i for i, word in enumerate([*WORDS, '<pad>', '<unk>', '<s>', '</s>', '<cls>', '<sep>', '<mask>'])
}


@pytest.mark.parametrize(
    'kind, vocab, fits',
    [
        ('AlbertTokenizer', SPELT, True),
        ('RemBertTokenizer', SPELT, True),
        ('BertTokenizer', LETTERS, True),
        ('XLNetTokenizer', SPELT, False),
        ('FunnelTokenizer', LETTERS, False),
    ],
)
def test_tokenizers_of_other_token_types_are_refused_in_the_plan(kind, vocab, fits, tmp_path):
    tokenizer = getattr(hf, kind)(vocab=vocab)
    size = SIZE | dict(vocab_size=max(len(LETTERS), len(SPELT)))
    folder = save_model(random_model(hf.BertConfig(**size, num_hidden_layers=2)), tmp_path / 'm', tokenizer)
    asked = make_config(mode='baseline', corpus='embedded', smoke=True, teacher=str(folder))
    if fits:
        assert 'token_type_ids' in load_tokenizer(folder).model_input_names
        assert plan(asked, Machine('cpu', 2)).run_id
        return
    with pytest.raises(KdnotesError, match='has token types besides 0 for the first text and 1') as refusal:
        plan(asked, Machine('cpu', 2))
    assert '\n' not in str(refusal.value)


def test_a_head_of_another_task_is_left_behind_and_that_is_said(tmp_path):
    config = configs(2)['bert']
    config.num_labels = 5
    config.problem_type = 'multi_label_classification'
    folder = write_teacher(tmp_path / 'five', config)
    planned = plan(make_config(corpus='embedded', smoke=True, teacher=str(folder)), Machine('cpu', 2))
    said = 'has 5 outputs, and the task has 2: a new one is made'
    assert said in str(planned.head[0]) and f'head: that of {folder} {said}' in planned.explain()
    task = make_task(planned.config, load_corpus('answer_selection', 'embedded'))
    model = models.fresh_model(task, str(folder), planned.config, 0)
    assert model.new_parameters == ['classifier.bias', 'classifier.weight'] and model.config.num_labels == 2
    assert torch.equal(
        model.classifier.weight, models.fresh_model(task, str(folder), planned.config, 0).classifier.weight
    )
    assert torch.equal(
        model.bert.pooler.dense.weight,
        hf.AutoModelForSequenceClassification.from_pretrained(folder).bert.pooler.dense.weight,
    )
    model.config.update(task.head_config)
    assert model.config.problem_type is None and len(model.config.id2label) == 2
    fits = write_teacher(tmp_path / 'two', configs(2)['bert'])
    fitting = plan(make_config(corpus='embedded', smoke=True, teacher=str(fits)), Machine('cpu', 2))
    assert fitting.head == ()


# ---- the layers nobody named ----


@pytest.mark.parametrize(
    'n_layers, expected',
    [(1, (0,)), (2, (1,)), (3, (1,)), (4, (1, 3)), (5, (1, 3)), (6, (1, 3, 5)), (12, (1, 3, 5, 7, 9, 11))],
)
def test_a_student_is_spread_over_its_teachers_depth(n_layers, expected, tmp_path):
    assert spread_layers(n_layers) == expected
    folder = write_teacher(tmp_path / 'teacher', configs(n_layers)['distilbert'])
    planned = plan(
        make_config(
            mode='full_kd', corpus='embedded', teacher=str(folder), hidden_loss='mse', signal='online'
        ),
        Machine('cpu', 2),
    )
    assert planned.config.model.student.kept_layers == expected == planned.config.loss.hidden_layers


# ---- training ----


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_a_stopped_training_goes_on_to_the_last_bit(kind, tmp_path):
    def training(**more):
        return trained(model=student_of(random_model(configs()[kind])), **more)

    whole = training()
    assert training(folder=tmp_path, stop_after=3).result is None
    again = training(folder=tmp_path)
    assert again.result.resumed_at == [3] and (again.weights == whole.weights).all()


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_the_fast_path_of_a_cpu_computes_the_same(kind):
    "Without dropout: the same loss, and the same gradient of every weight."
    model, task = random_model(configs(dropout=0.0)[kind]).train(), SameWord()
    first = task.batch('train', np.arange(8))

    def gradients():
        call(model, first.inputs).logits.square().sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return found

    plain = gradients()
    table = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    attention = model.config._attn_implementation
    with fast_path(model, task, torch.device('cpu'), 0) as fast_model:
        fast_model.start(1, lambda: first.inputs['input_ids'])
        call(model, first.inputs).logits.square().sum().backward()
        fast_model.finish(model, lambda gradient: gradient)
        fast = {name: p.grad for name, p in model.named_parameters()}
        fast[table] = (
            torch.zeros_like(plain[table]).index_copy(0, fast_model._rows._used, fast[table])
            if fast_model._rows
            else fast[table]
        )
        fast = {name: g.clone() for name, g in fast.items() if g is not None}
    assert model.config._attn_implementation == attention
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(fast[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_losses_on_intermediate_layers_fit_or_are_refused_in_the_plan(kind, teacher_folder):
    def planned(**given):
        return plan(
            make_config(
                mode='full_kd', corpus='embedded', teacher=str(teacher_folder), signal='online', **given
            ),
            Machine('cpu', 2),
        )

    assert planned(hidden_loss='mse').config.loss.hidden_layers == (1, 3)
    if kind in WITHOUT_VALUES:
        with pytest.raises(KdnotesError, match='has no value projections that are known here'):
            planned(relation_loss='values')
        return
    planned(relation_loss='values')
    model = load_model(teacher_folder, HEAD, 0)
    assert len(attention_projections(model)) == 4
    looked_at = call(ModelWithIntermediate(model, (2, 4), {'values': ('value', -1)}), batch())
    plain = model(
        **{name: value for name, value in batch().items() if name in architectures.model_inputs(model)},
        output_hidden_states=True,
    )
    for name, layer in (('hidden_0', 2), ('hidden_1', 4)):
        assert torch.equal(looked_at.intermediate[name], plain.hidden_states[layer])
    assert looked_at.intermediate['values'].shape == (3, 21, 32)


@pytest.mark.parametrize('kind', EACH_ARCHITECTURE)
def test_a_mask_in_its_long_form_goes_only_where_it_means_the_same(kind):
    """On a GPU it saves a wait; given to every architecture it would change ModernBERT's answers and stop
    DeBERTa's.
    """
    model = random_model(configs()[kind]).eval()
    short = batch()
    if not architectures._takes_whole_mask(model):
        assert kind in WITHOUT_SDPA | {'modernbert'}
        return
    mask = short['attention_mask'].bool()[:, None, None, :]
    long = short | dict(attention_mask=mask.expand(-1, 1, mask.shape[-1], -1))
    with torch.no_grad():
        expected = call(model, short).logits
        torch.testing.assert_close(call(model, long).logits, expected, atol=1e-5, rtol=1e-5)
        FastPath(model, None, DropoutRng(0))  # as a training has it
        assert architectures._takes_whole_mask(model)
        torch.testing.assert_close(call(model, long).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    'kind', one_of_each(['modernbert', 'deberta_v2', 'electra', 'distilbert', 'roberta'])
)
def test_the_whole_road(kind, teacher_folder, rank_here):
    "Plan, teacher, student, save, plain `from_pretrained`: the predictions that were recorded."
    config = make_config(
        mode='full_kd',
        corpus='embedded',
        smoke=True,
        teacher=str(teacher_folder),
        study='road',
        ranks=1,
        threads_per_rank=1,
        max_length=64,
    )
    record = run(config)
    planned = plan(config)
    assert (
        planned.config.model.student.kept_layers == (1, 3)
        and record['run_id'] == planned.run_id
        and record['teacher_run_id'] == planned.teacher.run_id
    )
    assert record['models']['attention'] == ('eager' if kind in WITHOUT_SDPA else 'sdpa')
    folder = find_run_model(record['run_id'])
    assert json.loads((folder / 'config.json').read_text())['model_type'] == configs()[kind].model_type
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert weights_sha256(model) == record['model_sha256'] and record['throughput'].keys() >= {
        'useful_flops_per_s'
    }
    task = make_task(planned.config, load_corpus('answer_selection', 'embedded'))
    task.encode(load_tokenizer(folder))
    test = task.batch('test', np.arange(len(task.lengths('test'))))
    with torch.no_grad():
        scores = task.scores(call(model, test.inputs), test)[:, 0].numpy()
    recorded = RunFolder('road', record['run_id']).table('predictions')
    recorded = recorded[recorded['split'] == 'test']['score'].to_numpy()
    np.testing.assert_allclose(scores, recorded, atol=1e-4)

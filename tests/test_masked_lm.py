"Masked language modelling: the recipe, one training on any number of ranks, scores one can check by hand."

import math
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM
from tiny_lm import LENGTH, SPECIAL, WORDS, tiny_lm, tiny_lm_config, tiny_task, tiny_tokenizer
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.distill.intermediate import online_teacher, open_student
from kdnotes.distill.models import load_model, save_model
from kdnotes.distill.students import choose_layers
from kdnotes.experiment.plan import plan
from kdnotes.losses.targets import soft_target_kl
from kdnotes.losses.vocabulary import OpenDecoder
from kdnotes.tasks.sources import CorpusError
from kdnotes.tasks.text_blocks import TextError
from kdnotes.train import distributed as runtime
from kdnotes.train.evaluation import evaluate
from kdnotes.train.loop import accumulate, loss_weights, schedule_steps, train
from kdnotes.train.state import Objective

HERE = SimpleNamespace(config=tiny_lm_config())


@pytest.fixture(scope='module')
def here():
    return runtime.start(HERE.config)


def objective_of(config, here, teacher, student):
    "A student under DDP's eyes, and what it minimises."
    task = tiny_task(config)
    signal = online_teacher(task, teacher, config)
    weights = loss_weights(task, config)
    task, trainable = open_student(task, student, config, signal, 0)
    return Objective(task, config, here, weights, signal), trainable


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---- the recipe of the public distiller ----


def public_loss(student, teacher, ids, hidden_positions, labels, T=2.0):
    """What the public DistilBERT distiller minimises by its defaults, from its published definition:
    soft targets of all real tokens, hard targets of hidden ones, cosine of the last hidden states,
    weighed 5, 2 and 1; means over tokens.
    """
    everything = dict(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    s = student(**everything)
    with torch.no_grad():
        t = teacher(**everything)
    soft = F.kl_div(
        (s.logits.flatten(0, 1) / T).log_softmax(-1),
        (t.logits.flatten(0, 1) / T).softmax(-1),
        reduction='batchmean',
    )
    asked = torch.full_like(ids, -100).scatter(1, hidden_positions, labels)
    hard = F.cross_entropy(s.logits.flatten(0, 1), asked.flatten(), ignore_index=-100)
    s_last = s.hidden_states[-1].flatten(0, 1)
    t_last = t.hidden_states[-1].flatten(0, 1)
    cosine = F.cosine_embedding_loss(s_last, t_last, torch.ones(len(s_last)))
    return 5.0 * soft * T**2 + 2.0 * hard + 1.0 * cosine


def test_the_recipe_is_the_public_distillers_loss(here):
    config = tiny_lm_config('full_kd', recipe='distilbert')
    teacher = tiny_lm(seed=7).eval()
    student = tiny_lm(seed=1)
    plain = tiny_lm(seed=1, closed=True)
    objective, trainable = objective_of(config, here, teacher, student)
    index = np.arange(4)
    losses, _, _ = accumulate(trainable, objective, here.scaler(), index)
    batch = objective.task.batch('train', index)
    expected = public_loss(
        plain, tiny_lm(seed=7, closed=True).eval(), batch.inputs['input_ids'], batch.positions, batch.labels
    )
    assert float(losses['total']) == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    theirs = gradients(plain)
    torch.testing.assert_close(gradients(student), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    'given,term,weight',
    [(dict(soft_weight=0, hidden_loss='none'), 'hard', 2), (dict(soft_weight=0, hard_weight=0), 'hidden', 1)],
)
def test_weights_of_zero_leave_terms_out(here, given, term, weight):
    objective, trainable = objective_of(
        tiny_lm_config('full_kd', **given), here, tiny_lm(7).eval(), tiny_lm(1)
    )
    losses, _, _ = accumulate(trainable, objective, here.scaler(), np.arange(4))
    assert float(losses['total']) == pytest.approx(weight * float(losses[term]), rel=1e-6)


@pytest.mark.parametrize(
    'cut', [dict(top_k=4), dict(min_probability=0.024), dict(top_k=4, min_probability=0.024)]
)
def test_cut_off_targets_are_those_of_the_whole_vocabulary(here, cut):
    "How likely a piece is, is a share of all pieces and not of the likeliest ones."
    config = tiny_lm_config('full_kd', hidden_loss='none', **cut)
    objective, trainable = objective_of(config, here, tiny_lm(7).eval(), tiny_lm(1))
    index = np.arange(4)
    losses, _, _ = accumulate(trainable, objective, here.scaler(), index)
    inputs = objective.task.batch('train', index).inputs
    with torch.no_grad():
        student, teacher = (
            tiny_lm(seed, closed=True).eval()(**inputs).logits.flatten(0, 1) for seed in (1, 7)
        )
    expected = soft_target_kl(student, teacher, 2.0, 'mean', **cut)
    assert float(losses['soft']) == pytest.approx(float(expected), rel=1e-5)


# ---- faults of the public distiller that this one does not share ----


def test_no_gradient_is_left_over_at_an_epochs_end(here):
    "There, micro-steps that filled no accumulation at an epoch's end went into the next epoch's first step."
    config = tiny_lm_config('full_student', epochs=2, batch_size=4)
    task = tiny_task(config)
    n = len(task.lengths('train'))
    assert n % 4, 'the last step of an epoch must be a short one'
    steps = list(schedule_steps(task, config)[1])
    for epoch in (0, 1):
        seen = np.concatenate([step.index for step in steps if step.epoch == epoch])
        assert sorted(seen.tolist()) == list(range(n))
    left = []
    model = tiny_lm()

    def on_row(kind, **values):
        if kind in ('step', 'eval'):
            left.append([p for p in model.parameters() if p.grad is not None and p.grad.abs().sum() > 0])

    train(task, model, config, here, on_row)
    assert left and not any(left)


def test_stored_tokens_are_never_unpickled(tmp_path):
    "There, the data is a pickle, which runs what it holds. Here a file is numbers, whatever is in it."
    config = tiny_lm_config('full_student')
    task = tiny_task(config)
    task.encode(tiny_tokenizer(), tmp_path)
    before = task.blocks['train'].ids(np.arange(3)).copy()
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / 'ran').encode() + b"'\ntR."
    for path in tmp_path.rglob('*'):
        if path.is_file() and path.suffix != '.lock':
            path.write_bytes(bomb)
    again = tiny_task(config)
    again.encode(tiny_tokenizer(), tmp_path)
    assert not (tmp_path / 'ran').exists()
    assert (again.blocks['train'].ids(np.arange(3)) == before).all()


# ---- masks ----


def test_teacher_and_student_see_the_same_and_epochs_differ():
    config = tiny_lm_config('full_kd')
    task = tiny_task(config)
    index = np.array([3, 0])
    first = task.batch('train', index, 0)
    assert torch.equal(first.inputs['input_ids'], task.batch('train', index, 0).inputs['input_ids'])
    assert torch.equal(
        first.inputs['input_ids'][1], task.batch('train', np.array([0]), 0).inputs['input_ids'][0]
    )
    assert not torch.equal(first.positions, task.batch('train', index, 1).positions)
    static = tiny_task(tiny_lm_config('full_kd', masks='static'))
    assert torch.equal(static.batch('train', index, 0).positions, static.batch('train', index, 1).positions)
    other_seed = tiny_task(tiny_lm_config('full_kd', seed=1))
    assert not torch.equal(first.positions, other_seed.batch('train', index, 0).positions)
    # scores ask the same of every seed
    assert torch.equal(task.batch('test', index).labels, other_seed.batch('test', index).labels)


# ---- scores one can check ----


class Says(torch.nn.Module):
    "A model that gives logits by a rule."

    def __init__(self, rule):
        super().__init__()
        self.config = SimpleNamespace()
        self.rule = rule

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.rule(input_ids))


VOCABULARY = len(SPECIAL) + WORDS


def test_a_model_that_knows_nothing_has_the_vocabularys_size_as_its_perplexity(here):
    task = tiny_task(tiny_lm_config())
    uniform = Says(lambda ids: torch.zeros(*ids.shape, VOCABULARY))
    metrics = evaluate(uniform, task, ('test',), here).metrics['test']
    for name in ('perplexity', 'perplexity_all', 'pseudo_perplexity'):
        assert metrics[name] == pytest.approx(VOCABULARY, rel=1e-4)
    # one token a word here
    assert metrics['perplexity_word'] == pytest.approx(metrics['perplexity'], rel=1e-3)


def test_a_model_that_copies_what_it_sees_knows_nothing_of_what_is_hidden(here):
    "That is how a perplexity over all tokens flatters."
    task = tiny_task(tiny_lm_config())
    copying = Says(lambda ids: 30.0 * F.one_hot(ids, VOCABULARY).float())
    metrics = evaluate(copying, task, ('test',), here).metrics['test']
    assert metrics['perplexity'] > VOCABULARY
    hidden = task.masked / (LENGTH - 2)
    assert metrics['nll_all'] == pytest.approx(hidden * metrics['nll'], rel=0.1)


def test_a_model_that_knows_the_text_has_a_perplexity_of_one(here):
    task = tiny_task(tiny_lm_config())
    text = task.texts['test']
    truth = torch.from_numpy(text.blocks.ids(np.arange(len(text.blocks))))
    seen = (truth >= len(SPECIAL)).sum(1)

    def knows(ids):
        "Each row is the block that it agrees with everywhere else."
        same = (ids[:, None] == truth[None]).sum(-1)
        return 50.0 * F.one_hot(truth[same.argmax(1)], VOCABULARY).float()

    assert int(seen.min()) > 5
    metrics = evaluate(Says(knows), task, ('test',), here).metrics['test']
    for name in ('perplexity', 'perplexity_all', 'pseudo_perplexity', 'perplexity_word'):
        assert metrics[name] == pytest.approx(1, abs=1e-4)


def test_scores_are_those_of_a_plain_computation(here):
    task = tiny_task(tiny_lm_config())
    model = tiny_lm(3).eval()
    plain = tiny_lm(3, closed=True).eval()
    found = evaluate(model, task, ('test',), here)
    batch = task.batch('test', np.arange(len(task.lengths('test'))))
    with torch.no_grad():
        log_p = plain(**batch.inputs).logits.log_softmax(-1)
    nll = -log_p.gather(1, batch.positions[..., None].expand(-1, -1, VOCABULARY)).gather(
        2, batch.labels[..., None]
    )[..., 0]
    assert found.metrics['test']['nll'] == pytest.approx(float(nll.mean()), abs=1e-5)
    assert found.metrics['test']['perplexity'] == pytest.approx(math.exp(float(nll.mean())), rel=1e-5)
    units = found.units[found.units['metric'] == 'nll']
    np.testing.assert_allclose(units['value'], nll.mean(1).numpy(), atol=1e-5)
    # one position at a time
    text = task.texts['test']
    alone = found.units[found.units['metric'] == 'pseudo_nll']
    for unit, value in list(zip(alone['unit'], alone['value']))[:5]:
        block, position = map(int, unit.split(':'))
        ids = torch.from_numpy(text.blocks.ids(np.array([block])))
        right = int(ids[0, position])
        ids[0, position] = task.mask_id
        with torch.no_grad():
            expected = -plain(input_ids=ids).logits[0, position].log_softmax(-1)[right]
        assert value == pytest.approx(float(expected), abs=1e-4)


def test_saved_models_are_plain_ones(tmp_path):
    model = tiny_lm(3).eval()
    save_model(model, tmp_path / 'model')
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / 'model').eval()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits.tensor())
    again = load_model(tmp_path / 'model', 'AutoModelForMaskedLM', 0).eval()
    assert isinstance(again.get_output_embeddings(), OpenDecoder)
    torch.testing.assert_close(again(ids).logits.tensor(), model(ids).logits.tensor())
    student = choose_layers(again, (1,))
    assert isinstance(student.get_output_embeddings(), OpenDecoder)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


# ---- bad input ----


@pytest.mark.parametrize(
    'given,words',
    [
        (dict(score_on='test,test'), 'names a text twice'),
        (dict(mask_share=0.99), 'hides all'),
        (dict(mask_share=0), 'greater than 0'),
        (
            dict(signal='cached', masks='static', top_k=8, soft_on='masked', min_probability=0.1),
            'asks how likely a piece is among all',
        ),
        (dict(recipe='tinybert'), "recipe='tinybert' is refused"),
        (dict(hidden_layers=(-2,)), 'must be counted from 0, or be -1'),
    ],
)
def test_settings_that_cannot_be_meant(given, words):
    with pytest.raises(ConfigError, match=words.replace('(', r'\(')):
        make_config(task='masked_lm', mode='full_kd', max_length=LENGTH, **given)


def planned(folder: Path, **given):
    "The plan of a run on a folder of books, with a model of 65 pieces."
    model = folder / 'model'
    tiny_lm(closed=True).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    books = folder / 'books'
    books.mkdir(exist_ok=True)
    for i in range(4):
        (books / f'{i}.txt').write_text(f'w{i} w7 w8 ' * 60)
    return plan(
        make_config(
            **dict(
                task='masked_lm',
                corpus=str(books),
                teacher=str(model),
                max_length=LENGTH,
                student_layers=(1,),
            )
            | given
        )
    )


def test_texts_and_pieces_that_do_not_suffice(tmp_path):
    with pytest.raises(CorpusError, match='top_k=66 is more than the 65 pieces of the tokenizer'):
        planned(tmp_path, top_k=66)
    texts = tmp_path / 'texts'
    texts.mkdir()
    for split, words in dict(train='w1 w2 ' * 90, dev='w1 ' + 'unheard' * 20, test='w1 ' * 90).items():
        (texts / f'{split}.txt').write_text(words)
    with pytest.raises(TextError, match='dev: the text has'):
        planned(tmp_path, corpus=str(texts))


def test_a_student_with_another_mask_token(tmp_path):
    student = tmp_path / 'student'
    tiny_lm(closed=True).save_pretrained(student)
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = '[UNK]'
    tokenizer.save_pretrained(student)
    with pytest.raises(ConfigError, match='has another vocabulary, or other special tokens, than teacher='):
        planned(
            tmp_path,
            student_init='hub',
            student=str(student),
            student_layers=None,
            hidden_layers='1',
            mode='full_kd',
        )


def test_outputs_without_a_token_start_as_rare_as_the_rarest(tmp_path):
    "Vocabularies are padded to a multiple of eight; the bias of a new head is the log share of each piece."
    net = tiny_lm(closed=True)
    net.resize_token_embeddings(len(SPECIAL) + WORDS + 7)
    net.bert.save_pretrained(tmp_path)
    prior = np.arange(1, len(SPECIAL) + WORDS + 1) / 100
    made = load_model(tmp_path, 'AutoModelForMaskedLM', 0, prior)
    bias = made.get_output_embeddings().bias.detach().numpy()
    assert np.allclose(np.diff(bias[: len(prior)]), np.diff(np.log(prior)), atol=1e-5)
    assert np.allclose(bias[len(prior) :], bias.min())
    assert 'cls.predictions.bias' in made.new_parameters
    assert choose_layers(made, (1,)).new_parameters == made.new_parameters

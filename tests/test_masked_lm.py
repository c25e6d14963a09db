"Masked language modelling: the recipe, one training on any number of ranks, scores one can check by hand."

import copy
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import launch
from tiny_lm import LENGTH, SPECIAL, WORDS, tiny_corpus, tiny_lm, tiny_lm_config, tiny_task, tiny_tokenizer
from kdnotes.checks import probes
from kdnotes.core.config import ConfigError, make_config
from kdnotes.core.processes import Stopped
from kdnotes.distill import teacher_cache as te
from kdnotes.distill.intermediate import online_teacher, open_student
from kdnotes.distill.models import choose_layers, load_model, save_model
from kdnotes.experiment.plan import plan
from kdnotes.losses.targets import soft_target_kl
from kdnotes.losses.vocabulary import OpenDecoder
from kdnotes.tasks.sources import CorpusError
from kdnotes.tasks.text_blocks import TextError
from kdnotes.train import distributed as runtime
from kdnotes.train.failures import STOP
from kdnotes.train.loop import accumulate, evaluate, loss_weights, make_optimizer, schedule_steps, train
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


def test_weights_of_zero_leave_terms_out(here):
    config = tiny_lm_config('full_kd', soft_weight=0, hidden_loss='none')
    objective, trainable = objective_of(config, here, tiny_lm(7).eval(), tiny_lm(1))
    losses, _, _ = accumulate(trainable, objective, here.scaler(), np.arange(4))
    assert float(losses['total']) == pytest.approx(2 * float(losses['hard']), rel=1e-6)


def test_the_cosine_alone_can_be_learnt(here):
    config = tiny_lm_config('full_kd', soft_weight=0, hard_weight=0)
    objective, trainable = objective_of(config, here, tiny_lm(7).eval(), tiny_lm(1))
    losses, _, _ = accumulate(trainable, objective, here.scaler(), np.arange(4))
    assert float(losses['total']) == pytest.approx(float(losses['hidden']), rel=1e-6)


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


def test_betas_reach_the_optimizer():
    config = tiny_lm_config('full_student', adam_beta1=0.8, adam_beta2=0.98, adam_epsilon=1e-6)
    for group in make_optimizer(tiny_lm(), config).param_groups:
        assert (group['betas'], group['eps']) == ((0.8, 0.98), 1e-6)


def test_stored_tokens_are_never_unpickled(tmp_path):
    "There, the data is a pickle, which runs what it holds. Here a file is numbers, whatever is in it."
    config = tiny_lm_config('full_student')
    task = tiny_task(config)
    from tiny_lm import tiny_tokenizer

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


# ---- the same training, however it is divided ----


def trained(ranks: int, mode: str, blocks: int = 11, **parameters) -> dict:
    "What a rank notes of a training."
    torch.set_num_threads(1)
    # a gradient of nothing but rounding errors is not worth a full step, as it is with AdamW's own epsilon
    config = tiny_lm_config(mode, ranks=ranks, **dict(adam_epsilon=1e-5) | parameters)
    here = runtime.start(config)
    task = tiny_task(config, tiny_corpus(blocks))
    model = tiny_lm(1)
    signal = online_teacher(task, tiny_lm(7).eval(), config) if 'kd' in mode else None
    rows = []
    with probes.watch(model, syncs=False) as seen:
        result = train(task, model, config, here, lambda kind, **v: rows.append((kind, v)), signal)
    scores = evaluate(model, task, task.evaluation_sets, here)
    runtime.stop(here)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    losses = [v['loss'] for kind, v in rows if kind == 'step']
    return dict(
        weights=weights,
        losses=losses,
        metrics=scores.metrics,
        units=scores.units,
        tokens=result.tokens,
        micro_batches=[step.forwards for step in seen.steps],
        synchronised=[step.rounds for step in seen.steps],
    )


def alone(mode: str, **parameters) -> dict:
    return launch('test_masked_lm:_trained', 1, mode, parameters, ranks=1)[0]


def _trained(ranks: int, mode: str, parameters: dict) -> dict:
    return trained(ranks, mode, **parameters)


@pytest.fixture(
    scope='module', params=[('full_kd', {}), ('full_kd', dict(soft_on='masked'))], ids=['all', 'masked']
)
def one_rank(request):
    mode, parameters = request.param
    return mode, parameters, alone(mode, **parameters)


@pytest.mark.parametrize('ranks,tokens', [(1, 2 * LENGTH), (2, 8192), (2, LENGTH)])
def test_ranks_and_accumulation_change_nothing(one_rank, ranks, tokens):
    mode, parameters, expected = one_rank
    parameters = parameters | dict(micro_batch_tokens=tokens)
    found = launch('test_masked_lm:_trained', ranks, mode, parameters, ranks=ranks)
    for rank in found:
        np.testing.assert_allclose(rank['weights'], expected['weights'], atol=1e-4)
        assert rank['metrics']['test']['nll'] == pytest.approx(expected['metrics']['test']['nll'], abs=1e-3)
        assert rank['metrics']['test']['pseudo_nll'] == pytest.approx(
            expected['metrics']['test']['pseudo_nll'], abs=1e-3
        )
        assert rank['tokens'] == expected['tokens']
    np.testing.assert_allclose(found[0]['losses'], expected['losses'], rtol=1e-4)
    np.testing.assert_array_equal(found[0]['weights'], found[-1]['weights'])
    if ranks > 1:
        # gradients travel once a step, however many micro-batches there are
        assert max(found[0]['micro_batches']) == (2 if tokens == LENGTH else 1)
        assert set(found[0]['synchronised']) == {1}


def test_it_learns():
    many = dict(blocks=150, batch_size=16)
    before = alone('full_student', epochs=0.01, **many)['metrics']['test']
    after = alone('full_student', epochs=60, **many)['metrics']['test']
    assert after['nll'] < before['nll'] - 0.5
    assert after['unigram_nll'] == before['unigram_nll']


def test_a_rank_without_blocks_changes_nothing(one_rank):
    "A step of one block, and two ranks."
    _, _, _ = one_rank
    parameters = dict(batch_size=1, epochs=0.5)
    expected = alone('full_student', **parameters)
    found = launch('test_masked_lm:_trained', 2, 'full_student', parameters, ranks=2)
    np.testing.assert_allclose(found[1]['weights'], expected['weights'], atol=1e-4)


@pytest.mark.parametrize('at', [1, 4])
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path, here, at):
    config = tiny_lm_config('full_kd', epochs=3)

    def run(folder, stop_at=None):
        task = tiny_task(config)
        model = tiny_lm(1, dropout=0.1)
        signal = online_teacher(task, tiny_lm(7).eval(), config)

        def on_row(kind, **values):
            if kind == 'step' and values['step'] == stop_at:
                STOP.requested = True

        try:
            train(task, model, config, here, on_row, signal, checkpoints=folder, key='tiny')
        finally:
            STOP.requested = False
        return [p.detach().clone() for p in model.parameters()]

    expected = run(None)
    with pytest.raises(Stopped):
        run(tmp_path, stop_at=at)
    assert all(map(torch.equal, run(tmp_path), expected))


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


# ---- a stored signal ----


def test_a_cached_signal_is_the_online_one(tmp_path, here):
    given = dict(masks='static', top_k=4, soft_on='masked', hidden_loss='none')
    online = tiny_lm_config('full_kd', signal='online', **given)
    cached = tiny_lm_config('full_kd', signal='cached', **given)
    task = tiny_task(cached)
    teacher = tiny_lm(7).eval()
    parts = dict(
        weights_sha256='a',
        config_sha256='f',
        corpus_sha256='b',
        tokenizer_sha256='c',
        split='train',
        max_length=LENGTH,
        forward_dtype='fp32',
        storage_dtype='fp32',
        subset=task.signal_key(),
    )
    stored = te.make_signal(task, teacher, tmp_path / 'signal', parts)
    batch = task.batch('train', np.array([2, 5]), epoch=1)
    said = te.teacher_signal(tiny_task(online), teacher, batch)
    assert torch.equal(stored(batch)['index'], said['index'])
    torch.testing.assert_close(stored(batch)['logits'], said['logits'], rtol=0, atol=1e-5)
    bytes_an_example = sum(f.stat().st_size for f in (tmp_path / 'signal').rglob('*.npy')) / len(
        task.lengths('train')
    )
    assert bytes_an_example < 2 * task.masked * 4 * 4 + 150
    both = []
    for config, signal in ((online, online_teacher(tiny_task(online), teacher, online)), (cached, stored)):
        model = tiny_lm(1)
        train(tiny_task(config), model, config, here, lambda *a, **k: None, signal)
        both.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*both, rtol=0, atol=1e-5)


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


def test_a_unigram_model_spends_nothing_on_what_is_never_asked_for():
    task = tiny_task(tiny_lm_config())
    assert task.unigram[task.vocabulary].sum() == pytest.approx(1)
    shares = task.label_prior[task.vocabulary]
    assert task.unigram[task.vocabulary] == pytest.approx(shares / shares.sum())


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
    from transformers import AutoModelForMaskedLM
    from kdnotes.distill.models import choose_layers, load_model, save_model

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


def test_the_doctor_sees_a_weight_that_was_not_saved(tmp_path, monkeypatch):
    task = tiny_task(tiny_lm_config('full_student'))
    model = tiny_lm(3)
    assert probes.saved_and_loaded(task, model, tmp_path / 'model') == ([], pytest.approx(0, abs=1e-6))

    def without_a_bias(model, folder):
        broken = copy.deepcopy(model)
        broken.cls.predictions.bias.data.zero_()
        save_model(broken, folder)

    torch.nn.init.ones_(model.cls.predictions.bias)
    monkeypatch.setattr(probes, 'save_model', without_a_bias)
    changed, apart = probes.saved_and_loaded(task, model, tmp_path / 'model')
    assert 'cls.predictions.bias' in changed and apart == pytest.approx(1, abs=1e-5)


# ---- bad input ----


@pytest.mark.parametrize(
    'given,words',
    [
        (dict(score_on='wikitext3'), "score_on names 'wikitext3'"),
        (dict(score_on=''), 'score_on names no text'),
        (dict(score_on='test,test'), 'names a text twice'),
        (dict(score_on='dev'), "names 'dev'"),
        (dict(mask_share=0.99), 'hides all'),
        (dict(mask_share=0), 'greater than 0'),
        (dict(dialect='textbrewer', hidden_loss='none'), 'is not read'),
        (dict(signal='cached', masks='static'), 'add top_k=8 soft_on=masked'),
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
    books.mkdir()
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


def test_more_likeliest_pieces_than_there_are(tmp_path):
    with pytest.raises(CorpusError, match='top_k=66 is more than the 65 pieces of the tokenizer'):
        planned(tmp_path, top_k=66)


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


def test_a_split_without_a_block_is_named_before_anything_is_trained(tmp_path):
    texts = tmp_path / 'texts'
    texts.mkdir()
    for split, words in dict(train='w1 w2 ' * 90, dev='w1 ' + 'unheard' * 20, test='w1 ' * 90).items():
        (texts / f'{split}.txt').write_text(words)
    with pytest.raises(TextError, match='dev: the text has'):
        planned(tmp_path, corpus=str(texts))


def test_a_text_shorter_than_a_block(tmp_path):
    corpus = tiny_corpus()
    corpus.splits['test'][:] = [dict(id='x', text='w1 w2', cluster='x')]
    with pytest.raises(TextError, match='takes 14 of them'):
        tiny_task(tiny_lm_config(), corpus)


def test_folders_that_are_no_corpus(tmp_path):
    from kdnotes.tasks.sources import CorpusError, load_corpus

    for i in range(4):
        (tmp_path / f'{i}.txt').write_text(f'Book {i}. ' * 50)
    assert [len(rows) for rows in load_corpus('masked_lm', str(tmp_path)).splits.values()] == [2, 1, 1]
    (tmp_path / '4.txt').write_bytes(b'\x00\x01\x02')
    with pytest.raises(CorpusError, match='4.txt is no text: it holds a zero byte'):
        load_corpus('masked_lm', str(tmp_path))
    (tmp_path / '4.txt').write_text('\n')
    with pytest.raises(CorpusError, match='4.txt is empty'):
        load_corpus('masked_lm', str(tmp_path))
    shutil.rmtree(tmp_path)
    Path(tmp_path).mkdir()
    (tmp_path / 'one.txt').write_text('alone')
    with pytest.raises(CorpusError, match='cannot make a train, a dev and a test split'):
        load_corpus('masked_lm', str(tmp_path))


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

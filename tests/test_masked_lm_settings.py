"What each setting of masked language modelling does: blocks, masks, names, scores on the way, a new head."

import math
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import transformers
from test_masked_lm import Says, objective_of
from test_text_blocks import random_words, spelling_tokenizer
from tiny_lm import LENGTH, SPECIAL, WORDS, tiny_lm, tiny_lm_config, tiny_task
from kdnotes.core.run_id import run_id
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.models import load_model
from kdnotes.tasks.sources import Corpus
from kdnotes.train import distributed as runtime
from kdnotes.train.evaluation import evaluate
from kdnotes.train.loop import accumulate, schedule_steps, train

VOCABULARY = len(SPECIAL) + WORDS


@pytest.fixture(scope='module')
def here():
    return runtime.start(tiny_lm_config())


def spelt_words() -> dict[str, list[str]]:
    "The words of each split; those of `dev` are long, those of `test` are not."
    long = [word for word in random_words(600, seed=1) if len(word) > 5]
    return dict(train=random_words(400), dev=long, test=random_words(300, seed=2))


def spelt_task(**parameters):
    "A task whose pieces are letters, two documents a split."

    def rows(split: str, words: list[str]) -> list[dict]:
        halves = words[: len(words) // 2], words[len(words) // 2 :]
        return [
            dict(id=f'{split}-{i}', text=' '.join(half), cluster=f'{split}-{i}')
            for i, half in enumerate(halves)
        ]

    splits = {split: rows(split, words) for split, words in spelt_words().items()}
    corpus = Corpus('spelt', 'folder', 'nowhere', splits, '0' * 64)
    return tiny_task(tiny_lm_config(**parameters), corpus, spelling_tokenizer())


# ---- scores ----


@pytest.mark.parametrize('name,prefix', [('dev', ''), ('test', ''), ('test', 'pseudo_')])
def test_a_word_costs_what_its_pieces_cost(here, name, prefix):
    task = spelt_task()
    torch.manual_seed(0)
    by_place = torch.randn(LENGTH, len(spelling_tokenizer()))
    model = Says(lambda ids: by_place.expand(len(ids), -1, -1))
    found = evaluate(model, task, (name,), here).metrics[name]
    words = spelt_words()[name]
    pieces = len(''.join(words))
    a_word = found[f'{prefix}nll'] * pieces / len(words)
    assert pieces > 3 * len(words)
    assert found[f'{prefix}nll_word'] == pytest.approx(a_word, rel=1e-9)
    assert found[f'{prefix}perplexity_word'] == pytest.approx(math.exp(a_word), rel=1e-9)
    if prefix:
        assert found['pseudo_nll'] != pytest.approx(found['nll'], rel=1e-3), 'one could stand for the other'


def test_a_score_hides_behind_the_mask_token_alone():
    task = spelt_task(mask_share=0.3)
    for name in task.evaluation_sets:
        index = np.arange(len(task.lengths(name)))
        batch = task.batch(name, index)
        truth = torch.from_numpy(task.texts[name].blocks.ids(task.texts[name].chosen))
        hidden = torch.zeros_like(truth, dtype=torch.bool).scatter_(1, batch.positions, True)
        ids = batch.inputs['input_ids']
        assert hidden.sum() == len(index) * 4 > 100
        assert (ids[hidden] == task.mask_id).all()
        assert torch.equal(ids[~hidden], truth[~hidden])
        assert torch.equal(batch.labels, truth.gather(1, batch.positions))


# ---- which blocks ----

INSIDE = LENGTH - 2


@pytest.mark.parametrize(
    'tokens,blocks',
    [(8, 1), (INSIDE, 1), (2 * INSIDE - 1, 1), (2 * INSIDE, 2), (50, 3), (10**6, None), (None, None)],
)
def test_train_tokens_are_the_first_ones(tokens, blocks):
    config = tiny_lm_config(train_tokens=tokens)
    task = tiny_task(config)
    whole = task.blocks['train'].ids(np.arange(len(task.blocks['train'])))
    n = len(whole) if blocks is None else blocks
    assert len(whole) > 3
    assert len(task.lengths('train')) == n
    steps = list(schedule_steps(task, config)[1])
    assert set(np.concatenate([step.index for step in steps]).tolist()) == set(range(n))
    batch = task.batch('train', np.arange(n))
    truth = torch.from_numpy(whole[:n])
    assert torch.equal(batch.labels, truth.gather(1, batch.positions))
    # a new head and the unigram model know no more than that
    counts = np.bincount(whole[:n, 1:-1].ravel(), minlength=VOCABULARY) + 1
    assert task.label_prior == pytest.approx(counts / counts.sum())


def test_score_blocks_are_drawn_once_for_all_seeds(here):
    uniform = Says(lambda ids: torch.zeros(*ids.shape, VOCABULARY))
    asked = []
    for seed in (0, 1):
        task = tiny_task(tiny_lm_config(seed=seed, score_blocks=5))
        found = evaluate(uniform, task, ('dev', 'test'), here).units
        for name in ('dev', 'test'):
            assert len(task.texts[name].blocks) > 5
            assert task.lengths(name).tolist() == [LENGTH] * 5
            # the unit of a pseudo-nll is block:position
            units = found.query('split == @name')['unit'].str.split(':').str[0]
            asked.append((name, sorted({int(unit) for unit in units})))
            assert asked[-1][1] == task.texts[name].chosen.tolist()
    assert asked[:2] == asked[2:]
    assert all(blocks != list(range(5)) for _, blocks in asked), 'the first ones are not a sample'
    whole = tiny_task(tiny_lm_config(score_blocks=None))
    assert len(whole.lengths('test')) == len(whole.blocks['test'])


# ---- soft targets of hidden tokens ----


@pytest.mark.parametrize('tokens', [2 * LENGTH, 8192], ids=['two micro-batches', 'one'])
def test_soft_targets_of_hidden_tokens_are_their_mean_divergence(here, tokens):
    T = 3.0
    config = tiny_lm_config(
        soft_on='masked', temperature=T, hidden_loss='none', micro_batch_tokens=tokens, mask_share=0.3
    )
    teacher = tiny_lm(7).eval()
    objective, trainable = objective_of(config, here, teacher, tiny_lm(1))
    task = objective.task
    index = np.array([5, 0, 2, 1])
    batch = task.batch('train', index)
    with torch.no_grad():
        log_p = (tiny_lm(7, closed=True)(**batch.inputs).logits / T).log_softmax(-1)
        log_q = (tiny_lm(1, closed=True)(**batch.inputs).logits / T).log_softmax(-1)
    every = T**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    divergences = every.gather(1, batch.positions)
    expected = float(divergences.mean())
    assert divergences.shape == (4, 4)
    assert expected != pytest.approx(float(every.mean()), rel=0.02), 'all tokens would do as well'
    signal = task.signal(teacher(**batch.inputs), batch)
    value, count = task.loss_terms(tiny_lm(1)(**batch.inputs), batch, signal)['soft']
    assert float(value.detach()) / count == pytest.approx(expected, rel=1e-5)
    losses, _, _ = accumulate(trainable, objective, here.scaler(), index)
    assert float(losses['soft']) == pytest.approx(expected, rel=1e-5)


# ---- names ----

CACHED = dict(signal='cached', soft_on='masked', masks='static', top_k=4, hidden_loss='none')


@pytest.mark.parametrize(
    'changed',
    [
        dict(seed=1),
        dict(mask_share=0.3),
        dict(whole_words=True),
        dict(rare_power=0.7),
        dict(train_tokens=50),
        dict(top_k=5),
        dict(smoke=True),
    ],
    ids=str,
)
def test_a_stored_signal_is_of_its_masks(changed):
    task = tiny_task(tiny_lm_config(**CACHED))
    other = tiny_task(tiny_lm_config(**CACHED | changed))
    assert other.signal_key() != task.signal_key()
    same = dict(learning_rate=1e-4, temperature=4, hard_weight=1, score_blocks=5, pseudo_sample=3)
    assert tiny_task(tiny_lm_config(**CACHED | same)).signal_key() == task.signal_key()


def name_of(**parameters) -> str:
    return run_id(tiny_lm_config(**parameters), 'a' * 64, dict(weights_sha256='b' * 64), 1)


@pytest.mark.parametrize('mode', ['baseline', 'full_kd'])
def test_a_run_is_named_after_the_texts_it_is_scored_on(mode):
    texts = ['test', 'wikitext2', 'test,wikitext2', 'wikitext2,test', 'test,wikitext2,imdb']
    names = [name_of(mode=mode, score_on=names) for names in texts]
    assert len(set(names)) == len(texts)
    assert name_of(mode=mode) == names[0]
    assert name_of(mode=mode, score_every=7) == name_of(mode=mode, score_epochs=2) == names[0]
    assert name_of(mode=mode, score_blocks=7) != names[0], 'scores on the way change no name'


# ---- scores on the way ----


def trained(here, **settings) -> SimpleNamespace:
    "Two epochs of four steps with dropout: an evaluation that drew numbers would change them."
    config = tiny_lm_config(**dict(epochs=2) | settings)
    task = tiny_task(config)
    model = tiny_lm(1, dropout=0.1)
    rows = []

    def on_row(kind, **values):
        if kind == 'eval':
            rows.append(SimpleNamespace(**values))

    signal = online_teacher(task, tiny_lm(7).eval(), config)
    result = train(task, model, config, here, on_row, signal)
    points = [point for point in result.curve if 'set' in point]
    losses = [point['loss'] for point in result.curve if 'loss' in point]
    assert result.steps == 4 * config.train.epochs
    weights = [p.detach() for p in model.parameters()]
    return SimpleNamespace(rows=rows, points=points, losses=losses, weights=weights)


@pytest.mark.slow
def test_scores_on_the_way_are_seen_and_change_nothing(here):
    plain = trained(here)
    found = {every: trained(here, score_every=every) for every in (1, 2, 3)}
    every_second = trained(here, epochs=4, score_epochs=2)
    assert [(row.step, row.set) for row in every_second.rows] == [(8, 'dev')]
    both = ['dev', 'test']
    # the first set at the end of an epoch; nothing after the last step, when all is scored anyway
    expected = {
        1: [(step, name) for step in range(1, 8) for name in both],
        2: [(step, name) for step in (2, 4, 6) for name in both],
        3: [(3, 'dev'), (3, 'test'), (4, 'dev'), (6, 'dev'), (6, 'test')],
    }
    assert [(row.step, row.set) for row in plain.rows] == [(4, 'dev')]
    for every, made in found.items():
        assert [(row.step, row.set) for row in made.rows] == expected[every]
        assert [(p['step'], p['set']) for p in made.points] == expected[every]
        for row, point in zip(made.rows, made.points):
            assert point['metric'] == 'nll' and point['value'] == row.metrics['nll'] > 0
        # each is of its own moment and text
        assert len({point['value'] for point in made.points}) == len(made.points)
        assert made.losses == plain.losses
        assert all(map(torch.equal, made.weights, plain.weights))
    [end_of_epoch] = plain.rows
    for made in found.values():
        assert [r.metrics for r in made.rows if (r.step, r.set) == (4, 'dev')] == [end_of_epoch.metrics]


# ---- a new head ----


def encoder(kind: str, folder: Path) -> None:
    "A pretrained model without a head, of random weights."
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    if kind == 'distilbert':
        sizes = dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, max_position_embeddings=32, **sizes
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


DENSE = dict(bert='cls.predictions.transform.dense', roberta='lm_head.dense', distilbert='vocab_transform')


@pytest.mark.parametrize('kind', DENSE)
def test_a_new_head_hands_on_what_it_is_given(kind, tmp_path):
    encoder(kind, tmp_path)
    model = load_model(tmp_path, 'AutoModelForMaskedLM', 0)
    dense = model.get_submodule(DENSE[kind])
    x = torch.randn(3, 32)
    assert torch.equal(dense(x), x)
    assert f'{DENSE[kind]}.weight' in model.new_parameters


def test_a_classifiers_new_layer_is_no_identity(tmp_path):
    "It is square, too."
    encoder('roberta', tmp_path)
    model = load_model(tmp_path, 'AutoModelForSequenceClassification', 0)
    assert not torch.equal(model.classifier.dense.weight, torch.eye(32))

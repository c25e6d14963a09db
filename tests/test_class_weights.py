"""Class weights and label smoothing: the loss of a step is torch's, however the step is divided,
and what cannot be meant is refused.
"""

from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertForSequenceClassification
from architectures import small_bert
from helpers import VOCABULARY, flat, tiny_config
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.spec import Loss
from kdnotes.experiment.plan import plan
from kdnotes.losses.targets import soft_target_kl
from kdnotes.tasks.batching import EncodedPairs, Ragged
from kdnotes.tasks.sources import Corpus
from kdnotes.tasks.text_classification import TextClassification, TextClassificationSettings
from kdnotes.train import distributed
from kdnotes.train.loop import Objective, accumulate, loss_weights, train
from ranks import launch

CPU = distributed.Runtime(torch.device('cpu'), 'fp32')
CLASSES = ['c'] * 17 + ['a'] * 5 + ['b'] * 3  # of the training rows
SETTINGS = [
    dict(class_weights='balanced'),
    dict(label_smoothing=0.15),
    dict(class_weights=(0.005, 0.0, 0.01), label_smoothing=0.3),  # the weights of a step are less than 1
]


def three_classes(unlabelled: int = 0, **settings) -> TextClassification:
    "Texts of one to eleven words, each of which is a token."
    rng = np.random.default_rng(2)
    texts = [[1, *rng.integers(10, 70, rng.integers(1, 12)).tolist(), 2] for _ in range(25 + unlabelled)]
    rows = [
        dict(id=f't{i}', text=f'text {i}', second='', label=label, cluster=f't{i}')
        for i, label in enumerate(CLASSES)
    ]
    more = [dict(row, id=f'u{i}', label='') for i, row in enumerate(rows[:unlabelled])]
    splits = dict(train=rows, dev=rows[15:], test=rows[15:]) | (dict(unlabelled=more) if more else {})
    corpus = Corpus('made up', 'made up', '', splits, 'x')
    task = TextClassification(corpus, settings=TextClassificationSettings(**settings), loss=Loss())
    encoded = {
        split: (Ragged.from_rows(ids), np.array([len(row) for row in ids]))
        for split, ids in dict(train=texts, dev=texts[15:25], test=texts[15:25]).items()
    }
    task.pairs = EncodedPairs(encoded)
    return task


def three_outputs() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        small_bert(VOCABULARY, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def asked(mode: str = 'full_student', **more):
    return tiny_config(mode, task='text_classification', **more)


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
@pytest.mark.parametrize('tokens', [8192, 64, 16])
def test_a_step_has_the_loss_and_the_gradient_of_torch(settings, tokens):
    task = three_classes(**settings)
    config = asked(micro_batch_tokens=tokens, **settings)
    index = np.arange(25)
    ours = three_outputs()
    losses, *_ = accumulate(
        ours, Objective(task, config, CPU, loss_weights(task, config), None), CPU.scaler(), index
    )

    weights = settings.get('class_weights')
    if weights == 'balanced':
        weights = compute_class_weight('balanced', classes=np.array(['a', 'b', 'c']), y=CLASSES)
    theirs = three_outputs()
    batch = task.batch('train', index)
    value = F.cross_entropy(
        theirs(**batch.inputs).logits,
        batch.labels,
        None if weights is None else torch.tensor(weights, dtype=torch.float32),
        label_smoothing=settings.get('label_smoothing', 0.0),
    )
    value.backward()
    assert losses['hard'].item() == pytest.approx(value.item(), abs=1e-6)
    gradients = [flat(p.grad for p in model.parameters()) for model in (ours, theirs)]
    np.testing.assert_allclose(*gradients, rtol=0, atol=1e-6)


def test_rows_without_a_label_and_soft_targets_are_not_weighed():
    plain, weighed = (three_classes(unlabelled=6, **more) for more in ({}, SETTINGS[2]))
    index = np.array([0, 18, 23, 26, 29])
    logits, teachers = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    for task in (plain, weighed):
        terms = task.loss_terms(
            SimpleNamespace(logits=logits), task.batch('train', index), dict(logits=teachers)
        )
        assert {name: n for name, (_, n) in terms.items()} == task.loss_counts('train', index)
        assert terms['soft'][0].item() == pytest.approx(soft_target_kl(logits, teachers, 2.0).item() * 5)
    labels = torch.tensor([2, 0, 1])
    expected = F.cross_entropy(
        logits[:3], labels, torch.tensor(SETTINGS[2]['class_weights']), label_smoothing=0.3
    )
    total, weight = terms['hard']
    assert (total / weight).item() == pytest.approx(expected.item(), abs=1e-6)
    assert weight == pytest.approx(0.01 + 0.005 + 0.0)


def in_ranks(ranks: int) -> tuple[np.ndarray, list[float]]:
    "What a rank does: weights and losses of a training."
    settings = SETTINGS[2]
    config = asked(ranks=ranks, micro_batch_tokens=64, **settings)
    here = distributed.start(config)
    losses = []

    def on_row(kind, **values):
        if kind == 'step':
            losses.append(values['loss'])

    model = three_outputs()
    train(three_classes(**settings), model, config, here, on_row)
    distributed.stop(here)
    return flat(p for name, p in model.named_parameters() if not name.endswith('key.bias')), losses


def test_two_ranks_learn_what_one_does():
    [(alone, losses)] = launch('test_class_weights:in_ranks', 1)
    (weights, of_main), (others, _) = launch('test_class_weights:in_ranks', 2, ranks=2)
    start = flat(p for name, p in three_outputs().named_parameters() if not name.endswith('key.bias'))
    assert np.abs(alone - start).max() > 1e-2 and np.array_equal(weights, others)
    np.testing.assert_allclose(of_main, losses, rtol=0, atol=1e-5)
    assert np.linalg.norm(weights - alone) < 1e-4 * np.linalg.norm(alone - start)


# ---- what is read, and what is refused ----


@pytest.mark.parametrize(
    'text, value', [('balanced', 'balanced'), ('1,2.5', (1.0, 2.5)), ([1, 2], (1.0, 2.0)), ('none', None)]
)
def test_weights_are_read_as_they_are_typed(text, value):
    assert make_config(task='text_classification', class_weights=text).task_settings.class_weights == value


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(class_weights='heavy'), ["class_weights=['heavy'] is refused: write balanced, or one number"]),
        (
            dict(class_weights='good=2,bad=1'),
            ["class_weights=['good=2', 'bad=1']", 'names of classes are not'],
        ),
        (dict(class_weights={'good': 2}), ["class_weights={'good': 2} is refused: write balanced"]),
        (dict(class_weights='1,-1'), ['class_weights=(1.0, -1.0)', 'numbers >= 0']),
        (dict(class_weights='0,0'), ['one of them above 0']),
        (dict(class_weights='1,2'), ['has 2 numbers', '12 classes', 'one for each']),
        (dict(label_smoothing=1.0), ['label_smoothing=1.0 is refused']),
        (dict(target='number', label_smoothing=0.1), ['label_smoothing=0.1', 'target=number has none']),
        (dict(target='number', class_weights='1,2'), ['class_weights=(1.0, 2.0)', 'target=number has none']),
        (dict(task='sentence_pairs', label_smoothing=0.1), ["task='sentence_pairs' does not read it"]),
        (dict(task='answer_selection', class_weights='1,2'), ['does not read it']),
        (dict(label_smoothing=0.1, loss='LOSS'), ['label_smoothing=0.1', 'loss of the task', 'replaces it']),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(given, words, tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    (tmp_path / 'mine.py').write_text(
        'def mine(outputs, batch, signal):\n    return outputs.logits.sum(), 1\n'
    )
    if given.get('loss'):
        given = given | dict(loss=f'{tmp_path}/mine.py:mine')
    with pytest.raises(KdnotesError) as e:
        plan(make_config(**dict(task='text_classification', corpus='embedded', mode='baseline') | given))
    assert all(word in str(e.value) for word in words) and '\n' not in str(e.value), e.value


def test_a_plan_shows_balanced_weights_of_the_rows_that_are_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    given = dict(task='text_classification', corpus='embedded', mode='baseline', labels=100)
    counts, texts = {}, {}
    for weights in (None, 'balanced'):
        planned = plan(make_config(**given, class_weights=weights), check=False)
        texts[weights] = planned.explain()
        counts[weights] = planned.labels['weights']
    assert counts[None] is None and 'class weights' not in texts[None].replace('class_weights', '')
    values = counts['balanced']
    assert len(values) == 12 and sum(100 / (12 * w) for w in values) == pytest.approx(100)
    assert f'balanced class weights {values[0]:.3g}, {values[1]:.3g}, ' in texts['balanced']


def test_a_new_head_starts_at_the_weighted_shares_of_the_classes():
    "Balanced classes weigh alike, but for the row that is added to each; one of weight 0 is not expected."
    assert three_classes(class_weights='balanced').label_prior == pytest.approx(1 / 3, abs=0.04)
    assert three_classes().label_prior == pytest.approx(np.array([6, 4, 18]) / 28)
    without = three_classes(class_weights=(1.0, 0.0, 1.0)).label_prior
    assert without[1] < 1e-6 and without.sum() == pytest.approx(1)

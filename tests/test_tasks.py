"The contract of `tasks.base`, demanded of every task in the registry: a new row of it gets these tests too."

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from kdnotes.core.config import TASKS, ConfigError, task_info
from kdnotes.core.spec import PATHS, parameters, teacher_names, with_values
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.distill.architectures import forward_flops
from kdnotes.tasks.base import Evaluation, Primary, Task
from kdnotes.tasks.sources import SPLITS, load_corpus

MEMBERS = sorted({*Task.__annotations__, *(name for name in vars(Task) if not name.startswith('_'))})
UNITS = ['split', 'set', 'unit', 'cluster', 'metric', 'value']
PREDICTIONS = ['split', 'unit', 'item', 'label', 'score']


def word_pieces(info, corpus, folder):
    "A small tokenizer of the texts that a model reads."
    pieces = tokenizers.BertWordPieceTokenizer()
    texts = (text for split in SPLITS for key in info.texts for text in corpus.splits[split][key])
    pieces.train_from_iterator(texts, vocab_size=400, show_progress=False)
    words = pieces.get_vocab()
    (folder / 'vocab.txt').write_text('\n'.join(sorted(words, key=words.get)) + '\n', encoding='utf-8')
    return transformers.BertTokenizerFast.from_pretrained(folder)


def tiny_model(task, vocabulary):
    "The task's head on a BERT of one layer."
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        **task.model_kwargs,
    )
    torch.manual_seed(0)
    return getattr(transformers, task.auto_class).from_config(config).eval()


class OneRank:
    "A model as `Task.evaluate_model` calls it."

    rank = 0
    ranks = 1

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def __call__(self, batch):
        return self.model(**batch.inputs)

    def at(self, batch):
        return self(batch).logits[torch.arange(len(batch.positions)), batch.positions[:, 0]]

    def sum(self, values):
        return values


def evaluated(task, forward) -> Evaluation:
    if task.evaluates_itself:
        return task.evaluate_model(forward, task.evaluation_sets)
    scores = {}
    for split in task.evaluation_sets:
        batch = task.batch(split, np.arange(len(task.lengths(split))))
        scores[split] = task.scores(forward(batch), batch).numpy()
    return task.evaluate(scores)


@pytest.fixture(scope='module', params=TASKS)
def made(request, tmp_path_factory):
    "A task on the embedded corpus, encoded, with a model and what evaluating it gives."
    info = task_info(request.param)
    config = make_config(
        task=info.name, mode='full_kd', corpus='embedded', smoke=True, ranks=1, threads_per_rank=1
    )
    config = resolve(config, Machine('cpu', 1), 'embedded')
    corpus = load_corpus(info.name, 'embedded')
    tokenizer = word_pieces(info, corpus, tmp_path_factory.mktemp(info.name))
    task = info.make(corpus, config)
    task.encode(tokenizer)
    forward = OneRank(tiny_model(task, len(tokenizer)))
    return SimpleNamespace(
        info=info,
        config=config,
        corpus=corpus,
        tokenizer=tokenizer,
        task=task,
        forward=forward,
        evaluation=evaluated(task, forward),
    )


@pytest.fixture
def batch(made):
    return made.task.batch('train', np.array([5, 0, 3]))


# ---- what is known before a corpus is read ----


def test_the_row_of_the_registry(made):
    info = made.info
    assert info.name == made.task.name and TASKS[info.name] == type(made.task).__module__
    assert info.unit_name and info.unit_name == info.unit_name.strip()
    assert not set(info.settings.model_fields) & set(PATHS), 'settings have names of their own'
    margin, stricter = info.margins[made.task.primary.metric]
    assert 0 < stricter < margin
    assert {'epochs', 'learning_rate', 'warmup_fraction'} <= set(
        info.default_setting('embedded', 'teacher', 'none')
    )
    for own, of_teacher in teacher_names(info.name).items():
        assert {own, of_teacher} <= parameters(info.name).keys()


def test_batches_that_change_with_the_epoch_have_no_cached_signal(made, monkeypatch):
    module = sys.modules[TASKS[made.info.name]]
    monkeypatch.setattr(module, 'TASK', replace(made.info, batches_change=lambda config: True))
    with pytest.raises(ConfigError, match="change with the epoch; use signal='online'"):
        make_config(mode='full_kd', task=made.info.name, signal='cached')
    assert make_config(mode='full_student', task=made.info.name)


def test_a_saved_model_says_what_its_outputs_are(made):
    names = made.task.head_config.get('id2label')
    if made.task.head_labels == ():
        assert made.task.head_config['problem_type'] == 'regression'
    for found in filter(None, (names, made.task.head_labels)):
        assert len(found) == made.task.model_kwargs['num_labels']


def test_texts_of_a_row_are_its_texts(made):
    for split in SPLITS:
        for row in made.corpus.splits[split]:
            texts = [row[key] for key in made.info.texts if row[key]]
            assert texts and all(isinstance(text, str) and text.strip() for text in texts)
            assert all(text in row.values() for text in texts)


# ---- the task ----


def test_it_has_every_member(made):
    assert [name for name in MEMBERS if not hasattr(made.task, name)] == []
    assert isinstance(made.task.primary, Primary)
    assert made.task.primary.set in made.task.evaluation_sets
    assert hasattr(transformers, made.task.auto_class)
    assert isinstance(made.task.signal_key(), str)
    assert made.task.auto_class == made.info.auto_class
    assert made.task.evaluation_sets[0] == made.info.tuning_set != made.task.primary.set


def test_operations_of_body_and_head_are_those_pytorch_counts(made):
    model = copy.deepcopy(made.forward.model)
    model.set_attn_implementation('eager')
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((3, 11), 7))
    lengths = np.array([11] * 3)
    head = made.task.head_flops(model.config, lengths)
    assert head > 0
    assert forward_flops(model.config, lengths) + head == pytest.approx(counter.get_total_flops())


def test_every_example_has_a_length_and_a_group(made):
    for split in ('train', *made.task.evaluation_sets):
        lengths = made.task.lengths(split)
        texts = made.task.batch(split, np.array([0])).texts  # an example of several has the tokens of each
        n_texts = 1 if texts is None else texts.shape[1]
        assert lengths.min() > 0 and lengths.max() <= n_texts * made.config.data.max_length
        assert len(made.task.groups(split)) == len(lengths)


def test_a_smoke_run_is_shorter(made):
    values = with_values(made.config, smoke=False)
    whole = made.info.make(made.corpus, values)
    whole.encode(made.tokenizer)
    for split in ('train', *made.task.evaluation_sets):
        assert len(made.task.lengths(split)) < len(whole.lengths(split))
    assert whole.signal_key() != made.task.signal_key()


def test_a_batch_is_a_function_of_split_index_and_epoch(made):
    task = made.task
    index = np.array([5, 0, 3])
    for split in ('train', *task.evaluation_sets):
        first = task.batch(split, index, 1)
        task.batch(split, np.array([1, 2]), 0)
        again = task.batch(split, index.copy(), 1)
        assert first.index.tolist() == index.tolist() and first.tokens == again.tokens
        assert torch.equal(first.labels, again.labels)
        assert all(torch.equal(first.inputs[name], again.inputs[name]) for name in first.inputs)
        assert first.tokens == int(first.inputs['attention_mask'].sum())


def test_a_signal_is_as_its_spec_says(made, batch):
    if not made.task.signal_spec:  # online alone: nothing of it is stored
        with pytest.raises(ConfigError):
            make_config(task=made.info.name, mode='full_kd', signal='cached')
        return
    found = made.task.signal(made.forward(batch), batch)
    assert set(found) == set(made.task.signal_spec)
    for name, spec in made.task.signal_spec.items():
        rows = batch.tokens if spec.ragged else len(batch.index)
        assert tuple(found[name].shape) == (rows, *spec.for_teacher(made.forward.model).shape)
        assert found[name].is_floating_point() != spec.integer and not found[name].requires_grad


@pytest.mark.parametrize('kd', [False, True])
def test_loss_terms_are_counted_and_weighted(made, batch, kd):
    task = made.task
    outputs = made.forward(batch)
    terms = task.loss_terms(outputs, batch, task.signal(outputs, batch) if kd else None)
    counts = task.loss_counts('train', batch.index)
    assert {name: n for name, (_, n) in terms.items()} == {name: counts[name] for name in terms}
    assert set(terms) == set(task.loss_weights(kd))
    for total, _ in terms.values():
        assert total.ndim == 0 and total.isfinite()


def test_loss_terms_are_sums_over_the_examples(made):
    def sums(index):
        batch = made.task.batch('train', np.array(index))
        outputs = made.forward(batch)
        terms = made.task.loss_terms(outputs, batch, made.task.signal(outputs, batch))
        return {name: float(total) for name, (total, _) in terms.items()}

    groups = made.task.groups('train')
    first = np.flatnonzero(groups == groups[0]).tolist()
    others = np.flatnonzero(groups != groups[0])[:4]
    others = np.flatnonzero(np.isin(groups, groups[others])).tolist()
    apart = [sums(first), sums(others)]
    together = {name: sum(one[name] for one in apart) for name in apart[0]}
    assert sums(first + others) == pytest.approx(together, rel=1e-4, abs=1e-5)


# ---- evaluation ----


def test_tables_have_their_columns(made):
    assert list(made.evaluation.units.columns) == UNITS
    assert list(made.evaluation.predictions.columns) == PREDICTIONS
    assert set(made.evaluation.metrics) == set(made.task.evaluation_sets)
    assert set(made.evaluation.predictions['split']) == set(made.task.evaluation_sets)
    keys = made.evaluation.units[['split', 'unit', 'metric']]
    assert not keys.duplicated().any(), 'a unit has one value of a metric'


def test_the_primary_metric_is_the_mean_of_its_units(made):
    where, metric, _ = made.task.primary
    units = made.evaluation.units
    values = units[(units['split'] == where) & (units['metric'] == metric)]['value']
    assert len(values) > 1
    assert made.evaluation.metrics[where][metric] == pytest.approx(values.mean(), abs=1e-9)


def test_every_unit_has_its_predictions(made):
    for split in made.task.evaluation_sets:
        units = made.evaluation.units
        predictions = made.evaluation.predictions
        scored = set(predictions[predictions['split'] == split]['unit'])
        assert set(units[units['split'] == split]['unit']) <= scored


@pytest.mark.parametrize('at_hand', [True, False], ids=['corpus', 'no corpus'])
def test_examples_for_people(made, at_hand):
    primary = made.task.primary._asdict() | {'value': 0.5}
    record = {'task': made.info.name, 'primary': primary}
    corpus = made.corpus if at_hand else None
    found = made.info.examples(record, made.evaluation.units, made.evaluation.predictions, corpus, 3)
    assert isinstance(found, pd.DataFrame) and len(found) == 3
    texts = {text for row in made.corpus.splits[primary['set']] for text in map(row.get, made.info.texts)}
    shown = {value.removesuffix(' …') for value in found.to_numpy().ravel() if isinstance(value, str)}
    texts = {' '.join(text.split()) for text in texts if text}
    # whole, or the beginning of a long one; an id may be a text's first word
    beginnings = {value for value in shown if len(value) > 100}
    whole = any(text in value for text in texts for value in shown)
    begun = any(text.startswith(value) for text in texts for value in beginnings)
    assert (whole or begun) == at_hand

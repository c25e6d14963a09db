"Several labels a text: from any file to metrics that equal scikit-learn's, a saved model and its use."

import json
import re
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy.special import expit, logit
from sklearn import metrics as sk
import kdnotes as kd
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.tables import class_cells
from kdnotes.distill.models import load_model
from kdnotes.distill.scores import mean_logits, measured, read_scores
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.experiment.card import snippet
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.evaluate import evaluate
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.experiment.predict_tables import predict_table
from kdnotes.losses.targets import hard_target_bce, soft_target_bce
from kdnotes.results.runs import RunFolder
from kdnotes.tasks.base import NO_LABEL, show_text
from kdnotes.tasks.label_sets import best_thresholds, constant_set, label_set_metrics
from kdnotes.tasks.sources import corpus_of, load_corpus
from kdnotes.tasks.text_classification import TASK, probe
from small_runs import ON

HEAD = 'AutoModelForSequenceClassification'
TEXTS = [f'text {word}' for word in ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven')]
SETS = [['ice'], ['ice', 'salt'], [], ['rust'], ['rust', 'ice'], [], ['salt'], ['ice']]
SMALL = dict(max_length=32, threads_per_rank=1, ranks=1, study='sets')


def planned(teacher: Path, mode: str = 'baseline', **more):
    student = dict(student_layers=(1,)) if mode != 'baseline' else {}
    given = SMALL | dict(task='text_classification', target='labels', corpus='embedded', smoke=True)
    return plan(make_config(mode=mode, teacher=str(teacher), **given | student | more), ON)


def task_of(corpus: str = 'embedded', **more):
    config = make_config(task='text_classification', target='labels', corpus=corpus, mode='full_kd', **more)
    return make_task(config, corpus_of(config))


def written(folder: Path, write, sets=SETS, test=None) -> Path:
    folder.mkdir(parents=True)
    for split in ('train', 'dev', 'test'):
        texts = [f'{text} of {split}' for text in TEXTS]
        write(folder / split, texts, test if test and split == 'test' else sets)
    return folder


# file endings, and how texts and sets are written
def _frame(texts, cells) -> pd.DataFrame:
    return pd.DataFrame(dict(text=texts, label=cells))


def _flags(texts, sets, kind=int) -> pd.DataFrame:
    names = ('ice', 'rust', 'salt')
    return pd.DataFrame(dict(text=texts) | {name: [kind(name in of) for of in sets] for name in names})


LISTS = {
    'parquet': lambda path, texts, sets: _frame(texts, sets).to_parquet(f'{path}.parquet'),
    'jsonl': lambda path, texts, sets: _frame(texts, sets).to_json(
        f'{path}.jsonl', orient='records', lines=True
    ),
    'csv': lambda path, texts, sets: _frame(texts, list(map(json.dumps, sets))).to_csv(
        f'{path}.csv', index=False
    ),
}
FLAGS = {
    'flags in csv': lambda path, texts, sets: _flags(texts, sets).to_csv(f'{path}.csv', index=False),
    'flags in parquet': lambda path, texts, sets: _flags(texts, sets, bool).to_parquet(f'{path}.parquet'),
    'flags as floats': lambda path, texts, sets: _flags(texts, sets, float).to_csv(
        f'{path}.csv', index=False
    ),
}


def test_every_file_holds_the_same_sets(home):
    shas, labels = set(), []
    for name, write in (LISTS | FLAGS).items():
        columns = 'label=salt+ice+rust' if name in FLAGS else None
        corpus = load_corpus('text_classification', str(written(home / name, write)), columns)
        shas.add(corpus.sha256)
        labels.append(corpus.splits['train']['label'].tolist())
    assert len(shas) == 1 and all(of == labels[0] for of in labels)
    assert labels[0][1:3] == ['["ice", "salt"]', '[]']
    bars = ['|'.join(of) or '[]' for of in SETS]
    of_bars = written(home / 'bars', lambda p, t, s: _frame(t, bars).to_csv(f'{p}.csv', index=False))
    one, other = (task_of(str(folder)) for folder in (of_bars, home / 'jsonl'))
    assert one.head_labels == other.head_labels == ('ice', 'rust', 'salt')
    for split, matrix in one.labels.items():
        assert (matrix == other.labels[split]).all() and matrix.sum() == 8
    assert one.labels['train'].dtype == np.int8


def test_tables_in_memory_hold_the_same_sets(home):
    folder = written(home / 'lists', LISTS['jsonl'])
    of_file = load_corpus('text_classification', str(folder))
    tables = {
        split: _flags([f'{text} of {split}' for text in TEXTS], SETS) for split in ('train', 'dev', 'test')
    }
    given = dict(task='text_classification', say=lambda text: None)
    data = kd.load_data(tables, columns=dict(label=['salt', 'ice', 'rust']), **given)
    lists = kd.load_data({split: _frame(table['text'], SETS) for split, table in tables.items()}, **given)
    for of in (data, lists):
        assert load_corpus('text_classification', of.corpus).sha256 == of_file.sha256


def test_numbers_of_classes_of_the_hub_get_their_names(home):
    datasets = pytest.importorskip('datasets')
    names = ['ice', 'rust', 'salt']
    numbers = [[names.index(name) for name in of] for of in SETS]
    folder = home / 'hub'
    folder.mkdir()
    for split in ('train', 'dev', 'test'):
        features = datasets.Features(
            text=datasets.Value('string'), label=datasets.Sequence(datasets.ClassLabel(names=names))
        )
        table = datasets.Dataset.from_dict(
            dict(text=[f'{text} of {split}' for text in TEXTS], label=numbers), features=features
        )
        table.to_parquet(folder / f'{split}.parquet')
        assert kd.core.hub.dataset_classes(table) == dict(label=names)
    lists = written(home / 'lists', LISTS['jsonl'])
    shas = {load_corpus('text_classification', str(of)).sha256 for of in (folder, lists)}
    assert len(shas) == 1
    assert class_cells([[0, 2], 1, None], names) == [['ice', 'salt'], 'rust', None]


def csv_of(cells, test=None):
    "Labels as they are, as a CSV file."
    return lambda folder: written(
        folder, lambda p, t, s: _frame(t, s).to_csv(f'{p}.csv', index=False), cells, test
    )


TWO = ['ice', 'rust', 'ice|rust', '[]', 'ice', 'rust', 'ice', 'rust']
# how the files are written, and what is said
WRONG = {
    'a text without a label': (csv_of(['', *TWO[1:]]), 'row 1: label is empty; fill it in or remove the row'),
    'no label at all': (csv_of(['[]'] * 8), "every label is '[]', so there is nothing to learn"),
    'one label': (csv_of(['ice', '[]'] * 4), "train has one label only, 'ice', and target=labels needs two"),
    'a label of test alone': (
        csv_of(TWO, ['ice|fog', 'fog', *TWO[2:]]),
        "test.csv, row 1: label 'ice|fog' has 'fog', which no row of train has, and 2 rows of test have it",
    ),
    'an empty name': (csv_of(['ice|', *TWO[1:]]), "label 'ice|' holds a label whose name is empty"),
    'a name in a list': (csv_of(['["ice", ""]', *TWO[1:]]), 'holds a label whose name is empty'),
    'a list of Python': (
        csv_of(["['ice', 'rust']", *TWO[1:]]),
        'is no JSON list; write names in double quotes',
    ),
    'lists of 0 and 1': (
        csv_of(['[0, 1, 0]', '[0, 0, 0]'] * 4),
        'has no name of a label but 0 or 1; write the',
    ),
    'no label was given': (csv_of(['nan?', '?', *TWO[2:]]), "row 2: label '?' says that nobody has labelled"),
}


@pytest.mark.parametrize('name', WRONG)
def test_labels_that_cannot_be_meant_are_a_sentence(name, home):
    write, words = WRONG[name]
    with pytest.raises(KdnotesError) as e:
        plan(make_config(task='text_classification', target='labels', corpus=str(write(home / 'c'))), ON)
    assert words in str(e.value) and '\n' not in str(e.value)


def test_columns_of_0_and_1_hold_nothing_else(home):
    def write(path, texts, sets):
        table = _flags(texts, sets)
        table.loc[3, 'rust'] = 2
        table.to_csv(f'{path}.csv', index=False)

    folder = written(home / 'two', write)
    with pytest.raises(
        KdnotesError, match="row 4: rust is '2' and must be 0 or 1, as one of several columns"
    ):
        load_corpus('text_classification', str(folder), 'label=ice+rust+salt')
    with pytest.raises(KdnotesError, match=r"there is no column 'ice\+fog'"):
        load_corpus('text_classification', str(folder), 'label=ice+fog')


def test_a_mix_of_lists_names_and_repeated_names_is_read(home):
    mixed = ['ice', ['rust', 'ice', 'rust'], [], 'salt|rust', ['a|b'], 'ice', ['salt'], 'rust']
    made = task_of(str(written(home / 'mixed', LISTS['jsonl'], mixed)))
    assert made.head_labels == ('a|b', 'ice', 'rust', 'salt'), 'a list may name what holds a bar'
    assert made.labels['train'][:5].tolist() == [
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0] * 4,
        [0, 0, 1, 1],
        [1, 0, 0, 0],
    ]


def test_a_column_that_has_a_plus_in_its_name_is_that_column(home):
    def write(path, texts, sets):
        _frame(texts, TWO).rename(columns=dict(label='a+b')).assign(a=0, b=1).to_csv(
            f'{path}.csv', index=False
        )

    folder = written(home / 'plus', write)
    assert load_corpus('text_classification', str(folder), 'label=a+b').splits['dev']['label'][0] == 'ice'


@pytest.mark.parametrize(
    'given, words',
    [
        (
            dict(class_weights='balanced'),
            "class_weights='balanced' is about classes, and target=labels has none",
        ),
        (dict(label_smoothing=0.1), 'label_smoothing=0.1 is about classes, and target=labels has none'),
        (dict(top_k=2), 'top_k=2 belongs to soft targets over classes, and target=labels has none'),
        (dict(min_probability=0.1), 'min_probability=0.1 belongs to soft targets over classes'),
        (dict(dialect='modelopt'), "dialect='modelopt' belongs to soft targets over classes"),
    ],
)
def test_settings_of_classes_are_refused(given, words):
    with pytest.raises(KdnotesError, match=re.escape(words)):
        make_config(task='text_classification', target='labels', mode='full_kd', **given)


def test_few_labelled_rows_may_lack_a_label(home):
    rare = [['ice'], ['rust'], ['ice'], ['rust'], ['ice', 'rust'], [], ['salt'], []]
    folder = written(home / 'rare', LISTS['jsonl'], rare)
    with pytest.raises(KdnotesError, match='use more than labels=3'):
        plan(make_config(task='text_classification', target='labels', corpus=str(folder), labels=3), ON)


@pytest.mark.parametrize('seed', range(4))
def test_metrics_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    labels = rng.random((60, 5)) < [0.5, 0.3, 0.1, 0.05, 0.0]
    logits = rng.normal(size=(60, 5)).astype(np.float32) + labels
    thresholds = rng.random(5)
    metrics, values = label_set_metrics(logits, labels, thresholds)
    p = expit(logits.astype(np.float64))
    given = p >= thresholds
    occurs = labels.any(0)
    expected = dict(
        samples_f1=sk.f1_score(labels, given, average='samples', zero_division=1),
        micro_f1=sk.f1_score(labels, given, average='micro'),
        macro_f1=sk.f1_score(labels, given, average='macro', zero_division=0),
        subset_accuracy=sk.accuracy_score(labels, given),
        mean_average_precision=sk.average_precision_score(labels[:, occurs], p[:, occurs], average='macro'),
        nll=np.mean([sk.log_loss(labels[:, k], p[:, k], labels=[0, 1]) for k in range(5)]),
    )
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-12)
    for name, of_units in values.items():
        assert of_units.shape == (60,) and of_units.mean() == pytest.approx(metrics[name], abs=1e-12)
    both_empty = ~labels.any(1) & ~given.any(1)
    assert (values['samples_f1'][both_empty] == 1).all()


def test_no_threshold_is_better_on_dev_than_the_one_that_is_chosen():
    rng = np.random.default_rng(0)
    labels = rng.random((80, 4)) < [0.5, 0.2, 0.05, 0.0]
    p = expit(rng.normal(size=(80, 4)).round(1) + labels)  # with equal ones
    chosen = best_thresholds(p, labels)
    for k in range(3):
        reached = sk.f1_score(labels[:, k], p[:, k] >= chosen[k])
        assert reached == pytest.approx(
            max(sk.f1_score(labels[:, k], p[:, k] >= t) for t in np.unique(p[:, k]))
        )
        assert abs(p[:, k] - chosen[k]).min() > 1e-9, 'it is between two probabilities'
    assert chosen[3] == 0.5
    for seed in range(3):  # the best of all prefixes, and none
        train = np.random.default_rng(seed).random((30, 4)) < 0.2 + 0.2 * seed
        order = np.argsort(-train.sum(0), kind='stable')
        sets = [np.isin(np.arange(4), order[:m]) for m in range(5)]
        f1 = [sk.f1_score(train, np.tile(s, (30, 1)), average='samples', zero_division=1) for s in sets]
        assert (constant_set(train) == sets[int(np.argmax(f1))]).all()


@pytest.mark.parametrize('k', (1, 3, 20))
def test_losses_are_those_of_torch_and_the_number_of_labels_is_no_scale(k):
    torch.manual_seed(k)
    z, t = (torch.randn(7, k, dtype=torch.float64) * 4 for _ in range(2))
    y = (torch.rand(7, k) < 0.3).to(torch.int8)
    torch.testing.assert_close(
        hard_target_bce(z, y), torch.nn.BCEWithLogitsLoss()(z, y.double()).float(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(hard_target_bce(z.repeat(1, 3), y.repeat(1, 3)), hard_target_bce(z, y))
    for T in (1.0, 3.0):
        p, q = (t / T).sigmoid(), (z / T).sigmoid()
        bce = torch.nn.functional.binary_cross_entropy
        divergence = bce(q, p, reduction='none') - bce(p, p, reduction='none')
        expected = (divergence.mean(1).sum() * T * T).float()
        torch.testing.assert_close(soft_target_bce(z, t, T, 'sum'), expected, atol=1e-4, rtol=1e-5)
    far = torch.tensor([[1e4, -1e4]], dtype=torch.float16, requires_grad=True)
    loss = hard_target_bce(far, torch.tensor([[0, 1]])) + soft_target_bce(far, -far.detach())
    loss.backward()
    assert loss.isfinite() and far.grad.isfinite().all()
    with pytest.raises(ValueError, match='one shape'):
        hard_target_bce(z, y[:, :1].repeat(1, k + 1))


def test_a_row_without_labels_has_a_soft_target_alone(home, small_teacher):
    folder = written(home / 'c', LISTS['jsonl'])
    (folder / 'unlabelled.jsonl').write_text('{"text": "nobody has read this"}\n{"text": "nor this"}\n')
    made = task_of(str(folder), teacher=str(small_teacher), temperature=3.0)
    assert made.unlabelled == 2 and made.labels['train'][-2:].tolist() == [[NO_LABEL] * 3] * 2
    made.encode(load_tokenizer(str(small_teacher)))
    index = np.array([0, 1, 8, 9])
    batch = made.batch('train', index)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    terms = made.loss_terms(
        transformers.modeling_outputs.SequenceClassifierOutput(logits=logits), batch, dict(logits=-logits)
    )
    assert terms['hard'][1] == made.loss_counts('train', index)['hard'] == 2 and terms['soft'][1] == 4
    torch.testing.assert_close(terms['hard'][0], hard_target_bce(logits[:2], batch.labels[:2], 'sum'))
    torch.testing.assert_close(terms['soft'][0], soft_target_bce(logits, -logits, 3.0, 'sum'))


def test_a_new_head_starts_at_the_log_odds_of_each_label(small_teacher):
    made = task_of(teacher=str(small_teacher))
    model = load_model(
        str(small_teacher), HEAD, 0, made.label_prior, independent_labels=True, **made.model_kwargs
    )
    shares = made.labels['train'].mean(0)
    assert model.classifier.bias.detach().sigmoid().numpy() == pytest.approx(shares, abs=0.01)


def test_trivial_baselines_need_no_network(home):
    made = task_of()
    n = {split: len(labels) for split, labels in made.labels.items()}
    floors = made.floors()
    assert set(floors) == {'frequent_labels'} <= set(TASK.floors)
    test = made.labels['test'].astype(bool)
    constant = np.tile(constant_set(made.labels['train']), (n['test'], 1))
    expected = sk.f1_score(test, constant, average='samples', zero_division=1)
    assert floors['frequent_labels'].metrics['test']['samples_f1'] == pytest.approx(expected, abs=1e-12)
    assert 'label_thresholds' not in made.head_config, 'a baseline is no model'
    rng = np.random.default_rng(0)
    features = {split: rng.normal(size=(n[split], 4)) + made.labels[split][:, :4] for split in n}
    sets = {split: features[split] for split in ('dev', 'test')}
    scores = made.probed(features['train'], made.labels['train'], sets)
    alone = probe(features['train'], made.labels['train'][:, 2], sets, 2)['test']
    assert scores['test'].shape == (n['test'], 6)
    assert scores['test'][:, 2] == pytest.approx(alone[:, 1] - alone[:, 0])


@pytest.fixture
def finished(home, small_teacher, rank_here):
    "A smoke run of a student and its teacher."
    return execute(planned(small_teacher, 'full_kd'))


def test_a_run_from_the_plan_to_its_use(finished, capsys, monkeypatch):
    run = finished
    assert run['corpus'] == 'embedded_labels' and run['primary']['metric'] == 'samples_f1'
    names = {'samples_f1', 'micro_f1', 'macro_f1', 'subset_accuracy', 'mean_average_precision', 'nll'}
    assert set(run['metrics']['test']) == names
    folder = RunFolder('sets', run['run_id'])
    config = json.loads((folder.path / 'model' / 'config.json').read_text())
    assert config['problem_type'] == 'multi_label_classification'
    labels = list(config['id2label'].values())
    thresholds = np.array([config['label_thresholds'][name] for name in labels])
    table = folder.table('predictions')
    test = table[table['split'] == 'test'].pivot(index='unit', columns='item', values=['label', 'score'])
    given = expit(test['score'][labels].to_numpy(float)) >= thresholds
    f1 = sk.f1_score(test['label'][labels].to_numpy(int), given, average='samples', zero_division=1)
    assert f1 == pytest.approx(run['metrics']['test']['samples_f1'], abs=1e-9)
    dev = table[table['split'] == 'dev'].pivot(index='unit', columns='item', values=['label', 'score'])
    chosen = best_thresholds(expit(dev['score'][labels].to_numpy(float)), dev['label'][labels].to_numpy(int))
    assert thresholds == pytest.approx(chosen, abs=1e-6)

    rows = load_corpus('text_classification', 'embedded_labels').splits['test'][:48]
    answers = predict(run['run_id'], text=rows['text'].tolist())
    for row, answer in zip(test.loc[rows['id'].tolist(), 'score'][labels].to_numpy(float), answers):
        of_name = {of['label']: of['probability'] for of in answer.values['labels']}
        assert [of_name[name] for name in labels] == pytest.approx(expit(row), abs=1e-4)
        assert answer.values['predicted'] == [
            name for name in sorted(labels) if of_name[name] >= config['label_thresholds'][name]
        ]
        assert answer.lines[0].startswith('labels: ')
    frame = predict_table(run['run_id'], pd.DataFrame(dict(text=rows['text'].tolist())))
    assert [json.loads(of) for of in frame['predicted']] == [of.values['predicted'] for of in answers]
    assert [f'probability_{name}' for name in labels] == [c for c in frame if c.startswith('probability_')]

    program = snippet(run, str(folder.path / 'model'))
    exec(program, {})  # noqa: S102
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith('[')
    card = (folder.path / 'model' / 'README.md').read_text()
    assert 'reach their thresholds' in card and 'sigmoid' in card and 'gets one of the training' not in card
    shown = show_text(
        run,
        next(folder.table('units').query("split == 'test'").itertuples()),
        table[table['unit'] == 'test-0'],
        [],
    )
    assert shown.keys() == {'text', 'label', 'predicted'}


def test_a_model_is_evaluated_on_a_file_by_its_own_thresholds(finished, home):
    rows = load_corpus('text_classification', 'embedded_labels').splits['test'][:48]
    file = home / 'new.csv'
    bars = ['|'.join(json.loads(of)) or '[]' for of in rows['label']]
    pd.DataFrame(dict(text=rows['text'].tolist(), label=bars)).to_csv(file, index=False)
    result = evaluate(finished['run_id'], str(file))
    table = result.table.set_index(['about', 'metric'])['estimate']
    for metric in ('samples_f1', 'micro_f1', 'macro_f1', 'nll'):
        assert table['model', metric] == pytest.approx(finished['metrics']['test'][metric], abs=1e-4)
    assert set(result.units.columns) >= {'samples_f1', 'prediction'}
    assert all(isinstance(json.loads(of), list) for of in result.units['prediction'])
    # a model without its run: thresholds are those of its config
    alone = home / 'alone'
    RunFolder('sets', finished['run_id']).path.joinpath('model').rename(alone)
    again = evaluate(str(alone), str(file), task='text_classification')
    table = again.table.set_index(['about', 'metric'])['estimate']
    assert table['model', 'samples_f1'] == pytest.approx(finished['metrics']['test']['samples_f1'], abs=1e-4)
    file.write_text('text,label\nIce floats.,comet\nIt is grey.,[]\n')
    with pytest.raises(KdnotesError, match="label 'comet' has 'comet', which is none of"):
        evaluate(str(alone), str(file), task='text_classification')


def test_a_cached_signal_teaches_what_the_teacher_itself_does(finished, small_teacher):
    online, plain = (
        execute(planned(small_teacher, 'full_kd', signal='online')),
        execute(planned(small_teacher, 'full_student')),
    )
    cached, same, other = (weights_of(run) for run in (finished, online, plain))
    # batches of a cache are padded otherwise, so a teacher's outputs differ in their last digits
    assert (cached - same).abs().max() < 1e-4 < 10 * 1e-4 < (cached - other).abs().max()


def weights_of(run: dict) -> torch.Tensor:
    folder = RunFolder('sets', run['run_id']).path / 'model'
    return torch.nn.utils.parameters_to_vector(load_model(str(folder), HEAD, 0).parameters()).detach()


def head(folder: Path, labels, teacher: Path, **config) -> Path:
    "A model of some outputs, on the encoder of the small teacher."
    model = load_model(str(teacher), HEAD, 1, num_labels=len(labels))
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {name: i for i, name in enumerate(labels)}
    model.config.update(config)
    model.save_pretrained(folder)
    load_tokenizer(str(teacher)).save_pretrained(folder)
    return folder


MULTI = dict(problem_type='multi_label_classification')
SUBJECTS = ['animal', 'country', 'element', 'mountain', 'person', 'river']


def test_a_given_head_must_have_a_probability_of_its_own_for_each_label(home, small_teacher):
    turned = [name.upper() for name in SUBJECTS[2:] + SUBJECTS[:2]]
    right = head(home / 'right', turned, small_teacher, **MULTI)
    assert planned(right, 'full_kd', teacher_mode='given').head == ()
    softmax = head(home / 'softmax', SUBJECTS, small_teacher)
    with pytest.raises(KdnotesError, match='add up to 1 .*target=labels needs one of its own'):
        planned(softmax, 'full_kd', teacher_mode='given')
    unnamed = head(home / 'unnamed', [f'LABEL_{i}' for i in range(6)], small_teacher, **MULTI)
    with pytest.raises(KdnotesError, match='the outputs of .* are called LABEL_0.*must have the same names'):
        planned(unnamed, 'full_kd', teacher_mode='given')
    with pytest.raises(KdnotesError, match='multi_label_classification'):
        classes = dict(target='classes', corpus='embedded')
        planned(right, 'full_kd', teacher_mode='given', **classes)


def with_scores(folder: Path, columns, sets=SETS) -> Path:
    def write(path, texts, sets):
        _frame(texts, sets).assign(**columns).to_json(f'{path}.jsonl', orient='records', lines=True)

    return written(folder, write, sets)


def scores_of(folder: Path, columns: str, **more):
    config = make_config(
        task='text_classification',
        target='labels',
        corpus=str(folder),
        mode='full_kd',
        columns=columns,
        teacher_mode='scores',
        **more,
    )
    corpus = corpus_of(config)
    made = make_task(config, corpus)
    return made, read_scores(made, corpus, config)


def test_scores_of_a_teacher_are_logits_or_probabilities_of_each_label(home):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(8, 3)) * 3
    p = expit(z)
    folder = with_scores(home / 'c', dict(z=z.tolist(), a=p[:, 0], b=p[:, 1], c=p[:, 2]))
    made, logits = scores_of(folder, 'teacher=z')
    _, probabilities = scores_of(folder, 'teacher=a+b+c', scores_are='probabilities')
    assert logits.logits['train'] == pytest.approx(z, abs=1e-5)
    assert probabilities.logits['train'] == pytest.approx(z, abs=1e-4)
    metrics = measured(made, logits)['test']
    expected, _ = label_set_metrics(z, made.labels['test'], best_thresholds(p, made.labels['dev']))
    assert metrics['samples_f1'] == pytest.approx(expected['samples_f1'])
    for columns, words in {
        'teacher=a+b+c': 'holds probabilities, as it does in 8 of 8 rows: numbers from 0 to 1; say',
        'teacher=a+b': 'holds 2 numbers, and there are 3 classes',
    }.items():
        with pytest.raises(KdnotesError, match=words):
            scores_of(folder, columns)
    with pytest.raises(KdnotesError, match='which is no probability'):
        scores_of(folder, 'teacher=z', scores_are='probabilities')


def test_the_mean_of_probabilities_is_taken_label_by_label():
    config = make_config(
        task='text_classification',
        target='labels',
        mode='full_kd',
        teachers='a,b',
        teachers_mean='probabilities',
    )
    one, other = np.array([[0.9, 0.2, 0.5]]), np.array([[0.5, 0.4, 0.5]])
    logits = [torch.tensor(logit(p)) for p in (one, other)]
    mean = mean_logits(logits, config, independent_labels=True).sigmoid().numpy()
    assert mean == pytest.approx((one + other) / 2)


def test_the_plan_says_how_many_labels_a_text_has(small_teacher, home):
    text = planned(small_teacher).explain()
    assert re.search(r"6 labels, 1\.\d\d per text \(\d+ texts without one\): 'animal' \d+%", text)
    assert planned(small_teacher, corpus='auto').config.data.corpus == 'embedded_labels'


@pytest.mark.exhaustive
def test_two_ranks_learn_what_one_does(home, small_teacher):
    given = dict(student_layers=(1,), dropout=0.0, batch_size=16)
    one = execute(planned(small_teacher, 'full_kd', **given))
    two = execute(planned(small_teacher, 'full_kd', **given | dict(ranks=2)))
    assert two['metrics']['test']['nll'] == pytest.approx(one['metrics']['test']['nll'], abs=1e-4)


@pytest.mark.exhaustive
def test_an_export_reads_the_same_in_onnx_and_has_its_thresholds(finished, home):
    pytest.importorskip('onnxruntime')
    from kdnotes.experiment.export import export_model

    exported = export_model(finished['run_id'], str(home / 'out'), int8=True, teacher=False)
    assert (
        exported['onnx']['largest_difference'] < 1e-3 and exported['int8']['test']['metric'] == 'samples_f1'
    )
    config = json.loads((home / 'out' / 'config.json').read_text())
    assert config['label_thresholds'].keys() == set(config['id2label'].values())
    frame = pd.DataFrame(dict(text=TEXTS))
    torch_answers, onnx = (predict_table(finished['run_id'], frame, backend=b) for b in ('torch', 'onnx'))
    assert list(torch_answers['predicted']) == list(onnx['predicted'])

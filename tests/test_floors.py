"""Trivial baselines: right values worked out by hand, and those of the committed evidence."""

import itertools
import json
import re
import shutil
from pathlib import Path
import numpy as np
import pytest
import torch
import transformers
from kdnotes.core.columns import Columns
from kdnotes.core.config import TASKS, metric_name, task_info
from kdnotes.core.files import cache_path
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.core.run_id import settings
from kdnotes.distill.tokenizers import load_tokenizer, reads_as
from kdnotes.experiment.compatibility import make_task
from kdnotes.stats.comparable import trivial_baselines
from kdnotes.stats.evidence import known_baselines, unscored_starts
from kdnotes.distill.models import FrozenEncoder
from kdnotes.distill.weights import MINILM, find_model, reading_sha256, source_sha256
from kdnotes.experiment import worker
from kdnotes.experiment.clean import clean, leftovers
from kdnotes.experiment.worker import floor_keys, have_floors
from kdnotes.results.store import floors, records
from kdnotes.tasks.base import FLOOR_COLUMNS, floor_table, floors_key
from kdnotes.tasks.ranking_metrics import (
    group_by_question,
    average_ties,
    ranking_metrics,
    threshold_metrics,
)
from kdnotes.tasks.sources import Corpus, corpus_of
from kdnotes.tasks.text_classification import TextClassification, TextRegression
from kdnotes.core.spec import value_of
from small_runs import small_model
from tiny_lm import tiny_corpus, tiny_lm_config, tiny_tokenizer

ROOT = Path(__file__).parents[1]
DATA = ROOT / 'thesis' / 'data'


def config_of(task, corpus='embedded', **given):
    return resolve(
        make_config(task=task, mode='baseline', corpus=corpus, **given), Machine('cpu', cores=2), corpus
    )


def task_of(task, corpus='embedded', **given):
    config = config_of(task, corpus, **given)
    made = make_task(config, corpus_of(config))
    if task == 'masked_lm':
        made.encode(load_tokenizer(config.model.pretrained))
    return made


# ---- answer selection ----


def question_of(labels):
    rows = [
        dict(question_id='Q', document_id='D', sentence_id=f'S{i}', label=label)
        for i, label in enumerate(labels)
    ]
    return group_by_question(Columns.from_rows(rows))


def every_order(scores):
    "Scores that put equal ones into each of their orders."
    for order in itertools.permutations(range(len(scores))):
        yield np.asarray(scores) + 1e-3 * np.array(order)


@pytest.mark.parametrize('scores', [(0,) * 5, (1, 0, 1, 0, 0), (2, 1, 1, 1, 0), (0, 1, 2, 3, 4), (7,)])
def test_floors_are_means_over_all_orders_of_equal_scores(scores):
    for labels in itertools.product((0, 1), repeat=len(scores)):
        questions = question_of(labels)
        every = [ranking_metrics(questions, order) for order in every_order(scores)]
        for name, value in ranking_metrics(average_ties(questions), np.array(scores)).items():
            assert value == pytest.approx(np.mean([found[name] for found in every], axis=0)), (labels, name)


def test_answering_by_equal_scores_is_right_as_often_as_one_of_them():
    "Three questions whose first two candidates are equal: both right, one of them, none."
    labels = (1, 1, 0), (1, 0, 0), (0, 0, 1)
    rows = [
        dict(question_id=f'Q{q}', document_id='D', sentence_id=f'S{i}', label=label)
        for q, own in enumerate(labels)
        for i, label in enumerate(own)
    ]
    questions = average_ties(group_by_question(Columns.from_rows(rows)))
    found = threshold_metrics(questions, np.array([1, 1, 0] * 3), dict(pair=1.0, trigger=1.0))
    assert found['trigger_precision'] == found['trigger_recall'] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found['pair_precision'] == 3 / 6 and found['pair_recall'] == 3 / 4


# ---- classes and numbers ----


def corpus_of_pairs(labels):
    "Pairs that share their words or none; `labels` says what each kind is."
    kinds = [('ice is cold', 'Ice is cold.'), ('ice is cold', 'iron sinks')]
    rows = [
        dict(id=f'{i}', text=first, second=second, label=labels[i % 2], cluster=f'{i}')
        for i, (first, second) in enumerate(kinds * 6)
    ]
    return Corpus('pairs', 'folder', '', dict(train=[*rows, rows[0]], dev=rows, test=rows), 'x')


def test_classes_have_the_largest_one_and_pairs_what_they_share():
    found = TextClassification(corpus_of_pairs(('same', 'other'))).floors()
    assert found['majority'].metrics['test']['accuracy'] == 0.5  # 7 of 13 in train, 6 of 12 here
    # shares of 'other' and 'same': 6 + 7/15 and 7 + 8/15 of 14 (one more of each class, one more of all)
    other, same = (6 + 7 / 15) / 14, (7 + 8 / 15) / 14
    assert found['majority'].metrics['test']['nll'] == pytest.approx(-np.log([other, same]).mean())
    assert found['shared_words'].metrics['test']['accuracy'] == 1.0


def test_numbers_have_their_mean_and_pairs_that_of_what_they_share():
    found = TextRegression(corpus_of_pairs(('1', '0'))).floors()
    train = np.array([1.0] * 7 + [0.0] * 6)
    right = ((np.array([1.0, 0.0]) - train.mean()) ** 2).mean() / train.var()
    assert found['mean'].metrics['test']['mse'] == pytest.approx(right, rel=1e-5)
    assert found['shared_words'].metrics['test']['mse'] < 0.05 and 'majority' not in found


# ---- language models ----


def test_a_unigram_model_has_the_shares_of_the_training_text():
    config = tiny_lm_config()
    task = make_task(config, tiny_corpus())
    task.encode(tiny_tokenizer())
    ids = task.blocks['train'].ids(task.trained)[:, 1:-1].ravel()
    counts = np.bincount(ids, minlength=65)[5:] + 1  # no special token is asked for
    nats = -np.log(counts / counts.sum())
    found = task.floors()['unigram']
    text = task.texts['test']
    labels = task.batch('test', np.arange(len(text.chosen))).labels.numpy() - 5
    assert found.metrics['test']['nll'] == pytest.approx(nats[labels].mean())
    assert found.metrics['test']['unigram_nll'] == pytest.approx(found.metrics['test']['nll'])
    asked = text.blocks.maskable(text.chosen)  # ends of documents are not
    of_blocks = [nats[ids[own] - 5].mean() for ids, own in zip(text.blocks.ids(text.chosen), asked)]
    assert found.metrics['test']['nll_all'] == pytest.approx(np.mean(of_blocks))
    alone = found.predictions[found.predictions['item'] == 'alone']
    assert found.metrics['test']['pseudo_nll'] == pytest.approx(nats[alone['label'].to_numpy() - 5].mean())


# ---- all tasks ----


@pytest.mark.parametrize('name', TASKS)
def test_floors_are_means_of_units_on_every_evaluation_set(name):
    task = task_of(name, smoke=True)
    found = task.floors()
    rng = np.random.default_rng(0)
    if frozen := task.encoder_floor(lambda texts: rng.normal(size=(len(texts), 8)).astype(np.float32)):
        found = {**found, 'frozen_encoder': frozen}
    assert bool(frozen) == ('frozen_encoder' in task_info(name).floors)
    assert found and found.keys() <= task_info(name).floors.keys()
    table = floor_table(found)
    for floor, of in found.items():
        assert set(of.metrics) == set(task.evaluation_sets)
        means = of.units.groupby(['split', 'metric'])['value'].mean()
        for (split, metric), mean in means.items():
            assert of.metrics[split][metric] == pytest.approx(mean, nan_ok=True)
        own = table[(table['floor'] == floor) & (table['unit'] == '')]
        assert (task.primary.set, task.primary.metric) in set(zip(own['split'], own['metric']))


def test_runs_that_were_made_before_get_their_floors_without_training(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    config = config_of('extractive_qa', smoke=True, study='old')
    sha = corpus_of(config).sha256
    have_floors(config, 'f' * 64)  # of another corpus than there is today
    assert len(floors('old')) == 0
    have_floors(config, sha)
    key = floors_key(task_info('extractive_qa'), sha, settings(config))
    never = floors('old', key).query(
        "floor == 'never' and unit == '' and metric == 'exact' and split == 'test'"
    )
    assert never['value'].tolist() == [0.5]  # a smoke run has twelve with and twelve without an answer
    path = tmp_path / 'runs/old/floors.csv.gz'
    before = path.stat().st_mtime_ns
    have_floors(config, sha)
    assert path.stat().st_mtime_ns == before


# ---- the committed evidence ----

STUDIES = sorted(p.name.removesuffix('.records.jsonl') for p in DATA.glob('*.records.jsonl'))


def kept(study):
    "Floors of committed evidence that its records stand beside."
    return known_baselines(study, records(study))


@pytest.mark.parametrize('study', STUDIES)
def test_evidence_has_floors_of_all_its_primary_units(study):
    table = kept(study)
    assert len(table)
    for _, own in table.groupby('floor'):
        r = records(study)[0]
        where, metric = r['primary']['set'], r['primary']['metric']
        of_set = own[(own['split'] == where) & (own['metric'] == metric)]
        mean = of_set[of_set['unit'] != '']['value'].mean()
        assert of_set[of_set['unit'] == '']['value'].item() == pytest.approx(mean, rel=1e-4)


def test_floors_of_evidence_are_what_the_code_gives_today():
    now = floor_table(task_of('answer_selection').floors())
    then = kept('embedded-rates')
    then = then[then['floor'] != 'frozen_encoder'][list(FLOOR_COLUMNS)].reset_index(drop=True)
    assert (now.drop(columns='value') == then.drop(columns='value')).all(axis=None)
    assert then['value'].to_numpy() == pytest.approx(now['value'].to_numpy(), rel=1e-5)


def rows_of_how_to(name):
    "(corpus, set, metric, floor, value) of a how-to's table."
    cells = json.loads((ROOT / f'nbs/howto/{name}.ipynb').read_text(encoding='utf-8'))['cells']
    [text] = [''.join(c['source']) for c in cells if 'trivial baseline | value' in ''.join(c['source'])]
    return [
        tuple(x.strip() for x in m.groups())
        for m in re.finditer(r'^\| `(\w+)` \|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$', text, re.M)
    ]


# MAP of all-MiniLM-L6-v2 as it comes, computed with twenty lines of plain transformers on another machine
FROZEN = {
    'wikiqa': dict(dev=0.687, test=0.715),
    'embedded-rates': dict(dev=0.733, test=0.737),
}


@pytest.mark.parametrize('study', FROZEN)
def test_the_frozen_encoder_of_evidence_has_the_value_of_plain_transformers(study):
    [found] = [
        floor for floor in trivial_baselines(records(study), kept(study)) if floor.name == 'frozen_encoder'
    ]
    assert found.words == 'the frozen encoder'
    for split, value in FROZEN[study].items():
        assert found.record['metrics'][split]['map'] == pytest.approx(value, abs=1e-3)


EVIDENCE = {  # (task, corpus) -> a study of it
    ('answer_selection', 'embedded'): 'embedded-rates',
    ('answer_selection', 'wikiqa'): 'wikiqa',
    ('answer_selection', 'squad1'): 'squad1',
    ('extractive_qa', 'squad1'): 'extractive_qa-squad1',
    ('extractive_qa', 'squad2'): 'squad2-qa',
    ('masked_lm', 'gutenberg'): 'gutenberg',
}
HOW_TO = dict(
    own_texts=('answer_selection', 'text_classification'),
    passages=('extractive_qa',),
    language_models=('masked_lm',),
)


@pytest.mark.parametrize('name', HOW_TO)
def test_how_tos_have_the_numbers_of_floors(name, request):
    rows = rows_of_how_to(name)
    assert rows and all(len(row) == 5 for row in rows)
    tables = {}
    for corpus, where, metric, floor, value in rows:
        [(task, key)] = [
            (t, key) for t in HOW_TO[name] for key, words in task_info(t).floors.items() if words == floor
        ]
        if (task, corpus) not in tables:
            if corpus == 'imdb':
                request.getfixturevalue('corpora')
            study = EVIDENCE.get((task, corpus))
            tables[task, corpus] = kept(study) if study else floor_table(task_of(task, corpus).floors())
        table = tables[task, corpus]
        table = table[(table['unit'] == '') & (table['split'] == where) & (table['floor'] == key)]
        found = {metric_name(m, task): v for m, v in zip(table['metric'], table['value'])}
        right = f'{100 * found[metric]:.1f} %' if value.endswith('%') else f'{found[metric]:.3f}'
        assert value == right, (corpus, metric, floor)


def test_rows_have_an_order_where_their_corpus_says_so(corpora):
    task = task_of('answer_selection', 'wikiqa')
    rows = task.rows['test']
    questions = group_by_question(rows)
    in_order = ranking_metrics(questions, -np.arange(len(rows)))['map'][questions.clean].mean()
    found = task.floors()
    assert found['row_order'].metrics['test']['map'] == pytest.approx(in_order)
    assert in_order == pytest.approx(0.633, abs=5e-4)
    assert 'row_order' not in task_of('answer_selection').floors()  # rows of a file may be in any order


# ---- the frozen encoder ----


def plain_embeddings(texts, max_length):
    "Mean-pooled hidden states by transformers alone, one text at a time."
    folder = find_model(MINILM)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = {}
    for text in dict.fromkeys(texts):
        with torch.no_grad():
            inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors='pt')
            found[text] = model(**inputs).last_hidden_state[0].mean(0)
    return torch.stack([found[text] for text in texts])


@pytest.mark.exhaustive
def test_the_frozen_encoder_ranks_as_plain_transformers_do():
    task = task_of('answer_selection')
    task.evaluation_sets = ('dev',)
    rows = task.rows['dev']
    u, v = (plain_embeddings([row[key] for row in rows], 128) for key in ('question', 'sentence'))
    cosine = torch.nn.functional.cosine_similarity(u, v).numpy()
    clean = group_by_question(rows).clean
    right = ranking_metrics(group_by_question(rows), cosine)['map'][clean].mean()
    assert right == pytest.approx(0.7325, abs=1e-3)
    found = task.encoder_floor(FrozenEncoder(MINILM))
    assert found.metrics['dev']['map'] == pytest.approx(right, abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize('corpus, right', dict(embedded=0.757, imdb=0.745).items())
def test_a_probe_of_the_frozen_encoder_tells_classes(corpus, right, request):
    if corpus == 'imdb':
        request.getfixturevalue('corpora')
    found = task_of('text_classification', corpus).encoder_floor(FrozenEncoder(MINILM))
    assert found.metrics['test']['accuracy'] == pytest.approx(right, abs=0.004)


def baselines(study, config, sha256):
    "Words -> value of the primary metric, of what is kept under the keys of a run."
    table = floors(study)
    table = table[table['key'].isin(floor_keys(config, sha256)) & (table['unit'] == '')]
    return table[table['split'] == 'test'].set_index(['floor', 'metric'])['value'].to_dict()


@pytest.mark.exhaustive
def test_baselines_that_read_labels_have_as_many_as_a_run(home, small_teacher):
    given = dict(study='few', teacher=str(small_teacher), max_length=32, labels=200)
    config = config_of('text_classification', seed=3, **given)
    sha = corpus_of(config).sha256
    assert have_floors(config, sha) == []
    found = baselines('few', config, sha)
    encoder = FrozenEncoder(small_teacher, 32)
    draws = []
    for seed in range(5):
        own = config_of('text_classification', seed=seed, **given)
        own_task = make_task(own, corpus_of(own))
        assert len(own_task.rows['train']) == 200
        draws.append({**own_task.floors(), 'frozen_encoder': own_task.encoder_floor(encoder)})
    for name in ('majority', 'frozen_encoder'):
        mean = np.mean([draw[name].metrics['test']['accuracy'] for draw in draws])
        assert found[name, 'accuracy'] == pytest.approx(mean, rel=1e-4)
    assert len({draw['frozen_encoder'].metrics['test']['accuracy'] for draw in draws}) > 1
    # draws of their own also for runs that keep another seed's labels
    have_floors(config_of('text_classification', seed=3, **given | dict(study='kept', labels_seed=7)), sha)
    assert baselines('kept', config, sha) == found
    # the same for every seed, and others with all labels
    before = (home / 'home/runs/few/floors.csv.gz').read_bytes()
    have_floors(config_of('text_classification', seed=0, **given), sha)
    assert (home / 'home/runs/few/floors.csv.gz').read_bytes() == before
    have_floors(config_of('text_classification', **given | dict(labels=None)), sha)
    assert len(floors('few')['key'].unique()) == 4


def test_a_frozen_encoder_that_cannot_be_had_is_left_out_with_its_reason(home, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    config = config_of('answer_selection', smoke=True, study='away', teacher='nobody/nothing')
    [why] = have_floors(config, corpus_of(config).sha256)
    assert why.startswith("the frozen encoder was not scored: 'nobody/nothing' is neither a folder nor")
    assert set(floors('away')['floor']) == {'random_order', 'shared_words', 'bm25'}


def test_embeddings_are_computed_once_and_cleaned_with_tokens(home, small_teacher, monkeypatch):
    given = dict(smoke=True, teacher=str(small_teacher), max_length=64)
    for study in ('one', 'other'):
        config = config_of('answer_selection', study=study, **given)
        have_floors(config, corpus_of(config).sha256)
        # another process' encoder finds what is kept, and computes nothing
        worker._encoder.cache_clear()
        monkeypatch.setattr(FrozenEncoder, '_embed', lambda self, texts: pytest.fail('computed again'))
    assert len(floors('one')) == len(floors('other'))
    own = [leftover for leftover in leftovers() if leftover.kind == 'embeddings']
    assert own and set(own) == set(clean(own)) and not list((cache_path() / 'embeddings').glob('*'))


def test_each_pretrained_start_of_a_study_has_a_baseline_under_its_name(home, small_teacher, tmp_path):
    other = small_model(tmp_path / 'other', seed=1)
    given = dict(smoke=True, study='two', max_length=64)
    config = config_of('answer_selection', teacher=str(small_teacher), **given)
    sha = corpus_of(config).sha256
    assert have_floors(config, sha) == []
    student = resolve(
        make_config(
            task='answer_selection',
            mode='full_student',
            corpus='embedded',
            student_init='hub',
            student=str(other),
            **given,
        ),
        Machine('cpu', cores=2),
        'embedded',
    )
    assert have_floors(student, sha) == []

    def made(config, network, source):
        reading = reading_sha256(source, reads_as(config))
        return dict(
            run_id=config.where.mode,
            task='answer_selection',
            study='two',
            mode=config.where.mode,
            factors=dict(network=network),
            corpus_sha256=sha,
            settings=settings(config),
            models=dict(
                teacher=config.model.pretrained, student=value_of(config, 'student'), profile='laptop'
            ),
            initial=dict(weights_sha256=source_sha256(source), reading_sha256=reading),
            teacher_run_id=None,
            primary=dict(set='test', metric='map', higher_is_better=True, value=0.5),
        )

    found = [made(config, 'teacher', small_teacher), made(student, 'student', other)]
    words = [floor.words for floor in trivial_baselines(found, known_baselines('two', found))]
    assert {f'the frozen encoder of {Path(of).name}' for of in (small_teacher, other)} < set(words)
    alone = [floor.words for floor in trivial_baselines(found[:1], known_baselines('two', found[:1]))]
    assert 'the frozen encoder' in alone and unscored_starts(found, known_baselines('two', found)) == []
    # weights in folders that are called alike have a baseline each
    namesake = small_model(tmp_path / 'elsewhere' / Path(small_teacher).name, seed=2)
    third = config_of('answer_selection', teacher=str(namesake), **given)
    assert have_floors(third, sha) == []
    alike = [made(config, 'teacher', small_teacher), made(third, 'teacher', namesake)]
    both = [
        f
        for f in trivial_baselines(alike, known_baselines('two', alike))
        if f.name.startswith('frozen_encoder')
    ]
    assert len(both) == len({f.words for f in both}) == len({f.value for f in both}) == 2
    # other weights under the same name are another start
    changed = found[0] | dict(initial=dict(weights_sha256='0' * 64))
    assert unscored_starts([changed], known_baselines('two', [changed])) == [str(small_teacher)]


def test_an_encoder_that_failed_answers_the_same_texts_the_next_time(small_teacher, monkeypatch):
    encoder = FrozenEncoder(small_teacher, 32)
    first = encoder(['iron'])
    with monkeypatch.context() as broken:
        broken.setattr(FrozenEncoder, '_embed', lambda self, texts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoder(['gold', 'iron'])
    texts = ['gold', 'iron', 'copper']
    assert encoder(texts) == pytest.approx(FrozenEncoder(small_teacher, 32)(texts), abs=1e-6)
    assert encoder(['iron']) == pytest.approx(first)


def test_weights_that_are_replaced_in_one_process_are_read_again(home, tmp_path):
    sha = None
    found = []
    for seed in (1, 2):
        folder = small_model(tmp_path / 'model', seed=seed)
        config = config_of('answer_selection', smoke=True, study='same', max_length=64, teacher=str(folder))
        sha = sha or corpus_of(config).sha256
        assert have_floors(config, sha) == []
        found.append(baselines('same', config, sha)['frozen_encoder', 'map'])
        shutil.rmtree(folder)
    alone = FrozenEncoder(small_model(tmp_path / 'other', seed=2), 64)
    right = make_task(config, corpus_of(config)).encoder_floor(alone).metrics['test']['map']
    assert found[1] == pytest.approx(right, rel=1e-4) != found[0]

"A teacher that is a column of the corpus: the same student as of its model, from any format, and no other."

import hashlib
import json
import re
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification
import kdnotes as kd
from architectures import configs, write_teacher
from kdnotes.stats.comparable import attribute
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.distill import weights
from kdnotes.distill.models import load_model
from kdnotes.distill.scores import read_scores
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.experiment.card import model_card
from kdnotes.experiment.study_plan import forecast
from kdnotes.experiment.launch import run
from kdnotes.experiment.study_plan import explain_study, plan_study
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study import run_study
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import records as study_records
from kdnotes.tasks.sources import corpus_of
from kdnotes.tasks.embedded import embedded_answer_selection, embedded_text_classification

FORMATS = ('csv', 'tsv', 'jsonl', 'parquet')
SIZES = dict(train=64, dev=40, test=40)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    "Runs and caches of the test's own; no real hub is asked."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(weights.hub_constants, 'HF_HUB_OFFLINE', True)


def small(folder: Path, outputs: int, seed: int = 0) -> Path:
    config = configs(2)['bert']
    config.num_labels = outputs
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.initializer_range = 0.4
    write_teacher(folder, config)
    if seed:
        torch.manual_seed(seed)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def tables(task: str) -> dict[str, pd.DataFrame]:
    "Some rows of the project's own corpus: whole questions, or two classes."
    of = dict(answer_selection=embedded_answer_selection, text_classification=embedded_text_classification)
    found = {}
    for split, rows in of[task]().items():
        if task == 'text_classification':
            classes = sorted({row['label'] for row in rows})[:2]
            rows = [row for row in rows if row['label'] in classes]
        keys = {'answer_selection': ('question', 'sentence'), 'text_classification': ('text',)}[task]
        rows = rows[: SIZES[split]]
        found[split] = pd.DataFrame([{key: row[key] for key in (*keys, 'label')} for row in rows])
    return found


def with_scores(task: str, seed: int = 0) -> dict[str, pd.DataFrame]:
    "Scores that know something of the labels."
    rng = np.random.default_rng(seed)
    found = tables(task)
    first = sorted(set(found['train']['label']))[0]
    for table in found.values():
        right = np.where(table['label'] == first, -1.0, 1.0)
        table['score'] = (2 * right + rng.normal(size=len(table)) * 2).astype(np.float32).astype(float)
    return found


def written(folder: Path, of: dict[str, pd.DataFrame], format: str = 'csv') -> Path:
    folder.mkdir(parents=True)
    for split, table in of.items():
        path = folder / f'{split}.{format}'
        if format == 'jsonl':
            path.write_text(''.join(json.dumps(row) + '\n' for row in table.to_dict('records')))
        elif format == 'parquet':
            table.to_parquet(path)
        else:
            table.to_csv(path, index=False, sep='\t' if format == 'tsv' else ',')
    return folder


def asked(corpus: Path, teacher: Path, mode: str = 'full_kd', task: str = 'answer_selection', **given):
    columns = 'question=question,sentence=sentence,label=label,' * (task == 'answer_selection')
    shared = dict(
        task=task, corpus=str(corpus), columns=f'{columns}teacher=score', teacher=str(teacher), epochs=1
    )
    shared |= dict(ranks=1, threads_per_rank=1, max_length=64, student_init='teacher_pretrained')
    kd_only = dict(teacher_mode='scores') if mode.endswith('kd') else {}
    return make_config(mode=mode, **shared | dict(student_layers=(1,)) | kd_only | given)


# ---- the same student ----


@pytest.mark.exhaustive
@pytest.mark.parametrize('format, ranking', [('csv', 'none'), ('parquet', 'margin_mse')])
def test_scores_of_a_cross_encoder_make_the_student_that_its_model_makes(
    format, ranking, tmp_path, rank_here
):
    "The scores are made by sentence-transformers alone, in batches of its own."
    ranker = pytest.importorskip('sentence_transformers').CrossEncoder
    teacher = small(tmp_path / 'teacher', 1)
    student = small(tmp_path / 'student', 2)
    found = tables('answer_selection')
    encoder = ranker(str(teacher), device='cpu', max_length=64, activation_fn=torch.nn.Identity())
    for table in found.values():
        pairs = list(zip(table['question'], table['sentence']))
        table['score'] = encoder.predict(pairs, batch_size=7).astype(np.float64)
        table['probability'] = encoder.predict(pairs, activation_fn=torch.nn.Sigmoid()).astype(np.float64)
    corpus = written(tmp_path / 'corpus', found, format)
    more = dict(student_init='hub', student=str(student), student_layers=None, learning_rate=1e-3)
    if ranking != 'none':
        more |= dict(ranking_loss=ranking)
    columns = 'question=question,sentence=sentence,label=label'
    of_model = run(asked(corpus, teacher, teacher_mode='given', columns=columns, **more))
    of_scores = run(asked(corpus, teacher, **more))
    probabilities = dict(columns=f'{columns},teacher=probability', scores_are='probabilities')
    of_probabilities = run(asked(corpus, teacher, **probabilities, **more))
    alone = run(asked(corpus, teacher, 'full_student', **more | dict(ranking_loss='none')))
    batch = dict(input_ids=torch.randint(5, 50, (8, 12), generator=torch.Generator().manual_seed(0)))

    def logits(record):
        folder = RunFolder(record['study'], record['run_id']).path / 'model'
        with torch.no_grad():
            return load_model(str(folder), 'AutoModelForSequenceClassification', 0)(**batch).logits

    same = logits(of_model)
    assert torch.allclose(logits(of_scores), same, atol=1e-5)
    assert torch.allclose(logits(of_probabilities), same, atol=1e-3)
    assert (logits(alone) - same).abs().max() > 1e-3, 'and it has learnt from them'
    # the given model and its scores score alike
    given = RunFolder(of_model['study'], of_model['teacher_run_id']).record()
    for split, metrics in given['metrics'].items():
        for name, value in metrics.items():
            assert of_scores['teachers']['metrics'][split][name] == pytest.approx(value, abs=1e-6), name
    assert of_scores['teacher_run_id'] is None and of_scores['time']['teacher_s'] is None
    assert 'outside kdnotes' in of_scores['reasons']['time.teacher_s']
    card = model_card(of_scores['run_id']).text
    assert of_scores['teachers']['sha256'][:12] in card.partition('- Teacher: ')[2].partition('\n')[0]
    assert 'Training time of the teacher' not in card


# ---- any format, any shape ----


@pytest.mark.parametrize('task', ('answer_selection', 'text_classification'))
def test_every_format_and_shape_holds_the_same_scores(task, tmp_path):
    teacher = small(tmp_path / 'teacher', 2)
    found = with_scores(task)
    plans = [plan(asked(written(tmp_path / format, found, format), teacher, task=task)) for format in FORMATS]
    shaped = {}
    for split, table in found.items():
        logits = np.stack([0 * table['score'], table['score']], axis=1)
        shaped[split] = table.drop(columns='score').assign(
            wrong=logits[:, 0], right=logits[:, 1], both=logits.tolist()
        )
    columns = 'question=question,sentence=sentence,label=label,' * (task == 'answer_selection')
    for format in FORMATS:
        folder = written(tmp_path / f'shaped-{format}', shaped, format)
        for name in ('wrong+right', 'both'):
            plans.append(plan(asked(folder, teacher, task=task, columns=f'{columns}teacher={name}')))
    assert len({p.run_id for p in plans}) == 1
    assert len({p.teachers['sha256'] for p in plans}) == 1
    data = kd.load_data(found, task, dict(teacher='score'))
    assert data.columns == 'teacher=score'
    of_table = asked(Path(data.corpus), teacher, task=task, columns=data.columns)
    assert plan(of_table).run_id == plans[0].run_id
    known = plans[0].teachers
    told = plans[0].explain()
    assert known['metrics'].keys() == {'dev', 'test'} and known['sha256'][:12] in told
    assert all(f' on {split}' in told for split in known['metrics'])


def test_scores_are_a_part_of_what_learns_from_them_and_of_nothing_else(tmp_path):
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    one = written(tmp_path / 'one', with_scores(task))
    other = written(tmp_path / 'other', with_scores(task, seed=1))
    plain = written(tmp_path / 'plain', tables(task))
    ids = {plan(asked(corpus, teacher, task=task)).run_id for corpus in (one, other)}
    assert len(ids) == 2
    ids = {
        plan(asked(corpus, teacher, 'full_student', task=task, columns=columns)).run_id
        for corpus, columns in [(one, 'teacher=score'), (other, 'teacher=score'), (one, None), (plain, None)]
    }
    assert len(ids) == 1
    # evaluation sets without scores, or with others, are another run: its record says how good they are
    unknown = {
        split: t if split == 'train' else t.drop(columns='score') for split, t in with_scores(task).items()
    }
    known = plan(asked(one, teacher, task=task))
    p = plan(asked(written(tmp_path / 'unknown', unknown), teacher, task=task))
    assert p.run_id != known.run_id and p.teachers['metrics'] == {} and len(known.teachers['metrics']) == 2
    assert 'quality on dev and test is unknown' in p.explain()
    # as they were named before evaluation sets counted
    assert p.teachers['sha256'] == hashlib.sha256(_shape_and_bytes(p)).hexdigest()
    without_test = with_scores(task)
    without_test['test'] = without_test['test'].drop(columns='score')
    p = plan(asked(written(tmp_path / 'half', without_test), teacher, task=task))
    assert p.teachers['metrics'].keys() == {'dev'}
    assert 'quality on test is unknown' in p.explain()


def _shape_and_bytes(p) -> bytes:
    corpus = corpus_of(p.config)
    train = read_scores(make_task(p.config, corpus), corpus, p.config).logits['train']
    return repr(train.shape).encode() + train.astype('<f4').tobytes()


def test_the_plan_and_the_record_say_the_same_of_the_scores_of_test(tmp_path, rank_here):
    "Test alone has other scores the second time."
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    found = with_scores(task)
    classes = sorted(set(found['train']['label']))
    right = np.where(found['test']['label'] == classes[1], 1.0, -1.0)
    ids = set()
    for name, share in (('right', 1.0), ('others', 0.4)):
        wrong = np.arange(len(right)) >= share * len(right)
        found['test']['score'] = np.where(wrong, -right, right)
        config = asked(written(tmp_path / name, found), teacher, task=task)
        its_plan = plan(config)
        record = run(config)
        assert its_plan.run_id == record['run_id']
        assert its_plan.teachers['metrics'] == record['teachers']['metrics']
        assert record['teachers']['metrics']['test']['accuracy'] == share
        ids.add(record['run_id'])
    assert len(ids) == 2


def test_a_set_with_a_part_of_the_scores_is_refused(tmp_path):
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    found = with_scores(task)
    for table in found.values():
        table['a'] = -table['score']
        table['b'] = table['score']
    for names, words in (('a+b', "test has 'a' and no 'b'"), ('a;b', "test has 'a' and no 'b'")):
        lacks = found | dict(test=found['test'].drop(columns='b'))
        corpus = written(tmp_path / names, lacks)
        with pytest.raises(KdnotesError, match=f'{words}.*give test all columns of scores, or none'):
            plan(asked(corpus, teacher, task=task, columns=f'teacher={names}'))
        without = found | dict(test=found['test'].drop(columns=['a', 'b']))
        p = plan(
            asked(
                written(tmp_path / f'{names}-none', without), teacher, task=task, columns=f'teacher={names}'
            )
        )
        assert p.teachers['metrics'].keys() == {'dev'}


def test_several_columns_are_several_teachers(tmp_path):
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    found = with_scores(task)
    for split, more in with_scores(task, seed=1).items():
        a, b = found[split]['score'], more['score']
        found[split] = found[split].assign(
            other=b,
            mean=(a + b) / 2,
            weighted=0.75 * a + 0.25 * b,
            share=(1 / (1 + np.exp(-a)) + 1 / (1 + np.exp(-b))) / 2,
        )
    corpus = written(tmp_path / 'corpus', found)

    def sha256(name, **given):
        return plan(asked(corpus, teacher, task=task, columns=f'teacher={name}', **given)).teachers['sha256']

    def close(a: dict, b: dict) -> bool:
        both = []
        for given in (a, b):
            config = plan(asked(corpus, teacher, task=task, **given)).config
            loaded = corpus_of(config)
            logits = read_scores(make_task(config, loaded), loaded, config).logits['train']
            both.append(np.diff(logits, axis=1))
        return np.allclose(*both, atol=1e-4)

    assert close(dict(columns='teacher=score;other'), dict(columns='teacher=mean'))
    weighted = dict(columns='teacher=score;other', teachers_weights='3,1')
    assert close(weighted, dict(columns='teacher=weighted'))
    shares = dict(columns='teacher=score;other', teachers_mean='probabilities')
    assert close(shares, dict(columns='teacher=share', scores_are='probabilities'))
    assert not close(shares, dict(columns='teacher=score;other'))
    assert sha256('score;other') != sha256('score')
    told = plan(asked(corpus, teacher, task=task, **weighted)).explain()
    assert 'the mean of their logits weighted 3, 1' in told and 'score; other' in told


@pytest.mark.exhaustive
@pytest.mark.parametrize('signal', ('cached', 'online'))
def test_several_models_teach_as_the_mean_of_their_scores_does(signal, tmp_path, rank_here):
    "Two folders, one of which has one output; the columns are what each says by itself."
    ranker = pytest.importorskip('sentence_transformers').CrossEncoder
    teachers = [small(tmp_path / f'teacher-{outputs}', outputs, seed=outputs) for outputs in (1, 2)]
    student = small(tmp_path / 'student', 2)
    found = tables('answer_selection')
    for folder, name in zip(teachers, 'ab'):
        encoder = ranker(str(folder), device='cpu', max_length=64, activation_fn=torch.nn.Identity())
        for table in found.values():
            said = encoder.predict(list(zip(table['question'], table['sentence']))).astype(np.float64)
            table[name] = said if said.ndim == 1 else said[:, 1] - said[:, 0]
    corpus = written(tmp_path / 'corpus', found)
    more = dict(student_init='hub', student=str(student), student_layers=None, learning_rate=1e-3)
    more |= dict(teachers_weights='1,3', teachers_mean='probabilities')
    columns = 'question=question,sentence=sentence,label=label'
    of_models = dict(teachers=','.join(map(str, teachers)), teacher_mode='baseline', columns=columns)
    of_models |= dict(signal=signal)
    its_plan = plan(asked(corpus, student, **of_models, **more))
    models_taught = run(its_plan.requested)
    of_columns = run(asked(corpus, student, columns=f'{columns},teacher=a;b', **more))
    batch = dict(input_ids=torch.randint(5, 50, (8, 12), generator=torch.Generator().manual_seed(0)))

    def logits(record):
        folder = RunFolder(record['study'], record['run_id']).path / 'model'
        with torch.no_grad():
            return load_model(str(folder), 'AutoModelForSequenceClassification', 0)(**batch).logits

    assert torch.allclose(logits(models_taught), logits(of_columns), atol=1e-5)
    assert models_taught['run_id'] == its_plan.run_id != of_columns['run_id']
    assert (models_taught['time']['teacher_s'] is None) == (signal == 'online')
    assert models_taught['teacher_run_id'] is None and len(models_taught['teachers']['models']) == 2
    assert 'the mean of their probabilities weighted 1, 3' in its_plan.explain()
    card = model_card(models_taught['run_id']).text
    assert models_taught['teachers']['sha256'][:12] in card and str(tmp_path) not in card
    # a finished run may be named, and the order of teachers and their weights count
    named = dict(of_models, teachers=f"{models_taught['run_id']},{teachers[1]}")
    other = dict(of_models, teachers=','.join(map(str, teachers[::-1])))
    ids = {plan(asked(corpus, student, **given, **more)).run_id for given in (named, other, of_models)}
    assert len(ids) == 3
    if signal == 'cached':
        study = dict(task='answer_selection', corpus=str(corpus), teacher=str(student), epochs=1, ranks=1)
        study |= more | dict(max_length=64) | {k: of_models[k] for k in ('teachers', 'columns')}
        plans = plan_study(1, 'full_student,full_kd,mixed_kd', **study)
        assert not any(p.teacher for p in plans)
        assert 'already fine-tuned (sha256 ' in explain_study(plans)


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(mode='full_student'), 'learns from none'),
        (dict(student_init='teacher_finetuned'), 'a student can start from the layers of one'),
        (dict(teacher_mode='given'), 'names another teacher'),
        (dict(teachers_weights='1,2,3'), 'for each of 2 teachers'),
        (dict(signal='online', hidden_loss='mse', hidden_layers='-1'), 'the layers of one teacher'),
        (dict(teachers='a,b'), "'a'"),
    ],
)
def test_teachers_that_cannot_teach_together_are_a_sentence(given, words, tmp_path):
    folders = [str(small(tmp_path / name, 2)) for name in 'ab']
    corpus = written(tmp_path / 'corpus', tables('text_classification'))
    shared = dict(teachers=','.join(folders), teacher_mode='baseline', columns=None)
    with pytest.raises(KdnotesError, match=words) as refused:
        plan(asked(corpus, folders[0], task='text_classification', **shared | given))
    assert '\n' not in str(refused.value)


def test_where_a_student_starts_follows_who_teaches():
    def start(mode='full_kd', **given):
        return make_config(task='text_classification', mode=mode, **given).model.student.init

    scores = dict(teacher_mode='scores', columns='teacher=score')
    assert start() == start(student_init=None) == 'teacher_finetuned'
    assert start(**scores) == start(**scores, student_init=None) == 'teacher_pretrained'
    assert start(teachers='a,b') == start(teachers=('a', 'b'), student_init='none') == 'teacher_pretrained'
    assert start(**scores, student_init='hub', student='s') == 'hub'
    assert start(teachers=None) == start(teachers='none') == start(teachers=[]) == 'teacher_finetuned'
    with pytest.raises(KdnotesError, match="teacher_mode='scores' has no model whose layers"):
        start(**scores, student_init='teacher_finetuned')


# ---- what is wrong is said before anything is trained ----


def changed(of: dict, split: str, row: int, value) -> dict:
    table = of[split].copy().astype({'score': object})
    table.loc[row, 'score'] = value
    return of | {split: table}


@pytest.mark.parametrize(
    'split, value, given, words',
    [
        ('train', 'nan', {}, r"train.csv, row 3: 'score' (is empty or nan|holds 'nan')"),
        ('train', '', {}, r"row 3: 'score' is empty or nan; fill it in"),
        ('dev', '', {}, r"dev.csv, row 3: 'score' is empty or nan; fill it in"),
        ('train', 'inf', {}, "row 3: 'score' holds 'inf', which is no finite number"),
        ('train', 'good', {}, "row 3: 'score' holds 'good', which is no finite number"),
        ('train', '9' * 400, {}, "row 3: 'score' holds '9+...9+', which is no finite number"),
        ('train', f'[{"9" * 400}, 1]', {}, "row 3: 'score' holds 9+...9+, which is no finite number"),
        ('train', '[' * 5000, {}, r"row 3: 'score' holds '\[+...\[+', which is no finite number"),
        ('train', 1e300, {}, "row 3: 'score' holds a number that is 1e.300 in size"),
        ('dev', '[0, -1e30]', {}, "dev.csv, row 3: 'score' holds (2 numbers|a number that is 1e.30)"),
        ('train', '[1, 2, 3]', {}, r"row 3: 'score' holds 3 numbers, and there are 2 classes \('animal', "),
        ('train', '[0.2, 0.3]', {'scores_are': 'probabilities'}, 'holds 2 numbers, and 1 in the first row'),
        ('train', 2.5, {'scores_are': 'probabilities'}, 'which is no probability; say scores_are=logits'),
        ('train', 0.5, {'columns': 'teacher=scor'}, "train.csv: there is no column 'scor' among"),
        ('train', 0.5, {'columns': 'teacher=score,teacher=label'}, "names a key or a column twice"),
        ('train', 0.5, {'columns': 'teacher=label'}, 'names a key or a column twice'),
        ('train', 0.5, {'teachers_weights': '1,2'}, 'for each of 1 teacher'),
        ('train', 0.5, {'target': 'number', 'scores_are': 'probabilities'}, 'no number|has none'),
    ],
)
def test_scores_that_cannot_be_meant_are_a_sentence(split, value, given, words, tmp_path):
    task = 'text_classification'
    corpus = written(tmp_path / 'corpus', changed(with_scores(task), split, 2, value))
    with pytest.raises(KdnotesError, match=words) as refused:
        plan(asked(corpus, small(tmp_path / 'teacher', 2), task=task, **given))
    assert '\n' not in str(refused.value)


def test_missing_scores_are_told_by_their_row(tmp_path):
    task = 'text_classification'
    of = changed(with_scores(task), 'train', 2, '')
    corpus = written(tmp_path / 'corpus', of)
    rest = with_scores(task)['test'].drop(columns='label').astype({'score': object})
    rest['text'] = 'Say of it: ' + rest['text']
    rest.loc[[4, 7], 'score'] = ''
    rest.to_csv(corpus / 'unlabelled.csv', index=False)
    teacher = small(tmp_path / 'teacher', 2)
    words = "row 3: 'score' is empty or nan"
    with pytest.raises(KdnotesError, match=words):
        plan(asked(corpus, teacher, task=task))
    of['train'].loc[2, 'score'] = 0.5
    of['train'].to_csv(corpus / 'train.csv', index=False)
    with pytest.raises(KdnotesError, match="unlabelled, example 4: 'score' is empty or nan"):
        plan(asked(corpus, teacher, task=task))


def test_probabilities_are_not_taken_for_logits(tmp_path):
    "As `CrossEncoder.predict` gives them when nobody asks for logits."
    found = with_scores('answer_selection')
    for table in found.values():
        table['score'] = 1 / (1 + np.exp(-table['score']))
    corpus = written(tmp_path / 'corpus', found)
    teacher = small(tmp_path / 'teacher', 2)
    with pytest.raises(KdnotesError, match='numbers from 0 to 1; say scores_are=probabilities'):
        plan(asked(corpus, teacher))
    assert plan(asked(corpus, teacher, scores_are='probabilities')).teachers['are'] == 'probabilities'


@pytest.mark.parametrize(
    ('row', 'n', 'words'),
    [
        ('[0.5, 0.7]', 1, r"'both' holds probabilities, as it does in 63 of 64 rows: .* that add up to 1"),
        ('[0.5, 2]', 6, r'in 58 of 64 rows: numbers from 0 to 1 that add up to 1'),
        ('[0.5, 2]', 7, ''),  # 57 of 64 are not nearly all
    ],
)
def test_probabilities_of_nearly_all_rows_are_not_taken_for_logits(row, n, words, tmp_path):
    task = 'text_classification'
    found = with_scores(task)
    for table in found.values():
        share = 1 / (1 + np.exp(-table['score']))
        table['both'] = [f'[{1 - p:.3f}, {p:.3f}]' for p in share]
    found['train'].loc[4 : 3 + n, 'both'] = row
    corpus = written(tmp_path / 'corpus', found)
    config = asked(corpus, small(tmp_path / 'teacher', 2), task=task, columns='teacher=both')
    if not words:
        assert plan(config).teachers['are'] == 'logits'
        return
    with pytest.raises(KdnotesError, match=words + '; say scores_are=probabilities'):
        plan(config)


@pytest.mark.parametrize('weights', ['1e308,1e308', '1e-320,1e-320', '1e308,1', '1e-10,1'])
def test_weights_that_cannot_be_added_or_compared_are_refused(weights, tmp_path):
    with pytest.raises(
        KdnotesError,
        match='teachers_weights=.* must be a number from 1e-9 to 1e9 for each of 2 teachers; only their r',
    ):
        plan(
            asked(two_teachers(tmp_path), small(tmp_path / 'teacher', 2), **OF_TWO, teachers_weights=weights)
        )


OF_TWO = dict(task='text_classification', columns='teacher=score;other')


def two_teachers(folder: Path) -> Path:
    found = {split: t.assign(other=t['score']) for split, t in with_scores('text_classification').items()}
    return written(folder / 'two', found)


# ---- rows without a label ----


@pytest.mark.parametrize('of', ['folder', 'file'])
def test_rows_without_a_label_bring_their_scores(of, tmp_path, rank_here):
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    found = with_scores(task)
    more = found['train'][40:]
    corpus = written(tmp_path / 'corpus', found | dict(train=found['train'][:40]))
    if of == 'folder':
        unlabelled = written(tmp_path / 'more', found | dict(train=more))
    else:
        unlabelled = tmp_path / 'more.csv'
        more.drop(columns='label').to_csv(unlabelled, index=False)
    config = asked(corpus, teacher, task=task, unlabelled=str(unlabelled))
    its_plan = plan(config)
    assert its_plan.sizes['unlabelled']['rows'] == 24
    corpus = corpus_of(its_plan.config)
    scores = read_scores(make_task(its_plan.config, corpus), corpus, its_plan.config)
    np.testing.assert_allclose(scores.logits['train'][:, 1], found['train']['score'], rtol=1e-6)
    assert run(config)['trained_rows'] == dict(train=40, unlabelled=24)


def test_rows_of_a_corpus_without_scores_are_refused(tmp_path):
    task = 'text_classification'
    corpus = written(tmp_path / 'corpus', with_scores(task))
    plain = written(tmp_path / 'plain', tables(task))
    teacher = small(tmp_path / 'teacher', 2)
    for name, words in (
        ('embedded', 'unlabelled=embedded has no scores'),
        (plain, "no column 'score' among"),
    ):
        with pytest.raises(KdnotesError, match=words) as refused:
            plan(asked(corpus, teacher, task=task, unlabelled=str(name)))
        assert '\n' not in str(refused.value)


# ---- numbers ----


def numbers(task: str) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(0)
    words = 'salt iron is in the sea and it was red when they saw what one can do'.split()
    found = {}
    for split, n in SIZES.items():
        texts = [' '.join(rng.choice(words, 6)) for _ in range(2 * n)]
        label = rng.uniform(0, 5, n).round(2)
        if task == 'sentence_pairs':
            found[split] = pd.DataFrame(dict(sentence1=texts[:n], sentence2=texts[n:], score=label))
        else:
            found[split] = pd.DataFrame(dict(text=texts[:n], label=label))
    return found


@pytest.mark.parametrize('task', ['text_classification', 'sentence_pairs'])
def test_scores_that_are_numbers_make_the_student_that_their_model_makes(task, tmp_path, rank_here):
    "In the labels' own unit."
    teacher = small(tmp_path / 'teacher', 1)
    found = numbers(task)
    label = 'score' if task == 'sentence_pairs' else 'label'
    mean, deviation = (0, 5)
    if task == 'text_classification':
        mean, deviation = found['train'][label].mean(), found['train'][label].std(ddof=0)
    own = dict(target='number') if task == 'text_classification' else {}
    more = dict(student_init='hub', student=str(teacher), student_layers=None, learning_rate=1e-3, **own)
    corpus = written(tmp_path / 'corpus', found)
    of_model = run(asked(corpus, teacher, task=task, teacher_mode='baseline', columns=None, **more))
    folder = RunFolder(of_model['study'], of_model['teacher_run_id']).path / 'model'
    model = load_model(str(folder), 'AutoModelForSequenceClassification', 0).eval()
    tokenizer = load_tokenizer(str(folder))
    for table in found.values():
        texts = [list(table[key]) for key in ('sentence1', 'sentence2', 'text') if key in table]
        with torch.no_grad():
            said = model(**tokenizer(*texts, padding=True, return_tensors='pt')).logits[:, 0].double()
        table['said'] = said.numpy() * deviation + mean
    scored = written(tmp_path / 'scored', found)
    of_scores = run(asked(scored, teacher, task=task, columns='teacher=said', **more))
    given = RunFolder(of_model['study'], of_model['teacher_run_id']).record()
    for split, metrics in given['metrics'].items():
        for name, value in metrics.items():
            assert of_scores['teachers']['metrics'][split][name] == pytest.approx(value, abs=1e-5), name
    for split, metrics in of_model['metrics'].items():
        for name, value in metrics.items():
            assert of_scores['metrics'][split][name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize(
    ('said', 'words'),
    [
        (1e300, "row 3: 'said' holds a number that is .* in size"),
        ('[1, 2]', "row 3: 'said' holds 2 numbers, and there is 1 class"),
        ('', "row 3: 'said' is empty or nan"),
    ],
)
@pytest.mark.parametrize('task', ['text_classification', 'sentence_pairs'])
def test_numbers_that_cannot_be_learnt_are_a_sentence(task, said, words, tmp_path):
    found = {split: t.assign(said=t.iloc[:, -1].astype(object)) for split, t in numbers(task).items()}
    found['train'].loc[2, 'said'] = said
    own = dict(target='number') if task == 'text_classification' else {}
    config = asked(
        written(tmp_path / 'corpus', found),
        small(tmp_path / 'teacher', 1),
        task=task,
        columns='teacher=said',
        **own,
    )
    with pytest.raises(KdnotesError, match=words) as refused:
        plan(config)
    assert '\n' not in str(refused.value)


# ---- a study ----


def test_a_study_of_scores_says_whose_they_are_and_shares_nothing_with_its_baseline(tmp_path, rank_here):
    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    corpus = written(tmp_path / 'corpus', with_scores(task))
    given = dict(
        task=task,
        corpus=str(corpus),
        columns='teacher=score',
        teacher=str(teacher),
        teacher_mode='scores',
        student_layers=(1,),
        epochs=1,
        ranks=1,
        max_length=64,
        temperature=3,
    )
    plans = plan_study(1, 'usual', **given)
    # there are no fine-tuned layers to start from; all students start alike
    starts = {p.config.model.student.init for p in plans if p.config.where.mode != 'baseline'}
    assert starts == {'teacher_pretrained'}
    said = plan_study(1, 'usual', **given, student_init='teacher_pretrained')
    nothing = plan_study(1, 'usual', **given, student_init='none')  # as make and papermill hand it over
    assert [p.run_id for p in plans] == [p.run_id for p in said] == [p.run_id for p in nothing]
    assert {p.config.where.mode for p in plans} == {'baseline', 'full_student', 'full_kd', 'mixed_kd'}
    assert not any(p.teacher for p in plans)
    sha256 = next(p.teachers['sha256'][:12] for p in plans if p.config.where.mode == 'full_kd')
    assert f'score of the corpus (logits; sha256 {sha256})' in explain_study(plans)
    assert [line['state'] for line in forecast(plans)] == ['pending'] * 4
    made = run_study(1, 'full_student,full_kd', study='scored', say=lambda text: None, **given)
    records = {r['arm']: r for r in study_records('scored')}
    effect = attribute((records['full_student'], records['full_kd']))
    assert effect.factor == 'kd' and effect.belongs['teachers'][1] == records['full_kd']['teachers']['sha256']
    text = str(made.report)
    assert f'score of the corpus (logits; sha256 {sha256})' in text
    assert 'the teacher' not in ' '.join(made.report.headline)


def test_scores_that_change_after_the_plan_are_noticed(tmp_path, rank_here):
    from kdnotes.experiment.launch import execute

    teacher = small(tmp_path / 'teacher', 2)
    task = 'text_classification'
    corpus = written(tmp_path / 'corpus', with_scores(task))
    its_plan = plan(asked(corpus, teacher, task=task))
    with_scores(task, seed=1)['train'].to_csv(corpus / 'train.csv', index=False)
    with pytest.raises(KdnotesError, match='the scores in .* changed since the run was planned'):
        execute(its_plan)


# ---- the how-to ----


def programs() -> list[str]:
    "The Python of the how-to that writes columns."
    notebook = json.loads((Path(kd.__file__).parents[1] / 'nbs/howto/students.ipynb').read_text())
    text = '\n'.join(''.join(cell['source']) for cell in notebook['cells'])
    return [code for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL) if 'to_csv' in code]


def test_the_programs_of_the_how_to_write_columns_that_a_run_reads(tmp_path, monkeypatch):
    pytest.importorskip('sentence_transformers')
    of_encoder, of_llm = programs()
    monkeypatch.chdir(tmp_path)
    teacher = small(tmp_path / 'teacher', 1)
    written(tmp_path / 'pairs', tables('answer_selection'))
    exec(of_encoder.replace('cross-encoder/ms-marco-MiniLM-L6-v2', str(teacher)), {})
    student = small(tmp_path / 'student', 2)
    assert plan(asked(tmp_path / 'pairs', student)).teachers['metrics'].keys() == {'dev', 'test'}

    found = tables('text_classification')
    written(tmp_path / 'reviews', found)
    for split, table in found.items():
        answers = [[label, ' ' + label, 'I cannot tell'] for label in table['label']]
        lines = [json.dumps(dict(row=i, answers=of)) for i, of in enumerate(answers)]
        (tmp_path / 'reviews' / f'{split}.answers.jsonl').write_text('\n'.join(lines))
    exec(of_llm, {})
    given = dict(task='text_classification', columns='teacher=llm', scores_are='probabilities')
    assert plan(asked(tmp_path / 'reviews', student, **given)).teachers['metrics']['test']['accuracy'] == 1

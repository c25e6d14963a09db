"A teacher that is a column of the corpus: the same student as of its model, from any format, and no other."

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
from kdnotes.analysis.comparable import attribute
from kdnotes.core.config import KdnotesError
from kdnotes.core.given import make_config
from kdnotes.distill import weights
from kdnotes.distill.models import load_model
from kdnotes.experiment.card import model_card
from kdnotes.experiment.forecast import forecast, memory_of
from kdnotes.experiment.launch import run
from kdnotes.experiment.plan import explain_study, plan, plan_study
from kdnotes.experiment.study import run_study
from kdnotes.records.runs import RunFolder
from kdnotes.records.store import records as study_records
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
    assert '- Teacher: score of the corpus (logits; sha256 ' in card and "Teacher's training" not in card


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
    told = plans[0].explain()
    assert (
        'teacher: score of the corpus (logits; sha256 ' in told and 'on dev, ' in told and ' on test' in told
    )


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
    # evaluation sets without scores, and other scores there, make the same student
    unknown = {
        split: t if split == 'train' else t.drop(columns='score') for split, t in with_scores(task).items()
    }
    known = plan(asked(one, teacher, task=task))
    p = plan(asked(written(tmp_path / 'unknown', unknown), teacher, task=task))
    assert p.run_id == known.run_id and p.teachers['metrics'] == {} and len(known.teachers['metrics']) == 2
    assert 'nobody knows how good it is' in p.explain()


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
        from kdnotes.distill.scores import read_scores
        from kdnotes.experiment.plan import make_task
        from kdnotes.tasks.sources import corpus_of

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
    assert 'score; other of the corpus (logits, the mean of their logits weighted 3, 1;' in told


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
    models_taught = run(its_plan.asked)
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
    assert 'of models that were fine-tuned already' in card and str(tmp_path) not in card
    # a finished run may be named, and the order of teachers and their weights count
    named = dict(of_models, teachers=f"{models_taught['run_id']},{teachers[1]}")
    other = dict(of_models, teachers=','.join(map(str, teachers[::-1])))
    ids = {plan(asked(corpus, student, **given, **more)).run_id for given in (named, other, of_models)}
    assert len(ids) == 3
    if signal == 'cached':
        study = dict(task='answer_selection', corpus=str(corpus), teacher=str(student), epochs=1, ranks=1)
        study |= more | dict(max_length=64) | {k: of_models[k] for k in ('teachers', 'columns')}
        plans = plan_study(1, 'full_student,full_kd,mixed_kd', **study)
        assert not any(p.teacher for p in plans) and 'taught by: ' in explain_study(plans)


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(mode='full_student'), 'learns from no teacher'),
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


# ---- what is wrong is said before anything is trained ----


def changed(of: dict, split: str, row: int, value) -> dict:
    table = of[split].copy().astype({'score': object})
    table.loc[row, 'score'] = value
    return of | {split: table}


@pytest.mark.parametrize(
    'split, value, given, words',
    [
        ('train', 'nan', {}, r"train.csv, row 3: 'score' (is empty or nan|holds nan)"),
        ('train', '', {}, r"row 3: 'score' is empty or nan, as it is in 1 of 64 rows of train"),
        ('dev', '', {}, r"dev.csv, row 3: 'score' is empty or nan, as it is in 1 of 40 rows of dev"),
        ('train', 'inf', {}, "row 3: 'score' holds inf, which is not finite"),
        ('train', 'good', {}, "row 3: 'score' holds 'good', which is no number"),
        ('train', '[1, 2, 3]', {}, r"row 3: 'score' holds 3 numbers, and there are 2 classes \('animal', "),
        ('train', '[0.2, 0.3]', {'scores_are': 'probabilities'}, 'holds 2 numbers, and 1 in the first row'),
        ('train', 2.5, {'scores_are': 'probabilities'}, 'which is no probability; say scores_are=logits'),
        ('train', 0.5, {'columns': 'teacher=scor'}, "train.csv: there is no column 'scor' among"),
        ('train', 0.5, {'columns': 'teacher=score,teacher=label'}, "names 'teacher' twice"),
        ('train', 0.5, {'columns': 'teacher=label'}, 'each needs a column of its own'),
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
        student_init='teacher_pretrained',
        student_layers=(1,),
        epochs=1,
        ranks=1,
        max_length=64,
        temperature=3,
    )
    plans = plan_study(1, 'usual', **given)
    assert {p.config.mode for p in plans} == {'baseline', 'full_student', 'full_kd', 'mixed_kd'}
    assert not any(p.teacher for p in plans)
    assert 'taught by: score of the corpus (logits; sha256 ' in explain_study(plans)
    assert [line.state for line in forecast(plans)] == ['to make'] * 4
    made = run_study(1, 'full_student,full_kd', study='scored', say=lambda text: None, **given)
    records = {r['arm']: r for r in study_records('scored')}
    effect = attribute((records['full_student'], records['full_kd']))
    assert effect.factor == 'kd' and effect.belongs['teachers'][1] == records['full_kd']['teachers']['sha256']
    text = str(made.report)
    assert 'Teacher: score of the corpus (logits; sha256 ' in text
    assert 'its teacher' not in ' '.join(made.report.headline)
    need = memory_of(next(p for p in plans if p.config.mode == 'full_kd'))
    assert need is not None


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

"""The study of question answering in the thesis: in percent, and verdicts that follow the numbers."""

import numpy as np
import pandas as pd
import pytest
from handmade import make_record
from kdnotes.stats.evidence import evidence
from kdnotes.results.schema import check_record
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import export
from kdnotes.tasks.passages import SQUAD2_SHA256
from kdnotes.tasks.span_metrics import UNIT_METRICS
from thesis.language import of_one_rank
from thesis.questions import course_of, progress_figure, question_values

ARTICLES = dict(dev=6, test=11)
EACH = 20  # questions of an article, every second one with an answer
# shares of answers that are found, and of missing ones that are refused
ARMS = dict(baseline=(0.45, 0.90), full_student=(0.20, 0.80), full_kd=(0.34, 0.86), mixed_kd=(0.34, 0.86))
CORPUS = dict(corpus='squad2', task='extractive_qa', metric='exact')


def questions(split: str) -> pd.DataFrame:
    "Questions of a set: article, has it an answer, and how hard it is, the same for every run."
    n = ARTICLES[split] * EACH
    hard = np.random.default_rng(len(split)).permutation(n // 2) / (n // 2)
    return pd.DataFrame(
        dict(
            unit=[f'{split}{i}' for i in range(n)],
            cluster=[f'{split.title()} {i // EACH}' for i in range(n)],
            has=np.arange(n) % 2 == 0,
            hard=np.repeat(hard, 2),
        )
    )


def set_tables(split: str, seed: int, found: float, refused: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    "Units and predictions of a set."
    q = questions(split)
    noise = np.random.default_rng([seed, len(split)]).normal(0, 0.01, len(q))
    q['exact'] = (q['hard'] + noise < np.where(q['has'], found, refused)).astype(float)
    q['f1'] = np.where(q['has'] & (q['exact'] == 0) & (q['hard'] > 0.9), 0.5, q['exact'])
    kinds = dict(all=q, has_ans=q[q['has']], no_ans=q[~q['has']])
    units = pd.concat(
        [
            kinds[of][['unit', 'cluster']].assign(
                split=split, set=of, metric=metric, value=kinds[of]['exact' if 'exact' in metric else 'f1']
            )
            for metric, of in UNIT_METRICS.items()
        ]
    )
    # of answers that are not found, those of hard questions are refused
    none = np.where(q['has'], (q['exact'] == 0) & (q['hard'] > 0.8), q['exact'] == 1)
    predicted = pd.DataFrame(
        dict(
            split=split,
            unit=q['unit'],
            item=[f'{seed}:{seed + 4}' for _ in range(len(q))],
            label=q['has'].astype(int),
            score=np.where(none, -2.0, 2.0),
        )
    )
    return units, predicted


def metrics_of(units: pd.DataFrame) -> dict:
    means = units.groupby('metric')['value'].mean().to_dict()
    best = dict(best_exact=means['exact'] + 0.01, best_exact_thresh=0.5, best_f1=means['f1'] + 0.01)
    return means | best | dict(best_f1_thresh=0.4, always_unanswerable=0.5, threshold=0.0)


def make_run(mode: str, seed: int, found: float, refused: float, study='squad2-qa', **parameters):
    "A record, its units and its predictions, as a run of extractive_qa leaves them."
    tables = {split: set_tables(split, seed, found, refused) for split in ARTICLES}
    r = make_record(mode, seed, 0.5, study=study, **CORPUS, **parameters)
    r['metrics'] = {split: metrics_of(units) for split, (units, _) in tables.items()}
    r['primary']['value'] = r['metrics']['test']['exact']
    r['corpus_sha256'] = SQUAD2_SHA256
    r['factors']['transfer'] = 'squad1'
    teacher = r['factors']['network'] == 'teacher'
    r['params_total'] = 22_700_000 if teacher else 17_400_000
    r['models'] = dict(teacher='sentence-transformers/all-MiniLM-L6-v2', profile='laptop')
    keys = ('exact', 'f1', 'has_ans_exact', 'no_ans_exact')
    r['curve'] = [p for p in r['curve'] if p['loss'] is not None] + [
        dict(step=step, loss=None, set='dev', value=part * of['exact'])
        | dict(metrics={k: part * of[k] for k in keys})
        for step, part in ((20, 0.5), (40, 0.8), (60, 1.0))
        for of in [r['metrics']['dev']]
    ]
    units, predicted = (pd.concat(part, ignore_index=True) for part in zip(*tables.values()))
    return r, units, predicted


def write_study(arms=ARMS, seeds=3, with_predictions=True, **more) -> list[dict]:
    "Finished runs under $KDNOTES_HOME, exported; each student has the teacher of its seed."
    runs = [make_run(mode, seed, *of, **more) for mode, of in arms.items() for seed in range(seeds)]
    teachers = {r['seed']: r['run_id'] for r, *_ in runs if r['factors']['network'] == 'teacher'}
    for r, units, predicted in runs:
        if r['factors']['network'] == 'student':
            r['teacher_run_id'] = teachers.get(r['teacher_seed'], r['teacher_run_id'])
        folder = RunFolder(r['study'], r['run_id']).create()
        folder.write_table('units', units)
        folder.write_table('predictions', predicted if with_predictions else predicted[:0])
        folder.write_record(r)
    export(runs[0][0]['study'])
    return [r for r, *_ in runs]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> dict:
    "Values of a study of four arms and three seeds."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(tmp_path_factory.mktemp('home')))
        write_study()
        return values_of()


def values_of() -> dict:
    return question_values(of_one_rank(evidence('squad2-qa')))


def test_values_of_the_study(whole):
    found = whole
    assert (found['metric'], found['n_runs']) == ('exact', 12)
    assert found['counted']['test'] == dict(articles=11, questions=220, no_ans=110)
    assert [found['steps'][k]['verdict'] for k in ('network', 'kd', 'precision')] == [
        'loses',
        'gains',
        'open',
    ]
    teacher = found['never']['baseline']
    assert teacher['verdict'] == 'better'
    assert teacher['difference'].estimate == pytest.approx((0.45 + 0.90) / 2 - 0.5, abs=0.01)
    assert teacher['difference'].n == 3 and teacher['difference'].units == 11
    assert found['answers']['baseline']['verdict'] == 'reached'
    assert found['answers']['full_student']['verdict'] == 'missed'


@pytest.mark.parametrize(
    'found, refused, seeds, never, aim',
    [
        (0.10, 0.50, 3, 'worse', 'missed'),
        (0.10, 0.90, 3, 'open', 'missed'),
        (0.30, 0.95, 3, 'better', 'not_told'),
        (0.45, 0.90, 1, 'one_seed', 'reached'),
    ],
)
def test_verdicts_on_the_teacher_follow_the_numbers(home, found, refused, seeds, never, aim):
    write_study(dict(baseline=(found, refused)), seeds)
    values = values_of()
    assert (values['never']['baseline']['verdict'], values['answers']['baseline']['verdict']) == (never, aim)
    # of the questions, not of the records alone
    assert values['never']['baseline']['difference'].units == 11


def test_scores_along_training(home):
    ((r, *_),) = [make_run('baseline', 0, 0.45, 0.90)]
    check_record(r)
    course = course_of(r)
    refused = course[course['key'] == 'no_ans_exact']
    assert list(refused['x']) == [20, 40, 60]
    assert refused['y'].iloc[-1] == pytest.approx(100 * r['metrics']['dev']['no_ans_exact'])


def test_the_legend_of_progress_names_an_arm_that_has_scores_and_no_losses():
    both = make_record('baseline', 0, 0.8)
    scores = make_record('mixed_kd', 0, 0.7)
    scores['curve'] = [p for p in scores['curve'] if p['loss'] is None]
    assert scores['curve']
    figure = progress_figure([both, scores])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ['baseline', 'mixed_kd']
    dashes = [line.get_linestyle() for line in legend.get_lines()]
    assert dashes == ['-', '--'], 'as its courses are drawn'

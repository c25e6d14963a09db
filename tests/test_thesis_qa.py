"""The study of question answering in the thesis: absent without evidence, whole with it,
in percent, and verdicts that follow the numbers.
"""

import json
import re
import numpy as np
import pandas as pd
import pytest
from handmade import make_record
from test_thesis import copy_without, set_with
from kdnotes.analysis.evidence import evidence
from kdnotes.core.files import read_json, write_json
from kdnotes.records.schema import check_record, of_this_schema
from kdnotes.records.runs import RunFolder
from kdnotes.records.store import export
from kdnotes.tasks.passages import NOTES, SQUAD2_SHA256
from kdnotes.tasks.span_metrics import UNIT_METRICS
from kdnotes.thesis import build as th
from kdnotes.thesis.question_figures import QUESTION_FIGURES, draw_questions, progress_figure, way_of
from kdnotes.thesis.questions import PUBLISHED, question_values, refused_shares
from kdnotes.thesis.roles import with_role_steps

ARTICLES = dict(dev=6, test=11)
EACH = 20  # questions of an article, every second one with an answer
# shares of answers that are found, and of missing ones that are refused
ARMS = dict(baseline=(0.45, 0.90), full_student=(0.20, 0.80), full_kd=(0.34, 0.86), mixed_kd=(0.34, 0.86))
CORPUS = dict(corpus='squad2', task='extractive_qa', metric='exact')
QA_PREFIXES = ('qa.', 'qa_preset.', 'qa_transfer.')


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
    return of_this_schema(r, 'made'), units, predicted


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


MIXED = {
    f'mixed_{role}': ARMS[f'{full}']
    for role, full in zip(('baseline', 'student', 'kd'), ('baseline', 'full_student', 'full_kd'))
}


def write_mixed_study(**more) -> None:
    "Three students of one teacher, all in mixed precision."
    teacher = dict(mixed_baseline=MIXED['mixed_baseline'])
    write_study(teacher, seeds=1, teacher_mode='mixed_baseline', **more)
    students = {arm: of for arm, of in MIXED.items() if arm != 'mixed_baseline'}
    write_study(students, teacher_mode='mixed_baseline', teacher_seed=0, **more)


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


def values_of(study='squad2-qa') -> dict:
    return question_values(with_role_steps(evidence(study)))


# ---- the values ----


def test_values_of_the_study(whole):
    found = whole
    assert (found['metric'], found['set'], found['n_runs']) == ('exact', 'test', 12)
    assert found['note'] == NOTES[SQUAD2_SHA256] and found['counted']['test'] == dict(
        articles=11, questions=220, has_ans=110, no_ans=110
    )
    kd = found['steps']['kd']
    assert kd['verdict'] == 'gains' and 'over the 3 comparisons' in kd['sentence']
    assert [found['steps'][k]['verdict'] for k in ('network', 'precision')] == ['loses', 'open']
    teacher = found['never']['baseline']
    assert teacher['verdict'] == 'better' and not teacher['one_seed']
    assert teacher['difference'].estimate == pytest.approx((0.45 + 0.90) / 2 - 0.5, abs=0.01)
    assert teacher['difference'].n == 3 and teacher['difference'].units == 11
    assert found['answers']['baseline']['verdict'] == 'reached'
    assert found['answers']['full_student']['verdict'] == 'missed'
    assert found['published']['verdict'] == 'not comparable' and len(found['published']['reasons']) == 3
    assert found['thresholds']['full_kd']['missed'].estimate == pytest.approx(0.01)
    assert not found['searched'] and not found['one_teacher']
    assert '--seeds 3 --arms baseline,full_kd,full_student,mixed_kd -p task=extractive_qa' in found['command']


def test_tables_and_sentences_are_in_percent(whole):
    found = whole
    arms = found['tables']['arms'].set_index('arm')
    exact = 100 * found['arms']['baseline']['primary'].estimate
    assert arms.at['baseline', 'test exact match %'].startswith(f'{exact:.1f} ±')
    scores = found['tables']['scores']['test'].set_index('score')
    assert scores.at['exact match', 'baseline'].startswith(f'{exact:.1f} [')
    assert scores.at['exact match of never answering', 'full_kd'] == '50.0'
    assert scores.at["best exact match's threshold", 'full_kd'].startswith('0.500')
    (row,) = [r for r in found['tables']['comparisons'].to_dict('records') if r['b'] == 'full_kd'][:1]
    difference = 100 * found['steps']['kd']['difference'].estimate
    assert row['a'] == 'full_student' and row['points'].startswith(f'{difference:+.1f} [')
    said = found['steps']['kd']['sentence']
    assert re.search(
        rf'by {difference:.2f} \[[\d., ]+\] percentage points \(95% interval, 3 seeds and 11', said
    )
    assert f'{difference:+.2f} [' in found['steps']['kd']['short']
    # margins are spoken of for precision alone
    assert 'not worse by' not in found['steps']['network']['sentence']
    assert found['tables']['never'].set_index('arm').at['baseline', 'points'].startswith('+')


def test_refusals_are_counted_among_questions_with_an_answer_too(whole):
    found = whole['refusals']['baseline']
    q = questions('test')
    hard = (q['hard'] > 0.8) & q['has']
    assert found['has_ans'].estimate == pytest.approx(hard.sum() / q['has'].sum(), abs=0.01)
    assert found['no_ans'].estimate == pytest.approx(0.90, abs=0.01)


def test_without_predictions_no_refusal_is_counted(home):
    write_study(dict(baseline=ARMS['baseline']), seeds=1, with_predictions=False)
    found = values_of()
    assert 'no predictions of some runs' in found['refusals']['reason'] and 'refusals' not in found['tables']


def test_a_question_at_the_threshold_is_answered():
    "Evidence has five digits of its log-odds, and the threshold has all of them."
    score = 0.123456789
    predicted = pd.DataFrame(dict(label=[1, 1, 0], score=[float(f'{score:.5g}'), 0.12, 0.13]))
    assert refused_shares(predicted, score) == dict(has_ans=0.5, no_ans=0.0)


@pytest.mark.parametrize(
    'found, refused, never, aim',
    [
        (0.10, 0.50, 'worse', 'missed'),
        (0.10, 0.90, 'open', 'missed'),
        (0.30, 0.95, 'better', 'open'),
    ],
)
def test_verdicts_on_the_teacher_follow_the_numbers(home, found, refused, never, aim):
    write_study(dict(baseline=(found, refused)))
    values = values_of()
    assert (values['never']['baseline']['verdict'], values['answers']['baseline']['verdict']) == (never, aim)
    # of the questions, not of the records alone
    assert values['never']['baseline']['difference'].units == 11


def test_a_study_of_one_seed_claims_nothing(home):
    write_study(seeds=1)
    found = values_of()
    assert found['one_seed'] and found['never']['baseline']['one_seed']
    assert {step['verdict'] for step in found['steps'].values()} == {'not_tested'}
    assert 'nothing is known about other seeds' in found['steps']['kd']['sentence']
    assert 'percentage points than' in found['steps']['kd']['sentence']


def test_what_the_published_study_differs_in(home):
    write_study(dict(full_kd=ARMS['full_kd']))
    e = evidence('squad2-qa')
    reasons = ' '.join(values_of()['published']['reasons'])
    assert NOTES[SQUAD2_SHA256] in reasons and '17.4 M' in reasons and 'all-MiniLM-L6-v2' in reasons
    rows = values_of()['published']['tables']['beside'].to_dict('records')
    assert [row['exact, %'].split()[0] for row in rows] == [
        '67.07',
        f"{100 * e.values['full_kd']['primary'].estimate:.1f}",
    ]
    for r in e.records:  # of the same size: that is no reason then
        r['params_total'] = int(1e6 * PUBLISHED['params'])
    assert len(question_values(with_role_steps(e))['published']['reasons']) == 2


# ---- figures ----


def test_scores_along_training(home):
    ((r, *_),) = [make_run('baseline', 0, 0.45, 0.90)]
    check_record(r)
    way = way_of(r).dropna(subset=['f1'])
    assert list(way['step']) == [20, 40, 60]
    assert way['no_ans_exact'].iloc[-1] == pytest.approx(100 * r['metrics']['dev']['no_ans_exact'])


@pytest.mark.parametrize('arms', [ARMS, dict(baseline=ARMS['baseline'])], ids=['all', 'a teacher alone'])
def test_figures_are_bound_to_their_runs_and_the_same_again(home, arms):
    write_study(arms, seeds=1)
    e = evidence('squad2-qa')
    made = draw_questions(e, home / 'figures')
    before = {f.name: f.path.read_bytes() for f in made if f.path}
    again = {f.name: f.path.read_bytes() for f in draw_questions(e, home / 'figures') if f.path}
    assert before == again and {f.name for f in made} == set(QUESTION_FIGURES)
    assert {f.name: f.reason for f in made if not f.path} == (
        {} if 'full_kd' in arms else dict(start='the study has no student')
    )
    manifest = read_json(home / 'figures' / 'MANIFEST.json')
    assert all(entry['run_ids'] == sorted(r['run_id'] for r in e.records) for entry in manifest.values())


# ---- the document ----


def set_of(tmp_path, **parts: dict) -> dict[str, str]:
    figures = {name: dict(reason='not drawn') for name in ('accuracy_time', *QUESTION_FIGURES)}
    made = {part: values | dict(figures=figures) for part, values in parts.items()}
    return set_with(copy_without(tmp_path / 'copy', 'qa'), *QA_PREFIXES, **made)


@pytest.mark.parametrize(
    'arms, seeds',
    [
        (ARMS, 1),
        (dict(baseline=(0.10, 0.50)), 3),
        (dict(mixed_kd=ARMS['mixed_kd']), 3),
        (dict(full_student=(0.20, 0.80), full_kd=(0.21, 0.79)), 3),
    ],
    ids=['one seed', 'a weak teacher alone', 'an arm alone', 'no teacher'],
)
def test_the_chapter_of_a_study_that_lacks_something(home, tmp_path, arms, seeds):
    write_study(arms, seeds, with_predictions=seeds == 1)
    said = set_of(tmp_path, qa=values_of())
    assert {'qa.steps.kd.sentence', 'qa.tables.never', 'qa.published.reasons'} <= said.keys()
    assert ('qa.tables.refusals' in said) == (seeds == 1)


def test_the_chapter_of_a_study_in_mixed_precision(home, tmp_path):
    write_mixed_study()
    write_study(dict(full_kd=ARMS['full_kd']), seeds=1, study='preset')
    said = set_of(tmp_path, qa=values_of(), qa_preset=values_of('preset'))
    assert {'qa.steps.kd.sentence', 'qa_preset.tables.scores.test', 'qa_preset.tables.runs'} <= said.keys()
    assert 'qa.steps.precision.sentence' not in said
    assert said['qa.never.mixed_baseline.difference'].startswith('17.')


def test_first_weights_that_the_plan_does_not_name_are_asked_for_by_their_part(tmp_path, monkeypatch):
    copy = copy_without(tmp_path / 'copy', 'qa')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    r, *tables = make_run('baseline', 0, 0.45, 0.90)
    r['initial']['transfer_run_id'] = 'baseline-s0-ffffffffffff'
    folder = RunFolder(r['study'], r['run_id']).create()
    for name, table in zip(('units', 'predictions'), tables):
        folder.write_table(name, table)
    folder.write_record(r)
    export(r['study'])
    plan = json.loads((copy / 'thesis' / 'plan.json').read_text())
    write_json(copy / 'thesis' / 'plan.json', plan | dict(parts={}))
    th.pin(copy, dict(qa='squad2-qa'))
    with pytest.raises(th.ThesisError, match='pin qa_transfer='):
        th.build(copy)


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

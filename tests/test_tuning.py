"The search as users start it; and the settings of the project are those its searches chose."

import json
import nbformat
import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel
from kdnotes.tasks.answer_selection import DEFAULTS
from kdnotes.core.files import evidence_path
from kdnotes.experiment.study_plan import explain_study
from kdnotes.search.tuning import SPACES, TUNING_SEED, as_judged, from_the_best, judge, plan_trials
from notebooks import command, papermill


def test_a_plan_of_a_search_tells_settings_from_seeds():
    said = explain_study(plan_trials('baseline', 3, corpus='embedded'))
    assert '3: baseline, 3 settings each, on seed 1000' in said and '3 seeds' not in said


def test_a_search_is_named_by_what_its_trials_are_made_of():
    def id_of(mode='full_kd', trials=2, **given):
        [id] = {
            p.config.train.tuning_id for p in plan_trials(mode, trials, 'mine', corpus='embedded', **given)
        }
        return id

    assert id_of() == id_of(trials=3), 'more trials continue it'
    assert id_of().startswith('mine-full_kd-')
    others = [id_of(smoke='true'), id_of(temperature='4'), id_of(teacher_mode='mixed_baseline')]
    assert len({id_of(), *others}) == 4


@pytest.fixture(scope='module')
def searched(tmp_path_factory, small_teacher):
    "The home of a search of two trials, through papermill."
    tmp_path = tmp_path_factory.mktemp('searched')
    done = papermill(
        tmp_path,
        'nbs/tune.ipynb',
        tmp_path / 'tune.ipynb',
        ('mode', 'full_student'),
        ('student_init', 'teacher_pretrained'),
        ('teacher', small_teacher),
        ('student_layers', '1'),
        ('trials', 2),
        ('jobs', 2),
        ('seeds', 1),
        ('smoke', True),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


def records_of(home, study):
    return [json.loads(path.read_text()) for path in sorted((home / 'runs' / study).glob('*/record.json'))]


def trials(home):
    return records_of(home, 'embedded-smoke-tuning')


def last_words(home):
    return nbformat.read(home / 'tune.ipynb', 4).cells[-1].outputs[0].text


@pytest.mark.exhaustive
def test_a_search_with_papermill(searched):
    tmp_path, records, last = searched, trials(searched), last_words(searched)
    assert (
        {r['seed'] for r in records} == {TUNING_SEED}
        and len({r['tuning_id'] for r in records}) == 1
        and len(records) == 2
    )
    by_setting = {
        (r['settings']['learning_rate'], r['settings']['epochs']): r['metrics']['dev']['map'] for r in records
    }
    assert len(by_setting) == 2
    best = max(by_setting, key=by_setting.get)
    [tuned] = records_of(tmp_path, 'embedded-smoke-sensitivity')
    assert (
        tuned['seed'],
        tuned['tuning_id'],
        tuned['settings']['learning_rate'],
        tuned['settings']['epochs'],
    ) == (0, records[0]['tuning_id'], *best)
    assert f"'learning_rate': {best[0]}" in last and records[0]['tuning_id'] in last


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_search_goes_on_without_notebooks(searched, small_teacher):
    tmp_path, records, last = searched, trials(searched), last_words(searched)
    asked = (
        'tune',
        '--mode',
        'full_student',
        '--jobs',
        2,
        '--seeds',
        1,
        '-p',
        'student_init=teacher_pretrained',
        '-p',
        f'teacher={small_teacher}',
        '-p',
        'student_layers=1',
        '-p',
        'smoke=true',
    )
    again = command(tmp_path, *asked, '--trials', 2)
    assert again.returncode == 0 and again.stdout.endswith(last) and 'training' not in again.stdout, (
        'without a notebook: the same search, found done\n' + again.stderr
    )
    wider, before = command(tmp_path, *asked, '--trials', 4), {r['run_id'] for r in records}
    assert wider.returncode == 0, wider.stderr
    records = trials(tmp_path)
    made = [r for r in records if r['run_id'] not in before]
    assert len(made) == 2 and {
        (r['machine']['jobs'], r['settings']['ranks'], r['settings']['threads_per_rank']) for r in made
    } == {(2, 1, 1)}
    for r in made:
        assert f"{r['run_id']}: dev MAP {r['metrics']['dev']['map']:.4f}, trained in " in wider.stdout, (
            'a search is not shown its test set'
        )


def test_the_test_set_chooses_nothing():
    made = [
        dict(
            run_id=f'r{i}',
            task='answer_selection',
            primary=dict(set='test', metric='map', higher_is_better=True),
            metrics=dict(dev=dict(map=d), test=dict(map=t)),
        )
        for i, (d, t) in enumerate([(0.6, 0.9), (0.7, 0.1), (0.5, 0.95)])
    ]
    assert judge([dict(epochs=i) for i in range(3)], made).run_id.tolist() == ['r1', 'r0', 'r2']


@pytest.mark.parametrize('higher', [True, False])
def test_the_distance_from_the_best_is_the_paired_t_interval_of_the_questions_that_judged(higher):
    values = np.random.default_rng(0).random((3, 30))
    made = [
        dict(
            run_id=f'r{i}',
            task='answer_selection',
            primary=dict(set='test', metric='map', higher_is_better=higher, value=0.5),
            metrics=dict(dev=dict(map=v.mean()), test=dict(map=0.5)),
        )
        for i, v in enumerate(values)
    ]
    units = pd.DataFrame(
        [
            dict(run_id=f'r{i}', split=split, metric='map', unit=q, value=x if split == 'dev' else 0.5)
            for i, v in enumerate(values)
            for q, x in enumerate(v)
            for split in ('dev', 'test')
        ]
    )
    judged = as_judged(made)
    first, *others = (values[int(r['run_id'][1:])] for r in judged)
    assert first.mean() == (values.mean(1).max() if higher else values.mean(1).min())
    none, *found = from_the_best(judged, units)
    assert none is None and len(found) == 2
    for d, other in zip(found, others):
        true = ttest_rel(other, first).confidence_interval(0.95)
        assert (d.estimate, d.low, d.high) == pytest.approx(
            (other.mean() - first.mean(), true.low, true.high)
        )
    assert judge([{}] * 3, made, units).from_the_best.tolist() == ['', *(f'{d:+.3f}' for d in found)]
    assert (
        from_the_best(judged, None) == [None] * 3 and judge([{}] * 3, made).from_the_best.tolist() == [''] * 3
    )
    assert (
        from_the_best(judged, units.assign(value=units['value'] + 0.1)) == [None] * 3
    )  # not what the records hold


@pytest.mark.parametrize(
    'corpus, network',
    [key for key, setting in DEFAULTS.items() if setting.get('tuning_id')]
    or [pytest.param('', '', marks=pytest.mark.skip(reason='no setting comes from a search yet'))],
)
def test_settings_are_those_the_search_chose(corpus, network):
    setting = DEFAULTS[corpus, network]
    lines = [
        line
        for path in evidence_path().glob('*-tuning.records.jsonl')
        for line in path.read_text().splitlines()
    ]
    trials = [r for r in map(json.loads, lines) if r['tuning_id'] == setting['tuning_id']]
    assert len(trials) >= 6, f"the trials of {setting['tuning_id']} are not among the evidence"
    best = judge([{}] * len(trials), trials).run_id[0]
    chosen = next(r['settings'] for r in trials if r['run_id'] == best)
    assert {k: setting[k] for k in SPACES[network]} == {k: chosen[k] for k in SPACES[network]}

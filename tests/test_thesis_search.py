"""The search in the thesis: the published design without evidence, a front and verdicts with it,
and verdicts that follow the numbers.
"""

import json
from dataclasses import replace
from pathlib import Path
import pytest
from handmade import make_record, write_run
from test_thesis import copy_without, set_with
from kdnotes.core.files import read_json
from kdnotes.records.store import export, records, units
from kdnotes.search.found import Found, Threshold, keep_search, load_found, save_found
from kdnotes.search.front import Objective, Trial
from kdnotes.search.spaces import STUDENT
from kdnotes.search.summary import runs_of
from kdnotes.thesis import build as th
from kdnotes.thesis.facts import flat
from kdnotes.thesis.search import search_values, studied_values

STUDY = 'tried-search'
CORPUS = dict(corpus='/somewhere/facts-2000', task='answer_selection')
SCORE = Objective('score', 'dev MAP', True)
PARAMS = Objective('params', 'parameters', False)
FRONT = ('search_front', 'search_hypervolume', 'search_importances', 'search_causes')


def make_trial(number: int, score: float, params: int, seeds: int = 4) -> tuple[Trial, list[str]]:
    "A trial of the front with its runs, finished under $KDNOTES_HOME: one a seed."
    names = []
    for seed in range(seeds):
        r = make_record('mixed_kd', seed, score, study=STUDY, learning_rate=1e-4 * (number + 1), **CORPUS)
        r['params_total'] = params
        r['metrics']['dev'] = dict(r['metrics']['test'], map=score)
        r['time']['wall_s'] = 60.0
        write_run(r)
        names.append(r['run_id'])
    drawn = dict(layers=1 + number % 6, heads=4, feed_forward=512, temperature=2.0, alpha=0.5)
    trial = Trial(
        number=number,
        params=drawn | dict(learning_rate=1e-4 * (number + 1)),
        state='complete',
        values=dict(score=score, params=float(params)),
        run_id=names[0],
        seconds=60.0,
        started_s=100.0 * number,
        ended_s=100.0 * number + 70,
        extra=dict(driver_s=0.6),
    )
    return trial, names


def broken(number: int, run_id: str | None, *causes: str) -> Trial:
    "A trial that is infeasible; without a run it was foretold."
    first = Trial(number, dict(layers=6), 'infeasible', dict(score=None, params=5e6), run_id, causes)
    told = replace(first, reason=f'{causes[0]}: too much', started_s=100.0 * number)
    return replace(told, seconds=30.0 if run_id else None, ended_s=100.0 * number + (31 if run_id else 1))


def write_search(points=((0.70, 20e6), (0.71, 14e6), (0.78, 20.1e6)), baseline=True) -> Found:
    "A search with these points, the baseline first, as its evidence; two others are infeasible."
    made = [make_trial(n if baseline else n + 1, score, int(size)) for n, (score, size) in enumerate(points)]
    n = len(made) + 1
    more = (broken(n, 'mixed_kd-s0-ffffffffffff', 'time'), broken(n + 1, None, 'memory', 'time'))
    found = Found(
        study=STUDY,
        task='answer_selection',
        corpus=CORPUS['corpus'],
        corpus_sha256='0' * 64,
        space={'alpha' if k == 'soft_weight' else k: of for k, of in STUDENT.items()},
        space_name='student',
        objectives=(SCORE, PARAMS),
        threshold=Threshold(0.6061, 'BM25'),
        trials=(*(t for t, _ in made), *more),
        fixed=dict(mode='mixed_kd'),
        seeds={t.run_id: tuple(names) for t, names in made},
    )
    export(STUDY)
    save_found(found)
    keep_search(STUDY)
    return found


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def values_of(found: Found) -> dict:
    own = records(found.study)
    return search_values(found, own, runs_of(found), units(found.study, [r['run_id'] for r in own]))


# ---- the values ----


def test_values_of_a_search(home):
    found = write_search()
    assert load_found(STUDY).seeds == found.seeds
    values = values_of(load_found(STUDY))
    cost = values['cost']
    assert (cost['trials'], cost['complete'], cost['foretold'], cost['ended_badly']) == (5, 3, 1, 1)
    assert cost['driver'] == pytest.approx(3 * 0.6 / 210) and cost['more'] == 9 and cost['at_a_time'] == 1
    broken_rows = values['tables']['broken'].set_index('constraint')
    assert list(broken_rows.loc['time'][['foretold', 'broken as it ran']]) == ['1', '1']
    assert list(values['tables']['front']['seeds']) == ['4', '4', '4']
    assert values['corpus'] == 'facts-2000' and 'somewhere' not in json.dumps(flat(values), default=str)
    assert values['threshold'] == '0.6061' and values['ship']['by'] == 'margin'
    assert values['ship']['run_id'] == found.trials[1].run_id, 'the smallest that is as good'


def test_claims_of_a_front_that_has_both(home):
    claims = values_of(write_search())['claims']
    verdicts = {name: claim['verdict'] for name, claim in claims.items()}
    assert verdicts == dict(level='not comparable', smaller='reproduced', better='reproduced')
    assert '30.0% smaller' in claims['smaller']['ours'] and claims['better']['ours'].startswith('+8.0 [')
    reasons = claims['level']['why']
    assert 'another task' in reasons and 'facts-2000' in reasons and 'another training set' in reasons


@pytest.mark.parametrize(
    'points, smaller, better, words',
    [
        (((0.70, 20e6), (0.60, 14e6)), 'not reproduced', 'not comparable', 'loses more than'),
        (((0.70, 20e6), (0.71, 17e6)), 'not reproduced', 'not comparable', 'nearest one is 15.0% smaller'),
        (((0.70, 20e6), (0.80, 30e6)), 'not reproduced', 'not comparable', 'nearest one is 50.0% larger'),
        (((0.70, 20e6), (0.705, 19.8e6)), 'not reproduced', 'not reproduced', 'nearest one is 1.0% smaller'),
    ],
    ids=['small and worse', 'hardly smaller', 'larger alone', 'as large and hardly better'],
)
def test_verdicts_follow_the_numbers(home, points, smaller, better, words):
    claims = values_of(write_search(points))['claims']
    assert (claims['smaller']['verdict'], claims['better']['verdict']) == (smaller, better)
    assert words in claims['smaller']['why']


def test_without_a_baseline_nothing_is_compared(home):
    claims = values_of(write_search(baseline=False))['claims']
    assert {claim['verdict'] for claim in claims.values()} == {'not comparable'}
    assert 'no baseline' in claims['smaller']['why']


# ---- the document ----


def set_of(copy: Path, **parts: dict) -> dict[str, str]:
    return set_with(copy, 'search.', 'search_', studied=studied_values(), **parts)


def test_without_its_evidence_the_chapter_says_so(tmp_path):
    copy = copy_without(tmp_path / 'copy', 'search')
    said = set_of(copy)
    assert 'studied.tables.space' in said and said['studied.trials'] == '479'
    assert not any(key.startswith('search.') for key in said)


def test_with_its_evidence_the_chapter_has_the_front_and_the_claims(tmp_path, monkeypatch):
    copy = copy_without(tmp_path / 'copy', 'search')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    write_search()
    th.pin(copy, dict(search=STUDY, search_student=STUDY))
    plan = read_json(copy / 'thesis' / 'plan.json')
    with th.evidence_alone(copy):
        runs = {part: th.part_records(plan, part) for part in ('search', 'search_student')}
        parts = {part: th.values_of(th.Given(th.PARTS[part], runs, plan, {}, copy)) for part in runs}
        assert f'{STUDY}.search' not in th.facts_of(copy)
    figures = parts['search']['figures']
    assert {name for name in FRONT if 'path' not in figures[name]} == {'search_importances'}
    assert 'trials' in figures['search_importances']['reason']
    manifest = read_json(copy / 'figures' / STUDY / 'MANIFEST.json')
    started = sorted(t.run_id for t in load_found(STUDY).trials if t.run_id)
    assert manifest and all(entry['run_ids'] == started for entry in manifest.values())
    said = set_of(copy, **parts)
    assert said['search.claims.smaller.verdict'] == 'reproduced' and 'search.tables.front' in said
    assert all(i in said['search.tables.runs'] for *_, i in th.planned(plan, 'search'))
    assert 'search_student.ship.sentence' in said and 'studied.tables.space' not in said


def test_a_front_without_seeds_is_told_so(tmp_path, monkeypatch):
    copy = copy_without(tmp_path / 'copy', 'search')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    found = write_search()
    trials = tuple(replace(t, state='infeasible', causes=('threshold',)) for t in found.trials)
    values = values_of(replace(found, trials=trials, seeds={}))
    figures = {name: dict(reason='not drawn') for name in FRONT}
    said = set_of(copy, search=values | dict(figures=figures))
    assert said['search.ship.sentence'].startswith('Nothing to ship') and 'search.tables.front' not in said
    assert said['search.claims.better.verdict'] == 'not comparable'


def test_what_was_found_must_be_there_and_be_planned(tmp_path, monkeypatch):
    copy = copy_without(tmp_path / 'copy', 'search')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    found = write_search()
    th.pin(copy, dict(search=STUDY))
    plan = read_json(copy / 'thesis' / 'plan.json')
    lost = found.seeds[found.trials[0].run_id][1]
    with th.evidence_alone(copy):
        runs = dict(search=th.part_records(plan, 'search'))
        some = dict(search=[r for r in runs['search'] if r['run_id'] != lost])
        with pytest.raises(th.ThesisError, match=f'{lost}.*pin search={STUDY} again'):
            th.values_of(th.Given(th.PARTS['search'], some, plan, {}, copy))
    (copy / 'thesis' / 'data' / f'{STUDY}.search.json').unlink()
    with th.evidence_alone(copy), pytest.raises(th.ThesisError, match=f'{STUDY}.search.json'):
        th.values_of(th.Given(th.PARTS['search'], runs, plan, {}, copy))

"""The search in the thesis: its front, what it cost, and verdicts that follow the numbers."""

import json
from dataclasses import replace
import pytest
from handmade import make_record, write_run
from test_thesis import copy_of
from kdnotes.core.files import read_json, write_json
from kdnotes.results.store import export, records, units
from kdnotes.search.front import Objective, Trial
from kdnotes.search.result import SearchResult, Threshold, export_result, load_result, save_result
from kdnotes.search.spaces import space_of
from thesis import build as th
from thesis.facts import flat
from thesis.search import search_values

STUDY = 'tried-search'
CORPUS = dict(corpus='/somewhere/facts-2000', task='answer_selection')
SCORE = Objective('score', 'dev MAP', True)
PARAMS = Objective('params', 'parameters', False)


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


def write_search(points=((0.70, 20e6), (0.71, 14e6), (0.78, 20.1e6)), baseline=True) -> SearchResult:
    "A search with these points, the baseline first, as its evidence; two others are infeasible."
    made = [make_trial(n if baseline else n + 1, score, int(size)) for n, (score, size) in enumerate(points)]
    n = len(made) + 1
    more = (broken(n, 'mixed_kd-s0-ffffffffffff', 'time'), broken(n + 1, None, 'memory', 'time'))
    found = SearchResult(
        study=STUDY,
        task='answer_selection',
        corpus=CORPUS['corpus'],
        corpus_sha256='0' * 64,
        space=space_of('student')[0],
        space_name='student',
        objectives=(SCORE, PARAMS),
        threshold=Threshold(0.6061, 'BM25'),
        trials=(*(t for t, _ in made), *more),
        fixed=dict(mode='mixed_kd'),
        seeds={t.run_id: tuple(names) for t, names in made},
    )
    export(STUDY)
    save_result(found)
    export_result(STUDY)
    return found


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def values_of(found: SearchResult) -> dict:
    own = records(found.study)
    return search_values(found, own, units(found.study, [r['run_id'] for r in own]))


def test_values_of_a_search(home):
    found = write_search()
    assert load_result(STUDY).seeds == found.seeds
    values = values_of(load_result(STUDY))
    cost = values['cost']
    assert (cost['trials'], cost['complete'], cost['more']) == (5, 3, 9)
    assert cost['driver'] == pytest.approx(3 * 0.6 / 210)
    front = values['tables']['front']
    assert [(row['trial'], row['n'], row['on_front']) for row in front] == [
        (1, 4, True),
        (0, 4, False),
        (2, 4, True),
    ]
    assert [row['saved'] for row in front] == [pytest.approx(0.3), None, pytest.approx(-0.005)]
    assert values['corpus'] == 'facts-2000' and 'somewhere' not in json.dumps(flat(values))
    assert values['threshold'] == 0.6061 and values['baseline_params'] == 20
    ship = values['ship']
    assert ship['by'] == 'margin' and ship['saved'] == pytest.approx(0.3), 'the smallest that is as good'
    assert ship['kept'] == pytest.approx(0.71 / 0.70)


@pytest.mark.parametrize(
    'points, smaller, better, saved',
    [
        (((0.70, 20e6), (0.71, 14e6), (0.78, 20.1e6)), 'reproduced', 'reproduced', 0.3),
        (((0.70, 20e6), (0.60, 14e6)), 'not_testable', 'not_comparable', 0.3),
        (((0.70, 20e6), (0.71, 17e6)), 'not_testable', 'not_comparable', 0.15),
        (((0.70, 20e6), (0.80, 30e6)), 'not_testable', 'not_comparable', -0.5),
        (((0.70, 20e6), (0.705, 19.8e6)), 'not_testable', 'not_testable', 0.01),
    ],
    ids=['both', 'small and worse', 'hardly smaller', 'larger alone', 'as large and hardly better'],
)
def test_verdicts_follow_the_numbers(home, points, smaller, better, saved):
    claims = values_of(write_search(points))['claims']
    assert (claims['smaller']['verdict'], claims['better']['verdict']) == (smaller, better)
    assert claims['smaller']['saved'] == pytest.approx(saved)


def test_without_a_baseline_nothing_is_compared(home):
    claims = values_of(write_search(baseline=False))['claims']
    assert {claim['verdict'] for claim in claims.values()} == {'not_comparable'}


def test_what_was_found_must_be_there_and_be_planned(tmp_path, monkeypatch):
    copy = copy_of(tmp_path / 'copy')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    found = write_search()
    plan = read_json(copy / 'thesis' / 'plan.json')
    write_json(copy / 'thesis' / 'plan.json', plan | dict(parts={}))
    th.pin(copy, dict(search=STUDY))
    plan = read_json(copy / 'thesis' / 'plan.json')
    lost = found.seeds[found.trials[0].run_id][1]

    def made(runs: list[dict]) -> dict:
        return th.values_of('search', runs, plan, copy)

    with th.evidence_alone(copy):
        runs = th.part_records(plan, 'search')
        with pytest.raises(th.ThesisError, match=f'{lost}.*pin search={STUDY} again'):
            made([r for r in runs if r['run_id'] != lost])
    (copy / 'thesis' / 'data' / f'{STUDY}.search.json').unlink()
    with th.evidence_alone(copy), pytest.raises(th.ThesisError, match=f'{STUDY}.search.json'):
        made(runs)

"A search from its first proposal to its front, what it refuses, and what a kill leaves."

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
import nbformat
import pytest
from kdnotes import cli
from kdnotes.core.config import ConfigError, flat
from kdnotes.core.given import make_config
from kdnotes.core.files import BusyError, lock, runs_path
from kdnotes.experiment.launch import RunError
from kdnotes.experiment.plan import plan
from kdnotes.records.store import records
from kdnotes.search import driver
from kdnotes.search.driver import search
from kdnotes.search.found import load_found
from kdnotes.search.goal import Asked, CurveRule, gains_of
from kdnotes.search.front import Objective, front, pareto_with_seeds, with_means
from kdnotes.search.spaces import Integer, OneOf, Real, space_of, written
from kdnotes.search.summary import front_with_test, runs_of, save_search, search_lines, seed_values
from kdnotes.search.trials import SAMPLERS, Ledger, constraints_of, first_points
from kinds import one_of_each
from notebooks import papermill

SCORE = Objective('score', 'dev score', True)
SIZE = Objective('params', 'parameters', False)
SMALL = dict(layers=[1, 2], heads=[1, 2], learning_rate=[1e-4, 1e-2, 'log'])


def toy(params: dict) -> tuple[dict, list[str]]:
    "A made-up trade: more layers score higher, one region has no memory."
    size = params['layers'] * (10 + params['heads'])
    causes = ['memory'] if size > 90 else []
    score = 1 - math.exp(-params['layers'] / 3) - 0.05 * abs(math.log10(params['learning_rate']) + 4)
    return dict(score=None if causes else score, params=float(size)), causes


SPACE = dict(layers=Integer(1, 8), heads=Integer(1, 12), learning_rate=Real(1e-6, 1e-2, log=True))


def toy_search(path, sampler: str, n: int, seed: int = 0) -> Ledger:
    ledger = Ledger(
        'toy',
        path,
        SPACE,
        (SCORE, SIZE),
        dict(corpus='toy'),
        sampler=sampler,
        seed=seed,
        first=first_points(sampler, SPACE, n, seed),
    )
    while len(ledger.trials()) < n:
        trial = ledger.ask()
        values, causes = toy(trial.params)
        ledger.tell(trial, values, dict(score=0.0, params=200.0), constraints_of(causes), causes=causes)
    return ledger


@pytest.mark.parametrize('sampler', one_of_each(['tpe', *(s for s in SAMPLERS if s != 'tpe')]))
def test_the_same_seed_proposes_the_same_trials(tmp_path, sampler):
    n = 12 if sampler == 'gp' else 24
    once = toy_search(tmp_path / 'a', sampler, n).trials()
    again = toy_search(tmp_path / 'b', sampler, n).trials()
    other = toy_search(tmp_path / 'c', sampler, n, seed=1).trials()
    assert [t.params for t in once] == [t.params for t in again] != [t.params for t in other]
    assert {t.state for t in once} <= {'complete', 'infeasible'}


def test_a_ledger_that_is_opened_again_proposes_what_it_would_have_proposed(tmp_path):
    whole = toy_search(tmp_path / 'a', 'tpe', 20).trials()
    toy_search(tmp_path / 'b', 'tpe', 20)  # the design is that of 20 trials
    parts = toy_search(tmp_path / 'b', 'tpe', 20).trials()
    assert [t.params for t in whole] == [t.params for t in parts]


def test_a_planned_trial_has_what_was_drawn(home):
    space, fixed, _ = space_of('study', 'extractive_qa')
    for setting in first_points('tpe', space, 10, 3):
        config = plan(
            make_config(task='extractive_qa', corpus='embedded', study='s', **fixed, **setting)
        ).config
        told = flat(config)
        told['layers'] = told['layers'] or len(told['student_layers'])  # those of the teacher that it keeps
        assert {name: told[name] for name in space} == setting


@pytest.mark.parametrize(
    'given, told',
    [
        (dict(layers=[4, 4]), 'is empty'),
        (dict(layers=[4, 1]), 'is empty'),
        (dict(learning_rate=[0, 1, 'log']), 'has no logarithm'),
        (dict(layers=[1.5, 4]), 'whole number'),
        (dict(nlayers=[1, 4]), "is no parameter 'nlayers'"),
        (dict(seed=[1, 4]), 'says which run it is'),
        (dict(layers='many'), 'must be'),
        (dict(layers=[]), 'must be'),
        (dict(layers=dict(low=1)), 'must be'),
        (dict(layers=dict(low=1, high='many', step=1)), 'must be'),
        (dict(layers=dict(low=1, high=6, step=0)), 'a step of 0'),
        (dict(learning_rate=dict(low=1e-5, high=1e-3, step=2)), 'no whole number'),
        (dict(student_layers=dict(choices=[[1, 3], [2, 4]])), 'must be texts or numbers'),
        ({}, 'names no parameter'),
        ('nothing', 'is none of study, laptop, student'),
        ('missing.yaml', 'is not there'),
    ],
)
def test_a_space_that_cannot_be_meant_is_refused(given, told):
    with pytest.raises(ConfigError, match=told) as e:
        space_of(given)
    assert '\n' not in str(e.value)


def test_a_space_in_yaml(tmp_path):
    file = tmp_path / 'mine.yaml'
    file.write_text(
        'layers: [1, 3]\nlearning_rate: [1e-5, 1e-3, log]\nhead_choice: {choices: [seed, importance]}\n'
        'feed_forward: {low: 128, high: 700, step: 128}\n'
    )
    space, fixed, name = space_of(str(file))
    assert space == dict(
        layers=Integer(1, 3),
        learning_rate=Real(1e-5, 1e-3, log=True),
        head_choice=OneOf(('seed', 'importance')),
        feed_forward=Integer(128, 640, step=128),
    )
    assert space_of(written(space))[0] == space
    assert (fixed, name) == ({}, 'mine')
    file.write_text('- layers\n')
    with pytest.raises(ConfigError, match='must name parameters'):
        space_of(str(file))


@pytest.mark.parametrize(
    'given, told',
    [
        (dict(workers=0), 'workers=0 must be a whole number, at least 1'),
        (dict(n_trials=0), 'n_trials=0'),
        (dict(n_trials=True), 'n_trials=True'),
        (dict(budget_minutes=-1), 'budget_minutes=-1'),
        (dict(max_trial_minutes=float('nan')), 'max_trial_minutes'),
        (dict(memory_mib=0), 'memory_mib=0'),
        (dict(sampler='bayes'), "sampler='bayes' is none of tpe"),
        (dict(objectives='speed'), 'the objectives are score, params'),
        (dict(objectives=''), 'objectives'),
        (dict(threshold='high'), 'threshold'),
        (dict(threshold=float('nan')), 'threshold'),
        (dict(space=dict(layers=[1, 4]), layers=2), 'both drawn and given'),
        (dict(storage='postgresql://nobody:secret@127.0.0.1:1/x'), 'does not answer'),
        (dict(storage='nothing at all'), 'does not answer'),
        (dict(storage='sqlite://'), 'keeps nothing; name a file'),
        (dict(mode='baseline'), 'trains no student to search for; give one of full_student'),
        (dict(layer=3), "^there is no parameter 'layer'"),
        (dict(mode='full_student', space=dict(temperature=[1, 4])), 'temperature would play no part'),
        (dict(tempreture=3), "no parameter 'tempreture'"),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused(home, given, told):
    with pytest.raises(ConfigError, match=told) as e:
        search(**dict(corpus='embedded', smoke=True, threshold=0.5) | given)
    assert '\n' not in str(e.value) and 'secret' not in str(e.value)
    assert not list(home.glob('home/runs/*/*/record.json'))


@pytest.mark.parametrize('limit', ['--budget-minutes', '--max-trial-minutes', '--memory-mib'])
def test_a_limit_may_have_a_fraction(home, capsys, limit):
    command = ['search', '--corpus', 'embedded', '--smoke', '--sampler', 'bayes', limit]
    for given, told in (('4.5', "sampler='bayes'"), ('-4.5', limit), ('much', limit)):
        assert cli.main([*command, given]) == 2
        assert told in capsys.readouterr().err


def test_the_curve_rule_keeps_the_front_of_a_recorded_search():
    "Replayed on the search in the evidence: what it would have ended, none of it on the front."
    found = load_found('embedded-search')
    of = {r['run_id']: r for r in records('embedded-search')}
    trials = sorted((t for t in found.trials if t.run_id in of), key=lambda t: t.ended_s)
    ended = []
    for t in trials:
        before = [u for u in trials if u.ended_s < t.started_s]
        r = of[t.run_id]
        smaller = [u for u in before if u.state == 'complete' and u.values['params'] <= t.values['params']]
        needed = max([found.threshold.value, *(u.values['score'] for u in smaller)])
        rule = CurveRule('dev', 'map', True, r['steps'], gains_of([of[u.run_id] for u in before]), needed)
        points = [p for p in r['curve'] if p.get('set') == 'dev']
        rows = [dict(kind='eval', set='dev', step=p['step'], metrics=dict(map=p['value'])) for p in points]
        if any(map(rule, rows)):
            ended.append(t.number)
    assert ended and not set(ended) & {t.number for t in found.front}
    assert not {t.run_id for t in trials if t.number in ended} & found.seeds.keys()


def small_search(teacher, **more):
    "Four small trials of smoke runs, in the test's own process."
    common = dict(
        space=SMALL,
        corpus='embedded',
        teacher=str(teacher),
        mode='full_kd',
        max_length=64,
        ranks=1,
        threads_per_rank=1,
        smoke=True,
        threshold='none',
        study='found',
        n_trials=4,
        front_seeds=1,
    )
    return search(**common | more)


@pytest.mark.slow
def test_a_search_ends_goes_on_and_is_read_again(home, small_teacher, rank_here):
    said = []
    part = small_search(small_teacher, n_trials=2, front_seeds=0, say=said.append)
    records = sorted(runs_path().glob('found-smoke/*/record.json'))
    times = [path.stat().st_mtime_ns for path in records]
    whole = small_search(small_teacher, say=said.append)
    assert [t.params for t in whole.trials[:2]] == [t.params for t in part.trials[:2]]
    assert [path.stat().st_mtime_ns for path in records] == times, 'what is done is not made again'
    assert [t.number for t in whole.trials] == list(range(4))
    assert all(t.state == 'complete' and t.values['params'] > 0 for t in whole.trials)
    assert whole.trials[0].params['layers'] == 1 and whole.front
    assert load_found('found-smoke') == whole, 'as it is kept'

    runs = runs_of(whole)
    assert set(runs) == {t.run_id for t in (*whole.front, whole.baseline)}
    assert all(len(of) == 2 and len({r['seed'] for r in of}) == 2 for of in runs.values())
    assert {r['teacher_seed'] for of in runs.values() for r in of} == {0}, 'one teacher for all'
    table = front_with_test(whole, runs)
    assert len(table) == len(runs) and any('test' in column for column in table.columns)
    saved = save_search(whole, pdf=False)
    assert 'Ship' in saved.html.read_text() and 'Ship' in search_lines(whole)[0]
    assert all(values['score'] for values in seed_values(whole, runs).values())

    lost = whole.ship.run_id
    shutil.rmtree(runs_path() / 'found-smoke' / lost)
    assert load_found('found-smoke').ship == whole.ship, 'what was told of it is known'
    again = small_search(small_teacher, say=said.append)
    assert again == whole and f'its run {lost} is gone, and is made again' in ' '.join(said)
    assert (runs_path() / 'found-smoke' / lost / 'record.json').exists()

    with pytest.raises(ConfigError, match='a search with another space'):
        small_search(small_teacher, space=SMALL | dict(heads=[1, 4]))
    with (
        lock(runs_path() / '.locks' / 'search-found-smoke.lock'),
        pytest.raises(BusyError, match='running already'),
    ):
        small_search(small_teacher)


@pytest.mark.slow
def test_what_cannot_be_reached_or_run_is_told_and_stops_nothing(home, small_teacher, rank_here):
    said = []
    none = small_search(small_teacher, threshold=2.0, n_trials=2, front_seeds=0, say=said.append)
    assert {t.causes for t in none.trials} == {('threshold',)} and not none.front
    told = '\n'.join(search_lines(none))
    assert 'No trial reached the threshold; the best had' in told
    tight = small_search(small_teacher, memory_mib=1, n_trials=2, study='tight', say=said.append)
    assert {t.causes for t in tight.trials} == {('memory',)}
    assert all(t.run_id is None and t.values['params'] > 0 for t in tight.trials), 'never started, true size'
    assert sum('foretold' in line for line in said) == 2


def test_a_fault_that_is_no_matter_of_settings_stops_the_search(home, monkeypatch, small_teacher):

    def broken(*args, **more):
        raise RunError('the disk is full')

    monkeypatch.setattr('kdnotes.search.driver.execute', broken)
    with pytest.raises(RunError, match='the disk is full'):
        small_search(small_teacher)
    ledger = json.loads((runs_path() / 'found-smoke' / 'trials.journal').read_text().splitlines()[0])
    assert ledger, 'what was asked for is kept'


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_notebook_shows_a_search(tmp_path, small_teacher):
    done = papermill(
        tmp_path,
        'nbs/search.ipynb',
        tmp_path / 'search.ipynb',
        ('n_trials', 2),
        ('front_seeds', 0),
        ('teacher', small_teacher),
        ('max_length', 64),
        ('threshold', 'none'),
        ('smoke', True),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = nbformat.read(tmp_path / 'search.ipynb', 4).cells
    said = '\n'.join(str(output) for c in cells if c.cell_type == 'code' for output in c.outputs)
    assert 'Ship' in said and 'data:image/svg+xml' in said and '2 of 2 trials' in said
    folder = tmp_path / 'runs' / 'embedded-search-smoke'
    assert (folder / 'report.html').exists() and len((folder / 'trials.csv').read_text().splitlines()) == 3
    assert json.loads((folder / 'search.json').read_text())['space_name'] == 'student'


@pytest.mark.slow
def test_trials_of_one_setting_are_one_run(home, small_teacher, rank_here):
    "What is drawn here names no run: the second trial waits for the first, and finds what it has made."
    given = dict(corpus='embedded', smoke=True, threshold='none', front_seeds=0, sampler='random')
    given |= dict(teacher=str(small_teacher), max_length=64, threads_per_rank=1)
    space = dict(eval_batch_size=[8, 32])
    search(n_trials=4, workers=2, space=space, **given)
    found = search(n_trials=4, workers=1, space=space, **given)  # on other cores it is the same search
    assert [t.state for t in found.trials] == ['complete'] * 4
    assert len({t.run_id for t in found.trials}) == 1
    assert [t.number for t in found.front] == [0] == [t.number for t in found.best]
    assert load_found(found.study).seeds == {found.trials[0].run_id: (found.trials[0].run_id,)}
    with pytest.raises(ConfigError, match=r'another settings \(temperature\)'):
        search(n_trials=4, space=space, temperature=7.0, **given)


def test_a_journal_that_a_kill_has_cut_goes_on_before_its_last_line(tmp_path):
    whole = toy_search(tmp_path / 'journal', 'random', 6).trials()
    path = tmp_path / 'journal'
    path.write_bytes(path.read_bytes()[:-30])
    assert [t.run_id for t in toy_search(path, 'random', 5).trials()[:5]] == [t.run_id for t in whole[:5]]
    assert len(toy_search(path, 'random', 7).trials()) == 7  # what was written behind it can be read


@pytest.mark.parametrize('line', [b'[1]\n', b'not json\n', b'\x00\xff\n', b'1\n'])
def test_a_journal_with_a_line_that_is_none_is_a_sentence(tmp_path, line):
    toy_search(tmp_path / 'journal', 'random', 3)
    with open(tmp_path / 'journal', 'ab') as f:
        f.write(line)
    with pytest.raises(ConfigError, match='journal is damaged .*; restore it, or move it away'):
        toy_search(tmp_path / 'journal', 'random', 4)


@pytest.mark.parametrize('text', ['layers: 2026-99-99', f'layers: [1, {"9" * 5000}]', '[' * 3000])
def test_a_space_that_yaml_cannot_read_is_a_sentence(tmp_path, text):
    (tmp_path / 'space.yaml').write_text(text)
    with pytest.raises(ConfigError, match='space.yaml'):
        space_of(str(tmp_path / 'space.yaml'), 'answer_selection', 'mixed_kd')


def test_a_sobol_search_that_is_longer_goes_on_with_its_sequence(tmp_path):
    points = first_points('sobol', SPACE, 15, 0)
    assert points[:7] == first_points('sobol', SPACE, 7, 0)
    for n in (7, 15):
        of = dict(path=tmp_path / 'trials.journal', space=SPACE, objectives=(SCORE, SIZE), identity={})
        ledger = Ledger('toy', sampler='sobol', first=points[:n], **of)
    assert [ledger.ask().params for _ in points] == points


def test_a_search_that_was_killed_as_it_began_begins_with_the_baseline(tmp_path):
    class Killed(BaseException):
        pass

    class Dying(Ledger):
        def _enqueue(self):
            self.study.enqueue_trial(self.first[0])
            raise Killed

    first = first_points('tpe', SPACE, 20, 0)
    of = dict(name='toy', path=tmp_path / 'trials.journal', space=SPACE, objectives=(SCORE, SIZE))
    with pytest.raises(Killed):
        Dying(identity=dict(corpus='a'), first=first, **of)
    ledger = Ledger(identity=dict(corpus='a'), first=first, **of)
    assert [ledger.ask().params for _ in first] == first


def test_a_mean_below_the_threshold_is_not_on_the_front():
    found = load_found('embedded-search')
    values = seed_values(found, runs_of(found))
    kept = pareto_with_seeds(found.trials, found.objectives, values, found.threshold.value)
    left = {t.number for t in pareto_with_seeds(found.trials, found.objectives, values)}
    missed = left - {t.number for t in kept}
    assert missed and all(t.values['score'] > found.threshold.value for t in kept)
    table = front_with_test(found, runs_of(found)).set_index('trial')
    assert all(table.at[f'trial {n}', 'still on the front'] == 'no' for n in missed)


def test_what_the_means_bring_to_the_front_gets_seeds_too(monkeypatch):
    "On the search in the evidence: a smaller trial of one seed beats the baseline, whose rivals fell behind."
    found = load_found('embedded-search')
    asked = []

    def more_seeds(_, trials):
        asked.append([t.number for t in trials])
        return {t.run_id: found.seeds.get(t.run_id, (t.run_id,)) for t in trials}

    monkeypatch.setattr(driver, '_more_seeds', more_seeds)
    monkeypatch.setattr(driver, 'save_found', lambda found: None)
    of = SimpleNamespace(say=lambda text: None, asked=Asked())
    believed = driver._with_seeds(of, replace(found, seeds={}))
    assert asked[0] == [t.number for t in found.best] and len(asked) > 1
    means = with_means(found.trials, seed_values(believed, runs_of(believed)))
    others = [t for t in found.trials if t.run_id not in believed.seeds]
    assert all(t.run_id in believed.seeds for t in front([*means, *others], found.objectives))

"A search from its first proposal to its front, what it refuses, and what a kill leaves."

import json
import math
import shutil
from pathlib import Path
from dataclasses import replace
from types import SimpleNamespace
import nbformat
import pytest
from kdnotes import cli
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.files import BusyError, lock, runs_path
from kdnotes.experiment.launch import RunError
from kdnotes.experiment.plan import plan
from kdnotes.search import driver
from kdnotes.search.config import resolve_search, search_config, store_of
from kdnotes.search.driver import search
from kdnotes.search.front import Objective, front, pareto_with_seeds, with_means
from kdnotes.search.result import load_result
from kdnotes.search.spaces import space_of
from kdnotes.search.store import SAMPLERS, TrialStore, constraints_of, exclusive
from kdnotes.search.summary import (
    front_with_test,
    save_search,
    search_lines,
    sentences,
    times,
    weak_teacher,
)
from kdnotes.tasks.sources import corpus_of
from handmade import make_record, write_run
from kinds import one_of_each
from notebooks import papermill
from small_runs import write_corpus, write_model

SCORE = Objective('score', 'dev score', True)
SIZE = Objective('params', 'parameters', False)
SMALL = dict(layers=[1, 2], heads=[1, 2], learning_rate=[1e-4, 1e-2, 'log'])


def toy(params: dict) -> tuple[dict, list[str]]:
    "A made-up trade: more layers score higher, one region has no memory."
    size = params['layers'] * (10 + params['heads'])
    causes = ['memory'] if size > 90 else []
    score = 1 - math.exp(-params['layers'] / 3) - 0.05 * abs(math.log10(params['learning_rate']) + 4)
    return dict(score=None if causes else score, params=float(size)), causes


SPACE, *_ = space_of(dict(layers=[1, 8], heads=[1, 12], learning_rate=[1e-6, 1e-2, 'log']))


FIRST = dict(layers=3, heads=12, learning_rate=1e-4)


def toy_store(path, sampler: str = 'tpe', seed: int = 0, **more) -> TrialStore:
    of = dict(space=SPACE, objectives=(SCORE, SIZE), identity=dict(corpus='toy'), first=FIRST)
    return TrialStore('toy', path, sampler=sampler, seed=seed, **of | more)


def toy_tell(store: TrialStore, trial) -> None:
    values, causes = toy(trial.params)
    store.tell(trial, values, dict(score=0.0, params=200.0), constraints_of(causes), causes=causes)


def toy_search(path, sampler: str, n: int, seed: int = 0, **more) -> TrialStore:
    store = toy_store(path, sampler, seed, **more)
    while len(store.trials()) < n:
        toy_tell(store, store.ask())
    return store


@pytest.mark.parametrize('sampler', one_of_each(['tpe', *(s for s in SAMPLERS if s != 'tpe')]))
def test_the_same_seed_proposes_the_same_trials(tmp_path, sampler):
    n = 12 if sampler == 'gp' else 24
    once = toy_search(tmp_path / 'a', sampler, n).trials()
    again = toy_search(tmp_path / 'b', sampler, n).trials()
    other = toy_search(tmp_path / 'c', sampler, n, seed=1).trials()
    assert [t.params for t in once] == [t.params for t in again] != [t.params for t in other]
    assert {t.state for t in once} <= {'complete', 'infeasible'}


def test_a_store_that_is_opened_again_proposes_what_it_would_have_proposed(tmp_path):
    whole = toy_search(tmp_path / 'a', 'tpe', 20).trials()
    for n in (3, 11, 15):
        toy_search(tmp_path / 'b', 'tpe', n)
    parts = toy_search(tmp_path / 'b', 'tpe', 20).trials()
    assert [t.params for t in whole] == [t.params for t in parts]


@pytest.mark.parametrize(
    'given, told',
    [
        (dict(layers=[4, 1]), r'layers=\[4, 1\] is refused: .*low'),
        (dict(learning_rate=[0, 1, 'log']), 'is refused: .*log'),
        (dict(layers=[1.5, 4]), 'low: Input should be a valid integer'),
        (dict(nlayers=[1, 4]), "is no parameter 'nlayers'"),
        (dict(seed=[1, 4]), 'cannot be varied'),
        (dict(layers='many'), 'is refused'),
        (dict(layers=[]), 'at least 1 item'),
        (dict(layers=dict(low=1)), 'high: Field required'),
        (dict(layers=dict(low=1, high='many', step=1)), 'high: Input should be a valid integer'),
        (dict(layers=dict(low=1, high=6, step=0)), 'step: Input should be greater'),
        (dict(learning_rate=dict(low=1e-5, high=1e-3, step=2)), 'step: Extra inputs are not permitted'),
        (dict(student_layers=dict(choices=[[1, 3], [2, 4]])), 'choices: 0: str: Input should be'),
        ({}, 'must map parameters to ranges'),
        ('nothing', 'is none of study, laptop, student'),
        ('missing.yaml', 'cannot be read: .*No such file'),
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
        layers=dict(low=1, high=3, log=False, step=1),
        learning_rate=dict(low=1e-5, high=1e-3, log=True),
        head_choice=dict(choices=['seed', 'importance']),
        feed_forward=dict(low=128, high=640, log=False, step=128),
    )
    assert space_of(space)[0] == space
    assert (fixed, name) == ({}, 'mine')
    file.write_text('- layers\n')
    with pytest.raises(ConfigError, match='must map parameters'):
        space_of(str(file))


@pytest.mark.parametrize(
    'given, told',
    [
        (dict(workers=0), 'workers=0 is refused: Input should be greater than or equal to 1'),
        (dict(n_trials=0), 'n_trials=0'),
        (dict(n_trials=99999999999), 'n_trials=99999999999 is refused: Input should be less than or equal'),
        (dict(workers=99999999999), 'workers=99999999999 is refused'),
        (dict(front_seeds=99999999999), 'front_seeds=99999999999 is refused'),
        (dict(seed=2**32 - 2, front_seeds=2), 'leaves no room for 2 more seeds of the front'),
        (dict(n_trials=True), 'n_trials=True'),
        (dict(budget_minutes=-1), 'budget_minutes=-1'),
        (dict(max_trial_minutes=float('nan')), 'max_trial_minutes'),
        (dict(memory_mib=0), 'memory_mib=0'),
        (dict(sampler='bayes'), "sampler='bayes' is refused: Input should be 'tpe'"),
        (dict(objectives='speed'), 'the objectives are score, params'),
        (dict(objectives=''), 'objectives'),
        (dict(threshold='high'), 'threshold'),
        (dict(threshold=float('nan')), 'threshold'),
        (dict(space=dict(layers=[1, 4]), layers=2), 'both drawn and given'),
        (dict(storage='postgresql://nobody:secret@127.0.0.1:1/x'), 'needs a driver|cannot be read'),
        (dict(storage='nothing at all'), 'cannot be read'),
        (dict(storage='sqlite://'), 'keeps nothing; name a file'),
        (dict(mode='baseline', space=dict(layers=[1, 4])), 'layers would play no part'),
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
    command = ['search', '--corpus', 'embedded', '--smoke', '--space', 'bayes', limit]
    below = f'{limit[2:]}=0.0 is refused: Input should be greater than 0'.replace('-', '_')
    for given, told in (('4.5', 'bayes'), ('0', below), ('-4.5', 'greater than 0'), ('much', limit)):
        assert cli.main([*command, given]) == 2
        assert told in capsys.readouterr().err


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
    part = small_search(small_teacher, n_trials=2, front_seeds=0, log=said.append)
    records = sorted(runs_path().glob('found-smoke/*/record.json'))
    times = [path.stat().st_mtime_ns for path in records]
    whole = small_search(small_teacher, log=said.append)
    assert [t.params for t in whole.trials[:2]] == [t.params for t in part.trials[:2]]
    assert [path.stat().st_mtime_ns for path in records] == times, 'what is done is not made again'
    assert [t.number for t in whole.trials] == list(range(4))
    assert all(t.state == 'complete' and t.values['params'] > 0 for t in whole.trials)
    assert whole.trials[0].params['layers'] == 1 and whole.front
    assert load_result('found-smoke') == whole, 'as it is stored'

    runs = whole.runs
    assert set(runs) == {t.run_id for t in (*whole.front, whole.baseline)}
    assert all(len(of) == 2 and len({r['seed'] for r in of}) == 2 for of in runs.values())
    assert {r['teacher_seed'] for of in runs.values() for r in of} == {0}, 'one teacher for all'
    table = front_with_test(whole)
    assert len(table) == len(runs) and any('test' in column for column in table.columns)
    saved = save_search(whole, pdf=False)
    assert 'Ship' in saved.html.read_text() and 'Ship' in search_lines(whole)[0]
    assert all(values['score'] for values in whole.seed_values.values())

    lost = whole.ship.run_id
    shutil.rmtree(runs_path() / 'found-smoke' / lost)
    assert load_result('found-smoke').ship.run_id == lost, 'what is stored of it is known'
    again = small_search(small_teacher, log=said.append)
    found, before = ([(t.run_id, t.state, t.values) for t in of.trials] for of in (again, whole))
    assert found == before, 'what it took is that of the run that is there'
    assert again.seeds == whole.seeds and f'its run {lost} is missing' in ' '.join(said)
    assert (runs_path() / 'found-smoke' / lost / 'record.json').exists()

    with pytest.raises(ConfigError, match='a search with another space'):
        small_search(small_teacher, space=SMALL | dict(heads=[1, 4]))
    with (
        lock(runs_path() / '.locks' / 'search-found-smoke.lock'),
        pytest.raises(BusyError, match='running already'),
    ):
        small_search(small_teacher)


# ---- a search is named by what its runs are made of ----


def a_store(**given) -> TrialStore:
    "The trials of a search that trains nothing."
    config = search_config(space=dict(learning_rate=[1e-4, 1e-2, 'log']), threshold='none', n_trials=2)
    common = dict(mode='full_kd', max_length=64, ranks=1, threads_per_rank=1, smoke=True, study='named')
    return store_of(config, resolve_search(config, common | given))


def test_a_search_with_another_hub_student_or_other_teachers_is_another_search(home):
    teacher, model = write_model(home / 'teacher'), write_model(home / 'model')
    hub = dict(teacher=str(teacher), teacher_mode='given', student_init='hub', student=str(model))
    two = dict(teacher=str(teacher), teachers=f'{teacher},{model}', student_init='teacher_pretrained')
    corpus = dict(corpus=str(write_corpus(home / 'corpus')))
    for name, given in dict(hub=hub, two=two | dict(student_layers=(1,))).items():
        a_store(**corpus, **given, study=name)
        before = (model / 'config.json').read_text()
        (model / 'config.json').write_text(before.replace('gelu', 'relu'))
        with pytest.raises(ConfigError, match='is a search with another models'):
            a_store(**corpus, **given, study=name)
        (model / 'config.json').write_text(before)
        a_store(**corpus, **given, study=name)


def test_a_search_with_other_scores_is_another_search(home):
    rows = ['text,label,one,other']
    rows += [f'word {i} of {"ab"[i % 2]},{"ab"[i % 2]},{i % 2 * 2 - 1}.5,{i % 3}.5' for i in range(24)]
    folder = home / 'corpus'
    folder.mkdir()

    def write(lines):
        for n, split in enumerate(('train', 'dev', 'test')):
            own = [line.replace('word', f'word {n}') for line in lines[1:]]
            (folder / f'{split}.csv').write_text('\n'.join([lines[0], *own]))

    write(rows)
    given = dict(task='text_classification', corpus=str(folder), teacher=str(write_model(home / 'teacher')))
    given |= dict(teacher_mode='scores', student_init='teacher_pretrained', student_layers=(1,))
    columns = 'text=text,label=label,teacher='
    a_store(**given, columns=f'{columns}one')
    with pytest.raises(ConfigError, match='is a search with another models .teachers.'):
        a_store(**given, columns=f'{columns}other')
    write([line.replace(',-1.5', ',1.25') for line in rows])
    with pytest.raises(ConfigError, match='is a search with another'):
        a_store(**given, columns=f'{columns}one')
    write([line.replace('one,other', 'uno,other') for line in rows])
    a_store(**given, columns=f'{columns}uno')  # the column may be called anything


def test_all_seeds_of_a_search_keep_the_labels_of_the_rows_that_their_teacher_knows(home):
    model = write_model(home / 'teacher')
    config = search_config(space=dict(learning_rate=[1e-4, 1e-2, 'log']), threshold='none', n_trials=2)
    given = dict(corpus=str(write_corpus(home / 'corpus')), teacher=str(model), labels=20, unlabelled='rest')
    given |= dict(mode='full_kd', max_length=64, ranks=1, threads_per_rank=1, student_layers=(1,))
    found = resolve_search(config, given)
    plans = [plan(make_config(**found.common | dict(learning_rate=1e-3, seed=seed))) for seed in (0, 1, 2)]
    assert len({p.teacher.run_id for p in plans}) == 1 and len({p.run_id for p in plans}) == 3
    assert len({json.dumps(list(corpus_of(p.config).splits['train'])) for p in plans}) == 1
    assert len({p.config.loss.unlabelled_id for p in plans}) == 1
    alone = plan(make_config(**given | dict(learning_rate=1e-3, seed=0)))
    assert alone.run_id == plans[0].run_id, 'a trial is called as ever'


# ---- databases ----


def in_database(path: Path, n: int) -> TrialStore:
    return toy_search(None, 'tpe', n, url=f'sqlite:///{path}')


@pytest.mark.exhaustive
def test_a_damaged_page_of_a_database_is_a_sentence(tmp_path):
    whole = as_told(in_database(tmp_path / 'trials.db', 6))
    content = (tmp_path / 'trials.db').read_bytes()
    size = 4096
    told = []
    for page in range(1, len(content) // size):
        path = tmp_path / f'{page}.db'
        path.write_bytes(content[: page * size] + b'\x55' * size + content[(page + 1) * size :])
        try:
            assert as_told(in_database(path, 6)) == whole, page
        except ConfigError as e:
            assert str(path) in str(e) and '\n' not in str(e)
            told.append(str(e))
    assert len(told) > 5 and any('malformed' in text for text in told)


def test_two_searches_of_one_database_are_a_sentence(tmp_path, monkeypatch):
    one, other = (in_database(tmp_path / 'trials.db', 0) for _ in range(2))
    trial = one.ask()
    [same] = other.running()
    values = dict(score=0.5, params=10.0)
    one.tell(trial, values, values, constraints_of([]))
    with pytest.raises(ConfigError, match='is used by another search .*; give each of the two a study name'):
        other.tell(same, values, values, constraints_of([]))
    url = f'sqlite:///{tmp_path}/trials.db'
    for home in ('a', 'b'):
        monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / home))
        if home == 'a':
            alone = exclusive('toy', url)
            alone.__enter__()
        else:
            with pytest.raises(BusyError, match='is running already'):
                exclusive('toy', url).__enter__()
    alone.__exit__(None, None, None)
    with exclusive('toy', url):
        pass


@pytest.mark.exhaustive
def test_what_cannot_be_reached_or_run_is_told_and_stops_nothing(home, small_teacher, rank_here):
    said = []
    none = small_search(small_teacher, threshold=2.0, n_trials=2, front_seeds=0, log=said.append)
    assert {t.causes for t in none.trials} == {('threshold',)} and not none.front
    assert search_lines(none)[0].startswith(
        'Nothing to ship: no trial satisfies all constraints. The best dev MAP'
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_trial_that_needs_more_memory_than_its_limit_is_infeasible(home, small_teacher):
    said = []
    found = small_search(small_teacher, memory_mib=1, n_trials=2, front_seeds=0, log=said.append)
    assert {t.causes for t in found.trials} == {('memory',)} and not found.front
    assert sum('more than the 1 that it may have' in line for line in said) == 2


def test_a_fault_that_is_no_matter_of_settings_stops_the_search(home, monkeypatch, small_teacher):

    def broken(*args, **more):
        raise RunError('the disk is full')

    monkeypatch.setattr('kdnotes.search.driver.execute', broken)
    with pytest.raises(RunError, match='the disk is full'):
        small_search(small_teacher)
    store = json.loads((runs_path() / 'found-smoke' / 'trials.journal').read_text().splitlines()[0])
    assert store, 'the trial is stored'


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


@pytest.mark.exhaustive
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
    assert load_result(found.study).seeds == {found.trials[0].run_id: (found.trials[0].run_id,)}
    with pytest.raises(ConfigError, match=r'another settings \(temperature\)'):
        search(n_trials=4, space=space, temperature=7.0, **given)


def test_a_journal_that_a_kill_has_cut_goes_on_before_its_last_line(tmp_path):
    whole = toy_search(tmp_path / 'journal', 'random', 6).trials()
    path = tmp_path / 'journal'
    path.write_bytes(path.read_bytes()[:-30])
    assert [t.params for t in toy_search(path, 'random', 5).trials()[:5]] == [t.params for t in whole[:5]]
    assert len(toy_search(path, 'random', 7).trials()) == 7  # what was written behind it can be read


def as_told(store: TrialStore) -> list[tuple]:
    "What is shown of trials, without times; an open trial gets its result."
    for trial in store.running():
        toy_tell(store, trial)
    return [(t.number, t.params, t.state, t.values, t.causes, t.constraints) for t in store.trials()]


@pytest.mark.parametrize('name', ['param_name', '"told"', 'identity'])
def test_a_journal_that_lost_a_line_of_a_finished_trial_is_refused(tmp_path, name):
    toy_search(tmp_path / 'journal', 'random', 3)
    lines = (tmp_path / 'journal').read_text().splitlines(keepends=True)
    lost = max(n for n, line in enumerate(lines) if name in line)
    (tmp_path / 'journal').write_text(''.join(lines[:lost] + lines[lost + 1 :]))
    with pytest.raises(ConfigError, match='journal is damaged .*; restore it, or move it away') as e:
        toy_search(tmp_path / 'journal', 'random', 4)
    assert '\n' not in str(e.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize('sampler', ['tpe', 'sobol'])
def test_a_search_killed_between_any_two_lines_of_its_journal_proposes_the_same_trials(tmp_path, sampler):
    "A kill leaves the first lines of the journal; the rest is written again."
    whole = as_told(toy_search(tmp_path / 'journal', sampler, 13))
    lines = (tmp_path / 'journal').read_text().splitlines(keepends=True)
    for n in range(0, len(lines), 7):
        path = tmp_path / f'first-{n}'
        path.write_text(''.join(lines[:n]))
        store = toy_store(path, sampler)
        for trial in store.running():
            toy_tell(store, trial)
        assert as_told(toy_search(path, sampler, 13)) == whole, 'none is lost, and none is there twice'


@pytest.mark.parametrize('line', [b'[1]\n', b'not json\n', b'\x00\xff\n', b'1\n'])
def test_a_journal_with_a_line_that_is_none_is_a_sentence(tmp_path, line):
    toy_search(tmp_path / 'journal', 'random', 3)
    with open(tmp_path / 'journal', 'ab') as f:
        f.write(line)
    with pytest.raises(ConfigError, match='journal cannot be read .*; restore it, or move it away'):
        toy_search(tmp_path / 'journal', 'random', 4)


@pytest.mark.parametrize('text', ['layers: 2026-99-99', f'layers: [1, {"9" * 5000}]', '[' * 3000])
def test_a_space_that_yaml_cannot_read_is_a_sentence(tmp_path, text):
    (tmp_path / 'space.yaml').write_text(text)
    with pytest.raises(ConfigError, match='space.yaml'):
        space_of(str(tmp_path / 'space.yaml'), 'answer_selection', 'mixed_kd')


def test_a_mean_below_the_threshold_is_not_on_the_front():
    found = load_result('embedded-search')
    values = found.seed_values
    kept = pareto_with_seeds(found.trials, found.objectives, values, found.threshold.value)
    left = {t.number for t in pareto_with_seeds(found.trials, found.objectives, values)}
    missed = left - {t.number for t in kept}
    assert missed and all(t.values['score'] > found.threshold.value for t in kept)
    table = front_with_test(found).set_index('trial')
    assert all(table.at[f'trial {n}', 'still on the front'] == 'no' for n in missed)


def test_what_the_means_bring_to_the_front_gets_seeds_too(monkeypatch):
    "On the search in the evidence: a smaller trial of one seed beats the baseline, whose rivals fell behind."
    found = load_result('embedded-search')
    asked = []

    def more_seeds(_, trials):
        asked.append([t.number for t in trials])
        return {t.run_id: found.seeds.get(t.run_id, (t.run_id,)) for t in trials}

    monkeypatch.setattr(driver, '_more_seeds', more_seeds)
    monkeypatch.setattr(driver, 'save_result', lambda found: None)
    of = SimpleNamespace(report=lambda *said: None, config=search_config())
    believed = driver._with_seeds(of, replace(found, seeds={}))
    assert asked[0] == [t.number for t in found.best] and len(asked) > 1
    means = with_means(found.trials, believed.seed_values)
    others = [t for t in found.trials if t.run_id not in believed.seeds]
    assert all(t.run_id in believed.seeds for t in front([*means, *others], found.objectives))


def test_a_search_says_first_that_its_teacher_is_worse_than_its_students(tmp_path, monkeypatch):
    "And what its trials took, in shares of the whole."
    found = load_result('embedded-search')
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    teacher, student = (
        make_record(mode, 0, study='made', value=value)
        for mode, value in (('baseline', 0.6), ('full_kd', 0.7))
    )
    teacher['metrics']['dev']['map'], student['metrics']['dev']['map'] = 0.485, 0.612
    student['teacher_run_id'] = teacher['run_id']
    for record in (teacher, student):
        write_run(record)
    one = next(t for t in found.trials if t.state == 'complete')
    one = replace(
        one, number=0, run_id=student['run_id'], values=one.values | dict(score=0.612), seconds=60.0
    )
    one = replace(one, started_s=100.0, ended_s=400.0, extra=dict(driver_s=30.0))
    found = replace(found, study='made', trials=(one,), seeds={}, options={})
    assert weak_teacher(found) == dict(number=0, teacher=0.485, student=pytest.approx(0.612))
    took = times(found)
    assert took['total'] == '5 min'
    assert took['shares'] == pytest.approx(dict(training=0.2, search=0.1, waiting=0.7))
    shipped = found.choice.sentence
    assert repr(found).splitlines() == [
        'Search made (answer_selection on embedded): 1 trial, 1 on the front',
        shipped,
    ]
    more = replace(found, fixed=found.fixed | dict(labels_seed=0, smoke=True), options=dict(front_seeds=1))
    more = replace(more, seeds={one.run_id: (one.run_id,)})
    shipped = more.choice.sentence
    assert sentences(more) == (
        'The teacher scores worse than its students: dev MAP 0.4850, against 0.6120 for trial 0 (baseline). '
        'Train a better teacher first (`kdnotes tune --mode baseline` searches its settings) or use another '
        'one. With this teacher, the search does not show what distillation can do.',
        f'{shipped} Smoke runs: these numbers mean nothing.',
        f'To export its weights: kdnotes export {one.run_id} --to FOLDER',
        "1 trial in the space 'student': 1 feasible, 0 infeasible, 1 on the front. The trials took 5 min "
        '(20% training, 10% search overhead, 70% startup and waiting).',
        'A feasible student has a dev MAP above 0.6061 (trivial baseline: BM25).',
        'This setting has fewer than the 2 requested seeds: trial 0 (1).',
        'All seeds use the labels of the same rows, as the teacher does. Their spread does not '
        'include the choice of these rows.',
    )
    assert list(found.table['number']) == [0] and '<td>' in found._repr_html_()
    assert weak_teacher(replace(found, trials=(replace(one, values=one.values | dict(score=0.4)),))) is None

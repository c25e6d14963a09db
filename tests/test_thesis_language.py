"""The study of language models in the thesis: absent without evidence, whole with it,
and verdicts on published claims that follow the numbers.
"""

import json
import numpy as np
import pandas as pd
import pytest
from handmade import make_record
from test_thesis import copy_without, set_with
from kdnotes.analysis.in_use import in_use
from kdnotes.analysis.intervals import Interval
from kdnotes.analysis.evidence import evidence
from kdnotes.core.config import task_info
from kdnotes.core.files import read_json, write_json
from kdnotes.records.schema import of_this_schema
from kdnotes.records.runs import RunFolder
from kdnotes.records.store import export, keep_floors, records, units
from kdnotes.tasks.base import Evaluation, floor_table, floors_key
from kdnotes.thesis import build as th
from kdnotes.thesis.claims import CLAIMS, VERDICTS, Known, claims_values
from kdnotes.thesis.language import batch_values, language_values
from kdnotes.thesis.roles import with_role_steps

SETS = ('dev', 'wikitext2', 'imdb')
UNIGRAM = 8.0  # nats
# better than the teacher's start and worse than the teacher: nats a hidden token on wikitext2
ARMS = dict(baseline=5.0, full_student=5.6, full_kd=5.3, mixed_kd=5.301)


def set_units(name: str, seed: int, nll: float, pseudo: float, visible: float) -> pd.DataFrame:
    "Six documents of five blocks, and of four tokens that were hidden by themselves."
    rng = np.random.default_rng([seed, len(name), int(1e4 * nll)])
    hard = np.random.default_rng(len(name)).normal(0, 0.1, 6)

    def rows(metric, mean, of_each):
        x = np.repeat(hard, of_each) + rng.normal(0, 0.02, 6 * of_each)
        return [
            dict(unit=f'{metric[0]}{i}', cluster=f'D{i // of_each}', metric=metric, value=round(v, 6))
            for i, v in enumerate(x - x.mean() + mean)
        ]

    found = rows('nll', nll, 5) + rows('nll_all', visible, 5)
    found += rows('pseudo_nll', pseudo, 4) if name != 'dev' else []
    return pd.DataFrame(found).assign(split=name, set='all')


def make_run(mode: str, seed: int, nll: float, study: str = 'gutenberg', pseudo: float = -0.2, **parameters):
    "A record and its units, as a run of masked_lm leaves them; `pseudo`: nats from perplexity to it."
    tables = {
        name: set_units(name, seed, nll + i / 10, nll + i / 10 + pseudo, nll - 3)
        for i, name in enumerate(SETS)
    }
    r = make_record(
        mode,
        seed,
        nll,
        study=study,
        corpus='gutenberg',
        metric='nll',
        higher=False,
        task='masked_lm',
        score_on='wikitext2,imdb',
        **parameters,
    )
    r['metrics'] = {name: metrics_of(table) for name, table in tables.items()}
    r['primary'] |= dict(set='wikitext2', value=r['metrics']['wikitext2']['nll'])
    r['params_total'] = 10 if r['factors']['network'] == 'teacher' else 7
    return of_this_schema(r, 'made'), pd.concat(tables.values(), ignore_index=True)


def metrics_of(table: pd.DataFrame) -> dict:
    means = table.groupby('metric')['value'].mean().to_dict() | dict(unigram_nll=UNIGRAM)
    return means | {name.replace('nll', 'perplexity'): float(np.exp(x)) for name, x in means.items()}


def write_study(runs) -> None:
    "Finished runs under $KDNOTES_HOME, exported."
    for r, table in runs:
        folder = RunFolder(r['study'], r['run_id']).create()
        folder.write_table('units', table)
        folder.write_table('predictions', pd.DataFrame(columns=['split', 'unit', 'item', 'label', 'score']))
        folder.write_record(r)
    r, _ = runs[0]
    key = floors_key(task_info(r['task']), r['corpus_sha256'], r['settings'])
    tables = [set_units(name, 99, UNIGRAM, UNIGRAM, UNIGRAM) for name in SETS]
    metrics = {name: metrics_of(table) for name, table in zip(SETS, tables)}
    unigram = Evaluation(metrics, pd.concat(tables, ignore_index=True), pd.DataFrame())
    keep_floors(r['study'], key, floor_table(dict(unigram=unigram)))
    export(r['study'])


def with_teachers(runs):
    "The same runs, each student with the run that taught it."
    of_seed = {r['seed']: r['run_id'] for r, _ in runs if r['factors']['network'] == 'teacher'}
    for r, _ in runs:
        if r['factors']['network'] == 'student':
            r['teacher_run_id'] = of_seed.get(r['teacher_seed'], r['teacher_run_id'])
    return runs


def write_main_study(arms=ARMS, seeds=3, **more) -> None:
    runs = [
        make_run(mode, seed, nll + 0.01 * seed + 0.003 * (seed == 1) * mode.endswith('_kd'), **more)
        for mode, nll in arms.items()
        for seed in range(seeds)
    ]
    write_study(with_teachers(runs))


def write_mixed_study() -> None:
    "Three students of one teacher, all in mixed precision."
    arms = dict(mixed_baseline=5.0, mixed_student=5.6, mixed_kd=5.3)
    runs = [
        make_run(mode, seed, nll + 0.01 * seed, teacher_mode='mixed_baseline', teacher_seed=0)
        for mode, nll in arms.items()
        for seed in (range(3) if mode != 'mixed_baseline' else [0])
    ]
    write_study(with_teachers(runs))


def batch_runs(change: float, seeds: int = 1, epochs=(2, 2, 2)):
    "Steps of 32, 64 and 128 blocks; each doubling changes the loss."
    return [
        make_run(
            'full_student',
            seed,
            5.0 + change * i + 0.01 * seed + 0.002 * (i - 1) * (seed - 1),
            study='gutenberg-batch',
            arm=f'batch_{32 * 2**i}',
            batch_size=32 * 2**i,
            epochs=epochs[i],
        )
        for i in range(3)
        for seed in range(seeds)
    ]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def values_of() -> dict:
    return language_values(with_role_steps(evidence('gutenberg')))


# ---- the values ----


def test_values_of_the_study(home):
    write_main_study()
    found = values_of()
    assert found['set'] == 'wikitext2' and found['metric'] == 'nll' and found['n_runs'] == 12
    assert found['steps']['network']['a'] == 'baseline' and found['steps']['network']['compared']
    assert [found['steps'][k]['verdict'] for k in ('network', 'kd', 'precision')] == [
        'loses',
        'gains',
        'open',
    ]
    assert 'over the 3 comparisons' in found['steps']['kd']['sentence']
    scores = found['sets']['wikitext2']['full_kd']
    assert scores['perplexity'].estimate == pytest.approx(np.exp(scores['nll'].estimate))
    assert scores['hidden'].high < 0 < scores['visible'].low
    assert 'hidden' not in found['sets']['dev']['full_kd'] and 'kept' not in found['sets']['dev']['baseline']
    # of 8 - 5.1 nats the student has 8 - 5.4: the share, and the interval, that headline and table have
    assert scores['kept'].estimate == pytest.approx(2.6 / 2.9, abs=0.01)
    assert scores['kept'] == in_use(evidence('gutenberg')).shares['full_kd']
    told = found['tables']['comparisons']
    assert set(told['epochs']) == {f'{n:g}, {n:g}' for n in [records('gutenberg')[0]['settings']['epochs']]}
    assert set(found['tables']['scores']) == set(SETS)
    assert found['recipe']['as_published'] and found['recipe']['differs'] == []
    assert found['params_ratio'] == 0.7
    assert found['command'].startswith('kdnotes study --seeds 3 --arms ')


def test_a_study_in_mixed_precision_has_arms_of_its_own(home):
    write_mixed_study()
    found = values_of()
    assert found['roles'] == dict(teacher='mixed_baseline', student='mixed_student', taught='mixed_kd')
    assert list(found['steps']) == ['network', 'kd', 'procedure_3'] and found['one_teacher']
    assert (found['steps']['kd']['a'], found['steps']['kd']['verdict']) == ('mixed_student', 'gains')
    command = found['command']
    assert 'mixed_baseline' not in command.split(' -p ')[0] and 'teacher_mode=mixed_baseline' in command
    assert 'teacher_seed=0' in command, 'the same three students'
    # three students of one teacher, which is compared with each of them
    assert found['sets']['wikitext2']['mixed_kd']['kept'].n == 3


@pytest.mark.parametrize(
    'change, seeds, verdict, side, trend',
    [
        (-0.3, 1, 'not_tested', 'better', 'falls'),
        (0.3, 1, 'not_tested', 'worse', 'rises'),
        (-0.3, 3, 'gains', 'better', 'falls'),
        (0.3, 3, 'loses', 'worse', 'rises'),
    ],
)
def test_sizes_of_a_step(home, change, seeds, verdict, side, trend):
    write_study(batch_runs(change, seeds))
    found = records('gutenberg-batch')
    values = batch_values(found, units('gutenberg-batch', [r['run_id'] for r in found]))
    assert (values['verdict'], values['side'], values['trend']) == (verdict, side, trend)
    assert (values['smallest'], values['largest'], values['equal_epochs']) == (32, 128, True)
    table = values['tables']['batches']
    assert table['blocks a step'].tolist() == ['32', '64', '128'] and table['from the smallest'][0] == '-'


# ---- verdicts on published claims ----


def known(
    left=(0.606, 0.612, 0.68), tokens=2_088_628, orders=((-1.0, 1.0),), kept=0.9, batches=None, n=3
) -> Known:
    "Made-up values."

    def around(x):
        return Interval(x, x - 0.1, x + 0.1, n, 0.95, 't')

    arms = {f'arm{i}': dict(hidden=around(h), visible=around(v)) for i, (h, v) in enumerate(orders)}
    arms['full_kd'] = dict(kept=around(kept), nll=around(5.0)) if kept else dict(nll=around(5.0))
    roles = dict(teacher='baseline', student='full_student', taught='full_kd')
    study = dict(set='wikitext2', roles=roles, params_ratio=0.77, sets=dict(wikitext2=arms))
    facts = dict(texts=dict(wikitext_tokens=tokens)) if tokens else {}
    if left:
        facts['sizes'] = dict(left=dict(zip(('base', 'masked_lm', 'untied'), left)))
    return Known(study, batches, facts)


def steps(verdict='open', side='open', **more) -> dict:
    about = dict(
        smallest=32, largest=512, set='wikitext2', metric='nll', n_seeds=3, equal_epochs=True, one_rate=True
    )
    return about | dict(verdict=verdict, side=side, change=Interval(0.1, 0.0, 0.2, 3, 0.95, 't')) | more


@pytest.mark.parametrize(
    'key, given, verdict',
    [
        ('smaller', {}, 'reproduced'),
        ('smaller', dict(left=(0.8, 0.8, 0.8)), 'not reproduced'),
        ('smaller', dict(left=(0.606, 0.7, 0.7)), 'not reproduced'),
        ('smaller', dict(left=None), 'not comparable'),
        ('left', {}, 'not reproduced'),
        ('left', dict(left=(0.39, 0.41, 0.9)), 'reproduced'),
        ('kept', {}, 'not comparable'),
        ('kept', dict(kept=None), 'not comparable'),
        ('order', {}, 'consistent'),
        ('order', dict(orders=((1.0, 2.0), (0.5, 2.0))), 'reproduced'),
        ('order', dict(orders=((1.0, 2.0), (0.15, 2.0))), 'consistent'),
        ('order', dict(orders=((-1.0, -0.5),)), 'not reproduced'),
        ('order', dict(orders=((-1.0, 0.15),)), 'open'),
        ('order', dict(orders=((0.15, 0.15),)), 'open'),
        # a difference that is sure and small is not far
        ('order', dict(orders=((-1.0, -0.05),)), 'not reproduced'),
        ('order', dict(orders=()), 'not comparable'),
        ('batches', {}, 'not comparable'),
        ('batches', dict(batches=steps('gains', 'better')), 'reproduced'),
        # one seed is no test, whichever way it points
        ('batches', dict(batches=steps('not_tested', 'better')), 'open'),
        ('batches', dict(batches=steps('not_tested', 'worse')), 'open'),
        ('order', dict(orders=((1.0, 2.0), (0.5, 2.0)), n=1), 'open'),
        ('batches', dict(batches=steps('not_tested')), 'open'),
        ('batches', dict(batches=steps('open', 'better')), 'open'),
        ('batches', dict(batches=steps('gains', 'better', one_rate=False)), 'not comparable'),
        ('batches', dict(batches=steps('loses', 'worse')), 'not reproduced'),
        ('batches', dict(batches=steps('gains', 'better', equal_epochs=False)), 'not comparable'),
        ('tokens', {}, 'consistent'),
        ('tokens', dict(tokens=245_569), 'not reproduced'),
        ('tokens', dict(tokens=None), 'not comparable'),
        ('table_2', {}, 'not comparable'),
        ('next_sentence', {}, 'not comparable'),
        ('speed', {}, 'not comparable'),
    ],
)
def test_a_verdict_follows_the_numbers(key, given, verdict):
    found = claims_values(known(**given))
    assert found[key]['verdict'] == verdict
    assert all(found[key][name] for name in ('says', 'ours', 'why'))


def test_every_claim_has_a_row_and_counts_add_up():
    found = claims_values(known())
    assert len(found['table']) == len(CLAIMS) == found['counts']['all']
    assert sum(found['counts'][v.replace(' ', '_')] for v in VERDICTS) == len(CLAIMS)


# ---- facts ----


def score_of(run_id: str, **more) -> dict:
    "As `kdnotes score --json` prints it."
    nats = dict(estimate=5.0, low=4.9, high=5.1, n=6, level=0.95, method='t')
    about = dict(
        model=run_id, model_sha256='m', text='wikitext2', text_sha256='c' * 64, documents=6, words=90
    )
    scored = dict(pieces=100, pieces_a_word=100 / 90, tokens=100, of_tokens=100, by='block', length=128)
    how = dict(dtype='fp32', device='cpu', clusters='documents')
    return about | scored | how | dict(pseudo_nll=nats, nll=nats, nll_all=nats) | more


def test_scores_are_facts_by_text_and_arm(tmp_path):
    (tmp_path / 'thesis' / 'data').mkdir(parents=True)
    files = []
    for arm in ('baseline', 'full_kd'):
        files.append(str(write_json(tmp_path / f'{arm}.json', score_of(f'{arm}-s0-0123456789ab'))))
    (written,) = th.write_facts(tmp_path, files)
    found = read_json(written)['wikitext2']
    assert written.name == 'scores.json' and set(found) == {'baseline', 'full_kd', 'table'}
    assert found['full_kd']['exact'] and found['full_kd']['pseudo_perplexity.estimate'] == 148.41316
    assert found['table']['rows'][0][:2] == ['baseline', 'all 100']


# ---- the document ----

LANGUAGE_PREFIXES = (
    'mlm.',
    'mlm_fp32.',
    'mlm_batch.',
    'claims.',
    'language.',
    'facts.texts',
    'facts.sizes',
    'facts.scores',
)


@pytest.mark.parametrize('beside', [False, True], ids=['alone', 'with runs in fp32'])
def test_the_chapter_of_a_study_in_mixed_precision(beside, tmp_path, monkeypatch):
    "Set with the values that the other chapters have already."
    copy = copy_without(tmp_path / 'copy', 'mlm')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    write_mixed_study()
    not_drawn = {name: dict(reason='not drawn') for name in ('accuracy_time', 'curves')}
    made = dict(mlm=values_of() | dict(figures=not_drawn))
    if beside:
        write_study([make_run(mode, 1, nll) for mode, nll in ARMS.items() if mode != 'mixed_kd'])
        fp32 = evidence('gutenberg', [r['run_id'] for r in records('gutenberg') if r['arm'] in ARMS])
        made |= dict(mlm_fp32=language_values(with_role_steps(fp32)))
    claims = claims_values(Known(made['mlm'], None, {}))
    set_with(copy, *LANGUAGE_PREFIXES, **made, claims=claims, language=dict(tables={}))


def test_a_score_of_other_weights_stops_the_build(tmp_path, monkeypatch):
    copy = copy_without(tmp_path / 'copy', 'mlm')
    monkeypatch.setenv('KDNOTES_HOME', str(copy))
    write_main_study(dict(baseline=5.0, full_kd=5.3), seeds=1)
    (run_id,) = [r['run_id'] for r in records('gutenberg') if r['arm'] == 'baseline']
    scored = write_json(tmp_path / 'score.json', score_of(run_id, model_sha256='other'))
    th.write_facts(copy, [str(scored)])
    # the study alone: what comes before it takes a minute
    plan = json.loads((copy / 'thesis' / 'plan.json').read_text())
    write_json(copy / 'thesis' / 'plan.json', plan | dict(parts={}))
    th.pin(copy, dict(mlm='gutenberg'))
    with pytest.raises(th.ThesisError, match=f'scores.json has {run_id} on wikitext2'):
        th.build(copy)

"""What the thesis computes: small made-up studies with values worked out by hand."""

from dataclasses import replace
from kdnotes.analysis import scaling_results as scaling
from kdnotes.analysis.compare import Comparison
from kdnotes.analysis.compare import Effect
from kdnotes.analysis.evidence import Evidence
from kdnotes.analysis.intervals import Interval
from kdnotes.analysis.intervals import LEVEL
from kdnotes.analysis.intervals import scaled
from kdnotes.analysis.labels import what_pays
from kdnotes.core.arms import MODES
from kdnotes.core.files import root
from kdnotes.search.spaces import OneOf
from kdnotes.tasks.sources import Corpus
from pathlib import Path
import numpy as np
import pandas as pd


def test_facts():
    from thesis.facts import (
        SHOWN_PEAKS,
        about_values,
        amp_values,
        flat,
        gradient_values,
        own_searches,
        peaks_table,
        plain,
        seeds_made_again,
        settings_table,
        studies_table,
        table,
        transfer_values,
    )
    from fastcore.test import test_eq
    from kdnotes.core.given import make_config
    from kdnotes.core.resolve import Machine, factors, resolve, settings

    def _record(mode='full_kd', seed=0, value=0.7, git='c0'):
        "The parts of a record that this lesson needs, with made-up numbers."
        c = resolve(make_config(mode=mode, seed=seed), Machine('cpu', cores=2), 'wikiqa')
        return dict(
            study='lesson',
            task='answer_selection',
            run_id=f'{mode}-s{seed}',
            mode=mode,
            arm=mode,
            seed=seed,
            teacher_seed=c.teacher_seed,
            corpus='wikiqa',
            corpus_sha256='0' * 64,
            factors=factors(c),
            settings=settings(c),
            precision=factors(c)['precision'],
            precision_reason='made up',
            parallel=dict(ranks=c.ranks, threads_per_rank=c.threads_per_rank),
            params_total=17e6 if MODES[mode].network == 'student' else 23e6,
            primary=dict(set='test', metric='map', value=value),
            initial={},
            amp=dict(final_scale=None, overflow_steps=None),
            environment=dict(
                git=git,
                cpu='a cpu',
                device='a cpu',
                torch='2',
                transformers='5',
                python='3',
                load_average=[0.5],
                cpu_steal=0.2,
            ),
            throughput=dict(examples_per_s=50.0),
            energy=dict(device_j=None),
            reasons={'energy.device_j': 'no counter'},
            time=dict(train_s=100.0 * (seed + 1), teacher_s=10.0, transfer_s=None),
            teacher_run_id=f'baseline-s{seed}' if MODES[mode].network == 'student' else None,
            phases=None,
        )

    _study = [_record(mode, seed) for mode in ('baseline', 'full_kd', 'mixed_kd') for seed in (0, 1)]

    counted = pd.DataFrame(
        dict(arm=['a', 'b', 'c'], time=['1 (n=3)', '2 (n=3)', '-'], size=['1 (n=3)', '2 (n=2)', '-'])
    )
    test_eq(plain(counted)['head'], ['arm', 'time (n=3)', 'size'])
    test_eq(plain(counted)['rows'], [['a', '1', '1 (n=3)'], ['b', '2', '2 (n=2)'], ['c', '-', '-']])

    _values = flat(
        {
            'arms': {'full_kd': {'primary': Interval(0.7, 0.65, 0.75, 3, 0.95, 't')}},
            'seeds': (0, 1),
            'one': Interval(0.7, None, None, 1, 0.95, 't', reason='one value has no spread'),
        }
    )
    assert (
        _values['arms.full_kd.primary.low'] == 0.65
        and _values['one.low'] is None
        and _values['one.reason'].startswith('one value')
    )

    _rows = [
        dict(arm='a', gain=Interval(0.1, 0.0, 0.2, 3, 0.95, 't'), p=0.0001),
        dict(arm='b', gain=None, p=None),
    ]
    _made = table(_rows, {'arm': '{arm}', 'gain': '{gain:+.2f}', 'p': '{p:p}'})
    test_eq(plain(_made)['rows'], [['a', '+0.10 [0.00, +0.20]', '< 0.001'], ['b', '-', '-']])

    _about = about_values(_study)
    test_eq(
        [_about[k] for k in ('n_runs', 'n_seeds', 'seeds_an_arm', 'formats_in_words', 'corpus_name')],
        [6, 2, '2', 'fp32 and bf16', 'WikiQA'],
    )

    test_eq(list(studies_table([_study])['runs']), ['6'])
    studies_table([_study])

    settings_table(_study).query("setting in ('precision', 'temperature', 'learning_rate')")

    _run = dict(precision='fp32', throughput=dict(examples_per_s=10.0, useful_flops_per_s=2e10))
    _arms = {arm: [_run] for arm in SHOWN_PEAKS}
    _alone = {arm: dict(format='fp32', speed=100.0) for arm in SHOWN_PEAKS}
    _made = peaks_table(dict(cpu=dict(fp32=4e10), gpu=dict(fp32=1e12)), _arms, _arms, _alone)
    test_eq([list(_made['share, %'])[k] for k in (0, -1)], ['50', '20'])

    def _scaled(steps, overflows, scale):
        return dict(steps=steps, amp=dict(overflow_steps=overflows, final_scale=scale))

    test_eq(
        amp_values([_scaled(10, 1, 2.0), _scaled(20, None, None), _scaled(30, 2, 8.0)]),
        dict(runs=2, steps=40, overflows=3, none=False, low=2.0),
    )
    test_eq(amp_values([_scaled(20, None, None)]), {})

    def _moment(first, shares):
        return dict(
            step=1,
            scale=1.0,
            layers=[
                dict(
                    layer='head',
                    elements=100,
                    zero=1 - sum(shares),
                    not_finite=0.0,
                    log2_from=first,
                    shares=shares,
                )
            ],
        )

    _seen = gradient_values(
        {
            'a': [dict(gradients=[_moment(-28, [0.1, 0.1, 0.2])])],
            'b': [dict(gradients=[_moment(-12, [0.5, 0.5])]), {}],
        }
    )
    test_eq(
        (
            _seen['lost']['share'],
            _seen['lost']['arm'],
            _seen['coarse']['share'],
            _seen['lost_scaled']['share'],
            _seen['over_scaled']['share'],
        ),
        (0.5, 'a', 1.0, 0.0, 0.0),
    )
    test_eq(gradient_values({'a': [{}]}), {})

    def _trial(arm, rate, value):
        primary = dict(set='test', metric='map', value=0.7, higher_is_better=True)
        about = dict(run_id=f'{arm}-{rate}', arm=arm, mode=arm, task='answer_selection', primary=primary)
        scores = dict(dev={'map': value}, test={})
        return about | dict(settings=dict(learning_rate=rate, epochs=2.0), metrics=scores)

    _runs = [
        dict(arm=arm, mode=arm, seed=0, run_id=arm, settings=dict(learning_rate=rate, epochs=2.0))
        for arm, rate in (('baseline', 1.0), ('full_student', 2e-4), ('full_kd', 3e-4), ('mixed_kd', 3e-4))
    ]
    _tried = [
        _trial(arm, rate, value)
        for arm in ('full_student', 'full_kd')
        for rate, value in ((1e-4, 0.71), (2e-4, 0.74))
    ]
    test_eq(
        own_searches(_tried, _runs),
        dict(full_student='same', full_kd='other', mixed_kd='none')
        | dict(same='full_student', other='full_kd', none='mixed_kd'),
    )

    _first = transfer_values(
        [
            _record('mixed_baseline')
            | dict(metrics=dict(dev={'map': 0.8}, test={'map': 0.9}), time=dict(train_s=5.0, total_s=5.0))
        ]
    )
    test_eq((_first['teacher']['test'], _first['formats'], 'student' in _first), (0.9, 'bf16', False))

    _again = [r | dict(initial=dict(start_sha256='made again' if r['seed'] else 'first')) for r in _study]
    test_eq(seeds_made_again({'baseline': [r for r in _again if r['arm'] == 'baseline']}), '1')
    test_eq(seeds_made_again({'baseline': _study[:2]}), None)


def test_steps():
    from thesis.steps import (
        DECISIONS,
        INTERACTION,
        PRECISION_STEPS,
        agreed,
        decision_values,
        decisions_table,
        effect_values,
        keeps,
        memory_values,
        pairs_by_seed,
        pooled_soft_targets,
        step_values,
        verdict,
    )
    from fastcore.test import test_close, test_eq

    def _made(low, high, seeds=(0, 1, 2), **more):
        return Comparison(
            'a',
            'b',
            None,
            {'higher_is_better': True},
            Interval((low + high) / 2, low, high, len(seeds), 0.95, 't'),
            {},
            seeds,
            {},
            {},
            (),
            **more,
        )

    test_eq(
        [
            verdict(_made(0.01, 0.03, p=0.01)),
            verdict(_made(-0.03, -0.01, p=0.01)),
            verdict(_made(-0.01, 0.03, p=0.2)),
            verdict(_made(0.01, 0.03)),
            verdict(_made(0.01, 0.03, (0,))),
            verdict(None),
        ],
        ['gains', 'loses', 'open', *['not_tested'] * 3],
    )
    test_eq(verdict(_made(0.01, 0.03, p=0.03, p_holm=0.09)), 'open')
    test_eq([keeps(_made(-0.03, 0.01), 0.05), keeps(None, 0.05)], [False, False])
    _same = Comparison(
        'a',
        'b',
        None,
        {'higher_is_better': True},
        Interval(0.0, 0.0, 0.0, 3, 0.95, 't', se=0.0),
        {},
        (0, 1, 2),
        {},
        {},
        (),
    )
    # values that are all the same show a margin only where there are enough units
    test_eq(keeps(_same, 0.05), False)

    test_eq(
        [agreed(x) for x in (['open', 'open'], ['open', 'gains'], ['not_tested'])],
        ['open', 'mixed', 'not_tested'],
    )

    _step = step_values('a', 'b', _made(0.01, 0.03, p=0.01, p_holm=0.02))
    test_eq([_step[k] for k in ('verdict', 'train', 'n_seeds', 'p_holm')], ['gains', 'not_tested', 3, 0.02])
    test_eq(step_values('a', 'b', None)['verdict'], 'not_tested')

    test_eq(
        [len(pairs_by_seed(*x)) for x in (([dict(seed=0)], [dict(seed=0)]), ([dict(seed=0)], []))], [1, 0]
    )

    def _scored(arm, seed, dev, test):
        "A run, and its values on a development and a test question."
        run_id = f'{arm}-{seed}'
        primary = dict(set='test', metric='map')
        rows = [
            dict(run_id=run_id, split=split, metric='map', unit=unit, value=value)
            for split, unit, value in (('dev', 'd1', dev), ('dev', 'd2', dev), ('test', 't1', test))
        ]
        return dict(run_id=run_id, arm=arm, seed=seed, task='answer_selection', primary=primary), rows

    # soft targets add .1 in fp32 and .3 in mixed on test, and take .1 on dev; one seed lacks a format
    _made_runs = [_scored('full_student', s, 0.5, 0.5 + s / 100) for s in (0, 1)]
    _made_runs += [_scored('full_kd', s, 0.4, 0.6 + s / 100) for s in (0, 1)]
    _made_runs += [_scored('mixed_student', 0, 0.5, 0.5), _scored('mixed_kd', 0, 0.4, 0.8)]
    _arms_of_kd: dict = {}
    for _run, _ in _made_runs:
        _arms_of_kd.setdefault(_run['arm'], []).append(_run)
    _of_kd = pooled_soft_targets([(_arms_of_kd, pd.DataFrame([x for _, rows in _made_runs for x in rows]))])
    test_close(_of_kd['test']['difference'].estimate, (0.2 + 0.1) / 2)
    test_close(_of_kd['dev']['difference'].estimate, -0.1)
    test_close(_of_kd['everywhere']['difference'].estimate, ((0.2 - 0.2) / 3 + (0.1 - 0.2) / 3) / 2)
    test_eq((_of_kd['everywhere']['difference'].n, _of_kd['everywhere']['difference'].units), (2, 3))
    test_eq(_of_kd['sets'], 'opposite')

    def _peak(seed, mib):
        return dict(seed=seed, memory=dict(peak_device_mib=None, peak_host_mib=mib))

    _arms = dict(
        full_kd=[_peak(s, 100.0 + s) for s in range(3)],
        mixed_kd=[_peak(s, 151.0 + s) for s in range(3)],
        full_student=[_peak(0, 100.0)],
        mixed_student=[_peak(0, 90.0)],
    )
    _memory = memory_values(_arms)
    test_eq([_memory[k]['verdict'] for k in PRECISION_STEPS], ['more', 'not_tested', 'not_tested'])
    test_eq(_memory['teacher_precision']['ratio'], None)

    def _decided(mode, values):
        scores = [dict.fromkeys(DECISIONS[:3], x) for x in values]
        return [
            dict(seed=s, arm=mode, primary=dict(set='test'), metrics=dict(test=of))
            for s, of in enumerate(scores)
        ]

    _decisions = decision_values(
        dict(
            baseline=_decided('baseline', [0.5, 0.52, 0.51]), mixed_kd=_decided('mixed_kd', [0.4, 0.43, 0.41])
        )
    )
    test_eq(list(_decisions), ['procedure_3'])
    assert _decisions['procedure_3']['pair_f1']['p_holm'] < 0.01
    decisions_table(_decisions)

    _effect = Effect(INTERACTION, {}, Interval(-0.001, -0.006, 0.004, 7, 0.95, 't'), 0.7, None, 1.0)
    test_eq(effect_values([_effect], INTERACTION)['verdict'], 'open')
    test_eq(
        effect_values([Effect(INTERACTION, {}, None, None, 'no runs')], INTERACTION)['verdict'], 'not_tested'
    )


def test_values():
    from thesis.values import aim_values, effects_table, transfer_seconds
    from fastcore.test import test_eq

    test_eq(
        transfer_seconds(
            [
                dict(factors=dict(network='teacher'), time=dict(transfer_s=9.0)),
                dict(factors=dict(network='student'), time=dict(transfer_s=None)),
            ]
        ),
        dict(teacher=9.0),
    )

    _comparison = Comparison(
        'a',
        'b',
        None,
        {'higher_is_better': True},
        Interval(0.02, 0.01, 0.03, 3, 0.95, 't'),
        {},
        (0, 1, 2),
        {},
        {},
        (),
    )
    assert effects_table([]).empty
    test_eq(
        list(effects_table([('chain', _comparison)])),
        ['a', 'b', 'factor', 'seeds', 'difference', 'p', 'p (Holm)'],
    )

    _by_arm = {'baseline': {'primary': Interval(0.86, 0.84, 0.88, 2, 0.95, 't')}}
    _aims = dict(teacher=0.85, student=0.83, kept=0.97)
    _found = aim_values(_by_arm, None, _aims)
    test_eq([_found[k]['reached'] for k in ('teacher', 'student', 'kept')], [True, False, False])
    test_eq(
        (_found['teacher']['decided'], _found['teacher']['verdict']), (False, 'not_told')
    )  # it holds the aim
    # of an error, at most so much is wanted
    _found = aim_values(_by_arm, None, _aims | dict(teacher=0.9), higher_is_better=False)
    test_eq((_found['teacher']['reached'], _found['teacher']['verdict']), (True, 'reached'))
    test_eq(aim_values(_by_arm, None, _aims, higher_is_better=False)['teacher']['reached'], False)


def test_language():
    from thesis.language import claims_values, kept_on, order_interval, recipe_values, work_values
    from types import SimpleNamespace
    from fastcore.test import test_close, test_eq

    def _run(seed, mode='full_kd', **settings):
        made = dict(epochs=2.0, learning_rate=1e-4, batch_size=32, max_length=128) | settings
        return dict(settings=made, mode=mode, seed=seed, factors=dict(init='pretrained'))

    test_eq(work_values([_run(0), _run(1, epochs=3.0)])['student']['epochs'], '2, 3')
    # a model that was given was not trained for any number of epochs
    _ready = _run(0, mode='baseline', epochs=None) | dict(factors=dict(init='given'))
    test_eq(set(work_values([_ready, _run(0)])), {'student'})

    _settings = dict(
        soft_weight=5.0, hard_weight=2.0, temperature=2.0, soft_on='masked', hidden_loss='cosine'
    )
    _recipe = recipe_values([dict(factors=dict(kd=True), settings=_settings)])
    test_eq((_recipe['published_weights'], _recipe['ours']['cosine_weight']), (True, 1.0))
    test_eq(recipe_values([dict(factors=dict(kd=False))]), {})

    def _scored(arm, seed, nll):
        r = dict(
            run_id=f'{arm}{seed}', arm=arm, seed=seed, task='masked_lm', teacher_run_id=f'baseline{seed}'
        )
        p = dict(set='dev', metric='nll', value=nll + 1, higher_is_better=False)
        return r | dict(
            primary=p,
            metrics=dict(text=dict(nll=nll)),
            factors=dict(
                network='teacher' if arm == 'baseline' else 'student', kd=arm != 'baseline', precision='fp32'
            ),
            mode=arm,
        )

    _runs = [
        _scored(arm, s, nll + s / 99)
        for arm, nll in dict(baseline=4.0, full_kd=5.0).items()
        for s in range(3)
    ]
    _unigram = pd.DataFrame(
        [dict(floor='unigram', split='text', set='', unit='', cluster='', metric='nll', value=8.0)]
    )
    _study = Evidence('books', _runs, pd.DataFrame(), {}, [], _unigram)
    test_close(kept_on(_study, 'text')['full_kd'].estimate, 0.75, 0.01)
    test_eq(kept_on(_study, 'text')['baseline'], None)
    worse = kept_on(replace(_study, floors=_unigram.assign(value=4.5)), 'text')['full_kd']
    assert worse.high < 0  # than counting
    test_eq(
        kept_on(replace(_study, floors=_unigram.assign(value=3.5)), 'text')['full_kd'], None
    )  # and the teacher, too

    _units = pd.DataFrame(
        [
            dict(
                run_id=f'r{s}', split='text', unit=f'{d}', cluster=f'D{d}', metric=metric, value=d + s + nats
            )
            for s in range(2)
            for d in range(3)
            for metric, nats in (('nll', 1.0), ('pseudo_nll', 0.5))
        ]
    )
    _two = [dict(run_id='r0'), dict(run_id='r1')]
    test_close(
        order_interval(SimpleNamespace(units=_units), _two, 'text', 'nll', 'pseudo_nll').estimate, -0.5
    )
    test_eq(order_interval(SimpleNamespace(units=_units), _two, 'text', 'nll', 'nll_all'), None)

    _facts = dict(sizes=dict(left=dict(base=0.606, masked_lm=0.612)), texts=dict(wikitext_tokens=2_088_628))
    _claims = claims_values(dict(verdict='consistent'), dict(verdict='not_tested'), _facts)
    test_eq([_claims[k] for k in ('smaller', 'left', 'batches')], ['reproduced', 'not_reproduced', 'open'])


def test_questions():
    from thesis.questions import beyond_never, counted, never_verdict, percent, way_of
    from types import SimpleNamespace
    from fastcore.test import test_close, test_eq

    _share = Interval(0.6123, 0.58, 0.64, 3, 0.95, 't')
    test_eq(percent(Interval(0.5, 0.5, 0.5, 3, 0.95, 't')), '50.0')
    test_eq(percent(None), '-')

    def _run(seed, exact, never=0.5, **more):
        scores = dict(exact=exact, always_unanswerable=never) | more
        primary = dict(set='test', metric='exact', higher_is_better=True, value=exact)
        about = dict(run_id=f'r{seed}', seed=seed, arm='baseline', task='extractive_qa', mode='baseline')
        return about | dict(primary=primary, metrics=dict(test=scores, dev=scores))

    # four questions in two articles; the first of each article has an answer
    _rows = [('exact', q, 1.0 - (q == 0)) for q in range(4)] + [('no_ans_exact', q, 1.0) for q in (1, 3)]
    _units = pd.DataFrame(
        [
            dict(run_id=f'r{s}', split='test', metric=metric, unit=f'Q{q}', cluster=f'A{q // 2}', value=value)
            for s in range(2)
            for metric, q, value in _rows
        ]
    )
    _runs = [_run(s, 0.75) for s in range(2)]
    _gain = beyond_never(SimpleNamespace(units=_units), _runs, 'test')
    test_close(_gain.estimate, 0.25)
    assert _gain.low < 0  # two articles
    percent(_gain, '+')

    _counts = counted(SimpleNamespace(units=_units, records=_runs))
    test_eq(_counts['test'], dict(articles=2, questions=4, no_ans=2))

    _of = Interval(0.1, 0.05, 0.15, 3, 0.95, 't')
    test_eq([never_verdict(x) for x in (_of, scaled(_of, -1))], ['better', 'worse'])

    _way = way_of(
        dict(
            task='extractive_qa',
            primary=dict(set='test', metric='exact'),
            metrics=dict(test={}, dev={}),
            curve=[
                dict(step=10, loss=1.5, value=None),
                dict(step=20, loss=None, set='dev', value=0.5, metrics=dict(f1=0.6)),
            ],
        )
    )
    test_eq(_way['loss'].count(), 1)
    test_eq(list(_way['f1'].dropna()), [60.0])


def test_rates():
    from thesis.rates import (
        CONTROLS,
        _ends,
        at_rates,
        beside,
        controls_of,
        growth,
        kinds_of,
        movement_table,
        rates_figure,
        scored_questions,
        shape_of,
    )
    from fastcore.test import test_close, test_eq
    from kdnotes.analysis.intervals import Interval
    from kdnotes.core.given import make_config
    from kdnotes.core.resolve import Machine, factors, resolve, resolved_dtype, settings

    def _made(part, rate, seed):
        mode = 'mixed_student' if part == 'format' else 'full_student'
        given = dict(
            mode=mode, seed=seed, arm=f'{part}_{rate:g}', learning_rate=rate, dropout_draw=part == 'draw'
        )
        cores = 2 if part == 'order' else 1
        c = resolve(make_config(**given), Machine('cpu', cores=cores, bf16=True), 'embedded')
        return dict(
            schema=1,
            run_id=f'{c.arm}-s{seed}',
            study='small',
            task=c.task,
            mode=mode,
            arm=c.arm,
            precision=resolved_dtype(c),
            factors=factors(c),
            settings=settings(c),
            initial={},
            seed=seed,
            teacher_seed=None,
            teacher_run_id=None,
            corpus='embedded',
            corpus_sha256='sha',
            environment=dict(device='cpu', cpu='a cpu', torch='2'),
            time=dict(train_s=1.0, total_s=1.0),
            reasons={},
        )

    def _study(seed=0):
        rng = np.random.default_rng(seed)
        base = rng.normal(size=(3, 40, 5))
        label = np.tile([1, 0, 0, 0, 0], 40)
        unit = np.repeat([f'Q{i:02}' for i in range(40)], 5)
        records, units, predictions = [], [], {}
        for rate in (0.1, 0.2, 0.4):
            for part, away in (('fp32', 0.0), ('format', rate), ('draw', 0.3), ('order', 0.001)):
                for s in range(3):
                    score = (base[s] + away * rng.normal(size=base[s].shape)).ravel()
                    r = _made(part, rate, s)
                    made = dict(split='test', unit=unit, item=[f'S{i}' for i in range(200)], label=label)
                    predictions[r['run_id']] = pd.DataFrame(made | dict(score=score))
                    best = score.reshape(40, 5)
                    value = 1 / (1 + (best[:, 1:] > best[:, :1]).sum(axis=1))
                    about = dict(run_id=r['run_id'], split='test', set='test', cluster='', metric='map')
                    units.append(pd.DataFrame(dict(unit=unit[::5], value=value)).assign(**about))
                    primary = dict(set='test', metric='map', value=value.mean(), higher_is_better=True)
                    records.append(r | dict(primary=primary))
        return records, pd.concat(units, ignore_index=True), predictions

    _records, _all_units, _predictions = _study()

    rates = at_rates(_records, _all_units, _predictions)
    test_eq([x.rate for x in rates], [0.1, 0.2, 0.4])
    test_eq(kinds_of(rates), ['format', 'draw', 'order'])
    moved = [x.moved['format'].distance.estimate for x in rates]
    test_close(moved, [x.rate * (2 / np.pi) ** 0.5 for x in rates], eps=0.03)
    # of a study that is still trained, the rates and seeds that have both of a pair
    begun = [r for r in _records if r['arm'] in ('fp32_0.1', 'order_0.1', 'fp32_0.4') and r['seed'] < 2]
    some = at_rates(begun, _all_units, _predictions)
    test_eq([(x.rate, kinds_of([x]), x.moved['order'].seeds) for x in some], [(0.1, ['order'], (0, 1))])
    pd.DataFrame([dict(rate=x.rate) | {kind: m.changed for kind, m in x.moved.items()} for x in rates])

    grown = growth(rates)
    test_close(grown['whole']['format']['ratio'].estimate, 4.0, eps=0.5)
    test_eq([grown[span]['format']['verdict'] for span in ('whole', 'last')], ['more'] * 2)
    test_eq([grown['whole'][control]['verdict'] for control in CONTROLS], ['open', 'open'])
    test_eq([list(growth(of)) for of in (rates, rates[:2])], [['whole', 'before', 'last'], ['whole']])
    test_eq((controls_of(rates), controls_of(some)), (['draw', 'order'], []))
    shapes = shape_of(grown)
    test_eq((shapes['format'], shapes['draw']), ('grows', 'open'))
    _steep = {
        span: dict(format=dict(ratio=Interval(x, 0.8 * x, 1.2 * x, 5, 0.95, 't'), verdict='more'))
        for span, x in (('whole', 33.0), ('before', 1.4), ('last', 24.0))
    }
    test_eq(shape_of(_steep)['format'], 'cliff')
    movement_table(rates)

    rates_figure(rates)

    test_eq(scored_questions(_records[0], _predictions), 40)
    _ends_of = _ends(beside(rates, 'order'))
    test_eq(_ends_of['all_less'], False)


def test_search():
    from thesis.search import Beside, STUDIED, better_claim, bounds, cost_values, smaller_claim, space_table
    from types import SimpleNamespace
    from fastcore.test import test_close, test_eq
    from kdnotes.search.front import Trial
    from kdnotes.search.spaces import LAPTOP, STUDENT

    test_eq(bounds(OneOf((3, 4, 5))), '3 to 5, no order')
    test_eq(bounds(OneOf(('a', 'b', 'c'))), 'a, b, c, no order')
    test_eq(space_table(STUDENT).set_index('parameter').at['feed_forward', 'published'], '-')
    test_eq(len(space_table(LAPTOP)), STUDIED['drawn'])
    space_table(LAPTOP).head()

    def _point(saved, low, high, gain=0.0):
        return Beside(saved, gain, Interval((low + high) / 2, low, high, 4, 0.95, 't'))

    _small = _point(0.30, -0.005, 0.015)
    _worse = _point(0.40, -0.080, -0.050, gain=0.01)
    _large = _point(0.02, 0.010, 0.070)
    test_eq(smaller_claim([_small, _large], 0.02)['verdict'], 'reproduced')
    test_eq(
        smaller_claim([_small, _worse], 0.02)['verdict'], 'not_testable'
    )  # the development set prefers it
    test_eq(smaller_claim([_small], 0.001)['verdict'], 'not_testable')
    test_eq(smaller_claim([_large], 0.02)['saved'], 0.02)
    test_eq(
        [better_claim(p)['verdict'] for p in ([_large], [_point(0.01, -0.02, 0.02)], [_small], [])],
        ['reproduced', 'not_testable', 'not_comparable', 'not_comparable'],
    )

    def _trial(number, state, seconds=None, **more):
        given = dict(params={}, values=dict(score=0.5, params=1e6), started_s=100.0 * number)
        return Trial(number=number, state=state, seconds=seconds, ended_s=100.0 * number + 90, **given | more)

    _trials = (
        _trial(0, 'complete', 80.0, run_id='a', extra=dict(driver_s=2.0)),
        _trial(1, 'infeasible', 20.0, run_id='b', causes=('time',)),
        _trial(3, 'running'),
    )
    _cost = cost_values(SimpleNamespace(trials=_trials))
    test_eq([_cost[k] for k in ('trials', 'complete')], [2, 1])
    test_close(_cost['driver'], 0.02)


def test_scaling():
    from thesis.scaling import (
        ASKED,
        answer_values,
        published_values,
        ranks_table,
        scaling_values,
        serial_share,
    )
    from fastcore.test import test_close, test_eq
    from kdnotes.analysis import steptime

    _published = published_values()
    test_eq((_published['follow'], _published['factors']), (5, 6))

    _half = Interval(0.5, 0.4, 0.8, 5, LEVEL, 'made up', null=1.0)
    _share = serial_share(_half, 2)
    test_close((_share.estimate, _share.low, _share.high), (1, 0.25, 1.5))  # no faster than one
    test_close(
        serial_share(replace(_half, estimate=1 / (0.1 * 4 + 0.9)), 4).estimate, 0.1
    )  # Amdahl's law, back

    from bench.scaling import NOTE, gains

    _task = 'answer_selection'
    _setups = (scaling.Setup(1, 8), scaling.Setup(1, 16), scaling.Setup(2, 8), scaling.Setup(2, 8, 'every'))
    _setups += (scaling.Setup(2, 1, large=True), scaling.Setup(1, 2, large=True))
    _machine = steptime.Machine(per_example_s=0.01, alpha_s=0.002, byte_s=1e-9, optimizer_s=0.05)
    _results = dict(note=NOTE, settings=dict(cores=2), environment={}, rows=[])
    for _setup in _setups:
        _several = _setup.ranks > 1
        _syncs = _several * (_setup.micro_batches if _setup.gradient_sync == 'every' else 1)
        _row = vars(_setup) | dict(name=_setup.name, task=_task, threads=1, simulated=False, parameters=17e6)
        _examples = (16 if _setup.large else 4) * _setup.ranks * _setup.micro_batches
        _row |= dict(examples=_examples, all_reduces=_syncs, buckets=3 * _syncs, bytes=7e7 * _syncs)
        _parts = steptime.step_s(steptime.step_of(_row | dict(cores=2)), _machine)
        _turns = sum(_parts.values()) * np.random.default_rng(0).normal(1, 0.01, 5)
        _waits = [_parts['communication'] + _parts['waiting']] * 5
        _row |= dict(step_s=list(_turns), exposed_s=_waits, least_exposed_s=_waits, steps=3)
        _results['rows'].append(_row)
    _results['gains'] = gains(_results)
    ranks_table(_results, _task)

    from kdnotes.analysis.scaling_results import predictions

    _predicted = predictions(_results)
    _answer = answer_values(_results, _predicted)
    assert 1 < _answer['faster'].estimate < 2
    print(_answer['sentence'])

    _values = scaling_values(_results, _predicted)
    assert _values['tasks'][ASKED]['error']['median'] < 10


def test_labels():
    from thesis.labels import held_against, labels_values, variants, variants_table
    from fastcore.test import test_eq
    from kdnotes.analysis.evidence import evidence

    e = evidence('wikiqa-labels')
    found = labels_values(e)
    test_eq(len(found['tables']['pays']), len(held_against(e, what_pays(e))))
    test_eq(len(found['tables']['variants']), 0)  # one arm has texts
    assert found['texts']['texts'] > 0 and not found['labelled_only']['texts']

    e = evidence('wikiqa-labels-gpu')
    paid = what_pays(e)
    varied = variants(e, paid, paid[1])
    test_eq({its.taught.texts > 0 for its in varied}, {True})
    assert all(its.result.a == 'taught_256_rest' for its in varied)
    variants_table(e, varied)


def test_measured():
    from thesis.measured import bench_facts, overlap, size_facts, texts_table
    from fastcore.test import test_eq

    _row = dict(
        question='Where do the seven ducks go in winter?',
        question_id='Q1',
        label=1,
        sentence='In winter the seven ducks of the pond fly to the south of the land.',
    )
    _again = dict(question='Who flies?', sentence='Each winter, the seven ducks of the pond fly to a lake.')
    _rows = [_row, _row | dict(label=0, sentence='They stay.')]
    _one, _two = (
        Corpus(name, 'folder', '', of, '')
        for name, of in (('one', dict(test=_rows)), ('two', dict(train=[_row | _again])))
    )
    test_eq(
        overlap(_one, _two), dict(words=8, sentences=1, questions=1, ids=['Q1'], correct=1, same_questions=0)
    )
    test_eq(overlap(_one, _two, words=10)['sentences'], 0)

    _sizes = size_facts()
    test_eq(set(_sizes['left']), {'base', 'masked_lm', 'untied'})
    texts_table(dict(texts=dict(novels=dict(train=dict(documents=3, words=1234, pieces=2000, sha256='ab')))))

    _turns = [
        dict(
            contestant=c,
            turn=k,
            split=False,
            examples_per_s=rate + k,
            tokens_per_s=40.0 * rate,
            host_mib=900.0,
        )
        for c, rate in (('1x1', 100.0), ('2x1', 130.0))
        for k in range(3)
    ]
    _bench = bench_facts(
        dict(
            turns=_turns,
            about={'1x1': '1 rank', '2x1': '2 ranks'},
            began='now',
            minutes=1.0,
            settings=dict(alternations=3, steps=50, dtype='bf16'),
            environment=dict(git='c0', device='a cpu', torch='2'),
            facts={},
        )
    )
    test_eq(_bench['ratios']['2x1_1x1.reached'], False)
    test_eq(_bench['table']['rows'][0][2:4], ['101 (100 to 102)', '4,000'])


def test_build():
    from thesis.build import evidence_alone, main, part_records
    from fastcore.test import test_eq, test_fail

    with evidence_alone(Path.cwd()) as home:
        test_eq(root(), home.resolve())
        test_eq([p.name for p in home.iterdir()], ['thesis'])
    assert root() != home

    _plan = {'parts': {'main': {'study': 'nowhere', 'runs': {'full_kd': {'3': 'full_kd-s3-0123456789ab'}}}}}
    with evidence_alone(Path.cwd()):
        test_fail(
            lambda: part_records(_plan, 'main'), contains='full_kd-s3-0123456789ab (arm full_kd, seed 3)'
        )

    import io
    from contextlib import redirect_stderr, redirect_stdout

    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()) as help:
        test_eq((main(['bake']), main(['--help'])), (1, 0))
    test_eq(said.getvalue(), help.getvalue())
    said.getvalue()

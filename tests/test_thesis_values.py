"""What the thesis computes: small made-up studies with values worked out by hand.

The values of the committed studies are held by tests/golden/.
"""

from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
from kdnotes.scaling import steptime
from kdnotes.stats.compare import Comparison
from kdnotes.stats.intervals import LEVEL, Interval
from kdnotes.search.front import Trial
from kdnotes.tasks.sources import Corpus
from thesis.facts import amp_values, flat, gradient_values, own_searches, plain, seeds_made_again
from thesis.language import order_interval, recipe_values
from thesis.measured import bench_facts, overlap
from thesis.questions import beyond_never, course_of, never_verdict
from thesis.rates import AtRate, beside, growth, shape_of
from thesis.scaling import answer_values, serial_share
from thesis.search import Beside, better_claim, cost_values, smaller_claim
from thesis.steps import (
    PRECISION_STEPS,
    agreed,
    decision_values,
    direction,
    memory_values,
    pooled_soft_targets,
    steps_values,
    units_values,
    verdict,
)
from thesis.values import aim_value, floor_values, transfer_seconds


def interval(low, high, n=3, **more) -> Interval:
    return Interval((low + high) / 2, low, high, n, LEVEL, 'made up', **more)


def test_groups_and_dataclasses_become_keys_and_rows_stay_one_value():
    unknown = Interval(0.7, None, None, 1, LEVEL, 't', reason='one value has no spread')
    values = flat(dict(arms=dict(full_kd=dict(primary=interval(0.65, 0.75))), one=unknown, rows=[unknown]))
    assert values['arms.full_kd.primary.low'] == 0.65 and values['one.low'] is None
    assert values['rows'][0]['estimate'] == 0.7 and not any('reason' in key for key in values)
    table = dict(head=['a'], rows=[['1']])
    assert flat(dict(facts=table)) == dict(facts=table)
    assert plain([np.float64(1 / 3), np.int64(2), np.bool_(True), float('nan')]) == [
        0.33333333,
        2,
        True,
        None,
    ]


def test_loss_scales_and_gradients():
    def run(steps, overflows, scale):
        return dict(steps=steps, amp=dict(overflow_steps=overflows, final_scale=scale))

    found = amp_values([run(10, 1, 2.0), run(20, None, None), run(30, 2, 8.0)])
    assert found == dict(runs=2, steps=40, overflows=3, none=False, low=2.0)
    assert amp_values([run(20, None, None)]) == {}

    def moment(first, shares):
        its = dict(elements=100, zero=1 - sum(shares), not_finite=0.0, log2_from=first, shares=shares)
        return dict(step=1, scale=1.0, layers=[dict(layer='head') | its])

    a, b = moment(-28, [0.1, 0.1, 0.2]), moment(-12, [0.5, 0.5])
    seen = gradient_values(dict(a=[dict(gradients=[a])], b=[dict(gradients=[b]), {}]))
    shares = [seen[name]['share'] for name in ('lost', 'coarse', 'lost_scaled', 'over_scaled')]
    assert (seen['lost']['arm'], shares) == ('a', [0.5, 1.0, 0.0, 0.0])
    assert gradient_values(dict(a=[{}])) == {}


def test_an_arm_tuned_by_itself():
    def trial(arm, rate, value):
        primary = dict(set='test', metric='map', value=0.7, higher_is_better=True)
        about = dict(run_id=f'{arm}-{rate}', arm=arm, mode=arm, task='answer_selection', primary=primary)
        scores = dict(dev={'map': value}, test={})
        return about | dict(settings=dict(learning_rate=rate, epochs=2.0), metrics=scores)

    runs = [
        dict(arm=arm, mode=arm, seed=0, run_id=arm, settings=dict(learning_rate=rate, epochs=2.0))
        for arm, rate in (('baseline', 1.0), ('full_student', 2e-4), ('full_kd', 3e-4), ('mixed_kd', 3e-4))
    ]
    tried = [
        trial(arm, rate, value)
        for arm in ('full_student', 'full_kd')
        for rate, value in ((1e-4, 0.71), (2e-4, 0.74))
    ]
    by_arm = dict(full_student='same', full_kd='other', mixed_kd='none')
    assert own_searches(tried, runs) == by_arm | {code: [arm] for arm, code in by_arm.items()}


def test_transfers():
    def run(network, seconds):
        return dict(factors=dict(network=network), time=dict(transfer_s=seconds))

    assert transfer_seconds([run('teacher', 9.0), run('student', None)]) == dict(teacher=9.0)
    starts = [dict(seed=s, initial=dict(start_sha256=sha)) for s, sha in enumerate(('first', 'again'))]
    assert seeds_made_again(dict(baseline=starts)) == [1]
    assert seeds_made_again(dict(baseline=starts[:1])) == seeds_made_again({}) == []


def comparison(low, high, seeds=(0, 1, 2), **more) -> Comparison:
    primary = dict(higher_is_better=True)
    return Comparison('a', 'b', None, primary, interval(low, high, len(seeds)), {}, seeds, {}, {}, (), **more)


@pytest.mark.parametrize(
    'compared, code',
    [
        (comparison(0.01, 0.03, p=0.01), 'gains'),
        (comparison(-0.03, -0.01, p=0.01), 'loses'),
        (comparison(-0.01, 0.03, p=0.2), 'open'),
        (comparison(0.01, 0.03, p=0.03, p_holm=0.09), 'open'),
        (comparison(0.01, 0.03), 'not_tested'),
        (comparison(0.01, 0.03, (0,)), 'not_tested'),
        (None, 'not_tested'),
    ],
)
def test_verdicts_follow_the_corrected_p(compared, code):
    e = SimpleNamespace(comparisons=[('chain', compared)] if compared else [])
    assert verdict(compared) == code == steps_values(e, dict(step=('a', 'b')))['step']['verdict']


def test_one_verdict_of_several():
    several = (['open', 'open'], ['open', 'gains'], ['not_tested'])
    assert [agreed(x) for x in several] == ['open', 'mixed', 'not_tested']


def test_a_margin_is_kept_only_where_it_is_shown():
    same = comparison(0.0, 0.0)  # of values that are all the same, without a test
    for known in ([('chain', same)], []):
        found = steps_values(SimpleNamespace(comparisons=known), dict(step=('a', 'b')))
        assert not found['step']['keeps_strictly']


def test_soft_targets_pooled_over_formats_and_sets():
    "They add .1 in fp32 and .3 in mixed precision on test, and take .1 on dev; one seed lacks a format."

    def scored(arm, seed, dev, test):
        run_id = f'{arm}-{seed}'
        rows = [
            dict(run_id=run_id, split=split, metric='map', unit=unit, value=value)
            for split, unit, value in (('dev', 'd1', dev), ('dev', 'd2', dev), ('test', 't1', test))
        ]
        about = dict(task='answer_selection', primary=dict(set='test', metric='map'), mode=arm)
        return dict(run_id=run_id, arm=arm, seed=seed) | about, rows

    made = [scored('full_student', s, 0.5, 0.5 + s / 100) for s in (0, 1)]
    made += [scored('full_kd', s, 0.4, 0.6 + s / 100) for s in (0, 1)]
    made += [scored('mixed_student', 0, 0.5, 0.5), scored('mixed_kd', 0, 0.4, 0.8)]
    runs = [r for r, _ in made]
    units = pd.DataFrame([row for _, rows in made for row in rows])
    found = pooled_soft_targets([(runs, units)])
    estimates = [found[name]['difference'].estimate for name in ('test', 'dev', 'everywhere')]
    assert estimates == pytest.approx([(0.2 + 0.1) / 2, -0.1, ((0.2 - 0.2) / 3 + (0.1 - 0.2) / 3) / 2])
    assert (found['everywhere']['difference'].n, found['everywhere']['difference'].units) == (2, 3)
    assert found['sets'] == 'opposite'


def test_memory_and_decisions():
    def peak(seed, mib):
        return dict(seed=seed, memory=dict(peak_device_mib=None, peak_host_mib=mib))

    arms = dict(
        full_kd=[peak(s, 100.0 + s) for s in range(3)],
        mixed_kd=[peak(s, 151.0 + s) for s in range(3)],
        full_student=[peak(0, 100.0)],
        mixed_student=[peak(0, 90.0)],
    )
    memory = memory_values(arms)
    assert [memory[k]['verdict'] for k in PRECISION_STEPS] == ['more', 'not_tested', 'not_tested']
    ratios = [(151 + s) / (100 + s) for s in range(3)]
    assert memory['precision']['ratio'].estimate == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert memory['teacher_precision']['ratio'] is None

    def decided(mode, values):
        scores = [dict.fromkeys(('pair_precision', 'pair_recall', 'pair_f1'), x) for x in values]
        about = dict(arm=mode, primary=dict(set='test'))
        return [dict(seed=s, metrics=dict(test=of)) | about for s, of in enumerate(scores)]

    found = decision_values(
        dict(baseline=decided('baseline', [0.5, 0.52, 0.51]), mixed_kd=decided('mixed_kd', [0.4, 0.43, 0.41]))
    )
    assert list(found) == ['procedure_3'] and found['procedure_3']['pair_f1']['p_holm'] < 0.01


def test_a_direction_follows_the_corrected_p():
    found = interval(-0.006, 0.004)
    assert [direction(found, p) for p in (1.0, 0.01, None)] == ['open', 'less', 'not_tested']
    assert direction(interval(1.1, 1.3), 0.01, 1.0) == 'more'


def test_units_that_a_step_changes():
    "Of three questions on each set one changes, on the test set alone."

    def run(arm, seed):
        primary = dict(set='test', metric='map', value=0.5, higher_is_better=True)
        about = dict(run_id=f'{arm}{seed}', arm=arm, seed=seed, task='answer_selection', primary=primary)
        return about | dict(metrics=dict(test=dict(map=0.5), dev=dict(map=0.5)))

    pairs = [(run('a', seed), run('b', seed)) for seed in range(2)]
    values = {('a', 'test'): (0.4, 0.5, 0.6), ('b', 'test'): (0.4, 0.6, 0.5)}
    rows = [
        dict(
            run_id=r['run_id'], split=split, set='all', metric='map', unit=f'{split}{i}', cluster='', value=x
        )
        for r in (r for pair in pairs for r in pair)
        for split in ('dev', 'test')
        for i, x in enumerate(values.get((r['arm'], split), (0.4, 0.5, 0.6)))
    ]
    found = units_values(pairs, pd.DataFrame(rows))
    assert (found['pairs'], found['changed'], found['everywhere'].units) == (6, 4, 6)
    assert found['dev'].estimate == 0 and units_values([], pd.DataFrame(rows)) == {}


@pytest.mark.parametrize(
    'wanted, higher, reached, code',
    [
        (0.80, True, True, 'reached'),
        (0.85, True, True, 'not_told'),  # the interval contains the aim
        (0.90, True, False, 'missed'),
        (0.90, False, True, 'reached'),  # of an error, at most so much is wanted
    ],
)
def test_aims(wanted, higher, reached, code):
    found = aim_value(wanted, Interval(0.86, 0.84, 0.88, 2, LEVEL, 't'), higher)
    assert (found['reached'], found['verdict']) == (reached, code)
    assert not aim_value(wanted, None, higher)['decided']


def test_what_tells_trivial_models_apart():
    def floor(name, weights, labels=()):
        primary = dict(metric='map', value=0.5)
        record = dict(primary=primary, metrics=dict(dev=dict(map=0.4)))
        units = pd.DataFrame(dict(weights=[weights]))
        return SimpleNamespace(name=name, labels=labels, units=units, record=record, value=0.5)

    first, second = floor('frozen_encoder of a', 'hub/a', (None,)), floor('frozen_encoder of b', 'b', (128,))
    e = SimpleNamespace(records=[dict(task='answer_selection')], baselines=[first, second])
    found = [floor_values(f, e) for f in e.baselines]
    assert [(f['kind'], f['weights'], f['labels'], f['dev']) for f in found] == [
        ('frozen_encoder', 'a', 'all', 0.4),
        ('frozen_encoder', 'b', 128, 0.4),
    ]
    e.baselines = [first, floor('bm25', '')]
    assert [floor_values(f, e)['weights'] for f in e.baselines] == [None, None]


def test_the_recipe_of_a_language_model():
    settings = dict(soft_weight=5.0, hard_weight=2.0, temperature=2.0, soft_on='masked', hidden_loss='cosine')
    found = recipe_values([dict(factors=dict(kd=True), settings=settings)])
    assert (found['published_weights'], found['ours']['cosine_weight']) == (True, 1.0)
    assert recipe_values([dict(factors=dict(kd=False))]) == {}


def test_one_score_above_another():
    rows = [
        dict(run_id=f'r{s}', split='text', unit=f'{d}', cluster=f'D{d}', metric=metric, value=d + s + nats)
        for s in range(2)
        for d in range(3)
        for metric, nats in (('nll', 1.0), ('pseudo_nll', 0.5))
    ]
    e, runs = SimpleNamespace(units=pd.DataFrame(rows)), [dict(run_id='r0'), dict(run_id='r1')]
    assert order_interval(e, runs, 'text', 'nll', 'pseudo_nll').estimate == pytest.approx(-0.5)
    assert order_interval(e, runs, 'text', 'nll', 'nll_all') is None


def test_what_a_model_has_beyond_never_answering():
    "Four questions in two articles; the first of each article has an answer."

    def run(seed):
        scores = dict(exact=0.75, always_unanswerable=0.5)
        primary = dict(set='test', metric='exact', higher_is_better=True, value=0.75)
        about = dict(run_id=f'r{seed}', seed=seed, arm='baseline', task='extractive_qa', mode='baseline')
        return about | dict(primary=primary, metrics=dict(test=scores, dev=scores))

    rows = [('exact', q, 1.0 - (q == 0)) for q in range(4)] + [('no_ans_exact', q, 1.0) for q in (1, 3)]
    units = [
        dict(run_id=f'r{s}', split='test', metric=metric, unit=f'Q{q}', cluster=f'A{q // 2}', value=value)
        for s in range(2)
        for metric, q, value in rows
    ]
    gain = beyond_never(SimpleNamespace(units=pd.DataFrame(units)), [run(s) for s in range(2)], 'test')
    assert gain.estimate == pytest.approx(0.25) and gain.low < 0  # two articles
    sides = [never_verdict(interval(*of)) for of in ((0.05, 0.15), (-0.15, -0.05), (-0.1, 0.1))]
    assert sides == ['better', 'worse', 'open']


def test_losses_and_scores_along_training():
    scored = dict(step=20, loss=None, set='dev', value=0.5, metrics=dict(f1=0.6))
    record = dict(
        task='extractive_qa',
        primary=dict(set='test', metric='exact'),
        metrics=dict(test={}, dev={}),
        curve=[dict(step=10, loss=1.5, value=None), scored],
    )
    course = course_of(record)
    assert list(course['key']) == ['loss', 'exact', 'f1'] and list(course['y']) == [1.5, 50.0, 60.0]


def moved_by(rate: float, **distances) -> AtRate:
    "What kinds of pair move a score by at one rate, seed by seed."
    moved = {kind: SimpleNamespace(seeds=(0, 1, 2), moved=of) for kind, of in distances.items()}
    return AtRate(rate, (), {}, moved)


def test_what_grows_with_the_learning_rate():
    spread = np.array([0.99, 1.0, 1.02])
    of_format = [far * np.roll(spread, k) for k, far in enumerate((0.1, 0.12, 2.4))]
    of_draw = [0.3 * np.roll(spread, -k) for k in range(3)]
    rates = [
        moved_by(rate, format=tuple(a), draw=tuple(b))
        for rate, a, b in zip((0.1, 0.2, 0.4), of_format, of_draw)
    ]
    grown = growth(rates)
    estimates = [grown[span]['format']['ratio'].estimate for span in ('whole', 'before', 'last')]
    assert estimates == pytest.approx([24, 1.2, 20])
    assert shape_of(grown) == dict(format='cliff', draw='open')
    spans = [list(growth(of)) for of in (rates, rates[:2], rates[:1])]
    assert spans == [['whole', 'before', 'last'], ['whole'], []]
    ratios = [of['ratio'].estimate for of in beside(rates, 'draw').values()]
    assert ratios == pytest.approx([np.exp(np.log(a / b).mean()) for a, b in zip(of_format, of_draw)])


def test_claims_of_a_search():
    def point(saved, low, high, gain=0.0):
        return Beside(saved, gain, interval(low, high, 4))

    small, large = point(0.30, -0.005, 0.015), point(0.02, 0.010, 0.070)
    worse = point(0.40, -0.080, -0.050, gain=0.01)  # which the development set prefers
    assert smaller_claim([small, large], 0.02)['verdict'] == 'reproduced'
    assert [smaller_claim(p, m)['verdict'] for p, m in (([small, worse], 0.02), ([small], 0.001))] == [
        'not_testable'
    ] * 2
    assert smaller_claim([large], 0.02)['saved'] == 0.02
    judged = [better_claim(p)['verdict'] for p in ([large], [point(0.01, -0.02, 0.02)], [small], [])]
    assert judged == ['reproduced', 'not_testable', 'not_comparable', 'not_comparable']


def test_the_cost_of_a_search():
    def trial(number, state, seconds=None, **more):
        given = dict(params={}, values=dict(score=0.5, params=1e6), started_s=100.0 * number)
        return Trial(number=number, state=state, seconds=seconds, ended_s=100.0 * number + 90, **given | more)

    trials = (
        trial(0, 'complete', 80.0, run_id='a', extra=dict(driver_s=2.0)),
        trial(1, 'infeasible', 20.0, run_id='b', causes=('time',)),
        trial(3, 'running'),
    )
    cost = cost_values(SimpleNamespace(trials=trials))
    assert [cost[k] for k in ('trials', 'complete', 'training', 'a_trial')] == [2, 1, 100.0, 50.0]
    assert cost['driver'] == pytest.approx(0.02)


def test_the_share_that_ranks_do_not_divide():
    share = serial_share(Interval(0.5, 0.4, 0.8, 5, LEVEL, 'made up', null=1.0), 2)
    assert (share.estimate, share.low, share.high) == pytest.approx((1, 0.25, 1.5))  # no faster than one
    amdahl = 1 / (0.1 * 4 + 0.9)  # of four ranks, where a tenth is undivided
    assert serial_share(interval(amdahl, amdahl), 4).estimate == pytest.approx(0.1)


def test_more_ranks_by_the_model_of_a_step():
    from bench.scaling import NOTE, gains

    setups = (
        steptime.Setup(1, 8),
        steptime.Setup(1, 16),
        steptime.Setup(2, 8),
        steptime.Setup(2, 8, 'every'),
    )
    setups += (steptime.Setup(2, 1, large=True), steptime.Setup(1, 2, large=True))
    machine = steptime.Machine(per_example_s=0.01, alpha_s=0.002, byte_s=1e-9, optimizer_s=0.05)
    results = dict(note=NOTE, settings=dict(cores=2), environment={}, rows=[])
    for setup in setups:
        several = setup.ranks > 1
        syncs = several * (setup.micro_batches if setup.gradient_sync == 'every' else 1)
        row = vars(setup) | dict(name=setup.name, task='answer_selection', threads=1, simulated=False)
        examples = (16 if setup.large else 4) * setup.ranks * setup.micro_batches
        row |= dict(examples=examples, all_reduces=syncs, buckets=3 * syncs, bytes=7e7 * syncs)
        parts = steptime.step_s(steptime.step_of(row | dict(cores=2)), machine)
        turns = sum(parts.values()) * np.random.default_rng(0).normal(1, 0.01, 5)
        waits = [parts['communication'] + parts['waiting']] * 5
        row |= dict(step_s=list(turns), exposed_s=waits, least_exposed_s=waits, steps=3, parameters=17e6)
        results['rows'].append(row)
    results['gains'] = gains(results)
    answer = answer_values(results, steptime.predictions(results))
    by_name = {row['name']: np.log(row['step_s']) for row in results['rows']}
    faster = np.exp((by_name['1 x 2 large, delayed'] - by_name['2 x 1 large, delayed']).mean())
    assert answer['faster'].estimate == pytest.approx(faster) and 1 < faster < 2
    assert answer['limit'].estimate == pytest.approx(1 / (2 / faster - 1))
    assert [link['slower'] for link in answer['links']] == [
        link['high'] < answer['faster'].estimate for link in answer['links']
    ]


def test_what_two_corpora_share():
    row = dict(question='Where do the seven ducks go in winter?', question_id='Q1', label=1)
    row['sentence'] = 'In winter the seven ducks of the pond fly to the south of the land.'
    again = dict(question='Who flies?', sentence='Each winter, the seven ducks of the pond fly to a lake.')
    one = Corpus('one', 'folder', '', dict(test=[row, row | dict(label=0, sentence='They stay.')]), '')
    two = Corpus('two', 'folder', '', dict(train=[row | again]), '')
    found = dict(words=8, sentences=1, questions=1, ids=['Q1'], correct=1, same_questions=0)
    assert overlap(one, two) == found and overlap(one, two, words=10)['sentences'] == 0


def test_a_benchmark_in_few_numbers():
    turns = [
        dict(contestant=c, turn=k, split=False, examples_per_s=rate + k, tokens_per_s=40.0 * rate)
        | dict(host_mib=900.0)
        for c, rate in (('1x1', 100.0), ('2x1', 130.0))
        for k in range(3)
    ]
    results = dict(turns=turns, about={'1x1': '1 rank', '2x1': '2 ranks'}, began='now', minutes=1.0)
    settings = dict(alternations=3, steps=50, dtype='bf16')
    environment = dict(git='c0', device='a cpu', torch='2')
    found = bench_facts(results | dict(settings=settings, environment=environment, facts={}))
    assert found['ratios']['2x1_1x1.reached'] is False
    assert found['table']['rows'][0][2:4] == ['101 (100 to 102)', '4,000']

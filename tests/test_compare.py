"""What may be compared with what, and what a difference may be called."""

import re
from dataclasses import replace
import numpy as np
import pandas as pd
import pytest
from handmade import make_record, make_units, units_of
from kdnotes.stats.comparable import Attribution, attribute, check_arm, differences, timed, unit_matrix
from kdnotes.stats.compare import (
    TIMES,
    Comparison,
    compare,
    study_comparisons,
)
from kdnotes.stats.evidence import difference_table
from kdnotes.stats import tables
from kdnotes.core.config import task_info
from kdnotes.core.render import MINUS, p_equals, phrase, reason
from kdnotes.core.arms import CHAIN, CONTROLS, MODES, PROCEDURES
from kdnotes.results.schema import SCHEMA
from kdnotes.results.table import arms_of
from kdnotes.stats.tests import Equivalence, Family, crossed_test, holm, permutation_test
from kdnotes.stats.intervals import Interval, crossed_interval, difference_interval
from kdnotes.telemetry.summary import BUSY_SHARE
from thesis.steps import INTERACTIONS, interaction


def details_of(why):
    return dict(why.details)


def warned(comparison, code):
    "The details of each warning of a code."
    return [details_of(w) for w in comparison.warnings if w.code == code]


def sentence(comparison, about='primary'):
    return phrase('comparison.jinja', 'sentence', comparison, about)


def ids(*runs):
    return tuple(r['run_id'] for r in runs)


def arm(mode, seeds=(0, 1, 2), value=0.7, train_s=10.0, **parameters):
    "Differences of arms vary a little by seed: intervals of effect sizes are slow where they do not."
    return [
        make_record(
            mode,
            s,
            value + 0.003 * s + 1e-6 * (round(1000 * value) * (s + 1) % 5),
            train_s + 0.1 * s,
            **parameters,
        )
        for s in seeds
    ]


def without_value(r):
    return r | dict(
        primary=r['primary'] | {'value': None},
        reasons=r['reasons'] | {'primary.value': 'the evaluation failed'},
    )


@pytest.mark.parametrize('a, b', CHAIN + CONTROLS)
def test_every_step_of_the_chain_is_one_factor(a, b):
    expected = next(
        f for f in ('network', 'precision', 'kd', 'ranks') if getattr(MODES[a], f) != getattr(MODES[b], f)
    )
    x = attribute((make_record(a), make_record(b)))
    assert x.factor == expected and not x.others and x.code == 'one_factor'
    assert attribute((make_record(b), make_record(a))).factor == expected


@pytest.mark.parametrize(
    'change',
    [
        dict(batch_size=16),
        dict(max_grad_norm=0.5),
        dict(train_questions='answered'),
        dict(smoke=True),
        dict(learning_rate=1e-3),
        dict(micro_batch_tokens=999),
    ],
)
def test_any_other_setting_takes_the_factors_name_away(change):
    x = attribute((make_record('full_student'), make_record('full_kd', **change)))
    assert x.factor is None and list(x.factors) == ['kd'] and x.code == 'not_alone'
    assert set(x.others) - {'teacher_questions'} == set(change)


def test_a_teacher_in_another_format_is_a_factor_and_no_others_effect():
    rounded = make_record('full_kd', forward_dtype='bf16')
    x = attribute((make_record('full_kd'), rounded))
    assert x.factor == 'signal_dtype' and x.code == 'one_factor' and not x.others
    assert x.factors['signal_dtype'] == ('fp32', 'fp32, computed in bf16')
    x = attribute((rounded, make_record('mixed_kd')))
    assert (
        x.factor is None and list(x.factors) == ['precision', 'signal_dtype'] and x.code == 'several_factors'
    )
    x = attribute((make_record('full_student'), rounded))  # part of whether there is a teacher
    assert x.factor == 'kd' and x.part_of['forward_dtype'] == ('kd',)
    x = attribute((make_record('full_kd'), make_record('full_kd', signal_dtype='bf16', forward_dtype='bf16')))
    assert x.factor == 'signal_dtype' and x.part_of['forward_dtype'] == ('signal_dtype',)


ELSEWHERE = [dict(torch='2.14.0'), dict(device='cuda:0 NVIDIA H200'), dict(cpu='another cpu')]


@pytest.mark.parametrize('change', ELSEWHERE)
def test_another_machine_refuses_times_but_not_accuracy(change):
    a, b = arm('full_student'), arm('full_kd', **change)
    c = compare(a, b, units_of(a + b))
    assert c.difference is not None and not c.speedup and c.attribution.factor is None
    (why,) = c.untimed
    assert why.code == 'equal_machines' and next(iter(change.values())) in ''.join(details_of(why)['b'])


@pytest.mark.parametrize('change', ELSEWHERE)
def test_times_are_of_the_machine_that_made_most_pairs(change):
    a, b = arm('full_student', train_s=20.0), arm('full_kd', train_s=10.0)
    more_a = arm('full_student', (3, 4), train_s=20.0, **change)
    more_b = arm('full_kd', (3, 4), train_s=40.0, **change)
    c = compare(a + more_a, b + more_b)
    # nothing of the two that were slower
    assert c.speedup == compare(a, b).speedup and c.speedup['train_s'].n == 3
    assert c.difference.n == 5 and c.attribution.factor == 'kd'
    (others,) = warned(c, 'other_machines')
    assert (others['n'], others['seeds']) == (6, (3, 4))
    assert others['excluded'] == tuple(sorted(ids(*more_a, *more_b)))
    # a pair from two machines has no ratio
    torn = compare(arm('full_student'), b[:2] + arm('full_kd', (2,), **change))
    assert torn.speedup['train_s'].n == 2 and torn.difference.n == 3
    even = compare(a[:2] + more_a, b[:2] + more_b)
    assert not even.speedup and even.difference.n == 4


def test_the_machine_is_chosen_once_for_a_study():
    # most runs of the study were made here, most pairs of its last step elsewhere
    runs = [r for m in ('baseline', 'parallel_baseline', 'full_student') for r in arm(m, range(3))]
    for mode, slow in (('full_kd', 30.0), ('mixed_kd', 10.0)):
        runs += arm(mode, (0,), train_s=slow) + arm(mode, (1, 2), train_s=40.0 - slow, torch='2.14.0')
    last = next(c for _, c in study_comparisons(runs) if (c.a, c.b) == ('full_kd', 'mixed_kd'))
    assert (
        last.speedup['train_s'].estimate == pytest.approx(3, rel=0.2)
        and last.speedup['train_s'].n == 1
        and last.difference.n == 3
    )
    (why,) = timed(runs).notes
    assert [w for w in last.warnings if w.code == 'other_machines'] == [why]
    assert (details_of(why)['n'], details_of(why)['machine']) == (11, ('torch 2.13.0',))


def test_a_family_of_one_needs_no_correction():
    ((_, c),) = study_comparisons([*arm('full_kd', range(3)), *arm('mixed_kd', range(3), train_s=20.0)])
    assert c.p_times_holm == c.p_times and len(c.family.members) == 1
    assert 'Holm' not in sentence(c, 'train_s') and 'uncorrected' not in sentence(c, 'train_s')


def test_a_total_with_a_teacher_from_another_machine_is_not_used():
    teacher = arm('baseline', range(3), torch='2.12.0')
    a = arm('full_kd', range(3))
    b = arm('mixed_kd', range(3))
    for runs in (a, b):
        for r, t in zip(runs, teacher):
            r['teacher_run_id'] = t['run_id']
    c = next(c for _, c in study_comparisons([*teacher, *a, *b]) if (c.a, c.b) == ('full_kd', 'mixed_kd'))
    assert set(c.speedup) == {'train_s'} and c.reasons['total_s'].code == 'other_machines'


def of_two_kinds(**change):
    return arm('full_kd', (0, 1)) + arm('full_kd', (2,), **change)


@pytest.mark.parametrize(
    'a, b, code, fact',
    [
        (arm('full_student'), arm('full_kd', corpus='wikiqa'), 'different', 'corpora'),
        (arm('full_student'), arm('full_kd', smoke=True), 'smoke_mixed', None),
        (arm('full_student'), arm('full_kd', metric='mrr'), 'different', 'primary metrics'),
        (arm('full_student'), [r | dict(schema=SCHEMA + 1) for r in arm('full_kd')], 'different', 'schemas'),
        (arm('full_student'), [r | dict(task='masked_lm') for r in arm('full_kd')], 'different', 'tasks'),
        (arm('full_student'), of_two_kinds(smoke=True), 'smoke_mixed', None),
        (arm('full_student'), of_two_kinds(corpus='wikiqa'), 'different', 'corpora'),
        (arm('full_student'), of_two_kinds(temperature=8.0), 'arm_mixes', ('temperature',)),
        (arm('full_student'), arm('full_kd') + arm('full_kd', (0,)), 'seed_twice', ('0',)),
        ([], arm('full_kd'), 'no_runs', None),
        (arm('full_student', (0,)), arm('full_kd', (1,)), 'no_common_seed', (0,)),
        (arm('full_student', teacher_seed=3), arm('full_kd', teacher_seed=4), 'no_common_seed', (0, 1, 2)),
    ],
)
def test_what_is_not_the_same_question_is_not_compared(a, b, code, fact):
    c = compare(a, b)
    why = c.reasons['comparison']
    assert why.code == code and (fact is None or fact in details_of(why).values())
    assert c.difference is None and not c.speedup and c.attribution is None
    assert c.verdict() == c.verdict('train_s') == ('not_tested', why)
    assert str(c) == sentence(c) and str(why) in sentence(c)


def test_pairs_are_by_seed_and_teacher_and_the_rest_is_named():
    a = arm('full_student', (0, 1, 2))
    b = arm('full_kd', (2, 1, 7), value=0.72)
    c = compare(a, b, units_of(a + b))
    assert c.seeds == (1, 2) and c.excluded == {'full_student': (0,), 'full_kd': (7,)}
    told = [dict(arm='full_student', seeds=(0,)), dict(arm='full_kd', seeds=(7,))]
    assert warned(c, 'excluded') == told
    assert c.difference.estimate == pytest.approx(0.02, abs=1e-5)
    b = arm('full_kd', (0, 1), teacher_seed=4)
    assert compare(arm('baseline', (0, 1)), b).seeds == (0, 1)
    two = b + arm('full_kd', (0, 1), teacher_seed=5)
    torn = compare(arm('baseline', (0, 1)), two).reasons['comparison']
    assert torn == reason('several_teachers', arm='full_kd')
    assert compare(arm('full_student', (0, 1), teacher_seed=5), two).seeds == (0, 1)
    assert check_arm(arm('full_kd', teacher_seed=0)) is None
    # a draw of one seed for all: the run of that seed records none
    drawn = [make_record('full_kd', seed, labels=32, labels_seed=1) for seed in range(3)]
    assert check_arm(drawn) is None


def test_the_difference_uses_units_and_seeds_in_any_order():
    a, b = arm('full_student'), arm('full_kd', value=0.72)
    units = units_of(a + b)
    c = compare(a, b, units)
    x, y = unit_matrix(a, units), unit_matrix(b, units)
    assert c.difference == crossed_interval(y[x.columns].to_numpy() - x.to_numpy())
    assert (c.difference.n, c.difference.units) == (3, 40)
    shuffled = compare(a[::-1], b, units.sample(frac=1, random_state=0)).difference
    assert (shuffled.estimate, shuffled.low) == pytest.approx((c.difference.estimate, c.difference.low))
    assert compare(b, a, units).difference.estimate == pytest.approx(-c.difference.estimate)


def test_units_whose_mean_is_not_the_metric_are_not_used_and_other_units_are_refused():
    a, b = arm('full_student'), arm('full_kd')
    units = units_of(a + b)
    for other in (units.assign(value=units['value'] * 2), units[units['run_id'] != a[0]['run_id']]):
        c = compare(a, b, other)
        assert 'no units' in c.difference.method and c.n_units is None
        assert warned(c, 'own_values') == [{}]
    renamed = units.assign(unit=np.where(units['arm'] == 'full_kd', 'X' + units['unit'], units['unit']))
    c = compare(a, b, renamed)
    assert c.difference is None and c.speedup
    assert c.reasons['difference'] == reason('different_units', a=40, b=40)


def test_what_is_null_gives_its_reason_and_the_rest_stays():
    a, b = arm('full_student'), arm('full_kd')
    c = compare(a, list(map(without_value, b)))
    failed = reason('no_value', run_ids=ids(*b), name='MAP', why=('the evaluation failed',))
    assert c.difference is None and c.reasons['difference'] == c.verdict().reason == failed
    assert set(c.speedup) == {'train_s', 'total_s'}
    c = compare(a, [r | dict(time=r['time'] | {'total_s': None}) for r in b])
    assert set(c.speedup) == {'train_s'} and c.reasons['total_s'].code == 'time_missing'
    assert details_of(c.reasons['total_s'])['why'].code == 'no_value'
    b[1] = b[1] | dict(time=b[1]['time'] | {'train_s': None})
    c = compare(a, b)
    assert (c.speedup['train_s'].n, c.speedup['total_s'].n) == (2, 3)
    lost = reason('no_value', run_ids=ids(b[1]), name='train_s', why=('no reason recorded',))
    assert warned(c, 'pair_excluded') == [dict(run=lost)]


def test_two_commits_are_said():
    c = compare(arm('full_student', (0,)), arm('full_kd', (0,), git=f'{"ab" * 20}-dirty'))
    ((first, _),) = [of['names'] for of in warned(c, 'commits')]
    assert first == 'ababababab-dirty'
    assert not warned(compare(arm('full_student'), arm('full_kd')), 'commits')


def test_a_factor_that_the_machine_did_not_vary_is_said():
    a = make_record('baseline')
    b = make_record('parallel_baseline', ranks=1)
    b = b | dict(settings=a['settings'], factors=a['factors'], parallel=a['parallel'])
    assert differences(a, b) == {} and compare([a], [b]).unvaried == ('ranks',)


def test_difference_table_names_the_factor_each_setting_is_part_of():
    t = difference_table(compare(arm('full_student'), arm('full_kd', batch_size=16))).set_index('setting')[
        'part of'
    ]
    assert t['kd'] == 'a factor' and t['alpha'] == 'kd' and t['batch_size'] == ''
    by_seed = difference_table(compare(arm('parallel_baseline'), arm('full_student'))).set_index('setting')
    assert (
        by_seed.loc['teacher_run_id', 'full_student'] == 'by seed'
        and by_seed.loc['student_layers', 'part of'] == 'network'
    )


def test_three_procedures_alone_are_compared_directly_and_labelled():
    found = study_comparisons([r for m in PROCEDURES for r in arm(m)])
    by_pair = {(c.a, c.b): c.attribution for _, c in found}
    assert list(by_pair['baseline', 'full_kd'].factors) == ['network', 'kd', 'ranks']
    assert list(by_pair['baseline', 'mixed_kd'].factors) == ['network', 'precision', 'kd', 'ranks']
    assert by_pair['full_kd', 'mixed_kd'].factor == 'precision' and len(found) == 3


def test_all_seven_modes_and_a_variant():
    runs = [r for m in MODES for r in arm(m)]
    runs += [make_record('full_kd', s, 0.71, 11.0, arm='hot', temperature=8.0) for s in (0, 1)]
    found = study_comparisons(runs, units_of(runs))
    assert [k for k, _ in found] == ['chain'] * 4 + ['control'] * 3 + ['procedures'] * 2 + ['variant']
    hot = found[-1][1]
    assert (
        (hot.a, hot.b, hot.seeds) == ('full_kd', 'hot', (0, 1))
        and hot.attribution.factor is None
        and list(hot.attribution.others) == ['temperature']
    )


@pytest.mark.parametrize(
    'arms, pairs',
    [
        (('baseline', 'full_student'), [('baseline', 'full_student')]),
        (('mixed_kd', 'parallel_baseline'), [('parallel_baseline', 'mixed_kd')]),
        (
            ('baseline', 'full_student', 'mixed_kd'),
            [('baseline', 'mixed_kd'), ('baseline', 'full_student')],
        ),
        (('full_kd',), []),
    ],
)
def test_no_arm_is_left_without_a_comparison(arms, pairs):
    found = study_comparisons([make_record(arm, seed, 0.7 + seed / 50) for arm in arms for seed in range(2)])
    assert [(c.a, c.b) for _, c in found] == pairs
    assert {kind for kind, _ in found} <= {'procedures'}


def study(seeds=(0, 1, 2, 3, 4), step=0.01):
    return [r for k, m in enumerate(MODES) for r in arm(m, seeds, value=0.7 + step * k, train_s=40 / (k + 1))]


def test_p_and_what_stands_beside_it_come_from_the_matrix_of_differences():
    a, b = arm('full_student', range(5)), arm('full_kd', range(5), value=0.72)
    units = units_of(a + b)
    c = compare(a, b, units)
    d = unit_matrix(b, units).to_numpy() - unit_matrix(a, units).to_numpy()
    assert c.p == crossed_test(d).p and (c.p < 0.05) == (c.difference.low > 0)
    assert (c.n_seeds, c.n_units, c.unit_name) == (5, 40, 'questions')
    assert c.p_permutation == pytest.approx(permutation_test(d, np.random.default_rng(0)).p, abs=0.01)
    assert c.effect_size.estimate == pytest.approx(d.mean(0).mean() / d.mean(0).std(ddof=1))
    assert c.effect_size_seeds.n == 5 and c.bootstrap.low < 0.02 < c.bootstrap.high
    assert [e.margin for e in c.equivalences] == [0.05, 0.02] and c.equivalences[0].equivalent
    assert c.p_holm is None and c.family is None
    assert compare(a, b, units) == compare(a, b, units)  # the same resamples each time


def test_a_run_that_failed_takes_its_pair_out_by_name():
    a, b = arm('full_student'), arm('full_kd', value=0.72)
    units = units_of(a + b)
    failed = [b[0], without_value(b[1]), b[2]]
    c = compare(a, failed, units)
    whole = compare([a[0], a[2]], [b[0], b[2]], units)
    assert c.difference == whole.difference and c.n_seeds == 2 and c.seeds == (0, 1, 2)
    (lost,) = warned(c, 'pair_excluded')
    assert details_of(lost['run']) == dict(run_ids=ids(b[1]), name='MAP', why=('the evaluation failed',))
    assert c.speedup['train_s'].n == 3  # its time still counts
    two = compare(a[:2], failed[:2], units)  # one value is left of two pairs
    assert two.n_seeds == 1 and two.seeds == (0, 1) and two.verdict().reason.code == 'one_seed'


def test_times_of_a_busy_machine_are_named():
    a, b = arm('full_student'), arm('full_kd')
    b[2] = b[2] | dict(machine=dict(busy_share=BUSY_SHARE + 0.3, load_average_mean=5.0, cpu_steal=0.0))
    c = compare(a, b)
    assert c.warnings == (reason('busy', runs=ids(b[2]), share=BUSY_SHARE),) and c.speedup
    for quiet in (
        dict(busy_share=BUSY_SHARE / 2, cpu_steal=0.0),
        dict(busy_share=None, cpu_steal=None),
        None,
    ):
        assert not compare(a, [r | dict(machine=quiet) for r in arm('full_kd')]).warnings


def test_without_units_there_is_no_p_below_eight_seeds():
    few, many = (
        compare(arm('full_student', range(n)), [make_record('full_kd', s, 0.8 + 0.004 * s) for s in range(n)])
        for n in (7, 8)
    )
    why = few.verdict().reason
    assert few.p is None and few.p_permutation is None and few.reasons['p'] == why
    assert (why.code, details_of(why)['n'], details_of(why)['needed']) == ('too_few_seeds', 7, 8)
    assert details_of(why)['least'] == 2 / 2**7
    assert many.p is not None and many.p_permutation == 2 / 2**8


def test_the_chain_and_the_controls_are_a_family_and_the_procedures_another():
    runs = study()
    found = study_comparisons(runs, units_of(runs))
    for kinds, name in (
        (('chain', 'control'), 'chain and controls'),
        (('procedures',), 'procedures and variants'),
    ):
        inside = {f'{c.a} -> {c.b}': c for kind, c in found if kind in kinds}
        assert {c.family for c in inside.values()} == {Family(name, tuple(inside))}
        assert {k: c.p_holm for k, c in inside.items()} == holm({k: c.p for k, c in inside.items()})
        times = holm({k: c.p_times['train_s'] for k, c in inside.items()})
        assert {k: c.p_times_holm['train_s'] for k, c in inside.items()} == times
    assert len(inside) == 2 and all(c.p_holm >= c.p for _, c in found)


def test_a_failed_arm_does_not_make_the_others_more_significant():
    runs = study(step=0.002)
    failed = [without_value(r) if r['arm'] == 'mixed_student' else r for r in runs]
    whole, part = ({(c.a, c.b): c for _, c in study_comparisons(rs, units_of(runs))} for rs in (runs, failed))
    assert (
        part['full_student', 'mixed_student'].p_holm is None
        and len(part['baseline', 'parallel_baseline'].family.members) == 7
    )
    ranked = sorted(CHAIN + CONTROLS, key=lambda k: whole[k].p)
    smallest = next(k for k in ranked if 'mixed_student' not in k)
    assert part[smallest].p_holm == pytest.approx(min(1, 7 * part[smallest].p), rel=1e-9, abs=0)
    assert 1e-4 < part[smallest].p < 0.1  # a moderate p, where the number of members can be seen
    absent = {
        (c.a, c.b): c
        for _, c in study_comparisons([r for r in runs if r['arm'] != 'mixed_student'], units_of(runs))
    }
    # as the notebook says
    least = absent[smallest]
    assert least.p_holm == pytest.approx(min(1, 5 * least.p), rel=1e-9, abs=0)
    assert len(least.family.members) == 5


def test_all_values_the_same_shows_what_so_many_units_can():
    a = arm('full_kd', range(3))
    b = arm('mixed_kd', range(3))
    units = units_of(a)
    units = pd.concat(
        [units, units.assign(run_id=units['run_id'].map({x['run_id']: y['run_id'] for x, y in zip(a, b)}))]
    )
    c = compare(a, b, units)
    assert c.identical and c.p == 1 and c.differing == 0
    # the chance that one more unit in twenty, changed by 1, is not among these
    assert c.equivalences[0].p_equivalent == pytest.approx(0.95**c.n_units, rel=0.05)
    assert c.few_differ and c.verdict().code == 'not_significant' and not c.equivalences[0].noninferior
    assert c.difference.high == pytest.approx(1 - 0.025 ** (1 / c.n_units), rel=0.02)
    assert (
        not compare(a[:1], b[:1], units).identical
        and not compare(a, arm('mixed_kd', range(3), value=0.8)).identical
    )


def changed_in(n, records, units, by=0.2):
    "Arm b as arm a, but in n units of one seed each; the runs' own values follow."
    of_a, of_b = records
    rows = units.copy()
    names = rows['unit'].unique()[:n]
    for k, unit in enumerate(names):
        run = of_b[k % len(of_b)]
        here = (rows['run_id'] == run['run_id']) & (rows['unit'] == unit)
        value = rows.loc[here, 'value'].iloc[0]
        rows.loc[here, 'value'] = value + by if value + by <= 1 else value - by
    for run in of_b:
        mine = rows[(rows['run_id'] == run['run_id']) & (rows['split'] == run['primary']['set'])]
        run['primary'] = run['primary'] | dict(value=float(mine['value'].mean()))
    return rows


def same_in_both(a, b):
    units = units_of(a)
    ids = {x['run_id']: y['run_id'] for x, y in zip(a, b)}
    return pd.concat([units, units.assign(run_id=units['run_id'].map(ids))], ignore_index=True)


@pytest.mark.parametrize('n', [3, 14, 15])
def test_few_units_that_differ_have_the_interval_of_a_bounded_mean(n):
    a, b = arm('full_kd', range(3)), arm('mixed_kd', range(3))
    units = changed_in(n, (a, b), same_in_both(a, b))
    c = compare(a, b, units)
    assert c.differing == n
    assert c.few_differ == (n < 15) == (c.effect_size is None) == (c.bootstrap is None)
    if c.few_differ:
        # no narrower than what units that were not seen allow
        assert c.difference.high > 1 - 0.025 ** (1 / c.n_units) > -c.difference.low / 2
        assert c.p >= 2 / 2**n and c.interval_kind == 'bounded'
    else:
        assert c.difference.se > 0 and c.interval_kind == 'crossed'


def interaction_of(records, units):
    "Whether precision changes the effect of distillation, as the thesis asks."
    return interaction(arms_of(records), units, INTERACTIONS['precision x kd'])


def test_a_contrast_of_arms_with_few_units_that_differ_is_bounded_too():
    "Of four arms one differs from the others, in some questions."
    arms = [arm(mode, range(3)) for mode in ('full_student', 'full_kd', 'mixed_student', 'mixed_kd')]

    def made(changed):
        runs = []
        rows = []
        for r in (r for runs in arms for r in runs):
            # of the four only rounding is left
            value = (
                np.linspace(0.3, 0.6, 40)
                + 0.1 * r['arm'].endswith('kd')
                + 0.07 * r['arm'].startswith('mixed')
            )
            if r['arm'] == 'mixed_kd':
                value[:changed] += np.linspace(0.1, 0.2, changed) + 0.01 * r['seed']
            runs.append(r | dict(primary=r['primary'] | dict(value=value.mean())))
            its = dict(
                split='test', set='clean', unit=[f'Q{u}' for u in range(40)], metric='map', value=value
            )
            rows.append(pd.DataFrame(its | dict(run_id=r['run_id'])))
        return runs, pd.concat(rows)

    (few, few_p), (many, many_p) = (interaction_of(*made(n)) for n in (3, 30))
    assert few.se is None and 'bounded mean' in few.method
    assert many.se > 0 and 'quadrature' in many.method
    # a difference of two differences reaches twice as far as one
    changed = np.zeros((3, 40))
    changed[:, :3] = np.linspace(0.1, 0.2, 3) + 0.01 * np.arange(3)[:, None]
    expected = difference_interval(changed, np.random.default_rng(0), bound=2.0)
    assert few.estimate == pytest.approx(expected.estimate)
    assert few.high == pytest.approx(expected.high, rel=0.05) and few.high > 1.5 * (
        difference_interval(changed, np.random.default_rng(0), bound=1.0).high
    )
    # three questions have eight flips
    assert few_p >= 2 / 2**3 and many_p < 0.01


def test_masks_of_another_kind_are_no_effect_of_precision():
    a = arm('full_kd', range(3), device='NVIDIA H100')
    b = [r | dict(dropout_masks='shared') for r in arm('mixed_kd', range(3), device='NVIDIA H100')]
    c = compare(a, b)
    assert c.attribution is None and c.difference is None and c.p is None
    assert c.reasons['comparison'] == reason('masks_differ', old=ids(*a), new=ids(*b))
    some = compare([*a[:2], a[2] | dict(dropout_masks='shared')], b)
    assert details_of(some.reasons['comparison'])['old'] == ids(*a[:2])
    # beside a CPU, whose masks never hung on the format, it is another machine
    beside = compare(arm('full_kd', range(3)), arm('mixed_kd', range(3), device='NVIDIA H100'))
    assert 'dropout_masks' in beside.attribution.others
    assert compare(a, arm('mixed_kd', range(3), device='NVIDIA H100')).attribution.factor == 'precision'


def test_a_metric_without_a_bound_keeps_its_interval(monkeypatch):
    a, b = arm('full_kd', range(3)), arm('mixed_kd', range(3))
    units = changed_in(3, (a, b), same_in_both(a, b))
    monkeypatch.setattr('kdnotes.stats.comparable.task_info', lambda name: replace(task_info(name), reach={}))
    c = compare(a, b, units)
    assert c.differing == 3 and not c.few_differ and c.difference.se > 0


def test_one_teacher_for_all_seeds_is_said():
    def shared(a, b):
        return [arms for of in warned(compare(a, b), 'one_teacher') for arms in of['arms']]

    one = dict(teacher_seed=7)
    assert shared(arm('full_student', **one), arm('full_kd', **one)) == ['full_student', 'full_kd']
    assert shared(arm('baseline'), arm('full_kd', **one)) == ['full_kd']
    assert not shared(arm('full_student'), arm('full_kd'))
    assert not shared(arm('baseline', (0,)), arm('full_kd', (0,), **one))


def test_interactions_pair_the_teachers_too():
    four = ('full_student', 'full_kd', 'mixed_student', 'mixed_kd')
    lift = {'mixed_kd': 0.04}
    runs = [
        make_record(m, s, 0.7 + lift.get(m, 0) + 0.01 * t, teacher_seed=t)
        for m in four
        for s in (0, 1)
        for t in ((3, 4) if m != 'full_kd' else (4, 3))
    ]

    found, p = interaction_of(runs, units_of(runs))
    assert (found.n, found.estimate) == (4, pytest.approx(0.04, abs=1e-5))
    matrix = sum(
        w
        * unit_matrix(
            [
                next(r for r in runs if (r['arm'], r['seed'], r['teacher_seed']) == (m, s, t))
                for s in (0, 1)
                for t in (3, 4)
            ],
            units_of(runs),
        ).to_numpy()
        for m, w in INTERACTIONS['precision x kd'].items()
    )
    assert p == pytest.approx(crossed_test(matrix).p)  # each run with those of its own seed and teacher
    fewer = [r for r in runs if (r['arm'], r['seed'], r['teacher_seed']) != ('full_kd', 1, 4)]
    assert interaction_of(fewer, units_of(fewer))[0].n == 3
    none = [r for r in runs if r['arm'] != 'full_kd']
    assert interaction_of(none, units_of(none)) == interaction_of(runs, None) == (None, None)


def corrected_pair(value, seeds=range(5), p_holm=None, **more):
    a = arm('full_student', seeds, **more)
    b = arm('full_kd', seeds, value=value, **more)
    one = study_comparisons(a + b, units_of(a + b))[0][1]
    return one if p_holm is None else replace(one, p_holm=p_holm)


def test_a_sentence_has_estimate_interval_corrected_p_and_what_it_rests_on():
    c = corrected_pair(0.72)
    i = c.difference
    assert sentence(c) == (
        f'MAP on the test set is significantly higher for full_kd than for full_student: {i:+.4f} '
        f'(95% interval over 5 seeds and 40 questions; {p_equals(c.p_holm)}).'
    )
    worse = corrected_pair(0.65)
    assert worse.difference.estimate < 0 and 'significantly lower' in sentence(worse)
    # of a difference of the network or of KD a margin says nothing
    assert 'inferior' not in sentence(worse) and 'equivalent' not in sentence(worse)
    a, b = arm('baseline', range(5)), arm('full_kd', range(5), value=0.65)
    assert ', uncorrected)' in sentence(compare(a, b, units_of(a + b)))


def test_epochs_stand_in_every_sentence_about_training_time():
    a, b = arm('baseline', range(3), epochs=3, train_s=40.0), arm('full_kd', range(3), epochs=2, train_s=20.0)
    c = study_comparisons(a + b, units_of(a + b))[0][1]
    assert c.epochs == (3, 2)
    for text in (sentence(c, 'train_s'), sentence(c, 'total_s')):
        assert 'times as fast' in text and ', 2 epochs against 3' in text
    assert 'times as fast as baseline (2 epochs against 3)' in str(c)
    one = study_comparisons(a[:1] + b[:1], None)[0][1]
    assert 'as baseline, 2 epochs against 3 (1 seed)' in sentence(one, 'train_s')
    assert one.verdict('train_s').reason.code == 'one_seed'


def test_a_comparison_of_one_seed_makes_no_family_larger():
    "It cannot be tested, so that nobody can be wrong about it."
    several = [*arm('full_student', range(5)), *arm('full_kd', range(5), value=0.72)]
    alone = [*arm('mixed_student', (0,)), *arm('mixed_kd', (0,))]
    runs = several + alone
    found = {(c.a, c.b): c for _, c in study_comparisons(runs, units_of(runs))}
    tested, single = found['full_student', 'full_kd'], found['mixed_student', 'mixed_kd']
    assert tested.family.members == ('full_student -> full_kd',) and tested.p_holm == tested.p
    assert single.verdict().code == 'not_tested' and single.family is None and single.p_holm is None
    # five seeds that have no value were to be tested, and stay in it
    lost = [r | dict(primary=r['primary'] | dict(value=None)) for r in arm('mixed_student', range(5))]
    both = [*several, *lost, *arm('mixed_kd', range(5))]
    with_lost = {
        (c.a, c.b): c for _, c in study_comparisons(both, units_of([r for r in both if r not in lost]))
    }
    assert len(with_lost['full_student', 'full_kd'].family.members) > 1


def test_a_comparison_of_two_arms_at_the_baseline_has_a_warning():
    runs = [*arm('full_student', range(5)), *arm('full_kd', range(5), value=0.72)]

    def told(value):
        of_set = dict(split='test', set='', unit='', cluster='', metric='map', value=value)
        table = pd.concat([pd.DataFrame([of_set]), make_units(value, 99)]).assign(floor='bm25', key='k')
        return study_comparisons(runs, units_of(runs), table)[0][1]

    both, one, none = (told(value) for value in (0.75, 0.71, 0.5))
    assert both.at_baseline == reason('at_baseline', a='full_student', b='full_kd', baselines=('BM25',))
    assert sentence(both).endswith(f'{both.at_baseline}.'.removeprefix('n'))
    assert one.at_baseline is None and none.at_baseline is None and 'BM25' not in sentence(none)


def test_the_corrected_p_decides_the_verdict():
    c = corrected_pair(0.72, p_holm=0.06)
    assert c.p < 0.05 and c.difference.low > 0 and c.verdict().code == 'not_significant'
    assert sentence(c).startswith('No significant difference') and 'p = .06' in sentence(c)
    assert 'excludes 0; the p-value is not below .05.' in sentence(c)
    found = corrected_pair(0.72, p_holm=0.0496)
    # .050 would not be below .05
    assert found.verdict().code == 'significant' and 'p = .0496' in sentence(found)


def test_one_seed_is_never_an_effect():
    c = corrected_pair(0.72, seeds=(3,))
    assert c.p is None and c.p_holm is None and c.equivalences[0].p_noninferior is None
    assert all(c.verdict(about) == ('not_tested', reason('one_seed')) for about in ('primary', *TIMES))
    assert {row['verdict'] for row in tables.tested_rows('chain', c)} == {'not_tested', None}
    label = phrase('comparison.jinja', 'called', c)
    assert label == 'only kd differs (one seed)'
    for text in (label, str(c), *(sentence(c, about) for about in ('primary', *TIMES))):
        assert 'effect' not in text and 'significant' not in text
    told = 'With seed 3 alone, MAP on the test set is higher for full_kd than for full_student by 0.0200 '
    assert sentence(c).startswith(
        f'{told}({c.difference:+.4f} over the questions of that seed). Not tested: '
    )


def test_a_time_sentence_turns_ratios_to_what_happened():
    a, b = arm('full_kd', range(5), train_s=20.0), arm('mixed_kd', range(5), train_s=10.0)
    faster, slower = (compare(*both) for both in ((a, b), (b, a)))
    ratio = faster.speedup['train_s']
    assert f'mixed_kd is trained {ratio:.2f} times as fast as full_kd' in sentence(faster, 'train_s')
    assert f'full_kd is trained {ratio:.2f} times as long as mixed_kd' in sentence(slower, 'train_s')
    elsewhere = compare(a, arm('mixed_kd', range(5), torch='2.14.0'))
    machines = dict(a=('torch 2.13.0',), b=('torch 2.14.0',))
    assert elsewhere.verdict('train_s').reason == reason('equal_machines', **machines)


def test_without_a_test_there_is_no_claim():
    "Five seeds without units: an interval excludes zero, but no test says so."
    c = compare(arm('full_student', range(5)), arm('full_kd', range(5), value=0.8))
    assert c.p is None and c.difference.low > 0 and c.verdict().code == 'not_tested'
    assert c.verdict().reason == c.reasons['p'] and c.reasons['p'].code == 'too_few_seeds'
    assert f'is {c.difference:+.4f} (95% interval over 5 seeds). Not tested: {c.reasons["p"]}.' in sentence(c)
    assert 'significant' not in str(c)


def test_without_spread_nothing_is_tested():
    a, b = (
        [make_record(m, s, v, t) for s in range(8)]
        for m, v, t in (('full_student', 0.7, 20.0), ('full_kd', 0.71, 10.0))
    )
    c = compare(a, b)  # every ratio is 2, and every difference 0.01
    assert c.verdict('train_s').code == 'not_tested' and c.speedup['train_s'].low > 1
    assert c.p is None and c.p_permutation == 2 / 2**8
    assert c.verdict().reason == c.verdict('train_s').reason == reason('no_spread')


def test_verdicts_are_codes_in_the_table():
    found = study_comparisons(study(step=0.03), units_of(study(step=0.03)))
    rows = [row for kind, c in found for row in tables.tested_rows(kind, c)]
    assert {row['verdict'] for row in rows if row['quantity'] in TIMES} <= {
        'significant',
        'not_significant',
        'not_tested',
    }
    primary = {(row['a'], row['b']): row for row in rows if row['method'] in ('crossed', 'bounded')}
    for _, c in found:
        row = primary[c.a, c.b]
        assert (row['verdict'], row['p'], row['p_corrected']) == (c.verdict().code, c.p, c.p_holm)
        assert (row['estimate'], row['n_seeds'], row['n_units']) == (c.difference.estimate, 5, 40)
    assert study_comparisons([]) == []


@pytest.mark.parametrize('moved', [-0.0003, 0.00004])
def test_a_small_difference_keeps_its_side_in_every_text(moved):
    a, b = arm('full_student', range(5)), arm('full_kd', range(5), value=0.7 + moved)
    c = compare(a, b, units_of(a + b))
    sign = '+' if moved > 0 else MINUS
    for text in (sentence(c), str(c)):
        assert f'full_student: {sign}0.000' in text
    # an estimate between bounds on two sides gets one digit more than was asked for, and no third
    assert all(float(x.strip('[],').replace(MINUS, '-')) for x in f'{c.difference:+.4f}'.split())


def lower_is_better(mode, value):
    "Five runs whose primary metric is an error."
    seeds = range(5)
    more = dict(task='text_classification', metric='mse', higher=False)
    return [make_record(mode, seed, value + 0.003 * seed, **more) for seed in seeds]


def error_pair(value):
    "Student without and with KD, and their comparison, corrected."
    records = lower_is_better('full_student', 0.70) + lower_is_better('full_kd', value)
    return study_comparisons(records, units_of(records).assign(metric='mse'))[0][1]


def test_of_an_error_lower_is_better_in_words_and_margins():
    less, more, much = map(error_pair, (0.65, 0.73, 0.80))
    assert less.verdict().code == 'significant' and less.difference.estimate < 0
    assert 'lower (better)' in sentence(less) and 'higher (worse)' in sentence(more)
    assert all(e.noninferior for e in less.equivalences)
    # the task's margins: 0.03 more is less than 0.05 and not less than 0.02
    assert [(e.margin, e.noninferior) for e in more.equivalences] == [(0.05, True), (0.02, False)]
    assert not any(e.noninferior for e in much.equivalences)


def precision_steps(b_values):
    "Three steps of precision, corrected together, each with many questions that differ."
    a_to_b = (('full_kd', 'mixed_kd'), ('full_student', 'mixed_student'), ('baseline', 'mixed_baseline'))
    runs = [
        r for (a, b), value in zip(a_to_b, b_values) for r in arm(a, range(5)) + arm(b, range(5), value=value)
    ]
    found = study_comparisons(runs, units_of(runs))
    return {c.b: c for _, c in found if (c.a, c.b) in a_to_b}, runs


def test_margins_are_spoken_of_for_precision_alone_and_corrected():
    found, runs = precision_steps((0.703, 0.69, 0.6))
    alone = {
        c.b: compare(*([r for r in runs if r['arm'] == x] for x in (c.a, c.b)), units_of(runs))
        for c in found.values()
    }
    smallest = sorted(e.equivalences[0].p_noninferior for e in alone.values())
    corrected = sorted(c.equivalences[0].p_noninferior for c in found.values())
    assert corrected[0] == pytest.approx(3 * smallest[0], rel=1e-6)
    assert all(c.equivalences[0].corrected_over == 3 for c in found.values())
    assert all(c.equivalences[0].corrected_over is None for c in alone.values())
    assert not found['mixed_baseline'].equivalences[0].noninferior
    for c in found.values():
        assert 'Holm-corrected over 3 comparisons of precision' in sentence(c)
        assert p_equals(c.equivalences[0].p_noninferior) in sentence(c) or c.equivalences[0].equivalent
    assert '; p < .001, uncorrected' in sentence(alone['mixed_baseline'])


def test_units_that_are_alike_count_as_their_clusters():
    "Ten examples an author, whose differences are the author's: no more is known than from the authors."
    records = [
        make_record(mode, seed, 0.7, task='text_classification', metric='accuracy')
        for mode in ('full_student', 'full_kd')
        for seed in range(3)
    ]
    rng = np.random.default_rng(0)
    gains = rng.normal(0.05, 0.1, 8)

    def rows(record, author, each):
        gain = gains[author] if record['mode'] == 'full_kd' else 0.0
        noise = 0.01 * np.random.default_rng([record['seed'], author]).normal()
        return [
            dict(unit=f'{author}-{i}', cluster=f'author{author}', value=0.7 + gain + noise)
            for i in range(each)
        ]

    def compared(each):
        tables = [
            pd.DataFrame([row for author in range(8) for row in rows(r, author, each)]).assign(
                run_id=r['run_id'], split=r['primary']['set'], set='all', metric='accuracy'
            )
            for r in records
        ]
        made = [
            r | dict(primary=r['primary'] | dict(value=float(table['value'].mean())))
            for r, table in zip(records, tables)
        ]
        return compare(made[:3], made[3:], pd.concat(tables))

    one = compared(1)
    ten = compared(10)
    assert (one.unit_name, ten.unit_name) == ('examples', 'clusters')
    assert one.difference.units == ten.difference.units == 8
    assert ten.difference.estimate == pytest.approx(one.difference.estimate)
    assert ten.difference.se == pytest.approx(one.difference.se)


def made_up(**known):
    "A comparison with the numbers of one branch of a template."
    i = Interval(0.0123, 0.0042, 0.0204, 5, 0.95, '', units=40, se=0.003)
    x = Attribution('kd', {'kd': (False, True)}, {'alpha': (None, 0.5)}, {}, {'alpha': ('kd',)})
    family = Family('chain and controls', ('s -> d', 'd -> m'))
    primary = dict(set='test', metric='map', higher_is_better=True)
    usual = dict(a='s', b='d', attribution=x, primary=primary, difference=i, seeds=(0, 1, 2, 3, 4))
    usual |= dict(speedup={}, p=0.01, p_holm=0.0213, family=family, unit_name='questions', epochs=(2, 3))
    return Comparison(**usual | known)


def of_margin(noninferior, equivalent, over=None):
    "The first margin of a comparison of precision."
    p = [0.0312 if shown else 0.217 for shown in (noninferior, equivalent)]
    return (Equivalence(0.05, *p, corrected_over=over),)


FORMAT = Attribution('precision', {'precision': ('fp32', 'amp')}, {}, {}, {})
ONE = Interval(-0.0123, None, None, 1, 0.95, '')
UNKNOWN = dict(p=None, p_holm=None)
OPEN = dict(difference=Interval(0.0021, -0.0042, 0.0084, 5, 0.95, '', units=40, se=0.003), p_holm=0.417)
RATIO = Interval(0.512, 0.451, 0.583, 5, 0.95, '', null=1.0, se=0.02, df=4.0)
LOW = reason('at_baseline', a='s', b='d', baselines=('BM25',))
ERROR = dict(task='text_classification', primary=dict(set='test', metric='mse', higher_is_better=False))


@pytest.mark.parametrize(
    'known, facts',
    [
        ({}, '+0.0123 [+0.0042, +0.0204] | 5 seeds | 40 questions | p = .021, Holm | 2 comparisons'),
        (dict(p_holm=None), 'p = .01, uncorrected'),
        (dict(p_holm=0.06), 'No significant difference | p = .06 | excludes 0'),
        (OPEN, 'No significant difference | +0.0021 [−0.0042, +0.0084] | p = .42'),
        (OPEN | dict(differing=3, difference=replace(OPEN['difference'], se=None)), '3 of which differ'),
        (
            UNKNOWN | dict(difference=ONE, seeds=(3,)),
            'seed 3 alone | lower | by 0.0123. Not tested: one seed',
        ),
        (UNKNOWN | dict(difference=replace(ONE, estimate=0.0)), 'one seed alone | is the same for d and s'),
        (UNKNOWN | dict(reasons=dict(p=reason('no_spread'))), '+0.0123 | Not tested: all values are equal'),
        (dict(reasons=dict(comparison=reason('smoke_mixed'))), 's and d are not compared: smoke runs'),
        (dict(reasons=dict(difference=reason('different_units', a=4, b=5))), 'not compared by MAP | 4 and 5'),
        (dict(at_baseline=LOW), 'Neither s nor d is significantly better than BM25'),
        (ERROR, 'quared error | higher (worse)'),
        (
            OPEN | dict(attribution=FORMAT, equivalences=of_margin(True, True)),
            'equivalent within ±0.05 | .031',
        ),
        (OPEN | dict(attribution=FORMAT, equivalences=of_margin(True, False, 3)), 'non-inferior | over 3'),
        (OPEN | dict(attribution=FORMAT, equivalences=of_margin(False, False)), 'not shown | p = .22'),
    ],
)
def test_every_branch_of_a_claim_renders(known, facts):
    c = made_up(**known)
    for text in (sentence(c), str(c)):
        assert [fact for fact in facts.split(' | ') if fact not in text] == []
        clean(text)


def clean(text):
    "Is this a sentence without the leftovers of a template?"
    assert not re.search(r'\{\{|\}\}|None|  |\.\.|\(\)| \)| [.,;](?= |$)', text), text
    assert text[-1] == '.' and text.count('(') == text.count(')'), text


@pytest.mark.parametrize(
    'known, about, facts',
    [
        (
            dict(p_times=dict(train_s=0.001)),
            'train_s',
            '1.95 [1.72, 2.22] times as long | 3 epochs against 2',
        ),
        (dict(p_times=dict(train_s=0.2), epochs=(2, 2)), 'train_s', '2 epochs each | not significant'),
        (dict(epochs=(None, 2)), 'train_s', 'as s (95% interval over 5 seeds). Not tested: '),
        (dict(p_times=dict(total_s=0.001)), 'total_s', "with the teacher's training and signal, 3 epochs"),
        (dict(speedup={}, reasons=dict(train_s=reason('no_spread'))), 'train_s', 's → d: all values'),
    ],
)
def test_every_branch_of_a_time_renders(known, about, facts):
    c = made_up(**dict(speedup=dict(train_s=RATIO, total_s=RATIO)) | known)
    text = sentence(c, about)
    assert [fact for fact in facts.split(' | ') if fact not in text] == []
    clean(text)
    clean(str(c))


BELONGS = {f'setting_{i}': (1, 2) for i in range(5)}


@pytest.mark.parametrize(
    'x, label, differs',
    [
        (FORMAT, 'effect of precision', 'The only factor that differs is precision.'),
        (
            Attribution(None, {'kd': (0, 1), 'ranks': (1, 2)}, BELONGS, {'epochs': (2, 3)}, {}),
            'several factors: kd, ranks, and epochs',
            'Several factors differ: kd, ranks, and epochs (5 settings, see the table of differences).',
        ),
        (
            Attribution(None, {'kd': (0, 1)}, {'alpha': (None, 0.5)}, {'epochs': (2, 3)}, {}),
            'kd, but epochs differs as well',
            'kd differs, but epochs also differs (with alpha).',
        ),
        (
            Attribution(None, {}, {}, {'teacher_run_id': ('x', 'y'), 'epochs': (2, 3)}, {}),
            'no factor; different teacher, epochs',
            'No factor differs, but the teacher and epochs do.',
        ),
        (Attribution(None, {}, {}, {}, {}), 'no recorded difference', 'No recorded setting differs.'),
    ],
)
def test_every_kind_of_attribution_renders(x, label, differs):
    c = made_up(attribution=x)
    assert phrase('comparison.jinja', 'called', c) == label
    assert phrase('comparison.jinja', 'differs', c) == differs
    clean(str(c))


def test_a_paragraph_has_times_and_warnings():
    total = replace(RATIO, estimate=1.2, low=1.1, high=1.3)
    many = reason('commits', names=('c0', 'c1'))
    shared = reason('one_teacher', arms=('d',))
    c = made_up(speedup=dict(train_s=RATIO, total_s=total), warnings=(many, shared))
    times = 'd trains 1.95 [1.72, 2.22] times as long as s (3 epochs against 2); with the teacher'
    assert times in str(c) and '1.20 [1.10, 1.30] times as fast.' in str(c)
    assert str(shared)[1:] in str(c) and 'c0' not in str(c), 'commits are a note of the study'
    clean(str(c))
    # modes that differ in what the runs do not
    unvaried = made_up(a='baseline', b='parallel_baseline', attribution=Attribution(None, {}, {}, {}, {}))
    assert str(unvaried).endswith('No recorded setting differs; ranks did not vary on this machine.')
    clean(str(made_up(speedup=dict(total_s=total), reasons=dict(train_s=reason('no_spread')))))


def test_labels_of_one_seed_and_of_refused_comparisons():
    assert phrase('comparison.jinja', 'called', made_up(seeds=(0,))) == 'only kd differs (one seed)'
    assert phrase('comparison.jinja', 'called', made_up(attribution=None)) == 'not compared'

"""What may be compared with what, and what a difference may be called."""
import numpy as np
import pytest
from handmade import make_record, units_of
from kdnotes.compare import attribute, chain_table, check_arm, compare, difference_table, differences, explain, label, study_comparisons, unit_matrix
from kdnotes.config import CHAIN, CONTROLS, MODES, PROCEDURES
from kdnotes.stats import paired_difference


def arm(mode, seeds=(0, 1, 2), value=.7, train_s=10., **parameters):
    return [make_record(mode, s, value + .003 * s, train_s + .1 * s, **parameters) for s in seeds]


@pytest.mark.parametrize('a, b', CHAIN + CONTROLS)
def test_every_step_of_the_chain_is_one_factor(a, b):
    expected = next(f for f in ('network', 'precision', 'kd', 'ranks') if getattr(MODES[a], f) != getattr(MODES[b], f))
    x = attribute(make_record(a), make_record(b))
    assert x.factor == expected and not x.others and label(x) == f'effect of {expected}'
    assert attribute(make_record(b), make_record(a)).factor == expected


@pytest.mark.parametrize('change', [dict(batch_size=16), dict(max_length=64), dict(max_grad_norm=.5), dict(train_questions='answered'), dict(smoke=True), dict(epochs=1), dict(learning_rate=1e-3),
                                    dict(weight_decay=0.), dict(micro_batch_tokens=999)])
def test_any_other_setting_takes_the_factors_name_away(change):
    a, b = make_record('full_student'), make_record('full_kd', **change)
    x = attribute(a, b)
    assert x.factor is None and set(x.others) == set(change) and list(x.factors) == ['kd'] and next(iter(change)) in label(x)


@pytest.mark.parametrize('change', [dict(torch='2.14.0'), dict(device='cuda:0 NVIDIA H200'), dict(cpu='another cpu')])
def test_another_machine_refuses_times_but_not_accuracy(change):
    a, b = arm('full_student'), arm('full_kd', **change)
    c = compare(a, b, units_of(a + b))
    assert c.difference is not None and not c.speedup and next(iter(change)) in c.reasons['train_s'] and c.attribution.factor is None
    assert 'times are not compared over different' in explain(c)
    mixed = arm('full_kd', (0, 1)) + arm('full_kd', (2,), **change)   # one seed elsewhere is enough
    assert not compare(a, mixed).speedup and compare(a, mixed).difference is not None


@pytest.mark.parametrize('change, words', [(dict(corpus='wikiqa'), 'different corpora'), (dict(smoke=True), 'smoke'), (dict(metric='mrr'), 'different primary metrics')])
def test_what_is_not_the_same_question_is_not_compared(change, words):
    c = compare(arm('full_student'), arm('full_kd', **change))
    assert words in c.reasons['comparison'] and c.difference is None and not c.speedup and c.attribution is None
    assert explain(c).count('\n') == 0 and 'not compared' in explain(c)


def test_schema_and_task_refuse_too():
    for key, value in (('schema', 2), ('task', 'masked_lm')):
        other = [r | {key: value} for r in arm('full_kd')]
        assert f'different {key}s' in compare(arm('full_student'), other).reasons['comparison']


def test_smoke_inside_one_arm_is_refused():
    assert 'smoke' in compare(arm('full_student'), arm('full_kd', (0, 1)) + arm('full_kd', (2,), smoke=True)).reasons['comparison']


def test_an_arm_of_two_kinds_is_refused_by_name():
    mixed = arm('full_kd', (0, 1)) + arm('full_kd', (2,), temperature=8.)
    assert 'temperature' in check_arm(mixed) and 'temperature' in compare(arm('full_student'), mixed).reasons['comparison']
    assert 'seed 0 more than once' in check_arm(arm('full_kd') + arm('full_kd', (0,)))
    assert check_arm(arm('full_kd', teacher_seed=0)) is None and 'no runs' in check_arm([])
    assert 'no runs' in compare([], arm('full_kd')).reasons['comparison']


def test_pairs_are_by_seed_and_the_rest_is_named():
    a, b = arm('full_student', (0, 1, 2)), arm('full_kd', (2, 1, 7), value=.72)
    c = compare(a, b, units_of(a + b))
    assert c.seeds == (1, 2) and c.left_out == {'full_student': (0,), 'full_kd': (7,)}
    text = explain(c)
    assert 'only full_student has them: seed 0' in text and 'only full_kd has them: seed 7' in text
    assert c.difference.estimate == pytest.approx(.02, abs=1e-5)
    assert 'no seed in common' in compare(arm('full_student', (0,)), arm('full_kd', (1,))).reasons['comparison']


def test_teacher_seeds_pair_where_both_have_a_teacher():
    a, b = arm('full_student', (0, 1), teacher_seed=3), arm('full_kd', (0, 1), teacher_seed=4)
    assert 'no seed in common' in compare(a, b).reasons['comparison']
    assert compare(arm('baseline', (0, 1)), b).seeds == (0, 1)
    two = b + arm('full_kd', (0, 1), teacher_seed=5)
    assert 'several teachers' in compare(arm('baseline', (0, 1)), two).reasons['comparison']
    assert compare(arm('full_student', (0, 1), teacher_seed=5), two).seeds == (0, 1)


def test_the_difference_uses_units_and_seeds():
    a, b = arm('full_student'), arm('full_kd', value=.72)
    units = units_of(a + b)
    c = compare(a, b, units)
    x, y = unit_matrix(a, units), unit_matrix(b, units)
    assert c.difference == paired_difference(x, y[x.columns]) and (c.difference.n, c.difference.units) == (3, 40)
    shuffled = compare(a[::-1], b, units.sample(frac=1, random_state=0)).difference
    assert (shuffled.estimate, shuffled.low) == pytest.approx((c.difference.estimate, c.difference.low))
    assert compare(b, a, units).difference.estimate == pytest.approx(-c.difference.estimate)
    assert 'no units' in compare(a, b).difference.method


def test_units_whose_mean_is_not_the_metric_are_not_used():
    a, b = arm('full_student'), arm('full_kd')
    units = units_of(a + b)
    assert 'no units' in compare(a, b, units.assign(value=units['value'] * 2)).difference.method
    assert 'no units' in compare(a, b, units[units['run_id'] != a[0]['run_id']]).difference.method


def test_runs_scored_on_other_units_are_refused():
    a, b = arm('full_student'), arm('full_kd')
    units = units_of(a + b)
    renamed = units.assign(unit=np.where(units['arm'] == 'full_kd', 'X' + units['unit'], units['unit']))
    c = compare(a, b, renamed)
    assert c.difference is None and 'same units' in c.reasons['difference'] and c.speedup


def test_null_accuracy_gives_its_reason_and_times_stay():
    b = [r | dict(primary=r['primary'] | {'value': None}, reasons={'primary.value': 'random weights'}) for r in arm('full_kd')]
    c = compare(arm('full_student'), b)
    assert c.difference is None and 'random weights' in explain(c) and set(c.speedup) == {'train_s', 'total_s'}


def test_null_time_gives_a_reason_and_the_other_stays():
    b = [r | dict(time=r['time'] | {'total_s': None}) for r in arm('full_kd')]
    c = compare(arm('full_student'), b)
    assert set(c.speedup) == {'train_s'} and 'total_s is null' in c.reasons['total_s']


def test_speedup_above_one_means_b_is_faster():
    c = compare(arm('full_kd', train_s=20.), arm('mixed_kd', train_s=10.))
    assert c.speedup['train_s'].estimate > 1.9 and 'training 1.9' in explain(c)


def test_better_and_worse_follow_the_metrics_direction():
    assert '(better)' in explain(compare(arm('full_student', value=.7), arm('full_kd', value=.8)))
    assert '(worse)' in explain(compare(arm('full_student', value=.7, higher=False, metric='loss'), arm('full_kd', value=.8, higher=False, metric='loss')))


def test_a_single_seed_and_two_commits_are_said():
    text = explain(compare(arm('full_student', (0,)), arm('full_kd', (0,), git=f'{"ab" * 20}-dirty')))
    assert 'A single seed' in text and 'more than one git commit: ababababab-dirty, c0' in text
    assert 'commit' not in explain(compare(arm('full_student'), arm('full_kd')))


def test_a_factor_that_the_machine_did_not_vary_is_said():
    a, b = make_record('baseline'), make_record('parallel_baseline', ranks=1)
    b = b | dict(settings=a['settings'], factors=a['factors'], parallel=a['parallel'])
    assert differences(a, b) == {} and 'ranks was not varied on this machine' in explain(compare([a], [b]))


def test_difference_table_names_the_factor_each_setting_is_part_of():
    t = difference_table(compare(arm('full_student'), arm('full_kd', batch_size=16))).set_index('setting')['part of']
    assert t['kd'] == 'a factor' and t['alpha'] == 'kd' and t['batch_size'] == ''
    by_seed = difference_table(compare(arm('parallel_baseline'), arm('full_student'))).set_index('setting')
    assert by_seed.loc['teacher_run_id', 'full_student'] == 'by seed' and by_seed.loc['student_layers', 'part of'] == 'network'


def test_three_procedures_alone_are_compared_directly_and_labelled():
    t = chain_table(study_comparisons([r for m in PROCEDURES for r in arm(m)])).set_index(['a', 'b'])
    assert t.loc[('baseline', 'full_kd'), 'label'] == 'not one factor: network, kd, ranks differ'
    assert t.loc[('baseline', 'mixed_kd'), 'label'] == 'not one factor: network, precision, kd, ranks differ'
    assert t.loc[('full_kd', 'mixed_kd'), 'factor'] == 'precision' and len(t) == 3


def test_all_seven_modes_and_a_variant():
    runs = [r for m in MODES for r in arm(m)]
    runs += [make_record('full_kd', s, .71, 11., arm='hot', temperature=8.) for s in (0, 1)]
    found = study_comparisons(runs, units_of(runs))
    assert [k for k, _ in found] == ['chain'] * 4 + ['control'] * 3 + ['procedures'] * 2 + ['variant']
    hot = found[-1][1]
    assert (hot.a, hot.b, hot.seeds) == ('full_kd', 'hot', (0, 1)) and hot.attribution.factor is None and list(hot.attribution.others) == ['temperature']


def test_an_empty_study_has_no_comparisons():
    assert study_comparisons([]) == [] and len(chain_table([])) == 0

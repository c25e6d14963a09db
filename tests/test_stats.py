"""Intervals: against scipy and statsmodels, against values worked by hand, and at their edges."""

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from scipy import stats as scipy_stats
from kdnotes.stats.intervals import (
    Interval,
    StatsError,
    _resampled,
    bootstrap_interval,
    crossed_interval,
    crossed_moments,
    difference_interval,
    draw_counts,
    cluster_interval,
    mean_interval,
    mean_squares,
    ratio_interval,
    score_interval,
    studentised_limits,
    wilson_limits,
)
from kdnotes.core.render import MINUS, FormatError, number_texts, p_equals, p_text, reason


def as_float(text):
    return float(text.replace(MINUS, '-'))


def crossed(seeds, units, spread, seed=0, mean=0.0):
    rng = np.random.default_rng(seed)
    return mean + sum(
        rng.normal(0, s, size) for s, size in zip(spread, ((seeds, 1), (1, units), (seeds, units)))
    )


@pytest.mark.parametrize('n', [2, 3, 10])
def test_mean_interval_is_scipys(n):
    x = np.random.default_rng(n).normal(5, 2, n)
    i = mean_interval(x)
    theirs = scipy_stats.ttest_1samp(x, 0).confidence_interval()
    assert (i.low, i.high) == pytest.approx(tuple(theirs), rel=1e-10)
    assert (i.n, i.df, i.level) == (n, n - 1, 0.95)


def components(ms, shape):
    "Variances of seeds, units and the rest."
    return (ms[0] - ms[2]) / shape[1], (ms[1] - ms[2]) / shape[0], ms[2]


def test_components_are_those_of_a_mixed_model():
    """Balanced data with positive components: REML and the method of moments agree."""
    import pandas as pd
    import statsmodels.formula.api as smf

    y = crossed(5, 12, (1.0, 2.0, 0.5), seed=3)
    long = pd.DataFrame([dict(seed=s, unit=u, value=y[s, u], one=1) for s in range(5) for u in range(12)])
    model = smf.mixedlm(
        'value ~ 1', long, groups='one', vc_formula={'seed': '0 + C(seed)', 'unit': '0 + C(unit)'}
    ).fit()
    assert components(mean_squares(y)[1], y.shape) == pytest.approx((*model.vcomp, model.scale), rel=1e-3)
    # and the standard error of the grand mean
    assert crossed_interval(y).se == pytest.approx(float(model.bse.iloc[0]), rel=1e-3)


def test_crossed_interval_by_hand():
    i = crossed_interval([[1, 2], [3, 6]])  # mean squares 9, 4, 1
    half = scipy_stats.t.ppf(0.975, 1) * 3**0.5  # both have one degree of freedom
    assert (i.estimate, i.low, i.high) == pytest.approx((3, 3 - half, 3 + half)) and (i.n, i.units) == (2, 2)
    # row means 2, 5, column means 2, 4, 4.5: mean squares 13.5, 3.5, .5, so that the variance is 16.5 / 6
    y = np.array([[1, 2, 3], [3, 6, 6]])
    few, many = (scipy_stats.t.ppf(0.975, df) for df in (1, 2))
    half = ((13.5 * few**2 + 3 * many**2) / 6) ** 0.5
    for found in (crossed_interval(y), crossed_interval(y.T)):  # the fewer keep their whole mean square
        assert (found.low, found.high) == pytest.approx((3.5 - half, 3.5 + half))
        assert (found.df, found.df_rest, found.df_share) == pytest.approx((1, 2, 13.5 / 16.5))


def test_a_component_below_zero_counts_as_zero():
    y = np.array([[0.0, 1, 0, 1, 1], [1, 1, 0, 0, 1]])
    ms = mean_squares(y)[1]
    assert ms[0] < ms[2] < ms[1]
    i = crossed_interval(y)
    assert i.df_share == 0 and i.low == pytest.approx(mean_interval(y.mean(0)).low)
    # seeds that are not quite alike, and less apart than luck would have them: they still have a part
    y = crossed(3, 20, (0.0, 0.3, 0.3), seed=1)
    ms, i = mean_squares(y)[1], crossed_interval(y)
    assert 0 < ms[0] < ms[2] < ms[1] and i.se == pytest.approx(mean_interval(y.mean(0)).se)
    assert i.df_share == pytest.approx(ms[0] / ms[1]) and i.low < mean_interval(y.mean(0)).low
    both = crossed_interval([[0.0, 1], [1, 0]])  # no effect of seeds or units at all: the rest alone
    assert both.df == 1 and both.high == pytest.approx(0.5 + scipy_stats.t.ppf(0.975, 1) * 0.5)


def test_the_crossed_interval_is_never_narrower_than_either_alone():
    for seed in range(50):
        y = crossed(3, 20, (0.05, 0.1, 0.3), seed)
        i = crossed_interval(y)
        assert i.se**2 >= max(y.mean(1).var(ddof=1) / 3, y.mean(0).var(ddof=1) / 20) * (1 - 1e-9)
        assert i.low <= min(mean_interval(y.mean(axis)).low for axis in (0, 1)) + 1e-12


def test_what_cannot_be_known_is_null_with_a_reason():
    for i in (
        mean_interval([3.0]),
        crossed_interval([[3.0]]),
        ratio_interval([3.0], [1.0]),
        bootstrap_interval([[3.0]], np.random.default_rng(0)),
    ):
        assert (i.estimate, i.low, i.high) == (pytest.approx(3), None, None)
        assert i.reason == reason('one_value')
        assert f'{i:.1f}' == '3.0'


def test_one_seed_or_one_unit_is_said():
    row = crossed_interval([[1.0, 2, 4]])
    column = crossed_interval([[1.0], [2], [4]])
    assert 'one seed' in row.method and 'one unit' in column.method and row.n == 1 and column.n == 3
    assert row.low == column.low == pytest.approx(mean_interval([1, 2, 4]).low)
    assert 'one seed' in bootstrap_interval([[1.0, 2, 4]], np.random.default_rng(0)).method


def test_paired_difference_is_the_paired_t_test_for_one_seed_and_has_a_direction():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(1, 40))
    b = rng.normal(0.5, 1, size=(1, 40))
    i = crossed_interval(b - a)
    theirs = scipy_stats.ttest_rel(b[0], a[0]).confidence_interval()
    assert (i.low, i.high) == pytest.approx(tuple(theirs), rel=1e-10)
    back = crossed_interval(a - b)
    assert (back.estimate, back.low, back.high) == pytest.approx((-i.estimate, -i.high, -i.low))


def test_order_of_seeds_and_units_does_not_matter():
    y = crossed(4, 9, (0.1, 0.2, 0.3))
    rng = np.random.default_rng(1)
    i = crossed_interval(y)
    j = crossed_interval(y[rng.permutation(4)][:, rng.permutation(9)])
    assert (i.low, i.high, i.df) == pytest.approx((j.low, j.high, j.df))


def test_ratio_interval_is_a_paired_t_on_logs():
    a = np.array([30.0, 33, 29, 41])
    b = np.array([17.0, 16, 18, 20])
    i = ratio_interval(a, b)
    theirs = scipy_stats.ttest_rel(np.log(a), np.log(b)).confidence_interval()
    assert (i.low, i.high) == pytest.approx(tuple(np.exp(theirs)), rel=1e-10)
    assert i.estimate == pytest.approx(np.exp(np.log(a / b).mean()))
    assert ratio_interval([2.0, 2], [1.0, 1]).low == pytest.approx(2)


def test_bootstrap_takes_its_draws_from_the_generator_alone_and_keeps_units_joint():
    y = crossed(3, 40, (0.1, 0.2, 0.1))
    np.random.seed(0)
    first = bootstrap_interval(y, np.random.default_rng(5))
    np.random.seed(1)
    assert bootstrap_interval(y, np.random.default_rng(5)) == first
    assert bootstrap_interval(y, np.random.default_rng(6)) != first
    # units drawn for each seed apart would make the unit effect average out over seeds
    crossed_units = crossed(3, 40, (0, 1.0, 0))

    def spread(matrix):
        seeds, units = draw_counts(matrix.shape, np.random.default_rng(0), 4000)
        return np.std(((seeds @ matrix) * units).sum(1) / matrix.size)

    three = spread(crossed_units)
    alone = spread(crossed_units[:1])
    assert three == pytest.approx(alone, rel=0.05)


def test_resampled_moments_are_those_of_the_drawn_matrix():
    """Counts in the formulas give what the matrix of the drawn rows and columns gives."""
    y = crossed(4, 7, (0.3, 0.5, 0.2))
    y -= y.mean()
    seeds, units = draw_counts(y.shape, np.random.default_rng(0), 20)
    mean, se = _resampled(y, seeds, units)
    for k in range(20):
        drawn = np.repeat(np.repeat(y, seeds[k].astype(int), axis=0), units[k].astype(int), axis=1)
        i = crossed_interval(drawn)
        assert (mean[k], se[k]) == pytest.approx((i.estimate, i.se), abs=1e-12)


def test_studentised_limits_turn_the_quantiles_over():
    """Right-skewed data: the interval reaches further to the right than to the left."""
    y = np.random.default_rng(0).exponential(size=(1, 30))
    i = bootstrap_interval(y, np.random.default_rng(0), 4000)
    assert i.high - i.estimate > 1.2 * (i.estimate - i.low) and 'studentised' in i.method


def test_a_bootstrap_has_2000_resamples_where_nobody_says():
    y = np.random.default_rng(0).normal(size=(3, 20))
    usual, said = (bootstrap_interval(y, np.random.default_rng(0), *n) for n in ((), (2000,)))
    assert usual == said


def test_studentised_limits_move_with_the_values():
    "A spread that is small beside the mean is a spread."
    y = np.random.default_rng(0).normal(size=(3, 20))
    drawn = draw_counts(y.shape, np.random.default_rng(1), 500)
    low, high = studentised_limits(y, *drawn)
    assert low < y.mean() < high
    far = 1e7
    assert studentised_limits(y + far, *drawn) == pytest.approx((low + far, high + far), abs=1e-6, rel=0)


@pytest.mark.parametrize('scale', [1.0, 0.1, 0.7, 1 / 3, 1e-6, 1e6])
def test_a_resample_without_spread_has_no_standard_error(scale):
    """Three values that are not zero among 711: many resamples hold zeros alone,
    and rounding must not make a huge ratio of them.
    """
    y = np.zeros((3, 237))
    y[[0, 1, 2], [5, 40, 77]] = 0.25, -0.1, -0.3
    y = scale * y - (scale * y).mean()
    seeds, units = draw_counts(y.shape, np.random.default_rng(0), 2000)
    mean, se = _resampled(y, seeds, units)
    drawn = seeds[:, [0, 1, 2]] * units[:, [5, 40, 77]]
    assert (se[(drawn == 0).all(1)] == 0).all() and (se[(drawn > 0).any(1)] > 0).all()
    i = bootstrap_interval(y, np.random.default_rng(0))
    assert i.low is None and i.high is None
    assert i.reason == reason('resamples_without_spread', seeds=3, units=237)
    many = np.random.default_rng(1).normal(size=(3, 237)) * scale  # nothing changes where there is spread
    mean, se = _resampled(many - many.mean(), np.ones((1, 3)), np.ones((1, 237)))
    assert se[0] == pytest.approx(crossed_interval(many).se)


@pytest.mark.parametrize('shape', [(3, 237), (5, 122), (2, 7)])
def test_equal_mean_squares_are_equal_whatever_the_scale_and_the_place(shape):
    """One value that is not zero: all three mean squares are equal, and the tie keeps both components."""
    S, U = shape
    for scale in (1.0, 3.0, 0.1, 0.7, 1 / 3, 1e-5):
        for s, u in ((0, 0), (S - 1, U // 2), (1, U - 1)):
            y = np.zeros(shape)
            y[s, u] = scale
            i = crossed_interval(y)
            assert (i.df, i.df_share) == (S - 1, pytest.approx(1, rel=1e-6))
            assert i.se == pytest.approx(abs(i.estimate), rel=1e-6)


def test_many_matrices_at_once_are_many_times_one():
    stack = np.stack([crossed(3, 9, (0.1, 0.2, 0.3), k) for k in range(5)])
    mean, variance, share = crossed_moments(stack)
    for k, y in enumerate(stack):
        i = crossed_interval(y)
        assert (i.estimate, i.se**2, i.df_share) == pytest.approx((mean[k], variance[k], share[k]))


def side(x, null):
    return int(x > null) - int(x < null)


NEAR = st.one_of(st.just(0.0), st.floats(1e-11, 2.0), st.floats(-2.0, -1e-11))  # away from the null


@given(
    st.lists(NEAR, min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0, 0.05]),
    st.sampled_from(['.2f', '.3f', '+.4f', '+z.3f', ',.0f', '.3g']),
)
@example([-0.0003, -0.0151, 0.0145], 0.0, '+.3f')
@example([0.0005, -0.0004, 0.0015], 0.0, '+.3f')
@example([-0.0004], 0.05, '.3f')
@example([-0.99999], 1.0, '+.4f')
def test_a_printed_number_is_on_its_own_side(away, null, spec):
    numbers = [null + x for x in away]
    texts = number_texts(numbers, spec, null)
    printed = [side(as_float(t), null) for t in texts]
    exact = [side(x, null) if abs(x - null) > 1e-12 * 4 else 0 for x in numbers]
    # an estimate between bounds on two sides is on neither, as far as anybody knows
    first = int(len(exact) == 3 and exact[1] * exact[2] < 0)
    assert printed[first:] == exact[first:]
    assert not any(as_float(t) == 0 and t[0] in f'+-{MINUS}' for t in texts), '0 has no sign'
    if spec.endswith('f'):
        assert len({len(t.partition('.')[2]) for t in texts}) == 1, 'as many digits for all'


def test_a_p_that_reads_as_the_level_says_on_which_side_it_is():
    values = (0.05003, 0.04997, 0.0496, 0.0504, 0.05, 0.0004)
    assert [p_text(p) for p in values] == ['> .05', '< .05', '.0496', '.0504', '.05', '< .001']
    assert [p_equals(p) for p in values[:3]] == ['p > .05', 'p < .05', 'p = .0496']
    others = (0.2345, 0.0336, 0.005, 0.001, 0.9999, 1.0, None)
    assert [p_text(p) for p in others] == ['.23', '.034', '.005', '.001', '> .99', '> .99', '-']


def test_digits_are_added_only_where_they_are_needed():
    assert f'{Interval(0.0123, -0.0301, 0.0546, 3, 0.95, "t"):+.3f}' == f'+0.012 [{MINUS}0.030, +0.055]'
    assert (
        f'{Interval(1.0003, 0.98, 1.02, 3, 0.95, "t", null=1.0):.2f}' == '1.000 [0.980, 1.020]'
        and f'{Interval(1.0003, 0.98, 1.02, 3, 0.95, "t"):.2f}' == '1.00 [0.98, 1.02]'
    )
    assert f'{ratio_interval([1.0003, 1.0003], [1.0, 1.0]):.2f}' == '1.0003 [1.0003, 1.0003]'
    assert number_texts([0.0, float('nan'), float('inf'), None], '+.2f') == ['0.00', '+nan', '+inf', None]


@pytest.mark.parametrize(
    'low, high, null, excludes',
    [
        (0.1, 0.3, 0, True),
        (-0.3, -0.1, 0, True),
        (0, 0.3, 0, False),
        (-0.1, 0.3, 0, False),
        (0.7, 0.9, 1, True),
    ],
)
def test_an_interval_excludes_what_is_on_neither_limit_nor_between(low, high, null, excludes):
    interval = Interval((low + high) / 2, low, high, 5, 0.95, 't', null=null)
    assert interval.excludes_null is excludes
    assert not mean_interval([0.2]).excludes_null


def test_what_every_interval_says_of_itself():
    assert mean_interval([5]) == Interval(5.0, None, None, 1, 0.95, 'one value', reason=reason('one_value'))
    mean = mean_interval([1, 2, 3])
    half = scipy_stats.t.ppf(0.975, 2) / 3**0.5
    assert (mean.low, mean.high, mean.se) == pytest.approx((2 - half, 2 + half, 3**-0.5))
    assert mean == Interval(
        2.0, mean.low, mean.high, 3, 0.95, 'Student t over runs', df=2.0, se=mean.se, null=0.0
    )
    equal = mean_interval([2, 2])
    assert equal == Interval(2.0, 2.0, 2.0, 2, 0.95, 'Student t over runs', df=1.0, se=0.0)

    alone = dict(units=1, reason=reason('one_value'))
    for one in (crossed_interval([[5]]), bootstrap_interval([[5]], np.random.default_rng(0))):
        assert one == Interval(5.0, None, None, 1, 0.95, 'one value', **alone)
    units = crossed_interval([[1, 2, 3]])
    assert units == Interval(
        2.0,
        mean.low,
        mean.high,
        1,
        0.95,
        'Student t over units of one seed',
        units=3,
        df=2.0,
        se=mean.se,
    )
    seeds = crossed_interval([[1], [2], [3]])
    assert (seeds.n, seeds.units, seeds.low) == (3, 1, pytest.approx(mean.low))
    assert seeds.method == 'Student t over seeds of one unit'
    both = crossed_interval(crossed(3, 4, (1, 1, 1)))
    assert (both.n, both.units, both.level) == (3, 4, 0.95)
    assert both.method == 'two-way random effects, seeds crossed with units, t limits of both in quadrature'


@pytest.mark.parametrize(
    'seeds, over',
    [(1, 'units of one seed'), (3, 'units and seeds')],
)
def test_what_a_bounded_interval_says_of_itself(seeds, over):
    matrix = np.zeros((seeds, 40))
    matrix[0, 7] = 0.5
    found = difference_interval(matrix, np.random.default_rng(0), bound=1.0)
    assert found.method == f'bounded mean over {over}'
    assert (found.estimate, found.n, found.units, found.level) == (matrix.mean(), seeds, 40, 0.95)
    assert found.low < found.estimate < found.high


def test_what_a_ratio_says_of_itself():
    ratio = ratio_interval([2, 4, 8], [1, 1, 2])
    logs = mean_interval(np.log([2, 4, 4]))
    assert ratio == Interval(
        pytest.approx(32 ** (1 / 3)),
        pytest.approx(np.exp(logs.low)),
        pytest.approx(np.exp(logs.high)),
        3,
        0.95,
        'Student t over pairs, log scale',
        df=2.0,
        se=logs.se,
        null=1.0,
    )
    assert ratio_interval([3], [2]) == Interval(
        pytest.approx(1.5),
        None,
        None,
        1,
        0.95,
        'one value',
        reason=reason('one_value'),
        null=1.0,
    )


def test_what_a_bootstrap_says_of_itself():
    y = crossed(3, 6, (1, 1, 1))
    both = bootstrap_interval(y, np.random.default_rng(0), 200)
    limits = studentised_limits(y, *draw_counts((3, 6), np.random.default_rng(0), 200))
    method = 'studentised bootstrap over seeds and units'
    assert both == Interval(float(y.mean()), *limits, 3, 0.95, method, units=6)
    one = bootstrap_interval(y[:1], np.random.default_rng(0))
    assert (one.n, one.units, one.level) == (1, 6, 0.95) and one.low < one.estimate < one.high
    assert one.method == 'studentised bootstrap over units of one seed'
    seeds, units = draw_counts((3, 6), np.random.default_rng(0))
    assert seeds.shape == (2000, 3) and units.shape == (2000, 6)
    assert (seeds.sum(1) == 3).all() and (units.sum(1) == 6).all()
    few = bootstrap_interval(np.array([[0, 0, 0, 1.0]]), np.random.default_rng(0))
    assert few == Interval(
        0.25,
        None,
        None,
        1,
        0.95,
        one.method,
        units=4,
        reason=reason('resamples_without_spread', seeds=1, units=4),
    )


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda: mean_interval(['a']), "values: could not convert string to float: 'a'"),
        (lambda: mean_interval([1, None]), 'values of shape (2,) must be finite numbers in 1 dimension(s)'),
        (lambda: mean_interval([]), 'values of shape (0,) must be finite numbers in 1 dimension(s), one at'),
        (lambda: crossed_interval([1, 2]), 'matrix of shape (2,) must be finite numbers in 2 dimension(s)'),
        (lambda: crossed_interval([[1, 2], [3]]), 'matrix: setting an array element with a sequence'),
        (lambda: ratio_interval([1, 1], [1, np.inf]), 'times_b of shape (2,) must be finite numbers'),
        (lambda: ratio_interval([1, 2], [1]), '2 and 1 times cannot be paired; keep the seeds both have'),
        (lambda: ratio_interval([1, 2], [0, 1]), 'times must be > 0 to have a ratio, got 0.0'),
    ],
)
def test_refusals(call, words):
    with pytest.raises(StatsError) as e:
        call()
    assert str(e.value).startswith(words)


def test_texts_by_default_and_without_limits():
    with pytest.raises(FormatError, match="'d' is no format of numbers with a precision"):
        number_texts([1.0], 'd')
    assert number_texts([0.5, -0.25]) == ['0.500', f'{MINUS}0.250']
    assert number_texts([1234.5], ',.1f') == ['1,234.5'] and number_texts([1234.5], '.2g') == ['1.2e+03']
    assert f'{mean_interval([5]):.2f}' == '5.00'


def test_both_tails_are_of_one_size_and_no_spread_has_no_variance():
    y = crossed(3, 6, (1, 1, 1))
    seeds, units = draw_counts((3, 6), np.random.default_rng(0), 400)
    mean, se = _resampled(y - y.mean(), seeds, units)
    own = _resampled(y - y.mean(), np.ones((1, 3)), np.ones((1, 6)))[1][0]
    low, high = np.quantile(mean / se, [0.025, 0.975], method='closest_observation')
    assert studentised_limits(y, seeds, units) == pytest.approx((y.mean() - high * own, y.mean() - low * own))
    assert crossed_moments(np.ones((2, 3)))[1:] == (0, 1)
    with pytest.raises(StatsError, match='^matrix of shape'):
        crossed_interval([1, 2])


def test_wilsons_limits_are_statsmodels():
    from statsmodels.stats.proportion import proportion_confint

    for right, n in ((150, 150), (149, 150), (0, 40), (7, 9), (50, 100)):
        theirs = proportion_confint(right, n, alpha=0.05, method='wilson')
        assert wilson_limits(right / n, n) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize('seeds', [1, 3])
def test_a_score_near_one_has_an_interval_that_covers_it_and_stays_on_its_scale(seeds):
    """An accuracy of .998 of 150 texts: where none is wrong the t interval is [1, 1]; it covers seldom."""
    rng = np.random.default_rng(0)
    covered = {'t': [], 'score': []}
    for _ in range(400):
        drawn = (rng.random((seeds, 150)) < 0.998).astype(float)
        for name, i in (('t', crossed_interval(drawn)), ('score', score_interval(drawn, 1.0))):
            covered[name].append(i.low <= 0.998 <= i.high)
            assert name == 't' or 0 <= i.low <= i.estimate <= i.high <= 1
    assert np.mean(covered['score']) > 0.94 > 0.75 > np.mean(covered['t'])


def test_a_score_near_an_end_by_hand():
    all_right = score_interval(np.ones((1, 150)), 1.0)
    z2 = scipy_stats.norm.ppf(0.975) ** 2
    assert (all_right.low, all_right.high) == pytest.approx((150 / (150 + z2), 1.0))
    assert all_right.se is None and 'Wilson' in all_right.method
    none_right = score_interval(np.zeros((1, 150)), 1.0)
    assert (none_right.low, none_right.high) == pytest.approx((0.0, z2 / (150 + z2)))
    # two seeds that differ: the distance over seeds is added in quadrature, and cut at 1
    y = np.ones((2, 150))
    y[0, :3] = 0
    low, _ = wilson_limits(0.99, 150)
    of_seeds = scipy_stats.t.ppf(0.975, 1) * np.std([0.98, 1.0], ddof=1) / 2**0.5
    i = score_interval(y, 1.0)
    assert (i.low, i.high) == pytest.approx((0.99 - np.hypot(0.99 - low, of_seeds), 1.0))
    # many units off both ends: the crossed interval, cut at the ends; without a bound it is not cut
    many = np.random.default_rng(0).random((2, 40)) * [[1.0], [0.2]]
    i, free = score_interval(many, 1.0), crossed_interval(many)
    assert (free.low < 0, free.high > 1, i.low, i.high) == (True, True, 0.0, 1.0)
    assert score_interval(many) == free
    with pytest.raises(StatsError, match='is not between 0 and 1'):
        score_interval(2 + many, 1.0)


def test_clusters_near_an_end_are_counted_and_not_their_values():
    right = cluster_interval([1.0] * 6, [0, 0, 0, 1, 1, 2], most=1.0)
    assert (right.low, right.high) == pytest.approx(wilson_limits(1.0, 3))
    mixed = cluster_interval([1.0, 0.0] * 60, np.arange(120) // 2, most=1.0)
    assert mixed == cluster_interval([1.0, 0.0] * 60, np.arange(120) // 2)

"Tests, effect sizes, likeness and power: by hand, against scipy and statsmodels, and at their edges."

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import integrate as scipy_integrate
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired
from kdnotes.core.render import reason
from kdnotes.stats.tests import (
    Family,
    _nct_cdf,
    crossed_test,
    effect_size,
    equivalence,
    flip_p,
    flips,
    holm,
    interval_test,
    permutation_test,
    seed_test,
    difference_and_test,
)
from kdnotes.stats.intervals import (
    Interval,
    StatsError,
    crossed_interval,
    mean_interval,
    ratio_interval,
)


def differences(seeds=5, units=80, spread=(0.02, 0.1, 0.1), mean=0.02, seed=0):
    rng = np.random.default_rng(seed)
    return mean + sum(
        s * rng.normal(size=n) for s, n in zip(spread, ((seeds, 1), (1, units), (seeds, units)))
    )


def test_the_primary_p_and_the_interval_are_one():
    for seed in range(40):
        d = differences(seed=seed)
        i = crossed_interval(d)
        t = crossed_test(d)
        assert (t.p < 0.05) == (i.low > 0 or i.high < 0)
        assert crossed_test(d, null=i.high).p == pytest.approx(0.05)
        wide = crossed_interval(d, level=1 - t.p)  # the interval of level 1 - p ends at the null
        assert min(abs(wide.low), abs(wide.high)) == pytest.approx(0, abs=1e-9)


def test_the_primary_p_by_hand():
    t = crossed_test([[1, 2], [3, 6]])  # mean 3, variance (9 + 4 - 1)/4, one degree of freedom each
    assert t.p == pytest.approx(2 * scipy_stats.t.sf(3**0.5, 1))
    # mean squares 13.5, 3.5, .5 of one, two and two degrees of freedom: the limit at 1 - p / 2 is the mean
    p = crossed_test([[1, 2, 3], [3, 6, 6]]).p
    few, many = (scipy_stats.t.isf(p / 2, df) for df in (1, 2))
    assert (13.5 * few**2 + 3 * many**2) / 6 == pytest.approx(3.5**2)


def test_a_far_p_keeps_its_digits():
    """Beside the t of both parts, between which it lies, and for both signs."""
    d = differences(3, 40, (0.05, 0.1, 0.1), mean=0.0)
    i = crossed_interval(d)
    for null in (5.0, -5.0, 1e4):
        t = crossed_test(d, null)
        few, many = (2 * scipy_stats.t.sf(abs(i.estimate - null) / i.se, df) for df in (2, 39))
        assert many <= t.p <= few and t.p == pytest.approx(crossed_test(-d, -null).p, rel=1e-9)


def drawn_tests(share, S, U, level, rng, n=60_000, of_units=0.16, of_rest=0.19):
    """Chance that the rule of the intervals, written again, rejects a true null: given its mean squares a
    mean is normal, so that its chance is known.
    """
    other = S * of_units**2 + of_rest**2
    of_seeds = share / (1 - share) * other
    a = (of_seeds + of_rest**2) * rng.chisquare(S - 1, n) / (S - 1)
    u = other * rng.chisquare(U - 1, n) / (U - 1)
    e = of_rest**2 * rng.chisquare((S - 1) * (U - 1), n) / ((S - 1) * (U - 1))
    whole = np.maximum(a, e) + np.maximum(u, e) - e
    few, many = (scipy_stats.t.isf(level / 2, df) for df in (S - 1, U - 1))
    reach = np.sqrt(a * few**2 + (whole - a) * many**2)
    return 2 * scipy_stats.norm.sf(reach / np.sqrt(of_seeds + other)).mean()


@pytest.mark.parametrize('seeds', [3, 5, 8])
def test_the_level_holds_far_out_whatever_the_seeds_share(seeds):
    rng = np.random.default_rng(seeds)
    for spread in ((0.16, 0.19), (0.0, 0.19), (0.16, 0.02)):
        for share in (0.0, 0.2, 0.5, 0.83, 0.9):
            for level in (0.05, 0.05 / 4, 0.05 / 7):
                found = drawn_tests(share, seeds, 237, level, rng, 20_000, *spread)
                assert found < 1.05 * level, (spread, share, level, found)
    # and the rule is the one in use
    d = differences(seeds, 40, (0.05, 0.1, 0.1))
    S, U = d.shape
    rest = d - d.mean(1, keepdims=True) - d.mean(0) + d.mean()
    a, u = U * d.mean(1).var(ddof=1), S * d.mean(0).var(ddof=1)
    e = (rest**2).sum() / ((S - 1) * (U - 1))
    for level in (0.05, 0.05 / 7):
        few, many = (scipy_stats.t.isf(level / 2, df) for df in (S - 1, U - 1))
        whole = max(a, e) + max(u, e) - e
        half = np.sqrt((a * few**2 + (whole - a) * many**2) / (S * U))
        assert crossed_interval(d, 1 - level).high == pytest.approx(d.mean() + half)


@given(
    st.integers(0, 10**6), st.integers(2, 6), st.integers(10, 60), st.integers(0, 16), st.floats(-0.4, 0.4)
)
def test_p_and_interval_are_one_rule_whatever_differs(seed, seeds, units, differ, shift):
    rng = np.random.default_rng(seed)
    d = np.zeros((seeds, units))
    where = d[:, : min(differ, units)]
    where += np.clip(shift + 0.2 * rng.normal(size=where.shape), -1, 1)
    interval, test = difference_and_test(d, rng, 1.0)
    if test.p is not None and abs(test.p - 0.05) > 1e-9:
        assert (test.p < 0.05) == (interval.low > 0 or interval.high < 0)
        assert 0 <= test.p <= 1


def test_flips_of_a_sum_of_nothing_are_all_as_far_out():
    """Rounding leaves 5e-17 of .1 + .2 - .3, which is no less than nothing."""
    assert permutation_test([[0.1, 0.2, -0.3]], None).p == 1
    x = np.random.default_rng(0).normal(size=30)
    assert permutation_test([np.r_[x, -x]], np.random.default_rng(1), 999).p == 1
    assert permutation_test([[1.0, -1.0]], None).p == 1 and seed_test([1.0, -1.0] * 4).p == 1


def test_a_p_is_scipys_where_only_one_side_varies():
    x = np.random.default_rng(0).normal(0.3, 1, 9)
    assert interval_test(mean_interval(x)).p == pytest.approx(scipy_stats.ttest_1samp(x, 0).pvalue)
    a = np.exp(x)
    b = np.ones(9)
    assert interval_test(ratio_interval(a, b), 1.0, log=True).p == pytest.approx(
        scipy_stats.ttest_rel(np.log(a), np.log(b)).pvalue
    )
    assert crossed_test(np.tile(x[:, None], (1, 4))).p == pytest.approx(
        scipy_stats.ttest_1samp(x, 0).pvalue, rel=1e-4
    )


def test_no_p_without_other_seeds_or_spread():
    one = crossed_test([[0.1, 0.2, 0.4]])
    assert one.p is None and one.reason == reason('one_seed')
    assert crossed_test(np.zeros((3, 5))).p == 1 and crossed_test(np.full((3, 5), 0.1)).p is None
    assert interval_test(mean_interval([0.3])).reason == reason('one_value')


@pytest.mark.parametrize('n', [3, 8, 14])
def test_exact_permutation_is_scipys(n):
    d = np.random.default_rng(n).normal(0.3, 1, (4, n))
    theirs = scipy_stats.permutation_test(
        (d.mean(0),), np.mean, permutation_type='samples', n_resamples=np.inf
    )
    assert permutation_test(d, None).p == pytest.approx(theirs.pvalue)


def test_permutation_by_hand_and_with_ties():
    # every sum is 1 or 3 away
    assert (
        permutation_test([[1.0, 2, 3]], None).p == 2 / 8 and permutation_test([[1.0, 1, -1]], None).p == 1.0
    )
    # sums that differ by rounding alone are equal
    assert permutation_test([[0.1, 0.2, 0.3]], None).p == 2 / 8
    assert permutation_test(np.zeros((2, 30)), None).p == 1


def test_random_permutation_is_close_to_the_exact_one_and_never_zero():
    d = differences(units=18, mean=0.03)
    exact = (abs(flip_signs(18) @ d.mean(0)) >= abs(d.mean(0).sum()) - 1e-12).mean()
    p = permutation_test(d, np.random.default_rng(0), 20000)
    assert p.p == pytest.approx(exact, abs=4 * (exact / 20000) ** 0.5 + 1e-3)
    assert permutation_test(d, np.random.default_rng(0), 500) == permutation_test(
        d, np.random.default_rng(0), 500
    )
    sure = permutation_test(np.ones((2, 60)), np.random.default_rng(0), 999)
    assert sure.p == 1 / 1000
    with pytest.raises(StatsError, match='give a random generator'):
        permutation_test(d, None)


def flip_signs(n):
    return 1.0 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)


def test_many_rows_at_once():
    d = np.random.default_rng(1).normal(0.2, 1, (6, 10))
    assert flip_p(d, flips(10, None)) == pytest.approx([permutation_test(row[None], None).p for row in d])
    many = np.random.default_rng(1).normal(0.1, 1, (3, 40))
    signs = flips(40, np.random.default_rng(2), 999)
    assert flip_p(many, signs) == pytest.approx(
        [permutation_test(row[None], np.random.default_rng(2), 999).p for row in many]
    )


def test_few_seeds_are_refused_with_the_least_p():
    for n in range(1, 8):
        t = seed_test([0.1] * n)
        assert t.p is None and t.reason == reason('too_few_seeds', n=n, least=2 / 2**n, needed=8)
    x = np.random.default_rng(0).normal(0.5, 1, 9)
    assert seed_test(x).p == pytest.approx(
        scipy_stats.permutation_test((x,), np.mean, permutation_type='samples', n_resamples=np.inf).pvalue
    )
    assert seed_test(np.arange(1.0, 9)).p == 2 / 2**8


def test_holm_is_statsmodels():
    p = dict(a=0.004, b=0.03, c=0.011, d=0.6)
    assert list(holm(p).values()) == pytest.approx(multipletests(list(p.values()), method='holm')[1])
    assert holm(dict(a=0.01, b=0.04, c=0.03)) == pytest.approx(dict(a=0.03, b=0.06, c=0.06))
    untested = holm(p | dict(d=None))
    assert untested['d'] is None and untested['a'] == pytest.approx(4 * 0.004)  # still four members
    with pytest.raises(StatsError, match='each once'):
        Family('twice', ('a', 'a'))


@pytest.mark.parametrize(
    'values',
    [
        np.random.default_rng(0).normal(0.5, 1, 20),
        10 + 0.1 * np.random.default_rng(0).normal(size=237),  # a noncentrality of 1,500
        [1.0, 1.1, 1.2, 1.15, 1.05],  # 4 degrees of freedom, where a normal approximation is off by .02
    ],
)
def test_effect_size_interval_is_the_noncentral_t(values):
    x = np.asarray(values)
    n, e = len(x), effect_size(x)
    t = e.estimate * n**0.5
    assert e.estimate == pytest.approx(x.mean() / x.std(ddof=1))
    found = [scipy_stats.nct.cdf(t, n - 1, limit * n**0.5) for limit in (e.low, e.high)]
    assert found == pytest.approx([0.975, 0.025], abs=1e-6)
    back = effect_size(-x)
    assert (back.estimate, back.low, back.high) == pytest.approx((-e.estimate, -e.high, -e.low), abs=1e-6)


def test_an_effect_size_of_two_seeds_that_nearly_agree():
    "Scipy has no number for one of the limits."
    two = effect_size([0.0100, 0.0102])
    assert 0 < two.low < two.estimate < two.high
    for limit, q in ((two.low, 0.975), (two.high, 0.025)):
        nc, t = limit * 2**0.5, two.estimate * 2**0.5
        at_most_t = scipy_integrate.quad(
            lambda z, t=t, nc=nc: scipy_stats.norm.pdf(z) * scipy_stats.chi2.sf(max((z + nc) / t, 0) ** 2, 1),
            -9,
            9,
            points=[-nc] if abs(nc) < 9 else None,
        )[0]
        assert at_most_t == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize(
    'values', [np.full(3, 0.1), np.full(7, -1 / 3), np.zeros(5), 0.7 + np.zeros(237), [0.3]]
)
def test_equal_differences_have_no_effect_size(values):
    e = effect_size(values)
    assert np.isnan(e.estimate) and e.low is None and e.high is None
    assert e.reason == reason('no_spread' if len(values) > 1 else 'one_value')
    assert effect_size(values) == e  # one comparison is equal to itself


def test_the_noncentral_t_is_scipys_wherever_it_has_a_number():
    for t, df, nc in (
        (29.4, 4, 31.0),
        (40.0, 4, 40.0),
        (-35.0, 2, -33.0),
        (310.0, 236, 300.0),
        (5.0, 7, 1.0),
    ):
        assert _nct_cdf(t, df, nc) == scipy_stats.nct.cdf(t, df, nc)
    assert np.isnan(scipy_stats.nct.cdf(-40.0, 2, 31.0)) and _nct_cdf(-40.0, 2, 31.0) == pytest.approx(
        0, abs=1e-3
    )


def as_if_of_two(x):
    return Interval(x.mean(), None, None, 2, 0.95, '', se=x.std(ddof=1) / len(x) ** 0.5, df=len(x) - 1.0)


@pytest.mark.parametrize('shift', [-0.06, -0.02, 0.0, 0.04])
def test_equivalence_is_statsmodels(shift):
    rng = np.random.default_rng(1)
    a = rng.normal(0.7, 0.1, 50)
    b = a + shift + rng.normal(0, 0.05, 50)
    p, (_, above, _), _ = ttost_paired(b, a, -0.05, 0.05)
    e = equivalence(as_if_of_two(b - a), 0.05)
    assert (e.p_equivalent, e.p_noninferior) == pytest.approx((p, above))
    lower = equivalence(as_if_of_two(b - a), 0.05, higher_is_better=False)
    assert lower.p_equivalent == pytest.approx(p) and lower.p_noninferior == pytest.approx(
        equivalence(as_if_of_two(a - b), 0.05).p_noninferior
    )


def test_equivalence_is_the_ninety_percent_interval_within_the_margin():
    for seed in range(40):
        d = differences(seed=seed, mean=0.02)
        i = crossed_interval(d, 0.9)
        e = equivalence(crossed_interval(d), 0.05)
        assert e.equivalent == (-0.05 < i.low and i.high < 0.05) and e.noninferior == (i.low > -0.05)


def test_likeness_needs_seeds_a_spread_and_a_margin():
    one = crossed_interval([[0.1, 0.2, 0.1]])
    same = [crossed_interval(np.full((3, 4), x)) for x in (0.0, 0.1, -0.1)]
    for i, why in ((one, 'one_seed'), *((i, 'no_spread') for i in same)):
        e = equivalence(i, 0.05)
        assert e.p_equivalent is e.p_noninferior is e.equivalent is e.noninferior is None
        assert e.reason == reason(why)
    assert equivalence(crossed_interval(differences()), 0.05).reason is None

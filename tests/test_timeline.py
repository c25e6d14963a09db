"What a record keeps of a run's samples and gradients."

import json
import pytest
from kdnotes.telemetry.summary import TRACE, compact_gradients, compact_timeline


def samples(n, step=0.5, **values):
    return [
        dict(elapsed_s=step * i, rank=0) | dict.fromkeys(TRACE) | {k: v(i) for k, v in values.items()}
        for i in range(n)
    ]


def row(step, counts=(1, 2, 3), first=-25, zero=0.25):
    return dict(
        kind='gradients',
        step=step,
        scale=1.0,
        scaled=False,
        layers=[
            dict(
                layer='head',
                elements=8,
                zero=zero,
                not_finite=0.0,
                largest=1.0,
                plain={},
                scaled={},
                log2_from=first,
                log2_counts=list(counts),
            )
        ],
    )


@pytest.mark.parametrize('n, points', [(1, 1), (2, 2), (59, 59), (61, 60), (5000, 60)])
def test_never_more_than_asked_and_always_json(n, points):
    line = compact_timeline(samples(n, cpu_percent=lambda i: 50.0, host_mib=float))
    assert (
        len(line) <= points
        and len(line) >= min(points, n) - 1
        and json.loads(json.dumps(line, allow_nan=False)) == line
    )
    assert max(p['host_mib'] for p in line) == n - 1 and {p['power_w'] for p in line} == {None}


@pytest.mark.parametrize('n, steps', [(1, [0]), (2, [0, 10]), (10, [0, 40, 90])])
def test_gradients_are_kept_at_the_first_and_last_step(n, steps):
    assert [c['step'] for c in compact_gradients([row(s) for s in range(0, 10 * n, 10)])] == steps


def test_a_step_done_again_after_a_resume_counts_once():
    found = compact_gradients([row(10), row(20, zero=0.5), dict(kind='resume', step=10), row(20)])
    assert [c['step'] for c in found] == [10, 20] and found[1]['layers'][0]['zero'] == 0.25


@pytest.mark.parametrize(
    'first, counts, start, shares',
    [
        (-25, (1, 2, 3), -26, [1 / 8, 5 / 8]),
        (-24, (1, 2, 3), -24, [3 / 8, 3 / 8]),
        (-24, (4, 2), -24, [6 / 8]),
        (0, (), 0, []),
    ],
)
def test_bins_are_two_exponents_wide_from_an_even_one(first, counts, start, shares):
    layer = compact_gradients([row(1, counts, first)])[0]['layers'][0]
    assert (layer['log2_from'], layer['shares']) == (start, shares)

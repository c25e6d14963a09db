"""Many cases of a kind: `make test` shows one of each, `make test-all` the others too.

@pytest.mark.parametrize('at', one_of_each(range(1, 33)))                           # the first alone
@pytest.mark.parametrize('run', one_of_each(RUNS, kind=lambda run: run.dtype))      # the first of each
"""

from collections.abc import Callable, Iterable
import pytest


def one_of_each(
    cases: Iterable,  # as `parametrize` takes them
    kind: Callable = lambda case: None,  # what a case is a case of; None: all are of one kind
) -> list:
    "The same cases; all but the first of each kind are marked as exhaustive."
    marked = []
    seen = set()
    for case in cases:
        of = kind(case)
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.exhaustive) if of in seen else case)
        seen.add(of)
    return marked

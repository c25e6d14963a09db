"Which tests are run: one of each kind, or a share of all."

from types import SimpleNamespace
import pytest
from conftest import pytest_collection_modifyitems
from conftest import read_share
from kinds import one_of_each


def exhaustive(case) -> bool:
    return [mark.name for mark in getattr(case, 'marks', ())] == ['exhaustive']


def test_the_first_of_each_kind_is_always_run():
    cases = one_of_each([('a', 1), ('a', 2), ('b', 3), ('b', 4)], kind=lambda case: case[0])
    assert [exhaustive(case) for case in cases] == [False, True, False, True]
    assert cases[0] == ('a', 1) and cases[1].values == ('a', 2)
    assert [exhaustive(case) for case in one_of_each('xyz')] == [False, True, True]


def test_shares_leave_nothing_out_and_overlap_nowhere(tmp_path):
    names = [f'tests/test_x.py::test[{i}]' for i in range(200)]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    found = []
    for k in range(5):
        items = [SimpleNamespace(nodeid=name, path=tmp_path / 'test_x.py') for name in names]
        config = SimpleNamespace(getoption=lambda option, k=k: f'{k}/5', hook=hook)
        pytest_collection_modifyitems(config, items)
        assert 20 < len(items) < 60, 'about a fifth'
        found += [item.nodeid for item in items]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize('wrong', ['5/5', '1', '-1/5', 'x/5', '1/0'])
def test_a_share_that_is_none_is_refused(wrong):
    with pytest.raises(pytest.UsageError, match='must be K/N'):
        read_share(wrong)

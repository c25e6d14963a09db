"A `clean` that is killed anywhere: nobody takes what is left for whole, and the next one ends the work."

import os
import shutil
from pathlib import Path
import pytest
from kinds import one_of_each
from kdnotes.core.files import cache_path
from kdnotes.core.parse import make_config
from kdnotes.experiment.clean import clean, leftovers
from kdnotes.experiment.launch import run
from small_runs import write_corpus, write_model


class Killed(BaseException):
    pass


@pytest.fixture
def taught(home, rank_here) -> dict:
    "What a student's run is given; one of these is done, and has left tokens and its teacher's outputs."
    given = dict(corpus=str(write_corpus(home / 'corpus')), teacher=str(write_model(home / 'teacher')))
    given |= dict(mode='full_kd', teacher_mode='given', student_layers=(1,), study='cleaned-smoke')
    given |= dict(max_length=64, smoke=True, threads_per_rank=1, ranks=1)
    run(make_config(**given))
    return given


def killed_after(n: int, monkeypatch) -> bool:
    "Clean, and be killed before the removal of the n-th file or folder; False: there are not so many."
    left = n

    def dying(remove):
        def removed(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return remove(*args, **more)

        return removed

    with monkeypatch.context() as patched:
        for name in ('unlink', 'rmdir'):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            clean(leftovers())
        except Killed:
            return True
    return False


@pytest.mark.exhaustive
@pytest.mark.parametrize('read', one_of_each((False, True)))
def test_a_clean_that_is_killed_anywhere_leaves_nothing_that_is_taken_for_whole(
    taught, home, read, monkeypatch
):
    whole = shutil.copytree(cache_path(), home / 'cache')
    other = make_config(**taught | dict(alpha=0.3))
    first = run(other)
    folder = Path(os.environ['KDNOTES_HOME']) / 'runs' / 'cleaned-smoke' / first['run_id']
    n = 0
    while killed_after(n, monkeypatch):
        if read:  # by the run of another student
            shutil.rmtree(folder)
            assert run(other)['model_sha256'] == first['model_sha256'], n
        else:
            clean(leftovers())
            assert not leftovers(), n
        shutil.rmtree(cache_path())
        shutil.copytree(whole, cache_path())
        n += 1
    assert n > 8 and not leftovers()

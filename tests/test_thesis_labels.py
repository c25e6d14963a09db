"The chapter on few labels: its figures again from the records, and what it says where arms are missing."

from dataclasses import replace
import numpy as np
import pytest
from kdnotes.stats.evidence import evidence
from kdnotes.stats.labels import trained_arms, label_efficiency
from kdnotes.core.files import at_home, root, with_evidence
from thesis.labels import held_against, labels_values
from thesis.steps import verdict

STUDY = 'wikiqa-labels'


@pytest.fixture(scope='module')
def e(tmp_path_factory):
    where = root()
    with at_home(with_evidence(tmp_path_factory.mktemp('home'), where)):
        yield evidence(STUDY)


def means(e):
    "Arm -> seed -> MAP, and the teacher's."
    found = {arm: {r['seed']: r['primary']['value'] for r in runs} for arm, runs in e.arms.items()}
    [teacher] = {of.pays.teacher.arm for of in held_against(e, label_efficiency(e))}
    return found, found.pop(teacher)


def test_the_gap_is_that_of_the_records(e):
    by_arm, teacher = means(e)
    of_teacher = next(iter(teacher.values()))
    assert all(value == pytest.approx(of_teacher, abs=1e-6) for value in teacher.values())  # one model
    found = labels_values(e)
    for name in ('texts', 'same_start', 'labelled_only', 'labelled_same_start'):
        its = found[name]
        taught, alone = by_arm[its['taught']], by_arm[its['alone']]
        gained = np.mean([taught[s] - alone[s] for s in taught])
        assert its['difference'].estimate == pytest.approx(gained, abs=1e-5)
        gap = np.mean([of_teacher - alone[s] for s in taught])
        assert its['closed'].estimate == pytest.approx(gained / gap, abs=1e-4)
        assert its['n'] == len(taught) == its['closed'].n


def test_no_better_arm_without_distillation_was_left_out(e):
    by_arm, _ = means(e)
    for of in held_against(e, label_efficiency(e)):
        if of.is_main:
            same = [
                its for its in trained_arms(e.arms) if its.role == 'alone' and its.labels == of.alone.labels
            ]
            assert (
                len({its.runs[0]['initial']['weights_sha256'] for its in same}) > 1
            )  # whatever they start from
            assert np.mean([*by_arm[of.alone.arm].values()]) == max(
                np.mean([*by_arm[its.arm].values()]) for its in same
            )


def test_a_significant_loss_is_no_gain(e):
    c = next(of.result for of in held_against(e, label_efficiency(e)) if of.pays.taught.texts)
    assert verdict(c) == 'gains' and c.p_holm < 0.05
    less = replace(c.difference, estimate=-c.difference.estimate)
    assert verdict(replace(c, difference=less)) == 'loses'
    assert verdict(replace(c, p=0.5, p_holm=0.5)) == 'open'
    assert verdict(replace(c, primary=c.primary | dict(higher_is_better=False))) == 'loses'


def test_without_rows_that_have_no_label_nothing_is_said_of_them(e):
    known = trained_arms(e.arms)
    ids = [r['run_id'] for its in known if not its.texts for r in its.runs]
    found = labels_values(evidence(STUDY, ids))
    assert 'texts' not in found and len(found['tables']['learners']) == len(known) - 1

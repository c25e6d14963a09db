"""Who teaches the students of a study: its own baseline, whatever the study is given;
a single run's teacher keeps its own setting.
"""

import functools
import json
import pytest
from kinds import one_of_each
from kdnotes.core.arms import MODES, SEVERAL_RANKS
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.experiment.study import notebook_parameters
from kdnotes.experiment.study_plan import explain_study, plan_study
from kdnotes.experiment.plan import plan
from kdnotes.search.tuning import plan_trials
from kdnotes.core.spec import with_values

CPU, GPU = Machine('cpu', cores=2), Machine('cuda', cores=16, gpus=1)
PRETRAINED = {'student_init': 'teacher_pretrained'}
MIXED_TEACHER = {'teacher_mode': 'mixed_baseline'}
GIVEN = [
    {},
    {'epochs': 1},
    {'learning_rate': '3e-4'},
    {'warmup_fraction': 0.2},
    {'weight_decay': 0.1},
    {'max_grad_norm': 0.5},
    {'batch_size': 16},
    {'micro_batch_tokens': 1024},
    {'max_length': 64},
    {'head_bias': 'zero'},
    {'document_title': True},
    {'train_questions': 'answered'},
    {'threads_per_rank': 1},
    {'ranks': 2},
    {'gradient_dtype': 'bf16'},
    {'ranking_loss': 'ranknet', 'ranking_weight': 0.5},
    {'smoke': True, 'epochs': 2},
    {'temperature': 4, 'alpha': 0.3, 'signal': 'online', 'hidden_loss': 'mse'},
    {'student_layers': '[1, 3]', 'epochs': 2},
    {'epochs': 2} | PRETRAINED,
    {'checkpoint_minutes': 1, 'tuning_id': 'mine'},
    {'epochs': 1, 'amp_dtype': 'bf16'} | MIXED_TEACHER,
]


def study(arms='all', seeds=1, **given):
    return planned(arms, seeds, json.dumps(given))


@functools.cache
def planned(arms: str, seeds: int, given: str) -> tuple:
    "The plans of a study; several tests look at the same one."
    return tuple(plan_study(seeds, arms, corpus='embedded', **json.loads(given)))


def by_mode(plans):
    return {p.config.where.mode: p for p in plans}


def single(**given):
    return plan(make_config(**{'mode': 'full_kd', 'corpus': 'embedded'} | given), CPU)


@pytest.mark.parametrize(
    'given',
    one_of_each(GIVEN, lambda g: len(g) > 1),
    ids=lambda g: ' '.join(f'{k}={v}' for k, v in g.items()) or 'nothing',
)
def test_the_students_learn_from_the_baseline_of_their_study(given):
    found = by_mode(study(**given))
    teacher = found[given.get('teacher_mode', 'baseline')]
    taught = [p for p in found.values() if p.teacher]
    assert {p.teacher.run_id for p in taught} == {teacher.run_id}
    assert {with_values(p.teacher.config, arm=teacher.config.where.arm) for p in taught} == {teacher.config}
    assert len(taught) == (2 if 'student_init' in given else 4)
    alone = by_mode(study('full_kd,parallel_baseline', **given))['full_kd']
    assert alone == found['full_kd'], 'the same teacher where the baseline is no arm'


@pytest.mark.parametrize(
    'given',
    one_of_each(GIVEN, lambda g: len(g) > 1),
    ids=lambda g: ' '.join(f'{k}={v}' for k, v in g.items()) or 'nothing',
)
def test_a_run_asked_for_as_its_study_asked_is_the_same_run(given):
    "As study.ipynb hands it to run.ipynb: as JSON."
    for p in study(**given):
        parameters = json.loads(json.dumps(notebook_parameters(p)))
        assert plan(make_config(**parameters)) == p


@pytest.mark.parametrize(
    'given', one_of_each([{}, PRETRAINED, {'temperature': 4}, {'smoke': True}, {'teacher_seed': 3}])
)
def test_a_study_that_gives_no_setting_makes_the_runs_that_are_made_singly(given):
    "Those that test_run_ids.py binds to the evidence."
    without_ranks = ','.join(mode for mode in MODES if mode != SEVERAL_RANKS)
    for p in study(without_ranks, seeds=2, **given):
        own = {
            k: v
            for k, v in given.items()
            if p.config.loss is not None or k == 'smoke' or k == 'student_init' and p.config.model.student
        }
        if p.teacher:
            own |= {k: v for k, v in given.items() if k == 'teacher_seed'}
        alone = plan(make_config(mode=p.config.where.mode, seed=p.config.seed, corpus='embedded', **own))
        assert alone.run_id == p.run_id and (alone.teacher is None) == (p.teacher is None)


def test_the_arms_of_a_study_that_varies_ranks_have_as_many_as_its_parallel_baseline():
    found = by_mode(study())
    ranks = {mode: p.config.compute.ranks for mode, p in found.items()}
    assert ranks == {mode: 2 if MODES[mode].ranks == 'auto' else 1 for mode in MODES}
    assert {p.config.compute.ranks for p in study('usual')} == {1}, 'one process with all cores is faster'
    assert {
        p.config.compute.ranks for p in study('usual', ranks=2) if MODES[p.config.where.mode].ranks == 'auto'
    } == {2}


def test_one_seed_may_teach_all():
    found = study('baseline,full_kd', seeds=2, teacher_seed=1, epochs=2)
    [teacher] = [p for p in found if (p.config.where.mode, p.config.seed) == ('baseline', 1)]
    assert {p.teacher.run_id for p in found if p.teacher} == {teacher.run_id}
    assert 'except teacher_seed=1' in explain_study(found)


def test_every_seed_has_its_own_baseline():
    found = study('baseline,mixed_kd', seeds=3, epochs=2)
    pairs = {p.config.seed: p.teacher.run_id for p in found if p.teacher}
    assert pairs == {p.config.seed: p.run_id for p in found if not p.teacher}
    assert f"{', '.join(pairs.values())}: settings of the study's baseline" in explain_study(found)


def test_a_teacher_takes_what_it_can():
    "A loss on a teacher's scores, and a precision of another mode, are the student's alone."
    ranked, plain = (by_mode(study('full_kd', epochs=2, **g)) for g in ({'ranking_loss': 'margin_mse'}, {}))
    assert ranked['full_kd'].teacher == plain['full_kd'].teacher
    shared = {'corpus': 'embedded', 'precision': 'tf32', 'epochs': 2}
    tf32 = plan(make_config(mode='full_kd', teacher_setting='shared', **shared), GPU)
    assert tf32.teacher.run_id == plan(make_config(mode='baseline', **shared), GPU).run_id
    mixed = plan(make_config(mode='full_kd', teacher_setting='shared', **shared, **MIXED_TEACHER), GPU)
    assert mixed.teacher.config.compute.precision == 'mixed'


def test_both_kd_arms_have_one_mixed_teacher_on_a_gpu(monkeypatch):
    for module in ('plan', 'study_plan'):
        monkeypatch.setattr(f'kdnotes.experiment.{module}.machine', lambda: GPU)
    found = by_mode(study(amp_dtype='bf16', **MIXED_TEACHER))
    assert found['mixed_baseline'].config.compute.amp_dtype == 'bf16'
    assert {p.teacher.run_id for p in found.values() if p.teacher} == {found['mixed_baseline'].run_id}


def test_a_corpus_learnt_first_is_learnt_once_whatever_the_study_is_given(tmp_path, monkeypatch):
    from test_transfer import corpus

    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    first = corpus.__wrapped__(tmp_path, monkeypatch)
    for init in ('transferred', 'teacher_finetuned'):
        shared = {'transfer': first, 'student_init': init}
        arms = 'baseline,full_kd'
        plain = by_mode(study(arms, **shared))
        shorter = by_mode(study(arms, epochs=1, **shared))
        assert shorter['full_kd'].teacher.run_id == shorter['baseline'].run_id != plain['baseline'].run_id
        assert shorter['full_kd'].transfer == plain['full_kd'].transfer
        assert shorter['baseline'].transfer == plain['baseline'].transfer


def test_a_single_run_keeps_its_teacher_unless_it_is_told():
    usual = single()
    shorter = single(epochs=1, batch_size=8)
    assert shorter.teacher.run_id == usual.teacher.run_id and shorter.run_id != usual.run_id
    assert (
        f"{usual.teacher.run_id}, 3 epochs, learning rate 0.0001, 32 examples per step, texts of up to "
        "128 tokens; default settings of the corpus" in usual.explain()
    )
    assert single(teacher_epochs=3).run_id == usual.run_id, 'given as it is anyway: the same run'
    given = {'epochs': 1, 'learning_rate': 3e-4, 'warmup_fraction': 0, 'weight_decay': 0.1, 'batch_size': 16}
    given['micro_batch_tokens'] = 1024
    told = single(**{f'teacher_{name}': value for name, value in given.items()})
    assert told.teacher.run_id == plan(make_config(mode='baseline', corpus='embedded', **given), CPU).run_id
    assert told.run_id != usual.run_id and told.config.train.epochs == usual.config.train.epochs
    for part in ('default settings of the corpus, except teacher_epochs=1.0', 'teacher_batch_size=16'):
        assert part in told.explain()


def test_a_study_may_have_a_teacher_of_its_own():
    found = by_mode(study(epochs=2, teacher_epochs=5))
    assert {p.teacher.config.train.epochs for p in found.values() if p.teacher} == {5} and found[
        'baseline'
    ].config.train.epochs == 2
    assert "settings of the study's baseline, except teacher_epochs=5.0" in explain_study(
        list(found.values())
    )
    own = by_mode(study(epochs=2, teacher_setting='own'))
    assert own['full_kd'].teacher.run_id == by_mode(study())['baseline'].run_id


def test_trials_keep_the_teachers_own_setting():
    usual = single(seed=1000).teacher.run_id
    trials = plan_trials('full_kd', 2, 'mine', corpus='embedded', batch_size=16)
    assert {p.teacher.run_id for p in trials} == {usual}
    other = plan_trials('full_kd', 2, 'mine', corpus='embedded', batch_size=16, teacher_epochs=1)
    assert {p.teacher.config.train.epochs for p in other} == {1}
    assert other[0].config.train.tuning_id != trials[0].config.train.tuning_id


@pytest.mark.parametrize(
    'given, told',
    [
        (
            {'mode': 'baseline', 'teacher_epochs': 2},
            "teacher_epochs=2.0 changes the teacher, and mode='baseline' has none",
        ),
        (
            {'mode': 'full_student', 'teacher_setting': 'shared'} | PRETRAINED,
            "student_init='teacher_pretrained' has none",
        ),
        ({'teacher_epochs': 0}, 'teacher_epochs=0 is refused'),
        ({'teacher_setting': 'mine'}, "'own' or 'shared'"),
        ({'amp_dtype': 'bf16'}, "amp_dtype='bf16' contradicts mode='full_kd'"),
    ],
)
def test_a_teacher_that_cannot_be_changed(given, told):
    with pytest.raises(ConfigError) as caught:
        single(**given)
    assert told in str(caught.value)


@pytest.mark.parametrize('name', ['teacher_epochs', 'teacher_seed'])
def test_a_study_without_students_has_no_teacher_to_change(name):
    with pytest.raises(ConfigError, match=f"{name} would play no part in arms='baseline'"):
        study('baseline', **{name: 2})


def test_a_notebook_may_give_a_student_of_none_to_arms_without_one():
    "study.ipynb passes the defaults of its parameters."
    plans = study('baseline', student=None, student_init=None)
    assert [p.run_id for p in plans] == [p.run_id for p in study('baseline')]


def test_a_loss_that_needs_a_teacher_goes_to_the_arms_that_have_one():
    plans = plan_study(1, 'all', corpus='embedded', ranking_loss='margin_mse', ranking_weight=0.5)
    for p in plans:
        kd = p.config.loss is not None
        assert p.config.task_settings.ranking_loss == ('margin_mse' if kd else 'none'), p.config.where.mode
    ranknet = plan_study(1, 'all', corpus='embedded', ranking_loss='ranknet')
    assert {p.config.task_settings.ranking_loss for p in ranknet} == {'ranknet'}


def test_a_plan_says_what_its_arms_share_and_what_is_no_default():
    found = study('baseline,full_kd,mixed_kd', epochs=1, dropout=0.3, weight_decay=0.1)
    lines = [line.strip() for line in explain_study(found).split('\n')]
    setting = '1 epoch, learning rate 0.0001, 32 examples per step, texts of up to 128 tokens'
    assert f'setting: {setting}' in lines, 'said once, since it is the same in all arms'
    assert 'not default: weight_decay=0.1, dropout=0.3' in lines
    [rows] = [line for line in lines if line.startswith('rows: ')]
    assert rows.startswith(
        'rows: train 384 questions (2,511 rows), dev 180 questions (1,080 rows), test 450 '
    )
    own = found[0].explain()
    assert setting in own and 'weight_decay=0.1, dropout=0.3' in own and 'train 384 questions' in own
    usual = [line.strip() for line in explain_study(study('baseline,full_kd')).split('\n')]
    assert not [line for line in usual if line.startswith('not default')]
    assert len([line for line in usual if line.startswith('setting')]) == 2, 'the arms have their own epochs'

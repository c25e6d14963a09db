"""A study with a grid: which runs it makes, what they are called, and what their comparison says of them."""

import pytest
from kdnotes.core.config import ConfigError
from kdnotes.experiment.study_plan import plan_study
from kdnotes.experiment.study import run_study
from small_runs import small_model, train_here

SMALL = dict(task='text_classification', corpus='embedded', max_length=32, threads_per_rank=1, ranks=1)


@pytest.mark.exhaustive
def test_a_study_with_a_grid(tmp_path, monkeypatch):
    train_here(monkeypatch)
    common = SMALL | dict(teacher=str(small_model(tmp_path / 'small')), student_layers='1', smoke=True)
    common |= dict(study='grid')
    made = run_study(1, 'full_student,full_kd', grid={'temperature': [2, 4]}, **common)
    run_ids = {p.config.where.arm: p.run_id for p in made.plans}
    # a student without a teacher has no temperature, and 2 is that of full_kd anyway
    assert sorted(run_ids) == ['full_kd', 'full_kd-temperature-4', 'full_student']
    plain = {p.config.where.arm: p.run_id for p in plan_study(1, 'full_student,full_kd', **common)}
    assert plain.items() <= run_ids.items()
    assert len({p.teacher.run_id for p in made.plans}) == 1 and not made.failed
    said = made.report.comparisons.set_index('comparison')['attribution']
    assert said['full_kd → full_kd-temperature-4'] == 'no factor; different temperature'
    taught = 'only kd differs (one seed)'
    assert said['full_student → full_kd'] == said['full_student → full_kd-temperature-4'] == taught
    assert 'No factor differs, but temperature does' in ' '.join(made.report.sentences)


@pytest.mark.parametrize(
    'grid, why',
    [
        ('temprature=2', "is it 'temperature'"),
        ('temperature=2,x', 'temperature.* is refused'),
        ('temperature=2,400', 'less than or equal to 100'),
        ('temperature=2,', 'an empty value of temperature'),
        ('temperature=2 temperature=4', 'names temperature twice'),
        ({'batch_size': list(range(1, 1002))}, '1,001 combinations'),
        ('seed=1,2', 'seed cannot be in a grid'),
        ('smoke=true,false', 'smoke cannot be in a grid'),
        ('checkpoint_minutes=1,2', 'changes no run'),
        ('hidden_loss=none,mse', "needs signal='online'"),
        ({}, None),
    ],
)
def test_a_grid_that_cannot_be_is_a_sentence(grid, why):
    if why is None:
        assert [p.config.where.arm for p in plan_study(1, 'full_kd', grid=grid, **SMALL)] == ['full_kd']
        return
    with pytest.raises(ConfigError, match=why):
        plan_study(1, 'full_kd', grid=grid, **SMALL)

"""A loss of a user: it is one term like any other, named by its source, the same in every rank, and each
mistake is one sentence.
"""

import json
import re
import textwrap
from pathlib import Path
import pytest
import torch.nn.functional as F
import kdnotes as kd
from kdnotes.core.arms import MODES
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.user_code import LOSS_FILE, code_of, read_code
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_record
from small_runs import ON

FOCAL = """
import torch.nn.functional as F


def focal(student_outputs, batch, teacher_signal):
    log_p = F.log_softmax(student_outputs.logits.float(), -1)
    of_label = log_p.gather(1, batch.labels[:, None])[:, 0]
    loss = -((1 - of_label.exp()) ** 2) * of_label
    if teacher_signal is not None:
        target = F.log_softmax(teacher_signal['logits'].float(), -1)
        loss = loss + F.kl_div(log_p, target, log_target=True, reduction='none').sum(-1)
    return loss.sum(), len(loss)
"""


@pytest.fixture
def focal(home) -> str:
    (home / 'focal.py').write_text(FOCAL)
    return f'{home / "focal.py"}:focal'


def planned(teacher: Path, mode: str = 'baseline', **more):
    student = dict(student_layers=(1,)) if MODES[mode].network == 'student' else {}
    usual = dict(task='text_classification', corpus='embedded', max_length=32, threads_per_rank=1, ranks=1)
    own = dict(teacher=str(teacher), smoke=True, study='own_loss')
    return plan(make_config(mode=mode, **usual | student | own | more), ON)


def written(folder: Path, body: str, name: str = 'focal') -> str:
    "A loss of this body, as the parameter that names it."
    file = folder / 'mine.py'
    text = textwrap.indent(textwrap.dedent(body).strip(), '    ')
    file.write_text(f'def {name}(student_outputs, batch, teacher_signal):\n{text}\n')
    return f'{file}:{name}'


def test_a_loss_that_is_the_tasks_own_trains_the_same_weights(home, small_teacher, rank_here):
    "Cross-entropy, written by a user, is the built-in one: bit for bit."
    body = """
        import torch.nn.functional as F
        loss = F.cross_entropy(student_outputs.logits.float(), batch.labels, reduction='none')
        return loss.sum(), len(loss)
    """
    builtin = execute(planned(small_teacher))
    own = execute(planned(small_teacher, loss=written(home, body)))
    assert own['run_id'] != builtin['run_id'] and own['model_sha256'] == builtin['model_sha256']
    assert own['losses']['loss'] == builtin['losses']['hard']
    assert own['settings']['loss_id'].startswith('focal-') and 'loss_id' not in builtin['settings']


def test_a_student_learns_with_it_and_its_name_follows_from_the_source(home, small_teacher, focal, rank_here):
    "The text is in the run's folder; another text is another run, another path or comment in config is not."
    of_kd = dict(mode='full_kd')
    first = planned(small_teacher, loss=focal, **of_kd)
    record = execute(first)
    folder = RunFolder('own_loss', first.run_id)
    assert (folder.path / LOSS_FILE).read_text() == FOCAL
    assert folder.rows('step')[-1]['losses'].keys() == {'loss'}
    assert (
        record['settings']['loss_id']
        == first.config.train.custom_loss_id
        == f'focal-{first.config.train.custom_loss_id[-12:]}'
    )
    moved = home / 'elsewhere.py'
    moved.write_text(FOCAL)
    assert planned(small_teacher, loss=f'{moved}:focal', **of_kd).run_id == first.run_id
    moved.write_text(FOCAL.replace('** 2', '** 3'))
    other = planned(small_teacher, loss=f'{moved}:focal', **of_kd)
    assert other.run_id != first.run_id
    assert execute(other)['model_sha256'] != record['model_sha256']
    assert 'focal, a function of the user' in first.explain()


@pytest.mark.slow
def test_two_ranks_load_the_text_of_the_plan_and_compute_what_one_does(home, small_teacher, focal):
    "Real processes; the user's file is gone when they start."
    usual = dict(mode='parallel_baseline', loss=focal, micro_batch_tokens=256, dropout=0, attention_dropout=0)
    one, two = (planned(small_teacher, **usual, ranks=ranks) for ranks in (1, 2))
    Path(focal.rpartition(':')[0]).unlink()
    losses = [execute(p)['losses']['loss'] for p in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_function_of_python_is_its_text_with_what_it_uses(home, small_teacher, rank_here):
    "As of a notebook's cell: what is not importable is written into the text."
    scope = dict(F=F, GAMMA=2.0, __name__='__main__')
    file = home / 'cell.py'
    source = FOCAL.replace('import torch.nn.functional as F', '').replace('** 2', '** GAMMA')
    file.write_text(source)
    exec(compile(source, str(file), 'exec'), scope)
    code = code_of(scope['focal'])
    assert code.text.startswith('import torch.nn.functional as F\nGAMMA = 2.0\n')
    scope['GAMMA'] = 3.0
    assert code_of(scope['focal']).id != code.id


def table(n=60):
    return [
        dict(text=f'thing number {i} is {"red" if i % 2 else "blue"}', label=f'c{i % 2}') for i in range(n)
    ]


@pytest.mark.slow
def test_python_gives_it_to_a_student_with_and_without_a_teacher(home, small_teacher, rank_here, focal):
    "The teacher that is trained first has the task's own loss; a study gives it to every arm."
    data = kd.load_data(table(), task='text_classification', say=lambda text: None)
    usual = dict(smoke=True, max_length=32, ranks=1, say=lambda text: None, study='own')
    teacher = kd.finetune(data, small_teacher, **usual)
    run = kd.distil(data, teacher, loss=focal, student_layers=[1], **usual)
    loss_id = run.record['settings']['loss_id']
    assert 'loss_id' not in teacher.record['settings'] and run.record['teacher_run_id'] == teacher.run_id
    alone = kd.distil(data, teacher, taught=False, loss=focal, student_layers=[1], **usual)
    assert alone.record['settings']['loss_id'] == loss_id
    more = dict(teacher=str(small_teacher), student_layers=[1]) | usual
    result = kd.study(data, seeds=1, arms='baseline,full_student,full_kd', loss=focal, **more)
    assert {p.config.train.custom_loss_id for p in result.plans} == {loss_id}
    assert {p.teacher.run_id for p in result.plans if p.teacher} == {
        p.run_id for p in result.plans if p.config.where.mode == 'baseline'
    }


@pytest.mark.slow
def test_the_doctor_tells_a_sum_from_what_is_no_sum(home, small_teacher, focal):
    data = kd.load_data(table(), task='text_classification', say=lambda text: None)
    usual = dict(mode='full_student', teacher=str(small_teacher), student_layers=[1], max_length=32)
    usual |= dict(student_init='teacher_pretrained')
    assert {f.check: f.result for f in kd.doctor(data, loss=focal, **usual).findings}['one rank'] == 'ok'
    body = """
        logits = student_outputs.logits.float()
        spread = (logits - logits.mean(0)).square().sum()
        return spread, len(batch.index)
    """
    found = {f.check: f for f in kd.doctor(data, loss=written(home, body), **usual).findings}['one rank']
    assert (
        found.result == 'fail'
        and 'the gradient of several is' in found.sentence
        and 'no mean' in found.change
    )
    wrong = kd.doctor(data, loss=written(home, 'return 1.0, 1'), **usual)
    assert not wrong.ok and any('returned a float as the sum' in f.sentence for f in wrong.findings)


# body of the function -> what is said of it
WRONG = [
    ("raise KeyError('logits')", "raised KeyError: 'logits' (line 2)"),
    (
        "return student_outputs.logits.sum() * float('nan'), len(batch.index)",
        'is nan for training examples 0, ',
    ),
    ('return student_outputs.logits.sum()', 'returned a Tensor, not (sum, count)'),
    ('return None', 'returned a NoneType, not (sum, count)'),
    ('return student_outputs.logits, 2', 'as the sum, which must be a scalar tensor of floats'),
    ('return 0.5, len(batch.index)', 'returned a float as the sum'),
    ("return student_outputs.logits.sum(), 'all'", "returned 'all' as the count"),
    ('return student_outputs.logits.sum(), 0', 'returned count=0 for 2 training rows'),
    ('return student_outputs.logits.sum(), 2 * len(batch.index)', 'returned count=4 for 2 training rows'),
    ('return student_outputs.logits.detach().sum(), len(batch.index)', 'a sum without a gradient'),
    (
        """
        n = len(batch.index)
        return student_outputs.logits.sum(), n if n < 3 else n - 1
        """,
        'and the sum must be over as many as the task counts',
    ),
]


@pytest.mark.parametrize('body, sentence', WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_result_is_one_sentence(home, small_teacher, rank_here, body, sentence):
    with pytest.raises(KdnotesError, match=re.escape(sentence)) as error:
        execute(planned(small_teacher, loss=written(home, body)))
    assert 'loss=focal' in str(error.value) and '\n' not in str(error.value)
    assert find_record(planned(small_teacher, loss=written(home, body)).run_id) is None


@pytest.mark.slow
def test_another_count_on_another_rank_is_said_by_the_run(home, small_teacher):
    body = """
        import os
        wrong = os.environ['RANK'] == '1' and len(batch.index) > 2
        return student_outputs.logits.float().square().sum(), len(batch.index) - wrong
    """
    with pytest.raises(KdnotesError, match='returned count=') as error:
        execute(planned(small_teacher, mode='parallel_baseline', ranks=2, loss=written(home, body)))
    assert 'loss=focal' in str(error.value)


def test_a_loss_that_becomes_nan_is_named_with_its_step_and_examples(home, small_teacher, rank_here):
    body = """
        loss = student_outputs.logits.float().square().sum()
        return loss * (float('nan') if len(batch.index) > 2 else 1.0), len(batch.index)
    """
    with pytest.raises(KdnotesError, match=r'step 1; .*loss=focal-\w+ itself, of finite outputs'):
        execute(planned(small_teacher, loss=written(home, body)))


CANNOT = [
    ('nowhere.py:focal', 'there is no such file'),
    ('focal.py', 'must be <file.py>:<function>'),
    ('focal.py:local', 'there is no function local; the file defines focal'),
    ('broken.py:focal', 'not valid Python (line 1: '),
    ('number.py:focal', 'is no function but a float'),
    ('import.py:focal', "cannot be loaded: ModuleNotFoundError: No module named 'nothing_here'"),
]


@pytest.mark.parametrize('given, sentence', CANNOT)
def test_a_loss_that_cannot_be_had_is_refused_before_anything_starts(
    home, small_teacher, focal, monkeypatch, given, sentence
):
    monkeypatch.chdir(home)
    Path('broken.py').write_text('def focal(:\n')
    Path('number.py').write_text('focal = 2.0\n')
    Path('import.py').write_text('import nothing_here\n\n\ndef focal(*args): ...\n')
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        planned(small_teacher, loss=given)


def test_what_cannot_be_written_down_is_refused_by_name():
    gamma = 2.0

    def closure(student_outputs, batch, teacher_signal):
        return gamma, 1

    with pytest.raises(ConfigError, match='loss=closure uses gamma of the function around it'):
        code_of(closure)
    with pytest.raises(ConfigError, match='loss is a lambda'):
        code_of(lambda outputs, batch, signal: (0, 1))
    with pytest.raises(ConfigError, match='is no function with a source'):
        code_of(max)
    scope = dict(TABLE={}, __name__='__main__')
    exec('def made(o, b, s):\n    return TABLE, 1\n', scope)
    with pytest.raises(ConfigError, match='the source of the function is not available'):
        code_of(scope['made'])


def test_settings_of_the_tasks_own_loss_are_refused_with_it(small_teacher, focal):
    with pytest.raises(
        ConfigError, match='alpha=0.3 belongs to the loss of the task, and loss=focal replaces'
    ):
        planned(small_teacher, mode='full_kd', alpha=0.3, loss=focal)
    with pytest.raises(ConfigError, match='is the hash of another source'):
        planned(small_teacher, loss=focal, loss_id='focal-0123456789ab')
    with pytest.raises(ConfigError, match='is the hash of a loss, and none is given'):
        planned(small_teacher, loss_id='focal-0123456789ab')


def test_a_text_that_was_changed_in_the_runs_folder_is_not_executed(home, small_teacher, focal, rank_here):
    from kdnotes.core.user_code import load_loss

    its_plan = planned(small_teacher, loss=focal)
    (home / LOSS_FILE).write_text(FOCAL + '\n# changed\n')
    with pytest.raises(ConfigError, match='was changed since the run was planned'):
        load_loss(its_plan.config, home)


def test_the_intermediate_losses_add_to_it(home, small_teacher, focal, rank_here):
    more = dict(mode='full_kd', signal='online', hidden_loss='cosine')
    record = execute(planned(small_teacher, loss=focal, **more))
    assert record['losses'].keys() >= {'loss', 'hidden', 'total'}
    assert json.dumps(record['settings']['hidden_loss'])


@pytest.mark.parametrize('arguments', ['outputs, batch', 'a, b, c, d', 'a, b, c, *, weight', ''])
def test_a_loss_that_takes_other_arguments_is_refused_before_anything_is_trained(arguments, tmp_path):
    (tmp_path / 'own.py').write_text(f'def own({arguments}):\n    return 0, 1\n')
    with pytest.raises(ConfigError, match='cannot be called with the three arguments of a loss'):
        read_code(f'{tmp_path}/own.py:own')


@pytest.mark.parametrize(
    'arguments', ['a, b, c', 'a, b, c, d=1', '*args', 'a, b, c, *, weight=2', 'a, *rest']
)
def test_arguments_with_defaults_are_no_matter(arguments, tmp_path):
    (tmp_path / 'own.py').write_text(f'def own({arguments}):\n    return 0, 1\n')
    assert read_code(f'{tmp_path}/own.py:own').id.startswith('own-')

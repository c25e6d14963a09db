"The losses a configuration can ask for besides the study's: they reach the training as they are meant, and what cannot be meant is refused."
import numpy as np
import pytest
import torch
from helpers import SameWord, flat, tiny_bert, tiny_config, tiny_teacher
from kdnotes.config import MODES, ConfigError, Machine, make_config, resolve, run_id, settings
from kdnotes.dialects import DIALECTS, dialect_loss
from kdnotes.experiment import make_task
from kdnotes.losses import margin_mse, ranknet, soft_target_kl
from kdnotes.runtime import Runtime
from kdnotes.teacher import online_signal
from kdnotes.trainer import accumulate, loss_weights, schedule_steps
from parity import ranked_corpus, ranked_task

CPU, QUIET = Runtime(torch.device('cpu'), 'fp32'), lambda *a, **k: None
OFF = dict(dialect='canonical', min_probability=None, top_k=None, ranking_loss='none', ranking_weight=1.)


def gradient(task, config, signal=None, index=None):
    "Losses and gradients of one step of a tiny student."
    student = tiny_bert()
    index = np.arange(len(task.lengths('train'))) if index is None else index
    losses, *_ = accumulate(student, task, index, config, CPU, CPU.scaler(), loss_weights(config), signal)
    return {k: v.item() for k, v in losses.items()}, flat(p.grad for p in student.parameters())


def in_plain_torch(task, signal, loss):
    "The gradient of `loss(logits, teacher's logits, batch)` over all training examples at once."
    student, batch = tiny_bert(), task.batch('train', np.arange(len(task.lengths('train'))))
    value = loss(student(**batch.inputs).logits, signal(batch)['logits'], batch)
    value.backward()
    return value.item(), flat(p.grad for p in student.parameters())


@pytest.mark.parametrize('mode', MODES)
def test_what_is_off_has_no_name(mode):
    "The run_ids of runs made before these settings existed."
    config = resolve(make_config(mode=mode), Machine('cpu', 2), 'embedded')
    assert not OFF.keys() & settings(config).keys()
    assert {k: getattr(config, k) for k in OFF} == OFF


@pytest.mark.parametrize('asked', [dict(dialect='textbrewer'), dict(min_probability=.1), dict(top_k=1), dict(ranking_loss='ranknet'), dict(ranking_loss='ranknet', ranking_weight=2.)], ids=str)
def test_what_is_on_is_another_run(asked):
    def name(**more): return run_id(resolve(make_config(mode='full_kd', **more), Machine('cpu', 2), 'embedded'), 'c', {}, 1)
    assert name(**asked) != name() and make_config(**make_config(mode='full_kd', **asked).model_dump()) == make_config(mode='full_kd', **asked)


@pytest.mark.parametrize('asked, sentence', [
    (dict(mode='full_student', dialect='modelopt'), "dialect='modelopt' needs a teacher, and mode='full_student' learns from none"),
    (dict(mode='baseline', min_probability=.1), 'min_probability=0.1 needs a teacher'),
    (dict(mode='full_student', ranking_loss='margin_mse'), "ranking_loss='margin_mse' needs a teacher, and mode='full_student' learns from none; use a KD mode, or ranking_loss='ranknet'"),
    (dict(ranking_weight=.5), "ranking_weight=0.5 weighs nothing; choose ranking_loss='ranknet' or 'margin_mse' too"),
    (dict(top_k=3), "top_k=3 is more than the 2 classes of task='answer_selection'"), (dict(top_k=0), 'top_k=0 is refused'), (dict(min_probability=0.), 'min_probability=0.0 is refused'),
    (dict(dialect='textbrewer', top_k=1), "dialect='textbrewer' knows no soft targets that are cut off"), (dict(ranking_loss='lambdarank'), "ranking_loss='lambdarank' is refused")], ids=str)
def test_bad_combinations_are_refused(asked, sentence):
    with pytest.raises(ConfigError) as e: make_config(**asked)
    assert sentence in str(e.value) and '\n' not in str(e.value)


def test_ranknet_needs_no_teacher():
    config = tiny_config('full_student', ranking_loss='ranknet')
    assert loss_weights(config) == {'hard': 1., 'ranking': 1.}
    losses, _ = gradient(ranked_task('ranknet'), config)
    assert losses.keys() == {'hard', 'ranking', 'total'} and losses['total'] == pytest.approx(losses['hard'] + losses['ranking'])


@pytest.mark.parametrize('dialect', DIALECTS)
@pytest.mark.parametrize('tokens', [8192, 64])
def test_a_dialect_is_what_its_system_computes(dialect, tokens):
    config, task = tiny_config('full_kd', dialect=dialect, alpha=.3, temperature=3., micro_batch_tokens=tokens), ranked_task('none', temperature=3.)
    own = {'kd_loss_weight': .3} if dialect == 'modelopt' else dict(zip(DIALECTS[dialect], (.7, .3)))
    signal = online_signal(task, tiny_teacher())
    _, theirs = in_plain_torch(task, signal, lambda s, t, batch: dialect_loss(dialect, s, t, batch.labels, 3., own))
    _, ours = gradient(task, config, signal)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    if dialect in ('textbrewer', 'modelopt'): assert np.abs(ours - gradient(task, tiny_config('full_kd', alpha=.3, temperature=3.), signal)[1]).max() > 1e-2


@pytest.mark.parametrize('cut', [dict(top_k=1), dict(min_probability=.3)], ids=str)
def test_the_cut_reaches_the_training(cut):
    task, config = ranked_task('none', **cut), tiny_config('full_kd', alpha=1., **cut)
    signal = online_signal(task, tiny_teacher())
    value, theirs = in_plain_torch(task, signal, lambda s, t, batch: soft_target_kl(s, t, 2., **cut))
    losses, ours = gradient(task, config, signal)
    assert losses['soft'] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert losses['soft'] != pytest.approx(gradient(ranked_task('none'), tiny_config('full_kd', alpha=1.), signal)[0]['soft'], rel=1e-3)


@pytest.mark.parametrize('loss', ['ranknet', 'margin_mse'])
@pytest.mark.parametrize('tokens', [8192, 64, 16])
def test_ranking_is_the_mean_over_the_pairs_of_the_step(loss, tokens):
    task, config = ranked_task(loss), tiny_config('full_kd', alpha=.4, ranking_loss=loss, ranking_weight=.25, micro_batch_tokens=tokens)
    signal, questions = online_signal(task, tiny_teacher()), torch.from_numpy(ranked_task(loss).questions['train'].of)

    def ranking(s, t, labels):
        s, t = s.diff(dim=1)[:, 0], t.diff(dim=1)[:, 0]
        return ranknet(s, questions, labels) if loss == 'ranknet' else margin_mse(s, t, questions, labels)

    def whole(s, t, batch): return .6 * torch.nn.functional.cross_entropy(s, batch.labels) + .4 * soft_target_kl(s, t, 2.) + .25 * ranking(s, t, batch.labels)
    value, theirs = in_plain_torch(task, signal, whole)
    losses, ours = gradient(task, config, signal)
    assert losses['total'] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_a_step_without_a_pair_has_no_ranking_loss():
    task = ranked_task('ranknet')
    index = np.flatnonzero(task.groups('train') == int(np.flatnonzero(task.questions['train'].positives == 0)[0]))
    losses, ours = gradient(task, tiny_config('full_student', ranking_loss='ranknet'), index=index)
    assert task.loss_counts('train', index)['ranking'] == 0 == losses['ranking']
    np.testing.assert_allclose(ours, gradient(ranked_task('none'), tiny_config('full_student'), index=index)[1], rtol=0, atol=1e-7)


def test_weight_0_is_the_control_with_the_same_steps():
    control, asked, usual = (tiny_config('full_student', **more) for more in (dict(ranking_loss='ranknet', ranking_weight=0.), dict(ranking_loss='ranknet'), {}))
    steps = [[s.index.tolist() for s in schedule_steps(ranked_task(c.ranking_loss), c)[1]] for c in (control, asked, usual)]
    assert steps[0] == steps[1] != steps[2]
    index, task = np.array(steps[0][0]), ranked_task('ranknet')
    np.testing.assert_allclose(gradient(task, control, index=index)[1], gradient(ranked_task('none'), usual, index=index)[1], rtol=0, atol=1e-7)
    assert gradient(task, control, index=index)[0]['ranking'] > .1, 'told, and not minimised'


def test_the_configuration_reaches_the_task():
    task = make_task(tiny_config('full_kd', min_probability=.2, top_k=1, ranking_loss='margin_mse'), ranked_corpus())
    assert task.cut == dict(min_probability=.2, top_k=1) and task.ranking_loss == 'margin_mse'
    assert (task.groups('train') == task.questions['train'].of).all()

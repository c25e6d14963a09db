"Every number of rows and records is a curve, nulls are none, and a resumed run's curves do not go back."

import pytest
from kdnotes.results import schema as S
from kdnotes.train.gradient_stats import gradient_ranges
from kdnotes.results.runs import RunFolder
from kdnotes.results.tracking import TensorBoard, outcome_of, scalars_of


def step(n, loss=0.5):
    return S.make_row(
        'step',
        step=n,
        epoch=0,
        loss=loss,
        losses={'hard': 0.5, 'soft': None},
        learning_rate=1e-4,
        grad_norm=float('nan'),
        examples=n,
        tokens=n,
        elapsed_s=1.0,
    )


def telemetry(**seen):
    return S.make_row(
        'telemetry', **dict.fromkeys(S.ROW_KEYS['telemetry']) | dict(elapsed_s=3.0, rank=1) | seen
    )


def gradients(scaled):
    import torch

    return S.make_row(
        'gradients',
        step=4,
        scale=1024.0,
        scaled=scaled,
        layers=gradient_ranges(
            [('embeddings.weight', torch.tensor([0.0, 1e-9, 1.0, float('inf')]))], 1024.0, scaled
        ),
    )


def events(folder):
    accumulator = pytest.importorskip(
        'tensorboard.backend.event_processing.event_accumulator', reason='tensorboard is optional'
    )
    return accumulator.EventAccumulator(str(folder / 'tb')).Reload()


def test_every_kind_of_row_is_thought_of():
    "A new kind of row, or a new reading, must not be left out unseen."
    assert set(S.ROW_KEYS) == {
        'start',
        'step',
        'eval',
        'checkpoint',
        'resume',
        'overflow',
        'gradients',
        'telemetry',
        'end',
    }
    readings = set(S.ROW_KEYS['telemetry']) - {'elapsed_s', 'rank'}
    assert {
        tag.rpartition('/')[2] for tag in scalars_of(telemetry(**dict.fromkeys(readings, 1.0)))
    } == readings


def test_gradient_ranges_become_points():
    found = scalars_of(gradients(True))
    assert (
        found['amp/loss_scale'] == 1024
        and found['gradients/embeddings/zero'] == 0.25
        and found['gradients/embeddings/not_finite'] == 0.25
    )
    assert found[
        'gradients/embeddings/plain/fp16_below_subnormal'
    ] == 0.25 and 'amp/loss_scale' not in scalars_of(gradients(False))


def mirror(folder, *rows, record=None, killed=False):
    "What a run that writes these rows leaves in TensorBoard."
    pytest.importorskip('tensorboard', reason='tensorboard is optional')
    board, at = TensorBoard(RunFolder('s', 'r', folder), 'r', {}), 0
    for row in rows:
        at = row.get('step', at)
        board.log(row, scalars_of(row), at)
    if killed:
        board.writer.flush()
    else:
        board.finish(record and outcome_of(record, {}))


def test_tensorboard_gets_it_all(tmp_path):
    end = S.make_row('end', step=2, train_s=1.0, status='done')
    rows = (telemetry(host_mib=9.0), step(1), step(2, 0.25), telemetry(host_mib=10.0), end)
    mirror(tmp_path, *rows, record=dict(steps=2, energy=dict(device_j=5.0)))
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars('loss')] == [(1, 0.5), (2, 0.25)]
    assert [(e.step, e.value) for e in found.Scalars('telemetry/rank 1/host_mib')] == [(0, 9), (2, 10)]
    assert found.Scalars('run/energy/device_j')[0].value == 5 and found.Scalars('time/train_s')[0].step == 2


def test_a_resumed_run_does_not_go_back(tmp_path):
    mirror(tmp_path, *(step(n, float(n)) for n in range(1, 6)), killed=True)
    mirror(tmp_path, S.make_row('resume', step=3, path='step-3'), *(step(n, 10.0 * n) for n in (4, 5)))
    losses = [(e.step, e.value) for e in events(tmp_path).Scalars('loss')]
    assert losses == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]


def test_runs_of_a_study_stand_in_the_tab_hparams(tmp_path):
    "As TensorBoard itself reads them for that tab."
    pytest.importorskip('tensorboard.plugins.hparams', reason='tensorboard is optional')
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    for name, kd, value in (('one', True, 0.5), ('two', False, 0.25)):
        record = dict(
            arm=name,
            seed=3,
            settings=dict(alpha=0.5, student_layers=[1, 3], min_probability=None),
            factors=dict(kd=kd, network='student'),
            metrics=dict(test=dict(map=value, f1=None)),
            time=dict(train_s=2.0),
        )
        mirror(tmp_path / name, record=record)
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    ids = (RequestContext(), '')
    experiment = context.experiment_from_metadata(
        *ids, True, context.hparams_metadata(*ids), context.hparams_from_data_provider(*ids, limit=100)
    )
    assert {i.name for i in experiment.hparam_infos} >= {'arm', 'kd', 'alpha', 'student_layers'}
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING],
    )
    groups = list_session_groups.Handler(*ids[:1], context, ids[1], asked).run().session_groups
    found = {}
    for group in groups:
        metrics = {m.name.tag: m.value for m in group.metric_values}
        found[group.hparams['arm'].string_value] = (group.hparams['kd'].string_value, metrics)
    assert {name: kd for name, (kd, _) in found.items()} == dict(one='True', two='False')
    assert {name: m['run/metrics/test/map'] for name, (_, m) in found.items()} == dict(one=0.5, two=0.25)
    assert found['one'][1]['run/time/train_s'] == 2.0

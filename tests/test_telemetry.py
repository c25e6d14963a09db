"""What is measured is right, what is not is null with a reason, and nothing reaches training (faked NVML)."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
import psutil
import pytest
from fake_nvml import COUNTER, INSTANT, LOAD, MEMORY, POWER, THROTTLE, FakeNvml
from kdnotes.telemetry import meters as M, sampler as T, summary as S
from kdnotes.telemetry.meters import (
    READINGS,
    GpuMeter,
    counted,
    counter_growth,
    integrate_power,
    open_meter,
    throttle_names,
)
from kdnotes.records.schema import ROW_KEYS
from kdnotes.telemetry.sampler import Telemetry, energy_of
from kdnotes.telemetry.summary import environment, is_busy, summarise, together


@pytest.fixture(autouse=True)
def each_time(monkeypatch):
    # however dear an answer is here
    monkeypatch.setattr(M, 'SPARING', 0.0)
    monkeypatch.setattr(T, 'MOST_SHARE', 1e9)


@pytest.fixture
def gpus(monkeypatch):
    def use(visible=None, cuda_uuid=None, **more):
        nvml = FakeNvml(**more)
        monkeypatch.setitem(sys.modules, 'pynvml', nvml)
        monkeypatch.setattr(M, '_cuda_uuid', lambda i: cuda_uuid)
        monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
        if visible is not None:
            monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
        return nvml

    return use


# energy from power


@pytest.mark.parametrize(
    't, watts, joules',
    [
        ([0, 1, 2, 3], [50] * 4, 150),
        ([0, 0.5, 3], [50] * 3, 150),  # constant power, any spacing
        ([10, 11, 14], [0, 30, 120], 30 / 2 + 3 * 75),  # a ramp, not from 0 on
        ([0, 2, 4], [0, 100, 0], 200),
        ([0, 0, 1], [0, 100, 100], 100),  # a triangle; a jump at one time
        ([], [], 0),
        ([3], [100], 0),
    ],
)
def test_integrals_of_exact_traces(t, watts, joules):
    assert integrate_power(t, watts) == pytest.approx(joules, abs=1e-12)


def test_a_split_trace_adds_up():
    t = [0, 1, 3, 4, 8]
    w = [10, 40, 20, 0, 90]
    assert integrate_power(t[:3], w[:3]) + integrate_power(t[2:], w[2:]) == integrate_power(t, w)


@pytest.mark.parametrize('t, w, why', [([1, 0], [1, 1], 'must increase'), ([0, 1], [1], 'one power a time')])
def test_a_trace_that_is_none_is_refused(t, w, why):
    with pytest.raises(ValueError, match=why):
        integrate_power(t, w)


def test_a_counter_may_wrap():
    assert (
        counted([5, 8, 12], 100) == 7 and counted([95, 3, 99, 1], 100) == 8 + 96 + 2 and counted([], 100) == 0
    )


# which GPU


@pytest.mark.parametrize(
    'visible, index, cuda_uuid, handle',
    [
        (None, 1, None, 1),
        ('3,0', 0, None, 3),
        ('3,0', 1, None, 0),
        (' 1 , 3', 1, None, 3),  # by index
        ('GPU-bb222222-3', 0, None, 2),
        ('GPU-cc333333-4,GPU-bb222222-3', 1, None, 2),
        ('GPU-cc', 0, None, 3),
        ('GPU-CC', 0, None, 3),  # by UUID, whole or its beginning
        ('0,1', 0, 'cc333333-4', 3),
        (None, 0, 'bb222222-3', 2),  # torch's UUID wins over an index
        ('GPU-cc', 0, 'aa000000-1', 3),
        ('MIG-77', 0, None, 'MIG-77'),
        ('GPU-cc,MIG-77', 1, 'aa000000-1', 'MIG-77'),
        ('2', 0, '77', 'MIG-77'),
    ],
)
def test_the_gpu_read_is_the_gpu_used(gpus, visible, index, cuda_uuid, handle):
    gpus(visible, cuda_uuid)
    assert open_meter('cuda', index).handle == handle


@pytest.mark.parametrize(
    'visible, index, why',
    [
        ('3,0', 2, 'shows 2 GPUs'),
        ('', 0, 'shows 0 GPUs'),
        ('GPU-aa', 0, '2 of the 4 GPUs'),
        ('GPU-zz', 0, '0 of the 4 GPUs'),
        ('MIG-1', 0, 'Not Found'),
        ('9', 0, 'Invalid Argument'),
    ],
)
def test_a_gpu_that_is_not_there_is_a_reason_not_an_error(gpus, visible, index, why):
    gpus(visible)
    assert why in open_meter('cuda', index).reasons['power_w']


@pytest.mark.parametrize(
    'visible, cuda_uuid',
    [(None, 'cc333333-4'), ('3', 'cc333333-4'), ('GPU-cc333333-4', None), ('GPU-cc', None)],
)
def test_a_gpu_of_others_does_not_hide_ours(gpus, visible, cuda_uuid):
    gpus(visible, cuda_uuid, forbidden={0, 1})
    assert open_meter('cuda').handle == 3


def test_a_gpu_that_is_forbidden_is_a_reason(gpus):
    gpus('GPU-aa111111-2', forbidden={1})
    assert '0 of the 3 GPUs' in open_meter('cuda').reasons['power_w']


def test_power_is_of_now_and_memory_without_the_drivers_where_nvml_can_tell(gpus):
    gpus()
    assert [open_meter('cuda').read()[k] for k in ('power_w', 'device_mib')] == [150.0, 1024.0]
    gpus(lacks={INSTANT, 'memory v2'})  # an older driver
    assert [open_meter('cuda').read()[k] for k in ('power_w', 'device_mib')] == [140.0, 1624.0]


def test_codes_are_those_of_nvml():
    import pynvml

    assert M.PASSING == tuple(
        getattr(pynvml, f'NVML_ERROR_{name}')
        for name in ('TIMEOUT', 'IN_USE', 'NO_DATA', 'NOT_READY', 'UNKNOWN')
    )
    assert (M._MEMORY_V2, M._POWER_INSTANT) == (pynvml.nvmlMemory_v2, pynvml.NVML_FI_DEV_POWER_INSTANT)


def test_a_driver_without_time_is_asked_again(gpus):
    gpus(busy={COUNTER: {2, 3}, LOAD: {2}})
    meter = open_meter('cuda')
    assert (
        [meter.joules() for _ in range(5)] == [0, None, None, 180, 240]
        and [meter.read()['gpu_percent'] for _ in range(3)] == [75, None, 75]
        and not meter.reasons
    )
    gpus(busy={COUNTER: set(range(2, 100))})
    meter = open_meter('cuda')
    assert (
        [meter.joules() for _ in range(8)] == [0] + [None] * 7
        and 'Timeout' in meter.reasons['joules']
        and meter.nvml.asked.count(COUNTER) == 1 + M.TRIES
    )


def test_a_mig_instance_does_not_report_its_neighbours(gpus):
    gpus('MIG-77')
    meter = open_meter('cuda')
    seen = meter.read()
    assert (seen['gpu_percent'], seen['device_mib'], seen['power_w']) == (
        None,
        1024.0,
        None,
    ) and meter.joules() is None
    assert 'shares its GPU' in meter.reasons['power_w'] and meter.identity()['uuid'] == 'MIG-77'
    gpus('2')  # the whole GPU in MIG mode
    assert {open_meter('cuda').read()[k] for k in ('power_w', 'device_mib')} == {None}
    gpus('0')  # a GPU without MIG
    assert open_meter('cuda').read()['power_w'] == 150


def test_each_question_of_nvml_becomes_its_reading(gpus):
    gpus('GPU-cc')
    meter = open_meter('cuda')
    seen = meter.read()
    assert set(seen) == set(READINGS) and meter.reasons == {}
    assert seen | dict(throttle=throttle_names(seen['throttle'])) == dict(
        gpu_percent=75,
        device_mib=1024.0,
        power_w=150.0,
        temperature_c=61,
        sm_mhz=1410,
        memory_mhz=2619,
        throttle=['sw_power_cap', 'hw_thermal_slowdown'],
    )
    assert meter.identity() == dict(uuid='GPU-cc333333-4', name='GPU number 3')


def test_names_of_throttle_reasons_are_those_of_nvml():
    import pynvml

    for name in M.THROTTLES:
        bits = getattr(pynvml, 'nvmlClocksEventReason' + ''.join(w.capitalize() for w in name.split('_')))
        assert throttle_names(bits) == [name]
    assert throttle_names(0) == [] and throttle_names(1 << 20) == ['bit 20']


def test_a_binding_that_lacks_a_question_is_a_reason(gpus, monkeypatch):
    gpus()
    monkeypatch.delattr(FakeNvml, THROTTLE)
    meter = open_meter('cuda')
    assert (
        meter.read()['throttle'] is None
        and THROTTLE in meter.reasons['throttle']
        and meter.read()['sm_mhz'] == 1410
    )


# a counter of energy


@pytest.mark.parametrize(
    'before, now, seconds, grown',
    [
        (0, 0, 0.1, 0),
        (100, 70_100, 0.1, 70_000),
        (2**32 - 5_000, 65_000, 0.1, 70_000),
        (2**64 - 5_000, 65_000, 0.1, 70_000),
        (2**32 + 9_000_000, 100, 0.1, None),
        (8_000_000, 100, 10.0, None),  # started anew: no wrap explains it
        (100, 100_000_000, 0.1, None),
        (100, 100_000_000, 3600.0, 99_999_900),
    ],
)  # no GPU draws a gigawatt, but a long silence is possible
def test_a_counter_wraps_or_starts_anew(before, now, seconds, grown):
    assert counter_growth(before, now, seconds) == grown


def test_a_wrap_in_the_middle_of_a_run_loses_nothing(gpus):
    gpus(
        counter=[2**32 - 200_000 + 90_000 * i for i in range(3)]
        + [(2**32 - 200_000 + 90_000 * i) % 2**32 for i in range(3, 6)]
    )
    meter = open_meter('cuda')
    assert [meter.joules() for _ in range(6)] == [0, 90, 180, 270, 360, 450]


def test_what_is_dear_to_ask_is_asked_where_a_phase_begins_and_ends(gpus, monkeypatch):
    nvml = gpus()
    monkeypatch.setattr(M, 'SPARING', 1e9)
    with Telemetry('cuda', interval_s=0.01, idle_s=0) as t:
        with t.phase('student'):
            wait_for(lambda: len(t.trace['joules']) > 8)
    used = summarise(t)
    counted = nvml.step_mj / 1000 * (nvml.asked.count(COUNTER) - 1)
    assert nvml.asked.count(COUNTER) < 8 < len(t.trace['joules']) and used['energy'][
        'device_j'
    ] == pytest.approx(counted - nvml.step_mj / 1000 * (t.trace['joules'][0] > 0))
    assert (
        0 < used['phases']['student']['device_j'] < used['energy']['device_j']
        and f"of {len(t.trace['joules'])} samples: " in used['reasons']['held']
        and 'joules ' in used['reasons']['held']
    )


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return SimpleNamespace(gpu=75)


@pytest.mark.parametrize('cost_s, least_s', [(0.05, 5.0), (0.01, 1.0)])
def test_sampling_never_takes_more_than_a_hundredth_of_a_core(gpus, monkeypatch, cost_s, least_s):
    "By its own clock, which here runs only while something waits."
    monkeypatch.setattr(T, 'MOST_SHARE', 0.01)
    clock = SimpleNamespace(now=0.0, spent=0.0)
    starts = []

    class Stop:
        def wait(self, pause):
            clock.now += pause
            return clock.now > 60

        def is_set(self):
            return clock.now > 60

        def set(self):
            pass

    def dear(handle):
        starts.append(clock.now)
        clock.now += cost_s
        clock.spent += cost_s
        return SimpleNamespace(gpu=75)

    t = Telemetry('cuda', idle_s=0)
    t.meter = GpuMeter(gpus(), 0)
    monkeypatch.setattr(t.meter.nvml, 'nvmlDeviceGetUtilizationRates', dear)
    monkeypatch.setattr(
        T, 'time', SimpleNamespace(perf_counter=lambda: clock.now, thread_time=lambda: clock.spent)
    )
    t.begin_s = t.begin_cpu_s = 0.0
    t.idle_w = None
    t._stop = Stop()
    T._watch(t)
    gaps = [b - a for a, b in zip(starts, starts[1:])]
    assert len(gaps) > 5 and min(gaps) >= least_s and max(gaps) < 1.1 * least_s
    assert clock.spent <= 0.01 * clock.now + cost_s and t.busy_s == pytest.approx(clock.spent)
    assert t.widest_s == pytest.approx(least_s, rel=0.1)


def test_what_costs_nothing_is_sampled_as_often_as_asked(gpus, monkeypatch):
    monkeypatch.setattr(T, 'MOST_SHARE', 0.01)
    monkeypatch.setattr(T, 'time', SimpleNamespace(perf_counter=time.perf_counter, thread_time=lambda: 0.0))
    gpus()
    t, used = run(interval_s=0.02)
    assert used['sampling']['widest_interval_s'] == 0.02 and 'paced' not in used['reasons']


def test_a_dear_device_is_sampled_less_often_and_the_record_says_so(gpus, monkeypatch):
    monkeypatch.setattr(T, 'MOST_SHARE', 0.1)
    nvml = gpus()
    monkeypatch.setattr(nvml, 'nvmlDeviceGetUtilizationRates', lambda handle: burn(0.05))
    t, used = run()
    monkeypatch.undo()
    assert used['sampling']['interval_s'] == 0.01 and used['sampling']['widest_interval_s'] > 0.4
    assert used['sampling']['samples'] <= 2 + t.wall_s / 0.5
    assert 'were left between two samples instead of 0.01 s' in used['reasons']['paced']
    assert together([used, used], 'cuda')['sampling']['widest_interval_s'] == t.widest_s


def test_what_changes_of_phases_take_is_paid_for_by_the_thread(gpus, monkeypatch):
    monkeypatch.setattr(T, 'MOST_SHARE', 0.001)
    nvml = gpus()
    monkeypatch.setattr(nvml, 'nvmlDeviceGetUtilizationRates', lambda handle: burn(0.02))
    with Telemetry('cuda', interval_s=0.01, idle_s=0) as t:
        for _ in range(5):
            with t.phase('student'):
                pass
        # ten changes and the first sample, of 20 ms each: they are paid for after 220 s
        time.sleep(0.5)
        assert len(t.trace['joules']) == 11


def test_a_counter_that_starts_anew_gives_way_to_power(gpus):
    gpus(counter=[500_000_000 + 60_000 * i for i in range(4)] + [10_000] * 1000)
    t, used = run()
    assert 'power integrated' in used['energy']['source'] and used['energy']['device_j'] == pytest.approx(
        150 * (t.trace['elapsed_s'][-1] - t.trace['elapsed_s'][0])
    )
    gpus(counter=[500_000_000 + 60_000 * i for i in range(4)] + [10_000] * 1000, lacks={POWER})
    _, used = run()
    assert used['energy']['device_j'] is None and all(
        why in used['reasons']['energy.device_j']
        for why in ('Not Supported', 'started anew, as after a reset of the device, after 0')
    )


# what a run used


def run(device='cuda', **kw):
    with Telemetry(device=device, **dict(interval_s=0.01, idle_s=0, row_s=0) | kw) as t:
        wait_for(lambda: len(t.trace['joules']) > 3 or t.reasons)
    return t, summarise(t)


def wait_for(condition, at_most_s=20):
    end = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def nulls(used):
    return set(S._nulls({k: v for k, v in used.items() if k != 'reasons'}))


def test_a_gpu_run(gpus):
    gpus('3')
    t, used = run()
    n = len(t.trace['joules'])
    assert n > 3
    assert used['energy'] == dict(
        device_j=60.0 * (n - 1), mean_w=60.0 * (n - 1) / t.wall_s, idle_w=150.0, source='NVML energy counter'
    )
    assert used['utilisation']['gpu_percent'] == 75 and used['sampling']['samples'] == n
    (device,) = used['devices']
    assert device == dict(
        rank=0,
        uuid='GPU-cc333333-4',
        name='GPU number 3',
        **{k: used['energy'][k] for k in ('device_j', 'mean_w', 'idle_w')},
        gpu_percent=75.0,
        temperature_c=61.0,
        device_mib=1024.0,
        sm_mhz=1410.0,
        memory_mhz=2619.0,
        throttle=dict(sw_power_cap=1.0, hw_thermal_slowdown=1.0),
    )
    times = list(t.trace['elapsed_s'])
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= t.wall_s


def test_power_is_integrated_where_there_is_no_counter(gpus):
    nvml = gpus(lacks={COUNTER})
    t, used = run()
    span = t.trace['elapsed_s'][-1] - t.trace['elapsed_s'][0]
    assert (
        used['energy']['device_j'] == pytest.approx(150 * span)
        and used['energy']['source'] == f"power integrated over {len(t.trace['elapsed_s'])} samples"
    )
    assert nvml.asked.count(COUNTER) == 1  # not asked again


def test_every_null_has_a_reason(gpus):
    gpus(lacks={COUNTER, POWER, LOAD, MEMORY})
    for device in ('cuda', 'cpu'):
        _, used = run(device)
        assert nulls(used) == set(used['reasons']) and all(used['reasons'].values())
    gpus(lacks={COUNTER, POWER})
    assert 'Not Supported' in run()[1]['reasons']['energy.device_j']


def test_without_nvml_there_is_a_reason(gpus):
    gpus(lacks={'nvmlInit'})
    _, used = run()
    assert used['energy'] == dict.fromkeys(['device_j', 'mean_w', 'idle_w', 'source'])
    assert used['reasons']['energy.device_j'] == 'NVML cannot read the GPU: Not Supported'
    assert used['memory']['peak_host_mib'] > 10


def test_the_package_of_nvml_may_be_missing(gpus, monkeypatch):
    gpus()
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert 'pynvml' in run()[1]['reasons']['energy.device_j']


def test_a_gpu_that_is_lost_ends_the_readings_and_not_the_run(gpus):
    gpus(lost_after=30)
    rows = []
    with Telemetry('cuda', rows.append, interval_s=0.002, idle_s=0, row_s=0) as t:
        with t.phase('teacher'):
            wait_for(lambda: len(t.trace['joules']) > 10)
        with t.phase('student'):
            wait_for(lambda: len(t.trace['joules']) > 40)
    used = summarise(t)
    assert rows[0]['power_w'] == 150 and rows[-1]['power_w'] is None and rows[-1]['host_mib'] > 10
    # known until then
    assert used['phases']['teacher']['device_j'] > 0 and used['phases']['teacher']['gpu_percent'] == 75
    for name in (
        'energy.device_j',
        'phases.student.device_j',
        'utilisation.gpu_percent',
        'devices.0.sm_mhz',
        'devices.0.throttle',
    ):
        assert 'GPU is lost, after ' in used['reasons'][name], name
    assert nulls(used) <= set(used['reasons']) and used['energy']['idle_w'] == 150


def test_a_missed_reading_is_taken_from_its_neighbours(gpus):
    gpus(busy={COUNTER: {6, 7}, LOAD: {14}, THROTTLE: {15, 16}})  # the first ten looks are at the idle device
    with Telemetry('cuda', interval_s=0.01, idle_s=0, row_s=0) as t:
        wait_for(lambda: len(t.trace['joules']) > 12)
    used = summarise(t)
    n = len(t.trace['joules'])
    assert (
        used['energy']['source'] == 'NVML energy counter'
        and used['energy']['device_j'] == 60.0 * (n - 1)
        and used['utilisation']['gpu_percent'] == 75
    )
    assert set(used['devices'][0]['throttle'].values()) == {1.0} and nulls(used) <= set(used['reasons'])
    assert used['reasons']['bridged'] == (
        'the driver had no time for 5 readings (gpu_percent 1, throttle 2, joules 2); they lie between '
        'those beside them'
    )


# traces of power, replayed


def replay(power=(), counter_mj=(), t_s=()):
    "A summary of samples at these times, of which NVML answered these powers and this counter."
    answers = SimpleNamespace(power=list(power), counter=list(counter_mj))

    class Replay(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle):
            return answers.power.pop(0)

        def nvmlDeviceGetTotalEnergyConsumption(self, handle):
            return answers.counter.pop(0) if answers.counter else self._answer(COUNTER, 0)

    t = Telemetry('cuda', idle_s=0)
    t.meter = GpuMeter(Replay(lacks={COUNTER, INSTANT}), 0)
    t.begin_s = time.perf_counter()
    t.begin_cpu_s = 0.0
    t.idle_w = None
    t.loads.append(1.5)
    for at in t_s:
        T._sample(t)
        t.trace['elapsed_s'][-1] = at
    assert not t.reasons
    return t


def test_a_synthetic_power_trace_gives_its_integral():
    t_s = [0, 0.1, 0.3, 0.35, 1.0, 4.0]  # uneven, as when the machine is busy
    watts = [60 + 100 * t for t in t_s]  # a ramp: the integral is 60 t + 50 t^2
    found, how = energy_of(replay([round(1e3 * w) for w in watts], t_s=t_s).trace)
    assert (found, how) == (pytest.approx(60 * 4 + 50 * 16, abs=1e-9), 'power')
    found, how = energy_of(replay([0] * 6, [1_000 * i * i for i in range(6)], t_s).trace)
    assert (found, how) == (25.0, 'counter')  # whatever the power says


def test_the_power_of_a_recorded_training_makes_what_its_counter_counted():
    session = json.loads((Path(__file__).parent / 'h100_session.json').read_text())
    t_s = [0.0, *session['elapsed_s']]
    watts = [session['power_w'][0], *session['power_w']]
    found, how = energy_of(replay([round(1e3 * w) for w in watts], t_s=t_s).trace)
    assert (
        how == 'power'
        and found == pytest.approx(session['joules'], rel=0.01)
        and found > 1.1 * session['idle_w'] * t_s[-1]
    )


def test_a_session_of_nvml_is_replayed():
    "A made-up session as NVML tells it (ms, mW, mJ): an on-off load that the power sensor half sees."
    session = json.loads((Path(__file__).parent / 'nvml_session.json').read_text())
    rows = session['samples']
    t = replay([r['mw'] for r in rows], [r['mj'] for r in rows], [r['ms'] / 1e3 for r in rows])
    # it wraps
    assert energy_of(t.trace) == (pytest.approx(session['joules']), 'counter') and (
        rows[-1]['mj'] < rows[0]['mj']
    )
    half = len(rows) // 2
    assert energy_of(t.trace, 0, half)[0] + energy_of(t.trace, half)[0] == pytest.approx(session['joules'])
    alone = replay([r['mw'] for r in rows], t_s=[r['ms'] / 1e3 for r in rows])
    assert energy_of(alone.trace) == (pytest.approx(session['joules_of_power']), 'power')
    assert session['joules_of_power'] > 1.2 * session['joules']  # why the counter is asked first


# phases


def test_phases_add_up(gpus):
    gpus()
    with Telemetry('cuda', interval_s=0.005, idle_s=0) as t:
        with t.phase('teacher'):
            time.sleep(0.05)
        with t.phase('student'):
            time.sleep(0.03)
            with t.phase('evaluation'):
                time.sleep(0.02)  # stops the student
            time.sleep(0.03)
        t.add_phase_seconds('synchronisation', 0.01), t.add_phase_seconds('synchronisation', 0.02)
    used = summarise(t)
    phases = used['phases']
    measured = [phases[name] for name in ('teacher', 'student', 'evaluation')]
    between = [(t.pieces[0][2], t.pieces[1][1])]  # teacher and student do not touch
    edges = [(None, t.pieces[0][1]), *between, (t.pieces[-1][2], None)]
    outside = sum(energy_of(t.trace, a[2] if a else 0, b[2] if b else None)[0] for a, b in edges)
    assert sum(p['device_j'] for p in measured) + outside == pytest.approx(
        used['energy']['device_j']
    ) and all(p['device_j'] > 0 for p in measured)
    assert sum(p['seconds'] for p in measured) == pytest.approx(
        t.pieces[-1][2][0] - t.pieces[0][1][0] - sum(b[0] - a[0] for a, b in between)
    )
    assert phases['student']['seconds'] >= 0.06 and phases['evaluation']['seconds'] >= 0.02
    assert phases['synchronisation'] == dict(
        seconds=pytest.approx(0.03), device_j=None, cpu_s=None, gpu_percent=None
    )
    assert 'inside other phases' in used['reasons']['phases.synchronisation.device_j']


def test_a_phase_ends_with_its_error(gpus):
    gpus()
    with Telemetry('cuda', interval_s=0.005, idle_s=0) as t:
        with pytest.raises(KeyError), t.phase('student'):
            raise KeyError
        time.sleep(0.02)
    phases = summarise(t)['phases']
    assert list(phases) == ['student'] and phases['student']['seconds'] <= t.wall_s - 0.02


def test_cpu_time_goes_to_the_phase_that_used_it():
    with Telemetry(interval_s=60) as t:
        with t.phase('student'):
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        with t.phase('evaluation'):
            time.sleep(0.05)
    phases = summarise(t)['phases']
    assert phases['student']['cpu_s'] >= 0.17 and phases['evaluation']['cpu_s'] < 0.1


# ranks together


def of_gpu(gpus, visible, **more):
    gpus(visible, **more)
    with Telemetry('cuda', interval_s=0.005, idle_s=0) as t:
        with t.phase('student'):
            wait_for(lambda: len(t.trace['joules']) > 4)
    return summarise(t)


def test_two_ranks_on_one_gpu_spend_its_energy_once(gpus):
    a = of_gpu(gpus, '3')
    b = of_gpu(gpus, 'GPU-cc')
    other = of_gpu(gpus, '0')
    one = together([a, b], 'cuda')
    both = together([a, other], 'cuda')
    assert one['energy']['device_j'] == max(s['energy']['device_j'] for s in (a, b)) and one['phases'][
        'student'
    ]['device_j'] == max(s['phases']['student']['device_j'] for s in (a, b))
    assert one['energy']['idle_w'] == 150 and both['energy']['idle_w'] == 300
    for key in ('device_j', 'mean_w'):
        assert both['energy'][key] == pytest.approx(a['energy'][key] + other['energy'][key])
    assert (
        both['phases']['student']['device_j']
        == a['phases']['student']['device_j'] + other['phases']['student']['device_j']
    )
    assert [(d['rank'], d['uuid']) for d in both['devices']] == [(0, 'GPU-cc333333-4'), (1, 'GPU-aa000000-1')]
    assert together([a, b, other], 'cuda')['energy']['device_j'] == pytest.approx(
        one['energy']['device_j'] + other['energy']['device_j']
    )


def test_what_one_rank_does_not_know_nobody_does(gpus):
    a = of_gpu(gpus, '3')
    b = of_gpu(gpus, '0', lacks={COUNTER, POWER})
    both = together([a, b], 'cuda')
    assert (
        both['energy']['device_j'] is None
        and both['phases']['student']['device_j'] is None
        and both['memory']['peak_host_mib'] > a['memory']['peak_host_mib']
    )
    assert (
        both['reasons']['energy.device_j'].startswith('rank 1: ')
        and 'Not Supported' in both['reasons']['devices.1.device_j']
    )
    assert nulls(both) == set(both['reasons']) and 'devices.0.device_j' not in both['reasons']


def test_ranks_on_cpus_read_the_same_packages(tmp_path, monkeypatch):
    rapl(tmp_path, p0=0)
    monkeypatch.setattr(T, 'open_meter', lambda *_: M.CpuMeter(tmp_path))
    with Telemetry(interval_s=60, idle_s=0) as a:
        with Telemetry(interval_s=60, idle_s=0) as b:
            rapl(tmp_path, p0=2_000_000)
        rapl(tmp_path, p0=3_000_000)
    both = together([summarise(a), summarise(b)], 'cpu')
    assert both['energy']['device_j'] == 3 and both['utilisation']['cpu_percent'] == pytest.approx(
        sum(summarise(s)['utilisation']['cpu_percent'] for s in (a, b))
    )


def test_a_summary_goes_through_json_and_one_rank_stays_itself(gpus):
    a = of_gpu(gpus, '3')
    assert json.loads(json.dumps(a)) == a and together([a], 'cuda') == a


# what others took


def machine(own_s, used_s, wall_s=10.0, steal=0.0, gpu=None):
    return dict(
        cores=4,
        wall_s=wall_s,
        used_cpu_s=used_s,
        own_cpu_s=own_s,
        load_average_start=1.0,
        load_average_mean=2.0,
        load_average_end=3.0,
        cpu_steal=steal,
        busy_share=S._others(4, used_s, own_s, wall_s),
        idle_gpu_percent=gpu,
    )


def test_sister_ranks_are_no_others():
    ranks = [machine(18.0, 37.0), machine(18.0, 37.0)]
    assert ranks[0]['busy_share'] == pytest.approx(19 / 40) and is_busy(ranks[0])
    both = S._machine_together(ranks)
    assert both['busy_share'] == pytest.approx(1 / 40) and not is_busy(both) and both['own_cpu_s'] == 36


@pytest.mark.parametrize(
    'own, used, steal, busy',
    [
        (20, 20, 0, False),
        (20, 21.9, 0, False),
        (20, 22.1, 0, True),
        (20, 21, 3.0, True),
        (20, 19.9, 0, False),
        (20, 20, None, False),
    ],
)
def test_a_busy_machine_is_flagged(own, used, steal, busy):
    found = machine(own, used, steal=steal)
    assert is_busy(found) is busy and found['busy_share'] >= 0


# the run's own last kernels are still in the first readings
@pytest.mark.parametrize(
    'before, percent, busy',
    [
        ([40] * 10, 40, True),
        ([90] * 3 + [6] * 7, 6, True),
        ([0] * 10, 0, False),
        ([90] * 3 + [5] * 7, 5, False),
    ],
)
def test_a_gpu_that_works_before_the_run_works_for_others(gpus, before, percent, busy):
    gpus('3', load=before)
    _, used = run()
    assert used['machine']['idle_gpu_percent'] == percent and used['utilisation']['gpu_percent'] == 75
    assert is_busy(used['machine'] | dict(busy_share=0.0, cpu_steal=0.0)) is busy


def test_the_busiest_gpu_counts_and_one_that_was_not_read_is_unknown(gpus):
    assert (
        S._machine_together([machine(9.0, 20.0, gpu=0.0), machine(9.0, 20.0, gpu=30.0)])['idle_gpu_percent']
        == 30
    )
    assert S._machine_together([machine(9.0, 20.0, gpu=30.0), machine(9.0, 20.0)])['idle_gpu_percent'] is None
    gpus('MIG-77')
    assert (
        'shares its GPU' in run()[1]['reasons']['machine.idle_gpu_percent']
        and run('cpu')[1]['reasons']['machine.idle_gpu_percent'] == 'no GPU was used'
    )


def test_what_was_not_recorded_is_not_idle():
    assert is_busy(dict(busy_share=None, cpu_steal=None)) is None and is_busy({}) is None


def test_a_process_beside_the_run_shows():
    with Telemetry(interval_s=60) as t:
        subprocess.run(
            [sys.executable, '-c', 'import time\nwhile time.process_time() < .8: pass'], check=True
        )
    found = summarise(t)['machine']
    assert found['used_cpu_s'] - found['own_cpu_s'] > 0.6 and found['busy_share'] == pytest.approx(
        min(1, (found['used_cpu_s'] - found['own_cpu_s']) / (found['cores'] * found['wall_s']))
    )


def rapl(folder, **microjoules):
    for name, value in microjoules.items():
        package = folder / ('intel-rapl:' + name[1:].replace('_', ':'))
        package.mkdir(exist_ok=True)
        for file, text in dict(
            name='core' if '_' in name else f'package-{name[1:]}',
            energy_uj=value,
            max_energy_range_uj=999_999_999,
        ).items():
            (package / file).write_text(f'{text}\n')


def test_cpu_packages_are_added_and_their_parts_are_not(tmp_path):
    rapl(tmp_path, p0=10_000_000, p1=999_000_000, p0_0=0)
    meter = M.CpuMeter(tmp_path)
    assert meter.joules() == 0
    rapl(tmp_path, p0=14_000_000, p1=1_000_000, p0_0=9_000_000)  # p1 wrapped
    assert meter.joules() == pytest.approx(4 + 2)
    rapl(tmp_path, p0=15_000_000)
    assert meter.joules() == pytest.approx(4 + 2 + 1)


def test_a_cpu_run_counts_its_energy(tmp_path, monkeypatch):
    rapl(tmp_path, p0=0)
    monkeypatch.setattr(T, 'open_meter', lambda *_: M.CpuMeter(tmp_path))
    with Telemetry(interval_s=60, idle_s=0.02) as t:
        time.sleep(0.05)
        rapl(tmp_path, p0=2_000_000)
    used = summarise(t)
    assert (
        used['energy']['device_j'] == 2
        and used['energy']['source'].startswith('RAPL')
        and used['energy']['mean_w'] == pytest.approx(2 / t.wall_s)
    )
    assert (
        t.trace['power_w'][-1] == pytest.approx(2 / (t.trace['elapsed_s'][-1] - t.trace['elapsed_s'][0]))
        and used['energy']['idle_w'] == 0
    )


# beside training


def test_a_broken_listener_or_driver_does_not_reach_training(gpus, monkeypatch):
    gpus()
    calls = []

    def listen(sample):
        calls.append(sample)
        raise OSError('disk full')

    with Telemetry('cuda', listen, interval_s=0.01, idle_s=0, row_s=0) as t:
        wait_for(lambda: len(t.trace['joules']) > 5)
    assert len(calls) == 1 and 'disk full' in summarise(t)['reasons']['on_sample']
    monkeypatch.setattr(GpuMeter, 'read', lambda self, sparing: 1 / 0)
    _, used = run()
    assert (
        'ZeroDivisionError' in used['reasons']['samples']
        and used['memory']['peak_host_mib'] is None
        and 'ZeroDivisionError' in used['reasons']['memory.peak_host_mib']
    )


def test_an_error_in_training_passes_and_the_thread_ends():
    with pytest.raises(KeyError):
        with Telemetry(interval_s=0.01) as t:
            raise KeyError
    assert not t._thread.is_alive() and summarise(t)['memory']['peak_host_mib'] > 10


def test_rows_are_thinner_than_samples_and_told_off_the_main_thread():
    heard = []
    with Telemetry(
        on_sample=lambda row: heard.append((threading.current_thread().name, row)),
        interval_s=0.002,
        row_s=0.1,
    ) as t:
        wait_for(lambda: len(heard) >= 3)
    n = len(t.trace['joules'])
    rows = [row for _, row in heard]
    assert len(rows) < n and {name for name, _ in heard[:-1]} == {'telemetry'}
    assert 0.1 * (len(rows) - 1) <= t.wall_s and rows[-1]['elapsed_s'] == t.trace['elapsed_s'][-1]
    assert set(rows[0]) == set(T.SAMPLE_KEYS)


def test_rows_are_at_most_one_a_second_unless_told():
    assert Telemetry().row_s == 1 and Telemetry().interval_s == 0.1


def test_a_row_is_the_mean_of_its_samples():
    t = replay([100_000, 200_000, 300_000, 100_000], t_s=[0, 1, 2, 3])
    row = T._row(t, 1, 4)
    assert (
        row['load_average'] == 1.5
        and row['power_w'] == pytest.approx(200)
        and row['elapsed_s'] == 3
        and row['throttle'] == ['sw_power_cap', 'hw_thermal_slowdown']
        and row['device_mib'] == 1024
    )


def test_a_row_can_be_written():
    assert set(T.SAMPLE_KEYS) | {'rank'} == set(ROW_KEYS['telemetry'])


def test_a_driver_that_hangs_does_not_hang_the_run(gpus, monkeypatch):
    gpus()
    released, entered = threading.Event(), threading.Event()

    def hang(self, sparing=False):
        if threading.current_thread().name == 'telemetry':
            entered.set(), released.wait(60)
        return dict.fromkeys(READINGS)

    monkeypatch.setattr(GpuMeter, 'read', hang)
    monkeypatch.setattr(T, 'DEVICE_TIMEOUT_S', 0.05)
    with Telemetry('cuda', interval_s=0.005, idle_s=0) as t:
        assert entered.wait(20)
        with t.phase('student'):
            pass
    released.set()
    used = summarise(t)
    assert (
        used['phases']['student']['device_j'] is None
        and used['phases']['student']['seconds'] > 0
        and 'did not answer' in used['reasons']['samples']
    )


def test_cpu_time_is_this_process_and_counts_cores():
    with Telemetry(interval_s=60) as idle:
        time.sleep(0.2)
    with Telemetry(interval_s=60) as busy:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
    assert busy.cpu_s >= 0.17 and idle.cpu_s < busy.cpu_s / 2
    assert summarise(busy)['utilisation']['cpu_percent'] == pytest.approx(100 * busy.cpu_s / busy.wall_s)


def test_host_memory_is_seen_growing(monkeypatch):
    held_mib = 100
    monkeypatch.setattr(psutil.Process, 'memory_info', lambda process: SimpleNamespace(rss=held_mib * 2**20))
    with Telemetry(interval_s=60) as t:
        with t.phase('student'):
            held_mib = 164
        held_mib = 116
    assert summarise(t)['memory']['peak_host_mib'] == 164


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match='interval_s must be > 0, got 0'):
        Telemetry(interval_s=0)


# the environment


def test_the_environment_has_its_keys():
    here = environment('cpu')
    assert set(here) == {
        'torch',
        'transformers',
        'python',
        'device',
        'cpu',
        'git',
        'load_average',
        'cpu_steal',
    }
    assert here['device'] == here['cpu'] and 'cores' in here['cpu'] and here['transformers']


def test_the_commit_says_when_the_tree_differs(tmp_path):
    def git(*args):
        subprocess.run(
            ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(tmp_path), *args],
            check=True,
            capture_output=True,
        )

    assert S.git_commit(tmp_path) is None
    git('init')
    assert S.git_commit(tmp_path) is None  # no commit yet
    (tmp_path / 'a').write_text('1')
    evidence = tmp_path / 'thesis/data/study.records.jsonl'
    evidence.parent.mkdir(parents=True)
    evidence.write_text('a run')
    git('add', 'a', 'thesis'), git('commit', '-m', 'one')
    clean = S.git_commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / 'new').write_text('')
    assert S.git_commit(tmp_path) == clean  # an untracked file is no change of the code
    evidence.write_text('another run')
    assert S.git_commit(tmp_path) == clean == S.git_commit(evidence.parent)  # what runs export is none either
    (tmp_path / 'a').write_text('2')
    assert S.git_commit(tmp_path) == clean + '-dirty'


def test_git_need_not_be_installed(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert S.git_commit(tmp_path) is None

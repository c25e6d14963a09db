"""What is measured is right, what is not is null with a reason, and nothing reaches training (faked NVML)."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
import pytest
from fake_nvml import COUNTER, INSTANT, LOAD, MEMORY, POWER, THROTTLE, FakeNvml
from kdnotes.telemetry import meters as M, sampler as T, summary as S
from kdnotes.telemetry.meters import Gpu, Meters, cpu_meters, gpu_meters, open_meters, throttle_names
from processes import wait_for
from kdnotes.results.schema import ROW_KEYS
from kdnotes.telemetry.sampler import Telemetry, energy_of
from kdnotes.telemetry.summary import is_busy, summarise, together


@pytest.fixture(autouse=True)
def each_time(monkeypatch):
    # however dear an answer is here
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


def gpu_meter(key, index=0):
    "What the meters of a GPU read under one name."
    return open_meters('cuda', index).read([key])[key]


# which GPU


@pytest.mark.parametrize(
    'visible, index, cuda_uuid, forbidden, found',
    [
        (None, 1, None, (), 1),
        ('3,0', 0, None, (), 3),
        ('3,0', 1, None, (), 0),
        (' 1 , 3', 1, None, (), 3),  # by index
        ('GPU-bb222222-3', 0, None, (), 2),
        ('GPU-cc333333-4,GPU-bb222222-3', 1, None, (), 2),
        ('GPU-CC', 0, None, (), 3),  # by UUID, whole or its beginning
        ('0,1', 0, 'cc333333-4', (), 3),
        ('GPU-cc', 0, 'aa000000-1', (), 3),  # torch's UUID wins over an index alone
        ('MIG-77', 0, None, (), 'MIG-77'),
        ('GPU-cc,MIG-77', 1, 'aa000000-1', (), 'MIG-77'),
        ('2', 0, '77', (), 'MIG-77'),
        (None, 0, 'cc333333-4', (0, 1), 3),  # GPUs of others do not hide ours
        ('GPU-cc', 0, None, (0, 1), 3),
        ('3,0', 2, None, (), 'shows 2 GPUs'),  # one that is not there is a reason, and no error
        ('', 0, None, (), 'shows 0 GPUs'),
        ('GPU-aa', 0, None, (), '2 of the 4 GPUs'),
        ('GPU-aa111111-2', 0, None, (1,), '0 of the 3 GPUs'),
        ('MIG-1', 0, None, (), '0 of the 4 GPUs'),
        ('9', 0, None, (), 'Invalid Argument'),
    ],
)
def test_the_gpu_read_is_the_gpu_used(gpus, visible, index, cuda_uuid, forbidden, found):
    gpus(visible, cuda_uuid, forbidden=set(forbidden))
    meters = open_meters('cuda', index)
    if isinstance(found, str) and not found.startswith('MIG'):
        assert found in meters.reasons['power_w']
    else:
        assert meters.questions['power_w'].args[0].handle == found


def test_power_is_of_now_where_nvml_can_tell(gpus):
    gpus()
    assert gpu_meter('power_w') == 150.0 and gpu_meter('device_mib') == 1024.0
    gpus(lacks={INSTANT})  # an older driver
    assert gpu_meter('power_w') == 140.0


def test_codes_are_those_of_nvml():
    import pynvml

    assert M.PASSING == tuple(
        getattr(pynvml, f'NVML_ERROR_{name}')
        for name in ('TIMEOUT', 'IN_USE', 'NO_DATA', 'NOT_READY', 'UNKNOWN')
    )
    for name in M.THROTTLES:
        bits = getattr(pynvml, 'nvmlClocksEventReason' + ''.join(w.capitalize() for w in name.split('_')))
        assert throttle_names(bits) == [name]
    assert (M._MEMORY_V2, M._POWER_INSTANT) == (pynvml.nvmlMemory_v2, pynvml.NVML_FI_DEV_POWER_INSTANT)


def test_a_driver_without_time_is_asked_again(gpus):
    gpus(busy={COUNTER: {2, 3}, LOAD: {2}})
    meters = open_meters('cuda')
    assert [meters.joules() for _ in range(5)] == [0, None, None, 180, 240]
    assert [meters.read(['gpu_percent'])['gpu_percent'] for _ in range(3)] == [75, None, 75]
    assert not meters.reasons
    nvml = gpus(busy={COUNTER: set(range(2, 100))})
    meters = open_meters('cuda')
    assert [meters.joules() for _ in range(8)] == [0] + [None] * 7
    assert meters.reasons['joules'] == f'{COUNTER}: Timeout'
    assert nvml.asked.count(COUNTER) == 1 + M.TRIES


def test_a_mig_instance_does_not_report_its_neighbours(gpus):
    gpus('MIG-77')
    meters = open_meters('cuda')
    assert meters.read(['gpu_percent', 'device_mib', 'power_w', 'joules', 'uuid']) == dict(
        gpu_percent=None, device_mib=1024.0, power_w=None, joules=None, uuid='MIG-77'
    )
    assert 'shares its GPU' in meters.reasons['power_w']
    gpus('2')  # the whole GPU in MIG mode
    assert open_meters('cuda').read(['power_w', 'device_mib']) == dict(power_w=None, device_mib=None)
    gpus('0')  # a GPU without MIG
    assert gpu_meter('power_w') == 150


# a counter of energy


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
    nvml = gpus()
    monkeypatch.setattr(nvml, 'nvmlDeviceGetUtilizationRates', dear)
    t.meters = gpu_meters(nvml, 0)
    monkeypatch.setattr(
        T, 'time', SimpleNamespace(perf_counter=lambda: clock.now, thread_time=lambda: clock.spent)
    )
    t.begin_s = 0.0
    t._stop = Stop()
    T._watch(t)
    gaps = [b - a for a, b in zip(starts, starts[1:])]
    assert len(gaps) > 5 and min(gaps) >= least_s and max(gaps) < 1.1 * least_s
    assert clock.spent <= 0.01 * clock.now + cost_s and t.busy_s == pytest.approx(clock.spent)
    assert t.widest_s == pytest.approx(least_s, rel=0.1)


def test_a_dear_device_is_sampled_less_often_and_the_record_says_so(gpus, monkeypatch):
    monkeypatch.setattr(T, 'MOST_SHARE', 0.1)
    nvml = gpus()
    monkeypatch.setattr(nvml, 'nvmlDeviceGetUtilizationRates', lambda handle: burn(0.05))
    t, used = run()
    monkeypatch.undo()
    assert used['sampling']['interval_s'] == 0.01 and used['sampling']['widest_interval_s'] > 0.4
    assert used['sampling']['samples'] <= 2 + t.wall_s / 0.5
    assert 's passed between two samples instead of 0.01 s' in used['reasons']['paced']
    assert together([used, used], 'cuda')['sampling']['widest_interval_s'] == t.widest_s


def test_a_counter_that_starts_anew_gives_way_to_power(gpus):
    gpus(counter=[500_000_000 + 60_000 * i for i in range(14)] + [10_000] * 1000)
    t, used = run()
    assert 'power integrated' in used['energy']['source'] and used['energy']['device_j'] == pytest.approx(
        150 * (t.trace['elapsed_s'][-1] - t.trace['elapsed_s'][0])
    )
    gpus(counter=[500_000_000 + 60_000 * i for i in range(14)] + [10_000] * 1000, lacks={POWER})
    _, used = run()
    assert used['energy']['device_j'] is None and all(
        why in used['reasons']['energy.device_j']
        for why in ('Not Supported', 'restarted, as after a reset of the device, after 0')
    )


# what a run used


def run(device='cuda', **kw):
    with Telemetry(device=device, **dict(interval_s=0.01, idle_s=0, row_s=0) | kw) as t:
        wait_for(lambda: len(t.trace['joules']) > 3 or t.reasons)
    return t, summarise(t)


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


def test_every_null_has_a_reason(gpus):
    gpus(lacks={COUNTER, POWER, LOAD, MEMORY})
    for device in ('cuda', 'cpu'):
        _, used = run(device)
        assert nulls(used) == set(used['reasons']) and all(used['reasons'].values())
    gpus(lacks={COUNTER, POWER})
    assert 'Not Supported' in run()[1]['reasons']['energy.device_j']


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
    # the first ten readings are of the idle device
    gpus(busy={COUNTER: {14, 15}, LOAD: {14}, THROTTLE: {5, 6}})
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
        'the driver did not answer in time for 5 readings (gpu_percent 1, throttle 2, joules 2); '
        'they are interpolated'
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
    t.meters = gpu_meters(Replay(lacks={COUNTER, INSTANT}), 0)
    t.begin_s = time.perf_counter()
    for at in t_s:
        T._sample(t)
        t.trace['elapsed_s'][-1] = at
    assert not t.reasons
    return t


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
        idle_gpu_percent=gpu,
    )


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
    found['busy_share'] = S._busy_share(found)
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


def test_a_cpu_run_counts_its_energy(tmp_path, monkeypatch):
    rapl(tmp_path, p0=0)
    monkeypatch.setattr(T, 'open_meters', lambda *_: cpu_meters(tmp_path))
    rows = []
    with Telemetry(on_sample=rows.append, interval_s=60, idle_s=0.02) as t:
        time.sleep(0.05)
        rapl(tmp_path, p0=2_000_000)
    used = summarise(t)
    assert used['energy']['device_j'] == 2 and used['energy']['source'].startswith('RAPL')
    assert used['energy']['mean_w'] == pytest.approx(2 / t.wall_s) and used['energy']['idle_w'] == 0
    assert rows[-1]['power_w'] == pytest.approx(2 / (t.trace['elapsed_s'][-1] - t.trace['elapsed_s'][0]))


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
    monkeypatch.setattr(Meters, 'read', lambda self, names: 1 / 0 if len(names) > 3 else dict.fromkeys(names))
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


def test_a_row_can_be_written():
    assert set(T.SAMPLE_KEYS) | {'rank'} == set(ROW_KEYS['telemetry'])


def test_a_driver_that_hangs_does_not_hang_the_run(gpus, monkeypatch):
    gpus()
    released, entered = threading.Event(), threading.Event()

    ask = Gpu.ask

    def hang(self, *question):
        if threading.current_thread().name == 'telemetry':
            entered.set(), released.wait(60)
        return ask(self, *question)

    monkeypatch.setattr(Gpu, 'ask', hang)
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


# the environment


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

"""What is measured is right, what is not is null with a reason, and nothing reaches training. NVML is faked: no test needs a GPU."""
import subprocess, sys, threading, time
from types import SimpleNamespace
import pytest
from kdnotes import telemetry as T
from kdnotes.records import ROW_KEYS
from kdnotes.telemetry import GpuMeter, Telemetry, counted, environment, integrate_power, open_meter, visible_gpu

UUIDS = ['GPU-aa000000-1', 'GPU-aa111111-2', 'GPU-bb222222-3', 'GPU-cc333333-4']


class FakeNvml:
    """A machine with four GPUs; GPU 2 is cut into MIG instances. A handle is the GPU's index or the instance's UUID."""
    class NVMLError(Exception): pass

    def __init__(self, lacks=()): self.lacks, self.asked, self.millijoules = lacks, [], 5_000_000
    def _answer(self, question, value):
        self.asked.append(question)
        if question in self.lacks: raise self.NVMLError('Not Supported')
        return value
    def nvmlInit(self): self._answer('init', None)
    def nvmlDeviceGetCount(self): return len(UUIDS)
    def nvmlDeviceGetHandleByIndex(self, i):
        if not 0 <= i < len(UUIDS): raise self.NVMLError('Invalid Argument')
        return i
    def nvmlDeviceGetUUID(self, handle): return UUIDS[handle]
    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != 'MIG-77': raise self.NVMLError('Not Found')
        return uuid
    def nvmlDeviceIsMigDeviceHandle(self, handle): return int(isinstance(handle, str))
    def nvmlDeviceGetMigMode(self, handle):
        if handle == 0: raise self.NVMLError('Not Supported')
        return [int(handle == 2)] * 2
    def nvmlDeviceGetUtilizationRates(self, handle): return self._answer('gpu_percent', SimpleNamespace(gpu=75, memory=10))
    def nvmlDeviceGetMemoryInfo(self, handle): return self._answer('memory', SimpleNamespace(used=2**30))
    def nvmlDeviceGetPowerUsage(self, handle): return self._answer('power', 150_000)
    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.millijoules += 60_000
        return self._answer('energy', self.millijoules)


@pytest.fixture
def gpus(monkeypatch):
    def use(visible=None, cuda_uuid=None, lacks=()):
        nvml = FakeNvml(lacks)
        monkeypatch.setitem(sys.modules, 'pynvml', nvml)
        monkeypatch.setattr(T, '_cuda_uuid', lambda i: cuda_uuid)
        monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
        if visible is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
        return nvml
    return use


# energy from power

@pytest.mark.parametrize('t, watts, joules', [
    ([0, 1, 2, 3], [50] * 4, 150), ([0, .5, 3], [50] * 3, 150),             # constant power, any spacing
    ([10, 11, 14], [0, 30, 120], 30 / 2 + 3 * 75),                          # a ramp, not from 0 on
    ([0, 2, 4], [0, 100, 0], 200), ([0, 0, 1], [0, 100, 100], 100),         # a triangle; a jump at one time
    ([], [], 0), ([3], [100], 0)])
def test_integrals_of_exact_traces(t, watts, joules): assert integrate_power(t, watts) == pytest.approx(joules, abs=1e-12)


def test_a_split_trace_adds_up():
    t, w = [0, 1, 3, 4, 8], [10, 40, 20, 0, 90]
    assert integrate_power(t[:3], w[:3]) + integrate_power(t[2:], w[2:]) == integrate_power(t, w)


@pytest.mark.parametrize('t, w, why', [([1, 0], [1, 1], 'must increase'), ([0, 1], [1], 'one power a time')])
def test_a_trace_that_is_none_is_refused(t, w, why):
    with pytest.raises(ValueError, match=why): integrate_power(t, w)


def test_a_counter_may_wrap():
    assert counted([5, 8, 12], 100) == 7 and counted([95, 3, 99, 1], 100) == 8 + 96 + 2 and counted([], 100) == 0


# which GPU

@pytest.mark.parametrize('visible, index, cuda_uuid, handle', [
    (None, 1, None, 1), ('3,0', 0, None, 3), ('3,0', 1, None, 0), (' 1 , 3', 1, None, 3),  # by index
    ('GPU-bb222222-3', 0, None, 2), ('GPU-cc333333-4,GPU-bb222222-3', 1, None, 2), ('GPU-cc', 0, None, 3), ('GPU-CC', 0, None, 3),  # by UUID, whole or its beginning
    ('0,1', 0, 'cc333333-4', 3), (None, 0, 'bb222222-3', 2),               # torch's UUID wins over an index
    ('GPU-cc', 0, 'aa000000-1', 3),
    ('MIG-77', 0, None, 'MIG-77'), ('GPU-cc,MIG-77', 1, 'aa000000-1', 'MIG-77')])
def test_the_gpu_read_is_the_gpu_used(gpus, visible, index, cuda_uuid, handle):
    gpus(visible, cuda_uuid)
    assert open_meter('cuda', index).handle == handle


@pytest.mark.parametrize('visible, index, why', [
    ('3,0', 2, 'shows 2 GPUs'), ('', 0, 'shows 0 GPUs'), ('GPU-aa', 0, '2 of the 4 GPUs'), ('GPU-zz', 0, '0 of the 4 GPUs'), ('MIG-1', 0, 'Not Found'), ('9', 0, 'Invalid Argument')])
def test_a_gpu_that_is_not_there_is_a_reason_not_an_error(gpus, visible, index, why):
    gpus(visible)
    assert why in open_meter('cuda', index).reasons['power_w']


def test_a_mig_instance_does_not_report_its_neighbours(gpus):
    gpus('MIG-77')
    meter = open_meter('cuda')
    assert meter.read() == dict(gpu_percent=None, device_mib=1024., power_w=None) and meter.joules() is None
    assert 'shares its GPU' in meter.reasons['power_w']
    gpus('2')  # the whole GPU in MIG mode
    assert open_meter('cuda').read()['power_w'] is None
    gpus('0')  # a GPU without MIG
    assert open_meter('cuda').read()['power_w'] == 150


# what a run used

def run(device='cuda', **kw):
    with Telemetry(device=device, interval_s=.01, idle_s=0, **kw) as t: wait_for(lambda: len(t.samples) > 2 or t.reasons)
    return t, t.summary()


def wait_for(condition, at_most_s=20):
    end = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < end: time.sleep(.01)
    assert condition()


def test_a_gpu_run(gpus):
    gpus('3')
    t, used = run()
    n = len(t.samples)
    assert n > 2
    assert used['energy'] == dict(device_j=60. * (n - 1), mean_w=60. * (n - 1) / t.wall_s, idle_w=150., source='NVML energy counter')
    assert used['utilisation']['gpu_percent'] == 75
    assert set(t.samples[0]) == set(ROW_KEYS['telemetry']) - {'rank'}
    assert t.samples[-1]['device_mib'] == 1024
    times = [s['elapsed_s'] for s in t.samples]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= t.wall_s


def test_power_is_integrated_where_there_is_no_counter(gpus):
    nvml = gpus(lacks={'energy'})
    t, used = run()
    span = t.samples[-1]['elapsed_s'] - t.samples[0]['elapsed_s']
    assert used['energy']['device_j'] == pytest.approx(150 * span) and used['energy']['source'] == f'power integrated over {len(t.samples)} samples'
    assert nvml.asked.count('energy') == 1  # not asked again


def test_a_counter_that_starts_anew_is_not_believed(gpus, monkeypatch):
    gpus()
    monkeypatch.setattr(GpuMeter, 'joules', lambda self, left=[500., 600.]: left.pop(0) if left else 3.)
    assert 'power integrated' in run()[1]['energy']['source']


def test_every_null_has_a_reason(gpus):
    gpus(lacks={'energy', 'power', 'gpu_percent', 'memory'})
    for device in ('cuda', 'cpu'):
        _, used = run(device)
        nulls = {f'{part}.{k}' for part in ('memory', 'energy', 'utilisation') for k, v in used[part].items() if v is None}
        assert nulls == set(used['reasons']) and all(used['reasons'].values())
    gpus(lacks={'energy', 'power'})
    assert 'Not Supported' in run()[1]['reasons']['energy.device_j']


def test_without_nvml_there_is_a_reason(gpus):
    gpus(lacks={'init'})
    _, used = run()
    assert used['energy'] == dict.fromkeys(['device_j', 'mean_w', 'idle_w', 'source'])
    assert used['reasons']['energy.device_j'] == 'NVML cannot read the GPU: Not Supported'
    assert used['memory']['peak_host_mib'] > 10


def test_the_package_of_nvml_may_be_missing(gpus, monkeypatch):
    gpus()
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert 'pynvml' in run()[1]['reasons']['energy.device_j']


def rapl(folder, **microjoules):
    for name, value in microjoules.items():
        package = folder/('intel-rapl:' + name[1:].replace('_', ':'))
        package.mkdir(exist_ok=True)
        for file, text in dict(name='core' if '_' in name else f'package-{name[1:]}', energy_uj=value, max_energy_range_uj=999_999_999).items(): (package/file).write_text(f'{text}\n')


def test_cpu_packages_are_added_and_their_parts_are_not(tmp_path):
    rapl(tmp_path, p0=10_000_000, p1=999_000_000, p0_0=0)
    meter = T.CpuMeter(tmp_path)
    assert meter.joules() == 0
    rapl(tmp_path, p0=14_000_000, p1=1_000_000, p0_0=9_000_000)  # p1 wrapped
    assert meter.joules() == pytest.approx(4 + 2)
    rapl(tmp_path, p0=15_000_000)
    assert meter.joules() == pytest.approx(4 + 2 + 1)


def test_a_cpu_run_counts_its_energy(tmp_path, monkeypatch):
    rapl(tmp_path, p0=0)
    monkeypatch.setattr(T, 'open_meter', lambda *_: T.CpuMeter(tmp_path))
    with Telemetry(interval_s=60) as t:
        time.sleep(.05)
        rapl(tmp_path, p0=2_000_000)
    used = t.summary()
    assert used['energy']['device_j'] == 2 and used['energy']['source'].startswith('RAPL') and used['energy']['mean_w'] == pytest.approx(2 / t.wall_s)
    assert t.samples[-1]['power_w'] == pytest.approx(2 / (t.samples[-1]['elapsed_s'] - t.samples[0]['elapsed_s']), rel=.05)


# beside training

def test_a_broken_listener_or_driver_does_not_reach_training(gpus, monkeypatch):
    gpus()
    calls = []
    def listen(sample):
        calls.append(sample)
        raise OSError('disk full')
    t, used = run(on_sample=listen)
    assert len(calls) == 1 and 'disk full' in used['reasons']['on_sample'] and len(t.samples) > 1
    monkeypatch.setattr(GpuMeter, 'read', lambda self: 1 / 0)
    _, used = run()
    assert 'ZeroDivisionError' in used['reasons']['samples'] and used['memory']['peak_host_mib'] is None and 'ZeroDivisionError' in used['reasons']['memory.peak_host_mib']


def test_an_error_in_training_passes_and_the_thread_ends():
    with pytest.raises(KeyError):
        with Telemetry(interval_s=.01) as t: raise KeyError
    assert not t._thread.is_alive() and t.summary()['memory']['peak_host_mib'] > 10


def test_the_listener_hears_every_sample_off_the_main_thread():
    heard = []
    with Telemetry(on_sample=lambda s: heard.append((threading.current_thread().name, s)), interval_s=.01) as t: wait_for(lambda: len(t.samples) > 3)
    assert [s for _, s in heard] == t.samples and {name for name, _ in heard[1:-1]} == {'telemetry'}


def test_cpu_time_is_this_process_and_counts_cores():
    with Telemetry(interval_s=60) as idle: time.sleep(.2)
    with Telemetry(interval_s=60) as busy:
        end = time.process_time() + .2
        while time.process_time() < end: pass
    assert busy.cpu_s >= .19 and idle.cpu_s < busy.cpu_s / 2
    assert busy.summary()['utilisation']['cpu_percent'] == pytest.approx(100 * busy.cpu_s / busy.wall_s)


def test_host_memory_is_seen_growing():
    with Telemetry(interval_s=60) as small: pass
    with Telemetry(interval_s=60) as large: held = bytearray(b'x') * (64 * 2**20)
    assert large.summary()['memory']['peak_host_mib'] > small.summary()['memory']['peak_host_mib'] + 40 and held


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match='interval_s must be > 0, got 0'): Telemetry(interval_s=0)


# the environment

def test_the_environment_has_its_keys():
    here = environment('cpu')
    assert set(here) == {'torch', 'transformers', 'python', 'device', 'cpu', 'git', 'load_average', 'cpu_steal'}
    assert here['device'] == here['cpu'] and 'cores' in here['cpu'] and here['transformers']


def test_the_commit_says_when_the_tree_differs(tmp_path):
    def git(*args): subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(tmp_path), *args], check=True, capture_output=True)
    assert T.git_commit(tmp_path) is None
    git('init')
    assert T.git_commit(tmp_path) is None  # no commit yet
    (tmp_path/'a').write_text('1')
    git('add', 'a'), git('commit', '-m', 'one')
    clean = T.git_commit(tmp_path)
    assert len(clean) == 40
    (tmp_path/'new').write_text('')
    assert T.git_commit(tmp_path) == clean  # an untracked file is no change of the code
    (tmp_path/'a').write_text('2')
    assert T.git_commit(tmp_path) == clean + '-dirty'


def test_git_need_not_be_installed(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert T.git_commit(tmp_path) is None

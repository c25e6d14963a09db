"""A machine with four GPUs that answers NVML's questions under NVML's names and fails with NVML's own
errors; no test needs a GPU.
"""

from types import SimpleNamespace
import pynvml

UUIDS = ['GPU-aa000000-1', 'GPU-aa111111-2', 'GPU-bb222222-3', 'GPU-cc333333-4']
COUNTER = 'nvmlDeviceGetTotalEnergyConsumption'
POWER = 'nvmlDeviceGetPowerUsage'
LOAD = 'nvmlDeviceGetUtilizationRates'
MEMORY = 'nvmlDeviceGetMemoryInfo'
HEAT = 'nvmlDeviceGetTemperature'
CLOCK = 'nvmlDeviceGetClockInfo'
THROTTLE = 'nvmlDeviceGetCurrentClocksEventReasons'
INSTANT = 'nvmlDeviceGetFieldValues'


class FakeNvml:
    """GPU 2 is cut into MIG instances. A handle is the GPU's index or the instance's UUID."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM

    def __init__(
        self, lacks=(), lost_after=None, counter=(), step_mj=60_000, load=(), forbidden=(), busy=None
    ):
        # GPUs of others; question -> calls, from 1, at which the driver has no time
        self.forbidden = forbidden
        self.busy = busy or {}
        self.lacks = lacks
        self.lost_after = lost_after
        self.counter = list(counter)
        self.step_mj = step_mj
        self.asked = []
        self.millijoules = 5_000_000
        self.load = list(load)

    def _answer(self, question, value):
        self.asked.append(question)
        if question in self.lacks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if self.asked.count(question) in self.busy.get(question, ()):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        if self.lost_after is not None and self.asked.count(question) > self.lost_after:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return value

    def nvmlInit(self):
        self._answer('nvmlInit', None)

    def nvmlDeviceGetCount(self):
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, i):
        if not 0 <= i < len(UUIDS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if i in self.forbidden:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return i

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid in UUIDS:
            return self.nvmlDeviceGetHandleByIndex(UUIDS.index(uuid))
        if uuid != 'MIG-77':
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return UUIDS[handle] if isinstance(handle, int) else handle

    def nvmlDeviceGetName(self, handle):
        return f'GPU number {handle}'

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return int(isinstance(handle, str))

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(handle == 2)] * 2

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer(LOAD, SimpleNamespace(gpu=self.load.pop(0) if self.load else 75, memory=10))

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):  # the first form adds what the driver keeps
        kept = 0 if version == pynvml.nvmlMemory_v2 else 600 * 2**20
        return self._answer(MEMORY, SimpleNamespace(used=2**30 + kept))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer(POWER, 140_000)  # the mean of the last second

    def nvmlDeviceGetFieldValues(self, handle, fields):  # a field that is not there is no error of the call
        assert fields == [pynvml.NVML_FI_DEV_POWER_INSTANT]
        lacks = {INSTANT, POWER} & set(self.lacks)
        return [
            SimpleNamespace(
                nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED if lacks else 0,
                value=SimpleNamespace(uiVal=0 if lacks else self._answer(INSTANT, 150_000)),
            )
        ]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self._answer(HEAT, {pynvml.NVML_TEMPERATURE_GPU: 61}[sensor])

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return self._answer(CLOCK, {pynvml.NVML_CLOCK_SM: 1410, pynvml.NVML_CLOCK_MEM: 2619}[clock])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer(
            THROTTLE, pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        )

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.counter:
            return self._answer(COUNTER, self.counter.pop(0))
        self.millijoules += self.step_mj
        return self._answer(COUNTER, self.millijoules)

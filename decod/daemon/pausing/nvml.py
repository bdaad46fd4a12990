"""What NVIDIA's driver tells of a GPU, behind one small interface.

The package `nvidia-ml-py` is optional: it comes with the extra `gpu`. Without it, or without a
driver that answers, the rules that need it can't be known.
"""

from dataclasses import dataclass
from typing import Any, Protocol


class UnknownError(Exception):
    """Something about this host can't be known. The text says why."""


@dataclass(frozen=True, slots=True)
class OwnGpu:
    """A GPU on which a compute process, or a rank of it, works."""

    uuid: str
    """Its name at the driver."""
    pid: int
    """The process."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    memory_bytes: int
    """0 if it is not known."""
    utilization: float
    """Part of the time in which it computes, from 0 to 1; 0 if it is not known."""


class Nvml(Protocol):
    """What is asked of the driver. Calls may block, and may raise `UnknownError`."""

    def processes(self, uuid: str) -> list[GpuProcess]:
        """Return the processes on a GPU."""

    def heat(self, uuid: str) -> tuple[float, float]:
        """Return the temperature of a GPU, and that at which it slows down, in degrees Celsius."""


class NvidiaMl:
    """NVML as `nvidia-ml-py` reaches it. Nothing is imported or loaded before the first call."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._asked_us: dict[str, int] = {}
        """The time of the last sample of each GPU's use, in the driver's microseconds."""

    def processes(self, uuid: str) -> list[GpuProcess]:
        nvml, handle = self._opened(uuid)
        memory: dict[int, int] = {}
        try:
            for each in (
                *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ):
                # A process may compute and draw. Each list counts all its memory.
                memory[each.pid] = max(memory.get(each.pid, 0), each.usedGpuMemory or 0)
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver does not list processes: {error}") from error
        busy = self._utilization(nvml, handle, uuid)
        pids = {**memory, **busy}
        return [GpuProcess(pid, memory.get(pid, 0), busy.get(pid, 0.0)) for pid in pids]

    def heat(self, uuid: str) -> tuple[float, float]:
        nvml, handle = self._opened(uuid)
        try:
            now_c = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            slow_c = nvml.nvmlDeviceGetTemperatureThreshold(
                handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            )
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver tells no temperature: {error}") from error
        return float(now_c), float(slow_c)

    def _opened(self, uuid: str) -> tuple[Any, Any]:
        """Return the library and its handle of a GPU."""
        if self._pynvml is None:
            self._pynvml = _loaded()
        nvml = self._pynvml
        try:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver does not know {uuid}: {error}") from error

    def _utilization(self, nvml: Any, handle: Any, uuid: str) -> dict[int, float]:
        """Return how busy each process was since the last call, by its id."""
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._asked_us.get(uuid, 0))
        except nvml.NVMLError:
            # Nobody has computed, or this device does not tell. Memory is known all the same.
            return {}
        busy: dict[int, float] = {}
        for sample in samples:
            self._asked_us[uuid] = max(self._asked_us.get(uuid, 0), sample.timeStamp)
            # Old drivers give percentages out of range for processes that have ended.
            busy[sample.pid] = max(busy.get(sample.pid, 0.0), min(1.0, sample.smUtil / 100))
        return busy


def _loaded() -> Any:
    """Return the library, ready for use."""
    try:
        import pynvml
    except ImportError as error:
        raise UnknownError("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UnknownError(f"NVIDIA's driver does not answer: {error}") from error
    return pynvml

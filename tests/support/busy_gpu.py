"""A `decod join` on a host whose GPU others use as long as a file exists.

    python -m tests.support.busy_gpu FILE join JOINSTRING ...

Driver and GPU are made up, and the node resumes after a second instead of a minute. The rest is
real.
"""

import sys
from pathlib import Path

OWN = "GPU-made-up"


def program(file: Path) -> tuple[str, ...]:
    """Return the program for a cluster."""
    return (sys.executable, "-u", "-m", "tests.support.busy_gpu", str(file))


class _Driver:
    def __init__(self, file: Path) -> None:
        self._file = file

    def processes(self, uuid: str) -> list[object]:
        from decod.daemon.pausing.pause_probes import GpuProcess

        assert uuid == OWN
        others = [GpuProcess(2, 6 << 30, 0.9)] if self._file.exists() else []
        return [GpuProcess(1, 1 << 30, 1.0), *others]

    def heat(self, uuid: str) -> tuple[float, float]:
        return 40.0, 90.0


def _make_up(file: Path) -> None:
    from decod.config.schedule import PauseRule
    from decod.daemon.device_owner import HostDevice
    from decod.daemon.pausing import keeper, pause_probes
    from decod.daemon.pausing.pause_probes import OwnGpu

    keeper.NvidiaMl = lambda: _Driver(file)  # type: ignore[assignment, misc]
    HostDevice.gpus = property(lambda _: (OwnGpu(OWN, 1),))  # type: ignore[assignment, method-assign]
    pause_probes.CALM_S = dict.fromkeys(PauseRule, 1.0)  # type: ignore[misc]


if __name__ == "__main__":
    from decod.cli.main import main

    _make_up(Path(sys.argv.pop(1)))
    sys.exit(main())

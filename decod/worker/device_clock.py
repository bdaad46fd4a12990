"""How long a CUDA device works for a job, by the device's own clock.

The host's clock would include what the device still does of an earlier job.
"""

import torch


class DeviceClock:
    """The clock of one device, for one job after another.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        """Return an instant: when the device has done what it was told so far."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """A job begins, once the device has done what was told before."""
        self._begun, self._ended = self.mark(), None

    def end(self) -> None:
        """The job's work has all been told."""
        self._ended = self.mark()

    def busy_s(self, wall_s: float, copy_s: float) -> float:
        """Return the time of the job that has ended.

        Args:
            wall_s: By the host's clock.
            copy_s: The part of it in which a result travelled to the host.
        """
        if self._begun is None or self._ended is None:
            return wall_s
        self._ended.synchronize()
        milliseconds: float = self._begun.elapsed_time(self._ended)
        return min(wall_s, milliseconds / 1e3 + copy_s)

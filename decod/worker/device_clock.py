"""How long a CUDA device works for a job, by the device's own clock.

A backward pass puts products off until its result is on its way. They still run when the next job
begins, whose time by the host's clock would include them.
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
        self._later: tuple[str, torch.cuda.Event, torch.cuda.Event] | None = None

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
        return min(wall_s, _between_s(self._begun, self._ended) + copy_s)

    def went_on(self, kind: str, begun: torch.cuda.Event) -> None:
        """Note that what the device was told since an instant is work that no job waits for.

        Args:
            kind: Of the job that has put it off.
            begun: The instant.
        """
        self._later = kind, begun, self.mark()

    def take_later_s(self) -> dict[str, float]:
        """Return the time of that work by the job's kind, once it is done, and only once."""
        if self._later is None or not self._later[2].query():  # type: ignore[no-untyped-call]
            return {}
        (kind, begun, ended), self._later = self._later, None
        return {kind: _between_s(begun, ended)}


def _between_s(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    milliseconds: float = begun.elapsed_time(ended)
    return milliseconds / 1e3

"""Event files for TensorBoard, written with tensorboardX, which needs no torch.

Its lower layer is used: the usual `SummaryWriter` writes in a thread, whose errors nobody sees.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary


class TensorBoardFolder:
    """The event files of one run in a folder of its own.

    When the run goes back, a new file begins. A file begins with the mark on which TensorBoard
    forgets the later iterations of earlier files. A new file begins after a failure, too: the old
    one may end in the middle of a record.

    Args:
        folder: Is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventsWriter | None = None
        self._num_files = 0
        self._last = 0
        """The newest iteration with a row."""

    def write(self, iteration: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Write some numbers of an iteration, down to the disk's cache.

        Raises:
            OSError: The disk is full, or the folder can't be written.
        """
        # Held-out loss comes later than the iterations that were trained meanwhile.
        is_row = "loss" in numbers
        try:
            if self._writer is None or (is_row and iteration <= self._last):
                self.close()
                self._writer = self._opened(time_s, iteration if is_row else self._last + 1)
            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
            event = Event(wall_time=time_s, step=iteration, summary=Summary(value=values))
            self._writer.write_event(event)
            self._writer.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise
        if is_row:
            self._last = iteration

    def _opened(self, time_s: float, first: int) -> EventsWriter:
        """Open a file whose rows replace the earlier ones from iteration `first` on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_files += 1
        # Names hold the second in which a file begins. The suffix tells two of them apart.
        writer = EventsWriter(str(self._folder / "events"), f".{self._num_files}")
        mark = SessionLog(status=SessionLog.START)
        writer.write_event(Event(wall_time=time_s, step=first, session_log=mark))
        return writer

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: Its end can't be written.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

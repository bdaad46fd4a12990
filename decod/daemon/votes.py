"""A node's last vote, kept on disk so that it can't vote twice in a term after a restart."""

import json
from pathlib import Path

from decod.errors import DecodError, HardwareError
from decod.files import read_beginning, replace_durably
from decod.ids import RunId
from decod.protocol.core.context import NO_PROMISE, Promise
from decod.texts import why_of, why_unwritten
from decod.wire import validate

_SIZE_MAX_BYTES = 64 * 1024


class VoteFile:
    """The vote of one run, in the folder of that run.

    Args:
        state_dir: The node's state folder.
        run_id: The run. Votes in other runs do not count.
    """

    def __init__(self, state_dir: Path, run_id: RunId) -> None:
        self._path = state_dir / "runs" / run_id / "vote.json"

    def load(self) -> Promise:
        """Return the vote that was kept last, or `NO_PROMISE` if there is none.

        Raises:
            HardwareError: The file can't be read. Without it, the node might vote twice (E-HW-008).
        """
        try:
            fields = json.loads(read_beginning(self._path, _SIZE_MAX_BYTES))
            term = validate.iteration("term", int(fields["term"]))
            return Promise(term, validate.node_id("candidate", fields["candidate"]))
        except FileNotFoundError:
            return NO_PROMISE
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DecodError) as error:
            raise HardwareError(
                f"can't read {self._path}",
                why=f"{why_of(error)}: without it this node might vote twice for a leader",
                fix="remove the file if this node has been out of the run for a minute",
                code="E-HW-008",
            ) from error

    def keep(self, promise: Promise) -> str:
        """Write a vote so that it survives a loss of power.

        Returns:
            Which file could not be written, and why; empty if the vote is on disk.
        """
        text = json.dumps({"term": promise.term, "candidate": promise.candidate})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(self._path, text.encode("utf-8"))
        except OSError as error:
            return why_unwritten(self._path, error)
        return ""

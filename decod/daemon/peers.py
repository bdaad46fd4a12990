"""Addresses of a run's members, kept on disk: an old join string still leads to the run by them.

A join string names nodes that may all be gone when it is used again, such as a leader that has
been replaced. A host that was in the run before has seen others.
"""

import json
from contextlib import suppress
from pathlib import Path

from decod.errors import MalformedMessageError
from decod.files import read_beginning
from decod.ids import RunId
from decod.protocol.view import View
from decod.wire import validate

KEPT_MAX = 16
"""Addresses; data nodes go first, for one of them leads as long as the run lives."""

_SIZE_MAX_BYTES = 64 * 1024


class KnownPeers:
    """A file in the folder of each run. What can't be read is as if it were not there."""

    def __init__(self, state_dir: Path) -> None:
        self._runs = state_dir / "runs"

    def keep(self, run_id: RunId, view: View, *, own: str) -> None:
        """Remember a view's members, this node's own address left out."""
        addresses = [m.address for m in view.members if m.address != own][:KEPT_MAX]
        path = self._path(run_id)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(addresses), encoding="utf-8")
            new.replace(path)

    def find(self, run_id: RunId) -> tuple[str, ...]:
        """Return the addresses that were kept last."""
        try:
            addresses = json.loads(read_beginning(self._path(run_id), _SIZE_MAX_BYTES))
            found = [validate.address("address", address) for address in addresses[:KEPT_MAX]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError, MalformedMessageError):
            return ()
        return tuple(found)

    def _path(self, run_id: RunId) -> Path:
        return self._runs / run_id / "peers.json"

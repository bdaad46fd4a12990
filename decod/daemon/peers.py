"""Addresses of a run's members, kept on disk, so that an old join string still finds the run.

The nodes in a join string may all be gone when it is used again: the leader may have been replaced.
A host that was in the run before knows other members.
"""

import json
from contextlib import suppress
from pathlib import Path

from decod.errors import MalformedMessageError
from decod.files import read_beginning
from decod.ids import RunId
from decod.protocol.core.view import View
from decod.wire import validate

KEPT_MAX = 16
"""Most addresses that are kept. Data nodes come first, since one of them leads the run."""

_FILE = "peers.json"
_SIZE_MAX_BYTES = 64 * 1024


class KnownPeers:
    """A file in the folder of each run. A file that can't be read is treated as missing."""

    def __init__(self, state_dir: Path) -> None:
        self._runs = state_dir / "runs"

    def keep(self, run_id: RunId, name: str, view: View, *, own: str) -> None:
        """Remember the addresses of a view's members, except this node's own.

        Args:
            run_id: The run.
            name: The name of the run in its file.
            view: The view with the members.
            own: This node's address.
        """
        addresses = [m.address for m in view.members if m.address != own][:KEPT_MAX]
        path = self._path(run_id)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps({"name": name, "addresses": addresses}), encoding="utf-8")
            new.replace(path)

    def find(self, run_id: RunId) -> tuple[str, ...]:
        """Return the addresses that were last kept of a run."""
        _, addresses = _read(self._path(run_id))
        return addresses

    def newest(self, name: str) -> tuple[RunId, tuple[str, ...]] | None:
        """Return the latest run of this name on this host, with the addresses of its members."""
        with suppress(OSError):
            for path in sorted(self._runs.glob(f"*/{_FILE}"), key=_written_s, reverse=True):
                of, addresses = _read(path)
                if of == name:
                    return RunId(path.parent.name), addresses
        return None

    def forget(self, run_id: RunId) -> None:
        """Forget a run that is over."""
        with suppress(OSError):
            self._path(run_id).unlink()

    def _path(self, run_id: RunId) -> Path:
        return self._runs / run_id / _FILE


def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a run's name and its members' addresses; both empty if they can't be read."""
    try:
        kept = json.loads(read_beginning(path, _SIZE_MAX_BYTES))
        found = [validate.address("address", each) for each in kept["addresses"][:KEPT_MAX]]
        return str(kept["name"]), tuple(found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MalformedMessageError):
        return "", ()


def _written_s(path: Path) -> float:
    return path.stat().st_mtime

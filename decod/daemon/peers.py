"""Addresses of a run's members, kept on disk, so that an old join string still finds the run.

The nodes in a join string may all be gone when it is used again: the leader may have been replaced.
A host that was in the run before knows other members.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decod.errors import MalformedMessageError
from decod.files import read_beginning
from decod.ids import RunId
from decod.membership.papers import membership_folder
from decod.net.join_string import JoinString
from decod.texts import from_base32, why_unwritten
from decod.wire import validate

KEPT_MAX = 16
"""Most addresses that are kept. Data nodes come first, since one of them leads the run."""

_FILE = "peers.json"
_SIZE_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a root that this host was in."""

    root: bytes
    run_id: RunId
    name: str
    addresses: tuple[str, ...]
    """Those of its members."""
    over: bool = False
    """It has ended, as far as this host was told."""


class KnownPeers:
    """A file for each root, beside this node's papers. One that can't be read counts as missing."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def keep(self, root: bytes, run_id: RunId, name: str, found: Iterable[str]) -> str:
        """Remember the addresses of a run's members.

        Args:
            root: The public key of the run's root.
            run_id: The run.
            name: The name of the run in its file.
            found: The addresses, the most useful first.

        Returns:
            Which file could not be written, and why; empty if the addresses are on disk.
        """
        content = {"run_id": run_id, "name": name, "addresses": [*found][:KEPT_MAX]}
        return self._write(root, content)

    def _write(self, root: bytes, content: Mapping[str, object]) -> str:
        path = self._path(root)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(content), encoding="utf-8")
            new.replace(path)
        except OSError as error:
            return why_unwritten(path, error)
        return ""

    def find(self, root: bytes) -> tuple[str, ...]:
        """Return the addresses that were last kept of a root's run."""
        last = _read(self._path(root))
        return () if last is None else last.addresses

    def addresses_of(self, join: JoinString) -> tuple[str, ...]:
        """Return the addresses of a join string, and those that were last kept of its run."""
        return tuple(dict.fromkeys((*join.addresses, *self.find(join.root))))

    def newest(self, name: str) -> LastRun | None:
        """Return the latest run of this name on this host."""
        return next(iter(self.runs(name)), None)

    def runs(self, name: str, *, over: bool = False) -> list[LastRun]:
        """Return the runs of this name that this host was in, of each root the last.

        Args:
            name: Of the runs, in their files.
            over: Those that are over are meant; otherwise, the others.
        """
        found = list[LastRun | None]()
        with suppress(OSError):
            paths = (self._state_dir / "memberships").glob(f"*/{_FILE}")
            found = [_read(path) for path in sorted(paths, key=_written_s, reverse=True)]
        return [last for last in found if last and (last.name, last.over) == (name, over)]

    def end(self, root: bytes) -> None:
        """Take in that a run is over: nobody is to be looked for there again."""
        if (last := _read(self._path(root))) is not None:
            content = {"run_id": last.run_id, "name": last.name, "addresses": [], "over": True}
            self._write(root, content)

    def _path(self, root: bytes) -> Path:
        return membership_folder(self._state_dir, root) / _FILE


def tell_unkept(note: Callable[..., None], kept: "asyncio.Future[str]") -> None:
    """Report that the addresses could not be written, when it is known."""
    if not kept.cancelled() and kept.exception() is None and kept.result():
        note("addresses.unkept", reason=kept.result())


def _read(path: Path) -> LastRun | None:
    """Return what a file holds; None if it can't be read."""
    try:
        kept = json.loads(read_beginning(path, _SIZE_MAX_BYTES))
        found = [validate.address("address", each) for each in kept["addresses"][:KEPT_MAX]]
        run_id = validate.run_id("run_id", kept["run_id"])
        root, over = from_base32(path.parent.name), kept.get("over") is True
        return LastRun(root, run_id, str(kept["name"]), tuple(found), over)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MalformedMessageError):
        return None


def _written_s(path: Path) -> float:
    return path.stat().st_mtime

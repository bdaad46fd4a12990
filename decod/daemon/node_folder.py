"""What a node keeps in its state folder for itself: identity, last vote, and addresses of members.

One daemon uses a folder at a time, and one process an identity.
"""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from decod.errors import ConfigError, DecodError, HardwareError, MalformedMessageError
from decod.files import open_lock, read_beginning, replace_durably
from decod.ids import RunId
from decod.membership.identity import HostKey
from decod.membership.papers import membership_folder
from decod.net.join_string import JoinString
from decod.protocol.core.context import NO_PROMISE, Promise
from decod.system import HeldName
from decod.texts import from_base32, why_of, why_unwritten
from decod.wire import validate

# --- the folder ----------------------------------------------------------------------------------
# The folder in which a node keeps its identity and its logs. One daemon uses it at a time.


_LOCK_FILE = "lock"


class StateFolder:
    """The folder of one node, locked while its daemon runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def lock(self) -> None:
        """Lock the folder.

        Raises:
            ConfigError: Another daemon uses the folder (E-CFG-041), or it can't be used
                (E-CFG-042).
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_lock(self.path / _LOCK_FILE)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # The disk is full: a report of errors will lack the process.
                self._lock.truncate()
                self._lock.write(b"%d\n" % os.getpid())
        except BlockingIOError as error:
            self.unlock()
            raise ConfigError(
                f"another decod daemon uses {self.path}",
                why="a folder holds one node's identity",
                fix="stop it, or give this one its own --state-dir",
                code="E-CFG-041",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"can't use the state folder {self.path}",
                why=why_of(error),
                fix="give a --state-dir that you may write to",
                code="E-CFG-042",
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            # Closing may report an error of the disk, but releases the lock in any case.
            with suppress(OSError):
                self._lock.close()
            self._lock = None


def is_in_use(path: Path) -> bool:
    """Whether a daemon uses a state folder."""
    try:
        descriptor = os.open(path / _LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def user_of(path: Path) -> int | None:
    """Return the process id of the daemon that uses a state folder; None if none does."""
    with suppress(OSError, ValueError):
        if is_in_use(path):
            return int(read_beginning(path / _LOCK_FILE, 32))
    return None


def nearest_folder(path: Path) -> Path:
    """Return a folder itself, or what exists of the way to it if it is yet to be made."""
    # A parent that may not be searched counts as missing. `Path.exists` would raise.
    return next(each for each in (path, *path.parents) if os.path.exists(each))


# --- sole use of an identity ---------------------------------------------------------------------
# One process at a time uses an identity, even if somebody has copied its key to another folder.
# Copies on other hosts are noticed by the nodes that they ask to be let in: `daemon/twins.py`.


class SoleUse:
    """The right of this process to use an identity, on this host.

    Args:
        identity: Whose.
        state_dir: Where its key lies.

    Raises:
        ConfigError: Another process on this host uses the identity (E-CFG-033).
    """

    def __init__(self, identity: HostKey, state_dir: Path) -> None:
        try:
            self._name = HeldName(str(identity.node_id))
        except FileExistsError as error:
            raise ConfigError(
                f"another process on this host is already {identity.name}",
                why=f"{state_dir} holds a copy of its key, and two nodes can't have one id",
                fix="stop the other one, or give this one an empty --state-dir",
                code="E-CFG-033",
            ) from error

    def end(self) -> None:
        """Let others use it."""
        self._name.end()


# --- the last vote -------------------------------------------------------------------------------
# A node's last vote, kept on disk so that it can't vote twice in a term after a restart.


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
            The file that could not be written, and why; empty if the vote is on disk.
        """
        text = json.dumps({"term": promise.term, "candidate": promise.candidate})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(self._path, text.encode("utf-8"))
        except OSError as error:
            return why_unwritten(self._path, error)
        return ""


# --- known peers ---------------------------------------------------------------------------------
# Addresses of a run's members, kept on disk, so that an old join string still finds the run.
#
# The nodes in a join string may all be gone when it is used again: the leader may have been
# replaced. A host that was in the run before knows other members.


KEPT_MAX = 16
"""Most addresses that are kept. Data nodes come first, since one of them leads the run."""

_FILE = "peers.json"


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

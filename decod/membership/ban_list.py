"""The bans of a run: a list that the leader signs, and that each member keeps and goes by.

A list holds all bans, so a later one takes the place of an earlier one. Its version begins with
the time at which it was made, and is larger than that of the list before, whatever the clock says.
So of two lists, all nodes take the same one. A leader that was elected goes on from the list that
it has.

A list is a data node's statement. It is believed as long as its author is a data node, and is not
banned. The leader signs it again before that ends.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from typing_extensions import override

from decod.clocks import wall_clock
from decod.errors import ConfigError, MalformedMessageError
from decod.files import read_beginning, replace_durably
from decod.ids import NodeId
from decod.membership.credential import Credential, Statement, parse_statement
from decod.membership.identity import name_of
from decod.protocol.core.bans import NO_BANS, BanList
from decod.protocol.core.messages.membership_messages import BANS_SIZE_MAX_BYTES
from decod.protocol.core.view import Role
from decod.texts import no_constant, unique
from decod.wire import validate

BANS_MAX = 1000
"""Most bans at a time."""
REASON_MAX_CHARACTERS = 200

_KIND = "bans"
_FILE = "bans.json"
_FILE_SIZE_MAX_BYTES = 2 * BANS_SIZE_MAX_BYTES + 1024
_TERM_BITS = 10
_RENEWED_BEFORE_S = 5 * 24 * 3600.0
"""A list is signed again when its author's membership ends within this time."""

State = Callable[[str, bytes], Statement]
"""Makes this node's statement of some kind with some body."""

_instant = validate.integer(0, 253_402_300_799)  # The end of the year 9999.
_reason = validate.printable(REASON_MAX_CHARACTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A node that must stay away. Instants are seconds of the Unix epoch."""

    node: NodeId
    reason: str
    """The reason, for people: at most 200 printable characters. May be empty."""
    made_s: int
    until_s: int | None
    """The instant when it ends; None if never."""
    by: NodeId
    """The data node that has made it."""

    def holds(self, now_s: float) -> bool:
        """Return whether it has not ended."""
        return self.until_s is None or now_s < self.until_s

    @override
    def __str__(self) -> str:
        """Return by whom, until when and why, for people."""
        until = "for ever"
        if self.until_s is not None:
            until = f"until {datetime.fromtimestamp(self.until_s, UTC):%Y-%m-%d %H:%M} UTC"
        return f"banned by {name_of(self.by)} {until}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class _Signed:
    """A list as its author has signed it."""

    version: int
    bans: tuple[Ban, ...]
    author: Credential
    statement: bytes

    @property
    def plain(self) -> BanList:
        """The list as the core knows it."""
        return BanList(self.version, {ban.node: str(ban) for ban in self.bans}, self.statement)


class BanBook:
    """The bans that one node knows of.

    Args:
        root: The public key of the run's root.
        folder: Where they are kept; None to keep them in memory only.
        clock: Returns seconds of the Unix epoch.

    Raises:
        ConfigError: They are there, but can't be read (E-CFG-080).
    """

    def __init__(
        self, root: bytes, folder: Path | None, clock: Callable[[], float] = wall_clock
    ) -> None:
        self._root = root
        self._clock = clock
        self._path = None if folder is None else folder / _FILE
        self._signed = None if self._path is None else _load(self._path, root)
        self._bans = _by_node(self._signed)
        self._keeping = Lock()
        self._kept = self.version

    # --- who is banned ------------------------------------------------------------------------

    @property
    def present(self) -> BanList:
        """The latest list."""
        return NO_BANS if self._signed is None else self._signed.plain

    @property
    def version(self) -> int:
        """The version of the latest list; 0 if there is none."""
        return 0 if self._signed is None else self._signed.version

    def allowed(self, node: NodeId) -> bool:
        """Return whether a node is not banned now."""
        ban = self._bans.get(node)
        return ban is None or not ban.holds(self._clock())

    def refusal(self, node: NodeId) -> str:
        """Return by whom, until when and why a node is banned; empty if it is not."""
        return "" if self.allowed(node) else str(self._bans[node])

    def all(self) -> list[Ban]:
        """Return the bans that hold, the latest first."""
        now_s = self._clock()
        return sorted((b for b in self._bans.values() if b.holds(now_s)), key=lambda b: -b.made_s)

    # --- lists of others ----------------------------------------------------------------------

    def read(self, statement: bytes) -> BanList | str:
        """Return the list in a statement, or why it is not believed. It is not used yet."""
        try:
            found = _parse(statement, self._root, now_s=self._clock())
        except MalformedMessageError as error:
            return f"{error.what}: {error.why}"
        author = found.author.node_id
        return found.plain if self.allowed(author) else f"its author, {author}, is banned"

    def use(self, bans: BanList) -> set[NodeId]:
        """Go by a list that `read` has returned, or this node has made, unless it has a later one.

        Returns:
            Who is banned by it and was not before.
        """
        if bans.version <= self.version:
            return set()
        before = {node for node in self._bans if not self.allowed(node)}
        self._signed = _parse(bans.statement, self._root, now_s=None)
        self._bans = _by_node(self._signed)
        return {node for node in self._bans if not self.allowed(node)} - before

    def keep(self) -> None:
        """Write the present list to disk, unless it is there. Takes a while: call it in a thread.

        Raises:
            ConfigError: It can't be written (E-CFG-081).
        """
        with self._keeping:
            path = self._path
            signed = self._signed
            if path is None or signed is None or signed.version == self._kept:
                return
            text = json.dumps({"statement": signed.statement.hex()})
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_durably(path, text.encode(), mode=0o600)
            except OSError as error:
                raise ConfigError(
                    f"{path} can't be written: {error.strerror or error}",
                    why="after a restart, this node would not know who is banned",
                    fix="make its folder one that you may write",
                    code="E-CFG-081",
                ) from error
            self._kept = signed.version

    # --- lists of this node -------------------------------------------------------------------

    def ban(self, ban: Ban, state: State, term: int) -> BanList:
        """Return a list with another ban, which takes the place of an earlier one of the same node.

        It is not used yet.

        Args:
            ban: The ban.
            state: Makes this node's statements. It is a data node, and leads.
            term: The term in which it leads.

        Raises:
            ConfigError: There are too many bans (E-CFG-082).
        """
        others = [each for each in self.all() if each.node != ban.node]
        if len(others) >= BANS_MAX:
            raise ConfigError(
                f"{BANS_MAX} nodes are banned",
                why="each member holds the whole list, so it has a limit",
                fix="lift some bans: decod node list, decod node unban NODE",
                code="E-CFG-082",
            )
        return self._issue([*others, ban], state, term)

    def unban(self, node: NodeId, state: State, term: int) -> BanList:
        """Return a list without a ban. It is not used yet."""
        return self._issue([ban for ban in self.all() if ban.node != node], state, term)

    def contested(self, bans: BanList, own: NodeId, state: State, term: int) -> BanList:
        """Return a list that is later than one of another leader, without a ban of this node.

        Args:
            bans: The other list, which `read` has returned.
            own: This node.
            state: As in `ban`.
            term: As in `ban`.
        """
        theirs = _parse(bans.statement, self._root, now_s=None)
        now_s = self._clock()
        others = [ban for ban in theirs.bans if ban.node != own and ban.holds(now_s)]
        return self._issue(others, state, term, after=theirs.version)

    def renewed(self, own: Credential, state: State, term: int) -> BanList | None:
        """Return another list if a ban has ended, or if the author's membership ends soon.

        Args:
            own: The leader's own credential.
            state: As in `ban`.
            term: As in `ban`.
        """
        signed = self._signed
        if signed is None:
            return None
        author = signed.author
        now_s = self._clock()
        bans = self.all()
        ends = author.expires_s < min(own.expires_s, now_s + _RENEWED_BEFORE_S)
        return self._issue(bans, state, term) if ends or len(bans) < len(self._bans) else None

    def _issue(self, bans: Iterable[Ban], state: State, term: int, after: int = 0) -> BanList:
        now_ms = int(self._clock() * 1000)
        number = max(now_ms, (max(self.version, after) >> _TERM_BITS) + 1)
        # Two leaders that do not know of each other have different terms.
        version = number << _TERM_BITS | term & ((1 << _TERM_BITS) - 1)
        body = json.dumps(
            {"version": version, "bans": [asdict(ban) for ban in bans]},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        statement = state(_KIND, body.encode()).to_bytes()
        return _parse(statement, self._root, now_s=None).plain


def _by_node(signed: _Signed | None) -> dict[NodeId, Ban]:
    return {} if signed is None else {ban.node: ban for ban in signed.bans}


def _parse(data: bytes, root: bytes, *, now_s: float | None) -> _Signed:
    """Return a list that a data node has signed.

    Args:
        data: The statement.
        root: The root's public key.
        now_s: Seconds of the Unix epoch, at which its author must be a data node; None for any
            time.

    Raises:
        MalformedMessageError: It is no such list.
    """
    validate.blob(BANS_SIZE_MAX_BYTES)("bans", data)
    statement = parse_statement(data)
    author = statement.check(root, _KIND, now_s=now_s)
    if author.role is not Role.DATA:
        raise validate.malformed("bans.author", author.node_id, allowed="a data node")
    try:
        found = json.loads(statement.body, object_pairs_hook=unique, parse_constant=no_constant)
        version = validate.number("bans.version", _int(found["version"]))
        bans = tuple(_ban_of(fields) for fields in found["bans"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise validate.malformed("bans", str(error), allowed="a list of bans") from error
    validate.length("bans", len(bans), low=0, high=BANS_MAX)
    validate.unique("bans", [ban.node for ban in bans])
    return _Signed(version, bans, author, data)


def _ban_of(fields: dict[str, Any]) -> Ban:
    until_s = fields["until_s"]
    return Ban(
        node=validate.node_id("bans.node", str(fields["node"])),
        reason=_reason("bans.reason", str(fields["reason"])),
        made_s=_instant("bans.made_s", _int(fields["made_s"])),
        until_s=None if until_s is None else _instant("bans.until_s", _int(until_s)),
        by=validate.node_id("bans.by", str(fields["by"])),
    )


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.60} is no whole number")
    return value


def _load(path: Path, root: bytes) -> _Signed | None:
    """Return the list that was kept. Its author may have left since."""
    try:
        text = read_beginning(path, _FILE_SIZE_MAX_BYTES)
        found = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        return _parse(bytes.fromhex(found["statement"]), root, now_s=None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except MalformedMessageError as error:
        raise _unreadable(path, f"{error.what}: {error.why}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} can't be read",
        why=why,
        fix="move it away: other nodes of the run know the bans, and tell this one",
        code="E-CFG-080",
    )

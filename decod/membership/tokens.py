"""Join tokens: whoever holds one may become a member.

A token is a secret of 160 bits. It is the seed of an Ed25519 key, and its holder proves that it has
the key by signing a TLS certificate with it. So the secret itself is never sent. A data node keeps
only the public half, with which nobody can join, and how often the token may be used.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typing_extensions import override

from decod.errors import ConfigError, MalformedMessageError
from decod.files import read_beginning, replace_durably
from decod.ids import NodeId
from decod.membership.certificates import token_anchor
from decod.membership.credential import PUBLIC_KEY_SIZE_BYTES
from decod.protocol.core.view import Role
from decod.texts import base32, no_constant, unique
from decod.wire import validate

SECRET_SIZE_BYTES = 20
ID_LENGTH = 8


@dataclass(frozen=True)
class Token:
    """A join token, as its holder has it. Do not log it."""

    role: Role
    """The role in which its holder may join."""
    secret: bytes

    @staticmethod
    def new(role: Role) -> "Token":
        """Return a token that nobody else has."""
        return Token(role, secrets.token_bytes(SECRET_SIZE_BYTES))

    @override
    def __repr__(self) -> str:
        return f"Token({self.role}, {self.id})"

    @cached_property
    def key(self) -> Ed25519PrivateKey:
        """The key of which the secret is the seed. It differs for each role."""
        seed = b"decod token 1\0" + self.role.value.encode() + b"\0" + self.secret
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed).digest())

    @cached_property
    def public(self) -> bytes:
        """The public half of the key."""
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @cached_property
    def id(self) -> str:
        """A short name, which is no secret."""
        return id_of(self.public)


def id_of(public: bytes) -> str:
    """Return the id of the token with this public key."""
    return base32(hashlib.sha256(public).digest())[:ID_LENGTH]


# The join tokens that a data node knows: their public halves, and how often each may be used.
#
# All data nodes of a run know the same tokens, a few seconds after each change. So whoever is
# elected leader goes on counting. Two records of a token merge into one in any order: who has
# used it by one of them has used it, and it is revoked if one of them says so.

USES_MAX = 1000
TOKENS_MAX = 256
"""Most tokens that are kept."""

_REMEMBERED_S = 14 * 24 * 3600.0
_BATCH_MAX_BYTES = 1 << 20
"""Size of the records that travel at a time."""
_USED_BY_MAX = 4 * USES_MAX
"""Nodes that have joined with one token. They may be more than its uses: two leaders have counted
without knowing of each other."""
_FILE = "tokens.json"
_SIZE_MAX_BYTES = 64 << 20

_instant = validate.within(-1e12, 1e12)
_uses = validate.integer(1, USES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A join token, as data nodes know it. It lets nobody in."""

    id: str
    public: str
    """The public half of its key, in hexadecimal digits."""
    role: Role
    created_s: float
    """Seconds of the Unix epoch."""
    expires_s: float
    """Seconds of the Unix epoch."""
    uses: int
    """The number of nodes that may join with it."""
    used_by: tuple[NodeId, ...] = ()
    """The nodes that have joined with it. Each may ask again."""
    revoked: bool = False
    note: str = ""

    @property
    def forgotten_s(self) -> float:
        """The instant when it is forgotten, in seconds of the Unix epoch. Until then a refusal has
        a reason."""
        return self.expires_s + _REMEMBERED_S

    def is_live(self, now_s: float) -> bool:
        """Return whether it may let anybody in."""
        return not self.revoked and now_s <= self.expires_s

    def refusal(self, node: NodeId, now_s: float) -> str:
        """Return why it does not let a node in; empty if it does."""
        if self.revoked:
            return "it was revoked"
        if now_s > self.expires_s:
            return "it has expired"
        if node not in self.used_by and len(self.used_by) >= self.uses:
            return f"it was used as often as it may be: {self.uses}"
        return ""

    @property
    def digest(self) -> str:
        """Stands for what may change: who has joined with it, and whether it was revoked."""
        text = f"{self.revoked} {' '.join(sorted(self.used_by))}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def merged(self, other: "TokenRecord") -> "TokenRecord":
        """Return what this record and another of the same token say together."""
        further = sorted({*other.used_by} - {*self.used_by})
        used_by = (*self.used_by, *further)[:_USED_BY_MAX]
        return replace(self, used_by=used_by, revoked=self.revoked or other.revoked)


class Tokens:
    """The tokens of one run, kept in a folder.

    Args:
        folder: Where they are kept; None to keep them in memory only, for tests.

    Raises:
        ConfigError: The file is there, but can't be read (E-CFG-038).
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE
        self._records = {} if self._path is None else _load(self._path)
        self.on_changed: list[Callable[[], None]] = []
        """Called after each change that was made here."""

    def create(
        self, role: Role, *, now_s: float, life_s: float, uses: int, note: str = ""
    ) -> Token:
        """Return a new token, and remember its public half.

        Raises:
            ConfigError: It can't be written (E-CFG-039), or there are too many (E-CFG-043).
        """
        kept = {each.id: each for each in self._records.values() if now_s < each.forgotten_s}
        if sum(each.is_live(now_s) for each in kept.values()) >= TOKENS_MAX:
            raise ConfigError(
                f"there are {TOKENS_MAX} join tokens that have not expired",
                why="no more are kept, since each makes TLS handshakes a little longer",
                fix="revoke some: decod token list, decod token revoke ID",
                code="E-CFG-043",
            )
        while len(kept) >= TOKENS_MAX:
            del kept[min((e for e in kept.values() if not e.is_live(now_s)), key=_age).id]
        token = Token.new(role)
        record = TokenRecord(
            id=token.id,
            public=token.public.hex(),
            role=role,
            created_s=now_s,
            expires_s=now_s + life_s,
            uses=uses,
            note=note,
        )
        self._records = {**kept, record.id: record}
        self._changed()
        return token

    def revoke(self, token_id: str) -> bool:
        """Let nobody in with a token from now on; return whether it was known."""
        if token_id not in self._records:
            return False
        self._replace(replace(self._records[token_id], revoked=True))
        return True

    def use(self, token_id: str, node: NodeId, now_s: float) -> str:
        """Count a node that joins with a token; return why it may not, or an empty text."""
        record = self._records.get(token_id)
        if record is None:
            return "it is not known here"
        if refusal := record.refusal(node, now_s):
            return refusal
        if node not in record.used_by:
            self._replace(replace(record, used_by=(*record.used_by, node)))
        return ""

    def find(self, token_id: str) -> TokenRecord | None:
        """Return what is known of a token."""
        return self._records.get(token_id)

    def all(self) -> list[TokenRecord]:
        """Return all tokens, the latest first."""
        return sorted(self._records.values(), key=lambda record: -record.created_s)

    def anchors(self) -> bytes:
        """Return trust anchors, as PEM, for the holders of all known tokens.

        Those that let nobody in any more are among them: their holders are to hear the reason.
        """
        return b"".join(token_anchor(each.id, bytes.fromhex(each.public)) for each in self.all())

    def _replace(self, record: TokenRecord) -> None:
        self._records[record.id] = record
        self._changed()

    def _changed(self) -> None:
        self._keep()
        for told in self.on_changed:
            told()

    # --- other data nodes ---------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """Return the digest of each record, by the token's id."""
        return {record.id: record.digest for record in self._records.values()}

    def records_for(self, known: Mapping[str, str]) -> bytes:
        """Return, as they travel, the records that are not as another data node knows them.

        Args:
            known: That node's digests.
        """
        return pack_records(r for r in self._records.values() if known.get(r.id) != r.digest)

    def pick(self, ids: Collection[str]) -> bytes:
        """Return the records of some tokens as they travel."""
        return pack_records(record for record in self._records.values() if record.id in ids)

    def merge(self, records: Iterable[TokenRecord], *, now_s: float, with_data: bool) -> bool:
        """Take in what another data node knows; return whether that was news.

        Args:
            records: Its records.
            now_s: Seconds of the Unix epoch.
            with_data: Whether new tokens may let data nodes in. Not at the organiser's host, which
                alone admits these: another data node could invite some by itself.

        Raises:
            ConfigError: They can't be written (E-CFG-039).
        """
        before = self.digests()
        for record in records:
            own = self._records.get(record.id)
            if own is not None:
                self._records[record.id] = own.merged(record)
            elif now_s < record.forgotten_s and (with_data or record.role is Role.RELAY):
                self._make_room(now_s)
                if len(self._records) < TOKENS_MAX:
                    self._records[record.id] = record
        if self.digests() == before:
            return False
        self._keep()
        return True

    def _make_room(self, now_s: float) -> None:
        """Forget the oldest token that lets nobody in, if there is no room for another."""
        ended = [e for e in self._records.values() if not e.is_live(now_s)]
        if len(self._records) >= TOKENS_MAX and ended:
            del self._records[min(ended, key=_age).id]

    # --- on disk ------------------------------------------------------------------------------

    def _keep(self) -> None:
        if self._path is None:
            return
        text = json.dumps([asdict(record) for record in self._records.values()], indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_durably(self._path, text.encode(), mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"{self._path} can't be written: {error.strerror or error}",
                why="a token that is forgotten lets nobody in",
                fix="make its folder one that you may write",
                code="E-CFG-039",
            ) from error


def _age(record: TokenRecord) -> float:
    return record.created_s


def pack_records(records: Iterable[TokenRecord]) -> bytes:
    """Return records as they travel. What does not fit goes with the next batch."""
    packed = list[str]()
    size_bytes = 2
    for record in records:
        text = json.dumps(asdict(record))
        size_bytes += len(text) + 1
        if size_bytes > _BATCH_MAX_BYTES:
            break
        packed.append(text)
    return f"[{','.join(packed)}]".encode()


def unpack_records(data: bytes) -> list[TokenRecord]:
    """Return the records that `pack_records` has packed.

    Raises:
        MalformedMessageError: They are none.
    """
    validate.blob(_BATCH_MAX_BYTES)("records", data)
    try:
        return _records_in(data) if data else []
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise validate.malformed("records", str(error), allowed="records of tokens") from error


def _load(path: Path) -> dict[str, TokenRecord]:
    try:
        text = read_beginning(path, _SIZE_MAX_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    try:
        return {record.id: record for record in _records_in(text)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    except MalformedMessageError as error:
        raise _unreadable(path, f"{error.what}: {error.why}") from error


def _records_in(text: bytes) -> list[TokenRecord]:
    found = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    return [_record(each) for each in found]


def _record(fields: dict[str, Any]) -> TokenRecord:
    public = bytes.fromhex(fields["public"])
    if len(public) != PUBLIC_KEY_SIZE_BYTES or id_of(public) != fields["id"]:
        raise ValueError("a token's id is not that of its key")
    used_by = tuple(validate.node_id("used_by", str(node)) for node in fields["used_by"])
    validate.unique("used_by", used_by)
    validate.length("used_by", len(used_by), low=0, high=_USED_BY_MAX)
    return TokenRecord(
        **{
            **fields,
            "role": Role(fields["role"]),
            "created_s": _instant("created_s", fields["created_s"]),
            "expires_s": _instant("expires_s", fields["expires_s"]),
            "uses": _uses("uses", int(fields["uses"])),
            "used_by": used_by,
            "revoked": _flag(fields["revoked"]),
            "note": validate.clip_reason(str(fields["note"])),
        }
    )


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError("revoked is neither true nor false")
    return value


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} can't be read",
        why=why,
        fix="restore it from a copy, or move it away: then all join tokens are void",
        code="E-CFG-038",
    )

"""The join tokens that a data node knows: their public halves, and how often each may be used."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decod.durable import replace_durably
from decod.errors import ConfigError
from decod.files import read_beginning
from decod.ids import NodeId
from decod.membership.certificates import token_anchor
from decod.membership.credential import PUBLIC_KEY_SIZE_BYTES
from decod.membership.token import Token, id_of
from decod.protocol.core.view import Role
from decod.strict_json import no_constant, unique

USES_MAX = 1000
TOKENS_MAX = 256
"""Most tokens that are kept."""

_REMEMBERED_S = 14 * 24 * 3600.0
_FILE = "tokens.json"
_SIZE_MAX_BYTES = 16 << 20


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
    """How many nodes may join with it."""
    used_by: tuple[NodeId, ...] = ()
    """The nodes that have joined with it. Each may ask again."""
    revoked: bool = False
    note: str = ""

    @property
    def forgotten_s(self) -> float:
        """When it is forgotten, in seconds of the Unix epoch. Until then a refusal has a reason."""
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
            return f"all of its {self.uses} uses are used up"
        return ""


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
        self._keep()
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
        self._keep()

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


def _load(path: Path) -> dict[str, TokenRecord]:
    try:
        text = read_beginning(path, _SIZE_MAX_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        records = [_record(each) for each in found]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    return {record.id: record for record in records}


def _record(fields: dict[str, Any]) -> TokenRecord:
    public = bytes.fromhex(fields["public"])
    if len(public) != PUBLIC_KEY_SIZE_BYTES or id_of(public) != fields["id"]:
        raise ValueError("a token's id is not that of its key")
    used_by = tuple(NodeId(str(node)) for node in fields["used_by"])
    return TokenRecord(
        **{**fields, "role": Role(fields["role"]), "used_by": used_by, "uses": int(fields["uses"])}
    )


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} can't be read",
        why=why,
        fix="restore it from a copy, or move it away: then all join tokens are void",
        code="E-CFG-038",
    )

"""The join string: everything that a host needs to take part in a run, in one line of text.

    decod1-<kind>-<root, 52>-<secret, 32>-<check, 4>@host:port[,host:port]

The kind says what the string is good for: `v` lets a volunteer in, `d` a further data node. Both
hold the secret of a token. `m` has no secret, and leads members back. The root is the public key
from which every proof of membership follows, so an impostor at one of the addresses gains nothing.

The check covers the part before it, so that a copying error is not mistaken for another run. It
does not cover the addresses: the organiser may add some by hand.

People copy the line out of terminals, mails and chats. What those add is taken away again. Errors
never show the text itself, since it holds a secret.
"""

import re
import zlib
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from decod.errors import NetworkError
from decod.membership.tokens import Token
from decod.net.address import split_address
from decod.protocol.core.view import Role
from decod.texts import base32, from_base32

PREFIX = "decod1-"
LABEL = "join string:"
"""The leader prints this before the join string for volunteers."""
DATA_LABEL = "join string for a data node:"
"""The leader prints this before the join string for further data nodes."""
ADDRESSES_MAX = 16
_TEXT_LENGTH_MAX = 8192
_KINDS = {"v": Role.RELAY, "d": Role.DATA, "m": None}
_KIND_OF = {role: kind for kind, role in _KINDS.items()}
_HEAD = re.compile(r"decod1-[vdm]-([a-z2-7]{52})(?:-([a-z2-7]{32}))?-([a-z2-7]{4})")
# Never part of a join string: spaces, line breaks, quotes, marks of quoted mails and of lists, and
# characters that nobody sees.
BREAKS = "\\s<>*|\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff"
"""The characters that mails and chats put between its characters."""
_NOISE = re.compile(f"[{BREAKS}\"'`\u00ab\u00bb\u2018-\u201f\u2039\u203a]+")
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""The characters that programs write instead of a hyphen."""
_DASHES = dict.fromkeys(map(ord, DASHES), "-")
_OPTION = re.compile(r"(^|\s)--[a-z]")
_LENGTHS = {kind: len(PREFIX) + 2 + 53 + (33 if role else 0) + 4 for kind, role in _KINDS.items()}
LENGTH_MAX = max(_LENGTHS.values())
"""Characters before the addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinString:
    """The contents of a join string. `str()` writes it, `parse` reads it."""

    root: bytes
    """The public key of the run's root."""
    addresses: tuple[str, ...]
    """`host:port` of the nodes to ask: at least one, best first."""
    token: Token | None = field(default=None, repr=False)
    """Lets its holder in; None if the string is for members."""

    code: ClassVar[str] = "E-NET-010"

    @override
    def __str__(self) -> str:
        token = self.token
        kind = _KIND_OF[None if token is None else token.role]
        parts = [kind, base32(self.root)]
        if token is not None:
            parts.append(base32(token.secret))
        body = PREFIX + "-".join(parts)
        return f"{body}-{_check(body)}@{','.join(self.addresses)}"

    @staticmethod
    def parse(text: str) -> "JoinString":
        """Read a join string. Whatever stands before it, and what copying adds, is ignored.

        Raises:
            NetworkError: A part is missing, altered or too long; says which (E-NET-010). Or an
                address can't be read (E-NET-011).
        """
        text = _cleaned(text)
        head, at, tail = text.partition("@")
        root, token = _parse_head(head, complete=bool(at))
        if len(text) > _TEXT_LENGTH_MAX:
            raise _error(f"it has {len(text)} characters")
        addresses = tuple(address.strip() for address in tail.split(",") if address.strip())
        if not addresses:
            length = len(head)
            raise _error(f"no address in it: after the first {length} characters comes @host:port")
        if len(addresses) > ADDRESSES_MAX:
            raise _error(f"{len(addresses)} addresses in it, more than {ADDRESSES_MAX}")
        for address in addresses:
            try:
                split_address(address)
            except NetworkError as error:
                fix = "copy the join string again, with its port, and nothing that stands behind it"
                raise NetworkError(error.what, why=error.why, fix=fix, code=error.code) from None
        return JoinString(root=root, addresses=addresses, token=token)


def _cleaned(text: str) -> str:
    """Return a join string without quotes, line breaks and the like, and what stands before it."""
    if _OPTION.search(text):
        raise _error("options of a command are in it, which belong on the command line")
    text = _NOISE.sub("", text.translate(_DASHES)).lower().rstrip(".,;)")
    if not text:
        raise _error("it is empty")
    if text.count(PREFIX) > 1:
        raise _error(f"there are {text.count(PREFIX)} of them, and one is needed")
    return text[max(0, text.find(PREFIX)) :]


def _parse_head(head: str, *, complete: bool) -> tuple[bytes, Token | None]:
    """Return the root's key, and the token if there is one."""
    if not head.startswith(PREFIX):
        raise _error(f"it does not begin with {PREFIX}")
    kind = head.removeprefix(PREFIX)[:1]
    if kind and kind not in _LENGTHS:
        raise _error(f"{kind!r} after {PREFIX} is no kind of it: v, d or m is")
    num_missing = _LENGTHS[kind or "v"] - len(head)
    if num_missing > 0:
        raise _error(f"it is incomplete: {num_missing} characters missing")
    if num_missing < 0:
        before = "before the @" if complete else "and no @host:port at the end"
        raise _error(f"it has {-num_missing} characters too many {before}")
    match = _HEAD.fullmatch(head)
    if match is None:
        raise _error("a character in it can't be part of one")
    if match[3] != _check(head[: -len(match[3]) - 1]):
        raise _error("its check does not hold: a character was altered")
    try:
        role = _KINDS[kind]
        token = None if role is None else Token(role, from_base32(match[2]))
        return from_base32(match[1]), token
    except ValueError as error:
        raise _error("its check holds, but it was not written by decod") from error


def _check(body: str) -> str:
    """Return 20 bits of CRC-32 as 4 characters of base32."""
    return base32(zlib.crc32(body.encode()).to_bytes(4, "big"))[:4]


def _error(why: str) -> NetworkError:
    return NetworkError(
        "this join string can't be used",
        why=why,
        fix="copy the whole join string that the organiser was shown",
        code=JoinString.code,
    )

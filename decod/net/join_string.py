"""The join string: everything that a volunteer needs, in one line of text.

`decod1-<run id, 26>-<manifest's SHA-256, first 16>-<check, 4>@host:port[,host:port]`

The check covers the part before it, so that a copying error is not mistaken for another run. It
does not cover the addresses: the organiser may add some by hand.
"""

import re
import zlib
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from decod.errors import NetworkError
from decod.ids import RunId
from decod.net.address import split_address

PREFIX = "decod1-"
LABEL = "join string:"
"""The leader prints this before the join string."""
ADDRESSES_MAX = 16
_LENGTH_MAX = 8192
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_HEAD = re.compile(r"decod1-([a-z2-7]{26})-([0-9a-f]{16})-([a-z2-7]{4})")
_HEAD_LENGTH = len(PREFIX) + 26 + 1 + 16 + 1 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinString:
    """The contents of a join string. `str()` writes it, `parse` reads it."""

    run_id: RunId
    manifest_prefix: str
    """First 16 hexadecimal digits of the manifest's SHA-256. Checks the manifest that a peer
    sends."""
    addresses: tuple[str, ...]
    """`host:port` of the nodes to ask: at least one, best first."""

    code: ClassVar[str] = "E-NET-010"

    @override
    def __str__(self) -> str:
        body = f"{PREFIX}{self.run_id}-{self.manifest_prefix}"
        return f"{body}-{_check(body)}@{','.join(self.addresses)}"

    @staticmethod
    def parse(text: str) -> "JoinString":
        """Read a join string. Spaces around it and `LABEL` before it are ignored.

        Raises:
            NetworkError: A part is missing, altered or too long; says which (E-NET-010). Or an
                address can't be read (E-NET-011).
        """
        text = text.strip().removeprefix(LABEL).lstrip()
        if not text:
            raise _error("it is empty")
        head, at, tail = text.partition("@")
        match = _match_head(head, complete=bool(at))
        if len(text) > _LENGTH_MAX:
            raise _error(f"it has {len(text)} characters")
        addresses = tuple(address.strip() for address in tail.split(",") if address.strip())
        if not addresses:
            raise _error("no address in it: after the first 55 characters comes @host:port")
        if len(addresses) > ADDRESSES_MAX:
            raise _error(f"{len(addresses)} addresses in it, more than {ADDRESSES_MAX}")
        for address in addresses:
            split_address(address)
        return JoinString(run_id=RunId(match[1]), manifest_prefix=match[2], addresses=addresses)


def _match_head(head: str, *, complete: bool) -> re.Match[str]:
    if not head.startswith(PREFIX):
        raise _error(f"it does not begin with {PREFIX}")
    num_missing = _HEAD_LENGTH - len(head)
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
    return match


def _check(body: str) -> str:
    """Return 20 bits of CRC-32 as 4 characters of base32."""
    crc = zlib.crc32(body.encode())
    return "".join(_BASE32[crc >> shift & 31] for shift in (15, 10, 5, 0))


def _error(why: str) -> NetworkError:
    return NetworkError(
        "this join string can't be used",
        why=why,
        fix="copy the whole line that `decod leader` printed",
        code=JoinString.code,
    )

"""Who is banned from the run. The core passes the list on, and whoever drives it reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decod.ids import NodeId


@dataclass(frozen=True, slots=True)
class BanList:
    """All bans. A later list takes the place of an earlier one."""

    version: int = 0
    """Grows with each change. 0: nobody has been banned yet."""
    banned: Mapping[NodeId, str] = field(default_factory=dict)
    """Who is banned, and by whom, until when and why, for people."""
    statement: bytes = b""
    """The list as it travels, with its proof."""


NO_BANS = BanList()

ReadBans = Callable[[bytes], BanList | str]
"""Returns the list in a statement, or why it is not believed. A function of its argument that may
take 20 ms."""


def disbelieve(statement: bytes) -> BanList | str:  # noqa: ARG001
    """Believe no list, as where nobody can prove one."""
    return "it can't be read here"

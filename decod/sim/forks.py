"""What two halves of a run may not do: commit an iteration twice (I3), or ignore a new leader (I4).

A part of the checker in `decod.sim.invariants`, which raises what is found here. It does not take
other parameters to be a fork: two halves of a run that repeat each other's iterations may well come
to the same ones, until a batch differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decod.ids import NodeId, Round
from decod.protocol.core.messages import Message, Open
from decod.sim.core import NodeProgress
from decod.sim.host import SimHost


@dataclass(slots=True)
class _Known:
    """One iteration's commit."""

    told: tuple[Round, int, int]
    """The round, and the term and version of the view that voted."""
    lives: dict[NodeId, int] = field(default_factory=dict)
    """Hosts that know of it, and in which life."""


class Commits:
    """Remembers in which round each iteration was committed, and who knows of that.

    If all who know have started again since, nothing is left of the commit: the others can't but
    repeat the iteration.
    """

    def __init__(self) -> None:
        self.hosts: Mapping[NodeId, SimHost] = {}
        """Of the run."""
        self._known: dict[tuple[int, int], _Known] = {}
        """By era and iteration."""

    def decided(self, host: SimHost, message: Open) -> str:
        """Take in a commit that a host tells of. Returns what is wrong, or nothing."""
        round_ = message.closed
        told = (round_, message.view_term, message.view_version)
        place = (round_.era, round_.iteration)
        known = self._known.setdefault(place, _Known(told))
        if known.told != told and not self._remembered(known):
            known = self._known[place] = _Known(told)
        if known.told == told:
            known.lives[host.node_id] = host.life
            return ""
        was, now = (f"{r} by view {v} of term {t}" for r, t, v in (known.told, told))
        return f"iteration {round_.iteration} is committed twice: in round {was}, and {now}"

    def stepped(self, host: SimHost, era: int, iteration: int) -> None:
        """A host has taken the step of an iteration, which it was told of."""
        if (known := self._known.get((era, iteration))) is not None:
            known.lives[host.node_id] = host.life

    def _remembered(self, known: _Known) -> bool:
        """Whether somebody still knows of a commit."""
        return any(self.hosts[node].life == life for node, life in known.lives.items())


class Decisions:
    """Remembers whether those who lead have committed or aborted each round."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, Round], tuple[str, str, int]] = {}
        """By the term and round that its members were in: what, who says so, and in which term."""

    def decided(self, name: str, term_before: int, message: Open) -> str:
        """Take in the decision of one that leads. Returns what is wrong, or nothing.

        What a leader has aborted the next one may commit, if it has been elected by members that
        had not heard of that; whether others had is seen by what they commit.

        Args:
            name: Of the host that decides.
            term_before: In which it was before.
            message: Its decision. Not an abort of one that has been voted out, which is void.
        """
        decision = "commit" if message.committed else "abort"
        told = (decision, name, message.opening.view.term)
        first = self._first.setdefault((term_before, message.closed), told)
        if decision == "commit" and first[2] < told[2]:
            self._first[term_before, message.closed] = told
        elif first[0] != decision:
            return f"{decision} of round {message.closed}, which {first[1]} says is a {first[0]}"
        return ""


def missed(host: SimHost, place: NodeProgress, message: Message) -> str:
    """Return what is wrong if a node has been told of a leader's opening and does not follow.

    Args:
        host: The node's.
        place: Where it is, after the event.
        message: What it has just taken in.
    """
    if not isinstance(message, Open):
        return ""
    opening = message.opening
    term = opening.view.term
    if not place.in_view or host.node_id not in opening.view or term <= place.term:
        return ""
    return f"it stays in term {place.term} though it is told of round {opening.round} of {term}"

"""Checks that two halves of a run neither commit an iteration twice (I3) nor ignore a leader (I4).

A part of the checker in `decod.sim.invariants`, which raises the violations found here. It does not
compare parameters to find a fork. Two halves that repeat each other's iterations may compute equal
parameters until a batch differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decod.ids import Iteration, NodeId
from decod.protocol.core.messages import Message, Open
from decod.sim.core import NodeProgress
from decod.sim.simulated_host import SimHost


@dataclass(slots=True)
class _Known:
    """One iteration's commit."""

    told: tuple[Iteration, int, int]
    """The iteration, and the term and version of the view that voted."""
    lives: dict[NodeId, int] = field(default_factory=dict)
    """Hosts that know of it, with the life in which they heard."""


class Commits:
    """Remembers the attempt at which each iteration was committed, and the hosts that know of it.

    If all those hosts have restarted since, the commit is forgotten and the others must repeat the
    iteration.
    """

    def __init__(self) -> None:
        self.hosts: Mapping[NodeId, SimHost] = {}
        """All hosts of the run."""
        self._known: dict[tuple[int, int], _Known] = {}
        """By era and iteration."""

    def decided(self, host: SimHost, message: Open) -> str:
        """Take in a commit that a host announces. Return what is wrong, or an empty text."""
        iteration = message.closed
        told = (iteration, message.view_term, message.view_version)
        place = (iteration.era, iteration.number)
        known = self._known.setdefault(place, _Known(told))
        if known.told != told and not self._remembered(known):
            known = self._known[place] = _Known(told)
        if known.told == told:
            known.lives[host.node_id] = host.life
            return ""
        was, now = (f"{r} by view {v} of term {t}" for r, t, v in (known.told, told))
        return f"iteration {iteration.number} is committed twice: in iteration {was}, and {now}"

    def stepped(self, host: SimHost, era: int, iteration: int) -> None:
        """Take in that a host has taken the committed step of an iteration."""
        if (known := self._known.get((era, iteration))) is not None:
            known.lives[host.node_id] = host.life

    def _remembered(self, known: _Known) -> bool:
        """Return whether a host still knows of a commit."""
        return any(self.hosts[node].life == life for node, life in known.lives.items())


class Decisions:
    """Remembers whether the leaders have committed or aborted each iteration."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, Iteration], tuple[str, str, int]] = {}
        """The first decision of each iteration, by its members' term: decision, host, host's
        term."""

    def decided(self, name: str, term_before: int, message: Open) -> str:
        """Take in a leader's decision. Return what is wrong, or an empty text.

        The next leader may commit an iteration that its predecessor aborted, if the members that
        elected it had not heard of the abort. Whether other members had heard shows in their
        commits.

        Args:
            name: Name of the host that decides.
            term_before: The host's term before the decision.
            message: The decision. The abort of a leader that was voted out is void: do not pass it.
        """
        decision = "commit" if message.committed else "abort"
        told = (decision, name, message.opening.view.term)
        first = self._first.setdefault((term_before, message.closed), told)
        if decision == "commit" and first[2] < told[2]:
            self._first[term_before, message.closed] = told
        elif first[0] != decision:
            return (
                f"{decision} of iteration {message.closed}, which {first[1]} says is a {first[0]}"
            )
        return ""


def missed(host: SimHost, place: NodeProgress, message: Message) -> str:
    """Return what is wrong if a node hears of a new leader's opening and does not follow.

    Args:
        host: The node's host.
        place: The node's progress after the event.
        message: The message that the node has just taken in.
    """
    if not isinstance(message, Open):
        return ""
    opening = message.opening
    term = opening.view.term
    if not place.in_view or host.node_id not in opening.view or term <= place.term:
        return ""
    told = f"iteration {opening.iteration} of {term}"
    return f"it stays in term {place.term} though it is told of {told}"

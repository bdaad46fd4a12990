"""Seals of the leader's decisions: statements of a data node (see `protocol.core.seals`)."""

from collections.abc import Callable
from dataclasses import replace

from decod.errors import MalformedMessageError
from decod.ids import RunId
from decod.membership.authors import Authors
from decod.membership.credential import parse_statement
from decod.membership.papers import Membership
from decod.protocol.core.messages import Mend, Open
from decod.protocol.core.seals import Decision
from decod.protocol.core.view import Role, ViewChange
from decod.wire.codec import content_of

_KIND = "decision"


class DecisionSeals:
    """The seals that one node makes and checks.

    Args:
        membership: This node's. Only a data node's seals are believed.
        run_id: The run. A seal of another run is not believed.
        wall_clock: Returns seconds of the Unix epoch.
    """

    def __init__(
        self, membership: Membership, run_id: RunId, wall_clock: Callable[[], float]
    ) -> None:
        self._membership, self._run_id = membership, run_id
        self._authors = Authors(membership.root, wall_clock)
        self._last: tuple[Decision, bytes] | None = None
        """The last decision that was sealed here: all nodes below in the tree get the same."""

    def seal_of(self, decision: Decision) -> bytes:
        """Return this node's seal; empty if it is no data node."""
        own = self._membership
        if own.role is not Role.DATA:
            return b""
        if self._last is None or self._last[0] is not decision:
            statement = own.state(_KIND, self._body(decision))
            self._last = (decision, replace(statement, body=b"").to_bytes())
        return self._last[1]

    def fault_of(self, decision: Decision) -> str:
        """Return why a decision is not believed; empty if it is."""
        if not decision.seal:
            return "it has no seal"
        try:
            statement = replace(parse_statement(decision.seal), body=self._body(decision))
            if statement.credential.role is not Role.DATA:
                return "a volunteer has sealed it"
            if not self._membership.bans.allowed(statement.credential.node_id):
                return "its author is banned"
            self._authors.author_of(statement, _KIND)
        except MalformedMessageError as error:
            return f"{error.what}: {error.why}"
        return ""

    def _body(self, decision: Decision) -> bytes:
        """Return what a seal is about: the run and the decision.

        The members of a view and the electors may travel as changes of earlier ones. So the hash of
        the view stands for it here, as in a change, and the electors are in order.
        """
        plain, electors = replace(decision, seal=b""), ""
        if isinstance(plain, Open):
            opening, view = plain.opening, plain.opening.view
            electors = " ".join(sorted(opening.electors))
            shown = replace(opening, view=view.outline, electors=())
            plain = replace(plain, opening=shown, change=ViewChange(view.hash, view.hash))
        elif isinstance(plain, Mend):
            view = plain.view
            plain = replace(plain, view=view.outline, change=ViewChange(view.hash, view.hash))
        return f"{self._run_id} {electors}\0".encode() + content_of(plain)

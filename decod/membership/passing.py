"""Proof of who says what comes by way of a third member.

A message that a member sends itself is proven by the certificate of the connection. One that it
passes on for another carries a statement of its origin. A tensor that comes with it is not covered.
"""

from collections.abc import Callable
from dataclasses import replace

from decod.ids import RunId
from decod.membership.authors import Authors
from decod.membership.credential import Credential, parse_statement
from decod.membership.papers import Membership
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way
from decod.wire import validate
from decod.wire.codec import content_of

_KIND = "passed"


class WayProofs:
    """Proofs that one node makes and checks.

    Args:
        membership: The node's.
        run_id: The run. A proof of another run is not believed.
        clock: Returns seconds of the Unix epoch.
    """

    def __init__(self, membership: Membership, run_id: RunId, clock: Callable[[], float]) -> None:
        self._membership, self._run_id = membership, run_id
        self._authors = Authors(membership.root, clock, membership.bans.allowed)

    def proven(self, message: Message, way: Way) -> Way:
        """Return the way of this node's own message, with a proof."""
        statement = self._membership.state(_KIND, self._body(message, way))
        return replace(way, proof=replace(statement, body=b"").to_bytes())

    def author_of(self, message: Message, way: Way) -> Credential:
        """Return the credential of the member that says a message which another has passed on.

        Raises:
            MalformedMessageError: The proof is missing, or is not that of the way's origin.
        """
        statement = replace(parse_statement(way.proof), body=self._body(message, way))
        author = self._authors.author_of(statement, _KIND)
        if author.node_id != way.origin:
            raise validate.malformed("proof", author.node_id, allowed=f"that of {way.origin}")
        return author

    def _body(self, message: Message, way: Way) -> bytes:
        head = f"{self._run_id} {way.goal} {way.term} {way.ticket}\0"
        return head.encode() + content_of(message)

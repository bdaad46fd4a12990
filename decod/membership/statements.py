"""Statements of members: whose word each is, and what members state.

`Authors` tells whose word a statement is, and whether that node is a member now. Members state what
they pass on for others, what they decide as the leader, which tensors they have sent, and which
manifest belongs to a run.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.limits import DIGEST_BYTES, PROOF_BYTES
from decod.membership.credential import Credential, Statement, parse_statement, verify
from decod.membership.identity import HostKey, node_id_of
from decod.membership.papers import Membership
from decod.protocol.core.messages import Mend, Message, Open
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.proofs import Subject, digest_in
from decod.protocol.core.seals import Decision
from decod.protocol.core.view import Role, ViewChange
from decod.wire import validate
from decod.wire.codec import content_of

_REMEMBERED_MAX = 4096


def everybody(_: NodeId) -> bool:
    """Allow each node."""
    return True


class Authors:
    """Checks whose word statements are. It remembers true credentials, since a check is dear.

    Args:
        root: The root's public key.
        clock: Returns seconds of the Unix epoch.
        allowed: Whether a member may still speak; a banned one may not.
    """

    def __init__(
        self,
        root: bytes,
        clock: Callable[[], float],
        allowed: Callable[[NodeId], bool] = everybody,
    ) -> None:
        self._root = root
        self._clock = clock
        self._allowed = allowed
        self._true: OrderedDict[Credential, None] = OrderedDict()
        """Credentials that follow from the root, the one that was used last at the end."""

    def allows(self, node_id: NodeId) -> bool:
        """Return whether a member may still speak."""
        return self._allowed(node_id)

    def author_of(self, statement: Statement, kind: str) -> Credential:
        """Return the credential of the member who made a statement.

        Raises:
            MalformedMessageError: The statement is of another kind, or no present member's.
        """
        credential = statement.credential
        node_id = credential.node_id
        if not self._allowed(node_id):
            raise validate.malformed("statement.author", node_id, allowed="no banned node")
        if credential not in self._true:
            credential.check(self._root, None)
            self._true[credential] = None
            if len(self._true) > _REMEMBERED_MAX:
                self._true.popitem(last=False)
        self._true.move_to_end(credential)
        statement.check_signature(self._root, kind, now_s=self._clock())
        return credential


# Proof of who says what comes by way of a third member.
#
# A message that a member sends itself is proven by the certificate of the connection. One that it
# passes on for another carries a statement of its origin. A tensor that comes with it is not
# covered.

_PASSED = "passed"


class WayProofs:
    """Proofs that one node makes and checks.

    Args:
        membership: The node's.
        run_id: The run. A proof of another run is not believed.
        clock: Returns seconds of the Unix epoch.
    """

    def __init__(self, membership: Membership, run_id: RunId, clock: Callable[[], float]) -> None:
        self._membership = membership
        self._run_id = run_id
        self._authors = Authors(membership.root, clock, membership.bans.allowed)

    def proven(self, message: Message, way: Way) -> Way:
        """Return the way of this node's own message, with a proof."""
        statement = self._membership.state(_PASSED, self._body(message, way))
        return replace(way, proof=replace(statement, body=b"").to_bytes())

    def author_of(self, message: Message, way: Way) -> Credential:
        """Return the credential of the member that says a message which another has passed on.

        Raises:
            MalformedMessageError: The proof is missing, or is not that of the way's origin.
        """
        statement = replace(parse_statement(way.proof), body=self._body(message, way))
        author = self._authors.author_of(statement, _PASSED)
        if author.node_id != way.origin:
            raise validate.malformed("proof", author.node_id, allowed=f"that of {way.origin}")
        return author

    def _body(self, message: Message, way: Way) -> bytes:
        head = f"{self._run_id} {way.goal} {way.term} {way.ticket}\0"
        return head.encode() + content_of(message)


# Seals of the leader's decisions: statements of a data node (see `protocol.core.seals`).

_DECISION = "decision"


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
        self._membership = membership
        self._run_id = run_id
        self._authors = Authors(membership.root, wall_clock)
        self._last: tuple[Decision, bytes] | None = None
        """The last decision that was sealed here: all nodes below in the tree get the same."""

    def seal_of(self, decision: Decision) -> bytes:
        """Return this node's seal; empty if it is no data node."""
        own = self._membership
        if own.role is not Role.DATA:
            return b""
        if self._last is None or self._last[0] is not decision:
            statement = own.state(_DECISION, self._body(decision))
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
            self._authors.author_of(statement, _DECISION)
        except MalformedMessageError as error:
            return f"{error.what}: {error.why}"
        return ""

    def _body(self, decision: Decision) -> bytes:
        """Return what a seal is about: the run and the decision.

        The members of a view and the electors may travel as changes of earlier ones. So the hash of
        the view stands for it here, as in a change, and the electors are in order.
        """
        plain = replace(decision, seal=b"")
        electors = ""
        if isinstance(plain, Open):
            opening = plain.opening
            view = plain.opening.view
            electors = " ".join(sorted(opening.electors))
            shown = replace(opening, view=view.outline, electors=())
            plain = replace(plain, opening=shown, change=ViewChange(view.hash, view.hash))
        elif isinstance(plain, Mend):
            view = plain.view
            plain = replace(plain, view=view.outline, change=ViewChange(view.hash, view.hash))
        return f"{self._run_id} {electors}\0".encode() + content_of(plain)


# Proofs of what has been sent from stage to stage (see `protocol.core.proofs`).
#
# A proof is the SHA-256 of the tensor, the signer's public key, and a signature over the run, what
# the tensor is, and the hash. A node's id is the hash of its key, so nothing else is needed to know
# whose it is, also when that node is gone.

_KEY_END = DIGEST_BYTES + 32


class TensorProofs:
    """The proofs that one node makes and checks.

    Args:
        host: This node's key.
        run_id: The run. A proof of another run is nobody's.
    """

    def __init__(self, host: HostKey, run_id: RunId) -> None:
        self._host = host
        self._run_id = run_id

    def proof_of(self, digest: bytes, subject: Subject) -> bytes:
        """Return this node's proof of a tensor of its own.

        Args:
            digest: The tensor's SHA-256.
            subject: What it is.
        """
        return digest + self._host.public + self._host.sign(self._text(digest, subject))

    def signer_of(self, proof: bytes, subject: Subject) -> NodeId | None:
        """Return who has signed a proof; None if nobody has, or it is of something else."""
        if len(proof) != PROOF_BYTES:
            return None
        public = proof[DIGEST_BYTES:_KEY_END]
        signature = proof[_KEY_END:]
        try:
            verify(public, signature, self._text(digest_in(proof), subject))
        except MalformedMessageError:
            return None
        return node_id_of(public)

    def _text(self, digest: bytes, subject: Subject) -> bytes:
        iteration = subject.iteration
        microbatch = subject.microbatch
        kind = "gradient" if subject.is_gradient else "activation"
        of = (microbatch.iteration, microbatch.data_node_index, microbatch.index)
        text = f"{self._run_id} {iteration} {' '.join(map(str, of))} {kind}"
        return b"decod tensor 1\0" + text.encode() + b"\0" + digest


# The charter of a run: a data node's word that a run and its manifest belong together.
#
# A join string names only the root, since a run that is resumed has another id and another
# manifest. The charter ties both to the root. Every member passes it on, and nobody else can
# write one.

_CHARTER = "run"


def new_charter(founder: Membership, run_id: RunId, manifest_json: str) -> Statement:
    """Return the charter of a run that a data node founds.

    Args:
        founder: The data node's membership.
        run_id: The run.
        manifest_json: Its manifest as canonical JSON.
    """
    return founder.state(_CHARTER, _charter_body(run_id, manifest_json))


def check_charter(charter: Statement, root: bytes, run_id: RunId, manifest_json: str) -> None:
    """Check that a run and its manifest belong to a root.

    Args:
        charter: The run's charter.
        root: The root's public key.
        run_id: The run.
        manifest_json: Its manifest as canonical JSON.

    Raises:
        MalformedMessageError: They do not, as far as the charter proves.
    """
    # It stays true after its author's membership has ended.
    author = charter.check(root, _CHARTER, now_s=None)
    if author.role is not Role.DATA or charter.body != _charter_body(run_id, manifest_json):
        raise validate.malformed("charter", run_id, allowed="a data node's word for this run")


def _charter_body(run_id: RunId, manifest_json: str) -> bytes:
    manifest_sha256 = hashlib.sha256(manifest_json.encode()).hexdigest()
    return json.dumps({"manifest_sha256": manifest_sha256, "run_id": run_id}).encode()

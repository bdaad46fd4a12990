"""The data node's side of enrolment: who becomes a member, and with which papers.

A node asks over a TLS connection. Its certificate there proves that it has a join token's secret,
or papers from an earlier time. Its request is signed with the node key, and names the TLS key, so
no other node can use it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from decod.ids import NodeId
from decod.membership.certificates import (
    Caller,
    Issuer,
    Purpose,
    issuing_certificate,
    new_tls_key,
    public_from_der,
)
from decod.membership.credential import Credential, issue, verify
from decod.membership.identity import HostKey, node_id_of
from decod.membership.papers import TERMS, Membership, Papers, PaperTerms, certified, chains_of
from decod.membership.tokens import TokenRecord, Tokens
from decod.membership.waiting_list import ID_CHARACTERS, Decision, WaitingList
from decod.protocol.core.view import Role
from decod.wire import validate


class Refusal(Enum):
    """The reasons why a node does not become a member."""

    NOT_LEADER = "another node counts the uses of tokens"
    TOKEN_SPENT = "its token lets nobody in any more"  # noqa: S105 - not a secret.
    NO_ROOT = "only the organiser's host can admit data nodes"
    WRONG_ROLE = "its token or certificate is for another role"
    BANNED = "it is banned"
    WAITING = "the organiser has not let it in yet"
    SENT_AWAY = "the organiser does not let it in"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrollRequest:
    """A node's request for papers. The TLS key to certify is that of the connection."""

    public: bytes
    """The node's Ed25519 public key."""
    signature: bytes
    issuing_key: bytes = b""
    """A data node's public key to issue with, as DER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The papers that make a node a member. A data node makes its certificates itself."""

    credential: Credential
    chain: bytes = b""
    renewal_chain: bytes = b""
    issuing_certificate: bytes = b""


def enrolment_text(root: bytes, tls_key: bytes, issuing_key: bytes) -> bytes:
    """Return what a node signs with its node key to ask for papers.

    Args:
        root: The root's public key.
        tls_key: The public key of its TLS certificate, as DER.
        issuing_key: Its public key to issue with, as DER; empty for a volunteer.
    """
    parts = (root, len(tls_key).to_bytes(2, "big"), tls_key, issuing_key)
    return b"decod enrolment 1\0" + b"".join(parts)


@dataclass(slots=True)
class Registrar:
    """Admits nodes to a run.

    Args:
        membership: This data node's own.
        tokens: The join tokens that it knows.
        clock: Returns seconds of the Unix epoch.
        leader: Returns the leader's address, empty if it is not known; None if this node leads.
            Only the leader counts the uses of tokens.
        note: Takes the name of an event, and its fields as keywords.
        newcomers: Those who wait for the organiser.
        terms: How long papers last.
    """

    membership: Membership
    tokens: Tokens
    clock: Callable[[], float]
    leader: Callable[[], str | None]
    note: Callable[..., None]
    newcomers: WaitingList
    terms: PaperTerms = TERMS

    def anchors(self) -> bytes:
        """Return trust anchors, as PEM, for the holders of join tokens."""
        return self.tokens.anchors()

    def uninvited(self, caller: Caller) -> str:
        """Return why the holder of a join token may not become a member; empty if it may."""
        record = self.tokens.find(caller.issuer)
        if record is None:
            return f"token {caller.issuer} is not known here"
        refusal = record.refusal(caller.node_id, self.clock())
        return refusal and f"token {record.id} does not let {caller.node_id} in: {refusal}"

    def learn(self, records: Iterable[TokenRecord]) -> bool:
        """Take in what another data node knows of join tokens; return whether that was news.

        Raises:
            ConfigError: It can't be kept (E-CFG-039).
        """
        with_data = self.membership.root_key is None
        return self.tokens.merge(records, now_s=self.clock(), with_data=with_data)

    def enroll(self, caller: Caller, request: EnrollRequest, address: str = "") -> Grant | Refusal:
        """Return papers for a node, or why it gets none.

        Args:
            caller: The node, as its certificate proves it.
            request: What it asks for.
            address: From where it calls, for the notes.

        Raises:
            MalformedMessageError: The request is not the caller's, or names no key.
        """
        node = node_id_of(request.public)
        if node != caller.node_id:
            raise validate.malformed("public_key", node, allowed=f"that of {caller.node_id}")
        text = enrolment_text(self.membership.root, caller.key, request.issuing_key)
        verify(request.public, request.signature, text)
        role = Role.DATA if request.issuing_key else Role.RELAY
        who = {"peer": node, "address": address}
        answer = self._answer(caller, request, role, who)
        if answer is Refusal.WAITING:
            pass  # It asks every few seconds, and is noted the first time.
        elif isinstance(answer, Refusal):
            self.note("member.refused", **who, role=role.value, reason=answer.value)
        elif caller.purpose is Purpose.JOINING:
            self.note("member.admitted", **who, role=role.value, token=caller.issuer)
        else:
            self.note("member.extended", **who, role=role.value)
        if isinstance(answer, Grant):
            until_s = answer.credential.expires_s
            self.note("certificate.issued", **who, role=role.value, until_s=until_s)
        return answer

    def _answer(
        self, caller: Caller, request: EnrollRequest, role: Role, who: dict[str, str]
    ) -> Grant | Refusal:
        root = self.membership.root_key
        if not self.membership.bans.allowed(caller.node_id):
            return Refusal.BANNED
        if role is Role.DATA and root is None:
            return Refusal.NO_ROOT
        if caller.purpose is not Purpose.JOINING:
            if caller.is_data != (role is Role.DATA):
                return Refusal.WRONG_ROLE
        else:
            if self.leader() is not None:
                return Refusal.NOT_LEADER
            record = self.tokens.find(caller.issuer)
            if record is not None and record.role is not role:
                return Refusal.WRONG_ROLE
            if role is Role.RELAY and (waits := self._waits(caller, record, who)) is not None:
                return waits
            if refusal := self.tokens.use(caller.issuer, caller.node_id, self.clock()):
                self.note("token.refused", **who, token=caller.issuer, reason=refusal)
                return Refusal.TOKEN_SPENT
            self.note("token.used", **who, token=caller.issuer)
        if root is not None and role is Role.DATA:
            issuing = public_from_der(request.issuing_key)
            return data_grant(root, request.public, issuing, self.terms, self.clock())
        return self._volunteer_grant(caller, request.public)

    def _waits(
        self, caller: Caller, record: TokenRecord | None, who: dict[str, str]
    ) -> Refusal | None:
        """Return whether a newcomer has to wait, or is sent away; None if it may come in."""
        if record is None or record.refusal(caller.node_id, self.clock()):
            return None  # A token that lets nobody in is told at once.
        if caller.node_id in record.used_by:
            return None  # It has come in before, and has lost its papers.
        match self.newcomers.decision(caller.node_id, who["address"], record.id):
            case Decision.ENTERS:
                return None
            case Decision.SENT_AWAY:
                return Refusal.SENT_AWAY
            case Decision.LISTED:
                # The whole id would be shown by its name.
                self.note(
                    "member.asking", **who, token=record.id, id=caller.node_id[:ID_CHARACTERS]
                )
        return Refusal.WAITING

    def _volunteer_grant(self, caller: Caller, public: bytes) -> Grant:
        own = self.membership
        now_s = self.clock()
        key = public_from_der(caller.key)
        issuer = own.papers.issuer
        credential = own.papers.credential
        assert issuer is not None, "a data node can issue"
        chain, renewal_chain = chains_of(issuer, caller.node_id, key, self.terms, now_s)
        expires_s = int(now_s + self.terms.certificate_s)
        given = issue(own.root, own.host.sign, Role.RELAY, public, expires_s, issuer=credential)
        return Grant(credential=given, chain=chain, renewal_chain=renewal_chain)


def data_grant(
    root: HostKey, public: bytes, issuing: EllipticCurvePublicKey, terms: PaperTerms, now_s: float
) -> Grant:
    """Return what makes the holder of a node key a data node.

    Args:
        root: The key of the run's root.
        public: The node's public key.
        issuing: The public key with which it is to issue.
        terms: How long it is one.
        now_s: Seconds of the Unix epoch.
    """
    expires_s = now_s + terms.issuing_s
    node: NodeId = node_id_of(public)
    return Grant(
        credential=issue(root.public, root.sign, Role.DATA, public, int(expires_s)),
        issuing_certificate=issuing_certificate(
            root.private, node, issuing, now_s=now_s, expires_s=expires_s
        ),
    )


def founder_papers(root: HostKey, host: HostKey, terms: PaperTerms, now_s: float) -> Papers:
    """Return the papers that the holder of a run's root makes for itself: a data node's.

    Args:
        root: The root's key.
        host: The node's identity.
        terms: How long the papers last.
        now_s: Seconds of the Unix epoch.
    """
    key = new_tls_key()
    grant = data_grant(root, host.public, key.public_key(), terms, now_s)
    issuer = Issuer(host.node_id, key, grant.issuing_certificate)
    return certified(issuer, grant.credential, terms, now_s, new_tls_key())

"""Proofs that hold outside of a TLS connection: credentials, and statements signed with them.

    root of the run -> a data node's credential -> a volunteer's credential

The root is an Ed25519 key, whose public half is in every join string. It signs the credentials of
data nodes, and they sign those of volunteers. A member signs its statements with its node key, and
puts its credential beside them. So whoever knows the root can check a statement, wherever it comes
from, without asking anybody.

Signatures cover a text of fixed form, not the bytes of a Protobuf message, which are not unique.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from decod.ids import NodeId
from decod.membership.identity import node_id_of
from decod.protocol.core.view import Role
from decod.wire import validate
from decod.wire.codec import parse
from decod.wire.v1 import membership_pb2

PUBLIC_KEY_SIZE_BYTES = 32
SIGNATURE_SIZE_BYTES = 64

Sign = Callable[[bytes], bytes]
"""Returns the Ed25519 signature of a message."""

_ROLES = {
    Role.DATA: membership_pb2.MEMBER_ROLE_DATA,
    Role.RELAY: membership_pb2.MEMBER_ROLE_RELAY,
}
_ROLE_OF = {number: role for role, number in _ROLES.items()}

_expiry_s = validate.integer(0, 1 << 40)


@dataclass(frozen=True, slots=True)
class Credential:
    """The issuer's word that the holder of a key is a member until some time."""

    role: Role
    public: bytes
    """The member's Ed25519 public key."""
    expires_s: int
    """Seconds of the Unix epoch."""
    signature: bytes
    issuer: "Credential | None" = None
    """The issuing data node's credential; None if the root of the run has issued this one."""

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.public)

    @property
    def until_s(self) -> int:
        """Return the instant until which it holds, in seconds of the Unix epoch: no longer than its
        issuer's."""
        return self.expires_s if self.issuer is None else min(self.expires_s, self.issuer.expires_s)

    def check(self, root: bytes, now_s: float | None) -> None:
        """Check that this credential follows from the root of a run.

        Args:
            root: The root's public key.
            now_s: Seconds of the Unix epoch, at which it must hold; None for any time.

        Raises:
            MalformedMessageError: It does not, or not any more.
        """
        issuer = self.issuer
        by_root = self.issuer is None
        if by_root != (self.role is Role.DATA) or (issuer is not None and issuer.issuer):
            allowed = "the root's word for a data node, or a data node's for a volunteer"
            raise validate.malformed("credential.role", self.role.value, allowed=allowed)
        self.require_unexpired(now_s)
        if issuer is not None:
            issuer.check(root, None)
        text = _credential_text(root, self.role, self.public, self.expires_s)
        verify(root if issuer is None else issuer.public, self.signature, text)

    def require_unexpired(self, now_s: float | None) -> None:
        """Raises `MalformedMessageError` if it no longer holds at an instant."""
        if now_s is not None and now_s > self.until_s:
            raise validate.malformed("credential.expires_s", self.until_s, allowed=f"{now_s:.0f}")


@dataclass(frozen=True, slots=True)
class Statement:
    """A member's signed word. The body's form follows from the kind."""

    kind: str
    body: bytes
    credential: Credential
    signature: bytes

    def check(self, root: bytes, kind: str, *, now_s: float | None) -> Credential:
        """Check a statement of some kind; return the credential of the member who made it.

        Args:
            root: The root's public key.
            kind: The kind that is expected.
            now_s: Seconds of the Unix epoch, at which its author must be a member; None for any
                time, since it remains true.

        Raises:
            MalformedMessageError: It is of another kind, or is not a member's.
        """
        self.credential.check(root, now_s)
        self.check_signature(root, kind, now_s=now_s)
        return self.credential

    def check_signature(self, root: bytes, kind: str, *, now_s: float | None) -> None:
        """Check a statement whose credential is known to be true, but may have expired since.

        Raises:
            MalformedMessageError: It is of another kind, or its author has not made it.
        """
        if self.kind != kind:
            raise validate.malformed("statement.kind", self.kind[:40], allowed=kind)
        self.credential.require_unexpired(now_s)
        verify(self.credential.public, self.signature, _statement_text(root, kind, self.body))

    def to_bytes(self) -> bytes:
        """Return the statement as it travels."""
        return statement_message(self).SerializeToString()


def issue(
    root: bytes,
    sign: Sign,
    role: Role,
    public: bytes,
    expires_s: int,
    issuer: Credential | None = None,
) -> Credential:
    """Return a new credential.

    Args:
        root: The root's public key.
        sign: Signs as the issuer.
        role: The member's role.
        public: The member's public key.
        expires_s: Until when it holds, in seconds of the Unix epoch.
        issuer: The issuer's own credential; None if the issuer is the root.
    """
    signature = sign(_credential_text(root, role, public, expires_s))
    return Credential(role, public, expires_s, signature, issuer)


def state(root: bytes, sign: Sign, credential: Credential, kind: str, body: bytes) -> Statement:
    """Return a new statement of the member whose credential is given."""
    return Statement(kind, body, credential, sign(_statement_text(root, kind, body)))


def verify(public: bytes, signature: bytes, text: bytes) -> None:
    """Check an Ed25519 signature.

    Raises:
        MalformedMessageError: It is not that of the key's holder.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError) as error:
        raise validate.malformed("signature", "another's", allowed="the key's holder's") from error


def _credential_text(root: bytes, role: Role, public: bytes, expires_s: int) -> bytes:
    parts = (root, _ROLES[role].to_bytes(1, "big"), public, expires_s.to_bytes(8, "big"))
    return b"decod credential 1\0" + b"".join(parts)


def _statement_text(root: bytes, kind: str, body: bytes) -> bytes:
    return b"decod statement 1\0" + root + kind.encode() + b"\0" + body


# --- on the wire ------------------------------------------------------------------------------


def credential_message(credential: Credential) -> membership_pb2.Credential:
    """Return the message of a credential."""
    issuer = credential.issuer
    message = membership_pb2.Credential(
        role=_ROLES[credential.role],
        public_key=credential.public,
        expires_s=credential.expires_s,
        signature=credential.signature,
    )
    if issuer is not None:
        message.issuer.public_key = issuer.public
        message.issuer.expires_s = issuer.expires_s
        message.issuer.signature = issuer.signature
    return message


def credential_from(message: membership_pb2.Credential) -> Credential:
    """Return the credential in a message. Nothing is proven yet.

    Raises:
        MalformedMessageError: A field is missing or out of range.
    """
    if message.role not in _ROLE_OF:
        raise validate.malformed("credential.role", message.role, allowed="a known role")
    issuer = _parts_of(message.issuer, Role.DATA) if message.HasField("issuer") else None
    return _parts_of(message, _ROLE_OF[message.role], issuer)


def _parts_of(
    message: "membership_pb2.Credential | membership_pb2.Issuer",
    role: Role,
    issuer: Credential | None = None,
) -> Credential:
    return Credential(
        role=role,
        public=_sized("credential.public_key", message.public_key, PUBLIC_KEY_SIZE_BYTES),
        expires_s=_expiry_s("credential.expires_s", message.expires_s),
        signature=_sized("credential.signature", message.signature, SIGNATURE_SIZE_BYTES),
        issuer=issuer,
    )


def statement_message(statement: Statement) -> membership_pb2.Statement:
    """Return the message of a statement."""
    return membership_pb2.Statement(
        kind=statement.kind,
        body=statement.body,
        credential=credential_message(statement.credential),
        signature=statement.signature,
    )


def statement_from(message: membership_pb2.Statement) -> Statement:
    """Return the statement in a message. Nothing is proven yet.

    Raises:
        MalformedMessageError: A field is missing or out of range.
    """
    return Statement(
        kind=message.kind,
        body=message.body,
        credential=credential_from(message.credential),
        signature=_sized("statement.signature", message.signature, SIGNATURE_SIZE_BYTES),
    )


def parse_credential(data: bytes) -> Credential:
    """Return the credential in some bytes. Nothing is proven yet. Raises as `credential_from`."""
    return credential_from(parse(membership_pb2.Credential, data))


def parse_statement(data: bytes) -> Statement:
    """Return the statement in some bytes. Nothing is proven yet. Raises as `statement_from`."""
    return statement_from(parse(membership_pb2.Statement, data))


def _sized(field: str, value: bytes, size_bytes: int) -> bytes:
    if len(value) != size_bytes:
        raise validate.malformed(field, f"{len(value)} bytes", allowed=f"{size_bytes} bytes")
    return value

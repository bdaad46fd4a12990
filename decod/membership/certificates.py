"""X.509 certificates, by which a node proves its membership in each TLS connection.

    root (Ed25519) -> a data node's issuing certificate (P-256) -> a member's certificate (P-256)
    a join token's key (Ed25519) -> a joiner's certificate (P-256), good for `Enroll` only

The names in them:

    <node id>.peer.decod     a member, as server and as client; peer.decod: any member
    data.peer.decod          beside it: a data node, which has an issuing certificate
    <node id>.renew.decod    a former or present member that asks for a new certificate
    <node id>.joiner.decod   a holder of a join token

Nobody sends or stores a certificate of the root or of a token. Whoever knows a public key makes a
trust anchor from it: a certificate without a valid signature, since TLS does not look at that of an
anchor. So a join string needs to hold no more than the root's public key.

gRPC refuses Ed25519 in the certificate of a connection's end, so these have P-256 keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from decod.ids import NodeId
from decod.wire import validate

MEMBER_NAME = "peer.decod"
"""The name in the certificate of every member."""
DATA_NAME = "data.peer.decod"
"""The name in the certificate of every data node."""
_DATA_RENEWAL_NAME = "data.renew.decod"

_ALWAYS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
"""The time that trust anchors last: it is the token or the run that ends."""
CLOCK_TOLERANCE_S = 7200.0
"""The time that a certificate reaches back, for hosts whose clocks are behind the issuer's."""

_ROOT = "root.decod"
_ISSUER = "issuer."
_TOKEN = "token."  # noqa: S105 - a prefix of names, not a secret.


class Purpose(Enum):
    """The purpose of a certificate: the last part of the name in it."""

    PEER = "peer.decod"
    RENEWAL = "renew.decod"
    JOINING = "joiner.decod"


def peer_name(node: NodeId) -> str:
    """Return the name in the TLS certificate of a member."""
    return f"{node}.{Purpose.PEER.value}"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The certificate that a node shows in a TLS handshake, and those that it believes. All as
    PEM."""

    key: bytes
    """The private key."""
    chain: bytes
    """Its certificate, and the issuer's."""
    anchors: bytes
    """Trust anchors: whose certificates are believed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The other end of a TLS connection, as its certificate proves it."""

    purpose: Purpose
    node_id: NodeId
    is_data: bool
    """It is a data node, or was one."""
    issuer: str
    """The node id of the data node that issued the certificate, or the id of the token."""
    expires_s: float
    key: bytes
    """The certified public key, as DER."""


# --- keys -------------------------------------------------------------------------------------


def new_tls_key() -> EllipticCurvePrivateKey:
    """Return a new key for a certificate."""
    return generate_private_key(SECP256R1())


def private_pem(key: EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_der(key: EllipticCurvePublicKey) -> bytes:
    """Return a public key as DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def public_from_der(data: bytes) -> EllipticCurvePublicKey:
    """Return the P-256 key in some bytes.

    Raises:
        MalformedMessageError: They hold no such key.
    """
    try:
        key = load_der_public_key(data)
    except ValueError:
        key = None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise validate.malformed("public key", f"{len(data)} bytes", allowed="a P-256 key")
    return key


# --- issuing ----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def root_anchor(root: bytes) -> bytes:
    """Return a trust anchor, as PEM, for the root with this public key."""
    return _anchor(root, _ROOT, Purpose.PEER, Purpose.RENEWAL)


@lru_cache(maxsize=1024)
def token_anchor(token_id: str, public: bytes) -> bytes:
    """Return a trust anchor, as PEM, for holders of a join token with this public key."""
    return _anchor(public, f"{_TOKEN}{token_id}", Purpose.JOINING)


def _anchor(public: bytes, name: str, *purposes: Purpose) -> bytes:
    builder = _begun(name, name, Ed25519PublicKey.from_public_bytes(public))
    certificate = (
        builder.not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_only(purposes), critical=True)
        # Anybody's signature does: see above.
        .sign(Ed25519PrivateKey.generate(), None)
    )
    return certificate.public_bytes(Encoding.PEM)


def issuing_certificate(
    root: Ed25519PrivateKey,
    node: NodeId,
    key: EllipticCurvePublicKey,
    *,
    now_s: float,
    expires_s: float,
) -> bytes:
    """Return a data node's issuing certificate, as PEM: with its key it admits others.

    Args:
        root: The root's key.
        node: The data node.
        key: The key with which it is to sign.
        now_s: Seconds of the Unix epoch.
        expires_s: Seconds of the Unix epoch.
    """
    builder = _begun(f"{_ISSUER}{node}", _ROOT, key)
    begin, until = _times(now_s, expires_s)
    certificate = (
        builder.not_valid_before(begin)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_only((Purpose.PEER, Purpose.RENEWAL)), critical=True)
        .sign(root, None)
    )
    return certificate.public_bytes(Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Issuer:
    """A data node's means to certify others, and itself."""

    node_id: NodeId
    key: EllipticCurvePrivateKey
    certificate: bytes
    """Its issuing certificate, as PEM."""

    def chain(
        self,
        purpose: Purpose,
        node: NodeId,
        key: EllipticCurvePublicKey,
        *,
        now_s: float,
        expires_s: float,
    ) -> bytes:
        """Return a node's certificate for a purpose, followed by the issuing one, as PEM.

        It says that the node is a data node if that is the issuer itself.

        Args:
            purpose: What it is good for.
            node: The node.
            key: The node's TLS key.
            now_s: Seconds of the Unix epoch.
            expires_s: Seconds of the Unix epoch. It never outlives the issuing certificate.
        """
        names = [f"{node}.{purpose.value}"]
        if purpose is Purpose.PEER:
            names.append(MEMBER_NAME)
        if node == self.node_id:
            names.append(DATA_NAME if purpose is Purpose.PEER else _DATA_RENEWAL_NAME)
        expires_s = min(expires_s, expiry_s(self.certificate))
        issuer = f"{_ISSUER}{self.node_id}"
        end = _end(names, issuer, key, *_times(now_s, expires_s))
        return end.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM) + self.certificate


def joiner_certificate(
    token_id: str,
    token_key: Ed25519PrivateKey,
    node: NodeId,
    key: EllipticCurvePublicKey,
) -> bytes:
    """Return the certificate, as PEM, that the holder of a join token makes for itself.

    It lasts for ever: it is the token that ends, and the holder's clock may be wrong.
    """
    names = [f"{node}.{Purpose.JOINING.value}"]
    end = _end(names, f"{_TOKEN}{token_id}", key, *_ALWAYS)
    return end.sign(token_key, None).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(
    subject: str, issuer: str, key: EllipticCurvePublicKey | Ed25519PublicKey
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name(issuer))
    return builder.public_key(key).serial_number(x509.random_serial_number())


def _times(now_s: float, expires_s: float) -> tuple[datetime, datetime]:
    """Return when a certificate that is made now begins and ends."""
    begin = datetime.fromtimestamp(now_s - CLOCK_TOLERANCE_S, UTC)
    return begin, datetime.fromtimestamp(expires_s, UTC)


def _only(purposes: Iterable[Purpose]) -> x509.NameConstraints:
    """Return the constraint that certificates below this one have names for these purposes."""
    return x509.NameConstraints([x509.DNSName(each.value) for each in purposes], None)


def _end(
    names: list[str], issuer: str, key: EllipticCurvePublicKey, begin: datetime, until: datetime
) -> x509.CertificateBuilder:
    """Return the unsigned certificate of one end of a connection."""
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    subject = names[0].partition(".")[0]
    return (
        _begun(subject, issuer, key)
        .not_valid_before(begin)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
    )


# --- reading ----------------------------------------------------------------------------------


def first_of(chain: bytes) -> bytes:
    """Return the first certificate of a chain, as PEM."""
    head, end, _ = chain.partition(b"-----END CERTIFICATE-----\n")
    return head + end


def expiry_s(pem: bytes) -> float:
    """Return when the first certificate of a chain expires, in seconds of the Unix epoch."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


@lru_cache(maxsize=4096)
def caller_of(pem: bytes) -> Caller:
    """Return what a certificate says. Its signature must have been checked: gRPC has done so.

    Raises:
        MalformedMessageError: It is none that a node of decod has.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = found.value.get_values_for_type(x509.DNSName)
        issuer = str(certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        key = certificate.public_key()
    except (ValueError, x509.ExtensionNotFound, IndexError) as error:
        raise validate.malformed("certificate", str(error), allowed="a node's") from error
    if not names or not isinstance(key, EllipticCurvePublicKey):
        raise validate.malformed("certificate", "no name, or another key", allowed="a node's")
    node, _, rest = names[0].partition(".")
    purpose = next((each for each in Purpose if each.value == rest), None)
    if purpose is None:
        raise validate.malformed("certificate.name", names[0], allowed="a node's name")
    of_token = issuer.startswith(_TOKEN)
    # The constraints of the anchors say so too, if the TLS library heeds them.
    if of_token != (purpose is Purpose.JOINING):
        raise validate.malformed("certificate.issuer", issuer, allowed="one for that purpose")
    return Caller(
        purpose=purpose,
        node_id=validate.node_id("certificate.name", node),
        # A data node certifies itself. It can't make another one a data node.
        is_data=bool({DATA_NAME, _DATA_RENEWAL_NAME} & {*names}) and issuer == f"{_ISSUER}{node}",
        issuer=issuer.removeprefix(_TOKEN).removeprefix(_ISSUER),
        expires_s=certificate.not_valid_after_utc.timestamp(),
        key=public_der(key),
    )

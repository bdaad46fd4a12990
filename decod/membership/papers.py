"""A node's papers: the certificates and the credential that prove its membership in a run.

They lie in the state folder, so that a node needs its join token only once. Each run has a folder
there, named after its root. A run that is resumed keeps its root, and so its members.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from decod.errors import ConfigError, MalformedMessageError
from decod.files import read_beginning, replace_durably
from decod.ids import NodeId
from decod.membership.ban_list import BanBook
from decod.membership.certificates import (
    Issuer,
    Purpose,
    TlsIdentity,
    expiry_s,
    private_pem,
    root_anchor,
)
from decod.membership.credential import (
    Credential,
    Statement,
    credential_message,
    parse_credential,
    state,
)
from decod.membership.identity import HostKey
from decod.protocol.core.view import Role
from decod.texts import base32, unique

_FILE = "papers.json"
_SIZE_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTerms:
    """The time that proofs of membership last, in seconds. A node renews them earlier."""

    certificate_s: float = 24 * 3600.0
    """A certificate and a volunteer's credential."""
    renewal_s: float = 14 * 24 * 3600.0
    """The time that a node can have been away and still come back without a token."""
    issuing_s: float = 30 * 24 * 3600.0
    """A data node's credential and issuing certificate."""


TERMS = PaperTerms()
RENEWS_AFTER = 2 / 3
"""The part of a certificate's life after which its holder renews it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """The proofs of a membership. A renewal replaces all of it."""

    tls_key: EllipticCurvePrivateKey
    credential: Credential
    chain: bytes
    """The TLS certificate and its issuer's, as PEM."""
    renewal_chain: bytes
    """A certificate that lasts longer, and its issuer's, as PEM: it renews after a long sleep."""
    issued_s: float
    """The instant when they were issued, in seconds of the Unix epoch on this host's clock."""
    issuer: Issuer | None = None
    """A data node's means to admit others."""

    @property
    def expires_s(self) -> float:
        """Return the instant until which they admit their holder, in seconds of the Unix epoch."""
        return min(expiry_s(self.chain), self.credential.expires_s)

    @property
    def renews_s(self) -> float:
        """Return the instant when to renew them, in seconds of the Unix epoch."""
        return self.issued_s + RENEWS_AFTER * (self.expires_s - self.issued_s)


class Membership:
    """A node's membership in one run, as its parts use it. Renewals replace its papers.

    Args:
        root: The public key of the run's root.
        host: This node's identity.
        papers: Its present papers.
        folder: Where to keep them; None to keep none.
        root_key: The root itself, at the organiser's host: it makes data nodes.

    Raises:
        ConfigError: The bans in the folder can't be read (E-CFG-080).
    """

    def __init__(
        self,
        root: bytes,
        host: HostKey,
        papers: Papers,
        folder: Path | None = None,
        *,
        root_key: HostKey | None = None,
    ) -> None:
        self.root = root
        self.host = host
        self.papers = papers
        self.root_key = root_key
        self.on_renewed: list[Callable[[], None]] = []
        """Called after each renewal."""
        self.folder = folder
        self.bans = BanBook(root, folder)
        """The bans of the run."""
        self._anchor = root_anchor(root)

    @property
    def node_id(self) -> NodeId:
        return self.host.node_id

    @property
    def role(self) -> Role:
        return self.papers.credential.role

    @property
    def tls(self) -> TlsIdentity:
        """The certificate that this node shows to other members."""
        return self._tls(self.papers.chain)

    @property
    def renewal_tls(self) -> TlsIdentity:
        """The certificate that this node shows to ask for new papers after the old ones have
        expired."""
        return self._tls(self.papers.renewal_chain)

    def _tls(self, chain: bytes) -> TlsIdentity:
        return TlsIdentity(private_pem(self.papers.tls_key), chain, self._anchor)

    def state(self, kind: str, body: bytes) -> Statement:
        """Return a statement of this node."""
        return state(self.root, self.host.sign, self.papers.credential, kind, body)

    def adopt(self, papers: Papers) -> None:
        """Use new papers from now on, and keep them on disk.

        Raises:
            ConfigError: They can't be written (E-CFG-037). They are used all the same.
        """
        self.papers = papers
        for told in self.on_renewed:
            told()
        if self.folder is not None:
            keep_papers(self.folder, papers)


def chains_of(
    issuer: Issuer, node: NodeId, key: EllipticCurvePublicKey, terms: PaperTerms, now_s: float
) -> tuple[bytes, bytes]:
    """Return a node's two certificates, each with its issuer's: for its peers, and for renewals.

    Args:
        issuer: The issuing data node's means. It makes no other node a data node.
        node: The node.
        key: The node's TLS key.
        terms: How long they last.
        now_s: Seconds of the Unix epoch.
    """
    make = partial(issuer.chain, node=node, key=key, now_s=now_s)
    return (
        make(Purpose.PEER, expires_s=now_s + terms.certificate_s),
        make(Purpose.RENEWAL, expires_s=now_s + terms.renewal_s),
    )


def certified(
    issuer: Issuer,
    credential: Credential,
    terms: PaperTerms,
    now_s: float,
    key: EllipticCurvePrivateKey,
) -> Papers:
    """Return the papers that a data node issues to itself.

    Args:
        issuer: Its means to certify.
        credential: Its credential, by the root.
        terms: How long the papers last.
        now_s: Seconds of the Unix epoch.
        key: Its TLS key.
    """
    chain, renewal_chain = chains_of(issuer, issuer.node_id, key.public_key(), terms, now_s)
    return Papers(
        tls_key=key,
        credential=credential,
        chain=chain,
        renewal_chain=renewal_chain,
        issued_s=now_s,
        issuer=issuer,
    )


# --- on disk ----------------------------------------------------------------------------------


def membership_folder(state_dir: Path, root: bytes) -> Path:
    """Return where a node keeps what it knows of the run with this root."""
    return state_dir / "memberships" / base32(root)


def keep_papers(folder: Path, papers: Papers) -> None:
    """Write papers to a folder, which is made if it is missing. Only the owner can read them.

    Raises:
        ConfigError: They can't be written (E-CFG-037).
    """
    issuer = papers.issuer
    content: dict[str, Any] = {
        "tls_key": private_pem(papers.tls_key).decode(),
        "credential": credential_message(papers.credential).SerializeToString().hex(),
        "chain": papers.chain.decode(),
        "renewal_chain": papers.renewal_chain.decode(),
        "issued_s": papers.issued_s,
    }
    if issuer is not None:
        content["issuing_key"] = private_pem(issuer.key).decode()
        content["issuing_certificate"] = issuer.certificate.decode()
    path = folder / _FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_durably(path, json.dumps(content, indent=1).encode(), mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror or error}",
            why="without it this node needs a new join token after its next start",
            fix="make its folder one that you may write, or name another with --state-dir",
            code="E-CFG-037",
        ) from error


def load_papers(folder: Path, host: HostKey, root: bytes) -> Papers | None:
    """Return the papers that a folder holds; None if it holds none that are this node's.

    Whether they still hold is not checked.
    """
    try:
        text = read_beginning(folder / _FILE, _SIZE_MAX_BYTES)
        content = json.loads(text, object_pairs_hook=unique)
        credential = parse_credential(bytes.fromhex(content["credential"]))
        issuer = None
        if "issuing_key" in content:
            certificate = content["issuing_certificate"].encode()
            issuer = Issuer(host.node_id, _private(content["issuing_key"]), certificate)
            expiry_s(certificate)
        papers = Papers(
            tls_key=_private(content["tls_key"]),
            credential=credential,
            chain=content["chain"].encode(),
            renewal_chain=content["renewal_chain"].encode(),
            issued_s=float(content["issued_s"]),
            issuer=issuer,
        )
        credential.check(root, None)
        # Raises if a chain is none.
        expiry_s(papers.chain), expiry_s(papers.renewal_chain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    except MalformedMessageError:
        return None
    return papers if credential.node_id == host.node_id else None


def _private(pem: str) -> EllipticCurvePrivateKey:
    key = load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise TypeError("the key is of another kind")
    return key

"""Forms of the DHT's datagrams.

    greeting  0  id  tag of the run  length  introduction  zeros to 448 bytes
    welcome   1  id of the greeting  length  introduction  nonce  proof
    request   2  tag of the session  id, which is the nonce too  encrypted call
    reply     3  id of the request  nonce  encrypted answer

Two members introduce themselves with a greeting and a welcome, once (see `dht_session`). All else
is encrypted msgpack. Greetings and searches are padded: what they lead to is never longer than they
are.
"""

import hashlib
import ipaddress
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import umsgpack  # type: ignore[import-untyped]  # Comes with kademlia; has no types.
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from kademlia.node import Node

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.credential import Credential, parse_statement
from decod.membership.papers import Membership
from decod.membership.statements import Authors
from decod.net.address import Address
from decod.net.dht_record import RECORD_SIZE_MAX_BYTES
from decod.net.dht_table import BUCKET_SIZE
from decod.wire import validate

# Sessions of the DHT: how two members of a run encrypt their datagrams to each other.
#
# An *introduction* is a member's statement that a key of its process is its own in this run. Two
# members that have each other's introductions share a *session*: a secret that follows from their
# two keys, and that nobody else can compute. Datagrams between them are encrypted and
# authenticated with it, so nobody else can read, make or alter one.
#
# A statement signed over the asker's random number would prove less. A stranger between two members
# could pass on the question and the answer, and would then be taken for one of them.
#
# A session ends with the process that made its key, or with the credential in its introduction.

KADEMLIA_ID_SIZE_BYTES = 20
SESSION_TAG_SIZE_BYTES = 8
NONCE_SIZE_BYTES = 12
MAC_SIZE_BYTES = 16
"""The bytes that encryption adds to a text: the code that authenticates it."""

_KIND = "dht introduction"
_KEY_SIZE_BYTES = 32
_PEERS_MAX = 4096


def kademlia_id_of(node_id: NodeId) -> bytes:
    """Return a node's place in the DHT, 20 bytes. Nobody can choose it without the node's key."""
    return hashlib.sha256(node_id.encode()).digest()[:KADEMLIA_ID_SIZE_BYTES]


@dataclass(slots=True, eq=False)
class Session:
    """The secret that this node shares with another member's process."""

    node_id: NodeId
    kademlia_id: bytes
    tag: bytes
    """The name of the session in the member's requests, 8 bytes."""
    introduction: bytes
    until_s: int
    """The instant when the member's credential ends, in seconds of the Unix epoch."""
    outgoing: ChaCha20Poly1305
    incoming: ChaCha20Poly1305

    def encrypt(self, nonce: bytes, text: bytes, head: bytes) -> bytes:
        """Return a text to the member that nobody else can read or alter.

        Args:
            nonce: 12 random bytes. They must never be used for another text.
            text: The text.
            head: What precedes the text. It can be read, but not altered.
        """
        return self.outgoing.encrypt(nonce, text, head)

    def decrypt(self, nonce: bytes, encrypted: bytes, head: bytes) -> bytes | None:
        """Return the text that the member has encrypted; None if it has not."""
        if len(nonce) != NONCE_SIZE_BYTES:
            return None
        try:
            return self.incoming.decrypt(nonce, encrypted, head)
        except InvalidTag:
            return None


@dataclass(slots=True)
class _Peer:
    """The sessions with one node, which may have begun anew since it answered last."""

    answered: Session | None = None
    introduced: Session | None = None


class Sessions:
    """This node's sessions with other members, at most 4096 of them.

    Args:
        membership: This node's.
        run_id: The run. Introductions of another run are not believed.
        clock: Returns seconds of the Unix epoch.
        authors: Tells who has made a statement.
    """

    def __init__(
        self, membership: Membership, run_id: RunId, clock: Callable[[], float], authors: Authors
    ) -> None:
        self._membership = membership
        self._run_id = run_id
        self._clock = clock
        self._authors = authors
        self._key = X25519PrivateKey.generate()
        self._public = self._key.public_key().public_bytes_raw()
        self._introduction: tuple[Credential, bytes] | None = None
        self._by_tag: dict[bytes, Session] = {}
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        """The members by place in the DHT, the one that was used last at the end."""
        self.kademlia_id = kademlia_id_of(membership.node_id)
        self.tag = _tag_of(membership.host.public, self._public)
        """The name of this node in its requests."""

    def introduction(self) -> bytes:
        """Return this node's introduction, with its present credential: at most 400 bytes."""
        credential = self._membership.papers.credential
        if self._introduction is None or self._introduction[0] is not credential:
            said = self._membership.state(_KIND, self._body(self._public))
            # The receiver knows the run.
            self._introduction = (credential, replace(said, body=self._public).to_bytes())
        return self._introduction[1]

    def known(self, introduction: bytes) -> Session | None:
        """Return the session of an introduction that has been checked before, else None."""
        try:
            said = parse_statement(introduction)
        except MalformedMessageError:
            return None
        session = self.find(_tag_of(said.credential.public, said.body))
        return session if session is not None and session.introduction == introduction else None

    def meet(self, introduction: bytes) -> Session:
        """Check an introduction, and return the session that follows from it.

        Raises:
            MalformedMessageError: It is no present member's of this run, or is this node's own.
        """
        said = parse_statement(introduction)
        public = said.body
        credential = said.credential
        if len(public) != _KEY_SIZE_BYTES or credential.node_id == self._membership.node_id:
            raise validate.malformed("introduction", public, allowed="another node's key")
        self._authors.author_of(replace(said, body=self._body(public)), _KIND)
        tag = _tag_of(credential.public, public)
        session = self._by_tag.get(tag)
        if session is None:
            session = self._new(credential.node_id, tag, public)
            self._keep(session)
        session.introduction = introduction
        session.until_s = credential.until_s
        return session

    def find(self, tag: bytes) -> Session | None:
        """Return the session of this name, if it still holds."""
        session = self._by_tag.get(tag)
        if session is None or not self._holds(session):
            return None
        self._peers.move_to_end(session.kademlia_id)
        return session

    def of(self, kademlia_id: bytes) -> Session | None:
        """Return the session in which a node answered last, if it still holds."""
        peer = self._peers.get(kademlia_id)
        session = None if peer is None else peer.answered
        return session if session is not None and self._holds(session) else None

    def answered(self, session: Session) -> None:
        """A node has answered this one's random number: use that session from now on.

        An introduction alone may be an old one that somebody repeats.
        """
        peer = self._peers.get(session.kademlia_id)
        if peer is not None and session in (peer.answered, peer.introduced):
            self._forget(peer.answered, unless=session)
            peer.answered = session

    def drop(self, kademlia_id: bytes) -> None:
        """Forget a node that does not answer any more."""
        peer = self._peers.pop(kademlia_id, None)
        if peer is not None:
            self._forget(peer.answered)
            self._forget(peer.introduced)

    def __len__(self) -> int:
        return len(self._peers)

    def _holds(self, session: Session) -> bool:
        allowed = self._authors.allows(session.node_id)
        return allowed and self._clock() <= session.until_s

    def _keep(self, session: Session) -> None:
        peer = self._peers.setdefault(session.kademlia_id, _Peer())
        self._peers.move_to_end(session.kademlia_id)
        self._forget(peer.introduced, unless=peer.answered)
        peer.introduced = self._by_tag[session.tag] = session
        if len(self._peers) > _PEERS_MAX:
            self.drop(next(iter(self._peers)))

    def _forget(self, session: Session | None, unless: Session | None = None) -> None:
        if session is not None and session is not unless:
            self._by_tag.pop(session.tag, None)

    def _new(self, node_id: NodeId, tag: bytes, public: bytes) -> Session:
        """Return a session with keys of its own, one for each direction."""
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            # Some points have no secret in common with anybody.
            raise validate.malformed("introduction", public, allowed="a key") from error
        kademlia_id = kademlia_id_of(node_id)
        own = (self.kademlia_id, self._public)
        other = (kademlia_id, public)
        return Session(
            node_id=node_id,
            kademlia_id=kademlia_id,
            tag=tag,
            introduction=b"",
            until_s=0,
            outgoing=self._cipher(secret, *own, *other),
            incoming=self._cipher(secret, *other, *own),
        )

    def _cipher(self, secret: bytes, *ends: bytes) -> ChaCha20Poly1305:
        """Return the cipher of one direction. It follows from who the two ends say they are."""
        info = b"".join((b"decod dht 1\0", self._membership.root, self._run_id.encode(), *ends))
        key = HKDF(SHA256(), length=_KEY_SIZE_BYTES, salt=None, info=info).derive(secret)
        return ChaCha20Poly1305(key)

    def _body(self, public: bytes) -> bytes:
        return self._run_id.encode() + public


def new_nonce() -> bytes:
    """Return 12 random bytes."""
    return os.urandom(NONCE_SIZE_BYTES)


def _tag_of(node_key: bytes, public: bytes) -> bytes:
    return hashlib.sha256(b"decod dht\0" + node_key + public).digest()[:SESSION_TAG_SIZE_BYTES]


DATAGRAM_SIZE_MAX_BYTES = 1200
GREETING_SIZE_BYTES = 448
RUN_TAG_SIZE_BYTES = 8
GREETING = b"\x00"
WELCOME = b"\x01"
REQUEST = b"\x02"
REPLY = b"\x03"

ID_END = 1 + NONCE_SIZE_BYTES
"""The place where the id ends, in all datagrams but requests."""
REQUEST_HEAD_SIZE_BYTES = 1 + SESSION_TAG_SIZE_BYTES
REQUEST_SIZE_LEAST_BYTES = REQUEST_HEAD_SIZE_BYTES + NONCE_SIZE_BYTES + MAC_SIZE_BYTES
REPLY_SIZE_LEAST_BYTES = ID_END + NONCE_SIZE_BYTES + MAC_SIZE_BYTES

PING = bytes(umsgpack.packb(["ping"]))
PING_SIZE_BYTES = REQUEST_SIZE_LEAST_BYTES + len(PING)

# The longest reply is a record, with at most 16 bytes round it. A ping may follow it.
_SEARCH_SIZE_BYTES = REPLY_SIZE_LEAST_BYTES + RECORD_SIZE_MAX_BYTES + 16 + PING_SIZE_BYTES
assert _SEARCH_SIZE_BYTES <= DATAGRAM_SIZE_MAX_BYTES

# All errors that the decoder raises on hostile bytes.
_UNPACK_ERRORS = (
    umsgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    OSError,
)


def run_tag(run_id: RunId) -> bytes:
    """Return what names the run in a greeting, 8 bytes. It does not tell the run's id."""
    return hashlib.sha256(b"decod dht run\0" + run_id.encode()).digest()[:RUN_TAG_SIZE_BYTES]


def framed(introduction: bytes) -> bytes:
    """Return an introduction after its length."""
    return len(introduction).to_bytes(2, "big") + introduction


def unframed(data: bytes) -> tuple[bytes, bytes]:
    """Return the introduction at the beginning of some bytes, and what follows it."""
    end = 2 + int.from_bytes(data[:2], "big")
    return data[2:end], data[end:]


def search_call(name: str, key: bytes) -> bytes:
    """Return a call for what is near to a place, or there. It is as long as the longest answer."""
    plain_size_bytes = len(encoded([name, key, bytes(256)])) - 256
    room_bytes = _SEARCH_SIZE_BYTES - REQUEST_SIZE_LEAST_BYTES - plain_size_bytes
    return encoded([name, key, bytes(room_bytes)])


def encoded(value: object) -> bytes:
    """Return the bytes of a call or an answer."""
    return bytes(umsgpack.packb(value))


def decoded(data: bytes) -> object:
    """Return a peer's call or answer; `()`, which is neither, if it can't be read."""
    try:
        value: object = umsgpack.unpackb(data)
    except _UNPACK_ERRORS:
        # Not an exception: an unreadable answer must end its caller's wait too.
        return ()
    # None means "no answer", so what decodes to None becomes an invalid one.
    return () if value is None else value


def nodes_in(answer: list[Any]) -> list[Node] | None:
    """Return the nodes that a peer names in its answer; None if one of them is malformed."""
    if len(answer) > BUCKET_SIZE:
        return None
    nodes = []
    for entry in answer:
        match entry:
            case [bytes(place), str(ip), int(port)] if len(place) == KADEMLIA_ID_SIZE_BYTES:
                if not _can_be_sent_to(ip, port):
                    return None
                nodes.append(Node(place, ip, port))
            case _:
                return None
    return nodes


def source_of(addr: tuple[Any, ...]) -> Address:
    """Return host and port of a datagram's source, with an IPv4-mapped address as IPv4."""
    host, port = addr[:2]
    return host.removeprefix("::ffff:") if "." in host else host, port


def _can_be_sent_to(ip: str, port: int) -> bool:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    # Nodes write IPv4 addresses as such, and know nothing of others' network interfaces.
    odd = "%" in ip or (address.version == 6 and address.ipv4_mapped is not None)
    if odd or address.is_multicast or address.is_unspecified or isinstance(port, bool):
        return False
    return 1 <= port <= 65535

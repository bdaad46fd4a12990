"""Members of a run of the tests' own, with real papers. Nobody has them anywhere else."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from decod.clocks import wall_clock
from decod.ids import NodeId
from decod.membership.ban_list import Ban
from decod.membership.certificates import (
    MEMBER_NAME,
    Caller,
    Purpose,
    caller_of,
    first_of,
    new_tls_key,
    public_der,
)
from decod.membership.identity import HostKey, identity_of
from decod.membership.papers import TERMS, Membership, Papers, PaperTerms
from decod.membership.registrar import (
    EnrollRequest,
    Grant,
    Registrar,
    enrolment_text,
    founder_papers,
)
from decod.membership.tokens import Tokens
from decod.membership.waiting_list import WaitingList
from decod.net.dht_table import network_of
from decod.protocol.core.bans import BanList
from decod.protocol.core.view import Role


def host_key(name: str) -> HostKey:
    """Returns the key of a node. It is the same in each run of the tests."""
    return identity_of(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


ROOT = host_key("root")
"""The root of the run of which `data_node` and `volunteer` are members."""


@cache
def data_node(name: str, root: HostKey = ROOT) -> Membership:
    """Returns the membership of a data node."""
    return new_data_node(name, root)


def new_data_node(
    name: str, root: HostKey = ROOT, *, terms: PaperTerms = TERMS, now_s: float | None = None
) -> Membership:
    """Returns a data node's membership with papers of the given terms."""
    return membership_of(host_key(name), Role.DATA, root, terms=terms, now_s=now_s)


def new_volunteer(
    name: str, root: HostKey = ROOT, *, terms: PaperTerms = TERMS, now_s: float | None = None
) -> Membership:
    """Returns a volunteer's membership with papers of the given terms."""
    return membership_of(host_key(name), Role.RELAY, root, terms=terms, now_s=now_s)


def membership_of(
    host: HostKey,
    role: Role,
    root: HostKey = ROOT,
    *,
    terms: PaperTerms = TERMS,
    now_s: float | None = None,
) -> Membership:
    """Returns new papers for a node, with its membership."""
    at_s = wall_clock() if now_s is None else now_s
    make = _data_node if role is Role.DATA else _volunteer
    return make(host, root, terms, at_s)


def _data_node(host: HostKey, root: HostKey, terms: PaperTerms, now_s: float) -> Membership:
    papers = founder_papers(root, host, terms, now_s)
    return Membership(root.public, host, papers, root_key=root)


@cache
def volunteer(name: str, root: HostKey = ROOT) -> Membership:
    """Returns the membership of a volunteer, which the data node "leader" has admitted."""
    return new_volunteer(name, root)


def _volunteer(host: HostKey, root: HostKey, terms: PaperTerms, at_s: float) -> Membership:
    by, key = data_node("leader", root), new_tls_key()
    registrar = registrar_of(by, terms, lambda: at_s)
    tls_key = public_der(key.public_key())
    caller = Caller(Purpose.RENEWAL, host.node_id, False, by.node_id, at_s, tls_key)
    signature = host.sign(enrolment_text(root.public, tls_key, b""))
    grant = registrar.enroll(caller, EnrollRequest(public=host.public, signature=signature))
    assert isinstance(grant, Grant)
    papers = Papers(
        tls_key=key,
        credential=grant.credential,
        chain=grant.chain,
        renewal_chain=grant.renewal_chain,
        issued_s=at_s,
    )
    return Membership(root.public, host, papers)


def ban(
    here: Membership, node: NodeId, *, reason: str = "it lies", life_s: float | None = 3600.0
) -> BanList:
    """Bans a node, as the data node "leader" says it; returns the list, which is in use here."""
    author, now_s = data_node("leader"), int(wall_clock())
    until_s = None if life_s is None else int(now_s + life_s)
    told = Ban(node=node, reason=reason, made_s=now_s, until_s=until_s, by=author.node_id)
    made = here.bans.ban(told, author.state, 1)
    here.bans.use(made)
    return made


def unban(here: Membership, node: NodeId, *, by: str = "leader") -> BanList:
    """Lifts a ban, as a data node says it; returns the list, which is in use here."""
    made = here.bans.unban(node, data_node(by).state, 1)
    here.bans.use(made)
    return made


def channel_to(
    address: str, membership: Membership, options: Sequence[tuple[str, int]] = ()
) -> grpc.Channel:
    """Returns a channel that blocks, from a member to any other."""
    tls = membership.tls
    credentials = grpc.ssl_channel_credentials(tls.anchors, tls.key, tls.chain)
    named = [("grpc.ssl_target_name_override", MEMBER_NAME), *options]
    return grpc.secure_channel(address, credentials, options=named)


def registrar_of(
    membership: Membership, terms: PaperTerms = TERMS, clock: Callable[[], float] = wall_clock
) -> Registrar:
    """Returns a registrar of a leader, which keeps its tokens in memory."""
    newcomers = WaitingList(clock, network_of)
    return Registrar(
        membership, Tokens(None), clock, lambda: None, lambda *_, **__: None, newcomers, terms
    )


def as_caller(membership: Membership) -> Caller:
    """Returns how a server sees a member."""
    return caller_of(first_of(membership.papers.chain))

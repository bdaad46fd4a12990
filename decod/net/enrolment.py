"""The calls that make members: enrolment and renewal, a look before joining, and the exchange of
tokens between data nodes. Both sides of each are here.
"""

import asyncio
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import RunId
from decod.membership.certificates import (
    DATA_NAME,
    Issuer,
    Purpose,
    TlsIdentity,
    caller_of,
    first_of,
    joiner_certificate,
    new_tls_key,
    private_pem,
    public_der,
    root_anchor,
)
from decod.membership.credential import credential_from, credential_message
from decod.membership.identity import HostKey
from decod.membership.papers import TERMS, Membership, Papers, PaperTerms, certified
from decod.membership.registrar import (
    EnrollRequest,
    Refusal,
    Registrar,
    enrolment_text,
)
from decod.membership.tokens import TOKENS_MAX, Token, unpack_records
from decod.net import channel
from decod.net.address import split_address
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.channel import ClosedError, banned, failed_call, other_version
from decod.net.door import Context, caller_in, ip_of, require_caller
from decod.net.net_limits import LIMITS, Limits
from decod.protocol.core.view import Role
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.system import secret_file
from decod.wire import codec, validate
from decod.wire.v1 import enroll_pb2, state_pb2

# --- a bare handshake ----------------------------------------------------------------------------
# A bare TLS handshake. It tells a node that refuses this one's certificate from a full one.
#
# gRPC reports both as "Socket closed". A full node closes a connection at once. A node that
# refuses a certificate has shown its own before, and so has proven who it is. A node that is
# content begins to speak HTTP/2.


async def is_refused(address: str, shown: TlsIdentity, name: str, *, timeout_s: float) -> bool:
    """Return whether the node at an address proves who it is, and then refuses a certificate.

    False also means that nothing is known: nobody answers, say.

    Args:
        address: `host:port`.
        shown: What this node shows, and whom it believes.
        name: The name that must be in the other's certificate.
        timeout_s: How long to wait for the node.
    """
    host, port = split_address(address)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_context(shown), server_hostname=name
            )
            try:
                # With TLS 1.3, a client has finished before the server looks at its certificate.
                return not await reader.read(1)
            except ssl.SSLError:
                return True
            finally:
                writer.transport.abort()
    return False


def _context(shown: TlsIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=shown.anchors.decode())
    # gRPC refuses whoever does not ask for HTTP/2.
    context.set_alpn_protocols(["h2"])
    # It loads keys from files only. Nobody else can open this one.
    with secret_file(shown.key + shown.chain) as path:
        context.load_cert_chain(path)
    return context


# The call by which a node becomes a member, or renews its membership: both of its sides.

_ENROLL = f"/{channel.ENROLL_SERVICE}/Enroll"

_REFUSALS = {
    Refusal.NOT_LEADER: enroll_pb2.ENROLL_REFUSAL_NOT_LEADER,
    Refusal.TOKEN_SPENT: enroll_pb2.ENROLL_REFUSAL_TOKEN_SPENT,
    Refusal.NO_ROOT: enroll_pb2.ENROLL_REFUSAL_NO_ROOT,
    Refusal.WRONG_ROLE: enroll_pb2.ENROLL_REFUSAL_WRONG_ROLE,
    Refusal.BANNED: enroll_pb2.ENROLL_REFUSAL_BANNED,
    Refusal.WAITING: enroll_pb2.ENROLL_REFUSAL_WAITING,
    Refusal.SENT_AWAY: enroll_pb2.ENROLL_REFUSAL_SENT_AWAY,
}


class EnrollmentGiver:
    """The serving side.

    Args:
        registrar: Decides, and issues papers.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def give(self, data: bytes, context: Context) -> bytes:
        """Answer an EnrollRequest."""
        request = codec.parse(enroll_pb2.EnrollRequest, data)
        response = enroll_pb2.EnrollResponse(protocol_version=PROTOCOL_VERSION)
        # Check the version first: the other fields of another version may mean something else.
        if request.protocol_version != PROTOCOL_VERSION:
            response.refusal = enroll_pb2.ENROLL_REFUSAL_VERSION_DIFFERS
            return response.SerializeToString()
        caller = caller_in(context)
        assert caller is not None, "callers without a certificate are refused before"
        asked = EnrollRequest(
            public=request.public_key,
            signature=request.signature,
            issuing_key=request.issuing_key,
        )
        answer = self._registrar.enroll(caller, asked, ip_of(context))
        if isinstance(answer, Refusal):
            response.refusal = _REFUSALS[answer]
            response.leader_address = self._registrar.leader() or ""
            response.banned = self._registrar.membership.bans.refusal(caller.node_id)
        else:
            response.credential.CopyFrom(credential_message(answer.credential))
            response.chain = answer.chain
            response.renewal_chain = answer.renewal_chain
            response.issuing_certificate = answer.issuing_certificate
        return response.SerializeToString()


class AskLeaderError(NetworkError):
    """Another node must be asked for papers: the leader."""

    def __init__(self, asked: str, leader_address: str) -> None:
        self.leader_address = leader_address
        """Empty if it is not known."""
        super().__init__(
            f"{asked} does not lead the run, and can't admit this node",
            why="the leader counts the uses of join tokens",
            fix="try again in a minute, or with the address of another node",
            code="E-NET-027",
        )


class WaitingError(RejectedError):
    """The organiser has not decided yet whether this node may come in. It asks again."""

    code = "E-REJ-023"


class UnknownTokenError(RejectedError):
    """A data node does not know the token. Another one may know it."""

    code = "E-REJ-011"


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrollee:
    """A node that asks for papers."""

    root: bytes
    """The public key of the run's root."""
    host: HostKey
    role: Role
    tls_key: EllipticCurvePrivateKey
    """The key to certify."""
    tls: TlsIdentity
    """The proof that it shows: a certificate for that key, by a token or from earlier papers."""
    issuing_key: EllipticCurvePrivateKey | None = None
    """A data node's key to admit others with."""

    @staticmethod
    def with_token(root: bytes, host: HostKey, token: Token) -> "Enrollee":
        """Return an enrollee that holds a join token. The token itself is not sent.

        Args:
            root: The public key of the run's root.
            host: The node's identity.
            token: The join token.
        """
        key = new_tls_key()
        end = joiner_certificate(token.id, token.key, host.node_id, key.public_key())
        return Enrollee(
            root=root,
            host=host,
            role=token.role,
            tls_key=key,
            tls=TlsIdentity(private_pem(key), end, root_anchor(root)),
            issuing_key=new_tls_key() if token.role is Role.DATA else None,
        )

    @staticmethod
    def renewing(membership: Membership, shown: TlsIdentity) -> "Enrollee":
        """Return an enrollee that has papers. Its keys stay.

        Args:
            membership: The node's.
            shown: `membership.tls`, or `renewal_tls` if that has expired.
        """
        papers = membership.papers
        return Enrollee(
            root=membership.root,
            host=membership.host,
            role=membership.role,
            tls_key=papers.tls_key,
            tls=shown,
            issuing_key=None if papers.issuer is None else papers.issuer.key,
        )

    def request(self) -> enroll_pb2.EnrollRequest:
        """Return the signed request."""
        issuing = b"" if self.issuing_key is None else public_der(self.issuing_key.public_key())
        text = enrolment_text(self.root, public_der(self.tls_key.public_key()), issuing)
        return enroll_pb2.EnrollRequest(
            protocol_version=PROTOCOL_VERSION,
            public_key=self.host.public,
            signature=self.host.sign(text),
            issuing_key=issuing,
        )


async def enroll(
    address: str,
    enrollee: Enrollee,
    *,
    now_s: float,
    terms: PaperTerms = TERMS,
    limits: Limits = LIMITS,
) -> Papers:
    """Ask the data node at `address` for papers.

    Args:
        address: `host:port`.
        enrollee: The node that asks.
        now_s: Seconds of the Unix epoch.
        terms: How long a data node's papers to itself last.
        limits: Timeouts.

    Raises:
        NetworkError: No answer came in time (E-NET-003), or the node there does not lead
            (`AskLeaderError`).
        RejectedError: The enrollee is banned (E-REJ-020), or not admitted for another reason
            (E-REJ-002, E-REJ-009 to E-REJ-013),
            or what listens there is no data node of the root (E-REJ-005).
        MalformedMessageError: The answer is none, or proves nothing.
    """
    async with channel.open_channel(address, limits, enrollee.tls, DATA_NAME) as opened:
        call = opened.unary_unary(_ENROLL, channel.as_is, channel.as_is)
        data = enrollee.request().SerializeToString()
        try:
            answer = await call(data, timeout=limits.hello_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await why_failed(
                address, enrollee, failed_call(address, error), limits
            ) from error
    response = codec.parse(enroll_pb2.EnrollResponse, answer)
    if response.protocol_version != PROTOCOL_VERSION or response.refusal:
        raise _refused(address, response)
    return _papers_of(enrollee, response, terms, now_s)


async def why_failed(
    address: str, enrollee: Enrollee, error: DecodError, limits: Limits
) -> DecodError:
    """Return the error for a failed call. gRPC does not say that a certificate was refused.

    Args:
        address: The node that was called.
        enrollee: The caller.
        error: What is known of it so far.
        limits: Timeouts.
    """
    if not isinstance(error, ClosedError) or not await is_refused(
        address, enrollee.tls, DATA_NAME, timeout_s=limits.hello_timeout_s
    ):
        return error
    if caller_of(first_of(enrollee.tls.chain)).purpose is Purpose.JOINING:
        return UnknownTokenError(
            f"{address} does not know the token in the join string",
            why="it ended more than two weeks ago, or was made by a data node that leads no more",
            fix="ask the organiser for a new join string",
        )
    return RejectedError(
        f"{address} does not believe this node's papers",
        why="they are not valid by its clock",
        fix="check this host's clock; if it is right, ask the organiser for a new join string",
        code=channel.NOT_ALLOWED,
    )


def _papers_of(
    enrollee: Enrollee, response: enroll_pb2.EnrollResponse, terms: PaperTerms, now_s: float
) -> Papers:
    """Return the papers in an answer, once they have proven to be the enrollee's."""
    host = enrollee.host
    key = enrollee.tls_key
    credential = credential_from(response.credential)
    credential.check(enrollee.root, None)
    if credential.public != host.public or credential.role is not enrollee.role:
        raise validate.malformed("credential", credential.node_id, allowed="the enrollee's")
    if enrollee.issuing_key is not None:
        issuer = Issuer(host.node_id, enrollee.issuing_key, response.issuing_certificate)
        return certified(issuer, credential, terms, now_s, key)
    own_key = public_der(key.public_key())
    for chain, purpose in (
        (response.chain, Purpose.PEER),
        (response.renewal_chain, Purpose.RENEWAL),
    ):
        told = caller_of(first_of(chain))
        if (told.node_id, told.purpose, told.key) != (host.node_id, purpose, own_key):
            raise validate.malformed("chain", told.node_id, allowed="the enrollee's")
    return Papers(
        tls_key=key,
        credential=credential,
        chain=response.chain,
        renewal_chain=response.renewal_chain,
        issued_s=now_s,
    )


def _refused(address: str, response: enroll_pb2.EnrollResponse) -> DecodError:
    """Return the error for an answer that is a refusal."""
    if response.protocol_version != PROTOCOL_VERSION:
        return other_version(address, response.protocol_version)
    what = f"{address} does not admit this node"
    match response.refusal:
        case enroll_pb2.ENROLL_REFUSAL_NOT_LEADER:
            leader = response.leader_address
            return AskLeaderError(address, validate.address("leader", leader) if leader else "")
        case enroll_pb2.ENROLL_REFUSAL_TOKEN_SPENT:
            return token_spent(address)
        case enroll_pb2.ENROLL_REFUSAL_BANNED:
            return banned(response.banned)
        case enroll_pb2.ENROLL_REFUSAL_WAITING:
            return WaitingError(
                what,
                why="its organiser looks at newcomers first, and has not decided yet",
                fix="wait: this host asks again every few seconds",
            )
        case enroll_pb2.ENROLL_REFUSAL_SENT_AWAY:
            why = "its organiser has looked at the newcomers, and refused this one"
            fix = "ask the organiser"
            code = "E-REJ-024"
        case enroll_pb2.ENROLL_REFUSAL_NO_ROOT:
            why = "only the organiser's host can admit data nodes, and another host leads now"
            fix = "try again when the organiser's host leads the run"
            code = "E-REJ-012"
        case enroll_pb2.ENROLL_REFUSAL_WRONG_ROLE:
            why = "the join string is for the other of `decod join` and `decod leader --join`"
            fix = "ask the organiser for a join string for this command"
            code = "E-REJ-013"
        case _:
            why = "it does not say why"
            fix = "ask the organiser"
            code = "E-REJ-001"
    return RejectedError(what, why=why, fix=fix, code=code)


def token_spent(address: str) -> RejectedError:
    """Return the error for a token that lets nobody in any more."""
    return RejectedError(
        f"{address} does not admit this node",
        why="the token in the join string has expired, is used up or was revoked",
        fix="ask the organiser for a new join string",
        code="E-REJ-010",
    )


# --- a look before joining -----------------------------------------------------------------------
# A look at a run before joining it, by a host that has no more than a join token.


async def visit(address: str, enrollee: Enrollee, *, limits: Limits = LIMITS) -> HelloInfo:
    """Ask the data node at `address` about its run. That is no use of the token.

    Args:
        address: `host:port`.
        enrollee: The holder of the token. It does not become a member.
        limits: Timeouts.

    Raises:
        RejectedError: The token lets nobody in (E-REJ-010), or is not known there (E-REJ-011).
        DecodError: As `hello` raises it.
    """
    try:
        return await hello(address, HelloRequest(), enrollee, name=DATA_NAME, limits=limits)
    except ClosedError as error:
        raise await why_failed(address, enrollee, error, limits) from error
    except RejectedError as error:
        if error.code == channel.NOT_ALLOWED:
            raise token_spent(address) from error
        raise


# The exchange of join tokens between data nodes: both sides of the call.
#
# The caller names the digest of each record that it has. The answer holds the records that differ,
# and the ids of those that are missing there. What the caller knows better goes with its next call.
# Both sides merge what they get, so in the end they know the same, whoever began.

_EXCHANGE = f"/{channel.STATE_SERVICE}/ExchangeTokens"
_ROUNDS_MAX = 32
"""Calls in a row. One is enough if nothing has changed."""

_TOKEN_ID = re.compile(r"[a-z2-7]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class RegisterKeeper:
    """The serving side: merges what other data nodes know of join tokens.

    Args:
        run_id: Calls of other runs are refused.
        blame: Counts a peer's fault. Takes the counter's name, the call, and a reason for the log.
        registrar: Has the tokens.
    """

    def __init__(
        self, run_id: RunId, blame: Callable[[str, Context, str], None], registrar: Registrar
    ) -> None:
        self._run_id = run_id
        self._blame = blame
        self._registrar = registrar

    async def exchange(self, data: bytes, context: Context) -> bytes:
        """Answer an ExchangeTokensRequest."""
        request = codec.parse(state_pb2.ExchangeTokensRequest, data)
        run_id = validate.run_id("run_id", request.run_id)
        require_caller("sender_id", request.sender_id, context)
        if run_id != self._run_id:
            self._blame("message.foreign", context, f"run {run_id}")
            return state_pb2.ExchangeTokensResponse().SerializeToString()
        validate.length("known", len(request.known), low=0, high=TOKENS_MAX)
        known = {_id(each.id): _digest(each.digest) for each in request.known}
        registrar = self._registrar
        registrar.learn(unpack_records(request.records))
        own = registrar.tokens.digests()
        return state_pb2.ExchangeTokensResponse(
            records=registrar.tokens.records_for(known),
            unknown=[each for each in known if each not in own],
        ).SerializeToString()


async def exchange_tokens(
    address: str, run_id: RunId, registrar: Registrar, *, limits: Limits = LIMITS
) -> None:
    """Make the data node at `address` and this one know the same join tokens.

    Raises:
        NetworkError: No answer came in time (E-NET-003).
        RejectedError: What answers there is no data node of the run, or does not take the call.
        MalformedMessageError: The answer holds no tokens.
        ConfigError: What is new can't be written here (E-CFG-039).
    """
    member = registrar.membership
    tokens = registrar.tokens
    wanted = set[str]()
    sent = set[str]()
    async with channel.open_channel(address, limits, member.tls, DATA_NAME) as opened:
        call = opened.unary_unary(_EXCHANGE, channel.as_is, channel.as_is)
        for _ in range(_ROUNDS_MAX):
            records = tokens.pick(wanted)
            try:
                answer = await call(
                    _request(run_id, member, tokens.digests(), records),
                    metadata=channel.run_metadata(run_id),
                    timeout=limits.hello_timeout_s,
                )
            except grpc.aio.AioRpcError as error:
                raise failed_call(address, error) from error
            response = codec.parse(state_pb2.ExchangeTokensResponse, answer)
            told = unpack_records(response.records)
            registrar.learn(told)
            sent |= {record.id for record in unpack_records(records)}
            now = tokens.digests()
            behind = {
                record.id for record in told if now.get(record.id) not in (None, record.digest)
            }
            # What was not taken once is not sent again.
            wanted = ({_id(each) for each in response.unknown} | behind) & now.keys() - sent
            if not wanted and not told:
                return


def _request(run_id: RunId, member: Membership, digests: dict[str, str], records: bytes) -> bytes:
    known = [state_pb2.TokenDigest(id=each, digest=digest) for each, digest in digests.items()]
    return state_pb2.ExchangeTokensRequest(
        run_id=run_id, sender_id=member.node_id, known=known, records=records
    ).SerializeToString()


def _id(value: str) -> str:
    if _TOKEN_ID.fullmatch(value) is None:
        raise validate.malformed("token.id", value, allowed="8 characters of a-z and 2-7")
    return value


def _digest(value: str) -> str:
    if _DIGEST.fullmatch(value) is None:
        raise validate.malformed("token.digest", value, allowed="16 hexadecimal digits")
    return value

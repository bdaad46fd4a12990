"""Attempts to get in, and to do more than one may, over real sockets."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import pytest

from decod.clocks import wall_clock
from decod.errors import DecodError, MalformedMessageError, RejectedError
from decod.ids import RunId
from decod.membership.certificates import (
    CLOCK_TOLERANCE_S,
    MEMBER_NAME,
    Purpose,
    TlsIdentity,
    caller_of,
    first_of,
    new_tls_key,
    peer_name,
    private_pem,
    root_anchor,
)
from decod.membership.identity import HostKey
from decod.membership.papers import Membership, Papers, PaperTerms
from decod.membership.registrar import Registrar
from decod.membership.tokens import Token
from decod.net import channel
from decod.net.ask import HelloRequest, ask_status, hello
from decod.net.channel import ClosedError
from decod.net.door import PeerFault
from decod.net.enrolment import AskLeaderError, Enrollee, enroll, is_refused, visit
from decod.net.net_limits import LIMITS, Limits
from decod.net.server import DataServices, PeerServer
from decod.net.tensor_stream import REFUSAL, RESULT
from decod.protocol.core import messages as m
from decod.protocol.core.view import Role
from decod.run.protocol_config import PROTOCOL_VERSION as PROTOCOL
from decod.wire import codec
from decod.wire.v1 import control_pb2, enroll_pb2
from tests.support.members import (
    ROOT,
    data_node,
    host_key,
    new_data_node,
    new_volunteer,
    registrar_of,
    volunteer,
)
from tests.support.peers import RUN, Host, header, no_receipts
from tests.support.sending import sending_to
from tests.support.wire_shapes import REQUESTS

ENROLL = f"/{channel.ENROLL_SERVICE}/Enroll"
HELLO = f"/{channel.ENROLL_SERVICE}/Hello"
DELIVER = f"/{channel.CONTROL_SERVICE}/Deliver"
READ_BLOCK = f"/{channel.STATE_SERVICE}/ReadBlock"
OURS = channel.run_metadata(RUN)

LEADER = data_node("leader")
NEWCOMER = host_key("newcomer")


@dataclass
class Door:
    """A leader that listens, and what it knows."""

    address: str
    registrar: Registrar
    host: Host
    server: PeerServer

    def token(self, role: Role = Role.RELAY, *, life_s: float = 60.0, uses: int = 1) -> Token:
        return self.registrar.tokens.create(role, now_s=wall_clock(), life_s=life_s, uses=uses)

    async def enroll(self, token: Token, host: HostKey = NEWCOMER) -> Papers:
        enrollee = Enrollee.with_token(ROOT.public, host, token)
        return await enroll(self.address, enrollee, now_s=wall_clock())

    async def call(
        self, method: str, tls: TlsIdentity, data: bytes = b""
    ) -> tuple[grpc.StatusCode, str]:
        """Returns how a call ended."""
        opened = channel.open_channel(self.address, LIMITS, tls, MEMBER_NAME)
        async with opened:
            call = opened.unary_unary(method)(data, metadata=OURS, timeout=5.0)
            return await call.code(), await call.details() or ""

    async def send_tensor(self, tls: TlsIdentity) -> int:
        """Returns the kind of the answer to a tensor. Raises OSError if there is none."""
        async with sending_to(self.address, tls) as sending:
            await sending.head(header())
            return (await sending.answer())[0]


def at_door(
    test: Callable[[Door], Awaitable[None]],
    membership: Membership = LEADER,
    *,
    leader: str | None = None,
    limits: Limits = LIMITS,
) -> None:
    async def run() -> None:
        host, registrar = Host(), registrar_of(membership)
        registrar.leader = lambda: leader
        server = serving(registrar, host, limits)
        port = await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                await test(Door(f"127.0.0.1:{port}", registrar, host, server))
        finally:
            await server.stop(None)

    asyncio.run(run())


def serving(registrar: Registrar, host: Host, limits: Limits = LIMITS) -> PeerServer:
    async def read(_: object) -> str:
        return "no block"

    services = DataServices(registrar, read, no_receipts)
    return PeerServer(registrar.membership, RUN, host, limits=limits, services=services)


@asynccontextmanager
async def listening(registrar: Registrar) -> AsyncIterator[str]:
    """Yields the address of another data node."""
    server = serving(registrar, Host())
    yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.stop(None)


def member_with(host: HostKey, papers: Papers) -> Membership:
    return Membership(ROOT.public, host, papers)


# --- in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.DATA, Role.RELAY])
def test_the_holder_of_a_token_becomes_a_member(role: Role) -> None:
    async def test(door: Door) -> None:
        papers = await door.enroll(door.token(role))
        papers.credential.check(ROOT.public, wall_clock())
        assert papers.credential.role is role
        caller = caller_of(first_of(papers.chain))
        assert (caller.node_id, caller.purpose) == (NEWCOMER.node_id, Purpose.PEER)
        assert caller.is_data == (role is Role.DATA)
        info = await hello(door.address, HelloRequest(), member_with(NEWCOMER, papers))
        assert info.run_id == RUN
        (code, _) = await door.call(READ_BLOCK, member_with(NEWCOMER, papers).tls)
        refused = grpc.StatusCode.PERMISSION_DENIED
        assert (code is refused) == (role is Role.RELAY)

    at_door(test)


def test_a_member_renews_even_after_its_certificate_has_expired() -> None:
    """A laptop that has slept. The token is not needed, nor is it used up again."""

    async def test(door: Door) -> None:
        asleep = new_volunteer("sleeper", now_s=wall_clock() - 3 * 24 * 3600.0)
        assert asleep.papers.expires_s < wall_clock()
        with pytest.raises(DecodError):
            await enroll(door.address, Enrollee.renewing(asleep, asleep.tls), now_s=wall_clock())
        enrollee = Enrollee.renewing(asleep, asleep.renewal_tls)
        papers = await enroll(door.address, enrollee, now_s=wall_clock())
        await hello(door.address, HelloRequest(), member_with(asleep.host, papers))

    at_door(test)


def test_who_was_away_for_too_long_needs_a_new_token() -> None:
    async def test(door: Door) -> None:
        gone = new_volunteer("gone", now_s=wall_clock() - 15 * 24 * 3600.0)
        with pytest.raises(DecodError):
            await enroll(
                door.address, Enrollee.renewing(gone, gone.renewal_tls), now_s=wall_clock()
            )

    at_door(test)


@pytest.mark.parametrize("role", [Role.DATA, Role.RELAY])
def test_papers_are_renewed_with_the_same_keys(role: Role) -> None:
    async def test(door: Door) -> None:
        papers = await door.enroll(door.token(role))
        member = member_with(NEWCOMER, papers)
        enrollee = Enrollee.renewing(member, member.tls)
        renewed = await enroll(door.address, enrollee, now_s=wall_clock())
        assert renewed.tls_key is papers.tls_key
        assert renewed.chain != papers.chain
        assert renewed.credential.role is role

    at_door(test)


def test_clocks_may_differ_by_an_hour() -> None:
    async def test(door: Door) -> None:
        for hours in (-1, 1):
            early_s = wall_clock() + hours * 3600.0
            assert abs(hours * 3600.0) < CLOCK_TOLERANCE_S
            token = door.token()
            enrollee = Enrollee.with_token(ROOT.public, NEWCOMER, token)
            papers = await enroll(door.address, enrollee, now_s=early_s)
            await hello(door.address, HelloRequest(), member_with(NEWCOMER, papers))
            other = new_data_node("ahead", now_s=early_s)
            await hello(door.address, HelloRequest(), other)

    at_door(test)


# --- out --------------------------------------------------------------------------------------


def test_a_token_that_was_revoked_expired_or_used_up_is_refused_with_a_reason() -> None:
    async def test(door: Door) -> None:
        revoked, used, expired = door.token(), door.token(), door.token(life_s=-1.0)
        assert door.registrar.tokens.revoke(revoked.id)
        await door.enroll(used)
        await door.enroll(used)
        for token, host in ((revoked, NEWCOMER), (expired, NEWCOMER), (used, host_key("b"))):
            with pytest.raises(RejectedError, match=r"E-REJ-010 .*expired, is used up or was rev"):
                await door.enroll(token, host)

    at_door(test)


def test_a_token_that_nobody_made_does_not_even_open_a_connection() -> None:
    """Whoever holds it hears so at once: it trusts the root, and so the node."""

    async def test(door: Door) -> None:
        with pytest.raises(RejectedError, match=r"E-REJ-011 .*does not know the token"):
            await door.enroll(Token.new(Role.RELAY))
        assert {*door.server.counters.totals()} <= {"connection.refused"}, "no call was heard"

    at_door(test)


def test_papers_that_a_node_does_not_believe_are_told_from_a_node_that_is_full() -> None:
    """To gRPC both are a closed socket. Only the full one may answer later."""

    async def disbelieving(door: Door) -> None:
        brief = new_volunteer(
            "brief", terms=PaperTerms(certificate_s=60.0), now_s=wall_clock() - 3600.0
        )
        with pytest.raises(RejectedError, match=r"E-REJ-009 .*not valid by its clock"):
            await enroll(door.address, Enrollee.renewing(brief, brief.tls), now_s=wall_clock())

    at_door(disbelieving)

    async def full(door: Door) -> None:
        member = volunteer("relay")
        async with channel.open_channel(door.address, LIMITS, member.tls, MEMBER_NAME) as opened:
            await opened.unary_unary(HELLO)(b"", timeout=5.0).code()
            with pytest.raises(ClosedError, match=r"E-NET-003 .*a node that has too many"):
                await door.enroll(door.token())
        assert all(not record.used_by for record in door.registrar.tokens.all())

    at_door(full, limits=replace(LIMITS, connections_max=1))


def test_whoever_proves_nothing_refuses_nobody() -> None:
    """A port that closes each connection, one that is silent, and one where nobody listens."""

    async def closing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def test() -> None:
        shown = volunteer("relay").tls
        for behave in (closing, silent):
            async with await asyncio.start_server(behave, "127.0.0.1", 0) as server:
                address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                assert not await is_refused(address, shown, MEMBER_NAME, timeout_s=0.2)
        assert not await is_refused(address, shown, MEMBER_NAME, timeout_s=1.0)

    asyncio.run(test())


def test_only_the_clock_of_the_host_that_is_wrong_is_in_the_way() -> None:
    """A certificate of another time says so. A token's holder can get in with any clock."""

    async def test(door: Door) -> None:
        token = door.token()
        for days, meaning in ((3, "it is not valid yet"), (-3, "it has expired")):
            at_s = wall_clock() + days * 24 * 3600.0
            registrar = registrar_of(new_data_node("leader", now_s=at_s))
            registrar.tokens._records = door.registrar.tokens._records
            async with listening(registrar) as address:
                enrollee = Enrollee.with_token(ROOT.public, NEWCOMER, token)
                with pytest.raises(RejectedError, match=rf"E-REJ-005 .*{meaning} by this host's"):
                    await enroll(address, enrollee, now_s=wall_clock())

    at_door(test)


# --- a look from outside ----------------------------------------------------------------------


def test_the_holder_of_a_token_may_look_at_the_run_without_using_it() -> None:
    async def test(door: Door) -> None:
        token = door.token()
        visitor = Enrollee.with_token(ROOT.public, NEWCOMER, token)
        info = await visit(door.address, visitor)
        assert info.run_id == RUN
        assert [record.used_by for record in door.registrar.tokens.all()] == [()]
        assert door.host.hellos[-1].sender is None

    at_door(test)


def test_who_can_not_get_in_can_not_look_either() -> None:
    async def test(door: Door) -> None:
        revoked, used, expired = door.token(), door.token(), door.token(life_s=-1.0)
        door.registrar.tokens.revoke(revoked.id)
        await door.enroll(used)
        other = host_key("other")
        for token, host, code in (
            (revoked, NEWCOMER, "E-REJ-010"),
            (expired, NEWCOMER, "E-REJ-010"),
            (used, other, "E-REJ-010"),
            (Token.new(Role.RELAY), other, "E-REJ-011"),
        ):
            with pytest.raises(RejectedError, match=code):
                await visit(door.address, Enrollee.with_token(ROOT.public, host, token))
        assert door.host.hellos == []

    at_door(test)


def test_a_visitor_has_nobody_dialled() -> None:
    """A data node would else dial whatever address the holder of a token names."""

    async def test(door: Door) -> None:
        visitor = Enrollee.with_token(ROOT.public, NEWCOMER, door.token())
        for sender in ("", NEWCOMER.node_id):
            asked = enroll_pb2.HelloRequest(
                protocol_version=PROTOCOL, sender_id=sender, sender_address="127.0.0.1:1"
            )
            code, _ = await door.call(HELLO, visitor.tls, asked.SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert door.host.hellos == []

    at_door(test)


def test_a_volunteers_token_makes_no_data_node() -> None:
    async def test(door: Door) -> None:
        token = door.token(Role.RELAY)
        enrollee = Enrollee.with_token(ROOT.public, NEWCOMER, token)
        greedy = replace(enrollee, role=Role.DATA, issuing_key=new_tls_key())
        with pytest.raises(RejectedError, match="E-REJ-013"):
            await enroll(door.address, greedy, now_s=wall_clock())
        member = volunteer("relay")
        renewing = Enrollee.renewing(member, member.tls)
        greedy = replace(renewing, role=Role.DATA, issuing_key=new_tls_key())
        with pytest.raises(RejectedError, match="E-REJ-013"):
            await enroll(door.address, greedy, now_s=wall_clock())

    at_door(test)


def test_only_the_leader_counts_tokens_and_only_the_organisers_host_makes_data_nodes() -> None:
    async def not_leading(door: Door) -> None:
        with pytest.raises(AskLeaderError) as caught:
            await door.enroll(door.token())
        assert caught.value.leader_address == "h:1"

    at_door(not_leading, leader="h:1")

    async def elected(door: Door) -> None:
        await door.enroll(door.token())
        with pytest.raises(RejectedError, match="E-REJ-012"):
            await door.enroll(door.token(Role.DATA))

    at_door(elected, member_with(LEADER.host, LEADER.papers))


def test_what_another_has_signed_can_not_be_used_again() -> None:
    """A request names the TLS key of its connection, so it is of no use over another one."""

    async def test(door: Door) -> None:
        honest = Enrollee.with_token(ROOT.public, NEWCOMER, door.token())
        replayed = honest.request().SerializeToString()
        thief = host_key("thief")
        for posing in (NEWCOMER, thief):
            own = Enrollee.with_token(ROOT.public, posing, door.token())
            code, _ = await door.call(ENROLL, own.tls, replayed)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert all(not record.used_by for record in door.registrar.tokens.all())

    at_door(test)


def test_without_a_certificate_of_the_run_nothing_answers() -> None:
    """No certificate, one of another root, an expired one, one that a node has made for itself."""

    async def test(door: Door) -> None:
        mine = volunteer("relay").tls
        foreign = data_node("leader", host_key("another root")).tls
        expired = new_volunteer(
            "relay", terms=PaperTerms(certificate_s=60.0), now_s=wall_clock() - 3600.0
        ).tls
        token = door.token()
        posing = Enrollee.with_token(ROOT.public, NEWCOMER, token)
        forged = TlsIdentity(
            private_pem(posing.tls_key),
            _self_made(posing, token),
            root_anchor(ROOT.public),
        )
        for shown in (
            replace(foreign, anchors=mine.anchors),
            expired,
            replace(mine, chain=first_of(mine.chain)),
            forged,
        ):
            code, _ = await door.call(HELLO, shown)
            assert code is grpc.StatusCode.UNAVAILABLE
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await door.send_tensor(shown)
        credentials = grpc.ssl_channel_credentials(mine.anchors)
        options = [("grpc.ssl_target_name_override", MEMBER_NAME)]
        async with grpc.aio.secure_channel(door.address, credentials, options=options) as opened:
            code = await opened.unary_unary(HELLO)(b"", timeout=5.0).code()
            assert code is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(door.address) as opened:
            code = await opened.unary_unary(HELLO)(b"", timeout=5.0).code()
            assert code is grpc.StatusCode.UNAVAILABLE
        assert {*door.server.counters.totals()} <= {"connection.refused"}, "no call was heard"

    at_door(test)


def _self_made(enrollee: Enrollee, token: Token) -> bytes:
    """Returns a member's certificate as a token's holder can forge it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    from decod.membership import certificates

    names = [peer_name(enrollee.host.node_id), MEMBER_NAME]
    key = enrollee.tls_key.public_key()
    end = certificates._end(names, f"token.{token.id}", key, *certificates._ALWAYS)
    made: x509.Certificate = end.sign(token.key, None)
    return made.public_bytes(Encoding.PEM)


def test_who_is_not_a_member_can_only_ask_to_be_one() -> None:
    """The holder of a token may also ask which run it is."""

    async def test(door: Door) -> None:
        joiner = Enrollee.with_token(ROOT.public, NEWCOMER, door.token())
        num_refused = 0
        for shown, allowed in (
            (joiner.tls, {ENROLL, HELLO}),
            (volunteer("relay").renewal_tls, {ENROLL}),
        ):
            for method in REQUESTS.keys() - allowed:
                code, details = await door.call(method, shown, b"x")
                assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, "E-REJ-009"), method
                num_refused += 1
            assert await door.send_tensor(shown) == REFUSAL
            num_refused += 1
        assert door.server.counters.total("caller.refused") == num_refused

    at_door(test)


def test_faults_are_told_with_the_id_that_the_caller_has_proven() -> None:
    """The holder of a token can write any id into its certificate: others' would be blamed."""

    async def test(door: Door) -> None:
        faults: list[PeerFault] = []
        door.server.on_fault.append(faults.append)
        victim, relay = volunteer("victim"), volunteer("relay")
        joiner = Enrollee.with_token(ROOT.public, victim.host, door.token())
        await door.call(READ_BLOCK, joiner.tls, b"x")
        await door.call(READ_BLOCK, relay.tls, b"x")
        await door.call(READ_BLOCK, data_node("other").tls, b"x")
        assert [(fault.name, fault.node, fault.address) for fault in faults] == [
            ("caller.refused", "", "127.0.0.1"),
            ("caller.refused", relay.node_id, "127.0.0.1"),
            ("message.malformed", data_node("other").node_id, "127.0.0.1"),
        ]

    at_door(test)


def test_a_volunteer_may_not_call_the_methods_of_data_nodes() -> None:
    async def test(door: Door) -> None:
        code, details = await door.call(READ_BLOCK, volunteer("relay").tls, b"x")
        assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, "E-REJ-009")
        code, _ = await door.call(READ_BLOCK, data_node("other").tls, b"x")
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "its body was read"

    at_door(test)


def test_a_certificate_that_expires_while_connected_is_refused_from_then_on() -> None:
    async def test(door: Door) -> None:
        brief = new_volunteer("brief", terms=PaperTerms(certificate_s=1.2))
        opened = channel.open_channel(door.address, LIMITS, brief.tls, MEMBER_NAME)
        codes = set()
        async with opened, asyncio.timeout(20):
            while grpc.StatusCode.PERMISSION_DENIED not in codes:
                call = opened.unary_unary(HELLO)(b"", timeout=5.0)
                codes.add(await call.code())
        assert grpc.StatusCode.OK in codes

    at_door(test)


def test_a_connection_for_tensors_ends_with_its_certificate() -> None:
    async def test(door: Door) -> None:
        brief = new_volunteer("brief", terms=PaperTerms(certificate_s=1.2))
        envelope = codec.encode(RUN, brief.node_id, 1, 1, m.LinkProbe())
        empty, kinds = header(envelope=envelope, size_bytes=0, crc32=0), list[int]()
        async with sending_to(door.address, brief.tls) as sending, asyncio.timeout(20):
            while REFUSAL not in kinds:
                await sending.head(empty)
                kinds.append((await sending.answer())[0])
            assert await sending.text(len(channel.NOT_ALLOWED)) == channel.NOT_ALLOWED
            with pytest.raises(ConnectionError):
                await sending.answer()
        assert RESULT in kinds

    at_door(test)


def test_the_sender_of_a_message_is_who_the_certificate_names() -> None:
    async def test(door: Door) -> None:
        liar, victim = volunteer("liar"), volunteer("victim")
        envelopes = [
            codec.encode(RUN, sender.node_id, 1, k, m.Ping(k))
            for k, sender in enumerate((victim, LEADER, liar))
        ]
        request = control_pb2.DeliverRequest(envelopes=envelopes).SerializeToString()
        code, _ = await door.call(DELIVER, liar.tls, request)
        assert code is grpc.StatusCode.OK
        assert door.host.delivered == [(liar.node_id, 1, m.Ping(2))]
        assert door.server.counters.totals() == {"message.forged": 2}
        status = enroll_pb2.HelloRequest(
            protocol_version=PROTOCOL, sender_id=victim.node_id, sender_address="h:1"
        )
        code, _ = await door.call(HELLO, liar.tls, status.SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert door.host.hellos == []

    at_door(test)


def test_a_call_of_another_run_of_the_same_root_is_refused() -> None:
    async def test(door: Door) -> None:
        with pytest.raises(RejectedError, match="E-REJ-003"):
            await ask_status(door.address, RunId("q" * 26), volunteer("relay"), timeout_s=5.0)

    at_door(test)


def test_a_node_that_is_not_the_one_that_is_meant_is_not_talked_to() -> None:
    async def test(door: Door) -> None:
        member = volunteer("relay")
        name = peer_name(host_key("somebody").node_id)
        with pytest.raises(RejectedError, match="E-REJ-005"):
            await hello(door.address, HelloRequest(), member, name=name)
        elsewhere = data_node("relay", host_key("another root"))
        with pytest.raises(RejectedError, match="E-REJ-005"):
            await hello(door.address, HelloRequest(), elsewhere)
        enrollee = Enrollee.with_token(elsewhere.root, NEWCOMER, door.token())
        with pytest.raises(RejectedError, match="E-REJ-005"):
            await enroll(door.address, enrollee, now_s=wall_clock())

    at_door(test)


def test_an_answer_with_another_nodes_papers_is_malformed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(door: Door) -> None:
        other = new_volunteer("other").papers
        grant = door.registrar.enroll

        def swapped(*arguments: object) -> object:
            given = grant(*arguments)  # type: ignore[arg-type]
            return replace(given, credential=other.credential)  # type: ignore[type-var]

        monkeypatch.setattr(Registrar, "enroll", lambda _self, *a: swapped(*a))
        with pytest.raises(MalformedMessageError):
            await door.enroll(door.token())

    at_door(test)

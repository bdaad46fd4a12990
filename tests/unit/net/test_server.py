"""Servers and clients on real loopback sockets: what arrives, what fails, what peers may not do."""

import asyncio
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import grpc.aio
import pytest

from decod.clocks import wall_clock
from decod.errors import NetworkError, RejectedError
from decod.ids import AveragingId, NodeId, RunId
from decod.membership.statements import WayProofs
from decod.net import channel
from decod.net.ask import Found, HelloInfo, HelloRequest, ask_status, hello
from decod.net.net_limits import LIMITS, Limits
from decod.net.server import PeerServer
from decod.net.tensor_stream import HEAD, PIECE, RESULT
from decod.protocol.core import messages as m
from decod.protocol.core.messages.scopes import Way
from decod.wire import codec
from decod.wire.v1 import control_pb2, enroll_pb2, tensor_pb2
from tests.support.messages import control_messages
from tests.support.peers import (
    ACTIVATION,
    ALICE,
    BOB,
    CAROL,
    FLOW,
    ITERATION,
    MEMBERS,
    MICROBATCH,
    OURS,
    RUN,
    Host,
    Pair,
    header,
    open_to,
    pair,
    with_pair,
)
from tests.waiting import wait_until


def test_what_waits_behind_a_message_that_is_not_answered_fails_with_it() -> None:
    """There may be another way to its receiver, and here it would wait as long again."""

    async def test(both: Pair) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            both.client.set_address(BOB, f"127.0.0.1:{silent.getsockname()[1]}")
            both.client.send(BOB, 1, m.Ping(1))
            await asyncio.sleep(0)  # It is under way.
            both.client.send(BOB, 1, m.Ping(2))
            await wait_until(lambda: both.alice.failed)
            assert [message for _, message, _, _ in both.alice.failed] == [m.Ping(1), m.Ping(2)]

    with_pair(test, Limits(control_timeout_s=0.5))


def test_every_control_message_arrives_in_order() -> None:
    async def test(both: Pair) -> None:
        sent = control_messages() * 20
        for message in sent:
            both.client.send(BOB, 7, message)
        await wait_until(lambda: len(both.bob.delivered) == len(sent))
        assert both.bob.delivered == [(ALICE, 7, message) for message in sent]
        assert both.alice.failed == []

    with_pair(test)


def test_a_small_call_is_timed_once_the_connection_stands() -> None:
    """Neither what opens the connection nor a large batch says how far the peer is."""

    async def test(both: Pair) -> None:
        async def deliver(num: int) -> list[float]:
            both.bob.delivered.clear()
            for nonce in range(num):
                both.client.send(BOB, 1, m.Ping(nonce))
            await wait_until(lambda: len(both.bob.delivered) == num)
            await both.client.flush(timeout_s=5)
            return both.alice.latencies_s

        assert await deliver(1) == []
        assert len(await deliver(2)) == 1, "messages that wait share a call"
        assert len(await deliver(100)) == 1

    with_pair(test)


def test_a_deadline_that_passes_while_this_process_stands_still_fails_nothing() -> None:
    limits = Limits(control_timeout_s=0.4)

    async def test(both: Pair) -> None:
        def stall(_message: m.Message) -> None:
            if not both.bob.delivered:
                threading.Event().wait(2 * limits.control_timeout_s)

        both.bob.on_deliver = stall
        both.client.send(BOB, 1, m.Ping(1))
        await both.client.flush(timeout_s=10.0)
        assert not both.alice.failed
        # The repeat is harmless; that it was needed shows that the deadline had passed.
        assert len(both.bob.delivered) == 2

    with_pair(test, limits)


def test_a_probe_that_is_refused_or_has_nowhere_to_go_shows_nothing() -> None:
    async def test(both: Pair) -> None:
        both.bob.refuse_tensors = True
        assert await both.client.probe(BOB, 1, 1 << 18) is None
        assert await both.client.probe(ALICE, 1, 1 << 18) is None
        assert both.alice.failed == []

    with_pair(test)


def test_what_is_passed_on_says_from_whom_and_to_whom() -> None:
    """Alice has Bob pass one on; another is passed on to Bob by her."""

    async def test(both: Pair) -> None:
        onwards, here = Way(ALICE, CAROL, 3, 1), Way(CAROL, BOB, 2, 9)
        proofs, word = WayProofs(MEMBERS[CAROL], RUN, wall_clock), m.CanTake(ITERATION)
        both.client.send(BOB, 3, word, onwards)
        both.client.send(BOB, 3, word, proofs.proven(word, here))
        await both.client.flush(timeout_s=10.0)
        tensor = memoryview(b"abc")
        both.client.send_tensor(BOB, 3, ACTIVATION, tensor, 1, proofs.proven(ACTIVATION, here))
        await both.client.flush(timeout_s=10.0)
        assert [(d.sender, d.term, d.way) for d in both.bob.received] == [
            (ALICE, 3, onwards),
            (ALICE, 2, here),
            (ALICE, 2, here),
        ]

    with_pair(test)


@pytest.mark.parametrize("size", [0, 1, 4096, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3])
def test_tensors_arrive_bit_for_bit(size: int) -> None:
    async def test(both: Pair) -> None:
        data = os.urandom(size)
        kinds: list[m.Message] = [
            ACTIVATION,
            m.BackwardGradient(ITERATION, MICROBATCH, FLOW, (BOB,)),
            m.ReducePart(AveragingId(ITERATION, 1), 1, 1, 1),
            m.ReducedPart(AveragingId(ITERATION, 1), 1),
        ]
        for token, message in enumerate(kinds):
            both.client.send_tensor(BOB, 1, message, memoryview(data), token)
        await wait_until(lambda: len(both.alice.sent) == 4)
        assert sorted(str(kind) for _, kind, _ in both.bob.arrived) == sorted(map(str, kinds))
        assert all(got == data and sender == ALICE for sender, _, got in both.bob.arrived)
        assert {token for *_, token, _ in both.alice.sent} == {0, 1, 2, 3}
        assert both.bob.num_given_back == 0

    with_pair(test)


def test_a_refused_tensor_fails_and_sends_little() -> None:
    async def test(both: Pair) -> None:
        both.bob.refuse_tensors = True
        for size in (10, 8 * 2**20):
            both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(size)), size)
        await wait_until(lambda: len(both.alice.failed) == 2)
        assert all("refused the tensor" in reason for *_, reason in both.alice.failed)
        # The large one may be cut off while it writes; the second attempt asks before it sends.
        assert both.server.counters.total("tensor.refused") in (2, 3)
        assert both.bob.num_allocated == 0

    with_pair(test)


def test_what_comes_after_the_end_is_refused_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Peers may not know yet that this node has left in order."""

    async def test(both: Pair) -> None:
        both.bob.refuse_tensors = both.bob.stopped = True
        both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(10)), 0)
        await wait_until(lambda: len(both.alice.failed) == 1)
        assert "refused the tensor" in both.alice.failed[0][-1]
        assert both.server.counters.totals() == {}

    with_pair(test)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


FOREIGN = codec.encode(RunId("x" * 26), ALICE, 1, 1, ACTIVATION)
CONTROL = codec.encode(RUN, ALICE, 1, 1, m.Ping(1))


@pytest.mark.parametrize(
    ("head", "data", "state", "num_allocated"),
    [
        (header(), b"good", tensor_pb2.TENSOR_RESULT_RECEIVED, 1),
        (header(), b"evil", tensor_pb2.TENSOR_RESULT_CORRUPTED, 1),
        (header(), b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 1),
        (header(size_bytes=-1), b"", tensor_pb2.TENSOR_RESULT_REFUSED, 0),
        (header(size_bytes=2**62), b"", tensor_pb2.TENSOR_RESULT_REFUSED, 0),
        (header(crc32=2**32), b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 0),
        (header(envelope=FOREIGN), b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 0),
        (header(envelope=CONTROL), b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 0),
        (b"", b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 0),
        (b"\xff\xff\xff", b"", tensor_pb2.TENSOR_RESULT_MALFORMED, 0),
    ],
)
def test_tensors_that_are_not_whole_are_told_so(
    head: bytes, data: bytes, state: int, num_allocated: int
) -> None:
    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.head(head)
            await sending.piece(data)
            assert await sending.answer() == (RESULT, state)
        assert both.bob.num_allocated == num_allocated
        await both.server.stop(0)
        assert both.bob.num_given_back + len(both.bob.arrived) == num_allocated

    with_pair(test)


@pytest.mark.parametrize(
    "stream",
    [
        HEAD.pack(LIMITS.header_size_max_bytes + 1, 0),
        HEAD.pack(len(header()), 0) + header() + PIECE.pack(6) + b"longer",
        HEAD.pack(len(header()), 0) + header() + PIECE.pack(2**31),
    ],
)
def test_streams_of_rubbish_end_the_connection(stream: bytes) -> None:
    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.raw(stream)
            with pytest.raises(ConnectionError):
                await sending.answer()
        assert both.bob.num_given_back == both.bob.num_allocated
        assert both.server.counters.total("message.malformed") == 1

    with_pair(test)


def test_a_sender_that_goes_on_with_what_is_not_wanted_is_cut_off() -> None:
    async def test(both: Pair) -> None:
        both.bob.refuse_tensors = True
        async with both.sending() as sending:
            await sending.head(header(size_bytes=2**40))
            assert await sending.answer() == (RESULT, tensor_pb2.TENSOR_RESULT_REFUSED)
            with suppress(OSError):
                for _ in range(64):
                    await sending.piece(bytes(1 << 20))
            await wait_until(lambda: not both.server._door._connections)

    with_pair(test)


def test_bad_envelopes_are_dropped_and_the_others_delivered() -> None:
    async def test(both: Pair) -> None:
        good = codec.encode(RUN, ALICE, 1, 1, m.Ping(1))
        own = codec.encode(RUN, BOB, 1, 1, m.Ping(2))
        bad = control_pb2.Envelope(run_id=RUN, sender_id=ALICE, ping=control_pb2.Ping(nonce=-1))
        bare = codec.encode(RUN, ALICE, 1, 1, ACTIVATION)
        foreign = codec.encode(RunId("x" * 26), ALICE, 1, 1, m.Ping(3))
        request = control_pb2.DeliverRequest(envelopes=[bad, foreign, own, bare, good])
        async with open_to(both.address) as opened:
            deliver = opened.unary_unary(f"/{channel.CONTROL_SERVICE}/Deliver")
            answer = await deliver(request.SerializeToString(), metadata=OURS)
        assert control_pb2.DeliverResponse.FromString(answer).num_dropped == 4
        assert both.bob.delivered == [(ALICE, 1, m.Ping(1))]
        assert both.server.counters.by_peer("message.foreign") == {"ipv4:127.0.0.1": 1}
        assert both.server.counters.by_peer("message.forged") == {"ipv4:127.0.0.1": 1}
        assert both.server.counters.by_peer("message.malformed") == {"ipv4:127.0.0.1": 2}

    with_pair(test)


def test_a_message_above_the_limit_is_refused_by_the_transport() -> None:
    async def test(both: Pair) -> None:
        bold = Limits(message_size_max_bytes=2**30)
        async with open_to(both.address, bold) as opened:
            deliver = opened.unary_unary(f"/{channel.CONTROL_SERVICE}/Deliver")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await deliver(bytes(5 * 2**20), metadata=OURS)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    with_pair(test)


def test_random_bytes_on_the_port_do_not_disturb_others() -> None:
    async def test(both: Pair) -> None:
        port = int(both.address.rpartition(":")[2])
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(os.urandom(2000))
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: both.bob.delivered)

    with_pair(test)


def test_the_text_of_our_own_errors_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    async def test(both: Pair) -> None:
        def fail(_message: m.Message) -> None:
            raise ValueError("secret path /home/x")

        both.bob.on_deliver = fail
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: both.alice.failed)
        assert both.alice.failed[0][3] == "internal: E-INT-001 1"
        both.bob.on_deliver = lambda _message: None
        both.client.send(BOB, 1, m.Ping(2))
        await wait_until(lambda: both.bob.delivered)

    with_pair(test)
    assert "secret path" in caplog.text


def test_sending_to_nobody_fails_soon_and_in_order() -> None:
    async def test(both: Pair) -> None:
        await both.server.stop(None)
        for nonce in range(5):
            both.client.send(BOB, 1, m.Ping(nonce))
        both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(b"x"), "token")
        both.client.send(NodeId("z" * 52), 1, m.Ping(9))
        await wait_until(lambda: len(both.alice.failed) == 7, timeout_s=3)
        pings = [msg for to, msg, *_ in both.alice.failed if to == BOB and msg != ACTIVATION]
        assert pings == [m.Ping(nonce) for nonce in range(5)]
        assert [token for _, msg, token, _ in both.alice.failed if msg == ACTIVATION] == ["token"]
        assert any(reason == "its address is unknown" for *_, reason in both.alice.failed)

    with_pair(test)


def test_a_server_that_ends_in_the_middle_of_a_tensor_is_noticed() -> None:
    async def test(both: Pair) -> None:
        data = memoryview(bytes(128 * 2**20))
        both.client.send_tensor(BOB, 1, ACTIVATION, data, "big")
        await wait_until(lambda: both.bob.num_allocated == 1)
        await both.server.stop(None)
        await wait_until(lambda: both.alice.failed, timeout_s=5)
        assert both.alice.failed[0][2] == "big"
        assert both.bob.num_given_back == both.bob.num_allocated
        assert both.alice.sent == []

    with_pair(test)


def test_a_forgotten_peer_fails_what_waits_and_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(both: Pair) -> None:
        allocate = both.bob.allocate

        def forgotten_in_time(sender: NodeId, message: m.Message, size_bytes: int) -> object:
            # Before the first two can have arrived, however late this test has its turn.
            if both.bob.num_allocated == 1:
                both.client.forget(BOB)
            return allocate(sender, message, size_bytes)

        monkeypatch.setattr(both.bob, "allocate", forgotten_in_time)
        for token in range(3):
            both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(2**26)), token)
        await wait_until(lambda: len(both.alice.failed) == 3)
        assert sorted(token for _, _, token, _ in both.alice.failed) == [0, 1, 2]

    with_pair(test)


def test_a_peer_at_a_new_address_gets_what_comes_then() -> None:
    async def test(both: Pair) -> None:
        moved = Host()
        other = PeerServer(MEMBERS[BOB], RUN, moved)
        port = await other.start("127.0.0.1", 0)
        both.client.set_address(BOB, f"127.0.0.1:{port}")
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: moved.delivered)
        assert both.client.address_of(BOB) == f"127.0.0.1:{port}"
        await other.stop(None)

    with_pair(test)


def test_a_full_queue_fails_the_newest() -> None:
    async def test(both: Pair) -> None:
        for nonce in range(5):
            both.client.send(BOB, 1, m.Ping(nonce))
        await wait_until(lambda: len(both.alice.failed) + len(both.bob.delivered) == 5)
        assert [message for _, message, *_ in both.alice.failed] == [m.Ping(3), m.Ping(4)]

    with_pair(test, Limits(queue_length_max=3))


def test_a_port_in_use_is_told() -> None:
    async def test(both: Pair) -> None:
        port = int(both.address.rpartition(":")[2])
        with pytest.raises(NetworkError, match="E-NET-002") as caught:
            await PeerServer(MEMBERS[ALICE], RUN, Host()).start("127.0.0.1", port)
        assert caught.value.exit_code == 4

    with_pair(test)


def test_hello_tells_the_run_and_where_the_asker_is() -> None:
    async def test(both: Pair) -> None:
        assert both.bob.info is not None
        request = HelloRequest(run_id=RUN, sender=ALICE, sender_address="h:1")
        info = await hello(both.address, request, MEMBERS[ALICE])
        assert abs(info.clock_s - wall_clock()) < 60.0
        assert replace(info, clock_s=0.0) == HelloInfo(
            run_id=RUN,
            manifest_json="{}",
            charter=both.bob.info.charter,
            node_id=BOB,
            leader=ALICE,
            leader_address="h:1",
            observed_address="127.0.0.1",
            start=MEMBERS[BOB].host.start,
        )
        assert both.bob.hellos[0].sender == ALICE
        for told, heard in (("nobody\nlistens", "nobody listens"), ("", "")):
            both.bob.found = Found(told)
            assert (await hello(both.address, request, MEMBERS[ALICE])).unreached == heard
        both.bob.found = Found("not asked", "h:2")
        info = await hello(both.address, HelloRequest(), MEMBERS[ALICE])
        assert (info.run_id, info.unreached) == (RUN, "")

    with_pair(test)


def test_hello_is_refused_for_another_run_version_and_before_its_time() -> None:
    async def test(both: Pair) -> None:
        with pytest.raises(RejectedError, match="E-REJ-003"):
            await hello(both.address, HelloRequest(run_id=RunId("x" * 26)), MEMBERS[ALICE])
        both.bob.info = None
        with pytest.raises(NetworkError, match="E-NET-004"):
            await hello(both.address, HelloRequest(), MEMBERS[ALICE])
        async with open_to(both.address) as opened:
            call = opened.unary_unary(f"/{channel.ENROLL_SERVICE}/Hello")
            answer = await call(enroll_pb2.HelloRequest(protocol_version=99).SerializeToString())
        refusal = enroll_pb2.HelloResponse.FromString(answer).refusal
        assert refusal == enroll_pb2.HELLO_REFUSAL_VERSION_DIFFERS

    with_pair(test)


def test_hello_says_where_another_host_has_the_askers_identity_and_what_to_do() -> None:
    async def test(both: Pair) -> None:
        both.bob.found = Found(twin_address="h:2")
        own = MEMBERS[ALICE].host
        request = HelloRequest(sender=ALICE, sender_address="h:1", start=own.start)
        with pytest.raises(RejectedError, match=r"E-REJ-022 .* at h:2.* delete identity\.key"):
            await hello(both.address, request, MEMBERS[ALICE])
        assert both.bob.hellos[0].start == own.start
        request = HelloRequest(sender=ALICE, twin_address="h:2")
        await hello(both.address, request, MEMBERS[ALICE])
        assert both.bob.hellos[1].twin_address == "h:2"

    with_pair(test)


def test_hello_where_nobody_listens_says_so() -> None:
    async def test(both: Pair) -> None:
        await both.server.stop(None)
        with pytest.raises(NetworkError, match="E-NET-003"):
            await hello(both.address, HelloRequest(), MEMBERS[ALICE])
        with pytest.raises(NetworkError, match="E-NET-011"):
            await hello("nonsense", HelloRequest(), MEMBERS[ALICE])

    with_pair(test)


def test_members_of_the_run_may_read_its_status() -> None:
    async def test(both: Pair) -> None:
        assert await ask_status(both.address, RUN, MEMBERS[ALICE], timeout_s=5) == '{"members":2}'
        with pytest.raises(RejectedError, match="E-REJ-003"):
            await ask_status(both.address, RunId("x" * 26), MEMBERS[ALICE], timeout_s=5)
        await both.server.stop(None)
        with pytest.raises(NetworkError, match="E-NET-003"):
            await ask_status(both.address, RUN, MEMBERS[ALICE], timeout_s=5)

    with_pair(test)


def test_closing_leaves_no_task_behind() -> None:
    async def run() -> None:
        async with pair() as both:
            for token in range(4):
                both.client.send_tensor(BOB, 1, ACTIVATION, memoryview(bytes(2**26)), token)
            both.client.send(BOB, 1, m.Ping(1))
            await wait_until(lambda: both.bob.num_allocated)

        def all_ended() -> bool:
            return both.bob.num_given_back + len(both.bob.arrived) == both.bob.num_allocated

        # What the server was reading ends with its connection, a turn or two later.
        await wait_until(all_ended)
        assert both.alice.failed == [], "nobody is told after close"

    asyncio.run(run())

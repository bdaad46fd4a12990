"""States that are taken from several donors at once, over real loopback sockets."""

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from decod.errors import CheckpointError, NetworkError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.net import channel
from decod.net.donor import StateBlob, StateRequest
from decod.net.download import Assembly, Donor, DownloadTerms, FetchedState, _Download, download
from decod.net.net_limits import Limits
from decod.net.rate_caps import UNLIMITED, Pace
from decod.net.server import PeerHandler, PeerServer
from decod.train.checkpoint.description import (
    CHUNK_SIZE_BYTES,
    Chunk,
    Transfer,
    describe_blob,
    described_hash,
    description_text,
    entry_json,
    parameter_hash,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import TensorEntry
from decod.wire.v1 import state_pb2
from tests.support.members import data_node
from tests.support.peers import open_to
from tests.waiting import wait_until

RUN = RunId("r" * 26)
OURS = channel.run_metadata(RUN)
ME = data_node("me")
WANTED = StateRequest(
    run_id=RUN, sender=ME.node_id, stage_index=1, iteration=5, with_optimizer=True
)
LIMITS = Limits(donor_pause_s=0.01, describe_grace_s=0.3)
CHUNK = CHUNK_SIZE_BYTES


class State:
    """A blob of random tensors, and what a donor says of it."""

    def __init__(self, *sizes: int, seed: int = 1) -> None:
        entries = placed(
            TensorEntry(f"t{k}", "float32", (size // 4,), 0, size, "")
            for k, size in enumerate(sizes)
        )
        end = entries[-1].offset + -(-sizes[-1] // 64) * 64 if sizes else 0
        self.blob = bytearray(random.Random(seed).randbytes(end))
        self.describe(entries)

    def describe(self, places: tuple[TensorEntry, ...]) -> None:
        self.entries, chunks = describe_blob(places, memoryview(self.blob))
        self.text = description_text([entry_json(e) for e in self.entries], "".join(chunks))

    def altered(self, offset: int) -> "State":
        """Return a state that differs in one byte."""
        other = State.__new__(State)
        other.blob = bytearray(self.blob)
        other.blob[offset] ^= 1
        other.describe(tuple(self.entries))
        return other


BIG = State(3 * CHUNK, 4, CHUNK + 8, 100, 5 * CHUNK)
"""12 chunks, of which some are small."""


LETTERS = {data_node(letter).node_id: letter for letter in "abcdefghij"}


class Holder:
    """A donor: a real server before a fake driver."""

    def __init__(
        self, letter: str, state: State | str, limits: Limits = LIMITS, pace: Pace = UNLIMITED
    ) -> None:
        member = data_node(letter)
        self.node = member.node_id
        self.state_given = state
        self.served = 0
        """Bytes that were read to be sent."""
        self.before_read: Callable[[int], Awaitable[None]] | None = None
        self.wrong_from: int | None = None
        """From this offset on it sends other bytes than it described."""
        self.num_copies = self.num_released = 0
        self.stopped = False
        self.pace, self.intake = pace, UNLIMITED
        self.server = PeerServer(member, RUN, cast("PeerHandler", self), limits=limits)
        self.address = ""

    async def state(self, request: StateRequest) -> StateBlob | str:
        assert (request.stage_index, request.iteration) == (1, 5)
        if isinstance(self.state_given, str):
            return self.state_given
        self.num_copies += 1
        return StateBlob(manifest=self.state_given.text, read=self._read, release=self._release)

    async def _read(self, offset: int, num_bytes: int) -> bytes:
        assert isinstance(self.state_given, State)
        if self.before_read is not None:
            await self.before_read(offset)
        self.served += num_bytes
        piece = bytearray(self.state_given.blob[offset : offset + num_bytes])
        if self.wrong_from is not None and offset >= self.wrong_from:
            piece[0] ^= 1
        return bytes(piece)

    def _release(self) -> None:
        self.num_released += 1

    async def __aenter__(self) -> "Holder":
        port = await self.server.start("127.0.0.1", 0)
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


class Sink:
    """Fakes the driver's side."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.transfer = Transfer(0, 0)
        self.here: dict[str, bytes] = {}
        self.room = True

    def expect(self, description: object) -> None:
        """Take any state."""

    def allocate(self, size_bytes: int) -> memoryview | None:
        return memoryview(bytearray(size_bytes)) if self.room else None

    def began(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        self.failed[LETTERS[donor]] = reason

    def local(self, chunk: Chunk) -> bytes | None:
        return self.here.get(chunk.sha256)


class Bench:
    """Donors, and one who asks them."""

    def __init__(self, *holders: Holder) -> None:
        self.holders = holders
        self.sink = Sink()
        self.wanted_hash = ""
        self.names: Collection[str] | None = None
        self.pace = UNLIMITED

    async def fetch(self, member: Membership = ME) -> FetchedState:
        donors = [Donor(holder.node, holder.address) for holder in self.holders]
        wanted = replace(WANTED, sender=member.node_id)
        return await download(
            wanted,
            donors,
            self.sink,
            member.tls,
            DownloadTerms(
                wanted_hash=self.wanted_hash, names=self.names, limits=LIMITS, pace=self.pace
            ),
        )

    def from_each(self) -> dict[str, int]:
        return {LETTERS[node]: num for node, num in self.sink.transfer.from_donors.items()}


def run(test: Callable[[Bench], Awaitable[None]], *holders: Holder) -> None:
    async def main() -> None:
        for holder in holders:
            await holder.__aenter__()
        try:
            async with asyncio.timeout(20):
                await test(Bench(*holders))
        finally:
            for holder in holders:
                await holder.__aexit__()

    asyncio.run(main())


def assert_is(fetched: FetchedState, state: State) -> None:
    assert fetched.description.text == state.text
    for entry in state.entries:
        place = slice(entry.offset, entry.offset + entry.num_bytes)
        assert fetched.buffer[place] == state.blob[place], entry.name


def payload(state: State) -> int:
    return sum(entry.num_bytes for entry in state.entries)


@pytest.mark.parametrize("state", [State(4), State(CHUNK), State(CHUNK + 4, 64, 4), BIG])
def test_a_state_arrives_bit_for_bit_from_one_donor_which_is_then_free(state: State) -> None:
    donor = Holder("a", state)

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), state)
        assert bench.from_each() == {"a": payload(state)}
        assert (donor.num_copies, donor.num_released) == (1, 1), "it was told, and waits no lease"

    run(test, donor)


def test_no_more_is_fetched_than_the_tensors_that_are_wanted() -> None:
    """From several donors; whose whole state is another than was committed is asked for nothing."""
    holders = [Holder("a", BIG), Holder("b", BIG), Holder("c", BIG.altered(0))]

    async def test(bench: Bench) -> None:
        bench.names = ["t0", "t3", "t4", "of another stage"]
        bench.wanted_hash = described_hash(BIG.entries)
        fetched = await bench.fetch()
        assert [entry.name for entry in fetched.description.entries] == ["t0", "t3", "t4"]
        assert sum(bench.from_each().values()) == payload(BIG) - 4 - (CHUNK + 8)
        assert set(bench.from_each()) <= {"a", "b"}
        assert "another one" in bench.sink.failed["c"]
        whole = {entry.name: entry for entry in BIG.entries}
        for entry in fetched.description.entries:
            place = slice(entry.offset, entry.offset + entry.num_bytes)
            there = whole[entry.name]
            assert entry.sha256 == there.sha256
            of_whole = slice(there.offset, there.offset + there.num_bytes)
            assert fetched.buffer[place] == BIG.blob[of_whole]

    run(test, *holders)


def test_donors_with_nothing_that_is_wanted_are_left() -> None:
    async def test(bench: Bench) -> None:
        bench.names = ["of another stage"]
        with pytest.raises(NetworkError, match="nothing of it is wanted"):
            await bench.fetch()

    run(test, Holder("a", BIG))


def test_all_donors_give_their_part_at_once() -> None:
    """No chunk is given before all three have been asked for one."""
    holders = [Holder(letter, BIG) for letter in "abc"]
    asked, all_asked = set[Holder](), asyncio.Event()

    def gate(holder: Holder) -> Callable[[int], Awaitable[None]]:
        async def wait(_: int) -> None:
            asked.add(holder)
            if len(asked) == len(holders):
                all_asked.set()
            await all_asked.wait()

        return wait

    for holder in holders:
        holder.before_read = gate(holder)

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        given = bench.from_each()
        assert sum(given.values()) == payload(BIG)
        assert set(given) == {"a", "b", "c"}, "nobody has given all of it"
        assert bench.sink.failed == {}
        await wait_until(lambda: all(h.num_released == 1 for h in holders))

    run(test, *holders)


def test_a_donor_whose_file_is_gone_is_done_without_and_has_no_traceback_to_show(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A kept state makes room for a newer one while it is being given."""
    without, other = Holder("a", BIG), Holder("b", BIG)

    async def gone(_: int) -> None:
        raise CheckpointError("the state can't be read", why="no such file", fix="nothing")

    without.before_read = gone

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        assert bench.from_each() == {"b": payload(BIG)}

    run(test, without, other)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_donor_that_is_cut_off_loses_nothing_that_has_arrived() -> None:
    cut, other = Holder("a", BIG), Holder("b", BIG)
    given = asyncio.Event()

    async def break_off(offset: int) -> None:
        if offset >= 2 * CHUNK:
            given.set()
            # The end of this call must not be the end of what ends it.
            await asyncio.shield(asyncio.ensure_future(cut.server.stop(None)))

    async def wait(_: int) -> None:
        await given.wait()

    cut.before_read, other.before_read = break_off, wait

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        assert bench.from_each() == {"a": CHUNK, "b": payload(BIG) - CHUNK}
        assert other.served == payload(BIG) - CHUNK, "what was there is not asked for again"

    run(test, cut, other)


def test_a_donor_that_lies_is_left_at_once_and_named() -> None:
    liar, other = Holder("a", BIG), Holder("b", BIG)
    liar.wrong_from = CHUNK
    lied = asyncio.Event()

    async def watch(offset: int) -> None:
        if offset >= CHUNK:
            lied.set()

    async def wait(_: int) -> None:
        await lied.wait()

    liar.before_read, other.before_read = watch, wait

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        assert bench.from_each() == {"a": CHUNK, "b": payload(BIG) - CHUNK}
        assert bench.sink.failed == {"a": "chunk 2 is not what it described"}
        assert liar.served < 4 * CHUNK, "it was not asked again"

    run(test, liar, other)


def test_an_upload_cap_holds_for_states() -> None:
    rate = 8 * 1024 * 1024
    donor = Holder("a", BIG, pace=Pace(rate))

    async def test(bench: Bench) -> None:
        start_s = asyncio.get_running_loop().time()
        assert_is(await bench.fetch(), BIG)
        # The last piece leaves a piece's time before its own has passed.
        assert asyncio.get_running_loop().time() - start_s >= payload(BIG) / rate - 0.3

    run(test, donor)


def test_chunks_that_a_stalled_donor_owes_come_from_others() -> None:
    stalled, other = Holder("a", BIG), Holder("b", BIG)

    async def stall(_: int) -> None:
        await asyncio.Event().wait()

    stalled.before_read = stall

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        assert bench.from_each() == {"b": payload(BIG)}
        assert bench.sink.failed == {}, "it is slow, which is no fault"

    run(test, stalled, other)


def test_most_donors_decide_and_the_odd_one_is_named() -> None:
    odd = BIG.altered(5 * CHUNK)
    holders = [Holder("a", odd), Holder("b", BIG), Holder("c", BIG)]

    async def test(bench: Bench) -> None:
        assert_is(await bench.fetch(), BIG)
        assert set(bench.from_each()) <= {"b", "c"}
        assert list(bench.sink.failed) == ["a"]

    run(test, *holders)


def test_a_state_that_does_not_hash_to_what_was_voted_is_replaced_where_it_differs() -> None:
    other = BIG.altered(5 * CHUNK)
    holders = [Holder("a", other), Holder("b", BIG)]

    async def test(bench: Bench) -> None:
        bench.wanted_hash = parameter_hash(BIG.entries, memoryview(BIG.blob))
        assert_is(await bench.fetch(), BIG)
        assert holders[1].served == CHUNK, "all but one chunk was right already"
        assert "vote" in bench.sink.failed["a"]

    run(test, *holders)


def test_what_this_host_has_is_not_fetched_and_is_verified_too() -> None:
    donor = Holder("a", BIG)

    async def test(bench: Bench) -> None:
        chunks = parse_description(BIG.text).chunks
        for chunk in chunks[:5]:
            piece = BIG.blob[chunk.offset : chunk.offset + chunk.num_bytes]
            bench.sink.here[chunk.sha256] = bytes(piece)
        bench.sink.here[chunks[4].sha256] = bytes(chunks[4].num_bytes)
        assert_is(await bench.fetch(), BIG)
        num_local = sum(chunk.num_bytes for chunk in chunks[:4])
        assert bench.sink.transfer.num_local == num_local
        assert donor.served == payload(BIG) - num_local

    run(test, donor)


def test_a_donor_that_answers_while_this_host_reads_its_own_disk_is_used_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described, may_describe, workers = threading.Event(), asyncio.Event(), list[str]()
    early, late = Holder("a", BIG), Holder("b", BIG)
    describe, work = _Download._describe, _Download._work

    async def watched(self: _Download, node: NodeId) -> bool:
        if node == late.node:
            await may_describe.wait()
        found = await describe(self, node)
        if node == late.node:
            described.set()
        return found

    async def counted(self: _Download, node: NodeId) -> None:
        workers.append(LETTERS[node])
        await work(self, node)

    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()

        def local(chunk: Chunk) -> None:
            """Read the disk for as long as the late donor takes to answer. Runs in a thread."""
            loop.call_soon_threadsafe(may_describe.set)
            assert described.wait(10)

        monkeypatch.setattr(bench.sink, "local", local)
        assert_is(await bench.fetch(), BIG)
        assert sorted(workers) == ["a", "b"]

    monkeypatch.setattr(_Download, "_describe", watched)
    monkeypatch.setattr(_Download, "_work", counted)
    run(test, early, late)


def test_a_busy_donor_is_asked_again() -> None:
    donor = Holder("a", State(CHUNK))

    async def test(bench: Bench) -> None:
        donor.server.donor._num_streams = LIMITS.state_streams_max

        async def free() -> None:
            refusals = bench.sink.transfer
            await wait_until(lambda: bench.sink.transfer is not refusals)
            await wait_until(lambda: donor.server.donor.num_lent == 1)
            donor.server.donor._num_streams = 0

        freed = asyncio.create_task(free())
        assert_is(await bench.fetch(), cast("State", donor.state_given))
        await freed

    run(test, donor)


def test_when_nobody_has_it_the_reasons_are_told() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(NetworkError, match="E-NET-005"):
            await bench.fetch()
        assert bench.sink.failed == {"a": "not here", "b": "moved on"}

    run(test, Holder("a", "not here"), Holder("b", "moved on"))


def test_without_room_nothing_is_fetched() -> None:
    donor = Holder("a", BIG)

    async def test(bench: Bench) -> None:
        bench.sink.room = False
        with pytest.raises(NetworkError, match="no room"):
            await bench.fetch()
        assert donor.served == 0
        await wait_until(lambda: donor.num_released == 1)

    run(test, donor)


def test_one_copy_serves_all_and_is_given_back_when_the_last_is_silent() -> None:
    donor = Holder("a", State(CHUNK), replace(LIMITS, state_lease_s=0.3))

    async def test(bench: Bench) -> None:
        states = await asyncio.gather(*(bench.fetch(data_node(x)) for x in "xyz"))
        for state in states:
            assert_is(state, cast("State", donor.state_given))
        request = state_pb2.DescribeRequest(
            run_id=RUN, sender_id=ME.node_id, stage_index=1, iteration=5, with_optimizer=True
        )
        async with open_to(donor.address, by=ME) as opened:
            describe = opened.unary_unary(f"/{channel.STATE_SERVICE}/Describe")
            for _ in range(2):
                await describe(request.SerializeToString(), metadata=OURS)
        await wait_until(lambda: donor.num_copies == donor.num_released)
        assert donor.server.donor.num_lent == 0

    run(test, donor)


def test_a_server_that_was_started_again_lends_as_before() -> None:
    """A node starts its server again where the UDP port of its first choice is in use."""
    donor = Holder("a", BIG)

    async def test(bench: Bench) -> None:
        await donor.__aexit__()
        await donor.__aenter__()
        assert_is(await bench.fetch(), BIG)

    run(test, donor)


@pytest.mark.parametrize(
    ("first", "num", "status"),
    [(12, 1, "INVALID"), (-1, 1, "INVALID"), (0, 0, "INVALID"), (11, 2, "INVALID"), (11, 1, "")],
)
def test_only_chunks_that_are_there_can_be_asked_for(first: int, num: int, status: str) -> None:
    donor = Holder("a", BIG)

    async def test(bench: Bench) -> None:
        state_id = parse_description(BIG.text).id
        assert len(parse_description(BIG.text).chunks) == 12
        request = state_pb2.DescribeRequest(
            run_id=RUN, sender_id=ME.node_id, stage_index=1, iteration=5, with_optimizer=True
        )
        wanted: dict[str, Any] = {"run_id": RUN, "sender_id": ME.node_id, "state_id": state_id}
        chunks = state_pb2.FetchRequest(**wanted, first_chunk=first, num_chunks=num)
        async with open_to(donor.address, by=ME) as opened:
            await opened.unary_unary(f"/{channel.STATE_SERVICE}/Describe")(
                request.SerializeToString(), metadata=OURS
            )
            fetch = opened.unary_stream(f"/{channel.STATE_SERVICE}/Fetch")
            answer = fetch(chunks.SerializeToString(), metadata=OURS)
            with suppress(grpc.aio.AioRpcError):
                _ = [message async for message in answer]
            code = str(await answer.code())
        assert status in code
        assert ("OK" in code) == (not status)

    run(test, donor)


# --- descriptions ---------------------------------------------------------------------------------


def _broken(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads(State(CHUNK + 4, 64).text)
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        _broken(lambda v: v.pop("chunks")),
        _broken(lambda v: v.update(more=1)),
        _broken(lambda v: v.update(chunks=5)),
        _broken(lambda v: v.update(chunks=v["chunks"][:-1])),
        _broken(lambda v: v.update(chunks="g" * len(v["chunks"]))),
        _broken(lambda v: v["tensors"].reverse()),
        _broken(lambda v: v["tensors"][0].update(offset=64)),
        _broken(lambda v: v["tensors"][0].update(num_bytes=4)),
        _broken(lambda v: v["tensors"][1].update(dtype="int8")),
        _broken(lambda v: v["tensors"][1].update(name="t0")),
        _broken(lambda v: v["tensors"][1].update(shape=[1 << 61, 1 << 61])),
    ],
)
def test_what_is_no_description_is_refused(text: str) -> None:
    donor, state = Holder("a", State(4)), State(4)
    state.text = text

    async def test(bench: Bench) -> None:
        donor.state_given = state
        # Past the donor's own check, as a bad donor would.
        donor.server.donor._described = lambda _: _answer(text)  # type: ignore[assignment,method-assign]
        with pytest.raises(NetworkError, match="E-NET-005"):
            await bench.fetch()
        assert list(bench.sink.failed) == ["a"]

    run(test, donor)


async def _answer(text: str) -> Any:
    class Said:
        def __init__(self) -> None:
            self.text = text

    return Said()


def test_chunks_are_dealt_so_that_nobody_fetches_what_another_does() -> None:
    async def test() -> None:
        chunks = [Chunk(k * 10, 10, hashlib.sha256(b"").hexdigest(), k) for k in range(6)]
        assembly = Assembly(chunks, memoryview(bytearray(60)))
        a, b, c = (NodeId(letter) for letter in "abc")
        first = assembly.take(a, 0)
        assert first is not None
        assert first.indices == range(6), "small chunks go together"
        late = assembly.take(b, 0)
        assert late is not None
        assert late.indices == range(5, 6), "the end of what another owes"
        third = assembly.take(c, 0)
        assert third is not None
        assert third.indices == range(4, 5)
        assert assembly.put(5, b"x" * 10)
        assert not assembly.put(5, b"y" * 10)
        assert bytes(assembly.buffer[50:]) == b"x" * 10
        assembly.give_back(first)
        again = assembly.take(a, 0)
        assert again is not None
        assert again.indices == range(4)
        assert not assembly.complete

    asyncio.run(test())

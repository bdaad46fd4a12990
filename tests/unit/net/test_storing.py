"""Parts of checkpoints that a member writes when the leader asks, over real loopback sockets."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from typing_extensions import override

from decod.errors import CheckpointError, DecodError, NetworkError
from decod.ids import NodeId
from decod.net.donor import StateRequest
from decod.net.download import Donor
from decod.net.net_limits import Limits
from decod.net.storing import NoStoreError, PartRequest, Sharing, _followed, write_part
from decod.train.checkpoint.description import Description
from decod.train.checkpoint.iteration_folders import StageBlob
from decod.train.checkpoint.shared import Content, FolderStore, SharedCheckpoints
from decod.wire.v1 import state_pb2
from tests.support.members import data_node
from tests.unit.net.test_download import BIG, CHUNK, ME, RUN, WANTED, Holder
from tests.waiting import wait_until

FOLDER = "5-0123abcd"
LIMITS = Limits(store_stall_s=20.0)


class Store(FolderStore):
    """A folder that waits, or fails, when a test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = threading.Event()
        self.may_write.set()
        self.reason = ""
        self.abandoned = False

    @override
    def write(self, name: str, content: Content) -> None:
        self.may_write.wait(30.0)
        if self.reason:
            raise OSError(self.reason)
        try:
            super().write(name, content)
        except CheckpointError:
            self.abandoned = True
            raise


def ask(
    member: Holder,
    described: Callable[[Description], None] = lambda _: None,
    *,
    folder: str = FOLDER,
    limits: Limits = LIMITS,
    request: StateRequest = WANTED,
) -> Awaitable[Description]:
    part = PartRequest(state=request, folder=folder)
    return write_part(part, Donor(member.node, member.address), described, ME.tls, limits)


def run(member: Holder, test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with member, asyncio.timeout(60):
            await test()

    asyncio.run(main())


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def share(member: Holder, store: FolderStore, written: list[tuple[int, ...]] | None = None) -> None:
    shared = SharedCheckpoints(store, RUN)
    told = [] if written is None else written

    def find(sender: NodeId) -> SharedCheckpoints | str:
        return shared if sender == ME.node_id else "only the leader of the run may ask for that"

    member.server.parts.share(Sharing(find, lambda *what: told.append(what)))


def test_a_member_writes_what_it_describes_and_gives_its_copy_back(tmp_path: Path) -> None:
    member, store, written = Holder("a", BIG), Store(tmp_path), list[tuple[int, ...]]()
    share(member, store, written)

    async def test() -> None:
        seen: list[str] = []
        description = await ask(member, lambda told: seen.append(told.id))
        assert (description.text, seen) == (BIG.text, [description.id])
        SharedCheckpoints(store, RUN).require_stage(FOLDER, 1, description)
        await wait_until(lambda: member.num_released == 1)
        assert written == [(1, 5, sum(entry.num_bytes for entry in BIG.entries))]

    run(member, test)
    reference = SharedCheckpoints(FolderStore(tmp_path / "other"), RUN)
    reference.write_stage(FOLDER, 1, StageBlob(tuple(BIG.entries), memoryview(BIG.blob)))
    name = f"{RUN}/{FOLDER}/stage-1.safetensors"
    assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_member_without_a_store_says_so_and_copies_nothing() -> None:
    member = Holder("a", BIG)

    async def test() -> None:
        with pytest.raises(NoStoreError):
            await ask(member)
        assert member.num_copies == 0

    run(member, test)


def test_only_the_leader_gets_something_written(tmp_path: Path) -> None:
    member, other = Holder("a", BIG), data_node("b")
    share(member, Store(tmp_path))

    async def test() -> None:
        request = StateRequest(
            run_id=RUN, sender=other.node_id, stage_index=1, iteration=5, with_optimizer=True
        )
        part = PartRequest(state=request, folder=FOLDER)
        donor = Donor(member.node, member.address)
        with pytest.raises(NetworkError, match="only the leader"):
            await write_part(part, donor, lambda _: None, other.tls, LIMITS)
        assert member.num_copies == 0
        assert files_in(tmp_path) == []

    run(member, test)


@pytest.mark.parametrize("folder", ["..", "5", "5-0123abcd/../../x", "5-0123ABCD", ""])
def test_a_folder_has_the_name_of_a_checkpoint(tmp_path: Path, folder: str) -> None:
    member = Holder("a", BIG)
    share(member, Store(tmp_path / "store"))

    async def test() -> None:
        with pytest.raises(DecodError):
            await ask(member, folder=folder)
        assert not (tmp_path / "store").exists()

    run(member, test)


def test_a_member_whose_state_is_another_ones_refuses(tmp_path: Path) -> None:
    member = Holder("a", "the state has moved on")
    share(member, Store(tmp_path))

    async def test() -> None:
        with pytest.raises(NetworkError, match="the state has moved on"):
            await ask(member)

    run(member, test)


def test_a_store_that_fails_is_named_to_the_leader(tmp_path: Path) -> None:
    member, store = Holder("a", BIG), Store(tmp_path)
    store.reason = "Unable to locate credentials"
    share(member, store)

    async def test() -> None:
        with pytest.raises(NetworkError, match=r"checkpoint store .* can't be used"):
            await ask(member)
        await wait_until(lambda: member.num_released == 1)
        store.reason = ""
        assert (await ask(member)).text == BIG.text, "the next time it works"

    run(member, test)


def test_bytes_that_are_not_as_described_are_not_written(tmp_path: Path) -> None:
    member, store = Holder("a", BIG), Store(tmp_path)
    member.wrong_from = CHUNK
    share(member, store)

    async def test() -> None:
        with pytest.raises(NetworkError, match="is not what its member said"):
            await ask(member)
        assert files_in(tmp_path) == []

    run(member, test)


def test_a_store_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The copy is given back once the store lets go of it, and one part is written at a time."""
    member, store = Holder("a", BIG), Store(tmp_path)
    share(member, store)
    store.may_write.clear()

    async def test() -> None:
        with pytest.raises(NetworkError, match=r"nothing came of it for too long"):
            await ask(member, limits=Limits(store_stall_s=0.3))
        assert member.num_released == 0
        store.may_write.set()
        await wait_until(lambda: member.num_released == 1)
        assert store.abandoned
        assert files_in(tmp_path) == []

    run(member, test)


class Answers:
    """A member's answers, the first of which takes a while."""

    def __init__(self, *answers: state_pb2.StoreResponse) -> None:
        self._answers = deque(answers)

    async def read(self) -> bytes:
        for _ in range(20 if len(self._answers) > 1 else 0):
            await asyncio.sleep(0)
        return self._answers.popleft().SerializeToString()


@pytest.mark.parametrize("size_bytes", [0, 10**12])
def test_a_member_gets_time_to_copy_a_large_state(size_bytes: int) -> None:
    async def test() -> None:
        answers = Answers(
            state_pb2.StoreResponse(description=BIG.text), state_pb2.StoreResponse(done=True)
        )
        limits = Limits(store_stall_s=0.0)
        followed = _followed(cast("Any", answers), lambda _: None, limits, size_bytes)
        if size_bytes:
            assert (await followed).text == BIG.text
        else:
            with pytest.raises(TimeoutError):
                await followed

    asyncio.run(test())


def test_a_leader_that_refuses_what_is_described_stops_the_member(tmp_path: Path) -> None:
    member, store = Holder("a", BIG), Store(tmp_path)
    share(member, store)
    store.may_write.clear()

    def refuse(_: Description) -> None:
        raise CheckpointError("another one's", why="of the vote", fix="none")

    async def test() -> None:
        with pytest.raises(CheckpointError, match="another one's"):
            await ask(member, refuse)
        # The member hears of it with its next answer.
        await wait_until(lambda: member.server.parts._num_writing == 0)
        store.may_write.set()
        await wait_until(lambda: member.num_released == 1)
        assert store.abandoned

    run(member, test)

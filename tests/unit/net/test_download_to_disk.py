"""States that go to a file as they arrive, over real loopback sockets."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from decod.errors import NetworkError
from decod.net.download import Donor, DownloadTerms, _Download, download
from decod.train.checkpoint.description import Description, QuietSink, describe_blob
from decod.train.checkpoint.iteration_folders import ArrivedStage, ArrivingStages, stage_file
from decod.train.checkpoint.manifest import file_header, packed
from decod.train.checkpoint.places import FileOperations
from tests.unit.net.test_download import (
    BIG,
    CHUNK,
    LIMITS,
    ME,
    WANTED,
    Bench,
    Holder,
    Sink,
    State,
    assert_is,
    run,
)


class DiskSink(Sink):
    """Leads states to a file."""

    def __init__(self, arriving: ArrivingStages) -> None:
        super().__init__()
        self._arriving = arriving
        self._description: Description | None = None

    @override
    def expect(self, description: object) -> None:
        assert isinstance(description, Description)
        self._description = description

    @override
    def allocate(self, size_bytes: int) -> ArrivedStage:  # type: ignore[override]
        assert self._description is not None
        return self._arriving.place(stage_file(1), self._description)


def test_a_state_arrives_in_the_file_of_a_checkpoint(tmp_path: Path) -> None:
    arriving = ArrivingStages(tmp_path, FileOperations())

    async def test(bench: Bench) -> None:
        bench.sink = DiskSink(arriving)
        fetched = await bench.fetch()
        assert_is(fetched, BIG)
        path = tmp_path / ".arriving" / stage_file(1)
        content = b"".join(BIG.blob[e.offset : e.offset + e.num_bytes] for e in BIG.entries)
        assert path.read_bytes() == file_header(packed(tuple(BIG.entries))) + content

    run(test, Holder("a", BIG), Holder("b", BIG))
    arriving.close()
    assert list(tmp_path.iterdir()) == []


def test_another_state_takes_over_what_is_equal(tmp_path: Path) -> None:
    """The first one that was chosen is not what was voted on."""
    wrong, right = BIG.altered(0), BIG
    arriving = ArrivingStages(tmp_path, FileOperations())

    async def test(bench: Bench) -> None:
        bench.sink = DiskSink(arriving)
        bench.wanted_hash = _hash(right)
        assert_is(await bench.fetch(), right)
        assert bench.sink.transfer.from_donors[bench.holders[2].node] <= 2 * CHUNK

    run(test, Holder("a", wrong), Holder("b", wrong), Holder("c", right))
    arriving.close()


def _hash(state: State) -> str:
    from decod.train.checkpoint.description import parameter_hash

    entries, _ = describe_blob(tuple(state.entries), memoryview(state.blob))
    return parameter_hash(entries, memoryview(state.blob))


class FullDisk(bytearray):
    """Takes nothing."""

    @override
    def __setitem__(self, place: object, piece: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullSink(QuietSink):
    """Gives a disk that is full."""

    transfer = Sink().transfer

    def allocate(self, size_bytes: int) -> FullDisk:
        return FullDisk(size_bytes)


def test_a_disk_that_fills_up_is_told(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.sink = FullSink()  # type: ignore[assignment]
        with pytest.raises(NetworkError, match=r"E-NET-005 .*can't write .*No space"):
            await bench.fetch()

    run(test, Holder("a", BIG))


@pytest.mark.parametrize("size_bytes", [0, 10**10])
def test_a_donor_gets_time_to_copy_what_is_asked_for(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted_s: list[float] = []
    unary = _Download._unary

    async def watched(self: _Download, *what: Any, timeout_s: float) -> bytes:
        granted_s.append(timeout_s)
        return await unary(self, *what, timeout_s=timeout_s)

    monkeypatch.setattr(_Download, "_unary", watched)

    async def test(bench: Bench) -> None:
        terms = DownloadTerms(size_bytes=size_bytes, limits=LIMITS)
        donors = [Donor(holder.node, holder.address) for holder in bench.holders]
        assert_is(await download(WANTED, donors, bench.sink, ME.tls, terms), BIG)
        assert granted_s[0] == pytest.approx(10 * LIMITS.frame_timeout_s + size_bytes / 5e7)

    run(test, Holder("a", BIG))

"""The chunks of one state: which have arrived, which are missing, and which donor fetches what."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decod.ids import NodeId
from decod.train.checkpoint.description import CHUNK_SIZE_BYTES, Chunk
from decod.train.checkpoint.entries import StateBytes

_RUN_SIZE_MAX_BYTES = 16 * CHUNK_SIZE_BYTES
"""Most bytes that a donor is asked for at once."""

_SHARE = 4
"""A run is at most 1/_SHARE of the missing bytes, so that all donors finish at about the same
time."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive chunks that one donor is asked for."""

    node: NodeId
    indices: range

    @property
    def first(self) -> int:
        return self.indices.start


class Assembly:
    """A state's blob that is put together from chunks of several donors.

    Args:
        chunks: The chunks of the state, in the order of their offsets.
        buffer: Takes the blob. Chunks are written to their offsets.
    """

    def __init__(self, chunks: Sequence[Chunk], buffer: StateBytes) -> None:
        self.chunks = tuple(chunks)
        self.buffer = buffer
        self.progress_s = asyncio.get_running_loop().time()
        """When a chunk last arrived, on the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray(len(self.chunks))
        self._num_missing = len(self.chunks)
        self._missing_bytes = sum(chunk.num_bytes for chunk in self.chunks)
        self._runs: list[Run] = []
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self._num_missing == 0

    async def changed(self) -> None:
        """Wait until a chunk arrives or a run is given back."""
        self._changed.clear()
        await self._changed.wait()

    def missing(self) -> Iterator[tuple[int, Chunk]]:
        """Yield every chunk that has not arrived, with its index."""
        for index, chunk in enumerate(self.chunks):
            if not self._arrived[index]:
                yield index, chunk

    def put(self, index: int, piece: memoryview | bytes | bytearray) -> bool:
        """Write a verified chunk to its place; return False if it was there already."""
        if self._arrived[index]:
            return False
        self.write(index, piece)
        return self.mark(index)

    def write(self, index: int, piece: memoryview | bytes | bytearray) -> None:
        """Write a verified chunk to its place. It counts as missing until `mark` is called.

        May be called in a thread, since the place may be in a file.
        """
        chunk = self.chunks[index]
        self.buffer[chunk.offset : chunk.offset + chunk.num_bytes] = piece

    def mark(self, index: int) -> bool:
        """Note that a chunk is in its place; return False if it was there already."""
        if self._arrived[index]:
            return False
        self._mark(index)
        return True

    def _mark(self, index: int) -> None:
        self._arrived[index] = 1
        self._num_missing -= 1
        self._missing_bytes -= self.chunks[index].num_bytes
        self.progress_s = self._loop.time()
        self._loop.call_soon_threadsafe(self._changed.set)

    def keep(self, other: "Assembly") -> int:
        """Take over the chunks of another state in the same buffer that are equal in this one.

        Returns:
            How many bytes were taken over.
        """
        alike = {
            (chunk.offset, chunk.num_bytes, chunk.sha256)
            for index, chunk in enumerate(other.chunks)
            if other._arrived[index]
        }
        before = self._missing_bytes
        for index, chunk in self.missing():
            if (chunk.offset, chunk.num_bytes, chunk.sha256) in alike:
                self._mark(index)
        return before - self._missing_bytes

    def take(self, node: NodeId, size_bytes: int) -> Run | None:
        """Claim the next chunks for a donor; return None if there are none at present.

        When all missing chunks are claimed, an idle donor gets a chunk that another donor owes.

        Args:
            node: The donor.
            size_bytes: Most bytes to ask it for. A run has at least one chunk, however small this
                is.
        """
        claimed = {index for run in self._runs for index in run.indices}
        first = next(
            (index for index, _ in self.missing() if index not in claimed),
            None,
        )
        indices = range(0)
        if first is not None:
            indices = self._run_from(first, claimed, size_bytes)
        else:
            indices = self._late(node)
        if not indices:
            return None
        run = Run(node, indices)
        self._runs.append(run)
        return run

    def _run_from(self, first: int, claimed: set[int], size_bytes: int) -> range:
        limit = min(size_bytes, _RUN_SIZE_MAX_BYTES, self._missing_bytes // _SHARE)
        limit = max(limit, CHUNK_SIZE_BYTES)
        stop, total = first, 0
        while stop < len(self.chunks) and stop not in claimed and not self._arrived[stop]:
            total += self.chunks[stop].num_bytes
            if total > limit and stop > first:
                break
            stop += 1
        return range(first, stop)

    def _late(self, node: NodeId) -> range:
        """Return the last missing chunk of another donor's run that no second donor fetches yet."""
        counts: dict[int, int] = {}
        for run in self._runs:
            for index in run.indices:
                counts[index] = counts.get(index, 0) + 1
        for run in self._runs:
            if run.node == node:
                continue
            for index in reversed(run.indices):
                if not self._arrived[index] and counts[index] == 1:
                    return range(index, index + 1)
        return range(0)

    def rest_arrived(self, run: Run, index: int) -> bool:
        """Whether all chunks of a run from `index` on have arrived, from any donor."""
        return all(self._arrived[i] for i in range(index, run.indices.stop))

    def give_back(self, run: Run) -> None:
        """End a donor's claim on a run. Its chunks that have not arrived can be claimed again."""
        self._runs.remove(run)
        self._changed.set()

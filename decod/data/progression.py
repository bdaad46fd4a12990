"""How far a preparation is, and which task comes next.

The corpus is one stream of tokens. Parts of the text fill it, and shards cut it at multiples of
their size. Where a part begins in the stream is known when all parts before it are done. A shard
can be joined when the parts that it lies in are done, and a part's file goes when all shards that
it lies in are.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress

from decod.data.encoding import Preparation, Span, encode_part, join_shard
from decod.data.engine import Engine, EngineTask, run_tasks
from decod.data.index import ShardEntry
from decod.data.prepare_journal import NUM_PLACES_MAX, PrepareJournal
from decod.data.shards import require_few
from decod.data.slices import PART_SIZE_BYTES, Part, cut_file
from decod.data.source_files import SourceFile
from decod.data.sources import BadRecord, OnRead, Slice, whole


class Progression:
    """The tasks of one preparation, in the order in which they start.

    Args:
        preparation: What the tasks share.
        parts: The parts of the text.
        shard_tokens: Number of tokens of every shard but the last.
        journal: What is done already.
    """

    def __init__(
        self,
        preparation: Preparation,
        parts: Sequence[Part],
        shard_tokens: int,
        journal: PrepareJournal,
    ) -> None:
        self._preparation, self._parts, self._shard_tokens = preparation, parts, shard_tokens
        self._journal = journal
        self._ends: list[int] = []
        """Where the parts end in the stream, in tokens, as far as that is known."""
        self._num_parts_removed = 0
        self._num_shards_joined = 0
        """All shards below this are done."""
        self._next_shard = 0
        self._learn()
        self._waiting = (i for i in range(len(parts)) if not self._has_part(i))

    def run(self, engine: Engine, on_read: OnRead | None) -> tuple[ShardEntry, ...]:
        """Do what is left. Return all shards.

        Raises as `decod.data.engine.run_tasks`.
        """
        report = on_read or (lambda _num_bytes: None)
        for part_index in range(len(self._parts)):
            if self._has_part(part_index):
                report(self._size_of(part_index))
        direct = report if engine.in_process else None
        for (kind, index), result in run_tasks(engine, lambda: self._next_task(direct)):
            if kind == "part":
                self._journal.add_part(index, result)
                if direct is None:
                    report(self._size_of(index))
            else:
                self._journal.add_shard(index, result)
            self._learn()
        return tuple(self._journal.shards[i] for i in range(self._num_shards_joined))

    def left_out(self) -> tuple[int, list[BadRecord]]:
        """Return how many records were left out, and the first of them, in the corpus's order."""
        parts = [self._journal.parts[i] for i in range(len(self._parts))]
        first = itertools.chain.from_iterable(part.bad for part in parts)
        return sum(part.num_bad for part in parts), list(itertools.islice(first, NUM_PLACES_MAX))

    def _next_task(self, on_read: OnRead | None) -> EngineTask | None:
        # Shards first: they make room on the disk.
        while self._can_join(self._next_shard):
            shard_index = self._next_shard
            self._next_shard += 1
            if shard_index not in self._journal.shards:
                require_few(shard_index + 1)
                arguments = (self._preparation, shard_index, self._spans(shard_index))
                return EngineTask(("shard", shard_index), join_shard, arguments)
        part_index = next(self._waiting, None)
        if part_index is None:
            return None
        part = self._parts[part_index]
        return EngineTask(
            ("part", part_index), encode_part, (self._preparation, part_index, part, on_read)
        )

    def _can_join(self, shard_index: int) -> bool:
        known = self._ends[-1] if self._ends else 0
        if len(self._ends) == len(self._parts):
            return shard_index * self._shard_tokens < known
        return (shard_index + 1) * self._shard_tokens <= known

    def _spans(self, shard_index: int) -> tuple[Span, ...]:
        """Return where the tokens of a shard lie."""
        start = shard_index * self._shard_tokens
        end = min(start + self._shard_tokens, self._ends[-1])
        spans = []
        part_index = bisect.bisect_right(self._ends, start)
        while start < end:
            begin = self._ends[part_index - 1] if part_index else 0
            stop = min(end, self._ends[part_index])
            size = self._preparation.item_size_bytes
            spans.append(Span(part_index, (start - begin) * size, (stop - begin) * size))
            start, part_index = stop, part_index + 1
        return tuple(span for span in spans if span.start < span.end)

    def _learn(self) -> None:
        """Take up what the journal says, and remove files that nobody needs any more."""
        parts = self._journal.parts
        while (part_index := len(self._ends)) in parts:
            begin = self._ends[-1] if self._ends else 0
            self._ends.append(begin + parts[part_index].num_tokens)
        while self._num_shards_joined in self._journal.shards:
            self._num_shards_joined += 1
        joined = self._num_shards_joined * self._shard_tokens
        while (
            self._num_parts_removed < len(self._ends)
            and self._ends[self._num_parts_removed] <= joined
        ):
            with suppress(FileNotFoundError):
                self._preparation.part_path(self._num_parts_removed).unlink()
            self._num_parts_removed += 1

    def _has_part(self, part_index: int) -> bool:
        return part_index in self._journal.parts

    def _size_of(self, part_index: int) -> int:
        return sum(each.size_bytes for each in self._parts[part_index])


def cut_files(
    files: Sequence[SourceFile], engine: Engine, *, skip_bad: bool = False
) -> Iterator[Slice]:
    """Yield the slices of all files, in order. The engine looks into large files.

    Raises as `decod.data.engine.run_tasks`.
    """
    large = ((i, file) for i, file in enumerate(files) if file.size_bytes > PART_SIZE_BYTES)

    def next_task() -> EngineTask | None:
        file_index, file = next(large, (0, None))
        cut = functools.partial(cut_file, skip_bad=skip_bad)
        return None if file is None else EngineTask(("file", file_index), cut, (file,))

    cut = dict(run_tasks(engine, next_task))
    for file_index, file in enumerate(files):
        yield from cut.get(("file", file_index), [whole(file)])

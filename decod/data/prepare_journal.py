"""The journal of a preparation: which parts and shards are done, so that a killed one goes on.

Each line is a JSON object, and is on the disk before anything relies on it. A line that a kill cut
off counts as not written.
"""

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from decod.data.index import ShardEntry
from decod.data.sources import BadRecord
from decod.files import sync_folder

NUM_PLACES_MAX = 10
"""How many records that were left out are named."""

_FILE = "journal.jsonl"


def has_journal(folder: Path) -> bool:
    """Return whether something is done of the preparation in a folder."""
    try:
        return (folder / _FILE).stat().st_size > 0
    except OSError:
        return False


class PartResult(BaseModel):
    """What came of a part."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_tokens: int
    num_bad: int = 0
    """Number of records that were left out."""
    bad: tuple[BadRecord, ...] = ()
    """The first of them, up to `NUM_PLACES_MAX`."""


class _Record(BaseModel):
    """One line: a part that is done, a shard, or the start of the move."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    part_index: int | None = None
    part: PartResult | None = None
    shard_index: int | None = None
    shard: ShardEntry | None = None
    moving: bool = False


class PrepareJournal:
    """What is done of a preparation. As a context, it closes its file.

    Args:
        folder: The preparation's folder, which may hold an earlier journal.
    """

    def __init__(self, folder: Path) -> None:
        self.parts: dict[int, PartResult] = {}
        """The parts that are done, by index."""
        self.shards: dict[int, ShardEntry] = {}
        """Entries of the shards that are done, by index."""
        self.moving = False
        """Whether the corpus is complete, and its files may have begun to move into place."""
        self._file = (folder / _FILE).open("a+b")
        self._read()
        sync_folder(folder)

    @property
    def empty(self) -> bool:
        """Whether nothing is done."""
        return not self.parts

    def add_part(self, part_index: int, part: PartResult) -> None:
        """Note that a part's file is complete."""
        self._append(_Record(part_index=part_index, part=part))

    def add_shard(self, shard_index: int, shard: ShardEntry) -> None:
        """Note that a shard's file is complete."""
        self._append(_Record(shard_index=shard_index, shard=shard))

    def begin_move(self) -> None:
        """Note that the files of the corpus move into place from now on."""
        self._append(_Record(moving=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def _append(self, record: _Record) -> None:
        line = record.model_dump_json(exclude_defaults=True) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._take(record)

    def _take(self, record: _Record) -> None:
        if record.part_index is not None and record.part is not None:
            self.parts[record.part_index] = record.part
        if record.shard_index is not None and record.shard is not None:
            self.shards[record.shard_index] = record.shard
        self.moving = self.moving or record.moving

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for line in self._file.readlines():
            try:
                record = _Record.model_validate_json(line, strict=True)
            except ValidationError:
                break
            if not line.endswith(b"\n"):
                break
            self._take(record)
            end += len(line)
        self._file.truncate(end)

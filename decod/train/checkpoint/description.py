"""A donor's description of a state: its tensors, and the chunks in which it is transferred.

    {"tensors":[{"name":..,"dtype":..,"shape":..,"offset":..,"num_bytes":..,"sha256":..},..],
     "chunks":"<sha256 of the first chunk, hexadecimal><of the second>.."}

A chunk is a piece of one tensor, 4 MiB or the rest of it. The places of chunks follow from the
tensors, so the description contains only their hashes. The hash of the whole text identifies the
state. Members that hold the same bits give the same text, and each of them can send any chunk. The
receiver verifies chunk by chunk, so it can change donors in the middle without losing anything.

`Transfer` is a state on its way to this host: its destination and its progress. The code that
fetches states (`decod.net`) and the code that uses them (`decod.driver`, `decod.daemon`) do not
know each other. Both know this module.

Imports no torch, because the node process serves and fetches states.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from decod.errors import CheckpointError
from decod.ids import NodeId
from decod.train.checkpoint.entries import (
    DTYPE_BYTES,
    MASTER_PREFIX,
    MOMENTUM_PREFIX,
    PENDING_PREFIX,
    StateBytes,
    TensorEntry,
    parse_entries,
    refused_state,
)

CHUNK_SIZE_BYTES = 4 << 20
"""Longest chunk, which is the loss from a wrong or lost one. Hashing it takes milliseconds."""

ALIGNMENT_BYTES = 64
"""Every tensor of a blob starts at a multiple of this, so any dtype can be read in place."""

_DIGEST_SIZE = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one tensor of a blob."""

    offset: int
    num_bytes: int
    sha256: str
    index: int = 0
    """Its number among the chunks that the donor has described."""


@dataclass(frozen=True, slots=True)
class Description:
    """A state as its donor describes it. Valid in itself."""

    text: str
    entries: tuple[TensorEntry, ...]
    """Entries in the order of their offsets, which follow from the blob's layout."""
    chunks: tuple[Chunk, ...]
    num_bytes: int
    """Size of the blob, including the gaps between tensors, whose content is undefined."""
    id: str = field(init=False)
    """SHA-256 of the text, which identifies the state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", hashlib.sha256(self.text.encode()).hexdigest())


def aligned(num_bytes: int) -> int:
    """Return the room that a tensor takes in a blob, in bytes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def placed(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return entries with their offsets in a blob, in this order."""
    result = []
    offset = 0
    for entry in entries:
        result.append(replace(entry, offset=offset))
        offset += aligned(entry.num_bytes)
    return tuple(result)


def cut(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the offset in the blob and the length of each chunk of a tensor."""
    for start in range(0, entry.num_bytes, CHUNK_SIZE_BYTES):
        yield entry.offset + start, min(CHUNK_SIZE_BYTES, entry.num_bytes - start)


def hash_tensor(pieces: Iterable[memoryview | bytes]) -> tuple[str, list[str]]:
    """Return the hashes of a tensor and of its chunks, from its bytes chunk by chunk."""
    whole = hashlib.sha256()
    digests = []
    for piece in pieces:
        # One pass over memory: the second hash finds the piece in the cache.
        whole.update(piece)
        digests.append(hashlib.sha256(piece).hexdigest())
    return whole.hexdigest(), digests


def describe_blob(
    entries: Sequence[TensorEntry], data: memoryview
) -> tuple[list[TensorEntry], list[str]]:
    """Return the entries with the hashes of their content in a blob, and the hashes of all chunks.

    Args:
        entries: Places of the tensors. Their `sha256` is ignored.
        data: The blob.
    """
    described = []
    digests = []
    for entry in entries:
        pieces = (data[offset : offset + size] for offset, size in cut(entry))
        whole, chunks = hash_tensor(pieces)
        described.append(replace(entry, sha256=whole))
        digests += chunks
    return described, digests


def entry_json(entry: TensorEntry) -> dict[str, object]:
    """Return an entry as a JSON object."""
    return asdict(entry) | {"shape": list(entry.shape)}


def description_text(tensors: Sequence[object], chunks: str) -> str:
    """Return the canonical text that describes a state.

    Args:
        tensors: JSON objects of the entries.
        chunks: Concatenated hashes of all chunks.
    """
    return json.dumps({"tensors": tensors, "chunks": chunks}, separators=(",", ":"))


def parse_description(text: str) -> Description:
    """Parse the description of a state by a donor, or from an own file.

    Raises:
        CheckpointError: The text is not a description, or describes something impossible.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or set(values) != {"tensors", "chunks"}:
        raise refused_state(["its description is unreadable"])
    entries = tuple(parse_entries(values["tensors"]))
    _check_places(entries)
    places = [place for entry in entries for place in cut(entry)]
    digests = values["chunks"]
    if (
        not isinstance(digests, str)
        or len(digests) != _DIGEST_SIZE * len(places)
        or not set(digests) <= set("0123456789abcdef")
    ):
        raise refused_state([f"the hashes of its {len(places)} chunks are malformed"])
    chunks = tuple(
        Chunk(offset, size, digests[_DIGEST_SIZE * k : _DIGEST_SIZE * (k + 1)], k)
        for k, (offset, size) in enumerate(places)
    )
    num_bytes = sum(aligned(entry.num_bytes) for entry in entries)
    return Description(text, entries, chunks, num_bytes)


def part_of(description: Description, names: Collection[str]) -> Description:
    """Return the part of a state that holds some tensors, one behind the other.

    Its chunks have their numbers in the whole.

    Raises:
        CheckpointError: None of them is there.
    """
    chunks = iter(description.chunks)
    kept = list[tuple[TensorEntry, list[Chunk]]]()
    for entry in description.entries:
        own = [next(chunks) for _ in cut(entry)]
        if entry.name in names:
            kept.append((entry, own))
    if not kept:
        raise refused_state(["nothing of it is wanted here"])
    entries = placed(entry for entry, _ in kept)
    moved = [
        replace(chunk, offset=entry.offset + chunk.offset - old.offset)
        for entry, (old, own) in zip(entries, kept, strict=True)
        for chunk in own
    ]
    text = description_text(
        [entry_json(entry) for entry in entries], "".join(chunk.sha256 for chunk in moved)
    )
    num_bytes = sum(aligned(entry.num_bytes) for entry in entries)
    return Description(text, entries, tuple(moved), num_bytes)


def _check_places(entries: Sequence[TensorEntry]) -> None:
    offset = 0
    for entry in entries:
        expected = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
        if not expected or entry.num_bytes != expected or entry.offset != offset:
            raise refused_state([f"the place of {ascii(entry.name)[:100]} can't be"])
        offset += aligned(entry.num_bytes)


def parameter_hash(entries: Sequence[TensorEntry], data: StateBytes) -> str:
    """Return the hash of a state's parameters that members vote on: see `Layout.hash`.

    Args:
        entries: Entries of the state. For bfloat16 models they must include the optimizer, because
            the parameters are then the master weights.
        data: The blob. It is read, whatever its description says of its hashes.
    """

    def found(entry: TensorEntry) -> str:
        digest = hashlib.sha256()
        for offset, size in cut(entry):
            digest.update(data[offset : offset + size])
        return digest.hexdigest()

    return _hash_of(entries, found)


def described_hash(entries: Sequence[TensorEntry]) -> str:
    """Return the `parameter_hash` of a state that has the hashes of its description."""
    return _hash_of(entries, lambda entry: entry.sha256)


def _hash_of(entries: Sequence[TensorEntry], hash_of: Callable[[TensorEntry], str]) -> str:
    masters = [entry for entry in entries if entry.name.startswith(MASTER_PREFIX)]
    plain = [entry for entry in entries if not entry.name.startswith("optimizer.")]
    digests = [_section_hash(masters or plain, MASTER_PREFIX, hash_of)]
    for prefix in (MOMENTUM_PREFIX, PENDING_PREFIX):
        section = [entry for entry in entries if entry.name.startswith(prefix)]
        if section:
            digests.append(_section_hash(section, prefix, hash_of))
    return joined_hash(digests)


def joined_hash(digests: Sequence[str]) -> str:
    """Return one hash for those of several buffers; the hash itself if there is only one."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _section_hash(
    entries: Sequence[TensorEntry], prefix: str, hash_of: Callable[[TensorEntry], str]
) -> str:
    """Return the hash of one flat buffer: see `Layout.hash`."""
    named = sorted((entry.name.removeprefix(prefix), entry) for entry in entries)
    digest = hashlib.sha256()
    for name, entry in named:
        digest.update(hashed_line(name, f"torch.{entry.dtype}", entry.shape, hash_of(entry)))
    return digest.hexdigest()


def hashed_line(name: str, dtype: object, shape: tuple[int, ...], sha256: str) -> bytes:
    """Return what a tensor adds to the hash of a buffer."""
    return f"{name} {dtype} {shape} {sha256}\n".encode()


def unlike_hash(stage_index: int, iteration: int) -> CheckpointError:
    """Return the error for a state that is not the one voted on."""
    return CheckpointError(
        f"the state of stage {stage_index} after iteration {iteration} is another one's",
        why="its parameters do not hash to what the members voted on",
        fix="nothing: another donor is asked",
        code="E-CKP-002",
    )


_COPY_LEAST_BYTES_PER_S = 5e7
"""Every device and disk copies and hashes a state faster than this."""


def copy_max_s(size_bytes: int) -> float:
    """Return how long a host may take to copy a state of this size, in seconds."""
    return size_bytes / _COPY_LEAST_BYTES_PER_S


@dataclass(slots=True)
class Transfer:
    """Progress of a state on its way."""

    stage_index: int
    iteration: int
    num_bytes: int = 0
    """Size of all chunks; 0 until it is known."""
    num_arrived: int = 0
    """Bytes of verified chunks that are here."""
    num_local: int = 0
    """The part of `num_arrived` that was found on this host."""
    begun_s: float = 0.0
    """The instant when the first chunk was requested, by the event loop's clock."""
    from_donors: Counter[NodeId] = field(default_factory=Counter)
    """Bytes from each donor."""


class QuietSink:
    """A sink that shows no progress and has no chunks. Subclasses give the memory."""

    def expect(self, description: Description) -> None:
        """Take any state."""

    def began(self, transfer: Transfer) -> None:
        """Ignore the progress: it is not shown."""

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        """Ignore the failure: the fetch's error names it too."""

    def local(self, chunk: Chunk) -> memoryview | bytes | None:  # noqa: ARG002
        """Return None: no chunks are here."""
        return None


class StateSink(Protocol):
    """The destination of a state. Hears of its progress."""

    def expect(self, description: Description) -> None:
        """Take in what comes next. Called before `allocate`.

        Raises:
            CheckpointError: This is not wanted.
        """

    def allocate(self, size_bytes: int) -> StateBytes | None:
        """Return a buffer for the blob, or None if there is no room. The sink keeps account."""

    def began(self, transfer: Transfer) -> None:
        """Take the transfer's progress, which changes as bytes arrive."""

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        """Take in that the transfer has left a donor."""

    def local(self, chunk: Chunk) -> memoryview | bytes | None:
        """Return a chunk's bytes if this host has them. Called in a thread. The caller verifies."""

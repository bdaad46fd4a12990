"""Chunks of the checkpoint from which a run goes on, read from the store that members share.

The leader describes the first state of each stage. A member that has the store too takes the chunks
from there, so that they don't pass the leader's link. Every chunk is verified by whoever fetches
it. If the store fails, the chunks come from the leader as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decod.errors import CheckpointError
from decod.train.checkpoint.description import Chunk, Description, cut
from decod.train.checkpoint.places import File, opened
from decod.train.checkpoint.shared import SharedStore, find_stored
from decod.train.checkpoint.store import CheckpointTensor, find_tensors


@dataclass(frozen=True, slots=True)
class _Place:
    file: File
    start: int


class StoredChunks:
    """The chunks of one checkpoint in a store.

    Args:
        store: The store.
        sha256: Hash of the checkpoint's manifest.
    """

    def __init__(self, store: SharedStore, sha256: str) -> None:
        self._store, self._sha256 = store, sha256
        self.on_failed: list[Callable[[str], None]] = []
        """Called with the reason if the store fails, in the thread that reads."""
        self._awaited: Description | None = None
        self._tensors: dict[str, CheckpointTensor] | None = None
        """The checkpoint's tensors by their names, once they were looked for."""
        self._places: dict[str, _Place] = {}

    def expect(self, description: Description) -> None:
        """Take in what is about to be fetched."""
        self._awaited = description

    def read(self, chunk: Chunk) -> bytes | None:
        """Return a chunk's bytes if the store has them. Waits for the store. Not verified."""
        try:
            if (awaited := self._awaited) is not None:
                self._awaited, self._places = None, {}
                self._places = self._places_of(awaited)
            place = self._places.get(chunk.sha256)
            if place is None:
                return None
            with opened(place.file) as file:
                return file.read(place.start, chunk.num_bytes)
        except (OSError, CheckpointError) as error:
            self._places = {}
            for told in self.on_failed:
                told(str(error))
            return None

    def _places_of(self, description: Description) -> dict[str, _Place]:
        """Return where the store has the chunks of a state, by their hashes."""
        if self._tensors is None:
            found = find_stored(self._store)
            ours = (e for e in found if e.manifest and e.manifest.sha256 == self._sha256)
            checkpoint = next(ours, None)
            self._tensors = {} if checkpoint is None else find_tensors(checkpoint)
        chunks, places = iter(description.chunks), dict[str, _Place]()
        for entry in description.entries:
            tensor = self._tensors.get(entry.name)
            same = tensor is not None and tensor.entry.sha256 == entry.sha256
            for offset, _ in cut(entry):
                chunk = next(chunks)
                if tensor is not None and same:
                    start = tensor.start + offset - entry.offset
                    places[chunk.sha256] = _Place(tensor.path, start)
        return places

"""Weights that a run does not train, from the Hugging Face Hub: of a model, only what a host holds.

The manifest names the model's commit if the leader has it from the Hub. A host then asks the Hub
for the ranges of the files that its stage needs. They come to lie where they lie in the whole
files, in files that are empty otherwise. So these are read as any model's folder, and a part counts
if it has the hash in the manifest. A host that can't have them there takes them from members.
"""

import asyncio
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from decod.config.schema import Carried, Manifest
from decod.daemon.base_supply import FetchPart
from decod.errors import DataError, DecodError, NetworkError
from decod.files import hub_name
from decod.ids import NodeId
from decod.model.shape import part_shapes
from decod.model.weights import INDEX_FILE, Stored, find_weights
from decod.net.net_limits import LIMITS
from decod.run.model_config import ModelConfig
from decod.tasks import in_thread
from decod.texts import why_of
from decod.train.checkpoint.base import ArrivingPart, BaseSource
from decod.train.checkpoint.initial_state import InitialState

SECOND_COPY = "consolidated"
"""The beginning of the names of weights that some models hold once more, in another format."""

_BEGINNING_BYTES = 128 << 10
"""Nearly all headers of safetensors are shorter."""
_HEADER_MAX_BYTES = 100_000_000
"""The limit of the safetensors library."""
_INDEX_MAX_BYTES = 64 << 20
_FILES_MAX = 1000
_DESCRIBING_MAX_S = 180.0
_DESCRIBED_MAX_BYTES = 256 << 20
"""All headers and the index. A manifest names the model, so anybody may have put it there."""
_TRIES = 4
"""At a range, without any byte in between."""
_PAUSE_S = 1.0


class _AbandonedError(Exception):
    """Nobody needs the weights any more."""


class HubBase:
    """The parts of a model on the Hub. Once it fails, it is not asked again.

    Args:
        name: ORG/NAME.
        commit: The commit, as the manifest names it.
        model: The run's.
        source: The hashes of the parts, and where they go.
        take: Waits until so many bytes more may be taken.
    """

    def __init__(
        self,
        name: str,
        commit: str,
        model: ModelConfig,
        source: BaseSource,
        take: Callable[[int], None],
    ) -> None:
        self._name = name
        self._commit = commit
        self._model = model
        self._source = source
        self._take = take
        self._folder = source.cache / "base" / f"hub-{commit}"
        self._places: dict[str, tuple[Stored, ...]] = {}
        self._abandoned = threading.Event()

    def before(self, fetch: FetchPart, note: Callable[..., None]) -> FetchPart:
        """Return what fetches a part from the Hub, and with `fetch` if the Hub does not give it.

        Args:
            fetch: Fetches it from members.
            note: Takes the name of an event, and its fields as keywords.
        """

        async def fetch_first(sha256: str, donors: Sequence[NodeId], sink: ArrivingPart) -> None:
            if not self._abandoned.is_set():
                try:
                    found = await self._fetch_in_time(sha256)
                    # Not before: nobody else may write there while it is copied.
                    await in_thread(lambda: sink.take_in(found))
                    await in_thread(self._empty)
                except asyncio.CancelledError:
                    self._abandoned.set()
                    raise
                except Exception as error:  # noqa: BLE001 - whatever the Hub says, members have it.
                    self._abandoned.set()
                    note("base.hub_failed", reason=_reason(error))
                    await in_thread(self._remove)
                else:
                    return
            await fetch(sha256, donors, sink)

        return fetch_first

    async def _fetch_in_time(self, sha256: str) -> InitialState:
        """Return a part. A Hub that hangs or drips raises TimeoutError."""
        if not self._places:
            await asyncio.wait_for(in_thread(self._describe), _DESCRIBING_MAX_S)
        part = self._source.hashes.index(sha256)
        shapes = part_shapes(self._model, part).values()
        # Files may hold wider numbers than the run does.
        most_bytes = 8 * sum(map(math.prod, shapes))
        time_max_s = LIMITS.rate_grace_s + most_bytes / LIMITS.rate_min_bytes_per_s
        return await asyncio.wait_for(in_thread(lambda: self._fetch(part)), time_max_s)

    def _fetch(self, part: int) -> InitialState:
        """Return a part.

        Raises:
            CheckpointError: A value is not finite.
            DataError: The Hub has another model than the run's.
            NetworkError: The Hub can't be reached, or refuses.
            OSError: The disk can't be written, or has no room.
        """
        wanted = [each for name in part_shapes(self._model, part) for each in self._places[name]]
        if self._source.room is not None:
            self._source.room.require(sum(place.num_bytes for place in wanted))
        for path, start, end in _joined(wanted):
            with path.open("r+b") as file:
                file.seek(start)
                for piece in self._pieces(path.name, start, end):
                    file.write(piece)
        found = replace(self._source, folder=self._folder).find(self._model, part)
        assert found is not None, "a folder has all parts"
        return found

    def _remove(self) -> None:
        self._places = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _describe(self) -> None:
        """Write the model's files without their tensors, and read the places of these."""
        self._remove()
        self._folder.mkdir(parents=True)
        left_bytes = _DESCRIBED_MAX_BYTES
        for file, size_bytes in self._files():
            if file == INDEX_FILE:
                beginning = self._read(file, 0, min(size_bytes, _INDEX_MAX_BYTES))
            else:
                beginning = self._read(file, 0, min(size_bytes, _BEGINNING_BYTES))
                end = min(8 + int.from_bytes(beginning[:8], "little"), size_bytes)
                end = min(end, _HEADER_MAX_BYTES)
                beginning = beginning[:end] + self._read(file, len(beginning), end)
            left_bytes -= len(beginning)
            if left_bytes < 0:
                raise DataError(
                    f"the files of {self._name} on the Hub are no model's",
                    why=f"their headers have more than {_DESCRIBED_MAX_BYTES >> 20} MiB",
                    fix="nothing: members have these weights",
                    code="E-DAT-063",
                )
            with (self._folder / file).open("wb") as out:
                out.write(beginning)
                out.truncate(size_bytes)
        self._places = dict(find_weights(self._folder, self._model).places)

    def _empty(self) -> None:
        """Give back the room of tensors."""
        starts = {place.path: 0 for places in self._places.values() for place in places}
        for path in starts:
            size_bytes = path.stat().st_size
            first = min(p.start for each in self._places.values() for p in each if p.path == path)
            os.truncate(path, first)
            os.truncate(path, size_bytes)

    # --- the Hub --------------------------------------------------------------------------------

    def _files(self) -> list[tuple[str, int]]:
        """Return the names and sizes of the files that hold weights, and of their index."""
        from huggingface_hub import HfApi, RepoFile, errors

        api = HfApi(library_name="decod")
        try:
            tree = api.list_repo_tree(self._name, revision=self._commit)
            listed = [*islice(tree, _FILES_MAX)]
        except (errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
            raise self._unreachable(error) from None
        return [
            (each.path, each.size)
            for each in listed
            if isinstance(each, RepoFile)
            and "/" not in each.path
            and not each.path.startswith(SECOND_COPY)
            and (each.path == INDEX_FILE or each.path.endswith(".safetensors"))
        ]

    def _read(self, file: str, start: int, end: int) -> bytes:
        return b"".join(self._pieces(file, start, end)) if end > start else b""

    def _pieces(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range. After a broken connection, it goes on where it was."""
        from huggingface_hub import (
            constants,
            errors,
            get_session,
            hf_hub_url,
            hf_raise_for_status,
        )
        from huggingface_hub.utils._headers import build_hf_headers

        url = hf_hub_url(self._name, file, revision=self._commit)
        headers = build_hf_headers(library_name="decod") | {"Accept-Encoding": "identity"}
        failures = (errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        left = _TRIES
        while start < end:
            self._require_wanted()
            headers["Range"] = f"bytes={start}-{end - 1}"
            before = start
            try:
                with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as answer:
                    hf_raise_for_status(answer)
                    if answer.status_code != 206 and start:
                        raise ValueError(f"it answers {answer.status_code} to a range")
                    for piece in answer.iter_raw():
                        self._require_wanted()
                        self._take(len(piece))
                        wanted = piece[: end - start]
                        start += len(wanted)
                        yield wanted
                        if start == end:
                            return
            except failures as error:
                failure: Exception = error
            else:
                failure = ValueError("an answer ends too early")
            left = _TRIES if start > before else left - 1
            if left == 0:
                raise self._unreachable(failure) from None
            time.sleep(_PAUSE_S)

    def _require_wanted(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError

    def _unreachable(self, error: Exception) -> NetworkError:
        # Its text may hold the token.
        status = getattr(getattr(error, "response", None), "status_code", None)
        return NetworkError(
            f"the Hub does not give {self._name}",
            why=f"it answers {status}" if status else type(error).__name__,
            fix="nothing: members have these weights",
            code="E-NET-041",
        )


def _reason(error: Exception) -> str:
    """Return why the Hub is not asked any more. The text of another's error may hold the token."""
    if isinstance(error, DecodError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "the Hub is too slow"
    if isinstance(error, OSError):
        return f"this host can't keep it: {why_of(error)}"
    return f"the Hub answers what huggingface_hub can't read ({type(error).__name__})"


def hub_model_of(manifest: Manifest) -> tuple[str, str] | None:
    """Return the name and the commit of the model that a run adapts. None: it has no such."""
    found = hub_name(Carried.from_text(manifest.carried).base_model)
    if not manifest.base or found is None or not found[1]:
        return None
    from huggingface_hub import constants

    return None if constants.HF_HUB_OFFLINE else found


def _joined(places: Iterable[Stored]) -> Iterator[tuple[Path, int, int]]:
    """Yield the ranges of files that some tensors take: those side by side as one."""
    path, start, end = Path(), 0, 0
    for place in sorted(places, key=lambda each: (str(each.path), each.start)):
        if (place.path, place.start) != (path, end):
            if end:
                yield path, start, end
            path, start = place.path, place.start
        end = place.start + place.num_bytes
    if end:
        yield path, start, end

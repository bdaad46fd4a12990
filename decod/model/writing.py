"""Writing of models and adapters in pieces, so that none is ever in memory as a whole.

The header of the safetensors file follows from the model's configuration. Every byte therefore has
its place before the first tensor is here, and tensors may come in any order. Imports no torch,
because the node process exports models.
"""

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from decod.errors import DataError
from decod.files import PieceFile
from decod.model.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    PEFT_PREFIX,
    adapter_fields,
    all_adapters,
)
from decod.model.hf import config_to_hf
from decod.model.shape import StoredTensors, stored_tensors
from decod.model.weights import INDEX_FILE, WEIGHTS_FILE, header_bytes
from decod.run.adapter_config import NO_ADAPTER, AdapterConfig, AdapterKind
from decod.run.model_config import ModelConfig
from decod.texts import why_of


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ModelWriter:
    """Writes `config.json` and `model.safetensors` of a folder, in the format of transformers.

    Of an adapter, it writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT does.

    A reader of the folder sees the old files until `finish`, and the complete new ones afterwards.
    All methods wait for the disk. They raise DataError (E-DAT-014) if it refuses.

    Args:
        folder: Created if missing. Existing files of these names are replaced.
        model: The model. Weights are stored in its dtype.
        adapter: What is written, if it is not the whole model.
        base: Folder of the model that the adapter changes, or its name.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        adapter: AdapterConfig = NO_ADAPTER,
        base: str | None = None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._adapter = adapter
        self._base = base
        whole = adapter.kind is AdapterKind.NONE
        prefix = "" if whole else PEFT_PREFIX
        self._names = (WEIGHTS_FILE, "config.json") if whole else (ADAPTER_FILE, ADAPTER_CONFIG)
        parts = stored_tensors(model)
        if not whole:
            parts = {n: ((n, shape),) for n, shape in all_adapters(model, adapter).items()}
        places = _places(model, parts)
        header = header_bytes([replace(place, name=prefix + place.name) for place in places])
        offsets = {place.name: place.offset for place in places}
        self.starts = {name: len(header) + offsets[keys[0][0]] for name, keys in parts.items()}
        """Where each parameter begins in the file, in bytes."""
        self._size_bytes = len(header) + sum(place.num_bytes for place in places)
        self._is_new = not folder.exists()
        with _refusals_told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
            self._path = self._scratch / "weights"
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.file = PieceFile(descriptor)
        """The new weights. Each parameter is to be written from its start on."""
        try:
            with _refusals_told(folder):
                self._require_room()
                self.file.resize(self._size_bytes)
                self.file.write_at(0, header)
        except DataError:
            self.close()
            raise

    def _require_room(self) -> None:
        # Or the disk would be full after all tensors but the last have come over slow links.
        if shutil.disk_usage(self._folder).free < self._size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, name: str, weights: memoryview) -> None:
        """Write a parameter.

        Args:
            name: From `model_shapes` or `adapter_shapes`.
            weights: All bytes of the parameter, in the model's dtype.
        """
        with _refusals_told(self._folder):
            self.file.write_at(self.starts[name], weights)

    def finish(self) -> None:
        """Have the files take their places. Every parameter must have been written."""
        config = self._scratch / "config"
        whole = self._adapter.kind is AdapterKind.NONE
        fields = (
            config_to_hf(self._model)
            if whole
            else adapter_fields(self._model, self._adapter, self._base)
        )
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        with _refusals_told(self._folder):
            self.file.close()
            config.write_text(text, encoding="utf-8")
            # A temporary folder's files may be private, whatever the user's umask.
            self._path.chmod(config.stat().st_mode)
            for path, name in zip((self._path, config), self._names, strict=True):
                _sync(path)
                path.replace(self._folder / name)
            if whole:
                # A leftover index of a sharded model would win over the file just written.
                (self._folder / INDEX_FILE).unlink(missing_ok=True)
            _sync(self._folder)

    def close(self) -> None:
        """Remove what has not taken its place."""
        self.file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._is_new:
            with suppress(OSError):  # It holds the model.
                self._folder.rmdir()


def _places(model: ModelConfig, parameters: StoredTensors) -> list[_Place]:
    """Return the places of tensors, in the order of the parameters' names."""
    places = list[_Place]()
    offset = 0
    for _, parts in sorted(parameters.items()):
        for key, shape in parts:
            num_bytes = math.prod(shape) * model.dtype.num_bytes
            places.append(_Place(key, model.dtype.value, shape, offset, num_bytes))
            offset += num_bytes
    return places


@contextmanager
def _refusals_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, why_of(error)) from error


def unwritable(folder: Path, why: str) -> DataError:
    """Return the error for a model folder that the disk refuses."""
    return DataError(
        f"cannot write the model to {folder}",
        why=why,
        fix="check free space and permissions, or give another folder",
        code="E-DAT-014",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

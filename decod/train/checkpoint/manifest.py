"""`manifest.json` of a checkpoint: its origin, and the hash of everything in it.

The text is canonical (sorted keys, no spaces) and contains the SHA-256 of itself without that
field, so any change of a byte shows. The tensor files contain nothing that does not follow from it:
a header that is made from the entries, then the tensors one after another.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import pydantic_core

from decod.errors import CheckpointError
from decod.model.weights import header_bytes
from decod.train.checkpoint.entries import DTYPE_BYTES, TensorEntry, parse_entries

FORMAT_VERSION = 1
"""Version of folder and manifest. Grows when an older release could misread a checkpoint."""

MANIFEST_SIZE_MAX_BYTES = 64 << 20
"""Size of the text. An entry has about 250 bytes, and a model of 1000 blocks 40,000 entries."""

SETTINGS_MAX = 1000

_LIMITS = {
    "iteration": range(1, 1 << 48),
    "created_s": range(253_402_300_800),  # To the end of the year 9999, the last in calendars.
    "num_deferred": range(1 << 48),
}

_RUN_ID = re.compile(r"[a-z2-7]{1,64}\Z")

Settings = dict[str, str | int | float | bool]
"""A run's configuration, flat: `model.hidden_size` to its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint. Valid in itself if it was parsed."""

    iteration: int
    """The committed iteration whose result this is, from 1. Iterations are numbered across all runs
    that resume from one another. They decide which tokens are read, so a resumed run needs nothing
    else to continue with the next batch."""
    run_id: str
    """Id of the run that wrote it."""
    created_s: int
    """The instant when the checkpoint was written, in seconds since 1970."""
    loss: float
    """Loss of the iteration, in nats."""
    num_deferred: int
    """Microbatches that were put off to the next iteration. A resumed run does without them."""
    settings: Settings
    """The run's configuration."""
    stages: tuple[tuple[TensorEntry, ...], ...]
    """The tensors of each stage's file, in order. Offsets count from the header's end."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensor files together."""
        return sum(file_size_bytes(entries) for entries in self.stages)

    def _body(self) -> dict[str, Any]:
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        body["stages"] = [[_entry_json(entry) for entry in entries] for entries in self.stages]
        return body | {"format_version": FORMAT_VERSION}

    @property
    def sha256(self) -> str:
        """Hash that identifies the whole checkpoint, 64 hexadecimal digits."""
        return hashlib.sha256(_canonical(self._body())).hexdigest()

    def to_json(self) -> bytes:
        """Return the canonical text."""
        return _canonical(self._body() | {"sha256": self.sha256})


def _entry_json(entry: TensorEntry) -> dict[str, Any]:
    return asdict(entry) | {"shape": list(entry.shape)}


def _canonical(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def parse_manifest(text: bytes) -> CheckpointManifest:
    """Parse a manifest.

    Raises:
        CheckpointError: The text is not exactly the output of `to_json` for a valid manifest.
    """
    try:
        values = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _refuse(f"it is not JSON ({str(error)[:100]})") from None
    names = {field.name for field in fields(CheckpointManifest)} | {"format_version", "sha256"}
    if not isinstance(values, dict) or type(values.get("format_version")) is not int:
        raise _refuse("it is no object with a format_version")
    if values["format_version"] != FORMAT_VERSION:
        raise _refuse(
            f"it has format {values['format_version']}, and this release reads {FORMAT_VERSION}"
        )
    if set(values) != names:
        odd = ", ".join(sorted(ascii(name)[:40] for name in set(values) ^ names)[:3])
        raise _refuse(f"fields are missing or unknown: {odd}")
    manifest = _checked(values)
    if text != manifest.to_json():
        raise _refuse("its own hash does not hold")
    return manifest


def _checked(values: dict[str, Any]) -> CheckpointManifest:
    for name, limits in _LIMITS.items():
        if type(values[name]) is not int or values[name] not in limits:
            raise _refuse(f"{name} is {ascii(values[name])[:40]}")
    if not isinstance(values["run_id"], str) or not _RUN_ID.match(values["run_id"]):
        raise _refuse(f"run_id is {ascii(values['run_id'])[:40]}")
    if type(values["loss"]) is not float:
        raise _refuse(f"loss is {ascii(values['loss'])[:40]}")
    settings = values["settings"]
    stages = values["stages"]
    if not isinstance(settings, dict) or len(settings) > SETTINGS_MAX:
        raise _refuse("settings is no object of a bounded size")
    if any(type(value) not in (str, int, float, bool) for value in settings.values()):
        raise _refuse("a setting is neither text nor number nor truth value")
    if not isinstance(stages, list) or not 2 <= len(stages) <= 1 << 13:
        raise _refuse("stages is no list of two or more")
    return CheckpointManifest(
        iteration=values["iteration"],
        run_id=values["run_id"],
        created_s=values["created_s"],
        loss=values["loss"],
        num_deferred=values["num_deferred"],
        settings=settings,
        stages=tuple(_checked_stage(index, stage) for index, stage in enumerate(stages)),
    )


def _checked_stage(index: int, stage: object) -> tuple[TensorEntry, ...]:
    try:
        entries = parse_entries(stage)
    except CheckpointError as error:
        raise _refuse(f"stage {index}: {error.what}") from None
    offset = 0
    for entry in entries:
        element_bytes = DTYPE_BYTES.get(entry.dtype, 0)
        expected = math.prod(entry.shape) * element_bytes
        # In order and without gaps, so that every byte of the file is covered by a hash.
        if not expected or entry.num_bytes != expected or entry.offset != offset:
            raise _refuse(f"stage {index}: the place of {ascii(entry.name)[:100]} can't be")
        offset += entry.num_bytes
    return tuple(entries)


def _refuse(problem: str) -> CheckpointError:
    return CheckpointError(
        f"manifest.json is refused: {problem}",
        why="it is what everything else in the checkpoint is compared with",
        fix="use an older checkpoint",
        code="E-CKP-010",
    )


def packed(entries: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return entries of a blob with their offsets in a file, which has no gaps."""
    result = []
    offset = 0
    for entry in entries:
        moved = {**asdict(entry), "shape": entry.shape, "offset": offset}
        result.append(TensorEntry(**moved))
        offset += entry.num_bytes
    return tuple(result)


def file_header(entries: tuple[TensorEntry, ...]) -> bytes:
    """Return the beginning of a stage's file: a safetensors header after its length."""
    return header_bytes(entries)


def file_size_bytes(entries: tuple[TensorEntry, ...]) -> int:
    """Return the size of a stage's file."""
    return len(file_header(entries)) + sum(entry.num_bytes for entry in entries)

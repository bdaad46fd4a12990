"""The state that a host must load to go on as the others: parameters, optimizer and scheduler, as
one blob.

    parameter.0, parameter.1, ..   in the order of the optimizer's groups
    state.0.exp_avg, ..            tensors of the wrapped optimizer, by parameter
    guide                          the newest average, if low-rank compression starts from it
    text                           JSON: what is no tensor

The blob is described as a stage's state is, in `decod.train.checkpoint.description`, so nodes serve
and fetch it in hashed chunks. Level hosts describe the same bits, so chunks may come from all of
them. A gradient scaler is not in it: each host has its own.

A blob comes from other hosts. It is checked as a whole before anything changes.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decod.errors import CheckpointError, ConfigError, HardwareError
from decod.memory_files import new_memory_file
from decod.optimizer.parameters import Parameters, all_finite
from decod.train.checkpoint.description import (
    Description,
    aligned,
    describe_blob,
    description_text,
    entry_json,
    hash_tensor,
    parse_description,
    placed,
)
from decod.train.checkpoint.description import cut as cut_tensor
from decod.train.checkpoint.entries import DTYPE_BYTES, TensorEntry, refused_state
from decod.train.committed_state import SnapshotLayout
from decod.train.layout import byte_view
from decod.train.start import blob_pieces, filled, misfit

_TEXT = "text"
_GUIDE = "guide"
_TEXT_SIZE_MAX_BYTES = 64 << 20


class TrainingState:
    """Parameters, optimizer and scheduler of a loop, to be copied and replaced.

    Args:
        parameters: What is trained.
        wrapped: The user's optimizer.
        scheduler: Stepped once a round. None: there is none.
    """

    def __init__(
        self, parameters: Parameters, wrapped: torch.optim.Optimizer, scheduler: Any
    ) -> None:
        self._parameters = parameters
        self._wrapped = wrapped
        self._scheduler = scheduler
        self._names = [set(group) - {"params", "param_names"} for group in wrapped.param_groups]
        """The names of each group's options. A scheduler that the loop makes later adds others, at
        one host sooner than at another."""

    # --- copying ------------------------------------------------------------------------------

    def layout(
        self, values: Sequence[Tensor], round_number: int, guide_P: Tensor | None
    ) -> SnapshotLayout:
        """Return the blob's tensors and their places. They are views: write them before a step.

        Args:
            values: Of the parameters.
            round_number: The newest round that is in them.
            guide_P: The newest average, or None.

        Raises:
            ConfigError: The optimizer or scheduler keeps something that can't be copied.
        """
        found = {f"parameter.{k}": value for k, value in enumerate(values)}
        states = [
            self._encoded(self._wrapped.state.get(parameter, {}), f"state.{k}", found)
            for k, parameter in enumerate(self._parameters.tensors)
        ]
        groups = [
            self._encoded(options, f"group.{k}", found) for k, options in enumerate(self._options())
        ]
        scheduled: Any = {} if self._scheduler is None else self._scheduler.state_dict()
        scheduler = self._encoded(scheduled, "scheduler", found)
        if guide_P is not None:
            found[_GUIDE] = guide_P
        said = {"round": round_number, "states": states, "groups": groups, "scheduler": scheduler}
        text = json.dumps(said, separators=(",", ":"), sort_keys=True).encode()
        found[_TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        entries = placed(_entry(name, tensor) for name, tensor in found.items())
        num_bytes = entries[-1].offset + aligned(entries[-1].num_bytes)
        return SnapshotLayout(entries, tuple(found.values()), num_bytes)

    def _options(self) -> list[dict[str, Any]]:
        pairs = zip(self._wrapped.param_groups, self._names, strict=True)
        return [{key: group[key] for key in group if key in names} for group, names in pairs]

    def _encoded(self, value: object, name: str, tensors: dict[str, Tensor]) -> object:
        """Return a value as JSON. Put its tensors into `tensors`, by names of their own."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Tensor() if str(value.dtype).removeprefix("torch.") in DTYPE_BYTES:
                if value.numel():
                    tensors[name] = value
                kind = str(value.dtype).removeprefix("torch.")
                return {"tensor": name, "dtype": kind, "shape": [*value.shape]}
            case tuple() | list():
                items = [self._encoded(v, f"{name}.{k}", tensors) for k, v in enumerate(value)]
                return {"tuple" if isinstance(value, tuple) else "list": items}
            case dict():
                pairs = [
                    [self._encoded(k, "", {}), self._encoded(v, f"{name}.{k}", tensors)]
                    for k, v in value.items()
                ]
                return {"dict": pairs}
        raise ConfigError(
            f"{name} of {type(self._wrapped).__name__} is a {type(value).__qualname__}",
            why="a host that joins later must load what this optimizer and its scheduler keep, and "
            "only numbers, texts, tensors, lists and dictionaries can be sent",
            fix="use an optimizer and scheduler from torch.optim, or one that keeps only those",
            code="E-CFG-092",
        )

    # --- replacing ----------------------------------------------------------------------------

    def load(self, blob: Tensor, description: Description, round_number: int) -> Tensor | None:
        """Replace everything by what a blob holds.

        Args:
            blob: uint8 on the CPU.
            description: Of the blob.
            round_number: The newest round that must be in it.

        Returns:
            The newest average, (P,) on the CPU, if low-rank compression starts from it.

        Raises:
            CheckpointError: The blob is not what it must be. Nothing has changed.
        """
        tensors = _read(blob, description.entries)
        try:
            said = json.loads(byte_view(tensors.pop(_TEXT)).tobytes())
            states = [dict(_decoded(value, tensors)) for value in said["states"]]
            groups = [dict(_decoded(value, tensors)) for value in said["groups"]]
            scheduled = dict(_decoded(said["scheduler"], tensors))
            found_round = said["round"]
        except (
            *(LookupError, TypeError, ValueError, RecursionError),
            *(AttributeError, RuntimeError),
        ) as error:
            raise refused_state(["its text is unreadable"]) from error
        if found_round != round_number:
            raise refused_state([f"it is of round {str(found_round)[:20]}, not {round_number}"])
        values = self._checked_values(tensors)
        self._check_others(states, groups, scheduled)
        with torch.no_grad():
            for parameter, value in zip(self._parameters.tensors, values, strict=True):
                parameter.copy_(value)
        for parameter, state in zip(self._parameters.tensors, states, strict=True):
            self._wrapped.state[parameter] = {
                key: self._on_device(key, value, parameter) for key, value in state.items()
            }
        for group, options in zip(self._wrapped.param_groups, groups, strict=True):
            group.update(_like(group, options))
        if self._scheduler is not None:
            own = self._scheduler.state_dict()
            self._scheduler.load_state_dict(_like(own, scheduled))
        return tensors.get(_GUIDE)

    def _on_device(self, key: object, value: object, parameter: Tensor) -> object:
        """Return an optimizer's value where torch's optimizers keep it."""
        if not isinstance(value, Tensor):
            return value
        (group,) = (
            group
            for group in self._wrapped.param_groups
            if any(each is parameter for each in group["params"])
        )
        counts_on_device = group.get("capturable") or group.get("fused")
        is_count = key == "step" and value.dim() == 0
        return value if is_count and not counts_on_device else value.to(parameter.device)

    def _checked_values(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        values = list[Tensor]()
        for index, parameter in enumerate(self._parameters.tensors):
            value = tensors.get(f"parameter.{index}")
            if value is None or (value.dtype, value.shape) != (parameter.dtype, parameter.shape):
                raise refused_state([f"parameter {index} is missing or another one"])
            values.append(value)
        if not all_finite(values):
            raise refused_state(["a parameter is not finite"])
        guide_P = tensors.get(_GUIDE)
        if guide_P is not None and (
            (guide_P.dtype, guide_P.shape)
            != (self._parameters.wide, (self._parameters.num_elements,))
            or not all_finite([guide_P])
        ):
            raise refused_state(["its newest average is another one's"])
        return values

    def _check_others(
        self, states: Sequence[Any], groups: Sequence[Any], scheduled: Mapping[Any, Any]
    ) -> None:
        problems = []
        if len(states) != len(self._parameters.tensors):
            problems.append("it is of another number of parameters")
        if [_kinds(options) for options in groups] != [*map(_kinds, self._options())]:
            problems.append("the optimizer's groups are others")
        own: Any = {} if self._scheduler is None else self._scheduler.state_dict()
        if set(scheduled) != set(own):
            problems.append("the scheduler is another one")
        if problems:
            raise refused_state(problems)


def _like(own: Mapping[Any, Any], loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return loaded values in the form of a host's own: counters, and tensors on their devices."""
    found = dict(loaded)
    for key, value in loaded.items():
        if isinstance(own[key], Counter):
            found[key] = Counter(value)
        elif isinstance(own[key], Tensor) and isinstance(value, Tensor):
            found[key] = value.to(own[key].device)
    return found


def _kinds(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of a group's options, by name. Whole numbers are numbers too."""
    numbers = ("int", "float")
    names = {key: type(value).__name__ for key, value in options.items()}
    return {key: "number" if name in numbers else name for key, name in names.items()}


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, kind, tuple(tensor.shape), 0, tensor.numel() * tensor.itemsize, "")


def _read(blob: Tensor, entries: Sequence[TensorEntry]) -> dict[str, Tensor]:
    """Return all tensors of a blob, in new memory.

    Raises:
        CheckpointError: One is not what its entry says.
    """
    found = {}
    pieces = blob_pieces(byte_view(blob))
    for entry in entries:
        if entry.name == _TEXT and entry.num_bytes > _TEXT_SIZE_MAX_BYTES:
            raise refused_state([f"its text has {entry.num_bytes} bytes"])
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        problem = misfit(entry, tensor.dtype, entry.shape)
        if problem := problem or filled(tensor.view(-1), entry, pieces(entry)):
            raise refused_state([problem])
        found[entry.name] = tensor
    if _TEXT not in found or found[_TEXT].dtype != torch.uint8:
        raise refused_state(["it has no text"])
    return found


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_encoded` has made JSON of."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        shape = value["shape"]
        dtype = getattr(torch, str(value["dtype"]))
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return tensors[value["tensor"]]
    ((kind, items),) = value.items()
    if kind == "dict":
        return {_decoded(k, tensors): _decoded(v, tensors) for k, v in items}
    decoded = [_decoded(item, tensors) for item in items]
    return tuple(decoded) if kind == "tuple" else decoded


# --- files ------------------------------------------------------------------------------------


def describe(layout: SnapshotLayout) -> Description:
    """Return the description of a state, without a copy of it."""
    entries = list[TensorEntry]()
    digests = list[str]()
    for place, tensor in zip(layout.places, layout.tensors, strict=True):
        view = byte_view(tensor.detach().cpu().contiguous())
        start = place.offset
        pieces = (view[at - start : at - start + size] for at, size in cut_tensor(place))
        whole, chunks = hash_tensor(pieces)
        entries.append(replace(place, sha256=whole))
        digests += chunks
    return parse_description(description_text([entry_json(e) for e in entries], "".join(digests)))


class StateFile:
    """A file with a copy of a state, in shared memory if that has room for it.

    Args:
        num_bytes: Of the state.

    Raises:
        HardwareError: There is no room for it.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            descriptor, self.path = new_memory_file(num_bytes)
        except OSError as error:
            raise _no_room(num_bytes, error) from error
        try:
            self._blob = torch.frombuffer(mmap(descriptor, num_bytes), dtype=torch.uint8)
        except OSError as error:
            self.remove()
            raise _no_room(num_bytes, error) from error
        finally:
            os.close(descriptor)

    def fill(self, layout: SnapshotLayout) -> None:
        """Copy a state into the file."""
        layout.copy(self._blob)

    def describe(self, layout: SnapshotLayout) -> str:
        """Return the description of what `fill` has copied. Takes long: it hashes all of it."""
        entries, chunks = describe_blob(layout.places, byte_view(self._blob))
        return description_text([entry_json(entry) for entry in entries], "".join(chunks))

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _no_room(num_bytes: int, error: OSError) -> HardwareError:
    return HardwareError(
        f"no room for a copy of the state, {num_bytes / 1e6:.1f} MB",
        why=f"hosts that join load it from there, and can't join now ({error.strerror})",
        fix="give /dev/shm more room, in a container with `docker run --shm-size=...`; or free "
        "disk space in /tmp",
        code="E-HW-021",
    )


def read_file(path: Path, description: Description) -> Tensor:
    """Return a blob from a file, mapped into memory.

    Raises:
        CheckpointError: The file is missing or has another size.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < description.num_bytes:
                raise refused_state([f"its file has {size_bytes} bytes"])
            data = mmap(file.fileno(), description.num_bytes, access=ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(
            f"the state's file {path} can't be read ({error})",
            why="the node has put the state of the other hosts there",
            fix="nothing: the node fetches it again",
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8)

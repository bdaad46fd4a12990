"""The `configure` message, the first to a compute process: describes the run and the device.

If the host has several devices, they divide what the message tells: rows, threads and memory.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from decod.clocks import Stopwatch
from decod.devices import CPU, built_for
from decod.errors import ConfigError, HardwareError
from decod.host_limits import host_free_bytes, num_processors
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from decod.train.checkpoint.base import BaseSource, split_hashes
from decod.train.checkpoint.shared import parse_folder
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig, Rows, rows_of_devices
from decod.train.ranks import Mirror
from decod.train.start import CheckpointSource
from decod.train.token_source import TokenSource
from decod.worker.device import ChosenDevice, choose_device, free_bytes

_DEVICE = re.compile(r"[a-z]{2,16}(:[0-9]{1,3})?")
"""A name that torch may know. It says itself of others that there is no such device."""

_C = TypeVar("_C")


def parse_dataclass(kind: type[_C], section: str, value: object) -> _C:
    """Make a dataclass from a JSON object. Missing fields take their defaults.

    Args:
        kind: Its fields are numbers, texts, choices, and dataclasses of such fields.
        section: Its place among others, for people; empty for the outermost.
        value: The object.

    Raises:
        ConfigError: A field is unknown, of a wrong type, or out of range.
    """
    hints = get_type_hints(kind)
    if not isinstance(value, dict):
        raise _refuse(section, value, "an object is needed there")
    fields = {}
    for name, item in value.items():
        path = f"{section}.{name}" if section else name
        if name not in hints:
            raise _refuse(path, item, "there is no such field")
        fields[name] = _parse_field(path, hints[name], item)
    return kind(**fields)


def _parse_field(path: str, hint: type, item: object) -> object:
    if is_dataclass(hint):
        return parse_dataclass(hint, path, item)
    if issubclass(hint, StrEnum):
        if item not in tuple(hint):
            raise _refuse(path, item, f"it is one of {', '.join(hint)}")
        return hint(str(item))
    if hint is float and type(item) is int:
        return float(item)
    if type(item) is not hint:
        raise _refuse(path, item, f"a value of type {hint.__name__} is needed there")
    return item


def _refuse(path: str, value: object, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is {str(value)[:100]}",
        why=why,
        fix="give every node of the run the same version of decod",
    )


_USUAL_NUM_THREADS = min(torch.get_num_threads(), num_processors())
"""The threads that torch takes if nobody says anything. It knows of no quota of processors' time:
threads beyond that would only wait for each other."""


def set_num_threads(message: Mapping[str, Any]) -> None:
    """Let torch use as many threads as a `configure` message says.

    None: as it does already, but no more than it has processors.

    Raises:
        ConfigError: It is no number of threads.
    """
    num_threads = message.get("num_threads")
    if num_threads is not None:
        if type(num_threads) is not int or num_threads < 1:
            raise _refuse("num_threads", num_threads, "at least one thread is needed")
        torch.set_num_threads(num_threads)
    elif torch.get_num_threads() > _USUAL_NUM_THREADS:
        torch.set_num_threads(_USUAL_NUM_THREADS)


def num_threads_of(message: Mapping[str, Any]) -> int:
    """Return how many threads a message lets torch use."""
    num_threads = message.get("num_threads")
    return num_threads if type(num_threads) is int else _USUAL_NUM_THREADS


def change_num_threads(num_threads: int | None) -> None:
    """Let torch use another number of threads. None: as many as it takes by itself."""
    torch.set_num_threads(num_threads or _USUAL_NUM_THREADS)


def make_executor(
    message: Mapping[str, Any], device: ChosenDevice, watch: Stopwatch
) -> StageExecutor:
    """Return an executor for the run that a `configure` message describes.

    Raises:
        ConfigError: A field is missing or wrong.
        HardwareError: The device does not have the run's dtype.
        DataError: The data folder cannot be read.
    """
    return StageExecutor(
        _parse_run(message, device),
        tokens=_parse_tokens(message),
        init_dir=_parse_path(message, "init_dir"),
        checkpoint=_parse_checkpoint(message),
        watch=watch,
    )


def make_mirror(message: Mapping[str, Any], device: ChosenDevice, watch: Stopwatch) -> Mirror:
    """Return what a device that is not the first of several has. See `make_executor`."""
    return Mirror(_parse_run(message, device), tokens=_parse_tokens(message), watch=watch)


def _parse_run(message: Mapping[str, Any], device: ChosenDevice) -> ExecutorConfig:
    """Return the run as a device sees it, and let torch use as many threads as the message says."""
    set_num_threads(message)
    tables = {name: message[name] for name in get_type_hints(RunConfig) if name in message}
    run = parse_dataclass(RunConfig, "", tables)
    if run.model.dtype is ModelDtype.FLOAT64 and not device.device.has_float64:
        raise HardwareError(
            f"device {device.name} cannot be used for this run",
            why="the run computes in float64, and the device has none",
            fix="use device cpu, or another host",
            code="E-HW-025",
        )
    return ExecutorConfig(
        run=run,
        is_client=message.get("is_client") is True,
        steps_on_host=message.get("steps_on_host") is True,
        device=device.name,
        base=_parse_base(message),
        rows=_parse_rows(message),
    )


def _parse_rows(message: Mapping[str, Any]) -> Rows | None:
    value = message.get("rows")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or any(type(n) is not int for n in value):
        raise _refuse("rows", value, "three numbers are needed there")
    return Rows(*value)


def _parse_checkpoint(message: Mapping[str, Any]) -> CheckpointSource | None:
    place = message.get("checkpoint_dir")
    if place is None:
        return None
    if not isinstance(place, str):
        raise _refuse("checkpoint_dir", place, "a path or URL is needed there")
    sha256 = message.get("checkpoint_sha256")
    if not isinstance(sha256, str):
        raise _refuse("checkpoint_sha256", sha256, "a checkpoint is known by its hash")
    return CheckpointSource(parse_folder(place), sha256)


def _parse_base(message: Mapping[str, Any]) -> BaseSource | None:
    cache = _parse_path(message, "base_cache")
    if cache is None:
        return None
    hashes = message.get("base")
    if not isinstance(hashes, str):
        raise _refuse("base", hashes, "the hashes of its parts are needed there")
    return BaseSource(split_hashes(hashes), cache, _parse_path(message, "base_dir"))


def _parse_path(message: Mapping[str, Any], name: str) -> Path | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise _refuse(name, value, "a path is needed there")
    return None if value is None else Path(value)


def _parse_tokens(message: Mapping[str, Any]) -> TokenSource | None:
    folder = _parse_path(message, "data_dir")
    if folder is None:
        return None
    # Imported here, since relays have no data and do not need it.
    from decod.data.block import is_cached
    from decod.data.dataset import Dataset

    return Dataset.open_cached(folder) if is_cached(folder) else Dataset.open(folder)


def parse_device(message: Mapping[str, Any]) -> ChosenDevice:
    """Return the device that a `configure` message asks for. See `choose_device`.

    Raises:
        ConfigError: The message asks for a device of another kind.
        HardwareError: The named device is missing or does not work.
    """
    asked = message.get("device", CPU)
    if not isinstance(asked, str) or not _DEVICE.fullmatch(asked):
        raise _refuse("device", asked, "it is auto, or a device's name with a number")
    return choose_device(asked)


def memory_max_bytes(message: Mapping[str, Any]) -> int | None:
    """Return the cap on the device's memory in a `configure` message, in bytes; None for none.

    Raises:
        ConfigError: It is no size.
    """
    value = message.get("memory_max_bytes")
    if value is not None and (type(value) is not int or value < 1):
        raise _refuse("memory_max_bytes", value, "a number of bytes is needed there")
    return value


def device_facts(device: ChosenDevice, memory_max_bytes: int | None = None) -> dict[str, Any]:
    """Return the reply to `configure`: torch's version and kind, the device, and what is free."""
    return {
        "torch": torch.__version__,
        "built_for": built_for(),
        "device": device.name,
        "device_text": device.text,
        "device_uuid": device.device.uuid,
        "memory_bytes": free_bytes(device.device, memory_max_bytes),
        "host_memory_bytes": host_free_bytes(),
    }


def divided(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `configure` messages of all ranks, from the one that the node has sent.

    A single device gets the message as it is.

    Raises:
        ConfigError: A microbatch has fewer sequences than there are devices.
    """
    devices = str(message.get("device", CPU)).split(",")
    if len(devices) == 1:
        return [dict(message)]
    batch = parse_dataclass(BatchConfig, "batch", message.get("batch"))
    rows = rows_of_devices(batch, len(devices))
    shared = dict(message) | {"num_threads": share_of_threads(message, len(devices))}
    return [
        {**shared, "device": device, "rows": list(astuple(own))}
        for device, own in zip(devices, rows, strict=True)
    ]


def share_of_threads(message: Mapping[str, Any], num_devices: int) -> int:
    """Return the threads of each rank: its part of those that the node may use, at least one."""
    return max(1, num_threads_of(message) // num_devices)


def facts_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the node is told of all devices, from what is known of each.

    The memory is that of the smallest device. Ranks on one device have equal parts of it.
    """
    names = Counter(each["device"] for each in facts)
    texts = "; ".join(each["device_text"] for each in facts)
    return {
        **facts[0],
        "device": ",".join(each["device"] for each in facts),
        "device_text": f"{len(facts)} devices: {texts}",
        "memory_bytes": min(each["memory_bytes"] // names[each["device"]] for each in facts),
        "ranks": [{"device_uuid": each["device_uuid"], "pid": each["pid"]} for each in facts[1:]],
    }

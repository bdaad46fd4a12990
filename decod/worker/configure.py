"""The `configure` message, the first to a compute process: describes the run and the device."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from decod.data.params import BatchConfig
from decod.errors import ConfigError, HardwareError
from decod.model.config import ModelConfig, StagesConfig
from decod.stopwatch import Stopwatch
from decod.train.executor import StageExecutor
from decod.train.holder import ExecutorConfig
from decod.train.params import OptimizerConfig, ReductionConfig
from decod.train.start import CheckpointSource
from decod.train.token_source import TokenSource

_C = TypeVar("_C")


def parse_dataclass(kind: type[_C], section: str, value: object) -> _C:
    """Make a flat dataclass from a JSON object. Missing fields take their defaults.

    Raises:
        ConfigError: A field is unknown, of a wrong type, or out of range.
    """
    hints = get_type_hints(kind)
    if not isinstance(value, dict):
        raise _refuse(section, value, "an object is needed there")
    fields = {}
    for name, item in value.items():
        if name not in hints:
            raise _refuse(f"{section}.{name}", item, "there is no such field")
        fields[name] = _parse_field(f"{section}.{name}", hints[name], item)
    return kind(**fields)


def _parse_field(path: str, hint: type, item: object) -> object:
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


def make_executor(message: Mapping[str, Any], watch: Stopwatch) -> StageExecutor:
    """Return an executor for the run that a `configure` message describes.

    Raises:
        ConfigError: A field is missing or wrong.
        DataError: The data folder cannot be read.
        HardwareError: There is no such device.
    """
    device = _parse_device(message.get("device", "cpu"))
    num_threads = message.get("num_threads")
    if num_threads is not None:
        if type(num_threads) is not int or num_threads < 1:
            raise _refuse("num_threads", num_threads, "at least one thread is needed")
        torch.set_num_threads(num_threads)
    seed = message.get("seed")
    if type(seed) is not int:
        raise _refuse("seed", seed, "the initial weights are made from a whole number")
    config = ExecutorConfig(
        model=parse_dataclass(ModelConfig, "model", message.get("model")),
        stages=parse_dataclass(StagesConfig, "stages", message.get("stages")),
        batch=parse_dataclass(BatchConfig, "batch", message.get("batch")),
        optimizer=parse_dataclass(OptimizerConfig, "optimizer", message.get("optimizer")),
        reduction=parse_dataclass(ReductionConfig, "reduction", message.get("reduction")),
        seed=seed,
        device=device,
    )
    data_dir, init_dir = (_parse_path(message, name) for name in ("data_dir", "init_dir"))
    tokens = None if data_dir is None else _open_tokens(data_dir)
    return StageExecutor(
        config,
        tokens=tokens,
        init_dir=init_dir,
        checkpoint=_parse_checkpoint(message),
        watch=watch,
    )


def _parse_checkpoint(message: Mapping[str, Any]) -> CheckpointSource | None:
    folder = _parse_path(message, "checkpoint_dir")
    if folder is None:
        return None
    sha256 = message.get("checkpoint_sha256")
    if not isinstance(sha256, str):
        raise _refuse("checkpoint_sha256", sha256, "a checkpoint is known by its hash")
    return CheckpointSource(folder, sha256)


def _parse_path(message: Mapping[str, Any], name: str) -> Path | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise _refuse(name, value, "a path is needed there")
    return None if value is None else Path(value)


def _parse_device(value: object) -> str:
    if not isinstance(value, str) or not (value == "cpu" or value.startswith("cuda")):
        raise _refuse("device", value, "it is cpu, or cuda with a number")
    try:
        torch.zeros(1, device=value)
    except (RuntimeError, AssertionError) as error:
        # A build of torch without CUDA raises an AssertionError.
        raise HardwareError(
            f"device {value} cannot be used",
            why=str(error).split("\n", maxsplit=1)[0],
            fix="see `nvidia-smi`, install a build of torch for it, or use device cpu",
            code="E-HW-002",
        ) from error
    return value


def _open_tokens(folder: Path) -> TokenSource:
    # Imported here, since relays have no data and do not need it.
    from decod.data.dataset import Dataset

    return Dataset.open(folder)


def device_facts(device: str) -> dict[str, Any]:
    """Return the reply to `configure`: torch's version, the device's name and free memory."""
    if device.startswith("cuda"):
        free_bytes, _ = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    else:
        free_bytes, name = _free_host_bytes(), "cpu"
    return {"torch": torch.__version__, "device": name, "memory_bytes": free_bytes}


def _free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)

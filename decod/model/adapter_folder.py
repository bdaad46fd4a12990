"""Folders of adapters, as PEFT writes them. Imports no torch.

    adapter_config.json        what is adapted, and how
    adapter_model.safetensors  two thin matrices for each adapted one

Settings with which PEFT would compute something else are refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decod.errors import ConfigError, DataError
from decod.files import hub_name
from decod.model.shape import adapter_shapes
from decod.model.weights import read_header, read_json, refuse_weights
from decod.run.adapter_config import AdapterConfig, AdapterKind
from decod.run.model_config import ModelConfig, Shapes

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""What PEFT writes before the name of each parameter."""

_BASE = "base_model_name_or_path"
_REVISION = "revision"

_ALPHA_MAX = 1e6
_DTYPES = ("BF16", "F16", "F32", "F64")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Others change the model itself.
    "init_lora_weights": (True, False, None, "gaussian"),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "exclude_modules": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "megatron_config": (None,),
    "layer_replication": (None,),
}
"""Settings that must hold one of these values if they are present."""


def adapter_fields(model: ModelConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Return an `adapter_config.json` with which PEFT loads an adapter.

    Args:
        model: The model beside which it was trained.
        adapter: Its settings.
        base: Folder of that model, or its name on the Hub, maybe with a revision.
    """
    name, revision = hub_name(base or "") or (base, "")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.of(model)),
        "fan_in_fan_out": model.family.transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        _BASE: name,
        _REVISION: revision or None,
    }


def all_adapters(model: ModelConfig, adapter: AdapterConfig) -> Shapes:
    """Return names and shapes of all that an adapter trains."""
    found: Shapes = {}
    for index in range(model.num_hidden_layers):
        found |= adapter_shapes(model, adapter, index)
    return found


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no model."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def hub_base_of(folder: Path) -> str | None:
    """Return the model on the Hub that an adapter names. None: it names a folder of this host.

    Raises:
        DataError: The settings of the adapter can't be read.
    """
    fields = read_json(folder / ADAPTER_CONFIG)
    named, revision = fields.get(_BASE), fields.get(_REVISION)
    text = f"{named}@{revision}" if revision else str(named)
    return text if hub_name(text) is not None and not Path(str(named)).exists() else None


def base_of(folder: Path, base: Path | None = None) -> Path | None:
    """Return the folder of the model that an adapter changes. None: `folder` holds no adapter.

    Args:
        folder: It may hold an adapter.
        base: The model's folder, as the user says. None: where the adapter's settings say.

    Raises:
        DataError: The settings can't be read, or name no folder of this host.
    """
    if not is_adapter(folder):
        return None
    named: object = base or read_json(folder / ADAPTER_CONFIG).get(_BASE)
    found = Path(named) if isinstance(named, str | Path) and "\0" not in str(named) else None
    if found is not None and found.is_dir():
        if is_adapter(found):
            raise DataError(
                f"{found} holds an adapter, and no model",
                why=f"the adapter in {folder} changes a model",
                fix="give the folder of the model with --base FOLDER",
                code="E-DAT-055",
            )
        return found
    raise DataError(
        f"the model of the adapter in {folder} is not on this host",
        why=f"{ADAPTER_CONFIG} says {ascii(named)[:100]}",
        fix="give the folder of the model with --base FOLDER",
        code="E-DAT-055",
    )


def read_adapter(folder: Path, model: ModelConfig) -> AdapterConfig:
    """Return the settings of an adapter, whose matrices are all there.

    Raises:
        DataError: It is of another model, or asks for something that decod does not have.
    """
    path = folder / ADAPTER_CONFIG
    fields = read_json(path)
    for name, allowed in _NEUTRAL.items():
        value = fields.get(name)
        if name in fields and value not in allowed:
            raise _refused(path, f"{name} is {ascii(value)[:80]}", "decod has no such adapters")
    targets = fields.get("target_modules")
    if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
        targets = ", ".join(targets)
    rank = fields.get("r")
    alpha = fields.get("lora_alpha")
    if not isinstance(alpha, int | float) or not 0 < alpha < _ALPHA_MAX:
        raise _refused(path, f"lora_alpha is {ascii(alpha)[:40]}", "it is a positive number")
    if type(rank) is not int or not isinstance(targets, str):
        raise _refused(path, "r or target_modules is missing", "they say what it does")
    try:
        adapter = AdapterConfig(
            kind=AdapterKind.LORA, rank=rank, alpha=float(alpha), targets=targets
        )
        shapes = all_adapters(model, adapter)
    except ConfigError as error:
        raise _refused(path, error.what, error.why) from error
    _check_matrices(folder, shapes)
    return adapter


def _check_matrices(folder: Path, shapes: Shapes) -> None:
    header = read_header(folder / ADAPTER_FILE)
    header.pop("__metadata__", None)
    found, problems = dict[str, tuple[object, ...]](), list[str]()
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        found[name] = tuple(shape) if isinstance(shape, list) else ()
        if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
            problems.append(f"{ascii(name)[1:-1][:100]} is no matrix of floats")
    wanted = {PEFT_PREFIX + name: shape for name, shape in shapes.items()}
    problems += [f"{name} is missing" for name in wanted.keys() - found.keys()]
    problems += [f"{ascii(name)[1:-1][:100]} is unknown" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    refuse_weights(folder, sorted(problems))


def _refused(path: Path, what: str, why: str) -> DataError:
    return DataError(
        f"{path}: {what}",
        why=why,
        fix="give an adapter that `decod export` has written, or merge it into its model with PEFT",
        code="E-DAT-056",
    )

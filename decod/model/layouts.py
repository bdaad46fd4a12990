"""The finding of a model's layout, once for each configuration.

Only transformers knows the names and shapes of the parameters of a model that it builds. It needs
torch, which takes a node more memory than all else. So another process finds the layout, unless
this one has torch already (`decod.model.cut`).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from decod.errors import ConfigError
from decod.run.model_layout import SIZES, BlockLayout, ModelLayout, installed_version, unusable

_DESCRIBE = "decod.model.cut:describe"

_FINDING_S = 120.0
"""Most seconds that the other process has. Most take five."""

_found: dict[str, ModelLayout] = {}
_FOUND_MAX = 16


def layout_of(config: str) -> ModelLayout:
    """Return the layout of a model. It takes a node some seconds, once.

    Args:
        config: The model's `config.json`, of which `require_decoder` holds.

    Raises:
        ConfigError: transformers is not installed, or not as the run's; or the model can't be cut.
    """
    if config in _found:
        return _found[config]
    _require_version(config)
    has_torch = "torch" in sys.modules
    layout = _parsed(resolve_name(_DESCRIBE)(config) if has_torch else _from_process(config))
    if len(_found) > _FOUND_MAX:
        _found.clear()
    _found[config] = _found[layout.config] = layout
    return layout


def _from_process(config: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            # Without -P, Python would take modules from the working directory.
            [sys.executable, "-P", "-m", "decod.model.cut"],
            input=config,
            capture_output=True,
            text=True,
            timeout=_FINDING_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "it takes too long" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        raise unusable(_type_of(config), f"its layout can't be found: {why}") from error
    try:
        values: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() if done.returncode == 1 else []
        why = lines[-1] if lines else f"a process ended with {done.returncode}, maybe for memory"
        raise unusable(_type_of(config), why) from None
    return values


def _type_of(config: str) -> str:
    return str(json.loads(config).get("model_type"))


def _require_version(config: str) -> None:
    """Check that this host computes as the run's organiser does."""
    here, run = installed_version(), json.loads(config)["transformers_version"]
    if run != here:
        raise ConfigError(
            f"this model is built by transformers {run}, and {here} is installed",
            why="all hosts of a run must compute the same",
            fix=f"pip install 'transformers=={run}.*'",
        )


def _shapes(values: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in values.items()}


def _stored(values: Mapping[str, list[Any]]) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    return {n: tuple((key, tuple(shape)) for key, shape in found) for n, found in values.items()}


def _parsed(values: dict[str, Any]) -> ModelLayout:
    kinds = [
        BlockLayout(
            _shapes(kind["shapes"]), tuple(kind["linears"]), _stored(kind["stored"]), kind["kept"]
        )
        for kind in values["blocks"]
    ]
    return ModelLayout(
        config=values["config"],
        sizes={name: values[name] for name in SIZES},
        block_prefix=values["block_prefix"],
        ends_prefix=values["ends_prefix"],
        embedding=values["embedding"],
        ends=_shapes(values["ends"]),
        stored=_stored(values["stored"]),
        blocks=tuple(kinds[kind] for kind in values["kinds"]),
        num_active=values["num_active"],
    )

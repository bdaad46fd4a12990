"""The configuration: `RunConfig`, shared by all members and hashed, and `NodeConfig`, local.

A run's tables are in `decod.run`. This package reads them from TOML and from peers, and checks
relations between them.

The names that concern a run are imported when they are first used. `decod status` needs only a
node's folder, and must not wait for pydantic.
"""

import importlib
from typing import TYPE_CHECKING, Any

from decod.config.node_config import NodeConfig, parse_listen

if TYPE_CHECKING:
    from decod.config.run_file import DataSource, RunFile, load_run_file
    from decod.config.schema import Manifest, validate
    from decod.run.run_config import RunConfig

__all__ = [
    "DataSource",
    "Manifest",
    "NodeConfig",
    "RunConfig",
    "RunFile",
    "load_run_file",
    "parse_listen",
    "validate",
]

_LATER = dict.fromkeys(("DataSource", "RunFile", "load_run_file"), "decod.config.run_file")
_LATER |= dict.fromkeys(("Manifest", "validate"), "decod.config.schema")
_LATER["RunConfig"] = "decod.run.run_config"


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)

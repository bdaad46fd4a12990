"""What is configured: `RunConfig`, shared by all members and hashed, and `NodeConfig`, local.

The sections of a run are defined beside their owners (`decod/model/config.py`, `*/params.py`);
this package nests them, reads them from TOML and from peers, and checks relations between them.
"""

from decod.config.node import NodeConfig, parse_listen
from decod.config.run_file import DataSource, RunFile, load_run_file
from decod.config.schema import Manifest, RunConfig, validate

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

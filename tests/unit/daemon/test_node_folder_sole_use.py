"""Two processes of one host can't be the same node."""

import sys
from pathlib import Path

import pytest

from decod.daemon.node_folder import SoleUse
from decod.errors import ConfigError
from decod.membership.identity import load_or_create_identity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of sockets are Linux's")


def test_a_copied_key_is_used_once_at_a_time(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path)
    first = SoleUse(identity, tmp_path)
    with pytest.raises(ConfigError, match=f"E-CFG-033 .* is already {identity.name}"):
        SoleUse(identity, tmp_path / "copy")
    first.end()
    SoleUse(identity, tmp_path / "copy").end()


def test_other_identities_are_other_nodes(tmp_path: Path) -> None:
    held = [SoleUse(load_or_create_identity(tmp_path / name), tmp_path) for name in "ab"]
    for use in held:
        use.end()

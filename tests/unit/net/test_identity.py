"""The identity is made once, kept private, and refused when somebody else could have it."""

import re
from pathlib import Path

import pytest

from decod.errors import ConfigError
from decod.net.identity import KEY_FILE, identity_of, load_or_create_identity


def test_the_same_folder_gives_the_same_identity(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "state")
    assert load_or_create_identity(tmp_path / "state") == first
    assert load_or_create_identity(tmp_path / "other") != first
    assert re.fullmatch("[a-z2-7]{52}", first.node_id)
    assert re.fullmatch("[a-z]+-[a-z]+", first.name)
    assert len(first.name) <= 32


def test_the_key_is_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_an_identity_is_a_function_of_its_key() -> None:
    assert identity_of(bytes(32)) == identity_of(bytes(32))
    assert identity_of(bytes(32)) != identity_of(b"\x01" * 32)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_create_identity(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match=f"E-CFG-031.*{mode:04o}.*chmod 600"):
        load_or_create_identity(tmp_path)


@pytest.mark.parametrize("size", [0, 31, 33, 100_000])
def test_a_key_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / KEY_FILE
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="E-CFG-032"):
        load_or_create_identity(tmp_path)
    assert path.stat().st_size == size, "it is not replaced"


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(ConfigError, match="E-CFG-030"):
        load_or_create_identity(tmp_path)


def test_a_file_in_place_of_the_state_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")
    with pytest.raises(ConfigError, match="E-CFG-030"):
        load_or_create_identity(tmp_path / "state")

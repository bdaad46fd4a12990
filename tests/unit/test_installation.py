"""How decod was installed is told from what installers leave, and each way has its own commands."""

import json
from pathlib import Path

import pytest

from decod.installation import IMAGE_MARK, SCRIPT_MARK, InstalledBy, find_installation, install_hint

NOWHERE = Path("/nonexistent")


@pytest.mark.parametrize(
    ("mark", "way", "update"),
    [
        (None, InstalledBy.PIP, "pip install --upgrade 'decod-train'"),
        (f"../{SCRIPT_MARK}", InstalledBy.SCRIPT, "run the line again"),
        (IMAGE_MARK, InstalledBy.CONTAINER, "newer image"),
        ("uv-receipt.toml", InstalledBy.UV_TOOL, "uv tool install --force --upgrade 'decod-train'"),
        ("pipx_metadata.json", InstalledBy.PIPX, "pipx install --force 'decod-train'"),
    ],
)
def test_what_an_installer_leaves_names_it(
    mark: str | None, way: InstalledBy, update: str, tmp_path: Path
) -> None:
    prefix = tmp_path / "venv"
    prefix.mkdir()
    if mark is not None:
        (prefix / mark).touch()
    found = find_installation(prefix, "")
    assert (found.way, found.place) == (way, prefix)
    assert update in found.update


def test_a_single_call_is_known() -> None:
    prefix = Path("/home/u/.cache/uv/archive-v0/abc")
    assert find_installation(prefix, "").way is InstalledBy.UVX


def test_a_folder_with_source_comes_before_all_else(tmp_path: Path) -> None:
    noted = {"url": "file:///home/u/my%20source", "dir_info": {"editable": True}}
    found = find_installation(tmp_path, json.dumps(noted))
    assert (found.way, found.place) == (InstalledBy.SOURCE, Path("/home/u/my source"))
    assert "git pull" in found.update
    assert "install -e '/home/u/my source[dask]'" in found.repair("dask")


@pytest.mark.parametrize("noted", ["", "{", "[]", '{"dir_info": 3}', '{"url": "file:///w.whl"}'])
def test_what_pip_notes_of_other_packages_is_no_source(noted: str, tmp_path: Path) -> None:
    assert find_installation(tmp_path, noted).way is InstalledBy.PIP


def test_what_no_index_has_is_installed_from_where_it_came(tmp_path: Path) -> None:
    found = find_installation(tmp_path, '{"url": "file:///w/decod.whl", "archive_info": {}}')
    assert found.way is InstalledBy.PIP
    assert "'decod-train[dask] @ file:///w/decod.whl'" in found.repair("dask")
    assert "get the newer source or wheel" in found.update


@pytest.mark.parametrize("way", InstalledBy)
def test_every_way_has_a_repair(way: InstalledBy) -> None:
    found = find_installation(NOWHERE, "")
    told = type(found)(way, Path("/place")).repair("parquet")
    assert "parquet" in told


def test_this_one_is_known() -> None:
    assert "parquet" in install_hint("parquet")

"""`decod identity`: a key is shown, copied and brought back, and never lost."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from decod.cli.main import main
from decod.membership.identity import KEY_FILE, load_identity, load_or_create_identity


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Return the folder of a node."""
    load_or_create_identity(tmp_path / "node")
    return tmp_path / "node"


def identity(*arguments: object) -> int:
    return main(["identity", *map(str, arguments)])


def test_show_says_who_the_node_is(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load_identity(there)
    assert identity("show", "--state-dir", there) == 0
    text = capsys.readouterr().out
    assert f"id          {found.node_id}\n" in text
    assert f"name        {found.name}\n" in text
    assert "PRIVATE" not in text
    assert identity("show", "--state-dir", there, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["id"], shown["name"]) == (found.node_id, found.name)


def test_a_copy_makes_the_same_node(there: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.key", tmp_path / "other"
    assert identity("export", copy, "--state-dir", there) == 0
    assert copy.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        assert identity("import", copy, "--state-dir", other) == 0
        assert load_identity(other) == load_identity(there)
    assert (other / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_key_goes_through_pipes(
    there: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert identity("export", "-", "--state-dir", there) == 0
    text = capsys.readouterr().out.encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert identity("import", "-", "--state-dir", tmp_path / "other") == 0
    assert load_identity(tmp_path / "other") == load_identity(there)


def test_no_identity_is_replaced(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = load_or_create_identity(tmp_path / "other")
    assert identity("export", tmp_path / "copy.key", "--state-dir", there) == 0
    assert identity("import", tmp_path / "copy.key", "--state-dir", tmp_path / "other") == 3
    assert f"holds the identity of {kept.name} already" in capsys.readouterr().err
    assert load_identity(tmp_path / "other") == kept


def test_no_file_is_replaced(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.key"
    copy.write_text("precious")
    assert identity("export", copy, "--state-dir", there) == 3
    assert "E-CFG-034" in capsys.readouterr().err
    assert copy.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("show",), "E-CFG-036"),
        (("export", "-"), "E-CFG-036"),
        (("import", "missing.key"), "E-CFG-034"),
        (("import", "folder"), "E-CFG-034"),
        (("import", "junk.key"), "E-CFG-032"),
    ],
)
def test_what_can_not_be_done_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("junk.key").write_bytes(b"junk")
    assert identity(*arguments, "--state-dir", tmp_path / "none") == 3
    assert code in capsys.readouterr().err
    assert not (tmp_path / "none").exists()

"""Names from outside: those that become names of folders can't lead out of theirs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from decod.daemon.member_admission import root_folder
from decod.errors import ConfigError, MalformedMessageError
from decod.ids import RunId
from decod.membership.papers import membership_folder
from decod.run.run_config import RunConfig
from decod.texts import base32
from decod.train.checkpoint.iteration_folders import stage_file
from decod.train.checkpoint.store import run_folder
from decod.wire import validate

BAD = [
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../../etc",
    "..\\..\\etc",
    "~root",
    "a/b",
    "a\0b",
    "a\nb",
    "a b",
    "%2e%2e",
    "\u2025",
    "\uff0e\uff0e",
    "\u202etxt",
    "$(id)",
    "`id`",
    "x" * 5000,
]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [validate.run_id, validate.node_id])
def test_an_id_is_a_word_of_base32(check: Callable[[str, str], str], name: str) -> None:
    length = 26 if check is validate.run_id else 52
    assert check("id", "a" * length) == "a" * length
    filled = name + "a" * (length - len(name)) if name else "A" * length
    for text in (name, filled, "a" * (length - 1), "a" * length + "\n"):
        with pytest.raises(MalformedMessageError):
            check("id", text)


@pytest.mark.parametrize("name", [*BAD, "Name", "x" * 33, "ab\n", "a_b", "a.b"])
def test_a_run_has_a_name_of_plain_letters(name: str) -> None:
    with pytest.raises(ConfigError, match="it appears in file names"):
        RunConfig(name=name)


def test_every_folder_that_a_name_from_outside_decides_is_a_plain_one(tmp_path: Path) -> None:
    """The key of a root may have any bytes."""
    folders = [
        membership_folder(tmp_path, b"/../../../../../../etc/pass\0wd"[:32]),
        membership_folder(tmp_path, bytes(32)),
        root_folder(tmp_path, RunConfig(name="-").name),
        run_folder(tmp_path, RunId("a" * 26)),
    ]
    for folder in folders:
        first, last, *_ = folder.relative_to(tmp_path).parts
        assert first in ("memberships", "roots", "runs")
        assert re.fullmatch(r"[a-z0-9-]{1,52}", last)
    assert base32(bytes(32)) == folders[1].name
    assert stage_file(4095) == "stage-4095.safetensors"

"""`decod set` at the daemon: what it changes, keeps and shows, and where values come from."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from decod.config.node_config import NodeConfig
from decod.config.node_settings import SETTINGS
from decod.config.schedule import PauseRule, WorkHours
from decod.config.settings_file import SETTINGS_FILE
from decod.daemon.desk import Desk
from decod.errors import ConfigError


class Node:
    """A node that keeps what it is told."""

    def __init__(self) -> None:
        self.pausable, self.paused, self.gpus = True, False, ()
        self.used: list[int | None] = []

    def use_threads(self, num_threads: int | None) -> None:
        self.used.append(num_threads)

    async def pause(self, *, paused: bool) -> object:
        self.paused = paused
        return None


class Front:
    """A node's own answers."""

    healthy = True

    def describe(self) -> str:
        return "training"

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"asked": request["command"]}


def make_desk(folder: Path, *, volunteers: bool = True, **given: Any) -> Desk:
    return Desk(NodeConfig(state_dir=folder, **given), volunteers=volunteers)


def ask(desk: Desk, **values: str) -> dict[str, dict[str, Any]]:
    """Returns what `decod set` shows, by name."""

    async def asking() -> dict[str, Any]:
        return await desk.answer(Front(), {"command": "set", "values": values})

    return {each["name"]: each for each in asyncio.run(asking())["settings"]}


def shown(desk: Desk, name: str) -> tuple[str, str]:
    found = ask(desk)[name]
    return found["value"], found["origin"]


def test_changes_count_at_once_and_survive_a_restart(tmp_path: Path) -> None:
    desk, node = make_desk(tmp_path), Node()
    assert shown(desk, "upload") == ("no limit", "default")
    with desk.of(node, node):
        ask(
            desk,
            upload="20Mbit",
            download="50Mbit",
            threads="4",
            schedule="22:00-07:00",
            pause_when="battery,hot",
            disk="50GiB",
            device_memory="10GiB",
        )
    config = desk.config
    assert node.used == [4]
    assert (config.upload_max_mbit, config.download_max_mbit, config.num_threads) == (20, 50, 4)
    assert config.schedule == WorkHours.parse("22:00-07:00")
    again = make_desk(tmp_path)
    assert again.config == desk.config
    assert shown(again, "pause_when") == ("battery,hot", "file")
    assert "when this node next joins" in ask(again)["device_memory"]["counts"]


def test_the_command_line_wins_over_the_file_for_its_start(tmp_path: Path) -> None:
    ask(make_desk(tmp_path), upload="20Mbit", threads="4")
    started = make_desk(tmp_path, upload_max_mbit=5.0)
    assert shown(started, "upload") == ("5Mbit", "option")
    assert shown(started, "threads") == ("4", "file")
    assert started.config.upload_max_mbit == 5.0
    # What is set while it runs wins over both, and the operator hears of the next start.
    changed = ask(started, upload="7Mbit")["upload"]
    assert (changed["value"], changed["origin"], changed["option_returns"]) == (
        "7Mbit",
        "file",
        True,
    )
    assert started.config.upload_max_mbit == 7.0
    assert make_desk(tmp_path).config.upload_max_mbit == 7.0
    assert make_desk(tmp_path, upload_max_mbit=5.0).config.upload_max_mbit == 5.0


def test_a_default_is_set_by_its_name(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, num_threads=2)
    ask(desk, upload="20Mbit", pause_when="none")
    assert desk.config.pause_when == ()
    ask(desk, upload="default", threads="default", pause_when="default")
    assert (desk.config.upload_max_mbit, desk.config.num_threads) == (None, None)
    assert shown(desk, "pause_when") == ("battery", "default")
    assert json.loads((tmp_path / SETTINGS_FILE).read_text()) == {}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"upload": "5Mbit", "threads": "many"}, "E-CFG-056"),
        ({"upload": "5Mbit", "colour": "red"}, "E-CFG-055"),
        ({"upload": "1kbit"}, "E-CFG-056"),
        ({"upload": None}, "E-CFG-056"),
        ({"disk": "1e9"}, "E-CFG-056"),
    ],
)
def test_all_is_changed_or_nothing(tmp_path: Path, values: dict[str, Any], code: str) -> None:
    desk, node = make_desk(tmp_path), Node()
    before = desk.config
    with desk.of(node, node), pytest.raises(ConfigError) as raised:
        ask(desk, **values)
    assert raised.value.code == code
    assert desk.config == before
    assert node.used == []
    assert not (tmp_path / SETTINGS_FILE).exists()


@pytest.mark.parametrize(
    "values",
    [
        {"disk": "1.9TiB"},
        {"disk": "64.0001MiB", "device_memory": "64.00001MiB"},
        {"device_memory": "2.3TiB"},
        {"schedule": "Mon-Fri 1:00-2:00, Mon 3:00-4:00, Sat Sun 5:00-6:00"},
        {"upload": "1000Gbit"},
    ],
)
def test_what_was_set_can_be_read_at_the_next_start(tmp_path: Path, values: dict[str, str]) -> None:
    desk = make_desk(tmp_path)
    ask(desk, **values)
    assert make_desk(tmp_path).config == desk.config


def test_what_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="E-CFG-056"):
        # It is written with leading zeros, so it grows beyond the limit.
        ask(make_desk(tmp_path), schedule="Mon-Tue 1:00-2:00," * 50)
    assert not (tmp_path / SETTINGS_FILE).exists()


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    (tmp_path / f".{SETTINGS_FILE}.tmp").mkdir()
    with pytest.raises(ConfigError, match="E-CFG-057"):
        ask(desk, upload="5Mbit")
    assert desk.config.upload_max_mbit is None


def test_a_data_node_has_caps_but_no_pauses(tmp_path: Path) -> None:
    ask(make_desk(tmp_path), schedule="22:00-07:00", upload="20Mbit")
    desk = make_desk(tmp_path, volunteers=False)
    assert (desk.config.schedule, desk.config.upload_max_mbit) == (None, 20.0)
    assert set(ask(desk)) == set(SETTINGS) - {"schedule", "pause_when"}
    with pytest.raises(ConfigError, match="can't be paused"):
        ask(desk, schedule="always")
    # What the file says for a volunteer in this folder is not lost.
    ask(desk, threads="2")
    assert json.loads((tmp_path / SETTINGS_FILE).read_text())["schedule"] == "22:00-07:00"


def test_the_caps_of_all_lives_change(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    paces, num_bytes = desk.caps.paces, 1 << 20
    (tmp_path / "state").write_bytes(bytes(num_bytes))
    desk.caps.disk.require(1 << 40)
    ask(desk, disk="64MiB", upload="8Mbit")
    with pytest.raises(OSError, match=r"disk limit is 64\.0 MiB"):
        desk.caps.disk.require((63 << 20) + num_bytes)
    assert desk.caps.paces is paces

    async def upload() -> float:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        paces.upload.charge(100_000)
        return paces.upload._free_s - start_s

    # 1 MB a second, and four percent for headers.
    assert asyncio.run(upload()) == pytest.approx(0.104, abs=0.01)


def test_the_status_shows_pauses_to_the_operator_and_other_requests_pass(tmp_path: Path) -> None:
    async def asking(desk: Desk, command: str) -> dict[str, Any]:
        return await desk.answer(Front(), {"command": command})

    desk = make_desk(tmp_path, pause_when=(PauseRule.HOT,))
    status = asyncio.run(asking(desk, "status"))
    quiet = {"by_person": False, "causes": [], "refusal": "", "unknown": {}}
    assert status == {"asked": "status", "pausing": quiet}
    assert asyncio.run(asking(desk, "drain")) == {"asked": "drain"}
    data_node = make_desk(tmp_path, volunteers=False)
    assert asyncio.run(asking(data_node, "status")) == {"asked": "status"}

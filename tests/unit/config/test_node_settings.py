"""What can be set, and the file that keeps it."""

import json
import os
from pathlib import Path

import pytest

from decod.config.node_config import NodeConfig
from decod.config.node_settings import SETTINGS, given_in, parse_setting, with_values
from decod.config.schedule import PauseRule, WorkHours, read_rules, show_rules
from decod.config.settings_file import SETTINGS_FILE, SettingsFile, read_settings, write_settings
from decod.errors import ConfigError

VALUES = {
    "upload": 20.0,
    "download": 50.0,
    "threads": 4,
    "disk": 50 << 30,
    "device_memory": 10 << 30,
    "schedule": WorkHours.parse("Mon-Fri 22:00-07:00, Sat Sun 00:00-24:00"),
    "pause_when": (PauseRule.BATTERY, PauseRule.HOT),
}


def test_everything_that_can_be_set_survives_a_restart(tmp_path: Path) -> None:
    assert set(VALUES) == set(SETTINGS) == set(SettingsFile.model_fields)
    assert read_settings(tmp_path) == {}
    write_settings(tmp_path, VALUES)
    assert read_settings(tmp_path) == VALUES
    write_settings(tmp_path, {"pause_when": ()})
    assert read_settings(tmp_path) == {"pause_when": ()}
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS_FILE]


def test_the_values_make_a_configuration_and_back() -> None:
    config = with_values(NodeConfig(device="cpu"), VALUES)
    assert given_in(config) == VALUES
    assert (config.device, config.num_threads, config.upload_max_mbit) == ("cpu", 4, 20.0)
    assert with_values(config, {}) == NodeConfig(device="cpu")


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ('{"upload": "20Mbit"', "E-CFG-051", "docs/reference.md"),
        ("", "E-CFG-051", "the file is empty"),
        ('{"upload": "20Mbit", "upload": "1Mbit"}', "E-CFG-051", "stands twice"),
        ('{"uploads": "20Mbit"}', "E-CFG-052", "did you mean upload"),
        ('{"upload": 20}', "E-CFG-052", "upload: is 20"),
        ('{"threads": "0"}', "E-CFG-056", "no number of threads"),
        ('{"upload": "500kbit"}', "E-CFG-056", "below 1 Mbit/s"),
        ('{"download": "2Mbit"}', "E-CFG-056", "below 5 Mbit/s"),
        ('{"disk": "1MiB"}', "E-CFG-056", "64 MiB"),
        ('{"schedule": "at night"}', "E-CFG-056", "no time and no weekday"),
        ('{"pause_when": "batteryx"}', "E-CFG-056", "did you mean battery"),
        ("[]", "E-CFG-052", "an object"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, content: str, code: str, said: str
) -> None:
    (tmp_path / SETTINGS_FILE).write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_settings(tmp_path)
    assert raised.value.code == code
    assert said in str(raised.value)
    assert SETTINGS_FILE in str(raised.value)


def test_a_file_that_is_none_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SETTINGS_FILE)
    with pytest.raises(ConfigError, match="E-CFG-050"):
        read_settings(tmp_path)


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path) -> None:
    write_settings(tmp_path, {"threads": 4})
    # A folder of that name is in the way of the new file.
    (tmp_path / f".{SETTINGS_FILE}.tmp").mkdir()
    with pytest.raises(ConfigError, match="E-CFG-057"):
        write_settings(tmp_path, {"threads": 5})
    assert json.loads((tmp_path / SETTINGS_FILE).read_text()) == {"threads": "4"}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("none", ()),
        ("hot, battery", (PauseRule.BATTERY, PauseRule.HOT)),
        ("busy-gpu,keyboard,busy-gpu", (PauseRule.BUSY_GPU, PauseRule.KEYBOARD)),
    ],
)
def test_rules_are_named(text: str, rules: tuple[PauseRule, ...]) -> None:
    assert read_rules(text) == rules
    assert read_rules(show_rules(rules)) == rules


@pytest.mark.parametrize("text", ["", "none,hot", "warm", ",", "hot;battery"])
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="busy-gpu, battery, hot, keyboard"):
        read_rules(text)


def test_an_impossible_value_says_where_to_read_more() -> None:
    with pytest.raises(ConfigError, match=r"--upload-max in docs/reference\.md"):
        parse_setting("upload", "fast")

"""A host's own settings: addresses, devices, counts."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.node_config import NodeConfig, parse_listen
from decod.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:7700", ("0.0.0.0", 7700)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("example.org:65535", ("example.org", 65535)),
        ("localhost", ("localhost", 7700)),
        ("[::1]:80", ("::1", 80)),
        ("[2001:db8::1]", ("2001:db8::1", 7700)),
    ],
)
def test_addresses_are_split(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7700",
        "0.0.0.0:",
        "0.0.0.0:99999",
        "0.0.0.0:abc",
        "0.0.0.0:-1",
        "0.0.0.0:+1",
        "0.0.0.0:1_0",
        "0.0.0.0:٣",
        "::1:7700",
        "[::1",
        "[::1]7700",
        "[zz]:1",
        "[127.0.0.1]:1",
        "300.0.0.1:1",
        "1.2.3:1",
        "a b:1",
        "a..b:1",
        "-a:1",
        "http://x:1",
        "x" * 300 + ":1",
        "host:1\n",
    ],
)
def test_a_bad_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-020 .*0\.0\.0\.0:7700"):
        parse_listen(text)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        host, port = parse_listen(text)
    except ConfigError:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize(
    "changes",
    [
        {"listen_port": 70000},
        {"listen_port": -1},
        {"advertise": "nonsense:port"},
        {"advertise": "example.org:0"},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"device": "cuda:0,"},
        {"device": "cuda:0,cpu"},
        {"device": "cuda,cuda:1"},
        {"device": "auto,auto"},
        {"device": "cuda:1,cuda:0,cuda:01"},
        {"device": ",".join(["cpu"] * 65)},
        {"capacity": 0},
        {"drain_timeout_s": -1.0},
        {"drain_timeout_s": float("nan")},
        {"num_threads": 100_000},
        {"upload_max_mbit": 0.5},
        {"upload_max_mbit": float("nan")},
        {"upload_max_mbit": float("inf")},
        {"upload_max_mbit": 1e7},
        {"name": ""},
        {"name": "\x1b[31mred"},
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NodeConfig(state_dir=tmp_path, **changes)


@pytest.mark.parametrize(("device", "num"), [("auto", 1), ("cpu,cpu", 2), ("cuda:3,cuda:0", 2)])
def test_a_node_may_have_several_devices(device: str, num: int) -> None:
    node = NodeConfig(device=device)
    assert node.num_devices == num
    assert device == "auto" or f"--device {device}" in node.arguments


def test_the_defaults_are_a_valid_node() -> None:
    node = NodeConfig()
    assert (node.listen_port, node.device, node.capacity) == (7700, "auto", None)
    assert node.state_dir.name == "decod"


def test_the_arguments_of_a_node_start_the_same_node_again() -> None:
    assert NodeConfig(state_dir=Path("a folder")).arguments == "--state-dir 'a folder'"
    node = NodeConfig(
        listen_host="::1",
        device="cpu",
        num_threads=2,
        upload_max_mbit=2.5,
        drain_timeout_s=90.0,
        state_dir=Path("s"),
        rejoins=False,
        name="n",
    )
    assert node.arguments == (
        "--state-dir s --listen '[::1]:7700' --device cpu --threads 2 --upload-max 2.5Mbit"
        " --drain-timeout 90s --name n --no-rejoin"
    )

"""A dry run says what would not fit, and what this host has chosen."""

from pathlib import Path
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig, Spread
from decod.config.schema import Manifest
from decod.daemon import demands as module
from decod.daemon.demands import JoinOptions, run_dry
from decod.errors import HardwareError
from decod.membership.identity import load_or_create_identity
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.texts import size_text
from tests.support.members import ROOT
from tests.unit.daemon.test_memory import llama_8b

GIB = 1 << 30
JOIN = JoinString(root=ROOT.public, addresses=("h:1",), token=Token.new(Role.RELAY))
SMALL = RunConfig()
LARGE = RunConfig(
    model=ModelConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=81, num_attention_heads=64
    ),
    stages=StagesConfig(num_relay_stages=2, num_first_blocks=0),
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The run that the organiser describes; nobody is asked, and no process is started."""
    box = [SMALL]

    async def look(*_: object) -> module._Seen:
        manifest = Manifest(run=box[0], data_index_sha256="ab" * 32, data_vocab_size=257)
        return module._Seen(manifest=manifest, address="192.0.2.7:7700", observed="198.51.100.4")

    async def device(*_: object, **__: object) -> dict[str, Any]:
        return {
            "device": "cuda:0",
            "device_text": "cuda:0, NVIDIA X",
            "memory_bytes": 24 * GIB,
            "host_memory_bytes": 64 * GIB,
        }

    monkeypatch.setattr(module, "_look", look)
    monkeypatch.setattr(module, "try_device", device)
    return box


def told(folder: Path, **choices: Any) -> str:
    lines = list[str]()
    node = NodeConfig(state_dir=folder / "state", **choices)
    assert run_dry(JoinOptions(join_string=str(JOIN), node=node), lines.append) == 0
    return "\n".join(lines)


def test_what_does_not_fit_is_told_and_ends_like_joining_would(
    seen: list[RunConfig], tmp_path: Path
) -> None:
    """The largest stage counts, since the leader may choose it."""
    seen[0], lines = LARGE, list[str]()
    options = JoinOptions(join_string=str(JOIN), node=NodeConfig(state_dir=tmp_path))
    with pytest.raises(
        HardwareError, match=r"E-HW-003 24\.0 GiB are free on cuda:0: stage 1"
    ) as at:
        run_dry(options, lines.append)
    assert at.value.exit_code == 6
    assert any(line.startswith("memory      at least 905.9 GiB") for line in lines), lines
    assert any("more, while such a state is fetched or copied" in line for line in lines), lines


def test_what_this_host_has_chosen_is_told(seen: list[RunConfig], tmp_path: Path) -> None:
    said = told(tmp_path, capacity=7, num_threads=2, upload_max_mbit=5.0, name="my-box")
    for text in (
        "device      cuda:0, NVIDIA X, 24.0 GiB free",
        "of which it takes 7",
        "threads     2 for computing",
        "port 7700 of 0.0.0.0, TCP",
        "upload      at most 5 Mbit/s",
        "others see  the address 198.51.100.4:7700",
        "the name my-box",
        "the device, cuda:0",
    ):
        assert text in said
    assert not (tmp_path / "state").exists()


def test_the_defaults_are_told(seen: list[RunConfig], tmp_path: Path) -> None:
    said = told(tmp_path)
    for text in ("at most 64", "as many as torch takes", "see --upload-max", "from the key that"):
        assert text in said
    assert "fetched or copied" not in said, "small states are in memory"
    load_or_create_identity(tmp_path / "state")
    name = load_or_create_identity(tmp_path / "state").name
    assert f"the name {name}" in told(tmp_path)


def test_a_stage_that_fits_only_spread_is_told_with_what_it_takes_of_the_host(
    seen: list[RunConfig], tmp_path: Path
) -> None:
    """The numbers are those of the way that joining would choose."""
    seen[0] = llama_8b(4)
    copied, spread = (stage_needs(seen[0], 1, 2, sharded=each) for each in (False, True))
    there = "on each of 2 devices"
    devices = {"device": "cuda:0,cuda:1"}
    said = told(tmp_path, **devices)
    assert (
        f"memory      at least {size_text(spread.device_bytes)} {there} and "
        f"{size_text(spread.host_bytes)} of this host's for a stage, and "
        f"{size_text(spread.microbatch_bytes)} for each microbatch"
    ) in said
    assert "24.0 GiB free on each\n" in said
    assert "64.0 GiB of this host's memory are free" in said
    assert "processors, divided among 2 devices" in said
    seen[0] = SMALL
    needs = stage_needs(SMALL, 1, 2)
    assert f"at least {size_text(needs.device_bytes)} {there} for a stage" in told(
        tmp_path, **devices
    )
    seen[0] = llama_8b(4)
    with pytest.raises(HardwareError, match=f"at least {size_text(copied.device_bytes)} there"):
        told(tmp_path, spread=Spread.COPY, **devices)


def test_free_ports_and_advertised_addresses_are_told(
    seen: list[RunConfig], tmp_path: Path
) -> None:
    said = told(tmp_path, listen_port=0, listen_host="::1")
    assert "a free port of [::1], TCP" in said
    assert ":0" not in said.replace("cuda:0", "")
    assert "others see  the address example.org:9" in told(tmp_path, advertise="example.org:9")

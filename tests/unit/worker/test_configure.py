"""What a host's devices divide: memory, of which the smallest decides, and threads."""

from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig, Spread
from decod.daemon.stage_memory import needs_here, require_memory
from decod.errors import HardwareError
from decod.worker import configure
from decod.worker.configure import divided, facts_of_all
from tests.unit.daemon.test_memory import llama_8b

GIB = 1 << 30


def found(device: str, free_gib: float) -> dict[str, Any]:
    return {
        "device": device,
        "device_text": f"{device}, NVIDIA X",
        "device_uuid": f"GPU-{device}",
        "memory_bytes": int(free_gib * GIB),
        "host_memory_bytes": 256 * GIB,
        "pid": 7,
    }


@pytest.mark.parametrize("free_gib", [(80, 24), (24, 80), (24, 24)])
def test_the_device_with_least_memory_decides(free_gib: tuple[int, int]) -> None:
    facts = facts_of_all([found(f"cuda:{rank}", free) for rank, free in enumerate(free_gib)])
    assert facts["memory_bytes"] == 24 * GIB
    run, config = llama_8b(4), NodeConfig(device="cuda:0,cuda:1")
    assert needs_here(run, 1, config, facts["memory_bytes"]).sharded
    with pytest.raises(HardwareError, match=r"24\.0 GiB are free on each of cuda:0,cuda:1"):
        require_memory(run, 1, NodeConfig(device=config.device, spread=Spread.COPY), facts)


def test_devices_that_all_have_room_get_a_copy_each() -> None:
    run = llama_8b(4)
    room = stage_needs(run, 1, 2).memory_min_bytes / GIB
    facts = facts_of_all([found("cuda:0", room + 8), found("cuda:1", room)])
    config = NodeConfig(device="cuda:0,cuda:1")
    assert not needs_here(run, 1, config, facts["memory_bytes"]).sharded


def test_ranks_on_one_device_share_its_memory() -> None:
    facts = facts_of_all([found("cpu", 24), found("cpu", 20)])
    assert facts["memory_bytes"] == 10 * GIB


@pytest.mark.parametrize("devices", ["cuda:0,cuda:1,cuda:2", "cpu,cpu,cpu"])
@pytest.mark.parametrize(
    ("given", "usual", "expected"), [(None, 16, 5), (9, 16, 3), (1, 16, 1), (None, 2, 1)]
)
def test_ranks_divide_the_threads(
    devices: str, given: int | None, usual: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs one at least."""
    monkeypatch.setattr(configure, "_USUAL_NUM_THREADS", usual)
    message = {"device": devices, "num_threads": given, "batch": {"microbatch_size": 3}}
    assert [each["num_threads"] for each in divided(message)] == 3 * [expected]


def test_a_single_device_has_all_threads() -> None:
    message = {"device": "cuda:0", "num_threads": 9}
    assert divided(message) == [message]

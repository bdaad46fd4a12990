"""What fits onto a device is known before anything is fetched, and so is what to do if it does not.

The runs have the shape of Llama 3 8B, which no test builds.
"""

import asyncio
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from decod.clocks import Stopwatch
from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig, Recompute, Spread
from decod.daemon.device_owner import HostDevice
from decod.daemon.stage_memory import capacity_of, needs_here, recomputes, require_memory
from decod.daemon.waits import OpenWaits
from decod.errors import ConfigError, HardwareError
from decod.protocol.core.job_codec import kind_of
from decod.protocol.core.jobs import BaseJob, Configured, DoNothing, Measured
from decod.protocol.core.view import Role
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.texts import size_text
from tests.support.raw_compute import Node as Worker
from tests.unit.daemon.nodes import make_node
from tests.unit.worker.test_runner import CONFIGURE

GIB = 1 << 30
LLAMA_8B = ModelConfig(
    dtype=ModelDtype.BFLOAT16,
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def llama_8b(num_stages: int) -> RunConfig:
    return RunConfig(
        model=LLAMA_8B,
        stages=StagesConfig(num_relay_stages=num_stages),
        batch=BatchConfig(sequence_length=4096, microbatch_size=4, num_microbatches=16),
    )


def facts(num_bytes: int, host_bytes: int = 64 * GIB) -> dict[str, Any]:
    return {
        "device": "cuda:0",
        "device_text": "cuda:0, NVIDIA X",
        "memory_bytes": num_bytes,
        "host_memory_bytes": host_bytes,
    }


def refused(run: RunConfig, num_bytes: int, **choices: Any) -> HardwareError:
    with pytest.raises(HardwareError) as at:
        require_memory(run, 1, NodeConfig(**choices), facts(num_bytes))
    assert (at.value.code, at.value.exit_code) == ("E-HW-003", 6)
    return at.value


def test_a_stage_that_can_not_fit_is_refused_with_its_parts_and_a_remedy() -> None:
    error = refused(llama_8b(4), 24 * GIB)
    assert error.what == "24.0 GiB are free on cuda:0"
    # 8 blocks with 218 million weights each, in bfloat16 and float32; the microbatch in bfloat16.
    assert error.why == (
        "stage 1 of this run takes at least 48.8 GiB there (weights 9.8 GiB, gradients 6.5 GiB, "
        "optimizer 32.5 GiB), and a microbatch 11.5 GiB"
    )
    assert error.fix == "free memory, use a larger device, or ask the organiser for more stages"


def test_more_stages_are_no_remedy_for_the_embedding_and_the_head() -> None:
    run = llama_8b(4)
    with pytest.raises(HardwareError) as at:
        require_memory(run, 0, NodeConfig(), facts(24 * GIB))
    assert at.value.fix == "free memory, or use a larger device"
    more = replace(run, stages=replace(run.stages, num_first_blocks=2))
    with pytest.raises(HardwareError) as at:
        require_memory(more, 0, NodeConfig(), facts(24 * GIB))
    assert at.value.fix == "free memory, use a larger device, or set stages.num_first_blocks = 0"


def test_several_devices_divide_microbatches_and_each_must_hold_the_stage() -> None:
    run, devices = llama_8b(4), "cuda:0,cuda:1"
    needs = stage_needs(run, 1, 2)
    free_bytes = needs.device_bytes + needs.microbatch_bytes
    found = facts(free_bytes) | {"device": devices}
    require_memory(run, 1, NodeConfig(device=devices), found)
    refused(run, free_bytes)
    copied = NodeConfig(device=devices, spread=Spread.COPY)
    with pytest.raises(HardwareError) as at:
        require_memory(run, 1, copied, found | {"memory_bytes": 24 * GIB})
    assert at.value.what == "24.0 GiB are free on each of cuda:0,cuda:1"
    assert "stage 1 of this run takes at least 48.8 GiB there" in at.value.why
    assert "a microbatch 5.8 GiB" in at.value.why
    assert "ask the organiser for more stages" in at.value.fix


def test_a_stage_is_spread_where_it_fits_only_so() -> None:
    run = llama_8b(4)
    auto = NodeConfig(device="cuda:0,cuda:1")
    copied = stage_needs(run, 1, 2)
    spread = stage_needs(run, 1, 2, sharded=True)
    # Half of the weights and the sums, and some of a block's at a time. A microbatch is the same.
    num, block = copied.num_parameters, copied.num_parameters // 8
    assert spread.weights_bytes == pytest.approx(2 * (num / 2 + 3 * block), rel=1e-3)
    assert spread.optimizer_bytes == pytest.approx(4 * num / 2 + 6 * block, rel=1e-3)
    assert spread.held_bytes(3) == copied.held_bytes(3)
    enough_bytes = copied.device_bytes + copied.microbatch_bytes
    assert needs_here(run, 1, auto, enough_bytes) == copied
    assert needs_here(run, 1, auto, enough_bytes - 1) == spread
    assert needs_here(run, 1, replace(auto, spread=Spread.SHARD), enough_bytes) == spread
    # Where neither fits, the error is about the usual way.
    assert needs_here(run, 1, auto, GIB) == copied
    with pytest.raises(ConfigError, match="--spread shard with one device"):
        needs_here(run, 1, NodeConfig(spread=Spread.SHARD), 80 * GIB)


def test_a_stage_that_fits_neither_way_is_refused_with_both_numbers() -> None:
    run = llama_8b(4)
    error = refused(run, 8 * GIB, device="cuda:0,cuda:1")
    spread = stage_needs(run, 1, 2, sharded=True)
    assert "takes at least 48.8 GiB there" in error.why
    assert error.why.endswith(
        f"; spread over all of them, it takes {size_text(spread.device_bytes)} of each"
    )
    alone = refused(run, 4 * GIB, device="cuda:0,cuda:1", spread=Spread.SHARD)
    assert f"takes at least {size_text(spread.device_bytes)} there (weights " in alone.why
    assert "optimizer" not in alone.why, "that is in the host's memory"


@pytest.mark.parametrize("device", ["cuda:0,cuda:1", "cpu,cpu"])
def test_the_host_must_have_room_for_the_state_of_a_stage_that_is_spread(device: str) -> None:
    run, config = llama_8b(4), NodeConfig(device=device)
    needs = stage_needs(run, 1, 2, sharded=True)
    # Weights, two moments, their next values and the sum of gradients: 7 float32 numbers.
    assert needs.host_bytes == 28 * needs.num_parameters
    each_bytes = needs.device_bytes + needs.microbatch_bytes
    enough_bytes = needs.host_bytes + (2 * each_bytes if device == "cpu,cpu" else 0)
    require_memory(run, 1, config, facts(24 * GIB, enough_bytes))
    with pytest.raises(HardwareError) as at:
        require_memory(run, 1, config, facts(24 * GIB, enough_bytes - GIB))
    error = at.value
    assert (error.code, error.exit_code) == ("E-HW-003", 6)
    assert error.what == f"{size_text(enough_bytes - GIB)} of this host's memory are free"
    assert f"spread over 2 devices, takes at least {size_text(enough_bytes)} of it" in error.why
    assert error.fix == "free memory of the host, add some, or ask the organiser for more stages"
    # A stage that fits onto each device takes nothing of the host's.
    require_memory(run, 1, config, facts(80 * GIB, 0))
    with pytest.raises(HardwareError, match="leave out --spread shard, free memory"):
        require_memory(run, 1, replace(config, spread=Spread.SHARD), facts(80 * GIB, 0))


def test_the_remedy_names_the_choices_that_are_in_the_way() -> None:
    run = llama_8b(16)
    needs = stage_needs(run, 1)
    room = needs.device_bytes + needs.held_bytes(3, recompute=True)
    require_memory(run, 1, NodeConfig(capacity=3), facts(room))
    off = refused(run, room, capacity=3, recompute=Recompute.OFF)
    assert off.fix.startswith("leave out --recompute off, give a smaller --capacity, free memory")
    short = refused(run, room - 1, capacity=3, device_memory_max_bytes=room)
    assert short.fix.startswith("allow more with --device-memory-max, give a smaller --capacity")
    assert "3 microbatches 8.6 GiB, or 3.1 GiB with recomputation" in short.why


@pytest.mark.parametrize(
    ("choices", "free_gib", "expected"),
    [
        ({}, 24, True),
        ({}, 120, False),
        ({"recompute": Recompute.OFF}, 24, False),
        ({"recompute": Recompute.ON}, 80, True),
        ({"capacity": 1}, 24, False),
        ({"capacity": 8}, 24, True),
        ({"capacity": 8}, 80, False),
    ],
)
def test_auto_recomputes_where_memory_is_short(
    choices: dict[str, Any], free_gib: int, expected: bool
) -> None:
    """A stage of two blocks: 12.2 GiB, and 2.9 GiB for each microbatch."""
    config = NodeConfig(**choices)
    assert recomputes(llama_8b(16), 1, config, free_gib * GIB) is expected


def test_the_last_stage_needs_one_microbatch_at_a_time_and_recomputes_none() -> None:
    assert not recomputes(llama_8b(16), 16, NodeConfig(), 24 * GIB)


def test_with_recomputation_more_microbatches_fit() -> None:
    run = llama_8b(16)
    needs = stage_needs(run, 1)
    room = 24 * GIB - needs.device_bytes
    kept = Measured(1.0, 2.0, needs.microbatch_bytes)
    again = Measured(1.0, 2.0, needs.input_bytes, needs.microbatch_bytes)
    assert capacity_of(run, Role.RELAY, room, kept, "cuda:0") == 1
    assert capacity_of(run, Role.RELAY, room, again, "cuda:0") == 5
    with pytest.raises(HardwareError, match=r"E-HW-003 2\.0 GiB are free on cuda:0 beside the"):
        capacity_of(run, Role.RELAY, 2 * GIB, kept, "cuda:0")


def test_a_data_node_takes_its_share_of_the_batch_if_it_fits() -> None:
    run = llama_8b(16)
    each = Measured(1.0, 2.0, GIB)
    assert capacity_of(run, Role.DATA, 100 * GIB, each, "cpu") == 16
    assert capacity_of(run, Role.DATA, 12 * GIB, each, "cpu") == 4


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, run: RunConfig, room: int) -> list[str]:
    """Return the jobs that a node with so much memory gives its compute process at the start."""
    asked: list[str] = []

    async def run_job(_: HostDevice, job: BaseJob) -> object:
        asked.append(kind_of(type(job)))
        return Configured(facts(room)) if len(asked) == 1 else Measured(1.0, 2.0, GIB)

    async def test() -> None:
        with make_node(folder, leads=False) as node:
            part = replace(node.part, manifest=replace(node.part.manifest, run=run))
            device = HostDevice(node.config, part, Stopwatch(), lambda *_, **__: None)
            try:
                await device.measure(lambda _: None, OpenWaits(lambda _, **__: None))
            except HardwareError as error:
                asked.append(error.code)

    monkeypatch.setattr(HostDevice, "run", run_job)
    asyncio.run(test())
    return asked


def test_a_node_with_little_memory_recomputes_or_ends_before_it_builds_or_fetches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not joined by then: what a stage learns is fetched by members."""
    jobs = prepared(tmp_path / "a", monkeypatch, llama_8b(16), 24 * GIB)
    assert jobs == ["configure", "set_recompute", "build", "measure"]
    jobs = prepared(tmp_path / "b", monkeypatch, llama_8b(16), 120 * GIB)
    assert jobs == ["configure", "build", "measure"]
    jobs = prepared(tmp_path / "c", monkeypatch, llama_8b(4), 24 * GIB)
    assert jobs == ["configure", "E-HW-003"]


def test_a_limit_of_the_system_is_all_that_a_stage_has() -> None:
    """The compute process may take no more, whatever the host has."""
    worker = Worker()
    try:
        worker.result(DoNothing())
        limit = psutil.Process(worker.process.pid).memory_info().vms + GIB
        most = (limit, resource.RLIM_INFINITY)
        resource.prlimit(worker.process.pid, resource.RLIMIT_AS, most)
        found = worker.configure(CONFIGURE)
    finally:
        worker.close()
    assert found["memory_bytes"] <= GIB
    with pytest.raises(HardwareError, match=r"E-HW-003 .* are free on cpu: stage 1 of this"):
        require_memory(llama_8b(16), 1, NodeConfig(), found)

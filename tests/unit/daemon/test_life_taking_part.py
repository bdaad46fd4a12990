"""How a node takes part in a run that another leads."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig, Spread
from decod.daemon import life as module
from decod.daemon.demands import tell_demands
from decod.daemon.life import take_part
from decod.daemon.pipeline_node import PipelineNode
from decod.protocol.core.effects import Stop, StopReason
from decod.run.run_config import RunConfig
from decod.texts import size_text
from tests.unit.daemon.nodes import make_node
from tests.unit.daemon.test_memory import llama_8b


def test_before_it_joins_it_says_what_the_run_takes_of_this_host(tmp_path: Path) -> None:
    run, lines = RunConfig(name="my-run"), list[str]()
    config = NodeConfig(state_dir=tmp_path, moves_port=True, upload_max_mbit=5.0, device="cuda:1")
    tell_demands(run, 2, config, lines.append)
    assert lines[0].startswith("joining my-run: llama with ")
    titles = [line[:12].strip() for line in lines[1:]]
    assert titles == ["downloads", "opens", "device", "memory", "disk", "upload"]
    needs = stage_needs(run, 2)
    assert f"{size_text(needs.state_bytes)} at the start" in lines[1]
    assert "port 7700, or one of the next 15 if it is in use, of 0.0.0.0" in lines[2]
    assert lines[3] == "device      cuda:1"
    assert f"at least {size_text(needs.device_bytes)}" in lines[4]
    assert str(tmp_path) in lines[5]
    assert lines[6] == "upload      at most 5 Mbit/s"


def test_with_several_devices_it_says_both_ways_to_use_them(tmp_path: Path) -> None:
    """It has not tried the devices yet, so it does not know which way it will choose."""
    run = llama_8b(4)
    copied, spread = (stage_needs(run, 1, 2, sharded=each) for each in (False, True))
    there, host = "on each of 2 devices", f"{size_text(spread.host_bytes)} of this host's"
    usual = f"{size_text(copied.device_bytes)} {there}"
    other = f"{size_text(spread.device_bytes)} {there} and {host}"
    for choice, expected in (
        (Spread.AUTO, f"{usual}, or if that does not fit {other}"),
        (Spread.COPY, usual),
        (Spread.SHARD, other),
    ):
        lines = list[str]()
        config = NodeConfig(state_dir=tmp_path, device="cuda:0,cuda:1", spread=choice)
        tell_demands(run, 1, config, lines.append)
        (line,) = (line for line in lines if line.startswith("memory"))
        assert line.startswith(f"memory      at least {expected} for a stage, and ")


async def test_nothing_waits_for_a_dht_of_nodes_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []

    async def announce(*_: Any, **__: Any) -> None:
        announced.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            announced.append("given up")

    async def prepare(_: PipelineNode) -> None:
        await asyncio.sleep(0)

    async def run_until_stopped(*_: Any) -> Stop:
        return Stop(StopReason.FINISHED, "all is done")

    monkeypatch.setattr(module, "announce", announce)
    monkeypatch.setattr(module, "run_until_stopped", run_until_stopped)
    monkeypatch.setattr(PipelineNode, "use_reach", lambda *_: None)
    monkeypatch.setattr(PipelineNode, "prepare", prepare)
    with make_node(tmp_path, leads=False) as node:
        async with asyncio.timeout(10):
            stop = await take_part(node)
    assert stop.reason is StopReason.FINISHED
    assert announced == ["begun", "given up"]

"""How a node takes part in a run that another leads."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decod.daemon import volunteer as module
from decod.daemon.node import Node
from decod.daemon.volunteer import take_part
from decod.protocol.core.effects import Stop, StopReason
from tests.unit.daemon.nodes import make_node


def test_nothing_waits_for_a_dht_of_nodes_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []

    async def announce(*_: Any, **__: Any) -> None:
        announced.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            announced.append("given up")

    async def prepare(_: Node) -> None:
        await asyncio.sleep(0)

    async def run_until_stopped(*_: Any) -> Stop:
        return Stop(StopReason.FINISHED, "all is done")

    monkeypatch.setattr(module, "announce", announce)
    monkeypatch.setattr(module, "run_until_stopped", run_until_stopped)
    monkeypatch.setattr(Node, "use_reach", lambda *_: None)
    monkeypatch.setattr(Node, "prepare", prepare)

    async def test() -> None:
        with make_node(tmp_path, leads=False) as node:
            async with asyncio.timeout(10):
                stop = await take_part(node, ("127.0.0.1:1",))
        assert stop.reason is StopReason.FINISHED
        assert announced == ["begun", "given up"]

    asyncio.run(test())

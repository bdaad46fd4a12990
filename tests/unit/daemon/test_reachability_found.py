"""How a node finds out whether others can dial it, and what follows."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.node_config import NodeConfig
from decod.daemon import life as module
from decod.daemon.life import find_reach
from decod.daemon.pipeline_node import PipelineNode
from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.net.interfaces import PortMapper
from decod.protocol.core.view import Reach, Role

LEADER = NodeId("l" * 52)
ADDRESS = "198.51.100.4:7700"


class FakeNode:
    """Keeps what it is told."""

    def __init__(self, config: NodeConfig, role: Role, *, held: bool = True) -> None:
        self.config, self.address, self.held = config, ADDRESS, held
        self.part = SimpleNamespace(
            membership=None,
            run_id=RunId("r" * 26),
            leader=LEADER,
            leader_address="203.0.113.5:7700",
            role=role,
        )
        self.reach: Reach | None = None
        self.notes: list[str] = []
        self.said: list[str] = []
        self.gateway = SimpleNamespace(dialling=self)
        self.dialled: list[tuple[NodeId, str]] = []

    def use_reach(self, reach: Reach) -> None:
        self.reach = reach

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append(event)

    def say(self, line: str) -> None:
        self.said.append(line)

    def set_address(self, node: NodeId, address: str) -> None:
        self.dialled.append((node, address))

    async def await_held(self, node: NodeId, timeout_s: float) -> bool:
        return self.held


class FakeMapper:
    """Maps ports, or says why not."""

    def __init__(self, refusal: str = "no router answers to UPnP") -> None:
        self.refusal = refusal
        self.asked: list[int] = []

    async def map(self, port: int) -> str:
        self.asked.append(port)
        return self.refusal


def find(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode, mapper: FakeMapper, *unreached: str
) -> None:
    """Runs `find_reach`; the leader gives these answers, one after the other."""
    answers = list(unreached)

    async def why_unreached(*_: object) -> str:
        return answers.pop(0)

    monkeypatch.setattr(module, "why_unreached", why_unreached)
    asyncio.run(find_reach(cast("PipelineNode", node), cast("PortMapper", mapper)))
    assert not answers


@pytest.mark.parametrize(
    ("role", "passes_on", "reach"),
    [
        (Role.RELAY, None, Reach.DIALLED),
        (Role.RELAY, True, Reach.PASSES_ON),
        (Role.DATA, None, Reach.PASSES_ON),
        (Role.DATA, False, Reach.DIALLED),
    ],
)
def test_who_is_dialled_passes_on_as_its_operator_wants(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    role: Role,
    passes_on: bool | None,
    reach: Reach,
) -> None:
    node = FakeNode(NodeConfig(state_dir=tmp_path, passes_on=passes_on), role)
    mapper = FakeMapper()
    find(monkeypatch, node, mapper, "")
    assert node.reach is reach
    assert not mapper.asked, "a router is asked only if that is needed"
    assert not node.said


def test_a_mapped_port_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node, mapper = FakeNode(NodeConfig(state_dir=tmp_path), Role.RELAY), FakeMapper("")
    find(monkeypatch, node, mapper, "no answer", "")
    assert node.reach is Reach.DIALLED
    assert mapper.asked == [7700]
    assert node.notes == ["port.mapped"]


def test_a_mapping_behind_two_routers_is_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node, mapper = FakeNode(NodeConfig(state_dir=tmp_path), Role.RELAY), FakeMapper("")
    find(monkeypatch, node, mapper, "no answer", "no answer")
    assert node.reach is Reach.OUTBOUND


@pytest.mark.parametrize("choice", [{"maps_port": False}, {"advertise": "gpu.example.org:7700"}])
def test_no_router_is_asked_against_the_operators_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: dict[str, Any]
) -> None:
    node = FakeNode(NodeConfig(state_dir=tmp_path, **choice), Role.RELAY)
    mapper = FakeMapper("")
    find(monkeypatch, node, mapper, "no answer")
    assert node.reach is Reach.OUTBOUND
    assert not mapper.asked


def test_an_outbound_volunteer_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = FakeNode(NodeConfig(state_dir=tmp_path, passes_on=True), Role.RELAY)
    find(monkeypatch, node, FakeMapper(), "no answer")
    assert node.reach is Reach.OUTBOUND, "it can't pass on, whatever its operator wants"
    assert node.notes == ["port.unmapped", "node.outbound"]
    assert node.dialled == [(LEADER, "203.0.113.5:7700")]
    first, second = node.said
    assert ADDRESS in first
    assert "port 7700" in second


@pytest.mark.parametrize(("role", "held"), [(Role.RELAY, False), (Role.DATA, True)])
def test_who_can_be_reached_in_no_way_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: Role, held: bool
) -> None:
    node = FakeNode(NodeConfig(state_dir=tmp_path), role, held=held)
    with pytest.raises(NetworkError, match="E-NET-013"):
        find(monkeypatch, node, FakeMapper(), "no answer")

"""Routings by name: another one is a class and a line in the registry."""

from typing import ClassVar

import pytest
from typing_extensions import override

from decod.config.schema import validate
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.protocol.flows import registry
from decod.protocol.flows.building import FlowOffer
from decod.protocol.flows.routing import Routing
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import RunConfig
from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation


class ByName(Routing):
    """Takes the node whose id comes first."""

    asked: ClassVar[set[NodeId]] = set()

    @override
    def price_s(self, peer: NodeId, offer: FlowOffer, num_uses: int) -> float:
        self.asked.add(peer)
        return float(ord(peer[0]))


def test_a_run_uses_the_routing_that_its_protocol_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ROUTINGS", {**registry.ROUTINGS, "by-name": ByName})
    protocol = ProtocolConfig(routing="by-name", min_nodes_per_stage=2)
    simulation = Simulation(Scenario(num_iterations=2, protocol=protocol))
    assert simulation.run().num_iterations == 2
    assert {simulation.leader.node_id} < ByName.asked


def test_the_first_routing_is_the_default() -> None:
    assert ProtocolConfig().routing == next(iter(registry.ROUTINGS)) == "flow"


@pytest.mark.parametrize("name", ["flow", "gwtf", "greedy"])
def test_a_run_file_may_name_any_of_them(name: str) -> None:
    validate(RunConfig(name="test", protocol=ProtocolConfig(routing=name)))


def test_a_run_with_a_routing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"protocol\.routing is 'best'"):
        validate(RunConfig(name="test", protocol=ProtocolConfig(routing="best")))

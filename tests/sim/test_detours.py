"""Links so slow that activations and gradients go by way of the data node."""

from collections.abc import Collection

import pytest

from decod.ids import NodeId, TensorId
from decod.protocol.core.detours import Detour, Detours
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Cut, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import storm_scenario, weather

MEGABYTE = 1_000_000


def forced(*, slow_bytes_per_s: float) -> Scenario:
    """Return a run in which all microbatches have to take one link between two relays."""
    fast, slow = LinkSpec(0.02, 40 * MEGABYTE), LinkSpec(0.02, slow_bytes_per_s)
    pair = ("relay0", "relay1")
    profile = ComputeProfile(
        jitter_ratio=0.0, activation_bytes=40 * MEGABYTE, parameter_bytes=MEGABYTE
    )
    return Scenario(
        seed=1,
        batch=BatchConfig(num_data_nodes=1, num_microbatches=4),
        num_relays=2,
        stages=StagesConfig(num_relay_stages=2),
        num_iterations=4,
        profile=profile,
        links=Links(fast, {pair: slow, pair[::-1]: slow}),
    )


def test_a_slow_link_that_cannot_be_avoided_is_gone_round() -> None:
    durations_s = {}
    for slow in (2 * MEGABYTE, 40 * MEGABYTE):
        simulation = Simulation(forced(slow_bytes_per_s=slow))
        simulation.run()
        durations_s[slow] = [f.duration_s for f in simulation.meter.figures]
    direct_s = 2 * 4 * 40 / 2
    *_, slowest, last = durations_s[2 * MEGABYTE]
    assert max(slowest, last) < direct_s / 5, "20 s each way for each microbatch"
    assert last < 3 * durations_s[40 * MEGABYTE][-1]


@pytest.mark.parametrize("at_s", [60.0, 160.0])
def test_a_detour_that_leads_nowhere_is_left(at_s: float) -> None:
    """A data node and a relay lose each other for good, and the relay serves its stage alone.

    Nobody can be removed for it, and nobody has to be: only detours need that link.
    """
    fast, middling, slow = (LinkSpec(0.02, rate * MEGABYTE) for rate in (40, 10, 2))
    links = dict.fromkeys([("relay0", "relay1"), ("relay1", "relay0")], slow)
    for relay in ("relay0", "relay1", "relay2"):
        links["data0", relay] = links[relay, "data0"] = middling
    scenario = Scenario(
        seed=1,
        batch=BatchConfig(num_data_nodes=2, num_microbatches=2),
        num_relays=3,
        stages=StagesConfig(num_relay_stages=3),
        num_iterations=6,
        profile=ComputeProfile(
            jitter_ratio=0.0, activation_bytes=40 * MEGABYTE, parameter_bytes=MEGABYTE
        ),
        links=Links(fast, links),
        duration_max_s=3000.0,
        protocol=ProtocolConfig(min_data_nodes=2),
        cuts=(Cut(("data1",), ("relay1",), at_s, 1e6),),
    )
    simulation = Simulation(scenario)
    assert simulation.run().num_iterations == 6
    assert {f.num_microbatches for f in simulation.meter.figures} == {4}
    assert max(f.duration_s for f in simulation.meter.figures) < 120, "slow, not at a stand"


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_in_bad_weather_where_every_third_tensor_makes_a_detour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storms' tensors are small, and would hardly make one."""
    taken = [0, 0]

    def choose(
        self: Detours, to: NodeId, byways: Collection[NodeId], tensor: TensorId
    ) -> Detour | None:
        detours = bool(byways) and tensor % 3 == 0
        taken[detours] += 1
        return Detour(sorted(byways)[tensor % len(byways)], 0.1) if detours else None

    monkeypatch.setattr(Detours, "choose", choose)
    failures, _ = weather(range(30), storm_scenario)
    assert not failures, failures
    assert taken[True] > 200, taken

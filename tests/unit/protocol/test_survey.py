"""Reports and probes: when, to whom, how many, and that they stop when there is nothing to say."""

import math

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core import events as ev
from decod.protocol.core import messages as m
from decod.protocol.core.context import Context
from decod.protocol.core.durations import STALE_S
from decod.protocol.core.effects import Effect, ProbeLink, Send
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.view import Opening, View
from decod.protocol.links.measuring import SURVEY_INTERVAL_S, LinkMeasuring
from tests.unit.protocol.cast import D0, FACTS, ITERATION, R1A, R2A, RUN, STRANGER, view_of
from tests.unit.protocol.world import World

VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b")


class Bench:
    """r1a's survey: d0 is upstream, r2a and r2b are downstream."""

    def __init__(self, *, size_bytes: int = 1 << 19, view: View = VIEW) -> None:
        links = LinkTable(activation_size_bytes=size_bytes, compute_s=1.0)
        opening = Opening(ITERATION, Iteration(0, 0), view)
        self.context = Context(node_id=R1A, run=RUN, facts=FACTS, links=links, opening=opening)
        self.context.adopt(view)
        self.links = links
        self.measuring = LinkMeasuring(self.context)
        self.measuring.opened(0.0, renewed=True)

    def tick(self) -> list[Effect]:
        """Let the deadline pass."""
        deadline_s = self.measuring.deadline_s
        assert deadline_s is not None
        return self.overdue(deadline_s)

    def overdue(self, now_s: float) -> list[Effect]:
        """Let it be that late."""
        self.measuring.overdue(now_s)
        return self.context.out.taken()

    def lose(self, to: NodeId) -> None:
        """Let a report come back as undelivered."""
        self.measuring.undelivered(ev.SendFailed(to, m.LinkReport(1, 0.1, 1e6, 1.0), "unreachable"))

    def told(self, effects: list[Effect]) -> list[NodeId]:
        return [e.to for e in effects if isinstance(e, Send)]

    def know(self, *peers: NodeId, bandwidth: float = 1e7, now_s: float = 0.0) -> None:
        for peer in peers:
            self.links.measured(peer, latency_s=0.1, bandwidth_bytes_per_s=bandwidth, now_s=now_s)


def probes(effects: list[Effect]) -> list[ProbeLink]:
    return [effect for effect in effects if isinstance(effect, ProbeLink)]


# --- reports --------------------------------------------------------------------------------------


def test_reports_come_at_most_once_in_an_interval_whatever_changes() -> None:
    bench = Bench()
    bench.tick()
    due_s = bench.measuring.deadline_s
    assert due_s is not None
    for k in range(50):
        bench.know(R2A, bandwidth=10.0 ** (4 + k % 5))
        now_s = due_s - SURVEY_INTERVAL_S * (50 - k) / 51
        assert bench.overdue(now_s) == []
    assert len(bench.told(bench.overdue(due_s))) <= 3


# --- probes ---------------------------------------------------------------------------------------


def test_a_probe_that_is_never_heard_of_is_given_up() -> None:
    bench = Bench()
    assert len(probes(bench.overdue(10.0))) == 1
    assert probes(bench.overdue(60.0)) == []
    assert probes(bench.overdue(71.0)) == []
    assert len(probes(bench.overdue(71.0 + STALE_S))) == 1


# --- whole nodes ----------------------------------------------------------------------------------


def pair() -> World:
    world = World(num_iterations=1)
    world.start("d0")
    world.start("r1a", stage_index=1)
    world.settle(["ForwardActivation", "to=r1a"])
    return world


@pytest.mark.parametrize(("sender", "version"), [(STRANGER, 1), (D0, 0), (D0, 2)])
def test_a_report_of_a_stranger_or_another_view_changes_nothing_now(
    sender: NodeId, version: int
) -> None:
    world = pair()
    links = world.hosts[R1A].machine.context.links
    before_s = links.cost_s(sender)
    world.step("r1a", ev.Received(sender, m.LinkReport(version, 30.0, 1e6, 30.0)))
    assert links.cost_s(sender) == before_s


def test_a_report_from_the_simulator_is_brought_into_bounds_by_the_core() -> None:
    world = pair()
    world.step("r1a", ev.Received(D0, m.LinkReport(1, math.inf, 0.0, math.nan)))
    assert math.isfinite(world.hosts[R1A].machine.context.links.cost_s(D0))

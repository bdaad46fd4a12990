"""Reports and probes: when, to whom, how many, and that they stop when there is nothing to say."""

import dataclasses
import math
from collections import Counter

import pytest

from decod.ids import Iteration, MicrobatchId, NodeId, TensorId
from decod.planner.cost import Link
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core import messages as m
from decod.protocol.core.context import Context
from decod.protocol.core.durations import STALE_S
from decod.protocol.core.effects import Effect, ProbeLink, Send
from decod.protocol.core.link_table import LinkTable, Terms
from decod.protocol.core.view import View
from decod.protocol.links.measuring import (
    PROBE_PAUSE_RATIO,
    PROBE_SIZE_MAX_BYTES,
    SURVEY_INTERVAL_S,
    URGENT_INTERVAL_S,
    LinkMeasuring,
)
from tests.unit.protocol.cast import (
    D0,
    D1,
    ITERATION,
    R1A,
    R1B,
    R2A,
    R2B,
    RUN,
    STRANGER,
    member,
    view_of,
)
from tests.unit.protocol.world import World

VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b")
MICROBATCH = MicrobatchId(1, 0, 0)


class Bench:
    """r1a's survey: d0 is upstream, r2a and r2b are downstream."""

    def __init__(self, *, size_bytes: int = 1 << 19, view: View = VIEW) -> None:
        links = LinkTable(activation_size_bytes=size_bytes, compute_s=1.0)
        self.context = Context(node_id=R1A, run=RUN, links=links, view=view, iteration=ITERATION)
        self.context.adopt(view)
        self.links = links
        self.measuring = LinkMeasuring(self.context)
        self.measuring.opened(0.0, renewed=True)

    def tick(self) -> list[Effect]:
        """Let the deadline pass."""
        deadline_s = self.measuring.deadline_s
        assert deadline_s is not None
        return self.measuring.overdue(deadline_s)

    def lose(self, to: NodeId) -> None:
        """Let a report come back as undelivered."""
        self.measuring.undelivered(ev.SendFailed(to, m.LinkReport(1, 0.1, 1e6, 1.0), "unreachable"))

    def end_probe(self, peer: NodeId) -> None:
        """End a probe that has shown nothing."""
        self.measuring.measured(0.0, ev.LinkMeasured(peer))

    def told(self, effects: list[Effect]) -> list[NodeId]:
        return [e.to for e in effects if isinstance(e, Send)]

    def know(self, *peers: NodeId, bandwidth: float = 1e7, now_s: float = 0.0) -> None:
        for peer in peers:
            self.links.measured(peer, latency_s=0.1, bandwidth_bytes_per_s=bandwidth, now_s=now_s)


def probes(effects: list[Effect]) -> list[ProbeLink]:
    return [effect for effect in effects if isinstance(effect, ProbeLink)]


# --- reports --------------------------------------------------------------------------------------


def test_each_neighbour_is_told_once_and_again_when_something_has_changed() -> None:
    bench = Bench()
    bench.know(D0, R2A, R2B)
    assert bench.measuring.overdue(0.1) == [], "the first latencies are still being measured"
    assert bench.told(bench.tick()) == [D0, R2A, R2B]
    assert bench.tick() == []
    for _ in range(3):
        bench.know(R2B, bandwidth=1e6)
    (report,) = bench.tick()
    assert report == Send(R2B, m.LinkReport(1, 0.1, 1e6, 1.0))
    assert bench.tick() == []


def test_a_change_of_this_nodes_speed_is_told_to_all() -> None:
    bench = Bench()
    bench.know(D0, R2A, R2B)
    bench.tick()
    bench.links._compute_s = 10.0
    assert bench.told(bench.tick()) == [D0, R2A, R2B]


def test_reports_come_at_most_once_in_an_interval_whatever_changes() -> None:
    bench = Bench()
    bench.tick()
    due_s = bench.measuring.deadline_s
    assert due_s is not None
    for k in range(50):
        bench.know(R2A, bandwidth=10.0 ** (4 + k % 5))
        now_s = due_s - SURVEY_INTERVAL_S * (50 - k) / 51
        assert bench.measuring.overdue(now_s) == []
    assert len(bench.told(bench.measuring.overdue(due_s))) <= 3


def test_a_report_that_did_not_arrive_is_repeated_with_the_next_tick() -> None:
    bench = Bench()
    bench.know(D0, R2A, R2B)
    bench.tick()
    bench.lose(R2A)
    bench.lose(STRANGER)
    assert bench.told(bench.tick()) == [R2A]


def test_a_new_view_is_a_new_beginning() -> None:
    bench = Bench()
    bench.know(D0, R2A, R2B)
    bench.tick()
    bench.measuring.opened(100.0, renewed=True)
    assert bench.told(bench.measuring.overdue(101.0)) == [D0, R2A, R2B]


def test_peers_beyond_a_slow_link_hear_which_data_node_is_near() -> None:
    bench = Bench(size_bytes=10_000_000, view=view_of("d0", "d1", "r1a", "r1b", "r2a", "r2b"))
    bench.know(R2A, bandwidth=1e6)
    bench.know(R2B, bandwidth=1e8)
    bench.tick()
    bench.know(D1, bandwidth=1e8)
    (told,) = (e for e in bench.tick() if isinstance(e, Send) and e.to == R2A)
    assert told == Send(R2A, m.LinkReport(1, 0.1, 1e6, 1.0, ((D1, 1e8),)))
    assert bench.told(bench.tick()) == []


# --- probes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bandwidth", "wanted"), [(1e6, [D1]), (1e8, [])])
def test_ways_iteration_a_link_are_probed_only_where_that_is_slow(
    bandwidth: float, wanted: list[NodeId]
) -> None:
    """d1 is no neighbour of r2a; all that are have been measured."""
    view = view_of("d0", "d1", "r1a", "r2a", "r3a")
    links = LinkTable(activation_size_bytes=10_000_000, compute_s=1.0)
    context = Context(node_id=R2A, run=RUN, links=links, view=view, iteration=ITERATION)
    context.adopt(view)
    survey = LinkMeasuring(context)
    survey.opened(0.0, renewed=True)
    links.measured(R1A, latency_s=0.1, bandwidth_bytes_per_s=bandwidth)
    for peer in (D0, NodeId("r3a")):
        links.measured(peer, latency_s=0.1, bandwidth_bytes_per_s=1e8)
    assert [effect.to for effect in probes(survey.overdue(10.0))] == wanted
    survey.measured(10.1, ev.LinkMeasured(D1, bandwidth_bytes_per_s=1e8))
    later = [effect.to for effect in probes(survey.overdue(100.0))]
    assert later == [R1A] * len(wanted), "the slow link itself, as it may be slow no longer"


def test_an_unknown_link_is_probed_once_with_an_activations_size() -> None:
    bench = Bench()
    bench.know(D0, R2A)
    assert probes(bench.tick()) == [ProbeLink(R2B, 1 << 19)]
    assert probes(bench.tick()) == [], "one at a time"
    bench.know(R2B)
    bench.end_probe(R2B)
    assert probes(bench.tick()) == []


def test_each_link_is_probed_once_though_it_has_shown_nothing() -> None:
    bench = Bench()
    found = []
    for _ in range(10):
        for effect in probes(bench.tick()):
            found.append(effect.to)
            bench.end_probe(effect.to)
    assert sorted(found) == [D0, R2A, R2B]


def test_probes_take_a_small_share_of_the_time() -> None:
    bench = Bench()
    (first,) = probes(bench.measuring.overdue(10.0))
    bench.measuring.measured(14.0, ev.LinkMeasured(first.to))
    assert probes(bench.measuring.overdue(14.0 + 4.0 * PROBE_PAUSE_RATIO - 1.0)) == []
    assert len(probes(bench.measuring.overdue(14.0 + 4.0 * PROBE_PAUSE_RATIO + 2.0))) == 1


def test_a_probe_that_is_never_heard_of_is_given_up() -> None:
    bench = Bench()
    assert len(probes(bench.measuring.overdue(10.0))) == 1
    assert probes(bench.measuring.overdue(60.0)) == []
    assert probes(bench.measuring.overdue(71.0)) == []
    assert len(probes(bench.measuring.overdue(71.0 + STALE_S))) == 1


def test_links_that_carry_tensors_are_not_probed_and_stale_ones_are() -> None:
    bench = Bench()
    bench.know(D0, R2A, R2B)
    for now_s in (10.0, STALE_S):
        assert probes(bench.measuring.overdue(now_s)) == []
    bench.know(D0, R2A, now_s=STALE_S)
    assert probes(bench.measuring.overdue(STALE_S + 10.0)) == [ProbeLink(R2B, 1 << 19)]


def test_a_link_that_can_not_be_cheap_is_not_probed() -> None:
    """r2b computes for half a minute: no bandwidth would make it cheaper than r2a."""
    for compute_s, wanted in ((30.0, []), (1.0, [R2B])):
        bench = Bench(size_bytes=1 << 23)
        bench.know(D0, R2A)
        bench.links.reported(R2B, Terms(Link(0.1, 1e7), compute_s))
        assert [effect.to for effect in probes(bench.tick())] == wanted


def test_a_link_whose_bytes_hardly_count_is_not_probed() -> None:
    assert probes(Bench(size_bytes=1000).tick()) == []


@pytest.mark.parametrize(
    ("activation", "probe"), [(1 << 30, PROBE_SIZE_MAX_BYTES), (30_000, 1 << 16)]
)
def test_a_probe_has_a_least_and_a_greatest_size(activation: int, probe: int) -> None:
    bench = Bench(size_bytes=activation)
    bench.links._compute_s = 0.01
    bench.links.measured(STRANGER, latency_s=0.001, bandwidth_bytes_per_s=1e6)
    assert [effect.size_bytes for effect in probes(bench.tick())] == [probe]


def test_a_large_stage_is_probed_little_by_little_and_then_never_more() -> None:
    """I8: what is sent is bounded by neighbours, whatever the size of the run."""
    peers = [dataclasses.replace(member("r2a"), node_id=NodeId(f"r2{k:02}")) for k in range(40)]
    view = view_of("d0", "r1a", *peers)
    bench, asked = Bench(view=view), Counter[NodeId]()
    num_neighbours = len(bench.context.previous) + len(bench.context.next)
    num_reports = 0
    for k in range(200):
        if k % 5 == 0:
            bench.measuring.opened(0.0, renewed=False)
        effects = bench.measuring.overdue(1.0 + k * 0.5)
        num_reports += len(bench.told(effects))
        for effect in probes(effects):
            asked[effect.to] += 1
            # All links are alike, so that the reports have no reason either.
            bench.links.measured(effect.to, latency_s=0.05, bandwidth_bytes_per_s=12.5e6, now_s=1.0)
            bench.end_probe(effect.to)
    assert set(asked.values()) == {1}
    assert len(asked) == num_neighbours
    assert num_reports == num_neighbours


# --- whole nodes ----------------------------------------------------------------------------------


def pair() -> World:
    world = World(num_iterations=1)
    world.start("d0")
    world.start("r1a", stage_index=1)
    world.settle(["ForwardActivation", "to=r1a"])
    return world


def test_a_report_reaches_the_cost_of_its_receiver() -> None:
    world = pair()
    world.step("r1a", ev.Received(D0, m.LinkReport(1, 1.0, 1e6, 3.0)))
    links = world.hosts[R1A].machine.context.links
    assert links.cost_s(D0) == pytest.approx((1.0 + 3.0) / 2 + (0.05 + 1.0) / 2)


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


def test_neighbours_exchange_reports_and_agree() -> None:
    world = pair()
    world.step("d0", ev.LinkMeasured(R1A, latency_s=0.2))
    world.step("r1a", ev.LinkMeasured(D0, latency_s=0.4))
    world.wait(1.0)
    costs_s = [
        world.hosts[node].machine.context.links.cost_s(peer)
        for node, peer in ((D0, R1A), (R1A, D0))
    ]
    assert costs_s[0] == costs_s[1]
    assert sum(" LinkReport " in line for line in world.seen) == 2
    world.wait(20.0)
    told = sum(" LinkReport " in line for line in world.seen)
    assert told <= 4, "the first microbatch may have changed what they compute in"


def test_an_undelivered_report_is_repeated_by_the_survey_alone() -> None:
    world = pair()
    world.wait(10.0)
    world.seen.clear()
    report = m.LinkReport(1, 0.1, 1e6, 1.0)
    world.step("r1a", ev.SendFailed(D0, report, "unreachable"))
    world.wait(10.0)
    assert sum("r1a -> d0 LinkReport" in line for line in world.seen) == 1


def test_a_probes_end_is_taken_in_by_the_machine() -> None:
    world = pair()
    machine = world.hosts[R1A].machine
    machine._measuring._probing = (D0, 1e9)
    machine.step(1.0, ev.LinkMeasured(D0, latency_s=0.2))
    assert machine._measuring._probing is not None, "any message may have been timed"
    machine.step(1.0, ev.LinkMeasured(D0))
    assert machine._measuring._probing is None
    machine._measuring._probing = (D0, 1e9)
    machine.step(1.0, ev.LinkMeasured(D0, 0.2, 5e6))
    assert machine._measuring._probing is None
    assert machine.context.links.link(D0) == Link(0.2, 5e6)


def test_a_probe_that_comes_as_a_message_changes_nothing() -> None:
    world = pair()
    assert world.step("r1a", ev.Received(D0, m.LinkProbe())) == []
    assert world.hosts[R1A].machine.context.iteration == Iteration(1, 1)
    assert R1B not in world.hosts


def transfer(bench: Bench, at_s: float, *, rate: float, num: int = 3) -> list[Effect]:
    """Let tensors to r2a take as long as they do at `rate` bytes a second."""
    size_bytes = bench.links.activation_size_bytes
    sent = ev.TensorSent(R2A, TensorId(0), size_bytes, size_bytes / rate)
    return [effect for _ in range(num) for effect in bench.measuring.sent(at_s, sent)]


@pytest.mark.parametrize(("rate", "urgent"), [(1e6, False), (6e5, False), (4e5, True), (3e6, True)])
def test_a_link_that_has_broken_down_or_come_back_is_told_at_once(
    rate: float, urgent: bool
) -> None:
    bench = Bench()
    bench.links.computed(jobs.Forward(MICROBATCH), 0.1)
    bench.links.computed(jobs.Backward(MICROBATCH), 0.1)
    assert not transfer(bench, 0.1, rate=1e6), "nobody has been told yet: the clock does that"
    bench.tick()
    effects = transfer(bench, 2.0, rate=rate)
    told = [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, m.LinkReport)]
    assert told == [R2A] * urgent
    assert not transfer(bench, 2.1, rate=rate, num=5), "and that once"


def test_urgent_reports_keep_a_distance() -> None:
    bench = Bench()
    transfer(bench, 0.1, rate=1e6)
    bench.tick()
    assert transfer(bench, 2.0, rate=1e5)
    assert not transfer(bench, 2.0 + 0.9 * URGENT_INTERVAL_S, rate=1e6, num=5)
    assert transfer(bench, 2.0 + 1.1 * URGENT_INTERVAL_S, rate=1e6, num=1)

"""A whole run in virtual time: hosts, links, faults and the checker."""

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from decod.errors import ConfigError
from decod.ids import NodeId
from decod.planner.cost import Link, link_cost_s
from decod.planner.graph import FlowGraph, GraphNode, Route
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.bans import BanList
from decod.protocol.core.effects import StopReason
from decod.protocol.core.view import Reach, Role
from decod.run.protocol_config import NO_AUDITS
from decod.run.run_config import Organisation
from decod.sim.core import (
    Founding,
    InstalledFlows,
    Machine,
    Wait,
    build_machine,
    leadership_part_of,
    lost_stage,
    members_wanted,
    place_of,
)
from decod.sim.injection import Injection
from decod.sim.invariants import Checker, InvariantViolation
from decod.sim.kernel import Kernel, Trace, seeded
from decod.sim.meter import Meter
from decod.sim.network import LinkSpec, Network
from decod.sim.profile import ComputeProfile, TensorTable
from decod.sim.progress import ProgressCheck
from decod.sim.scenario import Scenario
from decod.sim.simulated_compute import StageModel
from decod.sim.simulated_host import SimHost, World

Planner = Callable[[FlowGraph], list[Route]]


class PlannedRoutes:
    """The layout of a run with described hosts, planned anew for every set of members.

    Args:
        scenario: The hosts, the links between them, and the layout's name.
        ids: Ids of all hosts, by name.

    Raises:
        ConfigError: The scenario asks for the exact routing, but its solver is not installed.
    """

    def __init__(self, scenario: Scenario, ids: Mapping[str, NodeId]) -> None:
        assert scenario.layout is not None
        rng = seeded(scenario.seed, "plan")
        lay_out = scenario.layout.lay_out
        self._plan: Planner = lambda graph: lay_out(graph, rng)
        self._graph = true_graph(scenario, ids)
        self._known: dict[frozenset[NodeId], list[Route]] = {}
        self.layout([*ids.values()])

    def layout(self, members: Collection[NodeId]) -> Sequence[Route]:
        """Return all flows among these hosts."""
        key = frozenset(members)
        if key not in self._known:
            nodes = {node_id: self._graph.nodes[node_id] for node_id in sorted(key)}
            costs = {link: cost for link, cost in self._graph.costs.items() if key.issuperset(link)}
            self._known[key] = self._plan(FlowGraph(self._graph.num_stages, nodes, costs))
        return self._known[key]

    def cost(self, path: Sequence[NodeId]) -> float:
        """Return the cost of a path, in seconds."""
        return self._graph.path_cost(path)


def true_graph(scenario: Scenario, ids: Mapping[str, NodeId]) -> FlowGraph:
    """Return the graph of a scenario's hosts, with costs by equation (1) in seconds.

    These are the costs that nodes would know if they measured without error. A node deals with
    every node of an adjacent stage here, not with `protocol.max_peers_per_stage` of them.
    """
    nodes = {
        ids[host.name]: GraphNode(ids[host.name], host.stage_index, host.capacity)
        for host in scenario.hosts
    }
    by_stage: dict[int, list[tuple[str, ComputeProfile]]] = {}
    for host in scenario.hosts:
        by_stage.setdefault(host.stage_index, []).append((host.name, host.profile))
    num_stages = scenario.stages.num_relay_stages
    costs: dict[tuple[NodeId, NodeId], float] = {}
    for stage_index in range(num_stages + 1):
        behind = (stage_index + 1) % (num_stages + 1)
        for here, mine in by_stage[stage_index]:
            for there, theirs in by_stage[behind]:
                costs[ids[here], ids[there]] = link_cost_s(
                    compute_here_s=mine.pass_s(data=stage_index == 0),
                    compute_there_s=theirs.pass_s(data=behind == 0),
                    forth=_link(scenario.links.between(here, there, seed=scenario.seed)),
                    back=_link(scenario.links.between(there, here, seed=scenario.seed)),
                    size_bytes=scenario.profile.activation_bytes,
                )
    return FlowGraph(num_stages, nodes, costs)


def _link(spec: LinkSpec) -> Link:
    return Link(spec.latency_s, spec.bandwidth_bytes_per_s)


_SEARCH_S = 2.0
"""Pause between two searches for the leader."""

_FAREWELL_S = 10.0
"""All nodes must stop within this time, plus the leader timeout, after the end of the run."""

_LOOK_INTERVAL_S = 2.0
"""Interval at which the simulation checks that the run still has the hosts that it needs."""

_WAITS_MAX = 60
"""Largest number of checks in a row at which the leader may wait for a stage's new member."""

Wrap = Callable[[str, Machine], Machine]
"""Wraps a host's machine. Tests break machines with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a run."""

    num_iterations: int
    """Number of committed iterations."""
    duration_s: float
    """Virtual time."""
    num_events: int
    """Events of the kernel, which determine the real time."""
    num_control_mean: float
    """Control messages per node and iteration, without admission."""
    num_control_max: int
    num_control_steady_mean: float
    """The same without each node's first iteration, in which it joins and flows are built."""
    num_control_steady_max: int
    control_by_kind: tuple[tuple[str, float], ...]
    """Control messages of each kind per node and iteration, most frequent first."""
    num_bulk: int
    """Number of tensors sent."""
    stored_peak_bytes: int
    """Largest storage of any node."""
    lost_stage: int | None
    """The stage whose last holder died, which ended the run early. None: no stage was lost."""
    waits_for: str
    """The run's own word on what it waits for, if hosts will not come. Empty: nothing."""
    losses: tuple[float, ...]
    """Mean loss of each iteration, as the leader announced it."""
    record: Trace
    """All events."""

    @property
    def trace(self) -> tuple[str, ...]:
        """The trace, one line per transition."""
        return tuple(self.record.lines)


class Simulation:
    """One scenario, ready to run.

    Args:
        scenario: The scenario.
        wrap: Wraps every machine before it starts.
        stopwatch: Seconds of this computer's processor, if the cores are to be timed.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        wrap: Wrap | None = None,
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        self.scenario = scenario
        self.trace = Trace()
        self.kernel = Kernel()
        self._wrap = wrap
        names = scenario.host_names
        ids = {name: _node_id(scenario.seed, name) for name in names}
        self.capacities = {ids[name]: _capacity_of(name, scenario) for name in names}
        self.checker = Checker(
            config=scenario.protocol,
            profile=scenario.profile,
            capacities=self.capacities,
            batch=scenario.batch.microbatches_per_iteration,
            replay=scenario.command(),
            trace=self.trace,
        )
        self.checker.audited = scenario.audits != NO_AUDITS
        if scenario.organisation is Organisation.SERVERS:
            self.checker.num_clients = scenario.num_clients
        self._planned = PlannedRoutes(scenario, ids) if scenario.layout else None
        network = Network(self.kernel, scenario.links, scenario.link_faults, seed=scenario.seed)
        self.meter = Meter(self.kernel, self.checker)
        self.world = World(self.kernel, network, scenario.profile, self.meter, scenario.protocol)
        self.world.audited = scenario.audits != NO_AUDITS
        if stopwatch is not None:
            self.world.stopwatch = stopwatch
        self.hosts = {name: self._host(name, ids[name]) for name in names}
        self.world.hosts.update({host.node_id: host for host in self.hosts.values()})
        self.checker.watch(self.world, steps_locally=scenario.sync.steps_locally)
        network.hide(scenario.outbound_names, self.data_hosts)
        self._num_waits = 0
        """Checks in a row at which the leader waited for a host that the run can spare."""
        self._plan_start()
        self._injection = Injection(scenario, self.world, self.hosts, self._start)
        self.meter.opened = self._injection.opened
        self._progress = ProgressCheck(scenario, self)
        if scenario.batch.num_data_nodes > 1:
            self._tell_who_leads()

    @cached_property
    def leader(self) -> SimHost:
        """The first leader."""
        return self.hosts[self.scenario.host_names[0]]

    @property
    def acting(self) -> SimHost | None:
        """The leader of the highest term, as the DHT would show it."""
        places = [(place_of(host.machine), host) for host in self.data_hosts if host.reachable]
        leading = [(place.term, host) for place, host in places if place and place.leads]
        return max(leading, key=lambda found: found[0])[1] if leading else None

    @cached_property
    def data_hosts(self) -> list[SimHost]:
        names = self.scenario.host_names[: self.scenario.batch.num_data_nodes]
        return [self.hosts[name] for name in names]

    @property
    def _end(self) -> fx.Stop | None:
        """The end of the run, at a node that led it or could have led it."""
        stop = self.leader.stop
        elsewhere = (
            StopReason.SUPERSEDED,
            StopReason.REMOVED,
            StopReason.DRAINED,
            StopReason.CRIPPLED,
        )
        if stop is not None and stop.reason not in elsewhere and self.scenario.calm_s is None:
            return stop
        stopped = [(host, host.stop) for host in self.data_hosts if host.stop is not None]
        return next((stop for host, stop in stopped if _ends_run(host, stop)), None)

    def _over(self) -> bool:
        """Return whether the run has ended, or has no node left that could continue it."""
        for host in self.data_hosts:
            if not host.reachable or host.stop is not None:
                break
        else:
            return False
        started = any(host.life for host in self.data_hosts)
        gone = started and not any(host.reachable for host in self.data_hosts)
        return self._end is not None or (gone and self._injection.num_coming == 0)

    def run(self) -> Result:
        """Run to the end.

        Raises:
            InvariantViolation: Something happened that must never happen.
            ConfigError: The scenario's faults leave too few hosts (E-CFG-070).
        """
        deserted = self._run_until_stop()
        stop = self._end
        if stop is None:
            return self._result(deserted)
        failed = stop.reason is StopReason.FAILED
        # A candidate hears only that the run is over, not that it failed.
        failed = failed or self.checker.num_iterations < self.scenario.num_iterations
        lost = self._lost_stage() if failed else None
        if stop.reason is not StopReason.FINISHED and lost is None:
            raise self._stuck(f"the leader stopped: {stop.reason.value}, {stop.detail}")
        over_s = max(self.kernel.now_s, self.scenario.calm_s or 0.0)
        over_s += self.scenario.protocol.leader_timeout_s + _FAREWELL_S
        if not self.kernel.run(until_s=over_s, done=self._all_down):
            left = [host.name for host in self.hosts.values() if host.present]
            if left:
                raise self._stuck(f"{', '.join(left)} did not hear that the run is over")
        if lost is None:
            self._check_end()
        return self._result(lost)

    def _run_until_stop(self) -> int | None:
        """Run until the leader stops. Or return the stage that nobody serves or will serve."""
        limit_s = self.scenario.duration_max_s
        while not self._over():
            if (deserted := self._deserted_stage()) is not None:
                return deserted
            next_s = self.kernel.next_s
            if next_s is None or next_s > limit_s:
                raise self._stuck(f"no end of the run within {limit_s} s")
            until_s = min(limit_s, next_s + _LOOK_INTERVAL_S)
            self.kernel.run(until_s=until_s, done=self._over)
            if self._progress.ended(self.kernel.now_s):
                return None
        if self._end is None:
            if self.scenario.hosts:
                raise self._leader_lost()
            raise self._stuck("all data nodes are gone")
        return None

    def _deserted_stage(self) -> int | None:
        """Return a stage without hosts for which the leader waits in vain.

        Only described hosts have a known stage.
        """
        leader = self.acting
        num_hosts = Counter[int]()
        if (
            leader is not None
            and not self._injection.num_coming
            and (lost := lost_stage(leader.machine))
        ):
            self._num_waits += 1
            if self._num_waits >= _WAITS_MAX:
                return lost
        else:
            self._num_waits = 0
        if self._injection.num_coming or not self.scenario.hosts or leader is None:
            # Either another leader comes, or no data node is left: see `_over`.
            return None
        for described in self.scenario.hosts:
            num_hosts[described.stage_index] += self.hosts[described.name].reachable
        for stage in range(self.scenario.stages.num_relay_stages + 1):
            wanted = members_wanted(leader.machine, data=stage == 0)
            num = num_hosts[stage]
            if num < wanted and leader is self.leader and leader.life > 1:
                raise self._leader_lost()
            if num < wanted and num > 0:
                raise ConfigError(
                    f"{num} of {wanted} hosts are left that the first iteration waits for"
                    f" at stage {stage}",
                    why="the others were lost before it began",
                    fix="let faults come later, or lower min_nodes_per_stage, or min_data_nodes for"
                    " stage 0, in [protocol]",
                    code="E-CFG-070",
                )
            if num < wanted:
                return stage
        return None

    def _leader_lost(self) -> ConfigError:
        return ConfigError(
            f"host {self.leader.name} was lost, the data node that leads the run",
            why="no run goes on without a leader, and no other data node could be elected",
            fix="take that fault out, or let another data node lead: the first in the file does",
            code="E-CFG-070",
        )

    # --- building -----------------------------------------------------------------------------

    def _host(self, name: str, node_id: NodeId) -> SimHost:
        scenario = self.scenario
        spread = scenario.speed_spread_ratio
        described = scenario.described(name)
        drawn = seeded(scenario.seed, "speed", name).uniform(1 - spread, 1 + spread)
        host = SimHost(
            name,
            node_id,
            self.world,
            self._compute(name),
            speed=drawn if described is None else 1.0,
            rng=seeded(scenario.seed, "jobs", name),
        )
        if described is not None:
            host.profile = described.profile
            activation_bytes = scenario.profile.activation_bytes
            host.tensors = TensorTable(replace(host.profile, activation_bytes=activation_bytes))
        return host

    def _compute(self, name: str) -> StageModel:
        model = StageModel(self.scenario.run)
        model.is_client = self.scenario.is_client(name)
        return model

    def _bans_of(self, host: SimHost) -> BanList:
        """Return the list of bans with which a host starts. Its daemon asks the leader for it."""
        asked = self.acting or self.leader
        host.disk.bans = max(host.disk.bans, asked.disk.bans, key=lambda bans: bans.version)
        return host.disk.bans

    def _machine(self, host: SimHost) -> Machine:
        scenario = self.scenario
        described = self.scenario.described(host.name)
        leader = self.leader if self.leader.life <= 1 else self.acting or self.leader
        founding = Founding(
            name=host.name,
            node_id=host.node_id,
            leader=leader.node_id,
            capacity=self.capacities[host.node_id],
            role=_role_of(host.name, scenario),
            reach=_reach_of(host.name, scenario),
            stage_index=None if described is None else described.stage_index,
            promise=host.disk.promise,
            bans=self._bans_of(host),
        )
        rng = seeded(scenario.seed, "machine", host.name, host.life)
        profile = scenario.profile if described is None else described.profile
        core = build_machine(founding, scenario.run, profile, rng=rng)
        machine: Machine = core
        if self._planned is not None:
            machine = InstalledFlows(core, self._planned.layout, self._planned.cost)
        return machine if self._wrap is None else self._wrap(host.name, machine)

    def _plan_start(self) -> None:
        rng = seeded(self.scenario.seed, "start")
        for host in self.hosts.values():
            delay_s = 0.0
            if host is not self.leader:
                delay_s = rng.uniform(0.0, self.scenario.join_spread_s)
            self.kernel.after(delay_s, self._start, host)

    def _start(self, host: SimHost) -> None:
        if host.life and self.scenario.batch.num_data_nodes > 1 and self.acting is None:
            # The host has run before. It knows by now that there is no leader to contact.
            self.kernel.after(_SEARCH_S, self._start, host)
            return
        self._injection.num_coming -= 1
        if host.reachable or self._end is not None:
            return  # After the end of the run there is no leader to contact.
        host.compute = self._compute(host.name)
        host.start(self._machine(host))

    def _tell_who_leads(self) -> None:
        """Tell seekers who leads, as the DHT would: candidates, and leaders without a quorum.

        The others may have forgotten a leader without a quorum.
        """
        acting = self.acting
        if acting is not None and (leading := place_of(acting.machine)) is not None:
            found = ev.LeaderFound(acting.node_id, leading.term)
            for host in self.hosts.values():
                if host is not acting and host.reachable and self._seeks(host, acting):
                    host.deliver(found)
        self.kernel.after(_SEARCH_S, self._tell_who_leads)

    def _seeks(self, host: SimHost, acting: SimHost) -> bool:
        place = place_of(host.machine)
        if place is None or not place.leads:
            return place is not None and not place.iteration.number
        part = leadership_part_of(host.machine)
        lacks = part is not None and part.wait is Wait.QUORUM
        return lacks and self.world.network.joins(host, acting)

    # --- the end ------------------------------------------------------------------------------

    def _all_down(self) -> bool:
        # A frozen host hears of the end when it thaws.
        return not any(host.present for host in self.hosts.values())

    def _stuck(self, what: str) -> InvariantViolation:
        return self.checker.violated("I7", self.leader, what)

    def _lost_stage(self) -> int | None:
        """Return a stage whose committed parameters are lost, which no run survives."""
        if self.checker.num_iterations == 0:
            return None
        # The run may have given up a host that stalled or was cut off. Its state is then lost, too.
        cut_off = {name for cut in self.scenario.cuts for name in (*cut.senders, *cut.receivers)}
        hosts = [host for host in self.hosts.values() if host.name not in cut_off]
        alive = [host.compute for host in hosts if host.reachable and not host.frozen_until_s]
        holders = {c.stage_index for c in alive if c.iteration > 0 and not c.is_client}
        stages = (*range(1, self.scenario.stages.num_relay_stages + 1), 0)
        return next((stage for stage in stages if stage not in holders), None)

    def _check_end(self) -> None:
        num = self.scenario.num_iterations
        if self.checker.num_iterations != num:
            raise self._stuck(f"{self.checker.num_iterations} iterations committed, {num} wanted")
        members = self._last_members()
        for host in self.hosts.values():
            if host.stop is not None:
                self.checker.check_counted(host)
            finished = host.stop is not None and host.stop.reason is StopReason.FINISHED
            # A host that was left out before the end hears of the end, too. So does one that has
            # started again just before.
            entered = finished and host.node_id in members and self._entered(host)
            entered = entered and not host.compute.is_client
            if entered and host.compute.iteration != num:
                what = f"it finished after {host.compute.iteration} of {num} iterations"
                raise self.checker.violated("I3", host, what)
            if finished and host.num_leaked:
                what = f"{host.num_leaked} tensors were never freed"
                raise self.checker.violated("I6", host, what)

    @staticmethod
    def _entered(host: SimHost) -> bool:
        """Return whether a host has been a member since it started last."""
        place = place_of(host.machine)
        return place is not None and place.in_view

    def _last_members(self) -> tuple[NodeId, ...]:
        """Return the members at the end of the run."""
        parts = [leadership_part_of(host.machine) for host in self.data_hosts if host.life]
        known = [part for part in parts if part is not None]
        return max(known, key=lambda part: part.place).members

    def _result(self, lost_stage: int | None) -> Result:
        per_iteration = [
            num
            for _, counts in sorted(self.checker.traffic.nodes.items())
            for num in counts.control_per_iteration
        ]
        steady = [
            num
            for counts in self.checker.traffic.nodes.values()
            for num in counts.control_per_iteration[1:]
        ]
        hosts = self.hosts.values()
        kinds = sum((host.control_by_kind for host in hosts), Counter[type]())
        share = 1 / (len(self.hosts) * max(1, self.checker.num_iterations))
        return Result(
            num_iterations=self.checker.num_iterations,
            duration_s=self.kernel.now_s,
            num_events=self.kernel.num_events,
            num_control_mean=sum(per_iteration) / max(1, len(per_iteration)),
            num_control_max=max(per_iteration, default=0),
            num_control_steady_mean=sum(steady) / max(1, len(steady)),
            num_control_steady_max=max(steady, default=0),
            control_by_kind=tuple(
                (kind.__name__, num * share) for kind, num in kinds.most_common()
            ),
            num_bulk=sum(host.num_bulk_sent for host in hosts),
            stored_peak_bytes=max(host.tensors.stored_peak_bytes for host in hosts),
            lost_stage=lost_stage,
            waits_for=self._progress.waits_for,
            losses=self.checker.losses,
            record=self.trace,
        )


def run_scenario(scenario: Scenario, *, wrap: Wrap | None = None) -> Result:
    """Run a scenario to its end.

    Raises:
        InvariantViolation: Something happened that must never happen.
        ConfigError: The scenario's faults leave too few hosts (E-CFG-070).
    """
    return Simulation(scenario, wrap=wrap).run()


def _ends_run(host: SimHost, stop: fx.Stop) -> bool:
    place = place_of(host.machine)
    leads = place is not None and place.leads
    return stop.reason is StopReason.FINISHED or (stop.reason is StopReason.FAILED and leads)


def _node_id(seed: int, name: str) -> NodeId:
    """Return an id like a real node's. It sorts nodes in another order than their names do."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return NodeId(base64.b32encode(digest).decode().rstrip("=").lower())


def _role_of(name: str, scenario: Scenario) -> Role:
    if scenario.is_client(name):
        return Role.CLIENT
    return Role.DATA if scenario.is_data(name) else Role.RELAY


def _reach_of(name: str, scenario: Scenario) -> Reach:
    if scenario.is_data(name):
        return Reach.PASSES_ON
    return Reach.OUTBOUND if name in scenario.outbound_names else Reach.DIALLED


def _capacity_of(name: str, scenario: Scenario) -> int:
    described = scenario.described(name)
    if described is not None:
        return described.capacity
    if scenario.is_data(name):
        return scenario.batch.num_microbatches
    rng = seeded(scenario.seed, "capacity", name)
    return rng.randint(scenario.capacity_min, scenario.capacity_max)

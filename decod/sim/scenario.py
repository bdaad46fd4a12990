"""A simulated run's setting: its nodes, links and faults.

A scenario is plain data. The same scenario gives the same run to the last line of its trace. It can
be written as a command line, so one pasted line repeats a failure.
"""

import itertools
import random
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

from typing_extensions import override

from decod.compression.plan import Method
from decod.errors import ConfigError
from decod.planner.graph import FlowGraph, Route
from decod.run.protocol_config import NO_AUDITS, AuditConfig, ProtocolConfig
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    BatchConfig,
    OptimizerConfig,
    ServersConfig,
    SyncConfig,
    SyncMethod,
)
from decod.sim.kernel import seeded
from decod.sim.network import LinkFaults, Links
from decod.sim.profile import ComputeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """A relay crashes or comes back in an iteration.

    The draw fixes the relay, the iteration and the share of the iteration's length. It does not
    depend on how a run goes. Runs of the same seed therefore meet the same losses under every
    policy, even if their iterations differ in length. The first iteration has no churn, because the
    length of an iteration is still unknown.

    The draw never takes the last relay that surely holds its stage's state: the paper assumes that
    "at least one node remains active per stage". A relay that has come back counts as a holder from
    the second iteration after its return.

    Source: GWTF, section VI, "Node Crashes", and section VII, "Checkpointing".
    """

    iteration: int
    host: str
    at_ratio: float
    """When, after the iteration's opening: a share, 0 to 1, of its expected length."""
    returns: bool


def draw_churn(
    rng: random.Random, stages: Mapping[str, int], *, ratio: float, num_iterations: int
) -> tuple[Churn, ...]:
    """Return all crashes and returns of a run, in order.

    Args:
        rng: Source of all draws.
        stages: The relays' names, and the stage that each serves while it is up.
        ratio: Chance, per relay and iteration, that a relay crashes or, if it is gone, comes back.
        num_iterations: Last iteration to draw for; the first is the second.
    """
    holds_from: dict[str, int | None] = dict.fromkeys(stages, 0)
    drawn: list[Churn] = []
    for iteration in range(2, num_iterations + 1):
        found = []
        for name in rng.sample(sorted(stages), len(stages)):
            strikes = rng.random() < ratio
            at_ratio = rng.random()
            gone = holds_from[name] is None
            if not strikes or (not gone and not _others(name, iteration, stages, holds_from)):
                continue
            holds_from[name] = iteration + 2 if gone else None
            found.append(Churn(iteration=iteration, host=name, at_ratio=at_ratio, returns=gone))
        drawn += sorted(found, key=lambda churn: churn.at_ratio)
    return tuple(drawn)


def _others(
    name: str, iteration: int, stages: Mapping[str, int], holds_from: Mapping[str, int | None]
) -> Sequence[str]:
    """Return the other relays that hold the state of a relay's stage."""
    return [
        other
        for other, since in holds_from.items()
        if other != name and stages[other] == stages[name] and since is not None
        if since <= iteration
    ]


class Instants:
    """Turns shares of an iteration into instants, as a run goes on.

    Args:
        churn: All crashes and returns of the run.
    """

    def __init__(self, churn: Iterable[Churn]) -> None:
        self._churn = tuple(churn)
        self._opened_s: list[float] = []

    def opened(self, now_s: float, iteration: int) -> list[tuple[float, Churn]]:
        """Return the churn of an iteration that opens now, each with its delay in seconds.

        The expected length of the iteration is the median length of the earlier ones.
        """
        self._opened_s.append(now_s)
        lengths_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise(self._opened_s)]
        if not lengths_s:
            return []
        usual_s = statistics.median(lengths_s)
        return [(c.at_ratio * usual_s, c) for c in self._churn if c.iteration == iteration]


@dataclass(frozen=True, slots=True)
class FlowLayout:
    """A way to lay out flows from outside, with the true costs of all links."""

    name: str
    lay_out: Callable[[FlowGraph, Random], list[Route]]


class FaultKind(StrEnum):
    KILL = "kill"
    """The process crashes; its machine refuses connections."""
    VANISH = "vanish"
    """The machine is gone; senders wait for timeouts."""
    FREEZE = "freeze"
    """The process is suspended for a while: nothing happens there, and nothing is lost."""
    DOZE = "doze"
    """As a freeze, of the node's process alone: its compute process goes on with what it has."""
    CLOCK = "clock"
    """The host's clock stops for a while. Everything else goes on."""
    RESTART = "restart"
    """The process crashes. A new one with the same identity starts after a while."""
    COMPUTE = "compute"
    """The compute process dies. The node lives on."""
    HANG = "hang"
    """The compute process hangs for good. The node lives on and answers."""
    STALL = "stall"
    """The compute process stands still for a while, then goes on."""
    DRAIN = "drain"
    """The operator asks the node to leave."""
    BAN = "ban"
    """The leader's operator bans the node, and lifts the ban after a while. Then it joins again."""
    RECUT = "recut"
    """The leader's operator has the model cut anew, whoever leads."""
    STAGE = "stage"
    """The process crashes, and so do those of all other members of its stage."""
    FLIP = "flip"
    """A bit of the host's parameters flips."""
    PAUSE = "pause"
    """The operator pauses the node, and resumes it after a while."""
    FREE = "free"
    """The operator pauses the node, frees its device, and resumes it later."""
    SLOW = "slow"
    """The host's device works at a tenth of its speed for a while."""
    DISK = "disk"
    """The host's disk is full for a while: it can keep neither a vote nor a state."""
    SPOIL = "spoil"
    """The newest intact state of each stage on the host's disk is altered."""
    ROT = "rot"
    """A bit flips in an average that the host received, so it proposes another step than its stage.
    The only member of a stage would not be found out."""
    LIE = "lie"
    """The host's results are false from then on."""
    STALE = "stale"
    """At every fourth microbatch, the host returns results of before, from then on."""
    MEANS = "means"
    """The host falsifies from then on the means that it computes for its stage."""
    ACCUSE = "accuse"
    """The host says from then on that the work of others is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A host that is described instead of drawn."""

    name: str
    stage_index: int
    """0 for data nodes."""
    capacity: int
    profile: ComputeProfile
    """The host's own times, and what its averages send. Other sizes come from the scenario."""


_FAULT = re.compile(r"(\w+):([\w-]+)(?:@([\d.]+)|#(\d+)|!([A-Z][A-Za-z]+)\.(\d+))(?:\+([\d.]+))?")


@dataclass(frozen=True, slots=True)
class HostFault:
    """A fault of a host: at an instant, after a number of events, or before a message."""

    kind: FaultKind
    host: str
    at_s: float | None = None
    after_num_events: int | None = None
    before_message: tuple[str, int] | None = None
    """Name of a kind of message, and the number of the message of this kind, counted from 1.
    Earlier messages of the same step have left by then."""
    duration_s: float = 10.0
    """Duration of a freeze, pause or ban, or the time before a restart."""

    @override
    def __str__(self) -> str:
        when = f"@{self.at_s!r}" if self.after_num_events is None else f"#{self.after_num_events}"
        if self.before_message is not None:
            when = "!{}.{}".format(*self.before_message)
        return f"{self.kind}:{self.host}{when}+{self.duration_s!r}"

    @staticmethod
    def parse(text: str) -> "HostFault":
        """Read `KIND:HOST@SECONDS`, `KIND:HOST#EVENTS` or `KIND:HOST!MESSAGE.NUMBER`.

        Each form may end in `+DURATION`.

        Raises:
            ConfigError: The text has another form.
        """
        match = _FAULT.fullmatch(text)
        if match is None or match[1] not in list(FaultKind):
            raise ConfigError(
                f"fault is {text!r}",
                why="it does not say what happens to which host, and when",
                fix="write KIND:HOST@SECONDS, KIND:HOST#EVENTS or KIND:HOST!MESSAGE.NUMBER, with"
                f" KIND one of {', '.join(FaultKind)}",
            )
        return HostFault(
            FaultKind(match[1]),
            match[2],
            at_s=float(match[3]) if match[3] else None,
            after_num_events=int(match[4]) if match[4] else None,
            before_message=(match[5], int(match[6])) if match[5] else None,
            duration_s=float(match[7]) if match[7] else 10.0,
        )


_CUT = re.compile(r"([\w,-]+)([>|])([\w,-]+)@([\d.]+)\+([\d.]+)(?:=([\d.]+))?")


@dataclass(frozen=True, slots=True)
class Cut:
    """Links between two groups of hosts that carry nothing, or little, for a while.

    A host in neither group still reaches both: it is the bridge.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    at_s: float
    duration_s: float
    both_ways: bool = True
    rate_bytes_per_s: float = 0.0
    """Rate of tensors; messages travel as usual. 0: nothing gets through, not even messages."""

    @property
    def culprit(self) -> str | None:
        """The host whose links all these are; None if it is not clear which host that is."""
        sides = sorted((self.senders, self.receivers), key=len)
        return sides[0][0] if len(sides[0]) == 1 < len(sides[1]) else None

    @override
    def __str__(self) -> str:
        sign = "|" if self.both_ways else ">"
        sides = f"{','.join(self.senders)}{sign}{','.join(self.receivers)}"
        rate = f"={self.rate_bytes_per_s!r}" if self.rate_bytes_per_s else ""
        return f"{sides}@{self.at_s!r}+{self.duration_s!r}{rate}"

    @staticmethod
    def parse(text: str) -> "Cut":
        """Read `HOST,HOST|HOST@SECONDS+DURATION`.

        `>` instead of `|` cuts only the way there. `=RATE` at the end lets tensors through at that
        many bytes per second.

        Raises:
            ConfigError: The text has another form.
        """
        match = _CUT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"cut is {text!r}",
                why="it does not say which links carry nothing, and when",
                fix="write HOST,HOST|HOST,HOST@SECONDS+DURATION, with > for | to cut one way only,"
                " and =BYTES_PER_S at the end if tensors travel slowly",
            )
        here = tuple(match[1].split(","))
        there = tuple(match[3].split(","))
        rate = float(match[6]) if match[6] else 0.0
        return Cut(here, there, float(match[4]), float(match[5]), match[2] == "|", rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run."""

    seed: int = 0
    """Determines everything random."""
    num_relays: int = 4
    """Relays are dealt out over the relay stages in turn. With servers, the relays are those."""
    num_clients: int = 0
    """Hosts that come and go, and work for the servers of a stage."""
    capacity_min: int = 2
    capacity_max: int = 4
    """Relay capacities are drawn from this range, ends included. Data nodes hold their share."""
    num_outbound: int = 0
    """Relays that nobody can dial, the last ones. Two of them talk by way of a data node."""
    num_iterations: int = 3
    organisation: Organisation = Organisation.PIPELINE
    stages: StagesConfig = field(default_factory=StagesConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The first data node leads at the start."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Only the norm matters to which gradients are scaled down."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """See `sync_of`."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    audits: AuditConfig = NO_AUDITS
    join_spread_s: float = 1.0
    """Hosts start within this time."""
    speed_spread_ratio: float = 0.3
    """Largest deviation of a host's speed from the profile, as a share."""
    duration_max_s: float = 3600.0
    """Virtual time within which the run must be over (I7)."""
    profile: ComputeProfile = field(default_factory=ComputeProfile)
    links: Links = field(default_factory=Links)
    link_faults: LinkFaults = field(default_factory=LinkFaults)
    faults: tuple[HostFault, ...] = ()
    cuts: tuple[Cut, ...] = ()
    calm_s: float | None = None
    """When all faults are over. From then on the run must make progress, or say what it waits for
    (I7). Nodes that the run has given up come back by themselves, as their daemons or operators
    would ensure. None: no such instant."""
    churn: tuple[Churn, ...] = ()
    """Crashes and returns by iteration, besides the faults."""
    layout: FlowLayout | None = None
    """How flows are laid out from outside. None: the nodes find them by themselves, as
    `protocol.routing` says."""
    hosts: tuple[HostSpec, ...] = ()
    """If given: all hosts, data nodes first and clients last, in the numbers above. Only the jitter
    of their jobs is then drawn."""

    def __post_init__(self) -> None:
        if (
            not 1 <= self.stages.num_relay_stages <= self.num_relays
            or self.batch.num_data_nodes < 1
        ):
            raise ConfigError(
                f"{self.num_relays} relays for {self.stages.num_relay_stages} stages and"
                f" {self.batch.num_data_nodes} data nodes",
                why="every relay stage needs a relay, and every run a data node",
                fix="raise the number of relays or lower that of stages",
            )
        if not 1 <= self.capacity_min <= self.capacity_max or self.batch.num_microbatches < 1:
            raise ConfigError(
                f"capacities are {self.capacity_min} to {self.capacity_max}"
                f" and microbatches {self.batch.num_microbatches}",
                why="a node holds at least one microbatch, and a batch has at least one",
                fix="give positive numbers, the smaller capacity first",
            )
        if self.hosts:
            self._check_hosts()
        elif self.layout is not None:
            raise ConfigError(
                f"routing is {self.routing}",
                why="the stages of hosts that are drawn are not known beforehand",
                fix="describe the hosts",
            )
        names = self.host_names
        struck: list[tuple[HostFault | Cut, str]] = [(fault, fault.host) for fault in self.faults]
        struck += [(cut, host) for cut in self.cuts for host in (*cut.senders, *cut.receivers)]
        for fault, host in struck:
            if host not in names:
                raise ConfigError(
                    f"fault {fault} is for {host}",
                    why="there is no such host",
                    fix=f"name one of {names[0]} to {names[-1]}",
                )

    def _check_hosts(self) -> None:
        stages = [host.stage_index for host in self.hosts]
        num_data = self.batch.num_data_nodes
        assert stages[:num_data] == [0] * num_data
        assert len(stages) == num_data + self.num_relays + self.num_clients
        assert {*stages} == {*range(self.stages.num_relay_stages + 1)}

    def is_data(self, name: str) -> bool:
        """Return whether a host is a data node."""
        return self.host_names.index(name) < self.batch.num_data_nodes

    @property
    def outbound_names(self) -> list[str]:
        """Names of the relays that nobody can dial."""
        relays = [name for name in self.host_names if not self.is_data(name)]
        relays = relays[: self.num_relays]
        return relays[len(relays) - self.num_outbound :]

    def is_client(self, name: str) -> bool:
        """Return whether a host is a client."""
        return self.host_names.index(name) >= self.batch.num_data_nodes + self.num_relays

    @property
    def run(self) -> RunConfig:
        """The settings of the run."""
        protocol = self.protocol
        if self.layout is not None:
            # The nodes do not search for flows that are laid out from outside.
            protocol = replace(protocol, routing="greedy")
        return RunConfig(
            seed=self.seed,
            organisation=self.organisation,
            num_iterations=self.num_iterations,
            stages=self.stages,
            batch=self.batch,
            optimizer=self.optimizer,
            sync=self.sync,
            servers=self.servers,
            protocol=protocol,
            audits=self.audits,
        )

    def described(self, name: str) -> HostSpec | None:
        """Return a host's description, or None if the host is drawn."""
        return next((host for host in self.hosts if host.name == name), None)

    @property
    def host_names(self) -> list[str]:
        """Names of all hosts: data nodes, relays, clients. The first leads at the start."""
        if self.hosts:
            return [host.name for host in self.hosts]
        data = [f"data{index}" for index in range(self.batch.num_data_nodes)]
        relays = [f"relay{index}" for index in range(self.num_relays)]
        return data + relays + [f"client{index}" for index in range(self.num_clients)]

    def command(self) -> str:
        """Return the command that replays this scenario.

        Links, profile and protocol have no options: they become a comment unless they are the
        defaults.
        """
        words = ["python", "-m", "decod.sim"]
        default = Scenario()
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value != getattr(default, name) or name == "seed":
                words += [option, str(value)]
        for name, option in SYNC_OPTIONS.items():
            value = getattr(self.sync, name)
            if value != getattr(default.sync, name):
                words += [option, str(int(value) if isinstance(value, bool) else value)]
        for (part, name), option in PART_OPTIONS.items():
            value = getattr(getattr(self, part), name)
            if value != getattr(getattr(default, part), name):
                words += [option, str(value)]
        for fault in self.faults:
            words += ["--fault", str(fault)]
        for cut in self.cuts:
            words += ["--cut", str(cut)]
        if self.calm_s is not None:
            words += ["--calm-s", str(self.calm_s)]
        others = [
            f"{name}={getattr(self, name)}"
            for name in _UNSPOKEN
            if self._unspoken(name, default) != getattr(default, name)
        ]
        return shlex.join(words) + (f"  # with {', '.join(others)}" if others else "")

    @property
    def routing(self) -> str:
        """Where flows come from: the layout, or the nodes' own routing."""
        return self.layout.name if self.layout is not None else self.protocol.routing

    def _unspoken(self, part: str, default: "Scenario") -> object:
        """Return a part with the defaults of all fields that options say."""
        value = getattr(self, part)
        usual = getattr(default, part)
        spoken = {name: getattr(usual, name) for owner, name in PART_OPTIONS if owner == part}
        return replace(value, **spoken) if spoken else value

    def with_values(self, values: Mapping[tuple[str, str], Any]) -> "Scenario":
        """Return a copy with some fields of its parts, by part and name, replaced.

        Raises:
            ConfigError: The values contradict each other.
        """
        return replace(self, **self.parts_with(values))

    def parts_with(self, values: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        """Return the parts of which some fields, by part and name, are replaced."""
        changed: dict[str, Any] = {}
        # Replace all fields of a part at once, because some must keep a relation to each other.
        for part in dict.fromkeys(part for part, _ in values):
            fields = {name: value for (owner, name), value in values.items() if owner == part}
            changed[part] = replace(getattr(self, part), **fields)
        return changed


_UNSPOKEN = (
    "stages",
    "batch",
    "optimizer",
    "servers",
    "profile",
    "links",
    "link_faults",
    "protocol",
    "audits",
    "hosts",
    "layout",
    "churn",
)
"""Fields that options say in part or not at all."""

OPTIONS = {
    "seed": "--seed",
    "num_relays": "--relays",
    "organisation": "--organisation",
    "num_clients": "--clients",
    "num_outbound": "--outbound",
    "capacity_min": "--capacity-min",
    "capacity_max": "--capacity-max",
    "num_iterations": "--iterations",
    "join_spread_s": "--join-spread-s",
    "speed_spread_ratio": "--speed-spread-ratio",
    "duration_max_s": "--duration-max-s",
}
"""Fields of a scenario, and the command-line options that set them."""

SYNC_OPTIONS = {
    "every": "--sync-every",
    "overlap": "--overlap",
    "num_phases": "--phases",
    "fragments": "--fragments",
    "quorum": "--quorum",
    "reread": "--reread",
}
"""Arguments of `sync_of`, and the options that set them."""

PART_OPTIONS = {
    ("stages", "num_relay_stages"): "--stages",
    ("batch", "num_data_nodes"): "--data-nodes",
    ("batch", "num_microbatches"): "--microbatches",
    ("optimizer", "clip_norm"): "--clip-norm",
    ("servers", "delay"): "--delay",
    ("links", "spread_ratio"): "--link-spread-ratio",
    ("link_faults", "loss_ratio"): "--loss-ratio",
    ("link_faults", "duplicate_ratio"): "--duplicate-ratio",
    ("link_faults", "delay_ratio"): "--delay-ratio",
    ("link_faults", "reorder_ratio"): "--reorder-ratio",
    ("link_faults", "corrupt_ratio"): "--corrupt-ratio",
    ("link_faults", "delay_max_s"): "--delay-max-s",
    ("link_faults", "retry_timeout_s"): "--retry-timeout-s",
    ("link_faults", "until_s"): "--link-faults-until-s",
    ("protocol", "min_nodes_per_stage"): "--min-nodes-per-stage",
    ("protocol", "min_data_nodes"): "--min-data-nodes",
    ("protocol", "iteration_timeout_s"): "--iteration-timeout-s",
    ("protocol", "heartbeat_interval_s"): "--heartbeat-interval-s",
    ("protocol", "heartbeat_timeout_s"): "--heartbeat-timeout-s",
    ("protocol", "probe_timeout_s"): "--probe-timeout-s",
    ("protocol", "election_timeout_s"): "--election-timeout-s",
    ("protocol", "leader_timeout_s"): "--leader-timeout-s",
    ("protocol", "routing"): "--routing",
    ("audits", "share"): "--audit-share",
    ("audits", "share_in_probation"): "--audit-share-in-probation",
    ("profile", "optimizer_s"): "--optimizer-s",
    ("profile", "activation_bytes"): "--activation-bytes",
    ("profile", "parameter_bytes"): "--parameter-bytes",
}
"""Fields of a scenario's parts, and the options that set them."""


def sync_of(
    every: int = 1,
    *,
    overlap: bool = False,
    fragments: int = 1,
    quorum: float = 1.0,
    reread: bool = False,
    num_phases: int = 1,
) -> SyncConfig:
    """Return how nodes keep together that average every so many iterations.

    With 1, they average gradients, and neither `overlap` nor `reread` changes anything.

    Args:
        every: As in `SyncConfig`, like most others.
        overlap: See there.
        fragments: See there.
        quorum: See there. Without `overlap`, all are waited for.
        reread: See there.
        num_phases: Of an average: 2 if matrices travel as factors.
    """
    locally = every > 1
    return SyncConfig(
        method=SyncMethod.DILOCO if locally else SyncMethod.GRADIENTS,
        every=every,
        overlap=overlap and locally,
        fragments=fragments,
        quorum=quorum if overlap and locally else 1.0,
        reread=reread and locally,
        compression=Method.LOWRANK if num_phases > 1 else Method.NONE,
    )


def random_scenario(seed: int, **fixed: object) -> Scenario:
    """Return a small scenario drawn from a seed. The `fixed` fields keep their values."""
    rng = seeded(seed, "scenario")
    num_relay_stages = rng.randint(1, 3)
    num_data_nodes = rng.choice((1, 1, 1, 2))
    num_relays = num_relay_stages * rng.randint(2, 3) + rng.randint(0, 1)
    capacity_max = rng.randint(1, 4)
    drawn: dict[str, object] = {
        "seed": seed,
        "stages": StagesConfig(num_relay_stages=num_relay_stages),
        "batch": BatchConfig(num_data_nodes=num_data_nodes, num_microbatches=rng.randint(1, 8)),
        "num_relays": num_relays,
        "capacity_min": 1,
        "capacity_max": capacity_max,
        "num_iterations": 3,
    }
    return Scenario(**(drawn | fixed))  # type: ignore[arg-type]


def rush_scenario(num_volunteers: int, *, num_relay_stages: int, num_iterations: int) -> Scenario:
    """Return a run that begins with its first relays, while volunteers come for a minute.

    Its flows are not improved, since that has nothing to do with how volunteers enter.
    """
    return Scenario(
        seed=1,
        num_relays=num_volunteers,
        stages=StagesConfig(num_relay_stages=num_relay_stages),
        batch=BatchConfig(num_microbatches=4),
        num_iterations=num_iterations,
        join_spread_s=60.0,
        duration_max_s=2000.0,
        protocol=ProtocolConfig(min_nodes_per_stage=1, max_peers_per_stage=3, routing="greedy"),
    )


_PATIENCE_S = 36_000.0


def patient_protocol(min_nodes_per_stage: int) -> ProtocolConfig:
    """Return timeouts that no slow link reaches, for members that keep all activations."""
    return ProtocolConfig(
        min_nodes_per_stage=min_nodes_per_stage,
        complete_timeout_s=_PATIENCE_S,
        iteration_timeout_s=2 * _PATIENCE_S,
        heartbeat_interval_s=10.0,
        heartbeat_timeout_s=30.0,
        election_timeout_s=60.0,
        utilisation_interval_s=60.0,
        keep_max_bytes=1 << 43,
        snapshot_every_iterations=0,
    )

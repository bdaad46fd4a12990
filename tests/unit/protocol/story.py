"""Plays a scenario text: a few whole nodes in the simulator, told by what they say and when.

The nodes run the core as it is. The simulator gives them links, devices, disks and virtual time,
and its checker watches the invariants meanwhile. `scenarios/README.md` explains the commands.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.effects import Effect
from decod.protocol.core.view import Role
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import AuditConfig, ProtocolConfig
from decod.run.run_config import Organisation
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig, ServersConfig
from decod.sim.core import Founding, Machine, build_machine
from decod.sim.injection import Injection
from decod.sim.kernel import seeded
from decod.sim.network import LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Cut, FaultKind, HostFault, HostSpec, Scenario, sync_of
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation
from tests.unit.protocol.telling import fields_of, names_in

PATIENCE_S = 600.0
"""How long `until` waits, in virtual time."""

_SYNC = {"sync_every": "every", "overlap": "overlap", "reread": "reread"}
"""Options of `run` that say how nodes keep together, and the arguments of `sync_of`."""

_ROLES = {"d": Role.DATA, "c": Role.CLIENT}
"""By the first letter of a host's name. All others are relays."""


@dataclass(slots=True)
class Watch:
    """One word behind `show`: a kind of message, note or state, perhaps of one node only."""

    kind: str
    node: str
    num_left: int
    """How many more it shows."""

    @staticmethod
    def of(word: str) -> "Watch":
        """Read `Deny`, `Deny:r1a` (to or from it), `Deny:r1a>` (from it) or `Deny/2` (two only)."""
        rest, _, num = word.partition("/")
        kind, _, node = rest.partition(":")
        return Watch(kind, node, int(num or 10**9))

    def shows(self, kind: str, node: str, *receivers: str) -> bool:
        """Return whether something is of this kind, and count it."""
        nodes = ("", node, f"{node}>", *receivers)
        if self.kind != kind or self.node not in nodes or not self.num_left:
            return False
        self.num_left -= 1
        return True


@dataclass(slots=True)
class Strike:
    """What `lose` and `hold` do to the next messages of a kind."""

    kind: str
    sender: str
    receiver: str
    num_left: int
    delay_s: float | None
    """None: the message is lost, and its sender hears of it."""

    def hits(self, kind: str, sender: str, receiver: str) -> bool:
        wanted = (self.kind, self.sender or sender, self.receiver or receiver)
        return self.num_left > 0 and wanted == (kind, sender, receiver)


class Told:
    """A node's core, whose steps are told to the story."""

    def __init__(self, story: "Story", name: str, machine: NodeMachine) -> None:
        self.wrapped = machine
        self._story, self._name = story, name

    @property
    def deadline_s(self) -> float | None:
        return self.wrapped.deadline_s

    def start(self, now_s: float) -> list[Effect]:
        return self._story.stepped(self._name, self.wrapped, self.wrapped.start(now_s))

    def step(self, now_s: float, event: ev.Event) -> list[Effect]:
        if isinstance(event, ev.SendFailed):
            self._story.failed(self._name, event)
        return self._story.stepped(self._name, self.wrapped, self.wrapped.step(now_s, event))


class Stage(Simulation):
    """A simulation whose hosts start when the story says so."""

    def __init__(self, scenario: Scenario, story: "Story", later: set[str]) -> None:
        self._story, self._later = story, later
        super().__init__(scenario)

    @override
    def _plan_start(self) -> None:
        for name, host in self.hosts.items():
            if name not in self._later:
                self.kernel.after(0.0, self._start, host)

    def start(self, name: str) -> None:
        self._start(self.hosts[name])

    @property
    def injection(self) -> Injection:
        return self._injection

    @override
    def _machine(self, host: SimHost) -> Machine:
        scenario = self.scenario
        described, leader = scenario.described(host.name), self.acting or self.leader
        assert described is not None
        founding = Founding(
            name=host.name,
            node_id=host.node_id,
            leader=leader.node_id,
            capacity=described.capacity,
            role=_ROLES.get(host.name[0], Role.RELAY),
            # A volunteer `v1` lets the leader choose.
            stage_index=None if host.name.startswith("v") else described.stage_index,
            promise=host.disk.promise,
            bans=self._bans_of(host),
        )
        rng = seeded(scenario.seed, "machine", host.name, host.life)
        core = build_machine(founding, scenario.run, described.profile, rng=rng)
        return Told(self._story, host.name, core)


class Story:
    """Runs the commands of one text.

    Attributes:
        seen: What the commands so far have brought about and nobody has taken yet, as lines.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._stage: Stage | None = None
        self._names: dict[NodeId, str] = {}
        self._texts: dict[str, str] = {}
        self._watches: list[Watch] = []
        self._strikes: list[Strike] = []
        self._refusals: dict[tuple[str, str], str] = {}
        self._states: dict[tuple[str, str], str] = {}
        self._goal: tuple[Watch, int] | None = None

    def tell(self, command: str) -> list[str]:
        """Run a command; returns what came of it."""
        verb, *words = command.split()
        getattr(self, f"do_{verb.replace('-', '_')}")(words)
        told, self.seen = self.seen, []
        return told

    # --- commands -----------------------------------------------------------------------------

    def do_run(self, words: list[str]) -> None:
        """Begin: hosts, `later` and hosts that `start` starts, fields of the configuration."""
        pairs = (word.split(":") for word in words if ":" in word)
        options: dict[str, Any] = {key: _value(value) for key, value in pairs}
        named = [word for word in words if ":" not in word]
        later = named[named.index("later") + 1 :] if "later" in named else []
        casting = [_host(word, options) for word in named if word != "later"]
        hosts = sorted(casting, key=lambda host: (host.name[0] != "d", host.name[0] == "c"))
        num_data_nodes = sum(host.name[0] == "d" for host in hosts)
        num_clients = sum(host.name[0] == "c" for host in hosts)
        # Data nodes beyond this number find no place.
        num_data_nodes = int(options.pop("data_nodes", num_data_nodes))
        audited = float(options.pop("audited", 0.0))
        sync = {_SYNC[key]: options.pop(key) for key in [*options] if key in _SYNC}
        batch = BatchConfig(
            num_data_nodes=num_data_nodes, num_microbatches=options.pop("microbatches", 2)
        )
        scenario = Scenario(
            num_iterations=options.pop("iterations", 3),
            organisation=Organisation(options.pop("organisation", "pipeline")),
            batch=batch,
            optimizer=OptimizerConfig(clip_norm=options.pop("clip_norm", 0.0)),
            sync=sync_of(**sync),
            servers=ServersConfig(delay=options.pop("delay", 0)),
            num_relays=len(hosts) - num_data_nodes - num_clients,
            num_clients=num_clients,
            stages=StagesConfig(num_relay_stages=max(host.stage_index for host in hosts)),
            hosts=tuple(hosts),
            protocol=ProtocolConfig(**options),
            audits=AuditConfig(share=audited, share_in_probation=audited),
        )
        self._stage = Stage(scenario, self, {word.partition("=")[0] for word in later})
        self._names = {host.node_id: name for name, host in self._stage.hosts.items()}
        # A flow's id shows the start of its data node's.
        self._texts = {i[:length]: name for length in (None, 8) for i, name in self._names.items()}

    def do_show(self, words: list[str]) -> None:
        """Show these kinds of messages, notes and states from now on, and no others."""
        self._watches = [Watch.of(word) for word in words]

    def do_start(self, words: list[str]) -> None:
        for name in words:
            self.stage.start(name)

    def do_wait(self, words: list[str]) -> None:
        """Let so many seconds pass."""
        self._run(until_s=self.now_s + float(words[0]))

    def do_until(self, words: list[str]) -> None:
        """Go on to an instant, or to the first (`x3`: third) such message, note or state."""
        if words[0].replace(".", "").isdigit():
            self._run(until_s=float(words[0]))
            return
        times = int(words[1][1:]) if len(words) > 1 else 1
        self._goal = (Watch.of(words[0]), times)
        self._run(until_s=self.now_s + PATIENCE_S)
        assert self._goal is None, f"no {' '.join(words)} within {PATIENCE_S} s\n" + self.told()

    def do_lose(self, words: list[str]) -> None:
        """Lose the next such control message: `lose Open d0 r1a`, `lose Open d0 r1a x2`."""
        self._strikes.append(_strike(words, None))

    def do_hold(self, words: list[str]) -> None:
        """Hold the next such message back for some seconds: `hold 3.0 Open d0 r1a`."""
        self._strikes.append(_strike(words[1:], float(words[0])))

    def do_refuse(self, words: list[str]) -> None:
        """Have a node's device refuse its next such job: `refuse r2a Forward a value is nan`."""
        node, job, *reason = words
        self._refusals[node, job] = " ".join(reason) or "refused"

    def do_link(self, words: list[str]) -> None:
        """Change a link in both directions: `link d0 r1a latency_s:0.5`."""
        one, other, *rest = words
        values = {key: float(value) for key, value in (word.split(":") for word in rest)}
        if "rate" in values:
            values["bandwidth_bytes_per_s"] = values.pop("rate")
        network, hosts = self.stage.world.network, self.stage.hosts
        for here, there in ((one, other), (other, one)):
            network.change(hosts[here], hosts[there], LinkSpec(**values))

    def do_cut(self, words: list[str]) -> None:
        """Cut links for some seconds: `cut d0|r1a,r1b 20`; `>` for one way; `=RATE` at the end."""
        which, duration = words
        seconds, _, rate = duration.partition("=")
        text = f"{which}@{self.now_s:.6f}+{seconds}" + (f"={rate}" if rate else "")
        self.stage.injection._cut(Cut.parse(text))

    def do_fault(self, words: list[str]) -> None:
        """Strike hosts as the simulator does: `fault kill r1a`, `fault freeze r1a 20`."""
        kind, names, *rest = words
        for name in names.split(","):
            fault = HostFault(
                FaultKind(kind), name, at_s=self.now_s, duration_s=float(rest[0]) if rest else 10.0
            )
            self.stage.injection._strike(fault, self.stage.hosts[name])

    def do_drain(self, words: list[str]) -> None:
        """Ask a node to leave, within so many seconds if that is said."""
        timeout_s = float(words[1]) if len(words) > 1 else math.inf
        self.stage.hosts[words[0]].deliver(ev.DrainRequested(timeout_s))

    def do_pause(self, words: list[str]) -> None:
        self.stage.hosts[words[0]].deliver(ev.PauseRequested(paused=True))

    def do_resume(self, words: list[str]) -> None:
        self.stage.hosts[words[0]].deliver(ev.PauseRequested(paused=False))

    def do_who(self, _words: list[str]) -> None:
        """Show where every node is."""
        for name, host in self.stage.hosts.items():
            if not host.reachable:
                self._say(f"{name:<4} {'not there' if host.stop is None else _ended(host.stop)}")
                continue
            machine = _core(host)
            view, leads = machine.context.view, " (leads)" if machine.leader else ""
            stage = f"stage {view.by_id[host.node_id].stage_index}" if machine.in_view else ""
            where = f"{stage} {machine.context.iteration} term {view.term}{leads}".strip()
            self._say(f"{name:<4} {machine.state.value:<11} {where if stage else ''}".rstrip())

    def do_flows(self, _words: list[str]) -> None:
        """Show the whole flows that data nodes know."""
        for name, host in self.stage.hosts.items():
            flows = _core(host).strategy.flows if name[0] == "d" and host.reachable else None
            for flow_id, flow in sorted(getattr(flows, "complete", {}).items()):
                self._say(f"{flow_id}: {' -> '.join([name, *flow.path, name])}")

    # --- what nodes do ------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "a text begins with `run`"
        return self._stage

    @property
    def now_s(self) -> float:
        return self.stage.kernel.now_s

    def told(self) -> str:
        return "\n".join(self.seen[-40:])

    def stepped(self, name: str, machine: NodeMachine, effects: list[Effect]) -> list[Effect]:
        """Tell of a node's step; returns what is left of its effects."""
        left, said = list[Effect](), dict[tuple[str, str], list[str]]()
        for effect in effects:
            if (told := self._told_of(effect)) is not None:
                receivers = said.setdefault(told, [])
                if isinstance(effect, (fx.Send, fx.SendTensor)):
                    receivers.append(self._name_of(effect.to))
            if not self._struck(name, effect):
                left.append(effect)
        for (kind, text), receivers in said.items():
            self._hear(kind, text, name, *receivers)
        self._look(name, machine)
        return left

    def _told_of(self, effect: Effect) -> tuple[str, str] | None:
        """Return the kind of an effect, and what a line says of it. None: nothing."""
        match effect:
            case fx.Send(to, message, way) | fx.SendTensor(to, message, _, way):
                kind = type(message).__name__
                goal = f" (for {self._names[way.goal]})" if way and way.goal != to else ""
                return kind, kind + fields_of(kind, message) + goal
            case fx.StartJob(_, job):
                kind = job.name
                return f"job.{kind}", f"device: {kind}{fields_of(kind, job)}"
            case fx.Note(event, fields):
                return event, event + fields_of(event, dict(fields))
            case fx.Stop(reason, detail):
                return "stop", f"stops: {reason.value}, {detail}"
            case _:
                return self._told_of_host(effect)

    def _told_of_host(self, effect: Effect) -> tuple[str, str] | None:
        """Return the same of what a node wants of its host."""
        match effect:
            case fx.ProbeLink(to):
                return "probe", f"probes its link to {self._names[to]}"
            case fx.KeepState(iteration):
                return "keep", f"has its state after iteration {iteration} written to disk"
            case fx.MirrorState(_, stage, iteration):
                return "mirror", f"mirrors the state of stage {stage} after iteration {iteration}"
            case fx.PersistVote(term):
                return "disk", f"has its vote in term {term} written to disk"
            case fx.CompleteRun(iteration):
                return "result", f"has the model of iteration {iteration}"
        return None

    def failed(self, name: str, event: ev.SendFailed) -> None:
        """Tell that a message did not get through."""
        kind, receiver = type(event.message).__name__, self._name_of(event.to)
        if any(watch.shows(f"lost.{kind}", name, receiver) for watch in self._watches):
            text = f"{kind}{fields_of(kind, event.message)}"
            self._say(f"{name} -x {receiver}  {text} ({event.reason})")

    def _look(self, name: str, machine: NodeMachine) -> None:
        """Tell of states that have changed."""
        leader = machine.leader
        states = {
            "state": machine.state.value,
            "leading": leader.state.value if leader is not None else "",
            "election": machine.leadership.election.campaign.state.value,
        }
        for kind, state in states.items():
            before = self._states.get((name, kind), "")
            if state != before:
                self._states[name, kind] = state
                change = f"{before} => {state}" if before and state else state or "no more"
                self._hear(kind, f"{kind}: {change}", name)

    def _hear(self, kind: str, text: str, name: str, *receivers: str) -> None:
        if any(watch.shows(kind, name, *receivers) for watch in self._watches):
            to = f" -> {', '.join(receivers)}" if receivers else ""
            self._say(f"{name}{to}  {text}")
        if self._goal is not None and self._goal[0].shows(kind, name, *receivers):
            watch, times = self._goal
            self._goal = (watch, times - 1) if times > 1 else None

    def _struck(self, name: str, effect: Effect) -> bool:
        """Lose, hold back or refuse an effect that the text names, if this is it."""
        match effect:
            case fx.Send() | fx.SendTensor():
                return self._struck_message(name, effect)
            case fx.StartJob(job_id, job):
                reason = self._refusals.pop((name, job.name), None)
                if reason is not None:
                    refused = ev.JobFailed(job_id, reason, fatal=False)
                    self.stage.kernel.after(0.0, self.stage.hosts[name].deliver, refused)
                return reason is not None
        return False

    def _struck_message(self, name: str, effect: fx.Send | fx.SendTensor) -> bool:
        kind, to, host = type(effect.message).__name__, effect.to, self.stage.hosts[name]
        receiver, kernel = self._name_of(to), self.stage.kernel
        strike = next((s for s in self._strikes if s.hits(kind, name, receiver)), None)
        if strike is None:
            return False
        strike.num_left -= 1
        if strike.delay_s is None:
            assert isinstance(effect, fx.Send), f"{kind} carries a tensor: cut its link instead"
            lost = ev.SendFailed(to, effect.message, "lost", way=effect.way, fault=ev.Fault.LINK)
            kernel.after(self.stage.scenario.link_faults.retry_timeout_s, host.deliver, lost)
        else:
            kernel.after(strike.delay_s, host._perform, [effect])
        return True

    def _name_of(self, node: NodeId) -> str:
        return self._names.get(node, "nobody")

    def _run(self, *, until_s: float) -> None:
        wanted = self._goal is not None
        kernel = self.stage.kernel
        kernel.run(until_s=until_s, done=lambda: wanted and self._goal is None)
        if not wanted:
            kernel.now_s = max(kernel.now_s, until_s)

    def _say(self, text: str) -> None:
        self.seen.append(f"{self.now_s:9.2f}  {names_in(text, self._texts)}")


def _strike(words: list[str], delay_s: float | None) -> Strike:
    num = int(words.pop()[1:]) if words[-1][0] == "x" else 1
    kind, sender, receiver = words
    return Strike(kind, sender, receiver, num, delay_s)


def _host(word: str, options: Mapping[str, Any]) -> HostSpec:
    """Read `d0`, `r1a`, `r1a=3` with a capacity, `c1a`, a client of stage 1, or `v1`, a volunteer
    that chooses no stage.
    """
    name, _, capacity = word.partition("=")
    default = options.get("microbatches", 2) if name[0] == "d" else 2
    stage_index = int(name[1]) if name[0] in "rc" else int(name[0] == "v")
    return HostSpec(
        name=name,
        stage_index=stage_index,
        capacity=int(capacity or default),
        profile=ComputeProfile(jitter_ratio=0.0),
    )


def _value(word: str) -> int | float | str:
    if word.isalpha():
        return word
    return float(word) if "." in word else int(word)


def _core(host: SimHost) -> NodeMachine:
    machine = host.machine
    assert isinstance(machine, Told)
    return machine.wrapped


def _ended(stop: fx.Stop) -> str:
    return f"has stopped: {stop.reason.value}"


def retell(text: str) -> str:
    """Return a scenario text with the results that its commands have now.

    A line that begins with `> ` is a command, with `>  ` what is left of one; an indented line is a
    result, and the rest is prose.
    """
    story, told, command = Story(), list[str](), ""
    for line in [*text.splitlines(), ""]:
        if line.startswith(" "):
            continue
        if command and not line.startswith(">  "):
            told += story.tell(command)
            command = ""
        told.append(line)
        if line.startswith("> "):
            command += line.removeprefix(">")
    return "\n".join(told).rstrip() + "\n"

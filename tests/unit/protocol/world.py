"""A handful of whole nodes in one process: messages and jobs wait until a test lets them happen.

Nothing is random: messages arrive in the order in which they were sent, the devices work in turn,
and time stands still until a test moves it.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from decod.ids import NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.context import Identity, RunFacts
from decod.protocol.core.messages.decision_messages import Open
from decod.protocol.core.messages.scopes import Message, Way
from decod.protocol.core.view import Member, Role, ViewChange
from decod.protocol.node_machine import NodeMachine
from decod.protocol.strategy.pipeline import Pipeline
from decod.protocol.strategy.strategy import StrategyFactory
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig, SyncConfig
from tests.unit.protocol.cast import CONFIG, D0, MANIFEST, RUN


@dataclass(slots=True)
class Parcel:
    """A message on its way, with the sender's tensor if it carries one."""

    sender: NodeId
    to: NodeId
    message: Message
    tensor: TensorId | None = None
    way: Way | None = None
    content: object = None
    """Of the tensor."""

    @property
    def text(self) -> str:
        by = "" if self.way is None else f" ({self.way.origin} to {self.way.goal})"
        return f"{text_of(self.message)}{by}"

    def matches(self, words: list[str]) -> bool:
        """Whether it is of the kind, sender and receiver that are named (`Deny from=r1a`)."""
        kind, *rest = words
        wanted = dict(word.split("=") for word in rest)
        sender, to = wanted.get("from", self.sender), wanted.get("to", self.to)
        return (kind, sender, to) == (type(self.message).__name__, self.sender, self.to)


class Device(Protocol):
    """What runs a host's jobs."""

    def run(
        self, job: jobs.Job, inputs: Sequence[object]
    ) -> tuple[jobs.JobResult, Sequence[object]]:
        """Return what a job ends with, and the content of the tensors that it puts out."""
        ...


@dataclass(slots=True)
class Host:
    """One node: the real core, a device that computes at once, tensors that are counted."""

    machine: NodeMachine
    device: Device | None = None
    """None: tensors have no content."""
    stage_index: int = 0
    iteration: int = 0
    alive: bool = True
    tensors: dict[TensorId, object] = field(default_factory=dict)
    """With their content."""
    queue: deque[fx.StartJob] = field(default_factory=deque)
    stop: fx.Stop | None = None

    def run(self, start: fx.StartJob) -> tuple[jobs.JobResult, Sequence[object]]:
        """Return what a job ends with, and the content of the tensors that it puts out."""
        if self.device is not None:
            return self.device.run(start.job, [self.tensors[tensor] for tensor in start.inputs])
        result, num_outputs = self._pretend(start.job)
        return result, [None] * num_outputs

    def _pretend(  # noqa: C901 - a line each.
        self, job: jobs.Job
    ) -> tuple[jobs.JobResult, int]:
        match job:
            case jobs.Build(stage):
                self.stage_index = stage
                # The leader's host builds from the checkpoint itself.
                self.iteration = self.machine.context.facts.start_iteration
                return jobs.Built(f"initial{stage}"), 0
            case jobs.Load(iteration):
                self.iteration = iteration
                return jobs.Built(f"step{self.stage_index}.{iteration}"), 0
            case jobs.Head():
                return jobs.Loss(2.5, 10), 1
            case jobs.Propose(iteration) | jobs.StepLocally(iteration):
                return jobs.Proposed(f"step{self.stage_index}.{iteration}"), 0
            case jobs.Snapshot():
                return jobs.SnapshotTaken(self.iteration, "manifest"), 1
            case jobs.CommitStep(iteration):
                self.iteration = iteration
            case jobs.Gather(_, num_parts):
                return jobs.Nothing(), num_parts
            case jobs.Reduce():
                return jobs.Squared(2.0 if self.machine.context.run.clips else 0.0), 1
            case jobs.Square():
                return jobs.Squared(5.0), 0
            case jobs.Embed() | jobs.Forward() | jobs.Backward():
                return jobs.Nothing(), 1
        return jobs.Nothing(), 0


class World:
    """Hosts, and what is on its way between them.

    Attributes:
        seen: Everything that happened, as lines; a test may clear it.
        flight: Messages that have not arrived yet.
    """

    def __init__(
        self,
        *,
        config: ProtocolConfig = CONFIG,
        num_stages: int = 1,
        num_microbatches: int = 1,
        num_iterations: int = 0,
        clips: bool = False,
        initial_from_leader: bool = False,
        start_iteration: int = 0,
        num_data_nodes: int | None = None,
        sync: SyncConfig | None = None,
        strategy: StrategyFactory = Pipeline,
        device: Callable[[], Device] | None = None,
    ) -> None:
        self._strategy, self._new_device = strategy, device
        self.run = replace(
            RUN,
            num_iterations=num_iterations,
            stages=StagesConfig(num_relay_stages=num_stages),
            batch=BatchConfig(
                num_microbatches=num_microbatches,
                num_data_nodes=num_data_nodes or config.min_data_nodes,
            ),
            optimizer=OptimizerConfig(clip_norm=float(clips)),
            sync=sync or SyncConfig(),
            protocol=config,
        )
        self.facts = RunFacts(
            manifest_sha256=MANIFEST,
            activation_size_bytes=0,
            start_iteration=start_iteration,
            initial_from_leader=initial_from_leader,
        )
        self.now_s = 0.0
        self.hosts: dict[NodeId, Host] = {}
        self.flight: deque[Parcel] = deque()
        self.fetches: list[tuple[NodeId, fx.FetchState]] = []
        self.seen: list[str] = []
        self._tensor_ids = itertools.count(1)
        self._request_ids = itertools.count(1)
        self._requests: dict[int, tuple[NodeId, fx.FetchState, list[NodeId]]] = {}
        self._seeds = itertools.count(1)

    # --- what a test does ---------------------------------------------------------------------

    def start(self, name: str, *, capacity: int = 1, stage_index: int | None = None) -> Host:
        """Start a node, again if it ran before."""
        node_id = NodeId(name)
        data = name.startswith("d")
        identity = Identity(
            node_id=node_id,
            address=f"{name}:1",
            role=Role.DATA if data else Role.RELAY,
            capacity=capacity,
            compute_s=1.0,
            stage_index=stage_index,
            name=name,
        )
        machine = NodeMachine(
            identity,
            self.run,
            self.facts,
            leader=D0,
            rng=Random(next(self._seeds)),
            strategy=self._strategy,
        )
        device = self._new_device() if self._new_device is not None else None
        self.hosts[node_id] = host = Host(machine, device)
        self._perform(node_id, machine.start(self.now_s))
        return host

    def step(self, name: str, event: ev.Event) -> list[fx.Effect]:
        """Give a node an event; its effects are carried out, and returned."""
        host = self.hosts[NodeId(name)]
        effects = host.machine.step(self.now_s, event)
        self._perform(NodeId(name), effects)
        return effects

    def turn(self) -> None:
        """Let one message arrive, or every device end one job."""
        if self.flight:
            self.deliver(self.flight.popleft())
        else:
            assert self._compute(), "nothing is left to happen"

    def turn_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never happened")

    def settle(self, until: list[str] | None = None) -> None:
        """Let everything happen that needs no time, up to the first such message (not included)."""
        for _ in range(10_000):
            if self.flight:
                if until is not None and self.flight[0].matches(until):
                    return
                self.deliver(self.flight.popleft())
            elif not self._compute():
                assert until is None, f"no {' '.join(until or [])} came"
                return
        raise AssertionError("it never ends")

    def wait(self, duration_s: float) -> None:
        """Let time pass, and everything happen that happens meanwhile."""
        end_s = self.now_s + duration_s
        self.settle()
        while (due_s := self._next_deadline_s()) is not None and due_s <= end_s:
            self.expire()
            self.settle()
        self.now_s = end_s

    def expire(self) -> None:
        """Let time pass until the next deadline, and tell those whose deadline it is."""
        due_s = self._next_deadline_s()
        assert due_s is not None, "nothing is left to happen"
        self.now_s = max(self.now_s, due_s)
        for node, host in self.hosts.items():
            deadline_s = host.machine.deadline_s
            if host.alive and deadline_s is not None and deadline_s <= self.now_s:
                self.step(node, ev.DeadlinePassed())

    def deliver(self, parcel: Parcel) -> None:
        """Let a message arrive, or come back if there is nobody."""
        receiver = self.hosts[parcel.to]
        if not receiver.alive:
            self.fail(parcel)
            return
        self.seen.append(f"{parcel.sender} -> {parcel.to} {parcel.text}")
        tensor = None
        if parcel.tensor is not None:
            tensor = self._new_tensor(receiver, parcel.content)
            if self.hosts[parcel.sender].alive:
                self.step(parcel.sender, ev.TensorSent(parcel.to, parcel.tensor, 8, 1.0))
        said_by = parcel.sender if parcel.way is None else parcel.way.origin
        self.step(parcel.to, ev.Received(said_by, parcel.message, tensor, way=parcel.way))

    def fail(self, parcel: Parcel) -> None:
        """Let a message come back as undelivered."""
        self.seen.append(f"{parcel.sender} -x {parcel.to} {parcel.text}")
        if self.hosts[parcel.sender].alive:
            why, tensor = "unreachable", parcel.tensor
            failed = ev.SendFailed(parcel.to, parcel.message, why, tensor, parcel.way)
            self.step(parcel.sender, failed)

    def kill(self, name: str) -> None:
        """End a node without a word; what it had sent is still on its way."""
        self.hosts[NodeId(name)].alive = False

    def work(self, name: str, *, refuse: str = "", fatal: bool = False) -> list[fx.Effect]:
        """End the first job of a node's device, well or not."""
        host = self.hosts[NodeId(name)]
        start = host.queue.popleft()
        if refuse:
            self.seen.append(f"{name} can't {text_of(start.job)}: {refuse}")
            return self.step(name, ev.JobFailed(start.job_id, refuse, fatal))
        result, contents = host.run(start)
        outputs = tuple(self._new_tensor(host, content) for content in contents)
        self.seen.append(f"{name} does {text_of(start.job)}")
        return self.step(name, ev.JobFinished(start.job_id, result, outputs, duration_s=1.0))

    # --- inside -------------------------------------------------------------------------------

    def _next_deadline_s(self) -> float | None:
        deadlines = (h.machine.deadline_s for h in self.hosts.values() if h.alive)
        return min((d for d in deadlines if d is not None), default=None)

    def _compute(self) -> bool:
        """End one job on every device that has one; whether there was any."""
        busy = [node for node, host in self.hosts.items() if host.alive and host.queue]
        for node in busy:
            self.work(node)
        return bool(busy)

    def _new_tensor(self, host: Host, content: object = None) -> ev.Tensor:
        tensor = ev.Tensor(TensorId(next(self._tensor_ids)), 8)
        host.tensors[tensor.id] = content
        return tensor

    def _perform(self, node: NodeId, effects: list[fx.Effect]) -> None:
        host = self.hosts[node]
        for effect in effects:
            match effect:
                case fx.Send(to, message, way):
                    self.flight.append(Parcel(node, to, message, way=way))
                case fx.SendTensor(to, message, tensor, way):
                    assert tensor in host.tensors, f"{node} sends what it does not hold"
                    content = host.tensors[tensor]
                    self.flight.append(Parcel(node, to, message, tensor, way, content))
                case fx.StartJob(_, _, inputs):
                    assert {*inputs} <= host.tensors.keys(), f"{node} uses what it does not hold"
                    host.queue.append(effect)
                case fx.FreeTensor(tensor):
                    del host.tensors[tensor]
                case fx.Note(event, fields):
                    self.seen.append(f"{node} notes {event}{text_of_fields(fields)}")
                case fx.Stop(reason, detail):
                    self.seen.append(f"{node} stops: {reason.value}, {detail}")
                    host.stop, host.alive = effect, False
                case _:
                    self._perform_state(node, effect)

    def _perform_state(self, node: NodeId, effect: fx.Effect) -> None:
        match effect:
            case fx.FetchState(_, _, start) if start == self.facts.start_iteration:
                # Initial state: the leader's host has it, and does not ask its machine.
                initial = self._new_tensor(self.hosts[node])
                self.step(node, ev.StateFetched(effect.stage_index, start, "manifest", initial))
            case fx.FetchState():
                self._ask_donors(node, effect, list(effect.donors), "nobody to ask")
            case fx.ServeState(request_ids, iteration, manifest, tensor):
                del self.hosts[node].tensors[tensor]
                for request_id in request_ids:
                    asker, wanted, _ = self._requests[request_id]
                    copy = self._new_tensor(self.hosts[asker])
                    stage = wanted.stage_index
                    self.step(asker, ev.StateFetched(stage, iteration, manifest, copy))
            case fx.RefuseState(request_id, reason):
                self._ask_donors(*self._requests[request_id], reason)
            case fx.CompleteRun(iteration):
                self.seen.append(f"{node} has the result of iteration {iteration}")

    def _ask_donors(
        self, node: NodeId, wanted: fx.FetchState, donors: list[NodeId], reason: str
    ) -> None:
        """Ask the first of these donors that lives; the others are asked if it refuses."""
        stage, iteration = wanted.stage_index, wanted.iteration
        while donors:
            donor = donors.pop(0)
            if self.hosts[donor].alive:
                request_id = next(self._request_ids)
                self._requests[request_id] = (node, wanted, donors)
                request = ev.StateRequested(request_id, stage, iteration, with_optimizer=True)
                self.step(donor, request)
                return
            reason = "unreachable"
        self.step(node, ev.StateFetchFailed(stage, iteration, reason))


def text_of(thing: object) -> str:
    """Return a message or job as one short line: what it is, and the fields that people read."""
    assert dataclasses.is_dataclass(thing)
    fields = [(f.name, getattr(thing, f.name)) for f in dataclasses.fields(thing)]
    if isinstance(thing, Open):
        # Most of them say nothing of an opening that repeats an iteration.
        unset = {f.name: f.default for f in dataclasses.fields(thing)}
        fields = [(name, value) for name, value in fields if value != unset[name]]
    return type(thing).__name__ + text_of_fields(fields)


_HIDDEN = {
    "digest",
    "view_hash",
    "manifest_sha256",
    "incarnation",
    "address",
    "name",
    "manifest",
    "compute_s",
}
"""Fields that say nothing to a reader of a scenario."""

_OFTEN_EMPTY = ("kept", "votes", "change")


def text_of_fields(fields: object) -> str:
    """Return fields as ` name=value`, without those that are empty or say nothing."""
    assert isinstance(fields, (list, tuple))
    return "".join(
        f" {name}={_text(value)}"
        for name, value in fields
        if name not in _HIDDEN and value != "" and (name not in _OFTEN_EMPTY or value)
    )


def _names(members: Sequence[Member]) -> str:
    return ",".join(m.node_id if m.capacity else f"{m.node_id}:0" for m in members)


def _text(value: object) -> str:
    if hasattr(value, "view"):  # An opening.
        members = value.view.members
        names = _names(members) if members else f"view {value.view.version}"
        flags = ["paused"] if value.paused else []  # type: ignore[attr-defined]
        return f"{value.iteration}[{' '.join([names, *flags])}]"  # type: ignore[attr-defined]
    if hasattr(value, "members"):  # A view.
        return f"{value.version}[{','.join(m.node_id for m in value.members)}]"
    if isinstance(value, ViewChange):
        gone, new = ",".join(value.gone), _names(value.changed)
        return f"[{' '.join(filter(None, (gone and f'-{gone}', new and f'+{new}')))}]"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + " ".join(_text(v) for v in value) + "]"
    if hasattr(value, "node_id"):
        return str(value.node_id)
    return str(value)

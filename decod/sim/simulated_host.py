"""A simulated host: the real core, a symbolic compute process, and counted tensors.

This file is the simulator's counterpart of the daemon's driver: it gives events to the core and
carries out its effects. A core that breaks the rules ends the run with a message. Examples are the
use of a freed tensor, a second answer to a request, and a deadline that never moves.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from decod.ids import NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.bans import BanList
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event, Fault
from decod.protocol.core.jobs import Job
from decod.protocol.core.messages import Bans, Message, Open
from decod.protocol.core.messages.scopes import Way
from decod.run.protocol_config import ProtocolConfig
from decod.sim.audited_work import proven, with_digest
from decod.sim.averages import MisuseError
from decod.sim.core import Machine, term_of, view_of, with_ban, without
from decod.sim.kernel import HostClock, Kernel
from decod.sim.network import InFlight, Network, Probe, RoundTrips
from decod.sim.profile import ComputeProfile, Content, TensorTable, wire_bytes
from decod.sim.simulated_compute import SimulatedStep, StageModel
from decod.sim.simulated_device import SimDevice
from decod.sim.state_transfers import Disk, States

_SPIN_LIMIT = 1000
"""A machine is stuck after this many deadlines in a row at one instant."""

_RESULT_S = 1.0
"""Time in which the leader's daemon writes the result of a run."""


class Observer(Protocol):
    """Sees everything that happens. Raises if it must not happen."""

    def stepped(self, host: "SimHost", event: Event | None) -> None:
        """Handle the end of a machine's step; its effects are carried out.

        `event` is None at the machine's start, and for a message that it merely forwards.
        """

    def sent(self, host: "SimHost", to: NodeId, message: Message) -> None:
        """Handle a message of the machine's own to a peer."""

    def computed(self, host: "SimHost", job: Job, duration_s: float) -> None:
        """Handle the end of a job on this host."""

    def committed(self, host: "SimHost", step: SimulatedStep) -> None:
        """Handle a step that has become final on this host."""

    def noted(self, host: "SimHost", event: str, fields: tuple[tuple[str, object], ...]) -> None:
        """Handle an event for the trace."""

    def misused(self, host: "SimHost", text: str, cause: BaseException | None) -> None:
        """Raise: the core did something that it must never do."""


@dataclass(slots=True)
class World:
    """The objects that all hosts of a run share."""

    kernel: Kernel
    network: Network
    profile: ComputeProfile
    observer: Observer
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    hosts: dict[NodeId, "SimHost"] = field(default_factory=dict)
    liars: set[NodeId] = field(default_factory=set)
    """Who has ever said what is not true."""
    audited: bool = False
    """Whether members do parts of each other's work again."""
    stopwatch: Callable[[], float] = lambda: 0.0
    """Seconds of this computer's processor, to time the cores. The default measures nothing, since
    a run must not depend on it."""

    def signed(self, message: Message, content: Content, sender: "SimHost") -> Message:
        """Return a message with a tensor as it leaves its sender."""
        return proven(message, content, sender.node_id) if self.audited else message

    def hashed(self, received: ev.Received, content: Content) -> ev.Received:
        """Return a message with a tensor as it comes."""
        return with_digest(received, content) if self.audited else received


@dataclass(slots=True)
class _Spins:
    """Counts deadlines that pass at the same instant."""

    instant_s: float = -1.0
    num: int = 0

    def stuck(self, now_s: float) -> bool:
        """Count one more, and return whether there were too many."""
        self.num = self.num + 1 if now_s == self.instant_s else 1
        self.instant_s = now_s
        return self.num > _SPIN_LIMIT


class SimHost:
    """One node of a simulated run.

    Attributes:
        stop: Why the machine has ended, or None while it runs.
        num_control_sent: Number of control messages that the machine has sent.
        control_bytes_sent: What they take on the wire.
        num_passed_on: The part of these messages that others have sent by way of this node.
        bytes_passed_on: What that part takes on the wire.
        core_s: Time that the machine has computed, if the world has a stopwatch.
        num_bulk_sent: Number of messages with a tensor that the machine has sent.
        num_probes: Number of link probes that the machine has asked for.
        tensors: The tensors that the host holds.
        speed: Speed of its device relative to `profile`. Both may change during a run.
        on_stop: Called with the host when its machine has ended.
        work: Microbatches of committed iterations that each node has worked on, as far as this one
            knows. The counts outlive crashes, as receipts do.
        num_leaked: Tensors that the machine still owned but did not use when it ended.
        device: The compute process.
        disk: The disk, which outlives crashes.
    """

    def __init__(
        self,
        name: str,
        node_id: NodeId,
        world: World,
        compute: StageModel,
        *,
        speed: float = 1.0,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.node_id = node_id
        self.compute = compute
        self.reachable = False
        self.refuses = True
        self.frozen_until_s = 0.0
        self.stop: fx.Stop | None = None
        self.on_stop: Callable[[SimHost], None] = _nothing
        self.num_events = 0
        self.num_control_sent = self.num_passed_on = 0
        self.control_bytes_sent = self.bytes_passed_on = 0
        self.core_s = 0.0
        self.control_by_kind: Counter[type] = Counter()
        self.num_bulk_sent = 0
        self.num_probes = 0
        self.num_leaked = 0
        self.work: Counter[NodeId] = Counter()
        self.disk = Disk(world.kernel)
        self.tensors = TensorTable(world.profile)
        self._world = world
        self.speed = speed
        self.profile = world.profile
        self._machine: Machine | None = None
        self._life = 0
        self.states = States(self, world.kernel, world.network)
        self.clock = HostClock(world.kernel)
        self.device = SimDevice(self, world.kernel, world.observer, world.protocol, rng)
        self._timer_s: float | None = None
        """World time of the planned timer."""
        self._frozen_clock_s = 0.0
        self._num_freezes = 0
        """The clock's time at the last freeze, and the number of freezes."""
        self._spins = _Spins()
        self._backlog: list[Callable[[], None]] = []
        self._round_trips = RoundTrips(world.kernel, self.deliver)
        self._on_event: dict[int, Callable[[], None]] = {}
        self._on_sent: dict[tuple[str, int], Callable[[], None]] = {}
        self._num_sent: Counter[str] = Counter()
        self._perform_one: dict[type, Callable[..., None]] = {
            fx.Send: self._send,
            fx.SendTensor: self._send_tensor,
            fx.StartJob: self._start,
            fx.FreeTensor: self._free,
            fx.FetchState: self.states.fetch,
            fx.ServeState: self.states.serve,
            fx.KeepState: self.states.keep,
            fx.MirrorState: self.states.mirror,
            fx.RefuseState: self.states.refuse,
            fx.ProbeLink: self._probe,
            fx.PersistVote: self._persist,
            fx.ReadKept: self.states.read_kept,
            fx.UseMembers: self._ignore,
            **dict.fromkeys(_ABOUT_BANS, partial(_about_bans, self, world)),
            fx.Note: self._note,
            fx.CountWork: self._count_work,
            fx.CompleteRun: self._complete_run,
            fx.Stop: self._stop,
        }

    @property
    def machine(self) -> Machine:
        assert self._machine is not None, f"{self.name} has not started"
        return self._machine

    @property
    def frozen(self) -> bool:
        """Whether the host stands still."""
        return self._world.kernel.now_s < self.frozen_until_s

    @property
    def present(self) -> bool:
        """Whether the host is up and does not stand still."""
        return self.reachable and not self.frozen

    @property
    def life(self) -> int:
        """Grows with every start and end of this host, which voids everything planned before."""
        return self._life

    def peer(self, node: NodeId) -> "SimHost | None":
        """Return the run's host with this id, if there is one."""
        return self._world.hosts.get(node)

    # --- life ---------------------------------------------------------------------------------

    def start(self, machine: Machine) -> None:
        """Bring the host up with a machine."""
        self._machine = machine
        self._life += 1
        self.reachable = True
        self.stop = None
        self._act(None)
        life = self._life
        self.disk.search(self.profile.num_bytes, lambda: life == self._life, self.deliver)

    def kill(self, *, vanish: bool = False) -> None:
        """Crash: everything in memory is lost.

        Args:
            vanish: Lose the whole machine, so that senders wait for their timeouts. Otherwise lose
                only the process, so that senders are refused at once.
        """
        self._down(refuses=not vanish)
        self.trace("host.killed", vanish=vanish)

    def freeze(self, duration_s: float, *, device: bool = True) -> None:
        """Stall the host, with or without its device: all is late, and nothing lost."""
        self.device.sleeps = device
        now_s = self._world.kernel.now_s
        if not self.frozen:
            self.trace("host.frozen", duration_s=duration_s)
            self._frozen_clock_s = self.clock.now_s
            self._num_freezes += 1
        self.frozen_until_s = max(self.frozen_until_s, now_s + duration_s)
        self._world.kernel.at(self.frozen_until_s, self._thaw)

    def on_event(self, num_events: int, callback: Callable[[], None]) -> None:
        """Call back when the machine takes its `num_events`-th event, counted from 1."""
        self._on_event[num_events] = callback

    def on_sent(self, kind: str, num: int, callback: Callable[[], None]) -> None:
        """Call back before the machine's `num`-th message of this kind leaves, counted from 1."""
        self._on_sent[kind, num] = callback

    def _leaves(self, message: Message) -> bool:
        """Run the callback that waits for this message. Return whether the message still leaves."""
        kind = kind_of(message)
        self._num_sent[kind] += 1
        self._on_sent.pop((kind, self._num_sent[kind]), _nothing)()
        return self.reachable

    def deliver(self, event: Event) -> None:
        """Give the machine an event, now or when the host thaws."""
        if not self.reachable:
            return
        if self.frozen:
            self.when_thawed(partial(self._act, event))
        else:
            self._act(event)

    def when_thawed(self, callback: Callable[[], None]) -> None:
        """Call back when the frozen host thaws."""
        self._backlog.append(callback)

    def _thaw(self) -> None:
        if self.frozen:
            return
        behind_s = self.clock.stalled_since(self._frozen_clock_s)
        if not self.reachable:
            return
        if behind_s > ev.ASLEEP_LEAST_S:
            self._act(ev.Woke(behind_s))
        if self._num_freezes % 2:
            # After every other freeze, timers expire before the events that arrived meanwhile.
            self._expire()
        backlog = self._backlog
        self._backlog = []
        for callback in backlog:
            if self.reachable:
                callback()
        if self.reachable:
            self._arm()

    def _down(self, *, refuses: bool) -> None:
        self.reachable = False
        self.refuses = refuses
        self._life += 1
        self.states.down(refuses=refuses)
        self.device.down()
        self.tensors.clear()
        self._backlog.clear()
        self._timer_s = None

    def _act(self, event: Event | None) -> None:
        """SimulatedStep the machine, carry out its effects, and have the step checked."""
        world = self._world
        now_s = self.clock.now_s
        self.num_events += 1
        if self._on_event and self.num_events in self._on_event:
            self._on_event.pop(self.num_events)()
        machine = self._machine
        stopwatch = world.stopwatch
        assert machine is not None
        begin_s = stopwatch()
        try:
            effects = machine.start(now_s) if event is None else machine.step(now_s, event)
        except Exception as error:
            text = f"{type(error).__name__} at {event}: {error}"
            world.observer.misused(self, text, error)
            raise
        self.core_s += stopwatch() - begin_s
        try:
            if effects:
                self._perform(effects)
        except MisuseError as error:
            world.observer.misused(self, str(error), error)
        self._arm()
        # A message that the machine forwards is not its own.
        world.observer.stepped(self, None if self._passes_on(event) else event)

    def _passes_on(self, event: Event | None) -> bool:
        way = event.way if isinstance(event, ev.Received) else None
        return way is not None and way.goal != self.node_id

    def _says(self, effect: fx.Send | fx.SendTensor) -> None:
        """Show a message of this host to the observer, whichever way it goes."""
        way = effect.way
        if way is None or way.origin == self.node_id:
            to = effect.to if way is None else way.goal
            self._world.observer.sent(self, to, effect.message)

    def _perform(self, effects: list[Effect]) -> None:
        perform_one = self._perform_one
        for effect in effects:
            perform_one[type(effect)](effect)
            if not self.reachable:
                return  # The host has stopped, which voids the rest.

    # --- time ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Keep one timer planned, at or before the machine's deadline."""
        if not self.reachable:
            return
        assert self._machine is not None
        deadline_s = self._machine.deadline_s
        timer_s = self._timer_s
        if deadline_s is None:
            return
        instant_s = self.clock.instant_of(deadline_s)
        if timer_s is None or timer_s > instant_s:
            self._timer_s = instant_s
            self._world.kernel.at(instant_s, self._wake, instant_s, self._life)

    def _wake(self, time_s: float, life: int) -> None:
        if life != self._life or time_s != self._timer_s:
            return  # An earlier timer has replaced this one.
        self._timer_s = None
        if self.frozen:
            return  # Thawing arms it again.
        if not self._expire():
            self._arm()

    def _expire(self) -> bool:
        """Let the machine's deadline pass if it is due, and return whether it was."""
        deadline_s = self.machine.deadline_s
        if deadline_s is None or not self.clock.reaches(deadline_s):
            return False
        if self._spins.stuck(self._world.kernel.now_s):
            text = f"{_SPIN_LIMIT} deadlines in a row at one instant: the machine is stuck"
            self._world.observer.misused(self, text, None)
        self._act(ev.DeadlinePassed())
        return True

    # --- messages -----------------------------------------------------------------------------

    def _send(self, effect: fx.Send) -> None:
        if self._on_sent and not self._leaves(effect.message):
            return
        self.num_control_sent += 1
        size_bytes = wire_bytes(effect.message)
        self.control_bytes_sent += size_bytes
        if effect.way is not None and effect.way.origin != self.node_id:
            self.num_passed_on += 1
            self.bytes_passed_on += size_bytes
        self.control_by_kind[type(effect.message)] += 1
        world = self._world
        to = effect.to
        message = effect.message
        self._says(effect)
        receiver = world.hosts.get(to)
        said = self._said(message, effect.way)
        world.network.send_control(
            InFlight(
                sender=self,
                receiver=receiver,
                size_bytes=0,
                delivered=partial(receiver.deliver, said) if receiver else _nothing,
                sent=self._round_trips.timed(to),
                failed=partial(self._send_failed, effect),
                shunned=partial(self._shunned, receiver, message),
            )
        )

    def _probe(self, effect: fx.ProbeLink) -> None:
        self.num_probes += 1
        receiver = self._world.hosts.get(effect.to)
        Probe(effect, self._world.network, self, receiver, self.deliver).start()

    def _send_failed(self, effect: fx.Send, reason: str, fault: Fault) -> None:
        failed = ev.SendFailed(effect.to, effect.message, reason, way=effect.way, fault=fault)
        self.deliver(failed)

    def _send_tensor(self, effect: fx.SendTensor) -> None:
        if self._on_sent and not self._leaves(effect.message):
            return
        self.num_bulk_sent += 1
        self._says(effect)
        stored = self.tensors.usable(effect.tensor, effect)
        stored.num_sends += 1
        receiver = self._world.hosts.get(effect.to)
        said = self._said(self._world.signed(effect.message, stored.content, self), effect.way)
        self._world.network.send_tensor(
            InFlight(
                sender=self,
                receiver=receiver,
                size_bytes=stored.size_bytes,
                delivered=(
                    partial(receiver.take_tensor, said, stored.content) if receiver else _nothing
                ),
                sent=partial(self._tensor_sent, self._life, effect),
                failed=partial(self._tensor_failed, self._life, effect),
                late=partial(receiver.deliver, ev.TensorLate(self.node_id)) if receiver else None,
                shunned=partial(self._shunned, receiver, effect.message),
            )
        )

    def _shunned(self, receiver: "SimHost | None", message: Message) -> bool:
        """Return whether one end of a message knows that the other is banned."""
        if receiver is None or self.node_id in receiver.disk.bans.banned:
            return receiver is not None
        return receiver.node_id in self.disk.bans.banned and not isinstance(message, Bans)

    def _said(self, message: Message, way: Way | None) -> ev.Received:
        if way is None:
            return ev.Received(self.node_id, message, term=term_of(self._machine))
        return ev.Received(way.origin, message, term=way.term, way=way)

    def take_tensor(self, event: ev.Received, content: Content) -> None:
        """Take in a peer's tensor that has arrived in full."""
        tensor = self.tensors.add(content)
        self.deliver(self._world.hashed(replace(event, tensor=tensor), content))

    def _tensor_sent(self, life: int, effect: fx.SendTensor, duration_s: float) -> None:
        if life == self._life:
            size_bytes = self.tensors.end_send(effect.tensor)
            self.deliver(ev.TensorSent(effect.to, effect.tensor, size_bytes, duration_s))

    def _tensor_failed(
        self, life: int, effect: fx.SendTensor, reason: str, fault: Fault = Fault.LINK
    ) -> None:
        if life == self._life:
            self.tensors.end_send(effect.tensor)
            kept = effect.tensor if effect.tensor in self.tensors else None
            to = effect.to
            self.deliver(ev.SendFailed(to, effect.message, reason, kept, effect.way, fault))

    def _start(self, effect: fx.StartJob) -> None:
        view = view_of(self.machine)
        if view is not None and self.node_id in view:
            self.compute.use(view.num_stages)
        self.device.start(effect)

    def _free(self, effect: fx.FreeTensor) -> None:
        self.tensors.free(effect.tensor, effect)

    # --- the rest -----------------------------------------------------------------------------

    def _ignore(self, effect: Effect) -> None:
        """Do nothing: every host can reach every other by its id, without an address."""

    def _persist(self, effect: fx.PersistVote) -> None:
        life = self._life
        self.disk.keep(effect, lambda: life == self._life, self.deliver)

    def _note(self, effect: fx.Note) -> None:
        self._world.observer.noted(self, effect.event, effect.fields)

    def _count_work(self, effect: fx.CountWork) -> None:
        self.work.update(dict(effect.work))

    def _complete_run(self, effect: fx.CompleteRun) -> None:
        """Write no result, and let everybody go, as a daemon does once it has written one."""
        self.trace("run.completed", iteration=effect.iteration)
        self._world.kernel.after(_RESULT_S, self.deliver, ev.DrainRequested(ends_run=True))

    def _stop(self, effect: fx.Stop) -> None:
        self.stop = effect
        self.num_leaked = self.tensors.num_idle
        self.trace("host.stopped", reason=effect.reason.value, detail=effect.detail)
        self._down(refuses=True)
        self.on_stop(self)

    def trace(self, event: str, **fields: object) -> None:
        """Write a line of the trace."""
        self._world.observer.noted(self, event, tuple(fields.items()))


_ABOUT_BANS = (fx.UseBans, fx.ContestBans, fx.BanLiar)


def _about_bans(
    host: SimHost, world: World, effect: fx.UseBans | fx.ContestBans | fx.BanLiar
) -> None:
    """Keep a list of bans, or have the leader's daemon make one. Nobody honest is banned."""
    made: BanList | None = None
    match effect:
        case fx.UseBans(bans):
            host.disk.bans = bans
        case fx.ContestBans(bans):
            made = without(bans, host.node_id)
        case fx.BanLiar(node):
            if node not in world.liars:
                world.observer.misused(host, f"{node} has never lied, and is banned", None)
            made = with_ban(host.machine, node, banned=True, now_s=world.kernel.now_s)
    if made is not None:
        world.kernel.after(0.0, host.deliver, ev.BansMade(made))


def _nothing(*_: object) -> None:
    """Replace a callback that a transfer never needs."""


def kind_of(message: Message) -> str:
    """Return a message's kind, as faults name it: an opening is a commit or an abort."""
    if isinstance(message, Open):
        return "Commit" if message.committed else "Abort"
    return type(message).__name__

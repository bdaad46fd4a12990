"""A simulated peer of a collaborative run: the production core, and a loop in virtual time.

Tensors stand for what is in them: pieces of work, each a step of one loop. So the simulator can say
of each average which steps are in it, and whether one is missing or there twice.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from decod.ids import AveragingId, JobId, NodeId, TensorId
from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.collaboration.peer import PeerMachine
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.round_messages import BeginRound, Height
from decod.sim.kernel import Kernel
from decod.sim.network import InFlight, Network

_ASK_S = 0.002
"""Time in which a loop's second thread answers its node."""

_WORK_BYTES_PER_S = 2e9
"""Rate at which the averaging process adds up and decodes."""


@dataclass(frozen=True, slots=True)
class StepPiece:
    """What one step of one loop has given."""

    peer: NodeId
    number: int
    num_samples: int


Pieces = tuple[StepPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """How a loop trains."""

    step_s: float
    num_samples: int
    """Of a step."""
    spread: float = 0.1
    """Largest deviation of a step's time, as a share."""
    model_bytes: int = 40_000_000
    has_state: bool = True
    """Whether the run may go on from what it begins with."""


class Judge(Protocol):
    """Watches all peers."""

    def applied(self, peer: "SimPeer", height: Height, before: Height, pieces: Pieces) -> None:
        """A loop has applied an average."""

    def noted(self, peer: "SimPeer", note: fx.Note) -> None:
        """A core has noted something."""

    def waited(self, peer: "SimPeer", seconds: float, averaging_s: float) -> None:
        """A loop has waited for an average; for so long, the average was on its way."""


@dataclass(slots=True)
class _Value:
    """What a tensor holds."""

    pieces: Pieces
    size_bytes: int
    part: int = -1


@dataclass(slots=True)
class _Fetch:
    asked: lp.LoadState
    donors: list[NodeId] = field(default_factory=list)
    donor: NodeId | None = None
    """Who was asked last."""


class SimPeer:
    """A host with a core and a loop.

    Args:
        name: Of the host.
        spec: Of its loop.
        config: Of its core.
        world: Clock, network, all other peers, and the judge.
        rng: Draws the times of steps.
        height: The state that its loop begins with.
    """

    def __init__(
        self,
        name: str,
        spec: LoopSpec,
        config: RoundConfig,
        world: "PeerWorld",
        rng: random.Random,
        height: Height,
    ) -> None:
        self.name = name
        self.spec = spec
        self.config = config
        self._world = world
        self._rng = rng
        self.node_id = NodeId(name)
        self.reachable = True
        self.refuses = True
        self.frozen_until_s = 0.0
        self.machine = PeerMachine(
            self.node_id, f"{name}:1", height, config, has_state=spec.has_state
        )
        self.height = height
        """Of the loop's parameters."""
        self._values: dict[TensorId, _Value] = {}
        self._next_tensor = 1
        self._outstanding: list[StepPiece] = []
        self._num_steps = 0
        self._averages: list[tuple[lp.DeliverAverage, Pieces, Height, Height]] = []
        self._alone: int | None = None
        self._at_boundary = False
        self._waits_since: float | None = None
        self._begun_s: float | None = None
        self._wait_number = 0
        self._timer_s: float | None = None
        self._fetch: _Fetch | None = None
        self._copies: dict[int, SimPeer] = {}
        self._next_request = 1
        self._begun: dict[AveragingId, BeginRound] = {}
        """All that its core has ever begun."""
        self.num_stepped = self.num_copies = 0
        self.stopped: fx.StopReason | None = None
        self.rests = False
        """The loop begins no step any more."""
        self.pause_s = 0.0
        """How much longer the loop's next step takes, as if it evaluated the model."""

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._perform(self.machine.start(self._now_s))
        if self.machine.past.has_state:
            self._begin_step()
        else:  # It begins when its node has the run's state.
            self._at_boundary = True

    def kill(self, *, vanish: bool) -> None:
        """End the host. If it vanishes, nobody refuses connections."""
        self.reachable = False
        self.refuses = not vanish

    def leave(self) -> None:
        """End the loop well."""
        self.post(lp.LeaveRequested())
        self.kill(vanish=False)

    @property
    def _now_s(self) -> float:
        return self._world.kernel.now_s

    def post(self, event: lp.PeerEvent) -> None:
        if self.reachable:
            self._perform(self.machine.step(self._now_s, event))

    def _perform(self, effects: Iterable[lp.PeerEffect]) -> None:
        for effect in effects:
            self._do(effect)
        deadline_s = self.machine.deadline_s
        if deadline_s is not None and deadline_s != self._timer_s:
            self._timer_s = deadline_s
            self._world.kernel.at(deadline_s, self._expire, deadline_s)

    def _expire(self, deadline_s: float) -> None:
        if self._timer_s == deadline_s:
            self._timer_s = None
            self.post(ev.DeadlinePassed())

    # --- the loop -----------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self.reachable or self.rests:
            return
        self._at_boundary = False
        spread = self.spec.spread
        step_s = self.spec.step_s * self._rng.uniform(1 - spread, 1 + spread) + self.pause_s
        self.pause_s = 0.0
        self._world.kernel.after(step_s, self._end_step)

    def _end_step(self) -> None:
        if not self.reachable:
            return
        self._at_boundary = True
        self._num_steps += 1
        num = self.spec.num_samples
        self.num_stepped += num
        self._outstanding.append(StepPiece(self.node_id, self._num_steps, num))
        self.post(lp.LoopStepped(num))

    def _go_on(self, *, waits: bool) -> None:
        """The node has answered."""
        if not self._at_boundary:
            return
        self._apply_all()
        if waits and self._at_boundary:
            if self._waits_since is None:
                self._waits_since = self._now_s
                self._begun_s = None
                self._wait_number += 1
                limit_s = self.config.averaging_timeout_s
                self._world.kernel.after(limit_s, self._give_up_waiting, self._wait_number)
            return
        self._end_wait()
        self._begin_step()

    def _give_up_waiting(self, number: int) -> None:
        if self._waits_since is not None and number == self._wait_number and self.reachable:
            self._end_wait()
            self._begin_step()

    def _end_wait(self) -> None:
        if self._waits_since is None:
            return
        begun_s = self._begun_s if self._begun_s is not None else self._now_s
        waited_s = self._now_s - self._waits_since
        self._waits_since = None
        self._world.judge.waited(self, waited_s, self._now_s - begun_s)

    def _apply_all(self) -> None:
        """Apply what has come, at the end of a step."""
        if self._alone is not None:
            number = self._alone
            self._alone = None
            pieces = tuple(self._outstanding)
            self._outstanding = []
            before = self.machine.past.height
            self.post(lp.LoopApplied(number))
            self.height = self.machine.past.height
            self._world.judge.applied(self, self.height, before, pieces)
        while self._averages:
            average, pieces, before, height = self._averages.pop(0)
            assert before == self.height, (self.name, before, self.height)
            self.height = height
            self._world.judge.applied(self, height, before, pieces)
            self.post(lp.LoopApplied(average.round))
        machine = self.machine
        # Others may be delivered by the same step of the core.
        level = machine.own.num_waiting or self.height == machine.past.height
        assert level, f"{self.name} has another state"

    # --- effects ------------------------------------------------------------------------------

    def _do(self, effect: lp.PeerEffect) -> None:  # noqa: C901 - one line an effect.
        kernel = self._world.kernel
        match effect:
            case fx.Send(to, message):
                self._send(to, message)
            case fx.SendTensor(to, message, tensor):
                self._send_tensor(to, message, tensor)
            case fx.StartJob(job_id, job, inputs):
                values = [self._values[tensor] for tensor in inputs]
                size_bytes = sum(value.size_bytes for value in values)
                seconds = size_bytes / _WORK_BYTES_PER_S
                kernel.after(seconds, self._finish_job, job_id, job, values, seconds)
            case fx.FreeTensor(tensor):
                del self._values[tensor]
            case lp.AskContribution(request):
                kernel.after(_ASK_S, self._contribute, request)
            case lp.GiveBack(tensor):
                self._outstanding[:0] = self._values[tensor].pieces
            case lp.DeliverAverage():
                self._take_average(effect)
            case lp.StepAlone(number):
                self._alone = number
            case lp.AnswerLoop(waits):
                self._go_on(waits=waits)
            case lp.CopyState(request):
                self._give_copy(request)
            case lp.RefuseCopy(request, reason):
                self._refuse_copy(request, reason)
            case lp.LoadState():
                self._fetch = _Fetch(effect, list(effect.donors))
                self._rng.shuffle(self._fetch.donors)
                self._ask_donor()
            case fx.Note():
                self._world.judge.noted(self, effect)
            case fx.Stop(reason):
                self.stopped = reason
                self.kill(vanish=False)

    def _keep(self, value: _Value) -> ev.Tensor:
        tensor = TensorId(self._next_tensor)
        self._next_tensor += 1
        self._values[tensor] = value
        return ev.Tensor(tensor, value.size_bytes)

    def _contribute(self, request: int) -> None:
        if not self.reachable:
            return
        pieces = tuple(self._outstanding)
        self._outstanding = []
        num = sum(piece.num_samples for piece in pieces)
        tensor = self._keep(_Value(pieces, self.spec.model_bytes)) if num else None
        self.post(lp.LoopContributed(request, num, self.height.round, tensor))

    def _take_average(self, average: lp.DeliverAverage) -> None:
        pieces = self._values.pop(average.tensor).pieces
        before = self._averages[-1][3] if self._averages else self.height
        self._averages.append((average, pieces, before, self._world.heights.of(before, pieces)))
        if self._waits_since is not None:
            self._apply_all()
            self._end_wait()
            self._begin_step()

    # --- jobs ---------------------------------------------------------------------------------

    def _finish_job(
        self, job_id: JobId, job: jobs.Job, values: list[_Value], seconds: float
    ) -> None:
        if not self.reachable:
            return
        outputs: list[_Value] = []
        result: jobs.JobResult = jobs.Nothing()
        model_bytes = self.spec.model_bytes
        match job:
            case jobs.Gather(num_parts=num_parts):
                outputs = [
                    _Value(values[0].pieces, max(1, model_bytes // num_parts), part)
                    for part in range(num_parts)
                ]
            case jobs.Reduce(part=part, num_parts=num_parts, weights=weights):
                assert all(value.part == part for value in values)
                pieces = tuple(piece for value in values for piece in value.pieces)
                assert sum(piece.num_samples for piece in pieces) == sum(weights)
                outputs = [_Value(pieces, max(1, model_bytes // num_parts), part)]
                result = jobs.Squared(0.0)
            case jobs.Decode():
                first = values[0].pieces
                assert all(value.pieces == first for value in values), "parts differ"
                outputs = [_Value(first, model_bytes)]
                result = jobs.Proposed(hash_of(first))
        kept = tuple(self._keep(value) for value in outputs)
        self.post(ev.JobFinished(job_id, result, kept, seconds))

    # --- the network --------------------------------------------------------------------------

    def _send(self, to: NodeId, message: Message) -> None:
        receiver = self._world.peers.get(to)
        if isinstance(message, BeginRound):
            self._begun_s = self._now_s
            known = self._begun.setdefault(message.averaging, message)
            assert known == message, f"{self.name} uses {message.averaging} twice"

        def failed(reason: str, fault: ev.Fault) -> None:
            self.post(ev.SendFailed(to, message, reason, fault=fault))

        def delivered() -> None:
            assert receiver is not None
            receiver.hear(self.node_id, message)

        self._world.network.send_control(InFlight(self, receiver, 0, delivered, None, failed))

    def hear(self, sender: NodeId, message: Message) -> None:
        """Take a control message."""
        if isinstance(message, BeginRound):
            self._begun_s = self._now_s
        self.post(ev.Received(sender, message))

    def _send_tensor(self, to: NodeId, message: Message, tensor: TensorId) -> None:
        receiver = self._world.peers.get(to)
        value = self._values[tensor]

        def delivered() -> None:
            assert receiver is not None
            kept = receiver._keep(_Value(value.pieces, value.size_bytes, value.part))
            receiver.post(ev.Received(self.node_id, message, kept))

        def sent(seconds: float) -> None:
            self.post(ev.TensorSent(to, tensor, value.size_bytes, seconds))

        def failed(reason: str, fault: ev.Fault) -> None:
            self.post(ev.SendFailed(to, message, reason, tensor, fault=fault))

        flight = InFlight(self, receiver, value.size_bytes, delivered, sent, failed)
        self._world.network.send_tensor(flight)

    # --- states -------------------------------------------------------------------------------

    def _ask_donor(self) -> None:
        fetch = self._fetch
        if fetch is None or not self.reachable:
            return
        if not fetch.donors:
            self._fetch = None
            self.post(lp.StateCame(fetch.asked.height, "no donor has it"))
            return
        fetch.donor = fetch.donors.pop()
        donor = self._world.peers.get(fetch.donor)
        if donor is None or not donor.reachable:
            self._world.kernel.after(0.1, self._ask_donor)
            return
        request = donor._next_request
        donor._next_request += 1
        donor._copies[request] = self
        donor.post(lp.CopyRequested(request, fetch.asked.height))
        self._watch(donor, fetch)

    def _give_copy(self, request: int) -> None:
        asker = self._copies.pop(request)
        height = self.height
        self.num_copies += 1

        def delivered() -> None:
            asker._load(height)

        def failed(reason: str, fault: ev.Fault) -> None:  # noqa: ARG001
            asker._ask_donor()

        flight = InFlight(self, asker, 3 * self.spec.model_bytes, delivered, None, failed)
        self._world.network.send_tensor(flight)

    def _watch(self, donor: "SimPeer", fetch: _Fetch) -> None:
        """See whether a donor lives, until its state is here."""
        if self._fetch is not fetch or fetch.donor != donor.node_id or not self.reachable:
            return
        if donor.reachable:
            self._world.kernel.after(1.0, self._watch, donor, fetch)
        else:
            self._ask_donor()

    def _refuse_copy(self, request: int, reason: str) -> None:  # noqa: ARG002
        self._world.kernel.after(0.05, self._copies.pop(request)._ask_donor)

    def _load(self, height: Height) -> None:
        fetch = self._fetch
        self._fetch = None
        if fetch is None or not self.reachable:
            return
        if height != fetch.asked.height:
            self._fetch = fetch
            self._ask_donor()
            return
        self.post(lp.StateCame(height))
        if self._waits_since is not None:  # That was no wait for an average.
            self._waits_since = self._begun_s = self._now_s
        self.height = height
        self._outstanding.clear()
        self._averages.clear()
        self._alone = None
        self.post(lp.LoopLoaded(height))

    @property
    def num_tensors(self) -> int:
        """That the driver holds for the core."""
        return len(self._values)


def hash_of(pieces: Pieces) -> str:
    """Return the hash of an average."""
    text = " ".join(f"{p.peer}/{p.number}" for p in pieces)
    return hashlib.sha256(text.encode()).hexdigest()


class Heights:
    """What is in each state, and that nothing is in it twice."""

    def __init__(self) -> None:
        self._after: dict[tuple[Height, Pieces], Height] = {}

    def of(self, before: Height, pieces: Pieces) -> Height:
        """Return the state after an average."""
        from decod.protocol.collaboration.loading import after

        key = before, pieces
        if key not in self._after:
            self._after[key] = after(before, hash_of(pieces))
        return self._after[key]


@dataclass(slots=True)
class PeerWorld:
    """What simulated peers share."""

    kernel: Kernel
    network: Network
    judge: Judge
    heights: Heights = field(default_factory=Heights)
    peers: dict[NodeId, SimPeer] = field(default_factory=dict)

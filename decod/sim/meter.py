"""Time that a simulated run spends per iteration, in the measures of GWTF's table II."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId, iteration_of
from decod.protocol.core import jobs
from decod.protocol.core.events import Event, Received
from decod.protocol.core.jobs import Job
from decod.protocol.core.messages import BackwardGradient, ForwardActivation, Message
from decod.sim.kernel import Kernel
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import Observer, SimHost

_TRAVELLING = frozenset((ForwardActivation, BackwardGradient))
"""Messages that carry a microbatch to its next node."""

_ENDS = ("host.killed", "host.stopped", "host.compute_killed")


@dataclass(frozen=True, slots=True)
class IterationFigures:
    """Figures of one committed iteration, over all its attempts."""

    iteration: int
    duration_s: float
    """Time between two steps at the slowest data node. The first one counts from its opening."""
    num_microbatches: int
    """Number of committed microbatches."""
    communication_s: float
    """Time of activations and gradients from sender to receiver, including the wait for the link.
    The sum over all of them, in repeated attempts too."""
    wasted_s: float
    """Compute on microbatches whose result is in no committed step, over all hosts."""
    useful_s: float
    """Compute on microbatches whose result is in the committed step."""
    lost_s: float
    """The part of `wasted_s` that was lost with its host."""

    @property
    def time_per_microbatch_s(self) -> float | None:
        """The duration over the number of microbatches; None if there are none."""
        return self.duration_s / self.num_microbatches if self.num_microbatches else None


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node's part in the run costs it, per iteration from its first commit to its last."""

    num_control: float
    """Control messages sent, admission included."""
    control_bytes: float
    """What control messages take on the wire."""
    num_events: float
    """Events that its core takes in."""
    core_s: float
    """Time that its core computes; 0 if the world has no stopwatch."""

    @staticmethod
    def mean(costs: "Sequence[NodeCost]") -> "NodeCost":
        """Return the means over nodes."""
        return NodeCost(
            statistics.mean(cost.num_control for cost in costs),
            statistics.mean(cost.control_bytes for cost in costs),
            statistics.mean(cost.num_events for cost in costs),
            statistics.mean(cost.core_s for cost in costs),
        )


_Spent = tuple[int, int, int, float]
"""The sums of a `NodeCost`."""


@dataclass(slots=True)
class _Totals:
    """One host's totals at its first commit and its last."""

    first: _Spent
    last: _Spent
    num_iterations: int = 0


@dataclass(slots=True)
class _Tally:
    """Running sums of one iteration."""

    duration_s: float = 0.0
    num_microbatches: int = 0
    communication_s: float = 0.0
    wasted_s: float = 0.0
    useful_s: float = 0.0
    lost_s: float = 0.0


@dataclass(slots=True)
class Meter:
    """Measures a run, and passes everything on to another observer."""

    kernel: Kernel
    inner: Observer
    opened: Callable[[int], None] = lambda _: None
    """Called with each iteration when the first host opens it."""
    _tallies: dict[int, _Tally] = field(default_factory=lambda: defaultdict(_Tally))
    _num_committed: int = 0
    _num_opened: int = 0
    _under_way: dict[tuple[NodeId, NodeId, Message], float] = field(default_factory=dict)
    _spent_s: dict[str, dict[MicrobatchId, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Compute of each host since its last step, by microbatch."""
    _stepped_s: dict[str, float] = field(default_factory=dict)
    """When each host took its last step or opened its first iteration."""
    _totals: dict[str, _Totals] = field(default_factory=dict)
    members: list[tuple[float, int]] = field(default_factory=list)
    """Each opening of an iteration by its leader: when, and with how many members."""

    @property
    def costs(self) -> dict[str, NodeCost]:
        """What each host's part costs it, for hosts that have committed twice at least."""
        return {
            name: NodeCost(
                *(
                    (last - first) / totals.num_iterations
                    for first, last in zip(totals.first, totals.last, strict=True)
                )
            )
            for name, totals in self._totals.items()
            if totals.num_iterations
        }

    @property
    def figures(self) -> list[IterationFigures]:
        """Figures of the committed iterations, in order."""
        return [
            IterationFigures(
                iteration,
                tally.duration_s,
                tally.num_microbatches,
                tally.communication_s,
                tally.wasted_s,
                tally.useful_s,
                tally.lost_s,
            )
            for iteration, tally in sorted(self._tallies.items())
            if iteration <= self._num_committed
        ]

    # --- as an observer -----------------------------------------------------------------------

    def stepped(self, host: SimHost, event: Event | None) -> None:
        """Note the arrival of an activation or gradient."""
        if type(event) is Received and type(event.message) in _TRAVELLING:
            sent_s = self._under_way.pop((event.sender, host.node_id, event.message), None)
            if sent_s is not None:
                tally = self._tallies[_iteration(event.message)]
                tally.communication_s += self.kernel.now_s - sent_s
        self.inner.stepped(host, event)

    def sent(self, host: SimHost, to: NodeId, message: Message) -> None:
        """Note the departure of an activation or gradient."""
        if type(message) in _TRAVELLING:
            self._under_way[host.node_id, to, message] = self.kernel.now_s
        self.inner.sent(host, to, message)

    def computed(self, host: SimHost, job: Job, duration_s: float) -> None:
        """Count the compute of a job, or throw away what earlier jobs have computed.

        A dropped microbatch counts as useful if the host computes it again and its step contains
        it, because its activation has been passed on by then.
        """
        spent_s = self._spent_s[host.name]
        if isinstance(job, jobs.Pass):
            spent_s[job.microbatch] += duration_s
        elif isinstance(job, (jobs.Reset, jobs.Build, jobs.Load)):
            self._throw_away(host)
        self.inner.computed(host, job, duration_s)

    def committed(self, host: SimHost, step: SimulatedStep) -> None:
        """Close the tally of a host's step."""
        now = (host.num_control_sent, host.control_bytes_sent, host.num_events, host.core_s)
        totals = self._totals.setdefault(host.name, _Totals(now, now, -1))
        totals.last = now
        totals.num_iterations = totals.num_iterations + 1
        kept = {microbatch for microbatch, _ in step.counts}
        spent_s = self._spent_s.pop(host.name, {})
        tally = self._tallies[step.iteration]
        useful_s = sum(value for m, value in spent_s.items() if m in kept)
        tally.useful_s += useful_s
        tally.wasted_s += sum(spent_s.values()) - useful_s
        tally.num_microbatches = len(step.counts)
        self._num_committed = max(self._num_committed, step.iteration)
        now_s = self.kernel.now_s
        if host.compute.stage_index == 0 and host.name in self._stepped_s:
            tally.duration_s = max(tally.duration_s, now_s - self._stepped_s[host.name])
        self._stepped_s[host.name] = now_s
        self.inner.committed(host, step)

    def noted(self, host: SimHost, event: str, fields: tuple[tuple[str, object], ...]) -> None:
        """Note the opening of an iteration, or the end of a host."""
        if event == "iteration.opened":
            self._stepped_s.setdefault(host.name, self.kernel.now_s)
            told = dict(fields)
            if told["leader"] == host.node_id:
                self.members.append((self.kernel.now_s, int(str(told["num_members"]))))
            self._open(iteration_of(str(told["iteration"])))
        elif event in _ENDS:
            self._tallies[self._num_committed + 1].lost_s += self._throw_away(host)
        self.inner.noted(host, event, fields)

    def misused(self, host: SimHost, text: str, cause: BaseException | None) -> None:
        """Pass on the error that ends the run."""
        self.inner.misused(host, text, cause)

    def _open(self, iteration: int) -> None:
        if iteration > self._num_opened:
            self._num_opened = iteration
            self.opened(iteration)

    def _throw_away(self, host: SimHost) -> float:
        spent_s = sum(self._spent_s.pop(host.name, {}).values())
        self._tallies[self._num_committed + 1].wasted_s += spent_s
        return spent_s


def _iteration(message: Message) -> int:
    assert isinstance(message, (ForwardActivation, BackwardGradient))
    return message.iteration.number


def mean_figures(figures: Sequence[IterationFigures]) -> dict[str, float | None]:
    """Return the means over iterations; None for a figure that no iteration has."""
    times_s = [f.time_per_microbatch_s for f in figures]
    return {
        "duration_s": _mean([f.duration_s for f in figures]),
        "microbatches": _mean([f.num_microbatches for f in figures]),
        "time_per_microbatch_s": _mean([time_s for time_s in times_s if time_s is not None]),
        "communication_s": _mean([f.communication_s for f in figures]),
        "wasted_s": _mean([f.wasted_s for f in figures]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None

"""Strikes the hosts and links of a run with a scenario's faults, each at its instant."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise, product

from decod.protocol.core import events as ev
from decod.protocol.core.effects import StopReason
from decod.sim.audited_work import SimulatedWitness
from decod.sim.core import ends_run, place_of, stage_peers, with_ban
from decod.sim.kernel import seeded
from decod.sim.scenario import Churn, Cut, FaultKind, HostFault, Instants, Scenario
from decod.sim.simulated_host import SimHost, World

_RETURN_S = 2.0
"""Time until a node that the run has given up is started again."""

_SLOWNESS = 10.0
"""Factor by which a slow device takes longer."""

_FROM_OUTSIDE = (
    FaultKind.KILL,
    FaultKind.VANISH,
    FaultKind.RESTART,
    FaultKind.FREEZE,
    FaultKind.DOZE,
)
"""Faults that strike a host whatever its machine does."""

_RETURNING = (StopReason.REMOVED, StopReason.SUPERSEDED, StopReason.LEADER_LOST)


class Injection:
    """Strikes the hosts and cuts the links of one run.

    Args:
        scenario: The faults, cuts and churn.
        world: The world to strike.
        hosts: All hosts, by name.
        start: Brings a host up again.

    Attributes:
        num_coming: Number of hosts that will start, or start again.
    """

    def __init__(
        self,
        scenario: Scenario,
        world: World,
        hosts: dict[str, SimHost],
        start: Callable[[SimHost], None],
    ) -> None:
        self.num_coming = len(hosts)
        self._run = scenario.run
        self._instants = Instants(scenario.churn)
        self._num_slow: Counter[str] = Counter()
        """Number of reasons for which each host is slow now. Several do not add up."""
        self._strikes: dict[FaultKind, Callable[[SimHost, float], None]] = {
            FaultKind.KILL: self._kill,
            FaultKind.VANISH: self._vanish,
            FaultKind.FREEZE: self._freeze,
            FaultKind.DOZE: self._doze,
            FaultKind.STALL: self._stall,
            FaultKind.CLOCK: self._stop_clock,
            FaultKind.RECUT: self._recut,
            FaultKind.STAGE: self._stage,
            FaultKind.RESTART: self._restart,
            FaultKind.COMPUTE: self._compute,
            FaultKind.HANG: self._hang,
            FaultKind.DRAIN: self._drain,
            FaultKind.BAN: self._ban,
            FaultKind.PAUSE: self._pause,
            FaultKind.FREE: self._free,
            FaultKind.SLOW: self._slow,
            FaultKind.DISK: self._disk,
            FaultKind.SPOIL: self._spoil,
            FaultKind.ROT: self._rot,
            FaultKind.FLIP: self._flip,
            FaultKind.LIE: self._lie,
            FaultKind.STALE: self._return_stale,
            FaultKind.MEANS: self._spoil_means,
            FaultKind.ACCUSE: self._accuse,
        }
        self._world = world
        self._hosts = hosts
        self._start = start
        self._calm_s = scenario.calm_s
        for fault in scenario.faults:
            self._plan(fault)
        for cut in scenario.cuts:
            world.kernel.at(cut.at_s, self._cut, cut)
        if scenario.calm_s is not None:
            for host in hosts.values():
                host.on_stop = self._bring_back

    def _plan(self, fault: HostFault) -> None:
        host = self._hosts[fault.host]
        kernel = self._world.kernel
        strike = partial(self._strike, fault, host)
        if fault.kind is FaultKind.RESTART:
            self.num_coming += 1
        if fault.before_message is not None:
            # A fault that steps the machine must wait for the end of the machine's present step.
            at_once = fault.kind in _FROM_OUTSIDE
            later = partial(kernel.after, 0.0, strike)
            host.on_sent(*fault.before_message, strike if at_once else later)
        elif fault.after_num_events is None:
            kernel.at(fault.at_s or 0.0, strike)
        else:
            host.on_event(fault.after_num_events, lambda: kernel.after(0.0, strike))

    def _strike(self, fault: HostFault, host: SimHost) -> None:
        # The message that a fault waits for may come only after the calm has begun.
        late = self._calm_s is not None and self._world.kernel.now_s > self._calm_s
        if late or not host.reachable:
            self.num_coming -= fault.kind is FaultKind.RESTART
            return
        self._strikes[fault.kind](host, fault.duration_s)

    def opened(self, iteration: int) -> None:
        """Plan the churn of an iteration that has begun."""
        kernel = self._world.kernel
        for delay_s, churn in self._instants.opened(kernel.now_s, iteration):
            self.num_coming += churn.returns
            kernel.after(delay_s, self._come_or_go, churn)

    def _come_or_go(self, churn: Churn) -> None:
        host = self._hosts[churn.host]
        if churn.returns:
            self._start(host)
        elif host.reachable and not self._needed(host):
            host.kill(vanish=True)

    def _needed(self, host: SimHost) -> bool:
        """Return whether no other host of the stage holds what the run has committed."""
        hosts = [other for other in self._hosts.values() if other.reachable]
        newest = max((other.compute.iteration for other in hosts), default=0)
        # Some hosts hear of a commit a little later.
        return not any(
            other is not host and other.compute.iteration >= max(1, newest - 1)
            for other in hosts
            if other.compute.stage_index == host.compute.stage_index
        )

    def _kill(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        host.kill()

    def _vanish(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        host.kill(vanish=True)

    def _stage(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        for peer in dict.fromkeys((host.node_id, *stage_peers(host.machine))):
            self._world.hosts[peer].kill()

    def _freeze(self, host: SimHost, duration_s: float) -> None:
        host.freeze(duration_s)

    def _doze(self, host: SimHost, duration_s: float) -> None:
        host.freeze(duration_s, device=False)

    def _stall(self, host: SimHost, duration_s: float) -> None:
        host.device.stall(duration_s)

    def _stop_clock(self, host: SimHost, duration_s: float) -> None:
        self._note(host, "clock.stopped", duration_s=duration_s)
        host.clock.stop(duration_s)

    def _restart(self, host: SimHost, duration_s: float) -> None:
        host.kill()
        self._world.kernel.after(duration_s, self._start, host)

    def _compute(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        if self._calm_s is not None and ends_run(host.machine):
            self._note(host, "compute.spared")  # As with `_drain`.
        else:
            host.device.fail()

    def _hang(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        host.device.hang()

    def _drain(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        if self._calm_s is not None and ends_run(host.machine):
            self._note(host, "drain.spared")  # It would end the run, and prove nothing.
        else:
            host.deliver(ev.DrainRequested())

    def _ban(self, host: SimHost, duration_s: float) -> None:
        if self._decide_on(host, banned=True):
            self.num_coming += 1
            self._world.kernel.after(duration_s, self._unban, host)
        else:
            self._note(host, "ban.spared")

    def _unban(self, host: SimHost) -> None:
        if not self._decide_on(host, banned=False):
            # Without a leader, or while that has no quorum, the operator tries again.
            self._world.kernel.after(_RETURN_S, self._unban, host)
        elif not host.reachable:
            self._start(host)
        else:
            self.num_coming -= 1  # It had not heard of the ban.

    def _decide_on(self, host: SimHost, *, banned: bool) -> bool:
        """Have the leader ban a node or lift its ban. Return whether there is one that can."""
        now_s = self._world.kernel.now_s
        for other in filter(_leads, self._hosts.values()):
            bans = with_ban(other.machine, host.node_id, banned=banned, now_s=now_s)
            if bans is not None:
                other.deliver(ev.BansMade(bans))
                return True
        return False

    def _recut(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Once.
        run = self._run
        num = run.model.num_hidden_layers - run.stages.num_first_blocks
        num_stages = run.stages.num_relay_stages
        rng = seeded(run.seed, f"recut {self._world.kernel.now_s}")
        # As often as not, there are as many stages as before.
        num_stages = rng.choice((num_stages, rng.randint(1, min(num, num_stages + 1))))
        cuts = [
            tuple(end - begin for begin, end in pairwise((0, *ends, num)))
            for ends in combinations(range(1, num), num_stages - 1)
        ]
        for other in filter(_leads, self._hosts.values()):
            other.deliver(ev.RecutRequested(rng.choice(cuts)))

    def _pause(self, host: SimHost, duration_s: float) -> None:
        host.deliver(ev.PauseRequested(paused=True))
        self._world.kernel.after(duration_s, host.deliver, ev.PauseRequested(paused=False))

    def _free(self, host: SimHost, duration_s: float) -> None:
        host.deliver(ev.PauseRequested(paused=True, frees_device=True))
        self._world.kernel.after(duration_s, self._resume, host)

    def _resume(self, host: SimHost) -> None:
        if host.stop is not None and host.stop.reason is StopReason.PAUSED:
            self.num_coming += 1
            self._start(host)
        else:
            host.deliver(ev.PauseRequested(paused=False))

    def _slow(self, host: SimHost, duration_s: float) -> None:
        self._note(host, "host.slowed", duration_s=duration_s)
        self._num_slow[host.name] += 1
        if self._num_slow[host.name] == 1:
            host.speed /= _SLOWNESS
        self._world.kernel.after(duration_s, self._hasten, host)

    def _disk(self, host: SimHost, duration_s: float) -> None:
        self._note(host, "disk.filled", duration_s=duration_s)
        until_s = self._world.kernel.now_s + duration_s
        host.disk.full_until_s = max(host.disk.full_until_s, until_s)

    def _spoil(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        for stage, iteration in host.disk.spoil():
            self._note(host, "disk.altered", stage=stage, iteration=iteration)

    def _rot(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Once.
        self._note(host, "memory.rotted")
        host.compute.rotten = f" bit of {host.name}"

    def _lie(self, host: SimHost, _: float) -> None:
        self._lying(host).lies = True

    def _return_stale(self, host: SimHost, _: float) -> None:
        self._lying(host).is_stale = True

    def _spoil_means(self, host: SimHost, _: float) -> None:
        self._lying(host).spoils_means = True

    def _accuse(self, host: SimHost, _: float) -> None:
        self._lying(host).accuses = True

    def _lying(self, host: SimHost) -> SimulatedWitness:
        self._world.liars.add(host.node_id)
        return host.compute.witness

    def _flip(self, host: SimHost, duration_s: float) -> None:  # noqa: ARG002 - Permanent.
        self._note(host, "memory.flipped")
        host.compute.flip()

    def _hasten(self, host: SimHost) -> None:
        self._num_slow[host.name] -= 1
        if not self._num_slow[host.name]:
            host.speed *= _SLOWNESS

    def _cut(self, cut: Cut) -> None:
        until_s = self._world.kernel.now_s + cut.duration_s
        for here, there in product(cut.senders, cut.receivers):
            self._impair(here, there, cut.rate_bytes_per_s, until_s)
            if cut.both_ways:
                self._impair(there, here, cut.rate_bytes_per_s, until_s)
        first = self._hosts[cut.senders[0]]
        self._note(first, "links.slowed" if cut.rate_bytes_per_s else "links.cut", which=str(cut))

    def _impair(self, sender: str, receiver: str, rate: float, until_s: float) -> None:
        """Slow a link's tensors down to a rate, or cut the link if the rate is 0."""
        if rate:
            self._world.network.slow(sender, receiver, rate=rate, until_s=until_s)
        else:
            self._world.network.cut(sender, receiver, until_s=until_s)

    def _bring_back(self, host: SimHost) -> None:
        """Plan the return of a node that the run has given up, as its operator would."""
        if host.stop is not None and host.stop.reason in _RETURNING:
            self.num_coming += 1
            self._world.kernel.after(_RETURN_S, self._start, host)

    def _note(self, host: SimHost, event: str, **fields: object) -> None:
        self._world.observer.noted(host, event, tuple(fields.items()))


def _leads(host: SimHost) -> bool:
    """Return whether a host is there and leads, as it believes."""
    place = place_of(host.machine) if host.present else None
    return place is not None and place.leads

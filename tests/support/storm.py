"""A storm: real daemons that train together while their hosts are killed, frozen, cut and started.

`Fleet` holds the hosts of one run. Like an operator's service manager, it restarts daemons that
have ended. `Storm` strikes. Nobody else intervenes.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from decod.protocol.core.view import Role
from tests.support import trickling
from tests.support.cluster import Cluster, Daemon, stage_nodes

RETURN_S = 4.0
"""Time for which a killed host stays away."""
FROZEN_S = 9.0
CUT_S = 8.0
SUSPENDED_S = (1.0, 120.0)
"""Range of the time for which a host sleeps, like a laptop."""
TRICKLING_S = 60.0
"""Time for which a relay's tensors trickle out."""

_LATE = timedelta(seconds=5)
"""The leader may notice the loss of a host this long after the host's return."""

_SAMPLE_S = 1.0
_USE_S = 5.0

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the fleet at an instant."""

    at_s: float
    iteration: int
    capacity: float
    """Share of hosts present in the stage that lacks most. 1: none is missing."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without any commit."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Use:
    """The resources of a process at an instant."""

    at_s: float
    memory_bytes: int
    """Memory of its own, and memory shared with the host's other process. Pages of files are left
    out, because they stay in memory only while there is room."""
    num_files: int

    @staticmethod
    def of(pid: int, at_s: float) -> "Use":
        """Measure a process.

        Raises:
            OSError: The process has ended.
        """
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        held_kib = sum(int(line.split()[1]) for line in lines if line.startswith(_HELD))
        return Use(at_s, 1024 * held_kib, len(os.listdir(f"/proc/{pid}/fd")))


_HELD = ("RssAnon:", "RssShmem:")


@dataclass(slots=True)
class Usage:
    """Resources of the processes while they train, by host, node process and kind."""

    series: dict[tuple[str, int, str], list[Use]] = field(default_factory=dict)

    def look(self, name: str, daemon: Daemon, at_s: float) -> None:
        """Measure a node and its compute process now."""
        node_pid = daemon.process.pid
        for kind, pid in (("node", node_pid), ("compute", daemon.compute_pid())):
            if pid is None:
                continue
            with suppress(OSError):
                use = Use.of(pid, at_s)
                self.series.setdefault((name, node_pid, kind), []).append(use)

    def growth(self, *, warm_s: float, least_s: float) -> dict[str, float]:
        """Return the growth of each process's memory, in bytes per second.

        The growth is the median over all pairs of instants: a jump counts as often as it occurs.

        Args:
            warm_s: Time to skip at the beginning of a process's training.
            least_s: Least time that must remain. Shorter-lived processes are left out.
        """
        slopes = {}
        for (name, pid, kind), uses in self.series.items():
            warm = [use for use in uses if use.at_s >= uses[0].at_s + warm_s]
            if not warm or warm[-1].at_s - warm[0].at_s < least_s:
                continue
            slopes[_process(name, pid, kind)] = median(
                (later.memory_bytes - earlier.memory_bytes) / (later.at_s - earlier.at_s)
                for earlier, later in combinations(warm, 2)
            )
        return slopes

    def most_files(self) -> dict[str, int]:
        """Return the largest number of open files of each process."""
        return {
            _process(*key): max(use.num_files for use in uses) for key, uses in self.series.items()
        }


def _process(name: str, node_pid: int, kind: str) -> str:
    return f"the {kind} process of {name} ({node_pid})"


@dataclass(slots=True)
class Strike:
    """A strike on a host, which was in the run again at `end`."""

    name: str
    begin: datetime
    end: datetime | None = None

    def explains(self, name: str, at: datetime) -> bool:
        """Return whether a leader that lost a host at an instant was right."""
        over = self.end is not None and at > self.end + _LATE
        return name == self.name and self.begin <= at and not over


class Fleet:
    """The hosts of one run.

    Args:
        cluster: Starts the hosts.
        relays: Number of relays in each relay stage.
    """

    def __init__(self, cluster: Cluster, relays: tuple[int, ...]) -> None:
        self.cluster = cluster
        self.hosts: dict[str, Daemon] = {}
        self.stages = host_stages(cluster.run.batch.num_data_nodes, relays)
        """Stage of each host."""
        self.missing: dict[str, float] = {}
        """Struck hosts that are not back in the run, each with the instant of the first check."""
        self.in_view: set[str] = set()
        """Hosts that the leader counted as members when it was last asked."""
        self.held: set[str] = set()
        """Hosts that must not be started or examined for now."""
        self.samples: list[Sample] = []
        self.usage = Usage()
        self.exits: Counter[int] = Counter()
        """Exit codes of daemons that nobody had struck."""
        self.tracebacks: list[str] = []
        self._strikes: list[Strike] = []
        self._struck_pids: set[int] = set()
        self._sample_s = self._use_s = 0.0
        self._join_strings: dict[Role, str] = {}

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all hosts. The first data node leads."""
        self.hosts["data-0"] = self.cluster.start_leader(name="data-0")
        for role in Role:
            found = self.cluster.join_string(self.hosts["data-0"], role)
            self._join_strings[role] = found or ""
        for name in self.stages:
            if name != "data-0":
                self._start(name)

    def _start(self, name: str) -> None:
        stage = self.stages[name]
        join_string = self.join_string(Role.RELAY if stage else Role.DATA)
        if stage:
            arguments = ["join", join_string, "--stage", str(stage)]
            self.hosts[name] = self.cluster.start(name, *arguments, program=trickling.PROGRAM)
        else:
            arguments = ["leader", str(self.cluster.run_file), "--join", join_string]
            self.hosts[name] = self.cluster.start(name, *arguments)

    def join_string(self, role: Role) -> str:
        """Return the join string, from a data node that answers, or else the last known one."""
        field = "join_string" if role is Role.RELAY else "data_join_string"
        for name in self.data_nodes:
            daemon = self.hosts.get(name)
            if daemon is None or name in self.held or daemon.process.poll() is not None:
                continue
            status = daemon.try_status()
            if status is not None and status[field]:
                self._join_strings[role] = status[field]
                break
        return self._join_strings[role]

    @property
    def data_nodes(self) -> list[str]:
        return [name for name, stage in self.stages.items() if not stage]

    def lost(self, name: str, *, for_s: float = 0.0) -> None:
        """Note a strike on a host. The host can't be back before `for_s` has passed."""
        self.missing[name] = time.monotonic() + for_s
        self._strikes.append(Strike(name, datetime.now(UTC)))
        self._struck_pids.add(self.hosts[name].process.pid)

    def tend(self) -> None:
        """Restart daemons that have ended, and note hosts that are back."""
        now_s = time.monotonic()
        for name, daemon in self.hosts.items():
            if name in self.held:
                continue
            code = daemon.process.poll()
            if code is not None:
                if daemon.process.pid not in self._struck_pids:
                    self.exits[code] += 1
                self.tracebacks += daemon.tracebacks()
                self._start(name)
            elif self.missing.get(name, now_s) < now_s and _is_back(daemon):
                del self.missing[name]
                self._ended(name)
        self._look()

    def _ended(self, name: str) -> None:
        """Note that a struck host is back."""
        for strike in self._strikes:
            if strike.name == name:
                strike.end = strike.end or datetime.now(UTC)

    def wrongly_lost(self) -> list[str]:
        """Return the hosts that leaders have lost although nobody had struck them, and why."""
        names = {d.events("node.started")[0]["node_id"]: name for name, d in self.hosts.items()}
        found = []
        for asked in self.data_nodes:
            for record in self.hosts[asked].events("member.lost"):
                at = datetime.fromisoformat(record["time"])
                who = names.get(record["peer"], record["peer"])
                if not any(strike.explains(who, at) for strike in self._strikes):
                    found.append(f"{who} was lost to {asked}: {record['reason']}, {record['time']}")
        return found

    # --- looking ------------------------------------------------------------------------------

    def leader(self) -> tuple[str, dict[str, Any]] | None:
        """Return the leader's name and status."""
        found = []
        for name in self.data_nodes:
            daemon = self.hosts.get(name)
            if daemon is None or name in self.held or daemon.process.poll() is not None:
                continue
            status = daemon.try_status()
            if status is None or status["leader"]["electing"]:
                continue
            if status["leader"]["id"] == status["node"]["id"]:
                found.append((status["leader"]["term"], name, status))
        return max(found)[1:] if found else None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._sample_s:
            self._sample_s = now_s + _SAMPLE_S
            found = self.leader()
            last = self.samples[-1].iteration if self.samples else 0
            iteration = found[1]["iteration"] if found is not None else last
            if found is not None:
                self.in_view = {node["name"] for node in stage_nodes(found[1])}
            self.samples.append(Sample(now_s, max(last, iteration), self._capacity()))
        if now_s >= self._use_s:
            self._use_s = now_s + _USE_S
            for name in self.whole:
                if name not in self.held and self.hosts[name].process.poll() is None:
                    self.usage.look(name, self.hosts[name], now_s)

    def _capacity(self) -> float:
        full = Counter(self.stages.values())
        left = Counter(stage for name, stage in self.stages.items() if name not in self.missing)
        return min(left[stage] / full[stage] for stage in full)

    @property
    def whole(self) -> list[str]:
        """Hosts that train, as far as is known."""
        return [n for n in self.stages if n in self.in_view and n not in self.missing]

    @property
    def iteration(self) -> int:
        return self.samples[-1].iteration if self.samples else 0

    def longest_pause(self, begin_s: float, end_s: float) -> Pause:
        """Return the longest time without a commit between two instants."""
        longest, last_s, iteration = Pause(begin_s, begin_s), begin_s, -1
        for sample in self.samples:
            if begin_s <= sample.at_s <= end_s:
                if sample.iteration > iteration:
                    iteration, last_s = sample.iteration, sample.at_s
                longest = max(longest, Pause(last_s, sample.at_s), key=lambda p: p.duration_s)
        return longest

    def mean_capacity(self, begin_s: float, end_s: float) -> float:
        """Return the mean share of the bottleneck stage that was present between two instants."""
        found = [s.capacity for s in self.samples if begin_s <= s.at_s <= end_s]
        return sum(found) / len(found)


def host_stages(num_data_nodes: int, relays: tuple[int, ...]) -> dict[str, int]:
    """Return the stage of each host, by its name."""
    stages = {f"data-{index}": 0 for index in range(num_data_nodes)}
    for stage, num in enumerate(relays, start=1):
        stages |= {f"relay-{stage}-{index}": stage for index in range(num)}
    return stages


def _is_back(daemon: Daemon) -> bool:
    status = daemon.try_status()
    return status is not None and status["node"]["state"] in ("training", "aggregating")


class Storm:
    """Strikes one host or link at a time, but never the last whole host of a stage.

    Args:
        fleet: The fleet to strike.
        seed: Determines the victims and the kinds.
        pause_s: Time between two strikes.
    """

    KINDS: tuple[str, ...] = (
        *("kill", "cut", "freeze", "leader", "restart", "suspend"),
        *("leave", "resign", "cut", "kill", "trickle"),
    )

    def __init__(self, fleet: Fleet, *, seed: int, pause_s: float) -> None:
        self._fleet = fleet
        self._rng = Random(seed)
        self._pause_s = pause_s
        self._next_s = 0.0
        self._kinds: list[str] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self.struck: Counter[str] = Counter()
        self.log: list[tuple[float, str, str]] = []
        """Instant, kind and victim of each strike."""

    def step(self) -> None:
        """Strike if it is time, and end strikes that have lasted long enough."""
        now_s = time.monotonic()
        due = [undo for at_s, undo in self._undo if at_s <= now_s]
        self._undo = [entry for entry in self._undo if entry[0] > now_s]
        for undo in due:
            undo()
        if now_s >= self._next_s:
            self._next_s = now_s + self._pause_s
            self._strike(now_s)

    def struck_in(self, pause: Pause) -> list[str]:
        """Return the strikes during a pause or just before: kind, victim, and time in the pause."""
        return [
            f"{kind} {who} {at_s - pause.begin_s:+.1f} s"
            for at_s, kind, who in self.log
            if pause.begin_s - _SAMPLE_S <= at_s <= pause.end_s
        ]

    def end(self) -> None:
        """End all strikes."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _strike(self, now_s: float) -> None:
        if not self._kinds:
            self._kinds = list(self.KINDS)
            self._rng.shuffle(self._kinds)
        # A kind that is impossible now, because too few hosts are left, waits until it is possible.
        for kind in self._kinds:
            who = self._victim(kind)
            if who is not None:
                self._kinds.remove(kind)
                self.struck[kind] += 1
                self.log.append((now_s, kind, who))
                getattr(self, f"_{kind}")(who, now_s)
                return

    def _victim(self, kind: str) -> str | None:
        """Return the victim. None: the others could not go on without any candidate."""
        fleet, whole = self._fleet, self._fleet.whole
        # With another host, the missing ones could be more than half, and the rest would wait.
        if 3 * len(fleet.missing) > len(fleet.stages):
            return None
        if kind in ("leader", "resign"):
            found = fleet.leader()
            others = [name for name in fleet.data_nodes if name in whole]
            return found[0] if found is not None and len(others) > 1 else None
        if kind == "cut":
            possible = fleet.cluster.network is not None and len(whole) > 1
            return "->".join(self._rng.sample(whole, 2)) if possible else None
        stages = fleet.stages
        left = Counter(stages[name] for name in whole)
        choice = [name for name in whole if stages[name] and left[stages[name]] >= 2]
        return self._rng.choice(choice) if choice else None

    def _later(self, after_s: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + after_s, undo))

    def _kill(self, who: str, now_s: float) -> None:
        fleet = self._fleet
        fleet.lost(who)
        fleet.held.add(who)
        fleet.hosts[who].send(signal.SIGKILL)
        fleet.hosts[who].wait()
        self._later(RETURN_S, lambda: fleet.held.discard(who))

    def _leader(self, who: str, now_s: float) -> None:
        self._kill(who, now_s)

    def _restart(self, who: str, now_s: float) -> None:
        self._fleet.lost(who)
        self._fleet.hosts[who].send(signal.SIGKILL)
        self._fleet.hosts[who].wait()

    def _leave(self, who: str, now_s: float) -> None:
        self._fleet.lost(who)
        self._fleet.hosts[who].send(signal.SIGTERM)

    def _resign(self, who: str, now_s: float) -> None:
        self._leave(who, now_s)

    def _freeze(self, who: str, now_s: float) -> None:
        self._stop(who, FROZEN_S)

    def _suspend(self, who: str, now_s: float) -> None:
        least_s, most_s = SUSPENDED_S
        self._stop(who, least_s * (most_s / least_s) ** self._rng.random())

    def _stop(self, who: str, duration_s: float) -> None:
        fleet = self._fleet
        daemon = fleet.hosts[who]
        pids = [pid for pid in (daemon.process.pid, daemon.compute_pid()) if pid is not None]
        # After a thaw, the host believes for a moment that nothing has happened.
        fleet.lost(who, for_s=duration_s + 3.0)
        fleet.held.add(who)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            fleet.held.discard(who)

        self._later(duration_s, thaw)

    def _trickle(self, who: str, now_s: float) -> None:
        flag = self._fleet.hosts[who].state_dir / trickling.FLAG
        self._fleet.lost(who, for_s=TRICKLING_S)
        flag.touch()
        self._later(TRICKLING_S, lambda: flag.unlink(missing_ok=True))

    def _cut(self, who: str, now_s: float) -> None:
        network = self._fleet.cluster.network
        assert network is not None
        begin, _, end = who.partition("->")
        network.cut(begin, end)
        self._later(CUT_S, lambda: network.heal(begin, end))

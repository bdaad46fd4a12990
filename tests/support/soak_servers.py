"""A soak of stages that are organised as servers: clients are killed, and come back.

One data node, two servers in each of two stages, and clients that go where the leader sends them.
The storm kills one client after the other, and now and then a server if the plan says so. A host
that was killed comes back with its state folder, like one that reboots. The twin, without faults,
runs afterwards.

What the runs have in common with those of a pipeline, and what is audited: `tests.support.soak`.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random

from typing_extensions import override

from decod.protocol.core.view import Role
from decod.run.run_config import Organisation, RunConfig
from tests.support.cluster import Cluster, Daemon
from tests.support.history import read_records
from tests.support.runs import make_run
from tests.support.soak import LEARNING_RATE, Outcome, endure
from tests.support.storm import Fleet, Storm

NUM_STAGES = 2
NUM_SERVERS = 2
"""In each stage."""

SERVER_EVERY = 4
"""One of so many victims is a server, if servers are struck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersPlan:
    """Setting and duration of a soak."""

    num_clients: int = 6
    num_microbatches: int = 32
    storm_s: float = 300.0
    pause_s: float = 10.0
    seed: int = 1
    servers: bool = False
    """Whether servers are struck, too."""
    twin: bool = False
    fork: bool = True
    """All hosts share the processors of this one. Without forks, their starts take most of them."""

    @property
    def run(self) -> RunConfig:
        run = make_run()
        return replace(
            run,
            organisation=Organisation.SERVERS,
            batch=replace(run.batch, num_microbatches=self.num_microbatches),
            optimizer=replace(run.optimizer, lr=LEARNING_RATE),
        )


class ServersFleet(Fleet):
    """The hosts of one run. The leader chooses a stage for each client.

    Args:
        cluster: Starts the hosts.
        num_clients: Of all stages.
    """

    def __init__(self, cluster: Cluster, num_clients: int) -> None:
        super().__init__(cluster, (NUM_SERVERS,) * NUM_STAGES)
        self.servers = [name for name, stage in self.stages.items() if stage]
        self.clients = [f"client-{k}" for k in range(num_clients)]
        # They count as one more stage.
        self.stages |= dict.fromkeys(self.clients, NUM_STAGES + 1)

    @override
    def _start(self, name: str) -> None:
        arguments = ["join", self.join_string(Role.RELAY)]
        if name in self.servers:
            arguments += ["--server", "--stage", str(self.stages[name])]
        self.hosts[name] = self.cluster.start(name, *arguments)


class ServersStorm(Storm):
    """Kills one client at a time, or a server whose stage has another.

    Args:
        fleet: The fleet to strike.
        plan: Says when, and whom.
    """

    KINDS = ("kill",)

    def __init__(self, fleet: ServersFleet, plan: ServersPlan) -> None:
        super().__init__(fleet, seed=plan.seed, pause_s=plan.pause_s)
        self._hosts, self._plan = fleet, plan
        self._choices = Random(plan.seed)

    @override
    def _victim(self, kind: str) -> str | None:
        hosts = self._hosts
        whole = hosts.whole
        if self._plan.servers and len(self.log) % SERVER_EVERY == SERVER_EVERY - 1:
            servers = [name for name in hosts.servers if name in whole]
            pairs = [n for n in servers for m in servers if n != m and _stage(n) == _stage(m)]
            if pairs:
                return self._choices.choice(pairs)
        clients = [name for name in hosts.clients if name in whole]
        return self._choices.choice(clients) if len(clients) > 1 else None


def _stage(server: str) -> str:
    return server.rpartition("-")[0]


def iterations_s(leader: Daemon) -> list[float]:
    """Return how long each iteration of a run took, from the log of a leader that led all of it."""
    records = read_records(leader.state_dir)
    told = (r["time"] for r in records if r.get("event") == "step.committed")
    ends = [datetime.fromisoformat(time) for time in told]
    return [(end - begin).total_seconds() for begin, end in pairwise(ends)]


def soak_servers(
    plan: ServersPlan, folder: Path, corpus: Path
) -> list[tuple[Outcome, list[float]]]:
    """Run the storm, and then its twin if the plan says so.

    Returns:
        The outcome of each, and the time of each of its iterations. The storm's come first.
    """
    outcomes = []
    for name in ("storm", "twin")[: 1 + plan.twin]:
        with Cluster(folder / name, plan.run, corpus, fork=plan.fork) as cluster:
            fleet = ServersFleet(cluster, plan.num_clients)
            storm = ServersStorm(fleet, plan) if name == "storm" else None
            (outcome,) = endure([fleet], storm, plan.storm_s, corpus)
            if storm is not None:
                servers = sum(who in fleet.servers for _, _, who in storm.log)
                outcome.faults["of a server"] = servers
            outcomes.append((outcome, iterations_s(fleet.hosts["data-0"])))
    return outcomes

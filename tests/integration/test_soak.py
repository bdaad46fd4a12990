"""Relays are killed, frozen, asked to leave and started again, and training never minds.

`DECOD_SOAK_S` sets for how long; a fault strikes about every ten seconds.
"""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.support.cluster import Cluster, Daemon
from tests.support.runs import loss_error, make_run, reference

SOAK_S = float(os.environ.get("DECOD_SOAK_S", "90"))
PAUSE_S = 10.0
FROZEN_S = 9.0
LEARNING_RATE = 1e-4

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 240)]


class Storm:
    """Strikes a relay at a time, and starts again whoever has ended."""

    def __init__(self, cluster: Cluster, relays: dict[str, Daemon], seed: int) -> None:
        self._cluster = cluster
        self._relays = relays
        self._rng = Random(seed)
        self._frozen: tuple[Daemon, float] | None = None
        self.struck: Counter[str] = Counter()

    def strike(self) -> None:
        relay = self._relays[self._rng.choice(sorted(self._relays))]
        kind = self._rng.choice(("kill", "kill", "freeze", "leave"))
        if relay.process.poll() is not None or (kind == "freeze" and self._frozen):
            return
        self.struck[kind] += 1
        match kind:
            case "kill":
                relay.send(signal.SIGKILL)
            case "freeze":
                relay.send(signal.SIGSTOP)
                self._frozen = relay, time.monotonic() + FROZEN_S
            case "leave":
                relay.send(signal.SIGTERM)

    def mend(self) -> None:
        """Thaw, and start again."""
        if self._frozen is not None and time.monotonic() > self._frozen[1]:
            self._frozen[0].send(signal.SIGCONT)
            self._frozen = None
        for name, relay in self._relays.items():
            if relay.process.poll() is not None:
                self._relays[name] = self._cluster.start_relay(name)

    def thaw(self) -> None:
        if self._frozen is not None:
            self._frozen[0].send(signal.SIGCONT)


def test_a_storm_of_faults_costs_time_and_nothing_learnt(tmp_path: Path, corpus: Path) -> None:
    run = make_run()
    # At a higher rate hundreds of iterations amplify the last bit to whatever one likes.
    run = replace(run, optimizer=replace(run.optimizer, lr=LEARNING_RATE))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relays = {relay.name: relay for relay in cluster.start_relays(3)}
        cluster.wait_for_iteration(3)
        storm, begin_s = Storm(cluster, relays, seed=1), time.monotonic()
        next_s = begin_s
        seen = [(begin_s, leader.iteration)]

        def weather() -> bool:
            nonlocal next_s
            leader.refuse_death()
            now_s = time.monotonic()
            if leader.iteration > seen[-1][1]:
                seen.append((now_s, leader.iteration))
            if now_s > next_s:
                next_s = now_s + PAUSE_S
                storm.strike()
            storm.mend()
            return now_s - begin_s > SOAK_S

        cluster.wait_for(weather, "the end of the storm", timeout_s=SOAK_S + 60)
        storm.thaw()
        cluster.wait_for_iteration(leader.iteration + 3)
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0
        losses = leader.losses()
        expected, _ = reference(cluster.run, corpus, len(losses))
        longest_s = max(b[0] - a[0] for a, b in pairwise(seen))
        counts = {name: len(leader.events(name)) for name in ("round.mended", "round.aborted")}
        print(f"{dict(storm.struck)}: {len(losses)} iterations, {counts}", end=", ")
        print(
            f"longest pause {longest_s:.1f} s, losses differ by {loss_error(losses, expected):.1e}"
        )
        assert sorted(losses) == list(range(1, len(losses) + 1))
        assert loss_error(losses, expected) < 1e-8

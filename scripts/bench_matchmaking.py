"""Measure how peers of a collaborative run find together: `python scripts/bench_matchmaking.py`.

    python scripts/bench_matchmaking.py                     2, 4, 8 and 16 peers, 1,000 rounds each
    python scripts/bench_matchmaking.py --rounds 100 64     64 peers, 100 rounds

Runs are played in virtual time, by the core that real hosts run. Peers' speeds differ by up to
three times, and in each round a tenth of them vanish without a word while as many come. Two runs
are played at a time, each in a process of its own. With `--json` there is one run, in this process.

    whole     rounds in which all took part who were alive and level from its beginning to its end
    waiting   share of their time that loops wait, without the time that averages take
    averaging share of their time that loops wait while an average is on its way
    longest   longest wait of a loop
    repeated  attempts at an average that went on without a lost peer
    lost      rounds that ended without an average
    messages  control messages that a peer sends in a round
    core      processor time of a peer's core in a round
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import override

from decod.protocol.collaboration.loop import PeerEffect, PeerEvent
from decod.protocol.core.effects import Send
from decod.protocol.core.messages.round_messages import Height
from decod.sim.collaboration import START, Collaboration, CollaborationSpec
from decod.sim.kernel import core_stopwatch
from decod.sim.simulated_peers import SimPeer

SIZES = (2, 4, 8, 16)
NUM_ROUNDS = 1000
NUM_PROCESSES = 2


class TimedCollaboration(Collaboration):
    """A run whose cores are timed."""

    def __init__(self, spec: CollaborationSpec) -> None:
        super().__init__(spec)
        self.core_s, self.num_sent = 0.0, 0

    @override
    def add(self, *, height: Height = START, has_state: bool = True) -> SimPeer:
        peer = super().add(height=height, has_state=has_state)
        step = peer.machine.step

        def timed(now_s: float, event: PeerEvent) -> list[PeerEffect]:
            began_s = self.stopwatch()
            effects = step(now_s, event)
            self.core_s += self.stopwatch() - began_s
            self.num_sent += sum(isinstance(effect, Send) for effect in effects)
            return effects

        peer.machine.step = timed  # type: ignore[method-assign]
        return peer

    def stopwatch(self) -> float:
        """Return seconds of this thread's processor time."""
        return self._read()

    def play(self) -> dict[str, float]:
        """Play the run; return its figures."""
        began_s = time.perf_counter()
        with core_stopwatch() as self._read:
            found = self.run().summary()
        rounds = self.outcome.num_rounds * self.spec.num_peers
        found["core_ms"] = 1e3 * self.core_s / rounds
        found["messages"] = self.num_sent / rounds
        found["took_s"] = time.perf_counter() - began_s
        return found


def play(num_peers: int, options: argparse.Namespace) -> dict[str, float]:
    """Play one run in a process of its own."""
    fixed = [f"--{name}={getattr(options, name)}" for name in ("rounds", "churn", "seed")]
    command = [sys.executable, __file__, "--json", *fixed, str(num_peers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def row(num_peers: int, found: dict[str, float]) -> str:
    """Return one line of the table."""
    cells = (
        f"{num_peers}",
        f"{found['rounds']:.0f}",
        f"{found['seconds_a_round']:.1f} s",
        f"{found['whole_rounds_percent']:.1f} %",
        f"{found['waiting_percent']:.2f} %",
        f"{found['averaging_percent']:.2f} %",
        f"{found['longest_wait_s']:.1f} s",
        f"{found['repeated_attempts']:.0f}",
        f"{found['lost_rounds']:.0f}",
        f"{found['messages']:.0f}",
        f"{found['core_ms']:.1f} ms",
        f"{found['took_s']:.0f} s",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--churn", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        (size,) = options.peers
        spec = CollaborationSpec(
            num_peers=size, num_rounds=options.rounds, churn=options.churn, seed=options.seed
        )
        print(json.dumps(TimedCollaboration(spec).play()))
        return
    heads = "peers rounds a-round whole waiting averaging longest repeated lost messages core took"
    print("| " + " | ".join(heads.split()) + " |", flush=True)
    print("|" + "---:|" * len(heads.split()), flush=True)
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        runs = [(size, pool.submit(play, size, options)) for size in options.peers]
        for size, run in runs:
            print(row(size, run.result()), flush=True)


if __name__ == "__main__":
    main()

"""Throws messages of all shapes at a real run, and measures how long its event loops stand still.

    python scripts/fuzz_wire.py
    python scripts/fuzz_wire.py --seed 7 --iterations 3 --limit-ms 50
    python scripts/fuzz_wire.py --datagrams 100000
    python scripts/fuzz_wire.py --requests 100000

Starts a leader and two relays that train on the loopback. The leader and one relay then get many
small messages, few large ones, deep ones and repeated ones, on every method and on the UDP port
(`tests/support/wire_shapes.py`). Exits with 1 if an event loop stood still for longer than the
limit, if a member was removed, or if training does not go on. The limit is meant for an idle
machine: with `--processor` the processor time of the loop's thread counts instead of the clock.

With `--requests`, so many garbled requests are thrown at each method of a data node's server,
beside an honest member's heartbeats (`tests/support/garbled.py`). 100,000 take 2 to 3 minutes a
method. Exits with 1 after an error, or if the server grows, or if a heartbeat took over 1 s.

With `--datagrams`, only the UDP port is tried, of a node of the DHT without limits of rates
(`tests/support/hostile.py`). Exits with 1 after an error, or if the node grows or stops working.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.ids import RunId  # noqa: E402
from decod.membership.papers import Membership  # noqa: E402
from tests.support import ticking  # noqa: E402
from tests.support.cluster import Cluster, Daemon  # noqa: E402
from tests.support.garbled import METHODS, besiege  # noqa: E402
from tests.support.hostile import bombard  # noqa: E402
from tests.support.runs import make_run, prepare_corpus  # noqa: E402
from tests.support.throwing import Pauses, throw_all  # noqa: E402
from tests.support.wire_shapes import throws  # noqa: E402

GROWTH_MAX_MIB = 32
"""Most that a node may grow by under hostile datagrams or requests."""

BEAT_MAX_S = 1.0
"""Longest that a heartbeat may take meanwhile."""


def fuzz(cluster: Cluster, options: argparse.Namespace) -> int:
    """Throw all messages at the leader and a relay; return the exit code."""
    complaints: list[str] = []
    liar = cluster.admit("liar")
    for round_index in range(options.iterations):
        for daemon in cluster.daemons[:2]:
            complaints += fuzz_daemon(daemon, liar, f"{options.seed} {round_index}", options)
    cluster.wait_for_iteration(cluster.leader.iteration + 2)
    complaints += [str(record) for record in cluster.leader.events("member.lost")]
    complaints += cluster.tracebacks()
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return int(bool(complaints))


def fuzz_daemon(
    daemon: Daemon, liar: Membership, seed: str, options: argparse.Namespace
) -> list[str]:
    """Throw all messages at one daemon, as a member that never joins; return complaints."""
    kind = "processor_s" if options.processor else "wall_s"
    limit_s = options.limit_ms / 1000

    def told(name: str, pauses: Pauses) -> None:
        if pauses[kind] > limit_s or options.verbose:
            print(f"  {in_ms(pauses)}  {name}", flush=True)

    status = daemon.status()
    host, _, port = status["node"]["address"].rpartition(":")
    run_id = RunId(status["run_id"])
    shapes = throws(random.Random(f"{seed} {daemon.name}"), run_id)  # noqa: S311
    pauses = partial(ticking.pauses_of, daemon.state_dir)
    outcome = throw_all((host, int(port)), run_id, liar, shapes, pauses, told)
    print(f"{daemon.name}: {outcome.num_throws} throws, longest {in_ms(outcome.longest)}")
    for each, name in outcome.worst.items():
        print(f"  {each} after {name}", flush=True)
    if outcome.longest[kind] <= limit_s:
        return []
    return [f"{daemon.name} stood still after {outcome.worst[kind]!r}"]


def fuzz_dht(num: int, seed: int) -> int:
    """Throw datagrams at a node of the DHT; return the exit code."""
    damage = asyncio.run(bombard(num, random.Random(seed)))  # noqa: S311
    for error in damage.errors[:10]:
        print(f"FAILED: {error}")
    grown_mib = damage.grown_bytes / (1 << 20)
    print(
        f"{damage.num_thrown} datagrams, {len(damage.errors)} errors, grown by {grown_mib:.1f} MiB,"
        f" {damage.num_kept} things kept, {'works' if damage.works else 'FAILED: no lookup works'}"
    )
    return int(bool(damage.errors) or not damage.works or grown_mib > GROWTH_MAX_MIB)


def fuzz_methods(num: int, seed: int) -> int:
    """Throw garbled requests at each method; return the exit code."""
    logging.disable()
    failed = False
    for method in METHODS:
        siege = asyncio.run(besiege(num, random.Random(f"{seed} {method}"), [method]))  # noqa: S311
        for error in siege.errors[:10]:
            print(f"FAILED: {error}")
        grown_mib, worst_s = siege.grown_bytes / (1 << 20), max(siege.beats_s, default=0.0)
        print(
            f"{method:45} {siege.num_thrown[method]:7} thrown, {siege.num_malformed:7} malformed,"
            f" {len(siege.errors)} errors, grown by {grown_mib:5.1f} MiB,"
            f" {len(siege.beats_s)} heartbeats, longest {1000 * worst_s:.0f} ms",
            flush=True,
        )
        failed |= bool(siege.errors) or grown_mib > GROWTH_MAX_MIB or worst_s > BEAT_MAX_S
    return int(failed)


def in_ms(pauses: Pauses) -> str:
    return "  ".join(f"{kind} {1000 * pauses[kind]:7.1f} ms" for kind in sorted(pauses))


def main(arguments: Sequence[str]) -> int:
    """Fuzz and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=None, help="decides what is not systematic; else the clock")
    add("--iterations", type=int, default=1, help="times that everything is thrown (default: 1)")
    add("--limit-ms", type=float, default=50.0, help="longest pause allowed (default: 50)")
    add("--processor", action="store_true", help="count processor time, for a busy machine")
    add("--datagrams", type=int, help="throw so many datagrams at the UDP port, and nothing else")
    add("--verbose", action="store_true", help="show every throw")
    add("--requests", type=int, help="throw so many requests at each method, and nothing else")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = time.time_ns() // 1_000_000
    print(f"seed {options.seed}", flush=True)
    if options.requests:
        return fuzz_methods(options.requests, options.seed)
    if options.datagrams:
        return fuzz_dht(options.datagrams, options.seed)
    # State folders hold sockets, whose paths must be short. So not below a deep working directory.
    with tempfile.TemporaryDirectory(prefix="decod-fuzz-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        corpus = prepare_corpus(folder / "data")
        run = make_run(min_nodes_per_stage=1)
        with Cluster(folder / "run", run, corpus, fork=False) as cluster:
            cluster.start_leader(program=ticking.PROGRAM)
            for stage in ("1", "2"):
                options_of_relay = ("--stage", stage)
                cluster.start_relay(f"relay-{stage}", *options_of_relay, program=ticking.PROGRAM)
            cluster.wait_for_iteration(1)
            return fuzz(cluster, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Simulates many short runs in bad weather; any broken invariant is an error.

    python scripts/fuzz_sim.py                     2,000 seeds that nobody has run
    python scripts/fuzz_sim.py --first 0 --seeds 20000 --jobs 8
    python scripts/fuzz_sim.py --elections         ... whose leaders are struck again and again
    python scripts/fuzz_sim.py --local             ... whose nodes step by themselves (DiLoCo)
    python scripts/fuzz_sim.py --recuts            ... whose models are cut anew meanwhile
    python scripts/fuzz_sim.py --servers           ... whose stages have servers and clients
    python scripts/fuzz_sim.py --routing gwtf      ... all with this routing
    python scripts/fuzz_sim.py --mutations --seeds 200
                                                   does anybody notice if a safeguard is taken out?

Each run of 30 iterations has faults of all kinds of hosts, links, disks and memory, drawn from its
seed (`decod/sim/storm.py`; with `--elections` 12 iterations of `decod/sim/elections.py`); then
calm, in which it must commit again. Beside the invariants it is an error if a reduction finds that
its stage lacks or repeats a microbatch: that net should never be needed. A failure prints the
command that replays it, and the end of its trace; the summary names all seeds that failed.
`--mutations` takes out one safeguard after the other (`tests/support/mutations.py`) and prints how
many seeds it takes to notice that. Exits with 1 if there was a failure, or one went unnoticed.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.lab.sim.layouts import with_routing  # noqa: E402
from decod.protocol.flows.registry import ROUTINGS  # noqa: E402
from decod.sim.elections import election_storm  # noqa: E402
from decod.sim.scenario import Scenario  # noqa: E402
from decod.sim.storm import (  # noqa: E402
    local_storm,
    recut_storm,
    servers_storm,
    storm_scenario,
    weather,
)
from tests.support.mutations import MUTATIONS, notice  # noqa: E402
from tests.support.servers_mutations import SERVERS_MUTATIONS  # noqa: E402

Drawn = Callable[[int], Scenario]

CHUNK = 25
"""Seeds that a process runs at a time."""

NS_PER_SEED = 10_000
"""Nanoseconds of the clock per seed, when the clock draws the first. So a later run has other
seeds, even after a short pause."""

PROGRESS_INTERVAL_S = 30.0
"""Least time between two lines about the progress."""


def run_chunk(first: int, *, end: int, drawn: Drawn) -> tuple[list[str], Counter[str]]:
    return weather(range(first, min(first + CHUNK, end)), drawn)


def routed(seed: int, *, drawn: Drawn, routing: str) -> Scenario:
    """Return a seed's scenario, with another routing than it has drawn."""
    return with_routing(drawn(seed), routing)


def fuzz(first: int, end: int, jobs: int, drawn: Drawn) -> int:
    """Run seeds `first` to `end - 1`; print the progress, and at the end the failures."""
    begin_s = told_s = time.monotonic()
    failures: list[str] = []
    tally: Counter[str] = Counter()
    firsts, done = range(first, end, CHUNK), first
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for start, (found, counted) in zip(
                firsts, pool.map(partial(run_chunk, end=end, drawn=drawn), firsts), strict=True
            ):
                done = min(start + CHUNK, end)
                failures += found
                tally += counted
                for failure in found:
                    print(failure, flush=True)
                if time.monotonic() - told_s >= PROGRESS_INTERVAL_S:
                    told_s = time.monotonic()
                    text = f"{done - first} of {end - first} seeds, {len(failures)} failures"
                    print(f"{text}, {told_s - begin_s:.0f} s", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"interrupted; to go on: --first {done} --seeds {end - done}")
    shown = ", ".join(f"{count} {name}" for name, count in tally.items())
    took_s = time.monotonic() - begin_s
    print(f"{done - first} seeds: {len(failures)} failures; {shown}; {took_s:.0f} s")
    for failure in failures:
        print(failure.partition("\n")[0][:200])
    return 1 if failures or done < end else 0


def try_mutations(first: int, num: int, names: Collection[str]) -> int:
    """Print how many seeds it took to notice each mutation; return 1 if one went unnoticed."""
    unnoticed = 0
    print(f"{'without':10}  seeds  seed  what has noticed")
    for mutation in (*MUTATIONS, *SERVERS_MUTATIONS):
        if names and mutation.name not in names:
            continue
        found = notice(mutation, range(first, first + num))
        if found is None:
            unnoticed += 1
            print(f"{mutation.name:10}  UNNOTICED in {num}: {mutation.without}", flush=True)
        else:
            counts = f"{found.num_seeds:5}  {found.seed:4}"
            print(f"{mutation.name:10}  {counts}  {found.what[:120]}", flush=True)
    return 1 if unnoticed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument(
        "--first", type=int, help="the first seed; drawn from the clock if not given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--elections", action="store_true", help="strike leaders above all")
    parser.add_argument("--local", action="store_true", help="nodes step by themselves")
    parser.add_argument("--recuts", action="store_true", help="models are cut anew meanwhile")
    parser.add_argument("--servers", action="store_true", help="stages have servers and clients")
    parser.add_argument("--routing", choices=[*ROUTINGS], help="of all runs, not drawn")
    parser.add_argument(
        "--mutations",
        nargs="*",
        metavar="NAME",
        help="take safeguards out, one by one: these or all",
    )
    arguments = parser.parse_args()
    first = arguments.first
    if first is None:
        # Seeds that have passed before prove little.
        first = time.time_ns() // NS_PER_SEED
        print(f"first seed: {first}", flush=True)
    if arguments.mutations is not None:
        return try_mutations(first, arguments.seeds, arguments.mutations)
    drawn: Drawn = election_storm if arguments.elections else storm_scenario
    if arguments.local:
        drawn = local_storm
    if arguments.recuts:
        drawn = recut_storm
    if arguments.servers:
        drawn = servers_storm
    if arguments.routing is not None:
        drawn = partial(routed, drawn=drawn, routing=arguments.routing)
    return fuzz(first, first + arguments.seeds, arguments.jobs, drawn)


if __name__ == "__main__":
    sys.exit(main())

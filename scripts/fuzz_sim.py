"""Simulates many short runs with random faults; any broken invariant is an error.

    python scripts/fuzz_sim.py                     2,000 seeds
    python scripts/fuzz_sim.py --seeds 20000 --jobs 8
    python scripts/fuzz_sim.py --mutations         does anybody notice if a safeguard is taken out?

Each run has up to four faults: relays die, vanish, freeze, restart, lose their compute process;
in every third run links lose, repeat and delay messages. Beside the invariants it is an error if a
reduction finds that its stage lacks or repeats a microbatch: that net should never be needed.
A failure prints the command that replays it. Exits with 1 if there was one, or with `--mutations`
if a mutation went unnoticed.
"""

import argparse
import inspect
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from decod.protocol import node as node_module
from decod.protocol.data_microbatches import DataMicrobatches
from decod.protocol.leader import Leader, LeaderState
from decod.protocol.node import NodeMachine
from decod.protocol.relay_microbatches import RelayMicrobatches
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import faulty_scenario
from decod.sim.simulation import Simulation

CHUNK = 25
"""Seeds that a process runs at a time."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A safeguard, and how it is taken out."""

    name: str
    owner: type | object
    function: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "fence: who has missed a commit goes on with its old parameters",
        NodeMachine,
        "_in_step",
        "not self.in_view\n",
        "True\n",
    ),
    Mutation(
        "dedup: a repeated activation is computed again",
        RelayMicrobatches,
        "activation",
        "known = self.held.get(microbatch) or self._done.get(microbatch)",
        "known = None",
    ),
    Mutation(
        "roster: parts and votes of another view count",
        node_module,
        "_place_of",
        "return round_, message.view_version",
        "return round_, view_version",
    ),
    Mutation(
        "debt: a share is reported before what was lost is mended",
        DataMicrobatches,
        "_report",
        "self._waiting or self._owing",
        "self._waiting",
    ),
    Mutation(
        "share: the batch is complete before all data nodes have reported",
        Leader,
        "report",
        "if len(self._reports) < len(self.view.data_nodes):",
        "if False:",
    ),
)


@contextmanager
def mutated(mutation: Mutation | None) -> Iterator[None]:
    """Replace one function by a copy of its source in which one expression is another."""
    if mutation is None:
        yield
        return
    original = getattr(mutation.owner, mutation.function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutation.old) == 1, f"{mutation.name}: the code has changed"
    scope: dict[str, object] = {}
    exec(source.replace(mutation.old, mutation.new), original.__globals__, scope)  # noqa: S102
    setattr(mutation.owner, mutation.function, scope[mutation.function])
    try:
        yield
    finally:
        setattr(mutation.owner, mutation.function, original)


def failure_of(seed: int, tally: Counter[str]) -> str:
    """Run one seed. Returns what went wrong and how to replay it, or nothing."""
    scenario = faulty_scenario(seed)
    simulation = Simulation(scenario)
    try:
        result = simulation.run()
    except InvariantViolation as violation:
        core = getattr(simulation.leader.machine, "leader", None)
        if violation.invariant == "I7" and core and core.state is LeaderState.GATHERING:
            tally["runs that wait for nodes"] += 1
            return ""
        return str(violation)
    tally["runs"] += 1
    tally["iterations"] += result.num_iterations
    tally["stages lost"] += result.lost_stage is not None
    tally["rounds mended"] += sum(" goes on: " in line for line in result.trace)
    tally["rounds repeated"] += sum(" is repeated: " in line for line in result.trace)
    uneven = next((line for line in result.trace if " folded " in line), "")
    return f"{uneven}\nReplay: {scenario.command()}" if uneven else ""


def run_chunk(first: int, *, end: int) -> tuple[list[str], Counter[str]]:
    tally: Counter[str] = Counter()
    seeds = range(first, min(first + CHUNK, end))
    failures = [f"seed {seed}: {text}" for seed in seeds if (text := failure_of(seed, tally))]
    return failures, tally


def fuzz(first: int, num: int, jobs: int) -> int:
    begin_s, end = time.monotonic(), first + num
    failures: list[str] = []
    tally: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs) as pool:
        chunks = pool.map(partial(run_chunk, end=end), range(first, end, CHUNK))
        for found, counted in chunks:
            failures += found
            tally += counted
            for failure in found:
                print(failure, flush=True)
    shown = ", ".join(f"{count} {name}" for name, count in tally.items())
    print(f"{num} seeds: {len(failures)} failures; {shown}; {time.monotonic() - begin_s:.0f} s")
    return 1 if failures else 0


def try_mutations(first: int, num: int) -> int:
    """Say for each mutation which seed notices it first. Returns 1 if none does."""
    unnoticed = 0
    for mutation in MUTATIONS:
        with mutated(mutation):
            found = next(
                ((s, text) for s in range(first, first + num) if (text := _noticed(s))), None
            )
        if found is None:
            unnoticed += 1
            print(f"UNNOTICED in {num} seeds: {mutation.name}", flush=True)
        else:
            print(f"seed {found[0]} notices {mutation.name}\n    {found[1][:150]}", flush=True)
    return 1 if unnoticed else 0


def _noticed(seed: int) -> str:
    try:
        return failure_of(seed, Counter()).partition("\n")[0]
    except Exception as error:  # noqa: BLE001 - A mutant may do anything.
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--mutations", action="store_true", help="take safeguards out, one by one")
    arguments = parser.parse_args()
    if arguments.mutations:
        return try_mutations(arguments.first, arguments.seeds)
    return fuzz(arguments.first, arguments.seeds, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())

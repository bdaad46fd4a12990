"""Compares the simulator's traces with those of an earlier commit: a refactoring changes none.

    python scripts/compare_traces.py main~1                    500 storms
    python scripts/compare_traces.py v0.1.0 --seeds 2000 --first 7 --rename old.event=new.event
    python scripts/compare_traces.py main~1 --storm servers

`--storm` chooses what is run: `any` (the default), `local` (nodes that step by themselves),
`servers` or `elections`.

Each storm of `scripts/fuzz_sim.py` is run by the code of both commits. A trace holds every
transition with its virtual time, so equal traces mean equal behaviour. Exits with 1 at the first
seed whose traces differ, and shows where they part.

`--undisturbed` is for a change of messages, which may change times. It runs each storm without its
faults, and compares the losses, and each host's stage, iteration and parameters at the end.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CONTEXT_LINES = 8
"""Number of equal lines that are shown before the first difference."""

RUN = """
import sys
from dataclasses import replace
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import LinkFaults
from decod.sim.simulation import Simulation
from decod.sim.elections import election_storm
from decod.sim.storm import local_storm, storm_scenario
try:
    from decod.sim.storm import servers_storm
except ImportError:  # An earlier commit.
    from decod.sim.servers_storm import servers_storm
storms = {"any": storm_scenario, "local": local_storm, "servers": servers_storm}
drawn = {**storms, "elections": election_storm}[sys.argv[1]]
for line in sys.stdin:
    scenario = drawn(int(line))
    if sys.argv[2:]:
        calm = {"faults": (), "cuts": (), "churn": (), "link_faults": LinkFaults()}
        scenario = replace(scenario, **calm)
    simulation = Simulation(scenario)
    try:
        result = simulation.run()
        end = f"{result.num_events} events"
    except InvariantViolation as violation:
        result, end = None, str(violation).partition(chr(10))[0]
    lines = [*simulation.trace.lines, end]
    if sys.argv[2:]:
        states = ((name, host.compute) for name, host in sorted(simulation.hosts.items()))
        lines = [f"{n} {c.stage_index} {c.iteration} {c.parameter_hash}" for n, c in states]
        lines += [str(result and result.losses)]
    print(len(lines), *lines, sep=chr(10), flush=True)
"""


class Runner:
    """A process that runs storms with the code of one checkout."""

    def __init__(self, checkout: Path, *modes: str) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-c", RUN, *modes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            text=True,
        )

    def begin(self, seed: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()

    def trace(self) -> list[str]:
        """Return the trace of the oldest seed whose trace has not been returned."""
        assert self._process.stdout is not None
        num_lines = int(self._process.stdout.readline())
        return [self._process.stdout.readline().rstrip("\n") for _ in range(num_lines)]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def difference(before: list[str], after: list[str], renames: dict[str, str]) -> str:
    """Return the first difference of two traces and the lines before it, or an empty text."""
    for old, new in renames.items():
        before = [line.replace(old, new) for line in before]
    for k, (line, other) in enumerate(zip_longest(before, after)):
        if line != other:
            common = before[max(0, k - CONTEXT_LINES) : k]
            return "\n".join([*(f"  {c}" for c in common), f"- {line}", f"+ {other}"])
    return ""


def compare(base: Path, seeds: range, renames: dict[str, str], *modes: str) -> int:
    runners = Runner(base, *modes), Runner(ROOT, *modes)
    try:
        for seed in seeds:
            for runner in runners:
                runner.begin(seed)
            before, after = (runner.trace() for runner in runners)
            if found := difference(before, after, renames):
                print(f"seed {seed}:\n{found}")
                return 1
            if (seed - seeds.start + 1) % 100 == 0:
                print(f"{seed - seeds.start + 1} of {len(seeds)} traces are equal", flush=True)
    finally:
        for runner in runners:
            runner.end()
    print(f"{len(seeds)} traces are equal")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--undisturbed", action="store_true")
    storms = ("any", "local", "servers", "elections")
    parser.add_argument("--storm", choices=storms, default="any")
    chosen = parser.parse_args()
    modes = (chosen.storm, *(("undisturbed",) if chosen.undisturbed else ()))
    renames = dict(each.split("=", 1) for each in chosen.rename)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        worktree = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*worktree, "add", "--quiet", "--detach", base, chosen.base), check=True)
        try:
            seeds = range(chosen.first, chosen.first + chosen.seeds)
            return compare(base, seeds, renames, *modes)
        finally:
            subprocess.run((*worktree, "remove", "--force", base), check=True)


if __name__ == "__main__":
    sys.exit(main())

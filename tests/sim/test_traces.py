"""Storms go as they went before: who changes no behaviour changes no trace.

`traces.txt` has a row for each storm. `pytest tests/sim/test_traces.py --rewrite` writes what
happens now. If that was not meant to change, `scripts/compare_traces.py` shows where traces part.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from decod.sim.collaboration import Collaboration, CollaborationSpec
from decod.sim.elections import election_storm
from decod.sim.network import LinkFaults
from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import local_storm, servers_storm, storm_scenario

TABLE = Path(__file__).parent / "traces.txt"
SEEDS: dict[str, tuple[int, ...]] = {
    "any": (*range(8), 11, 16, 18, 19),
    "local": (*range(6), 12, 13),
    "servers": (*range(6), 12, 13),
    "elections": (*range(6),),
    "loops": (*range(8),),
}
"""Storms that lead to many places of the core."""


def storm(drawn: Callable[[int], Scenario], seed: int) -> tuple[int, list[str]]:
    """Return how many events a storm has, and its trace."""
    simulation = Simulation(drawn(seed))
    return simulation.run().num_events, simulation.trace.lines


def loops(seed: int) -> tuple[int, list[str]]:
    """Return how many rounds peers with their own loops try, and what they do."""
    run = Collaboration(
        CollaborationSpec(
            num_peers=3 + seed % 4,
            num_rounds=12,
            seed=seed,
            churn=0.2,
            pauses=0.1 * (seed % 2),
            steps_per_round=(4, 16)[seed % 2],
            faults=LinkFaults(delay_ratio=0.05, loss_ratio=0.005 * (seed // 2 % 2)),
            duration_max_s=5000.0,
        )
    )
    outcome = run.run()
    return outcome.num_rounds + outcome.num_repeated + outcome.num_lost, run.trace


KINDS: dict[str, Callable[[int], tuple[int, list[str]]]] = {
    "any": partial(storm, storm_scenario),
    "local": partial(storm, local_storm),
    "servers": partial(storm, servers_storm),
    "elections": partial(storm, election_storm),
    "loops": loops,
}


def row(kind: str, seed: int) -> str:
    """Return what the table says of a storm."""
    num_events, lines = KINDS[kind](seed)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{kind:<9} {seed:4} {num_events:7} {len(lines):6} {digest}"


@pytest.mark.parametrize("kind", SEEDS)
def test_storms_go_as_they_went_before(kind: str, request: pytest.FixtureRequest) -> None:
    table = TABLE.read_text(encoding="utf-8").splitlines()
    written = [line for line in table if line.startswith(kind)]
    if request.config.getoption("--rewrite"):
        found = [row(kind, seed) for seed in SEEDS[kind]]
        others = [line for line in table if line not in written]
        TABLE.write_text("\n".join([*others, *found]) + "\n", encoding="utf-8")
        return
    assert [int(line.split()[1]) for line in written] == [*SEEDS[kind]]
    for line in written:
        assert row(kind, int(line.split()[1])) == line, "kind, seed, events, lines, digest"

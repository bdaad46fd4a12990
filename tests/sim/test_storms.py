"""Faults of all kinds in a short time, then calm: invariants after every event, then progress.

`scripts/fuzz_sim.py` runs thousands of these.
"""

import os
import shlex
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from decod.sim.__main__ import _parsed, main
from decod.sim.elections import election_storm
from decod.sim.scenario import Cut, HostFault
from decod.sim.simulation import Simulation
from decod.sim.storm import storm_scenario, weather
from tests.support.mutations import MUTATIONS, Mutation, notice

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "40"))


@pytest.mark.timeout(600)
def test_runs_survive_storms_and_then_commit_again() -> None:
    """Or lose a whole stage, or more than half of the members at once, and say so."""
    failures: list[str] = []
    tally: Counter[str] = Counter()
    blocks = [range(block, NUM_SEEDS, 20) for block in range(20)]
    with ProcessPoolExecutor(2) as pool:
        for found, counted in pool.map(weather, blocks):
            failures += found
            tally += counted
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > NUM_SEEDS / 2, tally
    assert tally["leaders elected"] > NUM_SEEDS / 20, tally
    assert tally["rounds mended"] > NUM_SEEDS / 2, tally


def test_relays_that_are_full_shed_microbatches_in_storms() -> None:
    """Links are slower than devices, and most relays hold one microbatch at a time."""
    num_shed = 0
    for seed in range(6):
        scenario = storm_scenario(seed, num_iterations=8)
        profile = replace(scenario.profile, activation_bytes=4_000_000)
        scenario = replace(scenario, profile=profile, capacity_min=1, capacity_max=2)
        simulation = Simulation(replace(scenario, num_microbatches=4))
        assert simulation.run().num_iterations == 8
        num_shed += sum(host.compute.num_dropped for host in simulation.hosts.values())
    assert num_shed > 50


@pytest.mark.timeout(600)
def test_runs_survive_what_strikes_their_leaders() -> None:
    failures: list[str] = []
    tally: Counter[str] = Counter()
    blocks = [range(block, NUM_SEEDS, 10) for block in range(10)]
    with ProcessPoolExecutor(2) as pool:
        for found, counted in pool.map(weather, blocks, [election_storm] * 10):
            failures += found
            tally += counted
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > NUM_SEEDS / 2, tally
    assert tally["leaders elected"] > NUM_SEEDS / 3, tally


KNOWN = [mutation for mutation in MUTATIONS if mutation.seed is not None]


@pytest.mark.parametrize("mutation", KNOWN, ids=lambda mutation: mutation.name)
def test_a_safeguard_that_is_taken_out_is_missed(mutation: Mutation) -> None:
    """The seed that is known to notice comes first; others are tried if the weather has changed."""
    found = notice(mutation, [mutation.seed or 0, *range(20)])
    assert found is not None, mutation.without


def test_while_too_many_are_gone_nobody_enters_a_stage_that_nobody_holds() -> None:
    """All of a stage restart one after another, and with them half of the run."""
    failures, tally = weather([2044])
    assert not failures, failures[0]
    assert tally["runs that committed all"] == 1


def test_a_round_that_ends_at_a_deadline_takes_its_jobs_along() -> None:
    """The leader repeats a round in the very step in which its own share looks for a flow."""
    failures, _ = weather([5206])
    assert not failures, failures[0]


def test_the_command_of_a_storm_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = storm_scenario(1, num_iterations=4)
    words = scenario.command().replace("'", "").split()
    assert main(words[3:]) == 0
    assert "#" not in words
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == list(Simulation(scenario).run().trace)


def test_what_befalls_hosts_and_links_is_written_as_it_is_read() -> None:
    for text in ("data0,relay1|relay2@4.5+2.0", "relay0>data0@1.0+3.5"):
        assert str(Cut.parse(text)) == text
    for text in ("freeze:relay0@4.5+2.0", "kill:data0#150+10.0", "restart:data1!Candidacy.2+0.5"):
        assert str(HostFault.parse(text)) == text


@pytest.mark.parametrize("seed", [0, 4, 21])
def test_the_command_of_an_election_storm_replays_it(seed: int) -> None:
    scenario = election_storm(seed)
    assert _parsed(shlex.split(scenario.command().partition("  # ")[0])[3:])[0] == scenario


@pytest.mark.parametrize("text", ["relay0@1", "relay0|relay1", "relay0|nobody@1+1"])
def test_a_cut_that_can_not_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cut", text]) != 0
    assert capsys.readouterr().err.startswith("error: E-CFG-")

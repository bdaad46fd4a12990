"""Faults of all kinds in a short time, then calm: invariants after every event, then progress.

`scripts/fuzz_sim.py` runs thousands of these.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from decod.sim.__main__ import _parsed, main
from decod.sim.elections import election_storm
from decod.sim.scenario import Cut, HostFault, Scenario
from decod.sim.simulation import Simulation
from decod.sim.storm import local_storm, storm_scenario, weather
from tests.support.mutations import MUTATIONS, Mutation, notice

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "800"))
NUM_ELECTIONS = NUM_SEEDS // 10

_QUICK, _CHUNK = range(8, 22), 200
"""Seeds of the first test, which every run of the tests plays, and number of seeds of each later
one: those are dealt out among the processes that run the tests with `-m slow`. How often leaders
are lost, which is asked of each test, varies much among fewer. `test_traces.py` plays those before.
"""

_QUICK_ELECTIONS, _CHUNK_OF_ELECTIONS = range(6, 12), 40


def _chunks(num_seeds: int, quick: range, chunk: int) -> list[ParameterSet]:
    """Returns the first seed and the number of seeds of every test. All but the first are slow."""
    later = [
        pytest.param(first, min(chunk, num_seeds - first), marks=pytest.mark.slow)
        for first in range(quick.stop, num_seeds, chunk)
    ]
    return [pytest.param(quick.start, len(quick)), *later]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "num"), _chunks(NUM_SEEDS, _QUICK, _CHUNK))
def test_runs_survive_storms_and_then_commit_again(first: int, num: int) -> None:
    """Or lose a whole stage, or more than half of the members at once, and say so."""
    failures, tally = weather(range(first, first + num))
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > num / 2, tally
    assert tally["leaders elected"] > num / 50, tally
    assert tally["iterations mended"] > num / 2, tally


def test_relays_that_are_full_shed_microbatches_in_storms() -> None:
    """Links are slower than devices, and most relays hold one microbatch at a time."""
    num_shed = 0
    for seed in range(10):
        scenario = storm_scenario(seed, num_iterations=8)
        profile = replace(scenario.profile, activation_bytes=4_000_000)
        scenario = replace(scenario, profile=profile, capacity_min=1, capacity_max=2)
        simulation = Simulation(
            replace(scenario, batch=replace(scenario.batch, num_microbatches=4))
        )
        result = simulation.run()
        assert result.num_iterations == 8 or result.waits_for
        num_shed += sum(host.compute.num_dropped for host in simulation.hosts.values())
    assert num_shed > 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "num"), _chunks(NUM_ELECTIONS, _QUICK_ELECTIONS, _CHUNK_OF_ELECTIONS)
)
def test_runs_survive_what_strikes_their_leaders(first: int, num: int) -> None:
    failures, tally = weather(range(first, first + num), election_storm)
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > num / 2, tally
    assert tally["leaders elected"] > num / 3, tally


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_safeguard_that_is_taken_out_is_missed(mutation: Mutation) -> None:
    """The seed that is known to notice comes first; others are tried if the weather has changed."""
    found = notice(mutation, [mutation.seed, *range(20)])
    assert found is not None, mutation.without


_COMMON = (
    "--iterations 30 --link-spread-ratio 0.5 --min-nodes-per-stage 2 --min-data-nodes 2"
    " --iteration-timeout-s 60.0 --optimizer-s 0.05 --activation-bytes 100000"
)


def test_while_too_many_are_gone_nobody_enters_a_stage_that_nobody_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of a stage restart one after another, and with them half of the run."""
    faults = (
        "freeze:relay2@4.905+11.722 restart:relay1@6.409+6.757 restart:relay0@7.034+7.659"
        " compute:relay1@7.747+11.11 restart:relay2@11.288+1.138 restart:relay2@11.709+10.545"
        " restart:relay3@12.097+2.508 restart:relay2@12.51+9.391 rot:relay2@13.579+5.83"
        " restart:relay0@14.197+6.68 restart:relay4@15.878+5.651 pause:relay1@16.931+2.252"
        " restart:relay4@17.211+4.075"
    )
    cuts = (
        "relay1|data1@14.578+11.147 relay2,data0,relay4|relay3,relay0,data1,relay1@13.133+6.99"
        " data1|relay1@12.299+1.029"
    )
    words = "--seed 2044 --data-nodes 2 --relays 5 --microbatches 3 --calm-s 29.55"
    assert main(_words(words, faults, cuts)) == 0
    assert "iterations=30 " in capsys.readouterr().out.splitlines()[-1]


def test_an_iteration_that_ends_at_a_deadline_takes_its_jobs_along() -> None:
    """The leader repeats an iteration in the very step in which its own share looks for a flow."""
    faults = (
        "restart:relay0@6.401+4.686 pause:data0@7.216+1.0 freeze:data0@8.97+6.41"
        " rot:relay2@9.654+9.165"
    )
    cuts = (
        "relay3|data1@4.069+1.447 relay7|relay3@5.206+4.768"
        " relay3,relay1,relay5,data1|relay0,data0,relay2,relay4,relay6@5.611+11.527"
    )
    words = (
        "--seed 5206 --data-nodes 2 --relays 8 --stages 3 --microbatches 3 --routing greedy"
        " --calm-s 21.818"
    )
    assert main(_words(words, faults, cuts)) == 0


def test_a_bit_that_flips_in_a_newcomer_does_not_enter_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The iteration is repeated while it enters: nobody commits anything that it could compare
    with.
    """
    words = (
        "--seed 101058 --data-nodes 2 --relays 5 --microbatches 1 --routing greedy"
        " --duplicate-ratio 0.05 --delay-ratio 0.05 --corrupt-ratio 0.01"
        " --link-faults-until-s 9.011 --calm-s 21.011"
    )
    faults = (
        "disk:data0@5.402+3.287 rot:relay0@6.802+3.862 restart:relay2@8.417+11.212"
        " rot:relay1@8.868+10.199"
    )
    assert main(_words(words, faults, "")) == 0
    assert "it has come to other parameters than its stage" in capsys.readouterr().out


def test_a_newcomer_whose_wish_to_follow_is_lost_as_it_enters_fetches_the_state() -> None:
    """The last word of the candidate fails when it is a member: nothing else would wake it."""
    faults = (
        "restart:data1@8.628+6.518 slow:relay2@15.119+8.842 restart:relay3@16.887+0.471"
        " disk:relay0@17.731+1.357 slow:relay2@20.939+3.443"
    )
    words = (
        "--seed 104181 --data-nodes 2 --relays 5 --stages 1 --microbatches 3 --routing greedy"
        " --loss-ratio 0.01 --reorder-ratio 0.05 --corrupt-ratio 0.01 --link-faults-until-s 21.925"
        " --calm-s 33.925"
    )
    assert main(_words(words, faults, "")) == 0


def test_who_was_cut_off_and_is_back_makes_a_quorum_with_who_has_started_again() -> None:
    """Each had been given up by a leader that could go on with none of them."""
    faults = (
        "drain:data0@4.825+6.169 disk:data0@10.322+9.951 freeze:relay1@10.351+3.087"
        " restart:relay0@12.29+2.9 freeze:data1@13.101+1.409"
    )
    cuts = (
        "relay0>relay1,data1@7.215+2.183 relay1,relay0|data1,data0@6.941+2.912"
        " relay1|relay0,data1,data0@7.164+10.479"
    )
    words = "--seed 3688 --data-nodes 2 --relays 2 --stages 1 --microbatches 1 --calm-s 26.338"
    assert main(_words(words, faults, cuts)) == 0


def test_a_commit_is_made_again_if_all_who_knew_of_it_have_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A leader that slept goes on in its term: more than half of the run elected another, which
    committed, and then all of these were killed."""
    faults = (
        "freeze:data0@15.643+9.811 restart:relay1@17.494+3.624 freeze:relay3@17.777+21.009"
        " restart:relay3@19.656+1.72 restart:data1@19.928+1.065"
    )
    cuts = (
        "data1,relay3,relay1|data0,relay0,relay2@12.96+4.777"
        " relay0|relay2,relay1,data0,relay3,data1@5.383+7.917"
        " data0,relay0|relay2,data1,relay3@16.803+1.626"
    )
    words = (
        "--seed 179544325535629 --data-nodes 2 --stages 1 --microbatches 2 --clip-norm 1.0"
        " --parameter-bytes 400000 --routing greedy --calm-s 32.049"
    )
    assert main(_words(words, faults, cuts)) == 0
    told = capsys.readouterr().out
    assert "iteration 10.1 is committed" in told
    assert "iteration 10.4 is committed" in told


def test_a_run_that_can_not_do_without_a_relay_waits_until_its_tensors_come_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They trickle for ten minutes, and the leader and another data node are gone: the quorum."""
    faults = "restart:data0@4.657+6.717 drain:data0@12.08+0.701 freeze:data1@12.314+0.757"
    cuts = "relay0>data0,data1,relay1@4.07+586.439=1.0"
    words = (
        "--seed 179544650612634 --data-nodes 2 --relays 2 --stages 1 --microbatches 2"
        " --clip-norm 1.0 --loss-ratio 0.01 --reorder-ratio 0.05 --link-faults-until-s 15.55"
        " --parameter-bytes 400000 --routing greedy --calm-s 27.55"
    )
    assert main(_words(words, faults, cuts)) == 0
    told = capsys.readouterr().out.splitlines()
    assert "iterations=30 " in told[-1]
    assert sum("no progress in time" in line for line in told) > 5


def test_a_newcomer_leaves_a_donor_that_has_started_again() -> None:
    """It knew of nobody who followed it, and said nothing until both had entered."""
    faults = (
        "freeze:relay2@5.514+2.488 restart:relay1@7.459+0.746 slow:data0@7.879+5.115"
        " freeze:relay3@9.644+1.19 freeze:relay0@11.401+9.231"
    )
    words = "--seed 16244 --min-data-nodes 1 --stages 1 --microbatches 2 --calm-s 23.672"
    assert main(_words(words, faults, "")) == 0


def test_who_is_in_the_view_as_who_it_was_before_can_follow_to_make_a_quorum() -> None:
    """It left by itself, and without it the leader may open no view."""
    faults = (
        "rot:data2@4.173+4.327 restart:relay4@5.115+7.4 freeze:relay4@6.198+10.085"
        " vanish:data0@9.058+9.437 pause:relay3@9.351+3.819 kill:relay3@9.644+10.874"
        " freeze:relay4@9.994+11.938 restart:relay1@14.235+7.351 disk:data0@14.722+6.108"
        " freeze:data0@14.749+11.618 freeze:data2@15.842+2.113 compute:data0@15.902+3.797"
        " rot:data1@17.348+0.981 restart:relay0@17.979+4.426 slow:data1@18.574+11.785"
    )
    words = (
        "--seed 25407 --data-nodes 3 --relays 5 --stages 1 --microbatches 2 --loss-ratio 0.01"
        " --duplicate-ratio 0.05 --corrupt-ratio 0.01 --link-faults-until-s 19.017"
        " --min-data-nodes 3 --routing greedy --calm-s 31.017"
    )
    assert main(_words(words, faults, "")) == 0


def test_a_settlement_that_leaves_a_data_node_without_a_flow_is_not_used() -> None:
    """The draft had nothing when its only relay could not be reached; two flows did have."""
    faults = "restart:relay1@5.305+11.774 pause:relay0@6.08+7.962 freeze:data1@7.269+9.254"
    cuts = "data0>data1,relay1@9.808+8.26 data1,data0|relay1,relay0@7.391+11.758"
    words = "--seed 71008 --data-nodes 2 --relays 2 --stages 1 --microbatches 1 --calm-s 24.551"
    assert main(_words(words, faults, cuts)) == 0


def test_a_leader_whom_the_others_have_forgotten_finds_out_that_another_leads() -> None:
    """Cut off with one relay that never comes back, it has given up who was elected meanwhile."""
    faults = "restart:relay1@7.168+1.839 kill:relay2@15.958+5.539 rot:relay1@15.993+1.046"
    cuts = "relay1,relay0|relay2,data0@15.751+7.312 data1,relay2|relay0,data0@10.405+7.47"
    words = (
        "--seed 201169 --data-nodes 2 --relays 3 --stages 1 --microbatches 2 --routing greedy"
        " --calm-s 31.658"
    )
    assert main(_words(words, faults, cuts)) == 0


def test_a_newcomer_hears_that_the_averages_it_waits_for_will_not_come() -> None:
    """It has entered when the link to the member that it follows is cut."""
    faults = "freeze:relay1@4.323+11.877"
    cuts = "relay0|relay1@5.402+8.385 relay2>data0@15.484+9.068 relay1|relay2,relay0@21.663+6.824"
    words = (
        "--seed 700480 --relays 3 --stages 1 --microbatches 1 --sync-every 2 --min-data-nodes 1"
        " --parameter-bytes 400000 --calm-s 35.909"
    )
    assert main(_words(words, faults, cuts)) == 0


def test_a_member_does_not_take_a_wish_to_follow_for_one_of_an_earlier_life() -> None:
    """The relay comes back while averages for its earlier life are still being tried."""
    words = (
        "--seed 987222 --stages 1 --microbatches 1 --loss-ratio 0.02 --duplicate-ratio 0.05"
        " --reorder-ratio 0.05 --link-faults-until-s 21.75 --data-nodes 2 --routing greedy"
        " --calm-s 33.75"
    )
    assert main(_words(words, "restart:relay0@13.356+4.542", "")) == 0


def test_a_relay_that_restarts_as_a_candidate_is_followed_by_its_later_life() -> None:
    """Likewise with one data node and routing by flow."""
    faults = (
        "restart:relay0@4.281+8.333 slow:relay0@4.452+8.44 freeze:relay0@6.183+8.92"
        " pause:relay1@7.628+10.163 restart:relay0@13.815+1.913 freeze:relay2@14.07+0.365"
    )
    words = (
        "--seed 988428 --relays 3 --stages 1 --microbatches 1 --min-data-nodes 1 --loss-ratio 0.02"
        " --duplicate-ratio 0.05 --delay-ratio 0.05 --reorder-ratio 0.05 --corrupt-ratio 0.01"
        " --link-faults-until-s 16.168 --calm-s 28.168"
    )
    assert main(_words(words, faults, "")) == 0


@pytest.mark.parametrize(
    ("drawn", "seed"),
    [
        # A relay passes on what an election makes others say, which counts where it comes from.
        pytest.param(election_storm, 179596132860245, id="messages passed on"),
        # A microbatch is read again that only lost relays had learnt from.
        pytest.param(local_storm, 179596189237373, id="unknown microbatch"),
        # Another member enters just when the bound for the needed one, which trickles, is over.
        pytest.param(local_storm, 179596189238216, id="tensors trickle"),
        # Tensors trickle between the only two members that are left: nobody can pass them on.
        pytest.param(storm_scenario, 179596948869360, id="two members"),
    ],
)
def test_the_invariants_hold_in_storms_that_their_checks_once_misjudged(
    drawn: Callable[[int], Scenario], seed: int
) -> None:
    failures, tally = weather([seed], drawn)
    assert not failures, failures[0]
    assert tally["runs that committed all"] == 1


def _words(words: str, faults: str, cuts: str) -> list[str]:
    """Return the arguments of a command: all storms' settings, some own, faults and cuts."""
    told = [word for fault in faults.split() for word in ("--fault", fault)]
    told += [word for cut in cuts.split() for word in ("--cut", cut)]
    return [*_COMMON.split(), *words.split(), *told]


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

"""Runs whose nodes step by themselves, in virtual time: averages hold what nodes have learnt.

The simulated devices know what each node has trained on. The checker compares that with the batches
and with the averages.
"""

from collections import Counter
from dataclasses import replace

import pytest

from decod.ids import MicrobatchId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.jobs import AverageKind, Gather, Job, Propose
from decod.protocol.core.messages import Report
from decod.protocol.strategy.data_share import Learners
from decod.protocol.strategy.step import LocalSteps, weight_of
from decod.sim.__main__ import main
from decod.sim.core import positions_of
from decod.sim.elections import election_storm
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import FaultKind, HostFault, Scenario, sync_of
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation
from decod.sim.storm import local_storm, weather
from tests.support.quick import first_of

EVERY = 4
RUN = Scenario(seed=1, num_relays=6, num_iterations=14, sync=sync_of(EVERY))


def test_members_share_what_they_hold_after_each_average() -> None:
    simulation = Simulation(RUN)
    simulation.run()
    for host in simulation.hosts.values():
        assert (host.compute.iteration, host.compute.anchor) == (14, 14)
        assert not any(host.compute.learnt)


def test_a_newcomer_enters_between_two_averages() -> None:
    """It starts from the anchor, which stands still: nobody waits for it."""
    fault = HostFault(FaultKind.RESTART, "relay1", at_s=5.0, duration_s=1.0)
    simulation = Simulation(replace(RUN, num_iterations=30, faults=(fault,), calm_s=30.0))
    result = simulation.run()
    assert result.num_iterations == 30
    assert simulation.hosts["relay1"].compute.iteration == 30
    assert not result.record.of("replay.failed")


def test_an_average_that_travels_counts_when_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there one iteration later, which the leader hears with the votes. The last step misses
    nothing, and no average begins behind that.
    """
    simulation = Simulation(replace(RUN, sync=replace(RUN.sync, overlap=True)))
    begun, arrived = set[int](), set[int]()

    def computed(host: SimHost, job: Job, duration_s: float) -> None:
        if isinstance(job, Gather) and job.kind is AverageKind.AHEAD:
            begun.add(job.iteration)
        if isinstance(job, Propose) and not job.ends_phase:
            arrived.add(job.iteration)

    monkeypatch.setattr(simulation.checker, "computed", computed)
    result = simulation.run()
    assert begun == {4, 8, 12}
    assert arrived == {6, 10}
    assert result.num_iterations == 14
    assert not result.record.of("average.dropped")


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_is_lost_with_a_member_is_counted(overlap: int) -> None:
    fault = HostFault(FaultKind.KILL, "relay1", at_s=7.0)
    disturbed = replace(
        RUN,
        sync=replace(RUN.sync, overlap=overlap),
        num_iterations=18,
        faults=(fault,),
        calm_s=30.0,
    )
    lost = Simulation(disturbed).run().record.of("learning.lost")
    assert lost
    assert all("what stage 2 learnt from" in line for line in lost)
    undisturbed = Simulation(replace(disturbed, faults=(), calm_s=None)).run()
    assert not undisturbed.record.of("learning.lost")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("who", first_of(["relay1", "data1", "data0"]))
def test_nothing_is_lost_with_who_leaves_politely(overlap: int, who: str) -> None:
    """A relay, a data node and the leader: an average comes early for each of them."""
    fault = HostFault(FaultKind.DRAIN, who, at_s=33.0)
    run = replace(
        RUN,
        batch=replace(RUN.batch, num_data_nodes=2),
        sync=sync_of(20, overlap=overlap),
        num_iterations=30,
    )
    simulation = Simulation(replace(run, faults=(fault,), calm_s=34.0))
    result = simulation.run()
    record = result.record
    assert result.num_iterations == 30
    assert len(record.of("average.hastened")) == 1
    assert not record.of("learning.lost")
    assert not record.of("average.dropped")
    (left,) = [line for line in record.of("host.stopped") if who in line and "drained" in line]
    assert 33.0 < float(left.split()[0]) < 65.0, "it leaves long before an average is due"


def test_nothing_is_lost_with_those_who_leave_one_after_another() -> None:
    """One of each stage goes on working, and the others get no work while an average travels."""
    names = ("relay0", "relay1", "relay2", "data1")
    faults = tuple(
        HostFault(FaultKind.DRAIN, name, at_s=30.0 + 4 * k) for k, name in enumerate(names)
    )
    run = replace(
        RUN,
        batch=replace(RUN.batch, num_data_nodes=2),
        sync=replace(RUN.sync, overlap=True),
        num_iterations=40,
        calm_s=60.0,
    )
    record = Simulation(replace(run, faults=faults)).run().record
    assert sum("drained" in line for line in record.of("host.stopped")) == len(names)
    assert not record.of("learning.lost")
    assert not record.of("average.dropped")


@pytest.mark.parametrize(("overlap", "at_s"), [(0, 20.0), (0, 33.2), (1, 20.0), (1, 34.0)])
def test_what_a_lost_relay_had_learnt_from_is_trained_on_again(overlap: int, at_s: float) -> None:
    """Once, beside later batches, and nothing else is."""
    fault = HostFault(FaultKind.KILL, "relay1", at_s=at_s)
    run = replace(RUN, sync=sync_of(6, overlap=overlap, reread=True), num_iterations=30)
    simulation = Simulation(replace(run, faults=(fault,), calm_s=60.0))
    relay, lost = simulation.hosts["relay1"], set[MicrobatchId]()

    def remember() -> None:
        sending = [m for m, _ in relay.compute.sending] if overlap else ()
        lost.update(*relay.compute.learnt, sending)

    simulation.kernel.at(at_s - 0.001, remember)
    trained = Counter[MicrobatchId]()
    batches: dict[int, int] = {}

    def committed(step: SimulatedStep, era: int, *, num_unknown: int = 0) -> str:
        assert (era, num_unknown) == (0, 0)
        trained.update(microbatch for microbatch, _ in step.counts)
        batches[step.iteration] = len(step.counts)
        return checked(step, era)

    data = simulation.checker._data
    checked, data.committed = data.committed, committed  # type: ignore[method-assign]
    record = simulation.run().record
    assert {microbatch for microbatch, num in trained.items() if num == 2} == lost
    assert max(trained.values()) == 1 + bool(lost)
    assert bool(lost) == (overlap > 0 or at_s > 30.0), "an iteration after an average has begun"
    assert max(batches.values()) <= 12, "half as much again as an undisturbed batch"
    positions = positions_of(simulation.leader.machine)
    assert positions is not None
    assert (positions.num_reread, positions.num_skipped) == (len(lost), 0)
    told = [line for line in record.of("learning.lost") if "stage 2" in line]
    assert sum(int(line.split(" learnt from ")[1].split()[0]) for line in told) == len(lost)


def test_a_core_that_reads_again_what_is_not_lost_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the checks above would check nothing."""

    def wasteful(self: Learners) -> set[MicrobatchId]:
        return {microbatch for phase in self._phases for microbatch in phase.lives}

    monkeypatch.setattr(Learners, "take_lost", wasteful)
    with pytest.raises(InvariantViolation, match="trained on again, but not lost"):
        Simulation(replace(RUN, sync=replace(RUN.sync, reread=True))).run()


def test_a_core_that_does_not_say_what_it_reads_again_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = HostFault(FaultKind.KILL, "relay1", at_s=33.0)
    run = replace(
        RUN, sync=sync_of(6, reread=True), num_iterations=30, faults=(fault,), calm_s=60.0
    )

    def silent(*args: object, num_reread: int = 0, **fields: object) -> Report:
        del num_reread
        return Report(*args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr("decod.protocol.strategy.data_share.Report", silent)
    with pytest.raises(InvariantViolation, match=r"I5.* are of earlier ones"):
        Simulation(run).run()


@pytest.mark.parametrize("first", first_of(range(0, 40, 10)))
def test_they_survive_storms(first: int) -> None:
    failures, tally = weather(range(first, first + 10), local_storm)
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


@pytest.mark.parametrize("first", first_of([0, 10]))
def test_they_survive_what_strikes_their_leaders(first: int) -> None:
    failures, tally = weather(
        range(first, first + 10),
        lambda seed: replace(election_storm(seed), sync=sync_of(EVERY)),
    )
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > 5, tally


def test_a_core_that_forgets_what_a_node_has_learnt_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the checks above would check nothing."""

    def forgetful(self: LocalSteps, folded: tuple[MicrobatchId, ...]) -> Weight:
        return weight_of(folded)

    monkeypatch.setattr(LocalSteps, "weigh", forgetful)
    with pytest.raises(InvariantViolation):
        Simulation(RUN).run()


# --- storms that were not survived once ---------------------------------------------------------

_COMMON = (
    "--microbatches 2 --iterations 30 --link-spread-ratio 0.5 --min-nodes-per-stage 2"
    " --iteration-timeout-s 60.0 --optimizer-s 0.05 --activation-bytes 100000"
    " --parameter-bytes 400000"
)


def _play(words: str) -> None:
    assert main([*_COMMON.split(), *words.split()]) == 0


def test_who_keeps_its_state_since_all_donors_are_gone_gives_up_what_it_has_learnt() -> None:
    """It counts as lost, and must not enter the next average."""
    _play(
        "--seed 401912 --data-nodes 2 --sync-every 2 --phases 2 --min-data-nodes 2"
        " --calm-s 21.685 --fault rot:relay2@5.479+7.46 --fault disk:relay3@5.852+8.678"
        " --fault rot:relay0@7.026+3.949 --fault restart:relay3@8.14+4.985"
        " --fault rot:relay0@8.37+4.512 --fault compute:relay1@8.489+9.923"
    )


def test_a_candidate_does_not_replay_what_its_device_has_passed() -> None:
    """The run began anew when the candidate held a later state."""
    _play(
        "--seed 401548 --stages 1 --sync-every 2 --overlap 1 --calm-s 34.822"
        " --fault restart:relay2@7.465+8.752 --fault slow:relay2@19.483+11.124"
        " --fault compute:relay1@20.353+3.961 --cut relay3,relay2|data0,relay0,relay1@4.898+4.864"
        " --cut relay0,relay2|data0,relay3@9.367+9.971"
        " --cut data0,relay2|relay1,relay3,relay0@21.189+6.129"
    )


def test_an_average_for_an_earlier_life_is_freed_at_the_end() -> None:
    """It came to a candidate that never entered."""
    _play(
        "--seed 400021 --relays 3 --stages 1 --microbatches 1 --sync-every 3 --overlap 1"
        " --routing greedy --calm-s 34.372 --fault pause:relay1@10.403+0.488"
        " --fault restart:relay1@13.061+2.342 --cut relay1>relay0,relay2@18.739+3.508"
        " --cut relay1>relay2,relay0,data0@19.409+5.0 --cut relay0|relay2,data0,relay1@13.17+2.6"
    )


def test_who_starts_again_as_the_run_ends_hears_of_the_end_without_a_state() -> None:
    _play(
        "--seed 1067 --relays 3 --stages 1 --sync-every 5 --overlap 1 --routing greedy"
        " --calm-s 35.368 --fault clock:relay1@14.653+11.861 --fault restart:relay2@22.186+0.942"
    )

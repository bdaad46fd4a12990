"""Peers with their own training loops: rounds under churn and faults, and the cases in which other
systems hang, split or go back."""

import pytest

from decod.ids import NodeId, TensorId
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core.effects import StopReason
from decod.protocol.core.events import Fault, SendFailed
from decod.protocol.core.messages import Message, ReducedPart
from decod.protocol.core.messages.round_messages import Height
from decod.sim.collaboration import Collaboration, CollaborationSpec, Tally
from decod.sim.network import LinkFaults, LinkSpec
from decod.sim.simulated_peers import SimPeer
from tests.support.quick import first_of

FAULTS = (
    LinkFaults(),
    LinkFaults(loss_ratio=0.005),
    LinkFaults(delay_ratio=0.05),
    LinkFaults(delay_ratio=0.05, duplicate_ratio=0.05),
)


def run_of(num_peers: int, num_rounds: int = 20, **fields: object) -> Collaboration:
    return Collaboration(CollaborationSpec(num_peers=num_peers, num_rounds=num_rounds, **fields))


def play(run: Collaboration, seconds: float) -> None:
    run.kernel.run(until_s=run.kernel.now_s + seconds)


def play_until_together(run: Collaboration, seconds: float) -> float:
    """Play until all are level in one run; return how many seconds that took."""
    began_s = run.kernel.now_s
    assert run.kernel.run(until_s=began_s + seconds, done=lambda: are_together(run)), [
        (peer.name, peer.machine.company.coordinator, peer.machine.past.height.round)
        for peer in run.alive
    ]
    return run.kernel.now_s - began_s


def begun(num_peers: int, **fields: object) -> Collaboration:
    """Return a run that has come some rounds far."""
    run = run_of(num_peers, **fields)
    for _ in range(num_peers):
        run.add()
    assert run.kernel.run(until_s=300.0, done=lambda: run.outcome.num_rounds >= 2)
    play_until_together(run, 60)
    return run


def are_together(run: Collaboration) -> bool:
    """Whether all peers follow one coordinator, know each other, and have the same state."""
    alive = run.alive
    names = {peer.node_id for peer in alive}
    companies = [peer.machine.company for peer in alive]
    return (
        len({company.coordinator for company in companies}) == 1
        and all({*company.peers} == names for company in companies)
        and len({peer.machine.past.height for peer in alive}) == 1
    )


def coordinator_of(run: Collaboration) -> SimPeer:
    (name,) = {peer.machine.company.coordinator for peer in run.alive}
    return run.peers[name]


def cut_apart(run: Collaboration, one: list[SimPeer], other: list[SimPeer], until_s: float) -> None:
    for a in one:
        for b in other:
            run.world.network.cut(a.name, b.name, until_s=until_s)
            run.world.network.cut(b.name, a.name, until_s=until_s)


# --- churn and faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first_of(range(16), 6))
def test_each_step_counts_once_whatever_happens(seed: int) -> None:
    """Peers come and vanish, messages are lost, late or there twice. The simulator checks."""
    num_peers = (2, 3, 4, 5, 8, 6)[seed % 6]
    run = run_of(
        num_peers,
        seed=seed,
        churn=(0.1, 0.2, 0.3)[seed % 3],
        steps_per_round=(4, 16)[seed % 2],
        faults=FAULTS[seed % 4],
        duration_max_s=2000.0,
    )
    found = run.run()
    assert found.num_rounds == 20
    assert found.longest_wait_s < run.config.averaging_timeout_s
    run.rest()
    run.check_counts()


@pytest.mark.parametrize("seed", first_of(range(12), 4))
def test_each_step_counts_once_though_loops_stand_still(seed: int) -> None:
    run = run_of(
        (2, 3, 5, 8)[seed % 4],
        seed=seed,
        churn=(0.0, 0.1)[seed % 2],
        pauses=0.1,
        steps_per_round=(4, 16)[seed % 2],
        faults=FAULTS[seed % 4],
        duration_max_s=5000.0,
    )
    assert run.run().num_rounds == 20
    run.check_counts()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_each_step_counts_once_though_loops_stand_still_over_many_seeds(seed: int) -> None:
    test_each_step_counts_once_though_loops_stand_still(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_each_step_counts_once_over_many_seeds(seed: int) -> None:
    test_each_step_counts_once_whatever_happens(seed)


def test_the_same_seed_gives_the_same_run() -> None:
    def trace() -> list[str]:
        run = run_of(4, seed=3, churn=0.3, steps_per_round=4, faults=FAULTS[3])
        run.run()
        return run.trace

    assert trace() == trace()


def test_no_round_is_lost_because_one_peer_vanishes() -> None:
    """The others' contributions count in the round that was under way."""
    run = begun(4, steps_per_round=8, spread=0.2)
    victim = next(peer for peer in run.alive if peer is not coordinator_of(run))

    def is_averaging() -> bool:
        return bool(victim.machine.rounds.awaited)

    assert run.kernel.run(until_s=run.kernel.now_s + 60, done=is_averaging)
    before, at_s = victim.machine.past.height.round, run.kernel.now_s
    victim.kill(vanish=True)
    others = [peer for peer in run.alive if peer is not victim]
    done = lambda: all(peer.height.round > before for peer in others)  # noqa: E731
    assert run.kernel.run(until_s=at_s + 20, done=done)
    assert run.kernel.now_s - at_s < 8.0
    assert run.outcome.notes["round.repeated"] >= 1
    assert run.outcome.num_lost == 0
    assert sum(peer.machine.own.num_dropped for peer in others) == 0


@pytest.mark.parametrize("seed", first_of(range(12), 4))
def test_rounds_may_be_shorter_than_an_average_takes(seed: int) -> None:
    """One step is a round, so most peers only listen, and the coordinator may too."""
    run = run_of(
        (3, 4, 5)[seed % 3],
        num_rounds=150,
        seed=seed,
        step_s=(0.01, 0.03, 0.05)[seed % 3],
        config=RoundConfig(target_batch_size=8),
        model_bytes=(40_000, 400_000)[seed % 2],
        churn=(0.0, 0.02)[seed % 2],
        faults=FAULTS[seed % 4],
        link=LinkSpec((0.001, 0.005, 0.02)[seed // 3 % 3], 12_500_000.0),
        duration_max_s=600.0,
    )
    assert run.run().longest_wait_s < 11.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_rounds_may_be_shorter_than_an_average_takes_over_many_seeds(seed: int) -> None:
    test_rounds_may_be_shorter_than_an_average_takes(seed)


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_loop_may_stand_still_for_many_rounds(*, coordinates: bool) -> None:
    """As it does while it evaluates the model. The others go on, and its averages don't pile up."""
    run = begun(4, steps_per_round=4, spread=0.2)
    busy = next(p for p in run.alive if (p is coordinator_of(run)) == coordinates)
    others = [peer for peer in run.alive if peer is not busy]
    before, pause_s = run.outcome.num_rounds, 200.0
    busy.pause_s = pause_s
    most = 0

    def look(_: Height) -> None:
        nonlocal most
        most = max(most, busy.machine.own.num_waiting)

    run.on_round = look
    play(run, pause_s - 20)
    assert run.outcome.num_rounds - before > 30
    assert most == (run.config.backlog_max if not coordinates else most) <= run.config.backlog_max
    assert run.outcome.num_lost == 0
    assert not busy.machine.company.level
    assert coordinator_of(run) in others
    play(run, 25)
    play_until_together(run, 30)
    assert busy.machine.own.num_waiting <= 1
    run.check_counts()
    assert sum(peer.machine.own.num_dropped for peer in others) == 0


def test_the_coordinator_may_vanish_while_an_average_is_under_way() -> None:
    run = begun(4, steps_per_round=8, spread=0.2)
    victim = coordinator_of(run)
    assert run.kernel.run(until_s=120, done=lambda: bool(victim.machine.rounds.awaited))
    at_s, before = run.kernel.now_s, victim.machine.past.height.round
    victim.kill(vanish=True)
    others = run.alive
    done = lambda: all(peer.height.round > before for peer in others)  # noqa: E731
    assert run.kernel.run(until_s=at_s + 30, done=done)
    assert are_together(run)
    assert sum(peer.machine.own.num_dropped for peer in others) == 0


# --- cases in which others hang, split or go back ------------------------------------------------


@pytest.mark.parametrize("num_peers", [2, 3, 8])
def test_peers_that_begin_at_the_very_same_instant_become_one_run(num_peers: int) -> None:
    """Their steps take the same time, too."""
    run = run_of(num_peers, spread=0.0, steps_per_round=8)
    for _ in range(num_peers):
        run.add()
    assert play_until_together(run, 20) < 10.0
    assert run.outcome.notes["samples.lost"] == 0


def test_two_peers_that_find_each_other_at_the_very_same_instant_become_one_run() -> None:
    run = run_of(2)
    run.find_s = 1e9
    one, other = run.add(), run.add()
    run.meet(one, other)
    run.meet(other, one)
    assert play_until_together(run, 2.0) < 1.0


def test_a_peer_that_is_one_step_ahead_of_all_others_brings_them_along() -> None:
    run = run_of(4, steps_per_round=8)
    for _ in range(3):
        run.add()
    ahead = run.add(height=Height(1, "1" * 64))
    play_until_together(run, 30)
    assert coordinator_of(run) is ahead
    assert all(peer.machine.past.height.round >= 1 for peer in run.alive)


def test_a_peer_that_steps_alone_while_others_average_is_level_soon() -> None:
    """It has come one round ahead in the instant in which both have met."""
    run = run_of(4, steps_per_round=4, config=RoundConfig(target_batch_size=16))
    run.find_s = 1e9
    peers = [run.add() for _ in range(4)]
    for other in peers[1:3]:
        run.meet(peers[0], other)
    play(run, 10.0)
    run.meet(peers[3], peers[0])
    play_until_together(run, 30)
    run.check_counts()


def test_newcomers_find_the_run_through_others_when_its_first_peers_are_gone() -> None:
    run = begun(4, steps_per_round=8)
    first = run.alive
    second = [run.add() for _ in range(3)]
    play_until_together(run, 60)
    for peer in first:
        peer.kill(vanish=peer is first[0])
    run.find_s = 1e9
    newcomer = run.add()
    coordinator = coordinator_of_alive(run, but=newcomer)
    contact = next(peer for peer in second if peer is not coordinator)
    run.meet(newcomer, contact)
    height = contact.machine.past.height
    play_until_together(run, 60)
    assert newcomer.machine.past.height.round >= height.round > 0
    assert run.outcome.notes["samples.lost"] == 0


def coordinator_of_alive(run: Collaboration, *, but: SimPeer) -> SimPeer:
    """Return who succeeds, once that is settled among those who are left."""

    def settled() -> bool:
        others = [peer for peer in run.alive if peer is not but]
        found = {peer.machine.company.coordinator for peer in others}
        return len(found) == 1 and run.peers[found.pop()].reachable

    assert run.kernel.run(until_s=run.kernel.now_s + 30, done=settled)
    found = next(peer for peer in run.alive if peer is not but).machine.company.coordinator
    return run.peers[found]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 1)])
def test_two_halves_of_a_run_become_one_again(sizes: tuple[int, int]) -> None:
    """They have trained apart. What only the lesser half has done is reported as lost."""
    num_peers = sum(sizes)
    run = begun(num_peers, steps_per_round=8)
    one, other = run.alive[: sizes[0]], run.alive[sizes[0] :]
    apart_s = run.kernel.now_s + 120
    cut_apart(run, one, other, apart_s)
    play(run, 119)
    heights = [peer.machine.past.height for peer in (one[0], other[0])]
    assert heights[0] != heights[1], "they have trained apart"
    assert min(height.round for height in heights) > 2
    play_until_together(run, 60)
    assert run.outcome.notes["samples.lost"] >= 1
    lost = sum(peer.machine.company.num_lost for peer in run.alive)
    assert lost > 0
    run.check_counts()
    before = run.alive[0].height.round
    play(run, 60)
    assert all(peer.height.round > before for peer in run.alive)


def test_a_peer_that_only_its_coordinator_can_reach_stalls_nobody_for_long() -> None:
    """Two peers can't reach each other: a round goes on without one of them."""
    run = begun(4, steps_per_round=8, spread=0.2)
    peers = run.alive
    one, other = [peer for peer in peers if peer is not coordinator_of(run)][:2]
    cut_apart(run, [one], [other], 1e9)
    before, at_s = max(peer.height.round for peer in peers), run.kernel.now_s
    third = coordinator_of(run)
    done = lambda: third.height.round >= before + 5  # noqa: E731
    assert run.kernel.run(until_s=at_s + 200, done=done)
    assert run.outcome.longest_wait_s < 20.0


def test_a_mean_that_does_not_reach_one_peer_stalls_nobody_for_long() -> None:
    """The sender has the whole average already. It says whom it can't reach."""
    run = begun(4, steps_per_round=8, spread=0.2)
    one, other = [peer for peer in run.alive if peer is not coordinator_of(run)][:2]
    send = one._send_tensor

    def send_or_fail(to: NodeId, message: Message, tensor: TensorId) -> None:
        if to == other.node_id and isinstance(message, ReducedPart):
            failed = SendFailed(to, message, "lost", tensor, fault=Fault.LINK)
            run.kernel.after(3.0, one.post, failed)
        else:
            send(to, message, tensor)

    one._send_tensor = send_or_fail  # type: ignore[method-assign]
    before = run.outcome.num_rounds
    done = lambda: run.outcome.num_rounds >= before + 3  # noqa: E731
    assert run.kernel.run(until_s=run.kernel.now_s + 120, done=done)
    assert run.outcome.longest_wait_s < 15.0


def test_dial_errors_of_dead_peers_stall_nobody() -> None:
    """Half of the peers vanish without a word, between two rounds."""
    run = begun(6, steps_per_round=16, spread=0.1)
    peers = run.alive
    for peer in peers[3:]:
        peer.kill(vanish=True)
    outcome, before = run.outcome, run.outcome.num_rounds
    outcome.longest_wait_s = 0.0
    assert run.kernel.run(
        until_s=run.kernel.now_s + 200, done=lambda: run.outcome.num_rounds > before + 3
    )
    assert outcome.longest_wait_s < 2.0


def test_a_newcomer_whose_download_takes_several_rounds_is_level_afterwards() -> None:
    """It gets the averages meanwhile, and asks once."""
    run = begun(3, steps_per_round=4)
    peers = run.alive
    newcomer = run.add()
    for peer in peers:  # The state is three models, and takes four rounds.
        run.world.network.change(peer, newcomer, LinkSpec(0.02, 800_000.0))
    play(run, 3.0)
    began, loaded = peers[0].height.round, run.outcome.notes["peer.loaded"]
    assert run.kernel.run(until_s=run.kernel.now_s + 60, done=lambda: newcomer.height.round > 0)
    assert peers[0].height.round - began >= 3
    play_until_together(run, 30)
    assert run.outcome.notes["peer.loaded"] == loaded + 1
    assert run.outcome.notes["peer.unloaded"] == 0


def test_newcomers_do_not_all_take_the_state_from_one_donor() -> None:
    run = begun(4, steps_per_round=16)
    peers = run.alive
    newcomers = [run.add() for _ in range(8)]
    play_until_together(run, 60)
    given = [peer.num_copies for peer in peers]
    assert sum(given) >= len(newcomers)
    assert max(given) <= sum(given) / 2, given


def test_a_donor_that_dies_is_replaced() -> None:
    run = begun(3, steps_per_round=16)
    peers = run.alive
    newcomer = run.add()
    done = lambda: any(peer.num_copies for peer in peers)  # noqa: E731
    assert run.kernel.run(until_s=run.kernel.now_s + 20, done=done)
    next(peer for peer in peers if peer.num_copies).kill(vanish=True)
    play_until_together(run, 60)
    assert newcomer.machine.company.level


def test_a_peer_that_leaves_well_is_missed_by_nobody() -> None:
    run = begun(4, steps_per_round=16)
    coordinator_of(run).leave()
    assert play_until_together(run, 10) < 1.0
    assert run.outcome.longest_wait_s < 2.0


def test_a_lone_peer_steps_by_itself_at_once() -> None:
    run = run_of(1, num_rounds=10, steps_per_round=2)
    found = run.run()
    assert (found.num_rounds, found.wait_s) == (10, 0.0)
    assert run.alive[0].machine.own.num_dropped == 0


def test_a_peer_with_a_share_waits_for_the_average() -> None:
    """Its steps and the others' are the same ones, whoever is faster."""
    config = RoundConfig(target_batch_size=96, share=32)
    run = run_of(3, num_rounds=10, config=config)
    run.run()
    assert {*run.sizes} == {96}


# --- what is promised -----------------------------------------------------------------------------


def check_promises(found: Tally, num_rounds: int) -> None:
    figures = found.summary()
    assert figures["rounds"] == num_rounds
    assert figures["whole_rounds_percent"] >= 99.0, found.absent
    assert figures["waiting_percent"] < 2.0
    assert figures["lost_rounds"] == 0


@pytest.mark.parametrize("num_peers", [2, 4, 8])
def test_all_take_part_in_nearly_all_rounds_and_hardly_wait(num_peers: int) -> None:
    check_promises(run_of(num_peers, 40, churn=0.1).run(), 40)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_peers", [2, 4, 8, 16])
def test_a_thousand_rounds(num_peers: int) -> None:
    check_promises(run_of(num_peers, 1000, churn=0.1).run(), 1000)


@pytest.mark.slow
def test_sixty_four_peers() -> None:
    check_promises(run_of(64, 30, churn=0.1).run(), 30)


# --- who has the run's state ----------------------------------------------------------------------


def newcomer_that_fetches(run: Collaboration) -> SimPeer:
    """Have somebody join. Return it while the state is on its way to it."""
    newcomer = run.add(has_state=False)
    fetches = lambda: newcomer.machine.loading.under_way  # noqa: E731
    assert run.kernel.run(until_s=run.kernel.now_s + 30, done=fetches)
    return newcomer


@pytest.mark.parametrize("leaves", [True, False])
def test_a_newcomer_that_never_had_the_state_stops_when_nobody_has_it(*, leaves: bool) -> None:
    """It does not carry the run on from weights of its own."""
    run = begun(1, model_bytes=400_000_000)
    (first,) = run.alive
    newcomers = [newcomer_that_fetches(run) for _ in range(2)]
    at_s, rounds = run.kernel.now_s, run.outcome.num_rounds
    first.leave() if leaves else first.kill(vanish=True)
    stopped = lambda: not run.alive  # noqa: E731
    assert run.kernel.run(until_s=at_s + 60, done=stopped)
    assert [each.stopped for each in newcomers] == [StopReason.STATE_LOST] * 2
    assert run.outcome.num_rounds == rounds
    assert [each.num_stepped for each in newcomers] == [0, 0]


def test_a_newcomer_that_meets_nobody_stops() -> None:
    run = run_of(1)
    newcomer = run.add(has_state=False)
    run.kernel.run(until_s=60.0, done=lambda: not run.alive)
    assert newcomer.stopped is StopReason.STATE_LOST
    assert run.kernel.now_s == pytest.approx(run.config.seeking_max_s, abs=1.0)


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_nobody_begins_with_a_newcomers_weights(num_before: int) -> None:
    """Both are at round 0, and the newcomer has the greater id."""
    run = run_of(1)
    run.find_s = 1e9
    first = run.add(height=Height(0, "f" * 64))
    others = [
        run.add(height=Height(0, f"{k}" * 64), has_state=False) for k in range(num_before + 1)
    ]
    for each in others:
        run.meet(each, first)
        run.meet(first, each)
    play_until_together(run, 30.0)
    assert coordinator_of(run) is first
    assert run.outcome.notes["samples.lost"] == 0


def test_a_peer_that_is_far_behind_goes_on_from_what_it_has_when_all_others_vanish() -> None:
    """Newcomers wait for it: it is the only one that has had the state."""
    run = begun(3, steps_per_round=4, spread=0.2)
    slow = next(peer for peer in run.alive if peer is not coordinator_of(run))
    slow.pause_s = 150.0
    play(run, 100.0)
    assert not slow.machine.company.level
    newcomer = newcomer_that_fetches(run)
    before = slow.machine.past.height.round
    for peer in run.alive:
        if peer not in (slow, newcomer):
            peer.kill(vanish=True)
    play_until_together(run, 120.0)
    assert coordinator_of(run) is slow
    assert newcomer.stopped is None
    assert run.kernel.run(
        until_s=run.kernel.now_s + 60, done=lambda: newcomer.height.round > before
    )


def test_a_coordinator_that_starts_anew_without_its_state_is_succeeded() -> None:
    """It comes back under its name before the others have missed it."""
    run = begun(3, steps_per_round=8, spread=0.2)
    old, others = coordinator_of(run), [p for p in run.alive if p is not coordinator_of(run)]
    old.kill(vanish=False)
    born, run._num_born = run._num_born, int(old.name.removeprefix("peer"))
    again = run.add(height=Height(0, "e" * 64), has_state=False)
    run._num_born = born
    assert again.node_id == old.node_id
    for each in others:
        run.meet(again, each)
    play_until_together(run, 40.0)
    assert coordinator_of(run) in others
    assert again.stopped is None

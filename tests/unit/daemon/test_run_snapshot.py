"""States of all stages are gathered of one iteration; commits wait for copies, not transfers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from decod.daemon import run_snapshot as snapshot
from decod.daemon.run_snapshot import run_snapshot
from decod.errors import NetworkError
from decod.protocol.core.era import Mark
from decod.train.checkpoint.description import Description
from tests.support.noted import noted
from tests.unit.daemon.gathered import FakeRun
from tests.waiting import wait_until


class InMemory:
    """Takes states into memory."""

    def place(self, stage_index: int, description: Description) -> memoryview:
        return memoryview(bytearray(description.num_bytes))


async def test_commits_are_held_until_each_stage_has_its_copy_and_no_longer(tmp_path: Path) -> None:
    """How long a copy takes over a slow link must not stop the run."""
    run = FakeRun(tmp_path, "r1a")
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_copy.clear()
    relay.may_send.clear()
    gathered = run_snapshot(run.sources, InMemory(), with_optimizer=True)
    entering = asyncio.create_task(gathered.__aenter__())
    await wait_until(lambda: relay.num_asked)
    assert run.is_blocked
    relay.may_copy.set()
    await wait_until(lambda: not run.is_blocked)
    assert not entering.done(), "it still travels"
    relay.may_send.set()
    states = await entering
    assert (states.iteration, states.loss, len(states.stages)) == (5, 2.5, 2)
    assert run.lent == 1
    await gathered.__aexit__(None, None, None)
    assert run.lent == 0


async def test_a_member_that_takes_no_copy_does_not_hold_commits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "HOLD_MAX_S", 0.0)
    run = FakeRun(tmp_path, "r1a")
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_copy.clear()
    gathered = run_snapshot(run.sources, InMemory(), with_optimizer=True)
    entering = asyncio.create_task(gathered.__aenter__())
    await wait_until(lambda: relay.num_asked and not run.is_blocked)
    run.commit(6)
    relay.may_copy.set()
    with pytest.raises(NetworkError, match=r"E-NET-022 stage 1 .* moved on"):
        await entering
    assert relay.num_asked == 1, "it would only hold up the run again"
    assert run.lent == 0


async def test_commits_are_held_for_as_long_as_a_large_state_may_take_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "HOLD_MAX_S", 0.0)
    run = FakeRun(tmp_path, "r1a")
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_copy.clear()
    sources = replace(run.sources, state_bytes=120 << 30)
    gathered = run_snapshot(sources, InMemory(), with_optimizer=True)
    entering = asyncio.create_task(gathered.__aenter__())
    await wait_until(lambda: relay.num_asked)
    for _ in range(20):  # A timer of 0 s would have passed.
        await asyncio.sleep(0)
    assert run.is_blocked
    relay.may_copy.set()
    assert (await entering).iteration == 5
    assert not run.is_blocked
    await gathered.__aexit__(None, None, None)


async def test_another_member_is_asked_while_commits_are_held(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", "r1b")
    first, second = (run.members[m.node_id] for m in run.view.roster(1))
    first.manifest = '{"tensors": 5}'
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert states.iteration == 5
    assert (first.num_asked, second.num_asked) == (1, 1)
    assert run.lent == 0


async def test_if_a_copy_is_lost_on_its_way_a_later_iteration_is_gathered(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", "r1b")
    first, second = (run.members[m.node_id] for m in run.view.roster(1))
    first.may_send.clear()
    gathered = run_snapshot(run.sources, InMemory(), with_optimizer=True)
    entering = asyncio.create_task(gathered.__aenter__())
    await wait_until(lambda: first.num_asked and not run.is_blocked)
    run.commit(6)
    first.dies_sending = True
    first.may_send.set()
    states = await entering
    assert states.iteration == 6
    assert second.num_asked == 2, "it was asked for the lost one, and had left that behind"
    await gathered.__aexit__(None, None, None)
    assert run.lent == 0
    assert not run.is_blocked


async def test_what_is_gathered_at_a_mark_is_what_was_voted_on(tmp_path: Path) -> None:
    """A member's disk may hold that iteration's state of a future that the run has given up."""
    run = FakeRun(tmp_path, "r1a", "r1b")
    first, second = (run.members[m.node_id] for m in run.view.roster(1))
    first.parameter_hash, second.parameter_hash = "a" * 64, "b" * 64
    run.leader.marks = (
        Mark(3, ((1, "a" * 64),)),
        Mark(5, ((0, "c" * 64), (1, "b" * 64))),
    )
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert states.iteration == 5
    assert (first.num_asked, second.num_asked) == (1, 1)
    run.commit(6)
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert states.iteration == 6
    assert (first.num_asked, second.num_asked) == (2, 1), "no hash is known, the first serves"
    assert run.lent == 0


async def test_nothing_is_committed_after_what_is_kept_at_the_end(tmp_path: Path) -> None:
    """Model and checkpoint are of one iteration, and it is the run's last."""
    run = FakeRun(tmp_path, "r1a")
    run.ending = True
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True):
        assert run.is_blocked
    assert run.is_blocked


async def test_who_stops_waiting_leaves_nothing_held(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a")
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_send.clear()
    gathered = run_snapshot(run.sources, InMemory(), with_optimizer=True)
    entering = asyncio.create_task(gathered.__aenter__())
    await wait_until(lambda: run.lent == 1)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    assert run.lent == 0
    assert not run.is_blocked


async def test_a_failed_core_is_left_out_and_the_device_tells_the_iteration(tmp_path: Path) -> None:
    """The core may have decided a commit that nobody has heard of."""
    run = FakeRun(tmp_path, "r1a")
    run.commit(5, loss=2.25)
    run.driver.broken, run.leader.committed = True, 6
    run.driver.request_state = None
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert (states.iteration, states.loss) == (5, 2.25)
    assert run.lent == 0


async def test_without_its_device_a_leader_gathers_the_newest_states_on_disks(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    for iteration in range(1, 8):
        run.commit(iteration, loss=float(iteration))
    run.device_gone = True
    none_left = pytest.raises(NetworkError, match=r"E-NET-022 stage 0 .* no disk keeps")
    with none_left:
        async with run_snapshot(run.sources, InMemory(), with_optimizer=True):
            pass
    run.leader.marks = tuple(Mark(iteration, ()) for iteration in (2, 4, 6))
    run.on_disks = {2, 4}
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert (states.iteration, states.loss) == (4, 4.0), "the newest is not everywhere"
        assert run.lent == 1
    assert run.lent == 0


async def test_what_members_have_learnt_by_themselves_is_not_gathered(tmp_path: Path) -> None:
    """Nobody could give a state behind the last average, and commits would be held in vain."""
    run = FakeRun(tmp_path, "r1a")
    run.progress.take(
        noted("step.committed", {"iteration": "5.1", "loss": 3.5, "num_tokens": 8}, 0)
    )
    run.commit(6, averaged=False)
    async with run_snapshot(run.sources, InMemory(), with_optimizer=True) as states:
        assert (states.iteration, states.loss) == (5, 3.5)
    assert not run.is_blocked

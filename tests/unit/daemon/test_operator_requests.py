"""What the operator asks of a node: the commands of its socket, and how they are answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.daemon import operator_requests as module
from decod.daemon.pipeline_node import PipelineNode
from decod.errors import ConfigError, NetworkError, RejectedError
from decod.protocol.core.effects import Note, Stop, StopReason
from decod.protocol.core.events import DrainRequested, Event, PauseRequested
from decod.tasks import beside
from tests.unit.daemon.nodes import STRANGER, give_driver, make_node, tell
from tests.waiting import wait_until

Answers = list[Note]


class Core:
    """Stands in for the driver: keeps what it is told, and says what a test wants it to say."""

    def __init__(self, node: PipelineNode, *notes: Note) -> None:
        self.node = node
        self.events: list[Event] = []
        self.notes = list(notes)
        self.stopped: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        load, view = SimpleNamespace(capacity=2), SimpleNamespace(leader=STRANGER, by_id={}, term=1)
        self.facts = SimpleNamespace(load=load, view=view, electing=False, in_view=False)
        give_driver(node, self)

    def post(self, event: Event) -> None:
        self.events.append(event)
        while self.notes:
            tell(self.node, self.notes.pop(0))


@pytest.fixture(name="node")
@asynccontextmanager
async def _node(tmp_path: Path) -> AsyncIterator[PipelineNode]:
    with make_node(tmp_path, leads=False) as node:
        yield node


AGREED = Note("capacity.agreed", (("capacity", 0),))
REFUSED = Note("capacity.refused", (("reason", "stage 1 would stop"),))


@pytest.mark.parametrize("paused", [True, False])
async def test_a_pause_is_answered_when_the_leader_has_agreed(
    paused: bool, node: PipelineNode
) -> None:
    core = Core(node, Note("flow.completed"), AGREED, REFUSED)
    answer = await node.answer({"command": "pause" if paused else "resume"})
    assert answer == {"paused": paused, "capacity": 2}
    assert core.events == [PauseRequested(paused=paused)]


async def test_a_refusal_is_an_error_that_says_why(node: PipelineNode) -> None:
    Core(node, REFUSED)
    with pytest.raises(RejectedError, match="stage 1 would stop"):
        await node.answer({"command": "pause"})


async def test_the_last_relay_of_a_stage_is_told_to_find_another(node: PipelineNode) -> None:
    """Leaving would stop the stage as well."""
    core = Core(node, REFUSED)
    core.facts.in_view, core.facts.own_stage = True, 1
    core.facts.load.node_id = node.node_id
    core.facts.view.roster = lambda _: [SimpleNamespace(node_id=node.node_id, capacity=2)]
    with pytest.raises(RejectedError, match="decod join --stage 1") as refused:
        await node.answer({"command": "pause"})
    assert "drain" not in str(refused.value)


async def test_a_node_that_has_no_core_yet_can_not_be_paused(node: PipelineNode) -> None:
    with pytest.raises(RejectedError, match="not entered"):
        await node.answer({"command": "pause"})


async def test_a_leader_that_is_silent_is_named(
    monkeypatch: pytest.MonkeyPatch, node: PipelineNode
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)
    Core(node)
    with pytest.raises(NetworkError, match="has not answered"):
        await node.answer({"command": "pause"})
    # An answer that comes later is nobody's.
    tell(node, AGREED)


async def test_two_commands_at_once_are_answered_one_after_the_other(node: PipelineNode) -> None:
    core = Core(node)
    first = asyncio.create_task(node.answer({"command": "pause"}))
    second = asyncio.create_task(node.answer({"command": "resume"}))
    for answer in (REFUSED, AGREED):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tell(node, answer)
    with pytest.raises(RejectedError):
        await first
    assert (await second)["paused"] is False
    assert [cast("PauseRequested", event).paused for event in core.events] == [True, False]


async def test_draining_tells_the_core_how_long_it_may_take(node: PipelineNode) -> None:
    core = Core(node)
    await node.answer({"command": "drain"})
    await node.requests.wait_leaving()
    assert core.events == [], "at a leader the model is kept first"
    node.requests.tell_core()
    # Asking again shortens what is left, and never prolongs it.
    for timeout_s in (500, 5.0, 7):
        await node.answer({"command": "drain", "timeout_s": timeout_s})
    assert core.events == [DrainRequested(s) for s in (60.0, 60.0, 5.0, 5.0)]


async def test_the_first_request_may_give_more_time_than_the_daemon_was_told(
    node: PipelineNode,
) -> None:
    core = Core(node)
    await node.answer({"command": "drain", "timeout_s": 500.0})
    node.requests.tell_core()
    assert core.events == [DrainRequested(500.0)]


async def test_who_waits_for_the_end_hears_how_it_came(node: PipelineNode) -> None:
    core = Core(node)
    waiting = asyncio.create_task(node.answer({"command": "drain", "wait": True}))
    await node.requests.wait_leaving()
    core.stopped.set_result(Stop(StopReason.DRAINED, "finished"))
    answer = await waiting
    assert answer == {"draining": True, "reason": "drained", "detail": "finished"}


async def test_a_client_that_goes_away_does_not_take_the_node_along(node: PipelineNode) -> None:
    core = Core(node)
    waiting = asyncio.create_task(node.answer({"command": "drain", "wait": True}))
    await node.requests.wait_leaving()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not core.stopped.done()


@pytest.mark.parametrize("timeout_s", [-1, 1e9, float("nan"), "5", True, [1]])
async def test_a_time_that_is_none_is_refused(timeout_s: Any, node: PipelineNode) -> None:
    with pytest.raises(ConfigError, match="E-CFG-049"):
        await node.answer({"command": "drain", "timeout_s": timeout_s})


async def test_only_a_leader_that_does_not_leave_can_be_told_to_end_the_run(tmp_path: Path) -> None:
    with make_node(tmp_path / "volunteer", leads=False) as node:
        with pytest.raises(RejectedError, match=r"E-REJ-008 .* does not lead"):
            await node.answer({"command": "drain", "end_run": True})
        assert not node._leaving.asked.is_set()
    with make_node(tmp_path / "leader") as node:
        await node.answer({"command": "drain"})
        core = Core(node)
        core.facts.view.leader = node.node_id
        node.requests.tell_core()
        with pytest.raises(RejectedError, match=r"E-REJ-008 .* hands over"):
            await node.answer({"command": "drain", "end_run": True})
        assert not node.requests.ends_run
        tell(node, Note("handover.failed", (("reason", "nobody can lead"),)))
        assert node.requests.stays.is_set()
        await node.answer({"command": "drain", "end_run": True})
        assert node.requests.ends_run


async def test_a_node_is_paused_from_the_leader_s_word_until_it_is_taken_back(
    node: PipelineNode,
) -> None:
    core, requests = Core(node, AGREED), node.requests
    assert not requests.paused
    await requests.pause(paused=True)
    assert requests.paused
    # The others of its stage have gone, so it works on: its capacity in the view is not 0.
    tell(node, REFUSED)
    assert not requests.paused
    tell(node, AGREED)
    core.facts.load.capacity = 0
    tell(node, REFUSED)
    assert requests.paused, "the end of a pause was refused, not the pause"
    tell(node, Note("capacity.agreed", (("capacity", 2),)))
    assert not requests.paused


def give_stage(node: PipelineNode, *others: str, index: int = 2) -> Core:
    """Make the node a relay of a stage, beside others."""
    core = Core(node)
    me = SimpleNamespace(node_id=node.node_id, label="relay-3")
    roster = [me, *(SimpleNamespace(node_id=other) for other in others)]
    core.facts.in_view, core.facts.own_stage, core.facts.node_id = True, index, node.node_id
    core.facts.leading = None
    core.facts.view.by_id = {node.node_id: me}
    core.facts.view.roster = lambda stage: roster if stage == index else []
    return core


async def test_the_last_member_of_a_stage_is_told_what_leaving_means(node: PipelineNode) -> None:
    answer = node.answer
    Core(node).facts.leading = None
    assert (await answer({"command": "leaving"}))["means"] == "", "it has not entered yet"
    give_stage(node, "another")
    beside = await answer({"command": "leaving", "timeout_s": 5})
    assert beside == {"means": "", "is_grave": False, "stage": None, "left_s": 5.0}
    core = give_stage(node)
    alone = await answer({"command": "leaving"})
    assert alone["means"].startswith("relay-3 is the last member of stage 2: it waits until")
    assert (alone["is_grave"], alone["stage"], alone["left_s"]) == (True, 2, 60.0)
    assert core.events == [], "nothing is asked of the core yet"
    node.requests.leave(40.0)
    node.requests.tell_core()
    left_s = (await answer({"command": "leaving", "timeout_s": 5000}))["left_s"]
    assert 0.0 < left_s <= 40.0, "it leaves already"
    with pytest.raises(ConfigError, match="E-CFG-049"):
        await answer({"command": "leaving", "timeout_s": -1})


async def test_a_leader_whom_nobody_can_follow_is_told_that_the_run_ends(
    node: PipelineNode,
) -> None:
    core = give_stage(node, index=0)
    monkey = SimpleNamespace(can_hand_over=False, lacking=())
    core.facts.leading = monkey
    node.requests._leads = lambda: True
    told = await node.answer({"command": "leaving"})
    assert "relay-3 is the run's only data node: the run ends for everybody" in told["means"]
    assert (told["is_grave"], told["stage"], told["left_s"]) == (True, None, None)
    for other in ({"can_hand_over": True}, {"lacking": ("r1",)}):
        core.facts.leading = SimpleNamespace(**{**vars(monkey), **other})
        told = await node.answer({"command": "leaving"})
        assert (told["means"], told["is_grave"]) == ("", False), other


async def test_the_terminal_of_a_node_that_others_need_counts_down(
    monkeypatch: pytest.MonkeyPatch, node: PipelineNode
) -> None:
    monkeypatch.setattr(module, "COUNT_INTERVAL_S", 0.01)
    lines: list[str] = []
    give_stage(node)
    async with beside(node.requests.count_down(lines.append)):
        await asyncio.sleep(0)
        assert lines == [], "it has not been asked to leave"
        node.requests.leave(40.0)
        node.requests.tell_core()
        await wait_until(lambda: len(lines) > 2)
        assert lines[0].startswith("relay-3 is the last member of stage 2")
        assert lines[1] == "waiting for another member of stage 2: 40 s left"
        give_stage(node, "another")
        num = len(lines)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(lines) <= num + 1, "another serves the stage"

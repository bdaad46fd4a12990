"""What `decod status` tells: every field of docs/status.md, at every stage of a node's life."""

import asyncio
import json
import re
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from decod.daemon import status as module
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.progress_display import progress_text
from decod.daemon.run_facts import facts_of
from decod.errors import NetworkError
from decod.ids import Iteration, NodeId
from decod.journal.run_progress import RecentEvents, RunProgress, merged
from decod.net.channel import banned
from decod.protocol.core.context import Identity, NodeState
from decod.protocol.core.messages import Join, NodeLoad
from decod.protocol.core.view import Member, Role, View
from decod.protocol.facts import NodeFacts
from decod.protocol.leadership.election import ElectionState
from decod.protocol.node_machine import NodeMachine
from decod.run.run_config import Organisation
from tests.support.noted import noted
from tests.unit.daemon.nodes import STRANGER, give_driver, make_node

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "status.md"


def documented_fields() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


async def full_status(node: PipelineNode) -> dict[str, Any]:
    """What the operator of this node is shown."""
    return await node.answer({"command": "status"})


def give_core(node: PipelineNode) -> NodeMachine:
    """Give a node the core that `prepare` would, without what runs it."""
    identity = Identity(
        node_id=node.node_id,
        address="127.0.0.1:7",
        role=node.part.role,
        capacity=2,
        compute_s=1.0,
        name="me",
    )
    run, facts = node.part.run, facts_of(node.part.manifest)
    machine = NodeMachine(identity, run, facts, leader=node.part.leader, rng=Random(1))
    known, stopped = NodeFacts(machine), asyncio.get_running_loop().create_future()
    timing = {"wall_s": 1.0}
    driver = SimpleNamespace(
        facts=known, transfer=None, timing=lambda: timing, stopped=stopped, post=lambda _: None
    )
    give_driver(node, driver)
    return machine


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("running", [True, False])
async def test_a_status_has_the_documented_fields_and_is_json(
    tmp_path: Path, leads: bool, running: bool
) -> None:
    with make_node(tmp_path, leads=leads) as node:
        if running:
            give_core(node).start(0.0)
        status = json.loads(json.dumps(node.local_status(), allow_nan=False))
        assert set(status) == documented_fields()
        assert status["state"] == ("joining" if running else "starting")
        assert status["leader"]["id"] == node.part.leader
        assert len(status["stages"]) == 3


async def test_the_leader_tells_of_candidates(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        machine = give_core(node)
        machine.start(0.0)
        assert machine.leader is not None
        offer = Join(
            address="127.0.0.1:9",
            role=Role.RELAY,
            capacity=3,
            stage_index=None,
            manifest_sha256=node.part.manifest.sha256,
            incarnation=1,
            name="calm-crane",
        )
        machine.leader.join(1.0, STRANGER, offer)
        status = node.local_status()
        told = {candidate["name"]: candidate for candidate in status["candidates"]}
        assert told["calm-crane"]["capacity"] == 3
        json.dumps(status, allow_nan=False)


async def test_paused_nodes_and_stages_that_wait_for_them_are_shown_as_such(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        machine, me = give_core(node), node.node_id
        assert machine.leader is not None
        members = [
            Member(me, "h:1", Role.DATA, 0, 2, 0),
            Member(STRANGER, "h:2", Role.RELAY, 1, 0),
        ]
        view = View.of(members, version=1, leader=me, term=1, num_stages=2)
        machine.context.adopt(view)
        machine.leader.view = view
        for said, shown in (("training", "paused"), ("draining", "draining")):
            machine.leader.seats.told([NodeLoad(STRANGER, 3, 4, 9, said)])
            status = node.local_status()
            (paused,) = status["stages"][1]["nodes"]
            assert (paused["state"], paused["capacity"]) == (shown, 0)
        assert "all members of stage 1 are paused" in status["message"]


@pytest.mark.parametrize(
    ("organisation", "who", "command"),
    [
        (Organisation.PIPELINE, "members", ""),
        (Organisation.SERVERS, "servers", " (decod join --server)"),
    ],
)
async def test_the_leader_says_whom_an_empty_stage_needs(
    organisation: Organisation, who: str, command: str, tmp_path: Path
) -> None:
    with make_node(tmp_path, organisation=organisation) as node:
        machine, me = give_core(node), node.node_id
        assert machine.leader is not None
        assert node.local_status()["message"] == (
            f"waiting for {who}: stage 0 has 0 of 1, stage 1 has 0 of 1, stage 2 has 0 of 1"
            + command
        )
        only = [Member(me, "h:1", Role.DATA, 0, 2, 0)]
        machine.leader.view = View.of(only, version=1, leader=me, term=1, num_stages=2)
        assert node.local_status()["message"] == (f"waiting for {who}: stage 1 has 0 of 1{command}")
        machine.leader.committed = Iteration(1, 0)
        assert node.local_status()["message"] == f"waiting for {who} of stage 1{command}"


def give_view(node: PipelineNode, *, leads: bool) -> NodeMachine:
    """Give a node a core that is in a view with another data node; one of the two leads."""
    machine, me = give_core(node), node.node_id
    members = [
        Member(me, "h:1", Role.DATA if leads else Role.RELAY, 0 if leads else 1, 2, name="otter"),
        Member(STRANGER, "h:2", Role.DATA, 0, 2, name="calm-crane"),
    ]
    leader = me if leads else STRANGER
    view = View.of(members, version=1, leader=leader, term=1, num_stages=2)
    machine.context.adopt(view)
    if machine.leader is not None:
        machine.leader.view = view
    return machine


async def test_a_member_that_can_not_ask_its_leader_says_so_only_if_it_has_not_heard_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that is busy may not answer at once."""

    async def nobody(*_: Any, **__: Any) -> str:
        raise NetworkError("no answer from h:2", why="refused", fix="check it")

    monkeypatch.setattr(module, "ask_status", nobody)
    with make_node(tmp_path, leads=False) as node:
        machine = give_view(node, leads=False)
        machine.leadership.election.leader_watch.heard_s = time.monotonic()
        assert (await full_status(node))["run_state"] == node.local_status()["run_state"]
        machine.leadership.election.leader_watch.heard_s -= 20.0
        status = await full_status(node)
        assert status["run_state"] == "waiting"
        assert status["state"] == status["node"]["state"] == "reconnecting"
        assert re.fullmatch(
            r"nothing has come from the leader, calm-crane \(h:2\), for 2\d s:"
            r" after 60 s me looks for the run again",
            status["message"],
        )


async def test_a_late_leader_leaves_its_last_answer_for_a_while_and_then_the_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused node must not show that the run is paused."""
    answers = [json.dumps({"schema_version": 1, "run_state": "training", "iteration": 7})]

    async def answer_once(*_: Any, **__: Any) -> str:
        if not answers:
            raise NetworkError("no answer from h:2", why="it is late", fix="try again")
        return answers.pop()

    monkeypatch.setattr(module, "ask_status", answer_once)
    with make_node(tmp_path, leads=False) as node:
        machine = give_view(node, leads=False)
        machine.leadership.election.leader_watch.heard_s = time.monotonic()
        monkeypatch.setattr(NodeMachine, "state", NodeState.PAUSED)
        for _ in range(2):
            status = await full_status(node)
            assert (status["run_state"], status["iteration"]) == ("training", 7)
        monkeypatch.setattr(module, "KEPT_MAX_S", -1.0)
        status = await full_status(node)
        assert (status["run_state"], status["state"]) == ("unknown", "paused")
        assert status["message"] == module.NO_ANSWER
        node.progress.message = "iteration 7 is repeated"
        assert (await full_status(node))["message"] == "iteration 7 is repeated"


async def test_a_run_without_a_quorum_does_not_train_and_names_who_is_gone(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        machine = give_view(node, leads=True)
        assert machine.leader is not None
        machine.leader.quorum.wait_for([STRANGER], machine.context.view)
        status = node.local_status()
        assert status["run_state"] == "waiting"
        assert "NO QUORUM: training waits for some of calm-crane" in status["message"]
        campaign = machine.leadership.election.campaign
        campaign.state, campaign.unanswered = ElectionState.STANDING, (STRANGER,)
        status = node.local_status()
        assert (status["run_state"], status["leader"]["electing"]) == ("waiting", True)
        assert "more than half of 2 nodes must agree" in status["message"]
        assert status["message"].endswith("no word yet of calm-crane")


async def test_what_a_node_tells_of_itself_names_it_because_others_show_it_too(
    tmp_path: Path,
) -> None:
    with make_node(tmp_path) as node:
        fields = {"term": 2, "num_votes": 4}
        node.progress.take(noted("leader.elected", fields, 1.0))
        node.recent.take(noted("leader.elected", fields, time.monotonic()))
        status = node.local_status()
        assert status["message"] == "me leads the run in term 2"
        assert status["recent"][0]["text"] == "me leads term 2, by 4 votes"


def test_progress_follows_the_commits() -> None:
    progress, shown = RunProgress(), []
    progress.on_commit.append(lambda: shown.append(progress.iteration))
    progress.take(noted("member.lost", {"reason": "silent"}, 1.0))
    assert progress.message == "silent"
    progress.take(
        noted("step.committed", {"iteration": "3.2", "loss": 2.5, "num_tokens": 100}, 2.0)
    )
    assert (progress.iteration, progress.loss, progress.tokens_per_s) == (3, 2.5, None)
    assert progress.message == "", "what was wrong has been overcome"
    progress.take(
        noted("step.committed", {"iteration": "4.1", "loss": 2.0, "num_tokens": 100}, 4.0)
    )
    assert progress.tokens_per_s == 50.0
    assert shown == [3, 4]


def test_a_run_that_went_back_has_the_loss_of_the_iteration_it_went_back_to() -> None:
    """Not that of the last of those that it gave up."""
    progress = RunProgress()
    returned = {"iteration": 5, "source": "kept", "num_repeated": 4, "reason": "lost"}
    progress.take(noted("run.returned", returned, 1.0))
    assert (progress.iteration, progress.loss) == (5, None), "a newcomer never heard of it"
    for iteration in range(6, 10):
        fields = {"iteration": f"{iteration}.1", "loss": 1 / iteration, "num_tokens": 8}
        progress.take(noted("step.committed", fields, float(iteration)))
    progress.take(noted("iteration.committed", {"num_deferred": 3}, 9.0))
    progress.take(noted("run.returned", returned | {"iteration": 7}, 10.0))
    assert (progress.iteration, progress.loss, progress.num_deferred) == (7, 1 / 7, 0)
    assert progress.message == "lost: back to iteration 7"
    assert progress.loss_of(9) is None, "that iteration is no more"


def committed(progress: RunProgress, iteration: int, loss: float, *, now_s: float) -> None:
    fields = {"iteration": f"{iteration}.1", "loss": loss, "num_tokens": 100}
    progress.take(noted("step.committed", fields, now_s))


def test_the_trend_compares_the_loss_with_the_mean_of_the_iterations_before() -> None:
    progress = RunProgress()
    committed(progress, 1, 900.0, now_s=0.0)
    assert progress.loss_change is None, "there is nothing to compare with"
    for iteration in range(2, 22):
        committed(progress, iteration, 4.0 if iteration % 2 else 2.0, now_s=float(iteration))
    committed(progress, 22, 2.5, now_s=22.0)
    assert progress.loss_change == pytest.approx(-0.5), "the first is too long ago"
    returned = {"iteration": 21, "source": "kept", "num_repeated": 1, "reason": "lost"}
    progress.take(noted("run.returned", returned, 23.0))
    assert progress.loss_change == pytest.approx(4.0 - (900.0 + 10 * 2.0 + 9 * 4.0) / 20)


def test_the_time_left_goes_by_the_last_iterations() -> None:
    endless, progress = RunProgress(), RunProgress(num_iterations=100)
    for number in range(31):
        committed(endless, number + 1, 2.0, now_s=2.0 * number)
        committed(progress, number + 1, 2.0, now_s=2.0 * number)
        assert (progress.left_s is None) == (number == 0)
    assert progress.left_s == pytest.approx(2.0 * 69)
    assert endless.left_s is None, "it goes on until it is stopped"
    returned = {"iteration": 25, "source": "kept", "num_repeated": 6, "reason": "lost"}
    progress.take(noted("run.returned", returned, 100.0))
    committed(progress, 26, 2.0, now_s=200.0)
    assert progress.left_s is None, "the rollback says nothing about the speed"
    committed(progress, 27, 2.0, now_s=204.0)
    assert progress.left_s == pytest.approx(4.0 * 73)


def test_a_line_of_progress_holds_all_that_is_known() -> None:
    progress = RunProgress(num_iterations=3)
    committed(progress, 1, 5.5, now_s=0.0)
    assert progress_text(progress) == "iteration 1 of 3  loss 5.5000  -"
    committed(progress, 2, 5.25, now_s=150.0)
    text = "iteration 2 of 3  loss 5.2500 (-0.2500)  1 tokens/s  2 m left"
    assert progress_text(progress) == text
    committed(progress, 3, 5.75, now_s=300.0)
    assert progress_text(progress) == "iteration 3 of 3  loss 5.7500 (+0.3750)  1 tokens/s"


def test_only_the_newest_losses_are_kept() -> None:
    progress = RunProgress()
    for iteration in range(1, 5000):
        fields = {"iteration": f"{iteration}.1", "loss": 1 / iteration, "num_tokens": 8}
        progress.take(noted("step.committed", fields, float(iteration)))
    assert progress.loss_of(4500) == 1 / 4500
    assert progress.loss_of(1) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", "{}", '{"schema_version": 9}', "[" * 99_999, '{"schema_version": 1}'],
)
async def test_a_leader_that_tells_nonsense_leaves_what_the_node_knows(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(*_: Any, **__: Any) -> str:
        return text

    monkeypatch.setattr(module, "ask_status", tell)
    with make_node(tmp_path, leads=False) as node:
        assert await full_status(node) == node.local_status()


async def test_a_banned_node_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> str:
        raise banned("banned by calm-crane for ever: it lies")

    monkeypatch.setattr(module, "ask_status", refuse)
    with make_node(tmp_path, leads=False) as node:
        assert "calm-crane for ever: it lies" in (await full_status(node))["message"]


async def test_a_volunteer_shows_the_leaders_view_and_its_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "schema_version": 1,
        "run_state": "training",
        "iteration": 7,
        "loss": 1.5,
        "stages": "not a list",
        "state": "joining",
        "node": {"id": NodeId("x")},
        "flows": [{"data_node": "x", "slot": 0, "path": ["x", "y"], "costs_s": [0.1]}],
        "made_up": 1,
        "join_string": "theirs",
        "states": {"kept": [{"stage_index": 0, "iteration": 7}], "problem": "their disk is full"},
        "syncing": {"percent": 3},
    }

    async def tell(*_: Any, **__: Any) -> str:
        return json.dumps(told)

    monkeypatch.setattr(module, "ask_status", tell)
    with make_node(tmp_path, leads=False) as node:
        own, status = node.local_status(), await full_status(node)
        assert (status["run_state"], status["iteration"], status["loss"]) == (
            "training",
            7,
            1.5,
        )
        mine = ("node", "state", "flows", "join_string", "stages", "counters")
        for key in (*mine, "states", "syncing"):
            assert status[key] == own[key], key
        assert "made_up" not in status


async def test_what_was_not_routine_is_told_with_names_and_age(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        node.gateway.book.remember_name(STRANGER, "brave-otter")
        node.note("iteration.opened", iteration="2.1", num_members=3, view_version=1)
        assert node.local_status()["recent"] == [], "routine"
        for _ in range(3):
            node.note("member.lost", peer=STRANGER, reason="timeout")
        node.note("iteration.mended", iteration="2.1", reason="lost brave-otter (timeout)")
        lost, mended = node.local_status()["recent"]
        assert lost["text"] == f"brave-otter ({STRANGER[:8]}) is gone: timeout"
        assert mended["event"] == "iteration.mended"
        assert "others do its part again" in mended["text"]
        assert 0 <= mended["age_s"] <= lost["age_s"] < 60


def test_what_two_nodes_tell_is_told_once_and_oldest_first() -> None:
    own = [{"age_s": 9.0, "event": "a", "text": "both"}, {"age_s": 1.0, "event": "b", "text": "me"}]
    told = [{"age_s": 8.5, "text": "both"}, {"age_s": 4, "text": "leader"}, {"text": "ageless"}, 5]
    assert [one["text"] for one in merged(told, own)] == ["both", "leader", "me"]


def test_only_the_last_happenings_are_kept_and_not_for_ever() -> None:
    happenings = RecentEvents(dict)
    for k in range(20):
        happenings.take(noted("member.lost", {"peer": f"n{k}", "reason": "gone"}, float(k)))
    told = happenings.describe(20.0, name="otter")
    assert [one["age_s"] for one in told] == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert len(happenings.describe(617.5, name="otter")) == 2


@pytest.mark.parametrize("event", ["state.unkept", "checkpoint.failed"])
def test_what_comes_again_until_somebody_acts_does_not_hide_the_rest(event: str) -> None:
    happenings = RecentEvents(dict)
    happenings.take(noted("member.lost", {"peer": "n", "reason": "gone"}, 0.0))
    for k in range(20):
        fields = {"stage": k % 2, "iteration": k, "reason": "the disk is full"}
        happenings.take(noted(event, fields, float(k)))
    lost, unkept = happenings.describe(20.0, name="otter")
    assert lost["event"] == "member.lost"
    assert unkept["age_s"] == 1.0

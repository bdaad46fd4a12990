"""Which cut suits the members, and what the operator is told."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.daemon.recutting import Recutting
from decod.errors import ConfigError, RejectedError
from decod.ids import NodeId
from decod.planner.cost import Link
from decod.protocol.core.events import RecutRequested
from decod.protocol.core.link_table import LinkTable, RemoteLinks, Terms
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member, Role, View
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import RecutPolicy

ME, FAST, SLOW = (NodeId(letter * 8) for letter in "mab")
RUN = replace(RunConfig(), model=replace(RunConfig().model, num_hidden_layers=8))
MUCH = 1 << 40


class Scene:
    """A leader with a relay in each of two stages, of which one is three times as fast."""

    def __init__(self, *, memory_bytes: int = MUCH, run: RunConfig = RUN) -> None:
        links = LinkTable(activation_size_bytes=1000, compute_s=0.5)
        for node, compute_s in ((FAST, 0.1), (SLOW, 0.3)):
            links.reported(node, Terms(Link(0.02, 2e6), compute_s))
        members = tuple(
            Member(
                node,
                "h:1",
                Role.RELAY if stage else Role.DATA,
                stage,
                capacity=3,
                data_node_index=-1 if stage else 0,
                name=("", "fast", "slow")[stage],
            )
            for stage, node in enumerate((ME, FAST, SLOW))
        )
        view = View(version=1, leader=ME, term=1, num_stages=3, members=members)
        self.loads = {
            node: NodeLoad(node, 1, 3, 0, "training", memory_bytes=memory_bytes)
            for node in (FAST, SLOW)
        }
        self.leading: Any = SimpleNamespace(
            candidates={},
            view=view,
            loads=self.loads,
            recut=False,
            recut_marked=False,
            waits_for_stage=False,
        )
        self.facts: Any = SimpleNamespace(
            node_id=ME, view=view, links=links, remote_links=RemoteLinks(), leading=self.leading
        )
        self.posted: list[object] = []
        self.notes: list[str] = []
        core: Any = SimpleNamespace(
            facts=self.facts,
            leading=self.leading,
            driver=SimpleNamespace(post=self.posted.append),
        )
        self.core = core
        self.recutting = Recutting(run, core, lambda event, **_: self.notes.append(event))

    def ask(self, **asked: object) -> dict[str, Any]:
        return asyncio.run(self.recutting.commands()["recut"](asked))


def test_a_faster_host_gets_more_blocks() -> None:
    scene = Scene()
    found = scene.recutting.recommended()
    assert found is not None
    assert found.cut == (6, 2)
    assert found.gain == pytest.approx(1.0)
    answer = scene.ask()
    assert (answer["before"], answer["blocks"], answer["changed"]) == ([4, 4], [6, 2], True)
    assert answer["moved_bytes"] == found.moved_bytes > 0
    assert scene.posted == [RecutRequested((6, 2))]
    assert scene.notes == ["recut.begun"]


def test_no_host_gets_more_than_it_has_room_for() -> None:
    run = RUN.with_blocks((5, 3))
    needs = stage_needs(run, 1)
    room = needs.device_bytes + needs.held_bytes(3)
    found = Scene(memory_bytes=room).recutting.recommended()
    assert found is not None
    assert found.cut == (5, 3)
    # Who has not told its memory keeps what it has.
    assert Scene(memory_bytes=0).recutting.recommended() is None


def test_a_small_gain_is_not_worth_it() -> None:
    scene = Scene()
    scene.facts.links.reported(FAST, Terms(Link(0.02, 2e6), 0.29))
    assert scene.recutting.recommended() is None
    assert scene.ask()["changed"] is False
    assert scene.posted == []
    assert scene.recutting.describe()["recommended"] is None


def test_a_given_cut_is_used_if_it_can_be() -> None:
    scene = Scene(memory_bytes=0)
    assert scene.ask(blocks="1, 7")["blocks"] == [1, 7]
    assert scene.posted == [RecutRequested((1, 7))]
    assert scene.ask(blocks="8")["blocks"] == [8]
    with pytest.raises(RejectedError, match="too few relays for 3 stages"):
        scene.ask(blocks="2,3,3")
    for text in ("1,6", "9", "0,8", "x", ""):
        with pytest.raises(ConfigError, match=r"stages\.blocks"):
            scene.ask(blocks=text)
    crowded = Scene(memory_bytes=1)
    with pytest.raises(RejectedError, match="slow has no room for 7 blocks in stage 2"):
        crowded.ask(blocks="1,7")


def test_the_relays_that_are_left_take_the_blocks_of_a_stage_that_is_lost() -> None:
    auto = replace(RUN, stages=replace(RUN.stages, recut=RecutPolicy.AUTO))
    scene = Scene(run=auto)
    lost = tuple(m for m in scene.facts.view.members if m.node_id != SLOW)
    scene.facts.view = scene.leading.view = replace(scene.facts.view, members=lost)
    scene.recutting._look()
    assert scene.posted == []
    scene.leading.waits_for_stage = True
    scene.recutting._look()
    assert scene.posted == [RecutRequested((8,))]


def test_what_can_not_be_is_refused() -> None:
    scene = Scene()
    scene.leading.recut = True
    assert scene.recutting.recommended() is None
    assert scene.ask()["changed"], "another cut may take the place of one that only waits"
    scene.leading.recut_marked = True
    with pytest.raises(RejectedError, match="under way"):
        scene.ask()
    scene.core.leading = None
    with pytest.raises(RejectedError, match="does not lead"):
        scene.ask()
    served = Scene(run=replace(RUN, organisation=Organisation.SERVERS))
    with pytest.raises(RejectedError, match="servers"):
        served.ask()
    unknown = Scene()
    unknown.facts.links = LinkTable(activation_size_bytes=1000, compute_s=0.5)
    with pytest.raises(RejectedError, match="not known yet"):
        unknown.ask()

"""Who holds an iteration up, and which links, by what members say."""

from typing import Any

import pytest

from decod.daemon.status import (
    COMPUTING,
    NAMED_MAX,
    SENDING,
    describe_slow,
    mark_links,
    slow_members,
)
from decod.ids import NodeId
from decod.protocol.core.durations import IterationTimes
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member, Role

NODES = [NodeId(letter * 52) for letter in "abcdef"]


def member(node: NodeId) -> Member:
    return Member(node, "h:1", Role.RELAY, 1, 2, name=node[0])


def found(times: dict[NodeId, tuple[float, float, float] | None]) -> list[dict[str, Any]]:
    loads = {
        node: NodeLoad(node, 1, 1, 1, "training", times=each and IterationTimes(*each))
        for node, each in times.items()
    }
    return describe_slow(slow_members([member(node) for node in [*times, NODES[5]]], loads))


def names(times: dict[NodeId, tuple[float, float, float] | None]) -> list[str]:
    return [each["name"] for each in found(times)]


A, B, C, D, E, _ = NODES


def test_who_is_busy_while_the_others_wait_is_named_with_the_reason() -> None:
    slow = {A: (9.0, 1.0, 2.0), B: (2.0, 8.0, 1.0), C: (3.0, 7.0, 1.0), D: None}
    assert found(slow) == [
        {
            "id": A,
            "name": "a",
            "stage_index": 1,
            "by": COMPUTING,
            "share": 0.9,
            "usual_share": 0.25,
        }
    ]
    (sender,) = found({A: (1.0, 9.0, 8.0), B: (2.0, 8.0, 1.0), C: (3.0, 7.0, 1.0)})
    assert (sender["by"], sender["share"]) == (SENDING, 0.8)


@pytest.mark.parametrize(
    "times",
    [
        {},
        {A: (9.0, 1.0, 0.0)},
        {A: (9.0, 1.0, 0.0), B: None},
        {A: (9.0, 1.0, 0.0), B: (8.0, 2.0, 0.0)},
        {A: (4.0, 6.0, 0.0), B: (1.0, 9.0, 0.0)},
        {A: (0.0, 0.0, 5.0), B: (1.0, 9.0, 0.0), C: (1.0, 9.0, 0.0)},
    ],
)
def test_nobody_is_named_whom_the_numbers_do_not_accuse(
    times: dict[NodeId, tuple[float, float, float] | None],
) -> None:
    assert names(times) == []


def test_a_liar_accuses_nobody_and_hides_nobody() -> None:
    honest = {B: (9.0, 1.0, 0.0), C: (1.0, 9.0, 0.0), D: (1.0, 9.0, 0.0)}
    assert names(honest) == ["b"]
    for lie in [(604_800.0, 0.0, 604_800.0), (0.0, 604_800.0, 0.0), (0.0, 1e-300, 604_800.0)]:
        told = names({A: lie, **honest})
        assert "b" in told
        assert not {"c", "d"} & {*told}


def test_few_are_named() -> None:
    times = dict.fromkeys((A, B, C, D), (9.0, 1.0, 0.0))
    more = {NodeId(letter * 52): (1.0, 9.0, 0.0) for letter in "uvwxyz"}
    assert names({**times, **more}) == ["a", "b", "c"]
    assert NAMED_MAX == 3


def link(begin: str, end: str, flows: int, bandwidth: float | None) -> dict[str, Any]:
    return {
        "from": NodeId(begin * 52),
        "to": NodeId(end * 52),
        "num_flows": flows,
        "cost_s": 0.5,
        "latency_s": None if bandwidth is None else 0.0,
        "bandwidth_bytes_per_s": bandwidth,
    }


def marked(links: list[dict[str, Any]], times: dict[NodeId, Any]) -> list[tuple[str, str]]:
    loads = {
        node: NodeLoad(node, 1, 1, 1, "training", times=IterationTimes(*each))
        for node, each in times.items()
    }
    slow = slow_members([member(node) for node in times], loads)
    mark_links(links, slow, 1_000_000)
    return [(each["from"][0], each["to"][0]) for each in links if each["holds_up"]]


def test_a_link_is_marked_if_it_makes_the_iteration_longer_and_not_if_it_is_only_slow() -> None:
    links = [
        link("a", "b", 4, 1e5),
        link("a", "c", 4, 1e8),
        link("a", "d", 0, 1e3),
        link("b", "a", 1, 1e4),
    ]
    held_up = {A: (1.0, 9.0, 9.0), B: (2.0, 8.0, 1.0), C: (3.0, 7.0, 1.0)}
    assert marked(links, held_up) == [("a", "b")]
    waiting = {A: (3.0, 7.0, 2.0), B: (2.0, 8.0, 3.0), C: (3.0, 7.0, 1.0)}
    assert marked(links, waiting) == []
    computing = {A: (9.0, 1.0, 5.0), B: (2.0, 8.0, 1.0), C: (3.0, 7.0, 1.0)}
    assert marked(links, computing) == []


def test_a_link_that_nobody_measured_counts_by_its_cost() -> None:
    held_up = {A: (1.0, 9.0, 9.0), B: (2.0, 8.0, 1.0), C: (3.0, 7.0, 1.0)}
    assert marked([link("a", "b", 4, None), link("a", "c", 1, None)], held_up) == [("a", "b")]

"""What the page shows of a run: its state now, and what has happened since the reader last looked.

The status may come from another node, so each value is checked here: texts are cleaned, values of
the wrong type are null. It holds neither join strings nor addresses of other nodes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from decod.daemon.page.shared_run import as_run_status
from decod.ids import NodeId
from decod.journal.credit import credit_of
from decod.journal.history import TEXTS_TOLD_MAX, TOLD_MAX, ModelText, RunEvent, RunHistory
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.journal.told_status import mapping_in, number_in, sequence_in, slow_texts, spent_text
from decod.texts import clean_text

Status = Mapping[str, Any]

FRESH_S = 0.5
"""How old a leader's status may be. Readers share it."""

_OTHERS_FRESH_MIN_S, _OTHERS_FRESH_MAX_S = 2.0, 10.0
_ASKS_MAX_PER_S = 20
"""How often all other nodes together ask the leader, if all of them have readers."""

MEMBERS_MAX = 5000
LINKS_MAX = 20_000
FORMER_SHOWN_MAX = 200
_RECENT_MAX = 16
_AWAITED_MAX = 8
_ID_LENGTH = 8

_NODE_NUMBERS = ("capacity", "flows", "microbatches", "memory_bytes", "since_iteration")
_RUN_NUMBERS = (
    *("iteration", "num_iterations", "loss", *STEP_METRIC_NAMES),
    *("tokens_per_s", "num_tokens", "age_s", "left_s", "num_newcomers"),
)
_OWN_TEXTS = ("name", "role", "device", "state", "address")


class PageFeed:
    """Gives all readers of the page what it shows.

    Args:
        ask: Returns the status, or None if there is no node yet.
        history: What has happened in the run.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, Any] | None]],
        history: RunHistory,
        clock: Callable[[], float],
    ) -> None:
        self.history = history
        self._ask, self._clock = ask, clock
        self._asking: asyncio.Task[Status] | None = None
        self.num_looks = 0
        """How often the node was asked. The page's present changes only then."""
        self._state: dict[str, Any] = {}
        self._status: Status = {}
        self._next_s = float("-inf")

    async def status(self) -> Status:
        """Return the status, at most as old as is right for this node. Empty: no node yet."""
        if self._asking is None and self._clock() >= self._next_s:
            self._asking = asyncio.ensure_future(self._refreshed())
            self._asking.add_done_callback(self._asked)
        if self._asking is not None:
            # A reader who goes must not take the answer from the others.
            return await asyncio.shield(self._asking)
        return self._status

    def _asked(self, asking: "asyncio.Task[Status]") -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # Each reader has got it, and there may be none left.

    async def _refreshed(self) -> Status:
        status: Status = await self._ask() or {}
        self._status = as_run_status(status) if "collaboration" in status else status
        curve = mapping_in(self._status, "curve")
        # At the leader itself these are its own points, so nothing in them is new.
        self.history.learn(_points(curve, "steps", 4), _points(curve, "held_out", 2), _texts(curve))
        self._state = page_state(self._status, self.history)
        self.num_looks += 1
        self._next_s = self._clock() + _fresh_s(self._status, len(self._state["members"]))
        return self._status

    async def since(
        self, generation: str, num_steps: int, num_events: int, rest: str = ""
    ) -> dict[str, Any]:
        """Return the run's state, and what a reader lacks of its history (`RunHistory.since`)."""
        await self.status()
        news = self.history.since(generation, num_steps, num_events, rest)
        events = [_event(one) for one in news.pop("events")]
        return {**self._state, "history": {**news, "events": events}}


def public_news(news: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the world may see: no address, nothing of the node, and no text that has one."""
    history = news["history"]
    return {
        **news,
        "public": True,
        "run": {**news["run"], "message": "", "waits": []},
        "node": {**dict.fromkeys(news["node"]), "decod_version": news["node"]["decod_version"]},
        "members": [{**one, "own": False} for one in news["members"]],
        "recent": [],
        "history": {
            **history,
            "events": [
                one if one["kind"] == "recut" else {**one, "reason": ""}
                for one in history["events"]
            ],
        },
    }


def _fresh_s(status: Status, num_members: int) -> float:
    """Return how long a status may be shown. All but the leader ask the leader for theirs."""
    if mapping_in(status, "leader").get("id") == mapping_in(status, "node").get("id"):
        return FRESH_S
    wanted_s = num_members / _ASKS_MAX_PER_S
    return min(max(wanted_s, _OTHERS_FRESH_MIN_S), _OTHERS_FRESH_MAX_S)


def page_state(status: Status, history: RunHistory) -> dict[str, Any]:
    """Return what the page shows of the present. Links name members by their place in the list."""
    own, leader = mapping_in(status, "node"), mapping_in(status, "leader")
    members, places = _members(status, history)
    held_out = mapping_in(mapping_in(status, "evaluation"), "last")
    return {
        "started": "node" in status,
        "run": {
            "name": _text(status, "run_name"),
            "id": _text(status, "run_id"),
            "state": _text(status, "run_state"),
            "message": _text(status, "message"),
            "organisation": _text(status, "organisation"),
            "leader": _text(leader, "name"),
            "slow": slow_texts(status),
            "waits": [
                {"what": _text(one, "what"), "age_s": number_in(one, "age_s")}
                for one in sequence_in(status, "waits")
            ],
            "electing": leader.get("electing") is True,
            "checkpoint": number_in(mapping_in(status, "checkpoint"), "iteration"),
            "held_out_loss": number_in(held_out, "loss"),
            "held_out_perplexity": number_in(held_out, "perplexity"),
            "texts_share": number_in(mapping_in(status, "texts"), "share"),
            "num_candidates": len(sequence_in(status, "candidates")),
            **{name: number_in(status, name) for name in _RUN_NUMBERS},
        },
        "node": _own_node(status, own),
        "num_stages": len(sequence_in(status, "stages")),
        "members": members,
        "links": _links(status, places),
        "former": [
            {
                "name": clean_text(one.name),
                "stage": one.stage_index,
                "microbatches": one.num_microbatches,
            }
            for one in history.former()[-FORMER_SHOWN_MAX:]
            if one.node_id not in places
        ],
        "recent": [
            {"age_s": number_in(one, "age_s"), "text": _text(one, "text")}
            for one in sequence_in(status, "recent")[-_RECENT_MAX:]
        ],
    }


def _own_node(status: Status, own: Status) -> dict[str, Any]:
    contributed, syncing = mapping_in(status, "contributed"), mapping_in(status, "syncing")
    credit = credit_of(mapping_in(status, "credit"))
    return {
        **{name: _text(own, name) for name in _OWN_TEXTS},
        "id": _text(own, "id")[:_ID_LENGTH],
        "stage": number_in(own, "stage_index"),
        "capacity": number_in(own, "capacity"),
        "in_run_s": number_in(own, "in_run_s"),
        "microbatches": number_in(contributed, "num_microbatches"),
        "tokens": number_in(contributed, "num_tokens"),
        "credit": f"You did {credit}" if credit.num_microbatches else "",
        "syncing_percent": number_in(syncing, "percent"),
        "disk_problem": _text(mapping_in(status, "states"), "problem"),
        "decod_version": _text(status, "decod_version"),
    }


def _members(status: Status, history: RunHistory) -> tuple[list[dict[str, Any]], dict[object, int]]:
    """Return the members, stage after stage, and the place of each in the list by its id."""
    own_id, leader_id = mapping_in(status, "node").get("id"), mapping_in(status, "leader").get("id")
    slow = {NodeId(str(one.get("id"))) for one in sequence_in(status, "slow")}
    members: list[dict[str, Any]] = []
    places: dict[object, int] = {}
    for index, stage in enumerate(sequence_in(status, "stages")):
        for node in sequence_in(stage, "nodes"):
            node_id = NodeId(str(node.get("id")))
            if len(members) >= MEMBERS_MAX or node_id in places:
                continue
            places[node_id] = len(members)
            numbers = {name: number_in(node, name) for name in _NODE_NUMBERS}
            done = history.total(node_id)
            members.append(
                {
                    "id": clean_text(node_id)[:_ID_LENGTH],
                    "name": _text(node, "name") or clean_text(node_id)[:_ID_LENGTH],
                    "stage": index,
                    "role": _text(node, "duty") or _text(node, "role"),
                    "state": "lost" if node_id in history.lost else _text(node, "state"),
                    **numbers,
                    "microbatches": max((numbers["microbatches"], done), key=lambda n: n or 0),
                    "spends": spent_text(node),
                    "device": _text(node, "device"),
                    "version": _text(node, "decod_version"),
                    "reach": _text(node, "reach"),
                    "waits_for": [
                        clean_text(each)[:_ID_LENGTH] for each in _strings(node.get("waits_for"))
                    ],
                    "holds_up": node_id in slow,
                    "own": node_id == own_id,
                    "leads": node_id == leader_id,
                }
            )
    return members, places


def _links(status: Status, places: Mapping[object, int]) -> list[dict[str, Any]]:
    links = []
    for link in sequence_in(status, "links")[:LINKS_MAX]:
        begin, end = places.get(str(link.get("from"))), places.get(str(link.get("to")))
        if begin is not None and end is not None:
            links.append(
                {
                    "from": begin,
                    "to": end,
                    "flows": number_in(link, "num_flows"),
                    "holds_up": link.get("holds_up") is True,
                    "cost_s": number_in(link, "cost_s"),
                    "latency_s": _short(number_in(link, "latency_s")),
                    "bytes_per_s": _short(number_in(link, "bandwidth_bytes_per_s")),
                }
            )
    return links


def _points(curve: Mapping[str, Any], name: str, size: int) -> list[Any]:
    """Return the points of a curve that another node tells. What is no number is None."""
    found = curve.get(name)
    rows = found[:TOLD_MAX] if isinstance(found, list) else []
    rows = [row for row in rows if isinstance(row, list) and len(row) == size]
    points = [[number_in({"": each}, "") for each in row] for row in rows]
    # A step may have no loss and no rate.
    return [row for row in points if None not in row[:2]]


def _texts(curve: Mapping[str, Any]) -> list[ModelText]:
    """Return the texts that another node tells."""
    found = curve.get("texts")
    rows = found[:TEXTS_TOLD_MAX] if isinstance(found, list) else []
    return [
        (row[0], clean_text(row[1], limit=500), clean_text(row[2], limit=500))
        for row in rows
        if isinstance(row, list) and len(row) == 3 and isinstance(row[0], int)
    ]


def _event(one: RunEvent) -> dict[str, Any]:
    return {
        "time_s": one.time_s,
        "kind": one.kind,
        "iteration": one.iteration,
        "name": clean_text(one.name),
        "stage": one.stage_index,
        "reason": clean_text(one.reason),
        "cost_s": one.cost_s,
    }


def _short(number: float | None) -> float | None:
    """Return a number with three digits: more would only be bytes."""
    return None if number is None else float(f"{number:.3g}")


def _strings(value: object) -> list[str]:
    found = value[:_AWAITED_MAX] if isinstance(value, list) else []
    return [each for each in found if isinstance(each, str)]


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "" if value is None else clean_text(value, limit=500)

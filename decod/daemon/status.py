"""The status for `decod status`, one JSON object. Fields are only ever added. See
docs/status.md."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from decod import __version__
from decod.daemon.control import SCHEMA_VERSION
from decod.daemon.recent_events import THIS_NODE, merged
from decod.daemon.run_facts import RunPart
from decod.daemon.succession import KnownLeader
from decod.driver.fetching import outlook
from decod.errors import DecodError, NetworkError
from decod.ids import NodeId, iteration_of
from decod.net.ask import ask_status
from decod.protocol.core.identity import NodeState
from decod.protocol.core.view import View
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.train.checkpoint.transfer import Transfer

_REASONED = frozenset(
    (
        "iteration.aborted",
        "member.lost",
        "member.aside",
        "peer.suspected",
        "state.failed",
        "following.failed",
        "candidate.refused",
    )
)
"""Events whose reason is shown until the next commit."""

WAITING = "waiting"
"""State of a run without a leader that has a quorum, as far as this node knows."""

RECONNECTING = "reconnecting"
"""State of a node that was in the run, and is out of it or may be."""

_ASK_TIMEOUT_S = 0.3
"""Timeout of asking the leader. After it, a node shows its own status."""

_LOSSES_MAX = 1000
"""Iterations whose loss is remembered, since the run may roll back to one of them."""


@dataclasses.dataclass(slots=True)
class RunProgress:
    """The run's progress, according to the node's notes."""

    iteration: int = 0
    """The last committed iteration."""
    loss: float | None = None
    """Loss of that iteration. None before the first, and if this node was not there."""
    gradient_norm: float | None = None
    """Norm of that iteration's gradient over all stages, if it is clipped and known here."""
    tokens_per_s: float | None = None
    message: str = ""
    """The last event since then that was not routine."""
    num_deferred: int = 0
    """At the leader: microbatches that were deferred to the next iteration."""
    on_commit: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Called after each commit."""
    on_return: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Called when the run has rolled back to `iteration`."""
    on_stage_ending: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Called at the leader when the last member of a stage wants to leave."""
    _committed_s: float | None = None
    _losses: dict[int, float] = dataclasses.field(default_factory=dict)
    """Losses of the newest iterations that this node saw committed, the oldest first."""

    def loss_of(self, iteration: int) -> float | None:
        """Return an iteration's loss, or None if this node does not know it."""
        return self._losses.get(iteration)

    def take(self, event: str, fields: dict[str, Any], *, now_s: float) -> None:
        """Take in one note."""
        if event == "iteration.committed" and "num_deferred" in fields:
            # The leader's note of its decision. Every member notes the commit itself too.
            self.num_deferred = int(fields["num_deferred"])
        elif event == "iteration.committed":
            if self._committed_s is not None:
                self.tokens_per_s = fields["num_tokens"] / max(1e-9, now_s - self._committed_s)
            self._committed_s = now_s
            self.loss, self.gradient_norm = fields["loss"], fields.get("gradient_norm")
            self.iteration = iteration_of(str(fields["iteration"]))
            self._losses[self.iteration] = fields["loss"]
            if len(self._losses) > _LOSSES_MAX:
                del self._losses[next(iter(self._losses))]
            self.message = ""
            _call_all(self.on_commit)
        elif event == "leader.elected":
            self.message = f"{THIS_NODE} leads the run in term {fields['term']}"
        elif event in _REASONED:
            self.message = str(fields.get("reason", ""))
        elif event == "member.leaving":
            self.message = f"{str(fields.get('peer'))[:8]} is leaving: {fields.get('reason')}"
        elif event == "run.returned":
            self.iteration = int(fields["iteration"])
            self._losses = {i: loss for i, loss in self._losses.items() if i <= self.iteration}
            self.loss, self.num_deferred = self.loss_of(self.iteration), 0
            self.gradient_norm = None
            self.message = f"{fields['reason']}: back to iteration {self.iteration}"
            _call_all(self.on_return)
        elif event == "stage.ending":
            stage = fields.get("stage")
            self.message = f"the last member of stage {stage} is leaving: it needs another"
            _call_all(self.on_stage_ending)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """What a daemon knows beside its node's core, for its status."""

    part: RunPart
    node_id: NodeId
    name: str
    address: str
    device: str
    leader: KnownLeader
    progress: RunProgress
    reconnecting: bool
    """This node was in the run before, and is on its way back."""
    transfer: Transfer | None
    """Progress of the state that is being fetched."""
    checkpoint: dict[str, Any] | None
    """At the leader: its checkpoints."""
    states: dict[str, Any]
    """The states on this host's disk."""
    join_string: str | None
    counters: dict[str, int]
    timing: dict[str, float]
    recent: list[dict[str, Any]]


def status_of(daemon: DaemonFacts, facts: NodeFacts | None) -> dict[str, Any]:
    """Return the status as this node knows it. The leader's covers the whole run.

    Args:
        daemon: What the daemon knows.
        facts: What the core knows; None before it has started.
    """
    part, progress, leader = daemon.part, daemon.progress, daemon.leader
    run = part.manifest.run
    num_stages = run.stages.num_relay_stages + 1
    state = facts.state.value if facts is not None else "starting"
    me = {
        "id": daemon.node_id,
        "name": daemon.name,
        "address": daemon.address,
        "role": part.role.value,
        "stage_index": facts.own_stage if facts is not None and facts.in_view else None,
        "capacity": facts.load.capacity if facts is not None else None,
        "device": daemon.device,
        "device_free": False,
        "state": RECONNECTING if daemon.reconnecting else state,
    }
    leading = facts.leading if facts is not None else None
    return {
        "schema_version": SCHEMA_VERSION,
        "decod_version": __version__,
        "run_id": part.run_id,
        "run_name": run.name,
        "run_state": _run_state(facts, leading),
        "state": me["state"],
        "iteration": progress.iteration,
        "loss": progress.loss,
        "gradient_norm": progress.gradient_norm,
        "tokens_per_s": progress.tokens_per_s,
        "data": _data(facts),
        "leader": {
            "id": leader.node_id,
            "name": leader.name,
            "address": leader.address,
            "term": leader.term,
            "electing": leader.electing,
        },
        "node": me,
        "stages": [{"index": index, "nodes": []} for index in range(num_stages)]
        if facts is None
        else _stages(facts, leading),
        "flows": _flows(facts) if facts is not None else [],
        "candidates": _candidates(leading) if leading is not None else [],
        "checkpoint": daemon.checkpoint,
        "states": daemon.states,
        "syncing": _syncing(facts, daemon.transfer),
        "rebuilt": _rebuilt(leading),
        "join_string": daemon.join_string,
        "counters": daemon.counters,
        "timing": daemon.timing,
        "message": _message(facts, leading, progress).replace(THIS_NODE, daemon.name),
        "recent": daemon.recent,
    }


def _data(facts: NodeFacts | None) -> dict[str, int] | None:
    if facts is None:
        return None
    return {"num_skipped": facts.num_skipped, "num_deferred": facts.num_deferred}


def _run_state(facts: NodeFacts | None, leading: LeaderFacts | None) -> str:
    if facts is None:
        return "starting"
    if facts.electing or (leading is not None and leading.lacking):
        return WAITING
    return leading.state.value if leading is not None else facts.state.value


def _message(facts: NodeFacts | None, leading: LeaderFacts | None, progress: RunProgress) -> str:
    if facts is not None and facts.electing:
        return _election(facts)
    if leading is None:
        return progress.message
    if leading.lacking:
        gone = _names_of(leading.lacking, leading.view)
        return f"NO QUORUM: training waits for some of {gone}, who are gone"
    view = leading.view
    if leading.rebuilding:
        return leading.rebuilding
    if view.empty_stages:
        missing = ", ".join(str(stage) for stage in view.empty_stages)
        return f"waiting for members of stage {missing}"
    if view.idle_stages:
        paused = ", ".join(str(stage) for stage in view.idle_stages)
        return f"all members of stage {paused} are paused: the run waits for one to resume"
    return progress.message


def _election(facts: NodeFacts) -> str:
    """Return a text on the progress of this node's search for another leader."""
    text = "the leader is silent: another is being elected"
    if not facts.unanswered:
        return text
    wanted = f"more than half of {len(facts.view.members)} nodes must agree"
    return f"{text}; {wanted}, and no word yet of {_names_of(facts.unanswered, facts.view)}"


def _names_of(nodes: Sequence[NodeId], view: View) -> str:
    return ", ".join(view.by_id[node].label if node in view else node[:8] for node in nodes)


async def full_status(
    own: dict[str, Any], facts: NodeFacts | None, *, rejoins: bool
) -> dict[str, Any]:
    """Return the leader's status with this node's own parts, or else this node's status.

    Args:
        own: This node's status.
        facts: What its core knows.
        rejoins: Whether this node looks for the run again when the leader stays silent.
    """
    leader, node_id = own["leader"], own["node"]["id"]
    if leader["id"] == node_id or not leader["address"]:
        return own
    try:
        text = await ask_status(leader["address"], own["run_id"], node_id, timeout_s=_ASK_TIMEOUT_S)
        status = json.loads(text)
    except NetworkError:
        return _without_leader(own, facts, rejoins=rejoins)
    except (DecodError, ValueError, RecursionError):
        return own
    if not isinstance(status, dict) or status.get("schema_version") != own["schema_version"]:
        return own
    # Its own flows too: it knows its hops from the first flow on, the leader knows flows later.
    mine = ("node", "state", "flows", "states", "syncing", "counters", "timing", "join_string")
    best = {key: _better(own[key], None if key in mine else status.get(key)) for key in own}
    return best | {"recent": merged(best["recent"], own["recent"])}


def _better(own: Any, told: Any) -> Any:
    """Return the leader's value, unless it is None or of another type than this node's."""
    if told is None or (own is not None and not isinstance(told, type(own))):
        return own
    return told


def _without_leader(
    own: dict[str, Any], facts: NodeFacts | None, *, rejoins: bool
) -> dict[str, Any]:
    """Return a node's own status for the case that the leader has not answered.

    If nothing has come from the leader for `heartbeat_timeout_s`, the status says so.
    """
    if facts is None or not facts.in_view or facts.electing:
        return own
    config = facts.config
    silent_s = asyncio.get_running_loop().time() - facts.leader_heard_s
    if silent_s <= config.heartbeat_timeout_s:
        return own
    leader, name = own["leader"], own["node"]["name"]
    message = (
        f"nothing has come from the leader, {leader['name']} ({leader['address']}), for"
        f" {silent_s:.0f} s: after {config.leader_timeout_s:g} s {name} "
        + ("looks for the run again" if rejoins else "leaves the run")
    )
    me = {**own["node"], "state": RECONNECTING}
    return {**own, "run_state": WAITING, "state": RECONNECTING, "node": me, "message": message}


def _stages(facts: NodeFacts, leading: LeaderFacts | None) -> list[dict[str, Any]]:
    view, own = facts.view, facts.load
    loads = {**(leading.loads if leading is not None else {}), own.node_id: own}
    stages: list[dict[str, Any]] = []
    for index, roster in enumerate(view.rosters):
        nodes = []
        for member in roster:
            load = loads.get(member.node_id)
            state = load.state if load is not None else None
            if not member.capacity and state != NodeState.DRAINING:
                # The member's own report may be older than the view.
                state = NodeState.PAUSED.value
            nodes.append(
                {
                    "id": member.node_id,
                    "name": member.name,
                    "address": member.address,
                    "capacity": member.capacity,
                    "state": state,
                    "flows": load.num_flows if load is not None else None,
                    "microbatches": load.num_microbatches if load is not None else None,
                }
            )
        stages.append({"index": index, "nodes": nodes})
    return stages


def _syncing(facts: NodeFacts | None, transfer: Transfer | None) -> dict[str, Any] | None:
    """Return which state is being fetched, why, and its progress; None if none is."""
    if facts is None or transfer is None:
        return None
    found = outlook(transfer, asyncio.get_running_loop().time())
    return {
        "stage_index": transfer.stage_index,
        "iteration": transfer.iteration,
        "why": facts.why_fetching,
        "num_bytes": transfer.num_bytes,
        "num_arrived": transfer.num_arrived,
        "num_local": transfer.num_local,
        "percent": round(found.percent, 1),
        "bytes_per_s": round(found.bytes_per_s),
        "left_s": None if found.left_s is None else round(found.left_s, 1),
    }


def _flows(facts: NodeFacts) -> list[dict[str, Any]]:
    return [
        {
            "data_node": flow.flow_id.data_node,
            "slot": flow.flow_id.slot,
            "path": list(flow.path),
            "costs_s": [round(cost_s, 6) for cost_s in flow.costs_s],
        }
        for flow in facts.flows
    ]


def _rebuilt(leading: LeaderFacts | None) -> dict[str, Any] | None:
    """Return how the last lost stage was rebuilt, and at what cost; None if none was lost."""
    last = leading.rebuilt if leading is not None else None
    if last is None:
        return None
    origin = last.origin
    return {
        "stages": list(origin.lost),
        "source": origin.source.value,
        "iteration": last.iteration,
        "num_repeated": origin.num_repeated,
        "duration_s": round(last.duration_s, 3),
    }


def _candidates(leading: LeaderFacts) -> list[dict[str, Any]]:
    return [
        {
            "id": node_id,
            "name": candidate.join.name,
            "capacity": candidate.join.capacity,
            "stage_index": candidate.stage_index,
        }
        for node_id, candidate in sorted(leading.candidates.items())
    ]

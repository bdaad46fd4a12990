"""The status for `decod status`, one JSON object. Fields are only ever added. See
docs/status.md."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from decod import __version__
from decod.daemon.control import SCHEMA_VERSION
from decod.daemon.recent_events import THIS_NODE
from decod.daemon.succession import join_string_of, leader_of
from decod.driver.fetching import outlook
from decod.ids import NodeId, iteration_of
from decod.protocol.core.identity import NodeState
from decod.protocol.core.view import View
from decod.protocol.leadership.leader import Leader
from decod.protocol.node import NodeMachine
from decod.train.checkpoint.transfer import Transfer

if TYPE_CHECKING:
    from decod.daemon.host import Node

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
    on_stage_ending: Callable[[], None] = lambda: None
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
            self.on_stage_ending()


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def status_of(node: "Node") -> dict[str, Any]:
    """Return the status as this node knows it. The leader's covers the whole run."""
    driver, part, progress = node.driver, node.part, node.progress
    machine = driver.machine if driver is not None else None
    view = machine.context.view if machine is not None else None
    leader, name = leader_of(node), node.config.name or node.identity.name
    me = {
        "id": node.identity.node_id,
        "name": name,
        "address": node.address,
        "role": part.role.value,
        "stage_index": None,
        "capacity": machine.own_load().capacity if machine is not None else None,
        "device": node.device,
        "device_free": False,
        "state": _state(node, machine),
    }
    if view is not None and node.identity.node_id in view:
        me["stage_index"] = view.by_id[node.identity.node_id].stage_index
    return {
        "schema_version": SCHEMA_VERSION,
        "decod_version": __version__,
        "run_id": part.run_id,
        "run_name": part.manifest.run.name,
        "run_state": _run_state(machine),
        "state": me["state"],
        "iteration": progress.iteration,
        "loss": progress.loss,
        "gradient_norm": progress.gradient_norm,
        "tokens_per_s": progress.tokens_per_s,
        "data": _data(machine),
        "leader": {
            "id": leader.node_id,
            "name": leader.name,
            "address": leader.address,
            "term": leader.term,
            "electing": leader.electing,
        },
        "node": me,
        "stages": _stages(machine, part.manifest.run.stages.num_relay_stages + 1),
        "flows": _flows(machine),
        "candidates": _candidates(machine.leader if machine is not None else None),
        "checkpoint": node.describe_checkpoint(),
        "states": node.kept.describe(),
        "syncing": _syncing(machine, driver.transfer if driver is not None else None),
        "rebuilt": _rebuilt(machine.leader if machine is not None else None),
        "join_string": node.join_string and join_string_of(node),
        "counters": node.server.counters.totals(),
        "timing": node.timing(),
        "message": _message(machine, progress).replace(THIS_NODE, name),
        "recent": node.happenings.describe(time.monotonic(), name=name),
    }


def _state(node: "Node", machine: NodeMachine | None) -> str:
    if node.reconnecting:
        return RECONNECTING
    return machine.state.value if machine is not None else "starting"


def _data(machine: NodeMachine | None) -> dict[str, int] | None:
    if machine is None:
        return None
    positions = machine.pipeline.positions
    return {"num_skipped": positions.num_skipped, "num_deferred": positions.num_deferred}


def _run_state(machine: NodeMachine | None) -> str:
    if machine is None:
        return "starting"
    leader = machine.leader
    if machine.leadership.election.electing or (leader is not None and leader.quorum.lacking):
        return WAITING
    return leader.state.value if leader is not None else machine.state.value


def _message(machine: NodeMachine | None, progress: RunProgress) -> str:
    leader = machine.leader if machine is not None else None
    if machine is not None and machine.leadership.election.electing:
        return _election(machine)
    if leader is not None and leader.quorum.lacking:
        gone = _names_of(leader.quorum.lacking, leader.view)
        return f"NO QUORUM: training waits for some of {gone}, who are gone"
    if leader is not None and leader.recovery.needed:
        return leader.recovery.describe()
    view: View | None = leader.view if leader is not None else None
    if view is not None and view.empty_stages:
        missing = ", ".join(str(stage) for stage in view.empty_stages)
        return f"waiting for members of stage {missing}"
    if view is not None and view.idle_stages:
        paused = ", ".join(str(stage) for stage in view.idle_stages)
        return f"all members of stage {paused} are paused: the run waits for one to resume"
    return progress.message


def _election(machine: NodeMachine) -> str:
    """Return a text on the progress of this node's search for another leader."""
    text = "the leader is silent: another is being elected"
    view, unanswered = machine.context.view, machine.leadership.election.unanswered
    if not unanswered:
        return text
    wanted = f"more than half of {len(view.members)} nodes must agree"
    return f"{text}; {wanted}, and no word yet of {_names_of(unanswered, view)}"


def _names_of(nodes: Sequence[NodeId], view: View) -> str:
    return ", ".join(view.by_id[node].label if node in view else node[:8] for node in nodes)


def without_leader(node: "Node", own: dict[str, Any]) -> dict[str, Any]:
    """Return a node's own status for the case that the leader has not answered.

    If nothing has come from the leader for `heartbeat_timeout_s`, the status says so.
    """
    machine = node.driver.machine if node.driver is not None else None
    if machine is None or not machine.in_view or machine.leadership.election.electing:
        return own
    config = machine.context.config
    silent_s = asyncio.get_running_loop().time() - machine.leadership.election.leader_watch.heard_s
    if silent_s <= config.heartbeat_timeout_s:
        return own
    leader, name = own["leader"], own["node"]["name"]
    message = (
        f"nothing has come from the leader, {leader['name']} ({leader['address']}), for"
        f" {silent_s:.0f} s: after {config.leader_timeout_s:g} s {name} "
        + ("looks for the run again" if node.config.rejoins else "leaves the run")
    )
    me = {**own["node"], "state": RECONNECTING}
    return {**own, "run_state": WAITING, "state": RECONNECTING, "node": me, "message": message}


def _stages(machine: NodeMachine | None, num_stages: int) -> list[dict[str, Any]]:
    if machine is None:
        return [{"index": index, "nodes": []} for index in range(num_stages)]
    view, loads = machine.context.view, {}
    if machine.leader is not None:
        loads = dict(machine.leader.polling.loads)
    own = machine.own_load()
    loads[own.node_id] = own
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


def _syncing(machine: NodeMachine | None, transfer: Transfer | None) -> dict[str, Any] | None:
    """Return which state is being fetched, why, and its progress; None if none is."""
    if machine is None or transfer is None:
        return None
    found = outlook(transfer, asyncio.get_running_loop().time())
    return {
        "stage_index": transfer.stage_index,
        "iteration": transfer.iteration,
        "why": machine.context.why,
        "num_bytes": transfer.num_bytes,
        "num_arrived": transfer.num_arrived,
        "num_local": transfer.num_local,
        "percent": round(found.percent, 1),
        "bytes_per_s": round(found.bytes_per_s),
        "left_s": None if found.left_s is None else round(found.left_s, 1),
    }


def _flows(machine: NodeMachine | None) -> list[dict[str, Any]]:
    if machine is None:
        return []
    return [
        {
            "data_node": flow.flow_id.data_node,
            "slot": flow.flow_id.slot,
            "path": list(flow.path),
            "costs_s": [round(cost_s, 6) for cost_s in flow.costs_s],
        }
        for flow in machine.pipeline.known_flows
    ]


def _rebuilt(leader: Leader | None) -> dict[str, Any] | None:
    """Return how the last lost stage was rebuilt, and at what cost; None if none was lost."""
    last = leader.recovery.last if leader is not None else None
    if last is None:
        return None
    return {
        "stages": list(last.origin.lost),
        "source": last.origin.source.value,
        "iteration": last.iteration,
        "num_repeated": last.origin.num_repeated,
        "duration_s": round(last.duration_s, 3),
    }


def _candidates(leader: Leader | None) -> list[dict[str, Any]]:
    if leader is None:
        return []
    return [
        {
            "id": node_id,
            "name": candidate.join.name,
            "capacity": candidate.join.capacity,
            "stage_index": candidate.stage_index,
        }
        for node_id, candidate in sorted(leader.admission.candidates.items())
    ]

"""The status for `decod status`, one JSON object. Fields are only ever added. See
docs/status.md.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decod import __version__
from decod.config.schema import activation_size_bytes
from decod.daemon.control import SCHEMA_VERSION
from decod.daemon.known_hosts import describe_links
from decod.daemon.run_facts import RunPart
from decod.driver.driver import outlook
from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import NodeId
from decod.journal.history import SeenMember
from decod.journal.run_progress import RunProgress, merged
from decod.journal.told_status import number_in
from decod.membership.papers import Membership
from decod.net.ask import ask_status
from decod.net.channel import BANNED
from decod.protocol.core.context import NodeState
from decod.protocol.core.durations import IterationTimes
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member, Role, View
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.run.run_config import Organisation, RunConfig
from decod.run.training_config import SyncConfig
from decod.train.checkpoint.description import Transfer

# --- who holds an iteration up -------------------------------------------------------------------
# Who holds an iteration up, by what the members say that it has cost them.
#
# All members of a run commit together, so their iterations are equally long. One that is busy for
# most of it while the others mostly wait makes it longer: it computes or sends too slowly for its
# part. Only shares of each member's own time are compared, and none exceeds 1. A liar can look
# slow, or not slow, and can change nothing for the others.


BUSY_SHARE = 0.5
"""A member that is busy for less of the time waits for others, and not they for it."""

STANDS_OUT_RATIO = 1.5
"""A member stands out if it is busy for so many times as long as others usually are."""

NAMED_MAX = 3

_LINK_RATIO = 0.5
"""A slow sender's links hold it up that take at least this part of what its worst one takes."""

COMPUTING, SENDING = "computing", "sending"


@dataclass(frozen=True, slots=True)
class SlowMember:
    """A member that makes iterations longer."""

    member: Member
    by: str
    """`COMPUTING` or `SENDING`."""
    share: float
    """Of the time, for which it does that."""
    usual_share: float
    """For which the others usually compute or send."""


def slow_members(
    members: Iterable[Member], loads: Mapping[NodeId, NodeLoad]
) -> Sequence[SlowMember]:
    """Return the members that hold the iterations up, the worst first."""
    found: dict[NodeId, tuple[Member, float, str]] = {}
    for member in members:
        load = loads.get(member.node_id)
        share, by = (0.0, "") if load is None or load.times is None else busiest(load.times)
        if by:
            found[member.node_id] = member, share, by
    slow = []
    for node, (member, share, by) in found.items():
        others = [other for each, (_, other, _) in found.items() if each != node]
        if not others or share < BUSY_SHARE:
            continue
        usual = median(others)
        if share >= STANDS_OUT_RATIO * usual:
            slow.append(SlowMember(member, by, share, usual))
    return sorted(slow, key=lambda each: (-each.share, each.member.node_id))[:NAMED_MAX]


def busiest(times: IterationTimes) -> tuple[float, str]:
    """Return the share of the time for which a member computes or sends, and which of them.

    Empty if nothing is known.
    """
    whole_s = times.computing_s + times.waiting_s
    if whole_s <= 0:
        return 0.0, ""
    return max(
        (min(1.0, times.computing_s / whole_s), COMPUTING),
        (min(1.0, times.sending_s / whole_s), SENDING),
    )


def describe_slow(slow: Sequence[SlowMember]) -> list[dict[str, Any]]:
    """Return the field `slow` of `decod status`."""
    return [
        {
            "id": each.member.node_id,
            "name": each.member.name,
            "stage_index": each.member.stage_index,
            "by": each.by,
            "share": round(each.share, 3),
            "usual_share": round(each.usual_share, 3),
        }
        for each in slow
    ]


def mark_links(
    links: Sequence[dict[str, Any]], slow: Sequence[SlowMember], tensor_size_bytes: int
) -> None:
    """Set `holds_up` of each link: whether it makes iterations longer.

    Such a link carries flows from a member whose sends hold the others up, and no other link of
    that member takes much longer for what it carries.

    Args:
        links: As `describe_links` returns them.
        slow: The members that hold the iterations up.
        tensor_size_bytes: Of an activation.
    """
    senders = {each.member.node_id for each in slow if each.by == SENDING}
    times_s = [_carrying_s(link, tensor_size_bytes) for link in links]
    worst_s: dict[object, float] = {}
    for link, time_s in zip(links, times_s, strict=True):
        worst_s[link["from"]] = max(time_s, worst_s.get(link["from"], 0.0))
    for link, time_s in zip(links, times_s, strict=True):
        begin = link["from"]
        is_worst = time_s > 0 and time_s >= _LINK_RATIO * worst_s[begin]
        link["holds_up"] = begin in senders and is_worst


def _carrying_s(link: Mapping[str, Any], size_bytes: int) -> float:
    """Return how long a link takes for the microbatches of its flows, one after another."""
    bandwidth, latency_s = link["bandwidth_bytes_per_s"], link["latency_s"]
    if bandwidth:
        return float(link["num_flows"] * ((latency_s or 0.0) + size_bytes / bandwidth))
    return float(link["num_flows"] * (link["cost_s"] or 0.0))


# --- a node's status -----------------------------------------------------------------------------


WAITING = "waiting"
"""State of a run without a leader that has a quorum, as far as this node knows."""

UNKNOWN = "unknown"
"""State of a run at a node that is not at work itself, and has no answer from the leader."""

RECONNECTING = "reconnecting"
"""State of a node that was in the run, and is out of it or may be."""

_NUM_LISTED_MAX = 8
"""More stages that lack somebody are only counted."""


def status_of(
    part: RunPart, progress: RunProgress, facts: NodeFacts | None, transfer: Transfer | None
) -> dict[str, Any]:
    """Return the part of a node's status that its core and its notes tell.

    Args:
        part: The node's part in the run.
        progress: The run's progress, as the notes tell it.
        facts: What the core knows; None before it has started. The leader's covers the whole run.
        transfer: Progress of the state that is being fetched.
    """
    run, leading = part.run, facts.leading if facts is not None else None
    slow = _slow(facts)
    empty = [{"index": i, "nodes": []} for i in range(run.stages.num_relay_stages + 1)]
    return {
        "schema_version": SCHEMA_VERSION,
        "decod_version": __version__,
        "run_id": part.run_id,
        "run_name": run.name,
        "run_state": _run_state(facts, leading),
        "iteration": progress.iteration,
        "num_iterations": run.num_iterations or None,
        "loss": progress.loss,
        **progress.metrics,
        "tokens_per_s": progress.tokens_per_s,
        "num_tokens": progress.iteration * run.batch.tokens_per_iteration,
        "left_s": None if progress.left_s is None else round(progress.left_s, 1),
        "data": facts and _data(facts),
        "sync": _sync(run.sync, leading),
        "stages": empty if facts is None else _stages(facts),
        "organisation": run.organisation.value,
        "flows": [] if facts is None else _flows(facts),
        "links": _links(run, facts, slow),
        "slow": None if slow is None else describe_slow(slow),
        "candidates": [] if leading is None else _candidates(leading, part.membership.node_id),
        "syncing": _syncing(facts, transfer),
        "rebuilt": _rebuilt(leading),
        "audits": _audits(leading),
        "message": _message(run, facts, leading, progress),
    }


def _slow(facts: NodeFacts | None) -> Sequence[SlowMember] | None:
    """Return who holds iterations up; None if this node does not lead."""
    if facts is None or facts.leading is None:
        return None
    return slow_members(facts.view.members, _loads(facts))


def _loads(facts: NodeFacts) -> Mapping[NodeId, NodeLoad]:
    """Return what this node knows of how busy members are."""
    leading, own = facts.leading, facts.load
    return {**(leading.loads if leading is not None else {}), own.node_id: own}


def _links(
    run: RunConfig, facts: NodeFacts | None, slow: Sequence[SlowMember] | None
) -> list[dict[str, Any]]:
    """Return the links that this node knows, and which of them hold iterations up."""
    links = [] if facts is None else describe_links(run, facts)
    mark_links(links, slow or (), activation_size_bytes(run))
    return links


def _data(facts: NodeFacts) -> dict[str, int]:
    """Return what became of microbatches that were not trained on exactly once."""
    return {
        "num_skipped": facts.positions.num_skipped,
        "num_deferred": facts.positions.num_deferred,
        "num_reread": facts.positions.num_reread,
    }


def _sync(sync: SyncConfig, leading: LeaderFacts | None) -> dict[str, Any]:
    """Return how the members of a stage keep together, and what that has cost.

    Only the leader knows what it adapts.
    """
    shown: dict[str, Any] = {
        "method": sync.method.value,
        "every": sync.every,
        "fragments": sync.fragments,
        "overlap": sync.overlap,
        "compression": sync.compression.value,
        "rank": sync.rank if sync.compression.has_factors else None,
        "bits": None,
        "travel_s": None,
        "budget_s": None,
        "delay": None,
        "num_lost": None,
        "num_late": None,
    }
    if leading is None:
        return shown
    schedule = leading.sync
    adaptation, spec = schedule.adaptation, schedule.spec
    told = adaptation.told
    shown |= {
        "every": adaptation.every,
        "rank": spec.rank or shown["rank"],
        "bits": spec.bits or None,
        "travel_s": (told and told.travel_s) or None,
        "budget_s": adaptation.budget_s or None,
        "delay": schedule.average_delay or None,
        "num_lost": sum(leading.num_lost.values()),
        "num_late": schedule.learning.num_late,
    }
    return shown


def own_status(facts: NodeFacts | None) -> dict[str, Any]:
    """Return what a node's core tells of the node itself."""
    if facts is None:
        return {"stage_index": None, "capacity": None, "state": "starting"}
    stage_index = facts.own_stage if facts.in_view else None
    return {
        "stage_index": stage_index,
        "capacity": facts.load.capacity,
        "state": facts.state.value,
    }


def _run_state(facts: NodeFacts | None, leading: LeaderFacts | None) -> str:
    if facts is None:
        return "starting"
    if facts.electing or (leading is not None and leading.lacking):
        return WAITING
    if leading is not None:
        return leading.state.value
    # A node that works proves that the run does. A paused one proves nothing.
    at_work = facts.state in (NodeState.TRAINING, NodeState.AGGREGATING)
    return facts.state.value if at_work else UNKNOWN


def _message(
    run: RunConfig, facts: NodeFacts | None, leading: LeaderFacts | None, progress: RunProgress
) -> str:
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
        return _awaited(run, leading)
    if leading.ending_stages:
        stages = _listed(map(str, leading.ending_stages))
        return f"the last member of stage {stages} is leaving: another host must join there"
    if view.idle_stages:
        paused = ", ".join(str(stage) for stage in view.idle_stages)
        return f"all members of stage {paused} are paused: the run waits for one to resume"
    return progress.message


def _awaited(run: RunConfig, leading: LeaderFacts) -> str:
    """Return whom the run waits for, because a stage has nobody."""
    view, protocol = leading.view, run.protocol
    who, command = stage_keeper(run)
    if leading.started:
        return f"waiting for {who}s of stage {_listed(map(str, view.empty_stages))}{command}"
    coming = Counter(
        candidate.stage_index
        for candidate in leading.candidates.values()
        if candidate.join.role is not Role.CLIENT
    )
    needs = [protocol.min_data_nodes, *[protocol.min_nodes_per_stage] * (len(view.rosters) - 1)]
    found = [len(workers) + coming[stage] for stage, workers in enumerate(view.workers)]
    lacking = [
        f"stage {stage} has {num} of {need}"
        for stage, (num, need) in enumerate(zip(found, needs, strict=True))
        if num < need
    ]
    if not lacking:
        return "everybody is there: the run begins"
    return f"waiting for {who}s: {_listed(lacking)}{command}"


def stage_keeper(run: RunConfig) -> tuple[str, str]:
    """Return what those are called without whom a stage can't train, and how to become one."""
    if run.organisation is Organisation.SERVERS:
        return "server", " (decod join --server)"
    return "member", ""


def _listed(texts: Iterable[str]) -> str:
    """Return texts in one line, which does not grow with the number of stages."""
    several = list(texts)
    more = len(several) - _NUM_LISTED_MAX
    return ", ".join([*several[:_NUM_LISTED_MAX], *([f"and {more} more"] if more > 0 else [])])


def _election(facts: NodeFacts) -> str:
    """Return a text on the progress of this node's search for another leader."""
    text = "the leader is silent: another is being elected"
    if not facts.unanswered:
        return text
    wanted = f"more than half of {len(facts.view.members)} nodes must agree"
    return f"{text}; {wanted}, and no word yet of {_names_of(facts.unanswered, facts.view)}"


def _names_of(nodes: Sequence[NodeId], view: View) -> str:
    return ", ".join(view.by_id[node].label if node in view else node[:8] for node in nodes)


def seen_members(facts: NodeFacts) -> list[SeenMember]:
    """Return the members for the run's history, with what they have done as far as it is known."""
    loads = _loads(facts)
    return [
        SeenMember(
            member.node_id,
            member.label,
            member.stage_index,
            load.num_microbatches if (load := loads.get(member.node_id)) is not None else None,
        )
        for member in facts.view.members
    ]


INVITATIONS = ("join_string", "data_join_string")
"""Fields that hold secrets: the operator sees them, and no other member."""


def for_members(status: dict[str, Any]) -> dict[str, Any]:
    """Return what other members may see of a node's status."""
    # What a host has done in other runs is not their business.
    return {**status, **dict.fromkeys((*INVITATIONS, "credit", "page"))}


def _stages(facts: NodeFacts) -> list[dict[str, Any]]:
    view, loads = facts.view, _loads(facts)
    stages: list[dict[str, Any]] = []
    for index, (roster, clients) in enumerate(zip(view.rosters, view.clients, strict=True)):
        nodes = []
        for member in (*roster, *clients):
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
                    "role": member.role.value,
                    "duty": member.duty.value or None,
                    "reach": member.reach.value,
                    "capacity": member.capacity,
                    "state": state,
                    "flows": load.num_flows if load is not None else None,
                    "microbatches": load.num_microbatches if load is not None else None,
                    "device": (load.device or None) if load is not None else None,
                    "memory_bytes": (load.memory_bytes or None) if load is not None else None,
                    "decod_version": (load.decod_version or None) if load is not None else None,
                    "since_iteration": member.since_iteration,
                    "waits_for": list(load.awaited) if load is not None else [],
                    **_spent(load),
                }
            )
        stages.append({"index": index, "nodes": nodes})
    return stages


def _spent(load: NodeLoad | None) -> dict[str, float | None]:
    """Return what an iteration usually costs a member."""
    times = load.times if load is not None else None
    return {
        name: None if times is None else round(getattr(times, name), 4)
        for name in ("computing_s", "waiting_s", "sending_s")
    }


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


def _audits(leading: LeaderFacts | None) -> dict[str, Any] | None:
    """Return what audits have found and cost; None if nothing is audited, or it is not known."""
    if leading is None or not leading.audits.possible:
        return None
    audits, counts = leading.audits, leading.audits.counts
    return {
        "num_audited": counts.num_audited,
        "num_worked": counts.num_worked,
        "num_unfinished": counts.num_unfinished,
        "num_replayed": counts.num_replayed,
        "waited_s": round(counts.waited_s, 3),
        "chances": {str(num): round(audits.chance_of_discovery(num), 3) for num in (1, 10, 100)},
        "liars": counts.liars,
    }


def _candidates(leading: LeaderFacts, own: NodeId) -> list[dict[str, Any]]:
    """Return who waits to enter. A leader that has not begun yet waits for others, not itself."""
    return [
        {
            "id": node_id,
            "name": candidate.join.name,
            "capacity": candidate.join.capacity,
            "stage_index": candidate.stage_index,
        }
        for node_id, candidate in sorted(leading.candidates.items())
        if node_id != own
    ]


# --- the leader's status with a node's own parts -------------------------------------------------
# The status that a node shows its operator: the leader's, with the node's own parts.
#
# Only the leader knows what every member does. A leader that is busy answers late, so its last
# answer is shown for a while. Without one, a node shows its own status, and says what is not
# known.


ASK_TIMEOUT_S = 2.0
"""How long a node waits for the leader's answer. A reader of its status must wait longer."""

KEPT_MAX_S = 10.0
"""How old an answer of the leader may be that is shown because no newer one has come."""

NO_ANSWER = "the leader has not answered: what others do is not known"

_OWN_FIELDS = (
    "node",
    "state",
    # The leader knows flows later than the nodes that they leave from.
    "flows",
    "states",
    "contributed",
    "credit",
    "syncing",
    "counters",
    "timing",
    "connections",
    *INVITATIONS,
)
"""Fields that a node knows better than its leader."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last status that a leader has told."""

    leader: NodeId
    told: dict[str, Any]
    heard_s: float


class WholeStatus:
    """Asks the leader for its status, and remembers its last answer.

    Args:
        membership: This node's.
        rejoins: Whether this node looks for the run again when the leader stays silent.
    """

    def __init__(self, membership: Membership, *, rejoins: bool) -> None:
        self._membership, self._rejoins = membership, rejoins
        self._last: _Answer | None = None

    async def of(self, own: dict[str, Any], facts: NodeFacts | None) -> dict[str, Any]:
        """Return the leader's status with this node's own parts, or else this node's status.

        Args:
            own: This node's status.
            facts: What its core knows.
        """
        leader = own["leader"]
        if leader["id"] == own["node"]["id"] or not leader["address"]:
            return own
        try:
            text = await ask_status(
                leader["address"], own["run_id"], self._membership, timeout_s=ASK_TIMEOUT_S
            )
            told = json.loads(text)
        except NetworkError:
            return self._unanswered(own, facts)
        except RejectedError as error:
            banned = error.code == BANNED
            return own | ({"message": f"{error.what}: {error.why}"} if banned else {})
        except (DecodError, ValueError, RecursionError):
            return own
        if not isinstance(told, dict) or told.get("schema_version") != own["schema_version"]:
            return own
        self._last = _Answer(leader["id"], told, _now_s())
        return _joined(own, told)

    def _unanswered(self, own: dict[str, Any], facts: NodeFacts | None) -> dict[str, Any]:
        """Return the status for the case that the leader has not answered.

        If nothing has come from the leader for `heartbeat_timeout_s`, the status says so.
        """
        if facts is not None and facts.in_view and not facts.electing:
            silent_s = _now_s() - facts.leader_heard_s
            if silent_s > facts.config.heartbeat_timeout_s:
                return own | self._silent_leader(own, facts, silent_s)
        last, leader = self._last, own["leader"]["id"]
        if last and last.leader == leader and _now_s() - last.heard_s <= KEPT_MAX_S:
            return _joined(own, last.told)
        return own | {"message": own["message"] or NO_ANSWER}

    def _silent_leader(
        self, own: dict[str, Any], facts: NodeFacts, silent_s: float
    ) -> dict[str, Any]:
        leader, name = own["leader"], own["node"]["name"]
        message = (
            f"nothing has come from the leader, {leader['name']} ({leader['address']}), for"
            f" {silent_s:.0f} s: after {facts.config.leader_timeout_s:g} s {name} "
            + ("looks for the run again" if self._rejoins else "leaves the run")
        )
        me = {**own["node"], "state": RECONNECTING}
        return {"run_state": WAITING, "state": RECONNECTING, "node": me, "message": message}


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _joined(own: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Return the leader's status with this node's own parts."""
    best = {key: _better(own[key], None if key in _OWN_FIELDS else told.get(key)) for key in own}
    # A leader that was elected later has not seen all of the run.
    ages_s = [number_in(each, "age_s") for each in (best, own)]
    best["age_s"] = max((age_s for age_s in ages_s if age_s is not None), default=None)
    return best | {"recent": merged(best["recent"], own["recent"])}


def _better(own: Any, told: Any) -> Any:
    """Return the leader's value, unless it is None or of another type than this node's."""
    if told is None or (own is not None and not isinstance(told, type(own))):
        return own
    return told

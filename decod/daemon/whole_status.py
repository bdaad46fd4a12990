"""The status that a node shows its operator: the leader's, with the node's own parts.

Only the leader knows what every member does. A leader that is busy answers late, so its last answer
is shown for a while. Without one, a node shows its own status, and says what is not known.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from decod.daemon.status import INVITATIONS, RECONNECTING, WAITING
from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import NodeId
from decod.journal.run_progress import merged
from decod.journal.told_status import number_in
from decod.membership.papers import Membership
from decod.net.ask import ask_status
from decod.net.channel import BANNED
from decod.protocol.facts import NodeFacts

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

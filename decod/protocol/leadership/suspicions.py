"""Who may be gone, or can't be worked with: what the leader makes of its members' doubts.

A doubt alone costs nobody its place. The leader asks the suspect, which is gone if it does not
answer (`probes`). One that answers may be set aside all the same if the run can't get on with it
(`conflicts`), and is then let in again after a pause (`cooldown`).
"""

from collections.abc import Callable, Iterable

from decod.ids import NodeId
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import (
    OF_TENSORS,
    SLOW,
    TENSOR_REFUSED,
    TOO_SLOW,
    Message,
    NodeLoad,
    Suspect,
)
from decod.protocol.core.view import View
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.conflicts import Conflicts, Doubt, Ends, IterationProgress
from decod.protocol.leadership.cooldown import Cooldowns
from decod.protocol.leadership.probes import Probes
from decod.protocol.leadership.quorum import Quorum
from decod.run.protocol_config import ProtocolConfig

Around = Callable[[NodeId, Message], list[Effect]]
"""Sends a message by way of other members."""


class Suspicions:
    """The leader's doubts, and what has come of them.

    Args:
        config: The run's.
        admission: Knows the candidates.
        quorum: Knows with whom the leader may go on.
        around: Sends by way of others.
    """

    def __init__(
        self, config: ProtocolConfig, admission: Admission, quorum: Quorum, around: Around
    ) -> None:
        self.probes = Probes(config.probe_timeout_s, around)
        self.cooldowns = Cooldowns()
        self._conflicts = Conflicts(config, quorum.allows)
        self._refused: set[Ends] = set()
        """Who has had a tensor refused by whom, since the last commit."""
        self._admission = admission

    @property
    def deadline_s(self) -> float | None:
        return earliest(self.probes.deadline_s, self._conflicts.deadline_s)

    def renumber(self, term: int) -> None:
        """Another term begins: its questions are others than those of an earlier one."""
        self.probes = self.probes.renumbered(term)

    # --- doubts -------------------------------------------------------------------------------

    def suspected(
        self, now_s: float, sender: NodeId, message: Suspect, progress: IterationProgress
    ) -> list[Effect]:
        """A member doubts another, when the run is so far."""
        node, reason = message.node_id, message.reason
        slow = reason == TOO_SLOW or (reason == TENSOR_REFUSED and (sender, node) in self._refused)
        if reason == TENSOR_REFUSED:
            # Once is a mishap: bits flip, and memory is full for a moment.
            self._refused.add((sender, node))
        # Whoever is being asked whether it lives may not reach anybody.
        unreached = reason not in (SLOW, *OF_TENSORS) and node not in self.probes
        effects = list[Effect]()
        if progress.under_way and (slow or unreached):
            effects += self._conflicts.doubted(now_s, Doubt((sender, node), slow), progress)
        return effects + self.suspect(now_s, progress.view, node, reason, message.slack)

    def suspect(
        self, now_s: float, view: View, node: NodeId, reason: str, slack: float = 1.0
    ) -> list[Effect]:
        """Ask a suspect whether it lives."""
        known = node in view or node in self._admission.candidates
        if not known or node == view.leader:
            return []
        return self.probes.ask(now_s, node, reason, slack)

    def unreachable(
        self, now_s: float, view: View, node: NodeId, reason: str, *, ping: bool
    ) -> list[Effect] | None:
        """A message of the leader's did not reach a node. None: it was one ping too many."""
        if not ping or node not in self.probes:
            return self.suspect(now_s, view, node, reason)
        return self.probes.undelivered(node, last=node in view.last_workers)

    def stalled(self, now_s: float, view: View, loads: Iterable[NodeLoad]) -> bool:
        """An iteration has stood still until its time was up. Returns whether somebody is to go."""
        awaited = {load.node_id: load.awaited for load in loads}
        self._conflicts.stalled(now_s, view, awaited)
        return self._conflicts.deadline_s is not None

    def committed(self) -> None:
        """An iteration is done."""
        self._conflicts.committed()
        self._refused.clear()

    # --- what comes of them -------------------------------------------------------------------

    def overdue(self, now_s: float, view: View) -> tuple[list[Effect], dict[NodeId, str]]:
        """Ask who is to be asked; return that, and who is gone or is to go, and why."""
        probes = self.probes
        effects = probes.ask_all(now_s, self._admission.doubt(now_s), "not heard of")
        effects += probes.overdue(now_s)
        apart = self._conflicts.due(view)
        effects += [self.cooldowns.put(now_s, view.by_id[node], apart[node]) for node in apart]
        return effects, probes.silent(now_s) | apart

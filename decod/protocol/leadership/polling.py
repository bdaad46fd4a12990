"""The leader's questions to all members: how busy they are, and what they keep (GWTF V-B)."""

from collections.abc import Container
from itertools import count

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import NodeLoad, UtilisationQuery
from decod.protocol.core.view import View
from decod.protocol.leadership.admission import Admission
from decod.run.protocol_config import ProtocolConfig


class Polling:
    """Asks by the clock, and places candidates by the answers.

    Args:
        config: The run's.
        admission: Holds the candidates.
    """

    def __init__(self, config: ProtocolConfig, admission: Admission) -> None:
        self.loads: dict[NodeId, NodeLoad] = {}
        """The newest answers."""
        self.due_s: float | None = None
        self._config = config
        self._admission = admission
        self._ids = count(1)

    def start(self, now_s: float) -> None:
        self.due_s = now_s + self._config.admission_interval_s

    def renumber(self, term: int) -> None:
        """Another term begins: its questions are newer than all of an earlier one."""
        self._ids = count(term << 32)

    def ask(
        self,
        now_s: float,
        iteration: Iteration,
        view: View,
        leaving: Container[NodeId],
        *,
        with_kept: bool,
    ) -> list[Effect]:
        """Ask the members of a view; where nobody can answer, place who waits for that."""
        config = self._config
        self.due_s = now_s + max(config.admission_interval_s, config.utilisation_interval_s)
        effects: list[Effect] = []
        if view.version == 0 or view.idle_stages:
            effects += self._admission.assign_waiting(view, self.loads, leaving)
        if view.version > 0:
            # Where a stage has nobody, it also tells the others that the leader lives.
            query = UtilisationQuery(next(self._ids), iteration, with_kept)
            effects.append(Send(view.leader, query))
        return effects

    def told(
        self, loads: tuple[NodeLoad, ...], view: View, leaving: Container[NodeId]
    ) -> list[Effect]:
        """The answers of all members have come up the tree."""
        self.loads.update({load.node_id: load for load in loads})
        return self._admission.assign_waiting(view, self.loads, leaving)

"""A leader on its own, for tests: what is said to it, and what it decides."""

import itertools
from types import SimpleNamespace

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.averaging_messages import Ready
from decod.protocol.core.messages.decision_messages import Mend, Open
from decod.protocol.core.messages.membership_messages import Join, Leave, Prepared
from decod.protocol.core.messages.microbatch_messages import Report
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.view import Role
from decod.protocol.leadership.leader import Leader
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from tests.unit.protocol.cast import (
    D0,
    D1,
    MANIFEST,
    Heard,
    configured,
    context_of,
    sent,
    settle,
    view_of,
)

CONFIG = configured(iteration_timeout_s=100.0, min_data_nodes=2)
LEAVE = Leave("drained by its operator")


def report(
    iteration: Iteration, num: int = 2, digest: int = 7, failure: str = "", *, view_version: int = 1
) -> Report:
    return Report(
        iteration, num, digest, 1, 2.5 * num, 10 * num, view_version=view_version, failure=failure
    )


class Run:
    """A leader d0 with data node d1 and relays of one stage, all joined by their messages."""

    def __init__(
        self, *relays: NodeId, num_iterations: int = 0, config: ProtocolConfig = CONFIG
    ) -> None:
        context = context_of(D0, view_of("d0"), config=config)
        settle(
            context,
            num_iterations=num_iterations,
            stages=StagesConfig(num_relay_stages=1),
            batch=BatchConfig(num_data_nodes=2),
        )
        self.facts = SimpleNamespace(agreed_epoch=0, average_travels=False)
        self.leader = Heard(Leader(context, self))  # It stands for the strategy, too.
        self.leader.polling.start(0.0)
        self.incarnations = itertools.count(1)
        for node in relays:
            self.enter(node)
        for node in (D0, D1):
            self.enter(node)

    def offer(self, node: NodeId) -> Join:
        role = Role.DATA if node.startswith("d") else Role.RELAY
        stage = None if role is Role.DATA else 1
        return Join(f"{node}:1", role, 2, stage, MANIFEST, next(self.incarnations), name=node)

    def enter(self, node: NodeId) -> list[Effect]:
        join = self.offer(node)
        stage = 0 if join.role is Role.DATA else 1
        effects = self.leader.join(0.0, node, join)
        level = Prepared(stage, f"h{stage}", self.leader.iteration)
        return effects + self.leader.prepared(0.0, node, level)

    def aggregate(self) -> list[Effect]:
        """Let both data nodes report."""
        iteration, version = self.leader.iteration, self.leader.view.version
        effects = self.leader.report(1.0, D0, report(iteration, view_version=version))
        return effects + self.leader.report(1.0, D1, report(iteration, view_version=version))

    def commit(self, now_s: float = 2.0) -> list[Effect]:
        self.aggregate()
        return self.leader.voted(
            now_s,
            Ready(
                AveragingId(self.leader.iteration, self.leader.view.version), ((0, "a"), (1, "b"))
            ),
        )


def decision(effects: list[Effect], to: NodeId = D0) -> Message:
    kinds = (Open, Mend)
    (message,) = [m for node, m in sent(effects) if node == to and isinstance(m, kinds)]
    return message


def opening_view(effects: list[Effect]) -> set[NodeId]:
    message = decision(effects)
    return set((message.view if isinstance(message, Mend) else message.opening.view).by_id)


# --- opening --------------------------------------------------------------------------------------


def decisions(effects: list[Effect]) -> list[Message]:
    return [m for _, m in sent(effects) if isinstance(m, Open)]

"""A member where stages have servers: who takes in what, and what changes with views and eras."""

from random import Random

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.era import Origin, Source
from decod.protocol.core.events import Fault, JobFinished, SendFailed
from decod.protocol.core.jobs import Forward, Inspect, Nothing, StepAhead
from decod.protocol.core.messages.decision_messages import Open, Outcome
from decod.protocol.core.messages.routing_messages import LinkProbe
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Folded,
    Given,
    Leg,
    Missing,
    Offer,
    Revoke,
    Settled,
    StageActivation,
    StageGradient,
    Taken,
    Unable,
)
from decod.protocol.core.view import Opening, Role
from decod.protocol.state.stage_copy import note_return
from decod.protocol.strategy.servers.servers import Servers
from decod.run.run_config import Organisation
from decod.run.training_config import BatchConfig, ServersConfig
from tests.unit.protocol.cast import (
    B1A,
    C1A,
    C1B,
    D0,
    F1A,
    F2A,
    ITERATION,
    Heard,
    context_of,
    freed,
    jobs_of,
    mb,
    notes_of,
    received,
    reopen,
    sent,
    settle,
    tensor,
    told_end,
)
from tests.unit.protocol.servers_cast import activation, gradient, stage

M = mb(0)
ONE = (ITERATION, 1, M)
BEFORE = Iteration(0, 1)


class Node:
    """One node's strategy."""

    def __init__(self, node: NodeId, role: Role, *, delay: int = 0, loaded: bool = True) -> None:
        self.context = context_of(node, stage())
        settle(
            self.context,
            organisation=Organisation.SERVERS,
            servers=ServersConfig(delay=delay),
            batch=BatchConfig(num_microbatches=4),
        )
        self.strategy = Heard(Servers(self.context, role, rng=Random(0)))
        self.strategy.copy.stage.loaded = loaded
        self._num_tensors = 0

    def open(self) -> list[Effect]:
        opening = Opening(ITERATION, BEFORE, self.context.view)
        return self.strategy.open(0.0, opening, renewed=True)

    def hear(self, message: Message, sender: NodeId = B1A) -> list[Effect]:
        carried = None
        if isinstance(message, (StageActivation, StageGradient)):
            self._num_tensors += 1
            carried = tensor(self._num_tensors)
        return self.strategy.step(0.0, received(sender, message, carried))

    def look(self, job: Inspect) -> list[Effect]:
        """Find that what a client returned can be used."""
        given = self.context.compute._given
        job_id = next(i for i, each in given.items() if each.job == job)
        return told_end(self.context, JobFinished(job_id, Nothing(), (), duration_s=0.0))

    def lose(self, *names: str) -> list[Effect]:
        self.context.adopt(stage(*names, version=2))
        return self.strategy.mend(0.0)


def opened(node: NodeId, role: Role, *, delay: int = 0) -> Node:
    made = Node(node, role, delay=delay)
    made.open()
    return made


def server() -> Node:
    """Return f1a, an opened server."""
    return opened(F1A, Role.RELAY)


# --- parts ----------------------------------------------------------------------------------------


def test_there_are_no_flows_and_no_averages_that_travel() -> None:
    node = server()
    facts = node.strategy.facts
    assert (facts.known_flows, facts.agreed_epoch) == ((), 0)
    assert not facts.average_travels
    assert node.hear(LinkProbe()) == []


# --- who takes in what ----------------------------------------------------------------------------


def test_before_the_first_opening_nothing_is_taken_in() -> None:
    node = Node(F1A, Role.RELAY)
    assert freed(node.hear(activation(M, Leg.ONWARD))) == [1]
    assert node.strategy.mend(0.0) == []
    node = Node(C1A, Role.CLIENT)
    settled = Settled(AveragingId(ITERATION, 1), 0, 0)
    assert node.hear(settled) == []


def test_a_server_takes_in_what_concerns_forward_passes() -> None:
    node = server()
    frontal, backward = node.strategy.frontal, node.strategy.backward
    assert frontal is not None
    assert backward is not None
    node.hear(Fetch(*ONE), C1A)
    assert frontal.entries[M].asked_by == {C1A}
    node.hear(Given(*ONE, C1A), F1A)
    assert backward.outputs[M].given_to == {C1A}
    node.hear(activation(M, Leg.RESULT), C1A)
    node.look(Inspect(M, is_gradient=False))
    assert backward.outputs[M].maker == C1A
    node.hear(Missing(*ONE))
    assert frontal.entries[M].lost
    node.hear(Unable(*ONE, "no"), C1B)
    assert frontal.entries[M].unable == {C1B}
    node.hear(Taken(*ONE, C1A))
    assert frontal.entries[M].maker == C1A


def test_a_data_node_hears_that_an_iteration_can_not_be_ended() -> None:
    node = opened(D0, Role.DATA)
    ((to, report),) = sent(node.hear(Unable(*ONE, "no worker can compute it")))
    assert to == D0
    assert "no worker" in getattr(report, "failure", "")


def test_what_concerns_servers_alone_is_let_go_of_by_others() -> None:
    client, data = opened(C1A, Role.CLIENT), opened(D0, Role.DATA)
    assert client.hear(Given(*ONE, C1B)) == data.hear(Given(*ONE, C1B)) == []
    assert freed(client.hear(activation(M, Leg.RESULT))) == [1]
    assert server().hear(LinkProbe()) == []


def test_what_was_given_to_an_earlier_life_of_a_client_is_let_go_of() -> None:
    """It may be of another stage than the client's now, whose server has not heard of that yet."""
    node = Node(C1A, Role.CLIENT)
    node.context.adopt(stage(version=3))
    reopen(node.context, view=node.context.view)
    node.open()
    assert freed(node.hear(gradient(M, Leg.TASK, version=2, attempt=1))) == [1]
    assert freed(node.hear(activation(M, Leg.TASK, version=2))) == [2]
    assert freed(node.hear(activation(M, Leg.TASK, version=3), F2A)) == [3]
    assert jobs_of(node.hear(activation(M, Leg.TASK, version=3))) == [Forward(M)]


def test_what_did_not_reach_a_worker_is_told_to_who_gave_it() -> None:
    node = server()
    node.hear(Offer(ITERATION, 1, 2, 0.5), C1A)
    node.hear(activation(M, Leg.ONWARD), D0)
    node.hear(gradient(mb(1), Leg.ONWARD))

    def failed(message: Message) -> list[Effect]:
        return node.strategy.step(0.0, SendFailed(C1A, message, "lost", fault=Fault.LINK))

    frontal = node.strategy.frontal
    assert frontal is not None
    soon_s = frontal.deadline_s
    assert soon_s is not None
    frontal.overdue(soon_s)
    node.hear(Offer(ITERATION, 1, 2, 0.5), C1B)
    forward = failed(activation(M, Leg.TASK))
    assert [to for to, _ in sent(forward)] == [B1A, C1B]
    backward = failed(gradient(mb(1), Leg.TASK, attempt=1))
    assert sent(backward) == [(C1A, Revoke(ITERATION, 1, mb(1), 1))]
    assert failed(Folded(*ONE)) == []


# --- views, eras and late steps -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role", "source"),
    [
        (D0, Role.DATA, Source.KEPT),
        (D0, Role.DATA, Source.NEIGHBOURS),
        (C1A, Role.CLIENT, Source.KEPT),
    ],
)
def test_who_hears_that_the_run_goes_back_says_so(name: NodeId, role: Role, source: Source) -> None:
    node = opened(name, role)
    now, before = Iteration(1, 1, 1), Iteration(0, 1, 1)
    opening = Opening(now, before, node.context.view, origin=Origin(source, (1,), 0))
    told = Open(ITERATION, Outcome.ROLLED_BACK, opening, "stage 1 is lost")
    node.context.out.taken()
    note_return(told, node.context, None)
    assert "run.returned" in notes_of(node.context.out.taken())
    goes_back = source is not Source.NEIGHBOURS
    assert [node.strategy.facts.opened(opening) for _ in range(2)] == [goes_back, False]


def test_with_late_steps_servers_compute_the_next_parameters_first() -> None:
    node = Node(F1A, Role.RELAY, delay=1)
    assert jobs_of(node.open()) == [StepAhead(1)]
    (job_id,) = node.context.compute._given
    done = JobFinished(job_id, Nothing(), (), duration_s=1.0)
    assert told_end(node.context, done, now_s=1.0) == [], "nobody has asked for them yet"
    assert node.strategy.job_failed(1.0, StepAhead(1), "no memory") == []
    assert StepAhead(1) not in jobs_of(Node(C1A, Role.CLIENT, delay=1).open())

"""Members, views and contexts for tests, named by what they are: `d0`, `r1a`, `r2b`.

Where stages have servers, `f1a` is a frontal server, `b1a` a backward server, `c1a` a client.
"""

import dataclasses
from typing import Any

from decod.ids import FlowId, Iteration, MicrobatchId, NodeId, TensorId
from decod.protocol.core.compute_queue import NOBODY
from decod.protocol.core.context import Context, RunFacts
from decod.protocol.core.effects import Effect, FreeTensor, Note, Send, SendTensor, StartJob
from decod.protocol.core.era import Hashes
from decod.protocol.core.events import JobFailed, JobFinished, Received, Tensor
from decod.protocol.core.jobs import Job, JobResult, Nothing
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.decision_messages import Open, Outcome
from decod.protocol.core.messages.scopes import Message
from decod.protocol.core.view import Duty, Member, Opening, Role, View
from decod.run.protocol_config import NO_AUDITS, ProtocolConfig
from decod.run.run_config import RunConfig
from decod.run.training_config import SyncConfig, SyncMethod

D0, D1 = NodeId("d0"), NodeId("d1")
R1A, R1B, R1C = NodeId("r1a"), NodeId("r1b"), NodeId("r1c")
R2A, R2B = NodeId("r2a"), NodeId("r2b")
F1A, F1B, B1A, B1B = NodeId("f1a"), NodeId("f1b"), NodeId("b1a"), NodeId("b1b")
F2A, B2A = NodeId("f2a"), NodeId("b2a")
C1A, C1B = NodeId("c1a"), NodeId("c1b")
STRANGER = NodeId("stranger")
ITERATION = Iteration(1, 1)
CONFIG = ProtocolConfig()
RUN = RunConfig(audits=NO_AUDITS)
"""A run in which nothing is audited."""
MANIFEST = "0" * 64
FACTS = RunFacts(manifest_sha256=MANIFEST, activation_size_bytes=8)
LOCALLY = SyncConfig(method=SyncMethod.DILOCO, every=4)
"""Members step by themselves."""

_ROLES = {"d": Role.DATA, "c": Role.CLIENT}
_DUTIES = {"f": Duty.FRONTAL, "b": Duty.BACKWARD}


def mb(index: int, *, iteration: int = 1, data_node_index: int = 0) -> MicrobatchId:
    return MicrobatchId(iteration, data_node_index, index)


def flow(slot: int, data_node: NodeId = D0) -> FlowId:
    return FlowId(data_node, slot)


def tensor(number: int, size_bytes: int = 8) -> Tensor:
    return Tensor(TensorId(number), size_bytes)


def member(name: str, *, capacity: int = 2, since_iteration: int = 0) -> Member:
    """Return a member whose name says its role and place: `d<index>` or `r<stage><letter>`.

    Servers and clients: `f`, `b` and `c` in the place of `r`.
    """
    data = name.startswith("d")
    return Member(
        node_id=NodeId(name),
        address=f"{name}:7700",
        role=_ROLES.get(name[0], Role.RELAY),
        stage_index=0 if data else int(name[1]),
        capacity=capacity,
        data_node_index=int(name[1:]) if data else -1,
        since_iteration=since_iteration,
        name=name,
        duty=_DUTIES.get(name[0], Duty.NONE),
    )


def view_of(
    *members: str | Member, version: int = 1, leader: NodeId = D0, num_stages: int | None = None
) -> View:
    """Return a view; a name stands for a member with capacity 2."""
    known = [member(m) if isinstance(m, str) else m for m in members]
    if num_stages is None:
        num_stages = 1 + max(m.stage_index for m in known)
    return View.of(known, version=version, leader=leader, term=1, num_stages=num_stages)


def context_of(
    node_id: NodeId,
    view: View,
    *,
    iteration: Iteration = ITERATION,
    config: ProtocolConfig = CONFIG,
) -> Context:
    """Return a node's context; computing takes 1 s, and links cost what unmeasured ones do."""
    links = LinkTable(activation_size_bytes=0, compute_s=1.0)
    run = dataclasses.replace(RUN, protocol=config)
    opening = Opening(iteration, Iteration(0, 0), view)
    context = Context(node_id=node_id, run=run, facts=FACTS, links=links, opening=opening)
    context.adopt(view)
    return context


def reopen(context: Context, **changes: Any) -> None:
    """Change what was said when the context's iteration was opened."""
    context.opening = dataclasses.replace(context.opening, **changes)


def settle(context: Context, **tables: Any) -> None:
    """Change tables of the run's settings."""
    context.run = dataclasses.replace(context.run, **tables)


def configured(**changes: float) -> ProtocolConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type] # Ints are floats.


class Heard:
    """A machine under test, and its parts. What they say is what their methods return, if these
    return nothing else.

    Args:
        machine: It.
    """

    def __init__(self, machine: Any) -> None:
        self.__dict__["machine"] = machine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.machine, name)
        if callable(found):
            return self._heard(found)
        return Heard(found) if hasattr(found, "_out") else found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.machine, name, value)

    def _heard(self, method: Any) -> Any:
        def call(*args: object, **named: object) -> object:
            found = method(*args, **named)
            return self.machine._out.taken() if found is None else found

        return call


def suspect(leader: Heard, now_s: float, node: NodeId, reason: str) -> list[Effect]:
    """Have a leader doubt a node."""
    leader.suspicions.suspect(now_s, leader.view, node, reason)
    return leader._out.taken()


def sent(effects: list[Effect]) -> list[tuple[NodeId, Message]]:
    """Return what goes to peers, with and without tensors."""
    return [(e.to, e.message) for e in effects if isinstance(e, (Send, SendTensor))]


def jobs_of(effects: list[Effect]) -> list[Job]:
    return [e.job for e in effects if isinstance(e, StartJob)]


def notes_of(effects: list[Effect]) -> list[str]:
    return [e.event for e in effects if isinstance(e, Note)]


def freed(effects: list[Effect]) -> list[int]:
    return [int(e.tensor) for e in effects if isinstance(e, FreeTensor)]


def end_job(
    context: Context,
    effects: list[Effect],
    *outputs: Tensor,
    result: JobResult | None = None,
    refused: bool = False,
) -> list[Effect]:
    """End the only job that `effects` start; returns what the queue makes of it.

    Its owner does not hear of it: that is the test's to say.
    """
    (start,) = (e for e in effects if isinstance(e, StartJob))
    disown(context)
    if refused:
        return told_end(context, JobFailed(start.job_id, "refused", fatal=False))
    return told_end(context, JobFinished(start.job_id, result or Nothing(), outputs, 1.0))


def told_end(
    context: Context, event: JobFinished | JobFailed, *, now_s: float = 0.0
) -> list[Effect]:
    """Tell a node's queue how a job has ended; returns what comes of it."""
    if isinstance(event, JobFinished):
        context.compute.finished(now_s, event)
    else:
        context.compute.failed(now_s, event)
    return context.out.taken()


def disown(context: Context) -> None:
    """Have nobody hear of the jobs that the device has."""
    for given in context.compute._given.values():
        given.owner = NOBODY


def not_called(*_: object) -> None:
    """Stands for what a machine calls when something is there that the test does not bring."""
    raise AssertionError("called")


def received(sender: NodeId, message: Message, tensor: Tensor | None = None) -> Received:
    return Received(sender, message, tensor)


def committed(
    closed: Iteration, opening: Opening, loss: float = 1.0, num_tokens: int = 1, **more: Any
) -> Open:
    """Returns the opening behind a committed iteration."""
    return Open(closed, Outcome.COMMITTED, opening, loss=loss, num_tokens=num_tokens, **more)


def repeated(closed: Iteration, opening: Opening, reason: str = "", hashes: Hashes = ()) -> Open:
    """Returns the opening behind an iteration that never happened."""
    return Open(closed, Outcome.REPEATED, opening, reason, hashes)


def ended(closed: Iteration, opening: Opening, reason: str = "", *, failed: bool = False) -> Open:
    """Returns the end of a run."""
    return Open(closed, Outcome.ENDED, opening, reason, failed=failed)


def commits(message: object) -> bool:
    return isinstance(message, Open) and message.committed


def reopens(message: object) -> bool:
    return isinstance(message, Open) and not message.committed

"""Which server deals with which microbatch, and what is kept to be sent to it again.

All nodes find the same servers, without a word.

The microbatches of a share are cut evenly among a stage's frontal servers, and among its backward
servers, by index. So the n-th of two backward servers and the three frontal servers behind it share
a border wherever they can: the first sends two thirds of its microbatches to the first frontal
server, and one third to the second.

If a server is lost in the middle of an iteration, its microbatches are dealt out among the others
of its kind. If it was the last of its kind, servers of the other kind do its work as well. Nothing
else moves.

Source: reliable and unreliable parameter servers, section 3.2.1, "Forward and Backward". Deviation:
there tokens are cut, here microbatches.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from decod.ids import Iteration, MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import SendTensor
from decod.protocol.core.events import Received
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.server_messages import Leg, StageActivation, StageGradient, Unable
from decod.protocol.core.view import Duty, Member, View
from decod.protocol.strategy.data_share import shares_of


class Placement:
    """The servers of all stages in one iteration.

    Args:
        opening: The view with which the iteration was opened.
        num_microbatches: Of each share.
        num_shares: Of a batch.
    """

    def __init__(self, opening: View, *, num_microbatches: int, num_shares: int) -> None:
        self._opening = opening
        self._num = num_microbatches
        self._servers: dict[tuple[int, Duty], tuple[NodeId, ...]] = {}
        self._homes = {
            share: member.node_id
            for member in opening.data_nodes
            for share in shares_of(opening, member.node_id, num_shares=num_shares)
        }

    def home(self, microbatch: MicrobatchId) -> NodeId | None:
        """Return the data node that reads a microbatch."""
        return self._homes.get(microbatch.data_node_index)

    def frontal(self, view: View, stage_index: int, microbatch: MicrobatchId) -> NodeId | None:
        """Return the frontal server of a microbatch at a stage, or its data node at stage 0.

        None: the stage has no server left.
        """
        return self._at(view, stage_index, Duty.FRONTAL, microbatch)

    def backward(self, view: View, stage_index: int, microbatch: MicrobatchId) -> NodeId | None:
        """Return the backward server of a microbatch. As `frontal`."""
        return self._at(view, stage_index, Duty.BACKWARD, microbatch)

    def bereft(self, view: View, stage_index: int, duty: Duty) -> bool:
        """Whether a stage has lost servers with a duty. Others deal with what was theirs."""
        return not all(node in view for node in self._of(stage_index, duty))

    def all_backward(self, view: View, stage_index: int) -> tuple[NodeId, ...]:
        """Return all servers that deal with the backward passes of a stage in a view."""
        kind = [node for node in self._of(stage_index, Duty.BACKWARD) if node in view]
        return tuple(kind or (m.node_id for m in view.roster(stage_index)))

    def _at(
        self, view: View, stage_index: int, duty: Duty, microbatch: MicrobatchId
    ) -> NodeId | None:
        if stage_index % view.num_stages == 0:
            return self.home(microbatch)
        kind = self._of(stage_index, duty)
        if not kind:
            return None
        index = min(microbatch.index, self._num - 1)
        first = kind[index * len(kind) // self._num]
        if first in view:
            return first
        others = [m.node_id for m in self._opening.roster(stage_index) if m.node_id not in kind]
        rest = [node for node in kind if node != first]
        ranked = (*_turned(rest, index), *_turned(others, index))
        return next((node for node in ranked if node in view), None)

    def _of(self, stage_index: int, duty: Duty) -> tuple[NodeId, ...]:
        """Return the servers with a duty. If none has it, all of the stage do."""
        place = stage_index, duty
        if place not in self._servers:
            self._servers[place] = servers_of(self._opening.roster(stage_index), duty)
        return self._servers[place]


def servers_of(roster: Sequence[Member], duty: Duty) -> tuple[NodeId, ...]:
    """Return the servers of a stage with a duty, in the view's order. If none has it, all do."""
    able = [member for member in roster if member.duty is duty] or roster
    return tuple(member.node_id for member in able)


def _turned(nodes: Sequence[NodeId], by: int) -> list[NodeId]:
    start = by % len(nodes) if nodes else 0
    return [*nodes[start:], *nodes[:start]]


Local = Callable[[Received, TensorId], None]
"""Takes in what this node sends itself, with one reference to the tensor."""


class Kind(Enum):
    """What a kept tensor is, and thereby who may need it again."""

    ENTRY = "entry"
    """The activation that came from the stage before. Workers need it."""
    OUTPUT = "output"
    """What the stage has computed of it. The stage behind needs it."""
    GRADIENT = "gradient"
    """The gradient of the output. Workers need it."""
    RETURN = "return"
    """The gradient of the entry. The stage before needs it."""


class Room:
    """The room that all that a node keeps has in common."""

    def __init__(self) -> None:
        self.used_bytes = 0


class KeptTensors:
    """Tensors of an iteration, as far as there is room for them.

    Args:
        context: The node's.
        room: Shared with others.
    """

    def __init__(self, context: Context, room: Room) -> None:
        self._context = context
        self._out = context.out
        self._room = room
        self._tensors: dict[tuple[Kind, MicrobatchId], TensorId] = {}

    def keep(self, kind: Kind, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """Keep a tensor, with a reference of its own, if there is room. An older one stays."""
        tensors = self._context.tensors
        place = (kind, microbatch)
        size_bytes = tensors.size_of(tensor)
        fits = self._room.used_bytes + size_bytes <= self._context.run.protocol.keep_max_bytes
        if fits and place not in self._tensors:
            self._room.used_bytes += size_bytes
            self._tensors[place] = tensors.retain(tensor)

    def get(self, kind: Kind, microbatch: MicrobatchId) -> TensorId | None:
        """Return a kept tensor. Its reference is not the caller's."""
        return self._tensors.get((kind, microbatch))

    def drop(self, kind: Kind, microbatch: MicrobatchId) -> None:
        """Keep a tensor no longer."""
        tensor = self._tensors.pop((kind, microbatch), None)
        if tensor is not None:
            self._room.used_bytes -= self._context.tensors.size_of(tensor)
            self._context.tensors.release(tensor)

    def clear(self) -> None:
        """Keep nothing any more."""
        tensors = [*self._tensors.values()]
        self._tensors.clear()
        self._room.used_bytes -= sum(map(self._context.tensors.size_of, tensors))
        self._context.tensors.release(*tensors)


class Courier:
    """Sends a microbatch's tensors, to others and to this node's own other half.

    Args:
        context: The node's.
        local: Takes in what this node sends itself.
    """

    def __init__(self, context: Context, local: Local) -> None:
        self._context = context
        self._out = context.out
        self._local = local

    @property
    def place(self) -> tuple[Iteration, int]:
        """Iteration and view, with which all that is said of microbatches begins."""
        return self._context.iteration, self._context.view.version

    def tell(self, to: NodeId | None, message: Message) -> None:
        """Say something of a microbatch. `to`: None if nobody is left."""
        if to is not None:
            self._out.send(to, message)

    def unable(
        self, to: NodeId | None, microbatch: MicrobatchId, reason: str, attempt: int = 0
    ) -> None:
        """Say that another is to do a pass. To a data node: that the iteration can't be ended."""
        self.tell(to, Unable(*self.place, microbatch, reason, attempt))

    def activation(
        self, to: NodeId | None, microbatch: MicrobatchId, leg: Leg, tensor: TensorId
    ) -> None:
        """Send an activation. It takes over one reference. `to`: None if nobody is left."""
        self._send(to, StageActivation(*self.place, microbatch, leg), tensor)

    def gradient(
        self,
        to: NodeId | None,
        microbatch: MicrobatchId,
        leg: Leg,
        tensor: TensorId,
        attempt: int = 0,
    ) -> None:
        """Send a gradient. As `activation`."""
        self._send(to, StageGradient(*self.place, microbatch, leg, attempt), tensor)

    def _send(
        self, to: NodeId | None, message: StageActivation | StageGradient, tensor: TensorId
    ) -> None:
        if to is None:
            self._context.tensors.release(tensor)
        elif to == self._context.node_id:
            self._local(Received(to, message), tensor)
        else:
            self._out.put(SendTensor(to, message, tensor))

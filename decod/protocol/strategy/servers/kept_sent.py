"""What a member has sent in an iteration: kept until its end, and sent again if it was lost."""

from collections.abc import Callable
from enum import Enum

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, SendTensor
from decod.protocol.core.events import Received
from decod.protocol.core.messages.server_messages import Leg, StageActivation, StageGradient

Local = Callable[[Received, TensorId], list[Effect]]
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
        self._context, self._room = context, room
        self._tensors: dict[tuple[Kind, MicrobatchId], TensorId] = {}

    def keep(self, kind: Kind, microbatch: MicrobatchId, tensor: TensorId) -> None:
        """Keep a tensor, with a reference of its own, if there is room. An older one stays."""
        tensors, place = self._context.tensors, (kind, microbatch)
        size_bytes = tensors.size_of(tensor)
        fits = self._room.used_bytes + size_bytes <= self._context.run.protocol.keep_max_bytes
        if fits and place not in self._tensors:
            self._room.used_bytes += size_bytes
            self._tensors[place] = tensors.retain(tensor)

    def get(self, kind: Kind, microbatch: MicrobatchId) -> TensorId | None:
        """Return a kept tensor. Its reference is not the caller's."""
        return self._tensors.get((kind, microbatch))

    def drop(self, kind: Kind, microbatch: MicrobatchId) -> list[Effect]:
        """Keep a tensor no longer."""
        tensor = self._tensors.pop((kind, microbatch), None)
        if tensor is None:
            return []
        self._room.used_bytes -= self._context.tensors.size_of(tensor)
        return self._context.tensors.release(tensor)

    def clear(self) -> list[Effect]:
        """Keep nothing any more."""
        tensors = [*self._tensors.values()]
        self._tensors.clear()
        self._room.used_bytes -= sum(map(self._context.tensors.size_of, tensors))
        return self._context.tensors.release(*tensors)


class Courier:
    """Sends a microbatch's tensors, to others and to this node's own other half.

    Args:
        context: The node's.
        local: Takes in what this node sends itself.
    """

    def __init__(self, context: Context, local: Local) -> None:
        self._context, self._local = context, local

    def activation(
        self, to: NodeId | None, microbatch: MicrobatchId, leg: Leg, tensor: TensorId
    ) -> list[Effect]:
        """Send an activation. It takes over one reference. `to`: None if nobody is left."""
        place = self._context.iteration, self._context.view.version
        return self._send(to, StageActivation(*place, microbatch, leg), tensor)

    def gradient(
        self,
        to: NodeId | None,
        microbatch: MicrobatchId,
        leg: Leg,
        tensor: TensorId,
        attempt: int = 0,
    ) -> list[Effect]:
        """Send a gradient. As `activation`."""
        place = self._context.iteration, self._context.view.version
        return self._send(to, StageGradient(*place, microbatch, leg, attempt), tensor)

    def _send(
        self, to: NodeId | None, message: StageActivation | StageGradient, tensor: TensorId
    ) -> list[Effect]:
        if to is None:
            return self._context.tensors.release(tensor)
        if to == self._context.node_id:
            return self._local(Received(to, message), tensor)
        return [SendTensor(to, message, tensor)]

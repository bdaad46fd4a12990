"""What the members of a stage say to each other whose stages are organised as servers.

A message rests on a view, since the loss of a server changes who deals with which microbatch
(`protocol.strategy.servers.placement`). Whoever has an earlier view keeps it until it has that one.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from decod.ids import AveragingId, Iteration, MicrobatchId, NodeId
from decod.limits import AtMost, Count, Duration, Number, Ordinal, ReasonText, unique
from decod.protocol.core.messages.scopes import OfAveraging, OfPath, WithTensor

MICROBATCHES_MAX = 1 << 16
"""As many as a batch may have, at some 20 bytes each."""

Microbatches = Annotated[tuple[MicrobatchId, ...], AtMost(MICROBATCHES_MAX)]


class Leg(StrEnum):
    """A part of a microbatch's way."""

    ONWARD = "onward"
    """From one stage to the next, or the one before: between servers, or a server and a data
    node."""
    TASK = "task"
    """From a server to a worker."""
    RESULT = "result"
    """From a worker to a server."""


@dataclass(frozen=True, slots=True)
class StageActivation(OfPath, WithTensor):
    """With a tensor: an activation that a stage is to compute with, or has computed."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    leg: Leg
    """Which part of its way it is on."""


@dataclass(frozen=True, slots=True)
class StageGradient(OfPath, WithTensor):
    """With a tensor: the gradient of an activation that went the other way."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    leg: Leg
    """Which part of its way it is on."""
    attempt: Count = 0
    """Of a task: grows each time that the server gives it to a worker."""


@dataclass(frozen=True, slots=True)
class Offer(OfPath):
    """To the servers of its stage: the sender takes microbatches of the iteration."""

    iteration: Iteration
    path_version: Ordinal
    window: Count
    """Forward passes that it may have been given, and not have done, at a time: by each server."""
    pass_s: Duration
    """How long its device takes for both passes of a microbatch."""
    idle: bool = False
    """It has nothing to do: it could do what others were given and have not begun."""


@dataclass(frozen=True, slots=True)
class Given(OfPath):
    """To the backward server of a microbatch: a worker was given its forward pass."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    worker: NodeId
    """Who was given it."""


@dataclass(frozen=True, slots=True)
class Taken(OfPath):
    """The backward server of a microbatch has an output of its stage.

    Goes to the frontal server, and to workers whose output came later: they may forget theirs.
    """

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    worker: NodeId
    """Whose output counts."""


@dataclass(frozen=True, slots=True)
class Fetch(OfPath):
    """To the frontal server: the sender is to compute the backward pass, and has no activation.

    From a frontal server to the stage before: it has not got the activation either.
    """

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Folded(OfPath):
    """To the backward server: the microbatch's gradient is in the sender's sum."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Revoke(OfPath):
    """To a worker: give a backward pass up, unless it has begun. Answered by `Unable` if it has
    not."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    attempt: Count
    """That of `StageGradient`."""


@dataclass(frozen=True, slots=True)
class Unable(OfPath):
    """The sender does not do what it was given: its device has refused it, or it was revoked.

    To a data node: the iteration can't be ended with this microbatch.
    """

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId
    reason: ReasonText
    attempt: Count = 0
    """That was revoked. 0: none was."""


@dataclass(frozen=True, slots=True)
class Missing(OfPath):
    """To the frontal server: the backward server lacks an output that is needed again. A worker is
    to compute it."""

    iteration: Iteration
    path_version: Ordinal
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Holding(OfAveraging):
    """To a server that takes a lost one's place: what of the lost one's the sender has."""

    averaging: AveragingId
    made: Microbatches
    """Its output counts, or will come; the gradient is not here."""
    folding: Microbatches
    """The gradient is here: it will be in the sender's sum."""
    folded: Microbatches
    """It is in the sender's sum."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if a microbatch is in two places."""
        unique("made", (*self.made, *self.folding, *self.folded))


@dataclass(frozen=True, slots=True)
class Settled(OfAveraging):
    """From a backward server: all of its microbatches, as far as it knows, are in workers' sums.

    If it learns of more, it says so again.
    """

    averaging: AveragingId
    num_microbatches: Count
    """How many they are."""
    digest: Number
    """Of their ids."""


ServersMessage = (
    StageActivation
    | StageGradient
    | Offer
    | Given
    | Taken
    | Fetch
    | Folded
    | Revoke
    | Unable
    | Missing
    | Holding
    | Settled
)

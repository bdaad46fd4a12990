"""What a data node tells the leader of its share: what came home, and what was put off.

The report goes once, when all relays have done their part of the share. If the iteration can't be
ended with it, the data node asks for the iteration to be repeated instead.
"""

import math
from collections.abc import Collection, Mapping

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.digest import digest_of
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.jobs import Loss
from decod.protocol.core.messages import Report
from decod.protocol.flows.substitutes import Path
from decod.protocol.strategy.deferrals import Deferrals
from decod.protocol.strategy.microbatch import HeldMicrobatch, Phase


class ShareReport:
    """The account of one data node's share in the context's iteration.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.deferrals = Deferrals(context)
        self.done: dict[MicrobatchId, HeldMicrobatch] = {}
        """Home."""
        self.losses: dict[MicrobatchId, Loss] = {}
        self.put_off: set[MicrobatchId] = set()
        """Put off in this iteration; becomes a deferral when the iteration is committed."""
        self.owing: dict[MicrobatchId, set[NodeId]] = {}
        """Of microbatches whose path was changed: who has taken a lost relay's place, and not yet
        said that it is done."""
        self._sent = True
        self.failed = True
        """The leader has been asked to repeat the iteration, or there is none."""

    def reset(self) -> None:
        """Forget the iteration; what had been put off before it stays put off."""
        for record in (self.done, self.losses, self.put_off, self.owing):
            record.clear()
        self._sent = self.failed = True

    def open(self) -> None:
        """The share is to be reported, for the first time or again in a new view."""
        self._sent = self.failed = False

    def committed(self, *, marked: bool) -> None:
        """The iteration is final. `marked`: its states are kept."""
        self.deferrals.committed(self.done, self.put_off, marked=marked)

    def ask_again(self, reason: str) -> list[Effect]:
        """Ask the leader to repeat the iteration."""
        self._sent = self.failed = True
        report = Report(
            iteration=self._context.iteration,
            num_committed=0,
            digest=0,
            num_deferred=1,
            loss_sum=0.0,
            num_tokens=0,
            view_version=self._context.view.version,
            failure=reason[:200],
        )
        return [Send(self._context.view.leader, report)]

    def rerouted(self, microbatch: MicrobatchId, before: Path, path: Path) -> tuple[NodeId, ...]:
        """A microbatch's path was changed. Return the relays that owe it a pass."""
        owing = self.owing.setdefault(microbatch, set())
        owing.intersection_update(path)
        owing.update(set(path) - set(before))
        return tuple(sorted(owing))

    def mended(self, microbatch: MicrobatchId, relay: NodeId) -> None:
        """A relay that took a lost one's place has folded a microbatch in."""
        owing = self.owing.get(microbatch, set())
        owing.discard(relay)
        if not owing:
            self.owing.pop(microbatch, None)

    def report(
        self, waiting: Collection[MicrobatchId], held: Mapping[MicrobatchId, HeldMicrobatch]
    ) -> list[Effect]:
        """Tell the leader, once, when all relays have done their part of this node's share.

        What is left to do then concerns nobody else: the relays' reductions need not wait for it.
        Microbatches that are `waiting` have not been sent, those that are `held` are under way.
        """
        returning = [m for m, each in held.items() if each.phase is Phase.RETURNING]
        if self._sent or waiting or self.owing or len(returning) < len(held):
            return []
        self._sent = True
        done = [*self.done, *returning]
        losses, again = [self.losses[m] for m in done], self.deferrals.again
        put_off = self.put_off - again | self.deferrals.microbatches - set(done)
        report = Report(
            iteration=self._context.iteration,
            num_committed=len(done),
            digest=digest_of(done),
            num_deferred=len(put_off),
            loss_sum=math.fsum(loss.loss for loss in losses),
            num_tokens=sum(loss.num_tokens for loss in losses),
            view_version=self._context.view.version,
            num_reread=len(again.intersection(done)),
        )
        return [Send(self._context.view.leader, report)]

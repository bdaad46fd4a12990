"""The work of this node and of others for it: counted, vouched for with receipts, and shown.

A data node counts what the relays on its microbatches' paths have done, and answers each that asks
with a receipt. A relay asks the data nodes now and then while it works, and once more when it
leaves or the run has ended. An answer that is lost costs nothing, since the next one says more. A
data node that stops with the run waits a moment until its relays have asked.

What a data node has counted is in its memory. If it stops, the relays lose what they have not asked
for yet.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from decod.clocks import wall_clock
from decod.daemon.run_facts import RunPart
from decod.driver.driver import CoreHandle
from decod.errors import DecodError
from decod.ids import NodeId
from decod.membership.receipts import (
    KEPT_MAX,
    RECEIPTS_FILE,
    ReceiptAnswer,
    Receipts,
    Work,
    check_receipt,
    keep_receipts,
    load_receipts,
    new_receipt,
)
from decod.protocol.core.effects import CountWork, StopReason
from decod.protocol.core.view import Member, Role
from decod.tasks import in_thread
from decod.texts import why_unwritten
from decod.wire import validate

ASK_FIRST_S, ASK_MAX_S = 10.0, 300.0
"""Between two questions to the data nodes: doubled from one to the other."""
SETTLE_S = 10.0
"""How long a node stays for the last receipts at most: longer than a busy host takes to answer."""

_ASK_AGAIN_S = 0.1
_HOLDERS_MAX = 100_000
"""Most members whose work is counted. The one that came first is forgotten first."""

_UNKEPT_MAX = 10_000

Ask = Callable[[Member], Awaitable[ReceiptAnswer]]
"""Asks a data node for this node's receipt."""

_FOR_GOOD = (StopReason.FINISHED, StopReason.DRAINED, StopReason.PAUSED)
"""Ends after which this node may not be in the run again."""


class WorkLedger:
    """The counts of one node in one life, and the receipts that it has been given.

    Args:
        part: This node's part in the run.
        core: Its core, which knows the members.
        ask: Asks a data node for a receipt.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self, part: RunPart, core: CoreHandle, ask: Ask, note: Callable[..., None]
    ) -> None:
        self._membership, self._run_id = part.membership, part.run_id
        self._own, self._vouches = part.membership.node_id, part.role is Role.DATA
        self._core, self._ask, self._note = core, ask, note
        batch = part.run.batch
        self._tokens_each = batch.tokens_per_microbatch
        self._since_ms = int(1000 * wall_clock())
        self._counted: dict[NodeId, Work] = {}
        self._given: dict[NodeId, Work] = {}
        """At a data node: what the last receipt of each member says."""
        self._asked = asyncio.Event()
        self._iteration = 0
        """The last one that was counted."""
        self._unkept: deque[tuple[int, int]] = deque()
        """Iterations and this node's microbatches in them for which it may have no receipt yet."""
        self._receipts, self._changed = self._load(), False

    def _load(self) -> Receipts:
        folder = self._membership.folder
        if folder is not None:
            try:
                return load_receipts(folder, self._membership.root).receipts
            except OSError as error:
                self._note("receipts.unkept", reason=error.strerror or str(error))
        return Receipts()

    # --- counting -----------------------------------------------------------------------------

    def count(self, effect: CountWork) -> None:
        """Count the work of an iteration that is committed."""
        self._iteration = effect.iteration
        for node, number in effect.work:
            if not number:
                continue
            if node == self._own:
                self._unkept.append((effect.iteration, number))
            work = Work(
                since_ms=self._since_ms,
                first_iteration=effect.iteration,
                last_iteration=effect.iteration,
                num_microbatches=number,
                num_tokens=number * self._tokens_each,
            )
            known = self._counted.get(node)
            self._counted[node] = work if known is None else known + work
        while len(self._counted) > _HOLDERS_MAX:
            self._counted.pop(next(iter(self._counted)))
        if len(self._unkept) > _UNKEPT_MAX:
            number = self._unkept.popleft()[1]
            self._unkept[0] = (self._unkept[0][0], self._unkept[0][1] + number)

    def receipt_of(self, holder: NodeId) -> ReceiptAnswer:
        """At a data node: return the receipt for a member's work, if there is some."""
        work = self._counted.get(holder)
        if work is None:
            return ReceiptAnswer(None, self._iteration)
        self._given[holder] = work
        self._asked.set()
        now_s = int(wall_clock())
        receipt = new_receipt(self._membership, self._run_id, holder, work, now_s)
        return ReceiptAnswer(receipt, self._iteration)

    @property
    def num_workers(self) -> int:
        """At a data node: nodes whose work is counted, this one included."""
        return len(self._counted)

    @property
    def num_unkept(self) -> int:
        """Microbatches that this node has worked on, and may have no receipt for yet."""
        return sum(number for _, number in self._unkept)

    # --- receipts -----------------------------------------------------------------------------

    async def keep_collecting(self) -> None:
        """Ask for receipts now and then. Never returns."""
        pause_s, rng = ASK_FIRST_S, random.SystemRandom()
        while True:
            # Relays that began together don't ask together.
            await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, ASK_MAX_S)
            await self.collect()

    async def collect(self, *, anyway: bool = False) -> None:
        """Ask for receipts, if there is something to get or `anyway`, and keep them."""
        facts = self._core.facts
        if facts is None or not (self._unkept or anyway):
            return
        if self._vouches:
            answered = [self._take(self.receipt_of(self._own), self._own)]
        else:
            asked = [self._ask_one(member) for member in facts.view.data_nodes]
            answered = await asyncio.gather(*asked)
        done = min(answered, default=0)
        self._unkept = deque(each for each in self._unkept if each[0] > done)
        await self._keep()

    async def _ask_one(self, issuer: Member) -> int:
        """Ask a data node for a receipt; return up to which iteration it covers this node's work.

        0 if it does not answer, or not well.
        """
        with suppress(DecodError):
            return self._take(await self._ask(issuer), issuer.node_id)
        return 0

    def _take(self, answer: ReceiptAnswer, issuer: NodeId) -> int:
        """Take in a data node's answer; return up to which iteration it covers this node's work.

        Raises:
            MalformedMessageError: The receipt is none, or is for another node or run.
        """
        if answer.receipt is None:
            return answer.iteration
        receipt = check_receipt(answer.receipt, self._membership.root)
        said = (receipt.run_id, receipt.holder, receipt.issuer)
        if said != (self._run_id, self._own, issuer):
            raise validate.malformed("receipt", said, allowed="about this node, by the node asked")
        self._changed |= self._receipts.add(receipt)
        return answer.iteration

    async def _keep(self) -> None:
        """Write the receipts to disk, if there are others than on disk."""
        if not self._changed:
            return
        self._changed = False
        self._receipts.trim(KEPT_MAX)
        folder, text = self._membership.folder, self._receipts.text()
        if folder is None:
            return
        try:
            await in_thread(lambda: keep_receipts(folder, text))
        except OSError as error:
            self._note("receipts.unkept", reason=why_unwritten(folder / RECEIPTS_FILE, error))

    async def settle(self, reason: StopReason) -> None:
        """Get and give the last receipts of this life, for a moment. The core has stopped."""
        if reason not in _FOR_GOOD:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                # A relay that leaves is not told whether its last iteration counts.
                await self.collect(anyway=True)
                if self._vouches and reason is StopReason.FINISHED:
                    await self._wait_asked()
                while self._unkept:
                    await asyncio.sleep(_ASK_AGAIN_S)
                    await self.collect()

    async def _wait_asked(self) -> None:
        """Wait until the members have asked for their receipts."""
        facts = self._core.facts
        members = [] if facts is None else [m.node_id for m in facts.view.members]
        while any(self._given.get(node) != self._counted.get(node) for node in members):
            self._asked.clear()
            await self._asked.wait()

    # --- what others see ----------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the `contributed` part of `decod status`: of all runs with this root."""
        kept, num_unkept = [*self._receipts], self.num_unkept
        vouched = [each.work.num_microbatches for each in kept if not each.is_own_word]
        num_tokens = sum(each.work.num_tokens for each in kept)
        return {
            "num_microbatches": sum(each.work.num_microbatches for each in kept) + num_unkept,
            "num_tokens": num_tokens + num_unkept * self._tokens_each,
            "num_vouched": sum(vouched),
        }

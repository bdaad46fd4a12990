"""Counts what a node does for its run, for the credit ledger of its folder.

Work is counted when an iteration is committed. A thread writes the ledger every few seconds and at
the end of the node's life, so a slow or full disk does not disturb training. A crash loses the work
of the last seconds.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from decod.clocks import wall_clock
from decod.daemon.run_facts import RunPart
from decod.journal.credit import Credit, RunCredit, describe_credit
from decod.journal.credit_file import FILE_NAME, CreditLedger
from decod.protocol.core.effects import CountWork
from decod.tasks import in_thread
from decod.texts import clean_text, why_of

SAVE_INTERVAL_S = 10.0

_NAME_MAX_CHARACTERS = 64
_DISK_S = 10.0
"""How long the start and the end of a node wait for a disk that hangs."""


class CreditCounter:
    """Counts one node's work. Use it in `async with`.

    Args:
        ledger: Gets the counts. It outlives the node.
        part: The node's part in the run.
        node_name: The node's name.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self, ledger: CreditLedger, part: RunPart, node_name: str, note: Callable[..., None]
    ) -> None:
        self._ledger, self._note = ledger, note
        self._run_id, self._own = part.run_id, part.membership.node_id
        run = part.run
        self._tokens_each = run.batch.tokens_per_microbatch
        self._run_name = clean_text(run.name, limit=_NAME_MAX_CHARACTERS)
        self._node_name = clean_text(node_name, limit=_NAME_MAX_CHARACTERS)
        self._told = False

    async def __aenter__(self) -> Self:
        await self._save_in_time()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._save_in_time()

    async def _save_in_time(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISK_S):
                await self._save()

    async def keep_saving(self) -> None:
        """Write the ledger now and then. Never returns."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self._save()

    def count(self, effect: CountWork) -> None:
        """Count the microbatches of an iteration that is committed."""
        if number := dict(effect.work).get(self._own, 0):
            tokens = number * self._tokens_each
            self._add(Credit(num_microbatches=number, num_tokens=tokens))

    def spent(self, *, device_s: float, sent_bytes: int, received_bytes: int) -> None:
        """Count what the time since the commit before took of this host, in seconds and bytes."""
        self._add(Credit(device_s=device_s, sent_bytes=sent_bytes, received_bytes=received_bytes))

    def _add(self, credit: Credit) -> None:
        now_s = wall_clock()
        row = RunCredit(
            run_name=self._run_name,
            node_name=self._node_name,
            first_s=now_s,
            last_s=now_s,
            credit=credit,
        )
        self._ledger.add(self._run_id, row)

    async def _save(self) -> None:
        try:
            aside = await in_thread(self._ledger.save)
        except OSError as error:
            if not self._told:
                self._note("credit.unkept", reason=f"{FILE_NAME}: {why_of(error)}")
            self._told = True
            return
        self._told = False
        if aside is not None:
            path, reason = aside
            # Other members may see it, whom this host's folders don't concern.
            self._note("credit.damaged", file=path.name, reason=reason)

    def describe(self) -> dict[str, Any]:
        """Return the `credit` part of `decod status`: of all runs of this folder."""
        return dict(describe_credit(self._ledger.rows))

"""Copies of a loop's state on their way between hosts. They lie in memory, as files."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from decod.driver.peer_driver import StateCopy
from decod.errors import DecodError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.memory_files import is_in_memory, new_memory_file
from decod.net.donor import StateRequest
from decod.net.download import Donor, DownloadTerms, download
from decod.protocol.collaboration.loop import LoadState
from decod.train.checkpoint.description import QuietSink


class CopyNotes:
    """Tells the host once what each newcomer would cause again: little room for copies.

    Args:
        note: Logs an event.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._told: set[str] = set()

    def made(self, path: Path) -> None:
        """A copy lies there."""
        if not is_in_memory(path):
            self._once("state.on_disk", folder=str(path.parent))

    def failed(self, reason: str) -> None:
        """There is no room for a copy."""
        self._once("state.uncopied", reason=reason)

    def _once(self, event: str, **fields: str) -> None:
        if event not in self._told:
            self._told.add(event)
            self._note(event, **fields)


class _FileSink(QuietSink):
    """Puts a state that arrives into a file."""

    path: Path | None = None

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return the file's content.

        Raises:
            OSError: There is no room for it.
        """
        self.remove()
        descriptor, self.path = new_memory_file(size_bytes)
        try:
            return memoryview(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


async def fetch_state(
    wanted: LoadState,
    membership: Membership,
    run_id: RunId,
    address_of: Callable[[NodeId], str | None],
) -> StateCopy:
    """Fetch a state from several peers at once.

    Args:
        wanted: Which state, and who may have it.
        membership: This node's.
        run_id: The run.
        address_of: Returns a peer's address, if it is known.

    Raises:
        DecodError: No peer gave it.
    """
    found = {donor: address_of(donor) for donor in wanted.donors}
    donors = [Donor(node, address) for node, address in found.items() if address]
    if not donors:
        raise DecodError(
            "no peer with the run's state can be reached",
            why="their addresses are not known",
            fix="nothing: it is tried again",
            code="E-NET-007",
        )
    request = StateRequest(
        run_id=run_id,
        sender=membership.node_id,
        stage_index=0,
        iteration=wanted.height.round,
        with_optimizer=True,
        past_hash=wanted.height.state_id,
    )
    sink = _FileSink()
    try:
        fetched = await download(request, donors, sink, membership.tls, DownloadTerms())
    except BaseException:
        sink.remove()
        raise
    assert sink.path is not None
    return StateCopy(sink.path, fetched.description.text, wanted.height.round)

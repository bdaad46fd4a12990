"""Copies of a loop's state on their way between hosts. They lie in memory, as files."""

import mmap
import os
from collections.abc import Callable

from decod.driver.peer_driver import StateCopy
from decod.errors import DecodError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.memory_files import new_memory_file
from decod.net.donor import StateRequest
from decod.net.download import Donor, DownloadTerms, download
from decod.protocol.collaboration.loop import LoadState
from decod.train.checkpoint.transfer import QuietSink


class _FileSink(QuietSink):
    """Puts a state that arrives into a file."""

    def __init__(self) -> None:
        self._descriptor, self.path = new_memory_file()
        self._map: mmap.mmap | None = None

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return memory of the file; None if there is no room for it."""
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            os.ftruncate(self._descriptor, size_bytes)
            self._map = mmap.mmap(self._descriptor, size_bytes)
        except OSError:
            return None
        return memoryview(self._map)

    def close(self) -> None:
        os.close(self._descriptor)


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
        sink.path.unlink(missing_ok=True)
        raise
    finally:
        sink.close()
    return StateCopy(sink.path, fetched.description.text, wanted.height.round)

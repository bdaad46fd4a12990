"""The parts of a checkpoint that members write into the store that they share with the leader.

A volunteer's credentials are its own. The leader names a part in the manifest only if the member's
description has the hash that the stage voted on, and if the part is in the leader's own view of the
store, with the right size and header, and a chunk chosen by chance with the right hash.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from decod.config.node_config import NodeConfig
from decod.errors import DecodError
from decod.ids import NodeId
from decod.net.storing import NoStoreError
from decod.protocol.core.view import Member
from decod.run.run_config import RunConfig
from decod.tasks import in_thread
from decod.train.checkpoint.description import Description, described_hash, unlike_hash
from decod.train.checkpoint.entries import check_tensors, moments_of, state_tensors
from decod.train.checkpoint.shared import SharedCheckpoints, SharedStore, open_store

_ASK_AGAIN_S = 600.0
"""How long a member without a store is not asked again. It may have been restarted with one."""


def store_of(config: NodeConfig) -> SharedStore | None:
    """Return the store that a node shares with others, if it does.

    Raises:
        ConfigError: This host has no package for it (E-CFG-095).
    """
    return None if config.checkpoint_store is None else open_store(config.checkpoint_store)


class Stores:
    """Which members have no store, as far as the leader knows."""

    def __init__(self) -> None:
        self._asked_s: dict[NodeId, float] = {}

    def lacks(self, member: NodeId) -> None:
        """Take in that a member has no store."""
        self._asked_s[member] = time.monotonic()

    def may_have(self, member: NodeId) -> bool:
        """Return whether a member is worth asking."""
        asked_s = self._asked_s.get(member)
        return asked_s is None or time.monotonic() - asked_s > _ASK_AGAIN_S


class SharedParts:
    """The parts of one checkpoint. See `Parts`.

    Args:
        shared: The run's checkpoints in the store.
        stores: Which members have none.
        run: The run.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        shared: SharedCheckpoints,
        stores: Stores,
        run: RunConfig,
        note: Callable[..., None],
    ) -> None:
        self._shared, self._stores, self._run, self._note = shared, stores, run, note
        self._refused: set[int] = set()
        """Stages that are fetched, because a member that has a store has not used it."""
        self._iteration = 0

    def new_folder(self, iteration: int) -> str:
        self._iteration = iteration
        return self._shared.new_folder(iteration)

    def writers(self, stage_index: int, roster: Sequence[Member]) -> Iterable[NodeId]:
        for member in roster:
            if stage_index not in self._refused and self._stores.may_have(member.node_id):
                yield member.node_id

    def expect(self, stage_index: int, description: Description, hash_: str) -> None:
        run, entries = self._run, description.entries
        check_tensors(entries, state_tensors(run.model, run.stages, stage_index, moments_of(run)))
        if hash_ not in ("", described_hash(entries)):
            raise unlike_hash(stage_index, self._iteration)

    async def written(self, folder: str, stage_index: int, description: Description) -> None:
        shared = self._shared
        await in_thread(lambda: shared.require_stage(folder, stage_index, description))

    def failed(self, stage_index: int, member: NodeId, error: DecodError) -> None:
        if isinstance(error, NoStoreError):
            self._stores.lacks(member)
            return
        self._refused.add(stage_index)
        self._note("store.unused", peer=member, stage=stage_index, reason=error.why)

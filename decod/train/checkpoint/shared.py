"""Checkpoints in a store that members share. A member of each stage may write its stage's part.

    STORE/RUN_ID/ITERATION-TOKEN/stage-0.safetensors ...
                                /manifest.json

The files are those of a checkpoint on a leader's disk. The manifest comes last, so what lacks it
does not count. Every attempt has a folder of its own, so nothing is ever overwritten.
"""

import errno
import hashlib
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from decod.errors import CheckpointError
from decod.texts import why_of
from decod.train.checkpoint.description import Description
from decod.train.checkpoint.iteration_folders import (
    Abandoned,
    StageBlob,
    checked_content,
    stage_file,
)
from decod.train.checkpoint.manifest import CheckpointManifest, file_header, packed
from decod.train.checkpoint.places import Folder, opened
from decod.train.checkpoint.shared_store import SharedStore
from decod.train.checkpoint.stage_states import KeptState
from decod.train.checkpoint.store import (
    MANIFEST,
    Checkpoint,
    frame_problem,
    iteration_of,
    read_checkpoint,
)

FOLDER = re.compile(r"[1-9][0-9]{0,14}-[0-9a-f]{8}\Z", re.ASCII)
_RUN_ID = re.compile(r"[a-z2-7]{1,64}\Z")


class SharedStoreError(CheckpointError):
    """A store that members share can't be used. The leader's disk may serve instead."""


class SharedCheckpoints:
    """The checkpoints of one run in a store. All methods wait for the store.

    Args:
        store: The store.
        run_id: The run.
    """

    def __init__(self, store: SharedStore, run_id: str) -> None:
        self.store, self._run_id = store, run_id

    @staticmethod
    def new_folder(iteration: int) -> str:
        """Return a name for the folder of a checkpoint that is about to be written."""
        return f"{iteration}-{secrets.token_hex(4)}"

    def write_stage(
        self,
        folder: str,
        stage_index: int,
        blob: StageBlob,
        abandoned: Abandoned = lambda: False,
    ) -> None:
        """Write a stage's file.

        Raises:
            SharedStoreError: The store refuses (E-CKP-021).
            CheckpointError: The blob does not match its entries, or the write was abandoned. In
                either case, there is no such file.
        """
        entries, name = packed(blob.entries), stage_file(stage_index)
        content = checked_content(name, "checkpoint", entries, blob, abandoned)
        with self._refusals_told():
            self.store.write(self._path(folder, name), chain([file_header(entries)], content))

    def require_stage(self, folder: str, stage_index: int, description: Description) -> None:
        """Check that a stage's file is there: its size, its header, and a chunk of it by chance.

        Raises:
            SharedStoreError: It is not there, or another one's, or can't be read (E-CKP-021).
        """
        entries, file = packed(description.entries), self._folder(folder) / stage_file(stage_index)
        state = KeptState.of(file, stage_index, 0, "", description)
        chunk, start = state.places[secrets.choice(description.chunks).offset]
        with self._refusals_told():
            try:
                with opened(file) as here:
                    problem = frame_problem(here, entries)
                    right = hashlib.sha256(here.read(start, chunk.num_bytes)).hexdigest()
            except FileNotFoundError:
                problem = "it is not there: do all hosts name the same store?"
            except EOFError:
                problem = "it is shorter than it was"
            else:
                problem = problem or ("" if right == chunk.sha256 else "it was altered")
            if problem:
                raise OSError(errno.EIO, f"{file.name}: {problem}")

    def finish(self, folder: str, manifest: CheckpointManifest) -> Folder:
        """Write the manifest, which makes a folder a checkpoint. Return the folder.

        Raises:
            SharedStoreError: The store refuses (E-CKP-021).
        """
        with self._refusals_told():
            self.store.write(self._path(folder, MANIFEST), [manifest.to_json()])
        return self._folder(folder)

    def prune(self, keep: int, newest: str) -> None:
        """Remove the run's oldest checkpoints beyond `keep`, and unfinished ones.

        Args:
            keep: Number of checkpoints to keep.
            newest: Folder of the checkpoint written last. Unfinished ones of later iterations stay,
                because another leader may be writing them.

        Raises:
            OSError: The store refuses.
        """
        folders = [name for name in self.store.names(self._run_id) if FOLDER.match(name)]
        named = {name: MANIFEST in self.store.names(self._path(name)) for name in folders}
        found = [read_checkpoint(self._folder(name)) for name in folders if named[name]]
        # A manifest that can't be read now may be whole, so its folder stays.
        whole = [each for each in found if each.manifest is not None]
        whole.sort(key=lambda each: each.age_key, reverse=True)
        gone = [each.folder.name for each in whole[keep:]]
        last = iteration_of(newest)
        # Some stores list what was just written a little later.
        unfinished = [name for name in folders if not named[name] and name != newest]
        gone += [name for name in unfinished if iteration_of(name) <= last]
        for name in gone:
            self.discard(name)

    def discard(self, folder: str) -> None:
        """Remove a folder, its manifest first.

        Raises:
            OSError: The store refuses.
        """
        self.store.remove(self._path(folder), MANIFEST)

    def _path(self, *names: str) -> str:
        return "/".join((self._run_id, *names))

    def _folder(self, name: str) -> Folder:
        return self.store.folder(self._path(name))

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SharedStoreError(
                f"the checkpoint store {self.store} can't be used",
                why=why_of(error),
                fix="see that it is there, has room, and lets this host read, write and remove",
                code="E-CKP-021",
            ) from error


def find_stored(store: SharedStore) -> list[Checkpoint]:
    """Return the checkpoints of all runs in a store, the newest first. Unfinished ones are none.

    Raises:
        SharedStoreError: The store can't be listed (E-CKP-020).
    """
    try:
        found = [
            read_checkpoint(store.folder(f"{run_id}/{name}"))
            for run_id in store.names("")
            if _RUN_ID.match(run_id)
            for name in store.names(run_id)
            if FOLDER.match(name) and MANIFEST in store.names(f"{run_id}/{name}")
        ]
    except OSError as error:
        raise SharedStoreError(
            f"can't look for checkpoints in {store}",
            why=f"{why_of(error)}; nobody knows which there are, and whether one is newer than "
            "those that are seen",
            fix="mend the store or this host's credentials, or leave --checkpoint-store out",
            code="E-CKP-020",
        ) from error
    return sorted(found, key=lambda checkpoint: checkpoint.age_key, reverse=True)

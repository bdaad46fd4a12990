"""Checkpoints in a store that members share. A member of each stage may write its stage's part.

    STORE/RUN_ID/ITERATION-TOKEN/stage-0.safetensors ...
                                /manifest.json

The files are those of a checkpoint on a leader's disk. The manifest comes last, so what lacks it
does not count. Every attempt has a folder of its own, so nothing is ever overwritten.

The store is a folder, such as one of NFS, or an object store of fsspec. Credentials and addresses
of object stores come from fsspec's own settings on each host, and never travel. Every object is
written once. Its name appears only when all of it is there, in a folder by a rename, in an object
store because such stores put an object as a whole.
"""

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from decod.errors import CheckpointError, ConfigError, DataError, DecodError
from decod.files import open_ordinary, read_at
from decod.installation import install_hint
from decod.objects import file_system, is_url, shown
from decod.texts import clip, why_of
from decod.train.checkpoint.description import Description
from decod.train.checkpoint.iteration_folders import (
    Abandoned,
    StageBlob,
    checked_content,
    stage_file,
)
from decod.train.checkpoint.manifest import CheckpointManifest, file_header, packed
from decod.train.checkpoint.places import (
    FileOperations,
    Folder,
    Objects,
    StoredFolder,
    is_plain_folder,
    opened,
    remove_tree,
)
from decod.train.checkpoint.stage_states import KeptState
from decod.train.checkpoint.store import (
    MANIFEST,
    Checkpoint,
    frame_problem,
    iteration_of,
    read_checkpoint,
)

_REASON_MAX = 200

Content = Iterable[memoryview | bytes]


class SharedStore(Objects, Protocol):
    """A place for objects with names like `a/b/c`. All methods may raise OSError."""

    def write(self, name: str, content: Content) -> None:
        """Write an object. If anything fails, there is no object of this name."""

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder of objects, one of them before the others. It may be missing."""

    def folder(self, name: str) -> Folder:
        """Return a folder for reading."""
        ...


def open_store(text: str) -> SharedStore:
    """Return the store of a path or a URL. Nothing is read or written.

    Raises:
        ConfigError: The URL is of no store that this host has a package for (E-CFG-095).
    """
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return UrlStore(text) if is_url(text) else FolderStore(Path(text))


def parse_folder(text: str) -> Folder:
    """Return a checkpoint's folder from its address; see `address_of`.

    Raises:
        ConfigError: As `open_store`.
    """
    if not is_url(text):
        return Path(text)
    url, run_id, name = text.rsplit("/", 2)
    return open_store(url).folder(f"{run_id}/{name}")


class FolderStore:
    """A folder that all members see, each maybe by another path. See `SharedStore`.

    Permissions of new files and folders follow from the process's umask, so that a group can share
    them.

    Args:
        path: The folder. It is created with the first object.
        files: Operations on files.
    """

    def __init__(self, path: Path, files: FileOperations | None = None) -> None:
        self._path = path
        self._files = files or FileOperations()
        self.url = str(path)

    @override
    def __str__(self) -> str:
        return str(self._path)

    def folder(self, name: str) -> Path:
        return self._path / name

    def names(self, folder: str) -> list[str]:
        path = self._path / folder
        return [inner.name for inner in path.iterdir()] if is_plain_folder(path) else []

    def size_bytes(self, name: str) -> int:
        with open_ordinary(self._path / name, follow_links=False) as descriptor:
            return os.fstat(descriptor).st_size

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        with open_ordinary(self._path / name, follow_links=False) as descriptor:
            return read_at(descriptor, start, num_bytes)

    def write(self, name: str, content: Content) -> None:
        path = self._path / name
        files = self._files
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(scratch, flags, 0o666)
            try:
                for piece in content:
                    files.write(descriptor, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            files.rename(scratch, path)
            files.sync(path.parent)
        except BaseException:
            with suppress(OSError):
                files.remove_file(scratch)
            raise

    def remove(self, folder: str, first: str) -> None:
        path = self._path / folder
        with suppress(FileNotFoundError):
            self._files.remove_file(path / first)
        remove_tree(path, self._files)


class UrlStore:
    """An object store that fsspec knows. See `SharedStore`.

    Args:
        url: Such as `s3://bucket/folder`.

    Raises:
        ConfigError: This host has no package for it (E-CFG-095).
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            files, root = file_system(self.url)
        except (DataError, ValueError) as error:
            reason = error.why if isinstance(error, DataError) else str(error)
            raise ConfigError(
                f"the checkpoint store {self} can't be used",
                why=clip(" ".join(reason.split()), _REASON_MAX),
                fix=f"{install_hint('objects')}; a store other than S3 needs its own package too",
                code="E-CFG-095",
            ) from error
        self._files: Any = files
        self._root = root.rstrip("/")

    @override
    def __str__(self) -> str:
        return shown(self.url)

    def folder(self, name: str) -> StoredFolder:
        return StoredFolder(self, name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self, folder: str) -> list[str]:
        with _translated():
            # Members write at any time, so what was listed before says nothing.
            self._files.invalidate_cache()
            try:
                found: list[str] = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        names = (path.rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if name]

    def size_bytes(self, name: str) -> int:
        with _translated():
            self._files.invalidate_cache()
            return int(self._files.info(self._path(name))["size"])

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        with _translated():
            return bytes(self._files.cat_file(self._path(name), start=start, end=start + num_bytes))

    def write(self, name: str, content: Content) -> None:
        path = self._path(name)
        with _translated():
            stream = self._new(path)
            try:
                for piece in content:
                    stream.write(piece)
                stream.close()
            except BaseException:
                _discard(stream)
                with suppress(Exception):
                    self._files.rm_file(path)
                raise

    def _new(self, path: str) -> Any:
        try:
            return self._files.open(path, "wb")
        except FileNotFoundError:
            # Object stores have no folders. There the bucket is missing, and a slip of the pen must
            # not make one.
            if getattr(self._files, "async_impl", False):
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._files.open(path, "wb")

    def remove(self, folder: str, first: str) -> None:
        with _translated():
            self._files.invalidate_cache()
            for path in (f"{folder}/{first}", folder):
                with suppress(FileNotFoundError):
                    self._files.rm(self._path(path), recursive=True)


def _discard(stream: Any) -> None:
    """Give an unfinished object up: closing it would complete it, and so would forgetting it."""
    with suppress(Exception):
        stream.discard()
    with suppress(Exception):
        stream.closed = True


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the exceptions of all stores, which have no common base, into OSError."""
    try:
        yield
    except DecodError:
        raise
    except Exception as error:
        # Stores make OSErrors without a number, whose text is in no field of its own.
        told = (isinstance(error, OSError) and error.strerror) or str(error)
        text = " ".join(told.split()) or type(error).__name__
        missing = isinstance(error, FileNotFoundError)
        # The number decides the type.
        raise OSError(errno.ENOENT if missing else errno.EIO, clip(text, _REASON_MAX)) from error


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
        self.store = store
        self._run_id = run_id

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
        entries = packed(blob.entries)
        name = stage_file(stage_index)
        content = checked_content(name, "checkpoint", entries, blob, abandoned)
        with self._refusals_told():
            self.store.write(self._path(folder, name), chain([file_header(entries)], content))

    def require_stage(self, folder: str, stage_index: int, description: Description) -> None:
        """Check that a stage's file is there: its size, its header, and a chunk of it by chance.

        Raises:
            SharedStoreError: It is not there, or another one's, or can't be read (E-CKP-021).
        """
        entries = packed(description.entries)
        file = self._folder(folder) / stage_file(stage_index)
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

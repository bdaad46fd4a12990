"""The checkpoints of a host: written atomically, several kept, found and verified.

    STATE_DIR/runs/RUN_ID/checkpoints/ITERATION/manifest.json
                                               /stage-0.safetensors ...

See `iteration_folders` for how a folder is written. File names are never read from a file: the name
of a stage's file follows from its index.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from decod.errors import CheckpointError, ConfigError
from decod.train.checkpoint.description import cut, hash_tensor
from decod.train.checkpoint.entries import TensorEntry
from decod.train.checkpoint.iteration_folders import (
    Abandoned,
    ArrivedStage,
    ArrivingStages,
    Folders,
    StageBlob,
    numbered,
    stage_file,
)
from decod.train.checkpoint.manifest import (
    MANIFEST_SIZE_MAX_BYTES,
    CheckpointManifest,
    file_header,
    file_size_bytes,
    packed,
    parse_manifest,
)
from decod.train.checkpoint.places import (
    DiskRoom,
    File,
    FileOperations,
    Folder,
    OpenFile,
    is_plain_folder,
    names_in,
    opened,
    read_exactly,
)

EVERY_MAX = 1 << 40
KEEP_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of the leader's checkpoints: how often it writes one, and how many it keeps."""

    every_iterations: int = 100
    """A checkpoint after so many iterations, and when the leader ends; 0 writes none. Each takes
    three times the model's size, for bfloat16 seven times, on the leader's disk, and travels there
    from the other stages: raise it where links are slow and iterations short."""
    keep: int = 3
    """Checkpoints of the run that stay; the oldest go. While one is written there is one more."""

    def __post_init__(self) -> None:
        if not 0 <= self.every_iterations <= EVERY_MAX:
            raise ConfigError(
                f"checkpoint.every_iterations is {self.every_iterations}",
                why="it is a number of iterations, from 0 to 2^40",
                fix="give 0 for no checkpoints, or a number such as 100",
            )
        if not 1 <= self.keep <= KEEP_MAX:
            raise ConfigError(
                f"checkpoint.keep is {self.keep}",
                why="without one there is nothing to go on from, and more than 1000 is a slip",
                fix="give 3, or every_iterations = 0 for no checkpoints",
            )


MANIFEST = "manifest.json"
_CHECKPOINTS = "checkpoints"
_HARMLESS = re.compile(r"\..+|.+~|Thumbs\.db|desktop\.ini")
"""Files that systems and editors leave in any folder that somebody opens."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder that is named like a checkpoint. Its manifest shows whether it is one."""

    folder: Folder
    iteration: int
    """The iteration that the folder's name tells."""
    manifest: CheckpointManifest | None
    problem: str = ""
    """Why there is no manifest."""

    @property
    def run_id(self) -> str:
        """The run whose folder it is in."""
        return run_id_of(self.folder)

    @property
    def age_key(self) -> tuple[float, int]:
        """Sort key by time of writing, the newest last."""
        if self.manifest is not None:
            return self.manifest.created_s, self.iteration
        try:
            written_s = self.folder.lstat().st_mtime if isinstance(self.folder, Path) else 0.0
        except OSError:
            written_s = 0.0
        return written_s, self.iteration


class CheckpointStore:
    """The checkpoints of one run. Only this class writes to their folder.

    Args:
        folder: The run's `checkpoints` folder. Created with the first checkpoint.
        files: Operations on files.
        room: The cap on what this host's node may hold; if absent, there is none.
    """

    def __init__(
        self, folder: Path, files: FileOperations | None = None, room: DiskRoom | None = None
    ) -> None:
        self._room = room or DiskRoom(folder)
        self._folders = Folders(folder, files or FileOperations(), "checkpoint")

    def write(
        self,
        manifest: CheckpointManifest,
        blobs: Sequence[StageBlob],
        *,
        abandoned: Abandoned = lambda: False,
    ) -> Path:
        """Write a checkpoint and return its folder.

        Args:
            manifest: Description of the checkpoint. Its `stages` are computed here, from the blobs.
            blobs: The state of every stage, index 0 first.
            abandoned: Asked between pieces. Once it returns true, nothing more is written.

        Raises:
            CheckpointError: The disk refuses, a blob does not match its entries, or the write was
                abandoned. Earlier checkpoints are unchanged.
        """
        stages = tuple(packed(blob.entries) for blob in blobs)
        manifest = replace(manifest, stages=stages)
        new_bytes = sum(
            file_size_bytes(entries)
            for entries, blob in zip(stages, blobs, strict=True)
            if not isinstance(blob.data, ArrivedStage)
        )

        def fill(scratch: Path) -> None:
            for index, blob in enumerate(blobs):
                path = scratch / stage_file(index)
                self._folders.write_stage(path, stages[index], blob, abandoned)
            self._folders.write_file(scratch / MANIFEST, [manifest.to_json()])

        try:
            self._room.require(new_bytes)
            return self._folders.write(manifest.iteration, fill, abandoned)
        except OSError as error:
            raise self._unwritable(manifest.iteration, manifest.size_bytes, error) from error

    def arriving(self, iteration: int, size_bytes: int) -> ArrivingStages:
        """Return a folder for states of stages that are about to arrive for a checkpoint.

        Args:
            iteration: Iteration of the checkpoint, for errors.
            size_bytes: Size of all states, those included that don't arrive.

        Raises:
            CheckpointError: The disk refuses, or has too little room (E-CKP-012).
        """
        try:
            self._room.require(size_bytes)
            arriving = self._folders.arriving()
            # Or it would turn out after the states have come over slow links.
            if shutil.disk_usage(self._folders.folder).free < size_bytes:
                arriving.close()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - told below.
        except OSError as error:
            raise self._unwritable(iteration, size_bytes, error) from error
        return arriving

    def _unwritable(self, iteration: int, size_bytes: int, error: OSError) -> CheckpointError:
        needed = f"it needs {size_bytes / 2**20:.1f} MiB"
        with suppress(OSError):
            free = os.statvfs(self._folders.folder)
            needed += f", free are {free.f_bavail * free.f_frsize / 2**20:.1f} MiB"
        return CheckpointError(
            f"the checkpoint of iteration {iteration} could not be written to "
            f"{self._folders.folder}",
            why=f"{error.strerror or error}; {needed}",
            fix="make room or mend the disk; training goes on, and it is tried again",
            code="E-CKP-012",
        )

    def prune(self, keep: int, newest: int | None = None) -> None:
        """Remove the run's oldest checkpoints beyond `keep`, and unfinished ones.

        Args:
            keep: Number of checkpoints to keep.
            newest: Iteration of the checkpoint written last. Later iterations are from before a
                rollback and go first.

        Raises:
            OSError: Something can't be removed.
        """
        self._folders.prune(keep, newest)


def run_folder(state_dir: Path, run_id: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return state_dir / "runs" / run_id / _CHECKPOINTS


def run_id_of(folder: Folder) -> str:
    """Return the run of a checkpoint, by its folder: on a leader's disk, or in a shared store."""
    run, parent = str(folder).split("/")[-3:-1]
    return run if parent == _CHECKPOINTS else parent


def find_checkpoints(state_dir: Path) -> list[Checkpoint]:
    """Return all checkpoints of all runs of a state folder, the newest first.

    Reads and checks the manifests, but not the tensors. Skips unreadable folders, see
    `require_readable`.
    """
    folders, _ = _checkpoint_folders(state_dir)
    found = [read_checkpoint(path) for folder in folders for path in numbered(folder)]
    return sorted(found, key=lambda checkpoint: checkpoint.age_key, reverse=True)


def require_readable(state_dir: Path) -> None:
    """Check that no checkpoint of a state folder is hidden.

    Raises:
        CheckpointError: A folder that may contain checkpoints can't be read.
    """
    _, unreadable = _checkpoint_folders(state_dir)
    for folder, reason in unreadable.items():
        raise CheckpointError(
            f"can't look for checkpoints in {folder}: {reason}",
            why="nobody knows which there are, and whether one is newer than those that are seen",
            fix="let this user read and enter that folder and those above it (`chmod u+rwx`, "
            "`chown`), or run decod as the user who wrote it",
            code="E-CKP-017",
        )


def _checkpoint_folders(state_dir: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the runs' folders of checkpoints, and the unreadable folders with the reasons."""
    unreadable: dict[Path, str] = {}

    def inside(folder: Path) -> list[Path]:
        try:
            paths = sorted(folder.iterdir())
            for path in paths[:1]:
                # A folder that can be read but not entered shows names and nothing else.
                is_plain_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            unreadable[folder] = _text(error)
            return []
        return paths

    def is_plain(folder: Path) -> bool:
        try:
            return is_plain_folder(folder)
        except OSError as error:
            unreadable[folder] = _text(error)
            return False

    runs = [path for path in inside(state_dir / "runs") if is_plain(path)]
    folders = [path for path in (run / _CHECKPOINTS for run in runs) if is_plain(path)]
    for folder in folders:
        inside(folder)
    return [folder for folder in folders if folder not in unreadable], unreadable


def remove_unfinished(state_dir: Path) -> None:
    """Remove unfinished checkpoints of all runs, left by writers that died.

    Only for the daemon that has locked the state folder, while it writes none itself. Files that
    can't be removed stay.
    """
    for folder in _checkpoint_folders(state_dir)[0]:
        folders = Folders(folder, FileOperations(), "checkpoint")
        with suppress(OSError):
            folders.remove_unfinished()
        with suppress(OSError):
            folders.remove_arrived()


def find_links(state_dir: Path) -> list[Path]:
    """Return the symlinks in place of runs or of their checkpoints. None of them is followed.

    A symlink may lead to another leader's folder, where that leader writes and removes.
    """
    with suppress(OSError):
        runs = sorted((state_dir / "runs").iterdir())
        places = [path if path.is_symlink() else path / _CHECKPOINTS for path in runs]
        return [path for path in places if path.is_symlink()]
    return []


def iteration_of(folder_name: str) -> int:
    """Return the iteration that the name of a checkpoint's folder tells.

    In a store that members share, something follows that makes the name unique.
    """
    return int(folder_name.partition("-")[0])


def read_checkpoint(folder: Folder) -> Checkpoint:
    """Return a checkpoint with its manifest, or with the manifest's problem. Never raises."""
    iteration = iteration_of(folder.name)
    try:
        if isinstance(folder, Path) and not is_plain_folder(folder):
            missing = not os.path.lexists(folder)
            problem = "it is not there" if missing else "it is no folder, or a symlink to one"
            return Checkpoint(folder, iteration, None, problem)
        with opened(folder / MANIFEST) as file:
            size_bytes = file.size_bytes()
            if size_bytes > MANIFEST_SIZE_MAX_BYTES:
                return Checkpoint(folder, iteration, None, f"manifest.json has {size_bytes} bytes")
            manifest = parse_manifest(b"".join(read_exactly(file, 0, size_bytes)))
    except (OSError, EOFError) as error:
        return Checkpoint(folder, iteration, None, f"manifest.json can't be read: {_text(error)}")
    except CheckpointError as error:
        return Checkpoint(folder, iteration, None, error.what)
    if manifest.iteration != iteration:
        problem = f"it is of iteration {manifest.iteration}, in another one's place"
        return Checkpoint(folder, iteration, None, problem)
    return Checkpoint(folder, iteration, manifest)


def find_problems(
    checkpoint: Checkpoint, chunks: dict[str, Sequence[str]] | None = None
) -> list[str]:
    """Read every byte of a checkpoint. Return its problems, if any. Never raises.

    Args:
        checkpoint: The checkpoint.
        chunks: Gets the hashes of the chunks of each tensor, by name. None: they are not needed.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        return [checkpoint.problem]
    expected = {MANIFEST, *(stage_file(index) for index in range(len(manifest.stages)))}
    try:
        names = [name for name in names_in(checkpoint.folder) if name not in expected]
        strangers = [name for name in names if not _harmless(checkpoint.folder / name)]
    except OSError as error:
        return [_text(error)]
    problems = [
        f"{ascii(name)[1:-1]} does not belong there: remove it" for name in sorted(strangers)
    ]
    for index, entries in enumerate(manifest.stages):
        name = stage_file(index)
        try:
            found = _stage_problems(checkpoint.folder / name, entries, chunks)
            problems += [f"{name}: {problem}" for problem in found]
        except (OSError, EOFError) as error:
            problems.append(f"{name}: {_text(error)}")
    return problems


def _harmless(path: File) -> bool:
    if _HARMLESS.fullmatch(path.name) is None:
        return False
    return not isinstance(path, Path) or stat.S_ISREG(path.lstat().st_mode)


def frame_problem(file: OpenFile, entries: tuple[TensorEntry, ...]) -> str:
    """Return how a stage's file differs in size or header from what it must be; empty if not.

    Raises:
        OSError: The file can't be read.
        EOFError: It is too short.
    """
    found_bytes = file.size_bytes()
    expected_bytes = file_size_bytes(entries)
    if found_bytes != expected_bytes:
        return f"it has {found_bytes} bytes, not {expected_bytes}"
    header = file_header(entries)
    right = b"".join(read_exactly(file, 0, len(header))) == header
    return "" if right else "its header was altered"


def _stage_problems(
    path: File, entries: tuple[TensorEntry, ...], chunks: dict[str, Sequence[str]] | None
) -> list[str]:
    with opened(path) as file:
        if problem := frame_problem(file, entries):
            return [problem]
        altered = []
        first = len(file_header(entries))
        for entry in entries:
            pieces = _pieces(file, replace(entry, offset=first + entry.offset))
            if chunks is None:
                digest = hashlib.sha256()
                for piece in pieces:
                    digest.update(piece)
                found = digest.hexdigest()
            else:
                found, chunks[entry.name] = hash_tensor(pieces)
            if found != entry.sha256:
                altered.append(f"{entry.name[:100]} was altered")
    more = [f"and {len(altered) - 3} more"] if len(altered) > 3 else []
    return altered[:3] + more


def _pieces(file: OpenFile, entry: TensorEntry) -> Iterator[bytes]:
    """Yield the chunks of a tensor, which is in the file at its offset."""
    for start, size in cut(entry):
        yield b"".join(read_exactly(file, start, size))


def _text(error: OSError | EOFError) -> str:
    if isinstance(error, EOFError):
        return "it is shorter than it was"
    return error.strerror or str(error)


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint."""

    entry: TensorEntry
    path: File
    start: int
    """Offset in the file, in bytes."""

    def pieces(self) -> Iterator[bytes]:
        """Read the tensor, chunk by chunk. Its bytes may not have the hash of its entry.

        Raises:
            CheckpointError: The file can't be read or is too short.
        """
        try:
            with opened(self.path) as file:
                yield from _pieces(file, replace(self.entry, offset=self.start))
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"can't read {self.path}",
                why=_text(error),
                fix="`decod checkpoint verify` shows which checkpoints are whole",
                code="E-CKP-010",
            ) from error


def find_tensors(checkpoint: Checkpoint) -> dict[str, CheckpointTensor]:
    """Return all tensors of a checkpoint by their names, from all stages' files. Reads none.

    Args:
        checkpoint: A checkpoint with a manifest.
    """
    assert checkpoint.manifest is not None
    found = {}
    for index, entries in enumerate(checkpoint.manifest.stages):
        path = checkpoint.folder / stage_file(index)
        header = len(file_header(entries))
        for entry in entries:
            found[entry.name] = CheckpointTensor(entry, path, header + entry.offset)
    return found

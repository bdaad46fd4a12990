"""Files: safe reading of what people name, writing that survives a power loss, and signs of damage.

A path that somebody names may lead to a pipe or a device. A file that must be whole is written
beside its place, synced, renamed, and its folder synced. A file may also be something else than its
name says: a pointer, a page, or the leavings of a download. Only its beginning is looked at for
that, and nothing in it is opened or run.
"""

import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PIECE_BYTES = 4 << 20
"""Size of one read: a multiple of every number's size."""


class NotOrdinaryError(OSError):
    """The path leads to a pipe, device, folder or socket instead of a file."""


@contextmanager
def open_ordinary(path: Path, *, follow_links: bool = True) -> Iterator[int]:
    """Lend the descriptor of a file, for reading. Never waits for the writer of a pipe.

    Raises:
        OSError: The file can't be opened.
        NotOrdinaryError: It is not an ordinary file.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    _require_ordinary(path, descriptor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> IO[bytes]:
    """Return a file to lock, which is created if missing. Raises as `open_ordinary`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    _require_ordinary(path, descriptor)
    return open(descriptor, "r+b", buffering=0)


def _require_ordinary(path: Path, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOrdinaryError(errno.EINVAL, f"{path.name} is no ordinary file", str(path))


def read_pieces(descriptor: int, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to before `end` (None: to the file's end), in pieces.

    Raises:
        OSError: The bytes can't be read, or the file ends before `end`.
    """
    while end is None or start < end:
        piece = read_at(
            descriptor, start, _PIECE_BYTES if end is None else min(_PIECE_BYTES, end - start)
        )
        if not piece and end is None:
            return
        if not piece:
            raise OSError(errno.EIO, f"it ends at byte {start}")
        start += len(piece)
        yield piece


def read_at(descriptor: int, start: int, size_bytes: int) -> bytes:
    """Return `size_bytes` bytes of a file from `start` on, or fewer if the file ends before."""
    content = os.pread(descriptor, size_bytes, start)
    # Some file systems return less than there is.
    while len(content) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(content), start + len(content))
        if not more:
            break
        content += more
    return content


def read_beginning(path: Path, size_bytes: int) -> bytes:
    """Return at most `size_bytes` bytes from the start of a file. Raises as `open_ordinary`."""
    with open_ordinary(path) as descriptor:
        return b"".join(read_pieces(descriptor, 0, min(size_bytes, os.fstat(descriptor).st_size)))


def read_end(path: Path, size_max_bytes: int) -> bytes:
    """Return the last whole lines of a file, of at most so many bytes.

    Raises as `open_ordinary`.
    """
    with open_ordinary(path) as descriptor:
        size = os.fstat(descriptor).st_size
        start = max(0, size - size_max_bytes)
        content = read_at(descriptor, start, size - start)
    return content if not start else content.partition(b"\n")[2]


class PieceFile:
    """A file that is written in pieces, in any order and by several threads.

    A thread may still be writing when the file is closed, because nothing can stop it. It is waited
    for, and later writes fail. Otherwise they would go into the next file of this number.

    Args:
        descriptor: Of the file, open for reading and writing. It is closed by `close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def resize(self, size_bytes: int) -> None:
        """Give the file its size. New bytes are zero, and take no room on most disks."""
        with self._opened() as descriptor:
            os.ftruncate(descriptor, size_bytes)

    def write_at(self, start: int, piece: memoryview | bytes | bytearray) -> None:
        """Write a piece, all of it."""
        rest = memoryview(piece)
        with self._opened() as descriptor:
            while rest:
                written = os.pwrite(descriptor, rest, start)
                rest, start = rest[written:], start + written

    def read_at(self, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `start` on, or fewer if the file ends before."""
        with self._opened() as descriptor:
            return read_at(descriptor, start, size_bytes)

    def close(self) -> None:
        """Close the file, once nobody writes into it."""
        with self._lock:
            if not self._closed:
                os.close(self._descriptor)
            self._closed = True

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "it is closed")
            yield self._descriptor


# --- files that survive a power loss -------------------------------------------------------------
# Files that survive a power loss: written beside their place, synced, renamed, synced.


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file, and wait until the disk has its content (not yet its name).

    A new file gets `mode`, as far as the process's umask allows.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content, completely or not at all, and wait until the disk has it.

    Nothing is left behind if it can't be written.
    """
    new = path.with_name(f".{path.name}.tmp")
    new.unlink(missing_ok=True)
    try:
        write_durably(new, content, mode=mode)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


# Recognises files that are not what their names say: pointers, pages, and leavings of downloads.

BEGINNING_BYTES = 512
"""Enough to tell."""

_AGAIN = "fetch the file again"
_LFS = "run `git lfs pull` in its folder, or fetch the model with `hf download`"
_CONVERT = "convert the model to safetensors first, or choose a copy of it in that format"
_SIGN_IN = "sign in where the file comes from, accept the model's terms there, and fetch it again"

_POINTERS = (
    (b"version https://git-lfs.github.com/spec/", "Git LFS"),
    (b"version https://hawser.github.com/spec/", "Git LFS"),
    (b"# xet version", "Xet"),
)
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!--|(?:!doctype html|html|head|body)\b)", re.I)

_MAGIC = (
    (b"PK\x03\x04", "it is a zip archive, as torch.save writes pickled weights", _CONVERT),
    (b"\x80\x02", "it is pickled", _CONVERT),
    (b"\x80\x03", "it is pickled", _CONVERT),
    (b"\x80\x04", "it is pickled", _CONVERT),
    (b"\x80\x05", "it is pickled", _CONVERT),
    (b"GGUF", "it is in the format GGUF", _CONVERT),
    (b"\x89HDF\r\n", "it is in the format HDF5, which TensorFlow writes", _CONVERT),
    (b"\x1f\x8b", "it is packed with gzip", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "it is packed with zstd", "unpack it first"),
)

_ANSWERS = (
    b"access to model",
    b"entry not found",
    b"repository not found",
    b"invalid username or password",
    b"not found",
    b"unauthorized",
    b'{"error"',
)
"""Answers of servers in place of a file, in lower case."""


@dataclass(frozen=True, slots=True)
class Damage:
    """The true nature of such a file, and the remedy."""

    why: str
    fix: str


def pointer_of(beginning: bytes) -> str | None:
    """Return which program put a pointer in a file's place, if that shows."""
    return next((name for magic, name in _POINTERS if beginning.startswith(magic)), None)


def is_page(beginning: bytes) -> bool:
    """Return whether a file begins as a page of HTML does."""
    return _PAGE.match(beginning) is not None


def find_damage(beginning: bytes) -> Damage | None:
    """Return what a file with this beginning is instead of what its name says, if that shows."""
    if not beginning:
        return Damage("it is empty: its download did not begin, or the disk was full", _AGAIN)
    if (program := pointer_of(beginning)) is not None:
        return Damage(f"it is a pointer of {program}", _LFS)
    for magic, why, fix in _MAGIC:
        if beginning.startswith(magic):
            return Damage(why, fix)
    if not beginning.strip(b"\0"):
        why = "it begins with zeros only: room was reserved for it, and its download did not end"
        return Damage(why, _AGAIN)
    if is_page(beginning):
        return Damage("it is a page of HTML, maybe one that asks to sign in", _SIGN_IN)
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<?xml", b"<error")):
        return Damage("it is XML, probably a store's message about an error", _AGAIN)
    if text.startswith(_ANSWERS):
        shown = ascii(beginning.decode("ascii", "replace").strip().partition("\n")[0])[1:-1][:100]
        return Damage(f"it is a server's answer and not the file: {shown}", _SIGN_IN)
    return None


def is_cut_json(content: bytes) -> bool:
    """Return whether a file with a JSON object seems to end before that object does."""
    return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] != b"}"


_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_HUB_REVISION = re.compile(r"\w[\w./-]{0,199}\Z", re.ASCII)
_HUB_ADDRESS = re.compile(r"(https?:/+)?(www\.)?(huggingface\.co|hf\.co)/|hf:/+")


def is_hub_name(text: str) -> bool:
    """Return whether a text could be OWNER/NAME of a model on the Hugging Face Hub."""
    return "/" in text and _HUB_NAME.match(text) is not None


def hub_name(text: str) -> tuple[str, str] | None:
    """Return OWNER/NAME and the revision of a model on the Hub, or None if a text names none.

    Args:
        text: OWNER/NAME or OWNER/NAME@REVISION. Without a revision, an empty one is returned.
    """
    name, at, revision = text.partition("@")
    fits = not at or (_HUB_REVISION.match(revision) is not None and ".." not in revision)
    return (name, revision) if fits and is_hub_name(name) else None


def hub_advice(path: str) -> str | None:
    """Return what to do if a path that is not there could be a model's name on the Hub.

    A few old models there have no owner, such as `gpt2`.
    """
    name = _HUB_ADDRESS.sub("", path.removesuffix("/tokenizer.json").rstrip("/"), count=1)
    if not _HUB_NAME.match(name):
        return None
    given = name if "/" in name else f"OWNER/{name}, as its page there names it"
    return f"if it is a model on the Hugging Face Hub, give {given}"

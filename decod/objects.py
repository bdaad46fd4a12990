"""Object stores and other places that fsspec reaches by URL. No other module knows fsspec.

A name with `://` is a URL of fsspec, such as `s3://bucket/folder`. Any other name is a path of this
host. Credentials and addresses of object stores come from fsspec's own settings.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from typing_extensions import override

from decod.errors import DataError
from decod.installation import install_hint

if TYPE_CHECKING:
    import fsspec

T = TypeVar("T")

# Object stores answer slowly but send fast, so one request fetches megabytes.
_FETCH_SIZE_BYTES = 8 * 2**20
_FINAL_STATUS = (400, 401, 403, 404, 405, 410)
"""Answers of HTTP that will be the same a moment later."""
_PASSWORD = re.compile(r"://[^/@\s]*@")


class StoreError(DataError):
    """An object can't be read or written.

    Args:
        name: The object's URL.
        reason: What the store says.
        is_final: It will say the same a moment later.
    """

    def __init__(self, name: str, reason: str, *, is_final: bool) -> None:
        self.is_final = is_final
        super().__init__(
            f"{shown(name)} can't be read or written",
            why=reason,
            fix="check the URL and its credentials"
            if is_final
            else "try again when the store answers; see whether this host reaches it",
            code="E-DAT-060",
        )


class ObjectFolder:
    """A folder in a store. Its methods block, and may be called from several threads.

    All methods raise StoreError.

    Args:
        url: The folder's URL.

    Raises:
        DataError: A package is missing, or no store has such URLs.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with translated(url):
            self._file_system, self._root = file_system(self._url)

    @override
    def __str__(self) -> str:
        return shown(self._url)

    def name(self, file: str) -> str:
        """Return a file's URL, to be shown."""
        return f"{self}/{file}"

    def read(self, file: str, size_max_bytes: int) -> bytes:
        """Return a file's bytes, or the first `size_max_bytes + 1` of a larger one."""
        with self._translated(file):
            # `open` would ask for the size first, and hide why a server refuses.
            path, end = self._path(file), size_max_bytes + 1
            return cast("bytes", self._file_system.cat_file(path, start=0, end=end))

    def read_range(self, file: str, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes of a file from `start` on, or fewer if it ends before."""
        end = start + size_bytes
        with self._translated(file):
            content = cast(
                "bytes", self._file_system.cat_file(self._path(file), start=start, end=end)
            )
        if len(content) > size_bytes:
            raise StoreError(
                self.name(file), "the server sends all of it instead of a part", is_final=True
            )
        return content

    def size_bytes(self, file: str) -> int | None:
        """Return a file's size; None if the store doesn't tell."""
        with self._translated(file):
            size = self._file_system.info(self._path(file)).get("size")
        return None if size is None else int(size)

    def write(self, source: Path, file: str) -> None:
        """Copy a file of this host there, under another name."""
        with self._translated(file):
            # No folder is made: in some stores that would make a bucket of a mistyped name.
            self._file_system.put_file(str(source), self._path(file))

    def _path(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"

    @contextmanager
    def _translated(self, file: str) -> Iterator[None]:
        with translated(f"{self._url}/{file}"):
            yield


def is_url(name: str) -> bool:
    """Return whether a name is a URL rather than a path."""
    return "://" in name


def shown(url: str) -> str:
    """Return a URL, or a text with URLs, without names and passwords of users."""
    return _PASSWORD.sub("://", url)


def open_object(url: str) -> BinaryIO:
    """Return a stream of an object's bytes, which can seek. Errors are those of the store."""
    where, path = file_system(url)
    return cast("BinaryIO", where.open(path, "rb", block_size=_FETCH_SIZE_BYTES))


def file_system(url: str) -> "tuple[fsspec.AbstractFileSystem, str]":
    """Return the file system of a URL, and the path on it.

    Raises:
        DataError: A package is missing.
    """
    try:
        import fsspec.core

        # Packages of single stores, such as s3fs, are imported here.
        where, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{shown(url)} needs the Python package `{error.name or 'fsspec'}`",
            why=f"it reads files that are not on this host's disks ({_one_line(error)})",
            fix=f"{install_hint('objects')}; a store other than S3 needs its own package too",
            code="E-DAT-014",
        ) from error
    return where, path


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Make every error of a store a StoreError that names this URL."""
    try:
        yield
    except DataError:
        raise
    # Every store has exceptions of its own, which have no common base.
    except Exception as error:
        reason = shown(_one_line(error)) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            reason = "there is no such object"
        raise StoreError(url, reason, is_final=_is_final(error)) from error


def patiently(read: Callable[[], T], pause: Callable[[float], Any]) -> T:
    """Return what `read` returns. Call it again, up to twice, if the store fails for a moment.

    Args:
        read: Reads from a store.
        pause: Waits for so many seconds.
    """
    for pause_s in (1.0, 3.0):
        try:
            return read()
        except StoreError as error:
            if error.is_final:
                raise
            pause(pause_s)
    return read()


def _is_final(error: Exception) -> bool:
    # `status` is that of aiohttp, which fsspec uses for HTTP.
    refused = isinstance(error, FileNotFoundError | PermissionError | NotImplementedError)
    names = {each.__name__ for each in type(error).__mro__}
    return (
        refused
        or type(error) is ValueError
        or bool(names & {"NoCredentialsError", "PartialCredentialsError", "InvalidURL"})
        or getattr(error, "status", None) in _FINAL_STATUS
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

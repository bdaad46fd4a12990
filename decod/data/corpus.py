"""The default corpus: source text of the running Python's standard library.

It needs no download and no choice, so a first run can start at once. It is prepared with the bytes
tokenizer, in the user's cache, on first use.

The corpus takes every `*.py` under the standard library's folder, except tests, installed packages,
files generated for one host, and parts that distributions package separately. It takes them in the
order of the SHA-256 of their path, until `TEXT_SIZE_MAX_BYTES` is reached. One version of Python
therefore gives one corpus, unless a distribution patches its library. Hosts notice if their corpora
differ, because the run's manifest holds the hash of the index.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from decod.data.dataset import CacheConfig, Dataset
from decod.data.index import DEFAULT_PATH
from decod.data.prepare import PrepareConfig, write_corpus
from decod.data.sources import Piece, split_document
from decod.data.tokenizer import BytesTokenizer
from decod.errors import DataError
from decod.files import open_lock
from decod.objects import is_url
from decod.paths import user_folder

TEXT_SIZE_MAX_BYTES = 16 * 2**20
CORPUS_VERSION = 1
"""Increase it whenever the choice of files or their treatment changes."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes of text done so far, and the total."""

_SKIPPED_NAMES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "sitecustomize.py",
        "test",
        "tests",
        "tkinter",
        "turtle.py",
        "turtledemo",
        "usercustomize.py",
    }
)
_SKIPPED_PREFIXES = (".", "_sysconfigdata", "config-")


def open_corpus(place: str, cache: CacheConfig | None = None) -> Dataset:
    """Open the corpus of a run file: `default`, a prepared folder, or the URL of one.

    Args:
        place: Which.
        cache: Where blocks of a corpus at a URL are kept. None: nowhere.

    Raises:
        DataError: The default corpus cannot be prepared, or the corpus not be opened.
    """
    if is_url(place):
        return Dataset.open_url(place, cache)
    return Dataset.open(default_corpus() if place == DEFAULT_PATH else Path(place))


def default_corpus(cache_dir: Path | None = None, progress: OnProgress | None = None) -> Path:
    """Return the folder of the default corpus. Prepare the corpus if it is missing.

    Two processes may call this at once: one prepares, the other waits.

    Args:
        cache_dir: Folder for decod's files. None: the user's cache.
        progress: Called with the progress of the preparation.

    Raises:
        DataError: The cache cannot be written, or Python has no library sources.
        HardwareError: The disk is full.
    """
    cache_dir = cache_dir or user_folder("cache")
    folder = cache_dir / f"corpus-{platform.python_version()}-v{CORPUS_VERSION}"
    if _usable(folder):
        return folder
    try:
        with _locked(cache_dir):
            # Another process may have prepared it while this one waited.
            if not _usable(folder):
                _prepare_at(folder, Path(sysconfig.get_path("stdlib")), progress)
    except OSError as error:
        raise DataError(
            f"the default corpus cannot be kept in {cache_dir}",
            why=error.strerror or str(error),
            fix="make that folder writable, or set XDG_CACHE_HOME to another",
            code="E-DAT-018",
        ) from error
    return folder


def library_files(library: Path) -> list[Path]:
    """Return the corpus's files, as paths relative to the folder `library`, in corpus order."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if _taken(name)]
        found += [
            (Path(folder) / name).relative_to(library)
            for name in names
            if name.endswith(".py") and _taken(name)
        ]
    return sorted(found, key=lambda path: hashlib.sha256(os.fsencode(path.as_posix())).digest())


def read_library(library: Path, progress: OnProgress | None = None) -> Iterator[Piece]:
    """Yield the corpus's documents. Files that are unreadable or not UTF-8 are left out."""
    num_bytes = 0
    for path in library_files(library):
        try:
            content = (library / path).read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if num_bytes + len(content) > TEXT_SIZE_MAX_BYTES:
            return
        num_bytes += len(content)
        yield from split_document([text])
        if progress is not None:
            progress(num_bytes, TEXT_SIZE_MAX_BYTES)


def _taken(name: str) -> bool:
    return name not in _SKIPPED_NAMES and not name.startswith(_SKIPPED_PREFIXES)


def _usable(folder: Path) -> bool:
    """Return whether a corpus is complete. A cache may be cleared or damaged at any time."""
    try:
        Dataset.open(folder).close()
    except DataError:
        return False
    return True


def _prepare_at(folder: Path, library: Path, progress: OnProgress | None) -> None:
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        pieces = read_library(library, progress)
        write_corpus(building, pieces, (BytesTokenizer(), None), PrepareConfig())
        # mkdtemp's folders are private, but the cache may be shared.
        building.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        building.replace(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _locked(cache_dir: Path) -> Iterator[None]:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with open_lock(cache_dir / ".corpus.lock") as file:
        # The system releases the lock when the process that holds it ends, in any way.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

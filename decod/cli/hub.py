"""Models on the Hugging Face Hub: fetched for commands that read a folder, and uploaded.

Only command lines lead here; nodes ask the Hub in `decod.daemon.hub_base`. What is fetched lies in
the usual cache, and holds settings, tokenizers and safetensors. Code and pickled weights are never
fetched. Each file is compared with the hash that the Hub names. `huggingface_hub` finds the token,
the Hub's address and the cache. No text of its errors gets out of this module, since it may hold
the token.
"""

import errno
import glob
import hashlib
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from typing_extensions import override

from decod.cli.printing import Advance, print_warning, progress, waiting
from decod.daemon.exporting import CARD_FILE
from decod.daemon.hub_base import SECOND_COPY
from decod.daemon.node_folder import nearest_folder
from decod.errors import ConfigError, DataError, DecodError, HardwareError, NetworkError
from decod.files import hub_name, open_ordinary, read_pieces
from decod.model.adapter_folder import ADAPTER_CONFIG
from decod.objects import shown
from decod.paths import full_path
from decod.texts import clean_text, counted, size_text, why_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.utils.tqdm import tqdm

T = TypeVar("T")

_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_TRIES = 3
_PAUSE_S = 2.0
"""Time before another try. Within a file, huggingface_hub itself goes on a few times."""
_SERVER_WORDS_MAX = 300
_UNREACHABLE = "E-NET-041"
_NOT_CACHED = "E-DAT-065"


def on_hub(text: str) -> bool:
    """Return whether an argument names a model on the Hub, and nothing on this host."""
    return hub_name(text) is not None and not Path(text).exists()


def model_folder(text: str, files: Collection[str] = ()) -> Path:
    """Return the full path of a model's folder; if there is none, the Hub's model is fetched.

    Args:
        text: A path, or ORG/NAME or ORG/NAME@REVISION.
        files: Names of the files to fetch. Empty: all that decod reads of a model.

    Raises:
        DecodError: The model can't be had. The text says why.
    """
    found = hub_name(text)
    if found is None or not on_hub(text):
        return full_path(Path(text))
    name, revision = found[0], found[1] or "main"
    get = partial(_fetch, name, revision, files)
    try:
        return _asked(get, name, revision)
    except DecodError as error:
        with suppress(DecodError):
            if error.code in (_UNREACHABLE, _NOT_CACHED):
                folder = _asked(partial(get, cached=True), name, revision, num_tries=1)
                if error.code == _UNREACHABLE:
                    print_warning(f"the Hub does not answer: {text} is taken from {folder}")
                return folder
        raise


def fetched(text: str | None) -> Path | None:
    """Return what `model_folder` does for the value of an option, which may be absent."""
    return None if text is None else model_folder(text)


def require_writable(name: str) -> None:
    """Raise an error if a model surely can't be uploaded: before it is put together."""
    from huggingface_hub import get_token

    if hub_name(name) != (name, ""):
        raise click.UsageError(f"{name!r} is no ORG/NAME")
    if get_token() is None:
        raise _no_write_access(name, "HF_TOKEN is not set")


def upload(folder: Path, name: str, message: str, *, private: bool) -> str:
    """Upload a folder's model in one commit; return the address of its repository.

    Args:
        folder: What `decod export` has written.
        name: ORG/NAME. The repository is created if it is missing.
        message: Of the commit.
        private: Whether nobody else may see it.

    Raises:
        DecodError: It can't be uploaded. The text says why.
    """
    sent = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    sent = {file: path for file, path in sent.items() if file == CARD_FILE or _is_read(file)}
    size = size_text(sum(path.stat().st_size for path in sent.values()))

    def send() -> str:
        from huggingface_hub import CommitOperationAdd

        api = _api()
        address = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise _other_repository(f"{name} is there already, and public", "--private is given")
        there = [file for file in api.list_repo_files(name) if _is_weights(file)]
        if left := sorted(set(there) - sent.keys()):
            what = f"{name} holds {clean_text(left[0])}, which is no part of this model"
            raise _other_repository(what, "whoever loads it would get a mixture of two models")
        added = [CommitOperationAdd(file, path) for file, path in sent.items()]
        api.create_commit(name, added, commit_message=message)
        return shown(str(address))

    with waiting(f"uploading {counted(len(sent), 'file')}, {size}"):
        return _asked(send, name, writes=True)


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(library_name="decod")


def _is_read(file: str) -> bool:
    """Return whether decod reads this file of a model's repository."""
    return file.endswith(_SUFFIXES) and "/" not in file and not file.startswith(SECOND_COPY)


def _is_weights(file: str) -> bool:
    """Return whether a file of a repository decides which model transformers or PEFT find there."""
    named = file.endswith(".safetensors") or file in (ADAPTER_CONFIG, "config.json")
    return named and _is_read(file)


def _fetch(name: str, revision: str, files: Collection[str], *, cached: bool = False) -> Path:
    """Return the folder of a model in the cache. With `cached`, the Hub is not asked."""
    from huggingface_hub import RepoFile, get_cached_repo_tree, snapshot_download

    api = _api()
    listed = get_cached_repo_tree if cached else api.list_repo_tree
    with waiting(f"asking the Hub for {name}"):
        commit = api.resolve_revision(name, revision=revision, local_files_only=cached).resolved
        found = [file for file in listed(name, revision=commit) if isinstance(file, RepoFile)]
    needed = [file for file in found if (file.path in files if files else _is_read(file.path))]
    if not any(files or file.path.endswith(".safetensors") for file in needed):
        raise DataError(
            f"{name} has no {'tokenizer' if files else 'safetensors'} at {revision}",
            why="decod reads nothing else, since other weights could run code",
            fix="choose a copy of the model in that format, or another revision",
            code="E-DAT-063",
        )
    names = [glob.escape(file.path) for file in needed]
    get = partial(snapshot_download, name, revision=commit, allow_patterns=names)
    if cached:
        return Path(get(local_files_only=True))
    num_bytes = _missing_bytes(name, commit, needed)
    with progress(f"fetching {name}", num_bytes) as advance, _stoppable(advance) as bar:
        folder = Path(get(tqdm_class=bar))
    with progress(f"checking {name}", sum(file.size for file in needed)) as advance:
        for file in needed:
            _require_hash(folder / file.path, file, name, advance)
    return folder


def _missing_bytes(name: str, commit: str, files: "list[RepoFile]") -> int:
    """Return how much of a model is not in the cache, if the disk has room for it."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [
        file.size
        for file in files
        if not isinstance(try_to_load_from_cache(name, file.path, revision=commit), str)
    ]
    if shutil.disk_usage(nearest_folder(Path(constants.HF_HUB_CACHE))).free < sum(missing):
        raise OSError(errno.ENOSPC, f"{size_text(sum(missing))} are missing")
    if missing:
        size = size_text(sum(missing))
        click.echo(f"fetching {counted(len(missing), 'file')} of {name}, {size}", err=True)
    return sum(missing)


@contextmanager
def _stoppable(advance: Advance) -> "Iterator[type[tqdm]]":
    """Yield a bar for huggingface_hub that tells `advance`.

    At Ctrl-C the library waits for files that it fetches. Here its threads end at the next piece.
    """
    from huggingface_hub.utils.tqdm import tqdm

    stopped = threading.Event()

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            self._counts = name == "huggingface_hub.snapshot_download"
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        @override
        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt
            if self._counts:
                advance(int(n or 0))

    def stop(*_: object) -> NoReturn:
        stopped.set()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    # Where Ctrl-C is ignored or means something else, that stays.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        yield Bar
    finally:
        signal.signal(signal.SIGINT, before)


def _require_hash(path: Path, file: "RepoFile", name: str, on_read: Advance) -> None:
    """Remove a file that does not have the hash that the Hub names, and raise DataError."""
    # A file in git's large storage is known by its own hash, any other by that of its git object.
    wanted, digest = file.blob_id, hashlib.sha1(usedforsecurity=False)
    digest.update(f"blob {path.stat().st_size}\0".encode())
    if file.lfs is not None:
        wanted, digest = file.lfs.sha256, hashlib.sha256()
    with open_ordinary(path) as descriptor:
        for piece in read_pieces(descriptor, 0, None):
            digest.update(piece)
            on_read(len(piece))
    if digest.hexdigest() == wanted:
        return
    for each in (path.resolve(), path):
        each.unlink(missing_ok=True)
    raise DataError(
        f"{clean_text(file.path)} of {name} is not the file that the Hub names",
        why=f"its hash is {digest.hexdigest()[:16]}, and not {clean_text(wanted)[:16]}",
        fix="run the command again, which fetches it anew; if that fails too, something between"
        " this host and the Hub changes files",
        code="E-DAT-064",
    )


# --- errors -------------------------------------------------------------------------------------


def _asked(
    step: Callable[[], T],
    name: str,
    revision: str = "",
    *,
    writes: bool = False,
    num_tries: int = _TRIES,
) -> T:
    """Return what a step with the Hub returns. After a broken connection, it is done again.

    Raises:
        DecodError: The step fails.
    """
    from huggingface_hub import errors

    failures = (
        errors.HTTPError,  # type: ignore[attr-defined]  # Of the library that it speaks HTTP with.
        *(errors.RevisionResolutionError, errors.CachedRepoTreeNotFoundError),
        *(OSError, ValueError, LookupError, RuntimeError),
    )
    for left in reversed(range(num_tries)):
        try:
            with _quietly():
                return step()
        except failures as error:
            told = _told(error, name, revision, writes=writes)
            if left == 0 or told.code != _UNREACHABLE:
                raise told from None
        time.sleep(_PAUSE_S)
    raise AssertionError(num_tries)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep huggingface_hub from printing: addresses of files, and texts of errors, hold secrets."""
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        with warnings.catch_warnings(), disable_progress_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _told(error: Exception, name: str, revision: str, *, writes: bool) -> DecodError:
    """Return decod's error for one of huggingface_hub."""
    from huggingface_hub import constants, errors

    cause = error
    while not isinstance(cause, errors.HfHubHTTPError):
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return DataError(
                f"{name} is not in the cache as a whole, and no folder of this host",
                why=f"HF_HUB_OFFLINE is set, so only {constants.HF_HUB_CACHE} is looked at",
                fix="run the command once without HF_HUB_OFFLINE, or give a folder",
                code=_NOT_CACHED,
            )
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or (isinstance(cause, OSError) and cause.filename):
            return HardwareError(
                f"{name} can't be kept in {constants.HF_HUB_CACHE}",
                why=why_of(cause),
                fix="free space there, or set HF_HOME to a folder on another disk",
                code="E-HW-023",
            )
        deeper = cause.__cause__ or cause.__context__
        if not isinstance(deeper, Exception):
            break
        cause = deeper
    answered = isinstance(cause, errors.HfHubHTTPError)
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
    if not answered or status in (408, 429) or status >= 500:
        return NetworkError(
            f"the Hub can't be reached, or its connection breaks: {name} is not there as a whole",
            why=f"{_TRIES} tries failed at {shown(constants.ENDPOINT)}, the last with "
            f"{status or type(cause).__name__}",
            fix="run the command again later: it goes on with the files that are missing",
            code=_UNREACHABLE,
        )
    return _refusal(cause, name, revision, writes=writes)


def _no_write_access(name: str, why: str) -> ConfigError:
    fix = "set HF_TOKEN to a token that may write there, or give a name below your own account"
    return ConfigError(f"no access to write to {name}", why=why, fix=fix, code="E-CFG-112")


def _other_repository(what: str, why: str) -> ConfigError:
    return ConfigError(what, why=why, fix="give another name, or change it there", code="E-CFG-113")


def _refusal(answer: Any, name: str, revision: str, *, writes: bool) -> DecodError:
    """Return the error for an answer of the Hub that will be the same a moment later."""
    from huggingface_hub import constants, errors, get_token

    page = f"{shown(constants.ENDPOINT)}/{name}"
    token = get_token()
    account = "the token is of an account without it" if token else "HF_TOKEN is not set"
    status = answer.response.status_code
    if writes and (status in (401, 403) or isinstance(answer, errors.RepositoryNotFoundError)):
        return _no_write_access(name, account)
    if isinstance(answer, errors.GatedRepoError):
        what, why = f"{name} is gated: it needs an access that was not given", account
        fix = f"accept its licence at {page}, and set HF_TOKEN to a token of that account"
    elif isinstance(answer, errors.RepositoryNotFoundError):
        what = f"there is no model {name} on the Hub, and no such folder here"
        why = f"or it is private, and {account}"
        fix = "give a folder that is there, or correct the name; for a private model set HF_TOKEN"
    elif isinstance(answer, errors.RevisionNotFoundError):
        what, why = f"{name} has no revision {revision}", "it is no branch, tag or commit there"
        fix = f"give one that is listed at {page}/commits/main"
    elif status == 401:
        what, why = "the Hub does not know the token", "it has ended, or is not whole"
        fix = "set HF_TOKEN to a new one, or remove it: most models need none"
    else:
        words = str(answer.server_message or "no reason").replace(token or "\0", "[token]")
        words = clean_text(words, limit=_SERVER_WORDS_MAX)
        what, why = f"the Hub refuses {name}", f"it answers {status}: {words}"
        fix = f"look at {page}"
    return DataError(what, why=why, fix=fix, code="E-DAT-063")

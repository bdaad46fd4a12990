"""The join string in a file that only its owner may read: it lets its holder join the run."""

import os
from contextlib import suppress
from pathlib import Path

from decod.errors import ConfigError

JOIN_STRING_MAX_CHARACTERS = 10_000
"""Room for a join string with all its addresses."""


def read_join_string(path: Path) -> str:
    """Return the text of a file, without spaces around it.

    Raises:
        ConfigError: The file can't be read (E-CFG-046).
    """
    try:
        # Reading a pipe or a device might never end.
        if not path.is_file():
            raise _unreadable(path, "it is no file")
        with path.open(encoding="utf-8") as stream:
            return stream.read(JOIN_STRING_MAX_CHARACTERS).strip()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, "it is no text") from error


def write_join_string(path: Path, text: str, *, owner: tuple[int, int] | None = None) -> None:
    """Write a file that only its owner can read. It is written whole or not at all.

    Args:
        path: The file. Its folder must exist.
        text: A join string.
        owner: User and group id of the file; None for this process's.

    Raises:
        ConfigError: The file can't be written (E-CFG-047).
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            new.unlink()
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            if owner is not None:
                os.fchown(stream.fileno(), *owner)
            stream.write(f"{text}\n")
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"can't write the join string to {path}",
            why=error.strerror or str(error),
            fix="give a file in a folder that exists and that you may write to",
            code="E-CFG-047",
        ) from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"can't read the join string from {path}",
        why=why,
        fix="give the file into which the organiser's line was written",
        code="E-CFG-046",
    )

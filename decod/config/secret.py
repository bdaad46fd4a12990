"""The join string in a file that only its owner may read: it lets its holder join the run."""

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from decod.config.node_config import invoking_user
from decod.errors import ConfigError
from decod.files import read_beginning
from decod.system import PROC

JOIN_STRING_MAX_CHARACTERS = 10_000
"""Room for a join string with all its addresses."""

_PEOPLE = range(1000, 60_000)
"""Ids of users that are people, and neither the system's nor made for a while by systemd."""

_NO_SHELLS = ("/nologin", "/false")

_NOBODY_LOGGED_IN = 2**32 - 1
"""`loginuid` of a process that no login has begun."""


def read_join_string(path: Path) -> str:
    """Return the text of a file, without spaces around it.

    Raises:
        ConfigError: The file can't be read, or holds no text of that length (E-CFG-046).
    """
    try:
        content = read_beginning(path, JOIN_STRING_MAX_CHARACTERS + 1)
    except OSError as error:
        raise _unreadable(str(path), error.strerror or str(error)) from error
    return text_of(content, str(path))


def text_of(content: bytes, source: str) -> str:
    """Return a join string that was read as bytes, without spaces around it.

    Args:
        content: The bytes, or at least `JOIN_STRING_MAX_CHARACTERS + 1` of them.
        source: Their origin, for errors.

    Raises:
        ConfigError: They are no text of that length (E-CFG-046).
    """
    if len(content) > JOIN_STRING_MAX_CHARACTERS:
        raise _unreadable(source, f"it has more than {JOIN_STRING_MAX_CHARACTERS:,} bytes")
    try:
        text = content.decode().strip()
    except ValueError as error:
        raise _unreadable(source, "it is not UTF-8 text") from error
    if not text or "\0" in text:
        raise _unreadable(source, "it is not UTF-8 text" if text else "it is empty")
    return text


def holds_secret(text: str) -> bool:
    """Return whether a join string lets its holder in. A string for former members does not."""
    return "decod1-m-" not in text.lower()


def has_other_users(proc: Path = PROC, shadow: Path = Path("/etc/shadow")) -> bool:
    """Return whether other people than this command's user can use this host.

    They have an account that they can log in to, or are logged in with one of a directory.

    Args:
        proc: The system's list of processes.
        shadow: The system's list of passwords.
    """
    own = {os.getuid(), os.geteuid()}
    people = set[int]()
    locked = _without_password(shadow)
    for user in pwd.getpwall():
        if user.pw_name == invoking_user():
            own.add(user.pw_uid)
        if user.pw_uid not in _PEOPLE or user.pw_shell.endswith(_NO_SHELLS):
            continue
        if user.pw_name not in locked or _has_keys(Path(user.pw_dir)):
            people.add(user.pw_uid)
    for path in proc.glob("[0-9]*/loginuid"):
        with suppress(OSError, ValueError):
            people.add(int(path.read_text()))
    return bool(people - own - {0, _NOBODY_LOGGED_IN})


def _has_keys(home: Path) -> bool:
    """Return whether somebody can log in to an account with a key of SSH, as far as is known."""
    with suppress(OSError):
        return (home / ".ssh/authorized_keys").exists()
    return True


def _without_password(shadow: Path) -> set[str]:
    """Return the users who have no password, as far as this user may know: images have such."""
    with suppress(OSError, ValueError):
        lines = shadow.read_text(encoding="utf-8").splitlines()
        entries = [line.split(":") for line in lines]
        return {entry[0] for entry in entries if len(entry) > 1 and entry[1][:1] in ("!", "*")}
    return set()


def others_may_read(path: Path) -> bool:
    """Return whether other users of this host may read a file, if there are any."""
    if not has_other_users():
        return False
    with suppress(OSError):
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    return False


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


def _unreadable(source: str, why: str) -> ConfigError:
    return ConfigError(
        f"can't read the join string from {source}",
        why=why,
        fix="give the line that the organiser has sent, in a file or on standard input",
        code="E-CFG-046",
    )

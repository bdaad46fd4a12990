"""Texts: fitted into limited space, cleaned of what others may have put in, and forms that have
one reading only.

Base32 is written in lower case and without padding, so that it fits into names of the DNS. The
hooks for `json.loads` refuse texts which two readers might read differently.
"""

import base64
import unicodedata
from pathlib import Path
from typing import Any, NoReturn

_DOTS = "..."


def why_of(error: Exception) -> str:
    """Return an error's message, without the system's error number."""
    said = error.strerror if isinstance(error, OSError) else str(error)
    return said or type(error).__name__


def why_unwritten(path: Path, error: OSError) -> str:
    """Return which file a disk refuses, and why. Other members may read it, so no folder is told,
    except the last."""
    return f"{path.parent.name}/{path.name}: {why_of(error)}"


def clip(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, cut at the end of a word.

    A very long last word, such as a path, is cut itself.
    """
    if len(text) <= limit:
        return text
    cut = text[: limit - len(_DOTS)]
    whole = cut.rpartition(" ")[0]
    if text[len(cut)] != " " and len(whole) >= limit // 2:
        cut = whole
    return cut.rstrip(" ,;:.(") + _DOTS


def plain_value(value: object) -> Any:
    """Return a value that JSON can hold: numbers, booleans and None as they are, others as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean_text(value)


def counted(num: int, noun: str) -> str:
    """Return a number of things whose plural ends with an s: `1 stage`, `2 stages`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def printable(text: str) -> str:
    """Return a text that may be printed: characters that control a terminal are replaced."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def size_text(num_bytes: float) -> str:
    """Return a size in MiB or GiB, with one decimal."""
    mib = num_bytes / (1 << 20)
    return f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"


def span(seconds: float) -> str:
    """Return a length of time in its largest whole unit."""
    for unit, size_s in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def length_of(duration_s: float) -> str:
    """Return a length of time in its two largest units."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


TEXT_MAX_CHARACTERS = 200
"""Longest string from a peer that is shown whole. Names and reasons are shorter."""

# Control, format (bidirectional marks reorder what is read), surrogate, private, unassigned,
# line and paragraph separators.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean_text(value: object, *, limit: int = TEXT_MAX_CHARACTERS) -> str:
    """Return `value` as one line of at most `limit` characters without control characters.

    A peer's string can then neither forge a second log record nor move the reader's cursor.
    Each unsafe character is replaced by `?`, so that the reader sees it was there.
    """
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - a foreign __str__ must not end the caller.
        return f"<{type(value).__name__}>"
    text = clip(text, limit)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " "
        if character in "\n\t"
        else "?"
        if unicodedata.category(character) in _UNSAFE_CATEGORIES
        else character
        for character in text
    )


# --- base32 --------------------------------------------------------------------------------------
# Base32 as decod writes it: lower case, without padding. So it fits into names of the DNS.


def base32(data: bytes) -> str:
    """Return bytes as text of a-z and 2-7."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def from_base32(text: str) -> bytes:
    """Return the bytes that `base32` has written as this text.

    Raises:
        ValueError: It is no such text.
    """
    data = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    if base32(data) != text:
        raise ValueError(f"{text!r} is not written as base32 is here")
    return data


# --- strict JSON ---------------------------------------------------------------------------------
# Hooks for `json.loads` that refuse texts which two readers might read differently.


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. For `object_pairs_hook`.

    Raises:
        ValueError: A key is duplicate. Some readers take the first value, most the last.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {ascii(twice)[:60]} stands twice in one object")
    return values


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity. For `parse_constant`.

    Raises:
        ValueError: Always, because JSON has no such numbers.
    """
    raise ValueError(f"{name} is no number of JSON's")

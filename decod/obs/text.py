"""Cleaning of text from outside for one line of a log or a terminal."""

import unicodedata

from decod.texts import clip

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

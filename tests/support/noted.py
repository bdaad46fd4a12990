"""Entries of a journal, as a node would note them."""

from collections.abc import Mapping
from typing import Any

from decod.journal.journal import JournalEntry


def noted(event: str, fields: Mapping[str, Any], now_s: float = 0.0) -> JournalEntry:
    """Return an entry whose two clocks show the same."""
    return JournalEntry(event, fields, now_s, now_s)

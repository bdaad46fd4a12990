"""Contents of JSON files, with one thing wrong with them."""

import copy
from typing import Any


def changed(source: dict[str, Any], *keys: str | int, to: object) -> dict[str, Any]:
    """A copy of a file's content with one value replaced, or a list's end extended."""
    values = copy.deepcopy(source)
    place: Any = values
    for key in keys[:-1]:
        place = place[key]
    if isinstance(place, list) and keys[-1] == len(place):
        place.append(to)
    else:
        place[keys[-1]] = to
    return values


def without(source: dict[str, Any], *keys: str | int) -> dict[str, Any]:
    """A copy of a file's content without one value."""
    values = copy.deepcopy(source)
    place: Any = values
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return values

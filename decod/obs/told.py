"""Readers of a status that another node may have told.

A value of the wrong type counts as absent. In a status that is None, all are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def mapping_in(values: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Return the object that `values` has under a name, or an empty one."""
    value = None if values is None else values.get(name)
    return value if isinstance(value, Mapping) else {}


def sequence_in(values: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects of the list that `values` has under a name, or none."""
    value = None if values is None else values.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def number_in(values: Mapping[str, Any], name: str) -> int | float | None:
    """Return the finite number that `values` has under a name, or None.

    An integer beyond 2^53 counts as absent: no honest node sends one, and not every reader of JSON
    can hold it.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= 2**53 and math.isfinite(value) else None

"""Hooks for `json.loads` that refuse texts which two readers might read differently."""

from typing import Any, NoReturn


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

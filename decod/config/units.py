"""Rates and sizes as people write them: `20Mbit`, `10GiB`. A unit is always needed."""

import re

_NUMBER = r"([0-9]{1,16}(?:\.[0-9]{1,6})?)"
_RATE = re.compile(_NUMBER + r"(kbit|mbit|gbit)(?:/s)?\Z", re.ASCII | re.IGNORECASE)
_UNITS_MBIT = {"kbit": 0.001, "mbit": 1.0, "gbit": 1000.0}

_SIZE = re.compile(_NUMBER + r"(kib|mib|gib|tib|kb|mb|gb|tb|b)\Z", re.ASCII | re.IGNORECASE)
_UNITS_BYTES = {
    "TiB": 1 << 40,
    "TB": 10**12,
    "GiB": 1 << 30,
    "GB": 10**9,
    "MiB": 1 << 20,
    "MB": 10**6,
    "KiB": 1 << 10,
    "kB": 10**3,
    "B": 1,
}
_BYTES_OF = {unit.lower(): num for unit, num in _UNITS_BYTES.items()}


def read_rate(text: str) -> float:
    """Return a rate such as `20Mbit` or `1.5Gbit/s` in Mbit/s.

    Raises:
        ValueError: It is no rate. The text says how to write one.
    """
    match = _RATE.match(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no rate: write it like 20Mbit or 1Gbit")
    return float(match[1]) * _UNITS_MBIT[match[2].lower()]


def show_rate(rate_mbit: float) -> str:
    """Return a rate in Mbit/s as `read_rate` reads it, with up to six decimals."""
    return f"{rate_mbit:.6f}".rstrip("0").rstrip(".") + "Mbit"


def read_size(text: str) -> int:
    """Return a size such as `10GiB` or `500MB` in bytes, rounded down.

    Raises:
        ValueError: It is no size. The text says how to write one.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no size: write it like 10GiB or 500MiB")
    return int(float(match[1]) * _BYTES_OF[match[2].lower()])


def show_size(num_bytes: int) -> str:
    """Return a size as `read_size` reads it: in the largest unit that shows it without decimals."""
    for unit, each_bytes in _UNITS_BYTES.items():
        if num_bytes >= each_bytes and num_bytes % each_bytes == 0:
            return f"{num_bytes // each_bytes}{unit}"
    return f"{num_bytes}B"

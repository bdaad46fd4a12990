"""Base32 as decod writes it: lower case, without padding. So it fits into names of the DNS."""

import base64


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

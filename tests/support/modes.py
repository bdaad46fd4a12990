"""Folders and files that this process may not read, even if it runs as root."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: a process with them may open any file."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def modes_matter() -> Iterator[None]:
    """Make file modes count for this thread, as they do without root."""
    libc, header, halves = ctypes.CDLL(None, use_errno=True), _Header(_VERSION, 0), (_Half * 2)()
    if os.geteuid() != 0:
        yield
        return
    if libc.capget(ctypes.byref(header), halves):
        pytest.skip("capabilities can't be read")
    before = halves[0].effective
    halves[0].effective &= ~_OVERRIDES
    if libc.capset(ctypes.byref(header), halves):
        pytest.skip("capabilities can't be given up")
    try:
        yield
    finally:
        halves[0].effective = before
        assert libc.capset(ctypes.byref(header), halves) == 0

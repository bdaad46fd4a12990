"""Marks for tests of what only Linux has. With `DECOD_PORTABLE` set they skip on Linux, too."""

import pytest

from decod.system import IS_LINUX

linux_alone = pytest.mark.skipif(not IS_LINUX, reason="only Linux does this (decod/system.py)")

STOPPED_OR_NOT = (
    pytest.param(True, marks=linux_alone),
    pytest.param(False, marks=pytest.mark.slow),
)
"""Whether a process is stopped when the one that it must not outlive ends."""

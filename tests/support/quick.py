"""Which of a test's many cases every run of the tests plays: the others are slow."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def first_of(cases: Iterable[object], num_quick: int = 1) -> list[ParameterSet]:
    """Return parameters for a test. All but the first few need `-m slow`."""
    return [
        pytest.param(case, marks=() if place < num_quick else pytest.mark.slow)
        for place, case in enumerate(cases)
    ]

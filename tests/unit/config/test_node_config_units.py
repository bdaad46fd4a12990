"""Rates and sizes: whatever is shown is read again as the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.node_config import read_rate, read_size, show_rate, show_size


@pytest.mark.parametrize(
    ("text", "rate_mbit"),
    [("20Mbit", 20.0), ("1.5gbit/s", 1500.0), ("500kbit", 0.5), ("1Mbit", 1.0)],
)
def test_a_rate_is_in_mbit(text: str, rate_mbit: float) -> None:
    assert read_rate(text) == rate_mbit


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("10GiB", 10 << 30), ("50gb", 50 * 10**9), ("1.5KiB", 1536), ("2TiB", 2 << 40)],
)
def test_a_size_is_in_bytes(text: str, num_bytes: int) -> None:
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "20", "20MB", "-1Mbit", "1e3Mbit", "٣Mbit", "20 Mbit", "nan"])
def test_what_has_no_unit_of_a_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="like 20Mbit"):
        read_rate(text)


@pytest.mark.parametrize("text", ["", "20", "20Mbit", "-1GiB", "1GiBs", "inf", "9" * 40 + "GiB"])
def test_what_has_no_unit_of_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="like 10GiB"):
        read_size(text)


@given(st.integers(1, 10**8 - 1), st.sampled_from(["kbit", "Mbit"]))
def test_a_rate_that_is_shown_is_read_again(number: int, unit: str) -> None:
    rate = read_rate(f"{number}{unit}")
    if rate < 10**8:
        assert read_rate(show_rate(rate)) == pytest.approx(rate, rel=1e-6)


@given(st.integers(1, 10**7), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_that_is_shown_is_read_again(number: int, unit: str) -> None:
    size = read_size(f"{number}{unit}")
    assert read_size(show_size(size)) == size

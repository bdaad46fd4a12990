"""Texts that have to fit: no word is cut, unless it is too long by itself."""

from hypothesis import given
from hypothesis import strategies as st

from decod.texts import clip, counted


def test_a_text_that_fits_stays_as_it_is() -> None:
    assert clip("all is well", 11) == "all is well"


def test_a_text_that_is_too_long_ends_with_a_word() -> None:
    assert clip("the connection broke, and nobody knows why", 30) == "the connection broke, and..."
    assert clip("the connection broke, and nobody knows why", 25) == "the connection broke..."


def test_a_word_that_is_too_long_by_itself_is_cut() -> None:
    assert clip("cannot read /" + "x" * 100, 30) == "cannot read /" + "x" * 14 + "..."


@given(st.text(max_size=60), st.integers(4, 80))
def test_a_text_never_gets_longer_than_allowed(text: str, limit: int) -> None:
    cut = clip(text, limit)
    assert len(cut) <= limit
    assert cut == text or cut.endswith("...")


def test_only_one_thing_is_singular() -> None:
    assert [counted(num, "stage") for num in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]

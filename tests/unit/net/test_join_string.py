"""A join string that was copied badly says what is wrong with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import NetworkError
from decod.ids import RunId
from decod.net.address import join_address, split_address
from decod.net.join_string import LABEL, JoinString

GOOD = JoinString(
    run_id=RunId("abcdefghijklmnopqrstuvwxyz"),
    manifest_prefix="0123456789abcdef",
    addresses=("10.0.0.1:7700", "[2001:db8::7]:7700", "gpu.example.org:1"),
)
TEXT = str(GOOD)
HEAD, _, TAIL = TEXT.partition("@")


def test_it_survives_its_text_and_the_white_space_around_it() -> None:
    assert JoinString.parse(TEXT) == GOOD
    assert JoinString.parse(f"  {TEXT}\n") == GOOD
    assert JoinString.parse(f"{LABEL} {TEXT}\n") == GOOD, "the whole line of the leader"
    assert len(HEAD) == 55


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("decod2" + TEXT[6:], "does not begin with decod1-"),
        (HEAD[:-3], "incomplete: 3 characters missing"),
        (HEAD[:-3] + "@" + TAIL, "incomplete: 3 characters missing"),
        (HEAD, "no address"),
        (HEAD + "@", "no address"),
        (HEAD + "@,", "no address"),
        (HEAD + "xx@" + TAIL, "2 characters too many"),
        (TEXT.replace("abcdef", "abcedf", 1), "its check does not hold"),
        (TEXT.replace("abcdef", "ABCDEF", 1), "can't be part of one"),
        (HEAD + "@10.0.0.1", "E-NET-011"),
        (HEAD + "@10.0.0.1:0", "E-NET-011"),
        (HEAD + "@" + ",".join(["h:1"] * 17), "17 addresses"),
        (HEAD + "@" + "x" * 9000, "characters"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(NetworkError) as caught:
        JoinString.parse(text)
    assert said in str(caught.value)
    assert caught.value.exit_code == 4


@given(st.integers(7, 54), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_no_single_altered_character_passes(position: int, character: str) -> None:
    text = TEXT[:position] + character + TEXT[position + 1 :]
    if text != TEXT:
        with pytest.raises(NetworkError):
            JoinString.parse(text)


@given(st.text(max_size=300))
def test_any_other_text_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(NetworkError):
        JoinString.parse(text)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "h:65535", "a-b.c.d:7700", "[::1]:7700"])
def test_an_address_survives_being_split(address: str) -> None:
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", ":1", "h", "h:", "h:0", "h:65536", "h:-1", "h:1x", "h:\u0661", "h: 1"),
        *("::1:7700", "[::1]", "[h]:1", "[1.2.3.4]:1", "1.2.3:1", "1.2.3.4.5:1"),
        *("a b:1", "-h:1", "h..x:1", "x" * 300 + ":1"),
    ],
)
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(NetworkError, match="E-NET-011"):
        split_address(address)

"""Join strings survive terminals and copying, and say what is wrong when they did not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import NetworkError
from decod.membership.token import Token
from decod.net.address import join_address, split_address
from decod.net.join_string import ADDRESSES_MAX, DATA_LABEL, LABEL, JoinString
from decod.protocol.core.view import Role
from tests.support.members import ROOT

TOKEN = Token(Role.RELAY, bytes(range(20)))
GOOD = JoinString(root=ROOT.public, addresses=("10.0.0.1:7700", "[::1]:7701"), token=TOKEN)
TEXT = str(GOOD)
HEAD, _, TAIL = TEXT.partition("@")


@pytest.mark.parametrize(
    "token", [TOKEN, Token(Role.DATA, bytes(20)), None], ids=["volunteer", "data", "member"]
)
def test_a_join_string_survives_reading_and_writing(token: Token | None) -> None:
    join = JoinString(root=ROOT.public, addresses=("h:1",), token=token)
    assert JoinString.parse(str(join)) == join


@pytest.mark.parametrize("text", [f"  {TEXT}\n", f"{LABEL} {TEXT}", f"{DATA_LABEL} {TEXT}"])
def test_spaces_and_the_label_around_it_do_no_harm(text: str) -> None:
    assert JoinString.parse(text) == GOOD


def test_the_secret_is_in_no_text_for_people() -> None:
    secret = TEXT.split("-")[3]
    assert secret not in repr(GOOD)
    assert secret not in repr(TOKEN)
    assert repr(TOKEN.secret) not in repr(GOOD) + repr(TOKEN)


@pytest.mark.parametrize("kind", ["v", "d", "m"])
def test_every_altered_character_is_noticed(kind: str) -> None:
    role = {"v": Role.RELAY, "d": Role.DATA, "m": None}[kind]
    token = None if role is None else Token(role, TOKEN.secret)
    text = str(JoinString(root=ROOT.public, addresses=("h:1",), token=token))
    for k in range(text.index("@")):
        other = "b" if text[k] == "a" else "a"
        with pytest.raises(NetworkError, match="E-NET-010"):
            JoinString.parse(text[:k] + other + text[k + 1 :])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        (LABEL, "it is empty"),
        ("decod2-x", "does not begin with decod1-"),
        (HEAD[:-3] + "@h:1", "it is incomplete: 3 characters missing"),
        (HEAD[:40], f"it is incomplete: {len(HEAD) - 40} characters missing"),
        ("decod1-", f"it is incomplete: {len(HEAD) - 7} characters missing"),
        (f"{HEAD}zz@h:1", "it has 2 characters too many before the @"),
        (HEAD + "10.0.0.1:7700", "characters too many and no @host:port at the end"),
        (HEAD.replace("-v-", "-x-"), "'x' after decod1- is no kind of it"),
        (HEAD.replace("-v-", "-d-") + "@h:1", "a character was altered"),
        (HEAD.upper() + "@h:1", "does not begin with decod1-"),
        (HEAD[:20] + "!" + HEAD[21:] + "@h:1", "a character in it can't be part of one"),
        (HEAD, "no address in it"),
        (HEAD + "@", f"no address in it: after the first {len(HEAD)} characters"),
        (HEAD + "@," + ",".join(["h:1"] * (ADDRESSES_MAX + 1)), "more than 16"),
        (TEXT + ",h:1" * 4000, "it has"),
    ],
)
def test_a_damaged_join_string_says_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(NetworkError, match="E-NET-010") as caught:
        JoinString.parse(text)
    assert told in str(caught.value)
    assert caught.value.exit_code == 4


def test_an_address_that_cannot_be_read_is_named() -> None:
    with pytest.raises(NetworkError, match="E-NET-011"):
        JoinString.parse(f"{HEAD}@nonsense")


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

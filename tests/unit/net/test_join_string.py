"""Join strings survive terminals and copying, and say what is wrong when they did not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import NetworkError
from decod.membership.tokens import Token
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


WRAPPED = "\n".join(TEXT[k : k + 40] for k in range(0, len(TEXT), 40))


@pytest.mark.parametrize(
    "text",
    [
        f"  {TEXT}\n",
        f"{LABEL} {TEXT}",
        f"{DATA_LABEL} {TEXT}",
        f"the leader's {LABEL} {TEXT}",
        f"decod join {TEXT}",
        f"$ decod join '{TEXT}'",
        f"decod leader RUN.toml --join {TEXT}".replace("--join ", ""),
        *(
            f"{left}{TEXT}{right}"
            for left, right in ("''", '""', "``", "\u201c\u201d", "\u201e\u201c")
        ),
        *(f"{left}{TEXT}{right}" for left, right in ("<>", "\u2018\u2019", "\u00ab\u00bb")),
        f"join us with **{TEXT}**.",
        f"{TEXT};",
        WRAPPED,
        WRAPPED.replace("\n", "\r\n"),
        WRAPPED.replace("\n", " "),
        "> " + WRAPPED.replace("\n", "\n> "),
        TEXT.replace("@", "\n@").replace(":7700", ": 7700"),
        TEXT.replace("-", "\u2013"),
        TEXT.replace("-", "\u2011"),
        "\u200b\ufeff" + TEXT[:30] + "\u00ad\u200b" + TEXT[30:],
        TEXT.upper(),
        TEXT.capitalize(),
    ],
)
def test_what_copying_adds_does_no_harm(text: str) -> None:
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
        (" \n'' ", "it is empty"),
        (LABEL, "does not begin with decod1-"),
        ("decod2-x", "does not begin with decod1-"),
        (HEAD[:-3] + "@h:1", "it is incomplete: 3 characters missing"),
        (HEAD[:40], f"it is incomplete: {len(HEAD) - 40} characters missing"),
        ("decod1-", f"it is incomplete: {len(HEAD) - 7} characters missing"),
        (f"{HEAD}zz@h:1", "it has 2 characters too many before the @"),
        (HEAD + "10.0.0.1:7700", "characters too many and no @host:port at the end"),
        (HEAD.replace("-v-", "-x-"), "'x' after decod1- is no kind of it"),
        (HEAD.replace("-v-", "-d-") + "@h:1", "a character was altered"),
        (TEXT[3:], "does not begin with decod1-"),
        (TEXT[9:], "does not begin with decod1-"),
        (f"{TEXT}\n{TEXT}", "there are 2 of them"),
        (f"{DATA_LABEL} {TEXT}\n{LABEL} {TEXT}", "there are 2 of them"),
        (f"{TEXT} --device cuda:0", "options of a command"),
        (f"decod join --stage 1 {TEXT}", "options of a command"),
        (HEAD[:20] + HEAD[21] + HEAD[20] + HEAD[22:] + "@h:1", "a character was altered"),
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
    assert_secret_kept(str(caught.value))


def assert_secret_kept(text: str) -> None:
    """Checks that not even a part of the secret is in a text."""
    secret = TEXT.split("-")[3].lower()
    parts = {secret[k : k + 6] for k in range(len(secret) - 5)}
    assert not [part for part in parts if part in text.lower()]


def test_an_address_that_cannot_be_read_is_named() -> None:
    with pytest.raises(NetworkError, match="E-NET-011"):
        JoinString.parse(f"{HEAD}@nonsense")


@pytest.mark.parametrize(
    "tail", ["h", "h:", "h:0", "h:65536", "::1:7700", "h:7700relay", "h:1,h", "[::1]", "h 1"]
)
def test_an_address_that_was_cut_or_mistyped_says_what_to_copy(tail: str) -> None:
    with pytest.raises(
        NetworkError, match=r"E-NET-011 .*host:port.* nothing that stands behind it"
    ) as caught:
        JoinString.parse(f"{HEAD}@{tail}")
    assert_secret_kept(str(caught.value))


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

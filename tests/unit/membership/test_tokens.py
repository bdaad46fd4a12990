"""Join tokens: who may use them, how often, and what is kept of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decod.errors import ConfigError, MalformedMessageError
from decod.ids import NodeId
from decod.membership import tokens as module
from decod.membership.tokens import TOKENS_MAX, Token, Tokens, unpack_records
from decod.protocol.core.view import Role
from decod.texts import base32

A, B, C = (NodeId(letter * 52) for letter in "abc")


def test_a_token_lets_in_as_many_nodes_as_it_says_until_it_expires(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.create(Role.RELAY, now_s=0.0, life_s=100.0, uses=2)
    assert [tokens.use(token.id, node, 1.0) for node in (A, A, B, A)] == [""] * 4
    assert "as often as it may be: 2" in tokens.use(token.id, C, 1.0)
    assert tokens.use(token.id, A, 99.0) == "", "its answer may have been lost"
    assert "has expired" in tokens.use(token.id, A, 101.0)
    assert "not known" in tokens.use("aaaaaaaa", A, 1.0)


def test_a_revoked_token_lets_nobody_in(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.create(Role.RELAY, now_s=0.0, life_s=100.0, uses=2)
    assert tokens.use(token.id, A, 1.0) == ""
    assert tokens.revoke(token.id)
    assert not tokens.revoke("aaaaaaaa")
    assert "was revoked" in tokens.use(token.id, A, 1.0)
    assert "was revoked" in Tokens(tmp_path).use(token.id, A, 1.0), "after a restart too"


def test_what_is_kept_lets_nobody_join(tmp_path: Path) -> None:
    token = Tokens(tmp_path).create(Role.DATA, now_s=0.0, life_s=9.0, uses=1, note="for Ada")
    file = tmp_path / "tokens.json"
    text = file.read_text()
    assert base32(token.secret) not in text
    assert token.secret.hex() not in text
    assert file.stat().st_mode & 0o077 == 0
    (record,) = Tokens(tmp_path).all()
    assert (record.id, record.role, record.note) == (token.id, Role.DATA, "for Ada")


def test_the_role_is_part_of_the_key() -> None:
    """Or a volunteer could alter one letter of its join string and become a data node."""
    assert Token(Role.RELAY, bytes(20)).public != Token(Role.DATA, bytes(20)).public


def test_a_bounded_number_is_kept_and_old_ones_are_forgotten_first(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    made = [
        tokens.create(Role.RELAY, now_s=float(k), life_s=1000.0, uses=1) for k in range(TOKENS_MAX)
    ]
    with pytest.raises(ConfigError, match="E-CFG-043"):
        tokens.create(Role.RELAY, now_s=300.0, life_s=1.0, uses=1)
    tokens.revoke(made[7].id)
    tokens.create(Role.RELAY, now_s=300.0, life_s=1.0, uses=1)
    assert tokens.find(made[7].id) is None
    assert len(tokens.all()) == TOKENS_MAX
    later_s = 2000.0 + module._REMEMBERED_S
    tokens.create(Role.RELAY, now_s=later_s, life_s=1.0, uses=1)
    assert len(tokens.all()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda records: "x",
        lambda records: records[0],
        lambda records: [records[0] | {"id": "aaaaaaaa"}],
        lambda records: [records[0] | {"public": "00"}],
        lambda records: [records[0] | {"role": "king"}],
        lambda records: [records[0] | {"more": 1}],
    ],
)
def test_a_damaged_file_is_an_error_and_stays(tmp_path: Path, change: object) -> None:
    """Tokens that were revoked must not be good again, nor may those in use be lost silently."""
    Tokens(tmp_path).create(Role.RELAY, now_s=0.0, life_s=1.0, uses=1)
    file = tmp_path / "tokens.json"
    assert callable(change)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ConfigError, match="E-CFG-038"):
        Tokens(tmp_path)
    assert file.exists()


# --- what data nodes tell each other ----------------------------------------------------------


def pair(role: Role = Role.RELAY) -> tuple[Tokens, Tokens, str]:
    """Returns what two data nodes know, and the id of a token that both have."""
    here, there = Tokens(None), Tokens(None)
    token = here.create(role, now_s=0.0, life_s=1000.0, uses=2, note="for Ada")
    there.merge(here.all(), now_s=0.0, with_data=True)
    return here, there, token.id


def level(here: Tokens, there: Tokens) -> None:
    """Lets both know what the other knows."""
    for taker, teller in ((here, there), (there, here)):
        told = unpack_records(teller.records_for(taker.digests()))
        taker.merge(told, now_s=1.0, with_data=True)
    assert here.digests() == there.digests()


def test_what_two_data_nodes_know_of_a_token_adds_up() -> None:
    here, there, token = pair()
    assert here.use(token, A, 1.0) == ""
    assert there.use(token, B, 1.0) == ""
    level(here, there)
    for tokens in (here, there):
        found = tokens.find(token)
        assert found is not None
        assert {*found.used_by} == {A, B}
        assert "as often as it may be: 2" in tokens.use(token, C, 2.0)
        assert tokens.use(token, A, 2.0) == ""


def test_a_token_that_was_revoked_anywhere_stays_revoked() -> None:
    here, there, token = pair()
    assert there.revoke(token)
    before = here.all()
    level(here, there)
    assert "was revoked" in here.use(token, A, 1.0)
    assert not there.merge(before, now_s=1.0, with_data=True), "an older word changes nothing"
    assert "was revoked" in there.use(token, A, 1.0)


def test_the_terms_of_a_known_token_do_not_change() -> None:
    here, _, token = pair()
    (record,) = here.all()
    wider = replace(record, uses=1000, expires_s=9e9, role=Role.DATA, note="?")
    assert not here.merge([wider], now_s=1.0, with_data=True)
    assert here.all() == [record]
    assert here.find(token) == record


def test_another_data_node_can_not_invite_data_nodes_at_the_organisers_host() -> None:
    here, there, token = pair(Role.DATA)
    organisers = Tokens(None)
    assert not organisers.merge(here.all(), now_s=1.0, with_data=False)
    assert organisers.find(token) is None
    assert there.revoke(token)
    assert here.merge(there.all(), now_s=1.0, with_data=False), "it may revoke one"


def test_a_forgotten_token_does_not_come_back() -> None:
    here, _, _ = pair()
    later_s = 1001.0 + module._REMEMBERED_S
    assert not Tokens(None).merge(here.all(), now_s=later_s, with_data=True)


def test_tokens_of_others_make_room_as_ones_own_do() -> None:
    here, there = Tokens(None), Tokens(None)
    for k in range(TOKENS_MAX):
        here.create(Role.RELAY, now_s=float(k), life_s=5.0 if k == 3 else 1e6, uses=1)
    more = [there.create(Role.RELAY, now_s=300.0, life_s=1e6, uses=1).id for _ in range(2)]
    here.merge(there.all(), now_s=300.0, with_data=True)
    assert len(here.all()) == TOKENS_MAX
    assert sum(here.find(each) is not None for each in more) == 1, "one had ended"


def test_many_records_travel_in_batches() -> None:
    here, there = Tokens(None), Tokens(None)
    for _ in range(40):
        token = here.create(Role.RELAY, now_s=0.0, life_s=1000.0, uses=1000)
        record = here.find(token.id)
        assert record is not None
        nodes = (f"{k:052d}".translate(str.maketrans("0189", "abcd")) for k in range(1000))
        here.merge([replace(record, used_by=tuple(map(NodeId, nodes)))], now_s=0.0, with_data=True)
    num_batches = 0
    while there.digests() != here.digests():
        batch = here.records_for(there.digests())
        assert len(batch) <= 1 << 20
        assert there.merge(unpack_records(batch), now_s=0.0, with_data=True)
        num_batches += 1
    assert num_batches == 3


def test_changes_that_are_made_here_are_told_to_whoever_wants_to_know() -> None:
    here, there, token = pair()
    told: list[str] = []
    here.on_changed.append(lambda: told.append("changed"))
    here.use(token, A, 1.0)
    here.use(token, A, 1.0)
    here.revoke(token)
    there.use(token, B, 1.0)
    here.merge(there.all(), now_s=1.0, with_data=True)
    assert told == ["changed"] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"id": "aaaaaaaa"},
        {"role": "king"},
        {"uses": 0},
        {"uses": "x"},
        {"expires_s": float("inf")},
        {"created_s": "x"},
        {"used_by": ["x"]},
        {"used_by": [A, A]},
        {"revoked": 1},
        {"more": 1},
    ],
)
def test_records_that_are_malformed_are_refused(change: dict[str, object]) -> None:
    here, _, _ = pair()
    (fields,) = json.loads(here.records_for({}))
    assert unpack_records(json.dumps([fields]).encode()) == here.all()
    with pytest.raises(MalformedMessageError):
        unpack_records(json.dumps([fields | change]).encode())


@pytest.mark.parametrize("data", [b"x", b"7", b"[7]", b"{}7", b"[" * 9999, bytes(2 << 20)])
def test_bytes_that_are_no_records_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        unpack_records(data)

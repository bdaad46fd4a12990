"""Join tokens: who may use them, how often, and what is kept of them."""

import json
from pathlib import Path

import pytest

from decod.base32 import base32
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.membership import tokens as module
from decod.membership.token import Token
from decod.membership.tokens import TOKENS_MAX, Tokens
from decod.protocol.core.view import Role

A, B, C = (NodeId(letter * 52) for letter in "abc")


def test_a_token_lets_in_as_many_nodes_as_it_says_until_it_expires(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.create(Role.RELAY, now_s=0.0, life_s=100.0, uses=2)
    assert [tokens.use(token.id, node, 1.0) for node in (A, A, B, A)] == [""] * 4
    assert "all of its 2 uses" in tokens.use(token.id, C, 1.0)
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

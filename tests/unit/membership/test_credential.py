"""Credentials and statements: what follows from the root holds, and nothing else does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.ids import RunId
from decod.membership.credential import (
    Credential,
    Statement,
    credential_from,
    credential_message,
    issue,
    parse_credential,
    parse_statement,
    statement_from,
    statement_message,
)
from decod.membership.statements import check_charter, new_charter
from decod.protocol.core.view import Role
from tests.support.members import ROOT, data_node, host_key, volunteer

NOW_S = 1_000_000
DATA, MALLORY = host_key("leader"), host_key("mallory")
OF_DATA = issue(ROOT.public, ROOT.sign, Role.DATA, DATA.public, NOW_S)
OF_RELAY = issue(
    ROOT.public, DATA.sign, Role.RELAY, host_key("relay").public, NOW_S, issuer=OF_DATA
)


@pytest.mark.parametrize("credential", [OF_DATA, OF_RELAY], ids=["data node", "volunteer"])
def test_what_follows_from_the_root_holds_until_it_expires(credential: Credential) -> None:
    credential.check(ROOT.public, NOW_S)
    with pytest.raises(MalformedMessageError, match="expires_s"):
        credential.check(ROOT.public, NOW_S + 1)
    credential.check(ROOT.public, None)
    assert credential_from(credential_message(credential)) == credential


def test_a_credential_holds_no_longer_than_its_issuers() -> None:
    relay = issue(ROOT.public, DATA.sign, Role.RELAY, MALLORY.public, NOW_S + 9, issuer=OF_DATA)
    assert relay.until_s == NOW_S
    relay.check(ROOT.public, NOW_S)
    for check in (
        lambda: relay.check(ROOT.public, NOW_S + 1),
        lambda: relay.require_unexpired(NOW_S + 1),
    ):
        with pytest.raises(MalformedMessageError, match="expires_s"):
            check()


def forged() -> dict[str, Credential]:
    """Returns credentials that nobody has issued, or nobody could."""
    public, root = MALLORY.public, ROOT.public
    later = replace(OF_DATA, expires_s=NOW_S + 1)
    return {
        "a data node by nobody": issue(root, MALLORY.sign, Role.DATA, public, NOW_S),
        "a data node by a data node": issue(root, DATA.sign, Role.DATA, public, NOW_S, OF_DATA),
        "a volunteer by the root": issue(root, ROOT.sign, Role.RELAY, public, NOW_S),
        "a volunteer by itself": issue(root, MALLORY.sign, Role.RELAY, public, NOW_S, OF_DATA),
        "a volunteer by a volunteer": issue(
            root, host_key("relay").sign, Role.RELAY, public, NOW_S, OF_RELAY
        ),
        "another key": replace(OF_RELAY, public=public),
        "a longer life": replace(OF_RELAY, expires_s=NOW_S + 1),
        "an issuer with a longer life": replace(OF_RELAY, issuer=later),
        "another role": replace(OF_RELAY, role=Role.DATA, issuer=None),
        "of another run": issue(MALLORY.public, MALLORY.sign, Role.DATA, public, NOW_S),
        "with a key of no length": replace(OF_DATA, public=b""),
    }


@pytest.mark.parametrize("name", forged())
def test_what_is_forged_does_not(name: str) -> None:
    with pytest.raises(MalformedMessageError):
        forged()[name].check(ROOT.public, NOW_S)


def test_a_statement_is_its_authors_and_of_one_kind() -> None:
    said = volunteer("relay").state("peer", b"here I am")
    author = said.check(ROOT.public, "peer", now_s=None)
    assert (author.node_id, author.role) == (volunteer("relay").node_id, Role.RELAY)
    others = data_node("leader").papers.credential
    for altered, kind in (
        (said, "leader"),
        (replace(said, kind="leader"), "leader"),
        (replace(said, body=b"there I am"), "peer"),
        (replace(said, credential=others), "peer"),
        (replace(said, signature=bytes(64)), "peer"),
    ):
        with pytest.raises(MalformedMessageError):
            altered.check(ROOT.public, kind, now_s=None)
    with pytest.raises(MalformedMessageError):
        said.check(MALLORY.public, "peer", now_s=None)


def test_a_statement_survives_the_wire() -> None:
    said = volunteer("relay").state("peer", b"\0\xff")
    assert parse_statement(said.to_bytes()) == said
    assert statement_from(statement_message(said)) == said


@given(st.binary(max_size=400))
def test_any_bytes_are_a_statement_or_malformed(data: bytes) -> None:
    for parse in (parse_statement, parse_credential):
        try:
            found: Statement | Credential = parse(data)
        except MalformedMessageError:
            continue
        credential = found.credential if isinstance(found, Statement) else found
        with pytest.raises(MalformedMessageError):
            credential.check(ROOT.public, None)


def test_only_a_data_node_can_write_a_charter_and_only_for_one_run() -> None:
    run_id, leader = RunId("r" * 26), data_node("leader")
    charter = new_charter(leader, run_id, "{}")
    check_charter(charter, ROOT.public, run_id, "{}")
    by_relay = new_charter(volunteer("relay"), run_id, "{}")
    for wrong, other_id, manifest in (
        (charter, RunId("q" * 26), "{}"),
        (charter, run_id, '{"a": 1}'),
        (by_relay, run_id, "{}"),
        (leader.state("peer", charter.body), run_id, "{}"),
    ):
        with pytest.raises(MalformedMessageError):
            check_charter(wrong, ROOT.public, other_id, manifest)

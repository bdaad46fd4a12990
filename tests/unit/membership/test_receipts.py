"""Receipts: what proves them, what makes two of them one, and where they are kept."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.ids import RunId
from decod.membership.credential import Statement
from decod.membership.papers import Membership
from decod.membership.receipts import (
    RECEIPTS_FILE,
    Receipts,
    Work,
    check_receipt,
    keep_receipts,
    load_receipts,
    new_receipt,
    parse_receipt,
    read_receipts,
)
from tests.support.members import ROOT, data_node, host_key, volunteer

RUN = RunId("r" * 26)
ALICE, BOB, RELAY = data_node("alice"), data_node("bob"), volunteer("relay")
NOW_S = int(ALICE.papers.issued_s)
WORK = Work(
    since_ms=1_000, first_iteration=3, last_iteration=9, num_microbatches=40, num_tokens=640
)
SAID = {
    "first_iteration": 3,
    "holder": RELAY.node_id,
    "issued_s": NOW_S,
    "last_iteration": 9,
    "num_microbatches": 40,
    "num_tokens": 640,
    "run_id": RUN,
    "since_ms": 1_000,
}


def receipt(work: Work = WORK, issuer: Membership = ALICE, holder: Membership = RELAY) -> Statement:
    return new_receipt(issuer, RUN, holder.node_id, work, NOW_S)


def stated(body: bytes, by: Membership = ALICE, kind: str = "receipt") -> Statement:
    """Returns a statement that its author has signed whatever its body is."""
    return by.state(kind, body)


def canonical(**changes: Any) -> bytes:
    return json.dumps(SAID | changes, sort_keys=True, separators=(",", ":")).encode()


def grown(num_microbatches: int, since_ms: int = 1_000) -> Work:
    return replace(WORK, since_ms=since_ms, num_microbatches=num_microbatches)


def test_a_receipt_says_who_did_how_much_and_who_says_so() -> None:
    statement = receipt()
    assert statement.body == canonical()
    found = check_receipt(statement, ROOT.public)
    assert (found.run_id, found.issuer, found.holder) == (RUN, ALICE.node_id, RELAY.node_id)
    assert (found.work, found.issued_s, found.is_own_word) == (WORK, NOW_S, False)
    assert parse_receipt(str(found), ROOT.public) == found
    assert len(str(found)) < 800


def test_a_data_nodes_receipt_for_itself_is_its_own_word() -> None:
    assert check_receipt(receipt(holder=ALICE), ROOT.public).is_own_word


@pytest.mark.parametrize(
    "statement",
    [
        replace(receipt(), body=canonical(num_microbatches=41)),
        replace(receipt(), body=canonical(holder=BOB.node_id)),
        replace(receipt(), credential=BOB.papers.credential),
        stated(canonical(), by=RELAY),
        stated(canonical(), by=data_node("alice", host_key("another root"))),
        stated(canonical(), kind="decision"),
        stated(json.dumps(SAID).encode()),
        stated(canonical(more=1)),
        stated(canonical(num_tokens=-1)),
        stated(canonical(num_tokens=1.0)),
        stated(canonical(num_tokens=True)),
        stated(canonical(num_tokens=1 << 64)),
        stated(canonical(run_id="../../etc")),
        stated(canonical(holder="somebody")),
        stated(canonical(issued_s=ALICE.papers.credential.expires_s + 1)),
        stated(canonical().replace(b'{"', b'{"holder":"x","')),
        stated(b"[1]"),
        stated(b"\xff"),
        stated(b"[" * 100_000),
    ],
    ids=[
        "altered count",
        "altered holder",
        "another issuer",
        "a volunteer",
        "another run",
        "another kind",
        "not canonical",
        "more",
        "negative",
        "a fraction",
        "a truth value",
        "too large",
        "no run id",
        "no node id",
        "issued after its term",
        "a key twice",
        "no object",
        "no text",
        "deeply nested",
    ],
)
def test_nothing_else_is_a_receipt(statement: Statement) -> None:
    with pytest.raises(MalformedMessageError):
        check_receipt(statement, ROOT.public)


@pytest.mark.parametrize(
    "line", ["", "?", "AAAA", "ä", "A" * 5000, base64.b64encode(b"x").decode()]
)
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(MalformedMessageError):
        parse_receipt(line, ROOT.public)


def checked(work: Work, issuer: Membership = ALICE) -> Any:
    return check_receipt(receipt(work, issuer), ROOT.public)


def test_of_a_period_the_highest_count_counts_and_periods_and_issuers_add_up() -> None:
    found = Receipts()
    assert found.add(checked(grown(10)))
    assert found.add(checked(grown(25)))
    assert not found.add(checked(grown(10))), "an older one says nothing new"
    assert not found.add(checked(grown(25))), "nor does a copy"
    assert found.add(checked(grown(5, since_ms=2_000)))
    assert found.add(checked(grown(7), BOB))
    counts = {row["issuer"]: row["num_microbatches"] for row in found.rows()}
    assert counts == {ALICE.node_id: 30, BOB.node_id: 7}
    again = Receipts([*found, *found])
    assert again.rows() == found.rows()


def test_iterations_of_several_periods_are_shown_together() -> None:
    later = replace(WORK, since_ms=5_000, first_iteration=20, last_iteration=21)
    (row,) = Receipts([checked(WORK), checked(later)]).rows()
    assert (row["first_iteration"], row["last_iteration"]) == (3, 21)
    assert row["num_tokens"] == 2 * 640


def test_the_smallest_counts_are_dropped_if_there_are_too_many() -> None:
    found = Receipts(checked(grown(n, since_ms=n)) for n in range(1, 6))
    found.trim(2)
    assert sorted(each.work.num_microbatches for each in found) == [4, 5]


def test_receipts_are_kept_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    assert len(load_receipts(folder, ROOT.public).receipts) == 0
    found = Receipts([checked(grown(3)), checked(grown(4), BOB)])
    keep_receipts(folder, found.text())
    loaded = load_receipts(folder, ROOT.public)
    assert loaded.receipts.rows() == found.rows()
    assert loaded.problems == []
    assert (folder / RECEIPTS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda line: line[:-12] + "AAAA" + line[-8:], "signature"),
        (lambda line: line[:40], "line 2"),
        (lambda _: "hello", "base64"),
    ],
)
def test_bad_lines_are_named_and_the_others_count(spoil: Callable[[str], str], why: str) -> None:
    good, bad = str(checked(grown(3))), str(checked(grown(4), BOB))
    read = read_receipts(f"{good}\n{spoil(bad)}\n\n", ROOT.public)
    assert [row["num_microbatches"] for row in read.receipts.rows()] == [3]
    (problem,) = read.problems
    assert problem.startswith("line 2: ")
    assert why in problem

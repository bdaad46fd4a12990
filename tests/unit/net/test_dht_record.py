"""Records of the DHT: whose word they are, and which of them a node holds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import MalformedMessageError
from decod.ids import RunId
from decod.membership.papers import Membership
from decod.membership.statements import Authors
from decod.net.dht_record import (
    LEADER,
    PEER,
    TERM_MAX,
    RecordReader,
    RecordStore,
    record_key,
    record_statement,
)
from decod.net.net_limits import Counters
from tests.support.dht import NOW_S, RUN, Clock, leads, member, peer, record_of
from tests.support.members import ROOT, data_node, host_key, new_volunteer, volunteer

DATA, RELAY = data_node("leader"), volunteer("relay")


def reader(clock: Clock | None = None) -> RecordReader:
    clock = clock or Clock()
    return RecordReader(RUN, clock, Authors(ROOT.public, clock))


READER = reader()


def leader_record(by: Membership = DATA, value: Any = None, **times: Any) -> bytes:
    return record_of(by, LEADER, leads(1) if value is None else value, **times)


@pytest.mark.parametrize(
    ("by", "name", "value"),
    [(DATA, LEADER, leads(1)), (DATA, PEER, peer(1)), (RELAY, PEER, peer(1))],
)
def test_an_owners_record_is_read_as_it_was_written(
    by: Membership, name: str, value: dict[str, Any]
) -> None:
    data = record_of(by, name, value)
    record = READER.read(data)
    assert (record.name, record.owner, record.value) == (name, by.node_id, value)
    assert (record.sequence, record.expires_s) == (NOW_S * 1000, NOW_S + 60)
    assert record.key == record_key(RUN, name, None if name == LEADER else by.node_id)
    assert len(data) < 520


def test_the_longest_address_fits() -> None:
    value = {"address": "a" * 253 + ":65535", "term": TERM_MAX}
    assert len(leader_record(value=value)) < 800


def body(**changes: Any) -> bytes:
    fields = {
        "run": RUN,
        "name": LEADER,
        "sequence": 1,
        "expires_s": NOW_S + 60,
        "value": leads(1),
    }
    return json.dumps(fields | changes, sort_keys=True, separators=(",", ":")).encode()


def said(text: bytes) -> bytes:
    return record_statement(text, DATA.state)


FORGED = {
    "a leader's, by a volunteer": leader_record(RELAY),
    "a leader's, by another root's": leader_record(data_node("leader", host_key("another root"))),
    "a peer's, by another root's": record_of(
        volunteer("relay", host_key("another root")), PEER, peer(1)
    ),
    "of another run": leader_record(run_id=RunId("x" * 26)),
    "by one whose papers have expired": record_of(
        new_volunteer("relay", now_s=NOW_S - 25 * 3600), PEER, peer(1)
    ),
    "of another kind": DATA.state("decision", body()).to_bytes(),
    "altered": leader_record().replace(b"10.0.0.1", b"10.0.0.2"),
    "with another's credential": leader_record().replace(
        DATA.papers.credential.public, RELAY.papers.credential.public
    ),
    "with another's name": record_of(RELAY, f"peer:{DATA.node_id}", peer(1)),
    "with a name of its own": record_of(RELAY, "anything", peer(1)),
    "too long": leader_record(value={**leads(1), "x": "y" * 1000}),
}
MALFORMED = {
    "expired": leader_record(expires_s=NOW_S),
    "living too long": record_of(RELAY, PEER, peer(1), expires_s=NOW_S + 961),
    "a leader's, living too long": leader_record(expires_s=NOW_S + 181),
    "of a time to come": leader_record(sequence=NOW_S * 1000 + 61_000),
    "with a negative number": leader_record(sequence=-1),
    "with a truth for a number": said(body(sequence=True)),
    "with a fraction for a time": said(body(expires_s=NOW_S + 0.5)),
    "with a huge number": said(body(sequence=10**400)),
    "with infinity": said(body().replace(b'"term":1', b'"term":1,"x":1e999')),
    "with NaN": said(body().replace(b'"term":1', b'"term":NaN')),
    "with a field less": said(body().replace(b'"sequence":1,', b"")),
    "with a field more": said(body(more=1)),
    "in another order": said(json.dumps(json.loads(body()), separators=(",", ":")).encode()[::-1]),
    "with spaces": said(body() + b" "),
    "in another encoding": said(body().decode().encode("utf-16")),
    "deeply nested": said(b"[" * 700),
    "a list": said(b"[]"),
    "no text": said(b"\xff"),
    "without a value": leader_record(value={}),
    "with an odd address": leader_record(value={**leads(1), "address": "nowhere"}),
    "with a number for an address": leader_record(value={**leads(1), "address": 5}),
    "with a truth for a term": leader_record(value={**leads(1), "term": True}),
    "with a negative term": leader_record(value={**leads(1), "term": -1}),
    "with a term that nobody gets to": leader_record(value={**leads(1), "term": TERM_MAX + 1}),
    "with something behind it": leader_record() + b"\x7a\x01x",
    "cut short": leader_record()[:-1],
    "nothing": b"",
    "a text": "text",
    "None": None,
    "a number": 17,
}


@pytest.mark.parametrize("how", [*FORGED, *MALFORMED])
def test_what_is_not_its_owners_record_is_refused(how: str) -> None:
    data = (FORGED | MALFORMED)[how]
    with pytest.raises(MalformedMessageError):
        READER.read(data)
    counters = Counters()
    assert not RecordStore(READER, counters).put(data, source="x")
    assert counters.total("dht.malformed") == 1


@given(st.binary(max_size=200))
def test_random_bytes_are_no_record(data: bytes) -> None:
    for each in (data, said(data)):
        with pytest.raises(MalformedMessageError):
            READER.read(each)


def test_an_old_record_never_replaces_a_newer() -> None:
    store = RecordStore(READER, Counters())
    assert store.put(leader_record(sequence=5), source="x")
    assert store.put(leader_record(sequence=4), source="x")
    held = store.get(record_key(RUN, LEADER))
    assert held is not None
    assert held.sequence == 5


def test_of_two_records_with_one_number_the_first_is_kept() -> None:
    counters = Counters()
    store = RecordStore(READER, counters)
    first = record_of(RELAY, PEER, peer(1))
    assert store.put(first, source="x")
    for other in (
        record_of(RELAY, PEER, peer(2)),
        record_of(RELAY, PEER, peer(1), expires_s=NOW_S + 61),
    ):
        assert not store.put(other, source="x")
    assert store.put(first, source="x"), "to say it again is no fault"
    held = store.get(record_key(RUN, PEER, RELAY.node_id))
    assert held is not None
    assert held.data == first
    assert counters.by_peer("dht.equivocal") == {RELAY.node_id: 2}


def test_a_record_with_renewed_papers_is_no_other() -> None:
    store = RecordStore(READER, Counters())
    for now_s in (NOW_S, NOW_S - 3600):
        assert store.put(record_of(new_volunteer("relay", now_s=now_s), PEER, peer(1)), source="x")


def test_one_owner_fills_two_places_at_most() -> None:
    """Whatever it says: its names are given, and places follow from them."""
    store = RecordStore(READER, Counters())
    for number in range(200):
        for name, value in ((PEER, peer(1)), (LEADER, leads(1)), (f"peer{number}", peer(1))):
            store.put(record_of(DATA, name, value, sequence=number), source="x")
    assert len(store) == 2


def test_a_full_store_takes_no_more_until_something_ends() -> None:
    clock, counters = Clock(), Counters()
    store = RecordStore(reader(clock), counters, records_max=2)

    def put(index: int) -> bool:
        times = {"sequence": 1, "expires_s": int(clock.now_s) + 60}
        return store.put(record_of(member(index), PEER, peer(1), **times), source="x")

    assert [put(4), put(5), put(6)] == [True, True, False]
    assert counters.total("dht.full") == 1
    clock.now_s += 60
    assert put(6)
    assert len(store) == 1


def test_a_banned_owners_record_is_neither_kept_nor_shown() -> None:
    clock, banned = Clock(), set[str]()
    authors = Authors(ROOT.public, clock, lambda each: each not in banned)
    store, key = RecordStore(RecordReader(RUN, clock, authors), Counters()), record_key(RUN, LEADER)
    assert store.put(leader_record(), source="x")
    assert store.get(key) is not None
    banned.add(DATA.node_id)
    assert store.get(key) is None
    assert not store.put(leader_record(), source="x")

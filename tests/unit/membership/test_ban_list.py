"""Lists of bans: what they say, who may make them, which one counts, and what is kept of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from decod.clocks import wall_clock
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.membership.ban_list import BANS_MAX, REASON_MAX_CHARACTERS, Ban, BanBook
from decod.membership.credential import Statement
from decod.membership.papers import Membership, PaperTerms
from decod.protocol.core.bans import BanList
from tests.support.members import ROOT, data_node, host_key, new_data_node, new_volunteer

A, B, C = (NodeId(letter * 52) for letter in "abc")
LEADER, OTHER = data_node("leader"), data_node("other")
DAY_S = 24 * 3600.0


class Clock:
    def __init__(self) -> None:
        self.now_s = wall_clock()

    def __call__(self) -> float:
        return self.now_s


def book(clock: Clock, folder: Path | None = None) -> BanBook:
    return BanBook(ROOT.public, folder, clock)


def ban(
    node: NodeId = A,
    *,
    at_s: float,
    life_s: float | None = 60.0,
    reason: str = "it lies",
    by: Membership = LEADER,
) -> Ban:
    until_s = None if life_s is None else int(at_s + life_s)
    return Ban(node=node, reason=reason, made_s=int(at_s), until_s=until_s, by=by.node_id)


def banned(
    here: BanBook, clock: Clock, node: NodeId = A, *, by: Membership = LEADER, term: int = 1
) -> BanList:
    """Bans a node for a minute; returns the list, which is in use."""
    made = here.ban(ban(node, at_s=clock.now_s, by=by), by.state, term)
    here.use(made)
    return made


def test_a_ban_holds_until_it_ends_wherever_the_list_is_known() -> None:
    clock = Clock()
    here, there = book(clock), book(clock)
    made = banned(here, clock)
    found = there.read(made.statement)
    assert found == made
    assert isinstance(found, BanList)
    assert there.allowed(A), "it is read, and not used yet"
    assert there.use(found) == {A}
    assert not there.allowed(A)
    assert there.allowed(B)
    assert "it lies" in there.refusal(A)
    assert LEADER.host.name in there.refusal(A), "who has banned it"
    assert "UTC" in there.refusal(A), "until when"
    clock.now_s += 61.0
    assert there.allowed(A)
    assert there.refusal(A) == ""
    assert there.all() == []


def test_a_ban_for_ever_does_not_end() -> None:
    clock = Clock()
    here = book(clock)
    here.use(here.ban(ban(at_s=clock.now_s, life_s=None, reason=""), LEADER.state, 1))
    clock.now_s += 9 * 366 * DAY_S
    assert here.refusal(A).endswith("for ever")


def test_a_second_ban_of_a_node_replaces_the_first_and_a_lifted_one_is_gone() -> None:
    clock = Clock()
    here = book(clock)
    banned(here, clock)
    here.use(here.ban(ban(at_s=clock.now_s, reason="again"), LEADER.state, 1))
    (only,) = here.all()
    assert only.reason == "again"
    banned(here, clock, B)
    here.use(here.unban(A, LEADER.state, 1))
    assert [each.node for each in here.all()] == [B]
    assert here.allowed(A)


# --- which list counts ------------------------------------------------------------------------


def test_versions_grow_whatever_the_clock_says() -> None:
    clock = Clock()
    here = book(clock)
    versions = [banned(here, clock).version]
    for step_s in (0.0, 5.0, -DAY_S, 0.0):
        clock.now_s += step_s
        versions.append(banned(here, clock).version)
    assert versions == sorted(set(versions))


def test_an_earlier_list_is_not_used_again() -> None:
    clock = Clock()
    here = book(clock)
    first = banned(here, clock)
    here.use(here.unban(A, LEADER.state, 1))
    assert here.use(first) == set()
    assert here.allowed(A)


def test_an_elected_leader_goes_on_from_the_list_that_it_knows() -> None:
    clock = Clock()
    old, new = book(clock), book(clock)
    new.use(banned(old, clock, A))
    clock.now_s -= 3600.0  # Its clock is behind.
    later = banned(new, clock, B, by=OTHER, term=2)
    assert {*later.banned} == {A, B}
    assert later.version > old.version
    found = old.read(later.statement)
    assert isinstance(found, BanList)
    assert old.use(found) == {B}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_lists_of_one_time_all_take_that_of_the_higher_term(order: tuple[int, int]) -> None:
    clock = Clock()
    lists = [
        banned(book(clock), clock, A, term=1),
        banned(book(clock), clock, B, by=OTHER, term=2),
    ]
    there = book(clock)
    for k in order:
        there.use(lists[k])
    assert [each.node for each in there.all()] == [B]


def test_a_leader_replaces_a_list_that_bans_it() -> None:
    clock = Clock()
    old, here = book(clock), book(clock)
    banned(old, clock, A)
    theirs = banned(old, clock, OTHER.node_id)
    clock.now_s -= 3600.0
    made = here.contested(theirs, OTHER.node_id, OTHER.state, 2)
    assert made.version > theirs.version
    assert [*made.banned] == [A]


# --- who may make one -------------------------------------------------------------------------


def test_a_list_of_a_volunteer_or_of_another_root_is_not_believed() -> None:
    clock = Clock()
    for author in (new_volunteer("relay"), new_data_node("leader", host_key("another root"))):
        body = json.dumps({"version": 9, "bans": []}).encode()
        statement = author.state("bans", body).to_bytes()
        assert isinstance(book(clock).read(statement), str)


def test_a_list_of_a_banned_data_node_is_not_believed() -> None:
    """It could lift its own ban."""
    clock = Clock()
    here, there = book(clock), book(clock)
    banned(here, clock, OTHER.node_id)
    there.use(here.present)
    clock.now_s += 1.0
    lifted = there.unban(OTHER.node_id, OTHER.state, 1)
    assert lifted.version > here.version
    assert "is banned" in str(here.read(lifted.statement))


def test_a_list_of_a_former_data_node_is_not_believed_any_more() -> None:
    clock = Clock()
    brief = new_data_node("brief", terms=PaperTerms(issuing_s=100.0), now_s=clock.now_s)
    made = banned(book(clock), clock, by=brief)
    assert isinstance(book(clock).read(made.statement), BanList)
    clock.now_s += 101.0
    assert "expires_s" in str(book(clock).read(made.statement))


def altered(change: Callable[[dict[str, object]], object]) -> bytes:
    """Returns a data node's statement of an altered list."""
    fields = {"node": A, "reason": "", "made_s": 1, "until_s": None, "by": LEADER.node_id}
    content: dict[str, object] = {"version": 5, "bans": [fields]}
    change(content)
    return LEADER.state("bans", json.dumps(content).encode()).to_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("version"),
        lambda c: c.update(version="5"),
        lambda c: c.update(version=True),
        lambda c: c.update(version=2**63),
        lambda c: c.update(bans=7),
        lambda c: c.update(bans=[7]),
        lambda c: c.update(bans=c["bans"] * 2),
        lambda c: c["bans"][0].pop("node"),
        lambda c: c["bans"][0].update(node="x"),
        lambda c: c["bans"][0].update(reason="x" * (REASON_MAX_CHARACTERS + 1)),
        lambda c: c["bans"][0].update(reason="two\nlines"),
        lambda c: c["bans"][0].update(until_s=1.5),
        lambda c: c["bans"][0].update(until_s=10**12),
        lambda c: c["bans"][0].update(made_s=-1),
    ],
)
def test_a_list_that_is_malformed_is_not_believed(change: Callable[..., object]) -> None:
    assert isinstance(book(Clock()).read(altered(lambda _: None)), BanList)
    assert isinstance(book(Clock()).read(altered(change)), str)


@pytest.mark.parametrize("statement", [b"", b"x", b"\xff" * 500, bytes(3 << 20)])
def test_bytes_that_are_no_list_are_not_believed(statement: bytes) -> None:
    assert isinstance(book(Clock()).read(statement), str)


def test_a_statement_of_another_kind_is_no_list() -> None:
    made = banned(book(Clock()), Clock())
    body = json.dumps({"version": 5, "bans": []}).encode()
    other: Statement = LEADER.state("decision", body)
    assert isinstance(book(Clock()).read(other.to_bytes()), str)
    assert isinstance(book(Clock()).read(made.statement), BanList)


# --- limits and upkeep ------------------------------------------------------------------------


def test_a_full_list_fits_a_message_and_takes_no_more() -> None:
    clock, nodes = (
        Clock(),
        (f"{k:052d}".translate(str.maketrans("0189", "abcd")) for k in range(1001)),
    )
    here, longest = book(clock), "\N{HANGUL SYLLABLE GAG}" * REASON_MAX_CHARACTERS
    bans = [ban(NodeId(node), at_s=clock.now_s, reason=longest) for node in nodes]
    here.use(here._issue(bans[:BANS_MAX], LEADER.state, 1))
    assert len(here.all()) == BANS_MAX
    assert isinstance(book(clock).read(here.present.statement), BanList)
    with pytest.raises(ConfigError, match="E-CFG-082"):
        here.ban(bans[-1], LEADER.state, 1)
    here.use(here.ban(bans[0], LEADER.state, 1))


def test_the_leader_makes_the_list_anew_when_a_ban_has_ended() -> None:
    clock = Clock()
    here, own = book(clock), LEADER.papers.credential
    assert here.renewed(own, LEADER.state, 1) is None
    banned(here, clock, A)
    here.use(here.ban(ban(B, at_s=clock.now_s, life_s=None), LEADER.state, 1))
    assert here.renewed(own, LEADER.state, 1) is None
    clock.now_s += 61.0
    made = here.renewed(own, LEADER.state, 1)
    assert made is not None
    assert [*made.banned] == [B]


def test_the_leader_signs_the_list_again_before_its_authors_time_is_up() -> None:
    clock = Clock()
    here, old = book(clock), new_data_node("old", terms=PaperTerms(issuing_s=6 * DAY_S))
    here.use(here.ban(ban(at_s=clock.now_s, life_s=None), old.state, 1))
    own = LEADER.papers.credential
    assert here.renewed(own, LEADER.state, 1) is None
    clock.now_s += 2 * DAY_S
    assert here.renewed(old.papers.credential, old.state, 1) is None, "that would not help"
    made = here.renewed(own, LEADER.state, 1)
    assert made is not None
    clock.now_s += 5 * DAY_S
    assert isinstance(book(clock).read(made.statement), BanList)


# --- on disk ----------------------------------------------------------------------------------


def test_a_node_that_restarts_goes_by_the_list_and_can_pass_it_on(tmp_path: Path) -> None:
    clock = Clock()
    here = book(clock, tmp_path)
    made = banned(here, clock)
    here.keep()
    again = book(clock, tmp_path)
    assert not again.allowed(A)
    assert again.present == made
    assert (tmp_path / "bans.json").stat().st_mode & 0o077 == 0


def test_a_list_whose_author_has_left_since_is_still_gone_by(tmp_path: Path) -> None:
    clock = Clock()
    brief = new_data_node("brief", terms=PaperTerms(issuing_s=100.0), now_s=clock.now_s)
    here = book(clock, tmp_path)
    here.use(here.ban(ban(at_s=clock.now_s, life_s=None), brief.state, 1))
    here.keep()
    clock.now_s += 1000.0
    assert not book(clock, tmp_path).allowed(A)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"statement": "zz"}', '{"statement": "00"}', "{" * 9999]
)
def test_a_file_that_is_no_list_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "bans.json").write_text(content)
    with pytest.raises(ConfigError, match=r"E-CFG-080 .*bans\.json can't be read"):
        book(Clock(), tmp_path)


def test_a_list_that_can_not_be_written_is_told_and_used(tmp_path: Path) -> None:
    clock = Clock()
    here = book(clock, tmp_path / "file" / "folder")
    (tmp_path / "file").write_text("")
    banned(here, clock)
    with pytest.raises(ConfigError, match="E-CFG-081"):
        here.keep()
    assert not here.allowed(A)

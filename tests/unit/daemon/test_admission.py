"""A node's way to its papers: founded, asked for with a token, found again, renewed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decod.clocks import wall_clock
from decod.daemon import member_admission as module
from decod.daemon.member_admission import (
    enter,
    found,
    keep_renewed,
    known_membership,
    make_usable,
    most_telling,
)
from decod.errors import DecodError, NetworkError, RejectedError
from decod.membership.papers import TERMS, Membership, PaperTerms, keep_papers, membership_folder
from decod.membership.registrar import Registrar
from decod.membership.tokens import Token, Tokens
from decod.membership.waiting_list import WaitingList
from decod.net.channel import UnansweredError
from decod.net.dht_table import network_of
from decod.net.enrolment import UnknownTokenError, WaitingError
from decod.net.join_string import JoinString
from decod.net.server import DataServices, PeerServer
from decod.protocol.core.view import Role
from tests.support.members import host_key, new_volunteer
from tests.support.peers import RUN, Host, no_receipts
from tests.waiting import wait_until

ME, FOUNDER = host_key("me"), host_key("founder")
ADMITTED = ["token.used", "member.admitted", "certificate.issued"]
EXTENDED = ["member.extended", "certificate.issued"]


class Leader:
    """A leader that admits nodes."""

    def __init__(self, folder: Path, *, terms: PaperTerms = TERMS) -> None:
        self.membership = found(folder, "run", FOUNDER, TERMS)
        self.notes: list[str] = []
        self.registrar = Registrar(
            self.membership,
            Tokens(self.membership.folder),
            wall_clock,
            lambda: None,
            lambda event, **_: self.notes.append(event),
            WaitingList(wall_clock, network_of),
            terms,
        )
        self.host = Host()

    async def __aenter__(self) -> "Leader":
        async def read(_: object) -> str:
            return "no block"

        services = DataServices(self.registrar, read, no_receipts)
        self.server = PeerServer(self.membership, RUN, self.host, services=services)
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    def join_string(self, role: Role | None = Role.RELAY, *addresses: str) -> JoinString:
        token = None
        if role is not None:
            create = self.registrar.tokens.create
            token = create(role, now_s=wall_clock(), life_s=60.0, uses=1)
        root = self.membership.root
        return JoinString(root=root, addresses=addresses or (self.address,), token=token)


def test_all_runs_of_a_name_have_one_root(tmp_path: Path) -> None:
    first, again = (found(tmp_path, "run", FOUNDER, TERMS) for _ in range(2))
    assert first.root == again.root
    assert first.root != found(tmp_path, "other", FOUNDER, TERMS).root
    known = known_membership(tmp_path, FOUNDER, first.root)
    assert known is not None
    assert known.root_key is not None, "it can still make data nodes"
    assert (tmp_path / "roots" / "run" / "root.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("role", [Role.DATA, Role.RELAY])
async def test_a_token_is_needed_once(tmp_path: Path, role: Role) -> None:
    mine = tmp_path / "mine"
    async with Leader(tmp_path / "leader") as leader:
        join = leader.join_string(role)
        first = await enter(join, role, mine, ME)
        assert first.role is role
        back = leader.join_string(None, "127.0.0.1:1")
        again = await enter(back, role, mine, ME)
        assert again.papers.chain == first.papers.chain
        another = Role.DATA if role is Role.RELAY else Role.RELAY
        other = leader.join_string(another)
        assert (await enter(other, role, mine, ME)).papers.chain == first.papers.chain
        command = "decod leader RUN.toml --join" if role is Role.DATA else "decod join"
        with pytest.raises(RejectedError, match=f"E-REJ-013 .* back .*{command}.* JOINSTRING"):
            await enter(back, another, mine, ME)
        assert leader.notes == ADMITTED


async def test_a_host_that_has_lost_its_papers_need_not_wait_again(tmp_path: Path) -> None:
    """Its token has no use left. Who comes for the first time waits for the organiser."""
    async with Leader(tmp_path / "leader") as leader:
        join, other = leader.join_string(), leader.join_string()
        await enter(join, Role.RELAY, tmp_path / "mine", ME)
        leader.registrar.newcomers.open()
        again = await enter(join, Role.RELAY, tmp_path / "anew", ME)
        assert again.node_id == ME.node_id
        assert not leader.registrar.newcomers.all()
        with pytest.raises(WaitingError):
            await enter(other, Role.RELAY, tmp_path / "stranger", host_key("stranger"))
        assert leader.notes[-1] == "member.asking"


async def test_who_is_no_member_needs_a_token_for_its_own_command(tmp_path: Path) -> None:
    async with Leader(tmp_path / "leader") as leader:
        for join, code in (
            (leader.join_string(None), "E-REJ-014"),
            (leader.join_string(Role.DATA), "E-REJ-013 .*`decod leader RUN.toml --join JOIN"),
        ):
            with pytest.raises(RejectedError, match=code):
                await enter(join, Role.RELAY, tmp_path / "mine", ME)


async def test_another_data_node_leads_to_the_leader(tmp_path: Path) -> None:
    folder = tmp_path / "leader"
    follower = Leader(folder)
    follower.registrar.leader = lambda: leader.address
    async with Leader(folder) as leader, follower:
        join = leader.join_string(Role.RELAY, "127.0.0.1:1", follower.address)
        follower.registrar.tokens._records = leader.registrar.tokens._records
        membership = await enter(join, Role.RELAY, tmp_path / "mine", ME)
        assert membership.papers.credential.issuer is not None
        assert leader.notes == ADMITTED
        assert follower.notes == ["member.refused"]


async def test_a_token_that_nobody_knows_is_refused_at_once(tmp_path: Path) -> None:
    async with Leader(tmp_path / "leader") as leader:
        root, nobody = leader.membership.root, "127.0.0.1:1"
        for addresses in (
            (leader.address,),
            (nobody, leader.address),
            (leader.address, nobody),
        ):
            token = Token.new(Role.RELAY)
            join = JoinString(root=root, addresses=addresses, token=token)
            with pytest.raises(UnknownTokenError):
                await enter(join, Role.RELAY, tmp_path / "mine", ME)
        assert leader.notes == []


def test_the_error_that_says_most_is_shown() -> None:
    """A leader that stands still may know the token. A port where nobody listens does not."""

    def made(kind: type[DecodError]) -> DecodError:
        return kind(kind.__name__, why="w", fix="f")

    kinds = (RejectedError, UnansweredError, UnknownTokenError, NetworkError)
    refusal, late, unknown, absent = map(made, kinds)
    for errors, shown in (
        ([absent, refusal], refusal),
        ([unknown, refusal], refusal),
        ([unknown, late], late),
        ([late, refusal], refusal),
        ([absent, unknown], unknown),
        ([absent, made(NetworkError)], absent),
    ):
        assert most_telling(errors) is shown


async def test_expired_papers_are_renewed_or_a_token_is_used(tmp_path: Path) -> None:
    # The volunteer's old papers were issued by "leader", which is of the same root.
    async with Leader(tmp_path / "leader") as leader:
        root = leader.membership.root_key
        assert root is not None
        for days, join, ends in (
            (2, leader.join_string(None), EXTENDED),
            (20, leader.join_string(Role.RELAY), ADMITTED),
            (20, leader.join_string(None), None),
        ):
            mine = tmp_path / f"{days} {join.token is None}"
            old_s = wall_clock() - days * 24 * 3600.0
            old = new_volunteer("me", root, now_s=old_s)
            keep_papers(membership_folder(mine, root.public), old.papers)
            if ends is None:
                with pytest.raises(RejectedError, match="E-REJ-014"):
                    await enter(join, Role.RELAY, mine, ME)
                continue
            leader.notes.clear()
            membership = await enter(join, Role.RELAY, mine, ME)
            assert membership.papers.expires_s > wall_clock()
            assert leader.notes == ends


async def test_the_organisers_host_needs_nobody_however_long_it_was_away(tmp_path: Path) -> None:
    membership = found(tmp_path, "run", FOUNDER, PaperTerms(certificate_s=-9.0))
    await make_usable(membership, ())
    assert membership.papers.expires_s > wall_clock()


async def test_nobody_who_answers_is_a_network_error(tmp_path: Path) -> None:
    leader = Leader(tmp_path / "leader")
    join = leader.join_string(Role.RELAY, "127.0.0.1:1")
    with pytest.raises(NetworkError, match="E-NET-003"):
        await enter(join, Role.RELAY, tmp_path / "mine", ME)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("leads", [True, False], ids=["organiser", "volunteer"])
async def test_papers_are_renewed_in_time_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """Also after the endpoint was down for a while."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    monkeypatch.setattr(module, "_PAUSE_LEAST_S", 0.01)
    brief = PaperTerms(certificate_s=1.5)
    async with Leader(tmp_path / "leader", terms=brief) as leader:
        mine = tmp_path / "mine"
        membership: Membership
        if leads:
            membership = found(tmp_path / "leader", "run", FOUNDER, brief)
        else:
            membership = await enter(leader.join_string(), Role.RELAY, mine, ME)
        told, notes = list[float](), list[str]()
        down = ["127.0.0.1:1"]

        def renewed() -> None:
            told.append(membership.papers.expires_s)

        def note(event: str, **_: Any) -> None:
            notes.append(event)
            if event == "member.unrenewed":
                down[:] = [leader.address]

        before = membership.papers
        keeping = asyncio.create_task(
            keep_renewed(membership, lambda: tuple(down), brief, note, notes.append, renewed)
        )
        await wait_until(lambda: len(told) >= 2)
        keeping.cancel()
        assert told == sorted(told)
        assert ("member.unrenewed" in notes) == (not leads)
        assert membership.folder is not None
        host = FOUNDER if leads else ME
        kept = known_membership(tmp_path / ("leader" if leads else "mine"), host, membership.root)
        assert kept is not None
        assert kept.papers.chain != before.chain

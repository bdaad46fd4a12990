"""Whom `decod doctor` asks about a run, and as whom. Nobody is asked here."""

import asyncio
from pathlib import Path

import pytest

from decod.clocks import wall_clock
from decod.daemon.node_folder import KnownPeers
from decod.errors import RejectedError
from decod.ids import RunId
from decod.insight.doctor_asking import Inquiry, inquiry_by_node, inquiry_by_string
from decod.insight.network_checks import RunningNode
from decod.membership.identity import HostKey, keep_identity
from decod.membership.papers import Membership, keep_papers, membership_folder
from decod.membership.tokens import Token
from decod.net.enrolment import Enrollee
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support.members import ROOT, host_key, new_volunteer

HOST = host_key("host")
TOKEN = Token.new(Role.RELAY)
NODE = RunningNode(
    name="host", state="training", run_name="wiki", run_id="r", address="h:3", others=("h:1",)
)


def join(token: Token | None = TOKEN) -> JoinString:
    return JoinString(root=ROOT.public, addresses=("h:1", "h:3"), token=token)


def admit(folder: Path, root: HostKey = ROOT, *, age_s: float = 0.0) -> Membership:
    """Keeps papers in a folder, as a member of the root's run has them."""
    member = new_volunteer("host", root, now_s=wall_clock() - age_s)
    keep_papers(membership_folder(folder, root.public), member.papers)
    return member


def by_string(
    folder: Path, token: Token | None = TOKEN, node: RunningNode | None = None
) -> Inquiry:
    return asyncio.run(inquiry_by_string(join(token), folder, node))


def test_a_stranger_asks_with_the_token(tmp_path: Path) -> None:
    inquiry = by_string(tmp_path)
    assert isinstance(inquiry.asker, Enrollee)
    assert inquiry.member is None
    assert inquiry.addresses == ("h:1", "h:3")
    assert not list(tmp_path.iterdir())


def test_a_stranger_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="E-REJ-014"):
        by_string(tmp_path, None)


@pytest.mark.parametrize("token", [TOKEN, None, Token.new(Role.DATA)])
def test_a_member_asks_as_one(tmp_path: Path, token: Token | None) -> None:
    keep_identity(tmp_path, HOST)
    member = admit(tmp_path)
    KnownPeers(tmp_path).keep(ROOT.public, RunId("r" * 26), "wiki", ["h:9"])
    inquiry = by_string(tmp_path, token)
    assert inquiry.member is not None
    assert inquiry.member.papers.chain == member.papers.chain
    assert inquiry.addresses == ("h:1", "h:3", "h:9")


def test_a_node_is_not_asked_about_itself(tmp_path: Path) -> None:
    assert by_string(tmp_path, node=NODE).addresses == ("h:1",)


def test_a_running_node_has_the_newest_papers(tmp_path: Path) -> None:
    keep_identity(tmp_path, HOST)
    admit(tmp_path, host_key("earlier"), age_s=3600.0)
    admit(tmp_path)
    (tmp_path / "memberships" / "odd").mkdir()
    inquiry = inquiry_by_node(NODE, tmp_path)
    assert inquiry is not None
    assert inquiry.member is not None
    assert (inquiry.member.root, inquiry.addresses) == (ROOT.public, ("h:1",))


def test_a_node_that_is_alone_or_unknown_has_nobody_to_ask(tmp_path: Path) -> None:
    assert inquiry_by_node(NODE, tmp_path) is None
    keep_identity(tmp_path, HOST)
    assert inquiry_by_node(NODE, tmp_path) is None
    admit(tmp_path)
    alone = RunningNode(name="host", state="training", run_name="w", run_id="r", address="h:3")
    assert inquiry_by_node(alone, tmp_path) is None

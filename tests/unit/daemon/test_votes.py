"""What a node keeps on disk of elections, and of where its run is."""

import os
from pathlib import Path

import pytest

from decod.daemon.peers import KnownPeers
from decod.daemon.votes import VoteFile
from decod.errors import HardwareError
from decod.ids import NodeId, RunId
from decod.protocol.core.identity import NO_PROMISE, Promise
from tests.unit.protocol.cast import view_of

RUN_ID, OTHER = RunId("a" * 26), RunId("b" * 26)
VOTE = Promise(3, NodeId("c" * 52))


def test_a_vote_is_found_again_in_its_run_only(tmp_path: Path) -> None:
    assert VoteFile(tmp_path, RUN_ID).load() == NO_PROMISE
    assert VoteFile(tmp_path, RUN_ID).keep(VOTE)
    assert VoteFile(tmp_path, RUN_ID).load() == VOTE
    assert VoteFile(tmp_path, OTHER).load() == NO_PROMISE


def test_a_vote_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    assert not VoteFile(tmp_path, RUN_ID).keep(VOTE)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"term": 1, "candidate": "x"}', '{"term": -1}'])
def test_a_vote_that_can_not_be_read_is_no_vote_for_nobody(tmp_path: Path, text: str) -> None:
    """Going on as if there were none could make this node vote twice."""
    VoteFile(tmp_path, RUN_ID).keep(VOTE)
    (tmp_path / "runs" / RUN_ID / "vote.json").write_text(text)
    with pytest.raises(HardwareError, match="E-HW-008"):
        VoteFile(tmp_path, RUN_ID).load()


def test_members_addresses_are_kept_without_ones_own(tmp_path: Path) -> None:
    peers = KnownPeers(tmp_path)
    assert peers.find(RUN_ID) == ()
    peers.keep(RUN_ID, "mine", view_of("d0", "d1", "r1a"), own="d1:7700")
    assert peers.find(RUN_ID) == ("d0:7700", "r1a:7700")
    path = tmp_path / "runs" / RUN_ID / "peers.json"
    for text in ('["d0:7700"]', '{"name": "mine", "addresses": ["no address"]}', "{}", "x"):
        path.write_text(text)
        assert peers.find(RUN_ID) == ()


def test_the_run_of_a_name_that_this_host_was_in_last_is_known_until_it_is_over(
    tmp_path: Path,
) -> None:
    peers, other = KnownPeers(tmp_path), RunId("q" * 26)
    assert peers.newest("mine") is None
    for age_s, (run_id, name) in enumerate([(RUN_ID, "mine"), (other, "mine"), (RUN_ID, "yours")]):
        peers.keep(run_id, name, view_of("d0", "r1a"), own="r1a:7700")
        os.utime(tmp_path / "runs" / run_id / "peers.json", (age_s, age_s))
    assert peers.newest("mine") == (other, ("d0:7700",))
    assert peers.newest("yours") == (RUN_ID, ("d0:7700",))
    peers.forget(other)
    assert peers.newest("mine") is None

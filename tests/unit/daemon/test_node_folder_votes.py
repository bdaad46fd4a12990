"""What a node keeps on disk of elections, and of where its run is."""

import asyncio
import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest

from decod import files
from decod.daemon.node_folder import KnownPeers, LastRun, VoteFile, tell_unkept
from decod.errors import HardwareError
from decod.ids import NodeId, RunId
from decod.journal.run_progress import RecentEvents
from decod.membership.papers import membership_folder
from decod.protocol.core.context import NO_PROMISE, Promise
from tests.support.members import ROOT, host_key
from tests.support.noted import noted

RUN_ID, OTHER = RunId("a" * 26), RunId("b" * 26)
VOTE = Promise(3, NodeId("c" * 52))


def test_a_vote_is_found_again_in_its_run_only(tmp_path: Path) -> None:
    assert VoteFile(tmp_path, RUN_ID).load() == NO_PROMISE
    assert VoteFile(tmp_path, RUN_ID).keep(VOTE) == ""
    assert VoteFile(tmp_path, RUN_ID).load() == VOTE
    assert VoteFile(tmp_path, OTHER).load() == NO_PROMISE


def test_a_vote_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    unkept = VoteFile(tmp_path, RUN_ID).keep(VOTE)
    assert unkept == f"{RUN_ID}/vote.json: Not a directory"


def test_on_a_full_disk_the_file_and_the_reason_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_durably", full)
    unkept = VoteFile(tmp_path, RUN_ID).keep(VOTE)
    assert unkept == f"{RUN_ID}/vote.json: No space left on device"
    recent = RecentEvents(dict)
    for term in (9, 10):
        recent.take(noted("vote.failed", {"term": term, "reason": unkept}, 0.0))
    (told,) = recent.describe(1.0, name="data-2")
    assert told["text"] == (f"the vote in term 10 can't be written ({unkept}): data-2 abstains")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"term": 1, "candidate": "x"}', '{"term": -1}'])
def test_a_vote_that_can_not_be_read_is_no_vote_for_nobody(tmp_path: Path, text: str) -> None:
    """Going on as if there were none could make this node vote twice."""
    VoteFile(tmp_path, RUN_ID).keep(VOTE)
    (tmp_path / "runs" / RUN_ID / "vote.json").write_text(text)
    with pytest.raises(HardwareError, match="E-HW-008"):
        VoteFile(tmp_path, RUN_ID).load()


def test_members_addresses_are_kept(tmp_path: Path) -> None:
    peers, root = KnownPeers(tmp_path), ROOT.public
    assert peers.find(root) == ()
    assert peers.keep(root, RUN_ID, "mine", ["d0:7700", "r1a:7700"]) == ""
    assert peers.find(root) == ("d0:7700", "r1a:7700")
    path = membership_folder(tmp_path, root) / "peers.json"
    fields = {"run_id": RUN_ID, "name": "mine", "addresses": ["d0:7700"]}
    for text in (
        '["d0:7700"]',
        "{}",
        "x",
        json.dumps(fields | {"addresses": ["no address"]}),
        json.dumps(fields | {"run_id": "../.."}),
    ):
        path.write_text(text)
        assert peers.find(root) == ()
    path.write_text(json.dumps(fields))
    assert peers.find(root) == ("d0:7700",)


def test_the_run_of_a_name_that_this_host_was_in_last_is_known_until_it_is_over(
    tmp_path: Path,
) -> None:
    peers, other = KnownPeers(tmp_path), RunId("q" * 26)
    roots = [host_key(name).public for name in "abc"]
    assert peers.newest("mine") is None
    runs = ((RUN_ID, "mine"), (other, "mine"), (RUN_ID, "yours"))
    for age_s, (root, (run_id, name)) in enumerate(zip(roots, runs, strict=True)):
        peers.keep(root, run_id, name, ["d0:7700"])
        os.utime(membership_folder(tmp_path, root) / "peers.json", (age_s, age_s))
    assert peers.newest("mine") == LastRun(roots[1], other, "mine", ("d0:7700",))
    assert peers.newest("yours") == LastRun(roots[2], RUN_ID, "yours", ("d0:7700",))
    peers.end(roots[1])
    assert peers.newest("mine") == LastRun(roots[0], RUN_ID, "mine", ("d0:7700",))
    peers.end(roots[0])
    assert peers.newest("mine") is None


def test_addresses_that_can_not_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "memberships").write_text("in the way")
    told: list[tuple[str, str]] = []

    def note(event: str, reason: str) -> None:
        told.append((event, reason))

    async def keep() -> None:
        kept = asyncio.get_running_loop().create_future()
        kept.add_done_callback(partial(tell_unkept, note))
        kept.set_result(KnownPeers(tmp_path).keep(ROOT.public, RUN_ID, "mine", ["d0:7700"]))

    asyncio.run(keep())
    ((event, reason),) = told
    assert event == "addresses.unkept"
    assert reason.endswith("/peers.json: Not a directory")

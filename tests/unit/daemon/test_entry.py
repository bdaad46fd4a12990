"""What a leader goes on with when it is started again and nobody says with what."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.node import RESUME_AUTO, RESUME_LATEST
from decod.config.run_file import RunFile
from decod.daemon import entry as module
from decod.daemon.entry import LeaderOptions, continued
from decod.daemon.errors import TemporaryError
from decod.daemon.host import Host
from decod.daemon.peers import KnownPeers
from decod.errors import RejectedError
from decod.membership.papers import Membership, keep_papers, membership_folder
from decod.net.join_string import JoinString
from tests.support.checkpoints import write_checkpoint
from tests.support.members import data_node
from tests.unit.daemon.nodes import RUN_ID
from tests.unit.daemon.test_leader import options

ME = data_node("me")
GOES_ON = JoinString(root=ME.root, addresses=("d1:7700",))


def asked(folder: Path, *, num_data_nodes: int) -> LeaderOptions:
    run = SimpleNamespace(name="test", batch=SimpleNamespace(num_data_nodes=num_data_nodes))
    run_file = cast("RunFile", SimpleNamespace(run=run))
    return options(folder, run_file=run_file, resume=RESUME_AUTO, init_dir=folder)


def go_on(given: LeaderOptions) -> tuple[str | None, int | None, bool]:
    """Returns what is joined and resumed, and whether given weights are used."""
    host = cast("Host", SimpleNamespace(identity=ME.host))
    found = asyncio.run(continued(given, host, lambda _: None))
    return found.join, found.resume, found.init_dir is not None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Where the run is led."""
    box: list[str | None] = [None]

    async def look(addresses: tuple[str, ...], membership: Membership) -> str | None:
        assert (addresses, membership.node_id) == (("d1:7700",), ME.node_id)
        return box[0]

    monkeypatch.setattr(module, "await_leader", look)
    return box


def test_a_host_that_has_done_nothing_yet_begins(tmp_path: Path) -> None:
    for num_data_nodes in (1, 2):
        assert go_on(asked(tmp_path, num_data_nodes=num_data_nodes)) == (None, None, True)


def test_the_newest_checkpoint_of_the_run_is_gone_on_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    assert go_on(asked(tmp_path, num_data_nodes=1)) == (None, RESUME_LATEST, False)


def test_a_run_that_others_may_lead_is_joined_again_and_never_begun_a_second_time(
    tmp_path: Path, elsewhere: list[Any]
) -> None:
    write_checkpoint(tmp_path, 4)
    keep_papers(membership_folder(tmp_path, ME.root), ME.papers)
    KnownPeers(tmp_path).keep(ME.root, RUN_ID, "test", ["d1:7700"])
    given = asked(tmp_path, num_data_nodes=2)
    with pytest.raises(TemporaryError, match=r"E-RUN-012 .*--resume latest"):
        go_on(given)
    elsewhere[0] = "d1:7700"
    assert go_on(given) == (str(GOES_ON), None, False)
    (membership_folder(tmp_path, ME.root) / "papers.json").unlink()
    with pytest.raises(RejectedError, match="E-REJ-014"):
        go_on(given)
    KnownPeers(tmp_path).forget(ME.root)
    assert go_on(given) == (None, RESUME_LATEST, False)

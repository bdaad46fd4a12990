"""What a leader goes on with when it is started again: the run, a checkpoint, or nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.node_config import RESUME_AUTO, RESUME_LATEST
from decod.config.run_file import RunFile
from decod.daemon import entry as module
from decod.daemon.entry import Elsewhere, LeaderOptions, continued
from decod.daemon.host import Host
from decod.daemon.node_errors import TemporaryError
from decod.daemon.node_folder import KnownPeers
from decod.errors import ConfigError, RejectedError
from decod.membership.papers import Membership, keep_papers, membership_folder
from decod.net.join_string import JoinString
from tests.support.checkpoints import write_checkpoint
from tests.support.members import data_node, volunteer
from tests.unit.daemon.nodes import RUN_ID
from tests.unit.daemon.test_leader_daemon import options

ME = data_node("me")
GOES_ON = JoinString(root=ME.root, addresses=("d1:7700",))


def asked(
    folder: Path, *, num_data_nodes: int, resume: int | None = RESUME_AUTO, anew: bool = False
) -> LeaderOptions:
    run = SimpleNamespace(name="test", batch=SimpleNamespace(num_data_nodes=num_data_nodes))
    run_file = cast("RunFile", SimpleNamespace(run=run))
    return options(folder, run_file=run_file, resume=resume, init_dir=folder, begins_anew=anew)


def go_on(
    given: LeaderOptions, said: list[str] | None = None
) -> tuple[str | None, int | None, bool]:
    """Returns what is joined and resumed, and whether given weights are used."""
    host = cast("Host", SimpleNamespace(identity=ME.host))
    lines = [] if said is None else said
    found = asyncio.run(continued(given, host, lines.append))
    return found.join, found.resume, found.init_dir is not None


def was_in_run(folder: Path) -> None:
    keep_papers(membership_folder(folder, ME.root), ME.papers)
    KnownPeers(folder).keep(ME.root, RUN_ID, "test", ["d1:7700"])


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[Elsewhere | None]:
    """Where the run is led."""
    box: list[Elsewhere | None] = [None]

    async def look(
        addresses: tuple[str, ...], membership: Membership, *, several: bool
    ) -> Elsewhere | None:
        assert (addresses, membership.node_id) == (("d1:7700",), ME.node_id)
        assert several in {True, False}
        return box[0]

    monkeypatch.setattr(module, "seek_elsewhere", look)
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
    was_in_run(tmp_path)
    given = asked(tmp_path, num_data_nodes=2)
    with pytest.raises(TemporaryError, match=r"E-RUN-012 .*--resume latest"):
        go_on(given)
    elsewhere[0] = Elsewhere("d1:7700", answers=True)
    assert go_on(given) == (str(GOES_ON), None, False)
    elsewhere[0] = Elsewhere("d1:7700", answers=False)
    with pytest.raises(TemporaryError, match="E-RUN-012"):
        go_on(given)
    (membership_folder(tmp_path, ME.root) / "papers.json").unlink()
    with pytest.raises(RejectedError, match="E-REJ-014"):
        go_on(given)
    KnownPeers(tmp_path).end(ME.root)
    assert go_on(given) == (None, RESUME_LATEST, False)


def test_a_run_that_is_over_is_not_begun_again_where_nothing_of_it_is_left(
    tmp_path: Path, elsewhere: list[Any]
) -> None:
    assert elsewhere == [None]
    was_in_run(tmp_path)
    KnownPeers(tmp_path).end(ME.root)
    given = asked(tmp_path, num_data_nodes=2)
    with pytest.raises(ConfigError, match=r"E-RUN-049 .* is over.*--new-run"):
        go_on(given)
    assert go_on(asked(tmp_path, num_data_nodes=2, resume=None)) == (None, None, True)
    write_checkpoint(tmp_path, 4)
    assert go_on(given) == (None, RESUME_LATEST, False)


def test_a_run_file_that_says_one_data_node_now_does_not_hide_a_run_that_goes_on(
    tmp_path: Path, elsewhere: list[Any]
) -> None:
    was_in_run(tmp_path)
    given = asked(tmp_path, num_data_nodes=1)
    assert go_on(given) == (None, None, True), "nobody else can lead it, so it is over"
    elsewhere[0] = Elsewhere("d1:7700", answers=True)
    assert go_on(given) == (str(GOES_ON), None, False)


@pytest.mark.parametrize("resume", [RESUME_LATEST, 4, None])
@pytest.mark.parametrize("answers", [True, False])
def test_no_command_begins_a_second_run_while_the_first_goes_on_unless_it_is_told_to(
    tmp_path: Path, elsewhere: list[Any], resume: int | None, answers: bool
) -> None:
    was_in_run(tmp_path)
    for num_data_nodes in (1, 2):
        elsewhere[0] = None
        given = asked(tmp_path, num_data_nodes=num_data_nodes, resume=resume)
        assert go_on(given) == (None, resume, True), "nobody goes on with it"
        elsewhere[0] = Elsewhere("d1:7700", answers=answers)
        with pytest.raises(ConfigError, match=r"E-RUN-013 .*d1:7700.*--resume auto.*--new-run"):
            go_on(given)
        anew = asked(tmp_path, num_data_nodes=num_data_nodes, resume=resume, anew=True)
        assert go_on(anew) == (None, resume, True)


def test_a_host_that_may_not_ask_any_more_says_so_and_begins(tmp_path: Path) -> None:
    KnownPeers(tmp_path).keep(ME.root, RUN_ID, "test", ["d1:7700"])
    said: list[str] = []
    assert go_on(asked(tmp_path, num_data_nodes=2, resume=RESUME_LATEST), said)[0] is None
    assert f"warning: nobody can tell whether run {RUN_ID} goes on" in said[0]


def test_the_run_of_somebody_else_with_the_same_name_is_no_reason_to_stop(
    tmp_path: Path, elsewhere: list[Any]
) -> None:
    """This host gave its device to it, as a volunteer."""
    helper = volunteer("me")
    keep_papers(membership_folder(tmp_path, helper.root), helper.papers)
    KnownPeers(tmp_path).keep(helper.root, RUN_ID, "test", ["d1:7700"])
    elsewhere[0] = Elsewhere("d1:7700", answers=True)
    for resume in (None, RESUME_AUTO):
        assert go_on(asked(tmp_path, num_data_nodes=2, resume=resume)) == (None, None, True)

"""What the leader's daemon does beside its core; and how a node's end becomes an exit code."""

import asyncio
import dataclasses
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.node_config import NodeConfig
from decod.config.run_file import DataSource, EvaluationConfig, RunFile
from decod.daemon import entry as place_module
from decod.daemon import leader_daemon as module
from decod.daemon.contact import Contact
from decod.daemon.entry import EntryFinder as FurtherDataNode
from decod.daemon.entry import LeaderOptions
from decod.daemon.exporting import export_model
from decod.daemon.host import Host
from decod.daemon.leader_daemon import _Leading, cache_of
from decod.daemon.node_errors import TemporaryError, error_of, exit_code_of
from decod.daemon.progress_display import ProgressDisplay
from decod.daemon.run_snapshot import SnapshotSources
from decod.driver.compute import JobError
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
    RejectedError,
)
from decod.membership.papers import Membership
from decod.membership.statements import new_charter
from decod.protocol.core.effects import Stop, StopReason
from decod.run.model_config import ModelConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import StagesConfig
from decod.tasks import in_thread
from decod.train.checkpoint.places import DiskRoom
from decod.train.checkpoint.store import CheckpointConfig
from tests.support.members import data_node
from tests.support.noted import noted
from tests.unit.daemon.nodes import (
    RUN_ID,
    STRANGER,
    make_manifest,
    make_node,
)

MODEL = ModelConfig()
ME = data_node("me")


def options(folder: Path, **changes: Any) -> LeaderOptions:
    run_file = cast(
        "RunFile",
        SimpleNamespace(
            checkpoint=CheckpointConfig(), evaluation=EvaluationConfig(), path="run.toml"
        ),
    )
    given = {"run_file": run_file, "node": NodeConfig(state_dir=folder)}
    return LeaderOptions(**(given | changes))


def test_the_cache_of_data_keeps_to_the_cap_of_the_disk(tmp_path: Path) -> None:
    """Also if that changes while the node runs."""
    data = DataSource(path="s3://bucket/corpus", cache_max_gib=1.0)
    run_file = cast("RunFile", SimpleNamespace(data=data))
    room = DiskRoom(tmp_path)
    cache = cache_of(options(tmp_path, run_file=run_file), room)
    assert cache.folder == tmp_path / "data"
    assert cache.limit_bytes() == 2**30
    room.cap(2**30)
    assert cache.limit_bytes() == 2**29
    room.cap(2**40)
    assert cache.limit_bytes() == 2**30
    elsewhere = cast("RunFile", SimpleNamespace(data=DataSource(cache="/fast")))
    assert cache_of(options(tmp_path, run_file=elsewhere), room).folder == Path("/fast")


class Joining:
    """A run that another node leads, found without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        manifest = dataclasses.replace(make_manifest(), **changes)
        contact = Contact(
            run_id=RUN_ID,
            manifest=manifest,
            charter=new_charter(data_node("leader"), RUN_ID, manifest.to_json()),
            leader=STRANGER,
            leader_address="127.0.0.1:1",
            observed_address="",
            addresses=("127.0.0.1:1", "127.0.0.1:2"),
        )

        async def find(addresses: tuple[str, ...], by: Membership, *, avoid_own: bool) -> Contact:
            assert (addresses, by, avoid_own) == (("h:1",), ME, True)
            return contact

        monkeypatch.setattr(place_module, "find_run", find)

    def place(self, folder: Path, *, again: bool = False, **mine: Any) -> Any:
        given = options(folder, init_dir=folder if again else None)
        joining = FurtherDataNode(
            given, cast("Host", SimpleNamespace(identity=ME.host)), make_manifest(**mine), folder
        )
        return asyncio.run(joining.seek(("h:1",), ME, again=again))


def test_a_further_data_node_joins_with_the_same_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Joining(monkeypatch).place(tmp_path)
    assert (place.run_id, place.leader) == (RUN_ID, STRANGER)
    assert place.contacts == ("127.0.0.1:1", "127.0.0.1:2")


def test_another_run_file_is_refused_and_the_field_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RejectedError, match=r"run\.seed is 3 here and 0 there"):
        Joining(monkeypatch).place(tmp_path, seed=3)


def test_a_further_data_node_needs_no_folder_of_the_given_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for again in (False, True):
        joining = Joining(monkeypatch, initial_weights="a" * 64)
        place = joining.place(tmp_path, again=again)
        assert place.manifest.initial_weights == "a" * 64


async def test_the_last_iteration_is_always_shown(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        lines: list[str] = []
        node.say = lines.append
        leading = _Leading(node, options(tmp_path))
        for iteration in range(1, 6):
            fields = {"iteration": f"{iteration}.1", "loss": 2.0, "num_tokens": 8}
            node.progress.take(noted("step.committed", fields, float(iteration)))
        assert len(lines) == 1, "at most one a second"
        leading._shown.show_last()
        leading._shown.show_last()
        assert len(lines) == 2
        line = r"\d\d:\d\d:\d\d me  iteration 5  loss 2\.0000 \(\+0\.0000\)  8 tokens/s"
        assert re.fullmatch(line, lines[1])


async def test_a_newcomer_of_a_run_that_went_back_ends_without_a_loss(tmp_path: Path) -> None:
    """It knows the iteration from which the run goes on, and has committed none."""
    with make_node(tmp_path, leads=False) as node:
        lines: list[str] = []
        node.say = lines.append
        shown = ProgressDisplay(node.progress, node.say, node.name)
        returned = {"iteration": 12, "source": "kept", "num_repeated": 4, "reason": "lost"}
        node.progress.take(noted("run.returned", returned, 1.0))
        shown.show_last()
        assert [line[9:] for line in lines] == ["me  iteration 12  loss -  -"]


async def test_the_model_is_kept_before_a_stage_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []

    async def export(_: object, _run: object, folder: Path, *_base: object) -> int:
        kept.append(folder)
        raise NetworkError("no disk", why="it is full", fix="make room")

    monkeypatch.setattr("decod.daemon.leader_daemon.export_model", export)
    with make_node(tmp_path) as node:
        lines: list[str] = []
        node.say = lines.append
        leading = _Leading(node, options(tmp_path))
        node.progress.iteration = 3
        for _ in range(2):
            node.progress.take(noted("stage.ending", {"stage": 2, "peer": STRANGER}, 0.0))
        assert "stage 2" in node.progress.message
        assert leading._checkpoint_task is not None
        await leading._checkpoint_task
        assert len(kept) == 1, "once at a time"
        assert "could not be kept: " in lines[0]


@pytest.mark.parametrize(
    ("organisation", "num_stages", "need", "said"),
    [
        ("pipeline", 1, 1, "stage 1 needs 1 member"),
        ("pipeline", 3, 2, "every stage from 1 to 3 needs 2 members"),
        ("servers", 1, 2, "stage 1 needs 2 servers (decod join --server)"),
    ],
)
def test_the_leader_says_whom_a_run_waits_for(
    organisation: str, num_stages: int, need: int, said: str
) -> None:
    run = RunConfig(
        organisation=Organisation(organisation),
        stages=StagesConfig(num_relay_stages=num_stages),
        protocol=ProtocolConfig(min_nodes_per_stage=need),
    )
    assert module._awaited(run) == f"waiting for volunteers: {said}"


@pytest.mark.parametrize("path", [None, "", "model", "./model"])
async def test_an_export_needs_a_whole_path(tmp_path: Path, path: str | None) -> None:
    with make_node(tmp_path) as node:
        _Leading(node, options(tmp_path))
        request = {"command": "export"} | ({} if path is None else {"path": path})
        with pytest.raises(ConfigError, match="E-CFG-044"):
            await node.answer(request)


async def test_there_is_nothing_to_export_before_the_run(tmp_path: Path) -> None:
    begun = pytest.raises(NetworkError, match="has not committed an iteration yet")
    with make_node(tmp_path) as node, begun:
        leading = _Leading(node, options(tmp_path))
        await export_model(leading._sources, node.part.run, tmp_path / "model")


async def test_an_export_waits_for_the_first_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that goes on from a checkpoint, and before the leader leads."""

    async def export(sources: SnapshotSources, *_: object) -> int:
        return sources.progress.iteration

    monkeypatch.setattr(module, "export_model", export)
    request = {"command": "export", "path": str(tmp_path / "model")}
    with make_node(tmp_path) as node:
        for _ in range(2):
            with pytest.raises(NetworkError, match=r"E-NET-021 .*when `decod status` shows"):
                await node.answer(request)
            _Leading(node, options(tmp_path))
        node.progress.iteration += 1
        assert (await node.answer(request))["iteration"] == 1


async def test_an_export_at_a_relay_names_the_leader(tmp_path: Path) -> None:
    expected = r"E-RUN-003 this node does not lead .*on the leader's host \(127.0.0.1:1\)"
    with make_node(tmp_path, leads=False) as node, pytest.raises(ConfigError, match=expected):
        await node.answer({"command": "export", "path": str(tmp_path / "model")})


async def test_work_in_a_thread_gives_its_error_and_does_not_hold_up_the_end() -> None:
    never = threading.Event()
    await in_thread(lambda: None)
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: cast("None", 1 // 0))
    in_thread(lambda: cast("None", never.wait()))
    never.set()


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (StopReason.FINISHED, 0),
        (StopReason.DRAINED, 0),
        (StopReason.REFUSED, RejectedError),
        (StopReason.REMOVED, TemporaryError),
        (StopReason.LEADER_LOST, TemporaryError),
        (StopReason.SUPERSEDED, TemporaryError),
        (StopReason.CRIPPLED, DecodError),
        (StopReason.FAILED, DecodError),
    ],
)
def test_every_end_has_an_exit_code(reason: StopReason, expected: int | type[DecodError]) -> None:
    stop = Stop(reason, "because")
    if isinstance(expected, int):
        assert exit_code_of(stop) == expected
    else:
        with pytest.raises(expected, match="because"):
            exit_code_of(stop)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("E-CFG-009", ConfigError), ("E-HW-003", HardwareError), ("nonsense", DecodError)],
)
def test_an_error_of_the_compute_process_keeps_its_class(code: str, kind: type[DecodError]) -> None:
    found = error_of(JobError({"code": code, "what": "a", "why": "b", "fix": "c"}))
    assert type(found) is kind
    assert str(found) == f"{code} a: b. Try: c"

"""What the leader's daemon does beside its core; and how a node's end becomes an exit code."""

import asyncio
import dataclasses
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.node import NodeConfig
from decod.config.run_file import RunFile
from decod.daemon import leader as module
from decod.daemon.contact import Contact
from decod.daemon.errors import TemporaryError, error_of, exit_code_of
from decod.daemon.export import export_model
from decod.daemon.host import _ignore_signals
from decod.daemon.leader import LeaderOptions, _Leading, _part, run_leader
from decod.daemon.shown import ShownProgress
from decod.daemon.threads import in_thread
from decod.driver.compute import JobError
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
    RejectedError,
)
from decod.model.config import ModelConfig
from decod.net.identity import Identity
from decod.protocol.effects import Stop, StopReason
from decod.train.checkpoint.params import CheckpointConfig
from tests.unit.daemon.nodes import RUN_ID, STRANGER, make_manifest, make_node

MODEL = ModelConfig()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def options(folder: Path, **changes: Any) -> LeaderOptions:
    run_file = cast("RunFile", SimpleNamespace(checkpoint=CheckpointConfig(), path="run.toml"))
    return LeaderOptions(run_file=run_file, node=NodeConfig(state_dir=folder), **changes)


class Joining:
    """A run that another node leads, found without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        manifest = dataclasses.replace(make_manifest(), **changes)
        contact = Contact(
            run_id=RUN_ID,
            manifest=manifest,
            leader=STRANGER,
            leader_address="127.0.0.1:1",
            observed_address="",
            addresses=("127.0.0.1:1", "127.0.0.1:2"),
        )

        async def find(_: str, _known: object, _peers: object, own: str) -> Contact:
            assert own == "m" * 52
            return contact

        monkeypatch.setattr(module, "find_run", find)

    def part(self, folder: Path, **mine: Any) -> Any:
        identity = cast("Identity", SimpleNamespace(node_id="m" * 52))
        manifest, said = make_manifest(**mine), list[str]()
        given = options(folder, join="...")
        return asyncio.run(_part(given, identity, manifest, folder, said.append))


def test_a_further_data_node_joins_with_the_same_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, contacts = Joining(monkeypatch).part(tmp_path)
    assert (part.run_id, part.leader) == (RUN_ID, STRANGER)
    assert contacts == ("127.0.0.1:1", "127.0.0.1:2")


def test_another_run_file_is_refused_and_the_field_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RejectedError, match=r"run\.seed is 3 here and 0 there"):
        Joining(monkeypatch).part(tmp_path, seed=3)


def test_a_further_data_node_needs_no_folder_of_the_given_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _ = Joining(monkeypatch, initial_weights="a" * 64).part(tmp_path)
    assert part.manifest.initial_weights == "a" * 64


def test_the_last_iteration_is_always_shown(tmp_path: Path) -> None:
    async def test() -> None:
        with make_node(tmp_path) as node:
            lines: list[str] = []
            node.say = lines.append
            leading = _Leading(node, options(tmp_path))
            for iteration in range(1, 6):
                fields = {"round": f"{iteration}.1", "loss": 2.0, "num_tokens": 8}
                node.progress.take("round.committed", fields, now_s=float(iteration))
            assert len(lines) == 1, "at most one a second"
            leading._shown.show_last()
            leading._shown.show_last()
            assert lines[1:] == ["iteration 5  loss 2.0000  8 tokens/s"]

    asyncio.run(test())


def test_a_newcomer_of_a_run_that_went_back_ends_without_a_loss(tmp_path: Path) -> None:
    """It knows the iteration from which the run goes on, and has committed none."""

    async def test() -> None:
        with make_node(tmp_path, leads=False) as node:
            lines: list[str] = []
            node.say = lines.append
            shown = ShownProgress(node)
            returned = {"iteration": 12, "source": "kept", "num_repeated": 4, "reason": "lost"}
            node.progress.take("run.returned", returned, now_s=1.0)
            shown.show_last()
            assert lines == ["iteration 12  loss -  -"]

    asyncio.run(test())


def test_the_model_is_kept_before_a_stage_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []

    async def export(_: object, folder: Path) -> int:
        kept.append(folder)
        raise NetworkError("no disk", why="it is full", fix="make room")

    async def test() -> None:
        with make_node(tmp_path) as node:
            lines: list[str] = []
            node.say = lines.append
            leading = _Leading(node, options(tmp_path))
            node.progress.iteration = 3
            for _ in range(2):
                node.progress.take("stage.ending", {"stage": 2, "peer": STRANGER}, now_s=0.0)
            assert "stage 2" in node.progress.message
            assert leading._keeping is not None
            await leading._keeping
            assert len(kept) == 1, "once at a time"
            assert "could not be kept: " in lines[0]

    monkeypatch.setattr("decod.daemon.leader.export_model", export)
    asyncio.run(test())


@pytest.mark.parametrize("path", [None, "", "model", "./model"])
def test_an_export_needs_a_whole_path(tmp_path: Path, path: str | None) -> None:
    async def test() -> None:
        with make_node(tmp_path) as node:
            _Leading(node, options(tmp_path))
            request = {"command": "export"} | ({} if path is None else {"path": path})
            with pytest.raises(ConfigError, match="E-CFG-044"):
                await node._answer(request)

    asyncio.run(test())


def test_there_is_nothing_to_export_before_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        begun = pytest.raises(NetworkError, match="has not committed an iteration yet")
        with make_node(tmp_path) as node, begun:
            await export_model(node, tmp_path / "model")

    asyncio.run(test())


def test_an_export_waits_for_the_first_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that goes on from a checkpoint, and before the leader leads."""

    async def export(node: Any, _: Path) -> int:
        iteration: int = node.progress.iteration
        return iteration

    async def test() -> None:
        request = {"command": "export", "path": str(tmp_path / "model")}
        with make_node(tmp_path) as node:
            for _ in range(2):
                with pytest.raises(NetworkError, match=r"E-NET-021 .*when `decod status` shows"):
                    await node._answer(request)
                _Leading(node, options(tmp_path))
            node.progress.iteration += 1
            assert (await node._answer(request))["iteration"] == 1

    monkeypatch.setattr(module, "export_model", export)
    asyncio.run(test())


def test_an_export_at_a_relay_names_the_leader(tmp_path: Path) -> None:
    async def test() -> None:
        expected = r"E-RUN-003 this node does not lead .*on the leader's host \(127.0.0.1:1\)"
        with make_node(tmp_path, leads=False) as node, pytest.raises(ConfigError, match=expected):
            await node._answer({"command": "export", "path": str(tmp_path / "model")})

    asyncio.run(test())


class Lives:
    """A leader whom others have replaced, again and again, until a life ends otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, leaving: bool) -> None:
        self.lines: list[str] = []
        self.joins: list[str | None] = []
        self.ignored: list[bool] = []
        """Whether signals were, when each life began."""
        self._leaving = leaving
        monkeypatch.setattr(module, "_run_once", self._run_once)

    async def _run_once(self, asked: LeaderOptions, *_: Any) -> module._Life:
        self.joins.append(asked.join)
        self.ignored.append(signal.SIG_IGN in map(signal.getsignal, SIGNALS))
        _ignore_signals()
        reason = StopReason.FINISHED if len(self.joins) > 1 else StopReason.SUPERSEDED
        return module._Life(Stop(reason, "m leads the run in term 2"), "decod1-x", self._leaving)

    def run(self, folder: Path) -> int:
        before = [signal.getsignal(number) for number in SIGNALS]
        try:
            return run_leader(options(folder), self.lines.append)
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


def test_who_was_replaced_joins_again_and_can_be_ended_while_it_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(monkeypatch, leaving=False)
    assert lives.run(tmp_path) == 0
    assert lives.joins == [None, "decod1-x"]
    assert lives.lines == ["m leads the run in term 2: this node joins it again as a data node"]
    assert lives.ignored == [False, False]


def test_who_was_replaced_and_is_to_leave_does_not_join_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(monkeypatch, leaving=True)
    assert lives.run(tmp_path) == 0
    assert lives.joins == [None]
    assert lives.lines == ["left the run: m leads the run in term 2"]


def test_work_in_a_thread_gives_its_error_and_does_not_hold_up_the_end() -> None:
    never = threading.Event()

    async def test() -> None:
        await in_thread(lambda: None)
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: cast("None", 1 // 0))
        in_thread(lambda: cast("None", never.wait()))

    asyncio.run(test())  # Returns, though the last one runs on.
    never.set()


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (StopReason.FINISHED, 0),
        (StopReason.DRAINED, 0),
        (StopReason.REFUSED, RejectedError),
        (StopReason.REMOVED, TemporaryError),
        (StopReason.LEADER_LOST, TemporaryError),
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

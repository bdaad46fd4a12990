"""The life of a node around its core: folder, ports, addresses, and leaving early."""

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig
from decod.daemon import pipeline_node as node_module
from decod.daemon import reachability
from decod.daemon.device_owner import HostDevice, MeasuredHost
from decod.daemon.host import Host, Leaving
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.reachability import advertised
from decod.errors import ConfigError, HardwareError, NetworkError
from decod.net.ask import HelloRequest
from decod.net.dht import Dht
from decod.protocol.core.jobs import BaseJob, Configure, Configured, Measure, Measured
from tests.unit.daemon.nodes import make_manifest, make_node

LEAVING = Leaving(print)


class _Absent:
    """A stand-in that answers nothing."""

    healthy = True

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(request)

    def describe(self) -> str:
        return "absent"


def test_a_folder_serves_one_daemon_at_a_time(tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path / "new" / "folder")
    with Host(config, LEAVING) as first:
        with pytest.raises(ConfigError, match="E-CFG-041"):
            Host(config, LEAVING)
        identity = first.identity
    with Host(config, LEAVING) as second:
        assert second.identity == identity


def test_a_host_that_fails_to_begin_leaves_its_folder_free(tmp_path: Path) -> None:
    config = NodeConfig(state_dir=tmp_path)
    (tmp_path / "node.log").mkdir()
    with pytest.raises(HardwareError):
        Host(config, LEAVING)
    (tmp_path / "node.log").rmdir()
    with Host(config, LEAVING):
        pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="E-CFG-042"):
        Host(NodeConfig(state_dir=tmp_path / "file" / "x"), LEAVING)


def test_the_terminal_names_nodes_and_the_file_keeps_ids(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Host(NodeConfig(state_dir=tmp_path), LEAVING) as host:
        host.log.name_of = {"abcdefghijkl": "merry-marlin"}.get
        fields = {"peer": "abcdefghijkl", "reason": "silent"}
        extra = {"event": "member.lost", "fields": fields}
        logging.getLogger("decod").warning("member.lost", extra=extra)
    assert "merry-marlin (abcdefgh) is gone: silent" in capfd.readouterr().err
    assert json.loads((tmp_path / "node.log").read_text())["peer"] == "abcdefghijkl"


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        (None, "127.0.0.1:5"),
        ("example.org:7", "example.org:7"),
        ("example.org", "example.org:7700"),
        ("[::1]:7", "[::1]:7"),
    ],
)
def test_what_others_are_told_can_be_dialled(advertise: str | None, address: str) -> None:
    config = NodeConfig(listen_host="127.0.0.1", advertise=advertise)
    assert advertised(config, 5) == address


@pytest.mark.parametrize(
    ("observed", "address"),
    [("127.0.0.1", "10.0.0.9:5"), ("", "10.0.0.9:5"), ("1.2.3.4", "1.2.3.4:5"), ("::9", "[::9]:5")],
)
def test_a_peer_on_this_host_does_not_say_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, observed: str, address: str
) -> None:
    monkeypatch.setattr(reachability, "outward_addresses", lambda _: ["10.0.0.9"])
    assert advertised(NodeConfig(listen_host="0.0.0.0"), 5, observed) == address


async def test_another_port_is_tried_if_its_udp_twin_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[socket.socket] = []
    start = Dht.start

    async def start_late(dht: Dht, host: str, port: int) -> int:
        if len(taken) < 2:
            taken.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            taken[-1].bind((host, port))
        return await start(dht, host, port)

    monkeypatch.setattr(Dht, "start", start_late)
    with make_node(tmp_path) as node:
        port = await node._listen()
        assert port not in [twin.getsockname()[1] for twin in taken]
        await node._stack.aclose()
    assert len(taken) == 2
    for twin in taken:
        twin.close()


def test_a_port_that_was_asked_for_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def test() -> None:
            with make_node(tmp_path, port=port) as node:
                with pytest.raises(NetworkError, match="UDP"):
                    await node._listen()
                await node._stack.aclose()

        asyncio.run(test())


async def test_strangers_hear_nothing_before_the_node_knows_its_address(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        assert node._hello(HelloRequest()) is None
        node.address = "127.0.0.1:7"
        info = node._hello(HelloRequest())
        assert info is not None
        assert info.leader_address == "127.0.0.1:7"


async def test_leaving_does_not_wait_for_what_has_not_begun(tmp_path: Path) -> None:
    """The first Ctrl-C while torch still loads ends the daemon in peace, and at once."""
    with make_node(tmp_path) as node:
        cancelled = asyncio.Event()

        async def load() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        begun = asyncio.create_task(node.unless_drained(load()))
        await asyncio.sleep(0)
        answer = await node.answer({"command": "drain"})
        assert answer == {"draining": True}
        assert not await begun
        assert cancelled.is_set()


async def test_work_that_ends_in_time_is_done_and_its_error_is_raised(tmp_path: Path) -> None:
    async def fail() -> None:
        raise HardwareError("a", why="b", fix="c")

    with make_node(tmp_path) as node:
        assert await node.unless_drained(asyncio.sleep(0))
        with pytest.raises(HardwareError):
            await node.unless_drained(fail())


def test_a_node_says_and_shows_which_device_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacity and cost are measured on that one, so it is chosen before them."""
    asked: list[str] = []
    said: list[str] = []
    shown: list[str] = []
    nodes: list[PipelineNode] = []
    gibibyte = 1 << 30

    async def run_job(_: HostDevice, job: BaseJob) -> object:
        asked.append(job.name)
        shown.append(nodes[0].local_status()["node"]["device"])
        match job:
            case Configure(settings):
                assert settings["device"] == "auto"
                text = "CPU (no CUDA device is visible)"
                return Configured({"device": "cpu", "device_text": text, "memory_bytes": gibibyte})
            case Measure():
                return Measured(1.0, 2.0, gibibyte // 16)
            case _:
                return None

    async def test() -> list[MeasuredHost]:
        started: list[MeasuredHost] = []
        monkeypatch.setattr(HostDevice, "run", run_job)
        monkeypatch.setattr(PipelineNode, "_start_core", lambda _, found: started.append(found))
        with make_node(tmp_path, leads=False) as node:
            nodes.append(node)
            node.say = said.append
            await node.prepare()
            shown.append(node.local_status()["node"]["device"])
        return started

    started = asyncio.run(test())
    assert asked == ["Configure", "Build", "Measure"]
    assert said == ["device: CPU (no CUDA device is visible)"]
    assert shown == ["auto", "cpu", "cpu", "cpu"]
    assert started == [MeasuredHost(7, 1.5, 1 << 30)], (
        "half of what is free on the device beside the stage, by one microbatch's memory"
    )


@pytest.mark.parametrize(("capacity", "told"), [(None, "a microbatch"), (64, "64 microbatches")])
async def test_a_stage_that_can_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None, told: str
) -> None:
    """Else a manifest could have the system end other programs of this host for want of memory.

    The compute process of a volunteer is given no path that has come from others.
    """
    asked: list[BaseJob] = []

    async def run_job(_: HostDevice, job: BaseJob) -> object:
        asked.append(job)
        # Enough for the tiny stage, but not for 64 microbatches.
        needs = stage_needs(make_manifest().run, 1)
        enough = needs.device_bytes + needs.held_bytes(64, recompute=True)
        room = enough - 1 if capacity else 1
        return Configured({"device": "cpu", "device_text": "CPU", "memory_bytes": room})

    monkeypatch.setattr(HostDevice, "run", run_job)
    refused = pytest.raises(HardwareError, match=f"E-HW-003 .* are free on cpu: .*{told}")
    with make_node(tmp_path, leads=False, capacity=capacity) as node, refused:
        await node.prepare()
    (configure,) = asked
    assert isinstance(configure, Configure)
    assert {configure.settings[name] for name in ("data_dir", "init_dir", "checkpoint_dir")} == {
        None
    }


async def test_an_unknown_request_is_an_error(tmp_path: Path) -> None:
    with make_node(tmp_path) as node, pytest.raises(ConfigError, match="E-RUN-003"):
        await node.answer({"command": ["x"]})


async def test_what_no_task_caught_is_in_the_log(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        error = ZeroDivisionError("a bug")
        context = {"message": "in a task", "exception": error}
        node_module._failed(context, node._files, node.note)
    record = json.loads((tmp_path / "node.log").read_text().splitlines()[-1])
    assert (record["event"], record["level"]) == ("task.failed", "error")
    assert "ZeroDivisionError: a bug" in record["traceback"]

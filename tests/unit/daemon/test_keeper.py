"""A node is paused and resumed by rules, its schedule and its operator, in a real event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any

import pytest

from decod.config.node_config import NodeConfig
from decod.config.schedule import PauseRule, WorkHours
from decod.daemon.pausing import keeper
from decod.daemon.pausing.keeper import Pausing
from decod.daemon.pausing.pause_probes import GpuProcess, OwnGpu, Probe, Sighting, make_probes
from decod.errors import NetworkError, RejectedError
from tests.unit.daemon.test_pause_probes import FakeNvml
from tests.waiting import wait_until

RULES = tuple(PauseRule)
OWN = OwnGpu("GPU-1", 10)


class Node:
    """A node that does what it is asked, or not."""

    def __init__(self) -> None:
        self.paused, self.pausable, self.gpus = False, True, (OWN,)
        self.refusal = ""
        self.asked: list[bool] = []

    async def pause(self, *, paused: bool) -> object:
        self.asked.append(paused)
        if self.refusal:
            raise RejectedError("no", why=self.refusal, fix="wait", code="E-REJ-007")
        self.paused = paused
        return None

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        await self.pause(paused=request["command"] == "pause")
        return {"capacity": 0 if self.paused else 2}


class Setting:
    """A host whose probes find what a test says."""

    def __init__(self, **choices: Any) -> None:
        self.holds: dict[PauseRule, bool | None] = dict.fromkeys(PauseRule, False)
        choices.setdefault("pause_when", RULES)
        self.probes: dict[PauseRule, Probe] = {rule: self._probe(rule) for rule in PauseRule}
        self.wall_s = 0.0
        self.pausing = Pausing(NodeConfig(**choices), self.probes, lambda: self.wall_s)
        self.node = Node()

    def _probe(self, rule: PauseRule) -> Probe:
        return lambda: Sighting(self.holds[rule], f"{rule} was seen")

    def names(self) -> list[str]:
        return [cause["name"] for cause in self.pausing.describe()["causes"]]

    async def pause(self) -> dict[str, Any]:
        return await self.pausing.person_pauses({"command": "pause"}, self.node.answer)

    async def resume(self) -> dict[str, Any]:
        return await self.pausing.person_resumes({"command": "resume"}, self.node.answer)


Test = Callable[[Setting], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.01)
    monkeypatch.setattr(
        "decod.daemon.pausing.pause_probes.CALM_S", dict.fromkeys(PauseRule, 0.1), raising=True
    )


@asynccontextmanager
async def kept(**choices: Any) -> AsyncIterator[Setting]:
    host = Setting(**choices)
    keeping = asyncio.create_task(host.pausing.keep())
    try:
        with host.pausing.of(host.node, host.node):
            yield host
        assert not keeping.done(), keeping.result()
    finally:
        keeping.cancel()


@pytest.fixture(name="host")
def _host() -> AbstractAsyncContextManager[Setting]:
    return kept()


async def test_each_rule_pauses_the_node_and_its_end_resumes_it(host: Setting) -> None:
    for rule in PauseRule:
        host.holds[rule] = True
        await wait_until(lambda: host.node.paused)
        assert host.names() == [rule]
        host.holds[rule] = False
        await wait_until(lambda: not host.node.paused)
    assert host.node.asked == [True, False] * len(PauseRule)


async def test_a_person_s_pause_outlasts_every_cause(host: Setting) -> None:
    await host.pause()
    host.holds[PauseRule.HOT] = True
    await wait_until(lambda: host.names() == ["hot"])
    host.holds[PauseRule.HOT] = False
    await wait_until(lambda: not host.names())
    assert host.node.asked == [True]
    assert host.pausing.describe()["by_person"] is True
    assert (await host.resume())["capacity"] == 2
    assert host.node.asked == [True, False]
    assert host.pausing.describe()["by_person"] is False


async def test_a_person_s_resume_does_not_end_a_cause(host: Setting) -> None:
    host.holds[PauseRule.BATTERY] = True
    await wait_until(lambda: host.node.paused)
    await host.pause()
    answer = await host.resume()
    assert [cause["name"] for cause in answer["causes"]] == ["battery"]
    assert host.node.paused
    host.holds[PauseRule.BATTERY] = False
    await wait_until(lambda: not host.node.paused)


async def test_a_person_s_pause_holds_in_the_node_s_next_life(host: Setting) -> None:
    await host.pause()
    later = Node()
    later.pausable = False
    with host.pausing.of(later, later):
        assert later.asked == []
        later.pausable = True
        await wait_until(lambda: later.paused)


async def test_a_pause_that_is_refused_is_no_pause(
    monkeypatch: pytest.MonkeyPatch, host: Setting
) -> None:
    host.node.refusal = "stage 1 would stop"
    with pytest.raises(RejectedError):
        await host.pause()
    assert host.pausing.describe()["by_person"] is False
    host.holds[PauseRule.HOT] = True
    await wait_until(lambda: host.pausing.describe()["refusal"])
    assert host.pausing.describe()["refusal"] == "stage 1 would stop"
    host.node.refusal = ""
    monkeypatch.setattr(keeper, "ASK_AGAIN_S", 0.05)
    host.holds[PauseRule.HOT] = False
    await wait_until(lambda: not host.names())
    host.holds[PauseRule.HOT] = True
    await wait_until(lambda: host.node.paused)
    assert host.pausing.describe()["refusal"] == ""


async def test_a_leader_that_refuses_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, host: Setting
) -> None:
    monkeypatch.setattr(keeper, "ASK_AGAIN_S", 0.05)
    host.node.refusal = "stage 1 would stop"
    host.holds[PauseRule.HOT] = True
    await wait_until(lambda: len(host.node.asked) >= 3)
    host.node.refusal = ""
    await wait_until(lambda: host.node.paused)


async def test_a_pause_that_the_leader_has_not_answered_stays_wanted(host: Setting) -> None:
    async def silent(_: dict[str, Any]) -> dict[str, Any]:
        raise NetworkError("silence", why="it is away", fix="wait", code="E-NET-024")

    with pytest.raises(NetworkError):
        await host.pausing.person_pauses({"command": "pause"}, silent)
    assert host.pausing.describe()["by_person"] is True
    await wait_until(lambda: host.node.paused)


async def test_probes_that_crash_or_hang_harm_nothing_and_are_said_once(
    host: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PROBE_TIMEOUT_S", 0.05)
    hangs = threading.Event()
    num = [0]

    def hang() -> Sighting:
        num[0] += 1
        hangs.wait(10.0)
        return Sighting(holds=True)

    def crash() -> Sighting:
        raise ZeroDivisionError("a driver that is odd")

    host.probes[PauseRule.BUSY_GPU], host.probes[PauseRule.KEYBOARD] = hang, crash
    await wait_until(lambda: len(host.pausing.describe()["unknown"]) == 2)
    host.holds[PauseRule.BATTERY] = True
    await wait_until(lambda: host.node.paused)
    unknown = host.pausing.describe()["unknown"]
    assert unknown["keyboard"] == "a driver that is odd"
    assert "not ended" in unknown["busy-gpu"]
    assert num == [1], "a probe that hangs is not started again"
    hangs.set()
    await wait_until(lambda: "busy-gpu" not in host.pausing.describe()["unknown"])


async def test_a_schedule_pauses_the_node_until_it_opens() -> None:
    async with kept(schedule=WorkHours.parse("22:00-07:00")) as host:
        at_noon = datetime(2026, 11, 23, 12).astimezone()
        host.wall_s = at_noon.timestamp()
        await wait_until(lambda: host.node.paused)
        (cause,) = host.pausing.describe()["causes"]
        assert cause["until"] == at_noon.replace(hour=22).isoformat("T", "minutes")
        host.wall_s = at_noon.replace(hour=22).timestamp()
        await wait_until(lambda: not host.node.paused)


async def test_other_rules_count_at_once(host: Setting) -> None:
    host.holds[PauseRule.KEYBOARD] = True
    await wait_until(lambda: host.node.paused)
    host.pausing.use(NodeConfig(pause_when=(PauseRule.HOT,)))
    await wait_until(lambda: not host.node.paused)
    # Without a word of the operator, only the battery counts.
    host.pausing.use(NodeConfig())
    host.holds[PauseRule.BATTERY] = True
    await wait_until(lambda: host.node.paused)
    assert host.names() == ["battery"]


def test_a_gpu_that_others_use_pauses_the_node_within_five_seconds() -> None:
    """With the real intervals, and a driver that is slow."""
    driver = FakeNvml(GpuProcess(OWN.pid, 1 << 30, 1.0))

    async def main() -> None:
        node = Node()
        probes: Mapping[PauseRule, Probe] = make_probes(lambda: node.gpus, driver, lambda: 0.0)
        config = NodeConfig(pause_when=(PauseRule.BUSY_GPU,))
        pausing, loop = Pausing(config, probes), asyncio.get_running_loop()
        keeping = asyncio.create_task(pausing.keep())
        with pausing.of(node, node):
            # Just after a look: the next one is as far away as it can be.
            await wait_until(lambda: driver.num_asked)
            driver.found.append(GpuProcess(4711, 6 << 30, 0.9))
            start_s = loop.time()
            await wait_until(lambda: node.paused)
            assert loop.time() - start_s < 5.0
            assert "hold 6.0 GiB" in pausing.describe()["causes"][0]["detail"]
        keeping.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "LOOK_S", 2.0)
        asyncio.run(main())

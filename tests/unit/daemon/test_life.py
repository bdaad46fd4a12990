"""A node comes back into its run, and stops only when the run is over, or it is to leave."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from decod.daemon import life as module
from decod.daemon.life import FAILURES_MAX, Life
from decod.daemon.node_errors import TemporaryError
from decod.daemon.pipeline_node import PipelineNode
from decod.errors import DecodError, HardwareError, NetworkError, RejectedError
from decod.protocol.core.effects import Stop, StopReason
from decod.tasks import Backoff
from tests.unit.daemon.nodes import give_driver, make_node

DONE = Stop(StopReason.FINISHED, "the run is over")
LOST = Stop(StopReason.REMOVED, "the run goes on without this node")
BROKEN = Stop(StopReason.CRIPPLED, "exit code 1")
NO_DEVICE = HardwareError("no such device", why="it is gone", fix="look")
NO_PORT = NetworkError("port 7700 is taken", why="by another", fix="wait")


class Seen:
    """What a test sees of a life."""

    def __init__(self, number: int, node: PipelineNode, lives: Life) -> None:
        self.number, self.node, self.lives = number, node, lives


def live(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[Stop | DecodError],
    *,
    rejoins: bool = True,
    look: Callable[[Seen], None] = lambda _: None,
) -> tuple[int, list[str]]:
    """Returns the exit code of a daemon whose lives end so, and what it said."""
    lines = list[str]()
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)

    async def within() -> int:
        with make_node(folder, leads=False) as node:
            host = node._host
            lives = Life(host, lines.append, rejoins=rejoins)
            node.say = lines.append

            async def seek() -> int:
                await asyncio.sleep(0)
                return 1

            async def one_life(found: int) -> Stop:
                assert found == lives.again
                end = ends.pop(0)
                lives.begins(node)
                assert lives.again == bool(found)
                look(Seen(len(ends), node, lives))
                if isinstance(end, DecodError):
                    raise end
                await lives.ended(node, end, seek)
                return end

            async with host.tended():
                return await lives.run(0, one_life)

    return asyncio.run(within()), lines


@pytest.mark.parametrize(
    "reason",
    [StopReason.REMOVED, StopReason.LEADER_LOST, StopReason.SUPERSEDED, StopReason.CRIPPLED],
)
def test_it_comes_back_while_the_run_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: StopReason
) -> None:
    ends: list[Stop | DecodError] = [Stop(reason, "it was cut off"), LOST, NO_PORT, NO_DEVICE, DONE]
    code, lines = live(tmp_path, monkeypatch, ends)
    assert (code, ends) == (0, [])
    assert lines[0] == "out of the run (it was cut off): looking for it in 0 s"
    assert "port 7700 is taken: by another" in lines[2]


def test_without_rejoining_the_exit_code_says_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TemporaryError):
        live(tmp_path, monkeypatch, [LOST], rejoins=False)
    with pytest.raises(DecodError, match="E-RUN-004"):
        live(tmp_path, monkeypatch, [BROKEN], rejoins=False)


def test_a_refusal_and_a_run_that_has_failed_are_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RejectedError):
        live(tmp_path, monkeypatch, [LOST, Stop(StopReason.REFUSED, "another manifest")])
    with pytest.raises(DecodError, match="E-RUN-004"):
        live(tmp_path, monkeypatch, [LOST, Stop(StopReason.FAILED, "not finite")])


def test_what_keeps_the_first_life_from_beginning_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (NO_DEVICE, NO_PORT):
        with pytest.raises(type(error)):
            live(tmp_path, monkeypatch, [error])


def test_an_error_at_the_end_of_the_run_is_no_reason_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader may have been elected in a later life, and its disk be full."""

    def take_part(life: Seen) -> None:
        if not life.number:
            give_driver(life.node, object())

    with pytest.raises(HardwareError, match="no such device"):
        live(tmp_path, monkeypatch, [LOST, NO_DEVICE], look=take_part)


def test_compute_processes_that_fail_again_and_again_are_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many: list[Stop | DecodError] = [BROKEN] * (FAILURES_MAX + 5)
    with pytest.raises(HardwareError, match=r"E-HW-014 .* failed 6 times .* exit code 1"):
        live(tmp_path, monkeypatch, many)
    assert len(many) == 4
    monkeypatch.setattr(module, "FAILURES_WINDOW_S", 0.0)
    assert live(tmp_path, monkeypatch, [*many, *many, DONE])[0] == 0, "now and then is all right"


def test_who_is_to_leave_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked when it had stopped already."""

    def ask(life: Seen) -> None:
        life.node._leaving.asked.set()

    code, lines = live(tmp_path, monkeypatch, [LOST, DONE], look=ask)
    assert code == 0
    assert lines == ["left the run: the run goes on without this node"]


def test_a_node_that_was_in_the_run_for_long_comes_back_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[int] = []
    monkeypatch.setattr(Backoff, "reset", lambda _: resets.append(1))
    live(tmp_path, monkeypatch, [LOST, DONE])
    assert resets == []
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    live(tmp_path, monkeypatch, [LOST, DONE])
    assert resets

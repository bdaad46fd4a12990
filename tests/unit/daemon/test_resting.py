"""A volunteer that is paused with its device free: what it answers, and how that ends."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from decod.daemon.contact import Contact
from decod.daemon.control import ask
from decod.daemon.resting import Resting
from decod.errors import ConfigError, DecodError, NetworkError
from tests.unit.daemon.nodes import make_node, signals_kept
from tests.waiting import wait_until

FOUND = cast("Contact", object())


def rest(
    folder: Path,
    test: Callable[[Callable[..., Awaitable[dict[str, Any]]]], Awaitable[None]],
    seek: Callable[[], Contact],
) -> Contact | None:
    """Returns how a rest ended during which a test asked what it wanted to know."""

    async def sought() -> Contact:
        return seek()

    async def request(command: str) -> dict[str, Any]:
        question = {"command": command}
        return await asyncio.to_thread(ask, folder, question, timeout_s=10.0)

    async def within() -> Contact | None:
        with make_node(folder, leads=False) as node, signals_kept(), node.leaving:
            resting = Resting(node, sought)
            waiting = asyncio.create_task(resting.wait())
            await wait_until((folder / "decod.sock").exists)
            await test(request)
            return await waiting

    return asyncio.run(within())


def test_it_says_what_it_is_and_goes_back_when_the_run_is_found(tmp_path: Path) -> None:
    tries: list[DecodError] = [NetworkError("no answer", why="it is gone", fix="wait")]

    def seek() -> Contact:
        if tries:
            raise tries.pop()
        return FOUND

    async def test(request: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        status = await request("status")
        assert (status["state"], status["node"]["device_free"]) == ("paused", True)
        assert "decod resume" in status["message"]
        assert (await request("pause"))["device_free"] is True
        with pytest.raises(ConfigError, match="E-RUN-008"):
            await request("export")
        with pytest.raises(NetworkError, match="no answer"):
            await request("resume")
        assert (await request("status"))["state"] == "paused", "it goes on waiting"
        assert (await request("resume"))["paused"] is False

    assert rest(tmp_path, test, seek) is FOUND


@pytest.mark.parametrize("how", ["drain", "signal"])
def test_it_ends_when_it_is_asked_to_leave(tmp_path: Path, how: str) -> None:
    async def test(request: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            assert (await request("drain"))["draining"] is True

    assert rest(tmp_path, test, lambda: FOUND) is None
    assert not (tmp_path / "decod.sock").exists()

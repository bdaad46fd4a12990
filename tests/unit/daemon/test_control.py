"""The local socket: what a command asks and what it hears, whatever state either side is in."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from decod.daemon.control import SOCKET_NAME, ControlServer, ask
from decod.errors import ConfigError, DataError, DecodError, NotRunningError

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"echo": request}


def serve(
    folder: Path, test: Callable[[], Any], answer: Answer = echo, *, close: bool = False
) -> Any:
    """Returns what `test`, run in a thread, returns while a server answers in `folder`."""

    async def main() -> Any:
        server = ControlServer(folder)
        await server.answer_with(answer)
        try:
            asked = asyncio.create_task(asyncio.to_thread(test))
            if close:
                async with asyncio.timeout(10):
                    await started.wait()
                await server.close()
            return await asked
        finally:
            await server.close()

    started = asyncio.Event()
    if close:

        async def hang(request: dict[str, Any]) -> dict[str, Any]:
            started.set()
            return await asyncio.Event().wait() and {}

        answer = hang
    return asyncio.run(main())


def raw(folder: Path, data: bytes) -> Any:
    """Returns what the server says to bytes that no command would send."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(folder / SOCKET_NAME))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return json.loads(stream.readline())


def test_a_request_is_answered_and_the_socket_is_the_users_own(tmp_path: Path) -> None:
    def test() -> None:
        assert (tmp_path / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
        assert ask(tmp_path, {"x": "é"}, timeout_s=5) == {"echo": {"x": "é"}}

    serve(tmp_path, test)
    assert not (tmp_path / SOCKET_NAME).exists()


def test_a_path_that_is_too_long_for_the_system_works_too(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    assert serve(folder, lambda: ask(folder, {}, timeout_s=5)) == {"echo": {}}


def test_a_socket_of_a_daemon_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))
    with pytest.raises(NotRunningError, match="no node runs"):
        ask(tmp_path, {}, timeout_s=5)
    assert serve(tmp_path, lambda: ask(tmp_path, {}, timeout_s=5)) == {"echo": {}}


@pytest.mark.parametrize(
    "data", [b"\n", b"{\n", b"\xff\n", b"[1]\n", b"5\n", b"[" * 60_000 + b"\n", b"x" * 100_000]
)
def test_garbage_is_answered_with_an_error(tmp_path: Path, data: bytes) -> None:
    answer = serve(tmp_path, lambda: raw(tmp_path, data))
    assert answer["error"]["code"] == "E-RUN-002"


@pytest.mark.parametrize("kind", [ConfigError, DataError, NotRunningError, DecodError])
def test_an_error_of_the_daemon_is_the_commands_error(
    tmp_path: Path, kind: type[DecodError]
) -> None:
    original = kind("a", why="b", fix="c", code="E-XYZ-123")

    async def refuse(request: dict[str, Any]) -> dict[str, Any]:
        raise original

    with pytest.raises(kind) as caught:
        serve(tmp_path, lambda: ask(tmp_path, {}, timeout_s=5), refuse)
    assert str(caught.value) == str(original)
    assert caught.value.exit_code == original.exit_code


def test_a_bug_in_an_answer_is_an_error_and_the_server_lives_on(tmp_path: Path) -> None:
    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"one": 1 // request["x"]}

    def test() -> None:
        with pytest.raises(DecodError, match="ZeroDivisionError in the daemon"):
            ask(tmp_path, {"x": 0}, timeout_s=5)
        assert ask(tmp_path, {"x": 1}, timeout_s=5) == {"one": 1}

    serve(tmp_path, test, answer)


def test_who_waits_while_the_daemon_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="ended before it could answer"):
        serve(tmp_path, lambda: ask(tmp_path, {}, timeout_s=10), close=True)


async def test_who_answers_may_change_and_the_socket_stays(tmp_path: Path) -> None:
    """A node comes back in the same folder: whoever waits for its last life hears of its end."""
    started = asyncio.Event()

    async def hang(_: dict[str, Any]) -> dict[str, Any]:
        started.set()
        return await asyncio.Event().wait() and {}

    def request() -> dict[str, Any]:
        return ask(tmp_path, {}, timeout_s=10)

    server = ControlServer(tmp_path)
    assert not (tmp_path / SOCKET_NAME).exists()
    await server.answer_with(hang)
    waiting = asyncio.create_task(asyncio.to_thread(request))
    await started.wait()
    before = (tmp_path / SOCKET_NAME).stat().st_ino
    await server.answer_with(echo)
    with pytest.raises(NotRunningError, match="E-RUN-007"):
        await waiting
    assert await asyncio.to_thread(request) == {"echo": {}}
    assert (tmp_path / SOCKET_NAME).stat().st_ino == before
    await server.close()
    assert not (tmp_path / SOCKET_NAME).exists()


@pytest.mark.parametrize("line", [b"", b"x\n", b"[]\n", b"\xff\n"])
async def test_an_answer_that_is_none_counts_as_no_daemon(tmp_path: Path, line: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(line)
        writer.close()

    server = await asyncio.start_unix_server(talk, tmp_path / SOCKET_NAME)
    with pytest.raises(NotRunningError):
        await asyncio.to_thread(ask, tmp_path, {}, timeout_s=5)
    server.close()


def test_a_daemon_that_does_not_answer_is_told_from_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_NAME))
        silent.listen()
        with pytest.raises(NotRunningError, match="does not answer in time"):
            ask(tmp_path, {}, timeout_s=0.05)


def test_a_folder_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="decod leader"):
        ask(tmp_path / "no", {}, timeout_s=5)


def test_a_folder_in_the_sockets_place_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / SOCKET_NAME).mkdir()
    with pytest.raises(ConfigError, match=r"E-CFG-040 .*decod\.sock: .*remove it"):
        asyncio.run(ControlServer(tmp_path).answer_with(echo))


def test_a_folder_that_cannot_hold_a_socket_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, OSError)):
        asyncio.run(ControlServer(tmp_path / "missing").answer_with(echo))

"""The compute process's end of life, with stand-ins for it; and the contract with the real one."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decod.driver.arena import ArenaAllocator
from decod.driver.compute import ComputeDiedError, ComputeProcess, JobError
from decod.protocol.core.durations import Patience
from decod.protocol.core.jobs import BaseJob, DoNothing
from decod.run.protocol_config import ProtocolConfig
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Echoed:
    """What came."""

    job: int
    kind: str
    fields: dict[str, Any]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Echo(BaseJob):
    result = Echoed

    x: Any = None


@dataclass(frozen=True, slots=True)
class Known:
    pid: int


@dataclass(frozen=True, slots=True)
class Pid(BaseJob):
    result = Known


class Refuse(DoNothing):
    pass


class Wait(DoNothing):
    pass


class Exit(DoNothing):
    pass


class Complain(DoNothing):
    pass


@dataclass(frozen=True, slots=True)
class Say(BaseJob):
    text: str = ""


STAND_IN = """
import json, os, signal, socket, sys
connection = socket.socket(fileno=int(sys.argv[2]))
def say(text): connection.sendall(text.encode() + b"\\n")
def answer(job, result):
    times = dict(seconds=0.5, copy_seconds=0.25)
    say(json.dumps(dict(job=job, ok=True, result=result, **times)))
for line in connection.makefile("rb"):
    job = json.loads(line)
    match job["kind"]:
        case "echo": answer(job["job"], job)
        case "pid": answer(job["job"], {"pid": os.getpid()})
        case "refuse":
            error = dict(code="E-HW-003", what="no room", why="it is full", fix="free some")
            say(json.dumps(dict(job=job["job"], ok=False, error=error)))
        case "wait": pass
        case "exit": sys.exit(3)
        case "say": say(job["fields"]["text"])
        case "complain": print("a warning", file=sys.stderr, flush=True); answer(job["job"], {})
while "stubborn" in sys.argv[0]: signal.pause()
"""
COMMAND = (sys.executable, "-I", "-S", "-c", STAND_IN)


class StandIn:
    """A started stand-in, closed at the end."""

    def __init__(self, *, script: str = STAND_IN, end_s: float = 5.0, log: Path | None = None):
        self.command = (*COMMAND[:-1], script)
        self.end_s = end_s
        self.log = log
        self.arena = ArenaAllocator(1 << 16)

    async def __aenter__(self) -> ComputeProcess:
        self.process = await ComputeProcess.start(
            self.arena, command=self.command, end_s=self.end_s, log_path=self.log
        )
        return self.process

    async def __aexit__(self, *_: object) -> None:
        await self.process.close()
        self.arena.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_replies_come_to_the_jobs_in_their_order() -> None:
    async with StandIn() as compute:
        region = ArenaAllocator(4096).allocate(100)
        assert region is not None
        first = compute.submit(Echo(1), inputs=(region,))
        second = compute.submit(Echo(2), outputs=(region,))
        assert (await second).result.outputs == ({"offset": 0, "num_bytes": 100},)
        assert first.result().result.fields["x"] == 1
        assert first.result().duration_s == 0.5


async def test_a_refused_job_tells_why_and_the_next_one_runs() -> None:
    async with StandIn() as compute:
        with pytest.raises(JobError, match="E-HW-003 no room: it is full"):
            await compute.submit(Refuse())
        assert (await compute.submit(Echo())).result.kind == "echo"


async def test_whoever_waits_hears_of_the_process_being_killed() -> None:
    async with StandIn() as compute:
        waiting = [compute.submit(Wait()) for _ in range(3)]
        os.kill(compute.pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(ComputeDiedError, match="signal 9"):
                await future
        assert "signal 9" in await compute.ended
        with pytest.raises(ComputeDiedError):
            await compute.submit(Echo())


async def test_a_process_that_ends_while_idle_is_noticed() -> None:
    async with StandIn() as compute:
        with pytest.raises(ComputeDiedError, match="exit code 3"):
            await compute.submit(Exit())
        assert "exit code 3" in await compute.ended


async def test_a_process_may_say_why_it_ends() -> None:
    """Idle, or with jobs that it has not answered."""
    why = "rank 1 on cuda:1 ended (signal 9)"
    async with StandIn() as compute:
        waiting = compute.submit(Wait())
        compute.submit(Say(json.dumps({"ends": why})))
        compute.submit(Exit())
        with pytest.raises(ComputeDiedError, match="rank 1 on cuda:1 ended"):
            await waiting
        assert await compute.ended == why


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "5",
        "{}",
        '{"job": 7, "ok": true, "seconds": 1, "copy_seconds": 0, "result": {}}',
        "x" * (9 << 20),
        '{"job": 0, "ok": true, "seconds": 1, "copy_seconds": 0, "result": 5}',
        '{"job": 0, "ok": false}',
    ],
    ids=range(8),
)
async def test_a_process_that_talks_nonsense_counts_as_ended(text: str) -> None:
    nonsense = STAND_IN.replace(
        'job["fields"]["text"]', f"{text[:1000]!r} * {max(1, len(text) // 1000)}"
    )
    async with StandIn(script=nonsense) as compute:
        waiting = compute.submit(Say())
        with pytest.raises(ComputeDiedError):
            await waiting
        await compute.ended


async def test_a_reply_that_nobody_asked_for_ends_it() -> None:
    unasked = STAND_IN.replace("for line", "answer(0, {})\nfor line")
    async with StandIn(script=unasked) as compute:
        await compute.ended


async def test_a_process_that_hangs_at_its_end_is_killed() -> None:
    stubborn = STAND_IN.replace('"stubborn" in sys.argv[0]', "True")
    async with StandIn(script=stubborn, end_s=0.2) as compute:
        pid = int((await compute.submit(Pid())).result.pid)
        waiting = compute.submit(Wait())
        closing = asyncio.create_task(compute.close())
        await asyncio.sleep(0)
        late = compute.submit(Echo())
        await closing
        assert not is_alive(pid)
        for future in (waiting, late):
            with pytest.raises(ComputeDiedError, match="signal 9"):
                await future


class Hasty(Patience):
    """Waits for a fifth of a second, whatever the job."""

    def __init__(self) -> None:
        super().__init__(ProtocolConfig())
        self.interval_s = 0.05

    @property
    def limit_s(self) -> float:
        return 0.2


@pytest.mark.parametrize("killable", [True, False])
async def test_a_process_that_does_not_answer_is_ended(*, killable: bool) -> None:
    """One that can't be killed, since a driver holds it in the kernel, is given up."""
    async with StandIn(end_s=0.2) as compute:
        pid = int((await compute.submit(Pid())).result.pid)
        kill, told = compute.kill, list[tuple[str, float]]()
        if not killable:
            compute.kill = lambda: None  # type: ignore[method-assign]
        compute.watch_over(Hasty(), lambda *of: told.append(of))
        os.kill(pid, signal.SIGSTOP)
        waiting = [compute.submit(Echo()), compute.submit(Pid())]
        for future in waiting:
            with pytest.raises(ComputeDiedError, match=r"not answered for 0 s .job: echo\)"):
                await future
        assert "has not answered" in await compute.ended
        ((kind, waited_s),) = told
        assert kind == "echo"
        assert waited_s > 0.2
        assert is_alive(pid) == (not killable)
        kill()
        await compute._process.wait()


async def test_a_cancelled_job_does_not_take_the_reply_of_the_next() -> None:
    async with StandIn() as compute:
        compute.submit(Echo(1)).cancel()
        assert (await compute.submit(Echo(2))).result.fields["x"] == 2


async def test_a_request_that_would_end_the_process_is_refused_before_it_gets_there() -> None:
    """The manifest in a load job comes from a peer."""
    async with StandIn() as compute:
        with pytest.raises(JobError, match="E-RUN-006"):
            await compute.submit(Echo("y" * compute.REQUEST_SIZE_MAX_BYTES))
        assert (await compute.submit(Echo("y" * (1 << 19)))).result.kind == "echo"


async def test_what_it_writes_on_stderr_is_in_the_log(tmp_path: Path) -> None:
    async with StandIn(log=tmp_path / "log") as compute:
        await compute.submit(Complain())
    assert (tmp_path / "log").read_text() == "a warning\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = ArenaAllocator(1)
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(ComputeProcess.start(arena, log_path=tmp_path / "no" / "log"))
    arena.close()
    assert set(os.listdir("/proc/self/fd")) == before


NODE = """
import asyncio, sys
from decod.driver.arena import ArenaAllocator
from decod.driver.compute import ComputeProcess
from decod.protocol.core.jobs import DoNothing

class NoSuchKind(DoNothing):
    pass

async def main():
    compute = await ComputeProcess.start(ArenaAllocator(1 << 16))
    for job in (DoNothing(), NoSuchKind(), DoNothing()):
        try:
            print((await compute.submit(job)).result, flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    print(compute.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.processes
async def test_the_real_process_keeps_the_contract_and_goes_when_its_node_is_killed() -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    try:
        lines = [(await node.stdout.readline()).decode().strip() for _ in range(4)]
        assert lines[:3] == ["Nothing()", "JobError", "Nothing()"]
        pid = int(lines[3])
        assert is_alive(pid)
    finally:
        node.kill()
        await node.wait()
    await wait_until(lambda: not is_alive(pid), timeout_s=10)


@pytest.mark.processes
def test_the_real_process_leaves_in_silence_when_its_replies_are_not_read(tmp_path: Path) -> None:
    """A node that is killed with replies unread resets the connection instead of closing it."""
    here, there = socket.socketpair()
    arena = ArenaAllocator(1)
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "decod.worker",
                "--socket-fd",
                str(there.fileno()),
                "--arena-fd",
                str(arena.fd),
            ],
            pass_fds=(there.fileno(), arena.fd),
            stderr=log,
        )
    there.close()
    here.sendall(b'{"job": 0, "kind": "do_nothing"}\n')
    here.settimeout(60)
    assert here.recv(1)
    here.close()
    assert worker.wait(timeout=10) == 0
    assert (tmp_path / "log").read_text() == ""
    arena.close()

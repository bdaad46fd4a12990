"""A process that has loaded all imports of `decod` and its compute process, and forks them.

    python -m tests.support.preloaded SOCKET_FD PADDING

A node and its compute process spend 2 to 3 s of CPU time on loading; a fork has it done. Each fork
is a process of its own, with its own arguments, environment and session. It runs the same modules
as a fresh process, but does not load them anew. Before a fork, nothing is created that a fork must
not have: threads, sockets, an event loop, a tensor's device.

A node starts its compute process when it already has threads, which no fork carries over. The first
compute process is therefore forked before the node's first step, and waits for its command. A
second one is started as usual.

`forked` is the client's side.
"""

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

REQUEST_SIZE_MAX_BYTES = 1 << 17

NUM_REQUEST_FDS = 3
"""Standard output, standard error, and the pipe for the exit code."""

PADDING = "." * 4096
"""Room for the command lines of forked processes, as `ps` shows them."""

_MODULES = (
    "decod.cli.main",
    "decod.cli.leader_command",
    "decod.cli.join_command",
    "decod.daemon.leader_daemon",
    "decod.daemon.life",
    "decod.worker.job_methods",
)

_FREE_FD = 100
"""A number above all files that a fresh process has open."""

_CLONE_NEWNET = 0x40000000
"""From Linux's `sched.h`. Python has `os.setns` from 3.12 on."""


def _serve(connection: socket.socket) -> Mapping[str, Any] | None:
    """Fork a process per request. Returns twice: None at the end, and in each child its request."""
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    forked: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd in forked:
                selector.unregister(key.fd)
                os.close(key.fd)
                _tell_end(*forked.pop(key.fd))
                continue
            line, fds, _, _ = socket.recv_fds(connection, REQUEST_SIZE_MAX_BYTES, NUM_REQUEST_FDS)
            if not line:
                return None
            pid = os.fork()
            if not pid:
                selector.close()
                connection.detach()
                request = json.loads(line)
                _become(request, fds)
                return dict(request)
            pid_fd = os.pidfd_open(pid)
            socket.send_fds(connection, [str(pid).encode()], [pid_fd])
            *others, end_fd = fds
            for fd in others:
                os.close(fd)
            forked[pid_fd] = pid, end_fd
            selector.register(pid_fd, selectors.EVENT_READ)


def _tell_end(pid: int, end_fd: int) -> None:
    # The reader may be gone.
    with suppress(BrokenPipeError):
        os.write(end_fd, str(_exit_code(pid)).encode())
    os.close(end_fd)


def _exit_code(pid: int) -> int:
    """Return a process's exit code. A negative number is a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(request: Mapping[str, Any], fds: list[int]) -> None:
    """Make this process another one: its streams, session, folder and environment."""
    out_fd, error_fd, _ = fds
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null_fd, 0), (out_fd, 1), (error_fd, 2)):
        os.dup2(source, target)
    os.closerange(3, _FREE_FD)
    os.setsid()
    if request["namespace"] is not None:
        _enter(request["namespace"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def _enter(namespace: str) -> None:
    """Use only the interfaces of a network namespace, as `ip netns exec` does."""
    fd = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.close(fd)


def _title(command: list[str]) -> None:
    """Make `ps` show a command line, by writing it over this process's own."""
    with open("/proc/self/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _run(command: list[str]) -> NoReturn:
    """Run `PYTHON [-u] -m MODULE ARGUMENTS` in this process, to its end."""
    _title(command)
    start = command.index("-m") + 1
    sys.argv = command[start:]
    code: Any = 0
    try:
        runpy.run_module(command[start], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except Exception:  # noqa: BLE001 - as the interpreter does: nothing is above it.
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # Do what the interpreter does at its end, except for unloading modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


class _Spare:
    """A forked process that waits for its command, with the interface of asyncio's `Process`."""

    def __init__(self) -> None:
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._connection.close()
            _wait_for_command(there)
        there.close()
        self.returncode: int | None = None

    def start(self, command: list[str], fds: tuple[int, ...], error_fd: int | None) -> None:
        request = {"command": command, "fds": fds, "environment": dict(os.environ)}
        error_fd = 2 if error_fd is None else error_fd
        socket.send_fds(self._connection, [json.dumps(request).encode()], [error_fd, *fds])
        self._connection.close()

    async def wait(self) -> int:
        if self.returncode is None:
            ended, pid_fd = asyncio.Event(), os.pidfd_open(self.pid)
            loop = asyncio.get_running_loop()
            loop.add_reader(pid_fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pid_fd)
                os.close(pid_fd)
            self.returncode = _exit_code(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)


def _wait_for_command(connection: socket.socket) -> NoReturn:
    """Become the command that is sent. If the node ends first, end as well."""
    line, received, _, _ = socket.recv_fds(connection, REQUEST_SIZE_MAX_BYTES, 16)
    if not line:
        os._exit(0)
    request = json.loads(line)
    connection.detach()
    # The command's arguments name the numbers that these files have in the node.
    error_fd, *fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_FD) for fd in received]
    os.closerange(3, _FREE_FD)
    os.dup2(error_fd, 2)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1):
        os.dup2(null_fd, target)
    os.close(null_fd)
    for fd, target in zip(fds, request["fds"], strict=True):
        os.dup2(fd, target)
    os.closerange(_FREE_FD, _FREE_FD + len(received))
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    _run(request["command"])


def _hand_over(spare: _Spare) -> None:
    """Run the first Python module that this process starts in the spare process."""
    start = asyncio.create_subprocess_exec
    spares = [spare]

    async def create(*command: str, **options: Any) -> Any:
        if not spares or command[:2] != (sys.executable, "-m"):
            return await start(*command, **options)
        spare = spares.pop()
        spare.start(list(command), tuple(options["pass_fds"]), options["stderr"])
        return spare

    asyncio.create_subprocess_exec = create  # type: ignore[assignment]


def main() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    # Garbage collection writes to counted objects, and a page that is written to is no longer
    # shared.
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "threads do not survive a fork"
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    _hand_over(_Spare())
    _run(request["command"])


if __name__ == "__main__":
    main()

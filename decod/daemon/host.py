"""A daemon's host: what outlives its nodes, and the request that they leave.

lock the state folder -> open the log -> one node after another -> close the log -> unlock
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

from decod.config.node_config import NodeConfig
from decod.daemon.control import NO_NODE_YET, ControlServer
from decod.daemon.desk import Caps, Desk
from decod.daemon.device_owner import HostDevice
from decod.daemon.frontend import Frontend, Notifier
from decod.daemon.node_folder import SoleUse, StateFolder
from decod.daemon.open_files import raise_limit
from decod.daemon.pausing.keeper import Pausable
from decod.daemon.waits import OpenWaits
from decod.driver.event_loop import run_loop
from decod.errors import NotRunningError
from decod.exit_codes import ExitCode
from decod.journal.credit_file import CreditLedger
from decod.journal.history import RunHistory
from decod.journal.logs import LogContext, close_logs, log_note, set_up_logs
from decod.journal.terminal import PatientTerminal
from decod.membership.identity import load_or_create_identity
from decod.membership.waiting_list import WaitingList
from decod.net.dht_table import network_of
from decod.process import LEAVE_SIGNALS, URGENT_SIGNALS, heeded_signals
from decod.system import keep_freed_memory
from decod.tasks import beside, cancelled, until_first
from decod.texts import span

_log = logging.getLogger("decod")

T = TypeVar("T")

Say = Callable[[str], None]

_STATUS = {"command": "status"}

_LAST_LINES_S = 1.0
"""Timeout of writing the last lines of the log to the terminal."""


# --- the request to leave ------------------------------------------------------------------------
# The request that this daemon leaves. It may come at any moment, and holds for all later lives.
#
#     (the process has begun)  --a signal--> it ends, since it has nothing to leave: `decod.process`
#     (the event loop runs)    --a signal, or `decod drain`--> the node finishes its work and leaves
#                              --SIGINT or SIGTERM, once more--> the process ends on the spot
#     (the node has left)      --a signal--> nothing
#
# Signals after the node has left are ignored, so that they can't change the exit code into that of
# a crash.


_ONE_PRESS_S = 0.2
"""Urgent signals that come this close together count as one: `timeout` passes each on twice."""


class LeftEarlyError(Exception):
    """This daemon was asked to leave before it had a run to leave."""


class Leaving:
    """The request to leave. While the `with` block lasts, signals make it.

    Args:
        say: Takes lines for the operator's terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = asyncio.Event()
        self._kill: Callable[[], None] = _nothing
        self._say = say
        self._num_signals = self._num_urgent = 0
        self._urgent_s = -math.inf
        """When the last urgent signal came."""

    def kills(self, kill: Callable[[], None]) -> None:
        """Call `kill` before an end on the spot. It kills a process that would outlive this one."""
        self._kill = kill

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVE_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _signalled(self, number: signal.Signals) -> None:
        now_s = asyncio.get_running_loop().time()
        if number in URGENT_SIGNALS and now_s - self._urgent_s >= _ONE_PRESS_S:
            self._num_urgent += 1
            self._urgent_s = now_s
        if self._num_urgent > 1:
            self._say("stopped at once")
            self._kill()
            os._exit(ExitCode.INTERRUPTED)
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("finishing what is in hand; press Ctrl-C again to stop at once")
        self.asked.set()

    async def unless_asked(self, work: Awaitable[T]) -> T:
        """Do some work and return its result.

        Raises:
            LeftEarlyError: This daemon is asked to leave first. The work is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await until_first(task, self.asked.wait())
            if not task.done():
                raise LeftEarlyError
            return task.result()
        finally:
            await cancelled(task)


def run_until_left(command: Coroutine[Any, Any, int], say: Callable[[str], None]) -> int:
    """Run a command that runs nodes; return its exit code, or 0 if it left before it began."""
    try:
        return run_loop(command)
    except LeftEarlyError:
        say("left before anything had begun")
        return 0


def _nothing() -> None:
    """Do nothing: there is no process to kill yet."""


# --- the host ------------------------------------------------------------------------------------


class Host:
    """The parts of a daemon that outlive its nodes: folder, identity, log, credit. Use it in
    `with`.

    Args:
        config: This host's choices.
        leaving: Says whether this daemon is to leave.
        desk: Answers the operator beside the nodes, and has the choices as they change. If absent,
            they stay as they are.

    Raises:
        ConfigError: The state folder or the identity is in use, or can't be used.
        HardwareError: The log can't be written, or the limit on open files is too low.
    """

    def __init__(self, config: NodeConfig, leaving: Leaving, desk: Desk | None = None) -> None:
        keep_freed_memory()
        self._desk = desk
        self.caps = desk.caps if desk is not None else Caps(config)
        self.leaving, self.state_dir = leaving, config.state_dir
        self.history = RunHistory()
        self._control = ControlServer(config.state_dir)
        self._notifier = Notifier()
        self._frontend: Frontend | None = None
        self._page: str | None = None
        self.waits = OpenWaits(lambda event, **fields: log_note(_log, event, fields))
        """What this daemon waits for, whichever node it has."""
        self.newcomers = WaitingList(time.monotonic, network_of)
        """Hosts that wait until the operator lets them in. It outlives the nodes, so that nobody
        slips in between two."""
        self._folder = StateFolder(config.state_dir)
        self._folder.lock()
        self.credit = CreditLedger(config.state_dir)
        self._sole_use: SoleUse | None = None
        try:
            self.identity = load_or_create_identity(config.state_dir)
            self._sole_use = SoleUse(self.identity, config.state_dir)
            self.files = raise_limit()
            self.log = LogContext({"node_id": self.identity.node_id})
            self.terminal = PatientTerminal(2)
            """Takes the lines of the log, and shows progress below them."""
            log_path = config.state_dir / "node.log"
            set_up_logs(file=log_path, context=self.log, terminal=self.terminal)
        except BaseException:
            self._let_go()
            raise

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Answer the operator and inform the service manager while the context lasts."""
        telling = self._notifier.keep_telling(self._describe, self._healthy, self.leaving.asked)
        pausing = () if self._desk is None else (self._desk.keep(),)
        await self._control.answer_with(self._say_what_lacks)
        try:
            async with beside(telling, *pausing):
                yield
        finally:
            await self._control.close()

    async def _say_what_lacks(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("command") == "drain":
            self.leaving.asked.set()
            return {"draining": True, "reason": "drained", "detail": "it was in no run yet"}
        waits = [f"{one['what']}, for {span(one['age_s'])} so far" for one in self.waits.describe()]
        raise NotRunningError(
            f"the daemon of {self.state_dir} has no node yet",
            why=f"it waits for {'; '.join(waits) or 'what it needs first'}",
            fix="wait, or end it with decod drain",
            code=NO_NODE_YET,
        )

    def ready(self) -> None:
        """Tell the service manager that what is left to wait for may take long."""
        self._notifier.ready()

    async def present(self, frontend: Frontend) -> None:
        """Present the daemon as `frontend` from now on, to operator and service manager."""
        self._frontend, desk = frontend, self._desk
        ask = frontend.answer if desk is None else partial(desk.answer, frontend)

        async def answer(request: dict[str, Any]) -> dict[str, Any]:
            told = await ask(request)
            if request != _STATUS:
                return told
            return told | {"page": self._page, "waits": self.waits.describe()}

        await self._control.answer_with(answer)
        self._notifier.ready()

    def shows_page(self, url: str) -> None:
        """Tell the operator the page's address, with the token that lets a reader act."""
        self._page = url

    async def operate(self, line: bytes) -> dict[str, Any]:
        """Answer a request in the form of the control socket, which comes another way."""
        return await self._control.answer_to(line)

    async def status(self) -> dict[str, Any]:
        """Return what `decod status` shows. Before there is a node, that is what it waits for."""
        told = {} if self._frontend is None else await self._frontend.answer(_STATUS)
        return told | {"waits": self.waits.describe()}

    def operates(self, node: Pausable, device: HostDevice) -> AbstractContextManager[None]:
        """Return a context in which the operator's settings and pauses reach a node."""
        return nullcontext() if self._desk is None else self._desk.of(node, device)

    def _describe(self) -> str:
        if self._frontend is not None:
            return self._frontend.describe()
        waits = ", ".join(one["what"] for one in self.waits.describe())
        return f"waiting for {waits}" if waits else "starting"

    def _healthy(self) -> bool:
        return self._frontend is None or self._frontend.healthy

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            close_logs()
            self.terminal.finish(_LAST_LINES_S)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Let other processes use the folder and the identity."""
        if self._sole_use is not None:
            self._sole_use.end()
        self._folder.unlock()

"""A daemon's host: what outlives its nodes.

lock the state folder -> open the log -> one node after another -> close the log -> unlock
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from decod.config.node_config import NodeConfig
from decod.daemon.control import ControlServer
from decod.daemon.desk import Caps, Desk
from decod.daemon.device_owner import HostDevice
from decod.daemon.frontend import Frontend, Notifier
from decod.daemon.leaving import Leaving
from decod.daemon.node_folder import SoleUse, StateFolder
from decod.daemon.open_files import raise_limit
from decod.daemon.pausing.keeper import Pausable
from decod.journal.credit_file import CreditLedger
from decod.journal.history import RunHistory
from decod.journal.logs import LogContext, close_logs, set_up_logs
from decod.journal.terminal import PatientTerminal
from decod.membership.identity import load_or_create_identity
from decod.process import keep_freed_memory
from decod.tasks import beside

Say = Callable[[str], None]

_STATUS = {"command": "status"}

_LAST_LINES_S = 1.0
"""Timeout of writing the last lines of the log to the terminal."""


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
        self._folder = StateFolder(config.state_dir)
        self._folder.lock()
        self.credit = CreditLedger(config.state_dir)
        self._names: Callable[[str], str | None] = lambda _: None
        self._sole_use: SoleUse | None = None
        try:
            self.identity = load_or_create_identity(config.state_dir)
            self._sole_use = SoleUse(self.identity, config.state_dir)
            self.files = raise_limit()
            self.log = LogContext({"node_id": self.identity.node_id}, self._name_of)
            self.terminal = PatientTerminal(2)
            """Takes the lines of the log, and shows progress below them."""
            log_path = config.state_dir / "node.log"
            set_up_logs(file=log_path, context=self.log, terminal=self.terminal)
        except BaseException:
            self._let_go()
            raise

    def use_names(self, name_of: Callable[[str], str | None]) -> None:
        """Name other nodes in the log as `name_of` does, which takes their ids, from now on."""
        self._names = name_of

    def _name_of(self, node: str) -> str | None:
        return self._names(node)

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Answer the operator and inform the service manager while the context lasts."""
        telling = self._notifier.keep_telling(self._describe, self._healthy, self.leaving.asked)
        pausing = () if self._desk is None else (self._desk.keep(),)
        try:
            async with beside(telling, *pausing):
                yield
        finally:
            await self._control.close()

    async def present(self, frontend: Frontend) -> None:
        """Present the daemon as `frontend` from now on, to operator and service manager."""
        self._frontend, desk = frontend, self._desk
        answer = frontend.answer if desk is None else partial(desk.answer, frontend)
        await self._control.answer_with(answer)
        self._notifier.ready()

    async def status(self) -> dict[str, Any] | None:
        """Return what `decod status` shows; None if there is no node yet."""
        return None if self._frontend is None else await self._frontend.answer(_STATUS)

    def operates(self, node: Pausable, device: HostDevice) -> AbstractContextManager[None]:
        """Return a context in which the operator's settings and pauses reach a node."""
        return nullcontext() if self._desk is None else self._desk.of(node, device)

    def _describe(self) -> str:
        return "starting" if self._frontend is None else self._frontend.describe()

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

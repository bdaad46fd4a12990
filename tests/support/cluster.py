"""Real daemons for tests: `decod` processes on loopback, with folders of their own.

Tests look only at things that an operator could look at: exit codes, output, node.log and the
control socket. A cluster ends all its processes by their ids in any case, and finds tracebacks in
everything that they wrote.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

from decod.config.run_file import DataSource, render_run_file
from decod.daemon.control import ask
from decod.daemon.member_admission import enter, known_membership
from decod.errors import DecodError
from decod.membership.identity import load_identity
from decod.membership.papers import Membership
from decod.net.join_string import DATA_LABEL, LABEL, JoinString
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.texts import from_base32
from tests.support import forked
from tests.support.members import host_key
from tests.support.network import Network, inside
from tests.support.polling import wait_for

START_TIMEOUT_S = 60.0
"""Time for a node to load torch and enter a run while the machine is busy with others."""

_END_TIMEOUT_S = 15.0
_OUTPUT_MAX_BYTES = 1 << 22
_TAIL_LINES = 10

DECOD = (sys.executable, "-u", "-m", "decod")

living: list["Cluster"] = []
"""Existing clusters, whose logs are shown beside a failure."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed iteration, as a node logged it."""

    iteration: int
    attempt: int
    loss: float


@dataclass(slots=True)
class Daemon:
    """One `decod leader` or `decod join`, running or ended."""

    name: str
    process: "subprocess.Popen[bytes] | forked.ForkedProcess"
    folder: Path
    """Holds `state/`, `stdout` and `stderr`."""
    start_s: float

    def membership(self) -> Membership:
        """Return the daemon's own membership, to speak in its name."""
        (folder,) = (self.state_dir / "memberships").iterdir()
        root = from_base32(folder.name)
        found = known_membership(self.state_dir, load_identity(self.state_dir), root)
        assert found is not None, "it has none yet"
        return found

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def stdout(self) -> str:
        return _read(self.folder / "stdout")

    @property
    def stderr(self) -> str:
        return _read(self.folder / "stderr")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the records of node.log with this event, oldest first."""
        # A record that is still being written has no end of line yet.
        lines = _read(self.state_dir / "node.log").splitlines(keepends=True)
        mark = f'"event": "{name}"'
        return [json.loads(line) for line in lines if mark in line and line.endswith("\n")]

    def commits(self) -> list[Commit]:
        return [_commit(record) for record in self.events("step.committed")]

    def losses(self) -> dict[int, float]:
        """Return the loss of every iteration that this node committed."""
        return {commit.iteration: commit.loss for commit in self.commits()}

    @property
    def iteration(self) -> int:
        """The last committed iteration. It is read often, so only its line is parsed."""
        text = _read(self.state_dir / "node.log")
        whole = text.rfind("\n") + 1
        mark = text.rfind('"event": "step.committed"', 0, whole)
        if mark < 0:
            return 0
        line = text[text.rfind("\n", 0, mark) + 1 : text.index("\n", mark)]
        return _commit(json.loads(line)).iteration

    def status(self) -> dict[str, Any]:
        return ask(self.state_dir, {"command": "status"}, timeout_s=5.0)

    def try_status(self) -> dict[str, Any] | None:
        """Return the status, or None if the daemon does not answer."""
        try:
            return self.status()
        except DecodError:
            return None

    def is_ready(self) -> bool:
        """Return whether it takes part in the run."""
        self.refuse_death()
        status = self.try_status()
        return status is not None and status["node"]["state"] in ("training", "aggregating")

    def compute_pid(self) -> int | None:
        """Return the process id of the compute process, or None if there is none."""
        return self._child("decod.worker")

    def planning_pid(self) -> int | None:
        """Return the process id of the planning process, or None if there is none."""
        return self._child("decod.worker.planning_process")

    def _child(self, module: str) -> int | None:
        pid = self.process.pid
        children = _read(Path(f"/proc/{pid}/task/{pid}/children")).split()
        return next((int(child) for child in children if _runs(int(child), module)), None)

    def refuse_death(self) -> None:
        """Raise AssertionError if the daemon has ended."""
        code = self.process.poll()
        assert code is None, f"{self.name} ended with {code}\n{self.tail()}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_until_it_ends(self, number: signal.Signals, *, timeout_s: float = 20.0) -> int:
        """Send a signal again and again: right after the first, it counts as one with that.

        Returns the exit code.
        """

        def ended() -> bool:
            self.send(number)
            return self.process.poll() is not None

        wait_for(ended, f"the end of {self.name}", timeout_s=timeout_s, describe=self.tail)
        return self.process.wait(0.0)

    def end_run(self) -> None:
        """Make the leader end the run, even if another data node could lead it."""
        ask(self.state_dir, {"command": "drain", "end_run": True}, timeout_s=5.0)

    def wait(self, *, timeout_s: float = 60.0) -> int:
        """Wait for the end, and return the exit code."""
        wait_for(
            lambda: self.process.poll() is not None,
            f"the end of {self.name}",
            timeout_s=timeout_s,
            describe=self.tail,
        )
        return self.process.wait(0.0)

    def tail(self) -> str:
        """Return the last lines of all its output."""
        parts = [f"== {self.name} (pid {self.process.pid}, exit code {self.process.poll()})"]
        for path in (
            self.folder / "stdout",
            self.folder / "stderr",
            self.state_dir / "node.log",
            self.state_dir / "compute.log",
        ):
            lines = [line for line in _read(path).splitlines() if '"debug"' not in line]
            parts += [f"-- {path.name}", *(line[:300] for line in lines[-_TAIL_LINES:])]
        return "\n".join(parts)

    def tracebacks(self) -> list[str]:
        """Return the files that contain a traceback, and reports of unexpected errors."""
        paths = [self.folder / "stdout", self.folder / "stderr", self.state_dir / "compute.log"]
        paths.append(self.state_dir / "node.log")
        marks = ("Traceback (most recent call last)", "never retrieved", "was never awaited")
        paths += self.state_dir.glob("crash-*.txt")
        return [str(path) for path in paths if any(mark in _read(path) for mark in marks)]


class Cluster:
    """The daemons of one run. Leaving the `with` block ends all of them.

    Args:
        folder: An empty folder, for the run file and a folder per daemon.
        run: The run's configuration.
        corpus: Folder of prepared data, or its URL.
        network: Runs each daemon on the host of its name. None: the loopback.
        fork: Whether to fork daemons from a process that has loaded all their imports, if
            possible. That saves most of the cost of a start. Otherwise each is started by itself,
            as by an operator.
        device: What daemons compute on that get no other `--device`. The CPU is the default, so
            that a test does not depend on whether its host has a GPU.
    """

    def __init__(
        self,
        folder: Path,
        run: RunConfig,
        corpus: Path | str,
        network: Network | None = None,
        *,
        fork: bool = True,
        device: str = "cpu",
    ) -> None:
        self.fork = fork
        self.device = device
        self.folder = folder
        self.run = run
        self.corpus = corpus
        self.network = network
        self.daemons: list[Daemon] = []
        self.run_file = folder / "run.toml"
        folder.mkdir(parents=True, exist_ok=True)
        text = render_run_file(run, DataSource(path=str(corpus)))
        self.run_file.write_text(text, encoding="utf-8")

    def __enter__(self) -> Self:
        living.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        living.remove(self)
        if error is None:
            assert not self.tracebacks(), f"tracebacks in {self.tracebacks()}\n{self.tails()}"

    # --- starting -----------------------------------------------------------------------------

    def start(self, name: str, *arguments: str | Path, program: Sequence[str] = DECOD) -> Daemon:
        """Start `decod ARGUMENTS` as a node with one thread on a free port of its host."""
        folder = self.folder / name
        # A test may have put a state folder there.
        folder.mkdir(exist_ok=True)
        command = [*program, *map(str, arguments), "--name", name, "--threads", "1"]
        command += ["--state-dir", str(folder / "state")]
        host, namespace = "127.0.0.1", None
        if self.network is not None:
            host, namespace = self.network.address(name), self.network.namespace(name)
        if "--listen" not in command:
            command += ["--listen", f"{host}:0"]
        if "--page" not in command:
            # The page's libraries cost a tenth of a second of each start.
            command += ["--no-page"]
        if "--device" not in command:
            command += ["--device", self.device]
        start_s = time.monotonic()
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = _started(command, stdout, stderr, fork=self.fork, namespace=namespace)
        daemon = Daemon(name, process, folder, start_s)
        self.daemons.append(daemon)
        return daemon

    def start_leader(
        self, *arguments: str | Path, name: str = "leader", program: Sequence[str] = DECOD
    ) -> Daemon:
        """Start the run's leader, and wait for its join string."""
        leader = self.start(name, "leader", self.run_file, *arguments, program=program)
        wait_for(lambda: self.join_string(leader), "the join string", timeout_s=START_TIMEOUT_S)
        return leader

    def start_relay(
        self, name: str, *arguments: str | Path, program: Sequence[str] = DECOD
    ) -> Daemon:
        join_string = self.join_string(self.leader) or ""
        if "--pause-when" not in arguments:
            # A laptop on battery runs the tests, too.
            arguments = (*arguments, "--pause-when", "none")
        return self.start(name, "join", join_string, *arguments, program=program)

    def start_data_node(
        self, name: str, *arguments: str | Path, program: Sequence[str] = DECOD
    ) -> Daemon:
        joins = ("--join", self.join_string(self.leader, Role.DATA) or "")
        return self.start(name, "leader", self.run_file, *joins, *arguments, program=program)

    def start_relays(self, num_per_stage: int) -> list[Daemon]:
        """Start relays named by stage and number, such as `relay-1-0`."""
        return [
            self.start_relay(f"relay-{stage}-{index}", "--stage", str(stage))
            for stage in range(1, self.run.stages.num_relay_stages + 1)
            for index in range(num_per_stage)
        ]

    @property
    def leader(self) -> Daemon:
        return self.daemons[0]

    def join_string(self, leader: Daemon, role: Role = Role.RELAY) -> str | None:
        """Return the join string that the leader printed, or None if it has not yet."""
        label = f"{LABEL if role is Role.RELAY else DATA_LABEL} "
        for line in leader.stdout.splitlines(keepends=True):
            if line.startswith(label) and line.endswith("\n"):
                return line.removeprefix(label).strip()
        leader.refuse_death()
        return None

    def invite(self, role: Role) -> str:
        """Return a new join string of the leader."""
        asked = {"command": "token_create", "role": role.value}
        return str(ask(self.leader.state_dir, asked, timeout_s=10.0)["join_string"])

    def admit(self, name: str) -> Membership:
        """Return the membership of a volunteer that the leader admits, and that never joins."""
        join = JoinString.parse(self.join_string(self.leader) or "")
        return asyncio.run(enter(join, Role.RELAY, self.folder / f"{name}.papers", host_key(name)))

    # --- waiting ------------------------------------------------------------------------------

    def wait_for(
        self, look: Callable[[], Any], what: str, *, timeout_s: float = START_TIMEOUT_S
    ) -> Any:
        """Wait as `polling.wait_for` does. Show all logs if that fails."""
        return wait_for(look, what, timeout_s=timeout_s, describe=self.tails)

    def wait_for_iteration(
        self, iteration: int, *, node: Daemon | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Wait until a node (default: the leader) has committed an iteration."""
        node = node or self.leader

        def reached() -> bool:
            if node.iteration >= iteration:
                return True
            node.refuse_death()
            return False

        self.wait_for(reached, f"iteration {iteration} at {node.name}", timeout_s=timeout_s)

    def wait_for_end(self, *, timeout_s: float = 90.0) -> dict[str, int]:
        """Wait until all daemons have ended by themselves, and return their exit codes."""
        deadline_s = time.monotonic() + timeout_s
        return {
            daemon.name: daemon.wait(timeout_s=max(0.0, deadline_s - time.monotonic()))
            for daemon in self.daemons
        }

    # --- ending -------------------------------------------------------------------------------

    def end(self) -> None:
        """Ask all to end, volunteers first, and then kill them."""
        running = [d for d in reversed(self.daemons) if d.process.poll() is None]
        workers = [pid for d in running if (pid := d.compute_pid()) is not None]
        for daemon in running:
            # The second signal means: end at once.
            daemon.send(signal.SIGTERM)
        for daemon in running:
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(_END_TIMEOUT_S)
        for daemon in running:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
        for pid in workers:
            # Its node is gone, so the worker should be gone, too. A reused number is not touched.
            if _runs(pid, "decod.worker"):
                os.kill(pid, signal.SIGKILL)

    def tracebacks(self) -> list[str]:
        return [found for daemon in self.daemons for found in daemon.tracebacks()]

    def tails(self) -> str:
        return "\n".join(daemon.tail() for daemon in self.daemons)


def run_decod(
    *arguments: str | Path, timeout_s: float = 60.0, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a `decod` command that ends by itself, and return its result.

    `fork` is as for `Cluster`.
    """
    command = [*DECOD, *map(str, arguments)]
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = _started(command, stdout, stderr, fork=fork)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        said = [os.pread(file.fileno(), _OUTPUT_MAX_BYTES, 0) for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *(text.decode() for text in said))


def child_environment() -> dict[str, str]:
    """Return the environment with this source tree first, and one thread for every library."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def takes_part(cluster: Cluster, daemon: Daemon) -> bool:
    """Return whether a daemon is a member according to its leader and to itself."""
    return daemon.is_ready() and _is_member(cluster, daemon) is True


def is_removed(cluster: Cluster, daemon: Daemon) -> bool:
    """Return whether the leader says that a daemon is not a member."""
    return _is_member(cluster, daemon) is False


def _is_member(cluster: Cluster, daemon: Daemon) -> bool | None:
    """Return whether a daemon is a member, or None if the leader does not answer."""
    status = cluster.leader.try_status()
    return None if status is None else daemon.name in [n["name"] for n in stage_nodes(status)]


def stage_nodes(status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every node of every stage of a status."""
    for stage in status["stages"]:
        yield from stage["nodes"]


def assert_refused(
    result: subprocess.CompletedProcess[str], *, exit_code: int, holds: Sequence[str] = ()
) -> None:
    """Check that a command ended with one line that says why, and with the right code."""
    assert result.returncode == exit_code, result
    assert "Traceback" not in result.stderr, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for text in holds:
        assert text in lines[0], (text, lines[0])


def _started(
    command: list[str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    *,
    fork: bool,
    namespace: Path | None = None,
) -> "subprocess.Popen[bytes] | forked.ForkedProcess":
    environment = child_environment()
    if fork and forked.can_fork(command):
        return forked.fork(command, environment, stdout, stderr, namespace=namespace)
    if namespace is not None:
        command = [*inside(namespace), *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


def _commit(record: dict[str, Any]) -> Commit:
    iteration, _, attempt = str(record["iteration"]).rpartition(":")[2].partition(".")
    return Commit(int(iteration), int(attempt or 0), record["loss"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _runs(pid: int, module: str) -> bool:
    return module in _read(Path(f"/proc/{pid}/cmdline")).split("\0")

"""Training scripts for tests: real processes, each a loop with its node and averaging process.

Tests look only at what users can look at: what a script prints, its exit code, node.log and
`decod optimizer status`. A group of scripts ends all their processes by their ids in any case.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decod.daemon.control import ask
from tests.support.cluster import child_environment
from tests.support.polling import wait_for
from tests.support.training_script import Script

ROOT = Path(__file__).resolve().parents[2]

START_TIMEOUT_S = 60.0
"""Time for a script to load torch and join while the machine is busy with others."""
_END_TIMEOUT_S = 20.0
_TAIL_CHARACTERS = 3000

_COMMAND = (sys.executable, "-u", "-m", "tests.support.training_script")

BATCH = 4
LISTEN = "127.0.0.1:0"


def is_running(pid: int) -> bool:
    """Whether a process exists, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on."""
    try:
        found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [each for child in found for each in descendants(child)]


@dataclass(slots=True)
class RunningScript:
    """One script, running or ended."""

    name: str
    script: Script
    process: "subprocess.Popen[bytes]"
    folder: Path
    """Holds `state/`, `stdout` and `stderr`."""
    _default_state_dir: Path
    """Where its state is if it has chosen no folder, and all scripts before it run."""
    killed: datetime | None = None

    # --- what it has printed --------------------------------------------------------------------

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Return what the script has printed of a kind, oldest first."""
        lines = (self.folder / "stdout").read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in whole if each["kind"] == kind]

    def hashes(self) -> dict[int, str]:
        """Return the hash of the parameters after each round that the script has seen."""
        return {each["round"]: each["hash"] for each in self.said("round")}

    @property
    def round(self) -> int:
        return max(self.hashes(), default=0)

    @property
    def join_string(self) -> str:
        (joined,) = self.said("joined")
        return str(joined["join_string"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the records of node.log with this event, oldest first."""
        path = self.state_dir / "node.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        mark = f'"event": "{name}"'
        return [json.loads(line) for line in lines if mark in line and line.endswith("\n")]

    @property
    def state_dir(self) -> Path:
        chosen = self.script.settings["state_dir"]
        return self._default_state_dir if chosen is None else Path(chosen)

    def status(self) -> dict[str, Any]:
        return ask(self.state_dir, {"command": "status"}, timeout_s=10.0)

    # --- commands -------------------------------------------------------------------------------

    def train(self, rounds: int = 1 << 40) -> None:
        """Have the script train until it has the average of a round, or is told something else."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"rounds": rounds}).encode() + b"\n")
        stdin.flush()

    def stand_still(self) -> dict[str, Any]:
        """Have the script stop training, and stay in the run; return its account."""
        num = len(self.said("trained"))
        self.train(0)
        self.wait_for(lambda: len(self.said("trained")) > num, "that it stands still")
        # It ends what it was at, and then does what it was told.
        self.train(0)
        self.wait_for(lambda: len(self.said("trained")) > num + 1, "that it stands still")
        return self.said("trained")[-1]

    def leave(self) -> None:
        """Have the script leave its run in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def processes(self) -> list[int]:
        """Return the ids of loop, node and averaging process, as far as they run."""
        return [self.process.pid, *descendants(self.process.pid)]

    def kill(self) -> None:
        """Kill all processes of the script at once, as a power cut does."""
        self.killed = datetime.now(UTC)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """Wait for the end of the loop; return its exit code."""
        return self.process.wait(timeout_s)

    # --- waiting --------------------------------------------------------------------------------

    def wait_for(
        self, look: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S
    ) -> Any:
        """Return the first true result of `look`. Fails at once if the script ends before."""

        def look_alive() -> Any:
            ended = self.process.poll() is not None
            found = look()
            if not found and ended:
                raise AssertionError(f"{self.name} ended before {what}\n{self.tail()}")
            return found

        return wait_for(look_alive, f"{self.name}: {what}", timeout_s=timeout_s, describe=self.tail)

    def wait_joined(self) -> Self:
        self.wait_for(lambda: self.said("joined"), "that it has joined")
        return self

    def wait_for_round(self, number: int, timeout_s: float = START_TIMEOUT_S) -> None:
        self.wait_for(lambda: self.round >= number, f"round {number}", timeout_s)

    def wait_trained(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the last `train` is done; return the account and the parameters."""
        return dict(self.wait_for(lambda: self.said("trained"), "end of training", timeout_s)[-1])

    def wait_refused(self) -> dict[str, Any]:
        """Wait until the script ends with an error of decod; return it."""
        self.process.wait(START_TIMEOUT_S)
        assert self.said("error"), self.tail()
        return self.said("error")[-1]

    def tail(self) -> str:
        said = (self.folder / "stdout").read_text()[-_TAIL_CHARACTERS:]
        return f"--- {self.name}\n{said}\n{self.stderr[-_TAIL_CHARACTERS:]}"


class Scripts:
    """Training scripts on this machine. Use it in `with`.

    Args:
        folder: Holds a folder for each.
        usual: What they have in common.
    """

    def __init__(self, folder: Path, usual: Script) -> None:
        self._folder, self._usual = folder, usual
        self.all: list[RunningScript] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self.all:
            if each.process.poll() is None:
                each.kill()
            assert each.process.stdin is not None
            with suppress(BrokenPipeError):
                each.process.stdin.close()
        if error is None:
            self.check_no_traceback()

    def check_no_traceback(self) -> None:
        for each in self.all:
            assert "Traceback" not in each.stderr, each.tail()

    @property
    def living(self) -> list[RunningScript]:
        return [each for each in self.all if each.process.poll() is None]

    def start(self, script: Script | None = None, **settings: Any) -> RunningScript:
        """Start a script.

        Args:
            script: What it does. None: what is usual.
            settings: Of the optimizer, beside the usual ones.
        """
        number = len(self.all)
        name = f"script-{number}"
        folder = self._folder / name
        folder.mkdir()
        base = script or replace(self._usual, peer=number)
        common = {"listen": LISTEN, "state_dir": str(folder / "state"), "page": False}
        script = replace(base, settings={**common, **base.settings, **settings})
        environment = {
            **child_environment(),
            "XDG_STATE_HOME": str(self._folder / "xdg"),
            "OMP_NUM_THREADS": str(script.threads),
        }
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                (*_COMMAND, script.to_json()),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        default = self._folder / "xdg" / "decod" / "loops" / str(number + 1)
        running = RunningScript(name, script, process, folder, default)
        self.all.append(running)
        return running

    def start_run(self, num: int, **settings: Any) -> list[RunningScript]:
        """Start a run of several scripts, and wait until they are together."""
        first = self.start(run="test", **settings).wait_joined()
        others = [self.join(first, **settings) for _ in range(num - 1)]
        for each in others:
            each.wait_joined()
        first.wait_for(lambda: first.status()["num_peers"] == num, f"{num} peers")
        return [first, *others]

    def restart(self, ended: RunningScript) -> RunningScript:
        """Start a script that has ended again, with its folder: it has been in the run."""
        return self.start(ended.script)

    def join(
        self, other: RunningScript, script: Script | None = None, **settings: Any
    ) -> RunningScript:
        """Start a script that joins the run of another one."""
        return self.start(script, join=other.join_string, **settings)


def totals(scripts: Sequence[RunningScript]) -> dict[int, int]:
    """Return the samples in each round's average, which all scripts that log it must agree on."""
    found: dict[int, int] = {}
    for each in scripts:
        for record in each.events("round.committed"):
            known = found.setdefault(record["round"], record["samples"])
            assert known == record["samples"], (each.name, record)
    return found


def require_equal(scripts: Sequence[RunningScript]) -> int:
    """Check that scripts agree on the parameters after each round; return the rounds compared."""
    num = 0
    rounds = {number for each in scripts for number in each.hashes()}
    for number in rounds:
        found = {each.hashes()[number] for each in scripts if number in each.hashes()}
        assert len(found) == 1, f"different parameters after round {number}"
        num += sum(number in each.hashes() for each in scripts) > 1
    return num


def check_accounts(scripts: Sequence[RunningScript], gone: Sequence[RunningScript] = ()) -> int:
    """Check that each sample counts once: the peers' accounts, and the totals of all averages.

    Args:
        scripts: Were there from the first average on, have trained, and stand still now.
        gone: Were killed. The last lines of their logs are lost, and what they had given last may
            be in averages that they have not seen.

    Returns:
        The number of averages.
    """
    own = {
        each.name: {record["round"]: record["own"] for record in each.events("round.committed")}
        for each in (*scripts, *gone)
    }
    for each in scripts:
        account = each.said("trained")[-1]
        parts = account["contributed"] + account["outstanding"] + account["dropped"]
        assert account["stepped"] == parts, (each.name, account)
        applied = sum(n for number, n in own[each.name].items() if number <= account["round"])
        assert account["contributed"] >= applied, (each.name, account, applied)
    found = totals([*scripts, *gone])
    unseen = {number for each in gone for number in _unseen(each, own[each.name], scripts[0])}
    for number, total in found.items():
        given = sum(rounds.get(number, 0) for rounds in own.values())
        if number in unseen:
            assert given <= total, (number, given, total)
        else:
            assert given == total, (number, given, total)
    return len(found)


def _unseen(gone: RunningScript, seen: Mapping[int, int], witness: RunningScript) -> Iterator[int]:
    """Yield the rounds that may hold samples of a killed script which its log does not name."""
    assert gone.killed is not None
    num_after = 0
    for record in witness.events("round.committed"):
        num_after += datetime.fromisoformat(record["time"]) > gone.killed
        # Its contribution may have left it for the round after the one that was under way.
        if record["round"] > max(seen, default=0) and num_after <= 2:
            yield record["round"]

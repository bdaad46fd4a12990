"""One host's part in a run: what the loop and its node tell each other.

After each step the node says `go` or `wait`. Averages come in the order of their rounds, and the
loop applies them between two steps. See `decod.optimizer.node_link` for their form.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from torch import nn

from decod import __version__
from decod.errors import CheckpointError, DecodError, HardwareError, NotRunningError
from decod.optimizer.node_link import Message, NodeLink, malformed, start_node
from decod.optimizer.optimizer_ranks import Order
from decod.optimizer.parameters import all_finite
from decod.optimizer.settings import Settings
from decod.optimizer.training import Training


class LoopTiming:
    """The seconds that a loop takes for the parts of a step, as this process's clock sees it.

    On a GPU, kernels run later than they are launched. The times are then those of the
    launches and of the points where the loop waits for the device, which is where it is held up.

    Without `watch`, the time between two steps is known only as a whole. With it, that is split in
    data, forward and backward.
    """

    def __init__(self) -> None:
        self._ended_s = perf_counter()
        self._seconds: dict[str, float] = {}
        self._data_s = self._forward_s = 0.0
        self._forward_begun_s: float | None = None
        self._has_run = False
        """True if the watched model has run since the last step."""

    def watch(self, model: nn.Module) -> None:
        """Tell loading of data, forward and backward pass apart, by two hooks on the model.

        Args:
            model: The module that the loop calls.
        """
        model.register_forward_pre_hook(self._forward_begins)
        model.register_forward_hook(self._forward_ends)

    def _forward_begins(self, *_: Any) -> None:
        self._forward_begun_s = perf_counter()
        if not self._has_run:
            self._data_s = self._forward_begun_s - self._ended_s

    def _forward_ends(self, *_: Any) -> None:
        if self._forward_begun_s is not None:
            self._forward_s += perf_counter() - self._forward_begun_s
            self._has_run = True

    def begin_step(self) -> None:
        """The backward pass has ended: the loop calls `step()`."""
        if self._has_run:
            self._add("data", self._data_s)
            self._add("forward", self._forward_s)
            self._ended_s += self._data_s + self._forward_s
            self.lap("backward")
        else:
            self.lap("unsplit")
        self._data_s = self._forward_s = 0.0
        self._has_run = False

    def lap(self, name: str) -> float:
        """Count the time since the last lap, or the begin of the step, as `name`. Return it."""
        now_s = perf_counter()
        spent_s = now_s - self._ended_s
        self._ended_s = now_s
        self._add(name, spent_s)
        return spent_s

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since this was last called, by part.

        `data`, `forward`, `backward`: of a watched model; otherwise `unsplit`, all from the end of
        a step to the begin of the next. `accumulate`: taking the gradient in. `wait` and `apply`:
        waiting for an average, and applying it, at the end of the step before.
        """
        taken = self._seconds
        self._seconds = {}
        return taken


_LONG_S = 3600.0


@dataclass(slots=True)
class RunProgressReport:
    """The node's report on the run, now and then."""

    num_peers: int = 1
    num_samples: int = 0
    """The samples in the round in hand, at all hosts."""
    samples_per_s: float = 0.0


class RunSession:
    """An open session. Starts the node, and waits until it has joined its run.

    Args:
        training: What is trained.
        settings: Of the run.
        timing: Of the loop.

    Raises:
        DecodError: The node refuses, or ends.
    """

    def __init__(self, training: Training, settings: Settings, timing: LoopTiming) -> None:
        self._training = training
        self._settings = settings
        self._timing = timing
        self.progress = RunProgressReport()
        self._num_steps = 0
        self._files: set[Path] = set()
        with self._telling_ranks():
            self._open()

    def _open(self) -> None:
        self._link = NodeLink(*start_node())
        try:
            ready, self._arena = self._link.greet(self._hello())
            self.join_string = ready.text("join_string")
            self._link.listen(self._handle)
            if ready.flag("fetching"):
                self._show("fetching the state of the other hosts")
                # Steps from other weights than the run's would count nowhere.
                while self._act_on_next(monotonic() + _LONG_S) != "go":
                    pass
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _telling_ranks(self) -> Iterator[None]:
        """Tell this host's other ranks how it ends."""
        ranks = self._training.ranks
        try:
            yield
        except BaseException:
            ranks.order(Order.FAIL)
            raise
        ranks.order(Order.GO_ON)

    def _hello(self) -> dict[str, Any]:
        training = self._training
        parameters = self._training.parameters
        return {
            "version": __version__,
            "settings": self._settings.to_json(),
            "num_elements": parameters.num_elements,
            "wide": str(parameters.wide).removeprefix("torch."),
            "shapes": [list(shape) for shape in parameters.shapes],
            "fingerprint": training.fingerprint,
            "state_hash": training.state_hash(),
            "round": training.round,
            "device": str(parameters.tensors[0].device),
        }

    # --- at any time: the thread that answers the node ------------------------------------------

    def _handle(self, message: Message) -> bool:
        match message.kind:
            case "contribute":
                self._contribute(message)
            case "give_back":
                if not self._training.is_lending:
                    raise malformed("give_back without a contribution")
                self._training.give_back(self._flat(message))
                self._link.send("read_back")
            case "copy_state":
                self._copy_state(message.number("request"))
            case "progress":
                self._take_progress(message)
            case "average" if message.flag("included"):
                if not self._training.is_lending:
                    raise malformed("an average includes a contribution that was not given")
                self._training.will_use()
                return False
            case "load_state":
                self._training.will_load()
                return False
            case _:
                return False
        return True

    def _flat(self, message: Message) -> Any:
        parameters = self._training.parameters
        shape = (parameters.num_elements,)
        return self._arena.tensor(message.region(), parameters.wide, shape)

    def _contribute(self, message: Message) -> None:
        if self._training.is_lending:
            raise malformed("contribute, while the round in hand has a contribution")
        lent = self._training.lend(self._flat(message))
        self._link.send(
            "contributed",
            request=message.number("request"),
            samples=lent.num_samples,
            base_round=lent.base_round,
            finite=lent.is_finite,
            dropped=lent.num_dropped,
        )

    def _copy_state(self, request: int) -> None:
        try:
            path, text, round_number = self._training.copy()
        except HardwareError as error:
            self._link.send("state_failed", request=request, what=error.what)
            return
        self._files.add(path)
        self._link.send(
            "state",
            request=request,
            path=str(path),
            size_bytes=path.stat().st_size,
            description=text,
            round=round_number,
        )

    def _take_progress(self, message: Message) -> None:
        self.progress = RunProgressReport(
            message.number("peers"), message.number("samples"), message.length("samples_per_s")
        )
        told = message.number("round"), message.number("target")
        self._show(
            f"round {told[0]}: {self.progress.num_samples} of {told[1]} samples, "
            f"{self.progress.num_peers} hosts, {self.progress.samples_per_s:.1f} samples/s"
        )

    def _show(self, text: str) -> None:
        if self._settings.verbose:
            sys.stderr.write(f"decod: {text}\n")
            sys.stderr.flush()

    # --- between two steps: the loop --------------------------------------------------------------

    def end_step(self) -> None:
        """Tell the node of a step. Apply what has come, and wait if it is time for an average.

        Raises:
            DecodError: The node has ended, or is broken.
        """
        self._num_steps += 1
        samples = self._training.take_new_samples()
        seconds = self._timing.take()
        self._link.send("step", step=self._num_steps, samples=samples, seconds=seconds)
        with self._telling_ranks():
            if self._settings.overlap:
                while self._act_on_next(until_s=None):
                    pass
            else:
                self._wait()
        self._timing.lap("wait")

    def _wait(self) -> None:
        """Apply what comes until the node says `go`. If it says `wait`, an average will do too."""
        until_s = monotonic() + self._settings.averaging_timeout_s
        may_go = waits = False
        while not may_go:
            match self._act_on_next(until_s):
                case "":
                    self._link.send("waiting", step=self._num_steps)
                    return
                case "go":
                    may_go = True
                case "wait":
                    waits = True
                case "average" | "alone" | "load_state":
                    may_go = waits
        while self._act_on_next(until_s=None):
            pass

    def _act_on_next(self, until_s: float | None) -> str:
        """Take the next message. Return its kind; empty if there is none, or if it is stale.

        Args:
            until_s: When to give up, on the monotonic clock. None: if there is none now.
        """
        while (message := self._link.next(until_s)) is not None:
            match message.kind:
                case "go" | "wait":
                    if message.number("step") != self._num_steps:
                        continue  # Of a step that has not waited for it.
                case "average":
                    self._use(message)
                case "alone":
                    self._use_own(message)
                case "load_state":
                    self._load(message)
                case "stopped":
                    raise _stopped(message.text("reason"), state_lost=message.flag("state_lost"))
                case kind:
                    raise malformed(f"{kind} between two steps")
            return message.kind
        return ""

    def _use(self, message: Message) -> None:
        training = self._training
        round_number = message.number("round")
        included = message.flag("included")
        average_P = self._flat(message)
        if included and not training.samples.lent:
            raise malformed("an average includes a contribution to the state before it was loaded")
        self._timing.lap("wait")
        if round_number != training.round + 1:
            self._failed(round_number, f"it does not follow round {training.round}")
        elif not all_finite([average_P]):
            self._failed(round_number, "the average is not finite")
        else:
            training.use(average_P, round_number, included=included)
            self._applied(round_number)

    def _use_own(self, message: Message) -> None:
        training = self._training
        round_number = message.number("round")
        if training.is_lending:
            raise malformed("alone, while the round in hand has a contribution")
        self._timing.lap("wait")
        if round_number != training.round + 1:
            self._failed(round_number, f"it does not follow round {training.round}")
        elif num_samples := training.use_own(round_number):
            self._applied(round_number, samples=num_samples)
        else:
            self._failed(round_number, "no samples are outstanding")

    def _applied(self, round_number: int, **fields: int) -> None:
        seconds = self._timing.lap("apply")
        self._link.send("applied", round=round_number, seconds=seconds, **fields)

    def _failed(self, round_number: int, what: str) -> None:
        self._link.send("failed", round=round_number, what=what)

    def _load(self, message: Message) -> None:
        request = message.number("request")
        round_number = message.number("round")
        path = Path(message.text("path"))
        text = message.text("description")
        self._timing.lap("wait")
        try:
            self._training.load(path, text, round_number)
        except CheckpointError as error:
            self._link.send("state_refused", request=request, what=error.what)
            return
        self._timing.lap("apply")
        self._link.send("loaded", request=request, round=round_number)
        self._show(f"loaded the state of round {round_number}")

    def close(self) -> None:
        """Leave the run, and end the node. Nothing happens if that was done before."""
        self._link.close()
        # The node removes each once it has sent it, unless it has died before.
        for path in self._files:
            with suppress(OSError):
                path.unlink()
        self._files.clear()


class FollowingSession:
    """The session of a rank that has no node: it does what rank 0 does.

    Args:
        training: What is trained.
    """

    join_string = ""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.progress = RunProgressReport()
        training.follow()

    def end_step(self) -> None:
        """Do what rank 0 does between two steps.

        Raises:
            NotRunningError: Rank 0 can't go on.
        """
        self._training.follow()

    def close(self) -> None:
        """Nothing is open here."""


def _stopped(reason: str, *, state_lost: bool) -> DecodError:
    if state_lost:
        return NotRunningError(
            f"nobody has the run's state any more: {reason[:300]}",
            why="the run can't go on from the weights that this script has made itself: what was "
            "learnt would be gone without a word",
            fix="begin a new run from a checkpoint: start one host with run=..., load the model "
            "and then optimizer.load_state_dict(...) there, and start the others with its join "
            "string",
            code="E-RUN-042",
        )
    return NotRunningError(
        f"the node has left its run: {reason[:300]}",
        why="without it this host neither gives nor gets averages",
        fix="start the script again to take part, or train on with the wrapped optimizer",
        code="E-RUN-042",
    )

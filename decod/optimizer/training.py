"""A host's training: what the loop and the thread that answers the node both change.

A lock guards it, only for as long as something changes. So the node can take a contribution, or a
copy of the state, while the loop's forward or backward pass runs.

Legend: P all parameters, flat.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decod.compression.plan import Method
from decod.devices import device_of
from decod.optimizer.modes import ContributionMode, GradientMode, LocalMode
from decod.optimizer.optimizer_ranks import Order, Ranks
from decod.optimizer.parameters import Parameters, all_finite, fingerprint
from decod.optimizer.settings import Settings
from decod.optimizer.state import StateFile, TrainingState, describe, read_file
from decod.train.checkpoint.description import Description, parse_description
from decod.train.committed_state import SnapshotLayout


@dataclass(slots=True)
class Samples:
    """The account of a host's samples: each is somewhere, and nowhere twice.

    Always: stepped = outstanding + lent + contributed + dropped.
    """

    stepped: int = 0
    """All of them."""
    outstanding: int = 0
    """Those in the accumulator: they wait for a round."""
    lent: int = 0
    """Those at the node. They come back if their round goes on without them."""
    contributed: int = 0
    """Those in an average that was applied, or in a step of this host alone."""
    dropped: int = 0
    """Lost: gradients that were not finite, or computed before a state was loaded."""

    def add(self, num_samples: int) -> None:
        """A step has put its gradient into the accumulator."""
        self.stepped += num_samples
        self.outstanding += num_samples

    def drop(self, num_samples: int) -> None:
        """A step had no finite gradient."""
        self.stepped += num_samples
        self.dropped += num_samples

    def lend(self) -> int:
        """Give what is outstanding to the node. Return the number of samples."""
        num_samples = self.outstanding
        self.outstanding = 0
        self.lent += num_samples
        return num_samples

    def take_back(self, num_samples: int) -> None:
        """A round went on without a contribution of this host."""
        self.outstanding += num_samples
        self.lent -= num_samples

    def use_lent(self, num_samples: int) -> None:
        """A round included a contribution of this host."""
        self.contributed += num_samples
        self.lent -= num_samples

    def use_outstanding(self) -> None:
        """This host alone has taken a step with what was outstanding."""
        self.contributed += self.outstanding
        self.outstanding = 0

    def forget_outstanding(self) -> None:
        """Count what was outstanding as dropped."""
        self.dropped += self.outstanding
        self.outstanding = 0

    def forget_lent(self) -> None:
        """Count what was lent as dropped."""
        self.dropped += self.lent
        self.lent = 0

    def to_json(self) -> dict[str, int]:
        """Return the account as a checkpoint keeps it: what is lent can't be given back to it."""
        return {**asdict(self), "lent": 0, "dropped": self.dropped + self.lent}


class SideStream:
    """Copies from accelerators that run beside the loop's own kernels. On a CPU there is none.

    The node may ask for a contribution while the loop's forward pass has filled the device's queue.
    On the loop's stream the copy would wait for all of it.

    Args:
        tensors: What is copied from.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if device_of(tensor).has_streams}
        self._streams = {device: torch.Stream(device) for device in devices}
        self._marks: dict[torch.device, torch.Event] = {}

    def mark(self) -> None:
        """Note that the current streams have just changed what is to be copied."""
        for device in self._streams:
            self._marks[device] = torch.accelerator.current_stream(device).record_event()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Run what follows beside the loop's kernels, after the last mark. Wait for it at the end.

        The caller holds the lock under which the tensors change.
        """
        with ExitStack() as stack:
            for device, stream in self._streams.items():
                if device in self._marks:
                    stream.wait_event(self._marks[device])
                stack.enter_context(stream)
            yield
            for stream in self._streams.values():
                stream.synchronize()


@dataclass(frozen=True, slots=True)
class Lent:
    """A contribution that the node was given."""

    num_samples: int
    """0: there is none."""
    base_round: int
    """Round of the parameters from which the oldest of its samples was computed."""
    is_finite: bool
    num_dropped: int = 0
    """Samples that were outstanding, and can't be used."""


class Training:
    """Parameters, optimizer, scheduler, and what is outstanding.

    Args:
        wrapped: The user's optimizer.
        settings: Of the run.
        make_scheduler: Makes what is stepped once a round, from the wrapped optimizer. None: none.

    Raises:
        ConfigError: Something of it can't be averaged or copied.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        settings: Settings,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    ) -> None:
        self.parameters = Parameters(wrapped.param_groups)
        mode = "local" if settings.use_local_updates else "gradients"
        if settings.count != "samples":
            mode = f"{mode} of {settings.count}"
        self.ranks = Ranks(self.parameters)
        self.collects = self.ranks.is_first or settings.use_local_updates
        """Whether this process takes gradients in, and does not only follow rank 0."""
        self.wrapped = wrapped
        self.scheduler = None if make_scheduler is None else make_scheduler(wrapped)
        self.fingerprint = fingerprint(wrapped, mode, self.scheduler)
        batch_size = settings.batch_size_per_step
        num_calls = settings.gradient_accumulation_steps
        self._mode: ContributionMode = (
            LocalMode(self.parameters, wrapped, batch_size, num_calls, self.ranks)
            if settings.use_local_updates
            else GradientMode(self.parameters, wrapped, batch_size, self.ranks)
        )
        self._state = TrainingState(self.parameters, wrapped, self.scheduler)
        self._keeps_guide = Method(settings.compression).has_factors
        self._guide_P: Tensor | None = None
        self._side = SideStream(self.parameters.tensors)
        self._lock = threading.Lock()
        self.samples = Samples()
        self.round = 0
        """The newest round that is in the parameters."""
        self._base_round = 0
        self._lent: deque[int] = deque()
        """Samples of the contributions whose averages are not applied yet, oldest first."""
        self._num_averaged = 0
        """Of these, those whose average is here."""
        self._expects_load = False
        self._num_new = 0
        """Samples that the node has not been told of."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock, torch.no_grad():
            yield
            self._side.mark()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Let the thread read or change something while the loop computes."""
        with self._lock, torch.no_grad(), self._side.use():
            yield

    # --- between two steps, on the loop's thread ------------------------------------------------

    def add(self, num_samples: int, *, ends_step: bool, is_skipped: bool = False) -> None:
        """Take in the loop's gradients.

        Args:
            num_samples: Of which the gradients are the mean.
            ends_step: Whether `step` was called as often as one step takes.
            is_skipped: Whether a gradient scaler has found the gradients not finite.
        """
        if not self.collects:
            return
        gradients = self.parameters.gradients()
        is_good = not is_skipped and all_finite(gradients)
        with self._changing():
            taken = 0
            if is_good:
                taken = self._mode.add(gradients, num_samples)
            else:
                self.samples.drop(num_samples)
            if ends_step:
                taken += self._mode.end_step()
            if not self.samples.outstanding:
                self._base_round = self.round
            self.samples.add(taken)
            self._num_new += taken

    def take_new_samples(self) -> int:
        """Return how many samples have become outstanding since this was last called."""
        num_samples = self._num_new
        self._num_new = 0
        return num_samples

    def use(self, average_P: Tensor, round_number: int, *, included: bool) -> None:
        """Apply an average. See `ContributionMode.use`."""
        samples = self.samples
        with self._changing():
            if included:
                samples.use_lent(self._lent.popleft())
                self._num_averaged -= 1
            is_fresh = not samples.outstanding and not samples.lent
            self._mode.use(average_P, round_number, included=included, is_fresh=is_fresh)
            if self._keeps_guide:
                self._guide_P = average_P.clone()
            self._end_round(round_number)

    def use_own(self, round_number: int) -> int:
        """Apply what is outstanding. Return the number of its samples. 0: nothing has changed."""
        with self._changing():
            num_samples = self.samples.outstanding
            if num_samples:
                self._mode.use_own(num_samples, round_number)
                self.samples.use_outstanding()
                self._end_round(round_number)
        return num_samples

    def _end_round(self, round_number: int) -> None:
        self.round = round_number
        if self.scheduler is not None:
            self.scheduler.step()

    def load(self, path: Path, text: str, round_number: int) -> None:
        """Replace the state by one of other hosts.

        Args:
            path: Of the file that it lies in.
            text: Its description.
            round_number: The newest round that is in it.

        Raises:
            CheckpointError: It is not what it must be. Nothing has changed.
        """
        try:
            description = parse_description(text)
            blob = read_file(path, description)
            self._replace(blob, description, round_number)
            if self.ranks.is_first:
                self.ranks.load(str(path), text, round_number)
        finally:
            with self._lock:
                self._expects_load = False

    def _replace(self, blob: Tensor, description: Description, round_number: int) -> None:
        with self._changing():
            guide_P = self._state.load(blob, description, round_number)
            self._guide_P = guide_P if self._keeps_guide else None
            self.samples.forget_outstanding()
            self.samples.forget_lent()
            self._clear_lent()
            self.samples.drop(self._mode.restart())
            self.round = round_number

    # --- at the other ranks of a host, which do what rank 0 does ----------------------------------

    def follow(self) -> None:
        """Do what rank 0 orders, until it goes on to the next step.

        Raises:
            NotRunningError: Rank 0 can't go on.
        """
        while True:
            order, round_number = self.ranks.next_order()
            match order:
                case Order.GO_ON:
                    return
                case Order.LOAD:
                    path, text = self.ranks.texts()
                    self.load(Path(path), text, round_number)
                    self.ranks.wait_for_all()
                case _:
                    self._follow_round(order, round_number)

    def _follow_round(self, order: Order, round_number: int) -> None:
        with self._changing():
            if order is Order.STEP:
                with self.parameters.with_gradients(self.ranks.gradients()):
                    self.wrapped.step()
            elif order is Order.MOVE:
                pairs = zip(self.parameters.tensors, self.ranks.values(), strict=True)
                for parameter, value in pairs:
                    parameter.copy_(value)
            self._end_round(round_number)

    # --- at any time, on the thread that answers the node ---------------------------------------

    def lend(self, output_P: Tensor) -> Lent:
        """Write what is outstanding as a contribution, and begin a new one.

        There is none once `will_load` was called: it would be of a state that is replaced.

        Args:
            output_P: (P,) on the CPU, in the wide dtype.
        """
        samples = self.samples
        with self._beside():
            num_samples = samples.outstanding
            if not num_samples or self._expects_load:
                return Lent(0, self.round, is_finite=True)
            if not self._mode.write(output_P, num_samples):
                samples.forget_outstanding()
                return Lent(0, self._base_round, is_finite=False, num_dropped=num_samples)
            self._lent.append(samples.lend())
            return Lent(num_samples, self._base_round, is_finite=True)

    @property
    def is_lending(self) -> bool:
        """Return whether a contribution has been given to a round whose average is not here."""
        with self._lock:
            return len(self._lent) > self._num_averaged

    def will_use(self) -> None:
        """The average that includes the contribution is here. The next may be given already."""
        with self._lock:
            self._num_averaged += 1

    def will_load(self) -> None:
        """A state is here, which the loop will load before its next step."""
        with self._lock:
            self._expects_load = True

    def give_back(self, given_P: Tensor) -> None:
        """Take a contribution back: the round goes on without it."""
        with self._beside():
            self._mode.give_back(given_P)
            self.samples.take_back(self._lent.pop())

    def copy(self) -> tuple[Path, str, int]:
        """Write the state of the newest round to a file. Return path, description and round.

        Raises:
            HardwareError: There is no room for it.
        """
        while True:
            with self._lock, torch.no_grad():
                num_bytes = self._layout().num_bytes
            file = StateFile(num_bytes)
            with self._beside():
                layout = self._layout()
                round_number = self.round
                # A step may have come between.
                fits = layout.num_bytes == num_bytes
                if fits:
                    file.fill(layout)
            if fits:
                return file.path, file.describe(layout), round_number
            file.remove()

    # --- before training ------------------------------------------------------------------------

    def _layout(self) -> SnapshotLayout:
        return self._state.layout(self._mode.common(), self.round, self._guide_P)

    def state_hash(self) -> str:
        """Return the hash by which hosts know that they begin with the same state."""
        with self._lock, torch.no_grad():
            return describe(self._layout()).id

    def to_checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, beside parameters and optimizer."""
        with self._lock:
            return {
                "round": self.round,
                "base_round": self._base_round,
                "samples": self.samples.to_json(),
                "mode": self._mode.to_checkpoint(),
                "guide": self._guide_P,
                "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            }

    def forget_node(self) -> None:
        """The node has gone, and what was lent to it. Another will know of nothing."""
        with self._lock:
            self.samples.forget_lent()
            self._mode.forget_lent()
            self._clear_lent()
            self._expects_load = False
            self._num_new = self.samples.outstanding

    def _clear_lent(self) -> None:
        self._lent.clear()
        self._num_averaged = 0

    def is_at(self, kept: dict[str, Any]) -> bool:
        """Return whether a checkpoint is of this moment."""
        with self._lock:
            return bool(kept["round"] == self.round and kept["samples"] == self.samples.to_json())

    def load_wrapped(self, state: dict[str, Any]) -> None:
        """Load what the wrapped optimizer has saved."""
        with self._changing():
            self.wrapped.load_state_dict(state)

    def from_checkpoint(self, kept: dict[str, Any]) -> None:
        """Take it in again, after parameters and optimizer."""
        with self._changing():
            self.round = kept["round"]
            self._base_round = kept["base_round"]
            self.samples = Samples(**kept["samples"])
            self._num_new = self.samples.outstanding
            self._mode.from_checkpoint(kept["mode"])
            self._guide_P = kept["guide"]
            if self.scheduler is not None:
                self.scheduler.load_state_dict(kept["scheduler"])

"""The driver of a collaborative run's `PeerMachine`. See `decod.driver.machine_driver`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from decod.driver.arena import ArenaAllocator, ArenaRegion, Sizes, TensorRegion
from decod.driver.compute import Compute
from decod.driver.machine_driver import STOPPED, MachineDriver, MessageTransport
from decod.ids import NodeId, TensorId
from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.peer import PeerMachine
from decod.protocol.core import effects as fx
from decod.protocol.core.jobs import Guide
from decod.protocol.core.messages.round_messages import Height
from decod.texts import clip
from decod.train.checkpoint.description import parse_description

_GUIDE = "guide"
"""Name of the tensor of a state that holds the newest average."""


class PeerTransport(MessageTransport, Protocol):
    """The network as a peer's driver sees it."""

    def use_addresses(self, addresses: Mapping[NodeId, str]) -> None:
        """Dial these peers from now on."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of the loop's state in a file. Call `release` when it has been read."""

    path: Path
    description: str
    round: int

    def release(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPorts:
    """The receivers of a core's effects, beside its averaging process."""

    transport: PeerTransport
    tell_loop: Callable[..., None]
    """Sends the training loop a message: its kind, and its fields as keywords."""
    fetch: Callable[[lp.LoadState], Awaitable[StateCopy]]
    """Fetches a state. Raises DecodError if no peer gave it."""
    on_note: Callable[[fx.Note], None]


class PeerDriver(MachineDriver[lp.LoopEvent, lp.PeerEffect, PeerTransport]):
    """One peer: its machine, its averaging process, its transport and its training loop.

    Args:
        machine: The core.
        compute: The averaging process.
        arena: Holds the tensors. The loop maps it too.
        sizes: Sizes of the jobs' outputs.
        ports: Where the core's effects go.
    """

    def __init__(
        self,
        machine: PeerMachine,
        compute: Compute,
        arena: ArenaAllocator,
        sizes: Sizes,
        ports: PeerPorts,
    ) -> None:
        super().__init__(machine, compute, arena, sizes, ports.transport)
        self.peer = machine
        self._ports = ports
        self._copies: dict[int, tuple[int, asyncio.Future[StateCopy | str]]] = {}
        """The round of which each is to be, and the answer."""
        self._num_copies = 0
        self._model_bytes = sizes.num_parameters * sizes.sum_element_bytes
        self._step = 0
        self._asked: dict[int, ArenaRegion] = {}
        """Regions into which the loop writes contributions, by request."""
        self._applying: dict[int, TensorRegion] = {}
        """Averages that the loop is to apply, by round."""
        self._given_back: list[TensorId] = []
        """Contributions that the loop reads, in order."""
        self._freed_early: set[TensorId] = set()
        self._loading: tuple[Height, StateCopy] | None = None
        self._guided = machine.compresses_by_factors
        self._num_loads = 0

    @override
    async def close(self) -> None:
        """Stop the timer, cancel all tasks, and answer open requests."""
        await super().close()
        for number in [*self._copies]:
            self.copied(number, STOPPED)
        if self._loading is not None:
            self._loading[1].release()

    @property
    @override
    def _term(self) -> int:
        return self.peer.company.term

    @override
    def _perform(self, effect: lp.PeerEffect) -> None:  # noqa: C901 - one line an effect.
        tell = self._ports.tell_loop
        match effect:
            case lp.AnswerLoop(waits):
                tell("wait" if waits else "go", step=self._step)
            case lp.AskContribution(request):
                self._ask(request)
            case lp.GiveBack(tensor):
                self._given_back.append(tensor)
                tell("give_back", region=self._regions[tensor].reference())
            case lp.DeliverAverage():
                self._deliver(effect)
            case lp.StepAlone(number):
                tell("alone", round=number, samples=self.peer.own.num_outstanding)
            case lp.CopyState(request):
                tell("copy_state", request=request)
            case lp.RefuseCopy(request, reason):
                self.copied(request, reason)
            case lp.LoadState():
                self._tasks.start(self._load(effect))
            case lp.UseAddresses(addresses):
                self._transport.use_addresses(dict(addresses))
            case fx.Note():
                self._ports.on_note(effect)
            case _:
                super()._perform(effect)

    # --- contributions and averages -----------------------------------------------------------

    def _ask(self, request: int) -> None:
        region = self._arena.allocate(self._model_bytes)
        if region is None:
            self.post(lp.LoopContributed(request, 0, 0, None))
            return
        self._asked[request] = region
        self._ports.tell_loop("contribute", request=request, region=region.reference())

    def _deliver(self, average: lp.DeliverAverage) -> None:
        region = self._applying[average.round] = self._regions.pop(average.tensor)
        self._ports.tell_loop(
            "average",
            round=average.round,
            region=region.reference(),
            included=average.num_samples > 0,
            total_samples=average.total,
            roster=average.num_peers,
        )

    @override
    def _free(self, tensor: TensorId) -> None:
        """Free a tensor, or wait until the loop has read it."""
        if tensor in self._given_back:
            self._freed_early.add(tensor)
        else:
            super()._free(tensor)

    # --- the loop's messages ------------------------------------------------------------------

    def stepped(self, step: int, num_samples: int) -> None:
        """The loop has ended a step."""
        self._step = step
        self.post(lp.LoopStepped(num_samples))

    def contributed(
        self, request: int, num_samples: int, base_round: int, *, num_dropped: int
    ) -> None:
        """The loop has written its contribution, if it has one."""
        region = self._asked.pop(request)
        if num_samples:
            tensor = self.keep(region)
            self.post(lp.LoopContributed(request, num_samples, base_round, tensor))
        else:
            region.release()
            self.post(lp.LoopContributed(request, 0, base_round, None, num_dropped))

    def read_back(self) -> None:
        """The loop has read what was given back."""
        tensor = self._given_back.pop(0)
        if tensor in self._freed_early:
            self._freed_early.discard(tensor)
            self._free(tensor)

    def applied(self, number: int) -> None:
        """The loop has applied an average, or has stepped by itself."""
        region = self._applying.pop(number, None)
        if region is not None:
            region.release()
        self.post(lp.LoopApplied(number))

    # --- states -------------------------------------------------------------------------------

    async def request_copy(self, height: Height) -> StateCopy | str:
        """Return a copy of a state, or why there is none. Release it."""
        if self.stopped.done():
            return STOPPED
        self._num_copies += 1
        answer: asyncio.Future[StateCopy | str] = asyncio.get_running_loop().create_future()
        request = self._num_copies
        self._copies[request] = height.round, answer
        self.post(lp.CopyRequested(request, height))
        try:
            return await answer
        finally:
            self._copies.pop(request, None)

    def copied(self, request: int, copy: StateCopy | str) -> None:
        """The loop has written a copy, or says why it has not."""
        wanted, answer = self._copies.get(request, (-1, None))
        if isinstance(copy, StateCopy) and copy.round != wanted:
            copy.release()
            copy = f"it is at round {copy.round}"  # The loop has gone on meanwhile.
        if answer is not None and not answer.done():
            answer.set_result(copy)
        elif isinstance(copy, StateCopy):
            copy.release()

    async def _load(self, effect: lp.LoadState) -> None:
        try:
            found = await self._ports.fetch(effect)
        except Exception as error:  # noqa: BLE001 - whatever it is, another state may be had.
            if not self.stopped.done():
                self.post(lp.StateCame(effect.height, clip(str(error), 200)))
            return
        if self.stopped.done():
            found.release()
            return
        self.post(lp.StateCame(effect.height))
        self._loading = (effect.height, found)
        self._num_loads += 1
        self._ports.tell_loop(
            "load_state",
            request=self._num_loads,
            path=str(found.path),
            description=found.description,
            round=effect.height.round,
        )

    def _guide(self, found: StateCopy) -> None:
        """Give the averaging process the newest average, from which low-rank factors start."""
        entries = parse_description(found.description).entries
        entry = next((each for each in entries if each.name == _GUIDE), None)
        region = self._arena.allocate(entry.num_bytes) if entry is not None else None
        if entry is None or region is None:
            self._compute.submit(Guide())
            return
        with found.path.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(region.view)
        done = self._compute.submit(Guide(), inputs=(region,))
        done.add_done_callback(lambda _: region.release())

    def refused(self, reason: str) -> None:
        """The loop can't use the state that came."""
        assert self._loading is not None
        (height, found) = self._loading
        self._loading = None
        found.release()
        self.post(lp.LoadRefused(height, clip(reason, 200)))

    def loaded(self) -> None:
        """The loop has loaded a state."""
        assert self._loading is not None
        (height, found) = self._loading
        self._loading = None
        if self._guided:
            self._guide(found)
        found.release()
        for region in self._applying.values():
            region.release()
        self._applying.clear()
        self.post(lp.LoopLoaded(height))

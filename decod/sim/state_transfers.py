"""States of stages on simulated hosts: on disks, which outlive crashes, and on their way.

If a donor refuses, dies or breaks off, the asker turns to the next donor that its machine named. A
state that a machine no longer holds may still be on its host's disk.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from decod.ids import NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.bans import NO_BANS
from decod.protocol.core.context import NO_PROMISE, Promise
from decod.protocol.core.era import MARKS_MAX
from decod.protocol.core.events import Fault
from decod.sim.averages import MisuseError, SimulatedState, manifest_of
from decod.sim.kernel import Kernel
from decod.sim.network import InFlight, Network
from decod.sim.profile import Content

if TYPE_CHECKING:
    from decod.sim.simulated_host import SimHost

_WRITE_S = 0.005
"""Time until a small write is safe."""

_WRITE_BYTES_PER_S = 200e6

_SEARCH_S = 0.5
"""Delay before a restarted host begins to read the states that it kept."""


class Disk:
    """Keeps a node's last vote, and states of stages.

    Attributes:
        promise: The last vote.
        bans: The latest list of bans.
        states: The newest states of each stage, by stage index and iteration.
        full_until_s: The disk is full before this instant.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.promise = NO_PROMISE
        self.bans = NO_BANS
        self.states: dict[tuple[int, int], SimulatedState] = {}
        self.full_until_s = 0.0
        self._altered: set[tuple[int, int]] = set()
        self._kernel = kernel

    def keep(
        self,
        effect: fx.PersistVote,
        alive: Callable[[], bool],
        deliver: Callable[[ev.VotePersisted], None],
    ) -> None:
        """Write a vote, which takes a while. A crash before the end loses the vote.

        If the disk is full, nothing is reported, as in a daemon: the node abstains.
        """

        def written() -> None:
            if alive() and self._kernel.now_s >= self.full_until_s:
                self.promise = Promise(effect.term, effect.candidate)
                deliver(ev.VotePersisted(effect.term, effect.candidate))

        self._kernel.after(_WRITE_S, written)

    def write_state(
        self,
        blob: SimulatedState,
        size_bytes: int,
        alive: Callable[[], bool],
        deliver: Callable[[ev.Event], None],
        failed: Callable[[], None],
    ) -> None:
        """Write a state. It replaces one of the same iteration, or the oldest of its stage.

        If the disk is full, call `failed` and keep the old states.
        """

        def written() -> None:
            if not alive():
                return
            if self._kernel.now_s < self.full_until_s:
                failed()
                return
            self.states[blob.stage_index, blob.iteration] = blob
            self._altered.discard((blob.stage_index, blob.iteration))
            deliver(kept(blob))
            same = sorted(place for place in self.states if place[0] == blob.stage_index)
            for place in same[:-MARKS_MAX]:
                del self.states[place]
                self._altered.discard(place)
                deliver(ev.StateForgotten(*place))

        self._kernel.after(_WRITE_S + size_bytes / _WRITE_BYTES_PER_S, written)

    def read(self, size_bytes: int, done: Callable[[], None]) -> None:
        """Read a state, which takes a while."""
        self._kernel.after(size_bytes / _WRITE_BYTES_PER_S, done)

    def spoil(self) -> list[tuple[int, int]]:
        """Alter the newest intact state of each stage, and return their places."""
        newest = {place[0]: place for place in sorted(self.states) if place not in self._altered}
        self._altered.update(newest.values())
        return list(newest.values())

    def discard_altered(self, place: tuple[int, int]) -> bool:
        """Discard a state if it was altered, which every reader notices. Return whether it was."""
        if place not in self._altered:
            return False
        self._altered.discard(place)
        del self.states[place]
        return True

    def search(
        self,
        num_bytes: Callable[[SimulatedState], int],
        alive: Callable[[], bool],
        deliver: Callable[[ev.Event], None],
    ) -> None:
        """Report the states of an earlier life, the newest first. Each is read in full."""
        after_s = _SEARCH_S
        for blob in sorted(self.states.values(), key=lambda b: -b.iteration):
            after_s += num_bytes(blob) / _WRITE_BYTES_PER_S
            self._kernel.after(after_s, partial(self._found, blob, alive, deliver))

    def _found(
        self, blob: SimulatedState, alive: Callable[[], bool], deliver: Callable[[ev.Event], None]
    ) -> None:
        # The state may have been replaced meanwhile.
        place = (blob.stage_index, blob.iteration)
        if not alive() or self.states.get(place) is not blob:
            return
        if not self.discard_altered(place):
            deliver(kept(blob))


def kept(blob: SimulatedState) -> ev.StateKept:
    """Return the event that tells a machine of a state on its host's disk."""
    return ev.StateKept(blob.stage_index, blob.iteration, blob.parameter_hash)


_PIECE_BYTES = 1 << 20
"""A state travels in pieces of this size, so that other tensors can go in between."""

_FULL = "the disk is full"

_BROKEN_S = 0.1
"""Time until an asker sees that its donor's process has died."""

_VANISHED_S = 3.0
"""Time until it sees that the donor's whole host is gone."""


@dataclass(slots=True)
class _Fetch:
    """A host's request for a stage's state to one donor. It ends once, in success or failure."""

    asker: "SimHost"
    life: int
    wanted: fx.FetchState | fx.MirrorState
    num_asked: int
    """Number of donors asked before."""
    ended: bool = False

    @property
    def donor(self) -> NodeId:
        return self.wanted.donors[self.num_asked]

    def take(self) -> bool:
        """End the request. Return whether it was still open and its asker lives."""
        first = not self.ended
        self.ended = True
        return first and self.life == self.asker.life

    def succeed(self, content: Content) -> None:
        """Take in a state that has arrived in full."""
        wanted = self.wanted
        assert isinstance(content, SimulatedState)
        compute = self.asker.compute
        if not compute.same(content.cut, wanted.cut, wanted.stage_index):
            self.fail("it is a stage of another cut")
        elif wanted.parameter_hash not in ("", content.parameter_hash):
            self.fail("it is not the state that was committed")
        elif self.take():
            self.asker.states.arrived(wanted, content)

    def fail(self, reason: str, _fault: Fault = Fault.LINK) -> None:
        """Take in that the state will not come from this donor."""
        if self.take():
            self.asker.states.failed(self.wanted, self.num_asked, reason)


class States:
    """Fetches states for a host, and serves those that it holds.

    Args:
        host: The host whose machine asks and answers.
        kernel: The run's kernel.
        network: Carries requests and states.
    """

    def __init__(self, host: "SimHost", kernel: Kernel, network: Network) -> None:
        self._host = host
        self._kernel = kernel
        self._network = network
        self._next_request = 1
        self._asked: dict[int, _Fetch] = {}
        self._mirroring: deque[fx.MirrorState] = deque()

    def down(self, *, refuses: bool) -> None:
        """Break off all transfers. Askers see a broken stream, or nothing for a while."""
        for fetch in self._asked.values():
            after_s = _BROKEN_S if refuses else _VANISHED_S
            self._kernel.after(after_s, fetch.fail, "donor is gone")
        self._asked.clear()
        self._mirroring.clear()

    # --- the disk -----------------------------------------------------------------------------

    def keep(self, effect: fx.KeepState) -> None:
        """Write a copy of the host's own state. The tensor is held until the end."""
        host = self._host
        life = self._host.life
        stored = host.tensors.usable(effect.tensor, effect)
        stored.freed = True
        stored.num_sends = stored.num_sends + 1
        blob = stored.content
        if not isinstance(blob, SimulatedState) or blob.parameter_hash != effect.parameter_hash:
            raise MisuseError(f"{effect} of {blob}")

        def deliver(event: ev.Event) -> None:
            if isinstance(event, ev.StateKept):
                host.tensors.end_send(effect.tensor)
            host.deliver(event)

        def failed() -> None:
            host.tensors.end_send(effect.tensor)
            self._unkept(blob.stage_index, blob.iteration, _FULL)

        alive = partial(self._alive, life)
        host.disk.write_state(blob, stored.size_bytes, alive, deliver, failed)

    def _alive(self, life: int) -> bool:
        return life == self._host.life

    def _on_disk(self, place: tuple[int, int]) -> SimulatedState | None:
        """Return a state on the disk. Report and forget it if it was altered there."""
        host = self._host
        if host.disk.discard_altered(place):
            stage, iteration = place
            reason = "it was altered"
            host.trace("state.damaged", stage=stage, iteration=iteration, reason=reason)
            # The machine may be in the middle of a step.
            self._kernel.after(0.0, self._tell, host.life, ev.StateForgotten(*place))
        return host.disk.states.get(place)

    def _tell(self, life: int, event: ev.Event) -> None:
        if life == self._host.life:
            self._host.deliver(event)

    def read_kept(self, effect: fx.ReadKept) -> None:
        """Read the states that the machine asks for in full, and report altered ones."""
        host = self._host
        num_bytes = 0
        for state in effect.states:
            blob = self._on_disk((state.stage_index, state.iteration))
            num_bytes += host.profile.num_bytes(blob) if blob is not None else 0
        done = partial(self._tell, host.life, ev.KeptRead(effect.states))
        host.disk.read(num_bytes, done)

    def _unkept(self, stage_index: int, iteration: int, reason: str) -> None:
        self._host.trace("state.unkept", stage=stage_index, iteration=iteration, reason=reason)

    def mirror(self, effect: fx.MirrorState) -> None:
        """Copy another stage's state to the disk, after earlier copies."""
        self._mirroring.append(effect)
        if len(self._mirroring) == 1:
            self._ask(effect, 0, "nobody to ask")

    def _mirrored(self) -> None:
        self._mirroring.popleft()
        if self._mirroring:
            self._ask(self._mirroring[0], 0, "nobody to ask")

    def arrived(self, wanted: fx.FetchState | fx.MirrorState, blob: SimulatedState) -> None:
        """Take in a state that is here in full."""
        host = self._host
        life = self._host.life
        if isinstance(wanted, fx.FetchState):
            blob = replace(blob, part=wanted.part)
            tensor = host.tensors.add(blob)
            manifest = manifest_of(blob)
            place = (blob.stage_index, blob.iteration)
            cut = (wanted.cut, wanted.part)
            host.deliver(ev.StateFetched(*place, manifest, tensor, *cut))
            return
        size_bytes = host.profile.num_bytes(blob)
        failed = partial(self._unkept, blob.stage_index, blob.iteration, _FULL)
        alive = partial(self._alive, life)
        host.disk.write_state(blob, size_bytes, alive, host.deliver, failed)
        self._mirrored()

    # --- requests to others -------------------------------------------------------------------

    def fetch(self, effect: fx.FetchState) -> None:
        """Ask the donors, one after another, until one gives the state."""
        self._ask(effect, 0, "nobody to ask")

    def failed(self, wanted: fx.FetchState | fx.MirrorState, num_asked: int, reason: str) -> None:
        """Ask the next donor, because one does not give the state."""
        self._host.trace("state.failed", peer=wanted.donors[num_asked], reason=reason)
        self._ask(wanted, num_asked + 1, reason)

    def _ask(self, wanted: fx.FetchState | fx.MirrorState, num_asked: int, reason: str) -> None:
        if num_asked >= len(wanted.donors) and isinstance(wanted, fx.MirrorState):
            self._unkept(wanted.stage_index, wanted.iteration, reason)
            self._mirrored()
            return
        if num_asked >= len(wanted.donors):
            assert isinstance(wanted, fx.FetchState)
            cut = (wanted.cut, wanted.part)
            failed = ev.StateFetchFailed(wanted.stage_index, wanted.iteration, reason, *cut)
            self._host.deliver(failed)
            return
        fetch = _Fetch(self._host, self._host.life, wanted, num_asked)
        if fetch.donor == self._host.node_id:
            self._read(fetch)
            return
        donor = self._host.peer(fetch.donor)
        self._network.send_control(
            InFlight(
                sender=self._host,
                receiver=donor,
                size_bytes=0,
                delivered=partial(donor.states.asked, fetch) if donor else _nothing,
                sent=None,
                failed=fetch.fail,
            )
        )

    def _read(self, fetch: _Fetch) -> None:
        """Take a state from this host's own disk, which involves no link."""
        host = self._host
        wanted = fetch.wanted
        blob = self._on_disk((wanted.stage_index, wanted.iteration))
        if blob is None:
            self._kernel.after(0.0, fetch.fail, "it is not on the disk")
        else:
            host.disk.read(host.profile.num_bytes(blob), partial(fetch.succeed, blob))

    # --- requests from others -----------------------------------------------------------------

    def asked(self, fetch: _Fetch) -> None:
        """Take in a peer's request for a state."""
        request_id = self._next_request
        self._next_request += 1
        self._asked[request_id] = fetch
        stage = fetch.wanted.stage_index
        iteration = fetch.wanted.iteration
        wanted = fetch.wanted
        whole = wanted.with_optimizer if isinstance(wanted, fx.FetchState) else True
        self._host.deliver(
            ev.StateRequested(request_id, stage, iteration, with_optimizer=whole, cut=wanted.cut)
        )

    def serve(self, effect: fx.ServeState) -> None:
        """Send a copy to every asker. The host holds the state until all have it."""
        stored = self._host.tensors.usable(effect.tensor, effect)
        stored.freed = True
        stored.num_sends = stored.num_sends + len(effect.request_ids)
        for request_id in effect.request_ids:
            fetch = self._asked_for(request_id)
            ended = partial(self._served, self._host.life, request_id, effect.tensor)
            self._stream(
                InFlight(
                    sender=self._host,
                    receiver=fetch.asker,
                    size_bytes=stored.size_bytes,
                    delivered=partial(fetch.succeed, stored.content),
                    sent=ended,
                    failed=partial(_in_turn, ended, fetch.fail),
                )
            )

    def _stream(self, whole: InFlight, num_sent: int = 0) -> None:
        """Send a state piece by piece. The last piece completes it."""
        num_left = whole.size_bytes - num_sent
        if num_left <= _PIECE_BYTES:
            self._network.send_tensor(replace(whole, size_bytes=num_left))
            return
        life = self._host.life

        def go_on(_: float) -> None:
            if life == self._host.life:
                self._stream(whole, num_sent + _PIECE_BYTES)

        self._network.send_tensor(
            replace(whole, size_bytes=_PIECE_BYTES, delivered=_nothing, sent=go_on)
        )

    def _served(self, life: int, request_id: int, tensor: TensorId, _how: object) -> None:
        if life == self._host.life:
            del self._asked[request_id]
            self._host.tensors.end_send(tensor)

    def refuse(self, effect: fx.RefuseState) -> None:
        """Look on the disk for an asker that the machine has nothing for."""
        fetch = self._asked_for(effect.request_id)
        wanted = fetch.wanted
        blob = self._on_disk((wanted.stage_index, wanted.iteration))
        refusal = InFlight(
            sender=self._host,
            receiver=fetch.asker,
            size_bytes=0,
            delivered=partial(fetch.fail, effect.reason),
            sent=None,
            failed=fetch.fail,
        )
        if blob is None:
            del self._asked[effect.request_id]
            self._network.send_control(refusal)
            return
        ended = partial(self._given, self._host.life, effect.request_id)
        self._stream(
            replace(
                refusal,
                size_bytes=self._host.profile.num_bytes(blob),
                delivered=partial(fetch.succeed, blob),
                sent=ended,
                failed=partial(_in_turn, ended, fetch.fail),
            )
        )

    def _given(self, life: int, request_id: int, _how: object) -> None:
        if life == self._host.life:
            del self._asked[request_id]

    def _asked_for(self, request_id: int) -> _Fetch:
        fetch = self._asked.get(request_id)
        if fetch is None:
            text = f"answer to request {request_id}, which nobody made or has its answer"
            raise MisuseError(text)
        return fetch


def _in_turn(
    first: Callable[[str], None], second: Callable[[str], None], reason: str, _fault: Fault
) -> None:
    first(reason)
    second(reason)


def _nothing(*_: object) -> None:
    """Replace a callback that a transfer never needs."""

"""States of stages on their way between simulated hosts: asked of donors, served, refused.

A donor that refuses, dies or breaks off is followed by the next that the machine named. What a
machine no longer holds its host may still have on its disk.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from decod.ids import NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.events import Fault
from decod.sim.compute import Content, MisuseError, SimulatedState, manifest_of
from decod.sim.kernel import Kernel
from decod.sim.network import InFlight, Network

if TYPE_CHECKING:
    from decod.sim.host import SimHost

_PIECE_BYTES = 1 << 20
"""A state travels in pieces, one after another: other tensors go between them."""

_FULL = "the disk is full"

_BROKEN_S = 0.1
"""Until an asker sees that its donor's process has died."""

_VANISHED_S = 3.0
"""Until it sees that the whole host is gone."""


@dataclass(slots=True)
class _Fetch:
    """A host's wish for a stage's state, asked of one of its donors: it ends once, well or not."""

    asker: "SimHost"
    life: int
    wanted: fx.FetchState | fx.MirrorState
    num_asked: int
    """Donors that were asked before."""
    ended: bool = False

    @property
    def donor(self) -> NodeId:
        return self.wanted.donors[self.num_asked]

    def take(self) -> bool:
        """Return whether it had not ended before, and its asker lives; it has ended now."""
        first, self.ended = not self.ended, True
        return first and self.life == self.asker.life

    def succeed(self, content: Content) -> None:
        """The state has arrived in whole."""
        wanted = self.wanted
        assert isinstance(content, SimulatedState)
        if wanted.parameter_hash not in ("", content.parameter_hash):
            self.fail("it is not the state that was committed")
        elif self.take():
            self.asker.states.arrived(wanted, content)

    def fail(self, reason: str, _fault: Fault = Fault.LINK) -> None:
        """It will not come from this donor."""
        if self.take():
            self.asker.states.failed(self.wanted, self.num_asked, reason)


class States:
    """What a host wants of others' states, and gives of its own.

    Args:
        host: Whose machine asks and answers.
        kernel: Keeps the time.
        network: Carries everything.
    """

    def __init__(self, host: "SimHost", kernel: Kernel, network: Network) -> None:
        self._host = host
        self._kernel = kernel
        self._network = network
        self._next_request = 1
        self._asked: dict[int, _Fetch] = {}
        self._mirroring: deque[fx.MirrorState] = deque()

    def down(self, *, refuses: bool) -> None:
        """The host is gone. Who waits for a state sees its stream break, or nothing for a while."""
        for fetch in self._asked.values():
            after_s = _BROKEN_S if refuses else _VANISHED_S
            self._kernel.after(after_s, fetch.fail, "donor is gone")
        self._asked.clear()
        self._mirroring.clear()

    # --- the disk -----------------------------------------------------------------------------

    def keep(self, effect: fx.KeepState) -> None:
        """Write a copy of the host's own state, which is held until that is done."""
        host, life = self._host, self._host.life
        stored = host.tensors.usable(effect.tensor, effect)
        stored.freed, stored.num_sends = True, stored.num_sends + 1
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
        """Return a state of the disk; one that was altered there is told, and forgotten."""
        host = self._host
        if host.disk.discard_altered(place):
            stage, iteration = place
            reason = "it was altered"
            host.trace("state.damaged", stage=stage, iteration=iteration, reason=reason)
            # The machine may be in a step.
            self._kernel.after(0.0, self._tell, host.life, ev.StateForgotten(*place))
        return host.disk.states.get(place)

    def _tell(self, life: int, event: ev.Event) -> None:
        if life == self._host.life:
            self._host.deliver(event)

    def read_kept(self, effect: fx.ReadKept) -> None:
        """Read what the machine asks for to the last byte, and tell it of what was altered."""
        host, num_bytes = self._host, 0
        for state in effect.states:
            blob = self._on_disk((state.stage_index, state.iteration))
            num_bytes += host.profile.num_bytes(blob) if blob is not None else 0
        done = partial(self._tell, host.life, ev.KeptRead(effect.states))
        host.disk.read(num_bytes, done)

    def _unkept(self, stage_index: int, iteration: int, reason: str) -> None:
        self._host.trace("state.unkept", stage=stage_index, iteration=iteration, reason=reason)

    def mirror(self, effect: fx.MirrorState) -> None:
        """Copy another stage's state to the disk, one after another."""
        self._mirroring.append(effect)
        if len(self._mirroring) == 1:
            self._ask(effect, 0, "nobody to ask")

    def _mirrored(self) -> None:
        self._mirroring.popleft()
        if self._mirroring:
            self._ask(self._mirroring[0], 0, "nobody to ask")

    def arrived(self, wanted: fx.FetchState | fx.MirrorState, blob: SimulatedState) -> None:
        """A state is here in whole."""
        host, life = self._host, self._host.life
        if isinstance(wanted, fx.FetchState):
            tensor = host.tensors.add(blob)
            manifest = manifest_of(blob)
            host.deliver(ev.StateFetched(blob.stage_index, blob.iteration, manifest, tensor))
            return
        size_bytes = host.profile.num_bytes(blob)
        failed = partial(self._unkept, blob.stage_index, blob.iteration, _FULL)
        alive = partial(self._alive, life)
        host.disk.write_state(blob, size_bytes, alive, host.deliver, failed)
        self._mirrored()

    # --- wanted -------------------------------------------------------------------------------

    def fetch(self, effect: fx.FetchState) -> None:
        """Ask the donors, one after another, until one gives what is wanted."""
        self._ask(effect, 0, "nobody to ask")

    def failed(self, wanted: fx.FetchState | fx.MirrorState, num_asked: int, reason: str) -> None:
        """A donor will not give what is wanted: ask the next."""
        self._host.trace("state.failed", peer=wanted.donors[num_asked], reason=reason)
        self._ask(wanted, num_asked + 1, reason)

    def _ask(self, wanted: fx.FetchState | fx.MirrorState, num_asked: int, reason: str) -> None:
        if num_asked >= len(wanted.donors) and isinstance(wanted, fx.MirrorState):
            self._unkept(wanted.stage_index, wanted.iteration, reason)
            self._mirrored()
            return
        if num_asked >= len(wanted.donors):
            failed = ev.StateFetchFailed(wanted.stage_index, wanted.iteration, reason)
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
        """Take a state from this host's own disk, which no link can lose."""
        host, wanted = self._host, fetch.wanted
        blob = self._on_disk((wanted.stage_index, wanted.iteration))
        if blob is None:
            self._kernel.after(0.0, fetch.fail, "it is not on the disk")
        else:
            host.disk.read(host.profile.num_bytes(blob), partial(fetch.succeed, blob))

    # --- given --------------------------------------------------------------------------------

    def asked(self, fetch: _Fetch) -> None:
        """A peer wants a state."""
        request_id = self._next_request
        self._next_request += 1
        self._asked[request_id] = fetch
        stage, iteration = fetch.wanted.stage_index, fetch.wanted.iteration
        self._host.deliver(ev.StateRequested(request_id, stage, iteration, with_optimizer=True))

    def serve(self, effect: fx.ServeState) -> None:
        """Send a copy to all who asked for it; the host holds it until all have it."""
        stored = self._host.tensors.usable(effect.tensor, effect)
        stored.freed, stored.num_sends = True, stored.num_sends + len(effect.request_ids)
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
        """Send a state piece by piece; whoever has the last has the state."""
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
        """The machine has nothing for an asker: look on the disk."""
        fetch = self._asked_for(effect.request_id)
        del self._asked[effect.request_id]
        self._give_kept(fetch, effect.reason)

    def _give_kept(self, fetch: _Fetch, reason: str) -> None:
        """Send a state from the disk, or say that there is none."""
        wanted = fetch.wanted
        blob = self._on_disk((wanted.stage_index, wanted.iteration))
        answer = partial(fetch.fail, reason) if blob is None else partial(fetch.succeed, blob)
        transfer = InFlight(
            sender=self._host,
            receiver=fetch.asker,
            size_bytes=0 if blob is None else self._host.profile.num_bytes(blob),
            delivered=answer,
            sent=None,
            failed=fetch.fail,
        )
        if blob is None:
            self._network.send_control(transfer)
        else:
            self._stream(transfer)

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
    """Stand in for a callback of a transfer that can't come to it."""

"""Peers, their messages, and one peer's core with a loop that answers when it is told to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.collaboration.peer import PeerMachine
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.messages.round_messages import Height, PeerEntry, Progress, Roll, Standing
from decod.protocol.core.messages.scopes import Message

_T = TypeVar("_T")

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")
START = Height(0, "0" * 64)
CONFIG = RoundConfig(target_batch_size=32)
SIZE = 8


def height(number: int, name: str = "x") -> Height:
    return Height(number, f"{name}{number}")


def averaging(number: int, attempt: int = 1, term: int = 1) -> AveragingId:
    return AveragingId(Iteration(number, attempt, term), 1)


def entry(node: NodeId, *, level: bool = True) -> PeerEntry:
    return PeerEntry(node, f"{node}:1", level)


def roll(
    *nodes: NodeId | PeerEntry,
    term: int = 1,
    version: int = 2,
    at: Height = START,
    past: tuple[str, ...] = (),
) -> Roll:
    entries = tuple(each if isinstance(each, PeerEntry) else entry(each) for each in nodes)
    return Roll(term, version, at, past, entries)


def progress(
    num_samples: int, *, at: Height = START, term: int = 1, version: int = 2, rate: float = 8.0
) -> Progress:
    return Progress(term, version, at, num_samples, rate, 1.0)


def standing(
    num_samples: int = 0,
    *,
    at: Height = START,
    term: int = 1,
    rate: float = 8.0,
    committed: AveragingId | None = None,
    averaging: bool = False,
) -> Standing:
    return Standing(term, 2, at, committed, num_samples, rate, averaging=averaging)


def sent(effects: Sequence[object], to: NodeId | None = None) -> list[Message]:
    """Return the control messages, to one peer or to all."""
    return [e.message for e in effects if isinstance(e, fx.Send) and to in (None, e.to)]


def of(kind: type[_T], effects: Sequence[object]) -> list[_T]:
    return [each for each in effects if isinstance(each, kind)]


def events_of(effects: Sequence[object]) -> list[str]:
    """Return the events that were noted."""
    return [note.event for note in of(fx.Note, effects)]


@dataclass
class Peer:
    """One peer's core, and what stands for its loop."""

    node_id: NodeId = A
    at: Height = START
    config: RoundConfig = CONFIG
    now_s: float = 0.0
    num_tensors: int = 100
    effects: list[lp.PeerEffect] = field(default_factory=list)
    """All so far."""

    def __post_init__(self) -> None:
        self.machine = PeerMachine(self.node_id, f"{self.node_id}:1", self.at, self.config)
        self.effects += self.machine.start(self.now_s)

    def take(self, event: lp.PeerEvent, *, at_s: float | None = None) -> list[lp.PeerEffect]:
        if at_s is not None:
            self.now_s = at_s
        found = self.machine.step(self.now_s, event)
        self.effects += found
        return found

    def hear(
        self, sender: NodeId, message: Message, *, at_s: float | None = None
    ) -> list[lp.PeerEffect]:
        return self.take(ev.Received(sender, message), at_s=at_s)

    def wait_until(self, at_s: float) -> list[lp.PeerEffect]:
        """Let the machine's deadlines pass."""
        found: list[lp.PeerEffect] = []
        while (due_s := self.machine.deadline_s) is not None and due_s <= at_s:
            before_s, self.now_s = self.now_s, max(self.now_s, due_s)
            found += self.take(ev.DeadlinePassed())
            again_s = self.machine.deadline_s
            assert again_s is None or again_s > before_s, "a deadline that passed is due again"
        self.now_s = at_s
        return found

    def steps(self, num_samples: int = 8, *, at_s: float | None = None) -> list[lp.PeerEffect]:
        return self.take(lp.LoopStepped(num_samples), at_s=at_s)

    def tensor(self) -> ev.Tensor:
        self.num_tensors += 1
        return ev.Tensor(TensorId(self.num_tensors), SIZE)

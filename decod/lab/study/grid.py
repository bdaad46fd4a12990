"""The points of the study: the thesis' grid with smaller numbers."""

import itertools
from dataclasses import dataclass, replace

BATCH_SIZE = 16
TARGETS = (64, 128, 256, 512, 1024)
"""Target batch sizes. The thesis has 625 to 10,000, each twice the one before."""
TARGET = 128
"""Where other things vary. The thesis has 1250."""
LARGE_TARGET = 512
RATE = 0.05
RATES = (0.005, RATE, 0.5)
PEERS = (2, 4, 8)
ACCUMULATIONS = (1, 2, 4, 8)
LOAD_S = 5e-4
"""Time to load a picture. It makes loading about a third of a step, as in the thesis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One experiment. All points of a grid train on the same pictures."""

    peers: int = 2
    """0: one process with the plain optimizer, on all cores."""
    target: int = TARGET
    local: bool = False
    """Whether hosts use local updates."""
    accumulation: int = 1
    rate: float = RATE
    batch_size: int = BATCH_SIZE
    load_s: float = LOAD_S
    num_samples: int = 4096
    """Of all hosts together."""

    @property
    def name(self) -> str:
        """Return a few words that tell it from the other points."""
        parts = ["plain" if not self.peers else f"{self.peers} hosts"]
        if self.peers:
            parts.append(f"target {self.target}")
            parts.append("local" if self.local else "gradients")
        if self.accumulation > 1:
            parts.append(f"accumulation {self.accumulation}")
        if self.rate != RATE:
            parts.append(f"rate {self.rate:g}")
        if self.batch_size != BATCH_SIZE:
            parts.append(f"batch {self.batch_size}")
        if not self.load_s:
            parts.append("no loading")
        return ", ".join(parts)

    @property
    def baseline(self) -> "Point":
        """Return the point of one process that it is compared with."""
        return replace(self, peers=0, target=TARGET, local=False)


PLAIN = Point(peers=0)


def quick_grid() -> list[Point]:
    """Return the points with which every finding and question but those on rates is judged."""
    fast = replace(PLAIN, load_s=0.0)
    points = [PLAIN, replace(PLAIN, accumulation=2), fast, replace(fast, peers=2)]
    for local, target in itertools.product((False, True), (TARGET, LARGE_TARGET)):
        points += [Point(local=local, target=target, peers=peers) for peers in (2, 4)]
    points += [Point(local=local, accumulation=2) for local in (False, True)]
    points += [replace(PLAIN, accumulation=8), Point(accumulation=8)]
    return _unique(points)


def full_grid() -> list[Point]:
    """Return the thesis' grid: all of the quick one, and each axis in full."""
    points = quick_grid()
    axes = itertools.product(RATES, (1, 2), (False, True))
    for rate, accumulation, local in axes:
        some = Point(rate=rate, accumulation=accumulation, local=local)
        points.append(some.baseline)
        points += [replace(some, target=target) for target in TARGETS]
        points += [replace(some, peers=peers) for peers in PEERS]
    for batch_size, local in itertools.product((32, 64), (False, True)):
        some = Point(batch_size=batch_size, local=local)
        points += [some.baseline, some, replace(some, target=LARGE_TARGET)]
    for accumulation, local in itertools.product(ACCUMULATIONS, (False, True)):
        points += [Point(accumulation=accumulation, local=local)]
        points += [replace(PLAIN, accumulation=accumulation)]
    for peers, local in itertools.product(PEERS, (False, True)):
        points += [Point(peers=peers, local=local, target=each) for each in (256, LARGE_TARGET)]
    return _unique(points)


def smallest_grid() -> list[Point]:
    """Return one point of each kind, with few samples."""
    some = Point(num_samples=512, target=64, load_s=0.0)
    return [some.baseline, some, replace(some, local=True)]


def _unique(points: list[Point]) -> list[Point]:
    return list(dict.fromkeys(points))

"""Relays that crash and come back, drawn by iteration: GWTF's "join/leave probability".

The draw fixes the relay, the iteration and the share of the iteration's length. It does not depend
on how a run goes. Runs of the same seed therefore meet the same losses under every policy, even if
their iterations differ in length. The first iteration has no churn, because the length of an
iteration is still unknown.

The draw never takes the last relay that surely holds its stage's state: the paper assumes that "at
least one node remains active per stage". A relay that has come back counts as a holder from the
second iteration after its return.

Source: GWTF, section VI, "Node Crashes", and section VII, "Checkpointing".
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """A relay crashes or comes back in an iteration."""

    iteration: int
    host: str
    at_ratio: float
    """When, after the iteration's opening: a share, 0 to 1, of its expected length."""
    returns: bool


def draw_churn(
    rng: random.Random, stages: Mapping[str, int], *, ratio: float, num_iterations: int
) -> tuple[Churn, ...]:
    """Return all crashes and returns of a run, in order.

    Args:
        rng: Source of all draws.
        stages: The relays' names, and the stage that each serves while it is up.
        ratio: Chance, per relay and iteration, that a relay crashes or, if it is gone, comes back.
        num_iterations: Last iteration to draw for; the first is the second.
    """
    holds_from: dict[str, int | None] = dict.fromkeys(stages, 0)
    drawn: list[Churn] = []
    for iteration in range(2, num_iterations + 1):
        found = []
        for name in rng.sample(sorted(stages), len(stages)):
            strikes = rng.random() < ratio
            at_ratio = rng.random()
            gone = holds_from[name] is None
            if not strikes or (not gone and not _others(name, iteration, stages, holds_from)):
                continue
            holds_from[name] = iteration + 2 if gone else None
            found.append(Churn(iteration=iteration, host=name, at_ratio=at_ratio, returns=gone))
        drawn += sorted(found, key=lambda churn: churn.at_ratio)
    return tuple(drawn)


def _others(
    name: str, iteration: int, stages: Mapping[str, int], holds_from: Mapping[str, int | None]
) -> Sequence[str]:
    """Return the other relays that hold the state of a relay's stage."""
    return [
        other
        for other, since in holds_from.items()
        if other != name and stages[other] == stages[name] and since is not None
        if since <= iteration
    ]


class Instants:
    """Turns shares of an iteration into instants, as a run goes on.

    Args:
        churn: All crashes and returns of the run.
    """

    def __init__(self, churn: Iterable[Churn]) -> None:
        self._churn = tuple(churn)
        self._opened_s: list[float] = []

    def opened(self, now_s: float, iteration: int) -> list[tuple[float, Churn]]:
        """Return the churn of an iteration that opens now, each with its delay in seconds.

        The expected length of the iteration is the median length of the earlier ones.
        """
        self._opened_s.append(now_s)
        lengths_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise(self._opened_s)]
        if not lengths_s:
            return []
        usual_s = statistics.median(lengths_s)
        return [(c.at_ratio * usual_s, c) for c in self._churn if c.iteration == iteration]

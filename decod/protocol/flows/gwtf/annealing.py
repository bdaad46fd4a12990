"""Whether a change is worth it: the objective as a node sees it, and simulated annealing.

A change that lowers the objective is accepted; one that raises it by `delta` is with probability
exp(-delta / T). T begins at 1.7 and is multiplied by 0.95 with each accepted change (GWTF V-C).
Costs are normalised: the paper does not say how; here by a tenth of the mean cost of the links
that a node knows, so that the same T fits costs in seconds and costs from 1 to 20. A change that
leaves the objective as it is, is refused: it could be made for ever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from decod.planner.graph import Objective
from decod.protocol.core.messages.routing_messages import LinkUse
from decod.protocol.flows.position import Position

TEMPERATURE = 1.7
COOLING = 0.95
_UNITS_PER_LINK = 10.0
"""What a link costs on average, normalised."""

_NO_DIFFERENCE = 1e-9


def difference(objective: Objective, *, less: Sequence[LinkUse], more: Sequence[LinkUse]) -> float:
    """Return what the objective grows by if links lose, and others get, one flow each.

    Only these links are looked at: with the objective MAX a change counts as good if the largest
    f(i, j) * d(i, j) among them falls, as in the paper's example, wherever the largest of all is.
    """
    if objective is Objective.SUM:
        return sum(link.cost for link in more) - sum(link.cost for link in less)
    before = [link.cost * link.num_flows for link in (*less, *more)]
    after = [link.cost * (link.num_flows - 1) for link in less]
    after += [link.cost * (link.num_flows + 1) for link in more]
    return max(after) - max(before)


def cost_unit(position: Position) -> float:
    """Return the cost that counts as 1 at a node. Above 0."""
    costs = [position.cost_to(peer) for peer in position.next]
    costs += [position.cost_from(peer) for peer in position.previous]
    mean = sum(costs) / len(costs) if costs else 0.0
    return mean / _UNITS_PER_LINK if mean > 0 else 1.0


@dataclass(slots=True)
class Annealing:
    """One node's temperature."""

    rng: Random
    unit: float
    """See `cost_unit`."""
    temperature: float = TEMPERATURE
    cooling: float = COOLING
    """T is multiplied by this after each accepted change."""

    def accepts(self, delta: float) -> bool:
        """Decide on a change that makes the objective grow by `delta`; draws only if it does."""
        if delta < -_NO_DIFFERENCE:
            return True
        if delta <= _NO_DIFFERENCE or self.temperature <= 0:
            return False
        return math.exp(-delta / self.unit / self.temperature) > self.rng.random()

    def cool(self) -> None:
        self.temperature *= self.cooling

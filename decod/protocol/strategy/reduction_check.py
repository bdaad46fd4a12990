"""Whether a relay has reduced its part of an average rightly.

The mean, times the microbatches in it, is the sum of all contributions. Each other member of the
stage tells the auditor a sketch of what it gave. What the relay gave itself was done again. The
signs of all these sketches were drawn when all members had the mean already.

If the mean is not that sum, somebody lies: the relay, or a member about what it gave. Therefore the
relay tells what it got of each member. If that does not add up to the mean either, or the relay has
told nothing, it is the relay that lies. Otherwise it differs with some members about what they gave
(`decod.protocol.leadership.relay_audits` says who is believed).
"""

from collections.abc import Sequence

from decod.ids import NodeId
from decod.protocol.core.messages import AuditedShares
from decod.protocol.core.messages.audit_messages import AuditCase
from decod.protocol.core.sketch import NUM_SUMS, Sketch, added, error_of


class ReductionCheck:
    """The check of one relay's part of the average, by its first auditor.

    Args:
        case: The relay, and the seed of all sketches.
        roster: The members of its stage.
    """

    def __init__(self, case: AuditCase, roster: Sequence[NodeId]) -> None:
        self._relay, self._seed, self._roster = case.relay, case.seed, frozenset(roster)
        self._sum: Sketch | None = None
        self._given: dict[NodeId, Sketch] = {}
        """What each other member says that it gave."""
        self._got: dict[NodeId, Sketch] = {}
        """What the relay says that it got of each member."""

    def averaged(self, mean: bytes, num_microbatches: int) -> None:
        """Take in the sketch of the mean that the relay has sent to all."""
        sums = Sketch.from_bytes(mean).sums
        self._sum = Sketch(self._seed, tuple(each * num_microbatches for each in sums))

    def told(self, sender: NodeId, message: AuditedShares) -> None:
        """Take in what a member says of contributions. What it says first of each counts."""
        for contributor, data in message.shares:
            try:
                sketch = Sketch.from_bytes(data) if data else self._zero
            except ValueError:
                continue
            known = contributor in self._roster and sketch.seed == self._seed
            if known and sender in (self._relay, contributor):
                told = self._got if sender == self._relay else self._given
                told.setdefault(contributor, sketch)

    @property
    def _zero(self) -> Sketch:
        return Sketch(self._seed, (0.0,) * NUM_SUMS)

    @property
    def complete(self) -> bool:
        """Whether all is known but what the relay itself says."""
        return self._sum is not None and self._given.keys() == self._roster - {self._relay}

    @property
    def answered(self) -> bool:
        """Whether the relay has said all that it got. It matters only if something is wrong."""
        return self._got.keys() == self._roster

    def found(self, replayed: Sequence[Sketch], tolerance: float) -> dict[NodeId, float]:
        """Return with whom the relay differs, and how much; with itself if it must be lying.

        Args:
            replayed: What the relay should have given itself, microbatch by microbatch.
            tolerance: What is less far off is right.
        """
        assert self._sum is not None
        relay = self._relay
        given = {**self._given, relay: added([*replayed, self._zero])}
        error = error_of(self._sum, added([*given.values()]))
        if error <= tolerance:
            return {}
        if not self.answered:
            return {relay: error}
        errors = {node: error_of(self._got[node], given[node]) for node in sorted(given)}
        own_error = error_of(self._sum, added([*self._got.values()]))
        errors[relay] = max(errors[relay], own_error)
        return {node: each for node, each in errors.items() if each > tolerance}

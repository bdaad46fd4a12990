"""The parameters of a simulated stage whose steps come one iteration late."""

import hashlib
from dataclasses import dataclass, replace

from decod.protocol.core.jobs import Snapshot
from decod.sim.averages import MisuseError
from decod.sim.blobs import SimulatedState


@dataclass(slots=True)
class LateSteps:
    """What a device holds after its last commit. The joint hash of it is voted on."""

    weights: str = ""
    """Hash of the parameters."""
    pending: str = ""
    """Hash of the average that the next step comes from. Empty: of none."""
    ahead: int = 0
    """The iteration whose step is known beforehand. 0: of none."""

    def begin(self, weights: str, pending: str = "") -> None:
        """Hold something else from now on."""
        self.weights = weights
        self.pending = pending
        self.ahead = 0

    @property
    def next_weights(self) -> str:
        """Hash of the parameters after the next iteration."""
        if not self.pending:
            return self.weights
        return hashlib.sha256(f"{self.weights} {self.pending}".encode()).hexdigest()

    def snapshot(self, job: Snapshot, blob: SimulatedState) -> SimulatedState:
        """Return what a job copies.

        Args:
            job: The job.
            blob: What it would copy if steps were not late.

        Raises:
            MisuseError: Nothing is known beforehand.
        """
        if job.ahead and self.ahead != blob.iteration + 1:
            raise MisuseError(f"{job} when {blob.iteration} iterations are committed")
        if job.ahead:
            hash_ = self.next_weights
            return replace(blob, iteration=blob.iteration + 1, parameter_hash=hash_)
        if not job.with_optimizer:
            return replace(blob, parameter_hash=self.weights)
        return replace(blob, weights=self.weights, pending=self.pending)

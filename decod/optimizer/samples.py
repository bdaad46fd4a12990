"""The account of a host's samples: each is somewhere, and nowhere twice."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Samples:
    """Where the samples are that the loop has computed gradients of.

    Always: stepped = outstanding + lent + contributed + dropped.
    """

    stepped: int = 0
    """All of them."""
    outstanding: int = 0
    """In the accumulator: they wait for a round."""
    lent: int = 0
    """At the node. They come back if their round goes on without them."""
    contributed: int = 0
    """In an average that was applied, or in a step of this host alone."""
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
        num_samples, self.outstanding = self.outstanding, 0
        self.lent += num_samples
        return num_samples

    def take_back(self, num_samples: int) -> None:
        """A round went on without a contribution of this host."""
        self.outstanding, self.lent = self.outstanding + num_samples, self.lent - num_samples

    def use_lent(self, num_samples: int) -> None:
        """A round included a contribution of this host."""
        self.contributed, self.lent = self.contributed + num_samples, self.lent - num_samples

    def use_outstanding(self) -> None:
        """This host alone has taken a step with what was outstanding."""
        self.contributed, self.outstanding = self.contributed + self.outstanding, 0

    def forget_outstanding(self) -> None:
        """What was outstanding is no use any more."""
        self.dropped, self.outstanding = self.dropped + self.outstanding, 0

    def forget_lent(self) -> None:
        """What was lent is no use any more."""
        self.dropped, self.lent = self.dropped + self.lent, 0

    def to_json(self) -> dict[str, int]:
        """Return the account as a checkpoint keeps it: what is lent can't be given back to it."""
        return {**asdict(self), "lent": 0, "dropped": self.dropped + self.lent}

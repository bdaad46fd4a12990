"""Jobs of the compute process of a member that only averages, beside decod's own."""

from dataclasses import dataclass

from decod.protocol.core.jobs import BaseJob, Positive


@dataclass(frozen=True, slots=True)
class Checked:
    """The average was compared."""

    error: float
    """Relative to what it should be."""


@dataclass(frozen=True, slots=True)
class Fill(BaseJob):
    """Take the member's tensor as what it has learnt until the last outer step."""

    member: int


@dataclass(frozen=True, slots=True)
class Check(BaseJob):
    """Compare the average with the mean of all members' tensors."""

    result = Checked

    num_members: Positive

"""The result of one check: a level, what was found, and the remedy if that is not well."""

from dataclasses import dataclass
from enum import StrEnum

from decod.errors import DecodError
from decod.exit_codes import ExitCode


class Level(StrEnum):
    """How well things are."""

    OK = "OK"
    """Nothing needs to be done."""
    WARN = "WARN"
    """A node may run, but badly; or nobody can tell."""
    FAIL = "FAIL"
    """A node can't run, or can't take part in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check. `fine`, `doubtful`, `failed` and `failed_by` make one."""

    check: str
    """The check's name, one word."""
    level: Level
    found: str
    remedy: str = ""
    """One thing to do. Empty if and only if the level is OK."""
    exit_code: ExitCode = ExitCode.OK
    """That of `decod join` for the same reason. It is other than OK if and only if this is FAIL."""

    def __post_init__(self) -> None:
        assert (self.level is Level.OK) == (not self.remedy), self
        assert (self.level is Level.FAIL) == (self.exit_code is not ExitCode.OK), self


def fine(check: str, found: str) -> Diagnosis:
    """Return the diagnosis that all is well."""
    return Diagnosis(check=check, level=Level.OK, found=found)


def doubtful(check: str, found: str, remedy: str) -> Diagnosis:
    """Return the diagnosis of what hampers a node, or what can't be told."""
    return Diagnosis(check=check, level=Level.WARN, found=found, remedy=remedy)


def failed(check: str, found: str, remedy: str, exit_code: ExitCode) -> Diagnosis:
    """Return the diagnosis of what keeps a node from taking part.

    Args:
        check: The check's name.
        found: What is wrong.
        remedy: What to do.
        exit_code: With which `decod join` would end for this reason; not OK.
    """
    return Diagnosis(check=check, level=Level.FAIL, found=found, remedy=remedy, exit_code=exit_code)


def failed_by(check: str, error: DecodError) -> Diagnosis:
    """Return the diagnosis for an error that `decod join` would end with."""
    return failed(check, f"{error.code} {error.what}: {error.why}", error.fix, error.exit_code)

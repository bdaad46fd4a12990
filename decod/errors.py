"""Errors that decod raises, by the person or program that must act on them.

There are three families with three reactions. An operator's mistake or an unfit host ends the
command, with the class's exit code and a message of fixed form. A peer's fault is a `PeerError`:
the driver drops the message, counts it and goes on. Our own bugs are asserts.

Every message reads `CODE what: why. Try: fix`. Exit codes are an interface: a number is never
reused. Codes are `E-<AREA>-<number>`.
"""

from typing import ClassVar

from decod.exit_codes import ExitCode

OUT_OF_MEMORY = "E-HW-003"
"""Code of errors that say that a device has too little memory, before or during work."""


class DecodError(Exception):
    """Base class: says what happened (with the values), why it matters, and what to do.

    Args:
        what: What happened, with the offending values.
        why: Why that stops us, or its likely cause.
        fix: What the reader can do.
        code: Stable identifier for logs and searches. Default: the class's.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.UNEXPECTED
    code: str = "E-INT-001"

    def __init__(self, what: str, *, why: str, fix: str, code: str | None = None) -> None:
        self.what = what
        self.why = why
        self.fix = fix
        if code is not None:
            self.code = code
        super().__init__(f"{self.code} {what}: {why}. Try: {fix}")


class ConfigError(DecodError):
    """The run file, node file or an option cannot describe a working node. Nothing was started."""

    exit_code = ExitCode.CONFIG
    code = "E-CFG-001"


class NetworkError(DecodError):
    """This node cannot reach or serve any other: port in use, no answer, bad join string."""

    exit_code = ExitCode.NETWORK
    code = "E-NET-001"


class RejectedError(DecodError):
    """The run refuses this node: another manifest, wrong version, ban."""

    exit_code = ExitCode.REJECTED
    code = "E-REJ-001"


class HardwareError(DecodError):
    """This host cannot do the work: no such device, too little memory or disk."""

    exit_code = ExitCode.HARDWARE
    code = "E-HW-001"


class NotRunningError(DecodError):
    """No daemon answers on this host, so commands have nothing to ask."""

    exit_code = ExitCode.NOT_RUNNING
    code = "E-RUN-001"


class DataError(DecodError):
    """A shard, index, tokenizer or model folder is missing, truncated, altered or foreign."""

    exit_code = ExitCode.DATA
    code = "E-DAT-001"


class CheckpointError(DataError):
    """Weights or optimizer state that were read are not what they must be."""

    code = "E-CKP-001"


class TrainingError(DecodError):
    """The arithmetic cannot continue: shapes differ, or values are not finite."""

    code = "E-TRN-001"


class ShapeError(TrainingError):
    """Two tensors that must match do not. See `NonFiniteError` for bad values in good shapes."""

    code = "E-TRN-002"


class NonFiniteError(TrainingError):
    """A loss, activation or gradient holds NaN or infinity."""

    code = "E-TRN-003"


class PeerError(DecodError):
    """A peer broke the protocol: drop its message, count it, keep running."""

    code = "E-PEER-001"


class MalformedMessageError(PeerError):
    """A field is missing, too large, or out of range: illegal at any time."""

    code = "E-PEER-002"

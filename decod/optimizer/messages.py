"""Messages between a loop and its node: JSON objects, one a line, over a socket pair.

The loop starts the node and says `hello`. `region` is a part of the node's arena, {"offset",
"num_bytes"}: numbers of all parameters, flat, in the `wide` dtype.

    loop -> node
    hello         version, settings, num_elements, wide, shapes, fingerprint, state_hash, round,
                  device
    step          step (from 1), samples (new since the last), seconds {part: s}
    waiting       step: it has waited in vain, and goes on
    contributed   request, samples, base_round, finite; 0 samples: nothing was given
    applied       round, seconds; after `alone` also samples
    failed        round, what: an average could not be used
    state         request, path, size_bytes, description, round; the node removes the file
    state_failed  request, what
    loaded        request, round; what was outstanding is dropped
    state_refused request, what: the state could not be used, and nothing has changed
    bye

    node -> loop
    ready         join_string, fetching (a load_state comes before the first step); with the arena's
                  descriptor. Or refused: code, what, why, fix, exit_code
    go, wait      step: answers to it. A later `go` ends a wait
    contribute    request, region. Not before the average that includes the last contribution was
                  sent, or it was given back
    give_back     region, as it was contributed
    average       round, region, included; the region stays until `applied` or `failed`
    alone         round: step with what is outstanding
    copy_state    request
    load_state    request, path, description, round. No average of a contribution before it follows
    progress      round, peers, samples, target, samples_per_s
    stopped       reason, state_lost: nobody has the run's state, and this host never had it

`contribute`, `give_back`, `copy_state` and `progress` are answered at any time. The others wait,
in their order, until the loop is between two steps. The sender is our own node process, but a slip
there must end in an error and not in wrong parameters: `Message` checks each field.
"""

import json
import math
from typing import Any

from decod.errors import (
    ConfigError,
    DataError,
    DecodError,
    HardwareError,
    NetworkError,
    NotRunningError,
    RejectedError,
    TrainingError,
)
from decod.worker.arena_view import Region

LINE_SIZE_MAX_BYTES = 64 << 20
"""Longest message: it holds the hashes of a state's chunks."""

_KINDS = frozenset(
    {"ready", "refused", "stopped", "go", "wait", "contribute", "give_back", "average", "alone"}
    | {"copy_state", "load_state", "progress"}
)

_ERRORS: tuple[type[DecodError], ...] = (
    *(ConfigError, NetworkError, RejectedError, HardwareError),
    *(NotRunningError, DataError),
)
"""Errors that a node may have at its start. Each has an exit code of its own."""


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what[:300],
        why="the node process sent a message that this process does not understand",
        fix="report it with the node's log: this is an error in decod",
        code="E-INT-004",
    )


class Message:
    """One message.

    Args:
        line: JSON of an object with a known `kind`.

    Raises:
        TrainingError: It is something else.
    """

    def __init__(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise malformed(f"a line that is no JSON: {line[:100]!r}") from error
        if not isinstance(fields, dict) or fields.get("kind") not in _KINDS:
            raise malformed(f"a message of unknown kind: {line[:100]!r}")
        self._fields: dict[str, Any] = fields
        self.kind: str = fields["kind"]

    def number(self, name: str) -> int:
        """Return a whole number of at least 0."""
        value = self._fields.get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name)
        return value

    def length(self, name: str) -> float:
        """Return a number that is finite and at least 0."""
        value: Any = self._fields.get(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._wrong(name)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        if type(value) is not bool:
            raise self._wrong(name)
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self._wrong(name)
        return value

    def region(self) -> Region:
        """Return a part of the node's arena."""
        return Region.parse(self._fields.get("region"))

    def error(self) -> DecodError:
        """Return the error that a `refused` message reports."""
        what, why, fix, code = (self.text(name) for name in ("what", "why", "fix", "code"))
        exit_code = self.number("exit_code")
        kind = next((k for k in _ERRORS if k.exit_code == exit_code), DecodError)
        return kind(what, why=why, fix=fix, code=code)

    def _wrong(self, name: str) -> TrainingError:
        return malformed(f"{name} of {self.kind} is {str(self._fields.get(name))[:100]}")

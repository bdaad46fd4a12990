"""The rows of a node's journal, one JSON object a line, which `pandas.read_json` reads.

There are three kinds of row. A `round` row says how one peer spent one round. A `host` row says
what its host did between two samples. An `event` row is an event that the node has noted. All rows
of a kind have the same columns. A column is null where its value is not known, or has no meaning
for that peer.

Units are seconds and bytes. Columns are only ever added. A change of meaning raises `VERSION`.
"""

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

VERSION: Final = 1
"""Of the columns' meaning."""

TEXT_LENGTH_MAX = 200

Length = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""Seconds, or another quantity that is finite and not negative."""
Count = Annotated[int, Field(ge=0, le=1 << 62)]
"""Bytes, or a number of things."""
Text = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]


class Mode(StrEnum):
    """What a round is."""

    PIPELINE = "pipeline"
    """An iteration of `decod leader` and `decod join`."""
    OPTIMIZER = "optimizer"
    """From one average of the collaborative optimizer to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """How one peer spent one round.

    `data_s` to `optimizer_s` are times of the peer's own work, one after another. Times of phases
    and of transfers run beside them where the run overlaps work with averages.
    """

    version: Literal[1] = VERSION
    kind: Literal["round"] = "round"
    mode: Mode
    time_s: Length
    """End of the round, in seconds since 1970 by the host's clock."""
    run: Text
    peer: Text
    """The peer's id."""
    name: Text
    stage: Count | None = None
    """Pipeline: the peer's stage. 0 is a data node's."""
    round: Count
    round_s: Length
    """From the end of the round before to the end of this one."""
    steps: Count | None = None
    """Steps of the training loop, or microbatches that passed this peer's stage here."""
    samples: Count = 0
    """Sequences that this peer has trained on in the round."""
    round_samples: Count | None = None
    """Sequences that all peers together have trained on."""

    data_s: Length | None = None
    """Waiting for data, or reading it."""
    forward_s: Length | None = None
    backward_s: Length | None = None
    unsplit_s: Length | None = None
    """The three together, in a training loop that does not tell them apart."""
    accumulate_s: Length | None = None
    """Adding gradients up for the average."""
    optimizer_s: Length | None = None
    """The optimizer's steps."""
    other_s: Length | None = None
    """Other jobs of the device: audits, copies of the state."""
    apply_s: Length | None = None
    """Putting the average into the parameters, without the optimizer's step."""

    matchmaking_s: Length | None = None
    """Until the round's averaging could begin. Pipeline: until the first microbatch began."""
    averaging_s: Length | None = None
    """From the beginning of the average to its end, at this peer. Pipeline: to the commit."""
    averaging_compute_s: Length | None = None
    """The part of the work on the average that is arithmetic: encode, add up, decode."""
    wait_s: Length | None = None
    """How long the training loop stood still for matchmaking and averaging."""

    sending_s: Length | None = None
    """Pipeline: while activations or gradients of microbatches were on their way from here."""
    sent_bytes: Count | None = None
    """Bytes of these tensors."""
    received_bytes: Count | None = None
    average_sending_s: Length | None = None
    """While parts of the average were on their way from here."""
    average_sent_bytes: Count | None = None
    average_received_bytes: Count | None = None

    peers: Count | None = None
    """Peers that took part in the round."""
    target_batch_size: Count | None = None
    """Samples after which peers average. Pipeline: the batch of one iteration."""
    batch_size_per_step: Count | None = None
    accumulation_steps: Count | None = None
    local_updates: bool | None = None
    averages_every: Count | None = None
    """Pipeline: iterations from one average to the next."""
    overlap: bool | None = None
    """Peers train on while an average travels."""
    compression: Text | None = None
    """Of averages."""
    activation_compression: Text | None = None
    capacity: Count | None = None
    """Pipeline: microbatches that this peer takes at a time."""
    device: Text | None = None
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """What a host did since its last sample. `process_` columns add up this peer's processes.

    Source: Hivemind bottlenecks thesis, table 4.1. Deviations: bytes instead of megabytes, and
    amounts since the last sample instead of rates. CPU times are added.
    """

    version: Literal[1] = VERSION
    kind: Literal["host"] = "host"
    time_s: Length
    run: Text
    peer: Text
    name: Text
    interval_s: Length
    """Since the last sample, or since recording began."""
    network_sent_bytes: Count | None = None
    network_received_bytes: Count | None = None
    cpu_percent: Length | None = None
    """Of all cores together, 0 to 100."""
    cpu_logical_cores: Count | None = None
    cpu_context_switches: Count | None = None
    cpu_interrupts: Count | None = None
    cpu_soft_interrupts: Count | None = None
    cpu_load_1_min_percent: Length | None = None
    """Mean load, in percent of all cores."""
    cpu_load_5_min_percent: Length | None = None
    cpu_load_15_min_percent: Length | None = None
    memory_total_bytes: Count | None = None
    memory_available_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    memory_used_percent: Length | None = None
    process_cpu_s: Length | None = None
    process_context_switches_voluntary: Count | None = None
    process_context_switches_involuntary: Count | None = None
    process_resident_bytes: Count | None = None
    process_virtual_bytes: Count | None = None
    process_shared_bytes: Count | None = None
    process_text_bytes: Count | None = None
    process_data_bytes: Count | None = None
    process_library_bytes: Count | None = None
    process_dirty_bytes: Count | None = None
    disk_reads: Count | None = None
    disk_writes: Count | None = None
    disk_read_bytes: Count | None = None
    disk_write_bytes: Count | None = None
    disk_read_time_s: Length | None = None
    disk_write_time_s: Length | None = None
    disk_busy_time_s: Length | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event that a node has noted."""

    version: Literal[1] = VERSION
    kind: Literal["event"] = "event"
    time_s: Length
    run: Text
    peer: Text
    event: Text
    fields: dict[Text, Text | bool | int | float | None]


Row = RoundRow | HostRow | EventRow

EVENT_BEGINNING: Final = b'{"version":1,"kind":"event",'
"""Of every line with an `EventRow`."""
LINE_SIZE_MAX_BYTES = 16_384

_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="kind")])


def line_of(row: Row) -> bytes:
    """Return a row as it stands in a file, with the end of its line."""
    values = {key: _short(value) for key, value in asdict(row).items()}
    if isinstance(row, EventRow):
        values["fields"] = {key: _short(value) for key, value in row.fields.items()}
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _short(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity.

    A microsecond is enough, and shortens the file by a third.
    """
    if not isinstance(value, float):
        return value
    return round(value, 6) if math.isfinite(value) else None


def parse_line(line: bytes) -> Row:
    """Return the row of a line, which may come from other people.

    Raises:
        ValueError: The line holds none. The text says why.
    """
    if len(line) > LINE_SIZE_MAX_BYTES:
        raise ValueError(f"it has {len(line)} bytes, {LINE_SIZE_MAX_BYTES} at most are allowed")
    try:
        return _ROW.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None

"""A reader of TensorBoard's event files."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def read_events(path: Path) -> list[Event]:
    """Read all events of a file. A record is length, checksum, event, checksum."""
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of one event, by their names."""
    return {value.tag: value.simple_value for value in event.summary.value}

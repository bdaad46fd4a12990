"""Records of the DHT: who leads the run, and where a node is.

A record says its name, owner, sequence number and absolute end of life; holders can't extend it.
Of two records of one name the newer wins, whoever stores it: for the leader's the one of the higher
term, then for all the one with the higher sequence number. A record only says where to dial; it
proves nothing.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.net.counters import Counters
from decod.wire import validate

RECORD_SIZE_MAX_BYTES = 1000
TTL_MAX_S = 900.0
CLOCK_TOLERANCE_S = 60.0
RECORDS_MAX = 20_000

LEADER = "leader"
_PEER = "peer:"


def peer_name(node_id: NodeId) -> str:
    """Returns the name under which a node publishes where it is."""
    return _PEER + node_id


def record_key(run_id: RunId, name: str) -> bytes:
    """Returns the place of a record in the DHT: 20 bytes."""
    return hashlib.sha256(f"decod-dht-v1|{run_id}|{name}".encode()).digest()[:20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A checked record."""

    name: str
    owner: NodeId
    sequence: int
    """Grows with each publication; the owner's wall clock in milliseconds or more."""
    expires_s: float
    """Instant of the wall clock, in seconds of the Unix epoch."""
    value: Mapping[str, Any]

    @property
    def rank(self) -> tuple[int, int]:
        """Orders records of one name; the greatest is the newest."""
        return (self.value["term"] if self.name == LEADER else 0, self.sequence)

    def to_bytes(self) -> bytes:
        """Returns the one JSON text of this record."""
        fields = {
            "name": self.name,
            "owner": self.owner,
            "sequence": self.sequence,
            "expires_s": self.expires_s,
            "value": self.value,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_record(data: object, *, now_s: float) -> Record:
    """Returns the record in `data`, which came from a peer.

    Args:
        now_s: This host's wall clock.

    Raises:
        MalformedMessageError: It is no record, or not in its one form, or its time is over or too
            far away.
    """
    if not isinstance(data, bytes) or len(data) > RECORD_SIZE_MAX_BYTES:
        raise validate.malformed("record", data, allowed=f"{RECORD_SIZE_MAX_BYTES} bytes at most")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise validate.malformed("record", data, allowed="JSON") from error
    match fields:
        case {
            "name": str(name),
            "owner": str(owner),
            "sequence": int(sequence),
            "expires_s": float(expires_s),
            "value": dict(value),
        } if not isinstance(sequence, bool):
            record = Record(
                name=name,
                owner=validate.node_id("owner", owner),
                sequence=validate.number("sequence", sequence),
                expires_s=expires_s,
                value=value,
            )
        case _:
            raise validate.malformed("record", data, allowed="an object with the five fields")
    check_record(record, now_s=now_s)
    try:
        canonical = record.to_bytes()
    except (ValueError, RecursionError) as error:
        raise validate.malformed("record", data, allowed="finite numbers") from error
    if canonical != data:
        raise validate.malformed("record", data, allowed="in its one form")
    return record


def check_record(record: Record, *, now_s: float) -> None:
    """Checks times, name and value; raises `MalformedMessageError`."""
    latest_s = now_s + TTL_MAX_S + CLOCK_TOLERANCE_S
    if not (math.isfinite(record.expires_s) and now_s < record.expires_s <= latest_s):
        raise validate.malformed("expires_s", record.expires_s, allowed="in the next 16 minutes")
    if record.sequence > (now_s + CLOCK_TOLERANCE_S) * 1000:
        raise validate.malformed("sequence", record.sequence, allowed="no later than now")
    value = record.value
    if record.name == LEADER:
        term = value.get("term")
        if value.get("node_id") != record.owner or type(term) is not int:
            raise validate.malformed("value", value, allowed="the owner's id and term")
        validate.iteration("term", term)
    elif record.name != _PEER + record.owner:
        raise validate.malformed("name", record.name, allowed="leader or the owner's own")
    address = value.get("address")
    if not isinstance(address, str):
        raise validate.malformed("address", address, allowed="a text")
    validate.address("address", address)


class RecordStore:
    """The records that this node holds for others. Never holds one whose time is over.

    Args:
        run_id: Records whose key does not follow from their name and this run are refused.
        clock: Returns the wall clock, in seconds of the Unix epoch.
    """

    def __init__(
        self,
        run_id: RunId,
        clock: Callable[[], float],
        counters: Counters,
        *,
        records_max: int = RECORDS_MAX,
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        self._counters = counters
        self._records_max = records_max
        self._records: dict[bytes, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def put(self, data: object, *, source: str) -> bool:
        """Stores what a peer sent; returns whether this node now holds it or a newer one."""
        try:
            record = parse_record(data, now_s=self._clock())
        except MalformedMessageError:
            self._counters.add("dht.malformed", source)
            return False
        return self.put_record(record, source=source)

    def put_record(self, record: Record, *, source: str) -> bool:
        """Stores a checked record, unless it is older than what is here or there is no room."""
        key = record_key(self._run_id, record.name)
        held = self._live(key)
        if held is not None and held.rank >= record.rank:
            return True
        if held is None and len(self._records) >= self._records_max:
            self._drop_expired()
            if len(self._records) >= self._records_max:
                self._counters.add("dht.full", source)
                return False
        self._records[key] = record
        return True

    def get(self, key: bytes) -> Record | None:
        """Returns the live record at `key`."""
        return self._live(key)

    def _live(self, key: bytes) -> Record | None:
        record = self._records.get(key)
        if record is not None and record.expires_s <= self._clock():
            del self._records[key]
            return None
        return record

    def _drop_expired(self) -> None:
        now_s = self._clock()
        self._records = {k: r for k, r in self._records.items() if r.expires_s > now_s}

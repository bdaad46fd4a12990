"""Records of the DHT: the leader of the run, and the address of each node.

A record holds its name, owner, sequence number and end of life on the wall clock. Holders can't
extend its life. Of two records with one name the newer wins: the leader's record with the higher
term, and otherwise the record with the higher sequence number. A record only says where to dial.
It proves nothing.
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
    """Return the name under which a node publishes its address."""
    return _PEER + node_id


def record_key(run_id: RunId, name: str) -> bytes:
    """Return the place of a record in the DHT: 20 bytes."""
    return hashlib.sha256(f"decod-dht-v1|{run_id}|{name}".encode()).digest()[:20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record. `check_record` says which values are valid."""

    name: str
    owner: NodeId
    sequence: int
    """Grows with each publication. At least the owner's wall clock in milliseconds."""
    expires_s: float
    """Instant of the wall clock, in seconds of the Unix epoch."""
    value: Mapping[str, Any]

    @property
    def rank(self) -> tuple[int, int]:
        """A key that orders records of one name by age: the greatest is the newest."""
        return (self.value["term"] if self.name == LEADER else 0, self.sequence)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON text of this record."""
        fields = {
            "name": self.name,
            "owner": self.owner,
            "sequence": self.sequence,
            "expires_s": self.expires_s,
            "value": self.value,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_record(data: object, *, now_s: float) -> Record:
    """Parse and check a record that a peer sent.

    Args:
        data: A value of any type. A valid record is canonical JSON of at most 1000 bytes.
        now_s: This host's wall clock, in seconds of the Unix epoch.

    Raises:
        MalformedMessageError: `data` is no record, is not canonical, has expired, or expires too
            far in the future.
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
    """Check the times, name and value of a record.

    Raises:
        MalformedMessageError: One of them is invalid; says which.
    """
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
    """The records that this node holds, its own and others'. Expired ones are never returned.

    Args:
        run_id: The run. A record's key follows from its name and this.
        clock: Returns the wall clock, in seconds of the Unix epoch.
        counters: Counts `dht.malformed` and `dht.full`.
        records_max: Records of further names are refused.
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
        """Store a record that a peer sent; return whether this node now holds it or a newer one."""
        try:
            record = parse_record(data, now_s=self._clock())
        except MalformedMessageError:
            self._counters.add("dht.malformed", source)
            return False
        return self.put_record(record, source=source)

    def put_record(self, record: Record, *, source: str) -> bool:
        """Store a checked record, unless there is no room or a record as new is held.

        Returns:
            Whether this node now holds it or a newer one.
        """
        key = record_key(self._run_id, record.name)
        stored = self._live(key)
        if stored is not None and stored.rank >= record.rank:
            return True
        if stored is None and len(self._records) >= self._records_max:
            self._drop_expired()
            if len(self._records) >= self._records_max:
                self._counters.add("dht.full", source)
                return False
        self._records[key] = record
        return True

    def get(self, key: bytes) -> Record | None:
        """Return the record at `key`, or None if there is none or it has expired."""
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

"""Records of the DHT: the leader of the run, and the address of each node.

A record is a statement of its owner: nobody else can make one, and those who hold it can't extend
its life. Its place follows from its name, and for a node's own record from the owner. So an owner
has at most two records, and nobody can put one in another's place. A data node alone can say that
it leads.

Of two records in one place the newer wins: the leader's record with the higher term, otherwise the
one with the higher sequence number. A data node can name any term. That only makes others dial it:
a record says where to dial, and who answers there must prove who it is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement, parse_statement
from decod.membership.statements import Authors
from decod.net.net_limits import Counters
from decod.protocol.core.view import Role
from decod.wire import validate

RECORD_SIZE_MAX_BYTES = 1000
TTL_MAX_S = 900
LEADER_TTL_MAX_S = 120
"""A leader is replaced within seconds, and its record should not outlive that by much."""
TERM_MAX = 1 << 24
"""A run that elects a leader every five seconds gets there in two and a half years."""
CLOCK_TOLERANCE_S = 60
RECORDS_MAX = 20_000

LEADER = "leader"
PEER = "peer"
TTLS_MAX_S = {LEADER: LEADER_TTL_MAX_S, PEER: TTL_MAX_S}
"""The longest life of each record, by name."""

_KIND = "dht record"
_TYPES = {"expires_s": int, "name": str, "run": str, "sequence": int, "value": dict}


def record_key(run_id: RunId, name: str, owner: NodeId | None = None) -> bytes:
    """Return the place of a record in the DHT: 20 bytes.

    Args:
        run_id: The run.
        name: `LEADER` or `PEER`.
        owner: Whose record it is, if it is a node's own.
    """
    whole = name if owner is None else f"{name}:{owner}"
    return hashlib.sha256(f"decod-dht-v1|{run_id}|{whole}".encode()).digest()[:20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that has been checked, with the bytes in which it travels."""

    name: str
    owner: NodeId
    sequence: int
    """Grows with each publication. At least the owner's wall clock in milliseconds."""
    expires_s: int
    """Instant of the wall clock, in seconds of the Unix epoch."""
    value: Mapping[str, Any]
    """The fields: for a peer `address`, for the leader `address` and `term`."""
    key: bytes
    data: bytes
    until_s: int
    """The instant when it ends: with its life, or earlier with its owner's credential."""

    @property
    def rank(self) -> tuple[int, int]:
        """A key that orders records in one place by age: the greatest is the newest."""
        return (self.value["term"] if self.name == LEADER else 0, self.sequence)


def record_body(
    run_id: RunId, name: str, value: Mapping[str, Any], *, sequence: int, expires_s: int
) -> bytes:
    """Return what the owner of a record signs: canonical JSON."""
    times = {"sequence": sequence, "expires_s": expires_s}
    return _canonical({"run": run_id, "name": name, "value": value, **times})


def record_statement(body: bytes, state: Callable[[str, bytes], Statement]) -> bytes:
    """Return the bytes of a record, signed by `state`."""
    return state(_KIND, body).to_bytes()


class RecordReader:
    """Reads records, and checks them.

    Args:
        run_id: The run. Records of another run are refused.
        clock: Returns the wall clock, in seconds of the Unix epoch.
        authors: Tells who has made a statement.
    """

    def __init__(self, run_id: RunId, clock: Callable[[], float], authors: Authors) -> None:
        self._run_id = run_id
        self._clock = clock
        self._authors = authors

    def read(self, data: object) -> Record:
        """Return the record in some bytes.

        Args:
            data: A value of any type, as a peer sent it.

        Raises:
            MalformedMessageError: It is no record, has another form than `record_statement` gives
                it, is not of this run, has expired or lives too long, or is not its owner's.
        """
        if not isinstance(data, bytes) or len(data) > RECORD_SIZE_MAX_BYTES:
            raise validate.malformed("record", data, allowed=f"{RECORD_SIZE_MAX_BYTES} bytes")
        said = parse_statement(data)
        record = self._parse(said, data)
        # The dearest check comes last.
        author = self._authors.author_of(said, _KIND)
        if record.name == LEADER and author.role is not Role.DATA:
            raise validate.malformed("owner", author.node_id, allowed="a data node")
        return record

    def is_live(self, record: Record) -> bool:
        """Return whether a record that was read before still counts."""
        return record.until_s > self._clock() and self._authors.allows(record.owner)

    def _parse(self, said: Statement, data: bytes) -> Record:
        """Return the record that is said, whoever says it."""
        fields = _fields_of(said.body)
        if said.to_bytes() != data or fields["run"] != self._run_id:
            raise validate.malformed("record", data, allowed="of this run, in its one form")
        name = fields["name"]
        value = fields["value"]
        if name not in TTLS_MAX_S:
            raise validate.malformed("name", name, allowed="leader or peer")
        self._check_times(name, fields["expires_s"], fields["sequence"])
        _check_value(name, value)
        owner = said.credential.node_id
        expires_s = fields["expires_s"]
        return Record(
            name=name,
            owner=owner,
            sequence=fields["sequence"],
            expires_s=expires_s,
            value=value,
            key=record_key(self._run_id, name, None if name == LEADER else owner),
            data=data,
            until_s=min(expires_s, said.credential.until_s),
        )

    def _check_times(self, name: str, expires_s: int, sequence: int) -> None:
        now_s = self._clock()
        longest_s = TTLS_MAX_S[name] + CLOCK_TOLERANCE_S
        if not now_s < expires_s <= now_s + longest_s:
            raise validate.malformed("expires_s", expires_s, allowed=f"in the next {longest_s} s")
        if not 0 <= sequence <= (now_s + CLOCK_TOLERANCE_S) * 1000:
            raise validate.malformed("sequence", sequence, allowed="no later than now")


def _canonical(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a body, each of its type."""
    try:
        fields = json.loads(body)
        canonical = _canonical(fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise validate.malformed("record", body, allowed="JSON") from error
    match fields:
        case dict() if canonical == body and {n: type(fields[n]) for n in fields} == _TYPES:
            return fields
    raise validate.malformed("record", body, allowed="an object with its five fields")


def _check_value(name: str, value: Mapping[str, Any]) -> None:
    address = value.get("address")
    if not isinstance(address, str):
        raise validate.malformed("address", address, allowed="a text")
    validate.address("address", address)
    if name == LEADER:
        term = value.get("term")
        if type(term) is not int or not 0 <= term <= TERM_MAX:
            raise validate.malformed("term", term, allowed=f"from 0 to {TERM_MAX}")


class RecordStore:
    """The records that this node holds, its own and others'. Dead ones are never returned.

    Args:
        reader: Reads and checks them.
        counters: Counts `dht.malformed`, `dht.equivocal` and `dht.full`.
        records_max: Records in further places are refused.
    """

    def __init__(
        self, reader: RecordReader, counters: Counters, *, records_max: int = RECORDS_MAX
    ) -> None:
        self._reader = reader
        self._counters = counters
        self._records_max = records_max
        self._records: dict[bytes, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def put(self, data: object, *, source: str) -> bool:
        """Store a record, unless there is no room or a record as new is held.

        Args:
            data: A value of any type, as a peer sent it.
            source: Who sent it.

        Returns:
            Whether this node now holds it or a newer one.
        """
        try:
            record = self._reader.read(data)
        except MalformedMessageError:
            self._counters.add("dht.malformed", source)
            return False
        held = self.get(record.key)
        if held is not None and is_equivocal(held, record):
            self._counters.add("dht.equivocal", record.owner)
            return False
        if held is not None and held.rank >= record.rank:
            return True
        if held is None and len(self._records) >= self._records_max:
            self._records = {k: r for k, r in self._records.items() if self._reader.is_live(r)}
            if len(self._records) >= self._records_max:
                self._counters.add("dht.full", source)
                return False
        self._records[record.key] = record
        return True

    def get(self, key: bytes) -> Record | None:
        """Return the live record at `key`, or None if there is none."""
        record = self._records.get(key)
        if record is not None and not self._reader.is_live(record):
            del self._records[key]
            return None
        return record


def is_equivocal(one: Record, other: Record) -> bool:
    """Return whether their owner has said different things under one name and number."""
    same = (one.key, one.owner, one.sequence) == (other.key, other.owner, other.sequence)
    return same and (one.value, one.expires_s) != (other.value, other.expires_s)

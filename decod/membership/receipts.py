"""Receipts: data nodes count the work that other members do for them, and sign the count.

A data node knows the path of each of its microbatches. When an iteration is committed, it adds the
microbatches to the counts of the relays on their paths. Its receipt for a relay is a statement with
the present count. Whoever knows the root of the run can check it, without asking anybody.

    receipts of one run, issuer, holder and period:  the one with the highest count replaces others
    receipts that differ in one of these:            their counts add up

A period begins when an issuer begins to count, at its node's start. It counts each commit in one
period only, so nothing counts twice, however many copies there are.

Nobody vouches for a data node. The receipt that it writes for itself is its own word.
"""

import base64
import binascii
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from typing_extensions import override

from decod.errors import MalformedMessageError
from decod.files import read_beginning, replace_durably
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement, parse_statement
from decod.membership.papers import Membership
from decod.protocol.core.view import Role
from decod.texts import no_constant, unique
from decod.wire import validate

RECEIPTS_FILE = "receipts"
KEPT_MAX = 1000
"""Most receipts that a node keeps of the runs of one root. The smallest counts go first."""
LINE_MAX_CHARACTERS = 2048
FILE_MAX_BYTES = 64 << 20

_KIND = "receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a member in some committed iterations."""

    since_ms: int
    """The instant when the count began, in milliseconds of the Unix epoch: it names the issuer's
    period."""
    first_iteration: int
    last_iteration: int
    num_microbatches: int
    num_tokens: int
    """Tokens of these microbatches."""

    def __add__(self, more: "Work") -> "Work":
        return Work(
            since_ms=min(self.since_ms, more.since_ms),
            first_iteration=min(self.first_iteration, more.first_iteration),
            last_iteration=max(self.last_iteration, more.last_iteration),
            num_microbatches=self.num_microbatches + more.num_microbatches,
            num_tokens=self.num_tokens + more.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A data node's word on a member's work. It has been checked."""

    run_id: RunId
    issuer: NodeId
    holder: NodeId
    work: Work
    issued_s: int
    """Seconds of the Unix epoch on the issuer's clock."""
    statement: Statement = field(repr=False)

    @property
    def is_own_word(self) -> bool:
        """Return whether a data node speaks of itself."""
        return self.issuer == self.holder

    @property
    def period(self) -> tuple[str, ...]:
        """The key that receipts share of which only one counts."""
        return (self.run_id, self.holder, self.issuer, str(self.work.since_ms))

    @override
    def __str__(self) -> str:
        """Return the receipt as a line of a file."""
        return base64.b64encode(self.statement.to_bytes()).decode()


@dataclass(frozen=True, slots=True)
class ReceiptAnswer:
    """A data node's answer to a member that asks for a receipt."""

    receipt: Statement | None
    """None if the data node has counted nothing for that member."""
    iteration: int
    """The last iteration whose commit it has counted; 0 if there is none."""


def new_receipt(
    issuer: Membership, run_id: RunId, holder: NodeId, work: Work, issued_s: int
) -> Statement:
    """Return a data node's receipt for a member's work.

    Args:
        issuer: The data node's membership.
        run_id: The run.
        holder: The member.
        work: What it has done.
        issued_s: Seconds of the Unix epoch.
    """
    return issuer.state(_KIND, _body(run_id, holder, work, issued_s))


def check_receipt(statement: Statement, root: bytes) -> Receipt:
    """Check that a statement is a receipt of a run, and return what it says.

    Args:
        statement: The statement.
        root: The public key of the run's root.

    Raises:
        MalformedMessageError: It is no receipt, or nobody who may has written it like that.
    """
    credential = statement.credential
    body = statement.body
    credential.check(root, None)
    if credential.role is not Role.DATA:
        raise validate.malformed("issuer", credential.node_id, allowed="a data node")
    statement.check_signature(root, _KIND, now_s=None)
    receipt = _said_by(credential.node_id, statement)
    if _body(receipt.run_id, receipt.holder, receipt.work, receipt.issued_s) != body:
        raise validate.malformed("receipt", body, allowed="in the form that decod writes")
    # It stays true after its issuer's membership has ended, but not from then on.
    credential.require_unexpired(receipt.issued_s)
    return receipt


def parse_receipt(line: str, root: bytes) -> Receipt:
    """Return the receipt that a line of a file holds. Raises as `check_receipt`."""
    if len(line) > LINE_MAX_CHARACTERS:
        raise validate.malformed("receipt", line, allowed="shorter")
    try:
        data = base64.b64decode(line.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise validate.malformed("receipt", line, allowed="a line of base64") from error
    return check_receipt(parse_statement(data), root)


def _body(run_id: RunId, holder: NodeId, work: Work, issued_s: int) -> bytes:
    content = asdict(work) | {"run_id": run_id, "holder": holder, "issued_s": issued_s}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _said_by(issuer: NodeId, statement: Statement) -> Receipt:
    try:
        said = json.loads(statement.body, object_pairs_hook=unique, parse_constant=no_constant)
        work = Work(**{each.name: _number(each.name, said[each.name]) for each in fields(Work)})
        run_id = str(said["run_id"])
        holder = str(said["holder"])
        issued_s = _number("issued_s", said["issued_s"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise validate.malformed("receipt", statement.body, allowed="a receipt's JSON") from error
    return Receipt(
        run_id=validate.run_id("run_id", run_id),
        issuer=issuer,
        holder=validate.node_id("holder", holder),
        work=work,
        issued_s=issued_s,
        statement=statement,
    )


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is no whole number")
    return validate.integer(0, validate.NUMBER_MAX)(name, value)


class Receipts:
    """Receipts of the runs of one root. Of each period, the highest count is kept.

    Args:
        receipts: The first ones.
    """

    def __init__(self, receipts: Iterable[Receipt] = ()) -> None:
        self._newest: dict[tuple[str, ...], Receipt] = {}
        for receipt in receipts:
            self.add(receipt)

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._newest.values())

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, receipt: Receipt) -> bool:
        """Take in a receipt; return whether it says more than those before."""
        known = self._newest.get(receipt.period)
        if known is not None and known.work.num_microbatches >= receipt.work.num_microbatches:
            return False
        self._newest[receipt.period] = receipt
        return True

    def trim(self, num_max: int) -> None:
        """Drop the receipts with the smallest counts if there are more than `num_max`."""
        for receipt in sorted(self, key=_size)[: max(0, len(self) - num_max)]:
            del self._newest[receipt.period]

    def text(self) -> str:
        """Return the receipts as a file's text."""
        return "".join(f"{line}\n" for line in sorted(map(str, self)))

    def rows(self) -> list[dict[str, Any]]:
        """Return what each data node says of each member in each run, for people and programs."""
        found = defaultdict[tuple[str, ...], list[Receipt]](list)
        for receipt in self:
            found[receipt.period[:3]].append(receipt)
        return [_row(found[key]) for key in sorted(found)]


def _size(receipt: Receipt) -> int:
    return receipt.work.num_microbatches


def _row(receipts: list[Receipt]) -> dict[str, Any]:
    """Return what one data node says of one member in one run, in one or several periods."""
    first = receipts[0]
    work = receipts[0].work
    for receipt in receipts[1:]:
        work += receipt.work
    return {
        "run_id": first.run_id,
        "holder": first.holder,
        "issuer": first.issuer,
        "own_word": first.is_own_word,
        "num_microbatches": work.num_microbatches,
        "num_tokens": work.num_tokens,
        "first_iteration": work.first_iteration,
        "last_iteration": work.last_iteration,
        "issued_s": max(receipt.issued_s for receipt in receipts),
    }


# --- on disk ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadReceipts:
    """The content of a file of receipts."""

    receipts: Receipts
    problems: list[str]
    """The lines that are no receipts of the run, and why."""


def read_receipts(text: str, root: bytes) -> ReadReceipts:
    """Return the receipts in a file's text. Lines that prove nothing are named.

    Args:
        text: The text.
        root: The public key of the run's root.
    """
    found = ReadReceipts(Receipts(), [])
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.receipts.add(parse_receipt(line, root))
        except MalformedMessageError as error:
            found.problems.append(f"line {number}: {error.what}, {error.why}")
    return found


def load_receipts(folder: Path, root: bytes) -> ReadReceipts:
    """Return the receipts in a node's membership folder; none if it has none.

    Raises:
        OSError: They can't be read.
    """
    try:
        data = read_beginning(folder / RECEIPTS_FILE, FILE_MAX_BYTES)
    except FileNotFoundError:
        data = b""
    return read_receipts(data.decode(errors="replace"), root)


def keep_receipts(folder: Path, text: str) -> None:
    """Write a file's text to a node's membership folder.

    Raises:
        OSError: It can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_durably(folder / RECEIPTS_FILE, text.encode(), mode=0o600)

"""The credit ledger: what the nodes of one state folder have done, by run, for their operator.

It is one small JSON file, which outlives runs, restarts and crashes. It is replaced as a whole or
not at all. Of very many runs, the oldest become one row, so the file stays small and its sums stay
right. A file that is damaged is renamed and kept.

The counts are this host's own word. Receipts, which data nodes sign, are the proof.
"""

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from decod.files import read_beginning, replace_durably
from decod.journal.credit import CreditRows, RunCredit
from decod.texts import clean_text

FILE_NAME: Final = "credit.json"
FILE_MAX_BYTES = 2 << 20
DAMAGED_MAX = 100
"""Most damaged ledgers that are kept beside the ledger."""

_AMOUNT_MAX = 1 << 62


class DamagedLedgerError(ValueError):
    """The file is no ledger that this release can read. The text says why."""


_ROWS: TypeAdapter[CreditRows] = TypeAdapter(CreditRows)


def read_credit(state_dir: Path) -> CreditRows:
    """Return what the ledger of a state folder holds; nothing if there is none.

    Raises:
        OSError: It can't be read.
        DamagedLedgerError: It is not what a node has written.
    """
    try:
        text = read_beginning(state_dir / FILE_NAME, FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return CreditRows()
    if len(text) > FILE_MAX_BYTES:
        raise DamagedLedgerError(f"it is longer than {FILE_MAX_BYTES} bytes")
    try:
        rows = _ROWS.validate_json(text, strict=True)
    except ValidationError as error:
        # The error may quote the file.
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedLedgerError(
            clean_text(f"{place}: {first['msg']}" if place else first["msg"])
        ) from None
    every = [rows.earlier.credit, *(row.credit for row in rows.runs.values())]
    amounts = [amount for credit in every for amount in asdict(credit).values()]
    instants = [each for row in rows.runs.values() for each in (row.first_s, row.last_s)]
    for amount in (*amounts, *instants, rows.earlier.num_runs, rows.earlier.first_s):
        # Written so that it also refuses what is no number.
        if not 0 <= amount <= _AMOUNT_MAX:
            raise DamagedLedgerError(f"{amount} can't be an amount")
    return rows


def damaged_ledgers(state_dir: Path) -> list[Path]:
    """Return the damaged ledgers that were set aside in a state folder."""
    return sorted(state_dir.glob(f"{FILE_NAME}.damaged-*"))


def sum_of(every: Iterable[CreditRows]) -> CreditRows:
    """Return several ledgers as one."""
    return sum(every, CreditRows())


class CreditLedger:
    """The ledger of a daemon, which alone writes it. Threads may share it.

    What was added stays in memory until the file has it, whatever happens to the file.

    Args:
        state_dir: The folder, which the daemon has locked.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._rows = CreditRows()
        self._loaded, self._changed = False, False
        self._writing, self._adding = threading.Lock(), threading.Lock()

    @property
    def rows(self) -> CreditRows:
        """What is known: only the work since the start until the file has been read."""
        return self._rows

    def add(self, run_id: str, row: RunCredit) -> None:
        """Count some work. Never waits for the disk."""
        with self._adding:
            self._rows += CreditRows(runs={run_id: row})
            self._changed = True

    def save(self) -> tuple[Path, str] | None:
        """Write what was added, after reading what there was. Waits for the disk.

        Returns:
            Where a damaged file now is, and what is wrong with it; None if none was found.

        Raises:
            OSError: The file can't be read or written. Nothing is lost: call this again.
        """
        with self._writing:
            aside = self._load()
            with self._adding:
                changed, self._changed = self._changed, False
                rows = self._rows = self._rows.trimmed()
            if changed:
                try:
                    replace_durably(self._state_dir / FILE_NAME, _text_of(rows), mode=0o600)
                except OSError:
                    self._changed = True
                    raise
            return aside

    def _load(self) -> tuple[Path, str] | None:
        """Read the file once, before it is first replaced."""
        if self._loaded:
            return None
        aside = None
        try:
            found = read_credit(self._state_dir)
        except DamagedLedgerError as error:
            found, aside = CreditRows(), (self._set_aside(), str(error))
        with self._adding:
            self._rows = found + self._rows
        self._loaded = True
        return aside

    def _set_aside(self) -> Path:
        """Rename the damaged file, over none that was set aside before; return its path."""
        path = self._state_dir / FILE_NAME
        names = (f"{FILE_NAME}.damaged-{number}" for number in range(1, DAMAGED_MAX + 1))
        aside = next((each for name in names if not (each := path.with_name(name)).exists()), None)
        if aside is None:
            raise FileExistsError(f"{DAMAGED_MAX} damaged ledgers are beside {path.name} already")
        return path.rename(aside)


def _text_of(rows: CreditRows) -> bytes:
    return (json.dumps(asdict(rows), indent=1) + "\n").encode()

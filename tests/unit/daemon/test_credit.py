"""What a node counts for its operator, and what becomes of it when the disk fails."""

import errno
from pathlib import Path
from typing import Any, cast

import pytest

from decod.daemon.metrics import CreditCounter
from decod.daemon.run_facts import RunPart
from decod.daemon.status import for_members
from decod.journal.credit_file import FILE_NAME, CreditLedger, read_credit
from decod.membership.statements import new_charter
from decod.protocol.core.effects import CountWork
from tests.support.members import data_node
from tests.unit.daemon.nodes import RUN_ID, STRANGER, make_manifest

OWN = data_node("own")
MANIFEST = make_manifest()
TOKENS = MANIFEST.run.batch.tokens_per_microbatch


class Bench:
    """A node that counts in a folder, and its notes."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.ledger = CreditLedger(folder)
        part = RunPart(
            membership=OWN,
            run_id=RUN_ID,
            manifest=MANIFEST,
            charter=new_charter(OWN, RUN_ID, MANIFEST.to_json()),
            leader=OWN.node_id,
        )
        self.counter = CreditCounter(self.ledger, part, "otter", self._note)

    def _note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    def commit(self, number: int) -> None:
        self.counter.spent(device_s=1.5, sent_bytes=100, received_bytes=10)
        work = {OWN.node_id: number, STRANGER: 7}
        self.counter.count(CountWork(1, tuple(sorted(work.items()))))


async def test_only_own_work_counts_and_is_kept_at_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.counter:
        bench.commit(3)
        bench.commit(0)
    (row,) = read_credit(tmp_path).runs.values()
    assert (row.run_name, row.node_name) == ("tiny", "otter")
    assert row.credit.num_microbatches == 3
    assert row.credit.num_tokens == 3 * TOKENS
    assert (row.credit.device_s, row.credit.sent_bytes, row.credit.received_bytes) == (3.0, 200, 20)
    assert bench.counter.describe() == {
        "num_runs": 1,
        "num_microbatches": 3,
        "num_tokens": 3 * TOKENS,
        "device_s": 3.0,
        "sent_bytes": 200,
        "received_bytes": 20,
    }
    assert not bench.notes


async def test_a_damaged_ledger_is_told_and_kept(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    bench = Bench(tmp_path)
    async with bench.counter:
        bench.commit(3)
    ((event, fields),) = bench.notes
    assert event == "credit.damaged"
    assert (tmp_path / fields["file"]).read_text() == "{"
    assert fields["reason"]
    assert read_credit(tmp_path).total.num_microbatches == 3


async def test_a_full_disk_is_told_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    save = CreditLedger.save

    def full(_: CreditLedger) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CreditLedger, "save", full)
    async with bench.counter:
        bench.commit(3)
        await cast("Any", bench.counter)._save()
    assert [event for event, _ in bench.notes] == ["credit.unkept"]
    # The ledger outlives the node, whose successor finds room again.
    monkeypatch.setattr(CreditLedger, "save", save)
    async with bench.counter:
        bench.commit(2)
    assert read_credit(tmp_path).total.num_microbatches == 5


def test_other_members_do_not_see_what_a_host_has_done_elsewhere() -> None:
    told = for_members({"credit": {"num_runs": 2}, "contributed": {}, "join_string": "secret"})
    assert told["credit"] is None
    assert told["contributed"] == {}

"""A journal on a disk takes whole lines, stays bounded, and gives back what it holds."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import DataError
from decod.insight.round_files import read_records
from decod.journal import journal_file
from decod.journal.host_sampler import HostSampler
from decod.journal.journal import TakeNote
from decod.journal.journal_file import JournalFile, KeptJournal, kept_events
from decod.journal.records import HostRow, Mode, RoundRow, line_of
from tests.support.noted import noted
from tests.waiting import wait_until


def row(number: int = 1, **columns: object) -> RoundRow:
    return RoundRow(
        mode=Mode.OPTIMIZER,
        time_s=1000.0 + number,
        run="run",
        peer="peer",
        name="ant",
        round=number,
        round_s=1.5,
        **columns,  # type: ignore[arg-type]
    )


def silent(event: str, **fields: object) -> None:
    """Note nothing."""


def rounds_in(folder: Path) -> list[int]:
    try:
        return [each.round for each in read_records([folder]).rounds]
    except DataError:
        return []  # There is none yet.


def kept(folder: Path, note: TakeNote = silent) -> KeptJournal:
    return KeptJournal(folder, "run", "peer", "ant", lambda: (os.getpid(),), note)


def keep(folder: Path, *rows: RoundRow, note: TakeNote = silent) -> None:
    """Let a node record some rows, and end."""

    async def run() -> None:
        async with kept(folder, note) as journal:
            for each in rows:
                journal.add(each)

    asyncio.run(run())


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [row(1, loss=0.25, local_updates=True, compression="int8"), row(2, data_s=0.125)]
    keep(tmp_path / "journal", *rows)
    assert read_records([tmp_path]).rounds == rows


def test_events_that_outlive_a_daemon_come_back_in_their_order(tmp_path: Path) -> None:
    """Of another run, none does; and a line that somebody has spoilt is left out."""
    committed = {"iteration": "e1:7.1", "loss": 2.5, "num_tokens": 10, "gradient_norm": None}
    entries = [
        noted("step.committed", committed, 5.0),
        noted("run.returned", {"iteration": 3, "reason": "a stage was lost"}, 6.0),
    ]

    async def run() -> None:
        async with kept(tmp_path) as journal:
            journal.take(entries[0])
            journal.take(noted("member.lost", {"peer": "a"}, 5.5))
            journal.add(row())
            journal.take(entries[1])

    asyncio.run(run())
    with JournalFile(tmp_path).path().open("ab") as file:
        file.write(
            b'{"version":1,"kind":"event","event":"run.returned","fields":{"iteration":[]}}\n'
        )
    assert list(kept_events(tmp_path, "run")) == entries
    assert not list(kept_events(tmp_path, "another"))
    assert read_records([tmp_path]).rounds == [row()]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_files_stay_bounded_and_lose_the_oldest_rows(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    file = JournalFile(folder, size_max_bytes=500, num_files=3)
    lines = [b"%04d" % number + b"x" * length + b"\n" for number, length in enumerate(lengths)]
    for line in lines:
        file.add([line])
    file.close()
    paths = [file.path(age) for age in (2, 1, 0) if file.path(age).exists()]
    kept = b"".join(path.read_bytes() for path in paths)
    assert all(path.stat().st_size <= 500 for path in paths)
    assert len(list(folder.iterdir())) == len(paths)
    assert b"".join(lines).endswith(kept)
    assert lines[-1] in kept


def test_a_line_that_was_torn_by_a_power_loss_spoils_no_other(tmp_path: Path) -> None:
    file = JournalFile(tmp_path)
    file.add([line_of(row(1))])
    file.close()
    with file.path().open("ab") as torn:
        torn.write(line_of(row(2))[:40])
    file = JournalFile(tmp_path)
    file.add([line_of(row(3))])
    file.close()
    entries = read_records([tmp_path])
    assert [each.round for each in entries.rounds] == [1, 3]
    assert entries.num_problems == 1
    assert "line 2" in entries.problems[0]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_another_kind_of_file_is_no_place_for_rows(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    told = list[str]()
    make(JournalFile(tmp_path).path())
    keep(tmp_path, row(), note=lambda event, **_: told.append(event))
    assert told == ["metrics.unkept"]
    assert not (tmp_path / "elsewhere").exists()


def test_the_host_is_sampled_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "SAMPLE_INTERVAL_S", 0.01)

    async def run() -> None:
        async with kept(tmp_path) as journal:
            journal.add(row())
            await wait_until(
                lambda: rounds_in(tmp_path) and len(read_records([tmp_path]).hosts) >= 3
            )

    asyncio.run(run())
    hosts = read_records([tmp_path]).hosts
    for host in hosts:
        assert host.cpu_logical_cores
        assert host.memory_total_bytes
        assert 0 <= (host.cpu_percent or 0) <= 100
        assert (host.process_resident_bytes or 0) > 1 << 20
        assert host.interval_s < 5


def test_a_sample_leaves_out_what_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.disk_io_counters", lambda: None)
    monkeypatch.setattr("psutil.net_io_counters", lambda: None)
    found = HostSampler("run", "peer", "ant", lambda: (2**22 + 1,)).sample()
    assert found.disk_read_bytes is None
    assert found.network_sent_bytes is None
    assert found.process_cpu_s == 0


def test_work_of_a_process_counts_from_when_it_began_to_work_for_the_peer() -> None:
    """The sampler's own process has run before the sampler was made; that does not count."""
    sampler = HostSampler("run", "peer", "ant")
    first = sampler.sample()
    assert (first.process_cpu_s or 0) < 1.0


def test_all_rows_of_a_kind_have_the_same_columns() -> None:
    host = HostRow(time_s=1.0, run="run", peer="peer", name="ant", interval_s=10.0)
    for few, many in ((row(), row(loss=1.0, stage=2)), (host, HostSampler("r", "p", "n").sample())):
        names = [line_of(each).count(b'":') for each in (few, many)]
        assert names[0] == names[1]


def test_pandas_reads_a_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    keep(tmp_path, row(1, data_s=0.5), row(2))
    frame = pandas.read_json(tmp_path / "journal.jsonl", lines=True)
    assert list(frame["round"]) == [1, 2]
    assert frame["data_s"][0] == 0.5


def test_an_event_comes_back_whatever_its_fields_hold(tmp_path: Path) -> None:
    """Otherwise a restarted daemon would show iterations that the run has taken back."""
    fields = {"iteration": 3, "reason": "so many words " * 100, "loss": float("nan"), "of": (1, 2)}

    async def run() -> None:
        async with kept(tmp_path) as journal:
            journal.take(noted("run.returned", fields, 6.0))

    asyncio.run(run())
    (entry,) = kept_events(tmp_path, "run")
    assert (entry.event, entry.fields["iteration"], entry.fields["loss"]) == (
        "run.returned",
        3,
        None,
    )
    assert len(entry.fields["reason"]) <= 200

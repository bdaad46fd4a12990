"""A metrics file takes whole lines, stays bounded, and never disturbs its owner."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import DataError
from decod.insight.round_files import read_records
from decod.journal.host_sampler import HostSampler
from decod.journal.recorder import Recorder, RotatedFile
from decod.journal.records import HostRow, Mode, RoundRow, line_of
from tests.support.polling import wait_for


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


def rounds_in(folder: Path) -> list[int]:
    try:
        return [each.round for each in read_records([folder]).rounds]
    except DataError:
        return []  # There is none yet.


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [row(1, loss=0.25, local_updates=True, compression="int8"), row(2, data_s=0.125)]
    with Recorder(RotatedFile(tmp_path / "metrics")) as recorder:
        for each in rows:
            recorder.record(each)
    assert read_records([tmp_path]).rounds == rows


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_files_stay_bounded_and_lose_the_oldest_rows(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    file = RotatedFile(folder, size_max_bytes=500, num_files=3)
    lines = [b"%04d" % number + b"x" * length + b"\n" for number, length in enumerate(lengths)]
    for line in lines:
        file.add(line)
    file.close()
    paths = [file.path(age) for age in (2, 1, 0) if file.path(age).exists()]
    kept = b"".join(path.read_bytes() for path in paths)
    assert all(path.stat().st_size <= 500 for path in paths)
    assert len(list(folder.iterdir())) == len(paths)
    assert b"".join(lines).endswith(kept)
    assert lines[-1] in kept


def test_a_line_that_was_torn_by_a_power_loss_spoils_no_other(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path)
    file.add(line_of(row(1)))
    file.close()
    with file.path().open("ab") as torn:
        torn.write(line_of(row(2))[:40])
    file = RotatedFile(tmp_path)
    file.add(line_of(row(3)))
    file.close()
    records = read_records([tmp_path])
    assert [each.round for each in records.rounds] == [1, 3]
    assert records.num_problems == 1
    assert "line 2" in records.problems[0]


def test_a_full_disk_is_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written of the failed line is cut off."""
    full, write, told = threading.Event(), os.write, list[str]()

    def write_some(descriptor: int, data: bytes) -> int:
        if full.is_set() and len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-20] if full.is_set() else data)

    monkeypatch.setattr(os, "write", write_some)
    with Recorder(RotatedFile(tmp_path), tell=told.append) as recorder:

        def record(number: int, until: Callable[[], bool]) -> None:
            recorder.record(row(number))
            wait_for(until, f"row {number}", timeout_s=10.0)

        record(1, lambda: rounds_in(tmp_path) == [1])
        full.set()
        record(2, lambda: recorder.num_lost == 1)
        record(3, lambda: recorder.num_lost == 2)
        assert told == ["No space left on device"]
        full.clear()
        record(4, lambda: rounds_in(tmp_path) == [1, 4])
    assert read_records([tmp_path]).num_problems == 0
    assert len(told) == 1


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    write = os.write

    def write_late(descriptor: int, data: bytes) -> int:
        hangs.wait(30.0)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_late)
    with Recorder(RotatedFile(tmp_path)) as recorder:
        for number in range(1, 1001):
            recorder.record(row(number))
        assert recorder.num_lost >= 700
        hangs.set()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_another_kind_of_file_is_no_place_for_rows(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    file, told = RotatedFile(tmp_path), list[str]()
    make(file.path())
    with Recorder(file, tell=told.append) as recorder:
        recorder.record(row())
    assert len(told) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_the_host_is_sampled_again_and_again(tmp_path: Path) -> None:
    sampler = HostSampler("run", "peer", "ant")
    file = RotatedFile(tmp_path)
    with Recorder(file, sampler.sample, interval_s=0.01) as recorder:
        recorder.record(row())
        wait_for(
            lambda: rounds_in(tmp_path) and len(read_records([tmp_path]).hosts) >= 3,
            "three samples",
            timeout_s=10.0,
        )
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
    with Recorder(RotatedFile(tmp_path)) as recorder:
        recorder.record(row(1, data_s=0.5))
        recorder.record(row(2))
    frame = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert list(frame["round"]) == [1, 2]
    assert frame["data_s"][0] == 0.5

"""Parts, engines and object stores: the bytes are those of one process that was never disturbed."""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from decod.data import encoding
from decod.data import prepare as preparation
from decod.data.encoding import PartResult, PrepareJournal
from decod.data.engine import Engine, EngineTask, dask, processes, run_tasks
from decod.data.index import read_index
from decod.data.prepare import PrepareConfig, prepare, write_corpus
from decod.data.source_files import find_files
from decod.data.sources import BadRecord, read_pieces, whole
from decod.data.tokenizer import load_tokenizer
from decod.errors import DataError, HardwareError, NetworkError

CONFIG = PrepareConfig(shard_tokens=5000)
SLICE_BYTES = 700


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(seed: int, num: int) -> list[str]:
    draw = random.Random(seed)
    alphabet = "abcde  \n€"
    return ["".join(draw.choices(alphabet, k=draw.randint(0, 300))) for _ in range(num)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of every kind, some larger than a part."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "source"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" * (1 + i % 2) for i, text in enumerate(texts(1, 60))]
    (folder / "a.jsonl").write_text("\ufeff" + "".join(lines), encoding="utf-8")
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    table = pa.table({"text": texts(2, 90)})
    pq.write_table(table, folder / "c.parquet", row_group_size=7, compression="none")
    (folder / "d.txt").write_text("".join(texts(3, 40)))
    for i in range(20):
        (folder / f"e{i:02d}.txt").write_text("small " * i)
    return folder


@pytest.fixture
def expected(tmp_path: Path, source: Path) -> dict[str, bytes]:
    """What one process makes of whole files, in one go."""
    pieces = (
        p for file in find_files([source]) for p in read_pieces(whole(file), text_field="text")
    )
    write_corpus(tmp_path / "expected", pieces, load_tokenizer("bytes"), CONFIG)
    return contents(tmp_path / "expected")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (encoding, preparation):
        monkeypatch.setattr(module, "PART_SIZE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(encoding.cut_file, "__defaults__", (SLICE_BYTES,))
    monkeypatch.setattr(encoding.group, "__defaults__", (SLICE_BYTES,))
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


class Reluctant(Executor):
    """Does a task only when its result is asked for, the latest first, and dies after some."""

    def __init__(self, num_max: int = 10**9) -> None:
        self.num_left = num_max
        self.num_parts = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.num_left == 0:
            raise KeyboardInterrupt
        self.num_left -= 1
        self.num_parts += args[0] is encoding.encode_part
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def engine_of(executor: Executor) -> Engine:
    return Engine(executor, lambda: 3)


def test_cut_corpus_has_the_bytes_of_a_whole_one(
    tmp_path: Path, source: Path, expected: dict[str, bytes]
) -> None:
    kinds = {Path(f.name).name: len(encoding.cut_file(f)) for f in find_files([source])}
    assert min(kinds["a.jsonl"], kinds["c.parquet"]) > 3
    assert kinds["b.jsonl.zst"] == kinds["e19.txt"] == 1
    prepare(tmp_path / "out", [source], CONFIG)
    assert contents(tmp_path / "out") == expected


def test_slices_of_text_give_the_pieces_of_the_whole(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a piece that ends a line is followed by a long line with an early space."""
    monkeypatch.setattr("decod.data.sources.PIECE_SIZE_MAX_CHARS", 20)
    monkeypatch.setattr("decod.data.sources.CONTEXT_SIZE_CHARS", 7)
    draw = random.Random(5)
    for _ in range(50):
        text = "".join(draw.choices("aaaaaaaa \n€", k=draw.randint(1, 400)))
        (tmp_path / "a.txt").write_text(text)
        [file] = find_files([tmp_path / "a.txt"])
        cut = encoding.cut_file(file, draw.randint(10, 60))
        assert sum(each.size_bytes for each in cut) == file.size_bytes
        pieces = [piece for each in cut for piece in read_pieces(each, text_field="")]
        assert pieces == list(read_pieces(whole(file), text_field=""))


@pytest.mark.parametrize("line", [1, 30, 61])
def test_error_in_a_slice_names_the_line_of_the_file(tmp_path: Path, line: int) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "some text"}\n'] * 61
    lines[line - 1] = "{}\n"
    path.write_text("".join(lines))
    [file] = find_files([path])
    cut = encoding.cut_file(file, 100)
    assert len(cut) > 10
    pieces = (piece for each in cut for piece in read_pieces(each, text_field="text"))
    with pytest.raises(DataError, match=rf"a\.jsonl, line {line} cannot be used"):
        list(pieces)


def test_interrupted_preparation_goes_on_at_every_point(
    tmp_path: Path, source: Path, expected: dict[str, bytes]
) -> None:
    whole_run = Reluctant()
    prepare(tmp_path / "whole", [source], CONFIG, engine=engine_of(whole_run))
    num_tasks = 10**9 - whole_run.num_left
    assert contents(tmp_path / "whole") == expected
    for num_max in range(0, num_tasks, 3):
        out, rest = tmp_path / f"out{num_max}", Reluctant()
        first = Reluctant(num_max)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, [source], CONFIG, engine=engine_of(first))
        prepare(out, [source], CONFIG, engine=engine_of(rest))
        assert contents(out) == expected
        # Results that came in before the kill are not asked for again.
        assert first.num_parts + rest.num_parts <= whole_run.num_parts + 6


def test_bad_records_are_skipped_alike_wherever_the_work_is_done(
    tmp_path: Path, source: Path, expected: dict[str, bytes]
) -> None:
    """Also if a bad record has ended the command before, and after kills."""
    lines = (source / "a.jsonl").read_text().splitlines(keepends=True)
    lines.insert(90, "{\n")
    lines.insert(30, '{"text": null}\n')
    (source / "a.jsonl").write_text("".join(lines))
    (source / "d2.txt").write_bytes(b"text \n" * 400 + b"\xff")
    (source / "e2.txt").write_bytes(b"MZ\0")
    config = replace(CONFIG, skip_bad=True)
    gone = prepare(tmp_path / "out", [source], config).skipped
    assert gone is not None
    assert gone.num_records == 4
    assert gone.first == (
        f"{source}/a.jsonl, line 31: 'text' is no string but NoneType",
        f"{source}/a.jsonl, line 92: it is not JSON: Expecting property name enclosed in double "
        "quotes: line 2 column 1 (char 2)",
        f"{source}/d2.txt, line 401 is not UTF-8: byte 0xff cannot stand there (invalid start "
        "byte)",
        f"{source}/e2.txt is a program: decod would train on its bytes as if they were text",
    )
    wanted = contents(tmp_path / "out")
    assert read_index(tmp_path / "out").skipped == gone
    for name in expected.keys() - {"index.json"}:
        assert wanted[name] == expected[name]
    with processes(2) as engine:
        prepare(tmp_path / "two", [source], config, engine=engine)
    assert contents(tmp_path / "two") == wanted
    (source / "d2.txt").unlink()
    (source / "e2.txt").unlink()
    prepare(tmp_path / "fewer", [source], config)
    with pytest.raises(DataError, match=r"line 31 cannot be used: .*pass --skip-bad"):
        prepare(tmp_path / "again", [source], CONFIG)
    first, rest = Reluctant(20), Reluctant()
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "again", [source], config, engine=engine_of(first))
    prepare(tmp_path / "again", [source], config, engine=engine_of(rest))
    assert contents(tmp_path / "again") == contents(tmp_path / "fewer")


def test_a_preparation_that_a_bad_record_ended_goes_on_with_skip_bad(
    tmp_path: Path, source: Path
) -> None:
    (source / "z.jsonl").write_text('{"text": null}\n')
    whole_run, rest = Reluctant(), Reluctant()
    config = replace(CONFIG, skip_bad=True)
    prepare(tmp_path / "whole", [source], config, engine=engine_of(whole_run))
    with pytest.raises(DataError, match="pass --skip-bad"):
        prepare(tmp_path / "out", [source], CONFIG)
    prepare(tmp_path / "out", [source], config, engine=engine_of(rest))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert rest.num_parts < whole_run.num_parts / 3
    # The other way round, records were left out that must not be.
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "new", [source], config, engine=engine_of(Reluctant(20)))
    with pytest.raises(DataError, match="interrupted preparation of other files, or with other"):
        prepare(tmp_path / "new", [source], CONFIG)


def test_one_more_kill_while_files_move_loses_nothing(
    tmp_path: Path, source: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace
    for num_max in range(4):
        out, left = tmp_path / f"out{num_max}", [num_max]

        def dies(self: Path, target: Path, left: list[int] = left) -> Path:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dies)
            with pytest.raises(KeyboardInterrupt):
                prepare(out, [source], CONFIG)
        assert not (out / "index.json").exists()
        prepare(out, [source], CONFIG)
        assert contents(out) == expected


def test_another_command_does_not_drop_what_was_interrupted(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(out, [source], CONFIG, engine=engine_of(Reluctant(20)))
    other = PrepareConfig(shard_tokens=100)
    with pytest.raises(DataError, match="holds an interrupted preparation of other files"):
        prepare(out, [source], other)
    prepare(out, [source], PrepareConfig(shard_tokens=100, force=True))
    assert not (out / ".preparing").exists()


def test_earlier_work_on_a_changed_file_is_not_taken_up(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(out, [source], CONFIG, engine=engine_of(Reluctant(20)))
    (source / "a.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(DataError, match="pass --force to drop it"):
        prepare(out, [source], CONFIG)


def test_file_that_changes_while_the_command_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    [file] = find_files([path])
    path.write_text("other")
    with pytest.raises(DataError, match=r"E-DAT-010 .*a\.txt has changed since the command began"):
        list(read_pieces(whole(file), text_field=""))


def test_torn_line_of_the_journal_does_not_count(tmp_path: Path) -> None:
    bad = BadRecord("a.jsonl", "it is not JSON", "line", 3, 700)
    five, eight = PartResult(num_tokens=5, num_bad=1, bad=(bad,)), PartResult(num_tokens=8)
    with PrepareJournal(tmp_path) as journal:
        journal.add_part(0, five)
        journal.add_part(1, PartResult(num_tokens=6))
    path = tmp_path / "journal.jsonl"
    for end in range(1, len(path.read_bytes()) + 1):
        torn = tmp_path / str(end)
        torn.mkdir()
        (torn / "journal.jsonl").write_bytes(path.read_bytes()[:-end])
        with PrepareJournal(torn) as journal:
            assert journal.parts in ({0: five}, {})
            journal.add_part(7, eight)
        with PrepareJournal(torn) as journal:
            assert journal.parts[7] == eight


def test_objects_of_a_store_are_read_like_files(
    tmp_path: Path, source: Path, expected: dict[str, bytes]
) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.rm("/corpus", recursive=True) if store.exists("/corpus") else None
    for path in source.iterdir():
        store.pipe(f"/corpus/{path.name}", path.read_bytes())
    store.pipe("/corpus/.hidden/x.txt", b"hidden")
    for url in ("memory://corpus", f"file://{source}"):
        out = tmp_path / url.partition(":")[0]
        prepare(out, [url], CONFIG)
        assert contents(out) == expected


def test_a_star_in_a_url_stands_for_names() -> None:
    """A shell knows no files in stores."""
    store = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("a.jsonl", "b.txt", "sub/c.jsonl", ".hid/d.jsonl", ".e.jsonl", "odd*.txt"):
        store.pipe(f"/star/{name}", b"{}")

    def found(url: str) -> list[str]:
        return [file.name.removeprefix("memory:///star/") for file in find_files([url])]

    assert found("memory://star/*.jsonl") == ["a.jsonl"]
    assert found("memory://star/**/*.jsonl") == ["a.jsonl", "sub/c.jsonl"]
    assert found("memory://star/s*") == ["sub/c.jsonl"]
    assert found("memory://star/odd*.txt") == ["odd*.txt"]
    with pytest.raises(DataError, match=r"E-DAT-010 memory://star/\*\.gz cannot be read: there is"):
        find_files(["memory://star/*.gz"])


def test_missing_object_and_unknown_store_are_refused() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(DataError, match=r"E-DAT-010 memory://nowhere cannot be read: there is no"):
        find_files(["memory://nowhere"])
    with pytest.raises(
        DataError, match="E-DAT-010 nonsense://a cannot be read: Protocol not known"
    ):
        find_files(["nonsense://a"])


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"E-DAT-014 s3://a needs .*\[objects\]"):
        find_files(["s3://a"])


@pytest.mark.processes
def test_processes_write_the_same_bytes(
    tmp_path: Path, source: Path, expected: dict[str, bytes]
) -> None:
    read: list[int] = []
    with processes(2) as engine:
        prepare(tmp_path / "out", [source], CONFIG, engine=engine, on_read=read.append)
    assert contents(tmp_path / "out") == expected
    assert sum(read) == sum(file.size_bytes for file in find_files([source]))


@pytest.mark.processes
def test_dead_worker_is_an_error_of_the_host() -> None:
    tasks = iter([EngineTask(("part", 0), os._exit, (9,))])
    with (
        pytest.raises(HardwareError, match=r"E-HW-022 a worker process has died.*it goes on where"),
        processes(1) as engine,
    ):
        list(run_tasks(engine, lambda: next(tasks, None)))


@pytest.mark.processes
def test_error_comes_back_from_a_worker_as_it_was() -> None:
    tasks = iter([EngineTask(("file", 0), find_files, (["/nowhere"],))])
    message = r"E-DAT-010 /nowhere cannot be read: No such file or directory\. Try: give files"
    with pytest.raises(DataError, match=message), processes(1) as engine:
        list(run_tasks(engine, lambda: next(tasks, None)))


def test_without_dask_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(DataError, match=r"E-DAT-014 --dask needs .*\[dask\]"):
        dask("tcp://127.0.0.1:1").__enter__()


@pytest.mark.parametrize("address", ["", "localhost", "tcp://", "tcp://a:b", "processes"])
def test_what_is_no_address_of_a_scheduler_starts_no_cluster(address: str) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(NetworkError, match=r"E-NET-040 .*no address such as tcp://"):
        dask(address).__enter__()

"""Checks that a large corpus has the same bytes whoever makes it, and whatever is killed.

    python scripts/check_large_corpus.py
    python scripts/check_large_corpus.py --megabytes 5000 --folder /data/check

Writes text of every kind and prepares it four times:

1. on one core, undisturbed
2. on all cores, undisturbed
3. on all cores, killed with SIGKILL half-way, and resumed by the same command
4. on two workers of a Dask cluster on this host: one worker is killed after a third, the command
   after two thirds, and the same command resumes

Prints times, and the memory of the command with its processes. Compares the SHA-256 of all files.
Exits with 1 if any differs.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import zstandard
from bench_data_prepare import library_documents

FILE_SIZE_BYTES = 64 * 10**6
_POLL_S = 0.02
_MEMORY_POLL_S = 0.5
_START_MAX_S = 300.0


class CheckError(Exception):
    """A preparation failed, or ended before it could be killed."""


def write_text(folder: Path, num_bytes: int) -> None:
    """Write files of every kind, with random mixtures of lines of the standard library."""
    lines = [line for text in library_documents() for line in text.splitlines(keepends=True)]
    draw = random.Random(0)  # noqa: S311  # Text, not secrets.
    for number in itertools.count():
        left = num_bytes - number * FILE_SIZE_BYTES
        if left <= 0:
            return
        documents = list(_documents(lines, draw, min(left, FILE_SIZE_BYTES)))
        path = folder / f"{number:04d}"
        records = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
        match number % 4:
            case 0:
                path.with_suffix(".jsonl").write_bytes(records)
            case 1:
                path.with_suffix(".txt").write_text("".join(documents), encoding="utf-8")
            case 2:
                _write_parquet(path.with_suffix(".parquet"), documents)
            case _:
                path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(records, level=1))


def _documents(lines: Sequence[str], draw: random.Random, num_bytes: int) -> Iterator[str]:
    while num_bytes > 0:
        start = draw.randrange(len(lines))
        text = "".join(lines[start : start + draw.randint(1, 2000)])
        num_bytes -= len(text)
        yield text


def _write_parquet(path: Path, documents: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": documents}), path, row_group_size=200)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


class Preparation:
    """A running `decod data prepare`."""

    def __init__(self, out: Path, source: Path, options: Sequence[str]) -> None:
        self._out = out
        command = ["data", "prepare", str(out), str(source), "--shard-tokens", "20000000", *options]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "decod", *command], stdout=subprocess.DEVNULL
        )
        self.memory_max_bytes = 0
        """Most memory that it had with its processes, while `wait` watched."""

    def wait(self) -> None:
        """Wait until it has ended well."""
        while self._child.poll() is None:
            self.memory_max_bytes = max(self.memory_max_bytes, _memory_bytes(self._child.pid))
            time.sleep(_MEMORY_POLL_S)
        if self._child.returncode:
            raise CheckError(f"decod data prepare ended with exit code {self._child.returncode}")

    def wait_for(self, num_lines: int) -> None:
        """Wait until its journal has so many lines."""
        while self._child.poll() is None:
            if num_lines <= self._num_lines():
                return
            time.sleep(_POLL_S)
        raise CheckError("decod data prepare ended too early: give more --megabytes")

    def kill(self) -> None:
        """Kill it as `kill -9` does."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()

    def _num_lines(self) -> int:
        journals = self._out.glob(".preparing/*/journal.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in journals)


def _memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and of those that it started."""
    try:
        command = psutil.Process(pid)
        return sum(
            process.memory_info().rss for process in [command, *command.children(recursive=True)]
        )
    # One ended meanwhile.
    except psutil.NoSuchProcess:
        return 0


@contextmanager
def dask_cluster(folder: Path, num_workers: int) -> Iterator[tuple[str, list[int]]]:
    """Lend a Dask cluster on this host: its address, and the process ids of its workers."""
    told = folder / "scheduler.json"
    shared = ["--no-dashboard", "--scheduler-file", str(told)]
    place = ["--host", "127.0.0.1", "--port", "0"]
    alone = ["--nthreads", "1", "--no-nanny", "--local-directory", str(folder)]
    children = [_python("distributed.cli.dask_scheduler", *place, *shared)]
    try:
        end_s = time.monotonic() + _START_MAX_S
        while not told.exists() or not told.read_text().rstrip().endswith("}"):
            if children[0].poll() is not None or time.monotonic() > end_s:
                raise CheckError("the Dask scheduler did not start")
            time.sleep(_POLL_S)
        worker = ["distributed.cli.dask_worker", *alone, *shared]
        workers = [_python(*worker) for _ in range(num_workers)]
        children += workers
        yield json.loads(told.read_text())["address"], [each.pid for each in workers]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _python(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def check(folder: Path, options: argparse.Namespace) -> bool:
    """Do all preparations. Return whether their bytes are equal."""
    source = folder / "text"
    source.mkdir()
    with _told("text written"):
        write_text(source, options.megabytes * 10**6)
    chosen = ["--tokenizer", options.tokenizer]
    num_parts = options.megabytes * 10**6 // 2**24

    for name, cores in ("one", ["--workers", "1"]), ("all", []):
        with _told(f"{name} of the cores, undisturbed"):
            undisturbed = Preparation(folder / name, source, [*chosen, *cores])
            undisturbed.wait()
        print(f"  at most {undisturbed.memory_max_bytes / 1e6:.0f} MB of memory", flush=True)

    with _told("killed half-way and resumed"):
        killed = Preparation(folder / "killed", source, chosen)
        killed.wait_for(num_parts // 2)
        killed.kill()
        Preparation(folder / "killed", source, chosen).wait()

    with (
        _told("Dask, a worker and the command killed"),
        dask_cluster(folder, 2) as (address, workers),
    ):
        chosen += ["--dask", address]
        first = Preparation(folder / "dask", source, chosen)
        first.wait_for(num_parts // 3)
        os.kill(workers[0], signal.SIGKILL)
        first.wait_for(2 * num_parts // 3)
        first.kill()
        Preparation(folder / "dask", source, chosen).wait()

    found = [hashes(folder / name) for name in ("one", "all", "killed", "dask")]
    print(f"{len(found[0])} files, index {found[0]['index.json']}")
    return all(each == found[0] for each in found)


@contextmanager
def _told(what: str) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument(
        "--folder", type=Path, help="an existing folder; needs the text and four corpora"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        equal = check(Path(name), options)
    print("all bytes are equal" if equal else "BYTES DIFFER")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()

"""The default corpus: there after the first call, the same after every later one."""

import fcntl
import sysconfig
import threading
from pathlib import Path

import pytest

from decod.data import corpus
from decod.data.corpus import default_corpus, library_files, open_corpus, read_library
from decod.data.dataset import Dataset
from decod.errors import DataError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library in the place of the real one."""
    folder = tmp_path / "library"
    for name, content in {
        "a.py": b"print('a')\n" * 20,
        "json/__init__.py": b"x = 1\n",
        "json/latin.py": b"# \xe9\n",
        "json/tests/test_a.py": b"no",
        "test/b.py": b"no",
        "site-packages/foreign.py": b"no",
        "_sysconfigdata_linux.py": b"no",
        "config-3.11/python-config.py": b"no",
        "notes.txt": b"no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(folder))
    return folder


def test_tests_packages_and_generated_files_are_left_out(library: Path) -> None:
    names = {path.as_posix() for path in library_files(library)}
    assert names == {"a.py", "json/__init__.py", "json/latin.py"}
    assert {piece.text for piece in read_library(library)} == {"print('a')\n" * 20, "x = 1\n"}


def test_text_is_limited(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "TEXT_SIZE_MAX_BYTES", 100)
    assert sum(len(piece.text) for piece in read_library(library)) <= 100


def test_corpus_is_prepared_once_and_found_again(library: Path, tmp_path: Path) -> None:
    done: list[int] = []
    folder = default_corpus(tmp_path / "cache", lambda num_bytes, _total: done.append(num_bytes))
    assert done == sorted(done) != []
    written = (folder / "index.json").stat().st_mtime_ns
    assert default_corpus(tmp_path / "cache") == folder
    assert (folder / "index.json").stat().st_mtime_ns == written
    with Dataset.open(folder, verify=True) as dataset:
        assert dataset.vocab_size == 257


def test_two_caches_hold_the_same_corpus(library: Path, tmp_path: Path) -> None:
    folders = [default_corpus(tmp_path / name) for name in ("one", "two")]
    assert len({Dataset.open(folder).index_sha256 for folder in folders}) == 1


def test_cut_off_corpus_is_prepared_again(library: Path, tmp_path: Path) -> None:
    folder = default_corpus(tmp_path / "cache")
    (folder / "shard-00000.bin").write_bytes(b"")
    assert default_corpus(tmp_path / "cache") == folder
    Dataset.open(folder, verify=True).close()


def test_callers_at_the_same_time_get_one_corpus(library: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(default_corpus(tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert left == [".corpus.lock", found[0].name]


def test_unusable_cache_is_an_error_with_advice(library: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"E-DAT-018 .*XDG_CACHE_HOME"):
        default_corpus(tmp_path / "cache")


def test_run_file_names_the_default_or_a_folder(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = default_corpus()
    assert folder.parent == tmp_path / "xdg" / "decod"
    assert Path(open_corpus("default").place) == folder
    assert Path(open_corpus(str(folder)).place) == folder


def test_real_library_has_enough_text_for_a_first_run() -> None:
    pieces = read_library(Path(sysconfig.get_path("stdlib")))
    num_bytes = sum(len(piece.text.encode()) for piece in pieces)
    assert 4 * 2**20 < num_bytes <= corpus.TEXT_SIZE_MAX_BYTES


def test_lock_is_held_while_the_corpus_is_prepared(library: Path, tmp_path: Path) -> None:
    """Looks from inside the preparation, where a second process would try to start its own."""
    seen: list[bool] = []

    def look(_num_bytes: int, _total: int) -> None:
        with (tmp_path / "cache" / ".corpus.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(False)
            except BlockingIOError:
                seen.append(True)

    default_corpus(tmp_path / "cache", look)
    assert seen == [True] * len(seen) != []

"""How many files a process may open, and what that is enough for."""

import errno
import resource

import pytest

from decod.daemon.open_files import FileLimit, is_exhausted, raise_limit
from decod.errors import HardwareError


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "limit"),
    [
        (256, 4096, (4096, 4096), 4096),
        (1024, 1 << 20, (1 << 20, 1 << 20), 1 << 20),
        (4096, 4096, None, 4096),
        (256, resource.RLIM_INFINITY, (1 << 20, resource.RLIM_INFINITY), 1 << 20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1 << 20),
    ],
)
def test_the_system_is_asked_for_all_that_it_gives(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    asked: tuple[int, int] | None,
    limit: int,
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert raise_limit() == FileLimit(limit)
    assert calls == ([asked] if asked else [])


def test_what_is_refused_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, limits: tuple[int, int]) -> None:
        raise ValueError(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_limit() == FileLimit(512)


def test_a_limit_that_is_too_low_for_any_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(HardwareError, match=r"E-HW-011 .* only 64 files.*ulimit -n"):
        raise_limit()


def test_files_are_set_aside_before_peers_get_theirs() -> None:
    files = FileLimit(304)
    assert files.peers_max == 26
    assert files.connections_max == 52
    told: list[dict[str, object]] = []
    files.tell_if_few(26, lambda event, **fields: told.append(fields))
    assert told == []
    files.tell_if_few(27, lambda event, **fields: told.append(fields))
    assert told[0]["reason"] == "enough for 26 other nodes, and there are 27"
    assert FileLimit(1 << 20).connections_max == 8192


def test_only_a_lack_of_files_is_called_one() -> None:
    assert is_exhausted(OSError(errno.EMFILE, "Too many open files"))
    assert not is_exhausted(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_exhausted(None)

"""What a process may use of its host, within control groups of both versions."""

import os
from pathlib import Path

import pytest

from decod import host_limits
from decod.host_limits import ControlGroups, host_free_bytes, num_processors

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    """Writes files of a group. `__` stands for a dot in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path) -> ControlGroups:
    return ControlGroups(tmp_path / "cgroup", tmp_path / "own")


@pytest.fixture
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "num_allowed_processors", lambda: 16)


def test_a_group_allows_what_it_and_those_above_it_have_left(groups: ControlGroups) -> None:
    group = groups.root / "system.slice" / "decod.service"
    groups.own.write_text("1:name=systemd:/elsewhere\n0::/system.slice/decod.service\n")
    stat = "anon 500\ninactive_file 200"
    write(group, memory__max="max", memory__current=700, memory__stat=stat)
    write(group.parent, memory__max=1000, memory__current=700, memory__stat=stat)
    assert groups.memory_rooms() == [500]
    write(group, memory__max=800)
    assert groups.memory_rooms() == [300, 500]
    write(group, memory__high=750)
    assert groups.memory_rooms() == [250, 500]
    assert host_free_bytes(groups) == 250
    assert ControlGroups(groups.root, groups.own.with_name("missing")).memory_rooms() == []


def test_version_1_limits_memory_just_the_same(groups: ControlGroups) -> None:
    groups.own.write_text("4:memory:/docker/abc\n1:cpu:/elsewhere\n0::/\n")
    memory = groups.root / "memory"
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}"
    write(
        memory / "docker" / "abc",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=2 * GIB - 1000,
        memory__stat=stat,
    )
    write(memory / "docker", memory__limit_in_bytes=8 * GIB, memory__usage_in_bytes=8 * GIB - 5_000)
    # Without a limit, the system writes the largest number of whole pages.
    write(memory, memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=9 * GIB)
    assert groups.memory_rooms() == [GIB + 1000, 5_000]
    assert host_free_bytes(groups) == 5_000


def test_a_container_sees_its_group_as_the_root_under_the_hosts_path(
    groups: ControlGroups,
) -> None:
    groups.own.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    write(groups.root / "memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    write(groups.root / "cpu,cpuacct", cpu__cfs_quota_us=150_000, cpu__cfs_period_us=50_000)
    assert groups.memory_rooms() == [GIB]
    assert groups.processors() == [3.0]


@pytest.mark.usefixtures("many_processors")
@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ("200000 100000", "max 100000", 2),
        ("max 100000", "150000 100000", 2),
        ("1600000 100000", "400000 100000", 4),
        ("20000 100000", "400000 100000", 1),
        ("6400000 100000", "max 100000", 16),
        ("max 100000", "max 100000", 16),
        ("what", "", 16),
    ],
)
def test_quotas_of_version_2_bound_the_number_of_processors(
    groups: ControlGroups, own: str, above: str, expected: int
) -> None:
    groups.own.write_text("0::/machine/node\n")
    write(groups.root / "machine" / "node", cpu__max=own)
    write(groups.root / "machine", cpu__max=above)
    assert num_processors(groups) == expected


@pytest.mark.usefixtures("many_processors")
@pytest.mark.parametrize(
    ("quota", "above", "expected"),
    [(200_000, -1, 2), (-1, 300_000, 3), (1_000_000, 50_000, 1), (-1, -1, 16)],
)
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_quotas_of_version_1_bound_it_too(
    groups: ControlGroups, mount: str, quota: int, above: int, expected: int
) -> None:
    groups.own.write_text(f"4:memory:/else\n2:{mount}:/machine/node\n0::/machine/node\n")
    for folder, each in (("machine/node", quota), ("machine", above)):
        write(groups.root / mount / folder, cpu__cfs_quota_us=each, cpu__cfs_period_us=100_000)
    assert num_processors(groups) == expected


@pytest.mark.usefixtures("many_processors")
def test_a_quota_beside_version_1_counts_too(groups: ControlGroups) -> None:
    groups.own.write_text("4:memory:/a\n0::/a\n")
    write(groups.root / "unified" / "a", cpu__max="500000 100000")
    assert num_processors(groups) == 5


def test_no_more_processors_than_the_process_may_run_on(
    groups: ControlGroups, many_processors: None
) -> None:
    assert num_processors(groups) == 16


def test_of_this_process_the_system_itself_says_it() -> None:
    assert 1 <= num_processors() <= (os.cpu_count() or 1)
    assert host_limits.host_free_bytes() > 0

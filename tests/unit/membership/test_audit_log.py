"""The audit log: what is written can be read, and whatever is altered is found."""

import json
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decod.membership.audit_log import (
    FOLDER,
    LINE_MAX_BYTES,
    AuditEvent,
    AuditLog,
    Checked,
    LogHead,
    check_log,
    find_logs,
    log_files,
    parse_line,
    read_lines,
)
from decod.membership.papers import Membership, membership_folder
from tests.support.disk import small_disk
from tests.support.members import ROOT, data_node, host_key, volunteer

NODE = data_node("writer")
OTHER = data_node("other")


def event(number: int, **details: object) -> AuditEvent:
    return AuditEvent(
        time_s=1_800_000_000.0 + number,
        event="member.admitted",
        actor=NODE.node_id,
        node=OTHER.node_id,
        address="10.0.0.7",
        details={"number": number, **details},
    )


def folder_of(state_dir: Path, member: Membership = NODE) -> Path:
    return membership_folder(state_dir, member.root) / FOLDER


def new_log(state_dir: Path, member: Membership = NODE, **sizes: int) -> AuditLog:
    return AuditLog(member, folder_of(state_dir, member), "chess", **sizes)


def written(state_dir: Path, num_events: int = 4, member: Membership = NODE) -> list[Path]:
    """Write a log of one session, with a write for each event, and return its files."""
    log = new_log(state_dir, member)
    for number in range(num_events):
        assert log.append([event(number)]) == ""
    log.close()
    return log_files(folder_of(state_dir, member))


def check(state_dir: Path, noted: LogHead | None = None, *, node: bool = True) -> Checked:
    (found,) = find_logs(state_dir)
    return check_log(found, node=NODE.node_id if node else None, noted=noted)


def broken(state_dir: Path, noted: LogHead | None = None) -> tuple[str, int, str]:
    """Return file, line and reason of the first break."""
    found = check(state_dir, noted).broken
    assert found is not None, "the log passes"
    return found.path.name, found.line, found.what


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    found = check(tmp_path)
    assert found.broken is None
    assert (found.num_files, found.num_lines, found.num_unsigned) == (1, 6, 0)
    assert (found.signer, found.is_closed, found.is_torn) == (NODE.node_id, True, False)
    lines = [parse_line(raw) for raw in read_lines(path)]
    assert [line.event.partition(".")[2] for line in lines] == [
        "opened",
        "admitted",
        "admitted",
        "admitted",
        "admitted",
        "closed",
    ]
    second = lines[2]
    assert (second.seq, second.node, second.address) == (3, OTHER.node_id, "10.0.0.7")
    assert second.details == {"number": 1}
    assert second.time.timestamp() == 1_800_000_001.0
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path)
    (path,) = written(tmp_path)
    found = check(tmp_path)
    assert (found.broken, found.num_lines, found.num_unclosed) == (None, 12, 0)
    assert parse_line(list(read_lines(path))[6]).details == {
        "run": "chess",
        "closed": True,
        "unsigned_lines": 0,
    }


# --- what somebody else may do to it ----------------------------------------------------------


def test_no_byte_can_be_altered(tmp_path: Path) -> None:
    """Whichever it is, in whichever field: the break is at its line, or at the next one."""
    (path,) = written(tmp_path, 1)
    good = path.read_bytes()
    for position in range(0, len(good), 2):
        byte, line = good[position], good.count(b"\n", 0, position) + 1
        altered = bytes([byte ^ 1 if byte != ord("\n") else ord("x")])
        path.write_bytes(good[:position] + altered + good[position + 1 :])
        found = check(tmp_path)
        at_end = position == len(good) - 1
        assert found.is_torn if at_end else found.broken, (position, good[position:][:20])
        assert at_end or (found.broken is not None and found.broken.line in (line, line + 1))


FIELDS = {
    "seq": 7,
    "time": "2020-01-01T00:00:00.000+00:00",
    "event": "token.used",
    "actor": "operator",
    "node": NODE.node_id,
    "address": "10.0.0.8",
    "details": {"number": 9},
    "previous": "1" * 64,
    "statement": "AAAA",
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_no_field_can_be_altered(tmp_path: Path, name: str, number: int) -> None:
    """Not even in the last line, since it is signed itself."""
    (path,) = written(tmp_path)
    lines = lines_of(path)
    content = json.loads(lines[number - 1]) | {name: FIELDS[name]}
    lines[number - 1] = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    assert broken(tmp_path)[1] in (number, number + 1)


Alter = Callable[[list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    ("alter", "line", "told"),
    [
        (lambda lines: lines[:2] + lines[3:], 3, "its number is 4 instead of 3"),
        (lambda lines: lines[1:], 1, "its number is 2 instead of 1"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3, "its number is 4"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4, "its number is 3 instead of 4"),
        (lambda lines: [*lines[:2], b"{}\n", *lines[2:]], 3, "other fields"),
        (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3, "it is not JSON"),
        (lambda lines: [*lines[:2], lines[2][:100] + b"\n", *lines[3:]], 3, "it is not JSON"),
        (lambda lines: [*lines[:2], lines[2][:100], *lines[3:]], 3, "it is not JSON"),
        (lambda lines: [*lines, lines[-1]], 7, "its number is 6 instead of 7"),
    ],
    ids=[
        "deleted",
        "first",
        "swapped",
        "repeated",
        "inserted",
        "empty",
        "cut",
        "joined",
        "appended",
    ],
)
def test_no_line_can_be_deleted_moved_or_added(
    tmp_path: Path, alter: Alter, line: int, told: str
) -> None:
    (path,) = written(tmp_path)
    path.write_bytes(b"".join(alter(lines_of(path))))
    name, number, what = broken(tmp_path)
    assert (name, number) == (path.name, line)
    assert told in what


def test_a_history_that_hangs_together_needs_the_nodes_key(tmp_path: Path) -> None:
    """Another data node of the run, or a volunteer, can't write it in this node's name."""
    written(tmp_path / "own")
    for member in (OTHER, volunteer("writer")):
        state_dir = tmp_path / member.role
        written(state_dir, member=member)
        name, number, what = broken(state_dir)
        assert (name, number) == ("000000000001.jsonl", 2), "the first line that is signed"
        assert "and not the node whose log this is" in what
    (path,) = log_files(folder_of(tmp_path / "own"))
    (forged,) = log_files(folder_of(tmp_path / "data"))
    lines = lines_of(path)
    # Each of these lines carries a statement that is true where it comes from.
    path.write_bytes(b"".join([*lines[:2], *lines_of(forged)[2:]]))
    assert broken(tmp_path / "own")[1] == 3


def test_a_log_of_another_run_is_none_of_this_run(tmp_path: Path) -> None:
    elsewhere = host_key("another root")
    written(tmp_path / "a", member=data_node("writer", elsewhere))
    (path,) = (tmp_path / "a").rglob("*.jsonl")
    here = folder_of(tmp_path / "b")
    here.mkdir(parents=True)
    (here / path.name).write_bytes(path.read_bytes())
    assert "is not that of a member" in broken(tmp_path / "b")[2]


def test_without_a_signature_nothing_is_proven(tmp_path: Path) -> None:
    """Whoever can hash can chain lines; the first of them is not even needed to be a forgery."""
    (path,) = written(tmp_path)
    head, lines = LogHead(), []
    for raw in read_lines(path):
        content = json.loads(raw.text) | {"previous": head.sha256}
        content.pop("statement", None)
        lines.append(json.dumps(content, separators=(",", ":")).encode())
        head = head.after(lines[-1])
    path.write_bytes(b"\n".join([*lines, b""]))
    assert "none of the lines is signed" in broken(tmp_path)[2]


def test_lines_that_somebody_adds_at_the_end_are_told_from_the_nodes_own(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    last = list(read_lines(path))[-1].text
    content = json.loads(last) | {"seq": 7, "previous": LogHead(5).after(last).sha256}
    del content["statement"]
    path.write_bytes(path.read_bytes() + json.dumps(content).encode() + b"\n")
    found = check(tmp_path)
    assert (found.broken, found.num_unsigned) == (None, 1)
    written(tmp_path)
    found = check(tmp_path)
    assert (found.broken, found.num_unsigned, found.num_taken_over) == (None, 0, 1)


def test_a_tail_that_is_cut_off_shows_only_beside_what_was_noted_before(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    noted = check(tmp_path).head
    assert noted.seq == 6
    path.write_bytes(b"".join(lines_of(path)[:4]))
    found = check(tmp_path)
    assert (found.broken, found.is_closed) == (None, False), "it could be a crash"
    name, line, what = broken(tmp_path, noted)
    assert (name, line) == (path.name, 4)
    assert "ends with line 4, and had line 6" in what
    written(tmp_path)
    assert check(tmp_path).num_unclosed == 1
    assert "line 6 was another one" in broken(tmp_path, noted)[2]


def test_a_head_that_was_noted_is_found_again(tmp_path: Path) -> None:
    written(tmp_path)
    noted = check(tmp_path).head
    written(tmp_path)
    assert check(tmp_path, noted).broken is None


def test_what_happens_to_the_file_of_a_running_node_is_noticed(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.append([event(1), event(2)])
    (path,) = log_files(folder_of(tmp_path))
    for alter, told in (
        (lambda: path.write_bytes(path.read_bytes()[:50]), "it has 50 bytes instead of"),
        (lambda: log_files(path.parent)[-1].unlink(), "No such file"),  # noqa: PLW0108 - later.
    ):
        alter()
        assert told in log.append([event(3)])
        assert log.append([event(4)]) == ""
    newest = log_files(path.parent)[-1]
    line = parse_line(next(read_lines(newest)))
    assert (line.event, line.seq) == ("audit_log.altered", 7)
    assert broken(tmp_path)[:2] == (path.name, 1)


# --- crashes and disks ------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 40, 200, -1])
def test_a_line_that_a_crash_has_torn_is_cut_off_and_told(tmp_path: Path, kept: int) -> None:
    log = new_log(tmp_path)
    log.append([event(1)])
    (path,) = log_files(folder_of(tmp_path))
    whole = path.read_bytes()
    log.append([event(2)])
    torn = path.read_bytes()[len(whole) :][:kept]
    path.write_bytes(whole + torn)
    found = check(tmp_path)
    assert (found.broken, found.is_torn, found.num_lines) == (None, True, 2)
    written(tmp_path)
    found = check(tmp_path)
    assert (found.broken, found.is_torn, found.num_unclosed) == (None, False, 1)
    opened = parse_line(list(read_lines(path))[2])
    assert opened.details == {
        "torn_bytes": len(torn),
        "run": "chess",
        "closed": False,
        "unsigned_lines": 0,
    }


def test_of_a_torn_write_the_whole_lines_stay(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.append([event(1), event(2), event(3)])
    (path,) = log_files(folder_of(tmp_path))
    path.write_bytes(b"".join(lines_of(path)[:3]) + b'{"seq"')
    written(tmp_path)
    found = check(tmp_path)
    assert (found.broken, found.num_taken_over) == (None, 3)


def test_a_file_of_which_a_crash_has_left_nothing_is_begun_again(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    for left in (b"", b'{"seq":7'):
        number = check(tmp_path).num_lines + 1
        path.with_name(f"{number:012d}.jsonl").write_bytes(left)
        assert check(tmp_path).broken is None
        written(tmp_path)
        assert (check(tmp_path).broken, log_files(path.parent)) == (None, [path])


def test_garbage_does_not_keep_a_node_from_going_on(tmp_path: Path) -> None:
    """And it is not cut off, since it shows that something happened."""
    for garbage in (b"\0" * 4096 + b"\n", b"x" * (3 * LINE_MAX_BYTES) + b"\n", b"{}\n\n"):
        state_dir = tmp_path / str(len(garbage))
        (path,) = written(state_dir)
        path.write_bytes(path.read_bytes() + garbage)
        written(state_dir)
        assert garbage in path.read_bytes()
        assert broken(state_dir)[:2] == (path.name, 7)


def test_a_full_disk_leaves_no_part_of_a_line_and_loses_nothing_later(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "node")
    with small_disk(folder, 256 << 10):
        log, ballast = new_log(tmp_path / "node"), folder / "ballast"
        log.append([event(1)])
        (path,) = log_files(folder)
        before = path.read_bytes()
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(b"x" * (1 << 20))
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                log.append([event(number, text="y" * 150) for number in range(2, 200)])
            assert path.read_bytes() == before
        ballast.unlink()
        log.append([event(2)])
        log.close()
        found = check(tmp_path / "node")
        assert (found.broken, found.num_lines, found.num_unclosed) == (None, 4, 0)


def test_an_alteration_is_not_forgotten_while_the_disk_is_full(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "node")
    with small_disk(folder, 256 << 10):
        log, ballast = new_log(tmp_path / "node"), folder / "ballast"
        log.append([event(1), event(2)])
        (path,) = log_files(folder)
        path.write_bytes(b"".join(lines_of(path)[:1]))
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(b"x" * (1 << 20))
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                log.append([event(number, text="y" * 150) for number in range(3, 200)])
        ballast.unlink()
        assert "bytes instead of" in log.append([event(3)])
        name, line, what = broken(tmp_path / "node")
        assert (name, line) == ("000000000004.jsonl", 1)
        assert "ends with line 1" in what


# --- size -------------------------------------------------------------------------------------


def test_the_chain_goes_on_over_files_and_the_oldest_are_removed(tmp_path: Path) -> None:
    log = new_log(tmp_path, file_size_max_bytes=4000, files_max=3)
    for number in range(60):
        log.append([event(number)])
        files = log_files(folder_of(tmp_path))
        assert len(files) <= 3
        assert check(tmp_path).broken is None
    log.close()
    assert all(path.stat().st_size < 6000 for path in files)
    found = check(tmp_path)
    assert found.num_files == 3
    assert found.head.seq > 60
    assert found.num_lines < 30
    noted = LogHead(5, "0" * 64)
    assert "line 5 is not kept any more" in broken(tmp_path, noted)[2]
    # What rotation has removed is not missing, but what it has not removed is.
    names = [path.name for path in files]
    files[0].unlink()
    name, line, what = broken(tmp_path)
    assert (name, line) == (names[1], 1)
    assert re.search(r"lines [0-9]+ to [0-9]+ are missing", what)


def test_a_file_in_the_middle_can_not_go_missing(tmp_path: Path) -> None:
    log = new_log(tmp_path, file_size_max_bytes=2000)
    for number in range(12):
        log.append([event(number)])
    files = log_files(folder_of(tmp_path))
    assert len(files) > 3
    files[1].unlink()
    name, line, what = broken(tmp_path)
    assert (name, line) == (files[2].name, 1)
    assert "the file before it ends with line" in what


def test_a_rotation_that_finds_no_room_is_made_up_for(tmp_path: Path) -> None:
    log = new_log(tmp_path, file_size_max_bytes=1000)
    log.append([event(1), event(2)])
    (path,) = log_files(folder_of(tmp_path))
    blocker = path.with_name(f"{check(tmp_path).head.seq + 1:012d}.jsonl")
    blocker.mkdir()
    with pytest.raises(OSError, match="exists"):
        log.append([event(3)])
    blocker.rmdir()
    log.append([event(3)])
    log.close()
    assert check(tmp_path).broken is None


# --- content ----------------------------------------------------------------------------------


def test_texts_of_peers_are_cleaned_and_join_strings_left_out(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    secret = "decod1-v-" + "a" * 52 + "-" + "s" * 32 + "-abcd@10.0.0.1:7700"
    strange = {
        "reason": "\x1b[31mred\nline",
        "remark": f"for bob: {secret} ok",
        "long": "x" * 5000,
        "nan": float("nan"),
        "huge": 10**30,
        "bytes": b"\xff",
        "nothing": None,
        'quo"te': '","statement":"AAAA"}',
    }
    log.append([replace(event(1), address="\x07", details=strange)])
    log.append([replace(event(2), details={str(n): n for n in range(100)})])
    (path,) = log_files(folder_of(tmp_path))
    assert check(tmp_path).broken is None
    text = path.read_text()
    assert "sssss" not in text
    line = parse_line(list(read_lines(path))[1])
    assert line.details["remark"] == "for bob: decod1-... ok"
    assert line.details["reason"] == "?[31mred line"
    assert len(line.details["long"]) == 200
    assert line.details["nan"] == "nan"
    assert line.address == "?"
    assert max(map(len, lines_of(path))) < LINE_MAX_BYTES


def test_the_longest_line_can_be_read(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    wide = "\U0001f600" * 200
    details = {f"{wide[:190]}{number}": wide for number in range(16)}
    log.append([replace(event(1), node=wide, address=wide, actor=wide, details=details)])
    assert check(tmp_path).broken is None


def test_a_line_without_end_takes_little_memory(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    raw = list(read_lines(path))[-1]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert (raw.ended, raw.too_long, len(raw.text), raw.end) == (
        False,
        True,
        LINE_MAX_BYTES,
        64 << 20,
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 5000,
        b"{}",
        b'{"seq":1,"seq":1}',
        b"\xff\xfe",
        b"9" * 5000,
    ],
)
def test_what_is_no_line_says_why(tmp_path: Path, text: bytes) -> None:
    (path,) = written(tmp_path)
    path.write_bytes(text + b"\n" + path.read_bytes())
    assert broken(tmp_path)[:2] == (path.name, 1)


def test_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    (path,) = written(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        find_logs(tmp_path)


def test_roots_name_the_run(tmp_path: Path) -> None:
    written(tmp_path)
    (found,) = find_logs(tmp_path)
    assert (found.root, found.run) == (ROOT.public, "chess")

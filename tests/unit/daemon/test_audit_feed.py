"""What enters the audit log, how floods are bounded, and what a failing disk changes."""

import asyncio
import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from decod.daemon import audit_feed as module
from decod.daemon.audit_feed import (
    AUDITED,
    EVENT_BURST,
    INTERRUPTED,
    OMITTED,
    PEER_BURST,
    WAITING_MAX,
    AuditFeed,
    feed_of,
)
from decod.journal.event_specs import EVENTS
from decod.membership.audit_log import (
    FOLDER,
    AuditEvent,
    AuditLine,
    AuditLog,
    check_log,
    find_logs,
    log_files,
    parse_line,
    read_lines,
)
from decod.membership.papers import Membership, membership_folder
from decod.net.door import PeerFault
from tests.support.disk import small_disk
from tests.support.members import data_node, new_data_node, volunteer
from tests.support.noted import noted
from tests.waiting import wait_until

NODE = data_node("writer")
PEER = volunteer("peer").node_id


class Bench:
    """A feed whose notes are kept, and the log that it writes."""

    def __init__(self, state_dir: Path, log: AuditLog | None = None) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.state_dir, self.folder = state_dir, membership_folder(state_dir, NODE.root) / FOLDER
        self.log = log or AuditLog(NODE, self.folder, "chess")
        self.feed = AuditFeed(self.log, NODE.node_id, self.note, retry_s=0.02)

    def note(self, event: str, **fields: object) -> None:
        self.notes.append((event, fields))

    def lines(self, event: str | None = None) -> list[AuditLine]:
        """Return the lines of one event, or of all that are not about the log itself."""
        lines = [parse_line(raw) for path in log_files(self.folder) for raw in read_lines(path)]
        return [
            line
            for line in lines
            if (line.event == event if event else not line.event.startswith("audit_log."))
        ]

    def has_begun(self, event: str) -> bool:
        """Return whether a line of an event is being written. Its end may be missing yet."""
        text = f'"{event}"'.encode()
        return self.folder.is_dir() and any(text in f.read_bytes() for f in log_files(self.folder))

    async def wait_for(self, event: str) -> None:
        await wait_until(lambda: event in [name for name, _ in self.notes])


async def test_events_that_are_named_enter_the_log_and_others_do_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.feed.take(noted("token.created", {"token": "abcd2345", "uses": 3}))
    async with bench.feed:
        bench.feed.take(noted("iteration.committed", {"iteration": 7}))
        fields = {"peer": PEER, "address": "10.0.0.7", "token": "abcd2345"}
        bench.feed.take(noted("token.used", fields))
        bench.feed.take(noted("member.admitted", fields | {"role": "relay"}))
        bench.feed.take(noted("member.banned", {"node": PEER, "reason": "it lied"}))
        bench.feed.take(noted("member.banned", {"peer": PEER, "actor": PEER, "until_s": None}))
    shown = [(line.event, line.actor, line.node, line.details) for line in bench.lines()]
    assert shown == [
        ("token.created", NODE.node_id, "", {"token": "abcd2345", "uses": 3}),
        ("token.used", PEER, PEER, {"token": "abcd2345"}),
        ("member.admitted", NODE.node_id, PEER, {"token": "abcd2345", "role": "relay"}),
        ("member.banned", "operator", PEER, {"reason": "it lied"}),
        ("member.banned", PEER, PEER, {"until_s": None}),
    ]
    assert bench.lines()[1].address == "10.0.0.7"
    (found,) = find_logs(tmp_path)
    checked = check_log(found, node=NODE.node_id)
    assert (checked.broken, checked.is_closed, bench.notes) == (None, True, [])


async def test_faults_of_callers_enter_with_node_and_address(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.feed:
        bench.feed.take_fault(PeerFault("caller.refused", PEER, "10.0.0.7", "no data node"))
        bench.feed.take_fault(PeerFault("tensor.refused", PEER, "10.0.0.7", "is not audited"))
    (line,) = bench.lines()
    assert (line.actor, line.node, line.address) == (PEER, PEER, "10.0.0.7")
    assert line.details == {"reason": "no data node"}


def test_what_is_not_yet_noted_by_anybody_is_picked_up_by_its_name() -> None:
    """Others name their events so; all the rest is registered with a text."""
    assert (
        set(AUDITED)
        - set(EVENTS)
        - {
            "member.banned",
            "member.unbanned",
            "bans.changed",
            "bans.unproven",
            "relay.lied",
            "audit.disputed",
            "audit.unsettled",
            # Counted by the server, which writes its own lines.
            "caller.refused",
            "message.malformed",
            "message.forged",
        }
        == set()
    )


async def test_data_nodes_have_a_log_and_volunteers_have_none(tmp_path: Path) -> None:
    def note(event: str, **fields: object) -> None:
        raise AssertionError(event)

    for make, expected in ((new_data_node, True), (volunteer, False)):
        member: Membership = make("somebody")
        folder, member.folder = member.folder, tmp_path
        assert (feed_of(member, "chess", note) is not None) is expected
        member.folder = folder


# --- floods -----------------------------------------------------------------------------------


async def test_a_flood_of_one_peer_takes_few_lines_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OMITTED_S", 0.05)
    bench = Bench(tmp_path)
    async with bench.feed:
        flood = PeerFault("caller.refused", PEER, "10.0.0.7", "no member")
        for _ in range(10_000):
            bench.feed.take_fault(flood)
        bench.feed.take(noted("token.refused", {"peer": PEER, "token": "t", "reason": "expired"}))
        bench.feed.take_fault(PeerFault("caller.refused", "", "10.0.0.8", "no certificate"))
        await wait_until(lambda: bench.has_begun(OMITTED))
        bench.feed.take_fault(PeerFault("caller.refused", PEER, "10.0.0.7", "again"))
    refused = [line for line in bench.lines() if line.event == "caller.refused"]
    assert [line.node for line in refused] == [PEER] * PEER_BURST + [""]
    assert len(bench.lines()) == PEER_BURST + 2, "other events and peers are not held up"
    assert [line.details for line in bench.lines(OMITTED)] == [
        {"of": "caller.refused", "count": 10_000 - PEER_BURST, PEER: 10_000 - PEER_BURST},
        {"of": "caller.refused", "count": 1, PEER: 1},
    ]


async def test_a_flood_of_many_peers_is_bounded_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(5000):
        fault = PeerFault("message.malformed", "", f"2001:db8::{number:x}", "rubbish")
        bench.feed.take_fault(fault)
    bench.feed.take(noted("member.banned", {"peer": PEER}))
    async with bench.feed:
        pass
    events = [line.event for line in bench.lines()]
    assert EVENT_BURST <= events.count("message.malformed") <= EVENT_BURST + 100
    assert events[-1] == "member.banned"
    (omitted,) = bench.lines(OMITTED)
    assert omitted.details["count"] + events.count("message.malformed") == 5000
    assert len(omitted.details) <= 16


class Hanging(AuditLog):
    """A log whose disk takes nothing until it is released."""

    released = threading.Event()

    @override
    def append(self, events: Sequence[AuditEvent]) -> str:
        assert self.released.wait(10.0)
        return super().append(events)


async def test_the_event_loop_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """What comes meanwhile is written at once, later."""
    folder = membership_folder(tmp_path, NODE.root) / FOLDER
    bench = Bench(tmp_path, log := Hanging(NODE, folder, "chess"))
    async with bench.feed:
        for number in range(50):
            bench.feed.take(noted("member.admitted", {"peer": PEER, "number": number}))
            await asyncio.sleep(0)
        assert not folder.exists()
        log.released.set()
    assert [line.details["number"] for line in bench.lines()] == list(range(50))


# --- disks ------------------------------------------------------------------------------------


async def test_with_a_full_disk_the_node_goes_on_and_the_gap_is_recorded(tmp_path: Path) -> None:
    with small_disk(membership_folder(tmp_path / "node", NODE.root) / FOLDER):
        bench = Bench(tmp_path / "node")
        ballast = bench.folder / "ballast"
        async with bench.feed:
            bench.feed.take(noted("member.admitted", {"peer": PEER, "number": 0}))
            # It waits until the feed knows that it was written.
            await wait_until(lambda: bench.lines() and not bench.feed._spool.num_waiting)
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(b"x" * (4 << 20))
            for number in range(1, WAITING_MAX + 100):
                bench.feed.take(noted("member.admitted", {"peer": PEER, "number": number}))
            await bench.wait_for("audit_log.failed")
            assert bench.notes[-1][1]["reason"] == "No space left on device"
            assert not bench.lines()[1:]
            ballast.unlink()
            await bench.wait_for("audit_log.restored")
        numbers = [line.details["number"] for line in bench.lines()]
        assert numbers == list(range(WAITING_MAX + 1))
        (gap,) = bench.lines(INTERRUPTED)
        assert gap.details["num_lost"] == 99
        assert gap.details["reason"] == "No space left on device"
        assert bench.notes[-1] == ("audit_log.restored", {"num_lost": 99})
        (found,) = find_logs(tmp_path / "node")
        checked = check_log(found)
        assert (checked.broken, checked.num_unclosed, checked.is_closed) == (None, 0, True)


class Failing(AuditLog):
    """A log whose disk never takes anything."""

    @override
    def append(self, events: Sequence[AuditEvent]) -> str:
        raise OSError(errno.EIO, "Input/output error")


async def test_a_disk_that_always_fails_does_not_keep_a_node_from_ending(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Failing(NODE, tmp_path, "chess"))
    async with bench.feed:
        bench.feed.take(noted("run.started", {"run": "chess"}))
        await bench.wait_for("audit_log.failed")
    assert bench.notes[0] == (
        "audit_log.failed",
        {"reason": "Input/output error", "num_waiting": 1, "num_lost": 0},
    )


async def test_the_operator_hears_that_somebody_has_altered_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.feed:
        bench.feed.take(noted("run.started", {"run": "chess"}))
        await wait_until(lambda: bench.folder.is_dir() and bench.lines())
        (path,) = log_files(bench.folder)
        path.write_bytes(b"")
        bench.feed.take(noted("run.finished", {"run": "chess"}))
        await bench.wait_for("audit_log.altered")
    assert "it has 0 bytes instead of" in bench.notes[0][1]["reason"]

"""The operator's requests to a running node: to leave, to pause, to resume.

Signals and the commands of the local socket come here, and go on to the core, which decides. A
command that pauses waits only for the leader's answer, and not for the next iteration, since
iterations may be long.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from decod.daemon.frontend import Command
from decod.driver.driver import CoreHandle
from decod.errors import ConfigError, DecodError, NetworkError, RejectedError
from decod.journal.journal import JournalEntry
from decod.protocol.core.events import AverageRequested, DrainRequested, PauseRequested
from decod.protocol.facts import NodeFacts
from decod.tasks import until_first

ANSWER_TIMEOUT_S = 15.0
"""How long a command waits for the leader's answer. The node goes on asking after that."""

DRAIN_TIMEOUT_MAX_S = 86_400.0

COUNT_INTERVAL_S = 10.0
"""Time between two lines on the terminal of a node that waits until it may leave."""


class OperatorRequests:
    """The operator's requests to one node, and the commands that carry them.

    Args:
        leaving: Set once this daemon is to leave.
        timeout_s: How long leaving may take, unless a request says otherwise.
        core: The node's core.
        note: Takes the name of an event, and its fields as keywords.
        leads: Whether this node leads the run.
        unkept: At the leader: says which result was not kept at the end of the run, and why.
    """

    def __init__(
        self,
        leaving: asyncio.Event,
        timeout_s: float,
        core: CoreHandle,
        *,
        note: Callable[..., None],
        leads: Callable[[], bool],
        unkept: Callable[[], str],
    ) -> None:
        self._leaving, self._timeout_s, self._core = leaving, timeout_s, core
        self._note, self._leads, self._unkept = note, leads, unkept
        self._told = False
        """The core has been told that this node is to leave."""
        self._leave_by_s = math.inf
        """When it leaves at the latest, on the event loop's clock."""
        self.ends_run = False
        """At the leader: the run is to end, even if another node could lead it."""
        self.stays = asyncio.Event()
        """At the leader: the handover has failed, so this node goes on leading."""
        self.averaged = asyncio.Event()
        """At the leader: members that step by themselves have averaged, as `average` asks."""
        self.paused = False
        """The leader has agreed that this node takes no microbatches, and hasn't taken it back."""
        self._asking = asyncio.Lock()
        self._answer: asyncio.Future[str] | None = None
        """The leader's reason for a refusal; empty if it agrees."""

    def commands(self) -> dict[str, Command]:
        """Return the commands by which requests come."""
        return {
            "drain": self._drain,
            "leaving": self._outlook,
            "pause": lambda asked: self.pause(
                paused=True, frees_device=bool(asked.get("free_device"))
            ),
            "resume": lambda _: self.pause(paused=False),
        }

    # --- leaving ------------------------------------------------------------------------------

    def leave(self, timeout_s: float | None = None) -> None:
        """Have the node leave, at the latest at the end of its timeout.

        Another call can only shorten the timeout.
        """
        if timeout_s is not None:
            shorter = min(self._timeout_s, timeout_s)
            self._timeout_s = shorter if self._leaving.is_set() else timeout_s
        self._leaving.set()
        if self._told:
            self.tell_core()

    async def wait_leaving(self) -> None:
        """Wait until the node is asked to leave."""
        await self._leaving.wait()

    def tell_core(self) -> None:
        """Tell the core to finish its work and leave."""
        now_s = asyncio.get_running_loop().time()
        self._leave_by_s = min(self._leave_by_s, now_s + self._timeout_s)
        if not self._told:
            self._told = True
            self._note("node.draining", timeout_s=self._timeout_s)
        self._core.driver.post(DrainRequested(self._timeout_s))

    async def _outlook(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say what leaving would mean now, or means while this node leaves."""
        timeout_s = _timeout_of(request)
        left_s = self._left_s() if timeout_s is None or self._told else timeout_s
        # A leader takes the time that keeping the model takes.
        return self.cost() | {"left_s": None if self._leads() else left_s}

    def _left_s(self) -> float:
        """Return for how long this node stays at most once it is asked to leave."""
        if not self._told:
            return self._timeout_s
        return max(0.0, self._leave_by_s - asyncio.get_running_loop().time())

    def cost(self) -> dict[str, Any]:
        """Return what the run loses with this node: in words, and whether it loses much.

        `stage` is the stage of which this node is the last member, if it is.
        """
        facts, leading = self._core.facts, self._core.leading
        means, stage = "", None
        if facts is None or not facts.in_view or not self._core.runs:
            return {"means": means, "stage": stage, "is_grave": False}
        own = facts.view.by_id[facts.node_id]
        if self._leads() and leading is not None:
            # Without a quorum, others may go on.
            ends = not (leading.can_hand_over or leading.lacking)
            means = ends_with(own.label) if ends else ""
        elif stage := _last_of_stage(facts):
            means = (
                f"{own.label} is the last member of stage {stage}: it waits until another host has "
                "taken the stage over. Without one the run loses the stage when this node leaves. "
                "It then goes back some iterations, or stands still until a host joins"
            )
        return {"means": means, "stage": stage, "is_grave": bool(means)}

    async def count_down(self, say: Callable[[str], None]) -> None:
        """Tell the operator's terminal what leaving means, and for how long this node waits yet.

        Begins when this node is asked to leave, and never returns. A node that others can do
        without leaves too soon to say much.
        """
        await self.wait_leaving()
        if means := self.cost()["means"]:
            say(str(means))
        while True:
            if (stage := self.cost()["stage"]) is not None:
                say(f"waiting for another member of stage {stage}: {self._left_s():.0f} s left")
            await asyncio.sleep(COUNT_INTERVAL_S)

    async def average(self) -> None:
        """At the leader, before the run ends: wait for what members have learnt by themselves.

        No longer than leaving may take.
        """
        self._note("contribution.awaited")
        self._core.driver.post(AverageRequested())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await until_first(self._core.driver.stopped, self.averaged.wait())

    async def _drain(self, request: dict[str, Any]) -> dict[str, Any]:
        timeout_s = _timeout_of(request)
        if request.get("end_run"):
            self._end_run()
        self.leave(timeout_s)
        if not self._core.started or not request.get("wait"):
            return {"draining": True}
        # Shielded: a client that goes away must not cancel the future.
        stop = await asyncio.shield(self._core.driver.stopped)
        ended = {"draining": True, "reason": stop.reason.value, "detail": stop.detail}
        unkept = self._unkept()
        return ended | ({"unkept": unkept} if unkept else {})

    def _end_run(self) -> None:
        """Note that the leader is to end the run for all nodes.

        Raises:
            RejectedError: This node does not lead, or is handing over already (E-REJ-008).
        """
        if not self._leads():
            raise RejectedError(
                "this node can't end the run",
                why="it does not lead it",
                fix="run the command at the leader, which `decod status` names; or leave "
                "--end-run out, to let this node leave",
                code="E-REJ-008",
            )
        if self._told:
            raise RejectedError(
                "this node can't end the run any more",
                why="it hands over to another data node, and leaves",
                fix="run the command at the next leader, which `decod status` will name",
                code="E-REJ-008",
            )
        self.ends_run = True

    # --- pausing ------------------------------------------------------------------------------

    @property
    def pausable(self) -> bool:
        """Whether the leader can be asked for a pause: this node is in the run, and stays."""
        facts = self._core.facts
        return facts is not None and facts.in_view and not self._leaving.is_set()

    async def pause(self, *, paused: bool, frees_device: bool = False) -> dict[str, Any]:
        """Ask the leader that this node takes no microbatches for a while, or takes them again.

        Raises:
            RejectedError: The leader refuses, or this node is not in the run (E-REJ-007).
            NetworkError: The leader has not answered yet. The node goes on asking (E-NET-024).
        """
        if not self._core.started:
            raise _refused("it has not entered the run yet", paused=paused)
        async with self._asking:
            self._answer = asyncio.get_running_loop().create_future()
            self._core.driver.post(PauseRequested(paused, frees_device))
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    refusal = await self._answer
            except TimeoutError as error:
                raise NetworkError(
                    f"the leader has not answered for {ANSWER_TIMEOUT_S:.0f} s",
                    why="it can't be reached, or is busy",
                    fix="nothing: the node goes on asking; `decod status` shows when it is done",
                    code="E-NET-024",
                ) from error
            finally:
                self._answer = None
        if refusal:
            facts = self._core.driver.facts
            raise _refused(refusal, paused=paused, lonely_stage=_lonely_stage(facts))
        facts = self._core.driver.facts
        return {"paused": paused, "capacity": facts.load.capacity}

    def take(self, entry: JournalEntry) -> None:
        """Take in an entry, which may be about these requests."""
        event, fields = entry.event, entry.fields
        if event == "learning.shared":
            self.averaged.set()
        if event == "handover.failed":
            self._told = False
            self.stays.set()
        answer = self._answer if self._answer is not None and not self._answer.done() else None
        if event == "capacity.agreed":
            self.paused = not fields["capacity"]
            if answer is not None:
                answer.set_result("")
        elif event == "capacity.refused":
            # The view tells what holds: a pause may be refused, or taken back.
            facts = self._core.facts
            self.paused = facts is not None and not facts.load.capacity
            if answer is not None:
                answer.set_result(str(fields["reason"]))


def ends_with(leader: str) -> str:
    """Return what it means that the leader of a run leaves whom nobody can follow.

    Args:
        leader: Its name.
    """
    return (
        f"{leader} is the run's only data node: the run ends for everybody when it leaves, and can "
        "only go on from a checkpoint"
    )


def _timeout_of(request: dict[str, Any]) -> float | None:
    value = request.get("timeout_s")
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= DRAIN_TIMEOUT_MAX_S:
        raise ConfigError(
            f"a time to leave of {str(value)[:40]}",
            why=f"it is a number of seconds from 0 to {DRAIN_TIMEOUT_MAX_S:.0f}",
            fix="use the decod command of the same version",
            code="E-CFG-049",
        )
    return float(value)


def _last_of_stage(facts: NodeFacts) -> int | None:
    """Return the stage that this relay serves and no other member does, or None."""
    stage = facts.own_stage
    roster = facts.view.roster(stage) if stage else ()
    return stage if [each.node_id for each in roster] == [facts.node_id] else None


def _lonely_stage(facts: NodeFacts) -> int | None:
    """Return the stage whose microbatches nobody but this relay takes, if it is so."""
    if not (facts.in_view and facts.own_stage):
        return None
    roster, own = facts.view.roster(facts.own_stage), facts.load.node_id
    others = [member for member in roster if member.capacity and member.node_id != own]
    return None if others else facts.own_stage


def _refused(reason: str, *, paused: bool, lonely_stage: int | None = None) -> DecodError:
    fix = "look at `decod status`; `decod drain` leaves the run"
    if paused and lonely_stage is not None:
        # Leaving would stop the stage as well.
        stage = lonely_stage
        fix = f"have another relay join stage {stage} first, with `decod join --stage {stage}`"
    return RejectedError(
        f"this node can't be {'paused' if paused else 'resumed'} now",
        why=reason,
        fix=fix,
        code="E-REJ-007",
    )

"""A node's life in its run, from the join string to its exit code.

    CONNECTING --its run is found, and takes it as a member--> in the run
    in the run --it is removed, a link breaks, its leader or its device is lost--> AWAY
               --it is paused, and frees its device--> PAUSED
               --the run is over, it has left, or a person is needed--> the exit code
    AWAY       --the run is found--> in the run again, as a newcomer
               --pause--> PAUSED
               --refused for a while--> an error
    PAUSED     --resume, and the run is found--> in the run again, as a newcomer
    CONNECTING, AWAY, PAUSED --a signal or `drain`--> exit code 0

In the run, it is a `PipelineNode`, with a new compute process each time, at the address that this
host has by then. Identity and state folder stay the same. A life in the run ends when a laptop
sleeps, a link breaks, an address changes, a leader is replaced, or a compute process dies.

AWAY and PAUSED, the daemon does not listen for peers, and holds no memory of the device or for
tensors. It keeps only the state folder, with identity and kept states, and the operator's socket.
PAUSED frees the device for its operator. Without its compute process a node can't keep its stage's
weights up to date, reduce or vote, so it is no member meanwhile.

A data node lives likewise: `leader_daemon` says how it connects, and how it leads.
"""

import asyncio
import copy
import gc
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any

from decod.config.node_config import NodeConfig
from decod.daemon.checkpointing import store_of
from decod.daemon.contact import find_run, let_in
from decod.daemon.demands import JoinOptions, require_stage, tell_demands
from decod.daemon.desk import Desk
from decod.daemon.host import Host, Leaving, LeftEarlyError, Say, run_until_left
from decod.daemon.member_admission import enter
from decod.daemon.node_errors import TemporaryError, exit_code_of
from decod.daemon.node_folder import KnownPeers
from decod.daemon.page.page_server import page_served
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.progress_display import ProgressDisplay, show_transfer
from decod.daemon.reachability import not_reached, reach_advice, why_unreached
from decod.daemon.run_facts import RunPart
from decod.daemon.status import RECONNECTING
from decod.daemon.succession import RECORD_TTL_S, publish_leader, seek_leader
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
    PeerError,
    RejectedError,
)
from decod.journal.logs import log_note
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.membership.certificates import peer_name
from decod.membership.identity import HostKey
from decod.membership.papers import Membership
from decod.net.address import split_address
from decod.net.ask import HelloRequest, ask_status, hello
from decod.net.channel import BANNED, REFUSED
from decod.net.dht_record import PEER
from decod.net.enrolment import WaitingError
from decod.net.interfaces import PortMapper
from decod.net.join_string import JoinString
from decod.protocol.core.context import NodeState
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.view import Reach, Role
from decod.tasks import Backoff, beside, cancelled, until_first

_log = logging.getLogger("decod")

# --- decod join ----------------------------------------------------------------------------------


def run_join(options: JoinOptions, say: Say) -> int:
    """Train until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't be found, does not take this node, or goes on without it.
    """
    return run_until_left(_run(options, say), say)


async def _run(options: JoinOptions, say: Say) -> int:
    desk, join = Desk(options.node, volunteers=True), JoinString.parse(options.join_string)
    store_of(options.node)  # One that can't be used is told before anything is fetched.
    with Leaving(say) as leaving, Host(desk.config, leaving, desk) as host:

        async def seek() -> RunPart:
            return await _enrolled(options, join, host.identity)

        async def live(part: RunPart) -> Stop:
            async with PipelineNode(desk.config, part, host, say, again=life.again) as node:
                life.begins(node)
                say(f"{node.name} joins run {part.run.name} as {node.address}")
                core = node.core
                fetched = show_transfer(
                    lambda: core.driver.transfer if core.started else None, host.terminal
                )
                async with beside(fetched):
                    stop = await take_part(node)
                # It outlives the node, and so must not hold it.
                await life.ended(node, stop, seek)
            return stop

        say = host.terminal.above(say)
        async with host.tended(), page_served(desk.config, host, say):
            entering = let_in(seek, say, join=join, host=host)
            part = await leaving.unless_asked(entering)
            tell_demands(part.run, options.stage_index, desk.config, say)
            life = Life(host, say, rejoins=options.node.rejoins)
            return await life.run(part, live)


async def _enrolled(options: JoinOptions, join: JoinString, identity: HostKey) -> RunPart:
    """Become a member if need be, find the run, and return this node's part in it."""
    state_dir = options.node.state_dir
    membership = await enter(join, Role.RELAY, state_dir, identity)
    addresses = KnownPeers(state_dir).addresses_of(join)
    contact = await find_run(addresses, membership, avoid_own=True)
    require_stage(options, contact.manifest.run)
    return replace(
        contact.part_of(membership),
        observed_address=contact.observed_address,
        stage_index=options.stage_index,
        serves=options.serves,
        duty=options.duty,
    )


# --- one life after another ----------------------------------------------------------------------


_COMES_BACK = (
    StopReason.REMOVED,
    StopReason.LEADER_LOST,
    StopReason.SUPERSEDED,
    StopReason.CRIPPLED,
)
"""Reasons of an end after which the run can be joined again."""

SETTLED_S = 60.0
"""A node that has been in the run for this long comes back soon. Others wait longer each time."""

FAILURES_MAX = 5
FAILURES_WINDOW_S = 3600.0
"""`FAILURES_MAX` compute processes may fail within this time. One more ends the daemon."""

REFUSED_S = 30.0
"""How long a run must refuse a former member until the daemon gives up. Until then, its nodes may
have lost their leader, or a stranger may answer at the address of a node that is restarting."""

REFUSED_PAUSE_S = 10.0
"""The longest pause between two looks while the run's port refuses at once: such a look costs
little, and its leader may be about to start again."""

_STATUS_TIMEOUT_S = 0.3
_FROM_LEADER = (
    "iteration",
    "loss",
    *STEP_METRIC_NAMES,
    "tokens_per_s",
    "data",
    "leader",
    "stages",
    "candidates",
)
_PAUSED_TEXT = "paused, and the device is free: `decod resume` joins the run again"


class LifeState(Enum):
    """Where a node is while it is in no run. The values are its states in `decod status`."""

    CONNECTING = "connecting"
    """It has not been in its run yet."""
    AWAY = RECONNECTING
    PAUSED = NodeState.PAUSED.value


class Life:
    """One daemon's node, in its run again and again; and what stands for it in between.

    Args:
        host: The host, which outlives the node.
        say: Takes lines for the operator's terminal.
        rejoins: Whether the node comes back by itself.
    """

    def __init__(self, host: Host, say: Say, *, rejoins: bool) -> None:
        self._host, self._leaving, self._say = host, host.leaving, say
        self._rejoins = rejoins
        self._state = LifeState.CONNECTING
        self._node: PipelineNode | None = None
        """The node while it is in the run, or on its way there."""
        self._seek: Callable[[], Awaitable[RunPart]] | None = None
        """Finds the run again."""
        self._known: dict[str, Any] = {}
        """The node's last status."""
        self._membership: Membership | None = None
        self._why = ""
        """Why the node is out of the run."""
        self._seeking = asyncio.Lock()
        self._looking: asyncio.Task[RunPart] | None = None
        self._found: asyncio.Future[RunPart] = asyncio.get_running_loop().create_future()
        """The node's part in the run that was found when the operator resumed it."""
        self._backoff = Backoff()
        self._failures_s: list[float] = []
        """When compute processes failed, within the last window."""

    async def run(self, part: RunPart, live: Callable[[RunPart], Awaitable[Stop]]) -> int:
        """Be in the run until the node does not come back; return the exit code.

        Args:
            part: The node's part in the run that was found.
            live: Takes part in it, and returns how that ended. It must call `begins` when it has a
                node, and `ended` before it closes the node.

        Raises:
            DecodError: The node could not begin at first, or it has ended in a way that needs a
                person.
        """
        while True:
            try:
                stop = await live(part)
            except (HardwareError, NetworkError) as error:
                if not self.again or self._took_part():
                    raise
                self._failed(error)
                self._why = f"{error.what}: {error.why}"
                await self._host.present(self)
            else:
                if not self._comes_back(stop):
                    return self._exit_code(stop)
                if stop.reason is StopReason.CRIPPLED:
                    self._failed(_broken(stop))
            # The node's objects refer to each other, and hold files open.
            self._node = None
            gc.collect()
            try:
                part = await self._leaving.unless_asked(self.until_found())
            except LeftEarlyError:
                self._say("left the run: it was out of it already")
                return 0

    @property
    def again(self) -> bool:
        """Whether the node was in the run before."""
        return self._state is not LifeState.CONNECTING

    @property
    def _paused(self) -> bool:
        return self._state is LifeState.PAUSED

    def begins(self, node: PipelineNode) -> None:
        """Note that the node has started."""
        self._node = node

    async def ended(
        self, node: PipelineNode, stop: Stop, seek: Callable[[], Awaitable[RunPart]]
    ) -> None:
        """Note that the node has stopped. Call it before the node is closed.

        Args:
            node: The node.
            stop: How it stopped.
            seek: Finds the run again.
        """
        if node.in_run_s >= SETTLED_S:
            self._backoff.reset()
        if not self._comes_back(stop):
            return
        self._state = LifeState.PAUSED if stop.reason is StopReason.PAUSED else LifeState.AWAY
        self._seek, self._why = seek, stop.detail
        self._found = asyncio.get_running_loop().create_future()
        self._known, self._membership = node.local_status(), node.part.membership
        await self._host.present(self)
        if self._paused:
            self._say("paused, and the device is free: decod resume joins the run again")

    def _took_part(self) -> bool:
        """Whether the latest life has started its core."""
        return self._node is not None and self._node.core.started

    def _comes_back(self, stop: Stop) -> bool:
        if self._leaving.asked.is_set():
            return False
        rejoins = self._rejoins and stop.reason in _COMES_BACK
        return rejoins or stop.reason is StopReason.PAUSED

    def _exit_code(self, stop: Stop) -> int:
        if self._leaving.asked.is_set() and stop.reason in _COMES_BACK:
            # It was asked to leave after it had stopped.
            self._say(f"left the run: {stop.detail}")
            return 0
        return exit_code_of(stop)

    def _failed(self, error: HardwareError | NetworkError) -> None:
        """Count a life that ended by a fault of this host. Network errors do not count.

        Raises:
            HardwareError: There were too many.
        """
        if isinstance(error, NetworkError):
            return
        now_s = time.monotonic()
        recent = [then_s for then_s in self._failures_s if now_s - then_s < FAILURES_WINDOW_S]
        self._failures_s = [*recent, now_s]
        if len(self._failures_s) > FAILURES_MAX:
            raise error

    # --- out of the run -----------------------------------------------------------------------

    async def until_found(self) -> RunPart:
        """Wait until the run is found and the node may join it; return its part in the run.

        Raises:
            DecodError: The run does not take this node, or this host can't join it.
        """
        if self._state is LifeState.AWAY:
            self._looking = asyncio.create_task(self._look())
        try:
            while self._looking is not None:
                ends = {self._looking, self._found}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._found.done():
                    break
                if not self._looking.cancelled():
                    return self._looking.result()
                self._looking = None
            return await self._found
        finally:
            self._found = asyncio.get_running_loop().create_future()
            if self._looking is not None:
                await cancelled(self._looking)
                self._looking = None

    async def _look(self) -> RunPart:
        """Look for the run until it is found."""
        refused_s: float | None = None
        longest_s = math.inf
        now_s = asyncio.get_running_loop().time
        while True:
            pause_s = min(self._backoff.next_s(), longest_s)
            self._say(f"out of the run ({self._why}): looking for it in {pause_s:.0f} s")
            log_note(_log, "node.reconnecting", {"reason": self._why, "pause_s": round(pause_s, 1)})
            await asyncio.sleep(pause_s)
            try:
                async with self._seeking:
                    return await self._find()
            except WaitingError as error:
                # Who does not ask for a while is no longer listed.
                refused_s, longest_s = None, REFUSED_PAUSE_S
                self._why = f"{error.what}: {error.why}"
            except RejectedError as error:
                refused_s = now_s() if refused_s is None else refused_s
                if now_s() - refused_s >= REFUSED_S:
                    raise
                self._why = f"{error.what}: {error.why}"
            except (NetworkError, PeerError, TemporaryError) as error:
                refused_s = None
                longest_s = REFUSED_PAUSE_S if error.why == REFUSED else math.inf
                self._why = f"{error.what}: {error.why}"

    async def _find(self) -> RunPart:
        assert self._seek is not None, "it was in the run"
        return await self._seek()

    # --- commands -----------------------------------------------------------------------------

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the operator."""
        command = str(request.get("command"))
        answers = {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
        }
        if command not in answers:
            state = "paused with its device free" if self._paused else RECONNECTING
            raise ConfigError(
                f"{command[:40]!r} is not answered while this node is {state}",
                why="it is in no run, and has no compute process",
                fix="use `decod resume` first, or ask another node",
                code="E-RUN-008",
            )
        return await answers[command]()

    def describe(self) -> str:
        """Return one line on the node's state."""
        state = self._state.value
        return state if self._paused else f"{state}: {self._why}"

    @property
    def healthy(self) -> bool:
        """Always True: there is no core that could be late."""
        return True

    async def _pause(self) -> dict[str, Any]:
        self._state = LifeState.PAUSED
        if self._looking is not None:
            self._looking.cancel()
        return {"paused": True, "capacity": 0, "device_free": True}

    async def _resume(self) -> dict[str, Any]:
        async with self._seeking:
            if not self._found.done():
                found = await self._find()
                if not self._found.done():
                    self._found.set_result(found)
        return {"paused": False, "capacity": 0, "device_free": True}

    async def _drain(self) -> dict[str, Any]:
        self._leaving.asked.set()
        how = "paused, and in no run" if self._paused else "out of the run already"
        return {"draining": True, "reason": "drained", "detail": f"it was {how}"}

    async def _status(self) -> dict[str, Any]:
        """Return the node's last status, with the leader's view of the run if it answers."""
        status = copy.deepcopy(self._known)
        message = _PAUSED_TEXT if self._paused else f"out of the run: {self._why}"
        assert self._membership is not None, "it was in the run"
        with suppress(DecodError, ValueError, RecursionError):
            address, run_id = status["leader"]["address"], status["run_id"]
            try:
                text = await ask_status(
                    address, run_id, self._membership, timeout_s=_STATUS_TIMEOUT_S
                )
            except RejectedError as error:
                if error.code == BANNED:
                    message = f"{error.what}: {error.why}"
                raise
            told = json.loads(text)
            if isinstance(told, dict) and told.get("schema_version") == status["schema_version"]:
                of_run = {key: told[key] for key in _FROM_LEADER if key in told}
                right = {k: v for k, v in of_run.items() if isinstance(v, type(status[k]))}
                status.update(right)
        state = self._state.value
        status["node"] |= {"state": state, "capacity": 0, "stage_index": None, "device_free": True}
        return status | {
            "state": state,
            "run_state": state,
            "flows": [],
            "syncing": None,
            "message": message,
        }


def _broken(stop: Stop) -> HardwareError:
    return HardwareError(
        f"the compute process has failed {FAILURES_MAX + 1} times within an hour",
        why=stop.detail,
        fix="read compute.log in the state folder; most often it is memory: lower --capacity",
        code="E-HW-014",
    )


# --- in the run ----------------------------------------------------------------------------------


_HELD_TIMEOUT_S = 15.0
"""How long the leader may take to know of the call that a node keeps open."""

Lead = Callable[[], Awaitable[Stop]]
"""The work of a node that has been elected, until it stops."""


async def take_part(node: PipelineNode, lead: Lead | None = None) -> Stop:
    """Train in a run that another node leads, until the run ends or this node leaves.

    Args:
        node: This node.
        lead: Called if this node is elected; None if it can't be elected.
    """

    async def begin() -> None:
        await find_reach(node, mapper)
        await node.prepare()

    # Not awaited: after much churn, the DHT names many nodes that no longer answer.
    async with PortMapper() as mapper, beside(announce(node, leads=False)):
        if not await node.unless_drained(begin()):
            return Stop(StopReason.DRAINED, "it had not begun to train")
        return await run_until_stopped(node, lead)


async def find_reach(node: PipelineNode, mapper: PortMapper) -> None:
    """Find out how others reach this node. A volunteer that nobody can dial keeps calls open.

    Args:
        node: This node.
        mapper: Asks the router to let others through, if they don't get through.

    Raises:
        NetworkError: Nobody can dial this data node, or the leader takes no open call (E-NET-013).
        RejectedError: Another host has this node's identity (E-REJ-022).
    """
    part, passes_on = node.part, node.config.passes_on
    asked = (part.membership, part.run_id, part.leader_address, node.address)
    unreached = await why_unreached(*asked)
    if unreached and await _maps_port(node, mapper):
        unreached = await why_unreached(*asked)
    if part.role is Role.DATA:
        if unreached:
            raise not_reached(part.leader_address, node.address, unreached)
        node.use_reach(reach_of_data_node(node.config))
        return
    if not unreached:
        node.use_reach(Reach.PASSES_ON if passes_on else Reach.DIALLED)
        return
    node.use_reach(Reach.OUTBOUND)
    node.note("node.outbound", address=node.address, reason=unreached)
    dialling = node.gateway.dialling
    dialling.set_address(part.leader, part.leader_address)
    if not await dialling.await_held(part.leader, _HELD_TIMEOUT_S):
        raise not_reached(part.leader_address, node.address, unreached)
    node.say(
        f"nobody can dial this node at {node.address}, so it keeps its connections open itself"
    )
    advice = reach_advice(node.address, part.leader_address)
    node.say(f"it trains all the same; to be dialled, {advice}")


async def _maps_port(node: PipelineNode, mapper: PortMapper) -> bool:
    """Have the router pass the port on, if that is wanted; return whether it does."""
    port = split_address(node.address)[1]
    if not node.config.maps_port or node.config.advertise is not None:
        return False
    reason = await mapper.map(port)
    if reason:
        node.note("port.unmapped", port=port, reason=reason)
        return False
    node.note("port.mapped", port=port)
    return True


def reach_of_data_node(config: NodeConfig) -> Reach:
    """Return how others reach a data node: they dial it, and it passes on unless told otherwise."""
    return Reach.DIALLED if config.passes_on is False else Reach.PASSES_ON


async def announce(node: PipelineNode, *, leads: bool) -> None:
    """Introduce this node to the leader, enter the DHT, and publish this node's address there."""
    dht, contacts = node.dht, node.part.contacts
    if not leads:
        await _introduce(node)
    dialling = node.gateway.dialling
    await dialling.known.wait()
    if contacts:
        await dht.bootstrap(contacts)
    if dialling.reach is not Reach.OUTBOUND:
        await dht.publish(PEER, {"address": node.address}, ttl_s=RECORD_TTL_S)
    if leads:
        await publish_leader(dht, node.contacts)


async def _introduce(node: PipelineNode) -> None:
    """Tell the leader that this node is getting ready, to be told if the run ends meanwhile."""
    part = node.part
    request = HelloRequest(run_id=part.run_id, sender=node.node_id, sender_address=node.address)
    with suppress(DecodError):
        # Others may have another clock, or lie about it.
        name = peer_name(part.leader)
        info = await hello(part.leader_address, request, part.membership, name=name)
        node.note("node.introduced", address=part.leader_address)
        if off_s := part.clock.compare(info.clock_s):
            way = "ahead of" if off_s > 0 else "behind"
            node.note("clock.differs", seconds=round(abs(off_s)), way=way)


async def run_until_stopped(node: PipelineNode, lead: Lead | None = None) -> Stop:
    """Wait until the core has stopped. If the daemon is asked to leave, tell the core to leave."""
    core, requests, gateway = node.core, node.requests, node.gateway
    display = ProgressDisplay(node.progress, node.say, node.name)
    try:
        seeking = seek_leader(node.dht, core, gateway.client.set_address)
        async with beside(seeking, requests.count_down(node.say)):
            stopped, elected = core.driver.stopped, node.elected
            await until_first(requests.wait_leaving(), stopped, elected.wait())
            if elected.is_set() and lead is not None and core.runs:
                display.stop()
                return await lead()
            if core.runs:
                requests.tell_core()
            stop = await node.wait_stopped()
    finally:
        display.show_last()
    if stop.reason is StopReason.DRAINED:
        node.say(f"left the run: {stop.detail}")
    elif stop.reason is StopReason.FINISHED:
        node.say(f"the run has ended: {stop.detail}")
    return stop

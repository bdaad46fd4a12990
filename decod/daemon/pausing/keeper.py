"""Keeps a daemon's node paused while its operator, its schedule or a rule wants that.

The operator's own pause stands beside the causes and wins: no rule ends it, and it outlasts lives
of the node. `decod resume` ends it, and only it: a node stays paused while a cause holds.

The leader may refuse a pause that would stop a stage. Then it is asked again from time to time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.config.schedule import DEFAULT_PAUSE_RULES, PauseRule, WorkHours
from decod.daemon.device_owner import HostDevice
from decod.daemon.pausing.pause_probes import (
    Circumstances,
    NvidiaMl,
    OwnGpu,
    PauseCause,
    PauseRules,
    Probe,
    Sighting,
    make_probes,
)
from decod.errors import DecodError, NetworkError
from decod.journal.logs import log_note
from decod.tasks import in_thread

_log = logging.getLogger("decod")

LOOK_S = 2.0
"""Time between two looks at the host."""
PROBE_TIMEOUT_S = 2.0
"""A probe that takes longer can't tell. Together with `LOOK_S` it is less than five seconds."""
ASK_AGAIN_S = 30.0
"""Time until a leader that has refused, or not answered, is asked again."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Pausable(Protocol):
    """A node in one of its lives."""

    @property
    def pausable(self) -> bool:
        """Whether it is in the run, and stays."""

    @property
    def paused(self) -> bool:
        """Whether it takes no microbatches, or none after this iteration."""

    async def pause(self, *, paused: bool) -> object:
        """Ask the leader for a pause, or for its end. Raises DecodError."""


class Pausing:
    """The pauses of one daemon's node.

    Args:
        config: This host's choices.
        probes: Find out about the host; if absent, this host's own.
        clock: Returns the time in seconds of the Unix epoch, for the schedule.
    """

    def __init__(
        self,
        config: NodeConfig,
        probes: Mapping[PauseRule, Probe] | None = None,
        clock: Callable[[], float] = wall_clock,
    ) -> None:
        self._clock = clock
        self._probes = probes or make_probes(self._gpus, NvidiaMl(), clock)
        self._rules = PauseRules()
        self._schedule = WorkHours()
        self._active: tuple[PauseRule, ...] = ()
        self._by_person = False
        self._causes: tuple[PauseCause, ...] = ()
        self._unknown: dict[PauseRule, str] = {}
        """Why rules can't be known, each said once."""
        self._looking: dict[PauseRule, asyncio.Future[Sighting]] = {}
        """Probes that run, perhaps for longer than they may."""
        self._node: Pausable | None = None
        self._device: HostDevice | None = None
        self._refusal = ""
        self._wanted = False
        self._ask_s = 0.0
        """When the leader may be asked again."""
        self._asking = asyncio.Lock()
        self._changed = asyncio.Event()
        self.use(config)

    def use(self, config: NodeConfig) -> None:
        """Go by the schedule and the rules of a configuration from now on."""
        self._schedule = config.schedule or WorkHours()
        rules = DEFAULT_PAUSE_RULES if config.pause_when is None else config.pause_when
        self._active = rules
        self._unknown = {rule: why for rule, why in self._unknown.items() if rule in rules}
        self._changed.set()

    @contextmanager
    def of(self, node: Pausable, device: HostDevice) -> Iterator[None]:
        """Pause and resume this node, which computes on this device, while the context lasts."""
        self._node, self._device, self._ask_s = node, device, 0.0
        try:
            yield
        finally:
            self._node = self._device = None

    def _gpus(self) -> Sequence[OwnGpu]:
        return () if self._device is None else self._device.gpus

    # --- the operator -------------------------------------------------------------------------

    async def person_pauses(self, request: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """Answer `decod pause`. `answer` carries it out."""
        async with self._asking:
            try:
                result = await answer(request)
            except NetworkError:
                # The node goes on asking.
                self._by_person = True
                raise
            self._by_person = True
        return result

    async def person_resumes(self, request: dict[str, Any], answer: Answer) -> dict[str, Any]:
        """Answer `decod resume`. `answer` carries it out, unless a cause for a pause holds."""
        async with self._asking:
            self._by_person = False
            if self._causes and self._node is not None and self._node.paused:
                return {"paused": True, "capacity": 0, "causes": self._described()}
            return await answer(request)

    def describe(self) -> dict[str, Any]:
        """Return the part of `decod status` on pauses. Only this host's operator sees it."""
        unknown = {rule.value: why for rule, why in self._unknown.items()}
        return {
            "by_person": self._by_person,
            "causes": self._described(),
            "refusal": self._refusal,
            "unknown": unknown,
        }

    def _described(self) -> list[dict[str, Any]]:
        return [
            {
                "name": cause.name,
                "detail": cause.detail,
                "until": None if cause.until is None else cause.until.isoformat("T", "minutes"),
                "calm_s": None if cause.calm_s is None else round(cause.calm_s),
            }
            for cause in self._causes
        ]

    # --- the causes ---------------------------------------------------------------------------

    async def keep(self) -> None:
        """Look at the host and have the node pause or resume, again and again. Never returns."""
        while True:
            self._changed.clear()
            self._look_up(await self._look())
            await self._carry_out()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _look(self) -> Circumstances:
        for rule in self._active:
            # A probe that hangs is not started again.
            if rule not in self._looking:
                self._looking[rule] = in_thread(self._probes[rule])
        pending = {rule: self._looking[rule] for rule in self._active}
        if pending:
            await asyncio.wait(pending.values(), timeout=PROBE_TIMEOUT_S)
        sightings = {rule: self._sighting(rule, looked) for rule, looked in pending.items()}
        # The time zone may have changed, as it does on a journey.
        time.tzset()
        wall = datetime.fromtimestamp(self._clock(), UTC).astimezone()
        return Circumstances(wall, sightings)

    def _sighting(self, rule: PauseRule, looked: asyncio.Future[Sighting]) -> Sighting:
        """Return what a probe has found, if it has ended."""
        if not looked.done():
            return Sighting(holds=None, detail=f"the probe has not ended in {PROBE_TIMEOUT_S:g} s")
        del self._looking[rule]
        error = looked.exception()
        if error is None:
            return looked.result()
        return Sighting(holds=None, detail=str(error)[:200] or type(error).__name__)

    def _look_up(self, found: Circumstances) -> None:
        """Take in what was found: say what is not known, and decide."""
        for rule, sighting in found.sightings.items():
            if sighting.holds is not None:
                self._unknown.pop(rule, None)
            elif rule not in self._unknown:
                self._unknown[rule] = sighting.detail
                self._note("probe.failed", rule=rule.value, reason=sighting.detail)
        now_s = asyncio.get_running_loop().time()
        causes = self._rules.step(now_s, found, schedule=self._schedule, rules=self._active)
        before = {cause.name for cause in self._causes}
        for cause in causes:
            if cause.name not in before:
                self._note("pause.wanted", cause=cause.name, reason=cause.detail)
        for name in before - {cause.name for cause in causes}:
            self._note("pause.unneeded", cause=name)
        self._causes = causes

    async def _carry_out(self) -> None:
        """Have the node pause or resume, if it does not do what is wanted."""
        node, now_s = self._node, asyncio.get_running_loop().time()
        if node is None or not node.pausable or self._asking.locked():
            return
        async with self._asking:
            wanted = self._by_person or bool(self._causes)
            if wanted != self._wanted:
                self._wanted, self._ask_s = wanted, 0.0
            if node.paused == wanted:
                self._refusal = ""
            elif now_s >= self._ask_s:
                self._ask_s = now_s + ASK_AGAIN_S
                try:
                    await node.pause(paused=wanted)
                    self._refusal = ""
                except DecodError as error:
                    if error.why != self._refusal:
                        self._note("pause.refused", reason=error.why)
                    self._refusal = error.why

    def _note(self, event: str, **fields: object) -> None:
        log_note(_log, event, fields)

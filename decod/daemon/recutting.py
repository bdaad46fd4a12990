"""Another cut of the model while it trains: which one suits the members, and who asks for it.

The leader computes from what members tell it: how fast their devices are, and how much memory they
have. It recommends another cut when that would gain much. The operator asks for it, or the run file
says that the leader may. `decod.protocol.leadership.stage_recovery` does the rest.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from decod.config.needs import stage_needs
from decod.daemon.frontend import Command
from decod.daemon.known_hosts import relay_speeds
from decod.driver.driver import CoreHandle
from decod.errors import RejectedError
from decod.planner.partition import dealt
from decod.protocol.core.events import RecutRequested
from decod.protocol.core.view import Member
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import RecutPolicy, blocks_text, stage_blocks
from decod.train.checkpoint.entries import size_bytes_of, state_tensors

GAIN_MIN = 0.2
"""A cut is recommended that would make stages so much faster."""

LOOK_INTERVAL_S = 60.0
"""How often a leader looks for another cut that it may ask for by itself."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Another cut, and what it would bring."""

    cut: tuple[int, ...]
    """Blocks of each relay stage."""
    gain: float
    """By how much more microbatches the slowest stage would compute: 0.25 for a quarter."""
    moved_bytes: int
    """Size of the states of all blocks that change their stage."""


class _Stages:
    """What the leader knows of the relay stages: their speeds, and the room of their hosts.

    Args:
        run: The run.
        facts: The leading node's.
    """

    def __init__(self, run: RunConfig, facts: NodeFacts, leading: LeaderFacts) -> None:
        self._run = run
        self._rosters = facts.view.workers[1:]
        self._loads = leading.loads
        self._speeds = relay_speeds(run, facts)
        self.blocks = tuple(len(each) for each in run.stage_blocks(facts.view.cut)[1:])

    @cached_property
    def powers(self) -> list[float]:
        """Blocks that each stage computes in a second. 0: unknown."""
        return [sum(self._speeds.get(m.node_id, 0.0) for m in roster) for roster in self._rosters]

    @property
    def are_known(self) -> bool:
        """Whether the speeds of all members are known."""
        members = [member for roster in self._rosters for member in roster]
        return all(self._rosters) and all(member.node_id in self._speeds for member in members)

    def crowded(
        self, blocks: tuple[int, ...], *, trusts: bool = False
    ) -> tuple[int, Member] | None:
        """Return the first stage that would have too many blocks, from 0, and for which member.

        Args:
            blocks: Of each stage.
            trusts: Members that have not told their memory have room for anything, and not only
                for what they hold now.
        """
        run = self._run.with_blocks(blocks)
        for index, roster in enumerate(self._rosters):
            if blocks[index] <= self.blocks[index]:
                continue
            needs = stage_needs(run, index + 1)
            for member in roster:
                load = self._loads.get(member.node_id)
                memory_bytes = load.memory_bytes if load is not None else 0
                unknown = memory_bytes == 0 and trusts
                if not (unknown or needs.fits(memory_bytes, member.capacity)):
                    return index, member
        return None

    def best(self) -> tuple[int, ...] | None:
        """Return the cut with which the slowest stage is fastest. None: it is not known."""
        if not self.are_known:
            return None
        most = [math.inf] * len(self.blocks)

        def after_s(index: int, num: int) -> float:
            return num / self.powers[index] if num <= most[index] else math.inf

        while blocks := dealt(sum(self.blocks), len(self.blocks), after_s):
            crowded = self.crowded(blocks)
            if crowded is None:
                return blocks
            most[crowded[0]] = blocks[crowded[0]] - 1
        return None

    def recommended(self) -> Recommendation | None:
        """Return the best cut, if it is another."""
        best = self.best()
        if best is None or best == self.blocks:
            return None
        slowest = [
            max(num / power for num, power in zip(blocks, self.powers, strict=True))
            for blocks in (self.blocks, best)
        ]
        return Recommendation(best, slowest[0] / slowest[1] - 1, self.moved_bytes(best))

    def moved_bytes(self, blocks: tuple[int, ...]) -> int:
        """Return the size of the states that members would fetch from others."""
        before, after = (self._run.stage_blocks(each) for each in (self.blocks, blocks))
        run = self._run.with_blocks(blocks)
        total = 0
        for stage, roster in enumerate(self._rosters, 1):
            new = set(after[stage]) - set(before[stage])
            size_bytes = size_bytes_of(state_tensors(run, stage))
            total += len(roster) * size_bytes * len(new) // max(1, len(after[stage]))
        return total


class Recutting:
    """The leader's side of another cut.

    Args:
        run: The run.
        core: The leading node's.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(self, run: RunConfig, core: CoreHandle, note: Callable[..., None]) -> None:
        self._run, self._core, self._note = run, core, note

    def commands(self) -> dict[str, Command]:
        """Return the operator's commands."""
        return {"recut": self._recut}

    def describe(self) -> dict[str, Any]:
        """Return the part of `decod status` on the cut."""
        facts, leading = self._core.facts, self._core.leading
        blocks = self._run.stage_blocks(() if facts is None else facts.view.cut)[1:]
        found = self.recommended()
        return {
            "blocks": [len(each) for each in blocks],
            "under_way": leading is not None and leading.recut,
            "recommended": None if found is None else list(found.cut),
            "gain": None if found is None else round(found.gain, 3),
            "moved_bytes": None if found is None else found.moved_bytes,
        }

    def recommended(self) -> Recommendation | None:
        """Return a cut that would gain much; None if there is none, or this node does not lead."""
        leading, facts = self._core.leading, self._core.facts
        if leading is None or facts is None or self._run.organisation is Organisation.SERVERS:
            return None
        if leading.view.empty_stages or leading.recut:
            return None
        found = _Stages(self._run, facts, leading).recommended()
        return found if found is not None and found.gain > GAIN_MIN else None

    async def keep_looking(self) -> None:
        """Ask for a better cut now and then, if the run file allows that. Never returns."""
        allowed = self._run.stages.recut is RecutPolicy.AUTO
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            found = self.recommended() if allowed else None
            if found is not None:
                reason = f"the slowest stage will compute {found.gain:.0%} more"
                self._note("recut.begun", blocks=blocks_text(found.cut), reason=reason)
                self._core.driver.post(RecutRequested(found.cut))

    async def _recut(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Have the model cut as asked, or as suits the members best."""
        leading, facts = self._core.leading, self._core.facts
        if leading is None or facts is None:
            raise _refused(
                "this node does not lead the run",
                "run the command at the leader, which `decod status` names",
            )
        if self._run.organisation is Organisation.SERVERS:
            raise _refused(
                "its stages have servers, whose clients take work from a pool",
                "nothing: with servers, fast hosts take more work by themselves",
            )
        if leading.recut:
            raise _refused("another one is under way", "wait: `decod status` shows when it is done")
        stages = _Stages(self._run, facts, leading)
        given = self._given(asked)
        blocks = given or stages.best()
        if blocks is None:
            raise _refused(
                "the speed of some member is not known yet",
                "wait until the run has trained for some iterations, or give --blocks",
            )
        answer = {"before": list(stages.blocks), "blocks": list(blocks)}
        if blocks == stages.blocks:
            return answer | {"changed": False}
        if (crowded := stages.crowded(blocks, trusts=given is not None)) is not None:
            index, member = crowded
            raise _refused(
                f"{member.label} has no room for {blocks[index]} blocks in stage {index + 1}",
                "give that stage fewer, or have the node join again with a smaller --capacity",
            )
        self._note("recut.begun", blocks=blocks_text(blocks), reason="the operator asks for it")
        self._core.driver.post(RecutRequested(blocks))
        return answer | {"changed": True, "moved_bytes": stages.moved_bytes(blocks)}

    def _given(self, asked: dict[str, Any]) -> tuple[int, ...] | None:
        """Return the cut that a request names.

        Raises:
            ConfigError: The model can't be cut like this.
        """
        text = asked.get("blocks")
        if text is None:
            return None
        cut = replace(self._run.stages, blocks=str(text))
        return tuple(len(blocks) for blocks in stage_blocks(self._run.model, cut)[1:])


def _refused(reason: str, fix: str) -> RejectedError:
    return RejectedError("the model can't be cut anew now", why=reason, fix=fix, code="E-REJ-016")

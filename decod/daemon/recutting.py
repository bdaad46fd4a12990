"""Another cut of the model while it trains: which one suits the members, and who asks for it.

The leader computes from what members tell it: how fast their devices are, and how much memory they
have. It recommends another cut when that would gain much. The operator asks for it, or the run file
says that the leader may. `decod.protocol.leadership.stage_recovery` does the rest.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from decod.config.needs import stage_needs
from decod.daemon.frontend import Command
from decod.daemon.known_hosts import relay_speeds
from decod.driver.driver import CoreHandle
from decod.errors import RejectedError
from decod.planner.partition import dealt, part_sizes
from decod.protocol.core.events import RecutRequested
from decod.protocol.core.view import Member, Role
from decod.protocol.facts import LeaderFacts, NodeFacts
from decod.protocol.leadership.stage_recovery import seats_in
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import RecutPolicy, stage_blocks
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
        leading: What it knows as the leader.
    """

    def __init__(self, run: RunConfig, facts: NodeFacts, leading: LeaderFacts) -> None:
        self._run = run
        self._view = leading.view
        self._loads = leading.loads
        self._speeds = relay_speeds(run, facts)
        self._before = run.stage_blocks(leading.view.cut)
        self._candidates = [c.join for c in leading.candidates.values()]
        self.cut = tuple(len(blocks) for blocks in self._before[1:])

    def _rosters(self, num_stages: int) -> list[list[Member]]:
        """Return the relays of each stage if there are so many; none if there are too few."""
        places = seats_in(self._view, (1,) * num_stages)
        rosters: list[list[Member]] = [[] for _ in range(num_stages)]
        for roster in self._view.rosters[1:] if places is not None else ():
            for member in roster:
                stage = (places or {}).get(member.node_id, member.stage_index)
                rosters[stage - 1].append(member)
        return rosters

    @property
    def are_empty(self) -> bool:
        """Whether the run waits for its first members."""
        return not self._view.members

    @property
    def num_relays(self) -> int:
        """Relays that are members, or wait to be the first ones."""
        if self.are_empty:
            return sum(join.role is Role.RELAY for join in self._candidates)
        return sum(map(len, self._view.rosters[1:]))

    def crowded(self, cut: tuple[int, ...], *, trusts: bool = False) -> tuple[int, Member] | None:
        """Return a stage that would have too many blocks, from 0, and for which member.

        Args:
            cut: Of each stage.
            trusts: Members that have not told their memory have room for anything, and not only
                for as much as they hold now.
        """
        run = self._run.with_blocks(cut)
        for index, roster in enumerate(self._rosters(len(cut))):
            needs = stage_needs(run, index + 1)
            for member in roster:
                load = self._loads.get(member.node_id)
                memory_bytes = load.memory_bytes if load is not None else 0
                grows = cut[index] > len(self._before[member.stage_index])
                known = memory_bytes > 0 or not trusts
                if grows and known and not needs.fits(memory_bytes, member.capacity):
                    return index, member
        return None

    def _powers(self, num_stages: int) -> list[float]:
        """Return the blocks that each stage computes in a second. 0: that is not known."""
        rosters = self._rosters(num_stages)
        speeds = [[self._speeds.get(m.node_id, 0.0) for m in roster] for roster in rosters]
        return [sum(each) if all(each) else 0.0 for each in speeds]

    def best(self) -> tuple[int, ...] | None:
        """Return the cut with which the slowest stage is fastest. None: it is not known.

        It has as many stages as now, without those that have lost all their members. Before the
        run begins, it is even, and has as many as there are relays.
        """
        if self.are_empty:
            num_relays = min(self.num_relays, len(self.cut))
            return tuple(part_sizes(sum(self.cut), num_relays)) if num_relays else None
        num_stages = len(self.cut) - len(self._view.empty_stages)
        powers = self._powers(num_stages)
        if not powers or not all(powers):
            return None
        most = [math.inf] * num_stages

        def after_s(index: int, num: int) -> float:
            return num / powers[index] if num <= most[index] else math.inf

        while cut := dealt(sum(self.cut), num_stages, after_s):
            crowded = self.crowded(cut)
            if crowded is None:
                return cut
            most[crowded[0]] = cut[crowded[0]] - 1
        return None

    def recommended(self) -> Recommendation | None:
        """Return the best cut, if it is another with as many stages."""
        best = self.best()
        if best is None or best == self.cut or len(best) != len(self.cut):
            return None
        powers = self._powers(len(best))
        slowest = [
            max(num / power for num, power in zip(cut, powers, strict=True))
            for cut in (self.cut, best)
        ]
        return Recommendation(best, slowest[0] / slowest[1] - 1, self.moved_bytes(best))

    def moved_bytes(self, cut: tuple[int, ...]) -> int:
        """Return the size of the states that members would fetch from others."""
        run = self._run.with_blocks(cut)
        after = run.stage_blocks()
        total = 0
        for stage, roster in enumerate(self._rosters(len(cut)), 1):
            size_bytes = size_bytes_of(state_tensors(run, stage)) // len(after[stage])
            for member in roster:
                had = self._before[member.stage_index]
                total += size_bytes * sum(block not in had for block in after[stage])
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
        if leading.recut:
            return None
        found = _Stages(self._run, facts, leading).recommended()
        return found if found is not None and found.gain > GAIN_MIN else None

    async def keep_looking(self) -> None:
        """Ask for a better cut now and then, if the run file allows that. Never returns."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self._run.stages.recut is RecutPolicy.AUTO:
                self._look()

    def _look(self) -> None:
        leading, facts = self._core.leading, self._core.facts
        if leading is None or facts is None:
            return
        found = self.recommended()
        cut, reason = None, "the run waits for a stage that is lost"
        if leading.waits_for_stage:
            cut = _Stages(self._run, facts, leading).best()
        elif found is not None:
            cut, reason = found.cut, f"the slowest stage will compute {found.gain:.0%} more"
        if cut is not None:
            self._begin(cut, reason)

    def _begin(self, cut: tuple[int, ...], reason: str) -> None:
        self._note("recut.begun", blocks=", ".join(map(str, cut)), reason=reason)
        self._core.driver.post(RecutRequested(cut))

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
        if leading.recut_marked:
            raise _refused("another one is under way", "wait: `decod status` shows when it is done")
        stages = _Stages(self._run, facts, leading)
        given = self._given(asked)
        blocks = given or stages.best()
        if not blocks:
            raise _refused(
                "the speed of some member is not known yet, or they have too little memory",
                "wait until the run has trained for some iterations, or give --blocks",
            )
        answer = {"before": list(stages.cut), "blocks": list(blocks)}
        if blocks == stages.cut:
            return answer | {"changed": False}
        if len(blocks) > stages.num_relays:
            raise _refused(
                f"there are too few relays for {len(blocks)} stages", "give fewer numbers"
            )
        if (crowded := stages.crowded(blocks, trusts=given is not None)) is not None:
            index, member = crowded
            raise _refused(
                f"{member.label} has no room for {blocks[index]} blocks in stage {index + 1}",
                "give that stage fewer, or have the node join again with a smaller --capacity",
            )
        self._begin(blocks, "the operator asks for it")
        return answer | {"changed": True, "moved_bytes": stages.moved_bytes(blocks)}

    def _given(self, asked: dict[str, Any]) -> tuple[int, ...] | None:
        """Return the cut that a request names.

        Raises:
            ConfigError: The model can't be cut like this.
        """
        text = asked.get("blocks")
        if text is None:
            return None
        num = str(text).count(",") + 1
        cut = replace(self._run.stages, num_relay_stages=num, blocks=str(text))
        return tuple(len(blocks) for blocks in stage_blocks(self._run.model, cut)[1:])


def _refused(reason: str, fix: str) -> RejectedError:
    return RejectedError("the model can't be cut anew now", why=reason, fix=fix, code="E-REJ-016")

"""A `decod leader` that dies in a certain phase of an iteration, when it is told to.

    python -m tests.support.doomed_leader ORDER leader run.toml ...

ORDER is a file with the name of a moment. While it exists, and this node leads an iteration of two
data nodes, the process kills itself at that moment. Everything else about it is real.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from decod.cli.main import main
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import messages
from decod.protocol.node_machine import NodeMachine

BEFORE: dict[str, Any] = {
    "flows are built": messages.FlowAnswer,
    "microbatches are under way": messages.BackwardGradient,
    "reports arrive": messages.Report,
}
"""The leader dies when a message of this kind comes, before it handles the message."""

AMIDST: dict[str, tuple[type, int]] = {
    "BEGIN AGGREGATION goes down": (messages.BeginAggregation, 1),
    "the gradient's norm goes down": (messages.GradientNorm, 1),
    "all votes are in": (messages.Open, 0),
    "the commit goes down": (messages.Open, 2),
}
"""The leader dies when this many messages of the kind have left."""

MOMENTS = (*BEFORE, *AMIDST)

_FLUSH_S = 0.15
"""Sent messages leave within this time. Nothing else happens meanwhile."""


def doom(order: Path) -> None:
    """Make the process kill itself as the order says."""
    step = NodeMachine.step
    dead: list[bool] = []

    def watched(machine: NodeMachine, now_s: float, event: ev.Event) -> list[fx.Effect]:
        if dead:
            return []
        moment = _moment(order) if machine.leader is not None else ""
        if len(machine.context.view.data_nodes) < 2:
            moment = ""
        awaited = BEFORE.get(moment)
        if awaited and isinstance(event, ev.Received) and isinstance(event.message, awaited):
            os.kill(os.getpid(), signal.SIGKILL)
        effects = step(machine, now_s, event)
        if moment in AMIDST:
            kind, num = AMIDST[moment]
            sends = [
                index
                for index, effect in enumerate(effects)
                if isinstance(effect, fx.Send) and _counts(effect.message, kind)
            ]
            if len(sends) > num:
                dead.append(True)
                loop = asyncio.get_running_loop()
                loop.call_later(_FLUSH_S, os.kill, os.getpid(), signal.SIGKILL)
                return effects[: sends[num]]
        return effects

    NodeMachine.step = watched  # type: ignore[method-assign]


def _counts(message: messages.Message, kind: type) -> bool:
    """Whether a message is of a kind, and not an opening that repeats an iteration."""
    return isinstance(message, kind) and getattr(message, "committed", True)


def _moment(order: Path) -> str:
    try:
        return order.read_text(encoding="utf-8")
    except OSError:
        return ""


if __name__ == "__main__":
    doom(Path(sys.argv[1]))
    del sys.argv[1]
    sys.exit(main())

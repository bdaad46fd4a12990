"""A `decod` whose node process dies, or stops, at an exact moment of the protocol.

    python -m tests.support.doomed kill after_forward 5 join JOINSTRING ...

The process sends itself the signal when its core gets the event, before the core handles it.
Everything else about it is real.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from decod.cli.main import main
from decod.ids import Iteration
from decod.protocol.core import events as ev
from decod.protocol.core import jobs, messages
from decod.protocol.core.messages.server_messages import Leg, StageActivation, StageGradient
from decod.protocol.node_machine import NodeMachine

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

MOMENTS: dict[str, Callable[[ev.Event, jobs.Job | None], bool]] = {
    "before_forward": lambda e, _: (
        _got(e, messages.ForwardActivation) or _carries(e, StageActivation, Leg.TASK)
    ),
    "after_forward": lambda e, job: isinstance(e, ev.JobFinished) and isinstance(job, jobs.Forward),
    "in_backward": lambda e, _: (
        _got(e, messages.BackwardGradient) or _carries(e, StageGradient, Leg.TASK)
    ),
    "after_backward": lambda e, job: (
        isinstance(e, ev.JobFinished) and isinstance(job, jobs.Backward)
    ),
    "in_aggregation": lambda e, _: _got(e, messages.ReducePart),
}

OF_RECUT: dict[str, Callable[[ev.Event, jobs.Job | None], bool]] = {
    "while_states_are_written": lambda e, _: isinstance(e, ev.StateKept),
    "before_recut": lambda e, _: _is_recut(e),
    "after_build": lambda e, job: isinstance(e, ev.JobFinished) and isinstance(job, jobs.Build),
    "with_part": lambda e, _: isinstance(e, ev.StateFetched) and e.part is not None,
    "after_load": lambda e, job: isinstance(e, ev.JobFinished) and isinstance(job, jobs.Load),
}
"""While the model is cut anew."""

ALSO: dict[str, Callable[[ev.Event, jobs.Job | None], bool]] = {
    # Every member gets this, however few are left of its stage.
    "at_aggregation": lambda e, _: _got(e, messages.BeginAggregation),
    # Only if gradients are clipped.
    "at_norm": lambda e, _: _got(e, messages.GradientNorm),
    # Only at servers.
    "with_result": lambda e, _: (
        _carries(e, StageActivation, Leg.RESULT) or _carries(e, StageGradient, Leg.RESULT)
    ),
}


def _carries(event: ev.Event, kind: type[StageActivation | StageGradient], leg: Leg) -> bool:
    return (
        isinstance(event, ev.Received)
        and isinstance(event.message, kind)
        and event.message.leg is leg
    )


def _is_recut(event: ev.Event) -> bool:
    if not isinstance(event, ev.Received) or not isinstance(event.message, messages.Open):
        return False
    origin = event.message.opening.origin
    return origin is not None and not origin.lost


def _got(event: ev.Event, kind: type) -> bool:
    return isinstance(event, ev.Received) and isinstance(event.message, kind)


def doom(number: signal.Signals, moment: str, iteration: int) -> None:
    """Make the process send itself a signal, once.

    A moment `after_` a job is the next event after its result has been handled.
    """
    step, due = NodeMachine.step, (MOMENTS | ALSO | OF_RECUT)[moment]
    passed: list[bool] = []

    def watched(machine: NodeMachine, now_s: float, event: ev.Event) -> list[Any]:
        if machine.context.iteration < Iteration(iteration, 0) or len(passed) > 1:
            return step(machine, now_s, event)
        if passed and not moment.startswith("after_"):
            return step(machine, now_s, event)
        job = None
        if isinstance(event, ev.JobFinished):
            job = machine.context.compute._given[event.job_id].job
        if passed or (due(event, job) and not moment.startswith("after_")):
            passed.append(True)
            os.kill(os.getpid(), number)
        elif due(event, job):
            passed.append(True)
        return step(machine, now_s, event)

    NodeMachine.step = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    doom(SIGNALS[sys.argv[1]], sys.argv[2], int(sys.argv[3]))
    del sys.argv[1:4]
    sys.exit(main())

"""A `decod` whose relay works rightly, and tells the leader that another relay can't be reached.

    python -m tests.support.accusing STAGE join JOINSTRING ...

With each of its heartbeats it says so of the first member of that stage.
"""

import sys

from decod.cli.main import main
from decod.protocol.core.messages import Suspect
from decod.protocol.links.liveness import Liveness


def program(stage: int) -> tuple[str, ...]:
    """Return the program of a node that accuses a member of a stage."""
    return (sys.executable, "-u", "-m", "tests.support.accusing", str(stage))


def _accuse(stage: int) -> None:
    overdue = Liveness.overdue

    def accuse(self: Liveness, now_s: float) -> None:
        beats = self.deadline_s is not None and now_s >= self.deadline_s
        overdue(self, now_s)
        view = self._context.view
        accused = [member.node_id for member in view.workers[stage]][:1]
        for node in accused if beats else ():
            self._out.send(view.leader, Suspect(node, "no heartbeat"))

    Liveness.overdue = accuse  # type: ignore[method-assign]


if __name__ == "__main__":
    _accuse(int(sys.argv.pop(1)))
    sys.exit(main())

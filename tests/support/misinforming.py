"""A `decod` whose relay works rightly, and lies to those who audit others.

    python -m tests.support.misinforming RELAY join JOINSTRING ...

It says that it gave the relay behind it a gradient instead of an activation, or the other way
round. So what that relay has made of it looks wrong, if nobody asks what was signed. It says so of
each relay whose node id begins with RELAY.
"""

import sys

from decod.cli.main import main
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.audit_messages import AuditCase
from decod.protocol.strategy.witnessing import Audits


def _misinform(framed: str) -> None:
    tell = Audits._tell_of_passes

    def lie(self: Audits, case: AuditCase) -> list[Effect]:
        if case.relay == self._context.node_id or not case.relay.startswith(framed):
            return tell(self, case)
        given = self._microbatches.dealt_with(case.relay)
        for held in given:
            held.forward, held.backward = held.backward, held.forward
        try:
            return tell(self, case)
        finally:
            for held in given:
                held.forward, held.backward = held.backward, held.forward

    Audits._tell_of_passes = lie  # type: ignore[method-assign]


if __name__ == "__main__":
    _misinform(sys.argv.pop(1))
    sys.exit(main())

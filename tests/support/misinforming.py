"""A `decod` whose relay works rightly, and lies to those who audit others.

    python -m tests.support.misinforming join JOINSTRING ...

It says that it gave the relay behind it a gradient instead of an activation. So what that relay has
made of it looks wrong, and so does what it has contributed to the average.
"""

import sys

from decod.cli.main import main
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.audits import AuditCase
from decod.protocol.strategy.witnessing import Audits


def _misinform() -> None:
    tell = Audits._tell_of_passes

    def lie(self: Audits, case: AuditCase) -> list[Effect]:
        given = [
            (held, held.forward)
            for held in self._microbatches.dealt_with(case.relay)
            if held.downstream == case.relay
        ]
        for held, _ in given:
            held.forward = held.backward
        try:
            return tell(self, case)
        finally:
            for held, forward in given:
                held.forward = forward

    Audits._tell_of_passes = lie  # type: ignore[method-assign]


if __name__ == "__main__":
    _misinform()
    sys.exit(main())

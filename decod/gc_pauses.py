"""Settings that keep Python's own pauses of the event loop short."""

import gc
import sys

_SWITCH_INTERVAL_S = 0.001


def keep_pauses_short() -> None:
    """Make this process's pauses short. Call it once all modules are loaded.

    From time to time the garbage collector looks at every object, which stops the process for 20 ms
    or more. The objects that exist now live as long as the process, so the collector is told to
    ignore them.

    Threads hand over the interpreter every millisecond instead of every five, because the event
    loop shares it with the thread that reads large messages.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()

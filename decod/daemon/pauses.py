"""Keeps the pauses of the event loop short that Python itself causes."""

import gc
import sys

_SWITCH_INTERVAL_S = 0.001


def keep_pauses_short() -> None:
    """Set this for the process, once all modules are loaded.

    The garbage collector looks at every object from time to time, which stops everything for 20 ms
    or more. The objects of today live as long as the process, so the collector leaves them out. And
    threads hand the interpreter over every millisecond instead of every five: the event loop shares
    it with the thread that reads large messages.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()

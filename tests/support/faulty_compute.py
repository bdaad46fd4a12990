"""Programs that are a real `decod` but for a fault in its compute process."""

import json
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_FAULT = "DECOD_TEST_FAULT"
"""The words of the fault. The compute process gets no arguments of the tests'."""


def run(module: str, num_words: int, put_in: Callable[..., None]) -> NoReturn:
    """Run the node, or its compute process, which is the same program.

    Args:
        module: The program, as `python -m` names it.
        num_words: How many of the first arguments describe the fault.
        put_in: Puts the fault into the compute process; called with these words.
    """
    if "--socket-fd" in sys.argv:
        from decod.worker.__main__ import main as compute_main

        put_in(*json.loads(os.environ[_FAULT]))
        os._exit(compute_main())
    from decod.cli.main import main
    from decod.driver import compute

    os.environ[_FAULT] = json.dumps([sys.argv.pop(1) for _ in range(num_words)])
    compute.ComputeProcess.start.__func__.__kwdefaults__["command"] = (  # type: ignore[attr-defined]
        sys.executable, "-m", module,
    )  # fmt: skip
    sys.exit(main())

"""Makes the backend known to torch. Loads nothing of it."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
INSTALLED = HERE / "installed"


def announce() -> None:
    """Have torch find the backend, here and in all processes that are started from here."""
    places = [str(INSTALLED), str(ROOT)]
    sys.path[:0] = places
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, known] if known else places)

"""Helpers of the measurements in `scripts/`: the job, the subjects, their children, the report."""

import sys
from pathlib import Path

# A measurement is of this checkout, whichever decod is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

"""Parts of the measurements in `scripts/`: the job, the subjects, their processes, the report."""

import sys
from pathlib import Path

# Measure this checkout, and not an installed decod.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

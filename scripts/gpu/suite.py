"""The tests that need a GPU, as one check."""

import re
import subprocess
import sys

from bench.child import ROOT

from gpu.result import Measure
from gpu.setting import Setting

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")

_FAST = ("tests/unit/model", "tests/unit/train", "tests/unit/worker", "tests/unit/optimizer")
"""Tests of tensors. Those of daemons take minutes: `pytest -m gpu` runs them too."""


def check_tests(setting: Setting) -> list[Measure]:
    """Run the tests of tensors on CUDA. On a CPU: one file, to try the check itself."""
    chosen = ("-m", "gpu", *_FAST) if setting.on_cuda else ("tests/unit/model/test_autograd.py",)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = ended.stdout.splitlines()
    # The log shows what failed; the table only counts.
    sys.stderr.write("\n".join([*lines[-200:], ended.stderr]))
    counts = {name: int(number) for number, name in _COUNT.findall(lines[-1] if lines else "")}
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {' '.join(lines[-3:])[:300]}")
    return [
        Measure("passed", counts.get("passed", 0), "tests", at_least=1),
        Measure("failed", counts.get("failed", 0) + counts.get("error", 0), "tests", at_most=0),
        Measure("skipped", counts.get("skipped", 0), "tests"),
    ]

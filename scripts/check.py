"""Run every check that CI runs, and show how long each took.

The checks of the source run in parallel. The tests come after them, so that the last line of the
output is pytest's own. A failing step does not keep the others from running. The exit code is
non-zero if any step failed. Arguments are passed on to pytest.
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

_STEPS_MAX = 4
"""Most static checks at a time."""

_WORKERS_MAX = 4
"""Most processes that run tests. `-n 0` in the arguments runs the tests in one process."""

STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("types", (str(BIN / "mypy"), "--no-error-summary")),  # By far the longest.
    ("format", (str(BIN / "ruff"), "format", "--check", "--quiet", ".")),
    ("lint", (str(BIN / "ruff"), "check", "--quiet", ".")),
    ("imports", (str(BIN / "lint-imports"), "--no-logo")),
    ("spelling", (str(BIN / "codespell"),)),
    ("protos", (sys.executable, "scripts/gen_protos.py", "--check")),
)


ON_ACCELERATOR = (
    "tests/unit/train",
    "tests/unit/worker",
    "tests/unit/model/test_autograd.py",
    "tests/unit/model/test_autograd_loss.py",
    "tests/unit/optimizer/test_optimizer_devices.py",
    "tests/integration/test_equality.py",
)


def _run_step(name: str, command: tuple[str, ...]) -> bool:
    """Run one step, and show its output only if it failed; return whether it passed."""
    start_s = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = result.returncode == 0
    said = f"{name:10} {'ok' if passed else 'FAILED':6} {time.monotonic() - start_s:6.1f} s\n"
    if not passed:
        said += (result.stdout + result.stderr).rstrip() + "\n"
    # In one write, since other threads write too.
    sys.stdout.write(said)
    sys.stdout.flush()
    return passed


def main(pytest_arguments: list[str]) -> int:
    num_processors = os.cpu_count() or 1
    with ThreadPoolExecutor(min(_STEPS_MAX, num_processors)) as pool:
        passed = list(pool.map(lambda step: _run_step(*step), STEPS))
    failed = [name for (name, _), ok in zip(STEPS, passed, strict=True) if not ok]
    if failed:
        print(f"{len(failed)} of {len(STEPS)} steps failed: {', '.join(failed)}", flush=True)
    # All tests of a file run in one process, so that their shared fixtures are made once; see
    # tests/support/dealing.py. The first process mostly waits for daemons, so it gets no processor
    # of its own. With many processes, hosts would answer too late for their timeouts.
    spread = ("-n", str(min(_WORKERS_MAX, num_processors + 1)), "--dist", "loadfile")
    command = (sys.executable, "-m", "pytest", "-q", *spread)
    failed += _failed_on_accelerator(command) if not pytest_arguments else []
    tests = subprocess.run((*command, *pytest_arguments), cwd=ROOT, check=False)
    return tests.returncode or int(bool(failed))


def _failed_on_accelerator(command: tuple[str, ...]) -> list[str]:
    """Run what a device computes on one that behaves like a GPU; return what failed."""
    if shutil.which("g++") is None:
        print("accelerator skipped: g++ is missing, which builds the fake one", flush=True)
        return []
    environment = {**os.environ, "DECOD_TEST_DEVICE": "fake:0"}
    tests = subprocess.run((*command, *ON_ACCELERATOR), cwd=ROOT, env=environment, check=False)
    return ["accelerator"] if tests.returncode else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

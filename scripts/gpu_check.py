"""Checks decod on a CUDA device in under 8 minutes: `python scripts/gpu_check.py --json FILE`.

Each check runs in a process of its own with a limit, so that one failure does not end the others.
The table and the file are written after every check. Without a CUDA device it ends at once, with
code 6. `--device cpu --tiny` tries the checks themselves on any machine, in about a minute. Exits
with 1 if a check failed or a target was missed.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.child import import_path
from gpu.result import Measure, Outcome, as_json, as_table

ROOT = Path(__file__).resolve().parents[1]

CHECKS = {
    # Name: module, function, and limit in seconds. What matters most comes first.
    "agreement": ("gpu.tensors", "check_agreement", 45),
    "stage-1b": ("gpu.stage", "check_1b", 75),
    "stage-8b": ("gpu.stage", "check_8b", 90),
    "copies": ("gpu.tensors", "check_copies", 30),
    "memory": ("gpu.memory", "check_memory", 45),
    "compression": ("gpu.tensors", "check_compression", 30),
    "ranks": ("gpu.ranks", "check_ranks", 60),
    "free": ("gpu.daemons", "check_free", 120),
    "daemons": ("gpu.daemons", "check_daemons", 150),
    "tests": ("gpu.suite", "check_tests", 180),
}

TIME_MAX_S = 470.0
EXIT_NO_DEVICE = 6
_WHY_MAX_CHARACTERS = 600
_GRACE_S = 10.0
"""For a check to end the daemons that it has started."""


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda:0", help="cuda:N, or cpu with --tiny (default: cuda:0)")
    add("--tiny", action="store_true", help="sizes that only try the checks themselves")
    add("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="(default: all)")
    add("--json", type=Path, metavar="FILE", default=Path("gpu-check.json"), help="the results")
    add("--logs", type=Path, metavar="DIR", help="keep each check's output in this folder")
    add("--time-max-s", type=float, default=TIME_MAX_S, help="for all checks (default: 470)")
    add("--only", choices=CHECKS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_here(options: argparse.Namespace) -> int:
    """Run one check in this process, and write its numbers."""
    from gpu.setting import Setting

    module, name, _ = CHECKS[options.only]
    check = getattr(importlib.import_module(module), name)
    measures: list[Measure] = check(Setting(options.device, options.tiny))
    found = [asdict(measure) for measure in measures]
    options.json.write_text(json.dumps(found), encoding="utf-8")
    return 0


def run_apart(options: argparse.Namespace, name: str, limit_s: float, logs: Path) -> Outcome:
    """Run one check in a process of its own."""
    result, log = logs / f"{name}.json", logs / f"{name}.log"
    command = [sys.executable, __file__, "--only", name, "--device", options.device]
    command += ["--json", str(result), *(["--tiny"] if options.tiny else [])]
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": import_path()},
            cwd=ROOT,
            start_new_session=True,
        )
        failure = ""
        try:
            if code := process.wait(timeout=limit_s):
                failure = f"exit code {code}: {_end_of(log)}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {limit_s:.0f} s: {_end_of(log)}"
        finally:
            _end(process)
    duration_s = time.monotonic() - start_s
    if failure:
        return Outcome(name, duration_s, failure=failure)
    found = json.loads(result.read_text(encoding="utf-8"))
    return Outcome(name, duration_s, tuple(Measure(**each) for each in found))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a check and what it has started: it ends its own daemons if it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-4:])[-_WHY_MAX_CHARACTERS:]


def absence(device: str) -> str | None:
    """Return why there is no such device, or None if there is one."""
    if device == "cpu":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    built = torch.version.cuda is not None
    return "no CUDA device is visible" if built else "this torch is built without CUDA"


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on."""
    import torch

    on_cuda = options.device != "cpu"
    return {
        "device": torch.cuda.get_device_name(options.device) if on_cuda else platform.processor(),
        "driver_cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "tiny": options.tiny,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the checks; return the exit code."""
    options = parse_options(arguments)
    # A request to end it ends the check that runs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.only:
        return run_here(options)
    if why := absence(options.device):
        print(f"gpu_check: nothing was checked: {why}. Try: --device cpu --tiny")
        return EXIT_NO_DEVICE
    end_s, outcomes, facts = time.monotonic() + options.time_max_s, [], facts_of(options)
    print(json.dumps(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="decod-gpu-check-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for name in options.checks:
            left_s = end_s - time.monotonic()
            # A tiny check tries itself, perhaps on a busy machine: its time says nothing.
            limit_s = left_s if options.tiny else min(CHECKS[name][2], left_s)
            if limit_s < 1:
                outcomes.append(Outcome(name, 0.0, failure="no time was left for it"))
            else:
                outcomes.append(run_apart(options, name, limit_s, logs))
            print(as_table(outcomes[-1:]), flush=True)
            text = json.dumps(as_json(outcomes, facts), indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    print("\n" + as_table(outcomes))
    missed = any(m.reached is False for outcome in outcomes for m in outcome.measures)
    return int(missed or any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

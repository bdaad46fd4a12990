"""Measures how much memory the processes of a node need to get the state of its stage.

    python scripts/bench_loading_memory.py
    python scripts/bench_loading_memory.py --8b --vocab 4096 --layers 1 --relays 1 --folder DIR

A random state is written to disk first, as a checkpoint in a store, as a state that a node keeps,
and its weights as the folder of a model. Then a node gets the state of its stage in each of these
ways and from a peer, through production code: a node process, a compute process on the CPU, and a
donor. Prints the peak of each process's memory above what it took before, and the time. The disk
needs room for four times the state.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench_checkpoint_memory as family  # noqa: E402
from bench import checkpoint_phases, loading_phases  # noqa: E402
from bench.child import BenchError  # noqa: E402

from decod.run.run_config import RunConfig  # noqa: E402
from decod.train.checkpoint.entries import (  # noqa: E402
    size_bytes_of,
    state_tensors,
)

_MIB = 1 << 20


def stage_bytes(run: RunConfig) -> int:
    """Return the size of the state that is loaded."""
    return size_bytes_of(state_tensors(run, loading_phases.STAGE))


def measure(arguments: Sequence[str], run: RunConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each way the peaks of the processes in bytes, time, and hash of what was loaded.

    Args:
        arguments: The options that describe the run, for the phases' processes.
        run: The same run.
        folder: An empty folder.

    Raises:
        BenchError: A phase failed, or the disk has too little room.
    """
    size_bytes = family.state_bytes(run)
    if shutil.disk_usage(folder).free < 4 * size_bytes:
        raise BenchError(f"{folder} needs room for {4 * size_bytes / 1e9:.1f} GB")
    command = [sys.executable, __file__, *arguments, "--folder", str(folder), "--phase"]

    def ran(*phase: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [*command, *phase], capture_output=True, text=True, check=False, cwd=ROOT
        )
        if done.returncode:
            raise BenchError(f"{phase[0]} failed:\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    ran("states")
    found: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        [*command, "donor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as donor:
        assert donor.stdout is not None
        try:
            address = json.loads(donor.stdout.readline())["address"]
            for way in loading_phases.WAYS:
                told = ran(way, "--address", address)
                found[way] = next(each for each in told if "hash" in each)
                found[way] |= {e["process"]: e["peak_bytes"] for e in told if "process" in e}
        finally:
            donor.kill()
    return found


def run_phase(options: argparse.Namespace, run: RunConfig, folder: Path) -> None:
    """Do what one process does."""
    if options.phase == "states":
        checkpoint_phases.make_states(folder / "given", run)
        loading_phases.write_sources(folder, run)
        loading_phases.keep(folder)
    elif options.phase == "donor":
        asyncio.run(checkpoint_phases.give(folder / "given", run))
    else:
        asyncio.run(loading_phases.WAYS[options.phase](folder, run, options.address))  # type: ignore[arg-type]


def report(run: RunConfig, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"state of the stage {stage_bytes(run) / _MIB:,.0f} MiB"]
    lines.append(f"{'from':<20} {'node':>12} {'compute':>12} {'time':>7}")
    for way, peaks in found.items():
        cells = (f"{peaks[p] / _MIB:,.0f} MiB" if p in peaks else "" for p in ("node", "compute"))
        row = " ".join(f"{cell:>12}" for cell in cells)
        lines.append(f"{way:<20} {row} {peaks['seconds']:>5.1f} s")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table; return the exit code."""
    options = family.parser().parse_args(arguments)
    run = family.run_of(options)
    if options.phase is not None:
        run_phase(options, run, options.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="decod-loading-") as folder:
        found = measure(arguments, run, Path(folder))
    print("\n".join(report(run, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

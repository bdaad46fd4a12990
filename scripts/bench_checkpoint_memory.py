"""Measures how much memory a leader's host needs for the state of a large model.

    python scripts/bench_checkpoint_memory.py
    python scripts/bench_checkpoint_memory.py --layers 48
    python scripts/bench_checkpoint_memory.py --8b --folder /large/disk    # 240 GB of disk

Random states of all stages are written to disk first. Then the phases run through production code,
one process each: a donor gives the states of the relay stages over sockets, the leader writes a
checkpoint, `decod checkpoint verify` reads it, a leader resumes from it and gives each stage its
state, the compute process loads the leader's own stage, and the model is exported. Prints the peak
of each process's memory above its start, beside the size of the state.
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

from bench import checkpoint_phases as phases  # noqa: E402
from bench.child import BenchError  # noqa: E402

from decod.run.model_config import ModelConfig, ModelDtype  # noqa: E402
from decod.run.run_config import RunConfig  # noqa: E402
from decod.run.stages_config import StagesConfig  # noqa: E402
from decod.run.training_config import BatchConfig  # noqa: E402
from decod.train.checkpoint.entries import state_size_bytes  # noqa: E402

_MIB = 1 << 20
_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
}
"""The shape of Llama 3 8B."""


def run_of(options: argparse.Namespace) -> RunConfig:
    """Return the run whose states are handled."""
    shape: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 24,
    }
    if options.shape_8b:
        shape = _8B
    asked = {"vocab_size": options.vocab, "num_hidden_layers": options.layers}
    shape |= {key: value for key, value in asked.items() if value is not None}
    return RunConfig(
        name="memory",
        model=ModelConfig(dtype=ModelDtype.BFLOAT16, **shape),
        stages=StagesConfig(num_relay_stages=options.relays),
        batch=BatchConfig(sequence_length=8),
    )


def state_bytes(run: RunConfig) -> int:
    """Return the size of the whole state."""
    return state_size_bytes(run)


def measure(arguments: Sequence[str], run: RunConfig, folder: Path) -> dict[str, int]:
    """Return the peak of each phase's memory above its start, in bytes.

    Args:
        arguments: The options that describe the run, for the phases' processes.
        run: The same run.
        folder: An empty folder. The checkpoint and the model stay in it.

    Raises:
        BenchError: A phase failed, or the disk has too little room.
    """
    size_bytes = state_bytes(run)
    if shutil.disk_usage(folder).free < 2.2 * size_bytes:
        raise BenchError(f"{folder} needs room for {2.2 * size_bytes / 1e9:.1f} GB")
    command = [sys.executable, __file__, *arguments, "--folder", str(folder), "--phase"]
    found: dict[str, int] = {}

    def took(line: str) -> None:
        told = json.loads(line)
        found[told["phase"]] = told["peak_bytes"]

    def ran(*phase: str) -> None:
        done = subprocess.run(
            [*command, *phase], capture_output=True, text=True, check=False, cwd=ROOT
        )
        if done.returncode:
            raise BenchError(f"{phase[0]} failed:\n{done.stderr[-2000:]}")
        for line in done.stdout.splitlines():
            took(line)

    ran("states")
    with subprocess.Popen(
        [*command, "donor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as donor:
        assert donor.stdin is not None
        assert donor.stdout is not None
        try:
            address = json.loads(donor.stdout.readline())["address"]
            ran("checkpoint", "--address", address)
            for phase in phases.PHASES:
                ran(phase)
            ran("export", "--address", address)
            donor.stdin.close()
            took(donor.stdout.readline())
        finally:
            donor.kill()
    return found


def run_phase(options: argparse.Namespace, run: RunConfig, folder: Path) -> None:
    """Do what one process does."""
    phase, given = options.phase, folder / "given"
    if phase == "states":
        phases.make_states(given, run)
    elif phase == "donor":
        asyncio.run(phases.give(given, run))
    elif phase == "checkpoint":
        asyncio.run(phases.write_checkpoint(folder, run, options.address, shares=options.store))
    elif phase == "export":
        asyncio.run(phases.export(folder, run, options.address))
    else:
        asyncio.run(phases.PHASES[phase](folder, run))  # type: ignore[arg-type]


def report(run: RunConfig, found: dict[str, int]) -> list[str]:
    """Return the lines of the table."""
    size_bytes, own_bytes = state_bytes(run), phases.own_bytes(run)
    lines = [f"state {size_bytes / _MIB:,.0f} MiB, the leader's own stage {own_bytes / _MIB:,.0f}"]
    lines += [f"{phase:<12} {peak / _MIB:>10,.0f} MiB" for phase, peak in found.items()]
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--8b", dest="shape_8b", action="store_true", help="shape of Llama 3 8B")
    options.add_argument("--layers", type=int, help="blocks of the model")
    options.add_argument("--vocab", type=int, help="entries of the vocabulary")
    options.add_argument("--relays", type=int, default=4, help="relay stages")
    options.add_argument(
        "--store", action="store_true", help="the donor writes its stages into a store itself"
    )
    options.add_argument("--folder", type=Path, help="where a folder for the files is made")
    options.add_argument("--phase", help=argparse.SUPPRESS)
    options.add_argument("--address", default="", help=argparse.SUPPRESS)
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table; return the exit code."""
    options = parser().parse_args(arguments)
    run = run_of(options)
    if options.phase is not None:
        run_phase(options, run, options.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="decod-memory-") as folder:
        found = measure(arguments, run, Path(folder))
    print("\n".join(report(run, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

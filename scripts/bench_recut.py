"""Measures what another cut of the model costs while it trains: bytes, and time.

    python scripts/bench_recut.py
    python scripts/bench_recut.py --upload 50Mbit --before 2,6 --after 6,2

Two stages of relays, with one relay each, do the job of `bench_throughput.py`. Each sends no faster
than its cap. The leader is told to cut the model anew. What relays fetch is compared with the
states of the blocks that they lacked, and the time with what the uplink needs for these bytes, plus
an iteration. Exits with 1 if a launch failed, or if a relay fetched more.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.child import BenchError, Child, stop_all_at_exit
from bench.job import BATCH, MODEL, write_run
from bench.subject import Decod

from decod.config.node_config import read_rate
from decod.daemon.control import ask
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig
from decod.train.checkpoint.entries import size_bytes_of, state_tensors

_NUM_WARMUP = 4
_LAUNCH_MAX_S = 300.0


def events(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield what a node has logged so far."""
    for line in (folder / name / "node.log").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def wait_for(folder: Path, event: str) -> dict[str, Any]:
    """Return the first event of a kind that the leader logs."""
    end_s = time.monotonic() + _LAUNCH_MAX_S
    while time.monotonic() < end_s:
        found = next((each for each in events(folder, "data") if each["event"] == event), None)
        if found is not None:
            return found
        time.sleep(0.1)
    raise BenchError(f"there was no {event} in {_LAUNCH_MAX_S:.0f} s")


def lacking_bytes(run: RunConfig, after: Sequence[int]) -> list[int]:
    """Return the size of the states of the blocks that each relay lacks in another cut."""
    before, cut = run.stage_blocks(), run.with_blocks(after)
    found = []
    for stage, blocks in enumerate(cut.stage_blocks()[1:], 1):
        new = sum(block not in before[stage] for block in blocks)
        found.append(size_bytes_of(state_tensors(cut, stage)) * new // len(blocks))
    return found


def run_bench(options: argparse.Namespace, folder: Path) -> bool:
    """Print figures, and return whether no relay has fetched more than it lacked."""
    run = RunConfig(
        name="recut",
        num_iterations=1000,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=2, blocks=options.before),
        batch=replace(BATCH, num_microbatches=2),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    after = [int(word) for word in options.after.split(",")]
    lacking = lacking_bytes(run, after)
    running: list[Child] = []
    with ExitStack() as stack:
        subject = Decod(of_relays=("--upload-max", options.upload))
        started = subject.start(write_run(folder, run), 1, folder, running)
        for child in running:
            stack.callback(child.stop)
        deadline_s = time.monotonic() + _LAUNCH_MAX_S
        num_lines = 0
        while num_lines < _NUM_WARMUP:
            num_lines += "loss" in started.announcer.next_line(deadline_s)[1]
        ask(folder / "data", {"command": "recut", "blocks": options.after}, timeout_s=30.0)
        done = wait_for(folder, "run.recut")
        fetched = [
            each
            for name in ("relay-1-0", "relay-2-0")
            for each in events(folder, name)
            if each["event"] == "state.fetched"
        ]
        iterations = [e for e in events(folder, "data") if e["event"] == "iteration.committed"]
    usual_s = median(each["duration_s"] for each in iterations[1:_NUM_WARMUP])
    come = sum(each["num_bytes"] - each["num_local"] for each in fetched)
    least_s = max(lacking) / (read_rate(options.upload) * 1e6 / 8)
    print(f"blocks {options.before} become {options.after}, relays send at {options.upload}")
    print(f"fetched {come / 1e6:.1f} MB; the blocks' states have {sum(lacking) / 1e6:.1f} MB")
    print(
        f"{done['duration_s']:.1f} s from the mark to the first commit; the uplink takes"
        f" {least_s:.1f} s, and an iteration {usual_s:.1f} s"
    )
    return bool(come <= sum(lacking))


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--upload", default="50Mbit", help="of each relay")
    add("--before", default="2,6")
    add("--after", default="6,2")
    options = parser.parse_args(arguments)
    stop_all_at_exit()
    try:
        with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
            return 0 if run_bench(options, Path(folder)) else 1
    except (BenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

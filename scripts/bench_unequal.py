"""Measures what a cut that suits unequal hosts gains: the planner's beside the even one.

    python scripts/bench_unequal.py
    python scripts/bench_unequal.py --shares 0.2 0.2 0.4 --rounds 5

Three relays get unequal parts of a processor, by the system's quotas (cgroups, for which it needs
root). The job is that of `bench_throughput.py`, in three stages of relays. Rounds are interleaved,
and the quotas leave a part of the processors idle, so that no relay waits for another one's turn.
Exits with 1 if a launch failed, or if losses differ.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.child import BenchError, stop_all_at_exit
from bench.job import BATCH, MODEL, write_run
from bench.report import LOSS_DIFFERENCE_MAX
from bench.subject import Decod, Plan, Sample, measure

from decod.lab.files.hosts_file import load_run_hosts
from decod.lab.planner.organisations.pipeline_forecast import gradients_s
from decod.lab.planner.organisations.pipeline_search import plan_stages
from decod.lab.planner.organisations.pipeline_time import PipelineClock
from decod.run.run_config import RunConfig
from decod.run.stages_config import AUTO, StagesConfig, blocks_text
from decod.run.training_config import OptimizerConfig
from decod.sim.kernel import seeded

_QUOTAS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 20_000
_NUM_WARMUP = 2
_LAUNCH_MAX_S = 300.0
_GROUP_END_MAX_S = 10.0


def planned(run: RunConfig, shares: Sequence[float], folder: Path) -> tuple[str, list[float]]:
    """Return `stages.blocks` as the planner has it, and the share of each stage's relay."""
    hosts = [{"id": "data", "kind": "data"}] + [
        {"id": f"relay-{k}", "kind": "unreliable", "tflops": share}
        for k, share in enumerate(shares)
    ]
    link = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    path = folder / "hosts.json"
    path.write_text(json.dumps({"hosts": hosts, "default_link": link}))
    clock = PipelineClock(load_run_hosts(path, run))
    plan = plan_stages(clock, seeded(0, "unequal"), gradients_s, num_stages=len(shares))
    assert plan is not None, "it fits"
    return blocks_text(plan.time.layers), [shares[stage[0] - 1] for stage in plan.stages]


@contextmanager
def paced(shares: Sequence[float]) -> Iterator[Callable[[str, int], None]]:
    """Lend what gives relays these shares of a processor, by their names and process ids."""
    made = dict[str, Path]()

    def begun(name: str, pid: int) -> None:
        if name in made:
            # What it starts later is in the same group.
            (made[name] / "cgroup.procs").write_text(str(pid))

    try:
        for stage, share in enumerate(shares, 1):
            group = _QUOTAS / f"decod-bench-{os.getpid()}-{stage}"
            group.mkdir()
            made[f"relay-{stage}-0"] = group
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(share * _PERIOD_US)))
        yield begun
    finally:
        for group in made.values():
            # The system ends killed processes a little later.
            end_s = time.monotonic() + _GROUP_END_MAX_S
            while (group / "cgroup.procs").read_text() and time.monotonic() < end_s:
                time.sleep(0.05)
            group.rmdir()


def launch(run: RunConfig, shares: Sequence[float], folder: Path, num_measured: int) -> Sample:
    """Return how fast a run trains on such relays."""
    with paced(shares) as begun:
        subject = Decod(num_stages=len(shares), begun=begun)
        plan = Plan(1, _NUM_WARMUP, num_measured, folder, time.monotonic() + _LAUNCH_MAX_S)
        return measure(subject, write_run(folder.parent, run), plan)


def run_bench(options: argparse.Namespace, folder: Path) -> float:
    """Print rates, and return how far losses differ."""
    num_stages = len(options.shares)
    even = RunConfig(
        name="even",
        num_iterations=_NUM_WARMUP + options.iterations + 2,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=num_stages),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    blocks, order = planned(even, options.shares, folder)
    suited = replace(even, name="suited", stages=replace(even.stages, blocks=blocks))
    ratios, differences = list[float](), list[float]()
    print(f"relays with {options.shares} of a processor; blocks {blocks} for {order}")
    for number in range(options.rounds):
        # In an even cut, the first stages have a block more.
        cases = (even, sorted(options.shares, reverse=True)), (suited, order)
        found = [
            launch(run, shares, folder / f"{number}-{run.name}", options.iterations)
            for run, shares in cases
        ]
        ratios.append(found[1].tokens_per_s / found[0].tokens_per_s)
        common = found[0].losses.keys() & found[1].losses.keys()
        differences += [abs(found[0].losses[k] - found[1].losses[k]) for k in common]
        rates = f"{found[0].tokens_per_s:.0f} tokens/s {AUTO}, {found[1].tokens_per_s:.0f} suited"
        print(f"round {number + 1}: {rates}, {ratios[-1]:.2f} times as many", flush=True)
    print(f"median {median(ratios):.2f}; losses differ by at most {max(differences):.1e}")
    return max(differences)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.25, 0.25, 0.5], help="of each relay")
    add("--rounds", type=int, default=3)
    add("--iterations", type=int, default=4, help="measured (default: 4)")
    options = parser.parse_args(arguments)
    stop_all_at_exit()
    try:
        with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
            return int(run_bench(options, Path(folder)) > LOSS_DIFFERENCE_MAX)
    except (BenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

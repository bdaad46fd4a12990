"""Measures what audits cost: training with several shares of audited work, side by side.

    python scripts/bench_audits.py
    python scripts/bench_audits.py --shares 0 0.02 --rounds 1 --relays 3

A data node and `--relays` relays in each of two stages train the job of `bench_throughput.py`, with
one thread each. A share counts for all relays here; a run of its own has a higher one for relays in
probation. Rounds are interleaved, and each share is compared with the first of its round: tokens a
second, and processor seconds an iteration of all processes together. Exits with 1 if one failed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.child import BenchError, stop_all_at_exit
from bench.job import Job, write_job, write_run
from bench.subject import Decod, Plan, Sample, measure

from decod.run.protocol_config import AuditConfig

_LAUNCH_MAX_S = 300.0


def jobs_of(folder: Path, shares: Sequence[float], num_iterations: int) -> dict[float, Job]:
    """Return a job for each share, which differ in nothing else."""
    run = write_job(folder, num_iterations).run
    found = {}
    for share in shares:
        audits = AuditConfig(share=share, share_in_probation=share)
        name = f"audits-{round(share * 1000)}"
        found[share] = write_run(folder, replace(run, name=name, audits=audits))
    return found


def measure_round(
    jobs: dict[float, Job], options: argparse.Namespace, folder: Path
) -> dict[float, Sample]:
    """Measure each share once."""
    samples = {}
    for share, job in jobs.items():
        plan = Plan(
            num_threads=1,
            num_warmup=options.warmup,
            num_measured=options.iterations,
            folder=folder / str(round(share * 1000)),
            end_s=time.monotonic() + _LAUNCH_MAX_S,
        )
        samples[share] = measure(Decod(options.relays), job, plan)
        sample = samples[share]
        print(
            f"share {share:<5g} {sample.tokens_per_s:6.0f} tokens/s  "
            f"{_processor_s(sample):6.2f} processor s an iteration  "
            f"(others {sample.foreign_cores:.1f} cores)",
            flush=True,
        )
    return samples


def _processor_s(sample: Sample) -> float:
    return sum(sample.cpu_s.values())


def show(rounds: Sequence[dict[float, Sample]]) -> None:
    """Print each share's medians, relative to the first share of the same round."""
    first, *others = rounds[0]
    for share in others:
        speed = median(each[share].tokens_per_s / each[first].tokens_per_s for each in rounds)
        work = median(_processor_s(each[share]) / _processor_s(each[first]) for each in rounds)
        print(f"share {share:g} beside {first:g}: tokens/s x {speed:.3f}, processor x {work:.3f}")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.0, 0.02, 0.2], help="default: 0 0.02 0.2")
    add("--rounds", type=int, default=3, help="rounds over all shares (default: 3)")
    add("--relays", type=int, default=3, help="in each of two stages (default: 3)")
    add("--iterations", type=int, default=10, help="measured in each launch (default: 10)")
    add("--warmup", type=int, default=3, help="iterations before these (default: 3)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    options = parse_options(arguments)
    stop_all_at_exit()
    # State folders hold sockets, whose paths must be short. So not below a deep working directory.
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as name:
        folder = Path(name)
        jobs = jobs_of(folder, options.shares, options.warmup + options.iterations + 1)
        try:
            rounds = [
                measure_round(jobs, options, folder / str(index)) for index in range(options.rounds)
            ]
        except BenchError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures what membership costs: papers, tensors and training with TLS, beside the same without.

    python scripts/bench_tls.py
    python scripts/bench_tls.py --rounds 5 --members 2

Without TLS, decod runs as `bench.plaintext` has it. Rounds are interleaved, and each pair of a
round is compared in itself. An all-reduce of 100 MB on the loopback stands for tensor streams:
there, both ends and the cipher share the processors. Training is the job of `bench_throughput.py`.
Exits with 1 if a subject failed or an average was wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.averaging import ERROR_MAX
from bench.averaging_report import median_s
from bench.child import BenchError, stop_all_at_exit
from bench.hosts import LOOPBACK
from bench.job import Job, write_job
from bench.subject import Decod, Plan
from bench.subject import measure as train
from bench_allreduce import SUBJECTS, Subject
from bench_allreduce import measure as reduce

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.unit.net.test_enrolment import Door, at_door  # noqa: E402

PLAINTEXT = Subject("plaintext", "bench.averaging_node", ("--plaintext",))
NUM_ENROLMENTS = 20
_LAUNCH_MAX_S = 300.0


def enrolments_s() -> list[float]:
    """Return how long nodes took to get their papers with a token, over sockets."""
    found = list[float]()

    async def enrol(door: Door) -> None:
        for _ in range(NUM_ENROLMENTS):
            token, start_s = door.token(), time.perf_counter()
            await door.enroll(token)
            found.append(time.perf_counter() - start_s)

    at_door(enrol)
    return found


def reduced_ratio(num_members: int, options: argparse.Namespace, folder: Path) -> float:
    """Return the time of an all-reduce without TLS over that with TLS, of one round."""
    seconds = list[float]()
    for subject in (PLAINTEXT, SUBJECTS["decod"]):
        samples = reduce(subject, [LOOPBACK] * num_members, folder / subject.name, options)
        if max(each.error for each in samples) > ERROR_MAX[subject.precision]:
            raise BenchError(f"{subject.name}: a wrong average")
        seconds.append(median_s(samples))
    print(f"100 MB, {num_members} members: {seconds[0]:.3f} s without, {seconds[1]:.3f} s with TLS")
    return seconds[0] / seconds[1]


def trained_ratio(job: Job, options: argparse.Namespace, folder: Path) -> float:
    """Return the tokens/s with TLS over those without, of one round."""
    rates = list[float]()
    for name, subject in (("plain", Decod(module="bench.plaintext")), ("tls", Decod())):
        plan = Plan(
            num_threads=1,
            num_warmup=3,
            num_measured=options.iterations,
            folder=folder / name,
            end_s=time.monotonic() + _LAUNCH_MAX_S,
        )
        rates.append(train(subject, job, plan).tokens_per_s)
    print(f"training: {rates[0]:.0f} tokens/s without, {rates[1]:.0f} with TLS", flush=True)
    return rates[1] / rates[0]


def run_bench(options: argparse.Namespace, folder: Path) -> None:
    """Measure in a folder, and print medians."""
    seconds = enrolments_s()
    print(f"papers with a token: {median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f}")
    ratios: dict[str, list[float]] = {}
    job = write_job(folder, options.iterations + 5)
    for number in range(options.rounds):
        place = folder / str(number)
        for members in options.members:
            found = reduced_ratio(members, options, place / str(members))
            ratios.setdefault(f"tensors, {members} members", []).append(found)
        ratios.setdefault("training", []).append(trained_ratio(job, options, place))
    for name, of_rounds in ratios.items():
        spread = f"{min(of_rounds):.2f} to {max(of_rounds):.2f} in {len(of_rounds)} rounds"
        print(f"{name}: {median(of_rounds):.3f} of the speed without TLS ({spread})")


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--members", type=int, nargs="*", default=[2, 4], help="of all-reduces (default: 2 4)")
    add("--iterations", type=int, default=12, help="of training, measured (default: 12)")
    options = parser.parse_args(arguments, argparse.Namespace(threads=1, warmup=1, repeats=3))
    stop_all_at_exit()
    try:
        with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
            run_bench(options, Path(folder))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

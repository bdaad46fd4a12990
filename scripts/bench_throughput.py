"""Measures training throughput side by side: decod, torch's pipeline, one process.

`decod-transformers` is decod with the same blocks as transformers builds them.

    python scripts/bench_throughput.py
    python scripts/bench_throughput.py --rounds 1 --subjects decod --json result.json

All train the same model from the same weights on the same tokens: 8 Llama blocks of width 256,
vocabulary 4096, sequences of 256, 8 microbatches of 4, AdamW, float32. Rounds are interleaved and
each is compared in itself, because the speed of a shared machine drifts. Both numbers of threads
are tried in the first round; one that was clearly slower is not tried again. Exits with 1 if a
subject failed or was left out for want of time, or if losses show that it was not the same job.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.child import BenchError, stop_all_at_exit
from bench.job import Job, write_job
from bench.report import LOSS_DIFFERENCE_MAX, as_json, as_text, best_results, loss_difference
from bench.subject import Decod, DecodBuilt, OneProcess, Pipeline, Plan, Sample, Subject, measure

SUBJECTS: dict[str, Subject] = {
    "decod": Decod(),
    "decod-transformers": DecodBuilt(),
    "pipeline": Pipeline(),
    "one-process": OneProcess(),
}
SLOWER = 0.85
"""A setting below this fraction of its subject's best is not tried again."""
GIVE_UP = 0.5
"""A launch below this fraction of its subject's best is cut short, since it can't be the best."""
OVERTIME_MAX_S = 40.0
"""How long a launch may go on after the end of the measurement."""


@dataclass(slots=True)
class Bench:
    """One measurement: its settings, and its results so far."""

    job: Job
    subjects: Sequence[Subject]
    threads: Sequence[int]
    num_warmup: int
    num_measured: int
    folder: Path
    end_s: float
    """Instant after which no launch is started."""
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)
    """The longest duration of a launch of each subject so far."""

    def run_round(self, round_index: int) -> None:
        """Measure every subject at every setting that may still be its best.

        Every other round goes backwards, so that a machine that gets slower favours no subject.
        """
        for subject in self.subjects[:: -1 if round_index % 2 else 1]:
            for num_threads in self.threads:
                if subject.name in self.failures or not self._worth_trying(subject, num_threads):
                    continue
                expected_s = self.durations_s.get(subject.name, 0.0)
                if time.monotonic() + expected_s > self.end_s:
                    print(f"round {round_index + 1}: no time left for {subject.name}", flush=True)
                    continue
                self._measure(subject, num_threads, round_index)

    def _worth_trying(self, subject: Subject, num_threads: int) -> bool:
        best = best_results(self.samples).get(subject.name)
        own = [
            sample.tokens_per_s
            for sample in self.samples
            if (sample.subject, sample.num_threads) == (subject.name, num_threads)
        ]
        return best is None or not own or max(own) >= SLOWER * best.tokens_per_s

    def _measure(self, subject: Subject, num_threads: int, round_index: int) -> None:
        start_s = time.monotonic()
        folder = self.folder / f"{round_index}-{subject.name.replace(' ', '-')}-{num_threads}"
        label = f"round {round_index + 1}  {subject.name:16} {num_threads} threads"
        best = best_results(self.samples).get(subject.name)
        plan = Plan(
            num_threads=num_threads,
            num_warmup=self.num_warmup,
            num_measured=self.num_measured,
            folder=folder,
            end_s=self.end_s + OVERTIME_MAX_S,
            round_index=round_index,
            give_up_tokens_per_s=0.0 if best is None else GIVE_UP * best.tokens_per_s,
        )
        try:
            sample = measure(subject, self.job, plan)
        except BenchError as error:
            self.failures.append(subject.name)
            print(f"{label}  FAILED: {error}", flush=True)
            return
        self.samples.append(sample)
        duration_s = time.monotonic() - start_s
        self.durations_s[subject.name] = max(duration_s, self.durations_s.get(subject.name, 0.0))
        others = f"others {sample.foreign_cores:.1f} cores"
        print(f"{label}  {sample.tokens_per_s:6.0f} tokens/s  ({duration_s:.0f} s, {others})")
        sys.stdout.flush()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=_positive, default=5, help="rounds over all subjects (default: 5)")
    add("--iterations", type=_positive, default=5, help="measured in each launch (default: 5)")
    add("--warmup", type=_positive, default=3, help="iterations before these (default: 3)")
    add("--threads", type=_positive, nargs="+", default=[1, 2], help="settings (default: 1 2)")
    add("--subjects", nargs="+", choices=SUBJECTS, default=["decod", "pipeline", "one-process"])
    add("--time-max-s", type=float, default=900.0, help="start nothing that ends later than this")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE; - for stdout")
    add("--keep", type=Path, metavar="DIR", help="keep logs and state in this new folder")
    return parser.parse_args(arguments)


def run_bench(options: argparse.Namespace, folder: Path) -> int:
    """Measure in `folder`; return the exit code."""
    end_s = time.monotonic() + options.time_max_s
    job = write_job(folder, options.warmup + options.iterations + 1)
    bench = Bench(
        job=job,
        subjects=[SUBJECTS[name] for name in options.subjects],
        threads=options.threads,
        num_warmup=options.warmup,
        num_measured=options.iterations,
        folder=folder,
        end_s=end_s,
    )
    for round_index in range(options.rounds):
        bench.run_round(round_index)
    if bench.samples:
        print("\n" + as_text(bench.samples), flush=True)
    if options.json is not None:
        facts = {
            "num_cores": os.cpu_count(),
            "platform": platform.platform(),
            "num_rounds": options.rounds,
            "num_iterations": options.iterations,
            "failures": bench.failures,
        }
        text = json.dumps(as_json(bench.samples, facts), indent=1)
        if str(options.json) == "-":
            print(text)
        else:
            options.json.write_text(text + "\n", encoding="utf-8")
    same = loss_difference(bench.samples)[0] <= LOSS_DIFFERENCE_MAX
    measured = {sample.subject for sample in bench.samples}
    complete = measured == {subject.name for subject in bench.subjects}
    return int(bool(bench.failures) or not complete or not same)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    options = parse_options(arguments)
    stop_all_at_exit()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        return run_bench(options, options.keep.resolve())
    # State folders hold sockets, whose paths must be short. So not below a deep working directory.
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
        return run_bench(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures convergence side by side: all-reduce, and averages that are seldom, late or compressed.

    python scripts/bench_convergence.py --small
    python scripts/bench_convergence.py --scale 300k --cache DIR
    python scripts/bench_convergence.py --scale 1m --cache DIR --method h30 h30-d5-int4 --seeds 3
    python scripts/bench_convergence.py --scale 300k --cache DIR --search h10-d2
    python scripts/bench_convergence.py --scale 300k --cache DIR --report --plot losses.svg

Four replicas of a Llama-like model train in one process, with the code of a run's compute
processes, on the default corpus: ten tokens for each parameter, a cosine schedule, clipping. All
methods start from the same weights and read the same tokens. `scripts/bench/convergence.py` says
what the names of methods mean. Each has the rates that `--search` has found for it at this size,
which are kept in `scripts/bench/convergence_rates.json`.

Each training keeps one core busy, and several may share a cache. What is finished is not trained
again, and what was stopped goes on from its last checkpoint.
`--report` trains nothing: it prints the table of what is there.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.convergence import (
    ROWS,
    SCALES,
    SEARCHED,
    Method,
    Rates,
    Scale,
    keep_rates,
    method_of,
    neighbours,
    rates_of,
    settings_of,
)
from bench.convergence_report import draw, loss_of, table
from bench.replicas import Replicas

from decod.data.corpus import default_corpus
from decod.data.dataset import Dataset
from decod.run.run_config import RunConfig

CHECKPOINT_ITERATIONS = 500
"""A checkpoint after at least so many iterations, at the next average."""

SEARCH_LENGTH = 0.25
"""Rates are searched with trainings of this part of the length."""

NUM_REPORTS = 10
"""Losses that are measured on the way."""


class Training:
    """One method's training, which can be stopped at any time.

    Args:
        method: What is trained.
        run: Its run.
        scale: Its size.
        dataset: The tokens.
        path: Where the result is, without the ending.
    """

    def __init__(
        self, method: Method, run: RunConfig, scale: Scale, dataset: Dataset, path: Path
    ) -> None:
        self._method, self._run, self._scale = method, run, scale
        self._dataset = dataset
        self._result = path.with_name(f"{path.name}.json")
        self._checkpoint = path.with_name(f"{path.name}.safetensors")
        self._facts: dict[str, Any] = {}

    def train(self) -> dict[str, Any]:
        """Train to the end, or not at all if that is done. Return the result."""
        settings = settings_of(self._run)
        if self._result.exists():
            self._facts = json.loads(self._result.read_text(encoding="utf-8"))
            if self._facts["settings"] != json.loads(json.dumps(settings)):
                sys.exit(f"{self._result} has other settings; give another --cache, or remove it")
            if self._facts["finished"]:
                return self._facts
        method = self._method
        delay = method.delay or None
        replicas = Replicas(
            self._run,
            self._dataset,
            delay,
            goes_back=method.goes_back,
            anew=method.anew,
            late=method.late,
        )
        self._facts = {
            "method": self._method.name,
            "delay": self._method.delay,
            "settings": settings,
            "num_parameters": replicas.num_parameters(),
            "average_bytes": replicas.average_bytes(),
            "losses": [],
            "held_out": {},
            "seconds": 0.0,
            "finished": False,
        }
        if self._checkpoint.exists():
            self._facts = json.loads(replicas.load(self._checkpoint))
            print(f"{self._result.stem} goes on after iteration {replicas.iteration}", flush=True)
        self._train(replicas)
        return self._facts

    def _train(self, replicas: Replicas) -> None:
        losses, held_out = self._facts["losses"], self._facts["held_out"]
        # Processor time of one thread: what else runs here does not count.
        kept, start_s = replicas.iteration, time.process_time() - self._facts["seconds"]
        last = self._run.num_iterations
        report_every = -(-last // NUM_REPORTS)
        while replicas.iteration < last:
            losses.append(replicas.iterate())
            now = replicas.iteration
            if now % report_every == 0 or now == last:
                held_out[str(now)] = replicas.held_out_loss(self._scale.num_held_out)
            self._facts["seconds"] = time.process_time() - start_s
            if replicas.phase_end == now and now - kept >= CHECKPOINT_ITERATIONS:
                replicas.save(self._checkpoint, json.dumps(self._facts))
                kept = now
        self._facts["finished"] = True
        staging = self._result.with_suffix(".new")
        staging.write_text(json.dumps(self._facts) + "\n", encoding="utf-8")
        staging.replace(self._result)
        self._checkpoint.unlink(missing_ok=True)
        loss, seconds = held_out[str(last)], self._facts["seconds"]
        print(f"{self._result.stem}: held-out loss {loss:.4f}, {seconds:.0f} s", flush=True)


def search(method: Method, scale: str, dataset: Dataset, folder: Path) -> None:
    """Find the best rates of a method, one after the other, and keep them."""
    size = SCALES[scale]
    tried: dict[Rates, float] = {}

    def loss_at(rates: Rates) -> float:
        if rates not in tried:
            told = f"{rates.inner:.2e}-{rates.outer:g}-{rates.momentum:g}"
            path = folder / f"search-{method.name.replace('/', '_')}-{told}"
            run = method.run(size, rates, length=SEARCH_LENGTH)
            tried[rates] = loss_of(Training(method, run, size, dataset, path).train())
        return tried[rates]

    best = rates_of(method, scale)
    while True:
        better = (each for each in neighbours(best, method) if loss_at(each) < loss_at(best))
        found = next(better, None)
        keep_rates(scale, method.name, best, sorted(tried.items(), key=lambda each: each[1]))
        if found is None:
            return
        best = found


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", choices=SCALES, default="300k", help="size of the model (default: 300k)")
    add("--small", action="store_true", help="a comparison of seconds: --scale small")
    add("--method", nargs="+", default=list(ROWS), help="(default: the rows of the table)")
    add("--search", nargs="*", metavar="METHOD", help="search for rates (default: of all kinds)")
    add("--seeds", type=int, default=1, help="trainings of each method (default: 1)")
    add("--cache", type=Path, metavar="DIR", help="where results and checkpoints are kept")
    add("--report", action="store_true", help="train nothing, report what is there")
    add("--plot", type=Path, metavar="FILE", help="draw the losses, as PNG or SVG")
    return parser.parse_args(arguments)


def run_bench(options: argparse.Namespace, cache: Path) -> int:
    """Train what is missing, and report."""
    scale = "small" if options.small else options.scale
    folder = cache / scale
    folder.mkdir(parents=True, exist_ok=True)
    methods = [method_of(name) for name in options.method]
    with Dataset.open(default_corpus()) as dataset:
        if options.search is not None:
            for name in options.search or SEARCHED:
                search(method_of(name), scale, dataset, folder)
            return 0
        results = list[dict[str, Any]]()
        for method in methods:
            for seed in range(options.seeds):
                path = folder / f"{method.name.replace('/', '_')}-s{seed}"
                if options.report:
                    file = path.with_name(f"{path.name}.json")
                    results += [json.loads(file.read_text("utf-8"))] if file.exists() else []
                else:
                    run = method.run(SCALES[scale], rates_of(method, scale), seed)
                    training = Training(method, run, SCALES[scale], dataset, path)
                    results.append(training.train())
    print(table(results))
    if options.plot is not None:
        draw(results, options.plot)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Train and report; return the exit code."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    if options.cache is not None:
        return run_bench(options, options.cache)
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
        return run_bench(options, Path(folder))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main(sys.argv[1:]))

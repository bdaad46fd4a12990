"""Measures convergence side by side: all-reduce, DiLoCoX, its ablations, OpenDiLoCo, CocktailSGD.

    python scripts/bench_convergence.py --small
    python scripts/bench_convergence.py --scale 10m --cache DIR --method dilocox
    python scripts/bench_convergence.py --scale 10m --cache DIR --report

Four replicas of a Llama-like model train in one process, with the code of a run's compute
processes, on the default corpus. All methods start from the same weights and read the same tokens.
The arguments choose what is trained; what is finished is not trained again, and what was stopped
goes on from its last checkpoint. `--report` trains nothing: it prints the table of what is there.
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
from bench.convergence import METHODS, SCALES, Scale, settings_of
from bench.convergence_report import draw, table
from bench.replicas import Replicas

from decod.data.corpus import default_corpus
from decod.data.dataset import Dataset

CHECKPOINT_ITERATIONS = 100
"""A checkpoint after at least so many iterations, at the next average."""

SHOWN_ITERATIONS = 10
"""Iterations from one line of progress to the next."""


class Training:
    """One method's training, which can be stopped at any time.

    Args:
        method: Its name.
        scale: Its size.
        dataset: The tokens.
        folder: Where results and checkpoints are.
    """

    def __init__(self, method: str, scale: Scale, dataset: Dataset, folder: Path) -> None:
        self._method, self._scale = method, scale
        self._run = METHODS[method](scale)
        self._dataset = dataset
        self._result = folder / f"{method}.json"
        self._checkpoint = folder / f"{method}.safetensors"
        self._facts: dict[str, Any] = {}

    def train(self) -> None:
        """Train to the end, or not at all if that is done."""
        settings = settings_of(self._run)
        if self._result.exists():
            self._facts = json.loads(self._result.read_text(encoding="utf-8"))
            if self._facts["settings"] != json.loads(json.dumps(settings)):
                sys.exit(f"{self._result} has other settings; give another --cache, or remove it")
            if self._facts["finished"]:
                print(f"{self._method} is finished", flush=True)
                return
        replicas = Replicas(self._run, self._dataset)
        self._facts = {
            "method": self._method,
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
            print(f"{self._method} goes on after iteration {replicas.iteration}", flush=True)
        self._train(replicas)

    def _train(self, replicas: Replicas) -> None:
        losses, held_out = self._facts["losses"], self._facts["held_out"]
        kept, start_s = replicas.iteration, time.monotonic() - self._facts["seconds"]
        while replicas.iteration < self._run.num_iterations:
            losses.append(replicas.iterate())
            now = replicas.iteration
            if now % self._scale.report_every == 0 or now == self._run.num_iterations:
                held_out[str(now)] = replicas.held_out_loss(self._scale.num_held_out)
                print(f"{self._method} {now}  held-out loss {held_out[str(now)]:.4f}", flush=True)
            self._facts["seconds"] = time.monotonic() - start_s
            if now % SHOWN_ITERATIONS == 0:
                mean = sum(losses[-SHOWN_ITERATIONS:]) / SHOWN_ITERATIONS
                seconds = self._facts["seconds"]
                print(f"{self._method} {now}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
            if replicas.anchor == now and now - kept >= CHECKPOINT_ITERATIONS:
                self._keep(replicas)
                kept = now
        self._facts["finished"] = True
        self._write()
        self._checkpoint.unlink(missing_ok=True)

    def _keep(self, replicas: Replicas) -> None:
        replicas.save(self._checkpoint, json.dumps(self._facts))
        self._write()

    def _write(self) -> None:
        staging = self._result.with_suffix(".new")
        staging.write_text(json.dumps(self._facts) + "\n", encoding="utf-8")
        staging.replace(self._result)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", choices=SCALES, default="10m", help="size of the model (default: 10m)")
    add("--small", action="store_true", help="a comparison of seconds: --scale small")
    add("--method", choices=METHODS, nargs="+", default=list(METHODS), help="(default: all)")
    add("--cache", type=Path, metavar="DIR", help="where results and checkpoints are kept")
    add("--threads", type=int, default=1, help="of torch (default: 1)")
    add("--report", action="store_true", help="train nothing, report what is there")
    add("--plot", type=Path, metavar="FILE", help="draw the losses, as PNG or SVG")
    return parser.parse_args(arguments)


def run_bench(options: argparse.Namespace, cache: Path) -> int:
    """Train what is missing, and report."""
    name = "small" if options.small else options.scale
    folder = cache / name
    folder.mkdir(parents=True, exist_ok=True)
    if not options.report:
        with Dataset.open(default_corpus()) as dataset:
            for method in options.method:
                Training(method, SCALES[name], dataset, folder).train()
    results = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in (folder / f"{method}.json" for method in METHODS)
        if path.exists()
    ]
    print(table(results))
    if options.plot is not None:
        draw(results, options.plot)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Train and report; return the exit code."""
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    if options.cache is not None:
        return run_bench(options, options.cache)
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
        return run_bench(options, Path(folder))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main(sys.argv[1:]))

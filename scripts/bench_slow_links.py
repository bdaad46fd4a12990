"""Measures training over slow links: between homes, and where averages take most of the time.

    python scripts/bench_slow_links.py home --namespaces home-1,home-2,home-3,home-4,home-5
    python scripts/bench_slow_links.py adapter --namespaces home-1,home-2,home-3,home-4,home-5
    python scripts/bench_slow_links.py activations --namespaces home-1,home-2,home-3
    python scripts/bench_slow_links.py table --namespaces slow-1,slow-2,slow-3
    python scripts/bench_slow_links.py home --quick

Each daemon runs on a host of its own. A host is a network namespace, and the hosts are joined
already: this script changes no network. Namespaces are given by name, or as NAME=ADDRESS. Without
them, and in the fast half of `home` and `adapter`, all daemons talk over loopback.

`home` trains the model of `bench_throughput.py` with DiLoCoX on a leader and two relays in each of
two stages, over both nets in turn. `adapter` trains an adapter of that model likewise, and averages
its gradients in every iteration. `activations` compares `int8` and `int4` in one stage of two
relays, with a model that has little to compute for each byte of an activation. `table` compares
ways to average in one stage of two relays, with links so slow that an uncompressed all-reduce takes
about 100 times an iteration's compute. Exits with 1 if a run failed or had no time.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.child import BenchError, stop_all_at_exit
from bench.hosts import LOOPBACK, Host, OnHosts, find_hosts
from bench.job import NUM_RELAY_STAGES, write_base, write_run
from bench.slow_links import (
    NUM_MEMBERS,
    activations_run,
    adapter_run,
    compute_busy,
    cores_busy,
    durations,
    home_run,
    overhead_s,
    rows,
    sent_mb,
)
from bench.subject import Plan, Sample, measure

from decod.run.run_config import RunConfig
from decod.run.training_config import ActivationCompression

_ITERATION_MAX_S = 240.0
"""An iteration that takes longer has failed. All-reduces are slow on purpose."""

SLOW, FAST = "home", "fast"


@dataclass(slots=True)
class Measured:
    """One launch and its figures."""

    name: str
    sample: Sample
    figures: dict[str, Any]


@dataclass(slots=True)
class Bench:
    """All launches of an invocation."""

    folder: Path
    num_threads: int
    end_s: float
    results: list[Measured] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def launch(
        self,
        name: str,
        run: RunConfig,
        hosts: Sequence[Host],
        num_warmup: int,
        base: Path | None = None,
    ) -> Measured | None:
        """Measure a run on hosts, all of its iterations but the first ones and the last one."""
        if time.monotonic() > self.end_s:
            self.failures.append(name)
            print(f"{name}: no time left", flush=True)
            return None
        subject = OnHosts(name, hosts, NUM_MEMBERS, base)
        folder = self.folder / str(len(self.results) + len(self.failures))
        plan = Plan(
            num_threads=self.num_threads,
            num_warmup=num_warmup,
            num_measured=run.num_iterations - num_warmup - 1,
            folder=folder,
            end_s=self.end_s + _ITERATION_MAX_S,
            iteration_max_s=_ITERATION_MAX_S,
        )
        load = os.getloadavg()[0]
        try:
            sample = measure(subject, write_run(self.folder, run), plan)
        except BenchError as error:
            self.failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            return None
        moments = [each for each in subject.moments if each.iteration >= plan.num_warmup]
        relays = [node for node in subject.nodes() if node != "data"]
        figures = {
            "relays_busy": compute_busy(sample, relays),
            "data_busy": compute_busy(sample, ["data"]),
            "cores_busy": cores_busy(sample, os.cpu_count() or 1),
            "iterations_s": durations(moments),
            "sent_mb": sent_mb(moments[0], moments[-1]),
            "travel_s": moments[-1].travel_s,
            "budget_s": moments[-1].budget_s,
            "load_before": load,
        }
        result = Measured(name, sample, figures)
        self.results.append(result)
        print(as_line(result), flush=True)
        return result


def as_line(result: Measured) -> str:
    """Return one launch as a line."""
    sample, figures = result.sample, result.figures
    sent = ", ".join(f"{node} {mb:.2f}" for node, mb in figures["sent_mb"].items())
    parts = [
        f"{result.name:20} {sample.tokens_per_s:7.1f} tokens/s  {sample.iteration_s:6.2f} s",
        f"busy: relays {figures['relays_busy']:.0%} data {figures['data_busy']:.0%}"
        f" cores {figures['cores_busy']:.0%}",
        f"others {sample.foreign_cores:.1f} cores",
    ]
    if figures["travel_s"]:
        parts.append(f"average {figures['travel_s']:.1f} of {figures['budget_s'] or 0:.1f} s")
    if sent:
        parts.append(f"MB sent: {sent}")
    return "  ".join(parts)


def run_home(bench: Bench, options: argparse.Namespace) -> None:
    """Measure the run between homes beside the fast net."""
    num_hosts = 1 + NUM_RELAY_STAGES * NUM_MEMBERS
    slow, fast = hosts_of(options.namespaces, num_hosts), hosts_of(options.fast, num_hosts)
    found: dict[str, dict[int, float]] = {SLOW: {}, FAST: {}}
    base = write_base(bench.folder) if options.what == "adapter" else None
    for num_microbatches in options.microbatches:
        num_iterations = options.warmup + options.iterations + 1
        if base is None:
            run = home_run(num_microbatches, options.every, options.rank, num_iterations)
        else:
            run = adapter_run(num_microbatches, num_iterations)
        for net, hosts in ((FAST, fast), (SLOW, slow)):
            result = bench.launch(f"{net} {num_microbatches}", run, hosts, options.warmup, base)
            if result is not None:
                found[net][num_microbatches] = result.sample.iteration_s
        if all(num_microbatches in each for each in found.values()):
            ratio = found[FAST][num_microbatches] / found[SLOW][num_microbatches]
            print(f"{num_microbatches} microbatches: slow / fast {ratio:.2f}\n", flush=True)
    for net, each in found.items():
        if len(each) > 1:
            none_s, each_s = overhead_s(min(each.items()), max(each.items()))
            print(f"{net}: an iteration takes {none_s:.2f} s and {each_s:.3f} s a microbatch")


def run_activations(bench: Bench, options: argparse.Namespace) -> None:
    """Measure both formats of activations."""
    hosts = hosts_of(options.namespaces, 1 + NUM_MEMBERS)
    num_iterations = options.warmup + options.iterations + 1
    for num_microbatches in options.microbatches:
        rates = list[float]()
        for compression in (ActivationCompression.INT8, ActivationCompression.INT4):
            run = activations_run(compression, num_microbatches, num_iterations)
            name = f"{compression.value} {num_microbatches}"
            result = bench.launch(name, run, hosts, options.warmup)
            rates += [result.sample.tokens_per_s] if result is not None else []
        if len(rates) > 1:
            ratio = rates[1] / rates[0]
            print(f"{num_microbatches} microbatches: int4 / int8 {ratio:.2f}\n", flush=True)


def run_table(bench: Bench, options: argparse.Namespace) -> None:
    """Measure each way to average."""
    hosts = hosts_of(options.namespaces, 1 + NUM_MEMBERS)
    rates: dict[str, float] = {}
    compute_s = 0.0
    table = rows(options.every, options.rank, options.phases)
    if unknown := {*options.rows} - {row.name for row in table}:
        known = ", ".join(row.name for row in table)
        raise BenchError(f"there is no row {sorted(unknown)[0]!r}, but {known}")
    for index, row in enumerate(table):
        if options.rows and row.name not in options.rows:
            continue
        result = bench.launch(row.name, row.run(index), hosts, row.num_warmup)
        if result is not None:
            rates[row.name] = result.sample.tokens_per_s
            if row.name == "CocktailSGD":
                continue
            compute_s = compute_s or result.sample.iteration_s * result.figures["relays_busy"]
            if row.name == "all-reduce":
                ratio = result.sample.iteration_s / compute_s
                print(f"an iteration with all-reduce takes {ratio:.0f} times the compute")
    for name, rate in rates.items():
        if "DiLoCoX" in rates:
            print(f"{name:20} {rate:8.1f} tokens/s   DiLoCoX / it {rates['DiLoCoX'] / rate:7.2f}")


def hosts_of(names: str, num: int) -> list[Host]:
    """Return the hosts of the option, or so many on loopback.

    Raises:
        BenchError: The option names another number of hosts.
    """
    if not names:
        return [LOOPBACK] * num
    hosts = find_hosts(names)
    if len(hosts) != num:
        raise BenchError(f"{len(hosts)} namespaces are given, and {num} daemons are to run")
    return hosts


KINDS = {
    "home": run_home,
    "adapter": run_home,
    "activations": run_activations,
    "table": run_table,
}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=KINDS)
    add("--namespaces", default="", metavar="NAMES", help="of slow hosts, the leader's first")
    add("--fast", default="", metavar="NAMES", help="of the fast net's hosts (default: loopback)")
    add("--microbatches", type=int, nargs="+", default=[8, 16, 32], help="(default: 8 16 32)")
    add("--every", type=int, default=10, help="DiLoCoX's H (default: 10)")
    add("--rank", type=int, help="of factors (default: 32 at home, 256 in the table)")
    add("--warmup", type=int, default=3, help="iterations at home (default: 3)")
    add("--iterations", type=int, default=10, help="measured at home (default: 10)")
    add("--rows", nargs="+", default=[], metavar="ROW", help="of the table (default: all)")
    add("--phases", type=int, default=2, help="of DiLoCoX that the table measures (default: 2)")
    add("--threads", type=int, default=1, help="of each compute process (default: 1)")
    add("--time-max-s", type=float, default=720.0, help="start nothing after this")
    add("--quick", action="store_true", help="only see whether everything runs")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    options = parser.parse_args(arguments)
    if options.rank is None:
        options.rank = 256 if options.what == "table" else 32
    if options.quick:
        options.every, options.microbatches, options.iterations, options.phases = 2, [8], 3, 1
    return options


def run_bench(options: argparse.Namespace, folder: Path) -> int:
    """Measure in `folder`; return the exit code."""
    bench = Bench(folder, options.threads, time.monotonic() + options.time_max_s)
    try:
        KINDS[options.what](bench, options)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        text = json.dumps([asdict(result) for result in bench.results], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(bench.failures))


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    options = parse_options(arguments)
    stop_all_at_exit()
    # State folders hold sockets, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
        return run_bench(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures what collaborative training costs: two loops with decod beside plain torch and hivemind.

    python scripts/bench_optimizer.py
    python scripts/bench_optimizer.py --hivemind PYTHON --batch 128 --steps 16 --overlap
    python scripts/bench_optimizer.py --namespaces host-1,host-2 --compression int8 \
        --hivemind PYTHON --hivemind-compression fp16

Each loop is a process with the same model, data, optimizer and number of threads. With plain torch
the loops know nothing of each other, and step after as many samples. So what is missing of its
throughput is what collaboration costs: time in which loops wait, and processors that they share
with nodes. Subjects take turns, and stand still meanwhile; medians are compared. Without
namespaces, all talk over loopback. `--hivemind` names an interpreter with `hivemind==1.1.12` and
`psutil`. Exits with 1 if a subject failed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.child import BenchError, Child, stop_all_at_exit
from bench.hosts import LOOPBACK, Host, find_hosts
from bench.optimizer_peer import Loop

_START_MAX_S = 120.0
_ROUND_MAX_S = 180.0


class Group:
    """The running loops of one subject. Use it in `with`."""

    def __init__(self, loop: Loop, hosts: Sequence[Host], folder: Path, python: str) -> None:
        self._loop, self._hosts, self._folder, self._python = loop, hosts, folder, python
        self._loops: list[Child] = []

    def __enter__(self) -> "Group":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        first = ""
        for index, host in enumerate(self._hosts):
            folder = self._folder / f"{self._loop.subject}-{index}"
            folder.mkdir(parents=True, exist_ok=True)
            loop = replace(self._loop, peer=index, folder=str(folder / "state"), host=host.address)
            child = Child(
                ("-m", "bench.optimizer_peer", loop.to_json()),
                num_threads=loop.threads,
                log=folder / "log",
                place=replace(host.place, listens=True, python=self._python),
            )
            child.name = f"{loop.subject} {index}"
            self._loops.append(child)
            child.tell(f"PEERS {first}")
            found = self._answer(child, "READY", _START_MAX_S)
            first = first or found

    def __exit__(self, *_: object) -> None:
        for child in self._loops:
            child.kill()

    def measure(self, seconds: float) -> dict[str, float]:
        """Train so long; return samples/s of all together, and what else was seen.

        `longest_s` is the longest step, and `cpu_ms` the processor time of all processes for one
        sample.

        Two rounds come before it, since the loops have stood still meanwhile.
        """
        self._tell("WARM")
        for child in self._loops:
            self._answer(child, "WARMED", _ROUND_MAX_S)
        self._tell(f"GO {seconds}")
        limit_s = seconds + _ROUND_MAX_S
        found = [json.loads(self._answer(child, "DONE", limit_s)) for child in self._loops]
        return {
            "samples_per_s": sum(each["samples"] / each["seconds"] for each in found),
            "rounds": max(each["rounds"] for each in found),
            "longest_s": max(each["longest_s"] for each in found),
            "cpu_ms": 1e3
            * sum(each["cpu_s"] for each in found)
            / sum(each["samples"] for each in found),
        }

    def _tell(self, line: str) -> None:
        for child in self._loops:
            child.tell(line)

    def _answer(self, child: Child, word: str, timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while True:
            _, line = child.next_line(deadline_s)
            first, _, rest = line.partition(" ")
            if first == word:
                return rest


def measure_all(
    loop: Loop, hosts: Sequence[Host], pythons: dict[str, str], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Measure all subjects in turns; return what came of each turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as name, ExitStack() as stack:
        groups = {
            subject: stack.enter_context(
                Group(_as_subject(loop, subject, options), hosts, Path(name), python)
            )
            for subject, python in pythons.items()
        }
        for _ in range(options.repeats):
            for subject, group in groups.items():
                sample = group.measure(options.seconds)
                found[subject].append(sample)
                words = "  ".join(f"{key} {value:8.2f}" for key, value in sample.items())
                print(f"{subject:10} {words}", flush=True)
    return found


def _as_subject(loop: Loop, subject: str, options: argparse.Namespace) -> Loop:
    own = options.hivemind_compression if subject == "hivemind" else None
    return replace(loop, subject=subject, compression=own or loop.compression)


def report(found: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians, and how much each loses beside plain torch."""
    for subject, samples in found.items():
        # Turn by turn: what else the machine does changes slowly.
        pairs = zip(samples, found["plain"], strict=True)
        lost = statistics.median(1 - a["samples_per_s"] / b["samples_per_s"] for a, b in pairs)
        rate, cpu_ms = (
            statistics.median(each[key] for each in samples) for key in ("samples_per_s", "cpu_ms")
        )
        print(f"{subject:10} {rate:9.1f} samples/s  loses {lost:6.1%}  {cpu_ms:.3f} ms CPU/sample")


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--width", type=int, default=1024, help="of the model's layers (default: 1024)")
    add("--layers", type=int, default=10, help="of the model (default: 10, 10.5 M parameters)")
    add("--batch", type=int, default=64, help="samples of a step (default: 64)")
    add("--steps", type=int, default=16, help="of each loop in a round (default: 16)")
    add("--threads", type=int, default=1, help="of each loop (default: 1)")
    add("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    add("--repeats", type=int, default=5, help="measurements of each subject (default: 5)")
    add("--overlap", action="store_true", help="don't wait for averages")
    add("--local", action="store_true", help="step at once, and average parameters")
    add("--compression", default="none", help="of averages")
    add("--hivemind", metavar="PYTHON", help="interpreter with hivemind")
    known = "none, fp16 or int8 (default: as decod)"
    add("--hivemind-compression", metavar="NAME", help=f"of hivemind's averages: {known}")
    add("--namespaces", metavar="NAMES", help="network namespaces, one for each loop")
    options = parser.parse_args(arguments)
    hosts = find_hosts(options.namespaces) if options.namespaces else [LOOPBACK, LOOPBACK]
    pythons = {"plain": sys.executable, "decod": sys.executable}
    if options.hivemind:
        pythons["hivemind"] = options.hivemind
    loop = Loop(
        subject="plain",
        peer=0,
        folder="",
        width=options.width,
        layers=options.layers,
        batch=options.batch,
        steps=options.steps,
        num_peers=len(hosts),
        threads=options.threads,
        overlap=options.overlap,
        compression=options.compression,
        local=options.local,
    )
    stop_all_at_exit()
    try:
        report(measure_all(loop, hosts, pythons, options))
    except BenchError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

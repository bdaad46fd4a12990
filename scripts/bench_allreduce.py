"""Measures an all-reduce of 100 MB: decod's averager beside gloo and hivemind.

    python scripts/bench_allreduce.py
    python scripts/bench_allreduce.py --namespaces host-1,host-2,host-3,host-4 --mbit 100

Each member is a process, and decod's members have a compute process each, as a node has. All reduce
the same tensors, and each average is compared with the right one. Without namespaces, all members
talk over loopback. `--namespaces` names network namespaces that are joined already, one for each
member: this script lays out no network. `--mbit` is the rate of each host's link, from which the
time at line rate follows. hivemind needs an environment of its own (`hivemind==1.1.12`, `psutil`,
`numpy<2.4`): `--hivemind-python` names its interpreter. Exits with 1 if an average was wrong, or a
subject failed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.averaging import ERROR_MAX
from bench.averaging_report import HEADER, SIZE_BYTES, Sample, as_line, median_s
from bench.child import BenchError, Child, stop_all_at_exit
from bench.hosts import LOOPBACK, Host, find_hosts

_START_MAX_S = 120.0
_REDUCE_MAX_S = 300.0
"""An all-reduce that takes longer has failed."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program that can reduce."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    precision: str = "float32"
    python: str = sys.executable


SUBJECTS = {
    "gloo": Subject("gloo", "bench.averaging_gloo"),
    "hivemind": Subject("hivemind", "bench.averaging_hivemind"),
    "decod": Subject("decod", "bench.averaging_node"),
    "decod-int4": Subject(
        "decod int4", "bench.averaging_node", ("--compression", "int4"), precision="int4"
    ),
}
"""gloo first: the others are compared with it."""


class Group:
    """The running members of one subject. Use it in `with`."""

    def __init__(
        self, subject: Subject, hosts: Sequence[Host], folder: Path, num_threads: int
    ) -> None:
        self._subject, self._hosts = subject, hosts
        self._members: list[Child] = []
        self._folder, self._num_threads = folder, num_threads

    def __enter__(self) -> "Group":
        subject, num = self._subject, len(self._hosts)
        common = ("--members", str(num), "--threads", str(self._num_threads), *subject.options)
        rendezvous = ("--rendezvous", str(self._folder / "rendezvous"))
        try:
            for index, host in enumerate(self._hosts):
                more = rendezvous if subject.module == "bench.averaging_gloo" else ()
                child = Child(
                    ("-m", subject.module, "--member", str(index), *common, *more),
                    num_threads=self._num_threads,
                    log=self._folder / f"log-{index}",
                    environment={"GLOO_SOCKET_IFNAME": host.interface()},
                    place=replace(host.place, listens=True, python=subject.python),
                )
                self._members.append(child)
            ports = [self._answer(member, "LISTENS", _START_MAX_S) for member in self._members]
            addresses = [
                f"{host.address}:{port}" for host, port in zip(self._hosts, ports, strict=True)
            ]
            self._tell("PEERS", *addresses)
            for member in self._members:
                self._answer(member, "READY", _START_MAX_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.terminate()
        for member in self._members:
            member.stop()

    def reduce(self) -> Sample:
        """Reduce once."""
        self._tell("GO")
        found = [
            json.loads(self._answer(member, "DONE", _REDUCE_MAX_S)) for member in self._members
        ]
        return Sample(
            self._subject.name,
            len(self._hosts),
            seconds=max(each["end_s"] for each in found) - min(each["start_s"] for each in found),
            cpu_s=sum(each["cpu_s"] for each in found),
            error=max(each["error"] for each in found),
        )

    def _tell(self, *words: str) -> None:
        for member in self._members:
            member.tell(" ".join(words))

    def _answer(self, member: Child, word: str, timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while True:
            _, line = member.next_line(deadline_s)
            first, _, rest = line.partition(" ")
            if first == word:
                return rest


def measure(
    subject: Subject, hosts: Sequence[Host], folder: Path, options: argparse.Namespace
) -> list[Sample]:
    """Reduce some times with one subject; return the results but for those that warm up."""
    folder.mkdir(parents=True)
    with Group(subject, hosts, folder, options.threads) as group:
        samples = [group.reduce() for _ in range(options.warmup + options.repeats)]
    return samples[options.warmup :]


def chosen(names: Sequence[str], hivemind_python: str | None) -> list[Subject]:
    """Return the subjects to measure, gloo first; say which can't be measured."""
    subjects = [subject for name, subject in SUBJECTS.items() if name in names]
    hivemind = SUBJECTS["hivemind"]
    if hivemind in subjects:
        if hivemind_python is None:
            print("hivemind is not measured: it needs --hivemind-python", flush=True)
            subjects.remove(hivemind)
        else:
            subjects[subjects.index(hivemind)] = replace(hivemind, python=hivemind_python)
    return subjects


def run_bench(options: argparse.Namespace, folder: Path) -> int:
    """Measure in `folder`; return the exit code."""
    hosts = [LOOPBACK] * max(options.members)
    if options.namespaces:
        hosts = find_hosts(options.namespaces)
    subjects = chosen(options.subjects, options.hivemind_python)
    samples: list[Sample] = []
    failed = False
    load = os.getloadavg()[0]
    print(f"{SIZE_BYTES / 1e6:.0f} MB of float32; load before: {load:.1f}\n{HEADER}", flush=True)
    for num_members in options.members:
        gloo_s: float | None = None
        for subject in subjects:
            place = folder / f"{subject.name.replace(' ', '-')}-{num_members}"
            try:
                found = measure(subject, hosts[:num_members], place, options)
            except BenchError as error:
                failed = True
                print(f"{num_members:7}  {subject.name:12} FAILED: {error}", flush=True)
                continue
            failed |= max(sample.error for sample in found) > ERROR_MAX[subject.precision]
            gloo_s = median_s(found) if subject is SUBJECTS["gloo"] else gloo_s
            print(as_line(found, options.mbit, gloo_s), flush=True)
            samples += found
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in samples], indent=1) + "\n")
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--members", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    add("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="(default: all)")
    add("--namespaces", metavar="NAME,NAME,...", help="network namespaces, one for each member")
    add("--mbit", type=float, help="rate of each host's link, both ways, in Mbit/s")
    add("--repeats", type=int, default=5, help="measured (default: 5)")
    add("--warmup", type=int, default=1, help="before these (default: 1)")
    add("--threads", type=int, default=1, help="of each computing process (default: 1)")
    add("--hivemind-python", metavar="PATH", help="of an environment with hivemind and psutil")
    add("--json", type=Path, metavar="FILE", help="also write every sample to FILE")
    add("--keep", type=Path, metavar="DIR", help="keep logs in this new folder")
    options = parser.parse_args(arguments)
    if min(options.members) < 2 or options.repeats < 1:
        parser.error("an average needs two members, and a measurement one repeat")
    stop_all_at_exit()
    try:
        if options.keep is not None:
            options.keep.mkdir(parents=True)
            return run_bench(options, options.keep.resolve())
        with tempfile.TemporaryDirectory(prefix="decod-bench-") as folder:
            return run_bench(options, Path(folder))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

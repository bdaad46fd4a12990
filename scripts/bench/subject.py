"""The subjects of the throughput measurement, and the measurement of one launch.

All are measured alike. The subject's processes run the job, and one of them prints a line an
iteration. This process records the instants at which the lines arrive. The first iterations are a
warm-up. The rate is that of the others, from the last warm-up line to the last line.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import override

from bench.child import Child
from bench.job import NUM_PIPELINE_STAGES, NUM_RELAY_STAGES, Job, write_run
from decod.daemon.control import ask
from decod.errors import DecodError
from decod.model.hf import built_model, config_to_hf
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.model.writing import ModelWriter

_ITERATION = re.compile(r"iteration\s+(\d+)(?: of \d+)?\s+loss\s+([0-9.]+)")
JOIN_STRING = re.compile(r"join string:\s*(\S+)")

START_MAX_S = 60.0
_ITERATION_MAX_S = 60.0
_STATUS_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The results of one launch of a subject."""

    subject: str
    num_threads: int
    tokens_per_s: float
    iteration_s: float
    """Mean duration of a measured iteration."""
    losses: Mapping[int, float]
    """Mean loss by iteration."""
    cpu_s: Mapping[str, float]
    """Processor seconds per measured iteration, by process."""
    timing: Mapping[str, Mapping[str, float]]
    """The nodes' own measurements of their time, by process: seconds per iteration. decod only."""
    foreign_cores: float
    """Mean number of cores that other work kept busy meanwhile."""
    round_index: int = 0


@dataclass(slots=True)
class Running:
    """The processes of a running subject."""

    announcer: Child
    """The process that prints a line an iteration."""
    children: dict[str, Child] = field(default_factory=dict)


class Subject(ABC):
    """A program that can do the job."""

    name: str

    @abstractmethod
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        """Start its processes.

        Args:
            job: The job to do.
            num_threads: Threads of each computing process.
            folder: An empty folder for logs and state.
            running: Gets each process as soon as it runs, so that the caller can end it.
        """

    def loss(self, iteration: int, printed: float, folder: Path) -> float:  # noqa: ARG002
        """Return the loss of an iteration that has just been announced."""
        return printed

    def timing(self, folder: Path) -> dict[str, dict[str, float]]:  # noqa: ARG002
        """Return each process's own measurements of its time so far, in seconds by purpose."""
        return {}


class OneProcess(Subject):
    """The baseline of a plain loop in one process."""

    name = "one process"

    def __init__(self, *, device: str = "cpu", compiles: bool = False) -> None:
        """Take the device, and whether torch compiles the blocks."""
        self._options = ("--device", device, *(("--compile",) if compiles else ()))

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        options = ("--run", str(job.run_file), "--threads", str(num_threads), *self._options)
        child = Child(
            ("-m", "bench.one_process", *options), num_threads=num_threads, log=folder / "log"
        )
        running.append(child)
        return Running(child, {"process": child})


class Pipeline(Subject):
    """The baseline of torch.distributed.pipelining, with 1F1B over gloo."""

    name = "torch pipeline"

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        options = ("--run", str(job.run_file), "--threads", str(num_threads))
        children = {}
        for rank in range(NUM_PIPELINE_STAGES):
            place = ("--rank", str(rank), "--rendezvous", str(folder / "rendezvous"))
            children[f"rank {rank}"] = Child(
                ("-m", "bench.pipeline", *options, *place),
                num_threads=num_threads,
                log=folder / f"log-{rank}",
                environment={"GLOO_SOCKET_IFNAME": "lo"},
            )
            running.append(children[f"rank {rank}"])
        return Running(children[f"rank {NUM_PIPELINE_STAGES - 1}"], children)


class Decod(Subject):
    """One data node and some relays in each stage, as daemons."""

    name = "decod"

    def __init__(
        self,
        num_relays: int = 1,
        *,
        module: str = "decod",
        device: str = "cpu",
        num_stages: int = NUM_RELAY_STAGES,
        of_relays: tuple[str, ...] = (),
        begun: Callable[[str, int], None] = lambda _name, _pid: None,
    ) -> None:
        """Take the relays of each stage, the module that is run, and relays' options.

        `begun` is called with the name and the process id of each node that has been started.
        """
        self._module, self._device, self._begun = module, device, begun
        self._of_relays = of_relays
        self._stages = {
            f"relay-{stage_index}-{number}": stage_index
            for number in range(num_relays)
            for stage_index in range(1, num_stages + 1)
        }

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        deadline_s = time.monotonic() + START_MAX_S
        where = ("--listen", "127.0.0.1:0", "--device", self._device)
        options = (*where, "--threads", str(num_threads))

        def launch(name: str, *arguments: str) -> Child:
            child = Child(
                ("-m", self._module, *arguments, *options, "--state-dir", str(folder / name)),
                num_threads=num_threads,
                log=folder / f"log-{name}",
            )
            running.append(child)
            self._begun(name, child.process.pid)
            return child

        leader = launch("data", "leader", str(job.run_file), *self._of_leader(job))
        children = {"data": leader}
        while (match := JOIN_STRING.search(leader.next_line(deadline_s)[1])) is None:
            pass
        for name, stage_index in self._stages.items():
            children[name] = launch(
                name, "join", match[1], "--stage", str(stage_index), *self._of_relays
            )
        return Running(leader, children)

    def _of_leader(self, job: Job) -> tuple[str, ...]:  # noqa: ARG002
        """Return the leader's own options."""
        return ()

    @override
    def loss(self, iteration: int, printed: float, folder: Path) -> float:
        # The line is rounded for people. The status has all digits.
        status = ask_node(folder / "data")
        if status.get("iteration") == iteration and isinstance(status.get("loss"), float):
            return float(status["loss"])
        return printed

    @override
    def timing(self, folder: Path) -> dict[str, dict[str, float]]:
        found = {name: find_timing(ask_node(folder / name)) for name in ("data", *self._stages)}
        return {name: timing for name, timing in found.items() if timing}


class DecodBuilt(Decod):
    """The same with blocks that transformers builds."""

    name = "decod, transformers"

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        model = built_model(config_to_hf(job.run.model))
        run = replace(job.run, name="bench-built", model=model)
        built = write_run(job.run_file.parent, run)
        return super().start(built, num_threads, folder, running)

    @override
    def _of_leader(self, job: Job) -> tuple[str, ...]:
        folder = job.run_file.parent / "model"
        if not folder.exists():
            model = job.run.model
            with closing(ModelWriter(folder, model)) as writer:
                for name, shape in model_shapes(model).items():
                    weight = initial_weight(model, seed=job.run.seed, name=name, shape=shape)
                    array: Any = weight.numpy()
                    writer.write(name, memoryview(array).cast("B"))
                writer.finish()
        return ("--init", str(folder))


def ask_node(state_dir: Path) -> dict[str, Any]:
    """Return the status of the daemon with this state folder; empty if it does not answer."""
    with suppress(DecodError):
        return dict(ask(state_dir, {"command": "status"}, timeout_s=_STATUS_MAX_S))
    return {}


def find_timing(status: Mapping[str, Any]) -> dict[str, float]:
    """Return the `timing` object of the answering node: seconds since its start, by purpose.

    Empty if the daemon gives none.
    """
    node = status.get("node")
    for holder in (status, node if isinstance(node, dict) else {}):
        timing = holder.get("timing")
        if isinstance(timing, dict):
            return {
                name: float(value)
                for name, value in timing.items()
                if isinstance(value, (int, float)) and name.endswith("_s")
            }
    return {}


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one launch."""

    num_threads: int
    """Threads of each computing process."""
    num_warmup: int
    num_measured: int
    """The job must have at least one iteration more, so that no process leaves during the last."""
    folder: Path
    """A folder for logs and state. It is created."""
    end_s: float
    """Instant by which the launch must be over."""
    round_index: int = 0
    give_up_tokens_per_s: float = 0.0
    """A launch that is slower than this after one measured iteration is cut short."""
    iteration_max_s: float = _ITERATION_MAX_S
    """Silence after which a launch has failed."""


def measure(subject: Subject, job: Job, plan: Plan) -> Sample:
    """Launch a subject, let it do the job, end it, and return the results.

    Raises:
        BenchError: The subject failed, or was silent for too long.
    """
    assert job.run.num_iterations > plan.num_warmup + plan.num_measured, job.run.num_iterations
    plan.folder.mkdir(parents=True)
    started: list[Child] = []
    try:
        running = subject.start(job, plan.num_threads, plan.folder, started)
        return _watch(subject, running, job, plan)
    finally:
        for child in started:
            child.terminate()
        for child in started:
            child.stop()


@dataclass(frozen=True, slots=True)
class _Mark:
    """The clocks at the end of an iteration. Seconds since the processes' start."""

    instant_s: float
    cpu_s: Mapping[str, float]
    timing: Mapping[str, Mapping[str, float]]
    machine_s: float
    """Processor time of all processes on the machine."""


def _watch(subject: Subject, running: Running, job: Job, plan: Plan) -> Sample:
    losses: dict[int, float] = {}
    first: _Mark | None = None
    begun = 0
    """The last iteration of the warm-up."""
    silence_max_s = START_MAX_S + plan.iteration_max_s
    while True:
        deadline_s = min(time.monotonic() + silence_max_s, plan.end_s)
        instant_s, line = running.announcer.next_line(deadline_s)
        match = _ITERATION.search(line)
        if match is None:
            continue
        silence_max_s = plan.iteration_max_s
        iteration = int(match[1])
        losses[iteration] = subject.loss(iteration, float(match[2]), plan.folder)
        if iteration < plan.num_warmup:
            continue
        if first is None:
            # The line of a short iteration may be left out.
            first, begun = _mark(subject, running, instant_s, plan.folder), iteration
            continue
        num_measured = iteration - begun
        rate = job.tokens_per_iteration * num_measured / (instant_s - first.instant_s)
        if num_measured >= plan.num_measured or rate < plan.give_up_tokens_per_s:
            last = _mark(subject, running, instant_s, plan.folder)
            own_s = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
            foreign_s = last.machine_s - first.machine_s - own_s
            return Sample(
                subject=subject.name,
                num_threads=plan.num_threads,
                tokens_per_s=rate,
                iteration_s=(instant_s - first.instant_s) / num_measured,
                losses=losses,
                cpu_s=_per_iteration(first.cpu_s, last.cpu_s, num_measured),
                timing={
                    name: _per_iteration(first.timing[name], timing, num_measured)
                    for name, timing in last.timing.items()
                    if name in first.timing
                },
                foreign_cores=max(0.0, foreign_s) / (instant_s - first.instant_s),
                round_index=plan.round_index,
            )


def _mark(subject: Subject, running: Running, instant_s: float, folder: Path) -> _Mark:
    busy = psutil.cpu_times()
    return _Mark(
        instant_s,
        processor_times(running.children),
        subject.timing(folder),
        machine_s=busy.user + busy.nice + busy.system,
    )


def _per_iteration(
    before: Mapping[str, float], after: Mapping[str, float], num_iterations: int
) -> dict[str, float]:
    return {
        name: (total_s - before[name]) / num_iterations
        for name, total_s in after.items()
        if name in before
    }


def processor_times(children: Mapping[str, Child]) -> dict[str, float]:
    """Return user plus system seconds so far, of every child and of its descendants."""
    times = {}
    for name, child in children.items():
        with suppress(psutil.Error):
            process = psutil.Process(child.process.pid)
            times[name] = _cpu_s(process)
            computing = process.children(recursive=True)
            if computing:
                times[f"{name} compute"] = sum(_cpu_s(each) for each in computing)
    return times


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)

"""Daemons on one device: their throughput beside one process, and the memory that a pause frees."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from bench.child import Child, stop_all, stop_all_at_exit
from bench.job import Job, write_run
from bench.subject import Decod, OneProcess, Plan, Running, Sample, ask_node, measure
from typing_extensions import override

from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig
from gpu.result import Measure
from gpu.setting import Setting, batch_of, llama

RATIO_MIN = 0.9
"""Target: tokens a second of a data node and two relays, over those of one process."""

FREE_S_MAX = 1.0
"""Target: time from the end of a node's work until the device's memory is free."""

_OF_RELAYS = ("--capacity", "4")
"""Microbatches at a relay. Each node plans with the device as if it were alone there."""

_WORKING = ("training", "aggregating", "draining")
_STEP_S = 0.02
_PATIENCE_S = 60.0


def check_daemons(setting: Setting) -> list[Measure]:
    """Compare a data node and two relays on the device with one process on it."""
    stop_all_at_exit()
    with tempfile.TemporaryDirectory(prefix="decod-gpu-") as name:
        folder = Path(name)
        job = _job(setting, folder, num_iterations=setting.pick(12, 60))
        found = []
        for subject in (
            OneProcess(device=setting.device, compiles=setting.on_cuda),
            Decod(device=setting.device, of_relays=_OF_RELAYS),
        ):
            plan = Plan(
                num_threads=setting.pick(4, 1),
                num_warmup=2,
                num_measured=setting.pick(3, 2),
                folder=folder / subject.name.replace(" ", "-"),
                end_s=time.monotonic() + 300.0,
            )
            found.append(measure(subject, job, plan))
    one, decod = found
    return [
        Measure("tokens/s, one process compiled", one.tokens_per_s, "tokens/s"),
        Measure("tokens/s, three daemons", decod.tokens_per_s, "tokens/s"),
        Measure(
            "daemons over one process",
            decod.tokens_per_s / one.tokens_per_s,
            "",
            at_least=RATIO_MIN if setting.on_cuda else None,
        ),
        *_losses(one, decod),
    ]


def _losses(one: Sample, decod: Sample) -> list[Measure]:
    """Return the losses of the last iteration that both have told: it was the same training."""
    both = one.losses.keys() & decod.losses.keys()
    return [
        Measure(f"loss of iteration {max(both)}, {name}", sample.losses[max(both)])
        for name, sample in (("one process", one), ("daemons", decod))
        if both
    ]


def _job(setting: Setting, folder: Path, num_iterations: int) -> Job:
    num_blocks = setting.pick(5, 4)
    run = RunConfig(
        name="gpu-check",
        num_iterations=num_iterations,
        model=llama(setting, "8b", num_blocks),
        stages=StagesConfig(num_relay_stages=2, num_first_blocks=setting.pick(1, 0)),
        batch=batch_of(setting, 2, num_microbatches=setting.pick(32, 4)),
        optimizer=OptimizerConfig(lr=1e-4),
    )
    return write_run(folder, run)


# --- a pause --------------------------------------------------------------------------------------


class _TwoInStageOne(Decod):
    """One data node, two relays of stage 1, and one of stage 2: one of the two may pause."""

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        self._stages["relay-1-1"] = 1
        return super().start(job, num_threads, folder, running)


def check_free(setting: Setting) -> list[Measure]:
    """Pause a relay with `--free-device`, and watch its device's memory come back."""
    stop_all_at_exit()
    with tempfile.TemporaryDirectory(prefix="decod-gpu-") as name:
        folder, children = Path(name), list[Child]()
        job = _job(setting, folder, num_iterations=10_000)
        try:
            relays = _TwoInStageOne(device=setting.device, of_relays=_OF_RELAYS)
            relays.start(job, 1, folder, children)
            return _freed(setting, folder / "relay-1-1", children[-1])
        finally:
            stop_all()


def _freed(setting: Setting, state_dir: Path, relay: Child) -> list[Measure]:
    _until(lambda: ask_node(state_dir).get("iteration", 0) >= 1, "a step of the relay's", 120.0)
    pid = _computing(relay)
    held_bytes = _device_bytes(setting, pid)
    command = [sys.executable, "-m", "decod", "pause", "--free-device", "--state-dir"]

    def allowed() -> bool:
        asked = subprocess.run([*command, str(state_dir)], capture_output=True, check=False)
        return asked.returncode == 0

    # It is refused while this is the only member of its stage.
    _until(allowed, "the leave to pause")
    asked_s = time.monotonic()
    # It takes part in one more iteration, or two. Then its node ends, and a stand-in answers.
    _until(lambda: _node(state_dir).get("state") not in _WORKING, "the end of its work")
    paused_s = time.monotonic()
    _until(lambda: not psutil.pid_exists(pid), "the end of its compute process")
    _until(lambda: not _device_bytes(setting, pid), "its memory")
    freed_s = time.monotonic()
    return [
        Measure("held before the pause", held_bytes / 2**30, "GiB"),
        Measure("until its work had ended", paused_s - asked_s, "s"),
        Measure("then until the memory was free", freed_s - paused_s, "s", at_most=FREE_S_MAX),
        Measure("left on the device", _device_bytes(setting, pid), "bytes", at_most=0),
    ]


def _node(state_dir: Path) -> dict[str, object]:
    found = ask_node(state_dir).get("node")
    return found if isinstance(found, dict) else {}


def _computing(relay: Child) -> int:
    """Return the process id of a relay's compute process."""
    for child in psutil.Process(relay.process.pid).children():
        if "decod.worker" in child.cmdline():
            return int(child.pid)
    raise RuntimeError("the relay has no compute process")


def _device_bytes(setting: Setting, pid: int) -> int:
    """Return what a process holds of the device's memory. On a CPU: its resident memory."""
    if not setting.on_cuda:
        return int(psutil.Process(pid).memory_info().rss) if psutil.pid_exists(pid) else 0
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        number, _, mebibytes = line.partition(",")
        if number.strip() == str(pid):
            return int(mebibytes) << 20
    return 0


def _until(is_so: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > end_s:
            raise RuntimeError(f"{what} did not come in {patience_s:.0f} s")
        time.sleep(_STEP_S)

"""How much memory is free, and a compute process that has run out of it."""

import os
import resource
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch

from decod.devices import is_lost, ran_out
from decod.host_limits import host_free_bytes
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.jobs import DoNothing
from decod.system import anonymous_file
from decod.worker.device import Arena
from decod.worker.job_methods import JobRunner
from tests.support.raw_compute import Node
from tests.unit.worker.test_runner import CONFIGURE

MB = MicrobatchId(1, 0, 0)
MIB = 1 << 20
TOKENS, WIDTH = 1024, 16
WIDE = CONFIGURE | {
    # Its activations are small, and what its blocks keep takes 32 MiB a tensor.
    "model": {
        "vocab_size": 19,
        "hidden_size": WIDTH,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
    },
    "batch": {"sequence_length": 64, "microbatch_size": TOKENS // 64},
}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GiB)"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_only_a_lack_of_memory_is_one(error: Exception, expected: bool) -> None:
    assert ran_out(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_a_device_that_is_lost_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_lost(error) is expected


def test_a_host_has_no_more_than_the_system_says() -> None:
    assert 0 < host_free_bytes() <= psutil.virtual_memory().total


def test_a_job_without_memory_is_refused_and_the_process_goes_on() -> None:
    """The system refuses memory here: nothing is made to look as if it did."""
    with closing(Node()) as node:
        node.configure(WIDE, device="cpu")
        node.result(jobs.Build(1))
        entry = node.write(0, np.ones((TOKENS, WIDTH), dtype=np.float32))
        output = {"offset": entry["num_bytes"], "num_bytes": entry["num_bytes"]}
        _limit(node, psutil.Process(node.process.pid).memory_info().vms + 8 * MIB)
        refused = node.ask(jobs.Forward(MB), [entry], [output])
        assert refused["ok"] is False
        assert refused["error"]["code"] == "E-HW-003"
        assert refused["error"]["what"] == "out of memory in a forward job"
        assert "can't allocate memory" in refused["error"]["why"]
        backward = node.ask(jobs.Backward(MB), [entry], [output])
        assert backward["error"]["code"] == "E-TRN-005", "nothing of it is held"
        _limit(node, resource.RLIM_INFINITY)
        node.result(jobs.Forward(MB), [entry], [output])
        node.result(jobs.Backward(MB), [entry], [output])


def test_a_limit_of_the_process_counts_as_its_memory() -> None:
    with closing(Node()) as node:
        node.result(DoNothing())
        _limit(node, psutil.Process(node.process.pid).memory_info().vms + 64 * MIB)
        assert node.configure(CONFIGURE, device="cpu")["memory_bytes"] <= 64 * MIB


def _limit(node: Node, num_bytes: int) -> None:
    resource.prlimit(node.process.pid, resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


def test_what_a_failed_job_has_made_is_free_when_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor = anonymous_file("arena")
    runner = JobRunner(Arena(descriptor))
    freed: list[str] = []

    class Made:
        def __del__(self) -> None:
            freed.append("made")

    def fail(_: object) -> dict[str, object]:
        made = Made()
        raise torch.OutOfMemoryError(f"no room beside {id(made)}")

    monkeypatch.setitem(runner._kinds, "do_nothing", (DoNothing, fail))
    reply = runner.run({"job": 1, "kind": "do_nothing"})
    assert reply["error"]["code"] == "E-HW-003"
    assert freed == ["made"]
    monkeypatch.undo()
    assert runner.run({"job": 2, "kind": "do_nothing"})["ok"]
    os.close(descriptor)

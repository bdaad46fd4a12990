"""A rank that ends within a collective, while rank 0 waits there for its part."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from threading import Timer
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from torch import Tensor

from decod.protocol.core.jobs import Backward, BaseJob, Build, Forward, Square
from decod.train.ranks import Mirror
from decod.worker import job_methods
from decod.worker.device import Arena
from decod.worker.ranks import crew, mirror_runner
from decod.worker.ranks.crew import RankLostError
from decod.worker.ranks.group import FreeMemory, add_up
from decod.worker.ranks.mirror_runner import MirrorRunner
from tests.support.raw_compute import Here
from tests.support.systems import linux_alone
from tests.support.waiting_node import CONFIGURE, MB

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STOPPED_S = 0.3
GONE_S = 30.0
"""Seconds on a busy machine. A collective would time out after an hour."""


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_rank_that_ends_in_a_collective_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    with closing(Here()) as here:
        here.runner.ends = said.append
        (facts,) = here.configure(CONFIGURE)["ranks"]
        rank = psutil.Process(facts["pid"])
        here.result(Build(1))
        size = 2 * 8 * 16 * 4
        regions = [{"offset": index * size, "num_bytes": size} for index in range(2)]
        for job in (Forward(MB), Backward(MB)):
            here.result(job, regions[:1], regions[1:])

        def add_up_alone(sum_P: Tensor) -> None:
            """Wait for a rank that stands still, and then is no more."""
            rank.send_signal(signal.SIGSTOP)
            Timer(STOPPED_S, rank.kill).start()
            add_up(sum_P)

        monkeypatch.setattr(crew, "add_up", add_up_alone)
        with pytest.raises(RankLostError):
            here.ask(Square(1, weights_total=1))
    assert said == ["rank 1 on cpu ended (signal 9), and its sum of gradients is lost"]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_collective_that_fails_while_all_ranks_live_says_why(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(sum_P: Tensor) -> None:
        raise kind("NCCL error: peer access is not supported\nmore")

    with closing(Here()) as here:
        here.configure(CONFIGURE)
        monkeypatch.setattr(crew, "spread", refuse)
        monkeypatch.setattr(crew, "_NOTICE_S", 0)
        with pytest.raises(RankLostError, match=r"NCCL error: peer access is not supported$"):
            here.ask(Build(1))


@pytest.mark.parametrize(("kind", "call"), [("add_up", "add_up"), ("spread_weights", "spread")])
def test_a_rank_without_memory_for_a_collective_ends(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer would be of no use: rank 0 waits in the collective, and reads none."""

    def run_out(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(mirror_runner, call, run_out)
    runner = MirrorRunner(cast("Arena", None))
    held = SimpleNamespace(shards=None, weights=torch.empty(0), gradients=torch.empty(0))
    runner._configured = cast("Mirror", held)
    with pytest.raises(torch.OutOfMemoryError):
        runner.run({"job": 0, "kind": kind, "inputs": [], "outputs": []})


@pytest.mark.parametrize(
    "is_stopped",
    [pytest.param(True, marks=linux_alone), pytest.param(False, marks=pytest.mark.slow)],
)
def test_no_rank_outlives_the_node_while_one_waits_for_another(is_stopped: bool) -> None:
    """Otherwise the first would keep its GPU's memory until the collective times out."""
    command = [sys.executable, "-m", "tests.support.waiting_node"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            ranks = [psutil.Process(int(pid)) for pid in node.stdout.readline().split()]
            assert len(ranks) == 2
            if is_stopped:
                ranks[0].send_signal(signal.SIGSTOP)
        finally:
            node.kill()
    _, alive = psutil.wait_procs(ranks, timeout=GONE_S)
    for rank in alive:
        rank.kill()
    assert not alive


@pytest.mark.parametrize("least", ["first", "other"])
def test_free_memory_is_measured_once_the_collectives_have_theirs(
    monkeypatch: pytest.MonkeyPatch, least: str
) -> None:
    """Before, NCCL's buffers on a GPU would count as free."""
    happened = list[str]()
    join, call = crew.join_group, crew.Crew.call
    free = {"first": 1 << 30, "other": 1 << 30, least: 1 << 20}

    def joined(*arguments: Any) -> None:
        join(*arguments)
        happened.append("joined")

    def here(*_: Any) -> int:
        happened.append("first")
        return free["first"]

    def called(self: crew.Crew, job: BaseJob) -> list[FreeMemory]:
        (answer,) = call(self, job)
        assert answer.memory_bytes > 0
        happened.append("other")
        return [FreeMemory(free["other"])]

    monkeypatch.setattr(crew, "join_group", joined)
    monkeypatch.setattr(crew.Crew, "call", called)
    monkeypatch.setattr(job_methods, "free_bytes", here)
    with closing(Here()) as node:
        facts = node.configure(CONFIGURE)
    assert happened == ["joined", "other", "first"]
    # Both ranks are on the CPU, and share what is free there.
    assert facts["memory_bytes"] == (1 << 20) // 2

"""Averages of several hosts, each with the jobs of an averaging process."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from decod.compression.plan import CompressionConfig, Method, StagePlans
from decod.driver.arena import ArenaAllocator, ArenaRegion
from decod.driver.compute import ComputeProcess
from decod.protocol.core.job_codec import fields_of, kind_of, parsed
from decod.protocol.core.jobs import (
    AverageKind,
    BaseJob,
    Configure,
    Decode,
    Gather,
    Guide,
    Reduce,
    Use,
)
from decod.train.layout import byte_view
from decod.worker.averaging import AverageRunner
from decod.worker.device import Arena
from tests.support.raw_compute import message_of

SHAPES = ((24, 40), (40,), (16, 24), (1,))
NUM_ELEMENTS = sum(map(math.prod, SHAPES))
WEIGHTS = (3, 1, 4)
EXACT = {Method.NONE: None, Method.FP16: torch.float16, Method.BF16: torch.bfloat16}
RANK = 4


class Hosts:
    """The averaging processes of some hosts, on one memory file."""

    def __init__(self, num_hosts: int, method: Method, wide: torch.dtype = torch.float32) -> None:
        self.wide, self.method = wide, method
        self.memory = ArenaAllocator(4 << 20)
        arena = Arena(self.memory.fd)
        self.arena = arena
        self.runners = [AverageRunner(arena) for _ in range(num_hosts)]
        name = str(wide).removeprefix("torch.")
        config = CompressionConfig(method=method, rank=RANK, random_ratio=0.5, top_ratio=0.25)
        codec = None if method is Method.NONE else config
        self.plan = StagePlans(SHAPES, 1, codec, wide=name).plan(0, 0, 0)
        for runner in self.runners:
            self.result(runner, configure(config, name))

    def result(
        self,
        runner: AverageRunner,
        job: BaseJob,
        inputs: Sequence[ArenaRegion] = (),
        outputs: Sequence[ArenaRegion] = (),
    ) -> Any:
        """The result of one job."""
        regions = ([region.reference() for region in each] for each in (inputs, outputs))
        reply = runner.run(message_of(1, kind_of(type(job)), fields_of(job), *regions))
        assert reply["ok"], reply
        return parsed(job.result, json.loads(json.dumps(reply["result"])))

    def region(self, num_bytes: int) -> ArenaRegion:
        found = self.memory.allocate(num_bytes)
        assert found is not None
        return found

    def tensor(self, region: ArenaRegion) -> Tensor:
        return torch.frombuffer(region.view, dtype=self.wide)

    def put(self, tensor: Tensor) -> ArenaRegion:
        region = self.region(tensor.numel() * tensor.element_size())
        self.tensor(region).copy_(tensor)
        return region

    def part_bytes(self, phase: int, num_parts: int) -> list[int]:
        if self.plan is not None:
            return self.plan.part_bytes(phase, num_parts)
        size, longer = divmod(NUM_ELEMENTS, num_parts)
        return [(size + (k < longer)) * self.wide.itemsize for k in range(num_parts)]

    def gather(
        self,
        iteration: int,
        phase: int,
        contributions: Sequence[Tensor],
        weights: Sequence[int],
        means: Sequence[ArenaRegion],
    ) -> list[list[ArenaRegion]]:
        """The parts of all hosts that contribute."""
        num_parts, gathered = len(self.runners), []
        for runner, own_P, weight in zip(self.runners, contributions, weights, strict=True):
            job = Gather(iteration, num_parts if weight else 0, phase)
            sizes = self.part_bytes(phase, num_parts) if weight else []
            parts = [self.region(size) for size in sizes]
            inputs = means if phase else ([self.put(own_P)] if weight else [])
            self.result(runner, job, inputs, parts)
            gathered += [parts] if weight else []
        return gathered

    def average(
        self,
        iteration: int,
        contributions: Sequence[Tensor],
        weights: Sequence[int] = WEIGHTS,
        missed: Sequence[int] = (),
    ) -> Tensor:
        """A whole average, in which all hosts come to the same bits.

        `missed`: parts for which the first host's contribution is said to have come too late.
        """
        num_parts, means = len(self.runners), list[ArenaRegion]()
        told = [weight for weight in weights if weight]
        for phase in range(2 if self.method.has_factors else 1):
            gathered = self.gather(iteration, phase, contributions, weights, means)
            sizes = self.part_bytes(phase, num_parts)
            outputs = [self.region(size) for size in sizes]
            for part, (runner, output) in enumerate(zip(self.runners, outputs, strict=True)):
                job = Reduce(part, num_parts, tuple(told), phase, lenient=True)
                found = self.result(runner, job, [parts[part] for parts in gathered], [output])
                assert found.refused == ()
            means += outputs
        digests, averages = [], list[Tensor]()
        for index, runner in enumerate(self.runners):
            output = self.region(NUM_ELEMENTS * self.wide.itemsize)
            found = self.result(runner, Decode(iteration), means, [output])
            digests.append(found.parameter_hash)
            averages.append(self.tensor(output))
            late = () if index else tuple(missed)
            self.result(runner, Use(num_parts, missed=late))
        assert len(set(digests)) == 1
        assert all(torch.equal(each, averages[0]) for each in averages)
        return averages[0].clone()


def configure(config: CompressionConfig, wide: str) -> Configure:
    shapes = [list(shape) for shape in SHAPES]
    settings = {"shapes": shapes, "wide": wide, "num_threads": 1, "audited": False}
    return Configure({**settings, "compression": json.loads(json.dumps(asdict(config)))})


def contributions_of(seed: int, wide: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        weight * torch.randn(NUM_ELEMENTS, generator=generator, dtype=wide) for weight in WEIGHTS
    ]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", EXACT)
def test_what_is_only_rounded_equals_torch_bit_for_bit(method: Method, wide: torch.dtype) -> None:
    hosts, own = Hosts(3, method, wide), contributions_of(1, wide)
    short = EXACT[method] or wide
    total = own[0].to(short).to(wide)
    for each in own[1:]:
        total = total + each.to(short).to(wide)
    assert torch.equal(hosts.average(1, own), (total / sum(WEIGHTS)).to(short).to(wide))


@pytest.mark.parametrize("method", list(Method))
def test_what_an_average_leaves_out_is_in_later_ones(method: Method) -> None:
    """The averages of some rounds add up to what was contributed, but for one round's residual."""
    num_rounds, hosts = 24, Hosts(3, method)
    own = contributions_of(2)
    expected = sum(own[1:], own[0]) / sum(WEIGHTS)
    total, errors = torch.zeros_like(expected), []
    for iteration in range(1, num_rounds + 1):
        total += hosts.average(iteration, own)
        errors.append(float((total / iteration - expected).norm() / expected.norm()))
    assert errors[-1] < 1e-6 or errors[-1] < errors[0] / 3, errors


def test_a_host_without_samples_reduces_and_reads() -> None:
    hosts, own = Hosts(3, Method.NONE, torch.float64), contributions_of(3, torch.float64)
    weights = (3, 0, 4)
    found = hosts.average(1, own, weights)
    torch.testing.assert_close(found, (own[0] + own[2]) / 7, rtol=1e-14, atol=0)


def test_what_came_too_late_waits_until_its_host_contributes_again() -> None:
    """It counts half then. A round without samples of that host keeps it."""
    hosts, own = Hosts(3, Method.NONE, torch.float64), contributions_of(6, torch.float64)
    hosts.average(1, own, missed=[1])
    hosts.average(2, own, weights=(0, 1, 4))
    found = hosts.average(3, own)
    expected = sum(own[1:], own[0])
    here = slice(NUM_ELEMENTS // 3 + (NUM_ELEMENTS % 3 > 0), None)
    part = expected[here][: NUM_ELEMENTS // 3 + (NUM_ELEMENTS % 3 > 1)]
    part += own[0][here][: len(part)] / 2
    torch.testing.assert_close(found, expected / sum(WEIGHTS), rtol=1e-12, atol=1e-14)


def test_a_guide_lets_a_newcomer_start_like_the_others() -> None:
    """Low-rank methods start from the last average, which a newcomer has got with the state."""
    hosts, own = Hosts(3, Method.LOWRANK), contributions_of(4)
    first = hosts.average(1, own)
    newcomer = AverageRunner(hosts.arena)
    config = CompressionConfig(method=Method.LOWRANK, rank=RANK)
    hosts.result(newcomer, configure(config, "float32"))
    hosts.result(newcomer, Guide(), [hosts.put(first)])
    hosts.runners[2] = newcomer
    # `average` finds that all three come to the same bits; a wrong guide would spoil them.
    found = hosts.average(2, own)
    assert math.isfinite(float(found.norm()))


def test_a_contribution_that_is_no_number_is_left_out() -> None:
    hosts = Hosts(2, Method.NONE)
    good, bad = torch.ones(NUM_ELEMENTS), torch.full((NUM_ELEMENTS,), math.nan)
    output = hosts.region(NUM_ELEMENTS * 4)
    inputs = [hosts.put(good), hosts.put(bad)]
    found = hosts.result(hosts.runners[0], Reduce(0, 1, (1, 2), lenient=True), inputs, [output])
    assert (found.refused, found.reason) == ((1,), "it is not finite")
    assert found.square_sum == NUM_ELEMENTS
    assert torch.equal(hosts.tensor(output), good)


@pytest.mark.parametrize(
    "fields",
    [
        {"shapes": [[0]]},
        {"shapes": []},
        {"wide": "float16"},
        {"compression": {"method": "zip"}},
        {"compression": {"method": "lowrank", "rank": 0}},
        {"num_threads": 0},
        {"audited": None},
    ],
)
def test_a_wrong_setting_is_refused(fields: dict[str, Any]) -> None:
    runner = AverageRunner(Arena(-1))
    settings = {**configure(CompressionConfig(), "float32").settings, **fields}
    reply = runner.run(message_of(1, "configure", {"settings": settings}))
    assert not reply["ok"]
    assert not runner.run(message_of(2, "use", fields_of(Use(1))))["ok"]


async def _average_of_one(memory: ArenaAllocator, own: Tensor) -> tuple[str, bytes]:
    command = (sys.executable, "-m", "decod.worker.averaging")
    process = await ComputeProcess.start(memory, command=command)
    regions = [memory.allocate(NUM_ELEMENTS * 4) for _ in range(4)]
    (put, part, mean, output) = [region for region in regions if region is not None]
    put.view[:] = byte_view(own)
    try:
        await process.submit(configure(CompressionConfig(), "float32"))
        await process.submit(Gather(1, 1), inputs=(put,), outputs=(part,))
        reduced = Reduce(0, 1, (2,), lenient=True)
        await process.submit(reduced, inputs=(part,), outputs=(mean,))
        reply = await process.submit(Decode(1), inputs=(mean,), outputs=(output,))
        await process.submit(Use(1))
        return str(reply.result.parameter_hash), bytes(output.view)
    finally:
        await process.close()


def test_the_process_serves_a_node() -> None:
    own = contributions_of(5)[0]
    memory = ArenaAllocator(os.sysconf("SC_PAGESIZE") * 64)
    digest, found = asyncio.run(_average_of_one(memory, own))
    assert found == bytes(byte_view(own / 2))
    assert len(digest) == 64


@pytest.mark.parametrize("method", [Method.NONE, Method.INT8, Method.LOWRANK])
def test_groups_come_to_the_average_of_all(method: Method) -> None:
    """Two rows of two hosts average, and then two columns of what the rows have come to."""
    hosts = Hosts(4, method, torch.float64)
    weights, rows, columns = (3, 1, 4, 2), ((0, 1), (2, 3)), ((0, 2), (1, 3))
    generator = torch.Generator().manual_seed(6)
    sums = [
        weight * torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        for weight in weights
    ]
    totals = [sum(weights[host] for host in row) for row in rows]
    num_phases = 2 if method.has_factors else 1
    size = NUM_ELEMENTS * 8

    def averaged(
        members: Sequence[int],
        given: Sequence[ArenaRegion],
        told: Sequence[int],
        *,
        between: bool,
        scale: int,
    ) -> list[ArenaRegion]:
        kind = AverageKind.BETWEEN if between else AverageKind.NOW
        means = list[ArenaRegion]()
        for phase in range(1 if between else num_phases):
            sizes = whole_bytes() if between else hosts.part_bytes(phase, 2)
            parts = []
            for host, own in zip(members, given, strict=True):
                parts.append([hosts.region(each) for each in sizes])
                inputs = [*means] if phase else [own]
                hosts.result(hosts.runners[host], Gather(1, 2, phase, kind=kind), inputs, parts[-1])
            for part, host in enumerate(members):
                mean, inputs = hosts.region(sizes[part]), [each[part] for each in parts]
                job = Reduce(part, 2, tuple(told), phase, kind=kind)
                hosts.result(hosts.runners[host], job, inputs, [mean])
                means.append(mean)
        found = []
        for host in members:
            found.append(hosts.region(size))
            job = Decode(1, between=between, scale=scale)
            hosts.result(hosts.runners[host], job, means, [found[-1]])
        return found

    def whole_bytes() -> list[int]:
        longer, shorter = divmod(NUM_ELEMENTS, 2)
        return [8 * (longer + shorter), 8 * longer]

    row_sums: dict[int, ArenaRegion] = {}
    for row, total in zip(rows, totals, strict=True):
        given = [hosts.put(sums[host]) for host in row]
        told = [weights[host] for host in row]
        found = averaged(row, given, told, between=False, scale=total)
        row_sums |= dict(zip(row, found, strict=True))
    averages = []
    for column in columns:
        given = [row_sums[host] for host in column]
        averages += averaged(column, given, totals, between=True, scale=1)
    first = hosts.tensor(averages[0])
    assert all(torch.equal(hosts.tensor(each), first) for each in averages)
    expected = torch.stack(sums).sum(0) / sum(weights)
    tolerance = 1e-12 if method is Method.NONE else 0.05 if method is Method.INT8 else 10.0
    assert float((first - expected).abs().max()) < tolerance

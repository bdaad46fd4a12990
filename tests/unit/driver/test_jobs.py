"""Every job of the core is one that the compute process knows, with the sizes that it expects."""

import json
import os
from typing import Any, get_args

import pytest

from decod.driver.jobs import Sizes, request_of, result_of
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.sketch import SEED_BYTES, SKETCH_BYTES
from decod.train.compression.fragments import StagePlans
from decod.train.compression.plan import CompressionConfig, Method
from decod.worker.arena import Arena
from decod.worker.averaging.jobs import AverageRunner
from decod.worker.jobs import JobRunner

M = MicrobatchId(3, 1, 2)
SKETCH, SEED = bytes(SKETCH_BYTES), bytes(SEED_BYTES)
SIZES = Sizes(activation_bytes=100, wire_element_bytes=2, sum_element_bytes=4, num_parameters=7)

JOBS: tuple[jobs.Job, ...] = (
    jobs.Build(1),
    jobs.Embed(M),
    jobs.Forward(M),
    jobs.Head(M),
    jobs.Backward(M),
    jobs.EmbedBackward(M),
    jobs.Inspect(M, is_gradient=False),
    jobs.Drop(M),
    jobs.Reset(),
    jobs.Retract(),
    jobs.Gather(2, 3),
    jobs.GatherAhead(2, 3),
    jobs.Reduce(part=0, num_parts=3, weights=(2, 3)),
    jobs.ReduceAhead(part=0, num_parts=3, weights=(2, 3), lenient=True),
    jobs.Square(2, weights_total=5),
    jobs.Propose(iteration=4, num_parts=3, weights_total=5, gradient_norm=0.5),
    jobs.StepAhead(4),
    jobs.StepLocally(4),
    jobs.SketchPart(1, 2, SEED),
    jobs.ReplayPasses(M, True, False, 2, SEED),
    jobs.StandIn(1, 2, json.dumps({"tensors": []}), with_optimizer=False),
    jobs.CommitStep(4),
    jobs.ReturnToAnchor(),
    jobs.Snapshot(with_optimizer=True),
    jobs.Load(4, json.dumps({"tensors": []})),
    jobs.Measure(),
    jobs.Mix(4, (1,), (json.dumps({"tensors": []}),)),
)
WITH_INPUTS = (jobs.ReplayPasses,)
WITH_INPUT = (
    jobs.Forward,
    jobs.Head,
    jobs.Backward,
    jobs.Inspect,
    jobs.EmbedBackward,
    jobs.SketchPart,
    jobs.Load,
    jobs.Mix,
    jobs.StandIn,
)
# What the daemon itself asks for, beside the core.
DAEMONS_KINDS = {
    "set_threads",
    "configure",
    "ping",
    "measure",
    "recompute",
    "spread_stage",
    "give_block",
}


OF_AVERAGING_PROCESS = (
    jobs.GatherBetween(4, 3),
    jobs.ReduceBetween(0, 2, (3, 2)),
    jobs.Decode(4, scale=5),
    jobs.Decode(4, between=True),
    jobs.Use(2),
)


def test_the_averaging_process_knows_these_kinds() -> None:
    kinds = {request_of(job, SIZES).kind for job in OF_AVERAGING_PROCESS}
    assert kinds <= set(AverageRunner(Arena(-1))._kinds)


def test_what_groups_have_come_to_travels_as_it_is() -> None:
    plans = StagePlans(((64, 64),), 1, CompressionConfig(method=Method.INT8), wide="float64")
    sizes = Sizes(0, wire_element_bytes=2, sum_element_bytes=8, num_parameters=4096, plans=plans)
    for job, num_bytes in (
        (jobs.GatherBetween(4, 2), (16384, 16384)),
        (jobs.ReduceBetween(1, 2, (3, 2)), (16384,)),
        (jobs.Decode(4, between=True), (32768,)),
    ):
        assert request_of(job, sizes).output_bytes == num_bytes
    assert sum(request_of(jobs.Gather(4, 2), sizes).output_bytes) < 16384


def test_every_kind_of_job_is_here() -> None:
    """A job beside the device is for another process (`test_planning`)."""
    other = {type(job) for job in OF_AVERAGING_PROCESS}
    for_device = {kind for kind in get_args(jobs.Job) if not kind.beside_device} - other
    assert {type(job) for job in JOBS} == for_device


def test_the_compute_process_knows_these_kinds_and_no_others() -> None:
    kinds = {request_of(job, SIZES).kind for job in JOBS}
    known = JobRunner(Arena(-1))._kinds
    assert kinds | DAEMONS_KINDS == set(known)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: type(job).__name__)
def test_a_request_is_well_formed_for_the_compute_process(job: jobs.Job) -> None:
    """It gets as far as the missing configuration: nothing else was wrong with it."""
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, 4096)
    request = request_of(job, SIZES)
    outputs = [{"offset": 0, "num_bytes": n} for n in request.output_bytes]
    inputs = [{"offset": 0, "num_bytes": 100}] * (type(job) in WITH_INPUT)
    inputs += [{"offset": 0, "num_bytes": 100}] * 3 * (type(job) in WITH_INPUTS)
    message = {"job": 0, "kind": request.kind, **request.fields}
    message |= {"inputs": inputs, "outputs": outputs}
    reply = JobRunner(Arena(descriptor)).run(json.loads(json.dumps(message)))
    os.close(descriptor)
    assert "no configure came before" in reply["error"]["what"], reply


def test_a_gradient_is_cut_into_parts_that_sum_to_it() -> None:
    gathered = request_of(jobs.Gather(2, 3), SIZES).output_bytes
    assert sum(gathered) == 7 * 2
    reduced = [
        request_of(jobs.Reduce(part, num_parts=3, weights=(1,)), SIZES).output_bytes[0]
        for part in range(3)
    ]
    assert sum(reduced) == 7 * 4
    assert [2 * n for n in gathered] == reduced


@pytest.mark.parametrize(
    ("job", "reply", "result"),
    [
        (jobs.Build(1), {"hash": "ab"}, jobs.Built("ab")),
        (jobs.Load(1, "{}"), {"hash": "ab"}, jobs.Built("ab")),
        (jobs.Head(M), {"loss": 1.5, "num_tokens": 8}, jobs.Loss(1.5, 8)),
        (
            jobs.Reduce(0, 1, (1, 1)),
            {"square_sum": 0.5, "refused": [1], "reason": "why", "standing_out": [2]},
            jobs.Squared(0.5, (1,), "why", (2,)),
        ),
        (jobs.Square(1, 1), {"square_sum": 0.5}, jobs.Squared(0.5)),
        (
            jobs.Propose(1, 1, 1),
            {"hash": "cd", "effective_rank": 2.5, "standing_out": [1]},
            jobs.Proposed("cd", effective_rank=2.5, standing_out=(1,)),
        ),
        (jobs.StepLocally(1), {"hash": "abc"}, jobs.Proposed("abc")),
        (
            jobs.SketchPart(1, 2, SEED),
            {"sketches": [SKETCH.hex()] * 2},
            jobs.Sketched((SKETCH, SKETCH)),
        ),
        (
            jobs.ReplayPasses(M, True, False, 2, SEED),
            {"errors": [0.0, 0.5], "sketches": [SKETCH.hex(), SKETCH.hex()]},
            jobs.Replayed(0.0, 0.5, (SKETCH, SKETCH)),
        ),
        (jobs.CommitStep(1), {}, jobs.Nothing()),
        (
            jobs.Snapshot(with_optimizer=False),
            {"iteration": 3, "tensors": [], "chunks": "", "num_bytes": 0},
            jobs.SnapshotTaken(3, '{"tensors":[],"chunks":""}'),
        ),
    ],
)
def test_a_reply_becomes_the_cores_result(
    job: jobs.Job, reply: dict[str, Any], result: jobs.JobResult
) -> None:
    assert result_of(job, reply) == result

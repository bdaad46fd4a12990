"""Every job of the core is one that the compute process knows, with the sizes that it expects."""

import json
import os
from typing import Any, TypeVar, get_args

import pytest

from decod.compression.plan import CompressionConfig, Method, StagePlans
from decod.driver.arena import Sizes, output_bytes
from decod.ids import MicrobatchId, NodeId
from decod.planner.deciding import Decided, Unsettled
from decod.planner.graph import Route
from decod.protocol.core import jobs
from decod.protocol.core.fingerprints import SEED_BYTES, SKETCH_BYTES
from decod.protocol.core.job_codec import FormError, fields_of, kind_of, parsed
from decod.protocol.core.jobs import AverageKind
from decod.system import anonymous_file
from decod.worker.averaging import AverageRunner
from decod.worker.device import Arena
from decod.worker.job_methods import JobRunner
from tests.support.raw_compute import message_of

T = TypeVar("T")
M = MicrobatchId(3, 1, 2)
MANIFEST = json.dumps({"tensors": [], "chunks": ""})
A, B = NodeId("a"), NodeId("b")
DECIDE = jobs.DecideFlows(
    Unsettled(
        paths=((A, B),),
        capacities=((A, 2),),
        outward=((A, ((B, 1.5),)),),
        compute_s=((A, 0.1),),
        rooms=(((B, 1),),),
        fair=True,
        work_max=1000,
    )
)
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
    jobs.Gather(2, 3, kind=AverageKind.AHEAD),
    jobs.Reduce(part=0, num_parts=3, weights=(2, 3)),
    jobs.Reduce(part=0, num_parts=3, weights=(2, 3), lenient=True, kind=AverageKind.AHEAD),
    jobs.Square(2, weights_total=5),
    jobs.Propose(iteration=4, num_parts=3, weights_total=5, gradient_norm=0.5),
    jobs.StepAhead(4),
    jobs.StepLocally(4),
    jobs.SketchPart(1, 2, SEED),
    jobs.ReplayPasses(M, True, False, 2, SEED),
    jobs.StandIn(1, 2, MANIFEST, with_optimizer=False),
    jobs.CommitStep(4),
    jobs.ReturnToAnchor(),
    jobs.Snapshot(with_optimizer=True),
    jobs.Load(4, (MANIFEST,)),
    jobs.Measure(),
    jobs.Mix(4, (1,), (MANIFEST,)),
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
DAEMONS_JOBS = {
    each
    for each in vars(jobs).values()
    if isinstance(each, type) and issubclass(each, jobs.BaseJob)
} - {*get_args(jobs.Job), jobs.BaseJob, jobs.Pass, jobs._OfAverage}
AVERAGES_ONLY = {jobs.Decode, jobs.Use, jobs.Guide}

OF_AVERAGING_PROCESS = (
    jobs.Gather(4, 3, kind=AverageKind.BETWEEN),
    jobs.Reduce(0, 2, (3, 2), kind=AverageKind.BETWEEN),
    jobs.Decode(4, scale=5),
    jobs.Decode(4, between=True),
    jobs.Use(2),
)


def test_the_averaging_process_knows_these_jobs() -> None:
    known = {each for each, _ in AverageRunner(Arena(-1))._kinds.values()}
    assert {type(job) for job in OF_AVERAGING_PROCESS} | AVERAGES_ONLY <= known


def test_what_groups_have_come_to_travels_as_it_is() -> None:
    plans = StagePlans(((64, 64),), 1, CompressionConfig(method=Method.INT8), wide="float64")
    sizes = Sizes(0, wire_element_bytes=2, sum_element_bytes=8, num_parameters=4096, plans=plans)
    for job, num_bytes in (
        (jobs.Gather(4, 2, kind=AverageKind.BETWEEN), (16384, 16384)),
        (jobs.Reduce(1, 2, (3, 2), kind=AverageKind.BETWEEN), (16384,)),
        (jobs.Decode(4, between=True), (32768,)),
    ):
        assert output_bytes(job, sizes) == num_bytes
    assert sum(output_bytes(jobs.Gather(4, 2), sizes)) < 16384


def test_every_kind_of_job_is_here() -> None:
    """A job beside the device is for another process (`test_compute_planning`)."""
    for_device = {kind for kind in get_args(jobs.Job) if not kind.beside_device}
    assert {type(job) for job in JOBS} == for_device - AVERAGES_ONLY


def test_the_compute_process_knows_these_jobs_and_no_others() -> None:
    known = {each for each, _ in JobRunner(Arena(-1))._kinds.values()}
    assert known == ({type(job) for job in JOBS} | DAEMONS_JOBS) - AVERAGES_ONLY


def test_no_two_jobs_have_the_same_name() -> None:
    classes = {*get_args(jobs.Job), *DAEMONS_JOBS}
    assert len({kind_of(each) for each in classes}) == len(classes)
    assert kind_of(jobs.EmbedBackward) == "embed_backward"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_request_is_well_formed_for_the_compute_process(job: jobs.Job) -> None:
    """It gets as far as the missing configuration: nothing else was wrong with it."""
    descriptor = anonymous_file("arena")
    os.ftruncate(descriptor, 4096)
    outputs = [{"offset": 0, "num_bytes": n} for n in output_bytes(job, SIZES)]
    inputs = [{"offset": 0, "num_bytes": 100}] * (type(job) in WITH_INPUT)
    inputs += [{"offset": 0, "num_bytes": 100}] * 3 * (type(job) in WITH_INPUTS)
    message = message_of(0, kind_of(type(job)), fields_of(job), inputs, outputs)
    reply = JobRunner(Arena(descriptor)).run(message)
    os.close(descriptor)
    assert "no configure came before" in reply["error"]["what"], reply


def test_a_gradient_is_cut_into_parts_that_sum_to_it() -> None:
    gathered = output_bytes(jobs.Gather(2, 3), SIZES)
    assert sum(gathered) == 7 * 2
    reduced = [
        output_bytes(jobs.Reduce(part, num_parts=3, weights=(1,)), SIZES)[0] for part in range(3)
    ]
    assert sum(reduced) == 7 * 4
    assert [2 * n for n in gathered] == reduced


RESULTS: tuple[jobs.JobResult, ...] = (
    jobs.Nothing(),
    jobs.Built("ab", 7, 100),
    jobs.Loss(1.5, 8),
    jobs.Squared(0.5, (1,), "why", (2,)),
    jobs.Proposed("cd", effective_rank=2.5, standing_out=(1,), metrics=(("rate", 0.5),)),
    jobs.Sketched((SKETCH, SKETCH)),
    jobs.Replayed(0.0, 0.5, (SKETCH, SKETCH)),
    jobs.SnapshotTaken(3, MANIFEST, 12),
    jobs.Measured(0.1, 0.2, 5, 6),
    jobs.FlowsDecided((Decided(Route((A, B)), (0.5,)),)),
)


def travelled(value: T) -> T:
    """What comes of a job or a result at the other end."""
    return parsed(type(value), json.loads(json.dumps(fields_of(value))))


OF_DAEMON: tuple[jobs.BaseJob, ...] = (
    jobs.Configure({"device": "cpu", "batch": {"microbatch_size": 1}}),
    jobs.SetThreads(None),
    jobs.SetThreads(3),
    jobs.SpreadStage(sharded=True),
    jobs.GiveBlock(1, 2),
)


@pytest.mark.parametrize("job", [*JOBS, *OF_AVERAGING_PROCESS, *OF_DAEMON, DECIDE], ids=str)
def test_a_job_travels_as_it_is(job: jobs.BaseJob) -> None:
    assert travelled(job) == job


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_a_result_travels_as_it_is(result: jobs.JobResult) -> None:
    assert travelled(result) == result


def test_every_result_is_here() -> None:
    assert {type(result) for result in RESULTS} == {*get_args(jobs.JobResult)}
    assert {kind.result for kind in get_args(jobs.Job)} <= {*get_args(jobs.JobResult)}


WRONG: dict[str, tuple[jobs.Job, dict[str, Any]]] = {
    "a number is text": (jobs.Build(1), {"stage_index": "1"}),
    "a number is a truth value": (jobs.Build(1), {"stage_index": True}),
    "a number is negative": (jobs.Build(1), {"stage_index": -1}),
    "a number is less than the least": (jobs.Square(2, 5), {"weights_total": 0}),
    "a number is not whole": (jobs.Build(1), {"stage_index": 1.5}),
    "a length is negative": (jobs.Propose(1, 0, 1), {"gradient_norm": -1.0}),
    "a length is no number": (jobs.Propose(1, 0, 1), {"gradient_norm": float("nan")}),
    "a length is endless": (jobs.Propose(1, 0, 1), {"gradient_norm": float("inf")}),
    "a truth value is a number": (jobs.Snapshot(with_optimizer=True), {"ahead": 0}),
    "text is a number": (jobs.Load(1, (MANIFEST,)), {"manifests": [1]}),
    "an array is none": (jobs.Mix(1, (1,), ("",)), {"stages": None}),
    "an array holds text": (jobs.Mix(1, (1,), ("",)), {"stages": ["1"]}),
    "a kind is unknown": (jobs.Gather(1, 2), {"kind": "later"}),
    "a seed is short": (jobs.SketchPart(1, 2, SEED), {"seed": "00"}),
    "a seed is no hexadecimal": (jobs.SketchPart(1, 2, SEED), {"seed": "z" * 2 * SEED_BYTES}),
    "an id lacks a field": (jobs.Drop(M), {"microbatch": {"iteration": 1, "index": 0}}),
    "an id is none": (jobs.Drop(M), {"microbatch": None}),
    "a spec has a field more": (
        jobs.Use(2),
        {"spec": {"fragment": 0, "rank": 0, "bits": 0, "more": 0}},
    ),
    "a field is unknown": (jobs.CommitStep(1), {"more": 1}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_job_can_be_is_refused(what: str) -> None:
    job, wrong = WRONG[what]
    values = {**json.loads(json.dumps(fields_of(job))), **wrong}
    with pytest.raises(FormError, match=next(iter(wrong))):
        parsed(type(job), values)


@pytest.mark.parametrize("values", [None, [], 1, {}])
def test_fields_that_lack_one_are_refused(values: object) -> None:
    with pytest.raises(FormError, match="CommitStep has iteration, not"):
        parsed(jobs.CommitStep, values)

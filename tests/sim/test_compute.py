"""The symbolic compute process does what is right and refuses what is not."""

import math

import pytest

from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.jobs import Job
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig
from decod.sim.averages import AveragedPart, MisuseError, SimulatedState
from decod.sim.profile import Activation, ComputeProfile, Content, Gradient
from decod.sim.simulated_compute import StageModel

M1, M2 = MicrobatchId(1, 0, 0), MicrobatchId(1, 0, 1)


def run_of(num_relay_stages: int, *, clip_norm: float = 0.0) -> RunConfig:
    stages = StagesConfig(num_relay_stages=num_relay_stages)
    return RunConfig(seed=3, stages=stages, optimizer=OptimizerConfig(clip_norm=clip_norm))


def relay(stage_index: int = 1) -> StageModel:
    compute = StageModel(run_of(2))
    compute.run(jobs.Build(stage_index), ())
    return compute


def fold(compute: StageModel, microbatch: MicrobatchId) -> None:
    """Take a microbatch through a relay, there and back."""
    stage = compute.stage_index
    out = compute.run(jobs.Forward(microbatch), (Activation(microbatch, stage - 1),))
    assert out.outputs == (Activation(microbatch, stage),)
    back = compute.run(jobs.Backward(microbatch), (Gradient(microbatch, stage + 1),))
    assert back.outputs == (Gradient(microbatch, stage),)


def aggregate(members: list[StageModel], *, order: list[int]) -> list[str]:
    """Reduce over members, with the inputs of every part in the given order; returns hashes."""
    gathered = [member.run(jobs.Gather(1, len(members)), ()).outputs for member in members]
    total = sum(sum(member.sums.values()) for member in members)
    reduced = [
        members[part]
        .run(
            jobs.Reduce(part, len(members), (total,)),
            tuple(gathered[k][part] for k in order),
        )
        .outputs[0]
        for part in range(len(members))
    ]
    job = jobs.Propose(1, len(members), total)
    results = [member.run(job, tuple(reduced)).result for member in members]
    return [r.parameter_hash for r in results if isinstance(r, jobs.Proposed)]


def test_a_microbatch_goes_through_a_data_node_and_counts_once() -> None:
    data = relay(0)
    assert data.run(jobs.Embed(M1), ()).outputs == (Activation(M1, 0),)
    head = data.run(jobs.Head(M1), (Activation(M1, 2),))
    assert isinstance(head.result, jobs.Loss)
    assert head.outputs == (Gradient(M1, 3),)
    assert data.run(jobs.EmbedBackward(M1), (Gradient(M1, 1),)).outputs == ()
    assert dict(data.sums) == {M1: 1}
    assert not data.held


def test_members_of_a_stage_end_with_the_same_parameters_in_any_order_of_parts() -> None:
    hashes = []
    for order in ([0, 1], [1, 0]):
        members = [relay(), relay()]
        fold(members[0], M1)
        fold(members[1], M2)
        hashes += aggregate(members, order=order)
        for member in members:
            step = member.run(jobs.CommitStep(1), ()).committed
            assert step is not None
            assert step.counts == ((M1, 1), (M2, 1))
    assert len(hashes) == 4
    assert len(set(hashes)) == 1


def test_a_node_alone_in_its_stage_steps_as_a_roster_would() -> None:
    pair, alone = [relay(), relay()], relay()
    for member, microbatch in zip(pair, (M1, M2), strict=True):
        fold(member, microbatch)
        fold(alone, microbatch)
    result = alone.run(jobs.Propose(1, 0, 2), ()).result
    assert isinstance(result, jobs.Proposed)
    assert {result.parameter_hash} == set(aggregate(pair, order=[0, 1]))


def test_parameters_depend_on_what_was_folded_in() -> None:
    def hash_after(*microbatches: MicrobatchId) -> str:
        compute = relay()
        for microbatch in microbatches:
            fold(compute, microbatch)
        result = compute.run(jobs.Propose(1, 0, len(microbatches)), ()).result
        assert isinstance(result, jobs.Proposed)
        return result.parameter_hash

    assert hash_after(M1, M2) == hash_after(M2, M1)
    assert len({hash_after(), hash_after(M1), hash_after(M2), hash_after(M1, M2)}) == 4


def test_a_reset_undoes_a_proposed_step() -> None:
    compute = relay()
    before = compute.parameter_hash
    fold(compute, M1)
    compute.run(jobs.Propose(1, 0, 1), ())
    compute.run(jobs.Reset(), ())
    assert (compute.parameter_hash, compute.iteration, compute.proposed) == (before, 0, None)
    fold(compute, M1)  # The iteration is repeated: nothing of the first try is left.
    assert dict(compute.sums) == {M1: 1}


def test_state_moves_to_another_node_and_back_out_unchanged() -> None:
    donor, newcomer = relay(), relay()
    fold(donor, M1)
    donor.run(jobs.Propose(1, 0, 1), ())
    donor.run(jobs.CommitStep(1), ())
    taken = donor.run(jobs.Snapshot(with_optimizer=True), ())
    assert isinstance(taken.result, jobs.SnapshotTaken)
    newcomer.run(jobs.Load(taken.result.iteration, (taken.result.manifest,)), taken.outputs)
    assert newcomer.parameter_hash == donor.parameter_hash
    assert newcomer.iteration == 1


def test_a_snapshot_taken_while_a_step_is_proposed_is_of_the_committed_state() -> None:
    compute = relay()
    before = compute.parameter_hash
    fold(compute, M1)
    compute.run(jobs.Propose(1, 0, 1), ())
    assert compute.run(jobs.Snapshot(with_optimizer=True), ()).outputs == (
        SimulatedState(1, 0, before),
    )


WRONG: list[tuple[str, Job, tuple[Content, ...]]] = [
    ("backward of an unknown microbatch", jobs.Backward(M2), (Gradient(M2, 2),)),
    ("forward twice", jobs.Forward(M1), (Activation(M1, 0),)),
    ("forward on another's activation", jobs.Forward(M2), (Activation(M1, 0),)),
    ("forward that skips a stage", jobs.Forward(M2), (Activation(M2, 1),)),
    ("forward of the future", jobs.Forward(MicrobatchId(2, 0, 0)), (Activation(M2, 0),)),
    ("gradient of the wrong stage", jobs.Backward(M1), (Gradient(M1, 3),)),
    ("gradient where an activation is due", jobs.Forward(M2), (Gradient(M2, 0),)),
    ("embedding at a relay", jobs.Embed(M2), ()),
    ("head at a relay", jobs.Head(M1), (Activation(M1, 2),)),
    ("commit without a step", jobs.CommitStep(1), ()),
    ("step of the wrong iteration", jobs.Propose(2, 0, 1), ()),
    ("step with parts missing", jobs.Propose(1, 2, 1), (AveragedPart(0, 2, (), 1),)),
    ("step with parts exchanged", jobs.Propose(1, 1, 1), (AveragedPart(1, 2, (), 1),)),
    ("sum of averages", jobs.Reduce(0, 1, (1,)), (AveragedPart(0, 1, (), 1),)),
    ("division by nothing", jobs.Reduce(0, 1, ()), ()),
    ("no parts", jobs.Gather(1, 0), ()),
    ("no such stage", jobs.Build(3), ()),
    ("load of something else", jobs.Load(1, ("{}",)), (SimulatedState(1, 1, "x"),)),
    ("input where none is due", jobs.Reset(), (Activation(M1, 0),)),
]


@pytest.mark.parametrize(("job", "inputs"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_senseless_job_is_refused(job: Job, inputs: tuple[Content, ...]) -> None:
    compute = relay()
    compute.run(jobs.Forward(M1), (Activation(M1, 0),))
    with pytest.raises(MisuseError):
        compute.run(job, inputs)


def test_work_on_a_microbatch_stops_while_a_step_is_proposed() -> None:
    compute = relay()
    compute.run(jobs.Propose(1, 0, 1), ())
    with pytest.raises(MisuseError, match="proposed"):
        compute.run(jobs.Forward(M1), (Activation(M1, 0),))
    with pytest.raises(MisuseError, match="not final"):
        compute.run(jobs.Propose(1, 0, 1), ())


def test_what_is_in_the_sum_can_not_be_dropped() -> None:
    compute = relay()
    fold(compute, M1)
    with pytest.raises(MisuseError, match="in the sum"):
        compute.run(jobs.Drop(M1), ())
    with pytest.raises(MisuseError, match="already"):
        compute.run(jobs.Forward(M1), (Activation(M1, 0),))


def test_nothing_works_before_a_stage_is_built() -> None:
    with pytest.raises(MisuseError, match="before any stage"):
        StageModel(run_of(1)).run(jobs.Reset(), ())


def test_backward_takes_twice_as_long_as_forward_and_parts_share_a_gradient() -> None:
    profile = ComputeProfile()
    assert profile.seconds(jobs.Backward(M1)) == 2 * profile.seconds(jobs.Forward(M1))
    part = AveragedPart(0, 3, (), 1)
    assert 3 * profile.num_bytes(part) >= profile.parameter_bytes


def test_a_step_is_refused_unless_it_is_taken_with_the_norm_over_all_stages() -> None:
    compute = StageModel(run_of(2, clip_norm=1.0))
    compute.run(jobs.Build(1), ())
    fold(compute, M1)
    assert compute.run(jobs.Square(1, 1), ()).result == jobs.Squared(4.0)
    with pytest.raises(MisuseError, match="the norm over all stages"):
        compute.run(jobs.Propose(1, 0, 1), ())
    compute.run(jobs.Propose(1, 0, 1, math.sqrt(1 + 4 + 16)), ())
    with pytest.raises(MisuseError, match="the norm over all stages"):
        relay().run(jobs.Propose(1, 0, 1, 0.5), ())

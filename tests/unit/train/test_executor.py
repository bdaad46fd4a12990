"""Steps: proposed, undone, committed; sums over members; the optimizer's arithmetic."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.compression.plan import Method
from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.planner.partition import part_sizes
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    BatchConfig,
    OptimizerConfig,
    OptimizerName,
    ReductionConfig,
    SyncConfig,
    SyncMethod,
    WireDtype,
)
from decod.train.exchange import CompressedExchange, Place
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import Layout, byte_view
from decod.train.measure import measure
from decod.train.optimizers import (
    OptimizerState,
    Segment,
    clip_factor,
    learning_rate,
    optimizer_step,
    zero_moments,
)
from decod.train.reduction import reduce_part, square_sum
from tests.support.devices import on_devices
from tests.support.reference import make_stepper

torch.set_num_threads(1)

SHAPE = (2, 8, 16)
MB = MicrobatchId(1, 0, 0)


def make_relay(
    dtype: ModelDtype = ModelDtype.FLOAT32,
    wire: WireDtype = WireDtype.FLOAT32,
    clip_norm: float = 0.0,
    device: str = "cpu",
    sync: SyncConfig | None = None,
) -> StageExecutor:
    config = ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(
                dtype=dtype,
                vocab_size=19,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
            ),
            stages=StagesConfig(num_relay_stages=1),
            batch=BatchConfig(sequence_length=8, microbatch_size=2),
            optimizer=OptimizerConfig(lr=1e-2, clip_norm=clip_norm),
            reduction=ReductionConfig(wire_dtype=wire),
            sync=sync or SyncConfig(),
            seed=3,
        ),
        device=device,
    )
    relay = StageExecutor(config)
    relay.build(1)
    return relay


def noise(relay: StageExecutor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator).to(relay.config.dtype)


def contribute(relay: StageExecutor, mb: MicrobatchId = MB) -> torch.Tensor:
    entry, gradient = noise(relay, mb.index), noise(relay, mb.index + 100)
    relay.passes.forward(mb, entry)
    # As in the arena, where the next tensor takes the place of one that was used.
    entry.fill_(math.nan)
    result = relay.passes.backward(mb, gradient)
    gradient.fill_(math.nan)
    return result


def blob_of(relay: StageExecutor) -> tuple[Any, torch.Tensor]:
    snapshot = relay.snapshot(with_optimizer=True)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, _ = snapshot.write(blob)
    return entries, blob


def same(first: Any, second: Any) -> bool:
    return first[0] == second[0] and torch.equal(first[1], second[1])


@on_devices
def test_a_relay_computes_what_it_computes_on_a_cpu(device: str) -> None:
    """In float64 an operation is off by 1e-16 of its terms. Here some hundred follow each other,
    with terms of about 1, so 1e-13 is what rounding can come to. The tolerance is 100 times that.
    """
    here = make_relay(ModelDtype.FLOAT64)
    there = make_relay(ModelDtype.FLOAT64, device=device)
    entry, gradient = noise(here, 0), noise(here, 1)
    found = [
        (relay.passes.forward(MB, entry), relay.passes.backward(MB, gradient), *relay.gather(2))
        for relay in (here, there)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert theirs.device == torch.device(device)
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-11, atol=1e-11)
        assert float(ours.abs().max()) > 0.01


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_two_runs_on_one_device_give_the_same_bits(dtype: ModelDtype, device: str) -> None:
    first, second = make_relay(dtype, device=device), make_relay(dtype, device=device)
    for iteration in (1, 2, 3):
        digests = set()
        for relay in (first, second):
            for index in range(3):
                contribute(relay, MicrobatchId(iteration, 0, index))
            digests.add(relay.propose(iteration, [], weights_total=3))
            relay.commit(iteration)
        assert len(digests) == 1
    assert same(blob_of(first), blob_of(second))


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_members_on_different_devices_take_the_same_step(dtype: ModelDtype, device: str) -> None:
    """The members of a stage prove to each other by a hash that they hold the same bits."""
    here = make_relay(dtype, clip_norm=0.5)
    there = make_relay(dtype, clip_norm=0.5, device=device)
    for iteration in (1, 2, 3):
        contribute(here, MicrobatchId(iteration, 0, 0))
        parts = [part.to(here.config.wide) for part in here.gather(2)]
        digests = {
            relay.propose(iteration, parts, gradient_norm=0.7 * iteration)
            for relay in (here, there)
        }
        assert len(digests) == 1
        here.commit(iteration)
        there.commit(iteration)
    assert same(blob_of(here), blob_of(there))


@on_devices
@pytest.mark.parametrize("weights_total", [1, 3, 8, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_mean_has_the_same_bits_on_every_device(
    dtype: torch.dtype, weights_total: int, device: str
) -> None:
    """Whoever repeats a sum for a member that was lost may have another device."""
    generator = torch.Generator().manual_seed(weights_total)
    parts = [torch.randn(10_001, generator=generator).to(dtype) for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)
    here, there = (
        reduce_part(parts, weights_total=weights_total, dtype=wide, device=where)
        for where in ("cpu", device)
    )
    assert torch.equal(there.cpu(), here)


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_an_undone_step_leaves_every_bit_as_it_was(dtype: ModelDtype, device: str) -> None:
    relay = make_relay(dtype, device=device)
    contribute(relay)
    relay.propose(1, [], weights_total=1)
    relay.commit(1)
    before = blob_of(relay)
    output_before = relay.passes.forward(MB, noise(relay, 9))
    contribute(relay)
    digest = relay.propose(2, [], weights_total=1)
    assert same(blob_of(relay), before)
    relay.reset()
    assert same(blob_of(relay), before)
    assert torch.equal(relay.passes.forward(MB, noise(relay, 9)), output_before)
    contribute(relay)
    assert relay.propose(2, [], weights_total=1) == digest
    relay.commit(2)
    assert not same(blob_of(relay), before)
    assert not torch.equal(relay.passes.forward(MB, noise(relay, 9)), output_before)


@on_devices
def test_a_second_proposal_replaces_the_first_one(device: str) -> None:
    """A member died during the iteration: the rest agree on a smaller roster."""
    relay, other = make_relay(device=device), make_relay(device=device)
    contribute(relay)
    contribute(other)
    relay.propose(1, relay.gather(2))
    assert relay.propose(1, [], weights_total=3) == other.propose(1, [], weights_total=3)


@on_devices
def test_a_retracted_step_can_be_taken_again_with_more_in_it(device: str) -> None:
    """A member died during the iteration: what it had folded in is computed here, and added."""
    more = MicrobatchId(1, 0, 1)
    relay, other = make_relay(device=device), make_relay(device=device)
    contribute(relay)
    before = blob_of(relay)
    relay.propose(1, [], weights_total=2)
    relay.retract()
    assert same(blob_of(relay), before)
    contribute(relay, more)
    contribute(other)
    contribute(other, more)
    assert relay.propose(1, [], weights_total=2) == other.propose(1, [], weights_total=2)
    relay.commit(1)
    relay.retract()
    other.commit(1)
    assert same(blob_of(relay), blob_of(other)), "what is final can't be retracted"


@on_devices
def test_who_returns_to_the_anchor_trains_on_as_one_who_has_loaded_it(device: str) -> None:
    sync = SyncConfig(method=SyncMethod.DILOCO, every=3)
    relay, other = (make_relay(device=device, sync=sync) for _ in range(2))
    for each in (relay, other):
        contribute(each)
        each.propose(1, [], weights_total=1)
        each.commit(1)
    entries, blob = blob_of(other)
    for iteration in (2, 3):
        contribute(relay)
        relay.step_locally(iteration)
        relay.commit(iteration)
    learnt = relay.passes.forward(MB, noise(relay, 0))
    relay.return_to_anchor()
    other.load([(byte_view(blob), entries)], 1)
    assert relay.anchor == 1
    assert same(blob_of(relay), (entries, blob))
    for each in (relay, other):
        contribute(each)
        each.step_locally(4)
        each.commit(4)
    found, expected = (each.passes.forward(MB, noise(each, 0)) for each in (relay, other))
    assert torch.equal(found, expected)
    assert not torch.equal(found, learnt)


@on_devices
def test_a_repeated_backward_answers_again_and_adds_nothing(device: str) -> None:
    relay = make_relay(device=device)
    first = contribute(relay)
    (total,) = relay.gather(1)
    total = total.clone()
    assert torch.equal(contribute(relay), first)
    assert torch.equal(relay.gather(1)[0], total)
    relay.reset()
    contribute(relay)
    assert torch.equal(relay.gather(1)[0], total)


@on_devices
def test_nothing_is_computed_with_weights_that_may_be_undone(device: str) -> None:
    relay = make_relay(device=device)
    contribute(relay)
    relay.passes.forward(MicrobatchId(1, 0, 5), noise(relay, 0))
    relay.propose(1, [], weights_total=1)
    with pytest.raises(TrainingError, match="E-TRN-004"):
        relay.passes.forward(MB, noise(relay, 0))
    with pytest.raises(TrainingError, match="E-TRN-004"):
        relay.passes.backward(MicrobatchId(1, 0, 5), noise(relay, 0))
    with pytest.raises(TrainingError, match="E-TRN-007"):
        relay.commit(2)
    relay.commit(1)
    with pytest.raises(TrainingError, match="after 1 was committed"):
        relay.propose(1, [], weights_total=1)


@on_devices
@pytest.mark.parametrize("wire", list(WireDtype))
@pytest.mark.parametrize("num_members", [1, 3])
def test_members_that_reduce_in_parts_take_the_same_step(
    num_members: int, wire: WireDtype, device: str
) -> None:
    members = [make_relay(wire=wire, device=device) for _ in range(num_members)]
    for index, member in enumerate(members):
        contribute(member, MicrobatchId(1, 0, index))
    gathered = [[part.clone() for part in member.gather(num_members)] for member in members]
    reduced = [
        members[part]
        .exchange()
        .reduce([parts[part] for parts in gathered], Place(part, num_members), [1] * num_members)
        for part in range(num_members)
    ]
    assert len({member.propose(1, reduced) for member in members}) == 1
    plain = sum(torch.cat(parts).float() for parts in gathered) / num_members
    torch.testing.assert_close(torch.cat(reduced), plain, rtol=1e-6, atol=0)


@on_devices
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_a_gradient_is_scaled_to_the_norm_that_is_allowed(dtype: ModelDtype, device: str) -> None:
    """The first moment is a tenth of what the step was taken with."""
    relay = make_relay(dtype, clip_norm=0.5, device=device)
    contribute(relay)
    mean = relay.own_mean(1)
    norm = math.sqrt(relay.square_sum(mean))
    assert norm == pytest.approx(float(mean.double().norm()), rel=1e-12)
    factor = min(1.0, 0.5 / (2 * norm + 1e-6))
    relay.propose(1, [], weights_total=1, gradient_norm=2 * norm)
    relay.commit(1)
    assert factor < 1
    expected = mean * factor * (1 - relay.config.run.optimizer.beta1)
    assert torch.equal(relay._built.state.committed.moments[0], expected)


@on_devices
def test_squares_of_parts_add_up_to_those_of_the_whole(device: str) -> None:
    relay = make_relay(ModelDtype.FLOAT64, clip_norm=1.0, device=device)
    contribute(relay)
    parts = [relay.square_sum(part) for part in relay.gather(3)]
    assert sum(parts) == pytest.approx(relay.square_sum(relay.own_mean(1)), rel=1e-14)
    assert make_relay(device=device).square_sum(torch.ones(3)) == 0.0, "nothing is clipped"


@on_devices
def test_squares_are_summed_in_float64(device: str) -> None:
    """In float32 the ones would vanish beside 2^26, and 1e30 squared would be infinite."""
    ones = torch.ones(1 << 18, device=device)
    ones[0] = 2.0**13
    assert square_sum(ones) == 2.0**26 + (1 << 18) - 1
    assert square_sum(torch.tensor([1e30], device=device)) == pytest.approx(1e60)


@on_devices
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_norm_that_is_not_finite_is_refused(value: float, device: str) -> None:
    with pytest.raises(NonFiniteError, match="squares of the gradient"):
        square_sum(torch.tensor([1.0, value], dtype=torch.float64, device=device))


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.3, 0.999999, 1.0, 1.5, 1e12])
def test_the_factor_is_that_of_torch(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full((1,), norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    factor = clip_factor(OptimizerConfig(clip_norm=1.0), norm)
    assert float(parameter.grad) == norm * factor
    assert clip_factor(OptimizerConfig(), norm) == 1.0


@given(st.integers(0, 200), st.integers(1, 50))
def test_parts_cover_everything_and_differ_by_one(num_elements: int, num_parts: int) -> None:
    sizes = part_sizes(num_elements, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == num_elements
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@on_devices
def test_sums_are_wider_than_what_travels(device: str) -> None:
    """In bfloat16 the ones would vanish beside 256."""
    parts = [torch.full((1,), value, dtype=torch.bfloat16) for value in (256, 1, 1, 1)]
    total = reduce_part(parts, weights_total=1, dtype=torch.float32, device=device)
    assert total.dtype == torch.float32
    assert total.item() == 259


@on_devices
def test_a_member_with_bad_values_is_named(device: str) -> None:
    parts = [torch.zeros(3), torch.tensor([0.0, math.inf, 0.0]), torch.zeros(3)]
    with pytest.raises(NonFiniteError, match=r"positions \[1\]"):
        reduce_part(parts, weights_total=3, dtype=torch.float32, device=device)


def test_parts_that_do_not_fit_are_refused() -> None:
    relay = make_relay()
    contribute(relay)
    with pytest.raises(ShapeError):
        relay.propose(1, [torch.zeros(3)])
    with pytest.raises(ShapeError):
        relay.exchange().reduce([torch.zeros(3)], Place(0, 1), [1])
    with pytest.raises(ShapeError):
        relay.exchange().reduce([], Place(0, 1), [])
    with pytest.raises(ShapeError):
        relay.passes.forward(MB, torch.zeros(1, 8, 16))
    with pytest.raises(TrainingError, match="weights_total is 0"):
        relay.propose(1, [], weights_total=0)


@on_devices
def test_bad_values_are_stopped_at_the_door_and_leave_the_sum_clean(device: str) -> None:
    relay = make_relay(device=device)
    contribute(relay)
    before = relay.gather(1)[0].clone()
    bad = noise(relay, 1)
    bad[0, 0, 0] = math.nan
    other = MicrobatchId(1, 0, 1)
    with pytest.raises(NonFiniteError):
        relay.passes.forward(other, bad)
    relay.passes.forward(other, noise(relay, 1))
    with pytest.raises(NonFiniteError):
        relay.passes.backward(other, bad)
    assert torch.equal(relay.gather(1)[0], before)


@on_devices
def test_a_backward_that_stops_halfway_spoils_the_sum_until_reset(device: str) -> None:
    """As when memory runs out: some parameters have got their share and some have not."""
    relay = make_relay(device=device)
    relay.passes.forward(MB, noise(relay, 0))

    def stop(gradient: torch.Tensor) -> None:
        raise RuntimeError("device lost")

    hook = next(iter(relay._built.stage.parameters())).register_hook(stop)
    with pytest.raises(RuntimeError, match="device lost"):
        relay.passes.backward(MB, noise(relay, 1))
    hook.remove()
    with pytest.raises(NonFiniteError, match="E-TRN-006"):
        relay.gather(1)
    contribute(relay, MicrobatchId(1, 0, 1))
    with pytest.raises(NonFiniteError, match="microbatch 1/0/0 failed"):
        relay.gather(1)
    relay.reset()
    contribute(relay)
    assert relay.gather(1)[0].isfinite().all()


@on_devices
def test_a_repeated_pass_gives_the_same_gradient_and_adds_nothing(device: str) -> None:
    relay = make_relay(device=device)
    first = contribute(relay)
    total = relay.gather(1)[0].clone()
    assert torch.equal(contribute(relay), first)
    assert torch.equal(relay.gather(1)[0], total)


@on_devices
@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_measuring_changes_neither_weights_nor_gradients(dtype: ModelDtype, device: str) -> None:
    relay = make_relay(dtype, device=device)
    contribute(relay)
    before, total = blob_of(relay), relay.gather(1)[0].clone()
    found = measure(relay, 1)
    assert found.forward_s > 0
    assert same(blob_of(relay), before)
    assert torch.equal(relay.gather(1)[0], total)
    contribute(relay, MicrobatchId(1, 0, 1))
    assert not torch.equal(relay.gather(1)[0], total)


@on_devices
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70_000), st.integers(0, 5), st.integers(0, 1000))
def test_steps_equal_those_of_torch(device: str, size: int, warmup: int, seed: int) -> None:
    """Against the reference implementation on the CPU, over chunk borders, in float64."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = OptimizerConfig(warmup_iterations=warmup)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    middle = size // 2
    segments = [Segment(0, middle, decayed=True), Segment(middle, size, decayed=False)]
    expected = [start[:middle].clone().requires_grad_(), start[middle:].clone().requires_grad_()]
    adamw = torch.optim.AdamW(
        [
            {"params": [expected[0]], "weight_decay": optimizer.weight_decay},
            {"params": [expected[1]], "weight_decay": 0.0},
        ],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )
    zeros = torch.zeros(size, dtype=torch.float64, device=device)
    state = OptimizerState(start.to(device), (zeros, zeros.clone()))
    for iteration in (1, 2, 3):
        gradient = torch.randn(size, generator=generator, dtype=torch.float64)
        expected[0].grad, expected[1].grad = gradient[:middle].clone(), gradient[middle:].clone()
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optimizer, iteration)
        adamw.step()
        new = state.empty_like()
        gradient = gradient.to(device)
        optimizer_step(
            state, new, gradient, segments=segments, optimizer=optimizer, iteration=iteration
        )
        state = new
    found = state.weights.cpu()
    torch.testing.assert_close(found, torch.cat(expected).detach(), rtol=1e-12, atol=1e-14)


def test_muon_steps_as_torch_does() -> None:
    """50 steps in float64, beside AdamW for what is no hidden matrix."""
    optimizer = OptimizerConfig(name=OptimizerName.MUON, lr=0.02, beta1=0.95, warmup_iterations=9)
    shapes = {"a": (6,), "b": (8, 12), "c": (20, 4), "embedding": (7, 8), "z": (3,)}
    layout = Layout(shapes, {"b", "c"})
    generator = torch.Generator().manual_seed(4)
    start_P = torch.randn(layout.num_elements, generator=generator, dtype=torch.float64)
    expected = {name: view.clone().requires_grad_() for name, view in layout.views(start_P)}
    stepper = make_stepper(expected.values(), optimizer, [expected["b"], expected["c"]])
    segments = layout.segments()
    state = OptimizerState(start_P, zero_moments(optimizer.name, start_P, segments))
    assert len(state.moments[1]) == 6 + 7 * 8 + 3
    for iteration in range(1, 51):
        gradient_P = torch.randn(len(start_P), generator=generator, dtype=torch.float64)
        for name, view in layout.views(gradient_P):
            expected[name].grad = view.clone()
        for group in stepper.param_groups:
            group["lr"] = learning_rate(optimizer, iteration)
        stepper.step()
        new = state.empty_like()
        optimizer_step(
            state, new, gradient_P, segments=segments, optimizer=optimizer, iteration=iteration
        )
        state = new
    for name, view in layout.views(state.weights):
        torch.testing.assert_close(view, expected[name].detach(), rtol=0, atol=1e-10)


def test_the_rate_rises_linearly_to_its_peak() -> None:
    optimizer = OptimizerConfig(lr=0.4, warmup_iterations=3)
    assert [learning_rate(optimizer, t) for t in (1, 2, 3, 4, 5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4]
    )


def test_only_matrices_are_decayed() -> None:
    layout = Layout({"a": (2,), "b": (2, 3), "c": (1, 2), "d": (4,)})
    assert layout.segments() == [Segment(0, 2, False), Segment(2, 10, True), Segment(10, 14, False)]
    apart = Layout({"a": (2, 2), "b": (2, 3), "c": (1, 2), "d": (4,)}, {"b"})
    assert apart.segments() == [
        Segment(0, 4, True),
        Segment(4, 10, True, (2, 3)),
        Segment(10, 12, True),
        Segment(12, 16, False),
    ]


def test_a_member_without_a_contribution_keeps_what_it_rounds_off() -> None:
    """It reduces parts for the others, and reads no means before the step."""
    sync = SyncConfig(method=SyncMethod.DILOCO, compression=Method.LOWRANK_INT4, rank=2)
    members = [make_relay(sync=sync) for _ in range(3)]
    exchanges = [cast("CompressedExchange", member.exchange()) for member in members]
    for index, member in enumerate(members[:2]):
        contribute(member, MicrobatchId(1, 0, index))
    parts, means = [member.gather(3) for member in members[:2]], list[torch.Tensor]()
    assert members[2].gather(0) == []
    for phase in range(2):
        if phase:
            parts = [exchange.parts(phase, 3, means) for exchange in exchanges[:2]]
        means += [
            exchange.reduce([own[k] for own in parts], Place(k, 3, phase), [1, 1])
            for k, exchange in enumerate(exchanges)
        ]
    total = sum(exchange._begun._sum_P for exchange in exchanges[:2])
    assert len({member.propose(1, means, weights_total=2) for member in members}) == 1
    average = exchanges[2].average(means, 1)
    for member in members:
        member.commit(1)
    nothing = torch.zeros_like(average)
    left = [each._residuals.added(nothing, slice(0, nothing.numel())) for each in exchanges]
    assert float(left[2].norm()) > 0
    torch.testing.assert_close(2 * average + sum(left), total, rtol=0, atol=1e-3)

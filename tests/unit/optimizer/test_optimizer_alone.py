"""A host that is alone trains as with the wrapped optimizer, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.fake_node import FakeNode, alone
from tests.support.loops import (
    BATCH,
    MakeOptimizer,
    adamw,
    assert_counts,
    backward,
    batches,
    collaborate,
    falling,
    make_model,
    muon,
    same,
    sgd,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("use_local_updates", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [sgd, adamw, muon])
def test_one_step_a_round_equals_the_wrapped_optimizer(
    make: MakeOptimizer, dtype: torch.dtype, use_local_updates: bool
) -> None:
    plain, model = make_model(dtype), make_model(dtype)
    expected, data = make(plain.parameters()), batches(12, dtype)
    scheduler = falling(expected)
    settings: dict[str, Any] = {"scheduler": falling, "use_local_updates": use_local_updates}
    with collaborate(FakeNode(alone(BATCH)), make(model.parameters()), **settings) as optimizer:
        for batch in data:
            expected.zero_grad()
            backward(plain, batch)
            expected.step()
            scheduler.step()
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            assert_counts(optimizer)
            assert same(plain, model)
        assert optimizer.round == len(data)
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        assert optimizer.samples_contributed == len(data) * BATCH


@pytest.mark.parametrize("use_local_updates", [False, True])
@pytest.mark.parametrize("num_calls", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_accumulated_gradients_equal_those_of_torch(
    dtype: torch.dtype, num_calls: int, use_local_updates: bool
) -> None:
    """torch's way divides the loss. By a power of two, that rounds nothing."""
    plain, model = make_model(dtype), make_model(dtype)
    expected, wrapped = adamw(plain.parameters()), adamw(model.parameters())
    target = num_calls * BATCH
    with collaborate(
        FakeNode(alone(target)),
        wrapped,
        target_batch_size=target,
        gradient_accumulation_steps=num_calls,
        use_local_updates=use_local_updates,
    ) as optimizer:
        for index, batch in enumerate(batches(3 * num_calls, dtype), 1):
            backward(plain, batch, 1 / num_calls)
            if index % num_calls == 0:
                expected.step()
                expected.zero_grad()
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            assert_counts(optimizer)
            assert same(plain, model)
        assert optimizer.round == 3


def test_three_accumulated_gradients_are_summed_and_then_divided() -> None:
    plain, model = make_model(), make_model()
    expected, target = sgd(plain.parameters()), 3 * BATCH
    with collaborate(
        FakeNode(alone(target)), sgd(model.parameters()), target_batch_size=target
    ) as optimizer:
        for batch in batches(3):
            backward(plain, batch)
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3
        expected.step()
        assert same(plain, model)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    """The wrapped optimizer would else decay it."""
    model = make_model()
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    wrapped = adamw([*model.parameters(), unused])
    with collaborate(FakeNode(alone(BATCH)), wrapped) as optimizer:
        backward(model, batches(1)[0])
        optimizer.step()
        assert optimizer.round == 1
    assert torch.equal(unused, torch.ones_like(unused))
    assert unused not in wrapped.state


def test_uneven_batches_weigh_by_their_samples() -> None:
    plain, model = make_model(), make_model()
    expected = sgd(plain.parameters())
    data = [batches(1, size=size, seed=size)[0] for size in (4, 2, 6)]
    union = tuple(torch.cat(each) for each in zip(*data, strict=True))
    backward(plain, (union[0], union[1]))
    expected.step()
    with collaborate(
        FakeNode(alone(12)), sgd(model.parameters()), target_batch_size=12
    ) as optimizer:
        for batch in data:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step(batch_size=len(batch[0]))
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_closure_computes_the_gradients() -> None:
    plain, model = make_model(), make_model()
    expected, batch = adamw(plain.parameters()), batches(1)[0]
    loss = backward(plain, batch)
    expected.step()
    with collaborate(FakeNode(alone(BATCH)), adamw(model.parameters())) as optimizer:
        found = optimizer.step(lambda: backward(model, batch))
    assert torch.equal(found, loss)
    assert same(plain, model)


def test_the_loops_gradients_stay_where_they_are() -> None:
    """DDP and others hold references to them."""
    model = make_model()
    with collaborate(FakeNode(alone(BATCH)), adamw(model.parameters())) as optimizer:
        backward(model, batches(1)[0])
        before = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        assert all(
            parameter.grad is gradient
            for parameter, gradient in zip(model.parameters(), before, strict=True)
        )
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scheduler_round_the_collaborative_optimizer_reaches_the_wrapped_one() -> None:
    model = make_model()
    wrapped = sgd(model.parameters())
    with collaborate(FakeNode(alone(BATCH)), wrapped) as optimizer:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        backward(model, batches(1)[0])
        optimizer.step()
        scheduler.step()
        assert wrapped.param_groups[0]["lr"] == 0.05

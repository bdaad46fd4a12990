"""Gradients that are not finite never reach others, and are counted."""

import pytest
import torch

from tests.support.fake_node import FakeNode, alone
from tests.support.loops import (
    BATCH,
    adamw,
    assert_counts,
    backward,
    batches,
    collaborate,
    make_model,
    same,
    sgd,
)


@pytest.mark.parametrize("use_local_updates", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float, *, use_local_updates: bool) -> None:
    plain, model = make_model(), make_model()
    expected = sgd(plain.parameters())
    with collaborate(
        FakeNode(alone(BATCH)), sgd(model.parameters()), use_local_updates=use_local_updates
    ) as optimizer:
        for index, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            backward(model, batch)
            if index == 1:
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient[0, 0] = bad
            else:
                expected.zero_grad()
                backward(plain, batch)
                expected.step()
            optimizer.step()
            assert_counts(optimizer)
        assert same(model, plain)
        assert (optimizer.samples_dropped, optimizer.samples_contributed) == (BATCH, 2 * BATCH)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_gradient_scaler_unscales_and_skips(*, is_given: bool) -> None:
    """Whether the optimizer steps it, or the loop does."""
    plain, model = make_model(torch.float32), make_model(torch.float32)
    expected = adamw(plain.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    with collaborate(
        FakeNode(alone(BATCH)),
        adamw(model.parameters()),
        grad_scaler=scalers[1] if is_given else None,
    ) as optimizer:
        for index, (inputs, targets) in enumerate(batches(4, torch.float32)):
            scale = torch.inf if index == 2 else 1.0
            for network, each, scaler in (
                (plain, expected, scalers[0]),
                (model, optimizer, scalers[1]),
            ):
                each.zero_grad()
                loss = torch.nn.functional.mse_loss(network(inputs), targets)
                scaler.scale(loss * scale).backward()
                if each is expected or not is_given:
                    scaler.step(each)
                    scaler.update()
                else:
                    each.step()
            assert same(model, plain)
            assert_counts(optimizer)
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        # A loop that steps the scaler itself hides the skipped step from the optimizer.
        assert optimizer.samples_dropped == (BATCH if is_given else 0)
        assert optimizer.round == 3


def test_gradients_may_be_unscaled_and_clipped_before() -> None:
    plain, model = make_model(torch.float32), make_model(torch.float32)
    expected, batch = sgd(plain.parameters()), batches(1, torch.float32)[0]
    backward(plain, batch)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.125)
    expected.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with collaborate(
        FakeNode(alone(BATCH)), sgd(model.parameters()), grad_scaler=scaler
    ) as optimizer:
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        optimizer.step()
        assert same(model, plain)


def test_a_contribution_that_overflows_is_not_given() -> None:
    """Each gradient is finite, and their sum over samples is not."""
    node, model = FakeNode(), make_model(torch.float32)
    with collaborate(node, sgd(model.parameters()), overlap=True) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[0] = 3e38
        optimizer.step()
        node.expect("step")
        node.contribute()
        found = node.expect("contributed")
        assert (found["samples"], found["finite"]) == (0, False)
        assert optimizer.samples_dropped == BATCH
        assert_counts(optimizer)


def test_a_sparse_gradient_is_refused() -> None:
    from decod.errors import ConfigError

    table = torch.nn.Embedding(4, 2, sparse=True)
    with collaborate(
        FakeNode(alone(BATCH)), torch.optim.SparseAdam(table.parameters())
    ) as optimizer:
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match="sparse"):
            optimizer.step()

"""What training frameworks do with an optimizer, without the frameworks.

Lightning wraps it in an object of a class that derives from the optimizer's, and steps with a
closure. Hugging Face's accelerate loads a copy of its state at once, zeroes gradients in place, and
hands it to a gradient scaler with a closure of None.
"""

from typing import Any

import torch
from torch import Tensor

from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import FakeNode, alone
from tests.support.loops import (
    BATCH,
    adamw,
    backward,
    batches,
    collaborate,
    make_model,
    same,
)


class Wrapper:
    """An object that seems to be the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (self.__class__, optimizer.__class__), {})

    def step(self, closure: Any) -> Any:
        return self._optimizer.step(closure=closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_wrapper_that_steps_with_a_closure() -> None:
    plain, model = make_model(), make_model()
    expected = adamw(plain.parameters())
    with collaborate(FakeNode(alone(BATCH)), adamw(model.parameters())) as optimizer:
        wrapper: Any = Wrapper(optimizer)
        assert isinstance(wrapper, CollaborativeOptimizer)
        for batch in batches(3):
            expected.zero_grad()
            backward(plain, batch)
            expected.step()

            def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
                wrapper.zero_grad()
                return backward(model, batch)

            with torch.no_grad():
                assert wrapper.step(closure).requires_grad
        assert wrapper.round == 3
        assert wrapper.samples_contributed == 3 * BATCH
        assert same(model, plain)


def moved(value: Any) -> Any:
    """A copy, as for another device."""
    if isinstance(value, dict):
        return type(value)((key, moved(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each) for each in value)
    return value.clone() if isinstance(value, Tensor) else value


def test_state_that_is_moved_at_once_and_a_scaler_with_a_closure_of_none() -> None:
    plain, model = make_model(torch.float32), make_model(torch.float32)
    expected = adamw(plain.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    with collaborate(FakeNode(alone(BATCH)), adamw(model.parameters())) as optimizer:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
        reference = torch.optim.lr_scheduler.ConstantLR(expected, factor=0.5, total_iters=2)
        for index, (inputs, targets) in enumerate(batches(4, torch.float32)):
            if index in (0, 2):
                optimizer.load_state_dict(moved(optimizer.state_dict()))
            for network, each, scaler in (
                (plain, expected, scalers[0]),
                (model, optimizer, scalers[1]),
            ):
                each.zero_grad(set_to_none=False)
                scaler.scale(torch.nn.functional.mse_loss(network(inputs), targets)).backward()
                scaler.step(each, None)
                scaler.update()
            scheduler.step()
            reference.step()
            assert same(model, plain)
        assert optimizer.round == 4

"""A loop on each device: alone, with others, and a newcomer that loads its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.devices import DEVICES
from tests.support.fake_node import DEADLINE_S, FakeNode, Fields, alone
from tests.support.loops import (
    BATCH,
    adamw,
    assert_counts,
    backward,
    batches,
    collaborate,
    flat,
    make_model,
    same,
)


def model_on(device: str, seed: int = 1) -> nn.Module:
    return make_model(torch.float32, seed).to(device)


def data_on(device: str, num: int) -> list[tuple[Tensor, Tensor]]:
    return [(a.to(device), b.to(device)) for a, b in batches(num, torch.float32)]


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
def test_alone_as_the_wrapped_optimizer(device: str) -> None:
    plain, model = model_on(device), model_on(device)
    expected = adamw(plain.parameters())
    with collaborate(FakeNode(alone(BATCH)), adamw(model.parameters())) as optimizer:
        for batch in data_on(device, 4):
            step(plain, expected, batch)
            step(model, optimizer, batch)
        assert same(plain.cpu(), model.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_local_updates", [False, True])
def test_a_contribution_comes_back_as_an_average(device: str, *, use_local_updates: bool) -> None:
    node, model, plain = FakeNode(), model_on(device), model_on(device)
    expected = adamw(plain.parameters())
    settings = {"overlap": True, "use_local_updates": use_local_updates}
    with collaborate(node, adamw(model.parameters()), **settings) as optimizer:
        first, second = data_on(device, 2)
        step(model, optimizer, first)
        node.expect("step")
        node.contribute()
        assert node.expect("contributed")["samples"] == BATCH
        node.average(1, node.read(0) / BATCH, included=True)
        node.send("copy_state", request=1)  # Answered once the average is in the inbox.
        node.expect("state")
        step(model, optimizer, second)
        node.expect("step")
        assert node.expect("applied")["round"] == 1
        assert_counts(optimizer)
        step(plain, expected, first)
        if use_local_updates:
            step(plain, expected, second)
        found, wanted = (flat([*each.parameters()]).cpu() for each in (model, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_newcomer_goes_on_from_a_copy(device: str) -> None:
    node, model = FakeNode(alone(BATCH)), model_on(device)
    newcomer = model_on(device, seed=9)
    with collaborate(node, adamw(model.parameters())) as optimizer:
        *before, after = data_on(device, 3)
        for batch in before:
            step(model, optimizer, batch)
        node._policy = None
        node.send("copy_state", request=1)
        state: Fields = {}
        while state.get("kind") != "state":
            state = node.received.get(timeout=DEADLINE_S)
        node._policy = alone(BATCH)

        def answer(node: FakeNode, message: Fields) -> None:
            if message["kind"] == "step" and message["step"] == 1:
                told = {key: state[key] for key in ("path", "description", "round")}
                node.send("load_state", request=1, **told)
            elif message["kind"] == "step":
                node.send("alone", round=3, samples=BATCH)
            if message["kind"] == "step":
                node.go(message)

        with collaborate(FakeNode(answer), adamw(newcomer.parameters())) as late:
            step(newcomer, late, before[0])
            for each, of in ((model, optimizer), (newcomer, late)):
                assert isinstance(of, CollaborativeOptimizer)
                step(each, of, after)
            assert late.round == optimizer.round == 3
    assert same(model.cpu(), newcomer.cpu())

"""What the node asks for while the loop computes, and while it waits."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from decod.optimizer.optimizer import CollaborativeOptimizer
from decod.train.checkpoint.description import parse_description
from tests.support.fake_node import DEADLINE_S, FakeNode
from tests.support.loops import (
    BATCH,
    assert_counts,
    backward,
    batches,
    collaborate,
    flat,
    make_model,
    same,
    sgd,
    values,
)


class Gate(nn.Module):
    """A layer in whose forward or backward pass the loop stays until it is let go."""

    def __init__(self, model: nn.Module, *, in_backward: bool) -> None:
        super().__init__()
        self.model, self._in_backward = model, in_backward
        self.is_closed = False
        self.reached, self.open = threading.Event(), threading.Event()

    def _stay(self, *_: Any) -> None:
        if self.is_closed:
            self.reached.set()
            assert self.open.wait(DEADLINE_S)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        if self._in_backward:
            outputs.register_hook(self._stay)
        else:
            self._stay()
        return outputs


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_node_is_answered_while_the_loop_computes(*, in_backward: bool) -> None:
    node, gate = FakeNode(), Gate(make_model(), in_backward=in_backward)
    optimizer = collaborate(node, sgd(gate.parameters()), overlap=True)
    first, second = batches(2)
    with optimizer:
        backward(gate, first)
        gradient = flat([p.grad for p in gate.parameters() if p.grad is not None])
        optimizer.step()
        node.expect("step")
        optimizer.zero_grad()
        gate.is_closed = True
        loop = threading.Thread(target=backward, args=(gate, second))
        loop.start()
        assert gate.reached.wait(DEADLINE_S)
        # The loop is in the middle of a pass, and all three are answered.
        node.contribute()
        assert node.expect("contributed")["samples"] == BATCH
        torch.testing.assert_close(node.read(0), gradient * BATCH, rtol=1e-15, atol=0)
        node.send("give_back", region=node.region(0))
        node.send("copy_state", request=7)
        state = node.expect("state")
        assert (state["request"], state["round"]) == (7, 0)
        assert parse_description(state["description"]).num_bytes == state["size_bytes"]
        gate.open.set()
        loop.join(DEADLINE_S)
        optimizer.step()
        assert node.expect("step")["samples"] == BATCH
        assert optimizer.samples_outstanding == 2 * BATCH
        assert_counts(optimizer)


class Loop:
    """A loop in a thread, so that the test can be its node."""

    def __init__(self, optimizer: CollaborativeOptimizer, model: nn.Module, num_steps: int) -> None:
        self._optimizer, self._model, self._num_steps = optimizer, model, num_steps
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in batches(self._num_steps):
                self._optimizer.zero_grad()
                backward(self._model, batch)
                self._optimizer.step()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread.
            self._error = error

    def end(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def open_loop(num_steps: int = 1, **settings: Any) -> tuple[FakeNode, nn.Module, Any, Loop]:
    node, model = FakeNode(), make_model()
    settings = {"averaging_timeout_s": DEADLINE_S, **settings}
    optimizer = collaborate(node, sgd(model.parameters()), **settings)
    return node, model, optimizer, Loop(optimizer, model, num_steps)


def test_the_loop_waits_for_the_average_and_contributes_meanwhile() -> None:
    node, model, optimizer, loop = open_loop()
    before = flat(values(model))
    with optimizer:
        node.go(node.expect("step"), "wait")
        node.contribute()
        assert node.expect("contributed")["finite"]
        node.average(1, torch.ones_like(before), included=True)
        applied = node.expect("applied")
        assert applied["round"] == 1
        assert applied["seconds"] >= 0
        loop.end()
        torch.testing.assert_close(flat(values(model)), before - 0.1 * 1.9, rtol=1e-12, atol=0)
        assert optimizer.samples_contributed == BATCH
        assert_counts(optimizer)


def test_all_averages_are_applied_in_order() -> None:
    """A host that was slow finds several."""
    node, model, optimizer, loop = open_loop()
    plain = make_model()
    expected = sgd(plain.parameters())
    ones = torch.ones(optimizer._training.parameters.num_elements, dtype=torch.float64)
    with optimizer:
        step = node.expect("step")
        for round_number in (1, 2, 3):
            node.write(round_number, ones * round_number)
            fields = {"region": node.region(round_number), "included": False}
            node.send("average", round=round_number, **fields)
        node.go(step)
        assert [node.expect("applied")["round"] for _ in range(3)] == [1, 2, 3]
        loop.end()
        for scale in (1, 2, 3):
            for parameter in plain.parameters():
                parameter.grad = torch.full_like(parameter, scale)
            expected.step()
        assert same(model, plain)
        assert optimizer.samples_outstanding == BATCH
        assert_counts(optimizer)


def test_a_wait_in_vain_ends_in_time() -> None:
    node, model, optimizer, loop = open_loop(averaging_timeout_s=0.05)
    before = make_model()
    with optimizer:
        node.go(node.expect("step"), "wait")
        assert node.expect("waiting")["step"] == 1
        loop.end()
        assert same(model, before)
        assert optimizer.samples_outstanding == BATCH


def test_the_node_may_end_a_wait() -> None:
    """The round has failed, say."""
    node, _, optimizer, loop = open_loop()
    with optimizer:
        step = node.expect("step")
        node.go(step, "wait")
        node.go(step)
        loop.end()
        assert optimizer.round == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_average_that_is_not_finite_is_not_applied(bad: float) -> None:
    node, model, optimizer, loop = open_loop()
    before = make_model()
    with optimizer:
        step = node.expect("step")
        values_P = torch.ones(optimizer._training.parameters.num_elements)
        values_P[3] = bad
        node.average(1, values_P, included=False)
        node.go(step)
        failed = node.expect("failed")
        assert (failed["round"], failed["what"]) == (1, "the average is not finite")
        loop.end()
        assert same(model, before)


def test_an_average_that_does_not_follow_is_not_applied() -> None:
    node, model, optimizer, loop = open_loop()
    before = make_model()
    with optimizer:
        step = node.expect("step")
        node.average(2, torch.ones(optimizer._training.parameters.num_elements), included=False)
        node.go(step)
        assert node.expect("failed")["round"] == 2
        loop.end()
        assert same(model, before)


@pytest.mark.parametrize("use_local_updates", [False, True])
def test_the_next_contribution_may_be_taken_before_the_average_is_applied(
    *, use_local_updates: bool
) -> None:
    """Other hosts end a round while this one's pass goes on."""
    node, model = FakeNode(), make_model()
    settings = {"overlap": True, "use_local_updates": use_local_updates}
    with collaborate(node, sgd(model.parameters()), **settings) as optimizer:
        anchor, given = flat(values(model)), []

        def step(batch: tuple[Tensor, Tensor]) -> None:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            node.expect("step")

        def contribute(request: int) -> None:
            node.contribute(request, index=2)
            assert node.expect("contributed")["samples"] == BATCH
            given.append(node.read(2) / BATCH)

        first, second, third = batches(3)
        step(first)
        contribute(1)
        step(second)
        now = flat(values(model))
        node.average(1, given[0], included=True)
        contribute(2)
        node.write(3, given[1])
        node.send("average", round=2, region=node.region(3), included=True)
        node.send("copy_state", request=3)  # Answered once the second average is in the inbox.
        node.expect("state")
        step(third)
        assert [node.expect("applied")["round"] for _ in range(2)] == [1, 2]
        assert_counts(optimizer)
        assert (optimizer.samples_contributed, optimizer.samples_outstanding) == (2 * BATCH, BATCH)
        if use_local_updates:
            # Both ways lead to where the host was after two steps.
            torch.testing.assert_close(anchor - sum(given), now, rtol=1e-12, atol=1e-14)
            node.contribute(4)
            node.expect("contributed")
            torch.testing.assert_close(
                node.read(0) / BATCH, now - flat(values(model)), rtol=1e-9, atol=1e-12
            )

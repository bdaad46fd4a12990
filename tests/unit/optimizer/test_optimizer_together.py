"""Several hosts in one process, each with its loop's thread and a fake node that averages."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import DEADLINE_S, FakeNode, FakeRun
from tests.support.loops import (
    BATCH,
    MakeOptimizer,
    adamw,
    assert_counts,
    backward,
    batches,
    collaborate,
    falling,
    flat,
    make_model,
    muon,
    same,
    sgd,
    values,
)

Batch = tuple[Tensor, Tensor]


def train(
    run: FakeRun,
    make: MakeOptimizer,
    data: Sequence[Iterable[Batch]],
    see: Callable[[int, CollaborativeOptimizer], None] = lambda *_: None,
    **settings: Any,
) -> list[nn.Module]:
    """Let every host take all its steps at its own pace. Return their models."""
    models = [make_model() for _ in run.nodes]
    optimizers = [
        collaborate(node, make(model.parameters()), averaging_timeout_s=DEADLINE_S, **settings)
        for node, model in zip(run.nodes, models, strict=True)
    ]

    def loop(peer: int) -> None:
        for batch in data[peer]:
            optimizers[peer].zero_grad()
            backward(models[peer], batch)
            optimizers[peer].step(batch_size=len(batch[0]))
            assert_counts(optimizers[peer])
            see(peer, optimizers[peer])

    try:
        with ThreadPoolExecutor(len(models)) as pool:
            for done in [pool.submit(loop, peer) for peer in range(len(models))]:
                done.result(timeout=DEADLINE_S)
    finally:
        for optimizer in optimizers:
            optimizer.close()
    return models


@pytest.mark.parametrize("make", [sgd, adamw])
def test_hosts_equal_one_process_with_all_samples(make: MakeOptimizer) -> None:
    """Host 0 takes three steps a round, host 1 two and host 2 one, of another size."""
    num_rounds, steps, sizes = 5, (3, 2, 1), (4, 4, 6)
    data = [
        batches(num_rounds * steps[peer], seed=10 + peer, size=sizes[peer]) for peer in range(3)
    ]
    shares = [n * size for n, size in zip(steps, sizes, strict=True)]
    run = FakeRun(3, sum(shares), shares)
    models = train(run, make, data, target_batch_size=sum(shares), scheduler=falling)
    plain = make_model()
    expected = make(plain.parameters())
    scheduler = falling(expected)
    for index in range(num_rounds):
        used = [
            batch
            for peer, num in enumerate(steps)
            for batch in data[peer][index * num : (index + 1) * num]
        ]
        expected.zero_grad()
        union = [torch.cat(each) for each in zip(*used, strict=True)]
        backward(plain, (union[0], union[1]))
        expected.step()
        scheduler.step()
    assert run.totals == [sum(shares)] * num_rounds
    for model in models:
        assert same(model, models[0])
        torch.testing.assert_close(flat(values(model)), flat(values(plain)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [sgd, adamw, muon])
def test_local_updates_equal_a_reference_by_hand(make: MakeOptimizer) -> None:
    """Each steps by itself; a round moves the anchor by the mean way, weighed by samples."""
    num_rounds, steps = 4, (3, 2, 1)
    data = [batches(num_rounds * steps[peer], seed=20 + peer) for peer in range(3)]
    shares = [num * BATCH for num in steps]
    run = FakeRun(3, sum(shares), shares)
    models = train(run, make, data, target_batch_size=sum(shares), use_local_updates=True)

    plain = [make_model() for _ in range(3)]
    own = [make(model.parameters()) for model in plain]
    anchor = flat(values(plain[0]))
    for index in range(num_rounds):
        total = torch.zeros_like(anchor)
        for peer, num in enumerate(steps):
            for batch in data[peer][index * num : (index + 1) * num]:
                own[peer].zero_grad()
                backward(plain[peer], batch)
                own[peer].step()
            total += num * (anchor - flat(values(plain[peer])))
        anchor = anchor - total / sum(steps)
        for model in plain:
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    assert len(run.totals) == num_rounds
    for model in models:
        assert same(model, models[0])
        torch.testing.assert_close(flat(values(model)), anchor, rtol=1e-9, atol=1e-9)


def open_local(**settings: Any) -> tuple[FakeNode, nn.Module, CollaborativeOptimizer]:
    node, model = FakeNode(), make_model()
    optimizer = collaborate(
        node, sgd(model.parameters()), use_local_updates=True, overlap=True, **settings
    )
    return node, model, optimizer


def test_what_was_learnt_since_the_contribution_stays_on_top() -> None:
    """Local mode: an average comes when the host is two steps further on."""
    node, model, optimizer = open_local()
    data, anchor = batches(4), flat(values(model))

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        node.expect("step")
        return flat(values(model))

    with optimizer:
        at_contribution = step(data[0])
        node.contribute()
        assert node.expect("contributed")["samples"] == BATCH
        step(data[1])
        assert torch.equal(node.read(0) / BATCH, anchor - at_contribution)
        average = torch.full_like(anchor, 0.25)
        node.average(1, average, included=True)
        # `copy_state` is answered after the average has come, so the next step applies it.
        node.send("copy_state", request=1)
        node.expect("state")
        optimizer.zero_grad()
        backward(model, data[2])
        optimizer.step()
        assert node.expect("step")["samples"] == BATCH
        assert node.expect("applied")["round"] == 1
        assert_counts(optimizer)
        assert (optimizer.samples_contributed, optimizer.samples_outstanding) == (BATCH, 2 * BATCH)
        node.contribute(request=2)
        assert node.expect("contributed")["base_round"] == 0
        # The way from the new anchor is what was learnt since the first contribution.
        way = node.read(0) / (2 * BATCH)
        anchor_now = anchor - average
        torch.testing.assert_close(anchor_now - flat(values(model)), way, rtol=0, atol=1e-12)


def test_a_local_contribution_that_was_left_out_is_in_the_next() -> None:
    node, model, optimizer = open_local()
    anchor = flat(values(model))
    with optimizer:
        for batch in batches(2):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            node.expect("step")
        way = anchor - flat(values(model))
        node.contribute()
        assert node.expect("contributed")["samples"] == 2 * BATCH
        node.send("give_back", region=node.region(0))
        node.contribute(request=2)
        assert node.expect("contributed")["samples"] == 2 * BATCH
        assert torch.equal(node.read(0), way * (2 * BATCH))
        assert_counts(optimizer)


def test_overlap_never_waits_and_counts_late_averages_later() -> None:
    """Gradient mode: the node never answers a step, and the average comes two steps later."""
    node, model, plain = FakeNode(), make_model(), make_model()
    expected = sgd(plain.parameters())
    with collaborate(node, sgd(model.parameters()), overlap=True) as optimizer:
        data = batches(4)
        backward(model, data[0])
        optimizer.step()
        node.contribute()
        assert node.expect("step")["samples"] == BATCH
        assert node.expect("contributed")["samples"] == BATCH
        first = node.read(0) / BATCH
        optimizer.zero_grad()
        backward(model, data[1])
        optimizer.step()
        node.expect("step")
        assert same(model, plain)
        node.average(1, first, included=True)
        node.send("copy_state", request=1)  # Answered once the average is in the inbox.
        node.expect("state")
        optimizer.zero_grad()
        backward(model, data[2])
        optimizer.step()
        node.expect("step")
        assert node.expect("applied")["round"] == 1
        backward(plain, data[0])
        expected.step()
        assert same(model, plain)
        assert (optimizer.samples_contributed, optimizer.samples_outstanding) == (BATCH, 2 * BATCH)
        node.contribute(request=2)
        lent = node.expect("contributed")
        assert (lent["samples"], lent["base_round"]) == (2 * BATCH, 0)
        late = make_model()
        for batch in data[1:3]:
            backward(late, batch)
        total = flat([p.grad for p in late.parameters() if p.grad is not None])
        torch.testing.assert_close(node.read(0), total * BATCH, rtol=1e-12, atol=1e-14)
        assert_counts(optimizer)


def test_a_gradient_that_was_left_out_is_in_the_next_contribution() -> None:
    node, model = FakeNode(), make_model()
    with collaborate(node, sgd(model.parameters()), overlap=True) as optimizer:
        backward(model, batches(1)[0])
        optimizer.step()
        node.expect("step")
        node.contribute()
        node.expect("contributed")
        given = node.read(0)
        node.send("give_back", region=node.region(0))
        node.contribute(request=2, index=2)
        again = node.expect("contributed")
        assert (again["samples"], again["finite"]) == (BATCH, True)
        torch.testing.assert_close(node.read(2), given, rtol=1e-15, atol=0)
        assert_counts(optimizer)


def test_overlapping_hosts_lose_no_sample() -> None:
    least_steps, num_rounds = 12, 3
    run = FakeRun(2, 2 * BATCH, [BATCH, BATCH], waits=False)
    seen: dict[int, CollaborativeOptimizer] = {}
    steps = [0, 0]

    def until_averaged(peer: int) -> Iterator[Batch]:
        """Nobody waits for an average here, so a fast host goes on until some have come."""
        last_s = time.monotonic() + DEADLINE_S
        for batch in itertools.cycle(batches(least_steps, seed=1 + peer)):
            if steps[peer] >= least_steps and run.round >= num_rounds:
                return
            assert time.monotonic() < last_s, "the hosts' averages did not come"
            steps[peer] += 1
            yield batch

    train(
        run,
        sgd,
        [until_averaged(peer) for peer in range(2)],
        lambda peer, optimizer: seen.update({peer: optimizer}),
        target_batch_size=2 * BATCH,
        overlap=True,
    )
    for peer, optimizer in seen.items():
        assert_counts(optimizer)
        assert optimizer.samples_stepped == steps[peer] * BATCH
        assert optimizer.samples_dropped == 0

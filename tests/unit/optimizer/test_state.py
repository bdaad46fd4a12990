"""Copies of a loop's state: written by one host, loaded by another."""

import json
import os
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decod.errors import ConfigError
from decod.optimizer.optimizer import CollaborativeOptimizer
from decod.train.checkpoint.description import (
    aligned,
    describe_blob,
    description_text,
    entry_json,
    parse_description,
)
from tests.support.fake_node import DEADLINE_S, FakeNode, Fields, alone
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
    values,
)


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], gamma=0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def trained(
    make: MakeOptimizer, scheduler: Any, dtype: torch.dtype, num_steps: int = 3
) -> tuple[nn.Module, CollaborativeOptimizer, FakeNode]:
    model, node = make_model(dtype), FakeNode(alone(BATCH))
    optimizer = collaborate(node, make(model.parameters()), scheduler=scheduler)
    train(model, optimizer, num_steps)
    return model, optimizer, node


def train(model: nn.Module, optimizer: CollaborativeOptimizer, num_steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for batch in batches(num_steps, dtype, seed=optimizer.round):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def copy_of(node: FakeNode) -> Fields:
    """A copy of the state, which the node gets while the loop does nothing."""
    node._policy = None
    node.send("copy_state", request=3)
    while True:
        message = node.received.get(timeout=DEADLINE_S)
        # The last round may just have been applied.
        if message["kind"] == "state":
            return message


class Loading:
    """A policy: the first step's answer is a state to load."""

    def __init__(self, state: Fields) -> None:
        self.state = state
        self.told: queue.Queue[Fields] = queue.Queue()

    def __call__(self, node: FakeNode, message: Fields) -> None:
        if message["kind"] == "step" and message["step"] == 1:
            load(node, self.state)
            node.go(message)
        elif message["kind"] == "step":
            applied = self.state["round"] + sum(e["kind"] == "applied" for e in node.kept)
            node.send("alone", round=applied + 1, samples=BATCH)
            node.go(message)
        else:
            self.told.put(message)


def load(node: FakeNode, state: Fields) -> None:
    fields = {key: state[key] for key in ("path", "description", "round")}
    node.send("load_state", request=9, **fields)


@pytest.mark.parametrize(
    ("make", "scheduler"),
    [
        *((make, each) for make in (sgd, adamw, muon) for each in (None, falling, milestones)),
        # It cycles the momentum, which Muon and AdamW call by different names.
        *((make, one_cycle) for make in (sgd, adamw)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_newcomer_goes_on_bit_for_bit(
    make: MakeOptimizer, dtype: torch.dtype, scheduler: Any
) -> None:
    model, optimizer, node = trained(make, scheduler, dtype)
    with optimizer:
        loading = Loading(copy_of(node))
        newcomer, other = make_model(dtype, seed=99), FakeNode(loading)
        with collaborate(other, make(newcomer.parameters()), scheduler=scheduler) as late:
            train(newcomer, late, 1)
            loaded = loading.told.get(timeout=DEADLINE_S)
            assert loaded == {"kind": "loaded", "request": 9, "round": 3}
            assert same(newcomer, model)
            assert (late.round, late.samples_dropped) == (3, BATCH)
            assert_counts(late)
            node._policy = alone(BATCH)
            train(newcomer, late, 4)
            train(model, optimizer, 4)
            assert (late.round, optimizer.round) == (7, 7)
            assert same(newcomer, model)
            assert late.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_level_hosts_describe_the_same_bits() -> None:
    """So chunks may come from all of them, and the first hash says that they begin alike."""
    hosts = [trained(adamw, falling, torch.float32) for _ in range(2)]
    try:
        texts = {copy_of(node)["description"] for _, _, node in hosts}
        assert len(texts) == 1
        assert len({node.hello["state_hash"] for _, _, node in hosts}) == 1
        assert len({node.hello["fingerprint"] for _, _, node in hosts}) == 1
    finally:
        for _, optimizer, _ in hosts:
            optimizer.close()


def test_a_scheduler_that_the_loop_makes_is_its_own() -> None:
    """Frameworks make one at each host, before or after it loads a state."""
    model, optimizer, node = trained(adamw, None, torch.float32)
    with optimizer:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=20)
        state = copy_of(node)
        newcomer, other = make_model(torch.float32, seed=99), FakeNode(Loading(state))
        with collaborate(other, adamw(newcomer.parameters())) as late:
            train(newcomer, late, 1)
            assert late.round == 3
            assert same(newcomer, model)
            assert "initial_lr" not in late.param_groups[0]


def test_the_first_hash_is_that_of_the_description() -> None:
    node = FakeNode()
    with collaborate(node, adamw(make_model().parameters())):
        node.send("copy_state", request=1)
        assert parse_description(node.expect("state")["description"]).id == node.hello["state_hash"]


def test_a_copy_that_nobody_took_vanishes_with_its_host() -> None:
    node = FakeNode()
    with collaborate(node, adamw(make_model().parameters())):
        node.send("copy_state", request=1)
        path = Path(node.expect("state")["path"])
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_loop_may_load_a_state_before_its_first_step() -> None:
    model, optimizer, node = trained(adamw, falling, torch.float64)
    with optimizer:
        state = copy_of(node)
        newcomer, other = make_model(seed=99), FakeNode(fetching=True)
        greet = other._greet

        def greet_and_load(hello: Fields) -> None:
            greet(hello)
            load(other, state)
            other.send("go", step=0)

        other._greet = greet_and_load  # type: ignore[method-assign]
        with collaborate(other, adamw(newcomer.parameters()), scheduler=falling) as late:
            assert late.round == 3
            assert same(newcomer, model)
            assert late.samples_dropped == 0


def altered_byte(path: Path, state: Fields) -> Fields:
    with path.open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\xff")
    return state


def truncated(path: Path, state: Fields) -> Fields:
    os.truncate(path, 100)
    return state


def missing(path: Path, state: Fields) -> Fields:
    path.unlink()
    return state


def no_text(path: Path, state: Fields) -> Fields:
    said = json.loads(state["description"])
    said["tensors"] = said["tensors"][:1]
    said["chunks"] = said["chunks"][:64]
    return {**state, "description": json.dumps(said)}


def unreadable(path: Path, state: Fields) -> Fields:
    return {**state, "description": "{"}


@pytest.mark.parametrize("alter", [altered_byte, truncated, missing, no_text, unreadable])
def test_a_wrong_state_changes_nothing(alter: Callable[[Path, Fields], Fields]) -> None:
    _, optimizer, node = trained(adamw, falling, torch.float64)
    with optimizer:
        state = copy_of(node)
        loading = Loading(alter(Path(state["path"]), state))
        newcomer, untouched = make_model(seed=99), make_model(seed=99)
        with collaborate(
            FakeNode(loading), adamw(newcomer.parameters()), scheduler=falling
        ) as late:
            train(newcomer, late, 1)
            assert loading.told.get(timeout=DEADLINE_S)["kind"] == "state_refused"
            assert same(newcomer, untouched)
            assert (late.round, late.samples_outstanding) == (0, BATCH)


def with_text(state: Fields, change: Callable[[Any], Any]) -> Fields:
    """A state whose text another host has changed, with the right hashes."""
    path = Path(state["path"])
    description = parse_description(state["description"])
    *others, text = description.entries
    data = bytearray(path.read_bytes())
    said = change(json.loads(data[text.offset : text.offset + text.num_bytes]))
    new = json.dumps(said).encode()
    data[text.offset :] = new + bytes(aligned(len(new)) - len(new))
    path.write_bytes(data)
    entries = [*others, replace(text, shape=(len(new),), num_bytes=len(new))]
    described, chunks = describe_blob(entries, memoryview(data))
    tensors = [entry_json(entry) for entry in described]
    return {**state, "description": description_text(tensors, "".join(chunks))}


def with_rate(rate: Any) -> Callable[[Any], Any]:
    def change(said: Any) -> Any:
        for pair in said["groups"][0]["dict"]:
            if pair[0] == "lr":
                pair[1] = rate
        return said

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [],
        lambda said: {},
        lambda said: {**said, "round": 2},
        lambda said: {**said, "round": "3"},
        lambda said: {**said, "states": said["states"][1:]},
        lambda said: {**said, "groups": []},
        lambda said: {**said, "groups": [{"dict": []}]},
        lambda said: {**said, "scheduler": {"dict": [["step", 1]]}},
        lambda said: {**said, "scheduler": {"list": [1]}},
        lambda said: {**said, "scheduler": {"tensor": "none", "dtype": "x", "shape": []}},
        lambda said: {**said, "scheduler": {"tensor": "none", "dtype": "nn", "shape": [0]}},
        lambda said: {**said, "scheduler": {"tensor": "", "dtype": "bool", "shape": [0, -1]}},
        lambda said: {**said, "states": [{"dict": [[{"list": []}, 1]]}]},
        with_rate("fast"),
        with_rate(None),
    ],
)
def test_a_text_that_cannot_be_is_refused(change: Callable[[Any], Any]) -> None:
    _, optimizer, node = trained(adamw, falling, torch.float64)
    with optimizer:
        loading = Loading(with_text(copy_of(node), change))
        newcomer, untouched = make_model(seed=99), make_model(seed=99)
        with collaborate(
            FakeNode(loading), adamw(newcomer.parameters()), scheduler=falling
        ) as late:
            train(newcomer, late, 1)
            assert loading.told.get(timeout=DEADLINE_S)["kind"] == "state_refused"
            assert same(newcomer, untouched)


def test_an_unchanged_text_is_taken() -> None:
    """So the refusals before are for what was changed."""
    model, optimizer, node = trained(adamw, falling, torch.float64)
    with optimizer:
        loading = Loading(with_text(copy_of(node), lambda said: said))
        newcomer = make_model(seed=99)
        with collaborate(
            FakeNode(loading), adamw(newcomer.parameters()), scheduler=falling
        ) as late:
            train(newcomer, late, 1)
            assert loading.told.get(timeout=DEADLINE_S)["kind"] == "loaded"
            assert same(newcomer, model)


@pytest.mark.parametrize(
    ("make", "scheduler"), [(sgd, falling), (adamw, None), (adamw, milestones)]
)
def test_the_state_of_another_optimizer_is_refused(make: MakeOptimizer, scheduler: Any) -> None:
    _, optimizer, node = trained(adamw, falling, torch.float64)
    with optimizer:
        loading = Loading(copy_of(node))
        newcomer = make_model()
        with collaborate(
            FakeNode(loading), make(newcomer.parameters()), scheduler=scheduler
        ) as late:
            train(newcomer, late, 1)
            assert loading.told.get(timeout=DEADLINE_S)["kind"] == "state_refused"


def test_a_state_with_a_parameter_that_is_no_number_is_refused() -> None:
    model, optimizer, node = trained(sgd, None, torch.float64)
    with optimizer:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        loading = Loading(copy_of(node))
        newcomer, untouched = make_model(), make_model()
        with collaborate(FakeNode(loading), sgd(newcomer.parameters())) as late:
            train(newcomer, late, 1)
            assert "not finite" in loading.told.get(timeout=DEADLINE_S)["what"]
            assert same(newcomer, untouched)


def test_local_mode_copies_where_all_hosts_are() -> None:
    """Not what this host alone has learnt since."""
    node, model = FakeNode(), make_model()
    settings = {"use_local_updates": True, "overlap": True}
    with collaborate(node, sgd(model.parameters()), **settings) as optimizer:
        train(model, optimizer, 2)
        for _ in range(2):
            node.expect("step")
        node.send("copy_state", request=1)
        state = node.expect("state")
        newcomer = make_model(seed=99)
        loading = Loading(state)
        with collaborate(
            FakeNode(loading), sgd(newcomer.parameters()), use_local_updates=True
        ) as late:
            train(newcomer, late, 1)
            assert same(newcomer, make_model())
            assert not same(newcomer, model)


def test_a_low_rank_newcomer_gets_the_newest_average() -> None:
    """From it the next average's directions follow."""
    node, model = FakeNode(), make_model()
    settings = {"compression": "lowrank", "overlap": True}
    with collaborate(node, sgd(model.parameters()), **settings) as optimizer:
        average_P = torch.arange(optimizer._training.parameters.num_elements, dtype=torch.float64)
        node.average(1, average_P, included=False)
        node.send("copy_state", request=1)
        node.expect("state")
        train(model, optimizer, 1)
        node.expect("step")
        node.expect("applied")
        node.send("copy_state", request=2)
        state = node.expect("state")
        description = parse_description(state["description"])
        (entry,) = [entry for entry in description.entries if entry.name == "guide"]
        data = bytearray(Path(state["path"]).read_bytes())
        found = torch.frombuffer(data, dtype=torch.float64, count=66, offset=entry.offset)
        assert torch.equal(found, average_P)


class Odd(torch.optim.SGD):
    """An optimizer that keeps what can't be sent."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for group in self.param_groups:
            group["odd"] = object()


def test_an_optimizer_whose_state_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-092.*is a object"):
        collaborate(FakeNode(), Odd(make_model().parameters(), lr=0.1))


def test_checkpoints_hold_all_that_a_loop_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that saves model and optimizer goes on bit for bit, in the middle of a round."""
    target, data = 2 * BATCH, batches(6)

    def open_loop(of: nn.Module, node: FakeNode) -> CollaborativeOptimizer:
        wrapped = adamw(of.parameters())
        return collaborate(node, wrapped, scheduler=falling, target_batch_size=target)

    def step(model: nn.Module, optimizer: CollaborativeOptimizer, batch: Any) -> None:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()

    plain, model, resumed = make_model(), make_model(), make_model(seed=99)
    with open_loop(plain, FakeNode(alone(target))) as expected:
        for batch in data:
            step(plain, expected, batch)
    with open_loop(model, FakeNode(alone(target))) as first:
        for batch in data[:3]:
            step(model, first, batch)
        saved = first.state_dict()
        resumed.load_state_dict(model.state_dict())
    node, rounds = FakeNode(), iter((2, 3))

    def answer(node: FakeNode, message: Fields) -> None:
        if message["kind"] == "step":
            node.num_samples += message["samples"]
            if node.num_samples >= target:
                node.num_samples = 0
                node.send("alone", round=next(rounds), samples=target)
            node.go(message)

    node._policy = answer
    with open_loop(resumed, FakeNode()) as second:
        monkeypatch.setattr("decod.optimizer.session.start_node", node.connect)
        second.load_state_dict(saved)
        assert (node.hello["round"], second.samples_outstanding) == (1, BATCH)
        for batch in data[3:]:
            step(resumed, second, batch)
        assert second.round == 3
        assert same(resumed, plain)
        told = [message["samples"] for message in node.kept if message["kind"] == "step"]
        assert told == [2 * BATCH, BATCH, BATCH]
        assert_counts(second)


def test_a_framework_may_load_what_it_has_just_saved() -> None:
    """As Hugging Face's accelerate does, to move it to a device. The node stays."""
    node, model = FakeNode(), make_model()
    with collaborate(node, adamw(model.parameters()), scheduler=falling) as optimizer:
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is optimizer.wrapped.param_groups
        node.send("copy_state", request=1)
        node.expect("state")
    node.expect("bye")
    assert [message["kind"] for message in node.kept] == ["hello", "state", "bye"]


def test_what_a_node_was_lent_is_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node, again, model = FakeNode(), FakeNode(), make_model()
    with collaborate(node, sgd(model.parameters()), overlap=True) as optimizer:
        train(model, optimizer, 1)
        node.expect("step")
        saved = optimizer.state_dict()
        node.contribute()
        node.expect("contributed")
        monkeypatch.setattr("decod.optimizer.session.start_node", again.connect)
        optimizer.load_state_dict(saved)
        assert (optimizer.samples_outstanding, optimizer.samples_dropped) == (BATCH, 0)
        again.contribute()
        assert again.expect("contributed")["samples"] == BATCH
        assert_counts(optimizer)


def test_a_checkpoint_of_the_wrapped_optimizer_alone_is_taken() -> None:
    model = make_model()
    wrapped = adamw(model.parameters())
    backward(model, batches(1)[0])
    wrapped.step()
    saved = wrapped.state_dict()
    again = make_model()
    node = FakeNode()
    with collaborate(node, adamw(again.parameters())) as optimizer:
        optimizer.close()
        optimizer.load_state_dict(saved)
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert len(moments) == len(values(model))
        assert optimizer.state is optimizer.wrapped.state
        assert optimizer.param_groups is optimizer.wrapped.param_groups

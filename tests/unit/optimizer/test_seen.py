"""How many samples a step has had, as the loop's model sees it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decod.errors import ConfigError
from decod.optimizer.seen import SeenSamples
from tests.support.fake_node import FakeNode, alone
from tests.support.loops import collaborate, make_model, sgd

USUAL = 8


def seen_of(model: nn.Module, usual: int = USUAL, **fields: Any) -> SeenSamples:
    settings = {"num_ranks": 1, "of_tokens": False, **fields}
    return SeenSamples([*model.parameters()], usual, **settings)


def pass_of(model: nn.Module, size: int, *more: int) -> Tensor:
    loss: Tensor = model(torch.randn(size, *more, 5)).square().mean()
    loss.backward()
    return loss


def plain() -> nn.Module:
    return make_model(torch.float32)


class Keyed(nn.Module):
    """A model that is called with keywords, and gives a dictionary, as those of transformers."""

    main_input_name = "ids"
    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10)

    def loss_function(self) -> None:
        """Stands for the function that transformers names so."""

    loss_function.__name__ = "ForCausalLMLoss"

    def forward(self, *, mask: Tensor, ids: Tensor, **more: Any) -> dict[str, Tensor]:
        logits = self.head(self.embedding(ids)) * mask[..., None]
        return {"logits": logits, "loss": logits.square().mean()}


def test_a_shorter_batch_counts_as_what_it_has() -> None:
    model = plain()
    seen = seen_of(model)
    found = []
    for size in (USUAL, USUAL, 3, USUAL, 1):
        pass_of(model, size)
        model.zero_grad()
        found.append(seen.take())
    assert found == [USUAL, USUAL, 3, USUAL, 1]


def test_passes_whose_gradients_are_added_up_count_together() -> None:
    model = plain()
    seen = seen_of(model)
    for size in (4, 4):
        pass_of(model, size)
    assert seen.take() == 8
    model.zero_grad()
    for size in (4, 1):
        pass_of(model, size)
    assert seen.take() == 5


@pytest.mark.parametrize(
    "idle",
    [
        pytest.param(lambda m: m(torch.randn(50, 5)), id="without a backward pass"),
        pytest.param(lambda m: torch.no_grad()(m)(torch.randn(50, 5)), id="without gradients"),
        pytest.param(lambda m: (pass_of(m, 50), m.zero_grad()), id="whose gradients were dropped"),
        pytest.param(lambda m: pass_of(copy.deepcopy(m), 50), id="of a copy of the model"),
        pytest.param(lambda _: pass_of(plain(), 50), id="of another model"),
    ],
)
def test_passes_that_leave_no_gradient_do_not_count(idle: Callable[[nn.Module], Any]) -> None:
    model = plain()
    seen = seen_of(model)
    for size in (USUAL, 3):
        idle(model)
        pass_of(model, size)
        idle(copy.deepcopy(model))
        model(torch.randn(20, 5))
        assert seen.take() == size
        model.zero_grad()


def test_gradients_may_be_dropped_between_the_forward_and_the_backward_pass() -> None:
    model = plain()
    with collaborate(FakeNode(alone(1000)), sgd(model.parameters())) as optimizer:
        for size in (4, 4, 3):
            loss = model(torch.randn(size, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert optimizer.samples_stepped == 11


def test_the_module_that_the_loop_calls_is_watched_whatever_it_wraps() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
            (inputs,) = batch["inputs"]
            halves = inputs.chunk(2)
            return torch.zeros(()), [self.inner(half) for half in halves]

    model = plain()
    seen, outer = seen_of(model), Outer(model)
    for size in (USUAL, 6):
        _, found = outer({"inputs": [torch.randn(size, 5)]})
        sum(each.sum() for each in found).backward()  # type: ignore[union-attr]
        assert seen.take() == size
        model.zero_grad()


def test_a_compiled_model_is_watched_from_outside() -> None:
    model = plain()
    seen = seen_of(model)
    compiled = torch.compile(model, backend="eager")
    for size in (USUAL, 2, USUAL):
        pass_of(compiled, size)
        assert seen.take() == size
        model.zero_grad()


@pytest.mark.parametrize(
    ("usual", "shape", "last", "expected"),
    [
        pytest.param(32, (8, 4), (3, 4), 12, id="tokens"),
        pytest.param(8, (4, 8), (4, 3), 3, id="time first"),
        pytest.param(8, (8, 4), (2, 4), 2, id="rows"),
    ],
)
def test_a_sample_is_that_of_which_the_first_step_has_as_many_as_it_should(
    usual: int, shape: tuple[int, ...], last: tuple[int, ...], expected: int
) -> None:
    model = plain()
    seen = seen_of(model, usual)
    pass_of(model, *shape)
    assert seen.take() == usual
    model.zero_grad()
    pass_of(model, *last)
    assert seen.take() == expected


def test_ranks_have_batches_of_one_size() -> None:
    model = plain()
    seen = seen_of(model, num_ranks=2)
    for size in (4, 1):
        pass_of(model, size)
        assert seen.take() == 2 * size
        model.zero_grad()


def test_what_does_not_look_like_samples_counts_as_a_full_step_and_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nodes of graphs, for example."""
    model = plain()
    seen = seen_of(model)
    for size in (USUAL, 31, 5):
        pass_of(model, size)
        assert seen.take() == USUAL
        model.zero_grad()
    told = capsys.readouterr().err
    assert told.count("warning: a step had a batch of shape (31, 5)") == told.count("warning") == 1
    assert "step(batch_size=...)" in told


def test_a_step_without_a_call_of_a_module_counts_as_full_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = nn.Parameter(torch.randn(5))
    seen = SeenSamples([weights], USUAL, 1, of_tokens=False)
    (torch.randn(3, 5) @ weights).sum().backward()
    assert seen.take() == USUAL
    assert "no call of a module with the trained parameters was seen" in capsys.readouterr().err


def test_fewer_than_a_full_step_from_the_begin_count_as_they_are_and_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All data are less than a batch."""
    model = plain()
    seen = seen_of(model)
    pass_of(model, 3)
    assert seen.take() == 3
    assert "one with 3 counts as 3" in capsys.readouterr().err


def test_a_watched_model_can_be_copied_and_saved() -> None:
    """What is copied, or saved as a whole, has hooks that do nothing."""
    model = plain()
    seen = seen_of(model)
    pass_of(model, USUAL)
    other = copy.deepcopy(model)
    pass_of(other, 99)
    torch.save(model, io.BytesIO())
    assert seen.take() == USUAL


def test_nothing_is_watched_after_the_end() -> None:
    model = plain()
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    seen, unused = seen_of(model), seen_of(model)
    assert len(hooks) == before + 2
    pass_of(model, USUAL)
    seen.close()
    unused.close()
    assert not model._forward_hooks
    assert len(hooks) == before


# --- tokens ---------------------------------------------------------------------------------------


def keyed_batch(lengths: list[int], width: int = 6) -> dict[str, Tensor]:
    labels = torch.full((len(lengths), width), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = 1
    ids = torch.ones(len(lengths), width, dtype=torch.long)
    return {"mask": torch.ones(1, width), "ids": ids, "labels": labels}


def test_tokens_count_if_they_are_targets() -> None:
    """Padding is none, and neither is the first token of a text, which nothing predicts."""
    model = Keyed()
    seen = seen_of(model, of_tokens=True)
    for lengths, expected in (([6, 3], 5 + 2), ([1, 2, 4], 0 + 1 + 3)):
        model(**keyed_batch(lengths))["loss"].backward()
        assert seen.take() == expected
        model.zero_grad()


def test_tokens_of_several_passes_count_together() -> None:
    model = Keyed()
    seen = seen_of(model, of_tokens=True)
    for lengths in ([6, 3], [2]):
        model(**keyed_batch(lengths))["loss"].backward()
    assert seen.take() == 5 + 2 + 1


def test_tokens_without_labels_are_refused() -> None:
    model = Keyed()
    seen = seen_of(model, of_tokens=True)
    batch = keyed_batch([6])
    del batch["labels"]
    model(**batch)["loss"].backward()
    with pytest.raises(ConfigError, match="was not called with the argument labels"):
        seen.take()


def test_samples_are_rows_of_the_models_main_input() -> None:
    """The mask comes first, and has one row."""
    model = Keyed()
    seen = seen_of(model, 3)
    model(**keyed_batch([6, 6, 6]))["loss"].backward()
    assert seen.take() == 3


# --- the optimizer --------------------------------------------------------------------------------


def test_an_epoch_with_a_shorter_last_batch_is_the_step_on_all_its_samples() -> None:
    model = make_model()
    alone_model = copy.deepcopy(model)
    inputs = torch.randn(10, 5, dtype=torch.float64)
    expected = sgd(alone_model.parameters())
    alone_model(inputs).square().mean().backward()
    expected.step()
    sizes = {"batch_size_per_step": 8, "target_batch_size": 10}
    with collaborate(FakeNode(alone(10)), sgd(model.parameters()), **sizes) as optimizer:
        for batch in inputs.split(8):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        assert (optimizer.round, optimizer.samples_contributed) == (1, 10)
    for found, wanted in zip(model.parameters(), alone_model.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_a_number_that_is_given_counts() -> None:
    model = plain()
    with collaborate(FakeNode(alone(1000)), sgd(model.parameters())) as optimizer:
        pass_of(model, 4)
        optimizer.step(batch_size=7)
        optimizer.tell(9, 1.0)
        pass_of(model, 4)
        optimizer.step()
        pass_of(model, 4)
        optimizer.step()
        assert optimizer.samples_stepped == 7 + 9 + 4


def test_a_step_without_a_target_counts_nothing() -> None:
    model = Keyed()
    fields = {"count": "tokens", "target_batch_size": 100}
    with collaborate(FakeNode(alone(100)), sgd(model.parameters()), **fields) as optimizer:
        for lengths in ([1, 1], [3, 1]):
            model(**keyed_batch(lengths))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.samples_stepped == 2

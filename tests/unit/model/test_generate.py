"""Text that a model continues: the cache changes no score, and sampling means what it does in
transformers."""

from pathlib import Path

import pytest
import torch

from decod.errors import DataError
from decod.model.attention import KeyValueCache
from decod.model.generate import LoadedModel, choose
from decod.model.sampling import Sampling
from decod.run.model_config import FAMILIES, Architecture, ModelConfig
from tests.support.model_folders import write_folder
from tests.unit.model.test_stage import (
    MODELS,
    TOKENS,
    loaded_module,
    random_weights,
    transformers,
)

PROMPT = TOKENS[0, :5].tolist()
GREEDY = Sampling(temperature=0)


def continued(folder: Path, sampling: Sampling, *, num_tokens: int = 12) -> list[int]:
    return list(LoadedModel(folder).continuation(PROMPT, sampling, num_tokens=num_tokens))


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = MODELS[request.param]
    write_folder(tmp_path, model, random_weights(model))
    return tmp_path


def test_cached_scores_are_those_of_the_whole_text(folder: Path) -> None:
    module = loaded_module(folder)
    caches = [KeyValueCache(30) for _ in range(2)]
    with torch.inference_mode():
        expected = module(TOKENS)
        parts = [TOKENS[:, :7], *TOKENS[:, 7:].split(1, dim=1)]
        ends = [7 + number for number in range(len(parts))]
        for end, part in zip(ends, parts, strict=True):
            found = module.next_logits(part, caches)
            torch.testing.assert_close(found, expected[:, end - 1], atol=1e-4, rtol=1e-4)
    assert end == 30


def test_greedy_text_is_what_transformers_generates(folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = theirs.generate(TOKENS[:1, :5], max_new_tokens=40, do_sample=False)[0, 5:].tolist()
    assert continued(folder, GREEDY, num_tokens=40) == expected


def test_a_seed_decides_what_is_sampled(tmp_path: Path) -> None:
    write_folder(tmp_path, MODELS["llama"], random_weights(MODELS["llama"]))
    first, again, other = (
        continued(tmp_path, Sampling(seed=seed), num_tokens=20) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_text_may_outgrow_the_context(architecture: Architecture, tmp_path: Path) -> None:
    """From then on each token follows from the newer half of the context or more."""
    model = ModelConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        max_position_embeddings=8,
        model_type=architecture,
    )
    write_folder(tmp_path, model, random_weights(model))
    prompt, module = TOKENS[0, :12].tolist(), loaded_module(tmp_path)
    found = list(LoadedModel(tmp_path).continuation(prompt, GREEDY, num_tokens=10))
    expected, window = list[int](), prompt[-8:]
    for _ in range(10):
        window = window[-4:] if len(window) > 8 else window
        with torch.inference_mode():
            expected.append(int(module(torch.tensor([window]))[0, -1].argmax()))
        window = [*window, expected[-1]]
    assert found == expected


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(folder: Path) -> None:
    whole = continued(folder, GREEDY)
    stop = whole[5]
    model = LoadedModel(folder)
    found = model.continuation(PROMPT, GREEDY, num_tokens=12, stop_ids={stop})
    assert list(found) == whole[: whole.index(stop)]


def reachable(sampling: Sampling, scores: torch.Tensor) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose(scores.clone(), sampling, generator) for _ in range(3000)}


def test_the_tokens_to_sample_from_are_those_of_transformers() -> None:
    scores = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for temperature, top_k, top_p in ((1.0, 3, 1.0), (0.7, 0, 0.6), (1.5, 8, 0.8), (0.5, 99, 0.01)):
        warpers = [transformers.TemperatureLogitsWarper(temperature)]
        warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
        warpers += [transformers.TopPLogitsWarper(top_p)]
        kept = scores[None].clone()
        for warper in warpers:
            kept = warper(None, kept)
        expected = set(torch.isfinite(kept[0]).nonzero().flatten().tolist())
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        found = reachable(sampling, scores)
        assert found <= expected
        chances = torch.softmax(kept[0], -1)
        assert found >= {token for token in expected if chances[token] > 0.01}


def test_the_least_temperature_takes_the_likeliest_token() -> None:
    scores = torch.tensor([0.0, 3.0, 2.9], dtype=torch.float64)
    assert reachable(Sampling(temperature=5e-324), scores) == {1}


def test_a_model_that_has_diverged_is_named(tmp_path: Path) -> None:
    weights = random_weights(MODELS["llama"])
    weights["model.norm.weight"][0] = torch.nan
    write_folder(tmp_path, MODELS["llama"], weights)
    with pytest.raises(DataError, match=r"E-DAT-045 .*scores that are not finite"):
        continued(tmp_path, GREEDY)

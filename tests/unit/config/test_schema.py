"""Manifests: canonical, comparable, and read from a peer without trust."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.schema import (
    MANIFEST_SIZE_MAX_BYTES,
    Manifest,
    activation_size_bytes,
    count_parameters,
    validate,
)
from decod.daemon.run_facts import facts_of, sizes_of, tensor_sizes
from decod.errors import ConfigError, MalformedMessageError, RejectedError
from decod.model.shape import model_shapes
from decod.run.model_config import FAMILIES, Architecture, ModelConfig, ModelDtype
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationCompression,
    ActivationsConfig,
    BatchConfig,
    OptimizerConfig,
    OptimizerName,
    SyncConfig,
    SyncMethod,
)
from tests.support.manifests import changed

INDEX = "ab" * 32


def make_manifest(**changes: Any) -> Manifest:
    return Manifest(
        **{"run": RunConfig(), "data_index_sha256": INDEX, "data_vocab_size": 257} | changes
    )


def test_a_manifest_survives_its_json() -> None:
    manifest = make_manifest(initial_weights="cd" * 32)
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest


def test_the_hash_is_that_of_the_canonical_text() -> None:
    manifest = make_manifest()
    text = manifest.to_json()
    assert " " not in text
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert manifest.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_the_first_difference_is_named_with_both_values() -> None:
    one = make_manifest()
    other = make_manifest(run=RunConfig(seed=2, optimizer=OptimizerConfig(lr=0.5)))
    assert one.first_difference(other) == "run.seed is 0 here and 2 there"
    assert one.first_difference(make_manifest()) is None
    assert (one.sha256 == other.sha256) is False


@given(
    lr=st.floats(min_value=1e-300, max_value=1e3),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    size=st.integers(min_value=1, max_value=100),
)
def test_any_valid_manifest_survives_its_json(lr: float, seed: int, size: int) -> None:
    run = RunConfig(
        seed=seed, optimizer=OptimizerConfig(lr=lr), batch=BatchConfig(microbatch_size=size)
    )
    manifest = make_manifest(run=run)
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("extra", 1),
        ("run.model.extra", 1),
        ("run.model.hidden_size", "128"),
        ("run.model.hidden_size", 128.0),
        ("run.model.hidden_size", True),
        ("run.model.hidden_size", None),
        ("run.model.hidden_size", -1),
        ("run.model.hidden_size", 10**4000),
        ("run.model.num_hidden_layers", 2**62),
        ("run.stages.num_relay_stages", 2**62),
        ("run.batch.num_microbatches", 2**62),
        ("run.model.norm_eps", -1.0),
        ("run.model.rope_theta", 0.0),
        ("run.model.rope_type", "yarn"),
        ("run.model.rope_factor", 8.0),
        ("run.optimizer.clip_norm", -1.0),
        ("run.optimizer.clip_norm", 1e13),
        ("run.model.model_type", "bert"),
        ("run.model", []),
        ("run", None),
        ("run.name", "../../etc"),
        ("run.name", "x" * 33),
        ("run.seed", -1),
        ("run.optimizer.lr", 1),  # Not as we would write it: the hash would differ.
        ("data_index_sha256", INDEX.upper()),
        ("data_index_sha256", INDEX + "\n"),
        ("data_index_sha256", ""),
        ("data_vocab_size", 0),
        ("data_vocab_size", 258),
        ("initial_weights", "/etc/passwd"),
        ("protocol_version", "1"),
        ("protocol_version", True),
    ],
)
def test_a_bad_field_from_a_peer_is_a_malformed_message(path: str, value: object) -> None:
    with pytest.raises(MalformedMessageError, match="bad manifest") as caught:
        Manifest.from_json(changed(make_manifest(), path, value))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "{",
        '{"run": NaN}',
        "[" * 50_000,
        '{"a":' * 10_000,
        b"\xff\xfe",
        "\ud800",
        " " * (MANIFEST_SIZE_MAX_BYTES + 1),
        make_manifest().to_json() + " ",
        make_manifest().to_json().replace("{", '{"data_vocab_size":1,', 1),
        make_manifest().to_json().replace("0.001", "NaN"),
        make_manifest().to_json().replace("0.001", "1e999"),
    ],
)
def test_text_that_is_no_canonical_manifest_is_malformed(text: str | bytes) -> None:
    with pytest.raises(MalformedMessageError, match="bad manifest"):
        Manifest.from_json(text)


@given(st.binary(max_size=300))
def test_any_bytes_from_a_peer_are_refused(text: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        Manifest.from_json(text)


def test_another_protocol_version_is_told_as_such_even_with_unknown_fields() -> None:
    values = json.loads(make_manifest().to_json()) | {
        "protocol_version": PROTOCOL_VERSION + 1,
        "new_field": 1,
    }
    with pytest.raises(RejectedError, match=rf"E-REJ-002 .* version {PROTOCOL_VERSION + 1}"):
        Manifest.from_json(json.dumps(values))


def test_data_with_more_tokens_than_the_model_has_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size is 257: .* has 300 tokens"):
        make_manifest(data_vocab_size=300)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_the_shapes_have_them(
    architecture: Architecture, *, tied: bool
) -> None:
    model = ModelConfig(model_type=architecture, tie_word_embeddings=tied, num_hidden_layers=3)
    expected = sum(math.prod(shape) for shape in model_shapes(model).values())
    assert count_parameters(model) == expected


def test_activation_size_is_that_of_the_hidden_states() -> None:
    run = RunConfig(batch=BatchConfig(sequence_length=8, microbatch_size=3))
    assert activation_size_bytes(run) == 8 * 3 * 128 * 4


@pytest.mark.parametrize("dtype", list(ModelDtype))
@pytest.mark.parametrize(
    ("compression", "hidden_size", "token_bytes"),
    [
        # One scale for a token, or one for each 256 elements or somewhat less.
        ("int8", 128, 128 + 4),
        ("int8", 768, 768 + 3 * 4),
        ("int8", 640, 640 + 4 * 4),
        ("bf16", 640, 640 * 2),
        # Of each sequence of 8 tokens, the mean.
        ("int4", 640, 5 * (64 + 2) + 640 * 2 // 8),
        ("int4", 192, 3 * (32 + 2) + 192 * 2 // 8),
    ],
)
def test_compressed_activations_have_their_size_on_the_wire(
    dtype: ModelDtype, compression: str, hidden_size: int, token_bytes: int
) -> None:
    """The whole node sees this size: links, memory, and what it takes from peers."""
    run = RunConfig(
        model=ModelConfig(hidden_size=hidden_size, dtype=dtype),
        batch=BatchConfig(sequence_length=8, microbatch_size=3),
        activations=ActivationsConfig(compression=ActivationCompression(compression)),
    )
    assert activation_size_bytes(run) == 8 * 3 * token_bytes
    assert sizes_of(run).activation_bytes == tensor_sizes(run).activation_bytes == 24 * token_bytes
    assert facts_of(make_manifest(run=run)).activation_size_bytes == 24 * token_bytes


def test_muon_is_for_members_that_step_by_themselves() -> None:
    optimizer = OptimizerConfig(name=OptimizerName.MUON)
    with pytest.raises(ConfigError, match=r"optimizer\.name is muon"):
        validate(RunConfig(optimizer=optimizer))
    validate(RunConfig(optimizer=optimizer, sync=SyncConfig(method=SyncMethod.DILOCO)))


def test_a_width_that_does_not_suit_four_bits_is_refused() -> None:
    model = ModelConfig(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    activations = ActivationsConfig(compression=ActivationCompression.INT4)
    with pytest.raises(ConfigError, match=r"activations\.compression is int4"):
        validate(RunConfig(model=model, activations=activations))


def test_compressed_activations_make_another_run() -> None:
    run = dataclasses.replace(
        RunConfig(), activations=ActivationsConfig(compression=ActivationCompression.INT8)
    )
    other, manifest = make_manifest(run=run), make_manifest()
    assert other.sha256 != manifest.sha256
    assert other.first_difference(manifest) == (
        "run.activations.compression is int8 here and none there"
    )
    assert Manifest.from_json(other.to_json()) == other


def test_another_cut_makes_another_run() -> None:
    run = dataclasses.replace(RunConfig(), stages=StagesConfig(blocks="1, 3"))
    other, manifest = make_manifest(run=run), make_manifest()
    assert other.first_difference(manifest) == "run.stages.blocks is 1, 3 here and auto there"
    assert Manifest.from_json(other.to_json()) == other


def test_relations_between_owners_are_checked() -> None:
    run = RunConfig()
    validate(run)
    for bad in (
        dataclasses.replace(run, stages=StagesConfig(num_relay_stages=5)),
        dataclasses.replace(run, stages=StagesConfig(blocks="²,²")),
        dataclasses.replace(run, stages=StagesConfig(blocks="9" * 5000)),
        dataclasses.replace(run, stages=StagesConfig(blocks="1," * 50_000)),
        dataclasses.replace(run, batch=BatchConfig(sequence_length=1025)),
        dataclasses.replace(run, batch=BatchConfig(microbatch_size=2**16)),
    ):
        with pytest.raises(ConfigError):
            validate(bad)


def _numbers(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(prefix + key)
    return found


@pytest.mark.parametrize("path", _numbers(json.loads(make_manifest().to_json())))
@pytest.mark.parametrize("sign", [1, -1])
def test_no_number_from_a_peer_is_unbounded(path: str, sign: int) -> None:
    """A new field must get a range, or a manifest could ask for anything."""
    old = json.loads(make_manifest().to_json())
    for key in path.split("."):
        old = old[key]
    huge = sign * (1e300 if isinstance(old, float) else 2**63 - 1)
    if path == "run.seed" and sign == 1:
        return  # Every seed is as good as another.
    with pytest.raises((MalformedMessageError, RejectedError)):
        Manifest.from_json(changed(make_manifest(), path, huge))

"""A dishonest organiser's manifest: it holds numbers and names of choices, and opens nothing."""

import json
import math
import sys
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig
from decod.config.schema import ACTIVATION_SIZE_MAX_BYTES, Manifest
from decod.daemon.device_owner import arena_bytes, described
from decod.daemon.run_facts import facts_of, sizes_of, tensor_sizes
from decod.errors import MalformedMessageError
from decod.protocol.core.view import Role
from decod.run.adapter_config import AdapterConfig, AdapterKind
from decod.run.run_config import RunConfig
from tests.support.manifests import changed

FREE_NAME = "run.name"
"""The only text that is not one of a few: 1 to 32 of a-z, 0-9 and -."""

HASHES = ("data_index_sha256", "initial_weights", "base")

TEXTS = [
    "",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "~/.ssh/id_ed25519",
    "file:///etc/passwd",
    "http://198.51.100.4/model.bin",
    "//host/share",
    "a\0b",
    "a\nb",
    "\u202emp.exe",
    "\x1b[2J",
    "$(id)",
    "`id`",
    "{0.__class__}",
    "__import__('os').system('id')",
    "torch.load",
    "x" * 10_000,
    "Llama",
    " llama",
]


def manifest() -> Manifest:
    run = RunConfig(adapter=AdapterConfig(kind=AdapterKind.LORA))
    num_parts = run.model.num_hidden_layers + 1
    index, base = "ab" * 32, "cd" * 32 * num_parts
    return Manifest(run=run, data_index_sha256=index, data_vocab_size=257, base=base)


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found |= {prefix + key: value} if inner is None else inner
    return found


LEAVES = leaves(json.loads(manifest().to_json()))
CHOICES = [path for path, value in LEAVES.items() if isinstance(value, str)]


def test_a_manifest_holds_numbers_flags_and_words() -> None:
    """A field of another type, such as a list of files, would need another look at this module."""
    assert {type(value) for value in LEAVES.values()} == {int, float, bool, str}
    assert {FREE_NAME, *HASHES} < set(CHOICES)
    assert not [path for path in LEAVES if any(w in path for w in ("path", "dir", "url", "file"))]


@pytest.mark.parametrize("path", CHOICES)
def test_no_text_of_a_manifest_is_free(path: str) -> None:
    """A new text must be one of a few, or it could become a path, a command or an escape."""
    for text in TEXTS:
        if text == LEAVES[path]:
            continue
        with pytest.raises(MalformedMessageError, match="bad manifest"):
            Manifest.from_json(changed(manifest(), path, text))


@pytest.mark.parametrize("path", LEAVES)
def test_no_field_takes_a_structure(path: str) -> None:
    for value in (None, [], {}, ["../../etc"], {"path": "/etc"}):
        with pytest.raises(MalformedMessageError, match="bad manifest"):
            Manifest.from_json(changed(manifest(), path, value))


@pytest.mark.parametrize("table", ["", "run.", "run.model.", "run.sync.", "run.protocol."])
def test_no_field_can_be_added(table: str) -> None:
    for field in ("data_path", "tokenizer", "code", "auto_map", "trust_remote_code", ""):
        with pytest.raises(MalformedMessageError, match="bad manifest"):
            Manifest.from_json(changed(manifest(), table + field, "x"))


def test_a_manifest_opens_nothing() -> None:
    """Not even a file with a default: reading it and taking its measure touches no file or host."""
    touched: list[str] = []
    watching = False
    touching = ("open", "os.", "socket.", "subprocess.", "import", "ctypes.", "exec", "compile")

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if watching and event.startswith(touching):
            touched.append(event)

    def use() -> None:
        read = Manifest.from_json(text)
        facts_of(read)
        sizes_of(read.run)
        tensor_sizes(read.run)
        described(read.run, node, Role.RELAY)
        arena_bytes(read.run, node)
        stage_needs(read.run, 1)

    text, node = manifest().to_json(), NodeConfig()
    use()  # What is imported late is there from now on.
    sys.addaudithook(hook)
    try:
        watching = True
        use()
    finally:
        watching = False
    assert touched == []


def test_what_the_compute_process_hears_of_a_run_names_no_file() -> None:
    heard = leaves(described(manifest().run, NodeConfig(), Role.RELAY))
    texts = {path: value for path, value in heard.items() if isinstance(value, str)}
    assert texts == {"device": "auto"} | {
        path.removeprefix("run."): LEAVES[path]
        for path in CHOICES
        if path.startswith("run.") and path not in (FREE_NAME, "run.protocol.routing")
    }


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 1 << 24, "hidden_size": 1 << 18},
        {"hidden_size": 1 << 18, "intermediate_size": 1 << 20, "num_hidden_layers": 4096},
        {"num_hidden_layers": 4096, "hidden_size": 1 << 16, "intermediate_size": 1 << 18},
    ],
)
def test_a_model_of_absurd_size_is_no_manifest(sizes: dict[str, int]) -> None:
    values = json.loads(manifest().to_json())
    values["run"]["model"] |= sizes
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with pytest.raises(MalformedMessageError, match="parameters; the limit is"):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("sequence_length", "microbatch_size"), [(1 << 24, 1), (1024, 1 << 16), (1 << 24, 1 << 16)]
)
def test_activations_of_absurd_size_are_no_manifest(
    sequence_length: int, microbatch_size: int
) -> None:
    values = json.loads(manifest().to_json())
    values["run"]["model"]["max_position_embeddings"] = 1 << 24
    batch = {"sequence_length": sequence_length, "microbatch_size": microbatch_size}
    values["run"]["batch"] |= batch
    assert math.prod(batch.values()) * 128 * 4 > ACTIVATION_SIZE_MAX_BYTES
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    with pytest.raises(MalformedMessageError, match="microbatch's activations would have"):
        Manifest.from_json(text)

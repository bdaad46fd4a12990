"""The card of an exported model: `README.md`, as the Hugging Face Hub and people read it.

It says what was trained, on what and how. The header is YAML, in which every text is a JSON string.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from decod import __version__
from decod.config.run_file import CardConfig
from decod.config.schema import Carried, Manifest, count_parameters, flatten
from decod.ids import RunId

CARD_FILE = "README.md"

MARK = "<!-- decod writes this file anew with every export. Remove this line to keep your own. -->"
"""A line of every card. A card without it is somebody else's."""

_TUNED = ("seed", "batch", "optimizer", "sync", "activations", "reduction")
"""Keys and sections of the run file that decide what a run learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """A run at one of its iterations, as its card tells it."""

    manifest: Manifest
    run_id: RunId
    card: CardConfig
    """What the organiser says."""
    iteration: int
    loss: float | None
    """Mean cross-entropy over the tokens of that iteration; None if the leader does not know it."""
    num_data_tokens: int
    """Of the corpus."""
    tokenizer: str
    """The kind of the tokenizer: `bytes` or `tokenizer.json`."""
    has_tokenizer: bool = True
    """Whether the folder has the tokenizer, too."""
    num_nodes: int
    """Nodes, the leader included, whose work the leader has counted since it began to lead."""


def render_card(facts: CardFacts) -> str:
    """Return the text of a card."""
    run = facts.manifest.run
    model = run.model
    parts = [
        _header(facts, model.model_type),
        MARK,
        f"# {run.name}",
        f"A {model.model_type} language model with {count_parameters(model):,} parameters. Several "
        "hosts trained it with decod, each a part of it.",
        "## Training",
        _table("", "", _training(facts)),
        "## Hyperparameters",
        "The keys are those of decod's run file.",
        _table("key", "value", _hyperparameters(facts)),
        "## Use",
        _usage(facts),
        "Say here how it does on text that it was not trained with, what it is good for, and what "
        "it should not be used for.",
    ]
    return "\n\n".join(parts) + "\n"


def _base_model(facts: CardFacts) -> str:
    """Return the name of the model that the run began with; empty if it began at random."""
    return facts.card.base_model or Carried.from_text(facts.manifest.carried).base_model


def _header(facts: CardFacts, model_type: str) -> str:
    """Return the metadata, between two lines of dashes."""
    card = facts.card
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    lines += ["tags:", "- decod", f"- {model_type}"]
    if card.license:
        lines.append(f"license: {json.dumps(card.license)}")
    if base_model := _base_model(facts):
        lines.append(f"base_model: {json.dumps(base_model)}")
    if names := card.dataset_names:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in names)]
    return "\n".join(["---", *lines, "---"])


def _training(facts: CardFacts) -> dict[str, str]:
    manifest, run = facts.manifest, facts.manifest.run
    batch, model = run.batch, run.model
    num_tokens = batch.tokens_per_iteration
    planned = f" of {run.num_iterations}" if run.num_iterations else ""
    seen = facts.iteration * num_tokens
    begun = "random, from the seed"
    if manifest.initial_weights != "seed":
        begun = f"weights with SHA-256 `{manifest.initial_weights}`"
    tokenizer = "UTF-8 bytes" if facts.tokenizer == "bytes" else "its own `tokenizer.json`"
    names = ", ".join(facts.card.dataset_names)
    return {
        "run": f"`{run.name}`, run id `{facts.run_id}`",
        "iteration": f"{facts.iteration}{planned}",
        "training loss": "unknown" if facts.loss is None else f"{facts.loss:.4f} nats per token",
        "datasets": names or "not stated",
        "corpus": f"{facts.num_data_tokens:,} tokens, index SHA-256 `{manifest.data_index_sha256}`",
        "trained on": f"at most {seen:,} tokens, which is {seen / facts.num_data_tokens:.2f} times "
        "the corpus",
        "batch": f"{num_tokens:,} tokens in sequences of {batch.sequence_length:,}",
        "tokenizer": f"{tokenizer}, {manifest.data_vocab_size:,} tokens",
        "nodes that contributed": f"at least {facts.num_nodes}",
        "base model": f"`{base_model}`" if (base_model := _base_model(facts)) else "none",
        "beginning": begun if manifest.start_iteration == 0 else _resumed(manifest),
        "weights": model.dtype.value,
        "software": f"decod {__version__}",
    }


def _resumed(manifest: Manifest) -> str:
    return f"resumed from a checkpoint of iteration {manifest.start_iteration}"


def _hyperparameters(facts: CardFacts) -> dict[str, str]:
    values = dataclasses.asdict(facts.manifest.run)
    flat = flatten({name: values[name] for name in _TUNED})
    return {f"`{key}`": f"`{value}`" for key, value in flat.items()}


def _usage(facts: CardFacts) -> str:
    if not facts.has_tokenizer:
        return (
            "This folder has no tokenizer: that of the training data could not be read when the "
            "model was exported. Put its `tokenizer.json` here before you give the model texts."
            "\n\n"
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n```'
        )
    return (
        "FOLDER is the folder of this file.\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "outputs = model.generate(**inputs, max_new_tokens=100, do_sample=True)\n"
        "print(tokenizer.decode(outputs[0], skip_special_tokens=True))\n"
        "```\n\n"
        'With decod alone: `decod generate --model FOLDER "Once upon a time"`.'
    )


def _table(left: str, right: str, rows: dict[str, Any]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])

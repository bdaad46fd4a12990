"""Exports of the model of a running run, in the format of Hugging Face.

Each stage's weights go to their place in `model.safetensors` as they arrive. The leader's memory
holds the weights of its own stage, and a few chunks of the others. No torch is involved.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decod import __version__
from decod.config.run_file import CardConfig
from decod.config.schema import (
    CARRIED_MAX_CHARACTERS,
    JSON_FILES,
    Carried,
    Manifest,
    count_parameters,
    flags_of,
    flatten,
)
from decod.daemon.run_snapshot import (
    SnapshotSources,
    StageSnapshot,
    as_cut,
    require_begun,
    run_snapshot,
)
from decod.data.dataset import Dataset
from decod.data.tokenizer import (
    CONFIG_FILE,
    GENERATION_FILE,
    NO_EOS,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    FileTokenizer,
    eos_ids,
    read_fields,
    read_template,
    read_tokenizer_file,
)
from decod.errors import DataError
from decod.files import is_hub_name, read_beginning, replace_durably
from decod.ids import RunId
from decod.journal.history import SeenMember
from decod.model.weights import DTYPE_NAMES, is_finite
from decod.model.writing import ModelWriter, unwritable
from decod.run.run_config import RunConfig
from decod.tasks import in_thread, to_its_end
from decod.texts import clean_text, why_of
from decod.train.checkpoint.description import CHUNK_SIZE_BYTES, Description
from decod.train.checkpoint.entries import (
    TensorEntry,
    check_tensors,
    refused_state,
    weight_tensors,
)
from decod.train.checkpoint.iteration_folders import StateInFile, slices

# --- files beside the weights of --init ----------------------------------------------------------
# Reads what lies beside the weights in the folder of --init, and is carried to every export.
#
# The leader puts it into the run's manifest. So it also comes back in exports after a resume, and
# in those of another data node that leads.


_NOT_CARRIED = {
    # What tokenizer.json says is not said twice: it may be long. The others name places.
    TOKENIZER_CONFIG_FILE: ("added_tokens_decoder", "auto_map", "name_or_path", "tokenizer_file"),
}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CACHE_PREFIX = "models--"
_SNAPSHOTS = "snapshots"
_COMMIT = re.compile("[0-9a-f]{40}\\Z")


def read_carried(folder: Path, dataset: Dataset) -> tuple[Carried, list[str]]:
    """Return what is to be carried from a folder, and sentences on what can't be.

    Args:
        folder: The folder of --init.
        dataset: The run's data, whose tokenizer every export has.
    """
    left_out, objects = list[str](), dict[str, dict[str, Any]]()
    for name in JSON_FILES:
        try:
            found = read_fields(folder / name)
        except DataError as error:
            left_out.append(f"exports will lack {name}: {error.what} ({error.why})")
            continue
        if found:
            dropped = _NOT_CARRIED.get(name, ())
            objects[name] = {key: value for key, value in found.items() if key not in dropped}
    if GENERATION_FILE not in objects:
        # As transformers does, take from the description of the model what is known of its tokens.
        known = read_fields(folder / CONFIG_FILE)
        if ids := {key: known[key] for key in _SPECIAL_IDS if known.get(key) is not None}:
            objects[GENERATION_FILE] = ids
    carried = Carried(
        base_model=base_model_of(folder),
        objects=objects,
        template=_template(folder, left_out),
        added_tokens=_added(folder, dataset),
    )
    return _fitting(carried, left_out), left_out


def base_model_of(folder: Path) -> str:
    """Return the name of the model in a folder, as far as the folder tells.

    The cache of huggingface_hub names the model on the Hub, and its commit. So may config.json name
    it, which counts if its name ends as the folder's does. Otherwise it is the folder's own name.
    """
    path = folder.absolute()
    for index, part in reversed([*enumerate(path.parts)]):
        name = part.removeprefix(_CACHE_PREFIX).replace("--", "/")
        if part.startswith(_CACHE_PREFIX) and is_hub_name(name):
            place, commit = (*path.parts[index + 1 : index + 3], "", "")[:2]
            is_pinned = place == _SNAPSHOTS and _COMMIT.match(commit) is not None
            return f"{name}@{commit}" if is_pinned else name
    try:
        stated = read_fields(folder / CONFIG_FILE).get("_name_or_path")
    except DataError:
        stated = None
    if isinstance(stated, str) and is_hub_name(stated) and stated.endswith(f"/{path.name}"):
        return stated
    return path.name if is_hub_name(f"owner/{path.name}") else ""


def _template(folder: Path, left_out: list[str]) -> str:
    try:
        return read_template(folder, CARRIED_MAX_CHARACTERS + 1)
    except DataError as error:
        left_out.append(f"exports will lack {TEMPLATE_FILE}: it can't be read ({error.why})")
        return ""


def _added(folder: Path, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return the added tokens of the model's tokenizer that the data's lacks."""
    path = folder / TOKENIZER_FILE
    try:
        ours = dataset.tokenizer
        if not isinstance(ours, FileTokenizer):
            return {}
        theirs = FileTokenizer(read_tokenizer_file(path), eos=NO_EOS, name=str(path))
    except DataError:
        return {}  # `judge_folder` has told it.
    known = {token.content for token in ours.added_tokens().values()} | ours.vocabulary().keys()
    return {
        str(token_id): flags_of(token)
        for token_id, token in sorted(theirs.added_tokens().items())
        if token.content not in known
    }


def _fitting(carried: Carried, left_out: list[str]) -> Carried:
    """Return what fits into a manifest. The largest parts are left out first."""
    while len(carried.to_text()) > CARRIED_MAX_CHARACTERS:
        sizes = {name: len(json.dumps(value)) for name, value in carried.objects.items()}
        sizes |= {TEMPLATE_FILE: len(json.dumps(carried.template))}
        sizes |= {"the tokens added to it": len(json.dumps(carried.added_tokens))}
        largest = max(sizes, key=lambda name: sizes[name])
        left_out.append(
            f"exports will lack {largest}: that has {sizes[largest]} characters, too many to "
            "travel with the run. Copy it from the model's folder into the exported one"
        )
        if largest in carried.objects:
            rest = {name: value for name, value in carried.objects.items() if name != largest}
            carried = replace(carried, objects=rest)
        elif largest == TEMPLATE_FILE:
            carried = replace(carried, template="")
        else:
            carried = replace(carried, added_tokens={})
    return carried


# --- the card ------------------------------------------------------------------------------------
# The card of an exported model: `README.md`, as the Hugging Face Hub and people read it.
#
# It says what was trained, on what and how. The header is YAML, in which every text is a JSON
# string.


CARD_FILE = "README.md"

MARK = "<!-- decod writes this file anew with every export. Remove this line to keep your own. -->"
"""A line of every card. A card without it is somebody else's."""

_CONTRIBUTORS_MAX = 200

_TUNED = ("seed", "batch", "optimizer", "sync", "activations", "reduction")
"""Keys and sections of the run file that decide what a run learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """A run at one of its iterations, as its card tells it."""

    manifest: Manifest
    run_id: RunId
    card: CardConfig
    """The organiser's own words."""
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
    contributors: Sequence[SeenMember] = ()
    """Relays, as far as this leader has seen them, with what they have done; the busiest first."""


def render_card(facts: CardFacts) -> str:
    """Return the text of a card."""
    run = facts.manifest.run
    model = run.model
    parts = [
        _header(facts, model.model_type),
        MARK,
        f"# {run.name}",
        f"{_subject(run)}. Several hosts trained it with decod, each a part of it.",
        "## Training",
        _table("", "", _training(facts)),
        "## Hyperparameters",
        "The keys are those of decod's run file.",
        _table("key", "value", _hyperparameters(facts)),
        *_contributors(facts.contributors),
        "## Use",
        _usage(facts),
        "Say here how it does on text that it was not trained with, what it is good for, and what "
        "it should not be used for.",
    ]
    return "\n\n".join(parts) + "\n"


def title_in_card(folder: Path) -> str:
    """Return the run and the iteration that decod's card in a folder names; empty without one."""
    try:
        text = read_beginning(folder / CARD_FILE, _CARD_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    found = re.search(r"^\| run \| `(.+)`, run id .*\n\| iteration \| ([0-9]+)", text, re.MULTILINE)
    return f"run {found[1]}, iteration {found[2]}" if found and MARK in text else ""


def _subject(run: RunConfig) -> str:
    model = f"{run.model.model_type} language model with {count_parameters(run.model):,} parameters"
    if run.trains_all:
        return f"A {model}"
    return f"A LoRA adapter of rank {run.adapter.rank} for a {model}"


def base_of_run(card: CardConfig, manifest: Manifest) -> tuple[str, str]:
    """Return the name of the model that a run began with, and its commit on the Hub if known.

    The name is empty if the run began at random. The organiser's own words win.
    """
    name, _, commit = Carried.from_text(manifest.carried).base_model.partition("@")
    return (name, commit) if card.base_model in ("", name) else (card.base_model, "")


def _header(facts: CardFacts, model_type: str) -> str:
    """Return the metadata, between two lines of dashes."""
    card = facts.card
    run = facts.manifest.run
    trains_all = run.trains_all
    library = "transformers" if trains_all else "peft"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += ["tags:", "- decod", f"- {model_type}", *([] if trains_all else ["- lora"])]
    if card.license:
        lines.append(f"license: {json.dumps(card.license)}")
    if base_model := base_of_run(card, facts.manifest)[0]:
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
    if not run.trains_all:
        begun = "the base model as it was"
    elif manifest.initial_weights != "seed":
        begun = f"weights with SHA-256 `{manifest.initial_weights}`"
    tokenizer = "UTF-8 bytes" if facts.tokenizer == "bytes" else "its own `tokenizer.json`"
    names = ", ".join(facts.card.dataset_names)
    base_model, commit = base_of_run(facts.card, manifest)
    at = f", commit `{commit}`" if commit else ""
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
        "base model": f"`{base_model}`{at}" if base_model else "none",
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


def _contributors(members: Sequence[SeenMember]) -> list[str]:
    """Return a heading and a table of those who lent their hosts; nothing if none is known."""
    if not members:
        return []
    totals = Counter[int]()
    for one in members:
        totals[one.stage_index] += one.num_microbatches or 0
    lines = ["| host | stage | microbatches | share of its stage |", "|---|---|---|---|"]
    for one in members[:_CONTRIBUTORS_MAX]:
        num = one.num_microbatches or 0
        name = clean_text(one.name).translate({ord("`"): None, ord("|"): None})
        share = num / max(1, totals[one.stage_index])
        lines.append(f"| `{name}` | {one.stage_index} | {num:,} | {share:.1%} |")
    if (num_more := len(members) - _CONTRIBUTORS_MAX) > 0:
        lines.append(f"| and {num_more} more | | | |")
    return ["## Contributors", "They lent their machines to this run.", "\n".join(lines)]


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


# --- the folder of an exported model -------------------------------------------------------------
# What the folder of an exported model holds beside the weights: the run's tokenizer and a card.
#
# If the run began with the folder of a model, what lay beside its weights comes back.
#
# The compute process writes `config.json` and the weights first. A model whose tokenizer or card
# can't be written is a model still, so this raises nothing: it says what is missing.


_CARD_MAX_BYTES = 1 << 20
_ADDS = ("add_bos_token", "add_eos_token")
"""Fields that would change what a text begins and ends with."""


def complete_folder(folder: Path, dataset: Dataset, facts: CardFacts) -> str:
    """Write tokenizer and card into the folder of a model. Waits for the disk.

    Args:
        folder: The folder of a model.
        dataset: The run's data, which has its tokenizer.
        facts: What the card says. Whether there is a tokenizer is found out here.

    Returns:
        What is missing, and why; empty if nothing is.
    """
    try:
        files, missing = _tokenizer_files(dataset, facts.manifest), ""
    except DataError as error:
        # The reason names a path of this host, which is nobody's business on a card.
        files, missing = {}, f"no tokenizer: {error.what} ({error.why})"
        facts = dataclasses.replace(facts, has_tokenizer=False)
    try:
        for name, content in files.items():
            replace_durably(folder / name, content)
        if _is_others_card(folder / CARD_FILE):
            return missing or f"no model card: {CARD_FILE} is there and is not decod's"
        replace_durably(folder / CARD_FILE, render_card(facts).encode())
    except OSError as error:
        return f"no tokenizer or no model card, since the disk refuses them: {why_of(error)}"
    return missing


def _tokenizer_files(dataset: Dataset, manifest: Manifest) -> dict[str, bytes]:
    """Return files with which transformers gives the ids that the run was trained on.

    Raises:
        DataError: The data's tokenizer is missing or unusable.
    """
    tokenizer, given = dataset.tokenizer, Carried.from_text(manifest.carried)
    model = manifest.run.model
    config: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.eos_token,
        "model_max_length": model.max_position_embeddings,
    }
    config |= given.objects.get(TOKENIZER_CONFIG_FILE, {})
    # What a text begins and ends with is in tokenizer.json, as the data have it. Another class of
    # transformers would put its own rules in the place of those in the file.
    config = {key: value for key, value in config.items() if key not in _ADDS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = tokenizer.to_json()
    if isinstance(tokenizer, FileTokenizer):
        text = tokenizer.to_json(given.tokens())
    # Every document ended with this token, so a generated text does too.
    generation = {"eos_token_id": tokenizer.eos_id} | given.objects.get(GENERATION_FILE, {})
    ends = eos_ids(generation)
    if tokenizer.eos_id not in ends:
        ends.append(tokenizer.eos_id)
    generation["eos_token_id"] = ends if ends[1:] else ends[0]
    files = {
        TOKENIZER_FILE: text.encode(),
        TOKENIZER_CONFIG_FILE: _json(config),
        GENERATION_FILE: _json(generation),
    }
    if special := given.objects.get(SPECIAL_TOKENS_FILE):
        files[SPECIAL_TOKENS_FILE] = _json(special)
    if given.template:
        files[TEMPLATE_FILE] = given.template.encode()
    return files


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _is_others_card(path: Path) -> bool:
    """Return whether there is a card, or another text of that name, which decod must not replace.

    Raises:
        OSError: It can't be read.
    """
    try:
        return MARK.encode() not in read_beginning(path, _CARD_MAX_BYTES)
    except FileNotFoundError:
        return False


# --- the export ----------------------------------------------------------------------------------


async def export_model(
    sources: SnapshotSources, run: RunConfig, folder: Path, base: str | None = None
) -> int:
    """Write `config.json` and `model.safetensors` of the last commit; return its iteration.

    Args:
        sources: The leader's sources of states.
        run: The run.
        folder: The folder to write to. It is created if missing.
        base: Folder of the model that the run adapts, or its name.

    Raises:
        NetworkError: A stage has no member, or no member of it answers.
        CheckpointError: The weights of the leader's own stage are not finite.
        DataError: The folder can't be written (E-DAT-014).
    """
    require_begun(sources)
    writer = await in_thread(lambda: ModelWriter(folder, run.model, run.adapter, base))
    destination = _ModelFile(writer, as_cut(run, sources))
    try:
        async with run_snapshot(sources, destination, with_optimizer=False) as states:
            own = states.stages[0]
            with _refusals_told(folder):
                await to_its_end(lambda: destination.copy(0, own))
        await to_its_end(writer.finish)
    finally:
        await to_its_end(writer.close)
    return states.iteration


class _ModelFile:
    """Leads the weights of all stages to their places in one file. See `Destination`."""

    def __init__(self, writer: ModelWriter, run: RunConfig) -> None:
        self._writer, self._run = writer, run

    def place(self, stage_index: int, description: Description) -> StateInFile:
        run, entries = self._run, description.entries
        check_tensors(entries, weight_tensors(run, stage_index))
        starts = [self._writer.starts[entry.name] for entry in entries]
        return StateInFile(self._writer.file, entries, starts, _require_finite)

    def copy(self, stage_index: int, stage: StageSnapshot) -> None:
        """Write the weights of a stage from memory."""
        target = self.place(stage_index, stage.description)
        assert stage.data is not None, "no member writes an export's parts"
        for entry in stage.description.entries:
            for place in slices(entry, CHUNK_SIZE_BYTES):
                target[place] = stage.data[place]


def _require_finite(entry: TensorEntry, piece: memoryview) -> None:
    if not is_finite(piece, DTYPE_NAMES[entry.dtype]):
        raise refused_state([f"{entry.name[:100]} is not finite"])


@contextmanager
def _refusals_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, why_of(error)) from error

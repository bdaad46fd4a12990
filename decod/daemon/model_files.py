"""Reads what lies beside the weights in the folder of --init, and is carried to every export.

The leader puts it into the run's manifest. So it also comes back in exports after a resume, and in
those of another data node that leads.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from decod.config.schema import CARRIED_MAX_CHARACTERS, JSON_FILES, Carried, flags_of
from decod.data.dataset import Dataset
from decod.data.special_tokens import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    read_fields,
)
from decod.data.tokenizer import NO_EOS, TOKENIZER_FILE, FileTokenizer, read_tokenizer_file
from decod.errors import DataError
from decod.files import is_hub_name, read_beginning
from decod.texts import why_of

TEMPLATE_FILE = "chat_template.jinja"

_NOT_CARRIED = {
    # What tokenizer.json says is not said twice: it may be long. The others name places.
    TOKENIZER_CONFIG_FILE: ("added_tokens_decoder", "auto_map", "name_or_path", "tokenizer_file"),
}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CACHE_PREFIX = "models--"


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

    The cache of huggingface_hub names the model on the Hub. So may config.json, which counts if its
    name ends as the folder's does. Otherwise it is the folder's own name.
    """
    path = folder.absolute()
    for part in reversed(path.parts):
        name = part.removeprefix(_CACHE_PREFIX).replace("--", "/")
        if part.startswith(_CACHE_PREFIX) and is_hub_name(name):
            return name
    try:
        stated = read_fields(folder / CONFIG_FILE).get("_name_or_path")
    except DataError:
        stated = None
    if isinstance(stated, str) and is_hub_name(stated) and stated.endswith(f"/{path.name}"):
        return stated
    return path.name if is_hub_name(f"owner/{path.name}") else ""


def _template(folder: Path, left_out: list[str]) -> str:
    try:
        content = read_beginning(folder / TEMPLATE_FILE, CARRIED_MAX_CHARACTERS + 1)
        return content.decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        why = why_of(error) if isinstance(error, OSError) else "it is not UTF-8"
        left_out.append(f"exports will lack {TEMPLATE_FILE}: it can't be read ({why})")
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

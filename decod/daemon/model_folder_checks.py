"""What the folder of an exported model holds beside the weights: the run's tokenizer and a card.

If the run began with the folder of a model, what lay beside its weights comes back.

The compute process writes `config.json` and the weights first. A model whose tokenizer or card
can't be written is a model still, so this raises nothing: it says what is missing.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from decod.config.schema import Carried, Manifest
from decod.daemon.model_card import CARD_FILE, MARK, CardFacts, render_card
from decod.daemon.model_files import TEMPLATE_FILE
from decod.data.dataset import Dataset
from decod.data.special_tokens import (
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    eos_ids,
)
from decod.data.tokenizer import TOKENIZER_FILE, FileTokenizer
from decod.errors import DataError
from decod.files import read_beginning, replace_durably
from decod.texts import why_of

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

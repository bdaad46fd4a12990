"""The loss of an exported model on text that it was not trained with.

The text is a prepared corpus of its own. Its sequences are drawn once and for all from the corpus's
size, so that evaluations of one corpus can be compared with each other.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from decod.data.dataset import Dataset
from decod.data.index import TARGET
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.model.hf_folder import model_weights
from decod.model.stage import TORCH_DTYPES, empty_model
from decod.run.training_config import BatchConfig
from decod.train.model_folder import judge_folder
from decod.train.token_source import begun_places, read_tokens

_ROWS = 4
"""Sequences at a time."""

_PERPLEXITY_LOSS_MAX = 700.0
"""Beyond it, a perplexity is no double. No model that has learnt anything has such a loss."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model thinks of a text."""

    loss: float
    """Mean cross-entropy of a token, in nats."""
    num_sequences: int
    sequence_length: int
    num_tokens: int
    """Tokens that were predicted."""
    unchecked: tuple[str, ...] = ()
    """Checks that could not be made, and why."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, _PERPLEXITY_LOSS_MAX))


@torch.inference_mode()
def evaluate(
    folder: Path,
    dataset: Dataset,
    *,
    num_sequences: int,
    sequence_length: int | None = None,
    device: str = "cpu",
    base: Path | None = None,
) -> Evaluation:
    """Return the mean loss of a model over the targets in sequences of a corpus.

    If the corpus tells where documents begin, they are read apart, unless the model can't.

    Args:
        folder: A model folder, or that of an adapter.
        dataset: The corpus, made with the tokenizer of the model's.
        num_sequences: Number of sequences; all that the corpus has if it has fewer.
        sequence_length: Tokens that each sequence predicts. None: as many as the model can see.
        device: As torch calls it.
        base: The model that the adapter changes. None: the one that its settings name.

    Raises:
        DataError: The folder or the corpus can't be read, they don't fit each other, or the loss is
            not finite.
    """
    given = judge_folder(folder, dataset=dataset, base=base)
    model = given.config
    length = sequence_length or model.max_position_embeddings
    _require_fitting(dataset, folder, model.vocab_size, length, model.max_position_embeddings)
    module = empty_model(model)
    dtype = TORCH_DTYPES[model.dtype]
    weights = model_weights(folder, model, base)
    module.place({name: tensor.to(device, dtype) for name, tensor in weights})
    num = min(num_sequences, dataset.num_windows(length))
    batch = BatchConfig(
        sequence_length=length, microbatch_size=_ROWS, num_microbatches=-(-num // _ROWS)
    )
    reads_apart = dataset.index.marks is not None and model.can_read_apart
    total = 0.0
    num_tokens = 0
    for index in range(batch.num_microbatches):
        read = read_tokens(dataset, MicrobatchId(1, 0, index), batch, model, seed=0)
        tokens_BT, marks_BT = (rows[: num - index * _ROWS].to(device) for rows in read)
        places_BT = begun_places(marks_BT[:, :-1]) if reads_apart else None
        hidden_BTD = module.embed(tokens_BT[:, :-1], places_BT)
        chosen_BT = marks_BT[:, 1:] & TARGET == TARGET
        if num_here := int(chosen_BT.sum()):
            targets_BT = tokens_BT[:, 1:][chosen_BT][None]
            total += num_here * float(module.loss(hidden_BTD[chosen_BT][None], targets_BT))
            num_tokens += num_here
    if not num_tokens:
        raise DataError(
            f"the {num} sequences of {dataset.place} hold no answer",
            why="without tokens to predict there is no loss",
            fix="evaluate more sequences",
            code="E-DAT-043",
        )
    if not math.isfinite(total):
        raise DataError(
            f"the model in {folder} has a loss that is not finite",
            why="its weights are damaged, or its training has diverged",
            fix="use the model of an earlier iteration",
            code="E-DAT-045",
        )
    return Evaluation(total / num_tokens, num, length, num_tokens, given.unchecked)


def _require_fitting(
    dataset: Dataset, folder: Path, vocab_size: int, length: int, length_max: int
) -> None:
    """Refuse a corpus that a model can't read.

    Raises:
        DataError: It was made with another tokenizer, or is too short (E-DAT-043).
    """
    if dataset.vocab_size > vocab_size:
        raise DataError(
            f"the tokens of {dataset.place} are not those of {folder}",
            why=f"the text has {dataset.vocab_size} different ones, and the model {vocab_size}",
            fix="prepare the text with the tokenizer of the model's corpus",
            code="E-DAT-043",
        )
    if length > length_max:
        raise DataError(
            f"sequences of {length} tokens are longer than the {length_max} that {folder} can see",
            why="the model knows no positions behind those",
            fix=f"give a sequence length of at most {length_max}",
            code="E-DAT-043",
        )
    if not dataset.num_windows(length):
        raise DataError(
            f"{dataset.place} is too short to predict anything",
            why=f"it has {dataset.num_tokens} tokens, and a sequence {length}",
            fix="prepare more text, or give a smaller sequence length",
            code="E-DAT-043",
        )

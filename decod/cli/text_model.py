"""A model folder that reads and writes text: its weights, its tokenizer, and where texts end."""

from collections.abc import Iterator
from pathlib import Path

from decod.data.tokenizer import (
    CONFIG_FILE,
    GENERATION_FILE,
    NO_EOS,
    TOKENIZER_FILE,
    FileTokenizer,
    eos_ids,
    read_fields,
    read_tokenizer_file,
    stated_end,
)
from decod.errors import DataError, HardwareError
from decod.model.sampling import Sampling
from decod.train.model_folder import judge_folder


class TextModel:
    """The model in a folder, in memory and ready to continue texts. Loads torch.

    Args:
        folder: A model folder with a tokenizer, or that of an adapter.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        base: The model that the adapter changes. None: the one that its settings name.

    Raises:
        DataError: The folder is missing, holds no model or no tokenizer, or a file is unusable.
        HardwareError: The device can't be used, or has too little memory.
    """

    def __init__(self, folder: Path, device: str, base: Path | None = None) -> None:
        self._stop_ids, self._tokenizer = read_folder(folder, base)
        import torch

        from decod.model.generate import LoadedModel
        from decod.worker.configure import set_num_threads
        from decod.worker.device import choose_device

        set_num_threads({})
        chosen = choose_device(device)
        self.device = chosen.text
        """The device, for people."""
        try:
            self._model = LoadedModel(folder, chosen.name, base)
        except torch.OutOfMemoryError as error:
            raise _no_memory(chosen.name, error) from error
        self._device_name = chosen.name

    @property
    def context_max(self) -> int:
        """Most tokens that the model sees at a time."""
        return self._model.config.max_position_embeddings

    def tokens_of(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, as transformers does.

        An empty one begins where a document does: with its first token, or with the end of another.
        """
        bos_id = self._tokenizer.bos_id
        eos_id = self._tokenizer.eos_id
        ids = [] if bos_id is None else [bos_id]
        return ids + self._tokenizer.encode(prompt) or ([] if eos_id == NO_EOS else [eos_id])

    def pieces(
        self, prompt_ids: list[int], sampling: Sampling, *, num_tokens: int
    ) -> Iterator[str]:
        """Yield the text that continues a prompt, as soon as each piece of it is known.

        Raises:
            DataError: As `LoadedModel.continuation`.
            HardwareError: The device has too little memory.
        """
        import torch

        piece_of = self._tokenizer.decode_stream(prompt_ids)
        tokens = self._model.continuation(
            prompt_ids, sampling, num_tokens=num_tokens, stop_ids=self._stop_ids
        )
        try:
            for token in tokens:
                yield piece_of(token)
        except torch.OutOfMemoryError as error:
            raise _no_memory(self._device_name, error) from error


def read_folder(folder: Path, base: Path | None) -> tuple[list[int], FileTokenizer]:
    """Return the tokens that end a text, and the tokenizer, of a folder that `TextModel` takes.

    Raises:
        DataError: As `TextModel`.
    """
    judge_folder(folder, base=base)
    stop_ids = _stop_ids(folder)
    return stop_ids, _tokenizer(folder, stop_ids)


def _stop_ids(folder: Path) -> list[int]:
    """Return the ids of the tokens that end a text, as transformers finds them."""
    for name in (GENERATION_FILE, CONFIG_FILE):
        if found := eos_ids(read_fields(folder / name)):
            return found
    return []


def _tokenizer(folder: Path, stop_ids: list[int]) -> FileTokenizer:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER_FILE}",
            why="without a tokenizer no text can be read or written",
            fix="put the one there with which the model was trained, or export the model again",
            code="E-DAT-044",
        )
    content = read_tokenizer_file(path)
    stated = stated_end(folder)
    eos: str | int | None = stop_ids[0] if stop_ids else stated.eos
    return FileTokenizer(
        content,
        eos=NO_EOS if eos is None else eos,
        name=str(path),
        stated=stated,
        special_in_text=True,
    )


def _no_memory(device: str, error: Exception) -> HardwareError:
    return HardwareError(
        f"the model needs more memory than {device} has left",
        why=str(error).split("\n", maxsplit=1)[0][:200],
        fix="free some, or give --device cpu",
        code="E-HW-003",
    )

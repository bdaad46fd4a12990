"""A model folder that reads and writes text: its weights, its tokenizer, and where texts end."""

from collections.abc import Iterator
from pathlib import Path

from decod.data.tokenizer import TOKENIZER_FILE, FileTokenizer, read_tokenizer_file
from decod.errors import DataError, HardwareError
from decod.model.header import read_json
from decod.model.sampling import Sampling
from decod.texts import why_of

_GIVE = "give a folder that `decod export` has written"


class TextModel:
    """The model in a folder, in memory and ready to continue texts. Loads torch.

    Args:
        folder: A model folder with a tokenizer.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        DataError: The folder is missing, holds no model or no tokenizer, or a file is unusable.
        HardwareError: The device can't be used, or has too little memory.
    """

    def __init__(self, folder: Path, device: str) -> None:
        _require_model(folder)
        self._stop_ids = _stop_ids(folder)
        self._tokenizer = _tokenizer(folder, self._stop_ids)
        import torch

        from decod.model.generate import LoadedModel
        from decod.worker.device import TorchCuda, choose_device

        chosen = choose_device(device, TorchCuda())
        self.device = chosen.text
        """The device, for people."""
        try:
            self._model = LoadedModel(folder, chosen.name)
        except torch.OutOfMemoryError as error:
            raise _no_memory(chosen.name, error) from error
        self._device_name = chosen.name

    @property
    def context_max(self) -> int:
        """Most tokens that the model sees at a time."""
        return self._model.config.max_position_embeddings

    def tokens_of(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt. An empty one begins where a document has ended."""
        return self._tokenizer.encode(prompt) or self._stop_ids[:1]

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


def _require_model(folder: Path) -> None:
    """Raise DataError unless there is a folder with the description of a model."""
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        what, why = f"there is no folder {folder}", "the model is read from there"
    except OSError as error:
        what, why = f"{folder} can't be read", why_of(error)
    else:
        if "config.json" in names:
            return
        what, why = f"{folder} holds no model", "it has no config.json"
    raise DataError(what, why=why, fix=_GIVE, code="E-DAT-043")


def _stop_ids(folder: Path) -> list[int]:
    """Return the ids of the tokens that end a text, as transformers finds them."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = read_json(folder / name).get("eos_token_id")
            ids = given if isinstance(given, list) else [given]
            if found := [each for each in ids if type(each) is int]:
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
    eos = stop_ids[0] if stop_ids else None
    return FileTokenizer(read_tokenizer_file(path), eos=eos, name=str(path))


def _no_memory(device: str, error: Exception) -> HardwareError:
    return HardwareError(
        f"the model needs more memory than {device} has left",
        why=str(error).split("\n", maxsplit=1)[0][:200],
        fix="free some, or give --device cpu",
        code="E-HW-003",
    )

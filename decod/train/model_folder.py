"""The judgement of a model's folder, the same for every command that reads one.

    folder -> config.json -> places, names, shapes and types of the weights -> tokens of the data

A comparison that can't be made is told, and never passed over. Imports no torch, because a leader
judges the folder before it invites any node.
"""

from dataclasses import dataclass
from pathlib import Path

from decod.data.dataset import Dataset
from decod.data.tokenizer import NO_EOS, TOKENIZER_FILE, FileTokenizer, read_tokenizer_file
from decod.errors import DataError
from decod.files import BEGINNING_BYTES, Damage, find_damage, hub_advice, is_cut_json
from decod.model.adapter_folder import base_of, read_adapter
from decod.model.weights import find_weights, read_config, require_no_adapter
from decod.run.model_config import ModelConfig, ModelDtype
from decod.texts import why_of

_CONFIG_FILE = "config.json"
_GIVE = "give a folder that `decod export` has written, or a model's in the format of transformers"


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A folder that holds a model which decod computes exactly."""

    config: ModelConfig
    unchecked: tuple[str, ...]
    """Checks that could not be made, and why, as sentences."""


def judge_folder(
    folder: Path,
    *,
    dataset: Dataset | None = None,
    dtype: ModelDtype | None = None,
    trains: bool = False,
    built: bool = False,
    base: Path | None = None,
) -> GivenModel:
    """Judge a folder: what it is, its dtype, its weights and its tokenizer.

    Args:
        folder: The folder.
        dataset: Data that the model is to read; None if it reads none.
        dtype: The dtype to compute in. None: the folder's, or float32 if decod does not have that.
        trains: Whether the model is to be trained. Dropout matters only then.
        built: As for `config_from_hf`.
        base: The model that an adapter in the folder changes. None: the one that its settings name.

    Raises:
        DataError: It is no folder of a model (E-DAT-043), or a file is damaged. A field asks for
            something that decod lacks. The weights are not those of config.json. The data are of
            another tokenizer (E-DAT-025).
    """
    adapted = None if trains else base_of(folder, base)
    if adapted is not None:
        given = judge_folder(adapted, dataset=dataset, dtype=dtype)
        read_adapter(folder, given.config)
        return given
    require_folder(folder)
    config = read_config(folder, dtype=dtype, trains=trains, built=built)
    find_weights(folder, config)
    unchecked = () if dataset is None else _compare_tokens(folder, dataset)
    if code := sorted(path.name for path in folder.glob("*.py")):
        unchecked += (f"not run: {code[0][:100]} in {folder}, since a model's code is never run",)
    return GivenModel(config, unchecked)


def require_folder(folder: Path) -> None:
    """Raise DataError unless there is a folder with the description of a model (E-DAT-043)."""
    fix = _GIVE
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        what = f"there is no folder {folder}"
        why = "the model is read from there"
        if (advice := hub_advice(_as_given(folder))) is not None:
            fix = advice if "/" in _as_given(folder) else f"{_GIVE}; {advice}"
    except OSError as error:
        what = f"{folder} can't be read"
        why = why_of(error)
    else:
        if _CONFIG_FILE in names:
            return
        require_no_adapter(folder)
        what = f"{folder} holds no model"
        why = f"it has no {_CONFIG_FILE}"
        # One level down, or where huggingface_hub keeps what it has fetched.
        places = sorted({*folder.glob(f"*/{_CONFIG_FILE}"), *folder.glob(f"*/*/{_CONFIG_FILE}")})
        if places:
            fix = f"give {places[0].parent}"
    raise DataError(what, why=why, fix=fix, code="E-DAT-043")


def _as_given(folder: Path) -> str:
    """Return a path as it was probably given: relative to the working folder if it is in there."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _compare_tokens(folder: Path, dataset: Dataset) -> tuple[str, ...]:
    """Compare the tokenizer of data with that of a model; return what could not be compared.

    Only the tokens of text are compared. Special tokens may have been added since.

    Raises:
        DataError: They differ (E-DAT-025), or the model's tokenizer is a damaged download.
    """
    path = folder / TOKENIZER_FILE
    try:
        content = read_tokenizer_file(path)
        damage = find_damage(content[:BEGINNING_BYTES])
        if is_cut_json(content):
            damage = Damage("it ends within its JSON: its download was cut off", "fetch it again")
        ours = dataset.tokenizer.vocabulary()
        theirs = {} if damage else FileTokenizer(content, eos=NO_EOS, name=str(path)).vocabulary()
    except DataError as error:
        return (
            f"not checked: whether {dataset.place} was made with the tokens of {folder}, since "
            f"{error.what}: {error.why}",
        )
    if damage is not None:
        what = f"tokenizer {path} cannot be used"
        raise DataError(what, why=damage.why, fix=damage.fix, code="E-DAT-015")
    if ours != theirs:
        raise DataError(
            f"the data in {dataset.place} were made with another tokenizer than {path}",
            why="the model knows other tokens by these ids, so what it makes of them is nonsense",
            fix=f"decod data prepare OUT PATH... --tokenizer {path}, and use OUT; if the model is "
            "to learn other tokens, remove its tokenizer.json",
            code="E-DAT-025",
        )
    return ()

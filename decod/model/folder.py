"""Reading of model folders: `config.json` and `model.safetensors`, as transformers writes them.

Reading never runs code from a file: it opens only safetensors, and refuses pickled weights. See
`decod.model.writing` for the other direction.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from decod.model.config import ModelConfig
from decod.model.header import unreadable
from decod.model.shape import EMBEDDINGS
from decod.model.weights import check_tied, find_weights
from decod.texts import why_of


def read_weights(
    folder: Path, model: ModelConfig, wanted: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted parameters one by one, in sorted order of names.

    All names and shapes of the whole model are checked before the first parameter is yielded. A
    folder of another model is therefore refused even if this stage's part would fit.

    Args:
        folder: Contains `model.safetensors`, or several files and their index.
        model: The expected model.
        wanted: Names to read, from `model_shapes`. None: all.

    Yields:
        Name and tensor, on CPU, in the file's own floating-point dtype.

    Raises:
        DataError: A file is missing, damaged, pickled, or holds another model's weights.
    """
    found = find_weights(folder, model)
    names = sorted(found.places if wanted is None else wanted)
    if EMBEDDINGS[model.model_type] in names:
        check_tied(folder, found, model)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name in names:
            place = found.places[name]
            try:
                if place.path not in files:
                    opened = safe_open(place.path, framework="pt")
                    files[place.path] = stack.enter_context(opened)
                tensor = files[place.path].get_tensor(place.key)
            except (OSError, SafetensorError) as error:
                raise unreadable(place.path, why_of(error)) from error
            yield name, tensor

"""What the organiser says on the card of an exported model. Local: members need not agree on it."""

import re
from dataclasses import dataclass

from decod.errors import ConfigError

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}\Z")
_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_.-]{1,96})?\Z")
_DATASETS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CardConfig:
    """Facts about an exported model that decod can't know."""

    license: str = ""
    """Licence of the model, by its name on the Hugging Face Hub, such as `apache-2.0`. Empty: the
    card names none."""
    base_model: str = ""
    """Name on the Hugging Face Hub of the model that the run began with, such as `owner/model`.
    Empty: as the folder of --init tells, and none without one."""
    datasets: str = ""
    """Where the text comes from: names of datasets on the Hugging Face Hub, separated by commas.
    Empty: the card names none."""

    def __post_init__(self) -> None:
        if self.license and not _LICENSE.match(self.license):
            raise ConfigError(
                f"card.license is {ascii(self.license)[:60]}",
                why="the Hugging Face Hub knows licences by short names",
                fix="give a name such as apache-2.0, cc-by-4.0 or other",
            )
        if self.base_model and not _DATASET.match(self.base_model):
            raise ConfigError(
                f"card.base_model is {ascii(self.base_model)[:100]}",
                why="it is the name of a model on the Hugging Face Hub",
                fix="give OWNER/NAME",
            )
        bad = [name for name in self.dataset_names if not _DATASET.match(name)]
        if bad or len(self.dataset_names) > _DATASETS_MAX:
            what = ascii(bad[0])[:100] if bad else f"a list of {len(self.dataset_names)} names"
            raise ConfigError(
                f"card.datasets is {what}",
                why=f"it holds names of datasets, at most {_DATASETS_MAX}",
                fix="give OWNER/NAME, and a comma between two of them",
            )

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The names of the datasets, one by one."""
        return tuple(name.strip() for name in self.datasets.split(",") if name.strip())

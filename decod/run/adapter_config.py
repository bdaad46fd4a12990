"""What a run trains of its model: all parameters, or an adapter beside them. Imports no torch."""

from dataclasses import dataclass, fields
from enum import StrEnum

from decod.errors import ConfigError
from decod.run.model_config import ModelConfig, ModelDtype


class AdapterKind(StrEnum):
    """Which parameters a run trains."""

    NONE = "none"
    """All of the model's."""
    LORA = "lora"
    """Two thin matrices beside each chosen matrix, and nothing else (arXiv:2106.09685)."""


_SCALE_BYTES = 4


class BaseFormat(StrEnum):
    """How weights that are not trained lie in memory."""

    MODEL = "model"
    """As `model.dtype`."""
    BFLOAT16 = "bfloat16"
    """Two bytes each."""
    INT8 = "int8"
    """One byte each, and a scale for 256 of them."""
    NF4 = "nf4"
    """Half a byte each, and a scale for 64 of them (arXiv:2305.14314)."""

    @property
    def block_size(self) -> int:
        """How many weights share a scale. 0: there are no scales."""
        return {BaseFormat.INT8: 256, BaseFormat.NF4: 64}.get(self, 0)

    def weight_bytes(self, dtype: ModelDtype) -> float:
        """Return what a weight takes, with its part of a scale."""
        if self is BaseFormat.MODEL:
            return dtype.num_bytes
        own = {BaseFormat.BFLOAT16: 2.0, BaseFormat.INT8: 1.0, BaseFormat.NF4: 0.5}[self]
        return own + (_SCALE_BYTES / self.block_size if self.block_size else 0)


ALL_LINEAR = "all-linear"
"""The targets of an adapter: all matrices of all blocks."""

_RANK_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What a run trains of its model."""

    kind: AdapterKind = AdapterKind.NONE
    """`none` trains all parameters. `lora` leaves them as they are, and trains two thin matrices
    beside each of the targets."""
    rank: int = 16
    """Width of these matrices. Only with `lora`."""
    alpha: float = 32.0
    """What they add counts alpha / rank times. Only with `lora`."""
    targets: str = ALL_LINEAR
    """`all-linear` for all matrices of the blocks, or some of their names, separated by commas,
    such as `q_proj, v_proj`. Only with `lora`."""
    base: BaseFormat = BaseFormat.MODEL
    """How matrices that are not trained lie in memory: `model` for model.dtype, `bfloat16`, `int8`
    or `nf4`. Only with `lora`."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _RANK_MAX:
            raise ConfigError(
                f"adapter.rank is {self.rank}",
                why=f"it is the width of a matrix, from 1 to {_RANK_MAX}",
                fix="give a number such as 16",
            )
        if not 0 < self.alpha < 1e6:
            raise ConfigError(
                f"adapter.alpha is {self.alpha}",
                why="with it, what is learnt is multiplied",
                fix="give a positive number, usually twice adapter.rank",
            )
        set_ = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if self.kind is AdapterKind.NONE and set_:
            raise ConfigError(
                f"adapter.{set_[0]} is set, and adapter.kind is none",
                why="without an adapter it means nothing",
                fix='give adapter.kind = "lora", or remove it',
            )

    @property
    def scaling(self) -> float:
        """By what the product of the two matrices is multiplied."""
        return self.alpha / self.rank

    def of(self, model: ModelConfig, index: int | None = None) -> tuple[str, ...]:
        """Return the matrices of a block that get an adapter: names in sorted order.

        Args:
            model: The model.
            index: The block. None: those of all blocks.

        Raises:
            ConfigError: A target is no matrix of the model's blocks.
        """
        if self.kind is AdapterKind.NONE:
            return ()
        if index is not None:
            return tuple(each for each in self.of(model) if each in _matrices(model, index))
        blocks = range(model.num_hidden_layers)
        matrices = sorted({each for block in blocks for each in _matrices(model, block)})
        if self.targets == ALL_LINEAR:
            return tuple(matrices)
        wanted = {name.strip() for name in self.targets.split(",")}
        known = {name.rpartition(".")[2] for name in matrices}
        if missing := sorted(wanted - known - {*matrices}):
            raise ConfigError(
                f"adapter.targets names {ascii(missing[0])[:60]}",
                why=f"no block of a {model.model_type} has such a matrix",
                fix=f"give {ALL_LINEAR}, or some of {', '.join(sorted(known))}",
            )
        return tuple(each for each in matrices if {each, each.rpartition(".")[2]} & wanted)


def _matrices(model: ModelConfig, index: int) -> list[str]:
    return model.family.matrices(model, index)


NO_ADAPTER = AdapterConfig()

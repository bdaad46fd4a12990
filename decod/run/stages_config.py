"""The cut of a model into stages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from decod.errors import ConfigError
from decod.planner.partition import part_sizes
from decod.run.model_config import ModelConfig

AUTO = "auto"
"""Of `stages.blocks`: see there."""

_BLOCKS_MAX_CHARACTERS = 20_000
_NUMBER = re.compile(r"[0-9]{1,5}")


class RecutPolicy(StrEnum):
    """Who has the model cut anew."""

    ASK = "ask"
    """The operator. The leader recommends."""
    AUTO = "auto"
    """The leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesConfig:
    """The cut into stages. Stage 0 (data nodes) also holds embedding, final norm and head."""

    num_relay_stages: int = 2
    """Stages of relays, 1 or more. More stages: smaller memory per host, more hops."""
    num_first_blocks: int = 0
    """Blocks that stage 0 runs itself, before the relays'."""
    blocks: str = AUTO
    """Blocks of each relay stage, such as "4, 3, 1" if the first one's hosts have most memory.
    "auto": they differ by one at most."""
    recut: RecutPolicy = RecutPolicy.ASK
    """Who has the model cut anew while it trains. `ask`: the operator; the leader recommends it
    where it would gain more than a fifth. `auto`: the leader does it by itself then."""


def stage_blocks(model: ModelConfig, stages: StagesConfig) -> tuple[range, ...]:
    """Return the blocks of every stage, stage 0 first.

    Raises:
        ConfigError: A relay stage would hold no block, or `stages.blocks` does not fit the model.
    """
    left = model.num_hidden_layers - stages.num_first_blocks
    num_stages = stages.num_relay_stages
    if num_stages < 1 or stages.num_first_blocks < 0 or left < num_stages:
        raise ConfigError(
            f"stages.num_relay_stages is {num_stages} with {left} blocks left for them",
            why="every relay stage runs at least one block",
            fix="raise model.num_hidden_layers or lower the number of stages",
        )
    even = part_sizes(left, num_stages)
    sizes = even if stages.blocks == AUTO else _numbers_in(stages.blocks)
    if len(sizes) != num_stages or sum(sizes) != left or min(sizes) < 1:
        example = ", ".join(map(str, even))
        raise ConfigError(
            f"stages.blocks is {ascii(stages.blocks)[:60]}",
            why=f"{num_stages} relay stages share {left} blocks, and each has at least one",
            fix=f'give {num_stages} numbers whose sum is {left}, such as "{example}", or "{AUTO}"',
        )
    ends = (stages.num_first_blocks, *sizes)
    return tuple(range(end - size, end) for end, size in zip(accumulate(ends), ends, strict=True))


def _numbers_in(text: str) -> list[int]:
    """Return the numbers in a text like "4, 3, 1"; none if it has another form."""
    words = [word.strip() for word in text[:_BLOCKS_MAX_CHARACTERS].split(",")]
    return [*map(int, words)] if all(map(_NUMBER.fullmatch, words)) else []


def blocks_text(sizes: Sequence[int]) -> str:
    """Return the blocks of relay stages as `StagesConfig.blocks` has them."""
    even = part_sizes(sum(sizes), len(sizes))
    return AUTO if [*sizes] == even else ", ".join(map(str, sizes))

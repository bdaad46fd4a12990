"""What a training loop says of itself, and what follows from it for its node."""

from dataclasses import dataclass

from decod.compression.fragments import StagePlans
from decod.compression.plan import CompressionConfig, Method
from decod.config.terms import RunTerms
from decod.driver.arena import Sizes
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core.messages.round_messages import Height

_HELD_MAX = 6
"""Models in contributions, parts and averages of which a node can hold as much at a time as it
takes part in rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What a loop says of itself in its hello."""

    terms: RunTerms
    shapes: tuple[tuple[int, ...], ...]
    height: Height
    share: int
    overlap: bool
    averaging_timeout_s: float
    batch_size_per_step: int
    accumulation_steps: int
    device: str

    @property
    def compression(self) -> CompressionConfig:
        return CompressionConfig(method=Method(self.terms.compression))

    @property
    def plans(self) -> StagePlans:
        codec = None if self.compression.method is Method.NONE else self.compression
        return StagePlans(self.shapes, 1, codec, wide=self.terms.wide)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of a contribution or average."""
        return 8 if self.terms.wide == "float64" else 4

    @property
    def model_bytes(self) -> int:
        return self.terms.num_elements * self.element_bytes

    def config(self) -> RoundConfig:
        """Return the numbers of the core."""
        return RoundConfig(
            target_batch_size=self.terms.target_batch_size,
            num_phases=self.plans.num_phases,
            compresses=self.compression.method is not Method.NONE,
            share=self.share,
            overlap=self.overlap,
            averaging_timeout_s=self.averaging_timeout_s,
            held_max_bytes=_HELD_MAX * self.model_bytes,
        )

    def sizes(self) -> Sizes:
        """Return the sizes of the averaging process's outputs."""
        return Sizes(
            activation_bytes=0,
            wire_element_bytes=self.element_bytes,
            sum_element_bytes=self.element_bytes,
            num_parameters=self.terms.num_elements,
            plans=self.plans,
        )

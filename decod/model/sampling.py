"""How the next token of a text is chosen. Imports no torch, since the command line names it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The choice of tokens, in the words of transformers."""

    temperature: float = 1.0
    """0 takes the likeliest token; 1 samples from the model's own distribution. At least 0."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that have this probability together. Above 0, up to 1."""
    seed: int = 0
    """The same seed gives the same tokens on the same host and device."""

"""decod: train a language model together, on GPUs that come and go."""

import importlib

__version__ = "0.1.0"

__all__ = ["CollaborativeOptimizer", "MuonWithAdamW", "__version__"]


def __getattr__(name: str) -> object:
    """Import the optimizers when they are first asked for: most of decod needs no torch."""
    if name in ("CollaborativeOptimizer", "MuonWithAdamW"):
        return getattr(importlib.import_module("decod.optimizer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

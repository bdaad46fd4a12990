"""decod: train a language model together, on GPUs that come and go."""

import importlib

__version__ = "0.1.0"

__all__ = ["CollaborativeOptimizer", "__version__"]


def __getattr__(name: str) -> object:
    """Import `CollaborativeOptimizer` when it is first asked for: most of decod needs no torch."""
    if name == "CollaborativeOptimizer":
        return importlib.import_module("decod.optimizer").CollaborativeOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

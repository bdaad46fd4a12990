"""What type checkers see: `__init__.py` imports `CollaborativeOptimizer` when it is asked for."""

from decod.optimizer import CollaborativeOptimizer as CollaborativeOptimizer

__version__: str

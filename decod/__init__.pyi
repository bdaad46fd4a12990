"""What type checkers see: `__init__.py` imports the optimizers when they are asked for."""

from decod.optimizer import CollaborativeOptimizer as CollaborativeOptimizer
from decod.optimizer import MuonWithAdamW as MuonWithAdamW

__version__: str

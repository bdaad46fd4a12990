"""The collaborative optimizer: wraps any torch optimizer, and trains together with other hosts.

    optimizer = decod.CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        run="my-run", target_batch_size=4096, batch_size_per_step=32,
    )

The training loop stays as it is. Each `step()` adds a gradient to what this host has in hand. Once
all hosts together have `target_batch_size` samples, all take the same step with the average.

| module | holds |
|---|---|
| `optimizer.py` | the class that users see |
| `session.py` | one host's part in a run: what happens between two steps of the loop |
| `training.py` | what the loop and the thread that answers the node both change |
| `modes.py` | the two modes: gradients, or what hosts learnt |
| `seen.py` | how many samples a step has had |
| `state.py` | parameters and optimizer state as one described blob |
| `node_link.py` | the node process, and the messages to and from it |
| `optimizer_ranks.py` | several processes of torch.distributed on one host |
| `settings.py`, `parameters.py` | what these share |
| `muon.py` | Muon for hidden matrices, with AdamW for all else |
| `huggingface.py`, `lightning.py`, `frameworks.py` | Trainers as hosts of a run |
"""

from decod.optimizer.muon import MuonWithAdamW
from decod.optimizer.optimizer import CollaborativeOptimizer

__all__ = ["CollaborativeOptimizer", "MuonWithAdamW"]

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
| `accumulators.py`, `local_updates.py` | the two modes: gradients, or what hosts learnt |
| `samples.py` | the account of samples |
| `seen.py` | how many samples a step has had |
| `state.py` | parameters and optimizer state as one described blob |
| `node_link.py`, `node_process.py`, `messages.py` | the way to the node process |
| `ranks.py` | several processes of torch.distributed on one host |
| `uncaught.py` | errors that a script does not catch |
| `settings.py`, `parameters.py`, `timing.py`, `side_stream.py` | what these share |
"""

from decod.optimizer.optimizer import CollaborativeOptimizer

__all__ = ["CollaborativeOptimizer"]

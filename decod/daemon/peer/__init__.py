"""The node process of a training loop that takes part in a collaborative run."""

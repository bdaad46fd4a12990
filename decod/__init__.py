"""decod: train a language model together, on GPUs that come and go."""

__version__ = "0.1.0"

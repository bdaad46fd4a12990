"""Copies of the leader's rows for TensorBoard and Weights & Biases.

`tracking.py` runs in the node process. It hands each row to a process of its own, `__main__.py`,
which alone loads what writes them: `tensorboard.py` and `weights_and_biases.py`. Whatever hangs or
fails there, the node process only drops rows and says so once.
"""

"""Checkpoints: the state of all stages at one iteration, on the disk of the leader's host."""

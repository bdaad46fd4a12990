"""The settings of a run: the tables of the run file. Imports no torch, and does no I/O."""

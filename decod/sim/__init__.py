"""Whole runs in virtual time: the real core on simulated hosts and links, under checkers."""

"""Experiments in virtual time, and the systems that they compare with."""

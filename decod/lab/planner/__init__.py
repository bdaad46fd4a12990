"""Planners that see all hosts and links, for comparisons."""

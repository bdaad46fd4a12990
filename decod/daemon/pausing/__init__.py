"""Pauses that a node takes by itself: outside its schedule, and when its host is needed."""

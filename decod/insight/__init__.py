"""Answers from what nodes have recorded, for the people who run them.

`decod analyse` says what holds a run back, `decod why` answers questions about one node, `decod
doctor` examines a host, and `decod bugreport` packs what others need to help. Nothing here changes
a node.
"""

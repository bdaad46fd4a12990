"""Answers an operator's questions about a node from what the node has recorded.

`node_records` reads what there is. `idle`, `slow` and `removed` answer one question each, and are
pure functions of the records. `questions` says which questions there are. An answer never guesses:
if the records don't tell, it says so.
"""

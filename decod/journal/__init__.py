"""What a node records while it works, and how it tells people.

Notes and rows go through one journal. Progress, history, credit, metrics, the table of iterations,
the log and the audit log are views of it.
"""

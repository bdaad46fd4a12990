"""Compression of gradients for averages over slow links.

It depends on torch alone, so that other projects can use it. Start reading at `contribution.py`.

| module | holds |
|---|---|
| `coding.py` | the formats of a run of numbers, and their sizes; imports no torch |
| `plan.py` | what a method sends of a stage, in which order and format; imports no torch |
| `codecs.py` | numbers to bytes and back |
| `sparse.py` | the format that keeps few elements |
| `lowrank.py` | factors of matrices |
| `contribution.py` | one member's part in one compressed average |
| `means.py` | the average that all members read from the coded means |
"""

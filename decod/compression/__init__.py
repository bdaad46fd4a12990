"""Compression of gradients for averages over slow links.

It depends on torch alone, so that other projects can use it. Start reading at `contribution.py`.

| module | holds |
|---|---|
| `plan.py` | what a method sends of a stage: fragments, order, formats, sizes; imports no torch |
| `codecs.py` | numbers to bytes and back |
| `lowrank.py` | factors of matrices |
| `contribution.py` | one member's part in one compressed average, and the average that all read |
"""

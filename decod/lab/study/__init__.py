"""Experiments with real hosts on this machine, beside what others have published.

| module | holds |
|---|---|
| `grid.py` | what is run: points of the grid |
| `findings.py`, `questions.py` | what the thesis says, and how it is judged by results |
| `job_codec.py` | runs points, one after another, with worker processes |
| `worker.py`, `pictures.py` | one host of a point: a user's script, its model and data |
| `results.py`, `report.py` | what comes of a point, and how it is shown |

Source: A. D. Castro Tenemaya, *Analyzing Performance Bottlenecks in Collaborative Deep Learning*,
TU München, 2022. Deviations: a smaller model, pictures that are drawn, fewer samples; hosts are
processes of one machine.
"""

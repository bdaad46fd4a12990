"""What holds a run back: records of rounds and hosts, a model of a round's time, and a report.

Peers write records while they train. `decod analyse` reads them afterwards. Nothing here imports
torch or asyncio, so that a training script can record as well as a daemon.
"""

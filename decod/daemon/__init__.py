"""The composition root: the one place that builds a node, and the life cycle of its processes."""

import os

# gRPC's core would write its own lines ("Got goaway") to the operator's terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Read by the compute process: threads that wait for each other sleep. By default they spin, and
# where processes share a host's cores, each holds up the thread that it waits for: three of two
# threads on two cores took four to eight times as long. Alone on its cores a process loses nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

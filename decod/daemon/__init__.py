"""The composition root: the only place that builds a node, and the life cycle of its processes."""

import os

# gRPC's core would write its own lines ("Got goaway") to the operator's terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The compute process reads this: threads that wait for each other sleep. By default they spin. If
# processes share a host's cores, a spinning thread holds up the thread that it waits for: three
# processes of two threads on two cores took four to eight times as long. A process that has its
# cores to itself loses nothing by it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

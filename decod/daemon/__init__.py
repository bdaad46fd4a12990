"""The composition root: the one place that builds a node, and the life cycle of its processes."""

import os

# gRPC's core would write its own lines ("Got goaway") to the operator's terminal.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

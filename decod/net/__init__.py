"""Sockets: gRPC server and channels, tensor streams, the DHT, this node's identity."""

import os

# gRPC's C core writes lines of its own to the terminal, a closed connection among them. What
# matters of that reaches decod as a status. It reads this when it is imported, which is later.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

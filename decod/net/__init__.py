"""Sockets: gRPC server and channels, tensor streams, the DHT, this node's identity."""

"""Wire format: protobuf outside, the core's messages inside. Every field from a peer is checked."""

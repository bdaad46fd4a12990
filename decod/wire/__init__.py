"""Wire format: protobuf outside, the core's messages inside; everything from a peer is checked."""

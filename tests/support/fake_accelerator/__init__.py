"""A device for torch that behaves like a GPU and computes on the CPU."""

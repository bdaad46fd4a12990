"""The commands of `decod lab`."""

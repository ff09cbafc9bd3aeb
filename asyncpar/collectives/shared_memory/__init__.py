"""Collectives of ranks that share the memory of a host."""

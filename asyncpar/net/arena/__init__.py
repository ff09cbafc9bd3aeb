"""The arena: the shared memory of one host's ranks, its formation, wake-ups, and detection of ended ranks."""

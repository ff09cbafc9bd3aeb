"""The arena: the shared memory of the ranks of one host, how they meet there, wake each other, and learn of a death."""

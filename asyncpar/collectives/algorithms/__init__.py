"""Algorithms as schedules: the sends and receives of each rank, in chunk numbers.  Pure."""

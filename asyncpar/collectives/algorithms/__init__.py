"""Algorithms as schedules: what each rank sends and receives, in chunk numbers.  Pure."""

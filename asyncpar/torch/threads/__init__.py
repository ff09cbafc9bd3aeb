"""Ranks as threads of one process, each with a default group of its own."""

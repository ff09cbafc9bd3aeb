"""Threads and the event loop: worker threads, work off the loop, calls from a thread back to it, clean task groups."""

"""Threads and the event loop: worker threads, work off the loop, calls from threads to the loop, clean task groups."""

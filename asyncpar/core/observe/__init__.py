"""What a process tells about itself: progress, failures, counters."""

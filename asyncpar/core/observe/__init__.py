"""Reports of a process about itself: progress, failures, blocked loops."""

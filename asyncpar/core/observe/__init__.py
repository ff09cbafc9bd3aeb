"""Self-reports of a process: progress, failures, blocked loops."""

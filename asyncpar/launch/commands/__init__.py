"""Commands that look at a job that runs: status, stacks, logs, top, doctor."""

"""Commands that inspect a running job: status, stacks, logs, top, doctor."""

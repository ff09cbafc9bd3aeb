"""Data parallelism for torch whose gradients live in memory that the ranks of a host share."""

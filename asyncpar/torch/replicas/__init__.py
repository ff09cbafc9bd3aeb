"""Data parallelism for torch with gradients in memory that the ranks of a host share."""

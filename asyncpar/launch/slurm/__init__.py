"""``ap.slurm``: submit a program to Slurm, and follow its job."""

from .submission import JobEnding, QueuedJob, SlurmOptions, submit

__all__ = ["JobEnding", "QueuedJob", "SlurmOptions", "submit"]

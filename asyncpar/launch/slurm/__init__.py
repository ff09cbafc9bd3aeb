"""``ap.slurm``: submit a program to Slurm, and follow its job."""

from .submission import JobEnding, SlurmOptions, SubmittedJob, submit

__all__ = ["JobEnding", "SlurmOptions", "SubmittedJob", "submit"]

"""The MPI backend.  Start with ``progress.py``."""

"""The MPI backend.  Start with ``office.py``."""

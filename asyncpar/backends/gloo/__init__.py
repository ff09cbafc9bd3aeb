"""The Gloo backend.  Start with ``progress.py``."""

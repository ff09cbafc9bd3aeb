"""The Gloo backend.  Start with ``office.py``."""

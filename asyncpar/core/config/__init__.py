"""Frozen, validated settings and descriptions.  Pure: environment and files are read by those who call."""

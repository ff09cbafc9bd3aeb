"""Frozen, validated settings and descriptions.  Pure: callers read environment and files."""

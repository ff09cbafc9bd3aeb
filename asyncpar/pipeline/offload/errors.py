"""What can go wrong when activations are on disk."""

from __future__ import annotations

from asyncpar.errors import AsyncparError


class OffloadError(AsyncparError):
    """The disk did not take what was to be offloaded, or gave back something else; the message says which and where."""

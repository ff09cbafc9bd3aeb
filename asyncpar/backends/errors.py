"""What goes wrong with backends and groups.  Pure."""

from __future__ import annotations

from asyncpar.errors import UsageError


class BackendNotRegistered(UsageError):  # noqa: N818
    """The runtime knows no backend of this name; the message says which it knows."""


class BackendUnavailable(UsageError):  # noqa: N818
    """The backend cannot work here; the message says what it needs, and how to install it where that helps."""


class NoGroup(UsageError):  # noqa: N818
    """The runtime has no group at all: no backend is open."""


class GroupNotFound(UsageError):  # noqa: N818
    """The runtime has no group of this name on this rank; the message says which it has."""

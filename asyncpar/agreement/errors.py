"""Errors for differences between ranks."""

from __future__ import annotations

from asyncpar.errors import UsageError


class SettingsDiffer(UsageError):  # noqa: N818
    """Ranks differ in their settings, parameters or schedules; the message names the ranks and their values.

    Raised on all ranks of the group, before any other data is exchanged.
    """


PipelineMismatch = SettingsDiffer
"""Deprecated public name of ``asyncpar.pipeline``; use ``SettingsDiffer``."""

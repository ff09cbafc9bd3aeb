"""What is raised where ranks differ."""

from __future__ import annotations

from asyncpar.errors import UsageError


class SettingsDiffer(UsageError):  # noqa: N818
    """Ranks were started with different settings; raised on every rank, before anything else is exchanged."""


class Disagreement(SettingsDiffer):
    """Ranks differ in their parameters or settings; raised on every rank of a synchronizer, so no rank tells another.

    A type of its own: steps let it pass without telling other ranks, which is right for no other error.
    """


class PipelineMismatch(SettingsDiffer):
    """The ranks of a pipeline do not fit together; the message says which one differs, and in what.

    Raised on all ranks of the pipeline, before anything is sent.
    """
